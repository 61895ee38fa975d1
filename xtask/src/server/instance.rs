//! An instance of nagaya as its operator sees it: its status, and letting it rest.
//!
//! Not here: visiting it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nagaya_records::instance::{Tier, WakeReport};
use serde_json::Value;

use super::nagaya::NagayaNode;
use crate::interrupt;

/// Longest wait until an instance rests on command. The edge keeps one for half a second after its
/// last request.
const REST_MAX: Duration = Duration::from_secs(20);

/// The same for hundreds: an emulated CPU needs more than two minutes for the images of two
/// hundred.
const REST_ALL_MAX: Duration = Duration::from_secs(900);

/// Interval of the commands.
const REST_EVERY: Duration = Duration::from_millis(20);

/// Output of `nagaya instance show` for one.
#[derive(Debug, Clone)]
pub struct InstanceStatus {
    pub tier: Tier,
    pub memory_bytes: Option<f64>,
    /// Of its processes, some of many. A list has none.
    pub pids: Vec<u32>,
    pub image_bytes: Option<f64>,
    pub last_wake: Option<WakeReport>,
    /// A fault, such as why it has no image.
    pub note: Option<String>,
}

impl InstanceStatus {
    /// Returns the status of a running node's site of kind `app`.
    pub fn of(node: &NagayaNode, site: &str) -> Result<Self> {
        let shown = node.run(&["instance", "show", site, "--json"])?;
        Self::read(&serde_json::from_str(&shown).context("reading what is shown of an instance")?)
    }

    /// Returns the status of all the node's instances, by their sites.
    pub fn of_all(node: &NagayaNode) -> Result<BTreeMap<String, Self>> {
        let listed = node.run(&["instance", "list", "--json"])?;
        let listed: Vec<Value> = serde_json::from_str(&listed).context("reading the list of instances")?;
        let named = |one: &Value| Ok((one["site"].as_str().unwrap_or_default().to_owned(), Self::read(one)?));
        listed.iter().map(named).collect()
    }

    fn read(shown: &Value) -> Result<Self> {
        let read = |name: &str| shown.get(name).cloned().unwrap_or_default();
        Ok(Self {
            tier: serde_json::from_value(read("tier")).context("the tier of an instance")?,
            memory_bytes: shown["memory_bytes"].as_f64(),
            pids: shown["pids"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|pid| u32::try_from(pid.as_u64()?).ok())
                .collect(),
            image_bytes: shown["image"]["bytes"].as_f64(),
            last_wake: serde_json::from_value(read("last_wake")).context("the last wake of an instance")?,
            note: shown["note"].as_str().map(Into::into),
        })
    }
}

/// Lets an unused instance rest, and waits until it does. One without an image passes that tier.
pub fn rest(node: &NagayaNode, site: &str, to: Tier) -> Result<InstanceStatus> {
    let begun = Instant::now();
    loop {
        interrupt::check()?;
        let told = node.run(&["instance", "rest", site, "--to", to.as_str()]);
        let status = InstanceStatus::of(node, site)?;
        if status.tier == to || (to == Tier::Image && status.tier == Tier::Cold) {
            return Ok(status);
        }
        if begun.elapsed() > REST_MAX {
            told?;
            bail!("{site} does not rest at {to}: it is at {}", status.tier);
        }
        std::thread::sleep(REST_EVERY);
    }
}

/// Does the same for many. Each of them has an image if that is the target.
pub fn rest_all(node: &NagayaNode, sites: &[&str], to: Tier) -> Result<()> {
    let begun = Instant::now();
    loop {
        let all = InstanceStatus::of_all(node)?;
        let mut told = Ok(String::new());
        let mut awake = None;
        for site in sites {
            let status = all.get(*site).with_context(|| format!("{site} has no instance"))?;
            if status.tier != to {
                interrupt::check()?;
                told = node.run(&["instance", "rest", site, "--to", to.as_str()]);
                awake = Some((site, status));
            }
        }
        let Some((site, status)) = awake else { return Ok(()) };
        if begun.elapsed() > REST_ALL_MAX {
            told?;
            bail!("{site} does not rest at {to}: it is at {} ({:?})", status.tier, status.note);
        }
        std::thread::sleep(REST_EVERY);
    }
}

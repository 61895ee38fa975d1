//! Looking each hour whether a certificate ends soon: the log says it 30, 7 and 1 days before, and when it is over.
//!
//! Not here: reading them (`crate::certificates`).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::exposition::Page;
use super::node::Node;
use crate::certificates::{self, Certificate, Found, Nearness, unix_now};

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Lines that one look writes into the log, and rows that `nagaya status` shows.
const TOLD_MAX: usize = 20;

/// What is known of the node's certificates.
#[derive(Default)]
pub struct Watch {
    dir: Mutex<Option<PathBuf>>,
    configured: Notify,
    /// None: nobody has looked, or there is no directory.
    found: Mutex<Option<Found>>,
}

impl Watch {
    /// Looks there from now on, and soon.
    pub fn configure(&self, dir: Option<PathBuf>) {
        *self.dir.lock() = dir;
        self.configured.notify_one();
    }

    /// For `nagaya status`: null where there is no directory.
    pub fn status(&self) -> Value {
        let found = self.found.lock();
        let Some(found) = &*found else { return Value::Null };
        let now = unix_now();
        let ending: Vec<String> = found.ending().take(TOLD_MAX).map(|one| one.describe(now)).collect();
        json!({
            "read": found.certificates.len(),
            "left_out": found.left_out,
            "first": found.certificates.first(),
            "ending_count": found.ending().count(),
            "ending": ending,
            "broken_count": found.broken.len(),
            "broken": found.broken.iter().take(TOLD_MAX).collect::<Vec<_>>(),
        })
    }

    pub fn expose(&self, page: &mut Page) {
        let found = self.found.lock();
        let Some(found) = &*found else { return };
        let counted = |state: &str, count: usize| (format!("state=\"{state}\""), count as u64);
        let of = |wanted: Nearness| found.certificates.iter().filter(|one| one.nearness == wanted).count();
        let states = [
            counted("far", of(Nearness::Far)),
            counted("30_days", of(Nearness::Month)),
            counted("7_days", of(Nearness::Week)),
            counted("1_day", of(Nearness::Day)),
            counted("over", of(Nearness::Over)),
            counted("broken", found.broken.len()),
        ];
        page.family("nagaya_certificates", "gauge", "Certificates by how soon they end.", &states);
        if let Some(first) = found.certificates.first() {
            let ends = [(String::new(), u64::try_from(first.ends).unwrap_or_default())];
            page.family(
                "nagaya_certificate_first_end_timestamp_seconds",
                "gauge",
                "Unix time at which the first certificate ends.",
                &ends,
            );
        }
    }
}

/// Looks, at once and each hour, for ever.
pub async fn keep(node: Arc<Node>) {
    // What was said of each certificate: of a new one with the same name it is said anew.
    let mut told: HashMap<String, (i64, Nearness)> = HashMap::new();
    loop {
        let dir = node.certificates.dir.lock().clone();
        let look =
            dir.clone().map(|dir| tokio::task::spawn_blocking(move || certificates::look(&dir, unix_now())));
        let found = match look {
            None => None,
            Some(look) => match look.await {
                Ok(Ok(found)) => Some(found),
                Ok(Err(error)) => {
                    let dir = dir.unwrap_or_default();
                    tracing::warn!(code = "NGY0515", %error, "the certificates in {} cannot be read", dir.display());
                    None
                }
                // A panic there has been reported.
                Err(_) => None,
            },
        };
        if let Some(found) = &found {
            tell(found, &mut told);
        }
        *node.certificates.found.lock() = found;
        let _ = tokio::time::timeout(INTERVAL, node.certificates.configured.notified()).await;
    }
}

/// Writes into the log what has become nearer since the last look.
fn tell(found: &Found, told: &mut HashMap<String, (i64, Nearness)>) {
    let now = unix_now();
    let is_new = |one: &&Certificate| told.get(&one.name) != Some(&(one.ends, one.nearness));
    let new: Vec<&Certificate> = found.ending().filter(is_new).collect();
    for one in new.iter().take(TOLD_MAX) {
        tracing::warn!(code = "NGY0515", name = one.name, "the certificate of {}", one.describe(now));
    }
    if new.len() > TOLD_MAX {
        tracing::warn!(code = "NGY0515", "and those of {} more names end soon", new.len() - TOLD_MAX);
    }
    *told = found.ending().map(|one| (one.name.clone(), (one.ends, one.nearness))).collect();
}

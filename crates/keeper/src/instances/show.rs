//! Instances as JSON, for `nagaya instance` and `nagaya status`.
//!
//! What processes use is read from `/proc` on a worker. Not here: the rows' place in tables (`nagaya::cli`).

use std::fs;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nagaya_cmdb::Backend;
use nagaya_cmdb::instance::Tier;
use nagaya_cmdb::record::{App, ImageWhen};
use serde_json::{Value, json};

use super::costs::{Figure, Known};
use super::{Instance, Instances};
use crate::cells::Leaf;
use crate::engine::Engine;

/// Instances listed at most; the rest is a number.
const LIST_MAX: usize = 20_000;

/// Numbers of processes listed of one instance.
const PIDS_MAX: usize = 64;

/// What the processes of one instance use now.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Use {
    pub memory_bytes: u64,
    cpu_us: u64,
    processes: usize,
}

impl Instances {
    /// How many instances are at each tier, by `Tier::ALL`, and how many wait for their turn to wake.
    pub fn numbers(&self) -> ([usize; Tier::ALL.len()], usize) {
        let mut numbers = [0; Tier::ALL.len()];
        for instance in self.all.borrow().values() {
            numbers[instance.life.borrow().tier() as usize] += 1;
        }
        (numbers, self.wakes.borrow().waiting())
    }

    /// For `nagaya status`.
    pub fn status(&self) -> Value {
        let (numbers, waiting) = self.numbers();
        let tiers = Tier::ALL.iter().zip(numbers).map(|(tier, number)| (tier.to_string(), json!(number)));
        let mut status: serde_json::Map<String, Value> = tiers.collect();
        status.insert("waking".into(), json!(self.wakes.borrow().awake()));
        status.insert("waiting".into(), json!(waiting));
        status.insert("images".into(), self.images_status());
        status.into()
    }

    /// All of them, in the order of their sites' names.
    pub async fn list(&self, engine: &Rc<Engine>) -> Value {
        let mut listed: Vec<Rc<Instance>> = self.sites.borrow().values().cloned().collect();
        listed.sort_by(|a, b| a.site().name.cmp(&b.site().name));
        let left_out = listed.len().saturating_sub(LIST_MAX);
        listed.truncate(LIST_MAX);
        let leaves: Vec<Option<Arc<Leaf>>> = listed.iter().map(|instance| instance.leaf()).collect();
        let uses = engine
            .on_worker(move || Ok(leaves.iter().map(|leaf| leaf.as_deref().map(used)).collect::<Vec<_>>()));
        // Too much to do just now: the list comes without what they use.
        let uses = uses.await.unwrap_or_else(|_| vec![None; listed.len()]);
        let rows: Vec<Value> =
            listed.iter().zip(uses).map(|(instance, used)| self.row(instance, used)).collect();
        json!({"instances": rows, "left_out": left_out})
    }

    /// All that is known of one.
    pub(super) async fn inspect(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) -> Value {
        let tier = instance.life.borrow().tier();
        let used = match instance.leaf() {
            Some(leaf) => engine.on_worker(move || Ok(used_exactly(&leaf))).await.ok(),
            None => None,
        };
        if let Some(used) = used {
            self.holds(engine, instance, tier, used.memory_bytes);
        }
        let mut row = self.row(instance, used);
        let now = Instant::now();
        // Others may have measured what this one has not, since something last happened to it.
        instance.life.borrow_mut().assume(self.costs());
        self.look_again(instance);
        let life = instance.life.borrow();
        let (failures, left) = life.failures(now);
        row["costs"] = costs(life.costs(), now);
        row["last_end"] = json!(
            instance
                .last_end
                .borrow()
                .as_ref()
                .map(|(why, when)| { format!("{} s ago: {why}", when.elapsed().as_secs()) })
        );
        let kills = instance.body.borrow().as_ref().map_or(0, |body| body.memory_kills());
        row["outbound"] = json!(instance.body.borrow().as_ref().and_then(|body| body.traffic()));
        if row["image"].is_object()
            && let Backend::App(app) = &instance.site().backend
        {
            row["image"]["of"] = json!(image_moment(app));
            row["image"]["ends_when"] = json!(image_ends(app));
        }
        row["image_end"] = json!(*instance.image_end.borrow());
        row["memory_kills"] = json!(Some(kills).filter(|kills| *kills > 0));
        row["waiting"] = json!(life.waiting());
        row["failures"] = json!(failures);
        row["backoff_seconds"] = json!(left.map(|left| left.as_secs_f64()));
        row["idle_seconds"] = json!(life.idle_since().map(|since| now.duration_since(since).as_secs()));
        let due = life.deadline().map(|due| due.saturating_duration_since(now).as_secs_f64());
        row["next_look_seconds"] = json!(due);
        row["processes"] = json!(used.map(|used| used.processes));
        let (leaf, body) = (instance.leaf(), instance.body.borrow().clone());
        // Those that serve a request in a cell of its own, too.
        let leaves = body.map(|body| body.seats.leaves(&body)).unwrap_or_default();
        let pids: Vec<_> = leaves.iter().flat_map(|leaf| leaf.pids().unwrap_or_default()).collect();
        let pids = pids.iter().take(PIDS_MAX).map(|pid| pid.as_raw_nonzero().get());
        row["pids"] = pids.collect();
        row["cell"] = json!(leaf.map(|leaf| leaf.name().to_owned()));
        if life.is_queued() {
            let wait = self.wakes.borrow().predicted(instance.key, now);
            row["predicted_wait_seconds"] = json!(wait.as_secs_f64());
        }
        row
    }

    fn row(&self, instance: &Instance, used: Option<Use>) -> Value {
        let (site, life) = (instance.site(), instance.life.borrow());
        let tier = life.tier();
        let since = instance.tier.get().1.elapsed().as_secs();
        let state = match (life.doing(), life.failures(Instant::now()).1) {
            (Some(doing), _) => doing,
            (None, Some(_)) if !tier.has_process() => "failed",
            (None, _) if life.users() > 0 => "in use",
            (None, _) => "idle",
        };
        let image = instance.image.borrow();
        let image = image.as_ref().filter(|_| life.has_image());
        let image = image.map(|image| {
            let (files, gaps) = (image.watched().count(), image.watched().gaps());
            let gaps = Some(gaps).filter(|gaps| !gaps.is_empty());
            json!({"bytes": image.bytes(), "taken_at": image.taken_at(), "files": files, "not_watched": gaps})
        });
        let fault = instance.fault.borrow().as_ref().map(ToString::to_string);
        // Until it runs again.
        let end = instance.last_end.borrow().as_ref().map(|(why, _)| format!("it ended by itself: {why}"));
        let end = end.filter(|_| !tier.has_process() && life.doing().is_none());
        let no_image = instance.no_image.borrow().as_ref().map(|why| format!("it has no image: {why}"));
        json!({
            "site": site.name.as_str(),
            "tenant": site.tenant.as_str(),
            "tier": tier.as_str(),
            "state": state,
            "since_seconds": since,
            "uses": life.users(),
            "memory_bytes": used.map(|used| used.memory_bytes),
            "cpu_us": used.map(|used| used.cpu_us),
            "wakes": instance.wakes.get(),
            "last_wake": *instance.last_wake.borrow(),
            "image": image,
            "note": fault.or_else(|| instance.note.borrow().clone()).or(end).or(no_image),
        })
    }
}

/// Of which moment of the application an image is, in words.
fn image_moment(app: &App) -> &'static str {
    match app.image_when {
        ImageWhen::Start => "right after its start, before its first visitor",
        ImageWhen::Rest => "when it went to rest, with what was in its memory",
    }
}

/// What makes an image useless, in words.
fn image_ends(app: &App) -> String {
    let named: Vec<_> = app.image_watch.iter().map(|path| path.display().to_string()).collect();
    let named = if named.is_empty() { String::new() } else { format!(", or {}", named.join(", ")) };
    format!(
        "a file that it had read changes{named}, or tmp/restart.txt is touched; its record, secrets or base change; \
         the node gets another kernel, processor or CRIU"
    )
}

impl Instance {
    pub(super) fn leaf(&self) -> Option<Arc<Leaf>> {
        self.body.borrow().as_ref().map(|body| Arc::clone(body.leaf()))
    }
}

/// What each tier costs, from the shallowest down.
fn costs(known: &Known, now: Instant) -> Value {
    let rows = Tier::ALL.into_iter().rev().map(|tier| {
        let Figure { value: back, samples, whose } = known.returns(tier, now);
        let holds = known.holds(tier, now);
        let counted = holds.filter(|_| tier.has_process());
        json!({
            "tier": tier.as_str(),
            "return_us": u64::try_from(back.as_micros()).unwrap_or(u64::MAX),
            "return_samples": samples,
            "return_of": whose.as_str(),
            "holds_bytes": holds.map(|holds| holds.value),
            "holds_samples": counted.map(|holds| holds.samples),
            "holds_of": counted.map(|holds| holds.whose.as_str()),
        })
    });
    rows.collect()
}

/// What is resident, where what several processes share counts for each of them: one short file for each process.
fn used(leaf: &Leaf) -> Use {
    sum(leaf, resident)
}

/// Bytes of memory that a process has, what it shares with others too.
pub(super) fn resident(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// What is resident, where what is shared counts in parts: the kernel goes through all memory for it.
pub(super) fn used_exactly(leaf: &Leaf) -> Use {
    sum(leaf, |pid| {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
        Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
    })
}

fn sum(leaf: &Leaf, memory: impl Fn(i32) -> Option<u64>) -> Use {
    let pids = leaf.pids().unwrap_or_default();
    // Who ends meanwhile has no memory.
    let bytes = pids.iter().filter_map(|pid| memory(pid.as_raw_nonzero().get()));
    Use { memory_bytes: bytes.sum(), cpu_us: leaf.usage().cpu_us, processes: pids.len() }
}

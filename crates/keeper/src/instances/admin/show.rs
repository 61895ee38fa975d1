//! Instances as JSON, for `nagaya instance` and `nagaya status`.
//!
//! The use of processes is read from `/proc` on a worker. Not here: the rows' place in tables
//! (`nagaya::cli`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nagaya_records::Backend;
use nagaya_records::instance::Tier;
use nagaya_records::record::{App, ImageWhen};
use serde_json::{Value, json};

use crate::cells::Leaf;
use crate::instances::decide::costs::{CostFigure, KnownCosts, MeasuredBy};
use crate::instances::run::driver::{dispatch, rearm};
use crate::instances::run::measured::note_memory;
use crate::instances::run::usage::{InstanceUsage, measure, measure_exactly, queued_us};
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;
use crate::metrics::InstanceFigures;

/// Maximum number of instances listed. The rest is given as a number.
const LIST_MAX: usize = 20_000;

/// Maximum number of process numbers listed of one instance.
const PIDS_MAX: usize = 64;

/// Returns how many instances are at each tier, by `Tier::ALL`, and how many wait for their
/// turn to wake.
pub fn count_by_tier(instances: &NodeInstances) -> ([usize; Tier::ALL.len()], usize) {
    let mut numbers = [0; Tier::ALL.len()];
    for instance in instances.table.all() {
        numbers[instance.life.borrow().tier() as usize] += 1;
    }
    (numbers, instances.wakes.borrow().waiting())
}

/// Describes the instances for `nagaya status`.
pub fn status(instances: &NodeInstances) -> Value {
    let (numbers, waiting) = count_by_tier(instances);
    let tiers = Tier::ALL.iter().zip(numbers).map(|(tier, number)| (tier.to_string(), json!(number)));
    let mut status: serde_json::Map<String, Value> = tiers.collect();
    status.insert("waking".into(), json!(instances.wakes.borrow().awake()));
    status.insert("waiting".into(), json!(waiting));
    status.insert("images".into(), instances.images.status());
    status.into()
}

/// Lists all of them, in the order of their sites' names.
pub async fn list(instances: &NodeInstances) -> Value {
    let mut listed: Vec<Rc<SiteInstance>> = instances.table.listed();
    listed.sort_by(|a, b| a.site().name.cmp(&b.site().name));
    let left_out = listed.len().saturating_sub(LIST_MAX);
    listed.truncate(LIST_MAX);
    // Threads at deeper tiers are not in the run queue.
    let runs = |instance: &SiteInstance| instance.life.borrow().tier() >= Tier::Quiet;
    let leaves: Vec<Option<(Arc<Leaf>, bool)>> =
        listed.iter().map(|instance| Some((instance.leaf()?, runs(instance)))).collect();
    let measure = |(leaf, runs): &(Arc<Leaf>, bool)| InstanceUsage {
        queued_us: runs.then(|| queued_us(leaf)),
        ..measure(leaf)
    };
    let uses = instances
        .context
        .on_worker(move || Ok(leaves.iter().map(|leaf| leaf.as_ref().map(measure)).collect::<Vec<_>>()));
    // If there is too much work now, the list comes without their use.
    let uses = uses.await.unwrap_or_else(|_| vec![None; listed.len()]);
    let rows: Vec<Value> = listed.iter().zip(uses).map(|(instance, used)| row(instance, used)).collect();
    json!({"instances": rows, "left_out": left_out})
}

/// Describes all that is known of one.
pub async fn inspect(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) -> Value {
    let tier = instance.life.borrow().tier();
    let used = match instance.leaf() {
        Some(leaf) => instances.context.on_worker(move || Ok(measure_exactly(&leaf))).await.ok(),
        None => None,
    };
    if let Some(event) = used.and_then(|used| note_memory(instances, instance, tier, used.memory_bytes)) {
        dispatch(instances, instance, event);
    }
    let mut row = row(instance, used);
    let now = Instant::now();
    // Others may have new measurements since its last event.
    instance.life.borrow_mut().assume(instances.costs.get());
    rearm(instances, instance);
    let life = instance.life.borrow();
    let (failures, left) = life.failures(now);
    row["costs"] = costs(life.costs(), now);
    row["last_end"] = json!(
        instance
            .status
            .borrow()
            .last_end
            .as_ref()
            .map(|(why, when)| { format!("{} s ago: {why}", when.elapsed().as_secs()) })
    );
    let kills = instance.processes().map_or(0, |processes| processes.memory_kills());
    row["outbound"] = json!(instance.processes().and_then(|processes| processes.traffic()));
    if row["image"].is_object()
        && let Backend::App(app) = &instance.site().backend
    {
        row["image"]["of"] = json!(image_moment(app));
        row["image"]["ends_when"] = json!(image_ends(app));
    }
    row["image_end"] = json!(instance.image.borrow().image_end);
    row["memory_kills"] = json!(Some(kills).filter(|kills| *kills > 0));
    row["draining"] = json!(instance.drains.users());
    row["waiting"] = json!(life.waiting());
    row["failures"] = json!(failures);
    row["backoff_seconds"] = json!(left.map(|left| left.as_secs_f64()));
    row["idle_seconds"] = json!(life.idle_since().map(|since| now.duration_since(since).as_secs()));
    let due = life.deadline().map(|due| due.saturating_duration_since(now).as_secs_f64());
    row["next_look_seconds"] = json!(due);
    row["processes"] = json!(used.map(|used| used.processes));
    let (leaf, processes) = (instance.leaf(), instance.processes());
    // Includes processes that serve a request in a cell of its own.
    let leaves = processes.map(|processes| processes.request_cells.leaves()).unwrap_or_default();
    let pids: Vec<_> = leaves.iter().flat_map(|leaf| leaf.pids().unwrap_or_default()).collect();
    let pids = pids.iter().take(PIDS_MAX).map(|pid| pid.as_raw_nonzero().get());
    row["pids"] = pids.collect();
    row["cell"] = json!(leaf.map(|leaf| leaf.name().to_owned()));
    if life.is_queued() {
        let wait = instances.wakes.borrow().predicted(instance.key, now);
        row["predicted_wait_seconds"] = json!(wait.as_secs_f64());
    }
    row
}

fn row(instance: &SiteInstance, used: Option<InstanceUsage>) -> Value {
    let (site, life) = (instance.site(), instance.life.borrow());
    let (status, known) = (instance.status.borrow(), instance.image.borrow());
    let tier = life.tier();
    let since = status.tier.1.elapsed().as_secs();
    let state = match (life.doing(), life.failures(Instant::now()).1) {
        (Some(doing), _) => doing,
        (None, Some(_)) if !tier.has_process() => "failed",
        (None, _) if life.users() > 0 => "in use",
        (None, _) => "idle",
    };
    let image = known.image.as_ref().filter(|_| life.has_image());
    let image = image.map(|image| {
        let (files, gaps) = (image.watched().count(), image.watched().gaps());
        let gaps = Some(gaps).filter(|gaps| !gaps.is_empty());
        json!({"bytes": image.bytes(), "taken_at": image.taken_at(), "files": files, "not_watched": gaps})
    });
    let fault = status.fault.as_ref().map(ToString::to_string);
    // Until it runs again.
    let end = status.last_end.as_ref().map(|(why, _)| why.clone());
    let end = end.filter(|_| !tier.has_process() && life.doing().is_none());
    let no_image = known.no_image.as_ref().map(|why| format!("it has no image: {why}"));
    json!({
        "site": site.name.as_str(),
        "tenant": site.tenant.as_str(),
        "tier": tier.as_str(),
        "state": state,
        "since_seconds": since,
        "uses": life.users(),
        "memory_bytes": used.map(|used| used.memory_bytes),
        "cpu_us": used.map(|used| used.cpu_us),
        "queued_us": used.and_then(|used| used.queued_us),
        "wakes": instance.wake.count(),
        "last_wake": instance.wake.last(),
        "image": image,
        "note": fault.or_else(|| status.note.clone()).or(end).or(no_image),
    })
}

/// For the metrics.
pub fn figures(instances: &NodeInstances) -> InstanceFigures {
    let (known, now) = (KnownCosts::of_node(instances.costs.get()), Instant::now());
    let (at_tier, waiting) = count_by_tier(instances);
    let returns = Tier::ALL.map(|tier| {
        let back = known.returns(tier, now);
        Some(back.value).filter(|_| back.whose != MeasuredBy::Assumed)
    });
    InstanceFigures {
        can_use_images: instances.images.are_usable(),
        at_tier,
        waiting,
        returns,
        held_bytes: Tier::ALL.map(|tier| known.holds(tier, now).map(|held| held.value)),
    }
}

/// Describes the moment of the application's life that an image holds.
fn image_moment(app: &App) -> &'static str {
    match app.image_when {
        ImageWhen::Start => "right after its start, before its first visitor",
        ImageWhen::Rest => "when it went to rest, with what was in its memory",
    }
}

/// Describes what makes an image useless.
fn image_ends(app: &App) -> String {
    let files = app.image_watch.iter().map(|path| path.display().to_string());
    let asked = app.databases.iter().filter_map(|database| {
        let tag = database.tag.as_ref()?;
        Some(format!("the answer of {} to '{}'", database.socket.display(), tag.ask))
    });
    let named: Vec<_> = files.chain(asked).collect();
    let named = if named.is_empty() { String::new() } else { format!(", or {}", named.join(", ")) };
    format!(
        "a file that it had read changes{named}, or tmp/restart.txt is touched; its record, secrets or base change; \
         the node gets another kernel, processor or CRIU"
    )
}

/// Lists the cost of each tier, from the shallowest down.
fn costs(known: &KnownCosts, now: Instant) -> Value {
    let rows = Tier::ALL.into_iter().rev().map(|tier| {
        let CostFigure { value: back, samples, whose } = known.returns(tier, now);
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

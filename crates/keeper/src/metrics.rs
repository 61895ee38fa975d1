//! The keeper's metrics, all declared here.
//!
//! Not here: counting and text (`telemetry`), the numbers of `nagaya status` (`verbs`).

use std::sync::Arc;
use std::time::Duration;

use nagaya_records::instance::{Tier, WakeStage};
use nagaya_telemetry::{Counter, CounterFamily, Gauge, Histogram, LabelDimension, MetricPage, Registry};

use crate::cells::{CellCounts, KeeperCells};
use crate::mail::MailTallies;

/// In the order of `process::KINDS`.
const KIND: LabelDimension = LabelDimension { label: "kind", values: &["cgi", "php", "php_parent", "app"] };

const LEAF: LabelDimension = LabelDimension { label: "leaf", values: &["made", "reused"] };

/// `Tier::ALL` in their order.
const TIER: LabelDimension =
    LabelDimension { label: "from", values: &["cold", "image", "reclaimed", "frozen", "quiet", "running"] };

/// How a wake ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeEnd {
    Woke,
    /// Its image could not be restored, and it was started.
    FellBack,
    Failed,
}

/// In the order of `WakeEnd`.
const WAKE_END: LabelDimension = LabelDimension { label: "end", values: &["woke", "fell_back", "failed"] };

/// `Stage::ALL` in their order.
const STAGE: LabelDimension = LabelDimension {
    label: "stage",
    values: &["decide", "queue", "thaw", "sandbox", "restore", "boot", "ready", "image", "connect"],
};
const _: () = assert!(STAGE.values.len() == WakeStage::ALL.len() && TIER.values.len() == Tier::ALL.len());

/// Upper bounds in microseconds: from a thawed process to the slowest start.
const WAKE_BOUNDS_US: &[u64] = &[
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    60_000_000,
    300_000_000,
];

/// Event of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageEvent {
    Taken,
    NotTaken,
    Quarantined,
    /// Requested by an edge without an order of a supervisor.
    NotOrdered,
}

/// In the order of `ImageEvent`.
const IMAGE: LabelDimension =
    LabelDimension { label: "event", values: &["taken", "not_taken", "quarantined", "not_ordered"] };

/// Result for a line of an instance's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLine {
    Written,
    /// There were too many.
    Dropped,
    /// The disk did not accept it.
    Lost,
}

/// In the order of `LogLine`.
const LOG_LINE: LabelDimension = LabelDimension { label: "result", values: &["written", "dropped", "lost"] };

/// Figures of instances, counted when the metrics are read.
#[derive(Debug, Clone, Copy)]
pub struct InstanceFigures {
    pub can_use_images: bool,
    /// Instances at each tier, by `Tier::ALL`.
    pub at_tier: [usize; Tier::ALL.len()],
    /// Instances that wait for their turn to wake.
    pub waiting: usize,
    /// Time to come back from each tier. `None` if it was not measured.
    pub returns: [Option<Duration>; Tier::ALL.len()],
    /// Memory of an instance at each tier. `None` if it was not counted.
    pub held_bytes: [Option<u64>; Tier::ALL.len()],
}

#[derive(Clone)]
pub struct KeeperMetrics {
    registry: Arc<Registry>,
    pub started: CounterFamily<1>,
    pub failed: CounterFamily<1>,
    pub processes: Gauge,
    pub connections: Gauge,
    pub enters: Counter,
    pub moves: Counter,
    pub demotions: Counter,
    pub boosts: Counter,
    pub wakes: CounterFamily<2>,
    pub wake_stages: Histogram,
    pub images: CounterFamily<1>,
    pub log_lines: CounterFamily<1>,
    /// Microseconds.
    pub database_time: CounterFamily<0>,
    pub database_queries: Counter,
    pub mail: Arc<MailTallies>,
    instances: [Gauge; Tier::ALL.len()],
    waiting_wakes: Gauge,
    images_usable: Gauge,
    returns: [Gauge; Tier::ALL.len()],
    held: [Gauge; Tier::ALL.len()],
    leaves: CounterFamily<1>,
    limit_failures: Counter,
    orphans: Counter,
    tenants: Gauge,
    sites: Gauge,
    named: Gauge,
    giving_way: Gauge,
    requests: Gauge,
    free: Gauge,
}

impl KeeperMetrics {
    pub fn new() -> Self {
        let mut registry = Registry::new();
        let r = &mut registry;
        Self {
            started: r.counters("keeper_started", "Process trees started", [KIND]),
            failed: r.counters("keeper_start_failures", "Process trees that failed to start", [KIND]),
            processes: r.gauge("keeper_processes", "Process trees that run now"),
            connections: r.gauge("keeper_connections", "Connections of edge threads"),
            enters: r.counter("keeper_cell_enters", "Times a worker began to serve a request in a cell"),
            moves: r.counter("keeper_cell_moves", "Times a worker was moved to another cell"),
            demotions: r.counter("keeper_demotions", "Steps in which running requests were slowed down"),
            boosts: r.counter(
                "keeper_boosts",
                "Times limits of an instance were raised for a request, or as high as that already",
            ),
            wakes: r.counters(
                "keeper_wakes",
                "Instances woken, by where they rested and how it ended",
                [TIER, WAKE_END],
            ),
            wake_stages: r.histogram(
                "keeper_wake_stage",
                "How long each stage of waking an instance took",
                STAGE,
                WAKE_BOUNDS_US,
            ),
            images: r.counters("keeper_images", "Images of instances, by result", [IMAGE]),
            log_lines: log_lines(r),
            database_time: r.time_counters(
                "instance_database",
                "Time in which applications waited for answers of databases",
                [],
            ),
            database_queries: r
                .counter("instance_database_queries", "Questions of applications that databases answered"),
            mail: Arc::default(),
            instances: Tier::ALL.map(|tier| {
                r.gauge(&format!("keeper_instances_{tier}"), &format!("Instances that are {tier} now"))
            }),
            returns: returns(r),
            held: Tier::ALL.map(|tier| {
                r.gauge(
                    &format!("keeper_held_bytes_{tier}"),
                    &format!("Memory of an instance that is {tier}, a mean of the last counts; 0: none, or not counted"),
                )
            }),
            images_usable: r.gauge("keeper_images_usable", "Whether applications can rest as images: 1, or 0 where CRIU is missing"),
            waiting_wakes: r.gauge("keeper_wakes_waiting", "Instances that wait for their turn to wake"),
            leaves: r.counters(
                "keeper_cell_leaves",
                "Cells requests got, made for them or used again",
                [LEAF],
            ),
            limit_failures: r.counter(
                "keeper_cell_limit_failures",
                "Times that a limit could not be set as requested; `nagaya cells` shows which",
            ),
            orphans: r.counter("keeper_cell_orphans", "Directories of dead keepers removed at the start"),
            tenants: r.gauge("keeper_tenant_cells", "Tenants that have a cell now"),
            sites: r.gauge("keeper_site_cells", "Sites that have a cell now"),
            named: r.gauge("keeper_named_cells", "Named cells"),
            giving_way: r
                .gauge("keeper_tenants_giving_way", "Tenants whose CPU priority is lowered"),
            requests: r.gauge("keeper_request_cells", "Cells of requests, idle workers and applications"),
            free: r.gauge("keeper_free_cells", "Cells that wait for the next request"),
            registry: Arc::new(registry),
        }
    }

    /// Returns the text, with the present counts of cells and instances.
    pub fn encode(&self, cells: &KeeperCells, instances: &InstanceFigures) -> String {
        self.images_usable.set(i64::from(instances.can_use_images));
        let (tiers, waiting) = (instances.at_tier, instances.waiting);
        for (gauge, number) in
            self.instances.iter().chain([&self.waiting_wakes]).zip(tiers.into_iter().chain([waiting]))
        {
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX));
        }
        self.set_costs(instances);
        let CellCounts { tenants, sites, named, giving_way, requests, free, made, reused } = cells.numbers();
        for (gauge, number) in [
            (&self.tenants, tenants),
            (&self.sites, sites),
            (&self.named, named),
            (&self.giving_way, giving_way),
            (&self.requests, requests),
            (&self.free, free),
        ] {
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX));
        }
        for (at, now) in [(0, made), (1, reused)] {
            self.leaves.add([at], now.saturating_sub(self.leaves.get([at])));
        }
        for (counter, now) in [(&self.limit_failures, cells.complaints()), (&self.orphans, cells.orphans())] {
            counter.add(now.saturating_sub(counter.get()));
        }
        // The metrics page combines those of one process.
        let mut page = MetricPage::default();
        self.mail.expose(&mut page);
        self.registry.encode() + &page.encode()
    }

    fn set_costs(&self, instances: &InstanceFigures) {
        for (gauge, returns) in self.returns.iter().zip(instances.returns) {
            let micros = returns.map_or(0, |took| i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
            gauge.set(micros);
        }
        for (gauge, bytes) in self.held.iter().zip(instances.held_bytes) {
            gauge.set(bytes.map_or(0, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX)));
        }
    }
}

fn log_lines(r: &mut Registry) -> CounterFamily<1> {
    r.counters("instance_log_lines", "Lines for the logs of instances, by result", [LOG_LINE])
}

fn returns(r: &mut Registry) -> [Gauge; Tier::ALL.len()] {
    Tier::ALL.map(|tier| {
        r.gauge(
            &format!("keeper_return_us_{tier}"),
            &format!("Microseconds to come back from {tier}, a mean of the last times; 0: not measured"),
        )
    })
}

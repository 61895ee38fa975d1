//! Describes a lane for operators: one row of JSON, times in seconds.
//!
//! Not here: the data about it (`nagaya_admission`), its output (`nagaya lanes`), metrics.

use std::time::Duration;

use nagaya_admission::{LaneReport, Moment};
use serde_json::{Value, json};

use crate::admission::lanes::EdgeLane;

pub fn row(lane: &EdgeLane, explained: &LaneReport, now: Moment) -> Value {
    let (of, name) = lane.label.split_once(' ').unwrap_or_default();
    let seconds = |span: Option<Duration>| span.map(|span| span.as_secs_f64());
    let for_so_long = |since: Moment| Duration::from_micros(now.0.saturating_sub(since.0));
    let since = explained.queued_since.map(for_so_long);
    json!({
        "of": of,
        "name": name,
        "running": explained.running,
        "run": explained.run,
        "waiting": explained.waiting,
        "waiting_bytes": explained.waiting_bytes,
        "promised": explained.promised,
        "wait_seconds": seconds(explained.wait),
        "queued_for_seconds": seconds(since),
        "held_by": explained.held_by,
        "gives_way_for_seconds": seconds(lane.gives_way_since().map(for_so_long)),
        "drain_per_second": explained.drain_per_second,
        "service_p50_seconds": seconds(explained.service_p50),
        "service_p90_seconds": seconds(explained.service_p90),
        "counts": explained.counts,
        "calibration": explained.calibration,
    })
}

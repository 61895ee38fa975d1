//! Writes metrics of lanes in the text format of Prometheus. Only the fullest lanes are included,
//! because each is a label.
//!
//! Not here: metrics with fixed labels (`metrics`), rows for the command line (`explain`).

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::sync::Arc;

use nagaya_admission::LaneReport;

use crate::admission::lanes::EdgeLane;

/// Maximum number of lanes with metrics of their own: the fullest ones. Their names come from the
/// operator's records and rules, never from a request.
const LANES_MAX: usize = 100;

/// A metric's name, type, help, and value in a lane. `None` if the lane has no value.
type LaneMetric = (&'static str, &'static str, &'static str, fn(&LaneReport) -> Option<f64>);

const METRICS: [LaneMetric; 16] = [
    ("nagaya_lane_running", "gauge", "Requests of a lane that run", |lane| Some(lane.running.into())),
    ("nagaya_lane_run_limit", "gauge", "Requests of a lane that may run now", |lane| Some(lane.run.into())),
    ("nagaya_lane_waiting", "gauge", "Requests in a lane's line", |lane| Some(lane.waiting.into())),
    ("nagaya_lane_tickets", "gauge", "Tickets of a lane that are out", |lane| Some(lane.promised.into())),
    ("nagaya_lane_predicted_wait_seconds", "gauge", "What a newcomer would wait", |lane| {
        lane.wait.map(|wait| wait.as_secs_f64())
    }),
    (
        "nagaya_lane_drain_per_second",
        "gauge",
        "Requests that end in a second while there is a line",
        |lane| lane.drain_per_second,
    ),
    ("nagaya_lane_service_seconds_median", "gauge", "Median of the time a request runs", |lane| {
        lane.service_p50.map(|time| time.as_secs_f64())
    }),
    ("nagaya_lane_prediction_error_p50_percent", "gauge", "Median error of predicted waits", |lane| {
        lane.calibration.error_p50_pct
    }),
    ("nagaya_lane_prediction_error_p90_percent", "gauge", "What nine of ten errors stayed below", |lane| {
        lane.calibration.error_p90_pct
    }),
    ("nagaya_lane_prediction_bias_percent", "gauge", "Predicted less actual waits, of the actual", |lane| {
        lane.calibration.bias_pct
    }),
    (
        "nagaya_lane_waits_untold_total",
        "counter",
        "Waits of which too little was known to tell them",
        |lane| Some(lane.calibration.untold as f64),
    ),
    ("nagaya_lane_refused_total", "counter", "Requests refused without a ticket", |lane| {
        Some(lane.counts.refused as f64)
    }),
    ("nagaya_lane_promises_total", "counter", "Tickets given", |lane| Some(lane.counts.promised as f64)),
    (
        "nagaya_lane_promises_adopted_total",
        "counter",
        "Tickets given by other nodes that were shown here",
        |lane| Some(lane.counts.adopted as f64),
    ),
    ("nagaya_lane_promises_kept_total", "counter", "Tickets that came in time and ran in time", |lane| {
        Some(lane.counts.kept as f64)
    }),
    (
        "nagaya_lane_promises_broken_total",
        "counter",
        "Tickets that came in time and ran after their slot",
        |lane| Some(lane.counts.broken as f64),
    ),
];

/// Returns the families of all metrics above, each with a sample for each lane.
pub fn text(mut lanes: Vec<(Arc<EdgeLane>, LaneReport)>) -> String {
    let fullness = |lane: &LaneReport| (lane.waiting, lane.promised, lane.running, lane.counts.admitted);
    lanes.sort_by_key(|(_, lane)| Reverse(fullness(lane)));
    lanes.truncate(LANES_MAX);
    let mut out = String::new();
    for (name, kind, help, value) in METRICS {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (lane, explained) in &lanes {
            if let Some(value) = value(explained) {
                let _ = writeln!(out, "{name}{{lane=\"{}\"}} {value}", escaped(&lane.label));
            }
        }
    }
    out
}

/// Returns a label's value. Names of lanes that rules give may contain any character.
fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use nagaya_base::AnchoredClock;
    use nagaya_records::{Site, Tenant};
    use nagaya_telemetry::Gauge;

    use super::*;
    use crate::admission::lanes::LaneSet;
    use crate::options::EdgeConfig;

    #[test]
    fn a_lane_is_a_label_and_what_is_unknown_is_left_out() {
        let options = EdgeConfig::default();
        let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
        let tenant: Tenant = serde_json::from_str(r#"{"name":"demo","uid":1000,"gid":1000}"#).unwrap();
        let site = r#"{"name":"s","tenant":"demo","hosts":["s"],"max_concurrent":7,"backend":{"kind":"static","root":"s"}}"#;
        let site: Site = serde_json::from_str(site).unwrap();
        let lane = lanes.of_site(&site, &tenant, &options);
        let _permit = lanes.enter_calm(&lane).unwrap();
        let text = text(lanes.explain());
        assert!(text.contains("# TYPE nagaya_lane_running gauge\nnagaya_lane_running{lane=\""), "{text}");
        assert!(text.contains("\nnagaya_lane_running{lane=\"site s\"} 1\n"), "{text}");
        assert!(text.contains("\nnagaya_lane_run_limit{lane=\"site s\"} 7\n"), "{text}");
        assert!(!text.contains("nagaya_lane_drain_per_second{"), "{text}");
        assert_eq!(escaped("lane s a\"b\\"), "lane s a\\\"b\\\\");
    }
}

//! Exposes metrics of lanes. Only the fullest lanes are included, because each is a label.
//!
//! Not here: metrics with fixed labels (`metrics`), rows for the command line (`explain`).

use std::cmp::Reverse;
use std::sync::Arc;

use nagaya_admission::LaneReport;
use nagaya_telemetry::{MetricPage, MetricValue};

use crate::admission::lanes::EdgeLane;

/// Maximum number of lanes with metrics of their own: the fullest ones. Their names come from the
/// operator's records and rules, never from a request.
const LANES_MAX: usize = 100;

/// A metric's name, help, and value in a lane. `None` if the lane has no value.
type LaneGauge = (&'static str, &'static str, fn(&LaneReport) -> Option<MetricValue>);

const GAUGES: [LaneGauge; 10] = [
    ("nagaya_lane_running", "Requests of a lane that run", |lane| Some(lane.running.into())),
    ("nagaya_lane_run_limit", "Requests of a lane that may run now", |lane| Some(lane.run.into())),
    ("nagaya_lane_waiting", "Requests in a lane's line", |lane| Some(lane.waiting.into())),
    ("nagaya_lane_tickets", "Tickets of a lane that are out", |lane| Some(lane.promised.into())),
    ("nagaya_lane_predicted_wait_seconds", "What a newcomer would wait", |lane| {
        lane.wait.map(|wait| wait.as_secs_f64().into())
    }),
    ("nagaya_lane_drain_per_second", "Requests that end in a second while there is a line", |lane| {
        lane.drain_per_second.map(MetricValue::from)
    }),
    ("nagaya_lane_service_seconds_median", "Median of the time a request runs", |lane| {
        lane.service_p50.map(|time| time.as_secs_f64().into())
    }),
    ("nagaya_lane_prediction_error_p50_percent", "Median error of predicted waits", |lane| {
        lane.calibration.error_p50_pct.map(MetricValue::from)
    }),
    ("nagaya_lane_prediction_error_p90_percent", "What nine of ten errors stayed below", |lane| {
        lane.calibration.error_p90_pct.map(MetricValue::from)
    }),
    ("nagaya_lane_prediction_bias_percent", "Predicted less actual waits, of the actual", |lane| {
        lane.calibration.bias_pct.map(MetricValue::from)
    }),
];

/// A metric's name, help, and count in a lane.
type LaneCounter = (&'static str, &'static str, fn(&LaneReport) -> u64);

const COUNTERS: [LaneCounter; 6] = [
    ("nagaya_lane_waits_untold_total", "Waits of which too little was known to tell them", |lane| {
        lane.calibration.untold
    }),
    ("nagaya_lane_refused_total", "Requests refused without a ticket", |lane| lane.counts.refused),
    ("nagaya_lane_promises_total", "Tickets given", |lane| lane.counts.promised),
    ("nagaya_lane_promises_adopted_total", "Tickets given by other nodes that were shown here", |lane| {
        lane.counts.adopted
    }),
    ("nagaya_lane_promises_kept_total", "Tickets that came in time and ran in time", |lane| lane.counts.kept),
    ("nagaya_lane_promises_broken_total", "Tickets that came in time and ran after their slot", |lane| {
        lane.counts.broken
    }),
];

/// Adds the families of all metrics above, each with a sample for each lane. Names of lanes that
/// rules give may contain any character.
pub fn expose(mut lanes: Vec<(Arc<EdgeLane>, LaneReport)>, page: &mut MetricPage) {
    let fullness = |lane: &LaneReport| (lane.waiting, lane.promised, lane.running, lane.counts.admitted);
    lanes.sort_by_key(|(_, lane)| Reverse(fullness(lane)));
    lanes.truncate(LANES_MAX);
    for (name, help, value) in GAUGES {
        let family = page.gauges(name, help);
        for (lane, report) in &lanes {
            if let Some(value) = value(report) {
                family.add([("lane", &lane.label)], value);
            }
        }
    }
    for (name, help, count) in COUNTERS {
        let family = page.counters(name, help);
        for (lane, report) in &lanes {
            family.add([("lane", &lane.label)], count(report));
        }
    }
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
        let mut page = MetricPage::default();
        expose(lanes.explain(), &mut page);
        let text = page.encode();
        assert!(text.contains("# TYPE nagaya_lane_running gauge\nnagaya_lane_running{lane=\""), "{text}");
        assert!(text.contains("\nnagaya_lane_running{lane=\"site s\"} 1\n"), "{text}");
        assert!(text.contains("\nnagaya_lane_run_limit{lane=\"site s\"} 7\n"), "{text}");
        assert!(!text.contains("nagaya_lane_drain_per_second{"), "{text}");
        let refused = "# TYPE nagaya_lane_refused_total counter\nnagaya_lane_refused_total{lane=\"";
        assert!(text.contains(refused), "{text}");
        assert!(text.contains("\nnagaya_lane_refused_total{lane=\"site s\"} 0\n"), "{text}");
    }
}

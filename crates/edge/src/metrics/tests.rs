//! Tests of the edge's metrics: that positions and label values belong together, and that names are conventional.

use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use nagaya_records::cell::RequestUsage;

use super::*;
use crate::http::refusal::{DeferralContent, Refusal, RetryHint};
use crate::record::access_log::tests::record;
use crate::record::access_record::{AccessDetails, ProgramUsage, Relocation};

#[test]
fn metrics_are_hidden_from_debug_output() {
    assert_eq!(format!("{:?}", EdgeMetrics::new()), "Metrics");
}

#[test]
fn a_request_is_counted_under_its_own_labels() {
    let metrics = EdgeMetrics::new();
    let mut seen = record("/x", None);
    seen.method = Some(Method::PATCH);
    seen.version = Version::HTTP_2;
    seen.status = StatusCode::SERVICE_UNAVAILABLE;
    seen.refusal = Some("queue_full");
    seen.took = Duration::from_micros(251);
    (seen.bytes_in, seen.bytes_out) = (5, 7);
    metrics.request(&seen);
    let text = metrics.encode();
    for line in [
        r#"nagaya_http_requests_total{method="PATCH",protocol="HTTP/2",status="5xx",backend="none"} 1"#,
        r#"nagaya_http_refusals_total{reason="queue_full"} 1"#,
        r#"nagaya_http_request_duration_seconds_bucket{le="0.00025",backend="none"} 0"#,
        r#"nagaya_http_request_duration_seconds_bucket{le="0.0005",backend="none"} 1"#,
        "nagaya_http_received_bytes_total 5",
        "nagaya_http_sent_bytes_total 7",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn usage_of_programs_is_summed_up_by_kind_of_backend() {
    let metrics = EdgeMetrics::new();
    let site = r#"{"name":"w","tenant":"d","hosts":["w"],"backend":{"kind":"cgi","root":"w"}}"#;
    let usage =
        RequestUsage { cpu_us: 1_500_000, read_bytes: 3, write_bytes: 4, throttled_us: 250_000, demoted: 2 };
    let more =
        AccessDetails { used: ProgramUsage::Known(usage), paced_us: 2_000, ..AccessDetails::default() };
    let mut seen = record("/x", None);
    seen.site = Some(std::sync::Arc::new(serde_json::from_str(site).unwrap()));
    seen.queued = Duration::from_millis(20);
    seen.more = Some(Box::new(more.clone()));
    metrics.request(&seen);
    seen.more = Some(Box::new(AccessDetails { used: ProgramUsage::Unknown, ..more }));
    metrics.request(&seen);
    let text = metrics.encode();
    for line in [
        r#"nagaya_cell_cpu_seconds_total{backend="cgi"} 1.5"#,
        r#"nagaya_cell_read_bytes_total{backend="cgi"} 3"#,
        r#"nagaya_cell_written_bytes_total{backend="cgi"} 4"#,
        r#"nagaya_cell_throttled_seconds_total{backend="cgi"} 0.25"#,
        r#"nagaya_cell_demotions_total{backend="cgi"} 2"#,
        r#"nagaya_http_request_paced_seconds_total{backend="cgi"} 0.004"#,
        r#"nagaya_http_request_queued_seconds_total{backend="cgi"} 0.04"#,
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn each_label_value_stands_where_its_position_says() {
    for (at, name) in METHODS.values.iter().enumerate() {
        let method = if *name == "other" { Method::TRACE } else { name.parse().unwrap() };
        assert_eq!(method_position(&method), at, "{name}");
    }
    for (at, kind) in BACKENDS.values.iter().enumerate() {
        assert_eq!(backend_position((*kind != "none").then_some(*kind)), at, "{kind}");
    }
    for (status, class) in
        [(100, "1xx"), (204, "2xx"), (304, "3xx"), (499, "4xx"), (599, "5xx"), (999, "5xx")]
    {
        let at = status_position(StatusCode::from_u16(status).unwrap());
        assert_eq!(STATUS_CLASSES.values[at], class);
    }
    let metrics = EdgeMetrics::new();
    metrics.handshake(HandshakeResult::BrokenCertificate);
    metrics.certificate(CertificateLookup::Absent);
    metrics.upstream_connection(UpstreamConnection::Reused);
    metrics.file_cache(0, 1);
    let text = metrics.encode();
    for line in [
        r#"nagaya_tls_handshakes_total{result="broken_certificate"} 1"#,
        r#"nagaya_certificate_lookups_total{result="absent"} 1"#,
        r#"nagaya_upstream_connections_total{result="reused"} 1"#,
        r#"nagaya_file_cache_lookups_total{result="miss"} 1"#,
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
}

fn turned(is_early: bool) -> Refusal {
    let notice = Box::new(DeferralContent { headers: HeaderMap::new(), body: Bytes::new() });
    Refusal::TurnedAway { notice, is_early }
}

#[test]
fn every_refusal_has_its_own_reason_among_the_labels() {
    let refusals = [
        Refusal::BadRequest(""),
        Refusal::PlainHttp,
        Refusal::UnknownHost,
        Refusal::Misdirected,
        Refusal::NotFound,
        Refusal::Forbidden(""),
        Refusal::MethodNotAllowed(""),
        Refusal::MethodUnknown,
        Refusal::HeadTooLarge,
        Refusal::TargetTooLong,
        Refusal::BodyTooLarge,
        Refusal::RequestTimeout,
        Refusal::ExpectationFailed,
        Refusal::VersionNotSupported,
        Refusal::QueueFull { retry_after_seconds: 1, notice: None },
        Refusal::QueueTimeout { retry_after_seconds: 1, notice: None },
        turned(false),
        turned(true),
        Refusal::TicketInvalid("x".into()),
        Refusal::TicketUsed,
        Refusal::SpoolFull("x"),
        Refusal::LinkRefused(String::new()),
        Refusal::FilesHang,
        Refusal::TooManyConnections { retry_after_seconds: 1 },
        Refusal::TooManyRequests { retry_after_seconds: 1 },
        Refusal::ConnectionsFull { retry_after_seconds: 1 },
        Refusal::Overloaded(""),
        Refusal::BackendUnreachable(String::new()),
        Refusal::BackendInvalid(String::new()),
        Refusal::BackendTimeout,
        Refusal::SiteBroken(String::new()),
        Refusal::LoopDetected,
        Refusal::RuleBroken(String::new()),
        Refusal::Ruled(StatusCode::FORBIDDEN),
        Refusal::ClientGone,
        Refusal::Fenced,
        Refusal::Nowhere { reason: String::new(), code: nagaya_base::Code(461), later: RetryHint::default() },
        Refusal::Unplaced { why: crate::http::refusal::PlacementError::Late, later: RetryHint::default() },
        Refusal::MovedTooOften(""),
        Refusal::MayBeDone { node: nagaya_records::NodeName::new("b").unwrap(), reason: "" },
        Refusal::AnswerLost { node: nagaya_records::NodeName::new("b").unwrap(), why: String::new() },
        Refusal::NotPlacedHere { epoch: 1, tries: 0 },
        Refusal::AnswerBroken(String::new()),
        Refusal::OtherSite,
    ];
    for refusal in &refusals {
        let reason = refusal.row().reason;
        assert_eq!(REASONS.values.iter().filter(|r| **r == reason).count(), 1, "{reason}");
    }
    // `other` is of no refusal.
    assert_eq!(refusals.len() + 1, REASONS.values.len(), "a reason nobody gives");
}

#[test]
fn relocations_are_counted_under_their_own_words() {
    assert_eq!(WHYS.values, PlacementReason::ALL.map(PlacementReason::as_str));
    let metrics = EdgeMetrics::new();
    metrics.relocated(&Relocation {
        why: PlacementReason::Silent,
        from: None,
        to: nagaya_records::NodeName::new("c").unwrap(),
        epoch: 2,
        detect: Duration::from_millis(100),
        decide: Duration::from_micros(50),
        store: Duration::from_millis(3),
        asked: Duration::from_millis(4),
        predicted: None,
    });
    let text = metrics.encode();
    for line in [
        r#"nagaya_relocations_total{why="silent"} 1"#,
        r#"nagaya_relocation_stage_seconds_bucket{le="0.1",stage="detect"} 1"#,
        r#"nagaya_relocation_stage_seconds_bucket{le="0.05",stage="detect"} 0"#,
        r#"nagaya_relocation_stage_seconds_bucket{le="0.0025",stage="store"} 0"#,
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn tiers_and_stages_of_wakes_have_their_words() {
    assert_eq!(TIERS.values, Tier::ALL.map(Tier::as_str));
    assert_eq!(STAGES.values[..FIRST_BYTE], WakeStage::ALL.map(WakeStage::as_str));
    let metrics = EdgeMetrics::new();
    metrics.wake(&WakeReport {
        from: Tier::Image,
        stages: vec![(WakeStage::Restore, 38_000), (WakeStage::Connect, 40)],
        predicted_us: None,
    });
    let text = metrics.encode();
    for (stage, count) in [("restore", 1), ("connect", 1), ("boot", 0)] {
        let line = format!("nagaya_instance_wake_stage_seconds_count{{stage=\"{stage}\"}} {count}");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
}

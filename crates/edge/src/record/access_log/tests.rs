//! Tests of the access log: lines, their safety, and what happens when the disk does not keep up.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::time::SystemTime;

use http::{HeaderValue, Method, StatusCode};
use nagaya_base::RequestId;
use nagaya_records::cell::{Boost, CpuQuota, RequestUsage};
use nagaya_records::instance::{Tier, WakeReport, WakeStage};
use proptest::prelude::*;
use tokio::task::LocalSet;

use super::*;
use crate::http::message::ConnInfo;
use crate::options::EdgeConfig;
use crate::record::access_record::{AccessDetails, ProgramUsage, UsageScope, WakeWait};

/// A `GET` of `target` from 192.0.2.7 at a known time.
pub(crate) fn record(target: &str, agent: Option<&[u8]>) -> AccessRecord {
    let conn = ConnInfo {
        peer: "192.0.2.7:5000".parse().unwrap(),
        local: "192.0.2.1:80".parse().unwrap(),
        tls: None,
        carried: None,
        network: None,
    };
    let started = SystemTime::UNIX_EPOCH + Duration::from_millis(971_186_136_042);
    let host = "www.example.org";
    AccessRecord {
        started,
        method: Some(Method::GET),
        text: format!("{host}{target}"),
        target_at: host.len(),
        user_agent: agent.map(|a| HeaderValue::from_bytes(a).unwrap()),
        bytes_out: 2326,
        took: Duration::from_micros(1500),
        ..AccessRecord::without_head(RequestId(0xabc), &conn)
    }
}

fn line(format: AccessLogFormat, record: &AccessRecord) -> String {
    let mut out = Vec::new();
    LineFormatter::new(format, "n1").line(record, &mut out);
    String::from_utf8(out).unwrap()
}

fn run_local<F: Future>(future: F) -> F::Output {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    LocalSet::new().block_on(&runtime, future)
}

#[test]
fn a_combined_line_is_apaches() {
    assert_eq!(
        line(AccessLogFormat::Combined, &record("/a?b=\"c", Some(b"curl/8 \"x\"\\\t\x80"))),
        "192.0.2.7 - - [10/Oct/2000:13:55:36 +0000] \"GET /a?b=\\\"c HTTP/1.1\" 200 2326 \"-\" \"curl/8 \\\"x\\\"\\\\\\t\\x80\" duration_us=1500 node=n1\n"
    );
    let mut unread = record("", None);
    (unread.method, unread.status, unread.bytes_out) = (None, StatusCode::BAD_REQUEST, 0);
    unread.took = Duration::ZERO;
    assert_eq!(
        line(AccessLogFormat::Combined, &unread),
        "192.0.2.7 - - [10/Oct/2000:13:55:36 +0000] \"-\" 400 - \"-\" \"-\" node=n1\n"
    );
}

#[test]
fn an_extended_line_says_whose_the_request_was() {
    let mut of_site = record("/", None);
    of_site.took = Duration::ZERO;
    let unrouted = line(AccessLogFormat::Extended, &of_site);
    let id = "00000000000000000000000000000abc";
    assert!(
        unrouted.ends_with(&format!(" \"-\" \"-\" host=www.example.org id={id} node=n1\n")),
        "{unrouted}"
    );
    let site = r#"{"name":"s","tenant":"t","hosts":["s"],"backend":{"kind":"static","root":"s"}}"#;
    of_site.site = Some(Arc::new(serde_json::from_str(site).unwrap()));
    let routed = line(AccessLogFormat::Extended, &of_site);
    assert!(routed.contains(&format!(" host=www.example.org site=s tenant=t id={id} ")), "{routed}");
    assert_eq!(EdgeConfig::default().log.format, AccessLogFormat::Extended, "who wants less says so");
    // A client writes the host, and begins no word of its own by it.
    let mut hostile = of_site;
    (hostile.text, hostile.target_at) = ("a site=x\"\n/".into(), 10);
    assert!(line(AccessLogFormat::Extended, &hostile).contains(" host=asite=x site=s "));
}

#[test]
fn a_combined_line_ends_with_what_the_request_used() {
    let mut full = record("/x", None);
    let usage = RequestUsage { cpu_us: 9, read_bytes: 8, write_bytes: 7, throttled_us: 6, demoted: 1 };
    let cell = Some("demo/wiki r\"3".into());
    full.more = Some(Box::new(AccessDetails {
        cell,
        used: ProgramUsage::Known(usage),
        paced_us: 5,
        ..AccessDetails::default()
    }));
    let (queued, ruled, backend) = (4, 3, 2);
    full.queued = Duration::from_micros(queued);
    full.ruled = Duration::from_micros(ruled);
    full.backend = Duration::from_micros(backend);
    let told = line(AccessLogFormat::Combined, &full);
    let receipt = " duration_us=1500 queued_us=4 rules_us=3 backend_us=2 cpu_us=9 read_bytes=8 write_bytes=7 \
                   throttled_us=6 paced_us=5 demoted=1 cell=demo/wikir3 node=n1\n";
    assert!(told.ends_with(receipt), "{told}");
    let (cell, cell_of) = (Some("demo/blog/r3".into()), Some(UsageScope::Instance));
    full.more = Some(Box::new(AccessDetails { cell, cell_of, ..AccessDetails::default() }));
    assert!(
        line(AccessLogFormat::Combined, &full).ends_with(" cell=demo/blog/r3 cell_of=instance node=n1\n")
    );
    assert!(
        line(AccessLogFormat::Json, &full).contains(",\"cell\":\"demo/blog/r3\",\"cell_of\":\"instance\",")
    );
    let raised = Boost { cpu: Some(CpuQuota::of_core(2_000)), cpu_shares: Some(4096) };
    full.more = Some(Box::new(AccessDetails { raised, ..AccessDetails::default() }));
    let told = "raised=cpu=200%,cpu_shares=4096 node=n1\n";
    assert!(line(AccessLogFormat::Combined, &full).ends_with(told));
    assert!(line(AccessLogFormat::Json, &full).contains(",\"raised\":\"cpu=200%,cpu_shares=4096\","));
    full.more = Some(Box::new(AccessDetails { used: ProgramUsage::Unknown, ..AccessDetails::default() }));
    assert!(line(AccessLogFormat::Combined, &full).ends_with(" backend_us=2 cpu_us=- node=n1\n"));
    assert!(line(AccessLogFormat::Json, &full).contains("\"cpu_us\":null"));
}

#[test]
fn a_json_line_says_everything_known() {
    let site = r#"{"name":"wiki","tenant":"demo","hosts":["w"],"backend":{"kind":"php","root":"w"}}"#;
    let mut full = record("/x", Some(b"ua"));
    full.site = Some(Arc::new(serde_json::from_str(site).unwrap()));
    full.refusal = Some("queue_full");
    full.tls = Some("TLSv1_3");
    full.queued = Duration::from_micros(7);
    let usage = RequestUsage { cpu_us: 9, read_bytes: 8, ..RequestUsage::default() };
    let cell = Some("demo/wiki/r3".into());
    full.more =
        Some(Box::new(AccessDetails { cell, used: ProgramUsage::Known(usage), ..AccessDetails::default() }));
    let value: serde_json::Value = serde_json::from_str(&line(AccessLogFormat::Json, &full)).unwrap();
    assert_eq!(
        value,
        serde_json::json!({
            "time": "2000-10-10T13:55:36.042Z", "id": format!("{:032x}", 0xabc), "client": "192.0.2.7",
            "port": 5000, "host": "www.example.org", "method": "GET", "target": "/x", "protocol": "HTTP/1.1",
            "status": 200, "bytes_in": 0, "bytes_out": 2326, "duration_us": 1500, "queued_us": 7,
            "rules_us": 0, "backend_us": 0, "cpu_us": 9, "read_bytes": 8, "write_bytes": 0, "throttled_us": 0, "paced_us": 0,
            "demoted": 0, "cell": "demo/wiki/r3", "node": "n1", "site": "wiki", "tenant": "demo", "backend": "php", "user_agent": "ua",
            "refusal": "queue_full", "tls": "TLSv1_3",
        })
    );
}

#[test]
fn a_line_of_a_request_that_woke_its_application_has_each_stage() {
    let mut woke = record("/x", None);
    let stages = vec![(WakeStage::Sandbox, 900), (WakeStage::Boot, 210_000), (WakeStage::Connect, 60)];
    let wake = Arc::new(WakeReport { from: Tier::Cold, stages, predicted_us: None });
    let waited = Duration::from_micros(211_000);
    woke.more =
        Some(Box::new(AccessDetails { woken: Some(WakeWait { wake, waited }), ..AccessDetails::default() }));
    woke.backend = Duration::from_micros(1_500);
    let told = line(AccessLogFormat::Combined, &woke);
    let end = " duration_us=1500 wake_us=211000 backend_us=1500 \
               woken=cold:sandbox_us=900,boot_us=210000,connect_us=60,first_byte_us=1500 node=n1\n";
    assert!(told.ends_with(end), "{told}");
    let told: serde_json::Value = serde_json::from_str(&line(AccessLogFormat::Json, &woke)).unwrap();
    assert_eq!(told["wake_us"], 211_000);
    assert_eq!(
        told["woken"],
        serde_json::json!({
            "from": "cold", "sandbox_us": 900, "boot_us": 210_000, "connect_us": 60, "first_byte_us": 1_500,
        })
    );
}

#[test]
fn the_date_follows_the_second() {
    let mut formatter = LineFormatter::new(AccessLogFormat::Json, "n1");
    for (second, date) in [(0, "1970-01-01T00:00:00.000Z"), (951_782_400, "2000-02-29T00:00:00.000Z")] {
        let mut at = record("/", None);
        at.started = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        let mut out = Vec::new();
        formatter.line(&at, &mut out);
        assert!(String::from_utf8(out).unwrap().contains(date));
    }
}

proptest! {
    #[test]
    fn no_request_can_forge_a_line_or_a_field(
        agent in prop::collection::vec(any::<u8>(), 0..60),
        target in "\\PC*",
    ) {
        let mut any = record("", None);
        any.text = format!("h{target}");
        any.target_at = 1;
        // Header values cannot hold control bytes; the formatter does not rely on it.
        any.user_agent = HeaderValue::from_bytes(&agent).ok();
        any.referer = HeaderValue::from_maybe_shared(bytes::Bytes::from(agent.clone())).ok();
        let combined = line(AccessLogFormat::Combined, &any);
        prop_assert!(combined.trim_end_matches('\n').bytes().all(|b| matches!(b, b' '..=b'~')));
        prop_assert_eq!(combined.matches('\n').count(), 1);
        let quotes = combined.replace("\\\\", "").replace("\\\"", "").matches('"').count();
        prop_assert_eq!(quotes, 6);
        let json = line(AccessLogFormat::Json, &any);
        prop_assert_eq!(json.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let back: Vec<u8> = value["target"].as_str().unwrap().chars().map(|c| c as u32 as u8).collect();
        prop_assert_eq!(back, target.into_bytes());
    }
}

#[test]
fn lines_reach_the_file_and_shutdown_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let metrics = Arc::new(EdgeMetrics::new());
    run_local(async {
        let log = AccessLog::open(&path, AccessLogFormat::Combined, Arc::clone(&metrics)).unwrap();
        let thread = log.for_thread("n1");
        for n in 0..2000 {
            thread.write(&record(&format!("/{n}"), None));
        }
    });
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 2000);
    assert!(text.lines().last().unwrap().contains("/1999 "));
    assert_eq!(metrics.log_lines(), (2000, 0));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !0o640, 0);
}

#[test]
fn a_line_waits_no_longer_than_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let metrics = Arc::new(EdgeMetrics::new());
    run_local(async {
        let log = AccessLog::open(&path, AccessLogFormat::Combined, Arc::clone(&metrics)).unwrap();
        let thread = log.for_thread("n1");
        thread.write(&record("/first", None));
        // Time is simulated: this passes at once, and the flush is due at its end.
        tokio::time::sleep(FLUSH_AFTER + Duration::from_millis(1)).await;
        while metrics.log_lines() != (1, 0) {
            std::thread::yield_now();
        }
        thread.write(&record("/second", None));
        assert!(fs::read_to_string(&path).unwrap().contains("/first"));
    });
    assert_eq!(metrics.log_lines(), (2, 0));
}

#[test]
fn after_reopen_lines_go_to_the_new_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let moved = dir.path().join("access.log.1");
    run_local(async {
        let log = AccessLog::open(&path, AccessLogFormat::Combined, Arc::new(EdgeMetrics::new())).unwrap();
        let thread = log.for_thread("n1");
        thread.write(&record("/old", None));
        thread.flush();
        fs::rename(&path, &moved).unwrap();
        log.reopen();
        while !path.exists() {
            std::thread::yield_now();
        }
        thread.write(&record("/new", None));
    });
    assert!(fs::read_to_string(&moved).unwrap().contains("/old"));
    assert!(!fs::read_to_string(&moved).unwrap().contains("/new"));
    assert!(fs::read_to_string(&path).unwrap().contains("/new"));
}

#[test]
fn a_full_disk_drops_lines_and_counts_them() {
    let metrics = Arc::new(EdgeMetrics::new());
    run_local(async {
        let log =
            AccessLog::open(Path::new("/dev/full"), AccessLogFormat::Json, Arc::clone(&metrics)).unwrap();
        let thread = log.for_thread("n1");
        for _ in 0..10 {
            thread.write(&record("/", None));
        }
    });
    assert_eq!(metrics.log_lines(), (0, 10));
}

#[test]
fn a_writer_that_hangs_does_not_hold_up_a_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    // Nobody reads, so the writer hangs once the pipe is full; open for writing too, so that opening does not wait.
    let mut reader = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let metrics = Arc::new(EdgeMetrics::new());
    let total = run_local(async {
        let log = AccessLog::open(&path, AccessLogFormat::Combined, Arc::clone(&metrics)).unwrap();
        let thread = log.for_thread("n1");
        let long = record(&"/x".repeat(4000), None);
        let mut total = 0;
        while metrics.log_lines().1 == 0 {
            thread.write(&long);
            total += 1;
        }
        // Read the pipe empty until shutdown has written all that was taken.
        let drain = std::thread::spawn(move || {
            let mut sink = vec![0; 1 << 20];
            let mut tail = Vec::new();
            while !tail.ends_with(b"END") {
                let n = reader.read(&mut sink).unwrap();
                tail.extend_from_slice(&sink[n.saturating_sub(3)..n]);
            }
        });
        drop((thread, log));
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"END").unwrap();
        drain.join().unwrap();
        total
    });
    let (written, dropped) = metrics.log_lines();
    assert!(dropped > 0 && written > 0);
    assert_eq!(written + dropped, total);
}

#[test]
fn a_log_that_cannot_be_opened_says_where_and_why() {
    let path = Path::new("/proc/nonexistent/access.log");
    let error =
        AccessLog::open(path, AccessLogFormat::Json, Arc::new(EdgeMetrics::new())).unwrap_err().to_string();
    assert!(error.contains("NGY0441") && error.contains("/proc/nonexistent/access.log"), "{error}");
}

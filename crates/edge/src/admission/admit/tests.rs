//! The line as requests meet it: from several threads, with clients that leave, under bounds that change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER, USER_AGENT,
};
use http::{HeaderValue, Method, StatusCode};
use nagaya_admission::{
    AdmissionRefusal, AdmissionRequest, ClientKey, CostClass, Decision, Nonce, Prediction, RequestKey,
    ServiceUse, TicketRecord,
};
use nagaya_base::AnchoredClock;
use nagaya_records::{Site, SiteName, Tenant};
use nagaya_rules::{LaneRun, RuleLane};
use nagaya_telemetry::Gauge;
use tokio::sync::oneshot;

use crate::admission::admit::QueueEntry;
use crate::admission::deferral;
use crate::admission::lanes::{AdmitResult, EdgeLane, LaneSet, LaneStatus, TicketListenError, TurnResult};
use crate::admission::permit::{Permit, PermitSource};
use crate::backends::programs::testing::request;
use crate::http::message::{RequestBody, ResponseBody};
use crate::options::EdgeConfig;

const ASK: AdmissionRequest = AdmissionRequest {
    class: CostClass(1),
    client: ClientKey(1),
    bytes: 0,
    priority: 0,
    ticket: None,
    adopts: false,
    can_wait: true,
    nonce: None,
    passes: false,
    is_visiting: false,
};

fn tenant(max: Option<u32>) -> Tenant {
    let tenant = serde_json::json!({ "name": "demo", "uid": 1000, "gid": 1000, "max_concurrent": max });
    serde_json::from_value(tenant).unwrap()
}

fn site(max: Option<u32>) -> Site {
    let site = serde_json::json!({ "name": "s", "tenant": "demo", "hosts": ["s"], "max_concurrent": max,
        "backend": { "kind": "static", "root": "s" } });
    serde_json::from_value(site).unwrap()
}

fn options(max_waiting: u32) -> EdgeConfig {
    EdgeConfig { max_waiting, ..EdgeConfig::default() }
}

/// A lane of a site with this bound, and as many places in its line.
pub fn lane(run: u32, waiting: u32) -> (Arc<LaneSet>, Arc<EdgeLane>) {
    let options = options(waiting);
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let lane = lanes.of_site(&site(Some(run)), &tenant(None), &options);
    (lanes, lane)
}

fn runs(lanes: &LaneSet, lane: &Arc<EdgeLane>) -> Option<Permit> {
    if let Some(permit) = lanes.enter_calm(lane) {
        return Some(permit);
    }
    match lanes.enter(lane, ASK) {
        AdmitResult::Runs(pass) => Some(Permit::of_pass(lane, pass)),
        AdmitResult::Waits(pass, ..) => {
            lanes.cancel(pass);
            None
        }
        AdmitResult::Turned(..) => None,
    }
}

fn waits(lanes: &LaneSet, lane: &EdgeLane) -> (RequestKey, oneshot::Receiver<TurnResult>) {
    match lanes.enter(lane, ASK) {
        AdmitResult::Waits(pass, _, told) => (pass, told),
        _ => panic!("there is no line"),
    }
}

/// The row of a lane.
fn counts(lanes: &LaneSet, lane: &EdgeLane) -> (u32, u32) {
    let row = lanes.explain().into_iter().find(|(other, _)| other.id == lane.id).unwrap().1;
    (row.running, row.waiting)
}

#[test]
fn never_more_run_than_may_and_the_line_is_bounded() {
    let (lanes, lane) = lane(2, 1);
    let first = runs(&lanes, &lane).unwrap();
    let second = runs(&lanes, &lane).unwrap();
    let (_, mut told) = waits(&lanes, &lane);
    assert!(matches!(
        lanes.enter(&lane, ASK),
        AdmitResult::Turned(Decision::Refused(AdmissionRefusal::Full(_)), records) if records.is_empty()
    ));
    assert!(told.try_recv().is_err());
    drop(first);
    assert_eq!(told.try_recv(), Ok(Ok(())));
    assert_eq!(counts(&lanes, &lane), (2, 0));
    drop(second);
    assert_eq!(counts(&lanes, &lane), (1, 0));
}

#[test]
fn a_calm_lane_counts_its_requests_without_the_machine() {
    let (lanes, lane) = lane(100, 1);
    let first = runs(&lanes, &lane).unwrap();
    assert!(matches!(first.kind, PermitSource::Lent(_)));
    assert!(lane.enter(), "permits were lent in bulk");
    assert_eq!((counts(&lanes, &lane), lanes.running()), ((2, 0), 2));
    lane.leave(None);
    drop(first);
    assert_eq!((counts(&lanes, &lane), lanes.running()), ((0, 0), 0));
}

#[test]
fn lent_permits_do_not_break_a_bound() {
    let (lanes, lane) = lane(6, 10);
    let mut running = Vec::new();
    while let Some(permit) = runs(&lanes, &lane) {
        running.push(permit);
        assert!(running.len() <= 6);
    }
    assert_eq!((running.len(), counts(&lanes, &lane)), (6, (6, 0)));
    running.clear();
    assert_eq!(counts(&lanes, &lane), (0, 0));
}

#[test]
fn a_tenants_bound_holds_for_all_its_lanes() {
    let options = options(10);
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let tenant = tenant(Some(3));
    let one = lanes.of_site(&site(None), &tenant, &options);
    let mut other = site(None);
    other.name = SiteName::new("other").unwrap();
    let other = lanes.of_site(&other, &tenant, &options);
    let permits: Vec<_> = [&one, &one, &other].map(|lane| runs(&lanes, lane).unwrap()).into();
    assert!(runs(&lanes, &one).is_none() && runs(&lanes, &other).is_none());
    drop(permits);
    assert!(runs(&lanes, &other).is_some());
}

#[test]
fn leaving_the_line_frees_the_place_and_passes_the_permit_on() {
    let (lanes, lane) = lane(1, 2);
    let first = runs(&lanes, &lane).unwrap();
    let (leaving, _) = waits(&lanes, &lane);
    drop(QueueEntry { lanes: &lanes, pass: leaving, is_over: false });
    assert_eq!(counts(&lanes, &lane), (1, 0));
    // Called, and gone before it came.
    let (called, told) = waits(&lanes, &lane);
    let (_, mut next) = waits(&lanes, &lane);
    drop(first);
    drop(told);
    drop(QueueEntry { lanes: &lanes, pass: called, is_over: false });
    assert_eq!(next.try_recv(), Ok(Ok(())));
}

#[test]
fn a_raised_bound_lets_those_in_who_wait() {
    let (lanes, lane) = lane(1, 2);
    let _first = runs(&lanes, &lane).unwrap();
    let (_, mut told) = waits(&lanes, &lane);
    lanes.site_changed(&site(Some(2)), &options(2));
    assert_eq!(told.try_recv(), Ok(Ok(())));
}

#[test]
fn a_dropped_site_turns_away_who_waits_there() {
    let (lanes, lane) = lane(1, 2);
    let first = runs(&lanes, &lane).unwrap();
    let (_, mut told) = waits(&lanes, &lane);
    lanes.drop_site(&site(None).name);
    assert_eq!(told.try_recv(), Ok(Err(AdmissionRefusal::NoLane)));
    drop(first);
    assert_eq!(lanes.running(), 0);
}

#[test]
fn a_dropped_site_gives_back_what_it_was_lent() {
    let (lanes, lane) = lane(100, 1);
    let running = runs(&lanes, &lane).unwrap();
    lanes.drop_site(&site(None).name);
    assert!(!lane.enter(), "nobody enters a lane that is gone");
    assert_eq!(lanes.running(), 1, "what ran runs on, and what was not in use is back");
    drop(running);
    assert_eq!(lanes.running(), 0);
}

/// Threads that enter, sometimes give up, and leave: the bound holds at every moment, nobody is forgotten in line, and all
/// permits come back.
#[test]
fn permits_are_neither_lost_nor_given_twice_between_threads() {
    const RUN: u32 = 40;
    let (lanes, lane) = lane(RUN, 1000);
    let inside = Arc::new(AtomicU32::new(0));
    let run = |seed: u64| {
        let (lanes, lane, inside) = (Arc::clone(&lanes), Arc::clone(&lane), Arc::clone(&inside));
        move || {
            let mut random = seed;
            let mut held = Vec::new();
            for _ in 0..4000 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if random >> 60 < 7 && !held.is_empty() {
                    inside.fetch_sub(1, Ordering::SeqCst);
                    held.pop();
                    continue;
                }
                let permit = match lanes.enter_calm(&lane) {
                    Some(permit) => permit,
                    None => match lanes.enter(&lane, ASK) {
                        AdmitResult::Runs(pass) => Permit::of_pass(&lane, pass),
                        AdmitResult::Waits(pass, _, told) if random >> 61 == 0 || held.len() > 4 => {
                            drop(told);
                            lanes.cancel(pass);
                            continue;
                        }
                        AdmitResult::Waits(pass, _, told) => {
                            // Whoever waits holds nothing, or all might wait for each other.
                            inside.fetch_sub(u32::try_from(held.len()).unwrap(), Ordering::SeqCst);
                            held.clear();
                            assert_eq!(told.blocking_recv(), Ok(Ok(())));
                            Permit::of_pass(&lane, pass)
                        }
                        AdmitResult::Turned(..) => continue,
                    },
                };
                assert!(inside.fetch_add(1, Ordering::SeqCst) < RUN);
                held.push(permit);
            }
            inside.fetch_sub(u32::try_from(held.len()).unwrap(), Ordering::SeqCst);
        }
    };
    let threads: Vec<_> = (1..=8).map(|seed| std::thread::spawn(run(seed))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!((counts(&lanes, &lane), lanes.running()), ((0, 0), 0));
}

#[test]
fn refusal_without_a_ticket_has_the_requested_format() {
    let told = |method: Method, fields: &[(HeaderName, &'static str)]| {
        let mut request = request(method, RequestBody::empty());
        request
            .head
            .headers
            .extend(fields.iter().map(|(name, value)| (Some(name.clone()), HeaderValue::from_static(value))));
        let wait = Some(Duration::from_millis(6_500));
        let prediction = Prediction { ahead: 4, wait, at_most: None, guess: wait };
        let refusal = deferral::refused(AdmissionRefusal::NoSlot(prediction), &site(None), &request.head);
        let has_own_page = refusal.row().has_own_page;
        let response = refusal.into_response(request.head.id);
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers.get(RETRY_AFTER).unwrap(), "7");
        assert_eq!(response.headers.get(CACHE_CONTROL).unwrap(), "no-store");
        let ResponseBody::Bytes(body) = response.body else { panic!("it is short") };
        let kind = response.headers.get(CONTENT_TYPE).unwrap().to_str().unwrap().to_owned();
        (kind, String::from_utf8(body.to_vec()).unwrap(), has_own_page)
    };
    let (kind, document, has_own_page) = told(Method::POST, &[]);
    assert!(has_own_page && kind == "application/problem+json", "{kind}");
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!((&document["position"], &document["predicted_wait_seconds"]), (&5.into(), &7.into()));
    let people = [(ACCEPT, "text/html"), (ACCEPT_LANGUAGE, "ja")];
    let (kind, page, has_own_page) = told(Method::GET, &people);
    assert!(has_own_page && kind.starts_with("text/html") && page.contains("lang=\"ja\""), "{page}");
    let (_, plain, has_own_page) = told(Method::GET, &[(USER_AGENT, "Googlebot/2.1"), people[0].clone()]);
    assert!(!has_own_page && plain.contains("NGY0413") && !plain.contains("refresh"), "{plain}");
}

#[test]
fn how_full_a_lane_is_counts_what_is_lent_as_free() {
    let options = options(10);
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let tenant = tenant(Some(60));
    let one = lanes.of_site(&site(Some(50)), &tenant, &options);
    let mut other = site(None);
    other.name = SiteName::new("other").unwrap();
    let other = lanes.of_site(&other, &tenant, &options);
    let empty = LaneStatus { free: 50, wait: Some(Duration::ZERO), ..LaneStatus::default() };
    assert_eq!(one.crowded(), empty);
    let _running: Vec<_> = [&one, &one, &other].map(|lane| runs(&lanes, lane).unwrap()).into();
    assert_eq!(lanes.crowded(&one), LaneStatus { running: 2, free: 48, ..empty });
    let many: Vec<_> = (0..20).map(|_| runs(&lanes, &other).unwrap()).collect();
    assert_eq!(lanes.crowded(&one).free, 60 - 2 - 1 - 20, "its tenant's bound is nearer");
    let (_waiting, full) = (
        many,
        lanes.of_rule(
            &one,
            &RuleLane { name: "checkout".into(), run: LaneRun::Fixed(1), wait: None, tickets: false },
        ),
    );
    let _runs = runs(&lanes, &full).unwrap();
    let _waits = waits(&lanes, &full);
    let crowded = lanes.crowded(&full);
    assert_eq!((crowded.running, crowded.waiting, crowded.free), (1, 1, 0));
    assert_eq!((lanes.crowded(&one).running, lanes.crowded(&one).waiting), (3, 0), "its own line is empty");
}

#[test]
fn lane_of_a_rule_adapts_within_its_sites_bound() {
    let (lanes, site) = lane(6, 100);
    let by_rule = |run| RuleLane { name: "reports".into(), run, wait: None, tickets: true };
    let run = |lane: &Arc<EdgeLane>| {
        let explained = lanes.explain().into_iter().find(|(other, _)| Arc::ptr_eq(other, lane));
        explained.unwrap().1.run
    };
    let adapts = lanes.of_rule(&site, &by_rule(LaneRun::Auto));
    assert!(lanes.any_adapts() && (1..=6).contains(&run(&adapts)), "{}", run(&adapts));
    let fixed = lanes.of_rule(&site, &by_rule(LaneRun::Fixed(2)));
    assert!(Arc::ptr_eq(&adapts, &fixed) && !lanes.any_adapts());
    assert_eq!(run(&fixed), 2);
}

#[test]
fn runs_on_a_pass_teach_the_service_time() {
    let (lanes, lane) = lane(1, 4);
    for _ in 0..20 {
        let AdmitResult::Runs(pass) = lanes.enter(&lane, ASK) else { panic!("nobody runs") };
        lanes.release(pass, ServiceUse { service: Duration::from_millis(20), is_whole: true });
    }
    let row = lanes.explain().into_iter().find(|(other, _)| other.id == lane.id).unwrap().1;
    let p50 = row.service_p50.unwrap().as_secs_f64();
    assert!((0.017..0.023).contains(&p50), "{p50}");
}

#[test]
fn pages_that_listen_leave_connections_for_who_comes() {
    let mut options = EdgeConfig { threads: 1, ..options(1) };
    options.limits.connections = 8;
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let first = lanes.listen(Nonce(1)).unwrap();
    let _second = lanes.listen(Nonce(2)).unwrap();
    assert_eq!(lanes.listen(Nonce(3)).unwrap_err(), TicketListenError::TooMany);
    drop(first);
    let _third = lanes.listen(Nonce(3)).unwrap();
    options.limits.connections = 12;
    lanes.set_options(&options);
    lanes.listen(Nonce(4)).unwrap();
}

#[test]
fn repeated_promise_takes_no_records_along() {
    let options = EdgeConfig { wait_ms: 0, ..options(1) };
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let lane = lanes.of_site(&site(Some(1)), &tenant(None), &options);
    let used = ServiceUse { service: Duration::from_secs(1), is_whole: true };
    let AdmitResult::Runs(first) = lanes.enter(&lane, ASK) else { panic!("there is room") };
    lanes.release(first, used);
    let AdmitResult::Runs(running) = lanes.enter(&lane, ASK) else { panic!("there is room") };
    let asks = |nonce| AdmissionRequest { nonce: Some(Nonce(nonce)), client: ClientKey(2), ..ASK };
    let AdmitResult::Turned(Decision::Next(promise), records) = lanes.enter(&lane, asks(2)) else {
        panic!("nobody waits here")
    };
    assert!(
        promise.is_new && matches!(records[..], [TicketRecord::Promised { .. }, TicketRecord::Paced { .. }]),
        "{records:?}"
    );
    // Its page is called when the permit frees, which is to be stored in passing; then somebody else has that permit.
    let mut called = lanes.listen(Nonce(2)).unwrap();
    lanes.release(running, used);
    assert!(called.try_recv().is_ok());
    let AdmitResult::Runs(_) = lanes.enter(&lane, ASK) else { panic!("there is room") };
    let AdmitResult::Turned(Decision::Next(again), records) = lanes.enter(&lane, asks(3)) else {
        panic!("nobody waits here")
    };
    assert!(!again.is_new && records.is_empty(), "{records:?}");
    assert_eq!(lanes.take_records(), [TicketRecord::Called { nonce: Nonce(2) }]);
}

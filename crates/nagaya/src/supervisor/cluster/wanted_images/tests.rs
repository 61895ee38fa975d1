//! Tests of which images this node wants, and when it asks for each.
//!
//! Not here: fetching them (`nagaya_edge`, `tests/e2e/cluster`).

use nagaya_records::{NodeRecord, PlacementReason, Site};

use super::super::load::NodeReport;
use super::*;

fn site(name: &str) -> SiteName {
    SiteName::new(name).unwrap()
}

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn placement(name: &str, at: &str, epoch: u64) -> Placement {
    Placement {
        site: site(name),
        node: node(at),
        epoch,
        since_ms: 0,
        why: PlacementReason::First,
        wait_ms: 0,
        node_epoch: 0,
        copies: Vec::new(),
    }
}

fn here(bytes: u64) -> FetchResult {
    FetchResult::Here { digest: "d".into(), bytes }
}

#[test]
fn a_site_without_an_image_is_asked_for_less_and_less_often() {
    let mut images = WantedImages::default();
    let start = Instant::now();
    images.want(placement("wiki", "b", 1), start);
    let mut now = start;
    let mut waits = Vec::new();
    for _ in 0..14 {
        assert_eq!(images.next(now), Some((site("wiki"), node("b"), 1)));
        images.note_fetched(&site("wiki"), 1, Some(&FetchResult::None), now);
        let due = images.wanted[&site("wiki")].due;
        assert_eq!(images.next(due - Duration::from_millis(1)), None);
        waits.push((due - now).as_secs());
        now = due;
    }
    assert_eq!(waits[..4], [2, 4, 8, 16]);
    assert_eq!(waits.last(), Some(&RETRY_MAX.as_secs()));
    assert_eq!(images.due.len(), 1, "it stands there once");
}

#[test]
fn an_image_here_is_asked_for_again_after_a_change() {
    let mut images = WantedImages::default();
    let now = Instant::now();
    images.want(placement("wiki", "b", 1), now);
    images.next(now).unwrap();
    images.note_fetched(&site("wiki"), 1, Some(&here(9)), now);
    assert!(images.has(&site("wiki")));
    assert_eq!((images.counts(), images.next(now + RETRY_FIRST)), ((1, 1), None));
    images.want(placement("wiki", "c", 2), now);
    assert!(images.has(&site("wiki")), "nothing else is known yet");
    assert_eq!(images.next(now), Some((site("wiki"), node("c"), 2)));
    images.note_fetched(&site("wiki"), 2, None, now);
    assert!(!images.has(&site("wiki")));
    images.forget(&site("wiki"));
    assert_eq!((images.counts(), images.due.len()), ((0, 0), 0));
}

#[test]
fn images_found_again_keep_their_time_and_others_go() {
    let mut images = WantedImages::default();
    let now = Instant::now();
    images.replace(vec![placement("wiki", "b", 1), placement("blog", "b", 1)], now);
    while let Some((site, _, epoch)) = images.next(now) {
        images.note_fetched(&site, epoch, Some(&here(9)), now);
    }
    images.replace(vec![placement("wiki", "b", 1), placement("shop", "c", 1)], now);
    assert_eq!(images.next(now), Some((site("shop"), node("c"), 1)));
    assert_eq!(images.next(now), None);
    assert!(images.has(&site("wiki")) && !images.has(&site("blog")));
}

#[test]
fn others_are_told_what_most_are_and_which_are_otherwise() {
    let stock = |wanted: u32, here: &dyn Fn(u32) -> bool| {
        let mut images = WantedImages::default();
        let now = Instant::now();
        for n in 0..wanted {
            let name = format!("s{n:04}");
            images.want(placement(&name, "b", 1), now);
            if here(n) {
                images.note_fetched(&site(&name), 1, Some(&self::here(9)), now);
            }
        }
        images.stock()
    };
    let has = |stock: &ImageInventory, n: u32| stock.has(&site(&format!("s{n:04}")));
    let but = |stock: &ImageInventory| stock.but.len();
    let none = stock(0, &|_| false);
    assert!(!has(&none, 0) && but(&none) == 0);
    let table: [(u32, &dyn Fn(u32) -> bool); 6] = [
        (3, &|n| n == 1),
        (3, &|n| n != 1),
        (1, &|_| true),
        (2, &|n| n == 0),
        (9_000, &|n| n % 100 != 7),
        (9_000, &|_| false),
    ];
    for (wanted, here) in table {
        let stock = stock(wanted, here);
        assert!((0..wanted).all(|n| has(&stock, n) == here(n)), "{wanted}: {stock:?}");
        let read: ImageInventory = serde_json::from_value(serde_json::json!(stock)).unwrap();
        assert_eq!(read, stock);
    }
    // Too many are otherwise.
    let mixed = stock(900, &|n| n % 3 != 0);
    assert_eq!((mixed.most, but(&mixed)), (true, OTHERWISE_BYTES_MAX / r#""s0000","#.len()));
    assert!(!has(&mixed, 0) && has(&mixed, 1), "the first of them are told");
}

#[test]
fn too_many_changes_are_one() {
    let touched = SiteChanges::default();
    touched.note_changes(&[
        RecordChange::PutPlacement(placement("wiki", "b", 1)),
        RecordChange::DropSite(site("blog")),
    ]);
    let changed = touched.take();
    assert_eq!((changed.sites.len(), changed.is_all), (2, false));
    let many = (0..=TOUCHED_MAX).map(|n| RecordChange::DropSite(site(&format!("s{n}"))));
    touched.note_changes(&many.collect::<Vec<_>>());
    let changed = touched.take();
    assert_eq!((changed.sites.len(), changed.is_all), (0, true));
    assert!(!touched.take().is_all);
}

#[test]
fn each_application_is_wanted_by_one_other_node() {
    use nagaya_store::RedbStore;
    let dir = tempfile::tempdir().unwrap();
    let store = RedbStore::open(&dir.path().join("records.redb")).unwrap();
    let known: Vec<_> = ["a", "b", "c"].into_iter().map(known).collect();
    let tenant = r#"{"name":"t","uid":2000,"gid":2000,"home":"/srv/t"}"#;
    let mut changes = vec![RecordChange::PutTenant(serde_json::from_str(tenant).unwrap())];
    changes.extend(known.iter().map(|known| RecordChange::PutNode(Box::new(known.record.clone()))));
    for n in 0..60 {
        changes.push(RecordChange::PutSite(serde_json::from_value(app(n)).unwrap()));
        changes.push(RecordChange::PutPlacement(placement(&format!("s{n}"), ["a", "b"][n % 2], 1)));
    }
    let replicated = store.replicate(changes, store.reached().unwrap(), false).unwrap();
    assert!(replicated.left_out.is_empty());
    let mut wanted: Vec<_> = Vec::new();
    for known_node in &known {
        let found = search(&store, &known_node.record.name, &known).unwrap();
        assert!(!found.is_empty(), "{} has its share", known_node.record.name);
        assert!(found.iter().all(|placement| placement.node != known_node.record.name));
        wanted.extend(found.into_iter().map(|placement| placement.site));
    }
    wanted.sort();
    wanted.dedup();
    assert_eq!(wanted.len(), 60, "each of them, by one node");
}

fn app(n: usize) -> serde_json::Value {
    let name = format!("s{n}");
    serde_json::json!({
        "name": name, "tenant": "t", "hosts": [name],
        "backend": { "kind": "app", "command": ["serve"], "directory": "app" },
    })
}

fn known(name: &str) -> KnownNode {
    let record = NodeRecord {
        name: node(name),
        id: "0".repeat(32),
        peer: "127.0.0.1:9".into(),
        draining: false,
        cpus: 2,
        memory_bytes: 4 << 30,
        version: "test".into(),
        knows: 0,
        fence_ms: 300,
        heeds_marks: true,
    };
    KnownNode { record, load: Some(NodeReport::default()), placements: 0 }
}

#[test]
fn memory_that_a_site_may_use_is_what_its_limits_say() {
    let mut value = app(1);
    let of = |value: &serde_json::Value| memory_of(&serde_json::from_value::<Site>(value.clone()).unwrap());
    assert_eq!(of(&value), 0);
    value["limits"] = serde_json::json!({ "memory": "64MiB" });
    assert_eq!(of(&value), 64 << 20);
}

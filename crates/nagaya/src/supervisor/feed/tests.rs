//! Tests of the feed: what a process gets, in which order, and what happens when it does not keep up.

use std::sync::mpsc;

use nagaya_records::TenantName;
use nagaya_records::record::Tenant;
use nagaya_store::{ChangeMode, RedbStore};

use super::*;

/// Uids are unique, so each name has one of its own.
fn tenant(name: &str) -> RecordChange {
    let uid = 200_000 + u32::from(name.as_bytes()[0]);
    RecordChange::PutTenant(Box::new(Tenant {
        name: TenantName::new(name).unwrap(),
        uid,
        gid: uid,
        home: None,
        max_concurrent: None,
        php_workers: None,
        weight: None,
        limits: Default::default(),
        network: None,
        mail_per_hour: None,
    }))
}

fn changes(revision: u64, count: usize) -> FeedJob {
    FeedJob::Changes(Arc::new(CommittedBatch { revision, changes: vec![tenant("t"); count] }))
}

#[test]
fn a_queue_takes_changes_up_to_its_limit_until_it_closes() {
    let mut queue = FeedQueue::default();
    assert_eq!(queue.push(changes(1, QUEUE_CHANGES_MAX)), PushResult::Taken);
    assert_eq!(queue.push(changes(2, 1)), PushResult::Full);
    assert!(queue.pop().is_some());
    assert_eq!(queue.push(changes(2, 1)), PushResult::Taken);
    assert_eq!(FeedQueue::closed().push(changes(3, 1)), PushResult::Closed);
}

#[test]
fn a_transaction_above_the_queues_limit_fits_an_empty_queue() {
    let mut queue = FeedQueue::default();
    assert_eq!(queue.push(changes(1, QUEUE_CHANGES_MAX * 2)), PushResult::Taken);
    assert!(queue.pop().is_some());
    assert_eq!(queue.push(changes(2, QUEUE_CHANGES_MAX)), PushResult::Taken);
}

#[test]
fn frames_are_bounded_too() {
    let mut queue = FeedQueue::default();
    for _ in 0..QUEUE_FRAMES_MAX {
        assert_eq!(queue.push(FeedJob::Frame(FromSupervisor::ReopenLogs)), PushResult::Taken);
    }
    assert_eq!(queue.push(FeedJob::Frame(FromSupervisor::ReopenLogs)), PushResult::Full);
}

struct World {
    feed: ProcessFeed,
    process: UnixStream,
    news: mpsc::Receiver<FeedNews>,
    store: Arc<RedbStore>,
    _dir: tempfile::TempDir,
}

fn world(tenants: &[&str]) -> World {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(RedbStore::open(&dir.path().join("s.redb")).unwrap());
    for name in tenants {
        store.transaction(vec![tenant(name)], ChangeMode::Merge).unwrap();
    }
    let (ours, process) = UnixStream::pair().unwrap();
    let (tell, news) = mpsc::channel();
    let feed = ProcessFeed::new(ours, move |news| {
        // A test that ends early no longer listens.
        let _ = tell.send(news);
    });
    feed.begin(serde_json::json!({"node": "n"}), Arc::clone(&store) as Arc<dyn Store>).unwrap();
    World { feed, process, news, store, _dir: dir }
}

fn next(process: &mut UnixStream) -> FromSupervisor {
    feed::read(process).unwrap().expect("the feed is open")
}

#[test]
fn a_process_gets_options_then_a_snapshot_then_changes() {
    let mut world = world(&["a", "b"]);
    assert_eq!(next(&mut world.process), FromSupervisor::Options(serde_json::json!({"node": "n"})));
    assert_eq!(next(&mut world.process), FromSupervisor::Apply(vec![tenant("a"), tenant("b")]));
    let FromSupervisor::Commit { revision } = next(&mut world.process) else {
        panic!("a commit ends the first set")
    };
    assert_eq!(revision, world.store.revision().unwrap());
    // This one was in the store when it was read.
    world.feed.changes(Arc::new(CommittedBatch { revision, changes: vec![tenant("b")] }));
    world.feed.changes(Arc::new(CommittedBatch { revision: revision + 1, changes: vec![tenant("c")] }));
    world.feed.send(FromSupervisor::Drain);
    assert_eq!(next(&mut world.process), FromSupervisor::Apply(vec![tenant("c")]));
    assert_eq!(next(&mut world.process), FromSupervisor::Commit { revision: revision + 1 });
    assert_eq!(next(&mut world.process), FromSupervisor::Drain);
}

#[test]
fn an_answer_reaches_the_one_who_asked() {
    let mut world = world(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let process = std::thread::spawn(move || {
        loop {
            if let FromSupervisor::Ask { tag, question: FeedQuery::Status } = next(&mut world.process) {
                feed::write(&mut world.process, &ToSupervisor::Answer { tag: tag + 7, text: "wrong".into() })
                    .unwrap();
                return feed::write(&mut world.process, &ToSupervisor::Answer { tag, text: "{}".into() })
                    .unwrap();
            }
        }
    });
    assert_eq!(runtime.block_on(world.feed.query(FeedQuery::Status)).as_deref(), Some("{}"));
    process.join().unwrap();
    assert!(world.feed.shared.asks.lock().is_empty());
}

#[test]
fn a_process_that_ends_is_reported_and_questions_to_it_end() {
    let world = world(&[]);
    drop(world.process);
    loop {
        if let FeedNews::Over { .. } = world.news.recv().unwrap() {
            break;
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    assert_eq!(runtime.block_on(world.feed.query(FeedQuery::Status)), None);
}

#[test]
fn a_process_that_never_reads_is_given_up_without_waiting() {
    let world = world(&["a"]);
    // More than the socket's buffer holds, so that the writing thread is stuck with the first of them.
    for revision in 10..14 {
        let changes = vec![tenant("t"); QUEUE_CHANGES_MAX / 2];
        world.feed.changes(Arc::new(CommittedBatch { revision, changes }));
    }
    let FeedNews::Over { reason } = world.news.recv().unwrap() else {
        panic!("it never said that it was ready")
    };
    assert!(reason.contains("behind"), "{reason}");
}

#[test]
fn readiness_is_passed_on() {
    let mut world = world(&[]);
    feed::write(&mut world.process, &ToSupervisor::Ready { revision: 3 }).unwrap();
    assert!(matches!(world.news.recv().unwrap(), FeedNews::Ready { revision: 3 }));
}

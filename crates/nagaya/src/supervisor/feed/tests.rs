//! Tests of the feed: what a process gets, in which order, and what happens when it does not keep up.

use std::sync::mpsc;

use nagaya_cmdb::TenantName;
use nagaya_cmdb::record::Tenant;
use nagaya_cmdb::store::{Mode, RedbStore};

use super::*;

/// Uids are unique, so each name has one of its own.
fn tenant(name: &str) -> Change {
    let uid = 200_000 + u32::from(name.as_bytes()[0]);
    Change::PutTenant(Box::new(Tenant {
        name: TenantName::new(name).unwrap(),
        uid,
        gid: uid,
        home: None,
        max_concurrent: None,
        php_workers: None,
        weight: None,
        limits: Default::default(),
        network: None,
    }))
}

fn changes(revision: u64, count: usize) -> Job {
    Job::Changes(Arc::new(Changes { revision, changes: vec![tenant("t"); count] }))
}

#[test]
fn a_queue_takes_changes_up_to_its_limit_and_none_once_it_is_closed() {
    let mut queue = Queue::default();
    assert_eq!(queue.push(changes(1, QUEUE_CHANGES_MAX)), Pushed::Taken);
    assert_eq!(queue.push(changes(2, 1)), Pushed::Full);
    assert!(queue.pop().is_some());
    assert_eq!(queue.push(changes(2, 1)), Pushed::Taken);
    assert_eq!(Queue::closed().push(changes(3, 1)), Pushed::Closed);
}

#[test]
fn a_transaction_larger_than_the_queue_is_taken_when_nothing_waits() {
    let mut queue = Queue::default();
    assert_eq!(queue.push(changes(1, QUEUE_CHANGES_MAX * 2)), Pushed::Taken);
    assert!(queue.pop().is_some());
    assert_eq!(queue.push(changes(2, QUEUE_CHANGES_MAX)), Pushed::Taken);
}

#[test]
fn frames_are_bounded_too() {
    let mut queue = Queue::default();
    for _ in 0..QUEUE_FRAMES_MAX {
        assert_eq!(queue.push(Job::Frame(Down::ReopenLogs)), Pushed::Taken);
    }
    assert_eq!(queue.push(Job::Frame(Down::ReopenLogs)), Pushed::Full);
}

struct World {
    feed: Feed,
    process: UnixStream,
    news: mpsc::Receiver<News>,
    store: Arc<RedbStore>,
    _dir: tempfile::TempDir,
}

fn world(tenants: &[&str]) -> World {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(RedbStore::open(&dir.path().join("s.redb")).unwrap());
    for name in tenants {
        store.transaction(vec![tenant(name)], Mode::Merge).unwrap();
    }
    let (ours, process) = UnixStream::pair().unwrap();
    let (tell, news) = mpsc::channel();
    let feed = Feed::new(ours, move |news| {
        // A test that ends early no longer listens.
        let _ = tell.send(news);
    });
    feed.begin(serde_json::json!({"node": "n"}), Arc::clone(&store) as Arc<dyn Store>).unwrap();
    World { feed, process, news, store, _dir: dir }
}

fn next(process: &mut UnixStream) -> Down {
    feed::read(process).unwrap().expect("the feed is open")
}

#[test]
fn a_process_gets_options_then_everything_then_only_later_changes() {
    let mut world = world(&["a", "b"]);
    assert_eq!(next(&mut world.process), Down::Options(serde_json::json!({"node": "n"})));
    assert_eq!(next(&mut world.process), Down::Apply(vec![tenant("a"), tenant("b")]));
    let Down::Commit { revision } = next(&mut world.process) else { panic!("a commit ends the first set") };
    assert_eq!(revision, world.store.revision().unwrap());
    // This one was in the store when it was read.
    world.feed.changes(Arc::new(Changes { revision, changes: vec![tenant("b")] }));
    world.feed.changes(Arc::new(Changes { revision: revision + 1, changes: vec![tenant("c")] }));
    world.feed.send(Down::Drain);
    assert_eq!(next(&mut world.process), Down::Apply(vec![tenant("c")]));
    assert_eq!(next(&mut world.process), Down::Commit { revision: revision + 1 });
    assert_eq!(next(&mut world.process), Down::Drain);
}

#[test]
fn an_answer_reaches_the_one_who_asked() {
    let mut world = world(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let process = std::thread::spawn(move || {
        loop {
            if let Down::Ask { tag, question: Question::Status } = next(&mut world.process) {
                feed::write(&mut world.process, &Up::Answer { tag: tag + 7, text: "wrong".into() }).unwrap();
                return feed::write(&mut world.process, &Up::Answer { tag, text: "{}".into() }).unwrap();
            }
        }
    });
    assert_eq!(runtime.block_on(world.feed.ask(Question::Status)).as_deref(), Some("{}"));
    process.join().unwrap();
    assert!(world.feed.shared.asks.lock().is_empty());
}

#[test]
fn a_process_that_ends_is_reported_and_questions_to_it_end() {
    let world = world(&[]);
    drop(world.process);
    loop {
        if let News::Over { .. } = world.news.recv().unwrap() {
            break;
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    assert_eq!(runtime.block_on(world.feed.ask(Question::Status)), None);
}

#[test]
fn a_process_that_never_reads_is_given_up_and_nobody_waits_for_it() {
    let world = world(&["a"]);
    // More than the socket's buffer holds, so that the writing thread is stuck with the first of them.
    for revision in 10..14 {
        let changes = vec![tenant("t"); QUEUE_CHANGES_MAX / 2];
        world.feed.changes(Arc::new(Changes { revision, changes }));
    }
    let News::Over { reason } = world.news.recv().unwrap() else { panic!("it never said that it was ready") };
    assert!(reason.contains("behind"), "{reason}");
}

#[test]
fn readiness_is_passed_on() {
    let mut world = world(&[]);
    feed::write(&mut world.process, &Up::Ready { revision: 3 }).unwrap();
    assert!(matches!(world.news.recv().unwrap(), News::Ready { revision: 3 }));
}

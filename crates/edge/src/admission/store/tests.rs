//! The store of tickets with several threads, with a file that is locked, damaged or cannot be written, and killed while
//! it writes. Faults that a process cannot make for itself are made around a child: this same program, with one test.

use std::collections::BTreeSet;
use std::fs;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use nagaya_admission::{ClientKey, Nonce, Ticket};
use tokio::runtime::{Builder, Runtime};

use super::*;

const LANE: LaneName = LaneName(*b"lane of the shop");

/// As patient as in service, but for what a test would have to wait for.
const QUICK: StorePacing =
    StorePacing { retry: Duration::from_millis(5), retry_locked: Duration::from_millis(5), ..PACE };

/// No test takes so long that works at all.
const DEADLINE: Duration = Duration::from_secs(60);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn directory(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

fn open(path: &Path) -> (TicketStore, oneshot::Receiver<StoredTickets>) {
    TicketStore::open_at_pace(directory(path), QUICK, AnchoredClock::of_wall()).unwrap()
}

fn promised(nonce: u128) -> TicketRecord {
    let begins = Moment(AnchoredClock::of_wall().now_us() + 3_600_000_000);
    let ends = Moment(begins.0 + 60_000_000);
    let ticket = Ticket { lane: LANE, begins, ends, epoch: 0, nonce: Nonce(nonce) };
    TicketRecord::Promised { ticket, client: ClientKey(nonce as u64) }
}

fn nonces(stored: StoredTickets) -> BTreeSet<u128> {
    stored
        .into_iter()
        .map(|(_, record)| match record {
            TicketRecord::Promised { ticket, .. } => ticket.nonce.0,
            TicketRecord::Called { nonce }
            | TicketRecord::Spent { nonce, .. }
            | TicketRecord::Forgotten { nonce } => nonce.0,
            TicketRecord::Paced { lane, .. } => u128::from_be_bytes(lane.0),
        })
        .collect()
}

/// What a process started now would find.
fn stored(path: &Path) -> BTreeSet<u128> {
    let (_store, mut stored) = open(path);
    nonces(stored.try_recv().expect("the file can be opened"))
}

/// Tries until it is stored. What it says meanwhile has to be this.
async fn keep_until_stored(store: &TicketStore, record: TicketRecord, meanwhile: &str) {
    let began = Instant::now();
    while let Err(error) = store.keep(vec![record]).await {
        assert!(error.to_string().contains(meanwhile), "{error}");
        assert!(began.elapsed() < DEADLINE, "{error}");
        tokio::task::yield_now().await;
    }
}

#[test]
fn records_from_concurrent_threads_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (store, mut found) = open(dir.path());
    assert_eq!(found.try_recv(), Ok(Vec::new()));
    thread::scope(|scope| {
        for thread in 0..4_u128 {
            let store = &store;
            scope.spawn(move || {
                runtime().block_on(async {
                    let kept = (0..100).map(|n| store.keep(vec![promised(thread * 1_000 + n)]));
                    for kept in kept.collect::<Vec<_>>() {
                        assert_eq!(kept.await, Ok(()));
                    }
                });
            });
        }
    });
    drop(store);
    let expected = (0..4).flat_map(|thread| (0..100).map(move |n| thread * 1_000 + n));
    assert_eq!(stored(dir.path()), expected.collect());
}

#[test]
fn keys_are_the_same_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let TicketRecord::Promised { ticket, .. } = promised(1) else { unreachable!("it is a promise") };
    let text = open(dir.path()).0.keys().expect("the file is open").sign(&ticket);
    assert_eq!(open(dir.path()).0.keys().expect("the file is open").verify(&text), Ok(ticket));
}

#[test]
fn nothing_to_store_waits_for_what_came_before() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    // Nobody waits for these, and they are stored all the same.
    (0..50).for_each(|nonce| drop(store.keep(vec![promised(nonce)])));
    assert_eq!(runtime().block_on(store.keep(Vec::new())), Ok(()));
    drop(store);
    assert_eq!(stored(dir.path()).len(), 50);
}

#[test]
fn a_closed_store_stores_what_waits_and_then_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let before = store.keep(vec![promised(1)]);
    store.close();
    let after = store.keep(vec![promised(2)]);
    runtime().block_on(async {
        assert_eq!(before.await, Ok(()));
        assert_eq!(after.await, Err(TicketStoreError::Closed));
    });
    drop(store);
    assert_eq!(stored(dir.path()), [1].into());
}

#[test]
fn the_queue_to_the_disk_is_bounded() {
    // Nobody takes from it: a disk that hangs.
    let (sender, receiver) = sync_channel(QUEUE_MAX);
    let (keys, has_lost) = (Arc::default(), Arc::default());
    let store = TicketStore { sender: RwLock::new(Some(sender)), keys, has_lost, thread: None };
    let waiting: Vec<_> = (0..QUEUE_MAX).map(|_| store.keep(Vec::new())).collect();
    runtime().block_on(async {
        assert_eq!(store.keep(Vec::new()).await, Err(TicketStoreError::Full));
        drop(receiver);
        for kept in waiting {
            assert_eq!(kept.await, Err(TicketStoreError::Closed), "nobody waits for ever");
        }
    });
}

#[test]
fn the_file_of_an_edge_that_drains_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (old, _) = open(dir.path());
    let (new, mut found) = open(dir.path());
    runtime().block_on(async {
        assert_eq!(old.keep(vec![promised(1)]).await, Ok(()));
        let error = new.keep(vec![promised(2)]).await.expect_err("the old one has the file");
        assert_eq!(
            error,
            TicketStoreError::Unavailable("another process has file 'tickets.redb' open".into())
        );
        assert!(found.try_recv().is_err() && new.keys().is_none());
        old.close();
        keep_until_stored(&new, promised(3), "another process").await;
        assert_eq!(nonces(found.await.expect("it was opened")), [1].into());
        assert!(new.keys().is_some());
    });
    drop(new);
    assert_eq!(stored(dir.path()), [1, 3].into());
}

#[test]
fn a_damaged_file_is_set_aside_and_a_new_one_begun() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tickets.redb"), "not a database").unwrap();
    let (store, mut found) = open(dir.path());
    assert_eq!(found.try_recv(), Ok(Vec::new()));
    assert_eq!(runtime().block_on(store.keep(vec![promised(1)])), Ok(()));
    drop(store);
    assert_eq!(stored(dir.path()), [1].into());
    let names =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let aside: Vec<String> = names.filter(|name| name.starts_with("tickets.redb.damaged-")).collect();
    assert_eq!(aside.len(), 1);
    assert_eq!(fs::read(dir.path().join(&aside[0])).unwrap(), b"not a database");
}

#[test]
fn loss_of_an_open_file_is_reported_once_and_never_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tickets.redb");
    fs::write(&file, "not a database").unwrap();
    let (opened, mut found) = oneshot::channel();
    let mut keeper =
        StoreThread::new(directory(dir.path()), QUICK, Arc::default(), opened, AnchoredClock::of_wall());
    keeper.open();
    assert_eq!(found.try_recv(), Ok(Vec::new()));
    let has_lost = |keeper: &StoreThread| keeper.has_lost.swap(false, Ordering::AcqRel);
    assert!(!has_lost(&keeper), "nobody knows what was in it");
    keeper.fail(&TicketFileError::Io(io::Error::other("the disk is gone for a moment")));
    keeper.open();
    assert!(!has_lost(&keeper), "it is as it was");
    keeper.close_file();
    fs::write(&file, "not a database").unwrap();
    keeper.open();
    assert!(keeper.file.is_some() && has_lost(&keeper) && !has_lost(&keeper));
}

/// Counts what is said with a code, on the thread that it is set for.
#[derive(Default)]
struct Listener {
    codes: Arc<AtomicUsize>,
}

impl tracing::Subscriber for Listener {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let has_code = event.metadata().fields().field("code").is_some();
        self.codes.fetch_add(usize::from(has_code), Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_file_that_cannot_be_opened_is_spoken_of_once_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let in_the_way = dir.path().join("tickets.redb");
    let listener = Listener::default();
    let codes = Arc::clone(&listener.codes);
    let _guard = tracing::subscriber::set_default(listener);
    let pace = StorePacing { retry: Duration::ZERO, ..PACE };
    let (opened, mut found) = oneshot::channel();
    let mut keeper =
        StoreThread::new(directory(dir.path()), pace, Arc::default(), opened, AnchoredClock::of_wall());
    for round in 1..=3 {
        fs::create_dir(&in_the_way).unwrap();
        for _ in 0..20 {
            let (done, mut kept) = oneshot::channel();
            keeper.take(vec![PendingWrite { records: vec![promised(1)], done }]);
            let answer = kept.try_recv().expect("it is told at once");
            assert!(matches!(answer, Err(TicketStoreError::Unavailable(why)) if why.contains("directory")));
        }
        assert_eq!(codes.load(Ordering::Relaxed), round);
        fs::remove_dir(&in_the_way).unwrap();
        let (done, mut kept) = oneshot::channel();
        keeper.take(vec![PendingWrite { records: vec![promised(1)], done }]);
        assert_eq!(kept.try_recv(), Ok(Ok(())));
        assert!(keeper.trouble.is_none());
        keeper.close_file();
        fs::remove_file(&in_the_way).unwrap();
    }
    assert_eq!(found.try_recv(), Ok(Vec::new()));
}

// === Faults around a child ===

const CHILD: &str = "a_child_that_meets_with_a_fault";
const FAULT: &str = "NAGAYA_TEST_FAULT";
const DIRECTORY: &str = "NAGAYA_TEST_DIRECTORY";
const FIRST: &str = "NAGAYA_TEST_FIRST";

/// This program once more, running the one test below, behind what a shell does before it.
fn child(fault: &str, path: &Path, first: u128, shell: &str) -> Child {
    let name = format!("{}::{CHILD}", module_path!().split_once("::").expect("a module of this crate").1);
    Command::new("sh")
        .args(["-c", &format!("{shell}\nexec \"$@\""), "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"])
        .env(FAULT, fault)
        .env(DIRECTORY, path)
        .env(FIRST, first.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The numbers of tickets that a child says are stored, up to `count`.
fn acknowledged(lines: &mut impl BufRead, count: usize) -> Vec<u128> {
    let numbers =
        lines.lines().map(Result::unwrap).filter_map(|line| line.strip_prefix("stored ")?.parse().ok());
    numbers.take(count).collect()
}

fn finish(mut child: Child) -> BTreeSet<u128> {
    let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
    let numbers = acknowledged(&mut lines, usize::MAX);
    let status = child.wait().unwrap();
    assert!(status.success(), "the child says above what is wrong: {status}");
    assert!(!numbers.is_empty(), "the child ran no test");
    numbers.into_iter().collect()
}

fn say_stored(nonce: u128) {
    println!("stored {nonce}");
    std::io::stdout().flush().unwrap();
}

#[test]
#[ignore = "it is run by the tests below, in a process of its own"]
fn a_child_that_meets_with_a_fault() {
    let fault = std::env::var(FAULT).expect("it is run by another test");
    let path = PathBuf::from(std::env::var(DIRECTORY).expect("it is run by another test"));
    let first: u128 = std::env::var(FIRST).expect("it is run by another test").parse().unwrap();
    // The harness leaves its line about this test unfinished.
    println!();
    match fault.as_str() {
        "kill" => store_until_killed(&path, first),
        "size" => fill(&path, "File too large", || {
            let mut limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
            limit.current = limit.maximum;
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        }),
        "full" => {
            let filler = path.join("filler");
            fs::write(&filler, vec![1; 2 << 20]).unwrap();
            fill(&path, "No space left", || fs::remove_file(&filler).unwrap());
        }
        "read-only" => {
            let (store, mut found) = open(&path);
            runtime().block_on(async {
                let error = store.keep(vec![promised(1)]).await.expect_err("nothing can be written");
                assert!(error.to_string().contains("Read-only"), "{error}");
                assert!(found.try_recv().is_err());
                let remounted = Command::new("mount").args(["-o", "remount,rw"]).arg(&path).status();
                assert!(remounted.unwrap().success());
                keep_until_stored(&store, promised(2), "Read-only").await;
            });
            drop(store);
            stored(&path).into_iter().for_each(say_stored);
        }
        other => panic!("no such fault: {other}"),
    }
}

/// Several promises are on their way at any time, some of them together.
fn store_until_killed(path: &Path, first: u128) {
    let (store, _) = open(path);
    runtime().block_on(async {
        let mut on_their_way = std::collections::VecDeque::new();
        for nonce in (first..first + 100_000).step_by(3) {
            let records = (nonce..nonce + 1 + nonce % 3).map(promised).collect::<Vec<_>>();
            let count = records.len() as u128;
            on_their_way.push_back((nonce, count, store.keep(records)));
            if on_their_way.len() > 8
                && let Some((nonce, count, kept)) = on_their_way.pop_front()
            {
                assert_eq!(kept.await, Ok(()));
                (nonce..nonce + count).for_each(say_stored);
            }
        }
    });
}

/// Stores until there is no room, makes room, and stores on. Whatever was said to be stored is there.
fn fill(path: &Path, expected: &str, make_room: impl FnOnce()) {
    let (store, _) = open(path);
    let mut acknowledged = BTreeSet::new();
    runtime().block_on(async {
        let mut next = 0;
        let error = loop {
            let batch = next..next + 500;
            match store.keep(batch.clone().map(promised).collect()).await {
                Ok(()) => acknowledged.extend(batch),
                Err(error) => break error,
            }
            next += 500;
            assert!(next < 1_000_000, "there is no end of room");
        };
        assert!(error.to_string().contains(expected), "{error}");
        assert!(store.keys().is_some(), "what was signed is verified all the same");
        // One alone may find room in what was given up with the others.
        let again = store.keep((next..next + 500).map(promised).collect()).await;
        let again = again.expect_err("there is no more room than before");
        assert!(matches!(again, TicketStoreError::Unavailable(_)), "{again}");
        make_room();
        keep_until_stored(&store, promised(2_000_000), "tickets cannot be stored").await;
        acknowledged.insert(2_000_000);
    });
    drop(store);
    let found = stored(path);
    assert!(acknowledged.is_subset(&found), "{} said, {} found", acknowledged.len(), found.len());
    acknowledged.into_iter().for_each(say_stored);
}

#[test]
fn a_file_that_may_not_grow_stops_promises_until_it_may() {
    let dir = tempfile::tempdir().unwrap();
    // 4,096 blocks of 512 bytes. Without the trap the signal would end the child.
    let numbers = finish(child("size", dir.path(), 0, "trap '' XFSZ\nulimit -S -f 4096"));
    assert!(numbers.contains(&2_000_000));
    assert!(numbers.is_subset(&stored(dir.path())));
}

/// Whether this process may mount, in a mount namespace that ends with its child.
fn may_mount() -> bool {
    let mut mount = Command::new("unshare");
    mount.args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).stderr(Stdio::null());
    let may = mount.status().is_ok_and(|status| status.success());
    if !may {
        eprintln!("skipped: only root may mount a file system");
    }
    may
}

/// A shell's line after which this directory is a small file system of the child's own.
fn mounted(path: &Path, options: &str) -> String {
    let path = path.display();
    format!("exec unshare -m sh -c 'mount -t tmpfs -o {options} tmpfs {path} && exec \"$@\"' sh \"$@\"")
}

#[test]
fn a_full_disk_stops_promises_until_there_is_room() {
    if may_mount() {
        let dir = tempfile::tempdir().unwrap();
        let numbers = finish(child("full", dir.path(), 0, &mounted(dir.path(), "size=6m")));
        assert!(numbers.contains(&2_000_000));
    }
}

#[test]
fn a_disk_that_cannot_be_written_stops_promises_until_it_can() {
    if may_mount() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(finish(child("read-only", dir.path(), 0, &mounted(dir.path(), "size=6m,ro"))), [2].into());
    }
}

#[test]
fn acknowledged_records_survive_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut said = BTreeSet::new();
    // A seed and a linear congruence (Knuth, MMIX). When within a commit the kill comes is up to the machine.
    let mut random = 7_u64;
    for round in 0..10 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut child = child("kill", dir.path(), round * 1_000_000, "");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
        said.extend(acknowledged(&mut lines, 1 + (random >> 33) as usize % 400));
        child.kill().unwrap();
        // What it said before it noticed.
        said.extend(acknowledged(&mut lines, usize::MAX));
        child.wait().unwrap();
        let found = stored(dir.path());
        let lost: Vec<_> = said.difference(&found).collect();
        assert!(lost.is_empty(), "seed 7, round {round}: said to be stored and lost: {lost:?}");
    }
    assert!(said.len() > 1_000, "only {} were stored in all rounds", said.len());
}

//! Following the cluster's store: everything is loaded once, then each change is told by a watch and put into this node's
//! replica, for ever. Whatever ends the watch (a member, a leader, all of them; history that was compacted away), it begins
//! anew where it stopped, or by comparing everything, and only what differs is told.
//!
//! Not here: the member that is asked (`client`), what a key means (`keys`), writing (`write`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::{Failure, RANGE, RAW_TXN, Talk};
use super::error::ClusterError;
use super::keys::{self, Count, Meaning, signed, unsigned};
use super::wire::{
    Event, KeyValue, Range, RangeAnswer, Response, Txn, TxnAnswer, Watch, WatchAnswer, WatchCreate,
    WatchProgress, WatchRequest,
};
use super::{Inner, lost};
use crate::feed::BATCH_MAX;
use crate::record::Change;
use crate::store::redb::Reached;
use crate::store::{Kind, Store};

/// Keys asked for at once when everything is loaded. With the longest records it is half of `client::ANSWER_LEN_MAX`.
const PAGE_LEN: i64 = 500;

const _: () = assert!(PAGE_LEN as usize * crate::store::RECORD_LEN_MAX <= super::client::ANSWER_LEN_MAX);

/// For a page, and for the other questions before a watch.
const LOAD_WAIT: Duration = Duration::from_secs(5);

/// How often a quiet watch is asked whether it is up to date. It bounds how old a healthy copy says it is.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Without any word from the member, though it was asked, the watch is begun anew with another.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// A new watch has what it missed after this long, ten rounds of etcd's task that sees to it.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Between two tries to follow, doubled each time up to the second.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Replicated changes reach the disk at the latest after this long. What a crash loses comes again.
const SYNC_EVERY: Duration = Duration::from_secs(1);

/// Requests on the way to the watch: its making, and one question for progress.
const REQUESTS_MAX: usize = 4;

/// Where the watch goes on.
#[derive(Debug, Clone, Copy)]
struct Point {
    /// Everything up to this revision of etcd is in the replica.
    revision: u64,
    cluster_id: u64,
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn follow(inner: Arc<Inner>) {
    let mut from = None;
    let mut pause = PAUSE_MIN;
    loop {
        let began = Instant::now();
        match session(&inner, &mut from).await {
            Failure::Compacted => from = None,
            Failure::Error(error) => {
                if !matches!(error, ClusterError::Unreachable { .. }) {
                    from = None;
                }
                inner.trouble(Some(error));
            }
        }
        // A session that lasted had nothing wrong with it.
        if began.elapsed() > 2 * PAUSE_MAX {
            pause = PAUSE_MIN;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// From looking where the cluster is to the end of one watch.
async fn session(inner: &Arc<Inner>, from: &mut Option<Point>) -> Failure {
    match try_session(inner, from).await {
        Ok(never) => match never {},
        Err(failure) => failure,
    }
}

enum Never {}

async fn try_session(inner: &Arc<Inner>, from: &mut Option<Point>) -> Result<Never, Failure> {
    let began = Instant::now();
    let head = head(inner).await?;
    if from.is_some_and(|from| from.cluster_id != head.cluster_id || from.revision > head.revision) {
        // Another etcd, or one whose past was restored.
        *from = None;
        inner.client.reset_revision(head.revision);
        inner.signer.forget_sequences();
    }
    let at = match *from {
        Some(at) => at,
        None => {
            let revision = load(inner).await?;
            *from.insert(Point { revision, cluster_id: head.cluster_id })
        }
    };
    inner.loaded(at.revision, began);
    let (to, requests) = mpsc::channel(REQUESTS_MAX);
    let all = inner.keys.all();
    // What is known is told once more and passed over. Some releases of etcd (#18089, #19179) that compact at a revision forget
    // what that one deleted, and let a watch begin there all the same; one that begins earlier is refused, and we compare.
    let create = WatchCreate {
        range_end: keys::after_all(&all),
        key: all.into_bytes(),
        start_revision: signed(at.revision),
        fragment: true,
    };
    let ended = |_| Failure::Error(inner.client.unreachable(Duration::ZERO, "the watch ended".into()));
    to.send(WatchRequest { request: Some(Watch::Create(create)) }).await.map_err(ended)?;
    let (talk, stream) = inner.client.watch(ReceiverStream::new(requests), LOAD_WAIT).await?;
    let mut watch = Watching {
        inner,
        to,
        stream,
        talk,
        from: at,
        pending: Vec::new(),
        partial: false,
        asked: None,
        heard: Instant::now(),
        began: Instant::now(),
    };
    let failure = loop {
        if let Err(failure) = watch.turn().await {
            break failure;
        }
        *from = Some(watch.from);
    };
    *from = Some(watch.from);
    inner.client.give_up(&watch.talk);
    Err(failure)
}

/// Where the cluster is, and that it is one this program knows.
#[derive(Debug)]
struct Head {
    revision: u64,
    cluster_id: u64,
}

async fn head(inner: &Inner) -> Result<Head, Failure> {
    let keys = &inner.keys;
    let look = Txn {
        success: vec![
            keys::getting(&keys.format()),
            keys::getting(&keys.revision()),
            keys::getting(&keys.seeding()),
        ],
        ..Txn::default()
    };
    let answer: TxnAnswer = inner.client.ask(RAW_TXN, look, LOAD_WAIT).await?.value;
    let header = answer.header.unwrap_or_default();
    let [format, revision, seeding] = raw_values(answer.responses).try_into().unwrap_or_default();
    let format = check_head(inner, format.as_deref(), revision.is_some(), seeding.is_some());
    inner.format_is(format.map_err(Failure::Error)?);
    Ok(Head { revision: unsigned(header.revision), cluster_id: header.cluster_id })
}

/// Whether what stands at the three keys is a cluster that can be followed and changed, and the format it has.
pub(super) fn check_head(
    inner: &Inner,
    format: Option<&[u8]>,
    revision: bool,
    seeding: bool,
) -> Result<u64, ClusterError> {
    let cluster = inner.keys.cluster().to_owned();
    match format.map(|found| keys::known_format(&cluster, found)).transpose()? {
        // Somebody would have unsigned values count again.
        Some(format) if inner.signer.is_required() && format < keys::HAS_SIGNATURES => {
            let why = format!("it says {format}, and the records of this cluster are signed");
            Err(ClusterError::Forged { place: "format".into(), why })
        }
        _ if seeding => Err(ClusterError::BeingFilled { cluster }),
        Some(format) if revision => Ok(format),
        _ => Err(ClusterError::NotInitialised { cluster }),
    }
}

/// The value each of these reads has found, for those that nobody signs.
pub(super) fn raw_values(outcomes: Vec<super::wire::Outcome>) -> Vec<Option<Vec<u8>>> {
    raw_pairs(outcomes).into_iter().map(|pair| Some(pair?.value)).collect()
}

/// What each of these reads has found, as it lies in etcd: see `Inner::found`.
pub(super) fn raw_pairs(outcomes: Vec<super::wire::Outcome>) -> Vec<Option<super::wire::KeyValue>> {
    let first = |outcome: super::wire::Outcome| match outcome.response {
        Some(Response::Range(range)) => range.kvs.into_iter().next(),
        _ => None,
    };
    outcomes.into_iter().map(first).collect()
}

// === Loading ===

/// Compares everything there is, as of one revision, with the replica, and returns that revision.
async fn load(inner: &Arc<Inner>) -> Result<u64, Failure> {
    let all = inner.keys.all();
    let range_end = keys::after_all(&all);
    let mut key = all.into_bytes();
    let mut revision = 0;
    let mut loaded = Loaded::default();
    loop {
        let page = Range { key, range_end: range_end.clone(), limit: PAGE_LEN, revision, ..Range::default() };
        let page: RangeAnswer = inner.client.ask(RANGE, page, LOAD_WAIT).await?.value;
        if revision == 0 {
            revision = page.header.unwrap_or_default().revision;
        }
        let last = page.kvs.last().map(|kv| kv.key.clone());
        for kv in &page.kvs {
            loaded.take(inner, kv);
        }
        match last {
            Some(mut last) if page.more => {
                last.push(0);
                key = last;
            }
            _ => break,
        }
    }
    let revision = unsigned(revision);
    inner.replace_presences(std::mem::take(&mut loaded.presences));
    let batch = tokio::task::spawn_blocking({
        let inner = inner.clone();
        move || loaded.against(&inner, revision)
    });
    let batch = batch.await.map_err(|error| Failure::Error(lost(&error)))?.map_err(Failure::Error)?;
    apply(inner, batch, true).await?;
    Ok(revision)
}

/// Everything below the cluster's prefix, as it is read.
#[derive(Default)]
struct Loaded {
    /// `None`: there is a value, and it does not count. What is known of the record stays.
    records: HashMap<(Kind, String), Option<Vec<u8>>>,
    presences: Vec<(String, Vec<u8>)>,
    count: Option<u64>,
    refused: Vec<RefusedValue>,
}

impl Loaded {
    fn take(&mut self, inner: &Inner, kv: &KeyValue) {
        let value = match open_seen(inner, kv) {
            Ok(value) => Some(value),
            Err(refused) => {
                self.refused.push(refused);
                None
            }
        };
        match (inner.keys.meaning(&kv.key), value) {
            (Meaning::Record(kind, name), value) => drop(self.records.insert((kind, name.into()), value)),
            (Meaning::Present(node), Some(value)) => self.presences.push((node.into(), value)),
            (Meaning::Revision, Some(value)) => self.count = count(&value),
            _ => {}
        }
    }

    /// What differs from the replica. The same bytes are the same record; what is only written differently is found to be
    /// the same when it is replicated.
    fn against(mut self, inner: &Inner, revision: u64) -> Result<Batch, ClusterError> {
        let refused = std::mem::take(&mut self.refused);
        let mut batch = Batch { revision, count: self.count, refused, ..Batch::default() };
        let mut gone = Vec::new();
        inner
            .replica
            .walk(&mut |kind, json| {
                let Some(name) = keys::name_in(kind, json) else { return Ok(()) };
                match self.records.entry((kind, name)) {
                    Entry::Occupied(found)
                        if found.get().as_deref().is_none_or(|found| found == json.as_bytes()) =>
                    {
                        found.remove();
                    }
                    Entry::Occupied(_) => {}
                    Entry::Vacant(vacant) => gone.push(vacant.into_key()),
                }
                Ok(())
            })
            .map_err(ClusterError::from)?;
        for (kind, name) in gone {
            batch.add(kind, &name, None);
        }
        for ((kind, name), value) in self.records {
            if let Some(value) = value {
                batch.add(kind, &name, Some(&value));
            }
        }
        Ok(batch)
    }
}

/// A value that does not count or cannot be read.
#[derive(Debug)]
struct RefusedValue {
    place: String,
    why: String,
}

/// The body of a value that is told in the order in which it was written. What is older than it does not count from then on.
fn open_seen(inner: &Inner, kv: &KeyValue) -> Result<Vec<u8>, RefusedValue> {
    let revision = unsigned(kv.mod_revision);
    match inner.signer.open(&kv.key, &kv.value, revision) {
        Ok(opened) => {
            inner.signer.note(&kv.key, &opened, revision);
            Ok(opened.body)
        }
        Err(error) => Err(RefusedValue { place: inner.keys.label(&kv.key), why: error.to_string() }),
    }
}

fn count(value: &[u8]) -> Option<u64> {
    serde_json::from_slice(value).ok().map(|count: Count| count.count)
}

// === Watching ===

struct Watching<'a> {
    inner: &'a Arc<Inner>,
    to: mpsc::Sender<WatchRequest>,
    stream: Streaming<WatchAnswer>,
    talk: Talk,
    from: Point,
    /// Told, not yet taken.
    pending: Vec<Event>,
    /// The last of them are of a revision of which more is to come.
    partial: bool,
    /// The question for progress that is not yet answered.
    asked: Option<Question>,
    /// The last word of the member.
    heard: Instant,
    /// When the watch was made.
    began: Instant,
}

/// Whether all that was committed before `since` has been told.
#[derive(Debug, Clone, Copy)]
struct Question {
    since: Instant,
    proof: Proof,
}

#[derive(Debug, Clone, Copy)]
enum Proof {
    /// The member says so, twice. An etcd before 3.4.25 or 3.5.8 may answer ahead of events that wait to be sent, and those
    /// are sent before it can answer to what is asked after its first answer.
    Progress { again: bool },
    /// The newest change there was has arrived. For a watch that is new, and gets what it missed from a task of etcd's that
    /// runs ten times a second: until it has, answers of those versions say nothing.
    Newest { revision: u64 },
}

impl Watching<'_> {
    /// Waits for one thing and does it.
    async fn turn(&mut self) -> Result<(), Failure> {
        let ask_at = self.heard + PROGRESS_EVERY;
        let silent_at = self.asked.map_or(ask_at, |asked| asked.since).max(self.heard) + STUCK_AFTER;
        tokio::select! {
            message = self.stream.message() => {
                let answer = self.said(message)?;
                self.answered(answer).await
            }
            () = sleep_until(silent_at) => {
                Err(self.failed("the watch fell silent".into()))
            }
            () = sleep_until(ask_at), if self.asked.is_none() => {
                self.inner.sync().await.map_err(Failure::Error)?;
                self.ask().await
            }
            () = self.inner.nudge.notified() => self.ask().await,
            // As after a compaction.
            () = self.inner.reload.notified() => Err(Failure::Compacted),
        }
    }

    fn said(&self, message: Result<Option<WatchAnswer>, tonic::Status>) -> Result<WatchAnswer, Failure> {
        match message {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.failed("the watch ended".into())),
            Err(status) => Err(self.inner.client.failure(&self.talk, &status)),
        }
    }

    fn failed(&self, detail: String) -> Failure {
        Failure::Error(self.inner.client.unreachable(self.heard.elapsed(), detail))
    }

    /// Asks the member how far it has told us. One question at a time: what answers it answers no later one.
    async fn ask(&mut self) -> Result<(), Failure> {
        if self.asked.is_some() {
            return Ok(());
        }
        let since = Instant::now();
        if self.began.elapsed() >= SETTLED_AFTER {
            return self.put(Question { since, proof: Proof::Progress { again: false } }).await;
        }
        let all = self.inner.keys.all();
        let newest = Range {
            range_end: keys::after_all(&all),
            key: all.into_bytes(),
            limit: 1,
            sort_order: 2,
            sort_target: 3,
            keys_only: true,
            min_mod_revision: signed(self.from.revision + 1),
            ..Range::default()
        };
        let newest: RangeAnswer = self.inner.client.ask(RANGE, newest, LOAD_WAIT).await?.value;
        let revision = newest.kvs.first().map_or(0, |kv| unsigned(kv.mod_revision));
        self.asked = Some(Question { since, proof: Proof::Newest { revision } });
        self.prove(false).await
    }

    /// Takes note if the question is answered, by a word of the member or by what has arrived.
    async fn prove(&mut self, progress: bool) -> Result<(), Failure> {
        let Some(Question { since, proof }) = self.asked else { return Ok(()) };
        match proof {
            Proof::Progress { again: false } if progress => {
                self.put(Question { since, proof: Proof::Progress { again: true } }).await
            }
            Proof::Newest { revision } if self.from.revision < revision => Ok(()),
            Proof::Progress { .. } if !progress => Ok(()),
            Proof::Progress { .. } | Proof::Newest { .. } => {
                self.asked = None;
                self.inner.in_step_since(since);
                Ok(())
            }
        }
    }

    async fn put(&mut self, question: Question) -> Result<(), Failure> {
        self.asked = Some(question);
        let request = WatchRequest { request: Some(Watch::Progress(WatchProgress {})) };
        self.to.send(request).await.map_err(|_| self.failed("the watch ended".into()))
    }

    async fn answered(&mut self, answer: WatchAnswer) -> Result<(), Failure> {
        let mut progress = self.sort(answer)?;
        // What has arrived meanwhile goes with it, so that a storm costs fewer transactions.
        while !progress && self.pending.len() < BATCH_MAX {
            let Ok(message) = timeout(Duration::ZERO, self.stream.message()).await else { break };
            let answer = self.said(message)?;
            progress = self.sort(answer)?;
        }
        if !self.partial && !self.pending.is_empty() {
            let events = std::mem::take(&mut self.pending);
            self.take(events).await?;
        }
        self.prove(progress).await
    }

    /// Puts the events of an answer to the others; says if it is the answer to the question for progress.
    fn sort(&mut self, answer: WatchAnswer) -> Result<bool, Failure> {
        self.heard = Instant::now();
        if answer.canceled {
            if answer.compact_revision > 0 {
                return Err(Failure::Compacted);
            }
            return Err(self.failed(format!("the member ended the watch: {}", answer.cancel_reason)));
        }
        let progress = !answer.created && answer.events.is_empty();
        if !answer.events.is_empty() {
            let known = self.from.revision;
            let is_new =
                |event: &Event| event.kv.as_ref().is_some_and(|kv| unsigned(kv.mod_revision) > known);
            self.pending.extend(answer.events.into_iter().filter(is_new));
            self.partial = answer.fragment;
        }
        Ok(progress)
    }

    async fn take(&mut self, events: Vec<Event>) -> Result<(), Failure> {
        let inner = self.inner;
        let mut batch = Batch::default();
        for event in events {
            let Some(kv) = event.kv else { continue };
            batch.revision = batch.revision.max(unsigned(kv.mod_revision));
            let is_put = event.kind == 0;
            let opened = if is_put { open_seen(inner, &kv).map(Some) } else { Ok(None) };
            let value = match opened {
                Ok(value) => value,
                Err(refused) => {
                    batch.refused.push(refused);
                    continue;
                }
            };
            if !is_put {
                inner.signer.note_gone(&kv.key);
            }
            inner.accepted(&kv.key);
            self.take_value(&mut batch, &kv, value.as_deref())?;
        }
        inner.client.note_revision(batch.revision);
        let revision = batch.revision;
        apply(inner, batch, false).await?;
        self.from.revision = revision;
        inner.applied(revision);
        Ok(())
    }

    /// `None`: the key is gone.
    fn take_value(&self, batch: &mut Batch, kv: &KeyValue, value: Option<&[u8]>) -> Result<(), Failure> {
        let inner = self.inner;
        match inner.keys.meaning(&kv.key) {
            Meaning::Record(kind, name) => batch.add(kind, name, value),
            Meaning::Present(node) => inner.presence(node, value),
            Meaning::Pki => inner.pki_changed(unsigned(kv.mod_revision)),
            // Somebody removed the cluster's keys, or another version is taking over: what is known here stays.
            Meaning::Revision | Meaning::Format if value.is_none() => {
                let cluster = inner.keys.cluster().to_owned();
                return Err(Failure::Error(ClusterError::NotInitialised { cluster }));
            }
            Meaning::Format => {
                inner.format_is(check_head(inner, value, true, false).map_err(Failure::Error)?);
            }
            Meaning::Revision => batch.count = value.and_then(count),
            Meaning::Other => {}
        }
        Ok(())
    }
}

// === Applying ===

#[derive(Debug, Default)]
struct Batch {
    changes: Vec<Change>,
    revision: u64,
    /// Of changes of configuration, if it is among them.
    count: Option<u64>,
    /// Records that do not count or cannot be read. They stay as they are here.
    refused: Vec<RefusedValue>,
}

impl Batch {
    fn add(&mut self, kind: Kind, name: &str, value: Option<&[u8]>) {
        match keys::change(kind, name, value) {
            Ok(change) => self.changes.push(change),
            Err(why) => self.refused.push(RefusedValue { place: keys::place_of(kind, name), why }),
        }
    }
}

async fn apply(inner: &Arc<Inner>, batch: Batch, whole: bool) -> Result<(), Failure> {
    if whole {
        inner.keep_refused(&batch.refused.iter().map(|refused| &*refused.place).collect());
    }
    for RefusedValue { place, why } in batch.refused {
        inner.refused(&place, why);
    }
    if !whole && batch.changes.is_empty() && batch.count.is_none() {
        return Ok(());
    }
    let inner = inner.clone();
    let done = tokio::task::spawn_blocking(move || {
        let durable = whole || inner.is_sync_due(SYNC_EVERY);
        let before = inner.replica.reached()?;
        let reached = Reached { revision: batch.revision, count: batch.count.unwrap_or(before.count) };
        let told = inner.replica.replicate(batch.changes, reached, durable)?;
        inner.synced(durable);
        for mistake in told.left_out {
            // It begins with the record's kind and name.
            inner.refused(&mistake, "this node's copy cannot have it".into());
        }
        if !told.committed.changes.is_empty() {
            (inner.on_change)(told.committed.changes, told.committed.revision);
        }
        Ok::<_, crate::StoreError>(())
    });
    let done = done.await.map_err(|error| Failure::Error(lost(&error)))?;
    done.map_err(|error| Failure::Error(ClusterError::from(error)))
}

//! Follows the cluster's store. Everything is loaded once, then a watch reports each change, which
//! goes into this node's replica, for ever. Something may end the watch: a member, a leader, all of
//! them, or compacted history. It then starts again where it stopped, or by comparing everything,
//! and reports only differences.
//!
//! Not here: the choice of a member (`client`), the meaning of a key (`keys`), writing (`write`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::{EtcdFailure, MemberStream, RANGE, RAW_TXN};
use super::error::ClusterError;
use super::keys::{self, KeyMeaning, RevisionCount, signed, unsigned};
use super::wire::{
    KeyValue, RangeRequest, RangeResponse, TxnRequest, TxnResponse, Watch, WatchCreate, WatchEvent,
    WatchProgress, WatchRequest, WatchResponse, raw_values,
};
use crate::etcd::inner::{StoreInner, thread_lost};
use crate::redb::ReplicaPosition;
use crate::{RecordKind, Store};
use nagaya_records::feed::BATCH_MAX;
use nagaya_records::record::RecordChange;

/// Keys requested at once when everything is loaded. With the longest records it is half of
/// `client::ANSWER_LEN_MAX`.
const PAGE_LEN: i64 = 500;

const _: () = assert!(PAGE_LEN as usize * crate::RECORD_LEN_MAX <= super::client::ANSWER_LEN_MAX);

/// Time for a page, and for the other queries before a watch.
const LOAD_WAIT: Duration = Duration::from_secs(5);

/// Interval at which a quiet watch is asked whether it is up to date. It bounds the age that a
/// healthy copy reports.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Time without any message from a queried member after which the watch starts again with another.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// Time after which a new watch has all that it missed: ten rounds of etcd's task for that.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Pause between two tries to follow, doubled each time up to the second value.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Longest time until replicated changes reach the disk. Changes that a crash loses come again.
const SYNC_EVERY: Duration = Duration::from_secs(1);

/// Requests on the way to the watch: its creation, and one progress request.
const REQUESTS_MAX: usize = 4;

/// Where the watch continues.
#[derive(Debug, Clone, Copy)]
struct WatchPoint {
    /// Everything up to this revision of etcd is in the replica.
    revision: u64,
    cluster_id: u64,
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn follow(inner: Arc<StoreInner>) {
    let mut from = None;
    let mut pause = PAUSE_MIN;
    loop {
        let began = Instant::now();
        match session(&inner, &mut from).await {
            EtcdFailure::Compacted => from = None,
            EtcdFailure::Error(error) => {
                if !matches!(error, ClusterError::Unreachable { .. }) {
                    from = None;
                }
                inner.trouble(Some(error));
            }
        }
        // A session that lasted long had no fault.
        if began.elapsed() > 2 * PAUSE_MAX {
            pause = PAUSE_MIN;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Runs from the query for the cluster's state to the end of one watch.
async fn session(inner: &Arc<StoreInner>, from: &mut Option<WatchPoint>) -> EtcdFailure {
    match try_session(inner, from).await {
        Ok(never) => match never {},
        Err(failure) => failure,
    }
}

enum NeverEnds {}

async fn try_session(
    inner: &Arc<StoreInner>,
    from: &mut Option<WatchPoint>,
) -> Result<NeverEnds, EtcdFailure> {
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
            *from.insert(WatchPoint { revision, cluster_id: head.cluster_id })
        }
    };
    inner.loaded(at.revision, began);
    let (to, requests) = mpsc::channel(REQUESTS_MAX);
    let all = inner.keys.all();
    // Known changes are reported once more and skipped. Some releases of etcd (#18089, #19179) that
    // compact at a revision forget its deletions. They still let a watch begin there. A watch that
    // begins earlier is refused, and we compare.
    let create = WatchCreate {
        range_end: keys::after_all(&all),
        key: all.into_bytes(),
        start_revision: signed(at.revision),
        fragment: true,
    };
    let ended = |_| EtcdFailure::Error(inner.client.unreachable(Duration::ZERO, "the watch ended".into()));
    to.send(WatchRequest { request: Some(Watch::Create(create)) }).await.map_err(ended)?;
    let (talk, stream) = inner.client.watch(ReceiverStream::new(requests), LOAD_WAIT).await?;
    let mut watch = WatchStream {
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

/// The cluster's present state, of a format that this program knows.
#[derive(Debug)]
struct ClusterHead {
    revision: u64,
    cluster_id: u64,
}

async fn head(inner: &StoreInner) -> Result<ClusterHead, EtcdFailure> {
    let keys = &inner.keys;
    let look = TxnRequest {
        success: vec![
            keys::getting(&keys.format()),
            keys::getting(&keys.revision()),
            keys::getting(&keys.seeding()),
        ],
        ..TxnRequest::default()
    };
    let answer: TxnResponse = inner.client.ask(RAW_TXN, look, LOAD_WAIT).await?.value;
    let header = answer.header.unwrap_or_default();
    let [format, revision, seeding] = raw_values(answer.responses).try_into().unwrap_or_default();
    let format = check_head(inner, format.as_deref(), revision.is_some(), seeding.is_some());
    inner.format_is(format.map_err(EtcdFailure::Error)?);
    Ok(ClusterHead { revision: unsigned(header.revision), cluster_id: header.cluster_id })
}

/// Checks whether the three keys show a cluster that can be followed and changed. Returns its
/// format.
pub(super) fn check_head(
    inner: &StoreInner,
    format: Option<&[u8]>,
    revision: bool,
    seeding: bool,
) -> Result<u64, ClusterError> {
    let cluster = inner.keys.cluster().to_owned();
    match format.map(|found| keys::known_format(&cluster, found)).transpose()? {
        // A writer tries to make unsigned values count again.
        Some(format) if inner.signer.is_required() && format < keys::HAS_SIGNATURES => {
            let why = format!("it says {format}, and the records of this cluster are signed");
            Err(ClusterError::Forged { place: "format".into(), why })
        }
        _ if seeding => Err(ClusterError::BeingFilled { cluster }),
        Some(format) if revision => Ok(format),
        _ => Err(ClusterError::NotInitialised { cluster }),
    }
}

// === Loading ===

/// Compares all keys, as of one revision, with the replica, and returns that revision.
async fn load(inner: &Arc<StoreInner>) -> Result<u64, EtcdFailure> {
    let all = inner.keys.all();
    let range_end = keys::after_all(&all);
    let mut key = all.into_bytes();
    let mut revision = 0;
    let mut loaded = LoadedValues::default();
    loop {
        let page = RangeRequest {
            key,
            range_end: range_end.clone(),
            limit: PAGE_LEN,
            revision,
            ..RangeRequest::default()
        };
        let page: RangeResponse = inner.client.ask(RANGE, page, LOAD_WAIT).await?.value;
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
    let batch =
        batch.await.map_err(|error| EtcdFailure::Error(thread_lost(&error)))?.map_err(EtcdFailure::Error)?;
    apply(inner, batch, true).await?;
    Ok(revision)
}

/// All keys below the cluster's prefix, as read.
#[derive(Default)]
struct LoadedValues {
    /// `None` if there is a value, and it does not count. The known record stays.
    records: HashMap<(RecordKind, String), Option<Vec<u8>>>,
    presences: Vec<(String, Vec<u8>)>,
    count: Option<u64>,
    refused: Vec<RefusedValue>,
}

impl LoadedValues {
    fn take(&mut self, inner: &StoreInner, kv: &KeyValue) {
        let value = match open_seen(inner, kv) {
            Ok(value) => Some(value),
            Err(refused) => {
                self.refused.push(refused);
                None
            }
        };
        match (inner.keys.meaning(&kv.key), value) {
            (KeyMeaning::Record(kind, name), value) => drop(self.records.insert((kind, name.into()), value)),
            (KeyMeaning::Present(node), Some(value)) => self.presences.push((node.into(), value)),
            (KeyMeaning::Revision, Some(value)) => self.count = count(&value),
            _ => {}
        }
    }

    /// Returns the differences to the replica. The same bytes are the same record. A record that is
    /// only written differently is found to be the same when it is replicated.
    fn against(mut self, inner: &StoreInner, revision: u64) -> Result<WatchBatch, ClusterError> {
        let refused = std::mem::take(&mut self.refused);
        let mut batch = WatchBatch { revision, count: self.count, refused, ..WatchBatch::default() };
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

/// Returns the body of a value that is reported in the order of writing. Older values of its key do
/// not count from then on.
fn open_seen(inner: &StoreInner, kv: &KeyValue) -> Result<Vec<u8>, RefusedValue> {
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
    serde_json::from_slice(value).ok().map(|count: RevisionCount| count.count)
}

// === Watching ===

struct WatchStream<'a> {
    inner: &'a Arc<StoreInner>,
    to: mpsc::Sender<WatchRequest>,
    stream: Streaming<WatchResponse>,
    talk: MemberStream,
    from: WatchPoint,
    /// Received, not applied yet.
    pending: Vec<WatchEvent>,
    /// The last of them belong to a revision of which more will come.
    partial: bool,
    /// The progress request without a reply so far.
    asked: Option<ProgressQuery>,
    /// Time of the member's last message.
    heard: Instant,
    /// When the watch was created.
    began: Instant,
}

/// A query whether all that was committed before `since` has been reported.
#[derive(Debug, Clone, Copy)]
struct ProgressQuery {
    since: Instant,
    proof: StepProof,
}

#[derive(Debug, Clone, Copy)]
enum StepProof {
    /// The member confirms it, twice. An etcd before 3.4.25 or 3.5.8 may answer ahead of events
    /// that wait to be sent. It sends those before it answers a request that follows its first
    /// answer.
    Progress { again: bool },
    /// The newest known change has arrived. This is for a new watch, whose missed events come from
    /// a task of etcd. That task runs ten times a second. Until then, answers of those versions say
    /// nothing.
    Newest { revision: u64 },
}

impl WatchStream<'_> {
    /// Waits for one event and handles it.
    async fn turn(&mut self) -> Result<(), EtcdFailure> {
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
                self.inner.sync().await.map_err(EtcdFailure::Error)?;
                self.ask().await
            }
            () = self.inner.nudge.notified() => self.ask().await,
            // As after a compaction.
            () = self.inner.reload.notified() => Err(EtcdFailure::Compacted),
        }
    }

    fn said(
        &self,
        message: Result<Option<WatchResponse>, tonic::Status>,
    ) -> Result<WatchResponse, EtcdFailure> {
        match message {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.failed("the watch ended".into())),
            Err(status) => Err(self.inner.client.failure(&self.talk, &status)),
        }
    }

    fn failed(&self, detail: String) -> EtcdFailure {
        EtcdFailure::Error(self.inner.client.unreachable(self.heard.elapsed(), detail))
    }

    /// Asks the member how far its reports are. One query at a time: the reply to one does not
    /// answer a later one.
    async fn ask(&mut self) -> Result<(), EtcdFailure> {
        if self.asked.is_some() {
            return Ok(());
        }
        let since = Instant::now();
        if self.began.elapsed() >= SETTLED_AFTER {
            return self.put(ProgressQuery { since, proof: StepProof::Progress { again: false } }).await;
        }
        let all = self.inner.keys.all();
        let newest = RangeRequest {
            range_end: keys::after_all(&all),
            key: all.into_bytes(),
            limit: 1,
            sort_order: 2,
            sort_target: 3,
            keys_only: true,
            min_mod_revision: signed(self.from.revision + 1),
            ..RangeRequest::default()
        };
        let newest: RangeResponse = self.inner.client.ask(RANGE, newest, LOAD_WAIT).await?.value;
        let revision = newest.kvs.first().map_or(0, |kv| unsigned(kv.mod_revision));
        self.asked = Some(ProgressQuery { since, proof: StepProof::Newest { revision } });
        self.note_progress(false).await
    }

    /// Notes progress if the query is answered, by a message of the member or by arrived changes.
    async fn note_progress(&mut self, progress: bool) -> Result<(), EtcdFailure> {
        let Some(ProgressQuery { since, proof }) = self.asked else { return Ok(()) };
        match proof {
            StepProof::Progress { again: false } if progress => {
                self.put(ProgressQuery { since, proof: StepProof::Progress { again: true } }).await
            }
            StepProof::Newest { revision } if self.from.revision < revision => Ok(()),
            StepProof::Progress { .. } if !progress => Ok(()),
            StepProof::Progress { .. } | StepProof::Newest { .. } => {
                self.asked = None;
                self.inner.in_step_since(since);
                Ok(())
            }
        }
    }

    async fn put(&mut self, question: ProgressQuery) -> Result<(), EtcdFailure> {
        self.asked = Some(question);
        let request = WatchRequest { request: Some(Watch::Progress(WatchProgress {})) };
        self.to.send(request).await.map_err(|_| self.failed("the watch ended".into()))
    }

    async fn answered(&mut self, answer: WatchResponse) -> Result<(), EtcdFailure> {
        let mut progress = self.sort(answer)?;
        // Changes that have arrived meanwhile are applied together, so that a storm costs fewer
        // transactions.
        while !progress && self.pending.len() < BATCH_MAX {
            let Ok(message) = timeout(Duration::ZERO, self.stream.message()).await else { break };
            let answer = self.said(message)?;
            progress = self.sort(answer)?;
        }
        if !self.partial && !self.pending.is_empty() {
            let events = std::mem::take(&mut self.pending);
            self.take(events).await?;
        }
        self.note_progress(progress).await
    }

    /// Adds the events of a response to the others. Returns whether it answers the progress
    /// request.
    fn sort(&mut self, answer: WatchResponse) -> Result<bool, EtcdFailure> {
        self.heard = Instant::now();
        if answer.canceled {
            if answer.compact_revision > 0 {
                return Err(EtcdFailure::Compacted);
            }
            return Err(self.failed(format!("the member ended the watch: {}", answer.cancel_reason)));
        }
        let progress = !answer.created && answer.events.is_empty();
        if !answer.events.is_empty() {
            let known = self.from.revision;
            let is_new =
                |event: &WatchEvent| event.kv.as_ref().is_some_and(|kv| unsigned(kv.mod_revision) > known);
            self.pending.extend(answer.events.into_iter().filter(is_new));
            self.partial = answer.fragment;
        }
        Ok(progress)
    }

    async fn take(&mut self, events: Vec<WatchEvent>) -> Result<(), EtcdFailure> {
        let inner = self.inner;
        let mut batch = WatchBatch::default();
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
                inner.signer.note_gone(&kv.key, unsigned(kv.mod_revision));
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

    /// Applies a value; `None` if the key is gone.
    fn take_value(
        &self,
        batch: &mut WatchBatch,
        kv: &KeyValue,
        value: Option<&[u8]>,
    ) -> Result<(), EtcdFailure> {
        let inner = self.inner;
        match inner.keys.meaning(&kv.key) {
            KeyMeaning::Record(kind, name) => batch.add(kind, name, value),
            KeyMeaning::Present(node) => inner.presence(node, value),
            KeyMeaning::Pki => inner.pki_changed(unsigned(kv.mod_revision)),
            // The cluster's keys were removed, or another version is taking over: the known state
            // stays here.
            KeyMeaning::Revision | KeyMeaning::Format if value.is_none() => {
                let cluster = inner.keys.cluster().to_owned();
                return Err(EtcdFailure::Error(ClusterError::NotInitialised { cluster }));
            }
            KeyMeaning::Format => {
                inner.format_is(check_head(inner, value, true, false).map_err(EtcdFailure::Error)?);
            }
            KeyMeaning::Revision => batch.count = value.and_then(count),
            KeyMeaning::Other => {}
        }
        Ok(())
    }
}

// === Applying ===

#[derive(Debug, Default)]
struct WatchBatch {
    changes: Vec<RecordChange>,
    revision: u64,
    /// Count of changes of configuration, if it is among them.
    count: Option<u64>,
    /// Records that do not count or cannot be read. They stay as they are here.
    refused: Vec<RefusedValue>,
}

impl WatchBatch {
    fn add(&mut self, kind: RecordKind, name: &str, value: Option<&[u8]>) {
        match keys::change(kind, name, value) {
            Ok(change) => self.changes.push(change),
            Err(why) => self.refused.push(RefusedValue { place: keys::place_of(kind, name), why }),
        }
    }
}

async fn apply(inner: &Arc<StoreInner>, batch: WatchBatch, whole: bool) -> Result<(), EtcdFailure> {
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
        let reached =
            ReplicaPosition { revision: batch.revision, count: batch.count.unwrap_or(before.count) };
        let told = inner.replica.replicate(batch.changes, reached, durable)?;
        inner.note_synced(durable);
        for mistake in told.left_out {
            // It begins with the record's kind and name.
            inner.refused(&mistake, "this node's copy cannot have it".into());
        }
        if !told.committed.changes.is_empty() {
            (inner.on_change)(told.committed.changes, told.committed.revision);
        }
        Ok::<_, crate::StoreError>(())
    });
    let done = done.await.map_err(|error| EtcdFailure::Error(thread_lost(&error)))?;
    done.map_err(|error| EtcdFailure::Error(ClusterError::from(error)))
}

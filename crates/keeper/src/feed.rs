//! The keeper's end of the feed: records go into the table, everything else to the main loop.
//!
//! One thread reads, and another one acts on the messages. So a large import holds up a verb only
//! while its changes are applied. It never holds up the node's authority, which is handed on as it
//! is read. Instances that earlier changes move away are held back first. Not here: the frames
//! (`records::feed`), the table (`records::table`).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use nagaya_records::feed::{self, FeedQuery, FromSupervisor, ToSupervisor};
use nagaya_records::instance::ExecCommand;
use nagaya_records::{Backend, NameError, RecordChange, RecordIndex, SiteName, TableError};
use parking_lot::RwLock;
use tokio::sync::{mpsc, oneshot};

use crate::authority::PlacementLease;
use crate::fd_stream::FdStream;
use crate::options::KeeperConfig;

/// An event for the main loop.
#[derive(Debug)]
pub enum FeedEvent {
    Options(Box<KeeperConfig>),
    /// The table has changed. Must be answered once the main loop has acted on it.
    Committed {
        done: oneshot::Sender<()>,
        /// The sites whose record says that they always run, if they changed.
        kept: Option<BTreeSet<SiteName>>,
        /// Some sites were removed.
        gone: bool,
    },
    Ask {
        question: FeedQuery,
        answer: ReplySender,
    },
    /// A command for an instance, and its client's connection.
    Exec {
        exec: ExecCommand,
        connection: OwnedFd,
    },
    Drain,
    /// The feed cannot be followed any more. Only a new process can be in step again.
    Broken(FeedError),
}

#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    #[error("the feed from the supervisor broke: {0}")]
    Socket(#[from] io::Error),
    #[error("the supervisor sent settings this keeper does not understand: {0}")]
    Options(#[from] serde_json::Error),
    #[error("the supervisor sent a name of this node that is not valid: {0}")]
    Node(#[from] NameError),
    #[error("the supervisor sent a change that does not fit: {0}")]
    Change(#[from] TableError),
}

/// Channel for the answer to one question. It may come late, and others before it.
#[derive(Debug)]
pub struct ReplySender {
    tag: u64,
    up: SyncSender<ToSupervisor>,
}

impl ReplySender {
    /// Sends the answer. The supervisor may have closed the feed, whose end arrives next. Or it
    /// reads so little that it has stopped waiting.
    pub fn send(self, text: String) {
        let _ = self.up.try_send(ToSupervisor::Answer { tag: self.tag, text });
    }
}

/// Maximum number of frames that wait to be written to the supervisor: more than its open
/// questions.
const UP_MAX: usize = 128;

/// Maximum number of frames that are read and not acted on. While a large import is committed, the
/// frames behind it are read for leases among them.
const READ_MAX: usize = 64;

/// An item that was read.
enum FeedItem {
    Frame(FromSupervisor),
    Commit {
        revision: u64,
        /// By `PlacementLease::commit_read`.
        number: u64,
    },
    Exec(ExecCommand, OwnedFd),
    /// The feed has ended.
    End(Result<(), FeedError>),
}

/// Reads until the end, and passes leases of the node on at once.
fn read(
    stream: &mut FdStream,
    authority: &PlacementLease,
    items: &SyncSender<FeedItem>,
) -> Result<(), FeedError> {
    // Nothing runs before the first commit, so moves in it need not be noted.
    let mut is_begun = false;
    while let Some(frame) = feed::read::<FromSupervisor>(stream)? {
        let item = match frame {
            FromSupervisor::Authority { until_ns } => {
                authority.extend(until_ns);
                continue;
            }
            FromSupervisor::Options(options) => {
                authority.join(options.get("node").and_then(|node| node.as_str()))?;
                FeedItem::Frame(FromSupervisor::Options(options))
            }
            FromSupervisor::Apply(changes) => {
                if is_begun {
                    authority.note(&changes);
                }
                FeedItem::Frame(FromSupervisor::Apply(changes))
            }
            FromSupervisor::Commit { revision } => {
                is_begun = true;
                FeedItem::Commit { revision, number: authority.commit_read() }
            }
            FromSupervisor::Exec(exec) => match stream.take_passed() {
                Some(connection) => FeedItem::Exec(exec, connection),
                None => continue,
            },
            other => FeedItem::Frame(other),
        };
        if items.send(item).is_err() {
            break;
        }
    }
    Ok(())
}

/// The known records as they come in.
struct FeedFollower {
    authority: PlacementLease,
    table: Arc<RwLock<RecordIndex>>,
    events: mpsc::Sender<FeedEvent>,
    up: SyncSender<ToSupervisor>,
    kept: BTreeSet<SiteName>,
    kept_changed: bool,
    sites_gone: bool,
}

impl FeedFollower {
    /// Acts on items, until the feed ends.
    fn run(&mut self, items: &Receiver<FeedItem>) -> Result<(), FeedError> {
        let mut waiting: Vec<RecordChange> = Vec::new();
        // Nobody reads the table until the first commit, so its first hundred thousand records need
        // not wait.
        let mut committed = false;
        while let Ok(item) = items.recv() {
            let event = match item {
                FeedItem::End(end) => return end,
                FeedItem::Exec(exec, connection) => FeedEvent::Exec { exec, connection },
                FeedItem::Commit { revision, number } => {
                    self.apply(std::mem::take(&mut waiting))?;
                    committed = true;
                    if !self.commit(revision, number) {
                        return Ok(());
                    }
                    continue;
                }
                FeedItem::Frame(FromSupervisor::Apply(changes)) if committed => {
                    waiting.extend(changes);
                    continue;
                }
                FeedItem::Frame(FromSupervisor::Apply(changes)) => {
                    self.apply(changes)?;
                    continue;
                }
                FeedItem::Frame(FromSupervisor::Options(options)) => {
                    FeedEvent::Options(Box::new(serde_json::from_value(options)?))
                }
                FeedItem::Frame(FromSupervisor::Drain) => return Ok(()),
                FeedItem::Frame(FromSupervisor::Ask { tag, question }) => {
                    FeedEvent::Ask { question, answer: ReplySender { tag, up: self.up.clone() } }
                }
                // The reader handles these, or they are the edge's.
                FeedItem::Frame(
                    FromSupervisor::Commit { .. }
                    | FromSupervisor::Exec(_)
                    | FromSupervisor::Authority { .. }
                    | FromSupervisor::ReopenLogs
                    | FromSupervisor::Placed { .. }
                    | FromSupervisor::Leaving { .. }
                    | FromSupervisor::Wakes { .. }
                    | FromSupervisor::Vouch { .. }
                    | FromSupervisor::VouchAnswer { .. },
                ) => continue,
            };
            if self.events.blocking_send(event).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns once the main loop has acted on it. False if it has ended.
    fn commit(&mut self, revision: u64, number: u64) -> bool {
        self.table.write().set_revision(revision);
        let (done, acted) = oneshot::channel();
        let kept = std::mem::take(&mut self.kept_changed).then(|| self.kept.clone());
        let gone = std::mem::take(&mut self.sites_gone);
        if self.events.blocking_send(FeedEvent::Committed { done, kept, gone }).is_err()
            || acted.blocking_recv().is_err()
        {
            return false;
        }
        self.authority.commit_done(number);
        self.up.send(ToSupervisor::Ready { revision }).is_ok()
    }

    /// Applies changes, which become visible together.
    fn apply(&mut self, changes: Vec<RecordChange>) -> Result<(), FeedError> {
        let mut table = self.table.write();
        for change in changes {
            self.kept_changed |= note_kept(&mut self.kept, &change);
            self.sites_gone |= matches!(change, RecordChange::DropSite(_));
            // Secrets that are useless here are not kept.
            if matches!(change, RecordChange::PutTicketKeys(_)) {
                continue;
            }
            table.apply(change)?;
        }
        Ok(())
    }
}

/// Returns true if the set of sites that always run has changed.
fn note_kept(kept: &mut BTreeSet<SiteName>, change: &RecordChange) -> bool {
    match change {
        RecordChange::PutSite(site) => match &site.backend {
            Backend::App(app) if app.min == Some(1) => kept.insert(site.name.clone()),
            _ => kept.remove(&site.name),
        },
        RecordChange::DropSite(name) => kept.remove(name),
        _ => false,
    }
}

/// Starts following, and writing back, each on a thread of its own. The main loop learns of the end
/// as `Drain` or `Broken`.
pub fn start(
    stream: UnixStream,
    table: Arc<RwLock<RecordIndex>>,
    authority: PlacementLease,
    events: mpsc::Sender<FeedEvent>,
) -> io::Result<()> {
    let mut back = stream.try_clone()?;
    let (up, answers) = sync_channel::<ToSupervisor>(UP_MAX);
    let write = move || {
        // A feed that cannot be written to has ended, which its reader reports.
        while let Ok(frame) = answers.recv()
            && feed::write(&mut back, &frame).is_ok()
        {}
    };
    std::thread::Builder::new().name("keeper-answers".into()).spawn(write)?;
    let (queue, items) = sync_channel::<FeedItem>(READ_MAX);
    let (mut stream, of_reader) = (FdStream::new(stream), authority.clone());
    let reading = move || {
        let end = read(&mut stream, &of_reader, &queue);
        // The acting thread may have ended first.
        let _ = queue.send(FeedItem::End(end));
    };
    std::thread::Builder::new().name("keeper-feed".into()).spawn(reading)?;
    let follow = move || {
        let told = events.clone();
        let mut following = FeedFollower {
            authority,
            table,
            events,
            up,
            kept: BTreeSet::new(),
            kept_changed: false,
            sites_gone: false,
        };
        let last = match following.run(&items) {
            Ok(()) => FeedEvent::Drain,
            Err(error) => FeedEvent::Broken(error),
        };
        // The main loop may have ended first, on a signal.
        let _ = told.blocking_send(last);
    };
    std::thread::Builder::new().name("keeper-records".into()).spawn(follow)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_that_always_run_are_noted_as_they_come_and_go() {
        let put = |name: &str, backend: &str| {
            let text = format!(r#"{{"name":"{name}","tenant":"t","hosts":["{name}"],"backend":{backend}}}"#);
            RecordChange::PutSite(Box::new(serde_json::from_str(&text).unwrap()))
        };
        let app = |min: u32| format!(r#"{{"kind":"app","command":["x"],"directory":"a","min":{min}}}"#);
        let mut kept = BTreeSet::new();
        assert!(note_kept(&mut kept, &put("a", &app(1))));
        assert!(!note_kept(&mut kept, &put("a", &app(1))), "the same again");
        assert!(!note_kept(&mut kept, &put("b", &app(0))));
        assert!(note_kept(&mut kept, &put("a", &app(0))));
        note_kept(&mut kept, &put("c", &app(1)));
        assert!(note_kept(&mut kept, &put("c", r#"{"kind":"static","root":"w"}"#)));
        note_kept(&mut kept, &put("d", &app(1)));
        assert!(note_kept(&mut kept, &RecordChange::DropSite(SiteName::new("d").unwrap())));
        assert!(kept.is_empty());
    }
}

//! The keeper's end of the feed: records into the table, everything else to the main loop.
//!
//! It reads on a thread of its own, and acts on what it read on another, so that a large import never holds up a verb for
//! longer than its changes take to apply, nor the node's authority at all: that is handed on as it is read. What the
//! changes before it move away is held back first. Not here: the frames (`cmdb::feed`), the table (`cmdb::table`).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use nagaya_cmdb::feed::{self, Down, Question, Up};
use nagaya_cmdb::instance::Exec;
use nagaya_cmdb::{Backend, Change, NameError, SiteName, Table, TableError};
use parking_lot::RwLock;
use tokio::sync::{mpsc, oneshot};

use crate::authority::Authority;
use crate::options::Options;
use crate::passed::Receiving;

/// What the main loop must act on.
#[derive(Debug)]
pub enum Event {
    Options(Box<Options>),
    /// The table has changed. To be answered once that is acted on.
    Committed {
        done: oneshot::Sender<()>,
        /// The sites whose record says that they always run, if they are others than before.
        kept: Option<BTreeSet<SiteName>>,
        /// Some sites are not there any more.
        gone: bool,
    },
    Ask {
        question: Question,
        answer: Answerer,
    },
    /// A command for an instance, and the connection of who waits for it.
    Exec {
        exec: Exec,
        connection: OwnedFd,
    },
    Drain,
    /// The feed cannot be followed any more; only a new process can be in step again.
    Broken(FeedError),
}

#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    #[error("the feed from the supervisor broke: {0}")]
    Socket(#[from] io::Error),
    #[error("the supervisor sent settings this keeper does not understand: {0}")]
    Options(#[from] serde_json::Error),
    #[error("the supervisor sent a name of this node that is none: {0}")]
    Node(#[from] NameError),
    #[error("the supervisor sent a change that does not fit: {0}")]
    Change(#[from] TableError),
}

/// Where the answer to one question goes. It may come late, and others before it.
#[derive(Debug)]
pub struct Answerer {
    tag: u64,
    up: SyncSender<Up>,
}

impl Answerer {
    /// Whoever asked may have closed the feed, whose end arrives next; or it reads so little that it has stopped waiting.
    pub fn send(self, text: String) {
        let _ = self.up.try_send(Up::Answer { tag: self.tag, text });
    }
}

/// Frames that may wait to be written to the supervisor: more than it has questions open.
const UP_MAX: usize = 128;

/// Frames that may be read and not acted on: while a commit of a large import takes its time, those behind it are read for
/// the authority among them.
const READ_MAX: usize = 64;

/// What was read.
enum Item {
    Frame(Down),
    Commit {
        revision: u64,
        /// By `Authority::commit_read`.
        number: u64,
    },
    Exec(Exec, OwnedFd),
    /// The feed has ended.
    End(Result<(), FeedError>),
}

/// Reads until the end, and hands the node's authority on at once.
fn read(stream: &mut Receiving, authority: &Authority, items: &SyncSender<Item>) -> Result<(), FeedError> {
    // Nothing runs before the first commit, so what that moves away need not be noted.
    let mut is_begun = false;
    while let Some(frame) = feed::read::<Down>(stream)? {
        let item = match frame {
            Down::Authority { until_ns } => {
                authority.extend(until_ns);
                continue;
            }
            Down::Options(options) => {
                authority.join(options.get("node").and_then(|node| node.as_str()))?;
                Item::Frame(Down::Options(options))
            }
            Down::Apply(changes) => {
                if is_begun {
                    authority.note(&changes);
                }
                Item::Frame(Down::Apply(changes))
            }
            Down::Commit { revision } => {
                is_begun = true;
                Item::Commit { revision, number: authority.commit_read() }
            }
            Down::Exec(exec) => match stream.take_passed() {
                Some(connection) => Item::Exec(exec, connection),
                None => continue,
            },
            other => Item::Frame(other),
        };
        if items.send(item).is_err() {
            break;
        }
    }
    Ok(())
}

/// What is known of the records as they come in.
struct Following {
    authority: Authority,
    table: Arc<RwLock<Table>>,
    events: mpsc::Sender<Event>,
    up: SyncSender<Up>,
    kept: BTreeSet<SiteName>,
    kept_changed: bool,
    sites_gone: bool,
}

impl Following {
    /// Acts on what was read, until the feed ends.
    fn run(&mut self, items: &Receiver<Item>) -> Result<(), FeedError> {
        let mut waiting: Vec<Change> = Vec::new();
        // Until the first commit nobody reads the table, so its first hundred thousand records need not wait.
        let mut committed = false;
        while let Ok(item) = items.recv() {
            let event = match item {
                Item::End(end) => return end,
                Item::Exec(exec, connection) => Event::Exec { exec, connection },
                Item::Commit { revision, number } => {
                    self.apply(std::mem::take(&mut waiting))?;
                    committed = true;
                    if !self.commit(revision, number) {
                        return Ok(());
                    }
                    continue;
                }
                Item::Frame(Down::Apply(changes)) if committed => {
                    waiting.extend(changes);
                    continue;
                }
                Item::Frame(Down::Apply(changes)) => {
                    self.apply(changes)?;
                    continue;
                }
                Item::Frame(Down::Options(options)) => {
                    Event::Options(Box::new(serde_json::from_value(options)?))
                }
                Item::Frame(Down::Drain) => return Ok(()),
                Item::Frame(Down::Ask { tag, question }) => {
                    Event::Ask { question, answer: Answerer { tag, up: self.up.clone() } }
                }
                // The reader has these, or they are the edge's.
                Item::Frame(
                    Down::Commit { .. }
                    | Down::Exec(_)
                    | Down::Authority { .. }
                    | Down::ReopenLogs
                    | Down::Placed { .. }
                    | Down::Leaving { .. }
                    | Down::Wakes { .. }
                    | Down::Vouch { .. }
                    | Down::VouchAnswer { .. },
                ) => continue,
            };
            if self.events.blocking_send(event).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns once the main loop has acted on it. False: it has ended.
    fn commit(&mut self, revision: u64, number: u64) -> bool {
        self.table.write().set_revision(revision);
        let (done, acted) = oneshot::channel();
        let kept = std::mem::take(&mut self.kept_changed).then(|| self.kept.clone());
        let gone = std::mem::take(&mut self.sites_gone);
        if self.events.blocking_send(Event::Committed { done, kept, gone }).is_err()
            || acted.blocking_recv().is_err()
        {
            return false;
        }
        self.authority.commit_done(number);
        self.up.send(Up::Ready { revision }).is_ok()
    }

    /// All of them become visible together.
    fn apply(&mut self, changes: Vec<Change>) -> Result<(), FeedError> {
        let mut table = self.table.write();
        for change in changes {
            self.kept_changed |= note_kept(&mut self.kept, &change);
            self.sites_gone |= matches!(change, Change::DropSite(_));
            // Secrets that are of no use here are not kept.
            if matches!(change, Change::PutTicketKeys(_)) {
                continue;
            }
            table.apply(change)?;
        }
        Ok(())
    }
}

/// True: a site that always runs is one no more, or another is.
fn note_kept(kept: &mut BTreeSet<SiteName>, change: &Change) -> bool {
    match change {
        Change::PutSite(site) => match &site.backend {
            Backend::App(app) if app.min == Some(1) => kept.insert(site.name.clone()),
            _ => kept.remove(&site.name),
        },
        Change::DropSite(name) => kept.remove(name),
        _ => false,
    }
}

/// Starts following, and writing what goes back, each on a thread of its own. The main loop learns of the end as `Drain` or
/// `Broken`.
pub fn start(
    stream: UnixStream,
    table: Arc<RwLock<Table>>,
    authority: Authority,
    events: mpsc::Sender<Event>,
) -> io::Result<()> {
    let mut back = stream.try_clone()?;
    let (up, answers) = sync_channel::<Up>(UP_MAX);
    let write = move || {
        // A feed that cannot be written to has ended; who reads it says so.
        while let Ok(frame) = answers.recv()
            && feed::write(&mut back, &frame).is_ok()
        {}
    };
    std::thread::Builder::new().name("keeper-answers".into()).spawn(write)?;
    let (queue, items) = sync_channel::<Item>(READ_MAX);
    let (mut stream, of_reader) = (Receiving::new(stream), authority.clone());
    let reading = move || {
        let end = read(&mut stream, &of_reader, &queue);
        // Who acts on it may have ended first.
        let _ = queue.send(Item::End(end));
    };
    std::thread::Builder::new().name("keeper-feed".into()).spawn(reading)?;
    let follow = move || {
        let told = events.clone();
        let mut following = Following {
            authority,
            table,
            events,
            up,
            kept: BTreeSet::new(),
            kept_changed: false,
            sites_gone: false,
        };
        let last = match following.run(&items) {
            Ok(()) => Event::Drain,
            Err(error) => Event::Broken(error),
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
            Change::PutSite(Box::new(serde_json::from_str(&text).unwrap()))
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
        assert!(note_kept(&mut kept, &Change::DropSite(SiteName::new("d").unwrap())));
        assert!(kept.is_empty());
    }
}

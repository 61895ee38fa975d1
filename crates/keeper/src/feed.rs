//! The keeper's end of the feed: records into the table, everything else to the main loop.
//!
//! It reads on a thread of its own, so that a large import never holds up a verb for longer than its
//! changes take to apply. Not here: the frames (`cmdb::feed`), the table (`cmdb::table`).

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nagaya_cmdb::feed::{self, Down, Question, Up};
use nagaya_cmdb::{Change, Table, TableError};
use parking_lot::RwLock;
use tokio::sync::{mpsc, oneshot};

use crate::options::Options;

/// What the main loop must act on.
#[derive(Debug)]
pub enum Event {
    Options(Box<Options>),
    /// The table has changed. To be answered once that is acted on.
    Committed {
        done: oneshot::Sender<()>,
    },
    Ask {
        question: Question,
        answer: oneshot::Sender<String>,
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
    #[error("the supervisor sent a change that does not fit: {0}")]
    Change(#[from] TableError),
}

/// Follows the feed until it ends. The main loop learns of the end as `Drain` or `Broken`.
pub fn follow(mut stream: UnixStream, table: &RwLock<Table>, events: &mpsc::Sender<Event>) {
    let last = match run(&mut stream, table, events) {
        Ok(()) => Event::Drain,
        Err(error) => Event::Broken(error),
    };
    // The main loop may have ended first, on a signal.
    let _ = events.blocking_send(last);
}

fn run(
    stream: &mut UnixStream,
    table: &RwLock<Table>,
    events: &mpsc::Sender<Event>,
) -> Result<(), FeedError> {
    let mut waiting: Vec<Change> = Vec::new();
    // Until the first commit nobody reads the table, so its first hundred thousand records need not wait.
    let mut committed = false;
    while let Some(frame) = feed::read::<Down>(stream)? {
        let event = match frame {
            Down::Options(options) => Event::Options(Box::new(serde_json::from_value(options)?)),
            Down::Apply(changes) if committed => {
                waiting.extend(changes);
                continue;
            }
            Down::Apply(changes) => {
                apply(&mut table.write(), changes)?;
                continue;
            }
            Down::Commit { revision } => {
                let mut table = table.write();
                apply(&mut table, std::mem::take(&mut waiting))?;
                table.set_revision(revision);
                drop(table);
                committed = true;
                let (done, acted) = oneshot::channel();
                if events.blocking_send(Event::Committed { done }).is_err() || acted.blocking_recv().is_err()
                {
                    return Ok(());
                }
                feed::write(stream, &Up::Ready { revision })?;
                continue;
            }
            Down::Drain => return Ok(()),
            Down::ReopenLogs => continue,
            Down::Ask { tag, question } => {
                let (answer, answered) = oneshot::channel();
                if events.blocking_send(Event::Ask { question, answer }).is_err() {
                    return Ok(());
                }
                let Ok(text) = answered.blocking_recv() else { return Ok(()) };
                feed::write(stream, &Up::Answer { tag, text })?;
                continue;
            }
        };
        if events.blocking_send(event).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn apply(table: &mut Table, changes: Vec<Change>) -> Result<(), FeedError> {
    for change in changes {
        table.apply(change)?;
    }
    Ok(())
}

/// Starts following on a thread of its own.
pub fn start(stream: UnixStream, table: Arc<RwLock<Table>>, events: mpsc::Sender<Event>) -> io::Result<()> {
    let follow = move || follow(stream, &table, &events);
    std::thread::Builder::new().name("keeper-feed".into()).spawn(follow)?;
    Ok(())
}

//! The keeper's process: its start, the feed from the supervisor, its end.
//!
//! One thread runs everything but what blocks. Not here: connections of edges (`connection`), what
//! the verbs do (`verbs`).

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::RecordIndex;
use nagaya_records::feed::FeedQuery;
use parking_lot::RwLock;
use tokio::io::Interest;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use crate::authority::{NO_WARDEN, PlacementLease};
use crate::connection::accept;
use crate::context::{KeeperContext, SetupError};
use crate::feed::{self, FeedError, FeedEvent, ReplySender};
use crate::options::KeeperConfig;
use crate::sandbox::Launcher;
use crate::verbs::Verbs;
use crate::{cells, fault, instances, sched_slice, sys};

/// Maximum number of feed messages that wait.
const EVENTS_MAX: usize = 64;

/// Time in which everything that runs must end when the keeper ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two searches for cells that nobody uses any more.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Everything that the supervisor hands to the keeper's process.
#[derive(Debug)]
pub struct KeeperStart {
    /// A bound and listening Unix socket of type `SOCK_SEQPACKET`.
    pub listener: OwnedFd,
    /// The feed from the supervisor (`records::feed`).
    pub feed: UnixStream,
    /// The process was started without transparent huge pages, for its launcher. The keeper itself
    /// may use them, and the programs it starts may, too.
    pub small_pages: bool,
}

#[derive(Debug, thiserror::Error)]
enum KeeperServeError {
    #[error("cannot set up the keeper's process: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Feed(#[from] FeedError),
    #[error("the supervisor ended before it sent settings and records")]
    NoStart,
    #[error("the launcher of sandboxes has ended, and all applications with it")]
    NoLauncher,
    #[error("the warden has ended: placed applications could no longer be frozen in time")]
    NoWarden,
}

/// The main function of `nagaya keeper`. It ends when the feed asks for it or ends, or on
/// `SIGTERM`. It returns once everything it started has ended.
pub fn run(start: KeeperStart) -> ExitCode {
    match serve(start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}: the keeper ends: {error}", fault::START);
            ExitCode::FAILURE
        }
    }
}

fn serve(start: KeeperStart) -> Result<(), KeeperServeError> {
    // Leaves the session of the terminal that the node may have been started at. Programs of
    // tenants share this session, and they could type into its controlling terminal. The call fails
    // only if this is already a session's first process.
    let _ = rustix::process::setsid();
    // Must come before anything starts a thread.
    let launcher = start_launcher();
    if start.small_pages {
        rustix::thread::disable_transparent_huge_pages(false).map_err(io::Error::from)?;
    }
    sched_slice::request_short_slice();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let table = Arc::new(RwLock::new(RecordIndex::new()));
    let (events, mut incoming) = mpsc::channel(EVENTS_MAX);
    let authority = PlacementLease::default();
    feed::start(start.feed, Arc::clone(&table), authority.clone(), events)?;
    rustix::io::ioctl_fionbio(&start.listener, true).map_err(io::Error::from)?;
    LocalSet::new().block_on(&runtime, async {
        let mut terminate = signal(SignalKind::terminate())?;
        // A terminal's Ctrl-C reaches the whole process group, and only the supervisor acts on it.
        // A handler keeps these two signals from ending the process.
        let _ignored = (signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?);
        let Some(verbs) = begin(&mut incoming, (table, authority), launcher.clone()).await? else {
            return Err(KeeperServeError::NoStart);
        };
        let listener = nagaya_keeper_api::watch(start.listener, Interest::READABLE)?;
        let trying = Rc::clone(&verbs);
        spawn_local(async move { trying.try_sandbox().await });
        let result = tokio::select! {
            result = follow(&verbs, &mut incoming) => result,
            () = accept(&verbs, &listener) => Ok(()),
            () = sweep(&verbs) => Ok(()),
            () = verbs.context.expire_priorities() => Ok(()),
            () = instances::keep_time(&verbs.instances) => Ok(()),
            () = instances::watch_restarts(&verbs.instances) => Ok(()),
            () = verbs.follow_roots() => Ok(()),
            () = outlive(launcher) => Err(KeeperServeError::NoLauncher),
            () = instances::follow_authority(&verbs.instances) => Err(KeeperServeError::NoWarden),
            () = instances::watch_pressure(&verbs.instances) => Ok(()),
            () = instances::keep_images(&verbs.instances) => Ok(()),
            _ = terminate.recv() => Ok(()),
        };
        if !verbs.context.processes.close(CLOSE_TIMEOUT).await {
            tracing::error!("{}: some processes survived SIGKILL for {CLOSE_TIMEOUT:?}", fault::UNKILLABLE);
        }
        instances::settle_logs(&verbs.context);
        result
    })
}

/// Waits for settings and the first complete set of records.
async fn begin(
    incoming: &mut mpsc::Receiver<FeedEvent>,
    (table, authority): (Arc<RwLock<RecordIndex>>, PlacementLease),
    launcher: Option<Arc<Launcher>>,
) -> Result<Option<Rc<Verbs>>, KeeperServeError> {
    let mut verbs: Option<Rc<Verbs>> = None;
    while let Some(event) = incoming.recv().await {
        match (event, &verbs) {
            (FeedEvent::Options(options), None) => {
                let known = (Arc::clone(&table), authority.clone());
                verbs = Some(start_verbs(*options, known, launcher.clone())?);
            }
            (FeedEvent::Options(options), Some(verbs)) => verbs.set_options(*options),
            (FeedEvent::Committed { done, kept, .. }, Some(begun)) => {
                begun.instances.table.set_always_on(kept.unwrap_or_default());
                begun.records_changed();
                let _ = done.send(());
                return Ok(verbs);
            }
            (FeedEvent::Ask { question, answer }, Some(verbs)) => {
                answer_to(verbs, question, answer);
            }
            // The client sees its connection close, which is answer enough.
            (FeedEvent::Exec { .. }, _) => {}
            (FeedEvent::Committed { .. } | FeedEvent::Ask { .. } | FeedEvent::Drain, _) => return Ok(None),
            (FeedEvent::Broken(error), _) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Starts the launcher. Returns `None` without root, or where it cannot run: then no application
/// runs, and everything else does.
fn start_launcher() -> Option<Arc<Launcher>> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    match Launcher::start() {
        Ok(launcher) => Some(Arc::new(launcher)),
        Err(error) => {
            tracing::error!("{}: {error}", error.code());
            None
        }
    }
}

/// Returns once the launcher has ended, and everything it made with it. Only a new keeper can start
/// another.
async fn outlive(launcher: Option<Arc<Launcher>>) {
    if let Some(launcher) = &launcher
        && let Ok(watched) = nagaya_keeper_api::watch(launcher.pidfd(), Interest::READABLE)
        && watched.readable().await.is_ok()
    {
        return;
    }
    pending().await
}

fn start_verbs(
    options: KeeperConfig,
    (table, authority): (Arc<RwLock<RecordIndex>>, PlacementLease),
    launcher: Option<Arc<Launcher>>,
) -> Result<Rc<Verbs>, KeeperServeError> {
    if let Err(error) = authority.begin(launcher.as_deref()) {
        tracing::error!("{NO_WARDEN}: no application of the cluster runs on this node: {error}");
    }
    let context = KeeperContext::new(options, table, launcher, authority)?;
    let verbs = Verbs::new(context)?;
    instances::await_images(&verbs.instances);
    if verbs.context.is_root() {
        sys::forbid_dumping()?;
    } else {
        tracing::warn!(
            "the keeper is not root: all sites run under its own uid and can reach each other's files"
        );
    }
    let fence = verbs.context.cells().fence();
    tracing::info!(fence = fence.as_str(), "the keeper starts");
    if fence == cells::ProcessTracking::ProcessGroup {
        tracing::warn!(
            "{}: no cgroup can be used: a program that detaches itself outlives its request",
            fault::NO_FENCE
        );
    }
    Ok(verbs)
}

/// Acts on the feed until the feed asks for the end, or itself ends.
async fn follow(verbs: &Rc<Verbs>, incoming: &mut mpsc::Receiver<FeedEvent>) -> Result<(), KeeperServeError> {
    while let Some(event) = incoming.recv().await {
        match event {
            FeedEvent::Options(options) => verbs.set_options(*options),
            FeedEvent::Committed { done, kept, gone } => {
                if let Some(kept) = kept {
                    verbs.instances.table.set_always_on(kept);
                }
                verbs.records_changed();
                if gone {
                    // Includes sites that were never awake here: their images came from another
                    // node, or from an earlier keeper.
                    instances::collect(&verbs.context, &verbs.instances.images);
                    instances::collect_logs(&verbs.context);
                }
                let _ = done.send(());
            }
            FeedEvent::Ask { question, answer } => {
                answer_to(verbs, question, answer);
            }
            FeedEvent::Exec { exec, connection } => {
                let verbs = Rc::clone(verbs);
                spawn_local(async move { instances::exec(&verbs.instances, exec, connection).await });
            }
            FeedEvent::Drain => return Ok(()),
            FeedEvent::Broken(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Answers a question at once, or as soon as the answer is known or the work done.
fn answer_to(verbs: &Rc<Verbs>, question: FeedQuery, answer: ReplySender) {
    let text = match question {
        FeedQuery::Metrics => verbs.encode_metrics(),
        FeedQuery::Status => verbs.status(),
        FeedQuery::Cells => {
            let verbs = Rc::clone(verbs);
            spawn_local(async move { answer.send(verbs.show_cells().await) });
            return;
        }
        FeedQuery::Instances => {
            let verbs = Rc::clone(verbs);
            spawn_local(async move { answer.send(instances::list(&verbs.instances).await.to_string()) });
            return;
        }
        FeedQuery::Load => {
            let verbs = Rc::clone(verbs);
            spawn_local(async move { answer.send(instances::load(&verbs.instances).await) });
            return;
        }
        FeedQuery::Busy => instances::busy(&verbs.instances),
        FeedQuery::Instance { site, act } => {
            let verbs = Rc::clone(verbs);
            spawn_local(async move {
                answer.send(instances::do_act(&verbs.instances, &site, act).await.to_string());
            });
            return;
        }
        // The edge answers questions about requests.
        FeedQuery::Explain { .. } | FeedQuery::FetchImage { .. } | FeedQuery::Requests => "null".into(),
    };
    answer.send(text);
}

/// Removes cells that nobody uses any more, from time to time. Never returns.
async fn sweep(verbs: &Verbs) {
    sleep(SWEEP_INTERVAL).await;
    // A keeper that was killed just before this one began may not have been gone then. If no worker
    // is free, the next keeper does it.
    let _ = verbs.context.on_worker(|| Ok(cells::KeeperCells::clean_up_after_others())).await;
    loop {
        sleep(SWEEP_INTERVAL).await;
        verbs.context.cells().sweep();
        verbs.root_watch().drop_idle(Instant::now());
        let root_mounts = Arc::clone(verbs.root_mounts());
        // If no worker is free, the next round does it.
        let drop_idle = move || {
            root_mounts.drop_idle(Instant::now());
            Ok(())
        };
        let _ = verbs.context.on_worker(drop_idle).await;
    }
}

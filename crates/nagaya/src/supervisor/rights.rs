//! First steps of a process of the node: it takes over its inheritance, and gives up forbidden
//! rights.
//!
//! Not here: choosing the identity (`identity`), starting the process (`child`).

use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use nagaya_base::AnchoredClock;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::child::ProcessRole;
use super::{call_filter, edge_root};
use crate::inherit::{FdTaker, InheritError, InheritedFds, InheritedPeers, described};
use crate::logging::{self, LogSink};

#[derive(Debug, thiserror::Error)]
pub enum RightsError {
    #[error(transparent)]
    Inherit(#[from] InheritError),
    #[error("{what}: {error}")]
    System { what: &'static str, error: std::io::Error },
    #[error("the supervisor has ended already")]
    Orphaned,
    #[error("the supervisor described no {0} socket")]
    NoSocket(&'static str),
}

pub(super) fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> RightsError {
    move |error| RightsError::System { what, error: error.into() }
}

/// `nagaya edge`.
pub fn run_edge() -> ExitCode {
    match begin_edge() {
        Ok(start) => nagaya_edge::run(start),
        Err(error) => refuse(ProcessRole::Edge, &error),
    }
}

/// `nagaya keeper`.
pub fn run_keeper() -> ExitCode {
    match begin_keeper() {
        Ok(start) => nagaya_keeper::run(start),
        Err(error) => refuse(ProcessRole::Keeper, &error),
    }
}

fn refuse(role: ProcessRole, error: &RightsError) -> ExitCode {
    if matches!(error, RightsError::Inherit(InheritError::NotInherited)) {
        eprintln!("nagaya {role}: {error}");
    } else {
        tracing::error!(code = "NGY0504", "the {role} process does not run: {error}");
    }
    ExitCode::FAILURE
}

fn begin_edge() -> Result<nagaya_edge::EdgeStart, RightsError> {
    let inherited = begin()?;
    let mut taker = FdTaker::default();
    // Before it leaves the node's root: the inheritance is found in /proc.
    let start = edge_start(&inherited, &mut taker)?;
    // This also loads the page with which the kernel provides the time without a call.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    if let Some(root) = inherited.root {
        let root = taker.take(root)?;
        edge_root::enter(&root).map_err(system("the edge's own root directory cannot be entered"))?;
    }
    give_up(inherited.identity)?;
    tie(&inherited)?;
    call_filter::install().map_err(system("the filter of system calls cannot be put on"))?;
    Ok(start)
}

fn begin_keeper() -> Result<nagaya_keeper::KeeperStart, RightsError> {
    let inherited = begin()?;
    tie(&inherited)?;
    keeper_start(&inherited, FdTaker::default())
}

fn begin() -> Result<InheritedFds, RightsError> {
    let inherited = described()?;
    logging::start(&inherited.log_level, inherited.log_json, LogSink::standard_error());
    raise_open_files().map_err(system("the limit of open files cannot be raised"))?;
    Ok(inherited)
}

/// Makes this process end with its supervisor. A change of uid resets that, so it comes after.
fn tie(inherited: &InheritedFds) -> Result<(), RightsError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(system("the process cannot be tied to its supervisor"))?;
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent == Some(inherited.supervisor) { Ok(()) } else { Err(RightsError::Orphaned) }
}

/// Raises the limit: connections and files are descriptors; the soft limit is for programs that
/// still use `select`.
fn raise_open_files() -> rustix::io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
}

/// Changes from root to a user that owns nothing, for good.
pub(super) fn give_up(identity: Option<(u32, u32)>) -> Result<(), RightsError> {
    if let Some((uid, gid)) = identity {
        drop_bounding_set().map_err(system("the capability bounding set cannot be emptied"))?;
        setgroups(&[]).map_err(system("supplementary groups cannot be dropped"))?;
        let gid = Gid::from_raw(gid);
        setresgid(gid, gid, gid).map_err(system("the group cannot be taken"))?;
        let uid = Uid::from_raw(uid);
        setresuid(uid, uid, uid).map_err(system("the user cannot be taken"))?;
    }
    rustix::thread::clear_ambient_capability_set()
        .map_err(system("ambient capabilities cannot be dropped"))?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).map_err(system("capabilities cannot be dropped"))?;
    rustix::thread::set_no_new_privs(true).map_err(system("no_new_privs cannot be set"))?;
    // No process, not even of the same uid, can read keys from its memory.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(system("the process cannot be made non-dumpable"))
}

fn drop_bounding_set() -> rustix::io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // A capability that this kernel does not know cannot be held, either.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn edge_start(inherited: &InheritedFds, taker: &mut FdTaker) -> Result<nagaya_edge::EdgeStart, RightsError> {
    let feed = UnixStream::from(taker.take(inherited.feed)?);
    let mut listeners = Vec::with_capacity(inherited.listeners.len());
    for listener in &inherited.listeners {
        let mut sockets = Vec::with_capacity(listener.sockets.len());
        for fd in &listener.sockets {
            sockets.push(taker.take(*fd)?);
        }
        listeners.push(nagaya_edge::Listener {
            address: listener.address.clone(),
            tls: listener.tls,
            proxies: listener.proxies.clone(),
            sockets,
        });
    }
    let tickets = inherited.tickets.map(|fd| taker.take(fd)).transpose()?;
    let spool = inherited.spool.map(|fd| taker.take(fd)).transpose()?;
    let peers = inherited.peers.as_ref().map(|peers| peer_sockets(peers, taker)).transpose()?;
    Ok(nagaya_edge::EdgeStart {
        listeners,
        feed,
        tickets,
        spool,
        anchored_clock: AnchoredClock::at(inherited.now_us),
        peers,
    })
}

fn peer_sockets(
    inherited: &InheritedPeers,
    taker: &mut FdTaker,
) -> Result<nagaya_edge::PeerSockets, RightsError> {
    let streams = inherited.streams.iter().map(|fd| taker.take(*fd)).collect::<Result<_, _>>()?;
    Ok(nagaya_edge::PeerSockets { streams, probes: taker.take(inherited.probes)? })
}

fn keeper_start(
    inherited: &InheritedFds,
    mut taker: FdTaker,
) -> Result<nagaya_keeper::KeeperStart, RightsError> {
    let feed = UnixStream::from(taker.take(inherited.feed)?);
    let listener = taker.take(inherited.keeper.ok_or(RightsError::NoSocket("keeper"))?)?;
    Ok(nagaya_keeper::KeeperStart { listener, feed, small_pages: inherited.small_pages })
}

//! What keeps a tenant's CGI programs and PHP workers apart from all others: an enclosure, which is a set of namespaces of
//! its own. It is made for a tenant's first program and used by all that follow.
//!
//! Programs see the node's files, with a `/tmp`, `/var/tmp` and `/dev/shm` of their tenant's, and a `/proc` in which the
//! processes of other users are not. Their network is their own: the relay makes their connections outside, and passes on
//! those to services of the node that all tenants may use. Nobody lives in an enclosure to hold it: it is descriptors
//! of the keeper's. All of it blocks: call it from `workers`. Not here: sandboxes of applications (`sandbox`), entering
//! (`sys`).

mod files;
mod network;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nagaya_cmdb::{Tenant, TenantName};
use nix::sched::{CloneFlags, unshare};
use parking_lot::Mutex;

use self::files::Sources;
use crate::fault::{self, Fault};
use crate::options::{Options, ProgramCalls, ProgramNetwork, ProgramOptions};
use crate::protocol::Failure;
use crate::relay::{Outlets, Relay, Ways};
use crate::sandbox::{self, Instruction};
use crate::sys::Identity;

/// Enclosures at once. Beyond it the one that was used longest ago and holds no program goes.
pub const ENCLOSURES_MAX: usize = 1024;

/// How long one may be of no use before it goes, when another is asked for.
const IDLE_MAX: Duration = Duration::from_secs(600);

/// Ids nobody has, for the try at the start.
const NOBODY: Identity = Identity { uid: 65_534, gid: 65_534 };

/// Namespaces of one tenant, as long as this lives or a program runs in them.
#[derive(Debug)]
pub struct Enclosure {
    mount: OwnedFd,
    ipc: OwnedFd,
    /// `None`: programs share the node's.
    network: Option<OwnedFd>,
    /// Ends what leads out of the network.
    _outlets: Option<Outlets>,
}

impl Enclosure {
    /// To be entered in this order.
    pub fn namespaces(&self) -> Vec<BorrowedFd<'_>> {
        let network = self.network.as_ref().map(AsFd::as_fd);
        [self.ipc.as_fd(), self.mount.as_fd()].into_iter().chain(network).collect()
    }
}

/// What an enclosure is made for. Another value means another enclosure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    identity: Identity,
    home: Option<PathBuf>,
    programs: ProgramOptions,
}

struct Entry {
    owner: Owner,
    /// Held while it is made: a tenant's programs wait for their own, and for no other's.
    made: Arc<Mutex<Option<Arc<Enclosure>>>>,
    used: Instant,
}

impl Entry {
    /// Whether nobody makes it and no program is in it.
    fn is_idle(&self) -> bool {
        let is_unused =
            |made: &Option<Arc<Enclosure>>| made.as_ref().is_none_or(|made| Arc::strong_count(made) == 1);
        Arc::strong_count(&self.made) == 1 && self.made.try_lock().is_some_and(|made| is_unused(&made))
    }
}

/// All enclosures of this keeper.
pub struct Enclosures {
    entries: Mutex<HashMap<TenantName, Entry>>,
    programs: Mutex<ProgramOptions>,
    relay: Option<Relay>,
    /// Where tenants' own directories are made.
    state: PathBuf,
    runtime: PathBuf,
    made: AtomicU64,
    /// Why there are none.
    off: Option<String>,
}

impl Enclosures {
    /// Tries to make one. `relay`: why there is none, or the relay.
    pub fn start(options: &Options, is_root: bool, relay: Result<Relay, Fault>) -> Self {
        let mut all = Self {
            entries: Mutex::default(),
            programs: Mutex::new(options.programs.clone()),
            relay: None,
            state: options.instances.images.with_file_name("tenants"),
            runtime: options.runtime_dir.clone(),
            made: AtomicU64::new(0),
            off: None,
        };
        all.off = match relay {
            _ if !is_root => Some("it needs root".into()),
            Err(fault) => Some(fault.message),
            Ok(relay) => {
                all.relay = Some(relay);
                all.try_one().err().map(|error| error.to_string())
            }
        };
        all
    }

    fn try_one(&self) -> io::Result<()> {
        network::write_resolver(&self.runtime)?;
        let owner = Owner { identity: NOBODY, home: None, programs: self.programs.lock().clone() };
        self.make(&owner, None).map(drop)
    }

    /// Why programs run without.
    pub fn off(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// Holds for programs that are started from now on.
    pub fn set_options(&self, programs: &ProgramOptions) {
        *self.programs.lock() = programs.clone();
    }

    /// The filter of system calls that programs get which are started now, within an enclosure or not.
    pub fn call_filter(&self) -> &'static [Instruction] {
        match self.programs.lock().system_calls {
            ProgramCalls::Filtered => sandbox::filter_of_programs(),
            ProgramCalls::All => &[],
        }
    }

    /// How many there are, and how many were made.
    pub fn numbers(&self) -> (usize, u64) {
        (self.entries.lock().len(), self.made.load(Ordering::Relaxed))
    }

    /// The tenant's. `None`: there are none on this node, which is said at its start.
    pub fn of(&self, tenant: &Tenant, identity: Option<Identity>) -> Result<Option<Arc<Enclosure>>, Fault> {
        let Some(identity) = identity.filter(|_| self.off.is_none()) else { return Ok(None) };
        let mut programs = self.programs.lock().clone();
        programs.network = tenant.network.unwrap_or(programs.network);
        let owner = Owner { identity, home: tenant.home.clone(), programs };
        let entry = self.entry(&tenant.name, &owner)?;
        let mut made = entry.lock();
        if let Some(enclosure) = &*made {
            return Ok(Some(Arc::clone(enclosure)));
        }
        let enclosure = self.make(&owner, Some(tenant.name.as_str())).map_err(|error| {
            let message = format!("the enclosure of tenant '{}' cannot be made: {error}", tenant.name);
            Fault::new(Failure::Broken, fault::ENCLOSURE, message)
        })?;
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Arc::clone(made.insert(Arc::new(enclosure)))))
    }

    fn entry(&self, name: &TenantName, owner: &Owner) -> Result<Arc<Mutex<Option<Arc<Enclosure>>>>, Fault> {
        let now = Instant::now();
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get_mut(name).filter(|entry| entry.owner == *owner) {
            entry.used = now;
            return Ok(Arc::clone(&entry.made));
        }
        // Programs in one of a former record keep that until they end.
        entries.remove(name);
        entries.retain(|_, entry| now.duration_since(entry.used) < IDLE_MAX || !entry.is_idle());
        if entries.len() >= ENCLOSURES_MAX {
            let idle = entries.iter().filter(|(_, entry)| entry.is_idle());
            let oldest = idle.min_by_key(|(_, entry)| entry.used).map(|(name, _)| name.clone());
            let oldest = oldest.ok_or_else(|| {
                let message = format!("programs of {ENCLOSURES_MAX} tenants run, as many as may at once");
                Fault::new(Failure::Busy, fault::LIMIT, message)
            })?;
            entries.remove(&oldest);
        }
        let made = Arc::default();
        let entry = Entry { owner: owner.clone(), made: Arc::clone(&made), used: now };
        entries.insert(name.clone(), entry);
        Ok(made)
    }

    /// Makes one, on a thread that is in its namespaces and ends there. `tenant`: whose directories are in it.
    fn make(&self, owner: &Owner, tenant: Option<&str>) -> io::Result<Enclosure> {
        let directory = tenant.map(|tenant| self.state.join(tenant));
        let has_network = owner.programs.network == ProgramNetwork::Own;
        let resolver = has_network.then(|| network::resolver(&self.runtime));
        let sources =
            files::open(owner.identity, owner.home.as_deref(), directory.as_deref(), resolver.as_deref())?;
        let Made { mount, ipc, network, ways } = make_namespaces(sources, owner.programs.clone())?;
        let outlets = match (&self.relay, ways) {
            (Some(relay), Some(ways)) => Some(relay.open(ways)?),
            _ => None,
        };
        Ok(Enclosure { mount, ipc, network, _outlets: outlets })
    }
}

/// Namespaces, and what listens in their network.
struct Made {
    mount: OwnedFd,
    ipc: OwnedFd,
    network: Option<OwnedFd>,
    ways: Option<Ways>,
}

/// Makes them on a thread that is in them and ends there: the keeper's others stay where they are.
fn make_namespaces(sources: Sources, programs: ProgramOptions) -> io::Result<Made> {
    let has_network = programs.network == ProgramNetwork::Own;
    let inside = move || -> io::Result<Made> {
        let own_network = if has_network { CloneFlags::CLONE_NEWNET } else { CloneFlags::empty() };
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | own_network)?;
        files::put(&sources)?;
        let ways = if has_network { Some(network::open(&programs)?) } else { None };
        let namespace = |name: &str| File::open(format!("/proc/thread-self/ns/{name}")).map(OwnedFd::from);
        let network = if has_network { Some(namespace("net")?) } else { None };
        Ok(Made { mount: namespace("mnt")?, ipc: namespace("ipc")?, network, ways })
    };
    let thread = thread::Builder::new().name("keeper-enclosure".into()).spawn(inside)?;
    thread.join().map_err(|_| io::Error::other("making it panicked inside the keeper"))?
}

/// Why no enclosure can be made on this machine by this process. It changes nothing.
pub fn try_enclosure(programs: &ProgramOptions) -> Result<(), String> {
    let made =
        files::open(NOBODY, None, None, None).and_then(|sources| make_namespaces(sources, programs.clone()));
    made.map(drop).map_err(|error| error.to_string())
}

/// Whether `path` lies in one of the directories that are each tenant's own.
fn is_in_scratch(path: &Path) -> bool {
    files::SCRATCH.iter().any(|scratch| path.starts_with(scratch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_beneath_scratch_directories_are_known() {
        for (path, expected) in [("/tmp/x", true), ("/var/tmp", true), ("/home/tmp", false), ("/tmpx", false)]
        {
            assert_eq!(is_in_scratch(Path::new(path)), expected, "{path}");
        }
    }
}

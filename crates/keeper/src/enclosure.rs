//! Isolates a tenant's CGI programs and PHP workers from all others. An enclosure is a set of
//! namespaces of its own. It is made for a tenant's first program and used by all later ones.
//!
//! Programs see the node's files, with a `/tmp`, `/var/tmp` and `/dev/shm` of their tenant's. Their
//! `/proc` does not show processes of other users. They have a network of their own. The relay
//! makes their connections outside, and passes on those to services of the node that all tenants
//! may use. No process holds an enclosure: it consists of descriptors of the keeper's. All of it
//! blocks: call it from `workers`. Not here: sandboxes of applications (`sandbox`), entering
//! (`sys`).

mod files;
mod network;
mod program_view;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::{Tenant, TenantName};
use nix::sched::{CloneFlags, unshare};
use parking_lot::Mutex;

use crate::fault::{self, Fault};
use crate::mail::MailSender;
use crate::options::{KeeperConfig, ProgramCalls, ProgramNetwork, ProgramOptions};
use crate::relay::{EgressGuard, EgressSockets, Relay};
use crate::sandbox::{self, FilterInstruction};
use crate::sys::UnixIdentity;

use self::files::EnclosureMounts;

pub use program_view::{HiddenPath, ProgramView, hiding_directory};

/// Maximum number of enclosures. Beyond it the least recently used one without programs is removed.
pub const ENCLOSURES_MAX: usize = 1024;

/// Time without use after which one is removed, when another is needed.
const IDLE_MAX: Duration = Duration::from_secs(600);

/// Ids that nobody has, for the test at the start.
const NOBODY: UnixIdentity = UnixIdentity { uid: 65_534, gid: 65_534 };

/// Namespaces of one tenant. They exist while this lives or a program runs in them.
#[derive(Debug)]
pub struct Enclosure {
    mount: OwnedFd,
    ipc: OwnedFd,
    /// `None`: programs share the node's.
    network: Option<OwnedFd>,
    /// Path of nagaya's own `sendmail`. `None`: its programs have none.
    sendmail: Option<PathBuf>,
    /// Ends the ways out of the network when dropped.
    _outlets: Option<EgressGuard>,
}

impl Enclosure {
    pub fn sendmail(&self) -> Option<&Path> {
        self.sendmail.as_deref()
    }

    /// Returns them in the order in which they are entered.
    pub fn namespaces(&self) -> Vec<BorrowedFd<'_>> {
        let network = self.network.as_ref().map(AsFd::as_fd);
        [self.ipc.as_fd(), self.mount.as_fd()].into_iter().chain(network).collect()
    }
}

/// The values an enclosure is made for. Another value means another enclosure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EnclosureOwner {
    identity: UnixIdentity,
    home: Option<PathBuf>,
    programs: ProgramOptions,
    /// Sender of its programs' mail. `None`: they have no mail relay.
    tenant: Option<TenantName>,
}

struct EnclosureEntry {
    owner: EnclosureOwner,
    /// Held while it is made: a tenant's programs wait for their own, and for no other's.
    made: Arc<Mutex<Option<Arc<Enclosure>>>>,
    used: Instant,
}

impl EnclosureEntry {
    /// Whether nobody makes it and no program is in it.
    fn is_idle(&self) -> bool {
        let is_unused =
            |made: &Option<Arc<Enclosure>>| made.as_ref().is_none_or(|made| Arc::strong_count(made) == 1);
        Arc::strong_count(&self.made) == 1 && self.made.try_lock().is_some_and(|made| is_unused(&made))
    }
}

/// All enclosures of this keeper.
pub struct Enclosures {
    entries: Mutex<HashMap<TenantName, EnclosureEntry>>,
    programs: Mutex<ProgramOptions>,
    has_mail: AtomicBool,
    relay: Option<Relay>,
    /// Directory of tenants' own directories.
    state: PathBuf,
    runtime: PathBuf,
    made: AtomicU64,
    /// Why there are none.
    off: Option<String>,
}

impl Enclosures {
    /// Tests whether one can be made. `relay`: why there is none, or the relay.
    pub fn start(options: &KeeperConfig, is_root: bool, relay: Result<Relay, Fault>) -> Self {
        let mut all = Self {
            entries: Mutex::default(),
            programs: Mutex::new(options.programs.clone()),
            has_mail: AtomicBool::new(options.mail.relay),
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
        files::make_sendmail_place(&self.runtime)?;
        let programs = self.programs.lock().clone();
        let owner = EnclosureOwner { identity: NOBODY, home: None, programs, tenant: None };
        self.make(&owner, None).map(drop)
    }

    /// Returns why programs run without one.
    pub fn off(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// Sets the options of programs that are started from now on.
    pub fn set_options(&self, programs: &ProgramOptions, has_mail: bool) {
        self.has_mail.store(has_mail, Ordering::Relaxed);
        *self.programs.lock() = programs.clone();
    }

    /// Returns the system call filter of programs that are started now, in an enclosure or not.
    pub fn call_filter(&self) -> &'static [FilterInstruction] {
        match self.programs.lock().system_calls {
            ProgramCalls::Filtered => sandbox::filter_of_programs(),
            ProgramCalls::All => &[],
        }
    }

    /// Returns how many there are, and how many were made.
    pub fn numbers(&self) -> (usize, u64) {
        (self.entries.lock().len(), self.made.load(Ordering::Relaxed))
    }

    /// Returns which files of the node the tenant's programs see.
    pub fn view(&self, tenant: &Tenant, identity: Option<UnixIdentity>) -> ProgramView {
        if identity.is_none() || self.off.is_some() {
            return ProgramView::Whole;
        }
        ProgramView::Enclosed { home: tenant.home.clone() }
    }

    /// Returns the tenant's. `None` if there are none on this node, which is logged at its start.
    pub fn of(
        &self,
        tenant: &Tenant,
        identity: Option<UnixIdentity>,
    ) -> Result<Option<Arc<Enclosure>>, Fault> {
        let Some(identity) = identity.filter(|_| self.off.is_none()) else { return Ok(None) };
        let mut programs = self.programs.lock().clone();
        programs.network = tenant.network.unwrap_or(programs.network);
        let has_mail = self.has_mail.load(Ordering::Relaxed) && programs.network == ProgramNetwork::Own;
        let sender = has_mail.then(|| tenant.name.clone());
        let owner = EnclosureOwner { identity, home: tenant.home.clone(), programs, tenant: sender };
        let entry = self.entry(&tenant.name, &owner)?;
        let mut made = entry.lock();
        if let Some(enclosure) = &*made {
            return Ok(Some(Arc::clone(enclosure)));
        }
        let enclosure = self.make(&owner, Some(tenant.name.as_str())).map_err(|error| {
            let message = format!("the enclosure of tenant '{}' cannot be made: {error}", tenant.name);
            Fault::new(FailureKind::Broken, fault::ENCLOSURE, message)
        })?;
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Arc::clone(made.insert(Arc::new(enclosure)))))
    }

    fn entry(
        &self,
        name: &TenantName,
        owner: &EnclosureOwner,
    ) -> Result<Arc<Mutex<Option<Arc<Enclosure>>>>, Fault> {
        let now = Instant::now();
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get_mut(name).filter(|entry| entry.owner == *owner) {
            entry.used = now;
            return Ok(Arc::clone(&entry.made));
        }
        // Programs in one of an earlier record keep that until they end.
        entries.remove(name);
        entries.retain(|_, entry| now.duration_since(entry.used) < IDLE_MAX || !entry.is_idle());
        if entries.len() >= ENCLOSURES_MAX {
            let idle = entries.iter().filter(|(_, entry)| entry.is_idle());
            let oldest = idle.min_by_key(|(_, entry)| entry.used).map(|(name, _)| name.clone());
            let oldest = oldest.ok_or_else(|| {
                let message = format!("programs of {ENCLOSURES_MAX} tenants run, which is the maximum");
                Fault::new(FailureKind::Busy, fault::LIMIT, message)
            })?;
            entries.remove(&oldest);
        }
        let made = Arc::default();
        let entry = EnclosureEntry { owner: owner.clone(), made: Arc::clone(&made), used: now };
        entries.insert(name.clone(), entry);
        Ok(made)
    }

    /// Makes one, on a thread that enters its namespaces and ends there. `tenant`: whose
    /// directories are in it.
    fn make(&self, owner: &EnclosureOwner, tenant: Option<&str>) -> io::Result<Enclosure> {
        let directory = tenant.map(|tenant| self.state.join(tenant));
        let has_network = owner.programs.network == ProgramNetwork::Own;
        let resolver = has_network.then(|| network::resolver(&self.runtime));
        let mut sources =
            files::open(owner.identity, owner.home.as_deref(), directory.as_deref(), resolver.as_deref())?;
        let sender = owner.tenant.clone().map(|tenant| MailSender { tenant, site: None });
        let sendmail = if sender.is_some() { sources.add_sendmail(&self.runtime)? } else { None };
        let of = (owner.programs.clone(), owner.identity.uid, sender);
        let EnclosureParts { mount, ipc, network, ways } = make_namespaces(sources, of)?;
        let outlets = match (&self.relay, ways) {
            (Some(relay), Some(ways)) => Some(relay.open(ways)?),
            _ => None,
        };
        Ok(Enclosure { mount, ipc, network, sendmail, _outlets: outlets })
    }
}

/// Namespaces, and the listening sockets in their network.
struct EnclosureParts {
    mount: OwnedFd,
    ipc: OwnedFd,
    network: Option<OwnedFd>,
    ways: Option<EgressSockets>,
}

/// Makes them on a thread that enters them and ends there: the keeper's other threads stay where
/// they are.
fn make_namespaces(
    sources: EnclosureMounts,
    (programs, uid, sender): (ProgramOptions, u32, Option<MailSender>),
) -> io::Result<EnclosureParts> {
    let has_network = programs.network == ProgramNetwork::Own;
    let inside = move || -> io::Result<EnclosureParts> {
        let own_network = if has_network { CloneFlags::CLONE_NEWNET } else { CloneFlags::empty() };
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | own_network)?;
        files::put(&sources)?;
        let ways = if has_network { Some(network::open(&programs, uid, sender)?) } else { None };
        let namespace = |name: &str| File::open(format!("/proc/thread-self/ns/{name}")).map(OwnedFd::from);
        let network = if has_network { Some(namespace("net")?) } else { None };
        Ok(EnclosureParts { mount: namespace("mnt")?, ipc: namespace("ipc")?, network, ways })
    };
    let thread = thread::Builder::new().name("keeper-enclosure".into()).spawn(inside)?;
    thread.join().map_err(|_| io::Error::other("making it panicked inside the keeper"))?
}

/// Explains why this process cannot make an enclosure on this machine. Changes nothing.
pub fn try_enclosure(programs: &ProgramOptions) -> Result<(), String> {
    let made = files::open(NOBODY, None, None, None)
        .and_then(|sources| make_namespaces(sources, (programs.clone(), NOBODY.uid, None)));
    made.map(drop).map_err(|error| error.to_string())
}

/// Whether `path` is in one of the directories that each tenant has for itself.
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

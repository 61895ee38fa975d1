//! The processes of one run of an instance, once they can answer: connecting to them, asking how
//! they are, ending them.
//!
//! Not here: bringing them up (`start`), when they are to end (`decide::lifecycle`).

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::protocol::ProcessExit;
use nagaya_records::record::{App, STOP_SECONDS};

use crate::bases::UnpackedBase;
use crate::cells::{Leaf, OomKills};
use crate::context::KeeperContext;
use crate::fault;
use crate::image::{Image, NodeImages};
use crate::instances::limits::request_cells::RequestCells;
use crate::instances::run::app_launch::{AppLaunch, LaunchResult};
use crate::instances::run::endpoint::InstanceEndpoint;
use crate::instances::run::rest::TierControl;
use crate::instances::run::restart_file::RestartFile;
use crate::process::ProcessRef;
use crate::relay::{EgressGuard, EgressTraffic};
use crate::sandbox::Sandbox;

/// The processes of an instance that can answer.
pub struct InstanceProcesses {
    /// `None` once its end has begun.
    handle: RefCell<Option<ProcessRef>>,
    leaf: Arc<Leaf>,
    pub endpoint: InstanceEndpoint,
    pub resting: Arc<TierControl>,
    /// Its processes that are in request cells.
    pub request_cells: Rc<RequestCells>,
    /// The image it was restored from, if any.
    pub image: Option<Image>,
    /// Inputs of an image of it, until the image is taken or not wanted.
    image_source: RefCell<Option<Arc<ImageSource>>>,
    /// `None` if nobody counts.
    kills: Option<OomKills>,
    pub restart_file: Option<Arc<RestartFile>>,
    /// Its open ways to the outside and to its databases, which end with it.
    pub outlets: Option<EgressGuard>,
    /// Stays on disk while the processes see it.
    _base: Option<Arc<UnpackedBase>>,
    _dir: SocketDir,
}

/// Inputs for an image of an instance.
pub struct ImageSource {
    pub launch: Arc<AppLaunch>,
    pub made: LaunchResult,
}

/// How a run begins.
#[derive(Clone)]
pub enum StartMode {
    Boot,
    Restore(Arc<NodeImages>),
}

/// Directory of its socket. It is removed with the processes.
pub struct SocketDir(pub PathBuf);

impl Drop for SocketDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} cannot be removed", self.0.display());
        }
    }
}

impl InstanceProcesses {
    /// `app`: its record. `source`: what an image of it takes, if it is in a sandbox.
    pub fn new(
        context: &Rc<KeeperContext>,
        app: &App,
        (handle, endpoint): (ProcessRef, InstanceEndpoint),
        mut source: Option<ImageSource>,
        dir: SocketDir,
    ) -> Self {
        handle.set_grace(stop_time(app));
        let leaf = handle.leaf();
        let made = source.as_mut().map(|source| &mut source.made);
        let (outlets, image, restart_file) = match made {
            Some(made) => (made.outlets.take(), made.image.clone(), made.restart_file.take()),
            None => (None, None, None),
        };
        Self {
            resting: Arc::new(TierControl::new(Arc::clone(&leaf))),
            request_cells: RequestCells::new(Rc::clone(context), Arc::clone(&leaf)),
            kills: leaf.kills(),
            _base: source.as_ref().and_then(|source| source.launch.unpacked.clone()),
            image_source: RefCell::new(source.map(Arc::new)),
            handle: RefCell::new(Some(handle)),
            leaf,
            endpoint,
            image,
            restart_file,
            outlets,
            _dir: dir,
        }
    }

    /// Returns the source of an image of it. `None` if none can be taken, or none is wanted.
    pub fn image_source(&self) -> Option<Arc<ImageSource>> {
        self.image_source.borrow().clone()
    }

    /// Makes a non-blocking connection to it.
    pub async fn connect(&self) -> io::Result<OwnedFd> {
        self.endpoint.connect().await
    }

    /// Releases what was kept for an image: none is taken of it any more.
    pub fn needs_no_image(&self) {
        self.image_source.take();
    }

    /// Where it listens in its sandbox: the port, or none if that is a socket. `None` if it has no
    /// sandbox.
    pub fn port(&self) -> Option<Option<u16>> {
        self.endpoint.port()
    }

    /// Returns the sandbox of its processes. `None` if they see the whole node.
    pub fn sandbox(&self) -> Option<Arc<Sandbox>> {
        self.endpoint.sandbox()
    }

    /// Returns the cell of its processes.
    pub fn leaf(&self) -> &Arc<Leaf> {
        &self.leaf
    }

    /// Returns how many of its processes were killed for lack of memory.
    pub fn memory_kills(&self) -> u64 {
        self.kills.as_ref().map_or(0, OomKills::count)
    }

    /// Returns the counter of its waits for databases, for a reader.
    pub fn tally(&self) -> Option<OwnedFd> {
        self.outlets.as_ref().and_then(EgressGuard::tally)
    }

    /// Returns its open connections to places outside and to databases. `None` if it reaches
    /// nothing.
    pub fn traffic(&self) -> Option<EgressTraffic> {
        self.outlets.as_ref().map(EgressGuard::traffic)
    }

    /// Explains why it ended by itself.
    pub fn why_ended(&self, exit: ProcessExit) -> String {
        why_ended(self.memory_kills(), exit)
    }

    /// Resolves once nothing of it is left.
    pub fn ended(&self) -> impl Future<Output = ProcessExit> + use<> {
        let ended = self.handle.borrow().as_ref().map(ProcessRef::ended);
        async move {
            match ended {
                Some(ended) => ended.await.0,
                None => std::future::pending().await,
            }
        }
    }

    /// Kills all its processes now, frozen ones too. `end` does the rest.
    pub fn kill(&self) {
        if let Err(error) = self.leaf.end(None) {
            tracing::warn!(%error, "cell {} cannot be killed at once", self.leaf.name());
        }
    }

    /// Sets the time it has from now on to end after `SIGTERM`.
    pub fn set_stop(&self, app: &App) {
        if let Some(handle) = &*self.handle.borrow() {
            handle.set_grace(stop_time(app));
        }
    }

    /// Ends it, and returns once nothing of it is left. Returns the time it had after `SIGTERM`, if
    /// it was killed then.
    pub async fn end(&self) -> Option<Duration> {
        let handle = self.handle.take();
        let cut = match handle {
            Some(handle) => end(handle).await,
            None => None,
        };
        self.discard();
        cut
    }

    /// Nothing of it is left.
    pub fn discard(&self) {
        self.leaf.forget_freezer();
    }
}

/// Ends processes, and returns how long they had after `SIGTERM` if they were killed then.
pub async fn end(handle: ProcessRef) -> Option<Duration> {
    let (ended, cut) = (handle.ended(), handle.grace_cut());
    drop(handle);
    ended.await;
    cut.get()
}

fn stop_time(app: &App) -> Duration {
    Duration::from_secs(app.stop_seconds.unwrap_or(STOP_SECONDS).into())
}

/// Explains why an application ended by itself. `memory_kills`: how many of its processes the
/// kernel killed at its memory limit. It may have continued for long after such a kill.
fn why_ended(memory_kills: u64, exit: ProcessExit) -> String {
    const KILLED: i32 = 9;
    /// Exit status by which a shell reports a killed child.
    const CHILD_KILLED: i32 = 128 + KILLED;
    let end = match exit {
        ProcessExit { status: Some(CHILD_KILLED), .. } | ProcessExit { signal: Some(KILLED), .. }
            if memory_kills > 0 =>
        {
            return format!(
                "out of memory: the kernel killed it at the memory limit of its cell [{}]",
                fault::OUT_OF_MEMORY
            );
        }
        ProcessExit { status: Some(status), .. } => format!("exit status {status}"),
        ProcessExit { signal: Some(signal), .. } => format!("signal {signal}"),
        _ => "nobody knows why".into(),
    };
    match memory_kills {
        0 => end,
        kills => format!(
            "{end}; before that the kernel had killed {kills} of its processes at the memory limit of its cell [{}]",
            fault::OUT_OF_MEMORY
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_memory_is_named_where_it_ended_the_application() {
        let of = |kills, status, signal| {
            why_ended(kills, ProcessExit { status, signal, cpu_us: 0, out_of_memory: false })
        };
        assert_eq!(of(0, Some(1), None), "exit status 1");
        assert_eq!(of(0, None, Some(9)), "signal 9");
        for end in [of(1, None, Some(9)), of(2, Some(137), None)] {
            assert!(end.starts_with("out of memory: "), "{end}");
        }
        let later = of(1, Some(0), None);
        assert!(
            later.starts_with("exit status 0; before that the kernel had killed 1 of its processes"),
            "{later}"
        );
    }
}

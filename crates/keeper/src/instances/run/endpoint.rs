//! The endpoint of an instance: connections to the place where it listens, plain or in its sandbox.
//!
//! Not here: where that is (`plain_address`, `sandbox_spec`), who may ask (`instances`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::instances::run::plain_address;
use crate::sandbox::{self, Sandbox};
use crate::spawn;
use crate::workers::ThreadPool;

/// First and longest pause between two checks whether an application listens.
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(50);

/// Maximum duration of connecting to a listening application. Its queue may be full for a moment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub enum InstanceEndpoint {
    Plain {
        address: spawn::AppAddress,
        /// Owner that its socket must have. `None`: any owner, because all are ours.
        owner: Option<u32>,
    },
    Sandboxed {
        sandbox: Arc<Sandbox>,
        address: sandbox::SandboxAddress,
        workers: ThreadPool,
    },
}

impl InstanceEndpoint {
    /// Makes a non-blocking connection. Waits while the application's queue of connections is full.
    pub async fn connect(&self) -> io::Result<OwnedFd> {
        let connected = async {
            let mut pause = LOOK_FIRST;
            loop {
                match self.connect_once().await {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(pause).await,
                    connected => return connected,
                }
                pause = (pause * 2).min(LOOK_MAX);
            }
        };
        timeout(CONNECT_TIMEOUT, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Returns once the right process listens there.
    pub async fn wait_until_open(&self) -> io::Result<()> {
        let mut pause = LOOK_FIRST;
        loop {
            match self.connect_once().await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
                Err(_) => sleep(pause).await,
            }
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// Whether it is open before the program listens. Then an open socket says nothing.
    pub fn is_kept_open(&self) -> bool {
        match self {
            Self::Plain { address, .. } => matches!(address, spawn::AppAddress::Inherited(_)),
            Self::Sandboxed { address, .. } => matches!(address, sandbox::SandboxAddress::Listener(_)),
        }
    }

    /// Returns the sandbox it leads into.
    pub fn sandbox(&self) -> Option<Arc<Sandbox>> {
        match self {
            Self::Plain { .. } => None,
            Self::Sandboxed { sandbox, .. } => Some(Arc::clone(sandbox)),
        }
    }

    /// Returns where it listens in its sandbox: a port, or none for a socket. `None` if it has no
    /// sandbox.
    pub fn port(&self) -> Option<Option<u16>> {
        match self {
            Self::Plain { .. } => None,
            Self::Sandboxed { address: sandbox::SandboxAddress::Port(port), .. } => Some(Some(*port)),
            Self::Sandboxed { .. } => Some(None),
        }
    }

    /// Returns the port that must belong to its owner alone, because others share the network.
    pub fn shared_port(&self) -> Option<(u16, Option<u32>)> {
        match self {
            Self::Plain { address: spawn::AppAddress::Port(port), owner } => Some((*port, *owner)),
            _ => None,
        }
    }

    async fn connect_once(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Plain { address, owner } => plain_address::connect(address, *owner).await,
            Self::Sandboxed { sandbox, address: address @ sandbox::SandboxAddress::Port(_), workers } => {
                // A thread enters its network for that, and may have to wait for the handshake.
                let (sandbox, address) = (Arc::clone(sandbox), address.clone());
                let connected = workers.run(move || sandbox.connect(&address));
                let connected = connected.map_err(|fault| io::Error::other(fault.to_string()))?.await;
                connected.unwrap_or_else(|_| Err(io::Error::other("connecting failed inside the keeper")))
            }
            Self::Sandboxed { sandbox, address, .. } => sandbox.connect(address),
        }
    }
}

//! The way to an instance: connections to where it listens, plain or in its sandbox.
//!
//! Not here: where that is (`address`, `surroundings`), who may ask (`instances`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::address;
use crate::sandbox::{self, Sandbox};
use crate::spawn;
use crate::workers::Workers;

/// First and longest pause between two looks whether an application listens.
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(50);

/// How long a connection to a listening application may take; its queue may be full for a moment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub enum Door {
    Plain {
        address: spawn::Address,
        /// Whose socket it must be. None: anybody's, because all are ours.
        owner: Option<u32>,
    },
    Sandboxed {
        sandbox: Arc<Sandbox>,
        address: sandbox::Address,
        workers: Workers,
    },
}

impl Door {
    /// A connection, non-blocking. Waits while the application's queue of connections is full.
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

    /// Returns once somebody listens there who may.
    pub async fn until_open(&self) -> io::Result<()> {
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

    /// Whether it is open before the program listens: then that says nothing.
    pub fn is_kept_open(&self) -> bool {
        match self {
            Self::Plain { address, .. } => matches!(address, spawn::Address::Inherited(_)),
            Self::Sandboxed { address, .. } => matches!(address, sandbox::Address::Listener(_)),
        }
    }

    /// What it leads into.
    pub fn sandbox(&self) -> Option<Arc<Sandbox>> {
        match self {
            Self::Plain { .. } => None,
            Self::Sandboxed { sandbox, .. } => Some(Arc::clone(sandbox)),
        }
    }

    /// Where it listens in its sandbox: the port, or none if that is a socket. None: it has no sandbox.
    pub fn port(&self) -> Option<Option<u16>> {
        match self {
            Self::Plain { .. } => None,
            Self::Sandboxed { address: sandbox::Address::Port(port), .. } => Some(Some(*port)),
            Self::Sandboxed { .. } => Some(None),
        }
    }

    /// The port that must be its owner's alone, because others share the network.
    pub fn shared_port(&self) -> Option<(u16, Option<u32>)> {
        match self {
            Self::Plain { address: spawn::Address::Port(port), owner } => Some((*port, *owner)),
            _ => None,
        }
    }

    async fn connect_once(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Plain { address, owner } => address::connect(address, *owner).await,
            Self::Sandboxed { sandbox, address: address @ sandbox::Address::Port(_), workers } => {
                // A thread goes into its network for that, and may have to wait for the handshake.
                let (sandbox, address) = (Arc::clone(sandbox), address.clone());
                let connected = workers.run(move || sandbox.connect(&address));
                let connected = connected.map_err(|fault| io::Error::other(fault.to_string()))?.await;
                connected.unwrap_or_else(|_| Err(io::Error::other("connecting failed inside the keeper")))
            }
            Self::Sandboxed { sandbox, address, .. } => sandbox.connect(address),
        }
    }
}

//! Why a node does not start or cannot continue.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use nagaya_base::Code;
use nagaya_store::StoreError;

use super::cluster::{MemberError, NOT_JOINED};
use crate::config::ConfigMistake;

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{}", .0.iter().map(ConfigMistake::to_string).collect::<Vec<_>>().join("\n"))]
    Configuration(Vec<ConfigMistake>),
    #[error("{address} cannot be listened on: {error}; {hint}")]
    Listen { address: SocketAddr, error: io::Error, hint: String },
    #[error("{} cannot be listened on: {error}", path.display())]
    Socket { path: PathBuf, error: io::Error },
    #[error("{} cannot be prepared: {error}; without root, set runtime_dir and state_dir to directories you may write", path.display())]
    Directory { path: PathBuf, error: io::Error },
    #[error("a node already runs from {}; stop it, or give this one another runtime_dir", path.display())]
    Running { path: PathBuf },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Member(#[from] MemberError),
    #[error("the {process} process cannot be started: {error}")]
    Spawn { process: &'static str, error: io::Error },
    #[error(
        "the {process} process ended {times} times before the node was ready, the last time with {reason}; the log above has the reason"
    )]
    NeverReady { process: &'static str, times: u32, reason: String },
    #[error("the runtime of the supervisor cannot be made: {0}")]
    Runtime(io::Error),
    #[error("{} cannot be opened for the log: {error}", path.display())]
    Log { path: PathBuf, error: io::Error },
}

impl ServeError {
    /// Returns the code. `None` if each line has its own.
    pub fn code(&self) -> Option<Code> {
        Some(match self {
            Self::Configuration(_) => return None,
            Self::Listen { .. } | Self::Socket { .. } => Code(501),
            Self::Directory { .. } => Code(502),
            Self::Running { .. } => Code(503),
            Self::Store(error) => error.code(),
            Self::Member(_) => NOT_JOINED,
            Self::Spawn { .. } | Self::Runtime(_) => Code(504),
            Self::NeverReady { .. } => Code(505),
            Self::Log { .. } => Code(506),
        })
    }
}

//! A program that was just started.
//!
//! Not here: starting it (`spawn`, `instances::run::start`), its life (`process`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::enclosure::Enclosure;
use crate::process::root::TreeRoot;

/// A started program, with the keeper's and the edge's ends of its pipes and sockets.
#[derive(Debug)]
pub struct StartedProgram {
    pub root: TreeRoot,
    /// Pipe with its output for the log.
    pub log: OwnedFd,
    /// Descriptors for the edge, in the protocol's order.
    pub fds: Vec<OwnedFd>,
    /// Enclosure it runs in, kept while it runs.
    pub enclosure: Option<Arc<Enclosure>>,
}

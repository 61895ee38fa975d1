//! Connections to the Unix sockets of independent servers: sites of kind http with `unix:/path`.
//!
//! The edge sees no file system with such a socket, so it names the site. The connection is made
//! with the edge's rights, so it gains nothing by this. The server sees the edge as its peer. A
//! tenant that can replace its socket by a link leads the edge nowhere else by it (`tenant_path`).
//! It blocks: call it from `workers`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nagaya_keeper_api::protocol::FailureKind;

use crate::fault::{self, Fault};
use crate::paths::tenant_path::open_server_socket;
use crate::relay::socket::{as_peer, connect_file};
use crate::sys::UnixIdentity;

/// Connects. `home`: of the tenant whose site it is. `whose`: with whose rights; `None`: the
/// keeper's own.
pub fn connect(path: &Path, home: Option<&Path>, whose: Option<UnixIdentity>) -> Result<OwnedFd, Fault> {
    let trusted = match whose {
        Some(_) => 0,
        None => rustix::process::geteuid().as_raw(),
    };
    let act = || connect_file(&open_server_socket(home, path, trusted)?);
    let connected = match whose {
        Some(whose) => as_peer(whose, act).and_then(|connected| connected),
        None => act(),
    };
    connected.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            let message = format!("the queue of {} is full", path.display());
            Fault::new(FailureKind::Busy, fault::SERVER_SOCKET, message)
        }
        _ => Fault::of_path(fault::SERVER_SOCKET, "cannot connect to", path, error),
    })
}

//! Connections to the Unix sockets of servers that run by themselves: sites of kind http with `unix:/path`.
//!
//! The edge sees no file system in which such a socket could lie, so it asks by the site's name. The connection is made with the
//! edge's rights: it gains nothing by asking, and the server is told that the edge connects. A tenant that can put a link in
//! the place of its socket leads the edge nowhere else by it (`tenant_path`). It blocks: call it from `workers`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::fault::{self, Fault};
use crate::protocol::Failure;
use crate::relay::socket::{as_peer, connect_file};
use crate::sys::Identity;
use crate::tenant_path::open_server_socket;

/// `home`: of the tenant whose site it is. `whose`: with whose rights; `None`: the keeper's own.
pub fn connect(path: &Path, home: Option<&Path>, whose: Option<Identity>) -> Result<OwnedFd, Fault> {
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
            Fault::new(Failure::Busy, fault::SERVER_SOCKET, message)
        }
        _ => Fault::of_path(fault::SERVER_SOCKET, "cannot connect to", path, error),
    })
}

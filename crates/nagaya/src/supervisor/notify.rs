//! Reports the node's state to systemd (`Type=notify`, sd_notify(3)). Outside systemd nothing
//! happens.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends one state, for example `READY=1` or `RELOADING=1\nMONOTONIC_USEC=...`.
pub fn notify(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ()));
    if let Err(error) = sent {
        tracing::warn!("the state '{state}' could not be sent to systemd: {error}");
    }
}

/// Sends `RELOADING=1` with the required start time of the reload, in `CLOCK_MONOTONIC`
/// microseconds.
pub fn reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.tv_sec * 1_000_000 + now.tv_nsec / 1_000));
}

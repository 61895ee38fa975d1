//! Sockets in a sandbox' network that lead out of it. The keeper listens on them in there, at
//! addresses of others.
//!
//! A connection to such an address ends at the sandbox' own loopback device, which has the address,
//! too. Not here: where they lead (`crate::relay`).

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::netlink::route;

/// Connections that may wait to be accepted; the kernel's own bound (`net.core.somaxconn`) is this
/// or less.
pub const BACKLOG: i32 = 4096;

/// Listens at this address of this thread's network, without blocking. The network gets the address
/// if it does not have it.
pub fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    let ip = address.ip();
    if !ip.is_loopback() && !ip.is_unspecified() {
        route::add_address(ip)?;
    }
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        // At all addresses it serves those of IPv4, too.
        rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

//! The network of an enclosure: loopback, services of the node at their usual ports, and the
//! outside through the relay.
//!
//! Not here: passing on (`relay`), sockets at addresses (`sandbox`).

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nagaya_base::{CallerReach, OwnCaller};
use nagaya_records::record::{EndpointHost, NetworkEndpoint};

use crate::mail::{MAIL_PORT, MailSender};
use crate::options::ProgramOptions;
use crate::relay::{EgressSockets, OwnSites};
use crate::sandbox::{self, RESOLVER};

/// Returns the path of the file that replaces `/etc/resolv.conf`.
pub fn resolver(runtime: &Path) -> PathBuf {
    runtime.join("resolv.conf")
}

pub fn write_resolver(runtime: &Path) -> io::Result<()> {
    let path = resolver(runtime);
    fs::write(&path, format!("nameserver {}\n", RESOLVER.ip()))?;
    // Programs of all tenants read it.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
}

/// Opens the ways out of this thread's network. If `sender` names a sender, the relay replaces a
/// shared port for mail.
pub fn open(programs: &ProgramOptions, uid: u32, sender: Option<MailSender>) -> io::Result<EgressSockets> {
    sandbox::raise_loopback()?;
    let caller = OwnCaller::new(uid, CallerReach::AllSites);
    let own_sites = OwnSites::new(&programs.own_addresses, caller);
    let mut own_ports = Vec::new();
    for port in own_sites.ports() {
        own_ports.extend(listen(port)?.into_iter().map(|listener| (listener, port)));
    }
    let mut shared_ports = programs.local_ports.clone();
    shared_ports.sort_unstable();
    shared_ports.dedup();
    let mail = if sender.is_some() { listen(MAIL_PORT)? } else { Vec::new() };
    let is_taken = |port: u16| own_sites.ports().contains(&port) || (sender.is_some() && port == MAIL_PORT);
    let mut places = Vec::new();
    for port in shared_ports.iter().copied().filter(|port| !is_taken(*port)) {
        let place = NetworkEndpoint { host: EndpointHost::Address(Ipv4Addr::LOCALHOST.into()), port };
        places.extend(listen(port)?.into_iter().map(|listener| (listener, place.clone())));
    }
    let outside = Some(sandbox::capture_here()?);
    let own_sites = Some(own_sites);
    Ok(EgressSockets {
        places,
        own_ports,
        mail,
        sender,
        outside,
        own_sites,
        shared_ports,
        ..EgressSockets::default()
    })
}

/// Listens at this port of the loopback addresses.
fn listen(port: u16) -> io::Result<Vec<OwnedFd>> {
    let mut listeners = Vec::new();
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match sandbox::listen_here(SocketAddr::new(address, port)) {
            Ok(listener) => listeners.push(listener),
            // Without IPv6 nobody connects by it.
            Err(error) if address.is_ipv6() => tracing::debug!(%error, port, "no IPv6 in an enclosure"),
            Err(error) => return Err(error),
        }
    }
    Ok(listeners)
}

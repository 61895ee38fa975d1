//! The network of an enclosure: loopback, services of the node at their usual ports of it, and the outside by the relay.
//!
//! Not here: passing on (`relay`), sockets at addresses (`sandbox`).

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nagaya_cmdb::record::{Endpoint, EndpointHost};

use crate::options::ProgramOptions;
use crate::relay::Ways;
use crate::sandbox::{self, RESOLVER};

/// The file that is in the place of `/etc/resolv.conf`.
pub fn resolver(runtime: &Path) -> PathBuf {
    runtime.join("resolv.conf")
}

pub fn write_resolver(runtime: &Path) -> io::Result<()> {
    let path = resolver(runtime);
    fs::write(&path, format!("nameserver {}\n", RESOLVER.ip()))?;
    // Programs of all tenants read it.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
}

/// Opens what leads out of the network this thread is in.
pub fn open(programs: &ProgramOptions) -> io::Result<Ways> {
    sandbox::raise_loopback()?;
    let mut ports: Vec<u16> = programs.local_ports.iter().chain(&programs.own_ports).copied().collect();
    ports.sort_unstable();
    ports.dedup();
    let mut places = Vec::new();
    for port in ports {
        let place = Endpoint { host: EndpointHost::Address(Ipv4Addr::LOCALHOST.into()), port };
        let addresses = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        for address in addresses {
            match sandbox::listen_here(SocketAddr::new(address, port)) {
                Ok(listener) => places.push((listener, place.clone())),
                // Where IPv6 is turned off nobody connects by it.
                Err(error) if address.is_ipv6() => tracing::debug!(%error, port, "no IPv6 in an enclosure"),
                Err(error) => return Err(error),
            }
        }
    }
    let outside = Some(sandbox::capture_here()?);
    let (own_ports, shared_ports) = (programs.own_ports.clone(), programs.local_ports.clone());
    Ok(Ways { places, outside, own_ports, shared_ports, ..Ways::default() })
}

//! Destinations that no application and no program of a tenant reaches by itself, under any name or
//! form of address. These are the node and its link, metadata services of clouds, and the nodes and
//! the store of its cluster.
//!
//! Such an endpoint is reached only if a record names it by its address (`endpoint`). Not here:
//! making connections (`outside`, `endpoint`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::RecordIndex;
use parking_lot::{Mutex, RwLock};
use tokio::net::lookup_host;

use crate::netlink::route;

/// Services of clouds that give their clients the machine's credentials, or configure it. Fields:
/// first address, length of the prefix in bits, and the documenting company. Those at
/// 169.254.0.0/16 and fe80::/10 are refused with all link-local addresses.
const METADATA: &[(IpAddr, u8, &str)] = &[
    (v4([169, 254, 169, 254]), 32, "AWS, Azure, Google Cloud, Oracle, OpenStack: instance metadata"),
    (v4([169, 254, 170, 2]), 32, "AWS: credentials of ECS tasks"),
    (v4([168, 63, 129, 16]), 32, "Azure: 'What is IP address 168.63.129.16?'"),
    (v4([100, 100, 100, 200]), 32, "Alibaba Cloud: 'View instance metadata'"),
    (v4([192, 0, 0, 192]), 32, "Oracle Cloud Classic: 'Retrieving Instance Metadata'"),
    (
        v6([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0]),
        32,
        "AWS: IMDS at fd00:ec2::254, EKS pod identity at fd00:ec2::23",
    ),
    (v6([0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x254]), 128, "Google Cloud: metadata server of IPv6-only instances"),
    (v6([0xfd00, 0x00c1, 0, 0, 0, 0, 0xa9fe, 0xa9fe]), 128, "Oracle Cloud: instance metadata by IPv6"),
    (v6([0xfd00, 0x0042, 0, 0, 0, 0, 0, 0x42]), 128, "Scaleway: instance metadata by IPv6"),
    (v6([0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 0x1]), 128, "Akamai (Linode): metadata service by IPv6"),
];

const fn v4(octets: [u8; 4]) -> IpAddr {
    let [a, b, c, d] = octets;
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

const fn v6(groups: [u16; 8]) -> IpAddr {
    let [a, b, c, d, e, f, g, h] = groups;
    IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h))
}

/// The port at which members of etcd speak with each other (etcd, `--listen-peer-urls`).
const ETCD_PEER_PORT: u16 = 2380;

/// Time for which the addresses of the store's endpoints are cached.
const LOOKED_UP_FOR: Duration = Duration::from_secs(30);

/// Maximum number of addresses of all names of the store together.
const ETCD_ADDRESSES_MAX: usize = 64;

/// The cluster of this node, as far as the keeper knows it.
#[derive(Debug, Default)]
pub struct ForbiddenPlaces {
    /// Has the nodes' records. `None` in tests.
    table: Option<Arc<RwLock<RecordIndex>>>,
    /// The store's endpoints, `host:port`.
    etcd: RwLock<Vec<String>>,
    looked_up: Mutex<Option<(Instant, Arc<[SocketAddr]>)>>,
}

impl ForbiddenPlaces {
    pub fn new(table: Arc<RwLock<RecordIndex>>, etcd: Vec<String>) -> Self {
        Self { table: Some(table), etcd: RwLock::new(etcd), looked_up: Mutex::default() }
    }

    /// Sets the endpoints of the store.
    pub fn set_etcd(&self, etcd: &[String]) {
        let mut known = self.etcd.write();
        if *known != etcd {
            etcd.clone_into(&mut known);
            *self.looked_up.lock() = None;
        }
    }

    /// Whether a connection may go there. `shared_ports` of the cluster's nodes and `own_ports` of
    /// this node are open to all tenants.
    ///
    /// # Errors
    /// `PermissionDenied` with a description of the endpoint; others if the kernel cannot be
    /// queried about its own addresses.
    pub async fn judge(&self, to: SocketAddr, own_ports: &[u16], shared_ports: &[u16]) -> io::Result<()> {
        let canonical = to.ip().to_canonical();
        let etcd = self.etcd_addresses().await;
        let peers = self.peers();
        for address in meanings(canonical) {
            let is_itself = address == canonical;
            let may = |ports: &[u16]| is_itself && ports.contains(&to.port());
            if let Some(what) = what_is_near(address) {
                return Err(refuse(what));
            }
            // An embedded address may be unreachable from here.
            let asked = route::is_own(address);
            let is_own = matches!(asked, Ok(true));
            if is_own && !may(own_ports) {
                return Err(refuse("the node itself"));
            }
            if !is_own && peers.contains(&address) && !may(own_ports) && !may(shared_ports) {
                return Err(refuse("a node of its cluster"));
            }
            let is_of_store = |one: &SocketAddr| {
                one.ip().to_canonical() == address && [one.port(), ETCD_PEER_PORT].contains(&to.port())
            };
            if etcd.iter().any(is_of_store) {
                return Err(refuse("the store of its cluster"));
            }
            if is_itself {
                asked?;
            }
        }
        Ok(())
    }

    fn peers(&self) -> Vec<IpAddr> {
        let Some(table) = &self.table else { return Vec::new() };
        let nodes = table.read().nodes();
        let address = |peer: &str| Some(peer.parse::<SocketAddr>().ok()?.ip().to_canonical());
        nodes.iter().filter_map(|node| address(&node.peer)).collect()
    }

    /// Returns the store's addresses. For a name that is not found now, its last ones.
    async fn etcd_addresses(&self) -> Arc<[SocketAddr]> {
        let endpoints = self.etcd.read().clone();
        let known = self.looked_up.lock().clone();
        match known {
            _ if endpoints.is_empty() => return Arc::from([]),
            Some((at, known)) if at.elapsed() < LOOKED_UP_FOR => return known,
            _ => {}
        }
        let mut found = Vec::new();
        let mut is_whole = true;
        for endpoint in &endpoints {
            match lookup_host(endpoint.as_str()).await {
                Ok(addresses) => found.extend(addresses),
                Err(error) => {
                    tracing::debug!(%error, endpoint, "an endpoint of the store is not found");
                    is_whole = false;
                }
            }
        }
        if let (false, Some((_, known))) = (is_whole, known) {
            found.extend(known.iter());
        }
        found.sort_unstable();
        found.dedup();
        found.truncate(ETCD_ADDRESSES_MAX);
        let found: Arc<[SocketAddr]> = found.into();
        *self.looked_up.lock() = Some((Instant::now(), Arc::clone(&found)));
        found
    }
}

fn refuse(what: &str) -> io::Error {
    let why = format!("that is {what}, which may only be reached by its address in `outbound`");
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Returns the address, and each IPv4 address that it contains for a translation or tunnel.
fn meanings(address: IpAddr) -> Vec<IpAddr> {
    let mut meanings = vec![address.to_canonical()];
    let IpAddr::V6(address) = address else { return meanings };
    let bytes = address.octets();
    let mut add = |octets: [u8; 4]| meanings.push(v4(octets));
    let last = [bytes[12], bytes[13], bytes[14], bytes[15]];
    match address.segments() {
        // NAT64: the well-known prefix (RFC 6052, section 2.1), and IPv4-compatible and translated
        // addresses (RFC 4291, section 2.5.5.1; RFC 2765, section 2.1).
        [0x0064, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => add(last),
        // NAT64 of a network's own (RFC 8215): by a prefix of 96 bits, or of 48 (RFC 6052, section
        // 2.2).
        [0x0064, 0xff9b, 1, ..] => {
            add(last);
            add([bytes[6], bytes[7], bytes[9], bytes[10]]);
        }
        // 6to4 (RFC 3056, section 2).
        [0x2002, ..] => add([bytes[2], bytes[3], bytes[4], bytes[5]]),
        // Teredo: the server, and the client with all bits inverted (RFC 4380, section 4).
        [0x2001, 0, ..] => {
            add([bytes[4], bytes[5], bytes[6], bytes[7]]);
            add(last.map(|byte| !byte));
        }
        // ISATAP (RFC 5214, section 6.1).
        [_, _, _, _, 0x0000 | 0x0200, 0x5efe, ..] => add(last),
        _ => {}
    }
    meanings
}

/// Describes an address that no network leads to, or that no tenant may reach by any. `None` if it
/// may be elsewhere.
fn what_is_near(address: IpAddr) -> Option<&'static str> {
    let is_metadata = METADATA.iter().any(|(first, bits, _)| is_within(address, *first, *bits));
    if is_metadata {
        return Some("a cloud's service of metadata");
    }
    let is_near = match address {
        IpAddr::V4(address) => {
            let is_this = address.octets()[0] == 0;
            address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || is_this
        }
        IpAddr::V6(address) => {
            address.is_loopback()
                || address.is_unicast_link_local()
                || address.is_multicast()
                || address.is_unspecified()
        }
    };
    is_near.then_some("loopback, link-local or of many")
}

fn is_within(address: IpAddr, first: IpAddr, bits: u8) -> bool {
    let (address, first, len) = match (address, first) {
        (IpAddr::V4(address), IpAddr::V4(first)) => (address.to_bits().into(), first.to_bits().into(), 32),
        (IpAddr::V6(address), IpAddr::V6(first)) => (address.to_bits(), first.to_bits(), 128),
        _ => return false,
    };
    let differs: u128 = address ^ first;
    differs.checked_shr(len - u32::from(bits)).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(places: &ForbiddenPlaces, to: &str, own: &[u16], shared: &[u16]) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let judged = runtime.block_on(places.judge(to.parse().unwrap(), own, shared));
        match judged {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error.to_string()),
            // Some machines have no way to addresses for documentation.
            _ => Ok(()),
        }
    }

    /// Whether no form of this address is near.
    fn is_elsewhere(address: &str) -> bool {
        meanings(address.parse().unwrap()).into_iter().all(|address| what_is_near(address).is_none())
    }

    #[test]
    fn nearby_address_is_refused_in_each_form() {
        for bad in [
            "127.0.0.1",
            "127.77.0.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.170.2",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fd00:a9fe:a9fe::1",
            "::ffff:168.63.129.16",
            "64:ff9b::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::100.100.100.200",
            "64:ff9b:1:a9fe:a9:fe00::",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::",
            "::127.0.0.1",
            "::ffff:0:169.254.169.254",
            "2001:0:7f00:1::",
            "2001:0:cb00:7107::5601:5601",
            "2001:db8::5efe:127.0.0.1",
            "2001:db8::200:5efe:169.254.169.254",
        ] {
            assert!(!is_elsewhere(bad), "{bad}");
        }
        for good in [
            "203.0.113.7",
            "10.0.0.5",
            "192.168.1.9",
            "100.100.100.201",
            "168.63.129.17",
            "2001:db8::1",
            "fd00::1",
            "fd20:ce::255",
            "64:ff9b::203.0.113.7",
            "2002:cb00:7107::1",
            "2001:0:cb00:7107::34ff:8ef8",
            "2001:db8::5efe:203.0.113.7",
        ] {
            assert!(is_elsewhere(good), "{good}");
        }
    }

    #[test]
    fn nodes_and_the_store_of_the_cluster_are_refused() {
        let mut table = RecordIndex::new();
        let node = r#"{"name":"b","id":"00000000000000000000000000000000","peer":"203.0.113.9:7443","cpus":1,"memory_bytes":1,"version":"0"}"#;
        table.apply(nagaya_records::RecordChange::PutNode(serde_json::from_str(node).unwrap())).unwrap();
        let etcd = vec!["203.0.113.77:2379".into(), "[2001:db8::77]:4001".into()];
        let places = ForbiddenPlaces::new(Arc::new(RwLock::new(table)), etcd);
        for (to, what) in [
            ("203.0.113.9:7443", "a node of its cluster"),
            ("203.0.113.9:22", "a node of its cluster"),
            ("[64:ff9b::203.0.113.9]:443", "a node of its cluster"),
            ("203.0.113.77:2379", "the store"),
            ("203.0.113.77:2380", "the store"),
            ("[2001:db8::77]:4001", "the store"),
            ("[2002:cb00:714d::]:2379", "the store"),
            ("127.0.0.1:443", "loopback"),
        ] {
            let said = judge(&places, to, &[443], &[3306]).unwrap_err();
            assert!(said.contains(what), "{to}: {said}");
        }
        // Sites of the other node, services that all tenants may use, and what else is beside the
        // store.
        for to in ["203.0.113.9:443", "203.0.113.9:3306", "203.0.113.77:3306", "203.0.113.10:22"] {
            assert_eq!(judge(&places, to, &[443], &[3306]), Ok(()), "{to}");
        }
        places.set_etcd(&["203.0.113.78:2379".into()]);
        assert_eq!(judge(&places, "203.0.113.77:2379", &[], &[]), Ok(()));
        assert!(judge(&places, "203.0.113.78:2379", &[], &[]).is_err());
    }
}

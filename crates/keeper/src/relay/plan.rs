//! The address in a sandbox of each place that its application may reach. Pure.
//!
//! A place named by an address has that same address inside, on the loopback device. One named by a
//! name has an address of `NAMES`, which the sandbox' `/etc/hosts` gives for it: the name itself is
//! looked up outside, at each connection. The same list always gives the same addresses, because an
//! application that comes back from its image may remember them. Not here: listening there
//! (`sandbox`).

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nagaya_records::record::{APP_LIST_LEN_MAX, EndpointHost, NetworkEndpoint};

/// The loopback addresses of names: the first one is 127.77.0.1.
const NAMES: [u8; 3] = [127, 77, 0];

const _: () = assert!(APP_LIST_LEN_MAX < 255, "each name has an address of its own");

/// The loopback address of the tenant's own sites. Their names are in `/etc/hosts`, so that no
/// resolver is queried.
const OWN_SITES: Ipv4Addr = Ipv4Addr::new(127, 77, 2, 1);

/// Maximum number of names of own sites in one sandbox.
pub const OWN_NAMES_MAX: usize = 256;

/// The same for an application that reaches all outside: each has sockets of its own.
const OWN_WEB_NAMES_MAX: usize = 8;

const WEB_PORTS: [u16; 2] = [80, 443];

/// Entries that every machine's file has.
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPlan {
    places: Vec<(SocketAddr, NetworkEndpoint)>,
    /// Addresses that lead to the node's edge.
    own: Vec<SocketAddr>,
    names: Vec<(Ipv4Addr, String)>,
}

impl EgressPlan {
    pub fn new(endpoints: Vec<NetworkEndpoint>) -> Self {
        let mut names: Vec<(Ipv4Addr, String)> = Vec::new();
        let mut places = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints.into_iter().take(APP_LIST_LEN_MAX) {
            let address = match &endpoint.host {
                EndpointHost::Address(address) => *address,
                EndpointHost::Name(name) => {
                    let known = names.iter().find(|(_, known)| known == name).map(|(address, _)| *address);
                    let address = known.unwrap_or_else(|| {
                        let last = u8::try_from(names.len() + 1).expect("there are few names");
                        let address = Ipv4Addr::new(NAMES[0], NAMES[1], NAMES[2], last);
                        names.push((address, name.clone()));
                        address
                    });
                    IpAddr::V4(address)
                }
            };
            places.push((SocketAddr::new(address, endpoint.port), endpoint));
        }
        Self { places, own: Vec::new(), names }
    }

    /// As `with_own_sites`, for an application that reaches all outside. Only the first few names
    /// are used, each with an address of its own. At ports of the web that are not the edge's, such
    /// a name leads to its real address. That is the proxy in front of the node.
    #[must_use]
    pub fn with_own_sites_and_web(mut self, own_names: Vec<String>, ports: &[u16]) -> Self {
        if ports.is_empty() {
            return self;
        }
        for (number, name) in (1..).zip(own_names.into_iter().take(OWN_WEB_NAMES_MAX)) {
            let [a, b, c, _] = OWN_SITES.octets();
            let address = Ipv4Addr::new(a, b, c, number);
            self.own.extend(ports.iter().map(|port| SocketAddr::from((address, *port))));
            for port in WEB_PORTS.into_iter().filter(|port| !ports.contains(port)) {
                let place = NetworkEndpoint { host: EndpointHost::Name(name.clone()), port };
                self.places.push((SocketAddr::from((address, port)), place));
            }
            self.names.push((address, name));
        }
        self
    }

    /// Lets these names of the tenant's own sites lead to the node's edge at these ports. A place
    /// of the record under such a name keeps its other ports.
    #[must_use]
    pub fn with_own_sites(mut self, own_names: Vec<String>, ports: &[u16]) -> Self {
        if ports.is_empty() {
            return self;
        }
        for name in own_names.into_iter().take(OWN_NAMES_MAX) {
            let known = self.names.iter().find(|(_, known)| *known == name).map(|(address, _)| *address);
            let address = known.unwrap_or_else(|| {
                self.names.push((OWN_SITES, name));
                OWN_SITES
            });
            for port in ports {
                let address = SocketAddr::from((address, *port));
                if !self.own.contains(&address) {
                    self.own.push(address);
                }
            }
        }
        let own = &self.own;
        self.places.retain(|(address, _)| !own.contains(address));
        self
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty() && self.own.is_empty()
    }

    /// Returns the addresses in the order of `endpoints`.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.places.iter().map(|(address, _)| *address).collect()
    }

    /// Returns the addresses of own sites.
    pub fn own_addresses(&self) -> &[SocketAddr] {
        &self.own
    }

    pub fn endpoints(&self) -> impl Iterator<Item = NetworkEndpoint> + '_ {
        self.places.iter().map(|(_, endpoint)| endpoint.clone())
    }

    /// Returns the text for `/etc/hosts`. `None` if no place has a name.
    pub fn hosts(&self) -> Option<String> {
        if self.names.is_empty() {
            return None;
        }
        let mut text = HOSTS.to_owned();
        for (address, name) in &self.names {
            let _ = writeln!(text, "{address} {name}");
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(list: &[&str]) -> EgressPlan {
        EgressPlan::new(list.iter().map(|text| text.parse().unwrap()).collect())
    }

    #[test]
    fn a_name_has_one_address_and_an_address_is_itself() {
        let plan =
            plan(&["db.internal:3306", "203.0.113.7:443", "db.internal:33060", "[2001:db8::1]:1", "x:1"]);
        let addresses: Vec<String> = plan.addresses().iter().map(ToString::to_string).collect();
        let expected =
            ["127.77.0.1:3306", "203.0.113.7:443", "127.77.0.1:33060", "[2001:db8::1]:1", "127.77.0.2:1"];
        assert_eq!(addresses, expected);
        assert_eq!(plan.hosts().unwrap(), format!("{HOSTS}127.77.0.1 db.internal\n127.77.0.2 x\n"));
    }

    #[test]
    fn own_sites_lead_to_the_edge_at_its_ports_alone() {
        let own = |list: &[&str], names: &[&str]| {
            plan(list).with_own_sites(names.iter().map(|name| (*name).to_owned()).collect(), &[80, 443])
        };
        let texts = |addresses: &[SocketAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        let both = own(&[], &["a.test", "b.test"]);
        assert_eq!(texts(both.own_addresses()), ["127.77.2.1:80", "127.77.2.1:443"]);
        assert_eq!(both.hosts().unwrap(), format!("{HOSTS}127.77.2.1 a.test\n127.77.2.1 b.test\n"));
        assert!(both.addresses().is_empty() && !both.is_empty());
        // A place of the record with such a name, at a port of the edge and at another one.
        let named = own(&["a.test:443", "a.test:5432"], &["a.test"]);
        assert_eq!(texts(named.own_addresses()), ["127.77.0.1:80", "127.77.0.1:443"]);
        assert_eq!(texts(&named.addresses()), ["127.77.0.1:5432"]);
        assert_eq!(named.hosts().unwrap(), format!("{HOSTS}127.77.0.1 a.test\n"));
        let many: Vec<String> = (0..OWN_NAMES_MAX + 9).map(|number| format!("{number}.test")).collect();
        let bounded = plan(&[]).with_own_sites(many, &[80]);
        assert_eq!(bounded.hosts().unwrap().lines().count(), 2 + OWN_NAMES_MAX);
        assert!(plan(&[]).with_own_sites(vec!["a.test".into()], &[]).is_empty());
        let web = plan(&[]).with_own_sites_and_web(vec!["a.test".into(), "b.test".into()], &[80, 8443]);
        assert_eq!(
            texts(web.own_addresses()),
            ["127.77.2.1:80", "127.77.2.1:8443", "127.77.2.2:80", "127.77.2.2:8443"]
        );
        assert_eq!(texts(&web.addresses()), ["127.77.2.1:443", "127.77.2.2:443"]);
        let places: Vec<String> = web.endpoints().map(|place| place.to_string()).collect();
        assert_eq!(places, ["a.test:443", "b.test:443"]);
    }

    #[test]
    fn without_names_the_base_has_its_own_file() {
        assert_eq!(plan(&["127.0.0.1:3306"]).hosts(), None);
        assert!(plan(&[]).is_empty());
    }
}

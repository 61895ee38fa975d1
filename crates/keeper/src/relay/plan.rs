//! Where in a sandbox each place is that its application may reach. Pure.
//!
//! A place named by an address has that same address inside, on the loopback device. One named by a name has an address
//! of `NAMES`, which the sandbox' `/etc/hosts` gives for it: the name itself is looked up outside, at each connection.
//! The same list always gives the same addresses, because an application that comes back from its image may remember
//! them. Not here: listening there (`sandbox`).

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nagaya_cmdb::record::{APP_LIST_LEN_MAX, Endpoint, EndpointHost};

/// The loopback addresses of names: the first one is 127.77.0.1.
const NAMES: [u8; 3] = [127, 77, 0];

const _: () = assert!(APP_LIST_LEN_MAX < 255, "each name has an address of its own");

/// What every machine's file has.
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    places: Vec<(SocketAddr, Endpoint)>,
    names: Vec<(Ipv4Addr, String)>,
}

impl Plan {
    pub fn new(endpoints: Vec<Endpoint>) -> Self {
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
        Self { places, names }
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// In the order of `endpoints`.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.places.iter().map(|(address, _)| *address).collect()
    }

    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint> + '_ {
        self.places.iter().map(|(_, endpoint)| endpoint.clone())
    }

    /// What `/etc/hosts` is to have. None: no place has a name.
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

    fn plan(list: &[&str]) -> Plan {
        Plan::new(list.iter().map(|text| text.parse().unwrap()).collect())
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
    fn without_names_the_base_has_its_own_file() {
        assert_eq!(plan(&["127.0.0.1:3306"]).hosts(), None);
        assert!(plan(&[]).is_empty());
    }
}

//! Addresses that mark connections to an edge by tenants' programs of the same node.
//!
//! The keeper makes such a connection from an address of `127.128.0.0/10`, which identifies the
//! program's tenant. The edge trusts such a peer less than others: it is neither a proxy nor a
//! client of the operator's. A program with the node's own network can use these addresses, too,
//! and gains nothing by it.

use std::net::{IpAddr, Ipv4Addr};

/// First octets of all these addresses.
const NETWORK: u32 = 0x7f80_0000;

/// Length of that prefix, bits.
const PREFIX_BITS: u32 = 10;

/// Bits that hold the tenant's uid; one more holds the reach.
const UID_BITS: u32 = 32 - PREFIX_BITS - 1;

const UID_MASK: u32 = (1 << UID_BITS) - 1;

/// The sites of the node that a program reaches by such a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerReach {
    /// Those of its own tenant.
    OwnSites,
    /// All of them, like any client.
    AllSites,
}

/// A program of a tenant that connects to the edge of its own node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnCaller {
    /// The last bits of its tenant's uid.
    uid: u32,
    pub reach: CallerReach,
}

impl OwnCaller {
    pub fn new(uid: u32, reach: CallerReach) -> Self {
        Self { uid: uid & UID_MASK, reach }
    }

    /// Returns the caller of an address. `None` for any other address.
    pub fn from_address(address: IpAddr) -> Option<Self> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        let bits = address.to_bits();
        if bits >> (32 - PREFIX_BITS) != NETWORK >> (32 - PREFIX_BITS) {
            return None;
        }
        let is_limited = bits >> UID_BITS & 1 == 0;
        let reach = if is_limited { CallerReach::OwnSites } else { CallerReach::AllSites };
        Some(Self { uid: bits & UID_MASK, reach })
    }

    /// Returns the source address of its connections.
    pub fn address(self) -> Ipv4Addr {
        let reach = match self.reach {
            CallerReach::OwnSites => 0,
            CallerReach::AllSites => 1 << UID_BITS,
        };
        Ipv4Addr::from_bits(NETWORK | reach | self.uid)
    }

    /// Returns whether it may request a site of the tenant with this uid.
    pub fn may_ask(self, uid: u32) -> bool {
        self.reach == CallerReach::AllSites || self.uid == uid & UID_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_address_says_who_it_is() {
        for (uid, reach, address) in [
            (210_001, CallerReach::OwnSites, "127.131.52.81"),
            (210_001, CallerReach::AllSites, "127.163.52.81"),
            (u32::MAX, CallerReach::AllSites, "127.191.255.255"),
        ] {
            let caller = OwnCaller::new(uid, reach);
            assert_eq!(caller.address().to_string(), address);
            let mapped = IpAddr::V6(caller.address().to_ipv6_mapped());
            for address in [IpAddr::V4(caller.address()), mapped] {
                assert_eq!(OwnCaller::from_address(address), Some(caller));
            }
            assert!(caller.may_ask(uid));
            assert_eq!(caller.may_ask(uid ^ 1), reach == CallerReach::AllSites);
        }
        for other in ["127.0.0.1", "127.127.255.255", "127.192.0.0", "128.128.0.1", "::1", "10.128.0.1"] {
            assert_eq!(OwnCaller::from_address(other.parse().unwrap()), None, "{other}");
        }
    }
}

//! Lists of networks in the settings.

use std::net::IpAddr;

use ipnet::IpNet;
use nagaya_base::OwnCaller;

/// Parses networks of the settings, which have been checked.
pub fn parse_networks(texts: &[String]) -> Vec<IpNet> {
    let parse =
        |text: &String| text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).ok();
    texts.iter().filter_map(parse).collect()
}

/// Returns whether one of these networks contains the address. Tenants' programs of this node are
/// in none of the operator's networks, whatever their addresses.
pub fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    OwnCaller::from_address(address).is_none() && networks.iter().any(|network| network.contains(&address))
}

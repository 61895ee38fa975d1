//! The addresses of a lab's machines.

/// The lab's addresses. Each lab has its own network, so all of them have the same.
pub const NET: [u8; 3] = [10, 99, 0];
pub const NET_BITS: u8 = 24;

/// The last byte of the first etcd member's address, and of the clients'.
pub const STORES_FROM: usize = 201;
pub const CLIENTS_AT: u8 = 250;

/// Ports for clients and for other nodes.
pub const NODE_PORT: u16 = 80;

/// Returns the addresses of etcd's members, as filters name them.
pub fn stores_at() -> String {
    let ([a, b, c], last) = (NET, CLIENTS_AT - 1);
    format!("{a}.{b}.{c}.{STORES_FROM}-{a}.{b}.{c}.{last}")
}

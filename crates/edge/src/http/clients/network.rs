//! Counts connections, requests and TLS handshakes of client networks.
//!
//! A network is one IPv4 address or one IPv6 /64, unless the settings name other lengths. All
//! threads of the edge share the counts. A connection takes a lock when it begins, and a request
//! only changes one atomic number. Behind a trusted proxy each request may have another client,
//! so each takes the lock of one shard. Not here: closing a connection when a thread has no place
//! left (`crowd`), the settings (`limits`).

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::http::clients::rate::RateMeter;
use crate::http::clients::report::LimitReports;

/// Number of locks over which the networks are spread.
const SHARDS: usize = 64;

/// Maximum number of networks of one shard that are kept without an open connection: 65,536 in
/// all. If there are more, the rates of those without a connection start again.
const SHARD_NETWORKS_MAX: usize = 1024;

/// Number of shards that are searched for unused networks each second.
const SHARDS_SWEPT: usize = 8;

/// Number of bits in front of an IPv4 address in the form of an IPv6 one (RFC 4291 section
/// 2.5.5.2).
const MAPPED_BITS: u8 = 96;

/// A network of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientPrefix {
    bits: u128,
    /// Prefix length of the address as an IPv6 one.
    len: u8,
}

impl ClientPrefix {
    /// Returns the network of `address`, whose prefix has `ipv4` or `ipv6` bits.
    pub fn new(address: IpAddr, ipv4: u8, ipv6: u8) -> Self {
        let (bits, len) = match address.to_canonical() {
            IpAddr::V4(address) => {
                (u128::from(address.to_ipv6_mapped()), ipv4.saturating_add(MAPPED_BITS).min(128))
            }
            IpAddr::V6(address) => (u128::from(address), ipv6.min(128)),
        };
        let mask = u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or_default();
        Self { bits: bits & mask, len }
    }
}

impl fmt::Display for ClientPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Ipv6Addr::from(self.bits).to_canonical() {
            IpAddr::V4(address) if self.len >= MAPPED_BITS => {
                write!(f, "{address}/{}", self.len - MAPPED_BITS)
            }
            _ => write!(f, "{}/{}", Ipv6Addr::from(self.bits), self.len),
        }
    }
}

/// The counts of one network.
#[derive(Debug)]
pub struct ClientNetwork {
    prefix: ClientPrefix,
    open: AtomicU32,
    pub requests: RateMeter,
    pub handshakes: RateMeter,
}

impl ClientNetwork {
    fn new(prefix: ClientPrefix) -> Self {
        Self {
            prefix,
            open: AtomicU32::new(0),
            requests: RateMeter::default(),
            handshakes: RateMeter::default(),
        }
    }

    pub fn prefix(&self) -> ClientPrefix {
        self.prefix
    }

    /// Takes a place for a connection. Returns `None` if `max` are open. 0 means no limit.
    pub fn take_place(self: &Arc<Self>, max: u32) -> Option<NetworkCountGuard> {
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        let place = NetworkCountGuard(Arc::clone(self));
        (max == 0 || before < max).then_some(place)
    }

    /// Returns whether nothing is lost if it is dropped.
    fn is_forgettable(&self, now_ns: u64) -> bool {
        self.open.load(Ordering::Relaxed) == 0
            && self.requests.is_calm(now_ns)
            && self.handshakes.is_calm(now_ns)
    }
}

/// Counts one open connection of its network.
#[derive(Debug)]
pub struct NetworkCountGuard(Arc<ClientNetwork>);

impl Drop for NetworkCountGuard {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct NetworkShard {
    networks: HashMap<ClientPrefix, Arc<ClientNetwork>>,
    /// Length from which the shard is searched for unused networks. It grows if all have
    /// connections, so that each search is paid for by as many new networks.
    sweep_at: usize,
}

/// All networks that were seen lately.
#[derive(Debug)]
pub struct ClientNetworks {
    shards: Box<[Mutex<NetworkShard>]>,
    hasher: RandomState,
    began: Instant,
    pub reports: LimitReports,
}

impl Default for ClientNetworks {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            began: Instant::now(),
            reports: LimitReports::default(),
        }
    }
}

impl ClientNetworks {
    /// Returns the network. It is created if it is not known.
    pub fn find(&self, prefix: ClientPrefix) -> Arc<ClientNetwork> {
        let now_ns = self.now_ns();
        let mut shard = self.shards[self.shard_of(prefix)].lock();
        if let Some(network) = shard.networks.get(&prefix) {
            return Arc::clone(network);
        }
        if shard.networks.len() >= shard.sweep_at.max(SHARD_NETWORKS_MAX) {
            shard.networks.retain(|_, network| !network.is_forgettable(now_ns));
            if shard.networks.len() >= SHARD_NETWORKS_MAX {
                shard.networks.retain(|_, network| Arc::strong_count(network) > 1);
            }
            shard.sweep_at = 2 * shard.networks.len();
        }
        let network = Arc::new(ClientNetwork::new(prefix));
        shard.networks.insert(prefix, Arc::clone(&network));
        network
    }

    /// Drops networks that hold nothing, in some shards. Call it each second with another
    /// `round`.
    pub fn sweep(&self, round: usize) {
        let now_ns = self.now_ns();
        for n in 0..SHARDS_SWEPT {
            let mut shard = self.shards[(round * SHARDS_SWEPT + n) % SHARDS].lock();
            shard
                .networks
                .retain(|_, network| Arc::strong_count(network) > 1 || !network.is_forgettable(now_ns));
            shard.sweep_at = 0;
            if shard.networks.capacity() > 4 * shard.networks.len().max(16) {
                shard.networks.shrink_to_fit();
            }
        }
    }

    /// Returns the number of known networks.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().networks.len()).sum()
    }

    fn shard_of(&self, prefix: ClientPrefix) -> usize {
        usize::try_from(self.hasher.hash_one(prefix) % SHARDS as u64).unwrap_or_default()
    }

    /// Returns nanoseconds since this was made, enough for 584 years.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;

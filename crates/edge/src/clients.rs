//! Networks of clients: how many connections each holds, and how fast it asks and begins TLS handshakes.
//!
//! A network is one IPv4 address or one IPv6 /64, unless the settings name other lengths. All threads of the edge share the
//! counts: a lock is taken when a connection begins, and a request only changes one atomic number. Behind a trusted proxy the
//! client is another one with each request, so the lock of one shard is taken then.
//! Not here: which connection is closed when a thread has no place left (`crowd`), what the settings say (`limits`).

pub mod crowd;
pub mod limits;
mod rate;
mod report;

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

pub use self::limits::ClientLimits;
use self::rate::RateMeter;
pub use self::report::LimitKind;
use self::report::Reports;

/// Networks are spread over so many locks.
const SHARDS: usize = 64;

/// Networks of one shard that are remembered although they have no connection open: 65,536 in all. Where there are more, the
/// rates of those without a connection begin anew.
const SHARD_NETWORKS_MAX: usize = 1024;

/// Shards that are looked through for networks to forget, each second.
const SHARDS_SWEPT: usize = 8;

/// Bits by which an IPv4 address is longer once it is written as an IPv6 one (RFC 4291 section 2.5.5.2).
const MAPPED_BITS: u8 = 96;

/// A network of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    bits: u128,
    /// Of the address as an IPv6 one.
    len: u8,
}

impl Prefix {
    /// The network of `address`, whose prefix has `ipv4` or `ipv6` bits.
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

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Ipv6Addr::from(self.bits).to_canonical() {
            IpAddr::V4(address) if self.len >= MAPPED_BITS => {
                write!(f, "{address}/{}", self.len - MAPPED_BITS)
            }
            _ => write!(f, "{}/{}", Ipv6Addr::from(self.bits), self.len),
        }
    }
}

/// What is known of one network.
#[derive(Debug)]
pub struct ClientNetwork {
    prefix: Prefix,
    open: AtomicU32,
    requests: RateMeter,
    handshakes: RateMeter,
}

impl ClientNetwork {
    fn new(prefix: Prefix) -> Self {
        Self {
            prefix,
            open: AtomicU32::new(0),
            requests: RateMeter::default(),
            handshakes: RateMeter::default(),
        }
    }

    pub fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// Takes a place for a connection. `None` if `max` are open, where 0 is no limit.
    fn take_place(self: &Arc<Self>, max: u32) -> Option<Place> {
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(self));
        (max == 0 || before < max).then_some(place)
    }

    /// Nothing is lost if it is forgotten.
    fn is_forgettable(&self, now_ns: u64) -> bool {
        self.open.load(Ordering::Relaxed) == 0
            && self.requests.is_calm(now_ns)
            && self.handshakes.is_calm(now_ns)
    }
}

/// The place of one open connection in the count of its network.
#[derive(Debug)]
pub struct Place(Arc<ClientNetwork>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Shard {
    networks: HashMap<Prefix, Arc<ClientNetwork>>,
    /// Length from which on it is looked for networks to forget. Grows where all have connections, so that a look is paid for
    /// by as many new networks.
    sweep_at: usize,
}

/// All networks that were seen lately.
#[derive(Debug)]
pub struct ClientNetworks {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    began: Instant,
    reports: Reports,
}

impl Default for ClientNetworks {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            began: Instant::now(),
            reports: Reports::default(),
        }
    }
}

impl ClientNetworks {
    /// The network, which is made if it was not known.
    pub fn find(&self, prefix: Prefix) -> Arc<ClientNetwork> {
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

    /// Forgets networks that hold nothing, in some shards: to be called each second with another `round`.
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

    /// Networks that are remembered.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().networks.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn shard_of(&self, prefix: Prefix) -> usize {
        usize::try_from(self.hasher.hash_one(prefix) % SHARDS as u64).unwrap_or_default()
    }

    /// Nanoseconds since this was made; enough for 584 years.
    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;

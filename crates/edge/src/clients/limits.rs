//! What one thread lets the network of a client do: the settings, applied to what all threads have counted.
//!
//! Not here: the counts (`clients`), the refusal's response (`refusal`), closing connections (`drain`).

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::crowd::Group;
use super::rate::Rate;
use super::{ClientNetwork, LimitKind, Place, Prefix};
use crate::forward::Forwarding;
use crate::message::Head;
use crate::options::{NetworkOptions, Options};
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Clients that are told at once why their connection is not served, per thread. More are closed without a word.
const TURNED_AWAY_MAX: usize = 64;

/// When a client is told to come back whose network has too many connections open, or for whom there is no place.
pub const RETRY_CONNECTION_SECONDS: u32 = 5;

/// One thread's view of the limits.
pub struct ClientLimits {
    shared: Arc<Shared>,
    policy: RefCell<Rc<Policy>>,
    turned_away: Cell<usize>,
    /// The next number of a connection that counts by itself.
    alone: Cell<u64>,
}

#[derive(Debug)]
struct Policy {
    options: NetworkOptions,
    exempt: Vec<IpNet>,
    trusted: Vec<IpNet>,
}

impl Policy {
    fn new(options: &Options) -> Self {
        Self {
            options: options.networks.clone(),
            exempt: parse_networks(&options.networks.exempt),
            trusted: parse_networks(&options.trusted_proxies),
        }
    }

    fn prefix(&self, address: IpAddr) -> Prefix {
        let bits = |bits: u32| u8::try_from(bits).unwrap_or(u8::MAX);
        Prefix::new(address, bits(self.options.ipv4_prefix), bits(self.options.ipv6_prefix))
    }

    fn is_exempt(&self, address: IpAddr) -> bool {
        contains(&self.exempt, address)
    }

    fn requests(&self) -> Rate {
        Rate { per_second: self.options.requests_per_second, burst: self.options.requests_burst }
    }

    fn handshakes(&self) -> Rate {
        Rate { per_second: self.options.handshakes_per_second, burst: self.options.handshakes_burst }
    }
}

/// Networks of the settings, which have been checked.
pub fn parse_networks(texts: &[String]) -> Vec<IpNet> {
    let parse =
        |text: &String| text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).ok();
    texts.iter().filter_map(parse).collect()
}

pub fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// How a new connection counts.
#[derive(Debug)]
pub struct Admitted {
    pub group: Group,
    /// `None`: its network has no limits.
    pub network: Option<Arc<ClientNetwork>>,
    pub place: Option<Place>,
}

impl ClientLimits {
    pub fn new(shared: Arc<Shared>, options: &Options) -> Self {
        let policy = RefCell::new(Rc::new(Policy::new(options)));
        Self { shared, policy, turned_away: Cell::new(0), alone: Cell::new(0) }
    }

    pub fn set_options(&self, options: &Options) {
        *self.policy.borrow_mut() = Rc::new(Policy::new(options));
    }

    /// Counts a connection of `client` in.
    ///
    /// # Errors
    /// If its network has as many open as it may.
    pub fn admit_connection(&self, client: IpAddr) -> Result<Admitted, Refusal> {
        let policy = Rc::clone(&self.policy.borrow());
        if contains(&policy.trusted, client) {
            return Ok(self.admit_alone());
        }
        let group = Group::Network(policy.prefix(client));
        if policy.is_exempt(client) {
            return Ok(Admitted { group, network: None, place: None });
        }
        let network = self.shared.networks.find(policy.prefix(client));
        let Some(place) = network.take_place(policy.options.connections) else {
            self.note(LimitKind::Connections, network.prefix());
            return Err(Refusal::TooManyConnections { retry_after_seconds: RETRY_CONNECTION_SECONDS });
        };
        Ok(Admitted { group, network: Some(network), place: Some(place) })
    }

    /// Whether a peer's word on who the client is counts at an address that `named` are listed for. Nobody is listed: trusted
    /// proxies are.
    pub fn is_proxy(&self, named: &[IpNet], peer: IpAddr) -> bool {
        if named.is_empty() { contains(&self.policy.borrow().trusted, peer) } else { contains(named, peer) }
    }

    /// Counts a connection by itself, which is a trusted proxy's own or not yet known to be anybody's.
    pub fn admit_alone(&self) -> Admitted {
        let number = self.alone.get();
        self.alone.set(number.wrapping_add(1));
        Admitted { group: Group::Alone(number), network: None, place: None }
    }

    /// Counts a TLS handshake. False: its network begins them faster than it may.
    pub fn admit_handshake(&self, network: Option<&ClientNetwork>) -> bool {
        let Some(network) = network else { return true };
        let rate = self.policy.borrow().handshakes();
        let is_in = network.handshakes.take(self.shared.networks.now_ns(), rate).is_ok();
        if !is_in {
            self.note(LimitKind::Handshakes, network.prefix());
        }
        is_in
    }

    /// Counts a request of a client's, or of whom a trusted proxy says it is.
    ///
    /// # Errors
    /// If its network asks faster than it may.
    pub fn admit_request(&self, head: &Head, forwarding: &Forwarding) -> Result<(), Refusal> {
        let rate = self.policy.borrow().requests();
        // Another node that passes a request on has counted it.
        if rate.per_second == 0 || head.conn.carried.is_some() {
            return Ok(());
        }
        match &head.conn.network {
            Some(network) => self.count_request(network, rate),
            None => match self.find_relayed(head, forwarding) {
                Some(network) => self.count_request(&network, rate),
                None => Ok(()),
            },
        }
    }

    /// The network of a client behind a trusted proxy. `None` if it has no limits.
    fn find_relayed(&self, head: &Head, forwarding: &Forwarding) -> Option<Arc<ClientNetwork>> {
        let policy = Rc::clone(&self.policy.borrow());
        if !contains(&policy.trusted, head.conn.peer.ip()) {
            return None;
        }
        let client = forwarding.client(head);
        // A proxy that names nobody speaks for itself.
        let is_free = contains(&policy.trusted, client) || policy.is_exempt(client);
        (!is_free).then(|| self.shared.networks.find(policy.prefix(client)))
    }

    fn count_request(&self, network: &ClientNetwork, rate: Rate) -> Result<(), Refusal> {
        network.requests.take(self.shared.networks.now_ns(), rate).map_err(|wait| {
            self.note(LimitKind::Requests, network.prefix());
            Refusal::TooManyRequests { retry_after_seconds: whole_seconds(wait) }
        })
    }

    /// Counts a refusal, and says it in the log, within bounds.
    pub fn note(&self, kind: LimitKind, of: impl std::fmt::Display) {
        self.shared.metrics.client_limited(kind);
        self.shared.networks.reports.note(kind, self.shared.networks.now_ns(), of);
    }

    /// A place among those who are told why they are not served.
    pub fn turn_away(self: &Rc<Self>) -> Option<TurnedAway> {
        let turned_away = self.turned_away.get();
        (turned_away < TURNED_AWAY_MAX).then(|| {
            self.turned_away.set(turned_away + 1);
            TurnedAway(Rc::clone(self))
        })
    }
}

/// At least one, since a client is not to come back at once.
fn whole_seconds(wait: Duration) -> u32 {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    u32::try_from(seconds).unwrap_or(u32::MAX).max(1)
}

/// A client that is told why it is not served.
pub struct TurnedAway(Rc<ClientLimits>);

impl Drop for TurnedAway {
    fn drop(&mut self) {
        self.0.turned_away.set(self.0.turned_away.get() - 1);
    }
}

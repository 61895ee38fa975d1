//! Enforces the limits of client networks on one thread: applies the settings to the shared
//! counts.
//!
//! Not here: the counts (`clients`), the refusal's response (`refusal`), closing connections
//! (`connections`).

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use crate::http::clients::crowd::ConnectionGroup;
use crate::http::clients::network::{ClientNetwork, ClientNetworks, ClientPrefix, NetworkCountGuard};
use crate::http::clients::rate::RateLimit;
use crate::http::message::RequestHead;
use crate::http::networks::{contains, parse_networks};
use crate::http::proxy_headers::ForwardingRules;
use crate::http::refusal::Refusal;
use crate::metrics::{EdgeMetrics, LimitKind};
use crate::options::{EdgeConfig, NetworkOptions};

/// Maximum number of clients per thread that learn at once why their connection is refused.
/// Others are closed without a response.
const TURNED_AWAY_MAX: usize = 64;

/// Time to come back for a client that gets no connection. Its network has too many open, or
/// there is no place for it.
pub const RETRY_CONNECTION_SECONDS: u32 = 5;

/// One thread's view of the limits.
pub struct ClientLimits {
    networks: Arc<ClientNetworks>,
    metrics: Arc<EdgeMetrics>,
    policy: RefCell<Rc<LimitPolicy>>,
    turned_away: Cell<usize>,
    /// Next number of a connection that counts by itself.
    alone: Cell<u64>,
}

#[derive(Debug)]
struct LimitPolicy {
    options: NetworkOptions,
    exempt: Vec<IpNet>,
    trusted: Vec<IpNet>,
}

impl LimitPolicy {
    fn new(options: &EdgeConfig) -> Self {
        Self {
            options: options.networks.clone(),
            exempt: parse_networks(&options.networks.exempt),
            trusted: parse_networks(&options.trusted_proxies),
        }
    }

    fn prefix(&self, address: IpAddr) -> ClientPrefix {
        let bits = |bits: u32| u8::try_from(bits).unwrap_or(u8::MAX);
        ClientPrefix::new(address, bits(self.options.ipv4_prefix), bits(self.options.ipv6_prefix))
    }

    fn is_exempt(&self, address: IpAddr) -> bool {
        contains(&self.exempt, address)
    }

    fn requests(&self) -> RateLimit {
        RateLimit { per_second: self.options.requests_per_second, burst: self.options.requests_burst }
    }

    fn handshakes(&self) -> RateLimit {
        RateLimit { per_second: self.options.handshakes_per_second, burst: self.options.handshakes_burst }
    }
}

/// Group and counts of a new connection.
#[derive(Debug)]
pub struct AdmittedConnection {
    pub group: ConnectionGroup,
    /// `None` if its network has no limits.
    pub network: Option<Arc<ClientNetwork>>,
    #[expect(dead_code, reason = "the place is given back when this is dropped")]
    pub place: Option<NetworkCountGuard>,
}

impl ClientLimits {
    pub fn new(networks: Arc<ClientNetworks>, metrics: Arc<EdgeMetrics>, options: &EdgeConfig) -> Self {
        let policy = RefCell::new(Rc::new(LimitPolicy::new(options)));
        Self { networks, metrics, policy, turned_away: Cell::new(0), alone: Cell::new(0) }
    }

    pub fn set_options(&self, options: &EdgeConfig) {
        *self.policy.borrow_mut() = Rc::new(LimitPolicy::new(options));
    }

    /// Counts a new connection of `client`.
    ///
    /// # Errors
    /// Fails if its network has the maximum number of connections open.
    pub fn admit_connection(&self, client: IpAddr) -> Result<AdmittedConnection, Refusal> {
        let policy = Rc::clone(&self.policy.borrow());
        if contains(&policy.trusted, client) {
            return Ok(self.admit_alone());
        }
        let group = ConnectionGroup::Network(policy.prefix(client));
        if policy.is_exempt(client) {
            return Ok(AdmittedConnection { group, network: None, place: None });
        }
        let network = self.networks.find(policy.prefix(client));
        let Some(place) = network.take_place(policy.options.connections) else {
            self.note(LimitKind::Connections, network.prefix());
            return Err(Refusal::TooManyConnections { retry_after_seconds: RETRY_CONNECTION_SECONDS });
        };
        Ok(AdmittedConnection { group, network: Some(network), place: Some(place) })
    }

    /// Returns whether the peer may name the client at an address that lists `named`. If the list
    /// is empty, trusted proxies may.
    pub fn is_proxy(&self, named: &[IpNet], peer: IpAddr) -> bool {
        if named.is_empty() { contains(&self.policy.borrow().trusted, peer) } else { contains(named, peer) }
    }

    /// Counts a connection by itself. It is a trusted proxy's own, or its client is not known
    /// yet.
    pub fn admit_alone(&self) -> AdmittedConnection {
        let number = self.alone.get();
        self.alone.set(number.wrapping_add(1));
        AdmittedConnection { group: ConnectionGroup::Alone(number), network: None, place: None }
    }

    /// Counts a TLS handshake. Returns false if its network begins them too fast.
    pub fn admit_handshake(&self, network: Option<&ClientNetwork>) -> bool {
        let Some(network) = network else { return true };
        let rate = self.policy.borrow().handshakes();
        let is_in = network.handshakes.take(self.networks.now_ns(), rate).is_ok();
        if !is_in {
            self.note(LimitKind::Handshakes, network.prefix());
        }
        is_in
    }

    /// Counts a request of a client, possibly one named by a trusted proxy.
    ///
    /// # Errors
    /// Fails if its network sends requests too fast.
    pub fn admit_request(&self, head: &RequestHead, forwarding: &ForwardingRules) -> Result<(), Refusal> {
        let rate = self.policy.borrow().requests();
        // The node that forwarded a request has counted it.
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

    /// Returns the network of a client behind a trusted proxy. `None` if it has no limits.
    fn find_relayed(&self, head: &RequestHead, forwarding: &ForwardingRules) -> Option<Arc<ClientNetwork>> {
        let policy = Rc::clone(&self.policy.borrow());
        if !contains(&policy.trusted, head.conn.peer.ip()) {
            return None;
        }
        let client = forwarding.client(head);
        // A proxy that names nobody counts as the client.
        let is_free = contains(&policy.trusted, client) || policy.is_exempt(client);
        (!is_free).then(|| self.networks.find(policy.prefix(client)))
    }

    fn count_request(&self, network: &ClientNetwork, rate: RateLimit) -> Result<(), Refusal> {
        network.requests.take(self.networks.now_ns(), rate).map_err(|wait| {
            self.note(LimitKind::Requests, network.prefix());
            Refusal::TooManyRequests { retry_after_seconds: whole_seconds(wait) }
        })
    }

    /// Counts a refusal, and logs it at a limited rate.
    pub fn note(&self, kind: LimitKind, of: impl std::fmt::Display) {
        self.metrics.client_limited(kind);
        self.networks.reports.note(kind, self.networks.now_ns(), of);
    }

    /// Takes one of the places for clients that learn why they are refused.
    pub fn turn_away(self: &Rc<Self>) -> Option<TurnedAway> {
        let turned_away = self.turned_away.get();
        (turned_away < TURNED_AWAY_MAX).then(|| {
            self.turned_away.set(turned_away + 1);
            TurnedAway(Rc::clone(self))
        })
    }
}

/// Returns at least one second, because a client must not come back at once.
fn whole_seconds(wait: Duration) -> u32 {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    u32::try_from(seconds).unwrap_or(u32::MAX).max(1)
}

/// A client that learns why it is refused.
pub struct TurnedAway(Rc<ClientLimits>);

impl Drop for TurnedAway {
    fn drop(&mut self) {
        self.0.turned_away.set(self.0.turned_away.get() - 1);
    }
}

//! Holds the edge's settings, from `nagaya.toml` and its defaults.
//!
//! Not here: the file's grammar and its checks (`nagaya::config`), settings of one site
//! (`records::record`).

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use nagaya_rules::{RuleBudget, RuleFile};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

/// Node-wide settings. Times are milliseconds, sizes bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EdgeConfig {
    /// Name of this node in `Via`, receipts and logs.
    pub node: String,
    /// Number of edge threads. 0 means one per core.
    pub threads: usize,
    pub limits: EdgeLimits,
    pub networks: NetworkOptions,
    pub spool: SpoolOptions,
    pub log: LogOptions,
    pub receipts: ReceiptOptions,
    /// Rule files, in the order in which those of one phase run.
    pub rules: Vec<RuleFile>,
    /// Budget of one evaluation.
    pub rule_limits: RuleBudget,
    /// Addresses and networks of proxies whose `Forwarded` and `X-Forwarded-*` fields are
    /// believed.
    pub trusted_proxies: Vec<String>,
    /// HTTP/2 on plain connections by prior knowledge.
    pub h2c: bool,
    /// Requests of one tenant at once, if the tenant's record gives no number.
    pub tenant_max_concurrent: u32,
    /// Requests that may wait in one lane. Beyond it a client gets a ticket, or 503.
    pub max_waiting: u32,
    /// Longest predicted wait in line. The longest real wait is twice this.
    pub wait_ms: u64,
    pub admission: AdmissionOptions,
    /// PHP workers per tenant, if the tenant's record gives no number.
    pub php_workers: u32,
    /// Requests that one PHP worker serves before it is replaced.
    pub php_requests: u32,
    /// Time after which an idle PHP worker ends.
    pub php_idle_ms: u64,
    /// Socket on which the keeper listens.
    pub keeper: PathBuf,
    /// `None` if this node has no cluster.
    pub cluster: Option<ClusterOptions>,
}

/// This node's membership in its cluster, and its credentials for other nodes. The other members
/// are in their records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterOptions {
    /// This node's name, and the id in its record.
    pub node: String,
    pub id: String,
    /// PEM: certificates of the cluster's CA. There are two during a change.
    pub authorities: String,
    /// PEM: this node's chain, whose DNS name is `NODE.nagaya.internal`, and its key.
    pub certificate: String,
    pub key: String,
    /// Key of the probes' HMAC-SHA256 with which this node signs: 64 hexadecimal digits.
    pub probe_key: String,
    /// Other keys that nodes may sign with, while the cluster's keys change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probe_keys_also: Vec<String>,
    pub probe: ProbeKind,
    /// Maximum wait of a probe for an answer, milliseconds, 5 to 100. Measurements only shorten
    /// it.
    pub probe_ms: u64,
}

/// Maximum value of `EdgeLimits::header_fields`, for one request.
pub const HEADER_FIELDS_MAX: usize = 1_000;

/// Kind of probe for a node that was not heard from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeKind {
    /// A signed datagram to the edge, answered by a thread that does nothing else.
    #[default]
    Udp,
    /// A TCP connection to its edge, reset at once (SO_LINGER 0), as in paper 001.
    Connect,
    /// An ICMP echo to its host (`net.ipv4.ping_group_range` must allow it). It proves nothing
    /// about its edge.
    Icmp,
}

/// Limits for slow and oversized clients and backends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EdgeLimits {
    /// Request line and header fields together.
    pub head_bytes: usize,
    pub header_fields: usize,
    pub body_bytes: u64,
    /// From the first byte of a request to the end of its head.
    pub head_ms: u64,
    /// Longest silence while a body arrives or a response is taken.
    pub idle_body_ms: u64,
    /// Time without any sign of a client's machine after which the client counts as gone. At
    /// least `idle_body_ms`.
    pub vanished_ms: u64,
    /// Longest silence between two requests of a connection.
    pub keep_alive_ms: u64,
    pub keep_alive_requests: u32,
    pub backend: BackendLimits,
    /// Connections open at once, per edge thread.
    pub connections: usize,
    pub h2_streams: u32,
    /// Maximum time of a TLS handshake.
    pub handshake_ms: u64,
    /// Time that running requests may still take when draining.
    pub drain_ms: u64,
    /// Small hot files kept in memory, per edge thread.
    pub file_cache_bytes: usize,
    /// Minimum speed of clients, and their limits in HTTP/2.
    pub pace: PaceOptions,
}

/// Time limits of backends, if their site gives none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendLimits {
    /// From the request to the head of the answer.
    pub answer_ms: u64,
    /// Until it has accepted the connection.
    pub connect_ms: u64,
}

impl Default for BackendLimits {
    fn default() -> Self {
        Self { answer_ms: 60_000, connect_ms: 5_000 }
    }
}

/// Minimum rates of clients, as Apache's `RequestReadTimeout` has them, and limits of one HTTP/2
/// connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaceOptions {
    /// Maximum of `head_ms`, which grows with the received part of the head.
    pub head_max_ms: u64,
    /// Bytes of a head that extend its time by a second. With 0, none do.
    pub head_rate: u64,
    /// Time for a body of any length. With 0, there is no minimum rate.
    pub body_ms: u64,
    /// Bytes of a body that extend its time by a second. With 0, none do.
    pub body_rate: u64,
    /// Streams of one HTTP/2 connection that the client may reset before their response has
    /// ended. It is the number at once, and the number for each further minute.
    pub h2_resets: u32,
}

impl Default for PaceOptions {
    fn default() -> Self {
        Self { head_max_ms: 40_000, head_rate: 500, body_ms: 20_000, body_rate: 500, h2_resets: 200 }
    }
}

/// Limits of the clients of one network together, over all edge threads. 0 means no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkOptions {
    /// Leading bits of an address that make one network, 0 to 32. `ipv6_prefix` is the same for
    /// IPv6, 0 to 128.
    pub ipv4_prefix: u32,
    pub ipv6_prefix: u32,
    /// Connections open at once.
    pub connections: u32,
    pub requests_per_second: u32,
    /// Requests that may come at once.
    pub requests_burst: u32,
    /// TLS handshakes, full ones and those that resume a session.
    pub handshakes_per_second: u32,
    pub handshakes_burst: u32,
    /// Addresses and networks without these limits.
    pub exempt: Vec<String>,
}

impl Default for NetworkOptions {
    /// These numbers are for several hundred people at one address. Many people share one behind
    /// a carrier's NAT. Browsers open up to six connections to a host by HTTP/1, and request a
    /// page's hundred parts at once.
    fn default() -> Self {
        Self {
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            connections: 2_000,
            requests_per_second: 1_000,
            requests_burst: 5_000,
            handshakes_per_second: 200,
            handshakes_burst: 1_000,
            exempt: vec!["127.0.0.0/8".into(), "::1".into()],
        }
    }
}

/// Bodies on disk, in the directory that the supervisor gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpoolOptions {
    /// Maximum of all tenants.
    pub bytes: u64,
    pub tenant_bytes: u64,
}

impl Default for SpoolOptions {
    fn default() -> Self {
        Self { bytes: 8 << 30, tenant_bytes: 2 << 30 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogOptions {
    /// Access log. `None` if none is written.
    pub access: Option<PathBuf>,
    pub format: AccessLogFormat,
}

/// Disclosure of receipts to clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptOptions {
    /// Receipts that each edge thread keeps for `nagaya explain`. With 0, there are none, and the
    /// edge's own time on requests is not measured.
    pub keep: usize,
    /// Addresses and networks of clients that get `Server-Timing` and `Nagaya-Receipt`. If empty,
    /// nobody does.
    pub allow: Vec<String>,
}

impl Default for ReceiptOptions {
    fn default() -> Self {
        Self { keep: 8192, allow: Vec::new() }
    }
}

/// Treatment of requests beyond the limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdmissionOptions {
    /// Requests of all tenants at once. 0 means as many as their tenants may run.
    pub node_max_concurrent: u32,
    /// Bytes of request bodies held in one lane while their requests wait.
    pub body_bytes: u64,
    /// Tickets are issued if a lane is full.
    pub tickets: bool,
    /// Length of a ticket's slot.
    pub slot_ms: u64,
    /// Time ahead for which slots are given.
    pub horizon_ms: u64,
    /// Maximum number of open tickets of one lane.
    pub tickets_max: u32,
    /// Time for which a client is delayed that comes again before its given time.
    pub penalty_ms: u64,
}

impl Default for AdmissionOptions {
    fn default() -> Self {
        Self {
            node_max_concurrent: 0,
            body_bytes: 64 << 20,
            tickets: true,
            slot_ms: 15_000,
            horizon_ms: 3_600_000,
            tickets_max: 10_000,
            penalty_ms: 3_000,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessLogFormat {
    /// A combined line, followed by host, site, tenant and request id.
    Extended,
    Combined,
    Json,
}

impl Default for EdgeConfig {
    fn default() -> Self {
        Self {
            node: "localhost".into(),
            threads: 0,
            limits: EdgeLimits::default(),
            networks: NetworkOptions::default(),
            spool: SpoolOptions::default(),
            log: LogOptions { access: None, format: AccessLogFormat::Extended },
            receipts: ReceiptOptions::default(),
            rules: Vec::new(),
            rule_limits: RuleBudget::default(),
            trusted_proxies: Vec::new(),
            h2c: true,
            tenant_max_concurrent: 256,
            max_waiting: 1024,
            wait_ms: 30_000,
            admission: AdmissionOptions::default(),
            php_workers: 8,
            php_requests: 100_000,
            php_idle_ms: 60_000,
            keeper: PathBuf::from("/run/nagaya/keeper.sock"),
            cluster: None,
        }
    }
}

impl Default for EdgeLimits {
    fn default() -> Self {
        Self {
            head_bytes: 64 << 10,
            header_fields: 100,
            body_bytes: 1 << 30,
            head_ms: 10_000,
            idle_body_ms: 30_000,
            vanished_ms: 30_000,
            keep_alive_ms: 60_000,
            keep_alive_requests: 1_000_000,
            backend: BackendLimits::default(),
            connections: 10_000,
            h2_streams: 128,
            handshake_ms: 10_000,
            drain_ms: 30_000,
            file_cache_bytes: 32 << 20,
            pace: PaceOptions::default(),
        }
    }
}

/// The settings as they are now, for all threads.
#[derive(Debug)]
pub struct CurrentOptions(RwLock<Arc<EdgeConfig>>);

impl CurrentOptions {
    pub fn new(options: EdgeConfig) -> Self {
        Self(RwLock::new(Arc::new(options)))
    }

    pub fn get(&self) -> Arc<EdgeConfig> {
        Arc::clone(&self.0.read())
    }

    pub fn set(&self, options: EdgeConfig) {
        *self.0.write() = Arc::new(options);
    }
}

/// The limits as one thread knows them, until it gets the order to look again.
#[derive(Debug)]
pub struct ThreadLimits(RefCell<Rc<EdgeLimits>>);

impl ThreadLimits {
    pub fn new(options: &EdgeConfig) -> Self {
        Self(RefCell::new(Rc::new(options.limits.clone())))
    }

    pub fn get(&self) -> Rc<EdgeLimits> {
        Rc::clone(&self.0.borrow())
    }

    pub fn set_options(&self, options: &EdgeConfig) {
        *self.0.borrow_mut() = Rc::new(options.limits.clone());
    }
}

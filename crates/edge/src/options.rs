//! The edge's settings, as `nagaya.toml` and its defaults give them.
//!
//! Not here: the file's grammar and its checks (`nagaya::config`), settings of one site (`cmdb::record`).

use std::path::PathBuf;

use nagaya_rules::{Budget, RuleFile};
use serde::{Deserialize, Serialize};

/// Node-wide settings. Times are milliseconds, sizes bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Name of this node in `Via`, receipts and logs.
    pub node: String,
    /// Edge threads; 0 means one per core.
    pub threads: usize,
    pub limits: Limits,
    pub networks: NetworkOptions,
    pub spool: SpoolOptions,
    pub log: LogOptions,
    pub receipts: ReceiptOptions,
    /// Rule files, in the order in which those of one phase run.
    pub rules: Vec<RuleFile>,
    /// What one evaluation may use.
    pub rule_limits: Budget,
    /// Addresses and networks of proxies whose `Forwarded` and `X-Forwarded-*` fields are believed.
    pub trusted_proxies: Vec<String>,
    /// HTTP/2 on plain connections by prior knowledge.
    pub h2c: bool,
    /// Requests of one tenant at once, where the tenant's record gives no number.
    pub tenant_max_concurrent: u32,
    /// Requests that may wait in one lane; beyond it a ticket, or 503.
    pub max_waiting: u32,
    /// Longest predicted wait in line. Twice this is the longest that anybody waits.
    pub wait_ms: u64,
    pub admission: AdmissionOptions,
    /// PHP workers per tenant, where the tenant's record gives no number.
    pub php_workers: u32,
    /// Requests one PHP worker serves before it is replaced.
    pub php_requests: u32,
    /// An idle PHP worker ends after this.
    pub php_idle_ms: u64,
    /// Where the keeper listens.
    pub keeper: PathBuf,
    /// None: this node is alone.
    pub cluster: Option<ClusterOptions>,
}

/// This node's place in its cluster, and what it shows other nodes. Who they are stands in their records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterOptions {
    /// This node's name, and the id in its record.
    pub node: String,
    pub id: String,
    /// PEM: certificates of the cluster's authority; two while it is exchanged.
    pub authorities: String,
    /// PEM: this node's chain, whose DNS name is `NODE.nagaya.internal`, and its key.
    pub certificate: String,
    pub key: String,
    /// Key of the probes' HMAC-SHA256 that this node signs with: 64 hexadecimal digits.
    pub probe_key: String,
    /// Keys that other nodes may sign with, too, while the cluster's keys are exchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probe_keys_also: Vec<String>,
    pub probe: ProbeKind,
    /// Longest that a probe waits for an answer, milliseconds, 5 to 100: what is measured only shortens it.
    pub probe_ms: u64,
}

/// Most header fields of one request that `Limits::header_fields` may allow.
pub const HEADER_FIELDS_MAX: usize = 1_000;

/// How a node that was not heard from is asked whether it is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeKind {
    /// A signed datagram to the edge, answered by a thread that does nothing else.
    #[default]
    Udp,
    /// A TCP connection to its edge, reset at once (SO_LINGER 0), as paper 001 does it.
    Connect,
    /// An ICMP echo to its host (`net.ipv4.ping_group_range` must allow it): says nothing about its edge.
    Icmp,
}

/// Bounds against slow and oversized clients and backends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Request line and header fields together.
    pub head_bytes: usize,
    pub header_fields: usize,
    pub body_bytes: u64,
    /// From the first byte of a request to the end of its head.
    pub head_ms: u64,
    /// Longest silence while a body arrives or a response is taken.
    pub idle_body_ms: u64,
    /// A client whose machine gives no sign for so long is gone; or for `idle_body_ms`, if that is longer.
    pub vanished_ms: u64,
    /// Longest silence between two requests of a connection.
    pub keep_alive_ms: u64,
    pub keep_alive_requests: u32,
    pub backend: BackendLimits,
    /// Connections open at once, per edge thread.
    pub connections: usize,
    pub h2_streams: u32,
    /// TLS handshake.
    pub handshake_ms: u64,
    /// When draining: how long running requests may still take.
    pub drain_ms: u64,
    /// Small hot files kept in memory, per edge thread.
    pub file_cache_bytes: usize,
    /// How slow a client may be, and how much of HTTP/2 it may waste.
    pub pace: PaceOptions,
}

/// How long backends may take, where their site gives no number.
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

/// Least rates of clients, as Apache's `RequestReadTimeout` has them, and what one HTTP/2 connection may waste.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaceOptions {
    /// `head_ms` of the limits grows with what arrives of the head, up to this.
    pub head_max_ms: u64,
    /// Bytes of a head that make its time a second longer. 0: nothing does.
    pub head_rate: u64,
    /// Time that a body may take whatever its length. 0: no least rate holds.
    pub body_ms: u64,
    /// Bytes of a body that make its time a second longer. 0: nothing does.
    pub body_rate: u64,
    /// Streams of one HTTP/2 connection that the client may reset before their response has ended: at once, and then so many
    /// for each minute.
    pub h2_resets: u32,
}

impl Default for PaceOptions {
    fn default() -> Self {
        Self { head_max_ms: 40_000, head_rate: 500, body_ms: 20_000, body_rate: 500, h2_resets: 200 }
    }
}

/// What the clients of one network may do together, over all edge threads. 0: no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkOptions {
    /// Leading bits of an address that make one network: of IPv4, 0 to 32, and of IPv6, 0 to 128.
    pub ipv4_prefix: u32,
    pub ipv6_prefix: u32,
    /// Connections open at once.
    pub connections: u32,
    pub requests_per_second: u32,
    /// Requests that may come at once.
    pub requests_burst: u32,
    /// TLS handshakes, whether they are full or resume a session.
    pub handshakes_per_second: u32,
    pub handshakes_burst: u32,
    /// Addresses and networks that these limits do not hold for.
    pub exempt: Vec<String>,
}

impl Default for NetworkOptions {
    /// Many people share one address behind a carrier's NAT, and browsers open up to six connections to a host by HTTP/1 and
    /// ask for a page's hundred parts at once. These numbers are for several hundred of them at one address.
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
    /// Of all tenants.
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
    /// Access log; none is written if absent.
    pub access: Option<PathBuf>,
    pub format: LogFormat,
}

/// Who is told with the answer what a request used and waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptOptions {
    /// Receipts each edge thread keeps for `nagaya explain`. 0: none, and the edge's own time on requests is not measured.
    pub keep: usize,
    /// Addresses and networks of clients that get `Server-Timing` and `Nagaya-Receipt`. Empty: nobody.
    pub allow: Vec<String>,
}

impl Default for ReceiptOptions {
    fn default() -> Self {
        Self { keep: 8192, allow: Vec::new() }
    }
}

/// What becomes of those who come when as many run as may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdmissionOptions {
    /// Requests of all tenants at once. 0: as many as their tenants may.
    pub node_max_concurrent: u32,
    /// Bytes of request bodies held in one lane while their requests wait.
    pub body_bytes: u64,
    /// Tickets are given where a line is full.
    pub tickets: bool,
    /// Length of a ticket's slot.
    pub slot_ms: u64,
    /// How far ahead slots are given.
    pub horizon_ms: u64,
    /// Tickets of one lane that may be out at once.
    pub tickets_max: u32,
    /// So long a client is held that comes again before the time it was told.
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
pub enum LogFormat {
    /// A combined line, with host, site, tenant and request id behind it.
    Extended,
    Combined,
    Json,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node: "localhost".into(),
            threads: 0,
            limits: Limits::default(),
            networks: NetworkOptions::default(),
            spool: SpoolOptions::default(),
            log: LogOptions { access: None, format: LogFormat::Extended },
            receipts: ReceiptOptions::default(),
            rules: Vec::new(),
            rule_limits: Budget::default(),
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

impl Default for Limits {
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

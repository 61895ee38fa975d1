//! Declares every metric of the edge once. Its threads share them.
//!
//! Not here: counting (`telemetry`), requests for the text (the supervisor's admin socket), one
//! line per request (`access_log`).

use std::fmt;
use std::time::Duration;

use http::{Method, StatusCode, Version};
use nagaya_base::Code;
use nagaya_records::PlacementReason;
use nagaya_records::instance::{Tier, WakeReport, WakeStage};
use nagaya_telemetry::{Counter, CounterFamily, Gauge, Histogram, LabelDimension, MetricPage, Registry};

use crate::tenants::TenantMetrics;

pub(crate) const METHODS: LabelDimension = LabelDimension {
    label: "method",
    values: &["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "other"],
};
const PROTOCOLS: LabelDimension =
    LabelDimension { label: "protocol", values: &["HTTP/1.0", "HTTP/1.1", "HTTP/2"] };
const STATUS_CLASSES: LabelDimension =
    LabelDimension { label: "status", values: &["1xx", "2xx", "3xx", "4xx", "5xx"] };
const BACKENDS: LabelDimension =
    LabelDimension { label: "backend", values: &["static", "cgi", "php", "http", "app", "none"] };

/// The `reason` of each row of the table in `refusal`, and of a response that did not reach its
/// end.
pub(crate) const REASONS: LabelDimension = LabelDimension {
    label: "reason",
    values: &[
        "bad_request",
        "plain_http",
        "unknown_host",
        "misdirected",
        "not_found",
        "forbidden",
        "link_refused",
        "method",
        "method_unknown",
        "head_too_large",
        "target_too_long",
        "body_too_large",
        "request_timeout",
        "expectation",
        "version",
        "queue_full",
        "queue_timeout",
        "promised",
        "too_early",
        "ticket_invalid",
        "ticket_used",
        "network_connections",
        "network_requests",
        "connections_full",
        "overloaded",
        "spool_full",
        "files_hang",
        "backend_unreachable",
        "backend_invalid",
        "backend_timeout",
        "site_broken",
        "fenced",
        "nowhere",
        "not_placed_here",
        "may_be_done",
        "answer_lost",
        "moved_too_often",
        "other_site",
        "unplaced",
        "loop",
        "rule_broken",
        "ruled",
        "client_gone",
        "broken_off",
        "other",
    ],
};

/// Upper bounds in microseconds: from a small file in memory (tens of microseconds) to a slow
/// program (a minute).
const DURATION_BOUNDS_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 60_000_000,
];

/// `Tier::ALL` in their order.
const TIERS: LabelDimension =
    LabelDimension { label: "from", values: &["cold", "image", "reclaimed", "frozen", "quiet", "running"] };

/// `Stage::ALL` in their order, and the time after them.
const STAGES: LabelDimension = LabelDimension {
    label: "stage",
    values: &[
        "decide",
        "queue",
        "thaw",
        "sandbox",
        "restore",
        "boot",
        "ready",
        "image",
        "connect",
        "first_byte",
    ],
};
pub(crate) const FIRST_BYTE: usize = WakeStage::ALL.len();
const _: () = assert!(STAGES.values.len() == FIRST_BYTE + 1 && TIERS.values.len() == Tier::ALL.len());

/// Upper bounds in microseconds: from a thawed process (tens of microseconds) to the slowest start.
const WAKE_BOUNDS_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 60_000_000,
];

/// `Why::ALL` in their order.
const WHYS: LabelDimension = LabelDimension {
    label: "why",
    values: &["first", "silent", "refused", "fenced", "draining", "load", "operator"],
};
const _: () = assert!(WHYS.values.len() == PlacementReason::ALL.len());

/// Parts of a relocation that a request waited for, before its site is woken. The wake has stages
/// of its own.
const RELOCATION_STAGES: LabelDimension =
    LabelDimension { label: "stage", values: &["detect", "decide", "store", "asked"] };

const HOP: LabelDimension = LabelDimension { label: "to", values: &["first_byte"] };

/// Images between nodes.
const DIRECTIONS: LabelDimension = LabelDimension { label: "direction", values: &["in", "out"] };
const TAKEN: LabelDimension = LabelDimension { label: "result", values: &["here", "failed"] };

/// Direction of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageDirection {
    In,
    Out,
}

/// Result of a TLS handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeResult {
    Ok,
    /// The client broke off, or both sides have no common protocol.
    Failed,
    /// No certificate for the name, and no default.
    NoCertificate,
    /// The certificate for the name is unusable or unreadable.
    BrokenCertificate,
}

/// Source of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateLookup {
    /// From memory, without a check.
    Hit,
    /// From memory, after a check that the file is still the same.
    Unchanged,
    /// From the file: it is new or has changed.
    Loaded,
    /// There is no such file.
    Absent,
    /// The request for it failed, or the content of the file is unusable.
    Broken,
}

/// Source of a request's connection to a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamConnection {
    Opened,
    Reused,
    Failed,
}

/// All metrics of an edge. Share it with `Arc`: every method is a few additions.
pub struct EdgeMetrics {
    registry: Registry,
    pub(crate) tenants_served: TenantMetrics,
    pub(crate) requests: CounterFamily<4>,
    pub(crate) refusals: CounterFamily<1>,
    pub(crate) request_duration: Histogram,
    pub(crate) received: Counter,
    pub(crate) sent: Counter,
    pub(crate) figures: ReceiptMetrics,
    pub connections_open: Gauge,
    pub connections_accepted: Counter,
    /// Connections refused because the maximum number was open.
    pub connections_refused: Counter,
    clients: ClientMetrics,
    handshakes: CounterFamily<1>,
    certificates: CounterFamily<1>,
    file_cache: CounterFamily<1>,
    pub file_cache_bytes: Gauge,
    /// Bodies that wait, in memory and on disk.
    pub spool_memory_bytes: Gauge,
    pub spool_disk_bytes: Gauge,
    pub cgi_spawned: Counter,
    pub cgi_running: Gauge,
    pub php_spawned: Counter,
    pub php_workers: Gauge,
    /// Requests that wait for their tenant's or site's turn.
    pub waiting: Gauge,
    upstream_connections: CounterFamily<1>,
    pub upstream_retries: Counter,
    pub(crate) wakes: WakeMetrics,
    pub(crate) moves: PlacementMetrics,
    log_lines: CounterFamily<1>,
    pub sites: Gauge,
    pub tenants: Gauge,
}

/// Metrics of client networks.
#[derive(Debug)]
struct ClientMetrics {
    limits: CounterFamily<1>,
    evicted: CounterFamily<1>,
}

impl ClientMetrics {
    fn new(r: &mut Registry) -> Self {
        let by = |label, values| [LabelDimension { label, values }];
        Self {
            limits: r.counters(
                "client_limits",
                "Connections and requests refused by limits on their client's network, and by the connection limit",
                by("limit", LimitKind::LABELS),
            ),
            evicted: r.counters(
                "connections_evicted",
                "Client connections closed to make room for a client whose network holds fewer, by what they did",
                by("phase", ConnectionPhase::LABELS),
            ),
        }
    }
}

/// Sums of the figures in receipts, by kind of backend.
#[derive(Debug)]
pub(crate) struct ReceiptMetrics {
    pub(crate) cpu: CounterFamily<1>,
    pub(crate) read: CounterFamily<1>,
    pub(crate) written: CounterFamily<1>,
    pub(crate) throttled: CounterFamily<1>,
    pub(crate) demotions: CounterFamily<1>,
    pub(crate) paced: CounterFamily<1>,
    pub(crate) queued: CounterFamily<1>,
}

impl ReceiptMetrics {
    fn new(r: &mut Registry) -> Self {
        let by = [BACKENDS];
        Self {
            cpu: r.time_counters("cell_cpu", "CPU time of requests' programs", by),
            read: r.bytes_counters("cell_read", "Bytes requests' programs read from disks", by),
            written: r.bytes_counters("cell_written", "Bytes requests' programs wrote to disks", by),
            throttled: r.time_counters(
                "cell_throttled",
                "Time in which programs of requests were throttled by a CPU quota",
                by,
            ),
            demotions: r.counters("cell_demotions", "Steps by which running requests were slowed down", by),
            paced: r.time_counters(
                "http_request_paced",
                "Time bodies and ends of responses were held back by limits",
                by,
            ),
            queued: r.time_counters("http_request_queued", "Time requests waited for their turn", by),
        }
    }
}

/// Metrics of instances that requests waited for.
#[derive(Debug)]
pub(crate) struct WakeMetrics {
    pub(crate) waits: Histogram,
    pub(crate) stages: Histogram,
}

impl WakeMetrics {
    fn new(r: &mut Registry) -> Self {
        Self {
            waits: r.histogram(
                "instance_wake_wait",
                "Time requests waited for an application that rested, by how deep it did",
                TIERS,
                WAKE_BOUNDS_US,
            ),
            stages: r.histogram(
                "instance_wake_stage",
                "Parts of the wakes that requests waited for; first_byte is from then to the head of their answers",
                STAGES,
                WAKE_BOUNDS_US,
            ),
        }
    }
}

/// Metrics of requests whose sites run elsewhere, or did.
#[derive(Debug)]
pub(crate) struct PlacementMetrics {
    pub(crate) placed: Counter,
    pub(crate) relocations: CounterFamily<1>,
    pub(crate) stages: Histogram,
    pub(crate) hops: Histogram,
    pub(crate) images: CounterFamily<1>,
    pub(crate) image_bytes: CounterFamily<1>,
}

impl PlacementMetrics {
    fn new(r: &mut Registry) -> Self {
        Self {
            placed: r
                .counter("placed_requests", "Requests to applications that are placed here, in a cluster"),
            relocations: r.counters("relocations", "Requests that had their site placed again", [WHYS]),
            stages: r.histogram(
                "relocation_stage",
                "Parts of relocations that requests waited for, before the application was woken",
                RELOCATION_STAGES,
                WAKE_BOUNDS_US,
            ),
            hops: r.histogram(
                "forwarded_request",
                "Time from forwarding a request to another node to the head of its response",
                HOP,
                WAKE_BOUNDS_US,
            ),
            images: r.counters(
                "images_taken",
                "Images of applications that were to come from another node, by whether one came",
                [TAKEN],
            ),
            image_bytes: r.counters(
                "image_transfer_bytes",
                "Bytes of images that came from other nodes or went there",
                [DIRECTIONS],
            ),
        }
    }
}

impl Default for EdgeMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Prints no numbers: much of the edge holds them, and failing tests would print them.
impl fmt::Debug for EdgeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl EdgeMetrics {
    pub fn new() -> Self {
        let mut r = Registry::new();
        let by = |label, values| [LabelDimension { label, values }];
        Self {
            requests: r.counters(
                "http_requests",
                "Requests answered or refused",
                [METHODS, PROTOCOLS, STATUS_CLASSES, BACKENDS],
            ),
            refusals: r.counters("http_refusals", "Requests that the node itself refused", [REASONS]),
            request_duration: r.histogram(
                "http_request_duration",
                "Time from the first byte of a request to the last byte of its response",
                BACKENDS,
                DURATION_BOUNDS_US,
            ),
            received: r.bytes_counter("http_received", "Bytes of request bodies"),
            sent: r.bytes_counter("http_sent", "Bytes of response bodies"),
            figures: ReceiptMetrics::new(&mut r),
            connections_open: r.gauge("connections_open", "Client connections open now"),
            connections_accepted: r.counter("connections_accepted", "Client connections accepted"),
            connections_refused: r
                .counter("connections_refused", "Client connections refused at the connection limit"),
            clients: ClientMetrics::new(&mut r),
            handshakes: r.counters(
                "tls_handshakes",
                "TLS handshakes",
                by("result", &["ok", "failed", "no_certificate", "broken_certificate"]),
            ),
            certificates: r.counters(
                "certificate_lookups",
                "Certificates looked for",
                by("result", &["hit", "unchanged", "loaded", "absent", "broken"]),
            ),
            file_cache: r.counters(
                "file_cache_lookups",
                "Files looked for in memory",
                by("result", &["hit", "miss"]),
            ),
            file_cache_bytes: r.gauge("file_cache_bytes", "Bytes of files kept in memory"),
            spool_memory_bytes: r.gauge("spool_memory_bytes", "Bytes in memory of bodies that wait"),
            spool_disk_bytes: r.gauge("spool_disk_bytes", "Bytes reserved on disk for bodies that wait"),
            cgi_spawned: r.counter("cgi_spawned", "CGI programs started"),
            cgi_running: r.gauge("cgi_running", "CGI programs running now"),
            php_spawned: r.counter("php_workers_spawned", "PHP workers started"),
            php_workers: r.gauge("php_workers", "PHP workers alive now"),
            waiting: r.gauge("requests_waiting", "Requests waiting for their tenant's or site's turn"),
            upstream_connections: r.counters(
                "upstream_connections",
                "Connections to backends that were requested",
                by("result", &["opened", "reused", "failed"]),
            ),
            upstream_retries: r.counter("upstream_retries", "Requests sent to a backend a second time"),
            wakes: WakeMetrics::new(&mut r),
            moves: PlacementMetrics::new(&mut r),
            log_lines: r.counters(
                "access_log_lines",
                "Lines for the access log",
                by("result", &["written", "dropped"]),
            ),
            sites: r.gauge("sites", "Sites known"),
            tenants: r.gauge("tenants", "Tenants known"),
            registry: r,
            tenants_served: TenantMetrics::default(),
        }
    }

    /// Returns all metrics as text, of media type [`nagaya_telemetry::CONTENT_TYPE`].
    pub fn encode(&self) -> String {
        self.registry.encode()
    }

    /// Adds the counters of each tenant.
    pub fn expose_tenants(&self, page: &mut MetricPage) {
        self.tenants_served.expose(page);
    }

    /// Counts a wake that requests of a thread waited for.
    pub fn wake(&self, wake: &WakeReport) {
        for (stage, us) in &wake.stages {
            self.wakes.stages.observe(*stage as usize, Duration::from_micros(*us));
        }
    }

    /// Counts a request that is served here, where its site is placed.
    pub fn stayed_here(&self) {
        self.moves.placed.inc();
    }

    /// Returns the number of those.
    pub fn placed_requests(&self) -> u64 {
        self.moves.placed.get()
    }

    /// Counts a forwarded request, and the time until another node began to respond.
    pub fn forwarded(&self, took: Duration) {
        self.moves.hops.observe(0, took);
    }

    /// Counts an attempt to fetch an image from another node.
    pub fn image_taken(&self, is_here: bool) {
        self.moves.images.add([usize::from(!is_here)], 1);
    }

    /// Counts bytes of a transferred image.
    pub fn image_bytes(&self, direction: ImageDirection, len: usize) {
        self.moves.image_bytes.add([direction as usize], len as u64);
    }

    pub fn client_limited(&self, kind: LimitKind) {
        self.clients.limits.add([kind as usize], 1);
    }

    pub fn evicted(&self, phase: ConnectionPhase) {
        self.clients.evicted.add([phase as usize], 1);
    }

    pub fn handshake(&self, how: HandshakeResult) {
        self.handshakes.add([how as usize], 1);
    }

    pub fn certificate(&self, from: CertificateLookup) {
        self.certificates.add([from as usize], 1);
    }

    pub fn file_cache(&self, hits: u64, misses: u64) {
        self.file_cache.add([0], hits);
        self.file_cache.add([1], misses);
    }

    pub fn upstream_connection(&self, how: UpstreamConnection) {
        self.upstream_connections.add([how as usize], 1);
    }

    pub fn log_lines_written(&self, n: u64) {
        self.log_lines.add([0], n);
    }

    pub fn log_lines_dropped(&self, n: u64) {
        self.log_lines.add([1], n);
    }

    /// Returns the number of lines written and dropped so far.
    pub fn log_lines(&self) -> (u64, u64) {
        (self.log_lines.get([0]), self.log_lines.get([1]))
    }
}

pub(crate) fn method_position(method: &Method) -> usize {
    match *method {
        Method::GET => 0,
        Method::HEAD => 1,
        Method::POST => 2,
        Method::PUT => 3,
        Method::DELETE => 4,
        Method::OPTIONS => 5,
        Method::PATCH => 6,
        _ => 7,
    }
}

pub(crate) fn protocol_position(version: Version) -> usize {
    match version {
        Version::HTTP_10 => 0,
        Version::HTTP_2 => 2,
        _ => 1,
    }
}

pub(crate) fn status_position(status: StatusCode) -> usize {
    usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.values.len()) - 1
}

pub(crate) fn backend_position(kind: Option<&'static str>) -> usize {
    match kind {
        Some("static") => 0,
        Some("cgi") => 1,
        Some("php") => 2,
        Some("http") => 3,
        Some("app") => 4,
        _ => 5,
    }
}

/// Phase of a connection. The first ones are closed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionPhase {
    /// Between two requests, or before the first.
    Idle,
    /// A handshake, a head or a body has begun to arrive and has not ended.
    Arriving,
    /// A request runs or is answered.
    Working,
}

impl ConnectionPhase {
    pub const LABELS: &[&str] = &["idle", "arriving", "working"];
}

/// Reasons to refuse clients, or to close connections. In the order of the metric's labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// Its network has the maximum number of connections open.
    Connections,
    /// Its network sends requests too fast.
    Requests,
    /// Its network begins TLS handshakes too fast.
    Handshakes,
    /// No connection of this thread could be closed for it.
    Full,
    /// It sends no PROXY header where it must, or sends one where it may not.
    ProxyHeader,
}

impl LimitKind {
    pub const LABELS: &[&str] = &["connections", "requests", "handshakes", "full", "proxy_header"];

    pub fn code(self) -> Code {
        match self {
            Self::Connections => Code(480),
            Self::Requests => Code(481),
            Self::Handshakes => Code(482),
            Self::Full => Code(483),
            Self::ProxyHeader => Code(484),
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Connections => "connections were refused: their network has as many open as it may",
            Self::Requests => "requests were refused: their network sends more per second than allowed",
            Self::Handshakes => {
                "connections were closed: their network begins more TLS handshakes per second than allowed"
            }
            Self::Full => "connections were refused: an edge thread has as many open as it may",
            Self::ProxyHeader => {
                "connections were closed: they began with no PROXY header that is accepted here"
            }
        }
    }
}

#[cfg(test)]
mod tests;

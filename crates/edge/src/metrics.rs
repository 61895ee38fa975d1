//! Every metric of the edge, declared once and shared by its threads.
//!
//! Not here: how counting works (`telemetry`), who asks for the text (the admin socket of the supervisor),
//! one line per request (`access_log`).

use std::time::Duration;

use http::{Method, StatusCode, Version};
use nagaya_cmdb::Why;
use nagaya_cmdb::instance::{Stage, Tier, Wake};
use nagaya_telemetry::{Counter, Counters, Dimension, Gauge, Histogram, Registry};

use crate::access_log::{AccessRecord, Used};
use crate::clients::LimitKind;
use crate::clients::crowd::Phase;
use crate::place::Relocated;
use crate::tenants::TenantTallies;

const METHODS: Dimension = Dimension {
    label: "method",
    values: &["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "other"],
};
const PROTOCOLS: Dimension = Dimension { label: "protocol", values: &["HTTP/1.0", "HTTP/1.1", "HTTP/2"] };
const STATUS_CLASSES: Dimension = Dimension { label: "status", values: &["1xx", "2xx", "3xx", "4xx", "5xx"] };
const BACKENDS: Dimension =
    Dimension { label: "backend", values: &["static", "cgi", "php", "http", "app", "none"] };

/// The `reason` of each row of the table in `refusal`, and of an answer that did not reach its end.
const REASONS: Dimension = Dimension {
    label: "reason",
    values: &[
        "bad_request",
        "plain_http",
        "unknown_host",
        "misdirected",
        "not_found",
        "forbidden",
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

/// Upper bounds in microseconds: from a small file out of memory (tens of microseconds) to a slow program (a minute).
const DURATION_BOUNDS_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 60_000_000,
];

/// `Tier::ALL` in their order.
const TIERS: Dimension =
    Dimension { label: "from", values: &["cold", "image", "reclaimed", "frozen", "quiet", "running"] };

/// `Stage::ALL` in their order, and what follows them.
const STAGES: Dimension = Dimension {
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
const FIRST_BYTE: usize = Stage::ALL.len();
const _: () = assert!(STAGES.values.len() == FIRST_BYTE + 1 && TIERS.values.len() == Tier::ALL.len());

/// Upper bounds in microseconds: from a thawed process (tens of microseconds) to the slowest start.
const WAKE_BOUNDS_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 60_000_000,
];

/// `Why::ALL` in their order.
const WHYS: Dimension = Dimension {
    label: "why",
    values: &["first", "silent", "refused", "fenced", "draining", "load", "operator"],
};
const _: () = assert!(WHYS.values.len() == Why::ALL.len());

/// Parts of a relocation that a request waited for, before its site is woken: that has stages of its own.
const RELOCATION_STAGES: Dimension =
    Dimension { label: "stage", values: &["detect", "decide", "store", "asked"] };

const HOP: Dimension = Dimension { label: "to", values: &["first_byte"] };

/// Images between nodes.
const DIRECTIONS: Dimension = Dimension { label: "direction", values: &["in", "out"] };
const TAKEN: Dimension = Dimension { label: "result", values: &["here", "failed"] };

/// Which way an image goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
}

/// How a TLS handshake ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handshake {
    Ok,
    /// The client broke off, or both sides speak nothing in common.
    Failed,
    /// No certificate for the name, and no default.
    NoCertificate,
    /// The certificate for the name cannot be used, or not be read.
    BrokenCertificate,
}

/// Where a certificate came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateLookup {
    /// From memory, without asking.
    Hit,
    /// From memory, after seeing that the file is still the same.
    Unchanged,
    /// From the file: it is new or has changed.
    Loaded,
    /// There is no such file.
    Absent,
    /// It could not be asked for, or what the file holds cannot be used.
    Broken,
}

/// How a request got its connection to a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamConnection {
    Opened,
    Reused,
    Failed,
}

/// All metrics of an edge. Share it with `Arc`; every method is a few additions.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    tenants_served: TenantTallies,
    requests: Counters<4>,
    refusals: Counters<1>,
    request_duration: Histogram,
    received: Counter,
    sent: Counter,
    figures: Figures,
    pub connections_open: Gauge,
    pub connections_accepted: Counter,
    /// Connections refused because as many were open as may be.
    pub connections_refused: Counter,
    clients: Clients,
    handshakes: Counters<1>,
    certificates: Counters<1>,
    file_cache: Counters<1>,
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
    upstream_connections: Counters<1>,
    pub upstream_retries: Counter,
    wakes: Wakes,
    moves: Moves,
    log_lines: Counters<1>,
    pub sites: Gauge,
    pub tenants: Gauge,
    /// Revision of the store that this process has reached.
    pub revision: Gauge,
}

/// Of networks of clients.
#[derive(Debug)]
struct Clients {
    limits: Counters<1>,
    evicted: Counters<1>,
}

impl Clients {
    fn new(r: &mut Registry) -> Self {
        let by = |label, values| [Dimension { label, values }];
        Self {
            limits: r.counters(
                "client_limits",
                "Connections and requests refused by limits on their client's network, and by the connection limit",
                by("limit", LimitKind::LABELS),
            ),
            evicted: r.counters(
                "connections_evicted",
                "Client connections closed to make room for a client whose network holds fewer, by what they did",
                by("phase", Phase::LABELS),
            ),
        }
    }
}

/// Sums of what receipts say, by kind of backend.
#[derive(Debug)]
struct Figures {
    cpu: Counters<1>,
    read: Counters<1>,
    written: Counters<1>,
    throttled: Counters<1>,
    demotions: Counters<1>,
    paced: Counters<1>,
    queued: Counters<1>,
}

impl Figures {
    fn new(r: &mut Registry) -> Self {
        let by = [BACKENDS];
        Self {
            cpu: r.time_counters("cell_cpu", "CPU time of requests' programs", by),
            read: r.bytes_counters("cell_read", "Bytes requests' programs read from disks", by),
            written: r.bytes_counters("cell_written", "Bytes requests' programs wrote to disks", by),
            throttled: r.time_counters(
                "cell_throttled",
                "Time requests' programs stood still because a CPU quota was used up",
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

    fn add(&self, record: &AccessRecord, backend: usize) {
        if !record.queued.is_zero() {
            self.queued.add([backend], u64::try_from(record.queued.as_micros()).unwrap_or(u64::MAX));
        }
        let Some(more) = &record.more else { return };
        self.paced.add([backend], more.paced_us);
        if let Used::Known(usage) = more.used {
            self.cpu.add([backend], usage.cpu_us);
            self.read.add([backend], usage.read_bytes);
            self.written.add([backend], usage.write_bytes);
            self.throttled.add([backend], usage.throttled_us);
            self.demotions.add([backend], usage.demoted.into());
        }
    }
}

/// Of instances that requests waited for.
#[derive(Debug)]
struct Wakes {
    waits: Histogram,
    stages: Histogram,
}

impl Wakes {
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

/// Of requests whose sites run elsewhere, or did.
#[derive(Debug)]
struct Moves {
    placed: Counter,
    relocations: Counters<1>,
    stages: Histogram,
    hops: Histogram,
    images: Counters<1>,
    image_bytes: Counters<1>,
}

impl Moves {
    fn new(r: &mut Registry) -> Self {
        Self {
            placed: r
                .counter("placed_requests", "Requests to applications that are placed here, in a cluster"),
            relocations: r.counters(
                "relocations",
                "Requests that asked for another place for their site",
                [WHYS],
            ),
            stages: r.histogram(
                "relocation_stage",
                "Parts of relocations that requests waited for, before the application was woken",
                RELOCATION_STAGES,
                WAKE_BOUNDS_US,
            ),
            hops: r.histogram(
                "forwarded_request",
                "From passing a request on to another node to the head of its answer",
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

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut r = Registry::new();
        let by = |label, values| [Dimension { label, values }];
        Self {
            requests: r.counters(
                "http_requests",
                "Requests answered or refused",
                [METHODS, PROTOCOLS, STATUS_CLASSES, BACKENDS],
            ),
            refusals: r.counters("http_refusals", "Requests the node itself said no to", [REASONS]),
            request_duration: r.histogram(
                "http_request_duration",
                "From the first byte of a request to the last of its response",
                BACKENDS,
                DURATION_BOUNDS_US,
            ),
            received: r.bytes_counter("http_received", "Bytes of request bodies"),
            sent: r.bytes_counter("http_sent", "Bytes of response bodies"),
            figures: Figures::new(&mut r),
            connections_open: r.gauge("connections_open", "Client connections open now"),
            connections_accepted: r.counter("connections_accepted", "Client connections accepted"),
            connections_refused: r
                .counter("connections_refused", "Client connections refused at the connection limit"),
            clients: Clients::new(&mut r),
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
                "Connections to backends asked for",
                by("result", &["opened", "reused", "failed"]),
            ),
            upstream_retries: r.counter("upstream_retries", "Requests sent to a backend a second time"),
            wakes: Wakes::new(&mut r),
            moves: Moves::new(&mut r),
            log_lines: r.counters(
                "access_log_lines",
                "Lines for the access log",
                by("result", &["written", "dropped"]),
            ),
            sites: r.gauge("sites", "Sites known"),
            tenants: r.gauge("tenants", "Tenants known"),
            revision: r.gauge("store_revision", "Revision of the store this process has reached"),
            registry: r,
            tenants_served: TenantTallies::default(),
        }
    }

    /// All metrics as text, of media type [`nagaya_telemetry::CONTENT_TYPE`].
    pub fn encode(&self) -> String {
        self.registry.encode()
    }

    /// What is counted of each tenant, in the text format.
    pub fn encode_tenants(&self) -> String {
        self.tenants_served.text()
    }

    /// One request is over.
    pub fn request(&self, record: &AccessRecord) {
        let backend = backend_position(record.site.as_ref().map(|site| site.backend.kind()));
        let method = record.method.as_ref().map_or(METHODS.values.len() - 1, method_position);
        let status = status_position(record.status);
        self.requests.add([method, protocol_position(record.version), status, backend], 1);
        self.request_duration.observe(backend, record.took);
        if record.bytes_in > 0 {
            self.received.add(record.bytes_in);
        }
        self.sent.add(record.bytes_out);
        self.figures.add(record, backend);
        self.tenants_served.add(record);
        if let Some(woken) = record.woken() {
            self.wakes.waits.observe(woken.wake.from as usize, woken.waited);
            self.wakes.stages.observe(FIRST_BYTE, record.backend);
        }
        if let Some(reason) = record.refusal {
            let last = REASONS.values.len() - 1;
            let at = REASONS.values.iter().position(|r| *r == reason).unwrap_or(last);
            self.refusals.add([at], 1);
        }
    }

    /// A thread's requests waited for this wake.
    pub fn wake(&self, wake: &Wake) {
        for (stage, us) in &wake.stages {
            self.wakes.stages.observe(*stage as usize, Duration::from_micros(*us));
        }
    }

    /// A request has found its site another place.
    pub fn relocated(&self, relocated: &Relocated) {
        let why = Why::ALL.iter().position(|why| *why == relocated.why).unwrap_or_default();
        self.moves.relocations.add([why], 1);
        let stages = [relocated.detect, relocated.decide, relocated.store, relocated.asked];
        for (at, took) in stages.into_iter().enumerate() {
            self.moves.stages.observe(at, took);
        }
    }

    /// A request is to be served here, where its site is placed.
    pub fn stayed_here(&self) {
        self.moves.placed.inc();
    }

    /// How many there were.
    pub fn placed_requests(&self) -> u64 {
        self.moves.placed.get()
    }

    /// Another node has begun to answer a request, so long after it was sent there.
    pub fn forwarded(&self, took: Duration) {
        self.moves.hops.observe(0, took);
    }

    /// An image was to come from another node.
    pub fn image_taken(&self, is_here: bool) {
        self.moves.images.add([usize::from(!is_here)], 1);
    }

    /// So much of an image came, or went.
    pub fn image_bytes(&self, direction: Direction, len: usize) {
        self.moves.image_bytes.add([direction as usize], len as u64);
    }

    pub fn client_limited(&self, kind: LimitKind) {
        self.clients.limits.add([kind as usize], 1);
    }

    pub fn evicted(&self, phase: Phase) {
        self.clients.evicted.add([phase as usize], 1);
    }

    pub fn handshake(&self, how: Handshake) {
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

    /// Lines written and dropped so far.
    pub fn log_lines(&self) -> (u64, u64) {
        (self.log_lines.get([0]), self.log_lines.get([1]))
    }
}

fn method_position(method: &Method) -> usize {
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

fn protocol_position(version: Version) -> usize {
    match version {
        Version::HTTP_10 => 0,
        Version::HTTP_2 => 2,
        _ => 1,
    }
}

fn status_position(status: StatusCode) -> usize {
    usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.values.len()) - 1
}

fn backend_position(kind: Option<&'static str>) -> usize {
    match kind {
        Some("static") => 0,
        Some("cgi") => 1,
        Some("php") => 2,
        Some("http") => 3,
        Some("app") => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests;

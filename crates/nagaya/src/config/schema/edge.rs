//! Keys of the edge's limits: requests, networks of clients, and waiting bodies.
//!
//! Not here: its other keys, the type of a key (`schema`).

use nagaya_base::limits::KEEPER_MESSAGE_MAX;

use super::*;

/// Largest header section of a request that may be configured. It becomes a CGI environment. That
/// must fit one keeper message together with its server variables and, per field, `HTTP_` and two
/// length prefixes.
const HEAD_BYTES_MAX: u64 = 96 * KIB;
const HEADER_FIELDS_MAX: u64 = nagaya_edge::options::HEADER_FIELDS_MAX as u64;
const _: () = assert!(HEAD_BYTES_MAX + HEADER_FIELDS_MAX * 10 + 16 * KIB <= KEEPER_MESSAGE_MAX as u64);

pub(super) const LIMITS: &[KeyRow<NodeSettings>] = &[
    key!(
        "head_bytes",
        "0.1",
        size(KIB, HEAD_BYTES_MAX),
        edge.limits.head_bytes,
        "Request line and header fields together."
    ),
    key!(
        "header_fields",
        "0.1",
        count(10, HEADER_FIELDS_MAX),
        edge.limits.header_fields,
        "Header fields of one request."
    ),
    key!("body_bytes", "0.1", size(0, TIB), edge.limits.body_bytes, "Body of one request."),
    key!(
        "head_timeout",
        "0.1",
        time(100, HOUR),
        edge.limits.head_ms,
        "Time from the first byte of a request to the end of its head, for an empty head. Each \
         `head_min_rate` bytes add a second."
    ),
    key!(
        "head_timeout_max",
        "0.1",
        time(100, HOUR),
        edge.limits.pace.head_max_ms,
        "Longest time for a head, however fast it arrives. Not less than `head_timeout`."
    ),
    key!(
        "head_min_rate",
        "0.1",
        size(0, GIB),
        edge.limits.pace.head_rate,
        "Bytes of a head that add a second to `head_timeout`. `0`: no bytes add time."
    ),
    key!(
        "body_timeout",
        "0.1",
        time(0, DAY),
        edge.limits.pace.body_ms,
        "Time for the body of a request of any length. Each `body_min_rate` bytes add a second; a slower \
         client gets 408. Only waits for the client count. `0`: no minimum rate applies."
    ),
    key!(
        "body_min_rate",
        "0.1",
        size(0, GIB),
        edge.limits.pace.body_rate,
        "Bytes of a body that add a second to `body_timeout`. `0`: no bytes add time, so `body_timeout` \
         limits the whole body."
    ),
    key!(
        "idle_body_timeout",
        "0.1",
        time(100, HOUR),
        edge.limits.idle_body_ms,
        "Longest silence while a body arrives or a client reads a response."
    ),
    key!(
        "vanished_timeout",
        "0.1",
        time(2_000, HOUR),
        edge.limits.vanished_ms,
        "Time without a sign of a client's machine after which it counts as gone. Its place in the queue or \
         its permit is then free. When nothing else comes, the kernel asks for a sign (TCP keep-alive). If \
         `idle_body_timeout` is longer, that time counts."
    ),
    key!(
        "keep_alive_timeout",
        "0.1",
        time(0, DAY),
        edge.limits.keep_alive_ms,
        "Longest silence between two requests of a connection."
    ),
    key!(
        "keep_alive_requests",
        "0.1",
        count(1, 4_000_000_000),
        edge.limits.keep_alive_requests,
        "Requests of one connection, over HTTP/1.1 and HTTP/2."
    ),
    key!(
        "backend_timeout",
        "0.1",
        time(100, DAY),
        edge.limits.backend.answer_ms,
        "Time from the request to the head of the backend's response, unless the site has a number. A CGI \
         or PHP program under a limit may use that much CPU time. It gets an hour at most, and only while \
         it makes progress."
    ),
    key!(
        "backend_connect_timeout",
        "0.1",
        time(10, HOUR),
        edge.limits.backend.connect_ms,
        "Time in which a backend must accept the connection."
    ),
    key!(
        "connections",
        "0.1",
        count(1, 10_000_000),
        edge.limits.connections,
        "Connections open at once, for each edge thread. Beyond it, the network with the most connections \
         gives up one for each newcomer whose network holds fewer."
    ),
    key!(
        "h2_streams",
        "0.1",
        count(1, 10_000),
        edge.limits.h2_streams,
        "Requests at once on one HTTP/2 connection."
    ),
    key!(
        "h2_resets",
        "0.1",
        count(1, 1_000_000_000),
        edge.limits.pace.h2_resets,
        "Responses that the client of one HTTP/2 connection may cancel: this many at once, and as many more \
         in each minute. Beyond it the connection ends (`ENHANCE_YOUR_CALM`)."
    ),
    key!(
        "handshake_timeout",
        "0.1",
        time(100, HOUR),
        edge.limits.handshake_ms,
        "Time limit of a TLS handshake."
    ),
    key!(
        "drain_timeout",
        "0.1",
        time(0, DAY),
        edge.limits.drain_ms,
        "Time that running requests may still take when the edge ends."
    ),
    key!(
        "file_cache_bytes",
        "0.1",
        size(0, 64 * GIB),
        edge.limits.file_cache_bytes,
        "Small hot files that are kept in memory, for each edge thread."
    ),
];

pub(super) const NETWORKS: &[KeyRow<NodeSettings>] = &[
    key!(
        "ipv4_prefix",
        "0.1",
        count(0, 32),
        edge.networks.ipv4_prefix,
        "Leading bits of an IPv4 address that make one network."
    ),
    key!(
        "ipv6_prefix",
        "0.1",
        count(0, 128),
        edge.networks.ipv6_prefix,
        "Leading bits of an IPv6 address that make one network. A single customer has a /64 at least."
    ),
    key!(
        "connections",
        "0.1",
        count(0, 10_000_000),
        edge.networks.connections,
        "Connections that one network may have open."
    ),
    key!(
        "requests_per_second",
        "0.1",
        count(0, 10_000_000),
        edge.networks.requests_per_second,
        "Requests of one network, by HTTP/1 and HTTP/2 together. Behind a trusted proxy, the client that \
         the proxy names counts."
    ),
    key!(
        "requests_burst",
        "0.1",
        count(1, 10_000_000),
        edge.networks.requests_burst,
        "Requests of one network that may come at once, beyond the rate."
    ),
    key!(
        "handshakes_per_second",
        "0.1",
        count(0, 10_000_000),
        edge.networks.handshakes_per_second,
        "TLS handshakes that one network may begin. A connection beyond it is closed before any computation."
    ),
    key!(
        "handshakes_burst",
        "0.1",
        count(1, 10_000_000),
        edge.networks.handshakes_burst,
        "TLS handshakes of one network that may begin at once, beyond the rate."
    ),
    key!(
        "exempt",
        "0.1",
        ValueKind::Networks,
        edge.networks.exempt,
        "Addresses and networks without these limits. Connections from `trusted_proxies` are never limited \
         either."
    ),
];

pub(super) const SPOOL: &[KeyRow<NodeSettings>] = &[
    key!(
        "dir",
        "0.1",
        path(PathKind::Later),
        spool,
        "Directory of the files, which have no names. It is made at start and given to the edge's user. Its \
         file system must support `O_TMPFILE`; `/tmp` in memory is a poor place.",
        unset: "`spool` in `state_dir`"
    ),
    key!(
        "bytes",
        "0.1",
        size(0, 16 * TIB),
        edge.spool.bytes,
        "Bytes on disk of all tenants. An upload that finds no room gets 503 (`NGY0471`). A response that \
         finds none is sent at its client's pace."
    ),
    key!(
        "tenant_bytes",
        "0.1",
        size(0, 16 * TIB),
        edge.spool.tenant_bytes,
        "Bytes on disk of one tenant. If it is less than `body_bytes`, the largest uploads do not fit."
    ),
];

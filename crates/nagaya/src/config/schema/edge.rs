//! Keys of the edge's limits: requests, networks of clients, and bodies that wait.
//!
//! Not here: its other keys, what a key is (`schema`).

use nagaya_base::limits::KEEPER_MESSAGE_MAX;

use super::*;

/// Largest request head that may be configured. It becomes a CGI environment, which must fit one keeper
/// message together with its server variables and, per field, `HTTP_` and two length prefixes.
const HEAD_BYTES_MAX: u64 = 96 * KIB;
const HEADER_FIELDS_MAX: u64 = nagaya_edge::HEADER_FIELDS_MAX as u64;
const _: () = assert!(HEAD_BYTES_MAX + HEADER_FIELDS_MAX * 10 + 16 * KIB <= KEEPER_MESSAGE_MAX as u64);

pub(super) const LIMITS: &[Key<Settings>] = &[
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
        "From the first byte of a request to the end of its head, for a head of no bytes. Each `head_min_rate` bytes add a second."
    ),
    key!(
        "head_timeout_max",
        "0.1",
        time(100, HOUR),
        edge.limits.pace.head_max_ms,
        "Longest time that a head may take, however fast it arrives. Not less than `head_timeout`."
    ),
    key!(
        "head_min_rate",
        "0.1",
        size(0, GIB),
        edge.limits.pace.head_rate,
        "Bytes of a head that add a second to `head_timeout`. `0`: no bytes do."
    ),
    key!(
        "body_timeout",
        "0.1",
        time(0, DAY),
        edge.limits.pace.body_ms,
        "Time that the body of a request may take whatever its length. Each `body_min_rate` bytes add a second; whoever is slower gets 408. Only waiting for the client counts. `0`: no least rate holds."
    ),
    key!(
        "body_min_rate",
        "0.1",
        size(0, GIB),
        edge.limits.pace.body_rate,
        "Bytes of a body that add a second to `body_timeout`. `0`: no bytes do, so `body_timeout` bounds the whole body."
    ),
    key!(
        "idle_body_timeout",
        "0.1",
        time(100, HOUR),
        edge.limits.idle_body_ms,
        "Longest silence while a body arrives or a response is taken."
    ),
    key!(
        "vanished_timeout",
        "0.1",
        time(2_000, HOUR),
        edge.limits.vanished_ms,
        "After so long without a sign of a client's machine, which the kernel asks for when nothing else comes (TCP keep-alive), it counts as gone, and its place in line or its permit is free. If `idle_body_timeout` is longer, after that."
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
        "From the request to the head of the backend's answer, where the site gives no number. A CGI or PHP program under a limit may use that much CPU time, for an hour at most, as long as it gets on."
    ),
    key!(
        "backend_connect_timeout",
        "0.1",
        time(10, HOUR),
        edge.limits.backend.connect_ms,
        "Until a backend has accepted the connection."
    ),
    key!(
        "connections",
        "0.1",
        count(1, 10_000_000),
        edge.limits.connections,
        "Connections open at once, per edge thread. Beyond it the network with the most connections gives up one for each newcomer whose network holds fewer."
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
        "Responses that the client of one HTTP/2 connection may cancel: so many at once, and so many more in each minute. Beyond it the connection ends (`ENHANCE_YOUR_CALM`)."
    ),
    key!("handshake_timeout", "0.1", time(100, HOUR), edge.limits.handshake_ms, "TLS handshake."),
    key!(
        "drain_timeout",
        "0.1",
        time(0, DAY),
        edge.limits.drain_ms,
        "At the end: how long running requests may still take."
    ),
    key!(
        "file_cache_bytes",
        "0.1",
        size(0, 64 * GIB),
        edge.limits.file_cache_bytes,
        "Small hot files kept in memory, per edge thread."
    ),
];

pub(super) const NETWORKS: &[Key<Settings>] = &[
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
        "Connections one network may have open."
    ),
    key!(
        "requests_per_second",
        "0.1",
        count(0, 10_000_000),
        edge.networks.requests_per_second,
        "Requests of one network, by HTTP/1 and HTTP/2 together. Behind a trusted proxy its word on who the client is counts."
    ),
    key!(
        "requests_burst",
        "0.1",
        count(1, 10_000_000),
        edge.networks.requests_burst,
        "Requests of one network that may come at once, beyond what the rate allows."
    ),
    key!(
        "handshakes_per_second",
        "0.1",
        count(0, 10_000_000),
        edge.networks.handshakes_per_second,
        "TLS handshakes that one network may begin. A connection beyond it is closed before anything is computed."
    ),
    key!(
        "handshakes_burst",
        "0.1",
        count(1, 10_000_000),
        edge.networks.handshakes_burst,
        "TLS handshakes of one network that may begin at once, beyond what the rate allows."
    ),
    key!(
        "exempt",
        "0.1",
        Kind::Networks,
        edge.networks.exempt,
        "Addresses and networks that these limits do not hold for. Connections from `trusted_proxies` are never limited either."
    ),
];

pub(super) const SPOOL: &[Key<Settings>] = &[
    key!(
        "dir",
        "0.1",
        path(Exists::Later),
        spool,
        "Where the files are, which have no names. Made at start and given to the edge's user. Its file system must know `O_TMPFILE`; `/tmp` in memory is a poor place.",
        unset: "`spool` in `state_dir`"
    ),
    key!(
        "bytes",
        "0.1",
        size(0, 16 * TIB),
        edge.spool.bytes,
        "Bytes on disk of all tenants. An upload that finds no room gets 503 (`NGY0471`); an answer that finds none goes at its client's pace."
    ),
    key!(
        "tenant_bytes",
        "0.1",
        size(0, 16 * TIB),
        edge.spool.tenant_bytes,
        "Bytes on disk of one tenant. Less than `body_bytes` means that the largest uploads do not fit."
    ),
];

//! Provides the edge's parsers as fuzz targets: input of clients, programs of tenants and other
//! nodes.
//!
//! Targets assert more than the absence of panics. Input in pieces has the same result as the
//! whole. Forwarded messages mean the same as received ones. Not here: the fuzzer (`fuzz/`),
//! input from the keeper (`nagaya_keeper::fuzzing`).

mod bodies;
mod fields;
mod heads;
mod inputs;
mod nodes;

use nagaya_base::fuzz::FuzzTarget;

/// All fuzz targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "http1_request", run: heads::read_http1_request, seeds: heads::http1_requests },
    FuzzTarget { name: "http1_response", run: heads::read_http1_response, seeds: heads::http1_responses },
    FuzzTarget { name: "proxy_header", run: heads::read_proxy_header, seeds: heads::proxy_headers },
    FuzzTarget { name: "http2_head", run: heads::read_http2_head, seeds: heads::http2_heads },
    FuzzTarget { name: "authority", run: heads::read_authority, seeds: heads::authorities },
    FuzzTarget { name: "site_path", run: heads::read_site_path, seeds: heads::site_paths },
    FuzzTarget { name: "http1_body", run: bodies::read_http1_body, seeds: bodies::http1_bodies },
    FuzzTarget { name: "cgi_head", run: bodies::read_cgi_head, seeds: bodies::cgi_heads },
    FuzzTarget { name: "range", run: fields::read_range, seeds: fields::ranges },
    FuzzTarget { name: "conditions", run: fields::read_conditions, seeds: fields::conditions },
    FuzzTarget { name: "forwarded", run: fields::read_forwarded, seeds: fields::forwarded },
    FuzzTarget { name: "ticket", run: fields::read_ticket, seeds: fields::tickets },
    FuzzTarget { name: "peer_fields", run: nodes::read_peer_fields, seeds: nodes::peer_fields },
    FuzzTarget { name: "peer_datagram", run: nodes::read_datagram, seeds: nodes::datagrams },
];

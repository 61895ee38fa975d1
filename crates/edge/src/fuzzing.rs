//! The edge's parsers, as fuzz targets: what clients, programs of tenants and other nodes send.
//!
//! Targets assert more than that nothing panics: pieces mean the same as the whole, and what is passed on means what was
//! received. Not here: the fuzzer (`fuzz/`), what is read from the keeper (`nagaya_keeper::fuzzing`).

mod bodies;
mod fields;
mod heads;
mod nodes;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use nagaya_base::fuzz::FuzzTarget;

/// All of them.
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

/// Header fields in lines `name: value`. Lines that are none are passed over.
fn read_lines(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (HeaderName::from_bytes(&line[..at]), line[at + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    headers
}

/// The first byte, as a number from 1 on, and the rest.
fn split_step(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (step, rest) = bytes.split_first()?;
    Some((usize::from(*step).max(1), rest))
}

//! HTTP/1 on the wire: strict parsing, framing and writing, for clients and for backends.
//!
//! In reading order: `head` (what a request's head may look like), `response_head` (a backend's), `fields`, `framing` (where
//! a body ends), `connection` (a client's connection, request after request), `wire` (its bytes), `write` (responses, files
//! by `sendfile`). One rule holds throughout: what could be read in two ways is refused, so nothing ambiguous is ever
//! forwarded. `docs/http-readings.md` tells which sloppy forms have one reading.
//! Not here: HTTP/2 (`http2`), what a request means (`request`), backends' connections (`upstream`).

pub mod connection;
pub mod fields;
pub mod framing;
pub mod head;
pub mod response_head;
pub mod tunnel;
pub mod wire;
pub mod write;

//! HTTP/1 on the wire: strict parsing, framing and writing, for clients and for backends.
//!
//! In reading order: `head` (what a head may look like), `framing` (where a body ends), `connection` (a
//! client's connection, request after request), `wire` (its bytes), `write` (responses, files by `sendfile`). One rule
//! holds throughout: what could be read in two ways is refused, so nothing ambiguous is ever forwarded.
//! Not here: HTTP/2 (`http2`), what a request means (`request`), backends' connections (`upstream`).

pub mod connection;
pub mod framing;
pub mod head;
pub mod tunnel;
pub mod wire;
pub mod write;

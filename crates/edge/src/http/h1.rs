//! Implements HTTP/1 on the wire: strict parsing, framing and writing, for clients and for
//! backends.
//!
//! In reading order: `head` (the allowed forms of a request's head), `response_head` (a backend's),
//! `fields`, `framing` (the end of a body), `connection` (a client's connection, request after
//! request), `wire` (its bytes), `write` (responses, files by `sendfile`). One rule holds
//! throughout: input that has two readings is refused, so nothing ambiguous is ever forwarded.
//! `docs/http-readings.md` lists the sloppy forms that have one reading. Not here: HTTP/2 (`h2`),
//! the meaning of a request (`request`), backends' connections (`upstream`).

pub mod connection;
pub mod fields;
pub mod framing;
pub mod head;
pub mod lines;
pub mod response_head;
pub mod tunnel;
pub mod wire;
pub mod write;

//! HTTP: messages, the protocols that carry them, and every way to refuse a request.
//!
//! In reading order: `message`, `refusal`, `h1`, `h2`, `tls`, `proxy_headers`, `clients` (limits of
//! client networks), `throttle`.

pub mod arrival;
pub mod body;
pub mod body_adapters;
pub mod clients;
pub mod connections;
pub mod date;
pub mod deadline;
pub mod h1;
pub mod h2;
pub mod handler;
pub mod host;
pub mod message;
pub mod meter;
pub mod networks;
pub mod path;
pub mod peer_fields;
pub mod peer_meta;
pub mod proxy_headers;
pub mod proxy_protocol;
pub mod receipt_field;
pub mod refusal;
pub mod route;
pub mod serving;
pub mod target;
pub mod throttle;
pub mod tls;

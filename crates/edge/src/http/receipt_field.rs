//! The header field of a receipt. Protocols and backends drop it where somebody else sends it.
//!
//! Not here: what it says (`record::receipt`).

use http::HeaderName;

/// Only the node may send it: a site's own field of this name is dropped.
pub const RECEIPT: HeaderName = HeaderName::from_static("nagaya-receipt");

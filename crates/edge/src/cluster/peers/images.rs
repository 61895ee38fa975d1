//! Transfers images of applications between nodes. This edge passes the bytes of another node's
//! keeper to its own keeper. It serves images of its keeper to other nodes. It does not interpret
//! the bytes, which the keepers have sealed. The keepers act only on an order of the supervisor.
//! The edge passes it on, too, and cannot create one.
//!
//! Nodes use the same connections as for requests. A private header field (`fields`) marks a
//! request for an image. No client's request has it, so no site's host or path is reserved. The
//! requesting node first learns what there is (`OfferedImage`). Then it requests the bytes that its
//! own keeper lacks. So an interrupted transfer continues there. One image is transferred at a
//! time, and the keepers set the speed.
//!
//! Not here: which image to transfer, and when (the supervisor), its content and validity (the
//! keepers).

pub mod give;
pub mod orders;
pub mod take;

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use nagaya_base::limits::KEEPER_MESSAGE_MAX;
use nagaya_records::SiteName;
use serde::{Deserialize, Serialize};

const IMAGE: HeaderName = HeaderName::from_static("nagaya-peer-image");
const ORDER: HeaderName = HeaderName::from_static("nagaya-peer-image-order");
const DIGEST: HeaderName = HeaderName::from_static("nagaya-peer-image-digest");
const OFFSET: HeaderName = HeaderName::from_static("nagaya-peer-image-offset");

/// No host has this name: the request is in the header fields.
const TARGET: &str = "https://images.nagaya.internal/";

/// Maximum length of an offer, bytes. The keeper sends it in one message, and JSON in JSON is at
/// most twice as long.
const OFFER_LEN_MAX: usize = 2 * KEEPER_MESSAGE_MAX;

/// Maximum time for which either end of a transfer may stand still. The time of a keeper that
/// first compares its data does not count.
const STALL_MAX: Duration = Duration::from_secs(30);

/// Number of bytes passed on at once: the default capacity of a pipe.
const PIECE_LEN: usize = 64 << 10;

/// A node's description of an image it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OfferedImage {
    /// For the keeper that takes it.
    offer: Box<str>,
    /// For the keeper that gives it.
    digest: Box<str>,
    bytes: u64,
}

/// A request of one node to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRequest {
    site: SiteName,
    /// Order of the supervisor for the other node's keeper.
    order: String,
    /// Digest and first byte. `None` asks what there is.
    part: Option<(String, u64)>,
}

impl ImageRequest {
    fn write(&self, headers: &mut HeaderMap) {
        let mut put = |name, value: &str| {
            // Names, digests and numbers are printable.
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(name, value);
            }
        };
        put(IMAGE, self.site.as_str());
        put(ORDER, &self.order);
        if let Some((digest, offset)) = &self.part {
            put(DIGEST, digest);
            put(OFFSET, &offset.to_string());
        }
    }

    /// Returns `None` if the request is not about an image. Fails if it is, and is invalid.
    pub fn read(headers: &HeaderMap) -> Option<Result<Self, &'static str>> {
        const WRONG: &str = "another node requested an image without naming it";
        let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().map_err(|_| WRONG));
        let site = headers.get(IMAGE)?;
        let read = || {
            let site = site.to_str().ok().and_then(|site| SiteName::new(site).ok()).ok_or(WRONG)?;
            let order = text(ORDER).transpose()?.unwrap_or_default().to_owned();
            let part = match (text(DIGEST).transpose()?, text(OFFSET).transpose()?) {
                (None, None) => None,
                (Some(digest), Some(offset)) => Some((digest.to_owned(), offset.parse().map_err(|_| WRONG)?)),
                _ => return Err(WRONG),
            };
            Ok(Self { site, order, part })
        };
        Some(read())
    }
}

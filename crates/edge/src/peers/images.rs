//! Images of applications on their way between nodes: this edge takes what another node's keeper has to its own keeper, and
//! gives other nodes what its keeper has. It passes bytes on and understands nothing of them: the keepers have sealed them. What
//! lets the keepers act is an order of the supervisor, which it passes on, too, and cannot make.
//!
//! One node asks another over the connections that requests are passed on by. What makes it such a question is a private
//! header field (`fields`), which no client's request has; so no site's host or path is taken away. The asking node is told
//! what there is (`Offered`), and then asks for its bytes, from the one on that its own keeper lacks: what was cut off goes
//! on there. One image comes at a time; how fast, the keepers say.
//!
//! Not here: which image is to come, and when (the supervisor), what it is and whether it is right (the keepers).

mod give;
pub(super) mod take;

pub use give::give;
pub use take::{ImageOrder, Orders, follow};

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use nagaya_base::limits::KEEPER_MESSAGE_MAX;
use nagaya_cmdb::SiteName;
use serde::{Deserialize, Serialize};

const IMAGE: HeaderName = HeaderName::from_static("nagaya-peer-image");
const ORDER: HeaderName = HeaderName::from_static("nagaya-peer-image-order");
const DIGEST: HeaderName = HeaderName::from_static("nagaya-peer-image-digest");
const OFFSET: HeaderName = HeaderName::from_static("nagaya-peer-image-offset");

/// Nobody is reached under this name: what is asked for stands in the header fields.
const TARGET: &str = "https://images.nagaya.internal/";

/// Bytes of the longest offer: the keeper said it in one message, and JSON in JSON has twice as many at most.
const OFFER_LEN_MAX: usize = 2 * KEEPER_MESSAGE_MAX;

/// So long neither end of a transfer may stand still. A keeper that compares what it has first is not part of it.
const STALL_MAX: Duration = Duration::from_secs(30);

/// Passed on at once, bytes: what a pipe holds by default.
const PIECE_LEN: usize = 64 << 10;

/// What a node says of an image it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Offered {
    /// For the keeper that takes it.
    offer: Box<str>,
    /// For the keeper that gives it.
    digest: Box<str>,
    bytes: u64,
}

/// What one node asks another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    site: SiteName,
    /// Of the supervisor, for the other node's keeper.
    order: String,
    /// Digest and first byte. None: what is there.
    part: Option<(String, u64)>,
}

impl Asked {
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

    /// None: the request is not about an image. The error: it is, and cannot be understood.
    pub fn read(headers: &HeaderMap) -> Option<Result<Self, &'static str>> {
        const WRONG: &str = "another node did not say which image it wants";
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

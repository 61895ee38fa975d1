//! Facts that nodes exchange about a forwarded request: its site, its epoch and its deadline. If it
//! was not served, the reason.
//!
//! Not here: the header fields that carry it (`peer_fields`).

use std::time::Instant;

use nagaya_records::SiteName;

/// Data that accompanies a forwarded request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerRequestMeta {
    pub site: SiteName,
    /// Epoch of the placement for which it was sent.
    pub epoch: u64,
    /// Time when the sender gives it up.
    pub deadline: Instant,
    /// Number of times that the receiver may give it to the application after the first time.
    pub retries: u32,
}

/// Reason why another node did not serve a request. Nothing was done that makes a repetition
/// harmful.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerDenial {
    /// As far as it knows, the site runs elsewhere: it knows this epoch. `tries` is how often the
    /// application there was given the request.
    NotPlacedHere { epoch: u64, tries: u32 },
    /// It has no lease now. `tries` as above.
    Fenced { tries: u32 },
    /// By its records, the request belongs to another site.
    OtherSite,
}

//! Error codes of the cluster's part of the supervisor, and the answer to a request without a node.

use nagaya_base::Code;
use nagaya_records::feed::PlaceReply;

pub const NOT_CONFIGURED: Code = Code(240);
pub const NO_MEMBER: Code = Code(241);
pub const MEMBER_ALREADY: Code = Code(242);
pub const NOT_JOINED: Code = Code(243);
pub const NOWHERE: Code = Code(244);
pub const INSECURE: Code = Code(239);
pub const FORGED: Code = Code(238);
pub const NO_AUTHORITY: Code = Code(520);

/// Answers a request for a place that none was found.
pub fn answer_nowhere(reason: impl Into<String>) -> PlaceReply {
    PlaceReply::Nowhere { reason: reason.into(), code: NOWHERE.to_string() }
}

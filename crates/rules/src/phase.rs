//! When in the life of a request a rule runs.

use serde::{Deserialize, Serialize};

/// When in the life of a request a rule runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RulePhase {
    /// There is no request: before the first one for which a VM runs rules.
    Init,
    /// The header section of the request was read.
    PostReadRequest,
    /// The site is known; access and placement are being decided.
    AccessChecker,
    /// Just before the response is made.
    Fixups,
    /// The response has ended.
    LogTransaction,
}

impl RulePhase {
    pub const ALL: [Self; 5] =
        [Self::Init, Self::PostReadRequest, Self::AccessChecker, Self::Fixups, Self::LogTransaction];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::PostReadRequest => "post_read_request",
            Self::AccessChecker => "access_checker",
            Self::Fixups => "fixups",
            Self::LogTransaction => "log_transaction",
        }
    }

    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }
}

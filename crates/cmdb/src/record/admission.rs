//! How a site lets its visitors in when more come than can run at once.
//!
//! Not here: how many may run (`Site::max_concurrent`), what becomes of these words (the edge's `admission`).

use serde::{Deserialize, Serialize};

/// Longest text of [`Admission::page`], bytes.
pub const PAGE_LEN_MAX: usize = 32 << 10;

/// All of it can be left out; the node's settings hold then.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// How many run at once is found by measuring: between 1 and `max_concurrent`, or its tenant's where there is none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auto: bool,
    /// Longest predicted wait in line, seconds: 0 to 3600. Who would wait longer is given a ticket, or turned away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<u32>,
    /// Most requests in line, whatever is predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Tickets are given when the line is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tickets: Option<bool>,
    /// Length of a ticket's slot, seconds: 1 to 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_seconds: Option<u32>,
    /// Share of its tenant's permits against its other sites, when all want more than there are. 1 to 10,000; 100 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Waiting page of its own: HTML with places for what is known, such as `{{begins_in}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
}

impl Admission {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

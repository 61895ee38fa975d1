//! How a site admits visitors when more come than can run at once.
//!
//! Not here: how many may run (`Site::max_concurrent`), the effect of these values (the edge's
//! `admission`).

use serde::{Deserialize, Serialize};

/// Longest text of [`AdmissionSettings::page`], bytes.
pub const PAGE_LEN_MAX: usize = 32 << 10;

/// Length of a visit if [`AdmissionSettings::visit_seconds`] is left out.
pub const VISIT_SECONDS: u32 = 600;

/// Admission settings of a site. Each can be left out; the node's settings hold then.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdmissionSettings {
    /// The number that run at once is found by measuring. It is between 1 and `max_concurrent`, or
    /// the tenant's limit without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auto: bool,
    /// Longest predicted wait in the queue, seconds: 0 to 3600. A request that would wait longer
    /// gets a ticket or a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<u32>,
    /// Most requests in the queue, whatever is predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
    /// Tickets are given when the queue is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tickets: Option<bool>,
    /// Length of a ticket's slot, seconds: 1 to 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_seconds: Option<u32>,
    /// Time for which a client that has waited and was admitted goes before newcomers, seconds.
    /// Range 0 to 86,400, where 0 means not at all. [`VISIT_SECONDS`] if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub visit_seconds: Option<u32>,
    /// Share of its tenant's permits against its other sites, when all want more than there are.
    /// Range 1 to 10,000; 100 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The site's own waiting page: HTML with placeholders for known values, such as
    /// `{{begins_in}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
}

impl AdmissionSettings {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

//! A task that one node asks of another, sent beside its load, and the result.
//!
//! Not here: asking and waiting (`delegated`), doing it (`task_runner`).

use nagaya_records::{NodeName, SiteName};
use serde::{Deserialize, Serialize};

/// A site must be moved away from `at`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelegatedTask {
    /// Random.
    pub id: String,
    pub at: NodeName,
    pub site: SiteName,
    /// `None` means the best node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Instead, `at` must fetch its image from this node. An older version that does not know this
    /// moves nothing, either, as the site does not run there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_from: Option<NodeName>,
}

/// Outcome of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskOutcome {
    Moved {
        node: NodeName,
        epoch: u64,
    },
    /// The image is there.
    Brought,
    Failed(String),
}

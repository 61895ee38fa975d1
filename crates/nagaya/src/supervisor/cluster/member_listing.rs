//! Writes into this node's record in the store with which options the node is started. Before that
//! the node asks for no lease, because others go by the record.

use std::rc::Rc;
use std::time::Duration;

use nagaya_placement::lease::{lease_term, max_elapsed};
use nagaya_records::NodeRecord;
use nagaya_store::etcd::ClusterError;
use tokio::sync::Notify;

use super::codes::NOT_JOINED;
use super::pki::PkiError;
use super::view::ClusterView;

/// Interval of attempts to write the node's record.
const LIST_AGAIN: Duration = Duration::from_millis(200);

/// The same for a node that is no longer a member.
const REMOVED_AGAIN: Duration = Duration::from_secs(5);

pub struct MemberListing {
    pub view: Rc<ClusterView>,
    pub record: NodeRecord,
    /// Notified once the record is written.
    pub listed: Rc<Notify>,
}

impl MemberListing {
    pub async fn run(self) {
        // The draining state is not read from this node's copy of the records. A node that was
        // removed meanwhile starts over.
        let stands = self.write_record().await;
        self.listed.notify_one();
        // Sites served before this start, under the earlier lease length, are no longer served by
        // then.
        if stands.fence_ms != self.record.fence_ms {
            self.write_fence(&stands).await;
        }
    }

    async fn write_record(&self) -> NodeRecord {
        let mut said = String::new();
        loop {
            match self.view.store.refresh(self.record.clone()).await {
                Ok(stands) => return stands,
                // Only a join token lets it in again.
                Err(ClusterError::NoNode { .. }) => {
                    let text = PkiError::NotForUs.to_string();
                    if said != text {
                        tracing::error!(code = %NOT_JOINED, "{text}; this node serves no application");
                    }
                    said = text;
                    tokio::time::sleep(REMOVED_AGAIN).await;
                }
                Err(error) => {
                    let text = error.to_string();
                    match &error {
                        _ if text == said => {}
                        ClusterError::NameTaken { .. } => {
                            tracing::error!(code = %error.code(), "{text}; this node serves no application");
                        }
                        _ => tracing::warn!(code = %error.code(), "{text}"),
                    }
                    said = text;
                }
            }
            tokio::time::sleep(LIST_AGAIN).await;
        }
    }

    async fn write_fence(&self, stands: &NodeRecord) {
        loop {
            tokio::time::sleep(max_elapsed(lease_term(stands.fence_ms))).await;
            match self.view.store.set_fence(&self.view.node, &self.view.id, self.record.fence_ms).await {
                Ok(()) => break,
                Err(error) => {
                    tracing::warn!(code = %error.code(), "other nodes still wait for the former lease length of this node: {error}");
                }
            }
        }
    }
}

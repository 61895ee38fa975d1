//! This node as a member of its cluster.
//!
//! Not here: what is placed on it (`membership`).

use nagaya_records::NodeName;

use crate::cluster::nonce_prefix::NoncePrefix;
use crate::cluster::peers::credentials::PeerCredentials;
use crate::options::ClusterOptions;

/// This node as a member.
#[derive(Debug)]
pub struct LocalMember {
    pub node: NodeName,
    pub options: ClusterOptions,
    pub credentials: PeerCredentials,
    /// Prefix of the numbers of its tickets.
    pub mark: Option<NoncePrefix>,
}

/// Reason why a node cannot be a member with its settings.
#[derive(Debug, thiserror::Error)]
pub enum NotAMember {
    #[error("{0}")]
    Name(#[from] nagaya_records::NameError),
    #[error("{0}")]
    Credentials(#[from] crate::cluster::peers::credentials::CredentialsError),
}

impl LocalMember {
    pub fn new(options: &ClusterOptions) -> Result<Self, NotAMember> {
        let node = NodeName::new(&options.node)?;
        let credentials = PeerCredentials::new(options)?;
        let mark = NoncePrefix::of(&options.id);
        Ok(Self { node, options: options.clone(), credentials, mark })
    }
}

//! Errors of the cluster's store, each with its page.
//!
//! Not here: refused records (`check`), this node's own file (`StoreError`).

use nagaya_base::Code;

/// An error of the cluster's store. Nothing was changed, except where the variant says so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    #[error("the cluster's store did not answer within {waited_ms} ms (asked: {members}): {detail}")]
    Unreachable { members: String, waited_ms: u64, detail: String },
    #[error("this node's copy of the cluster's store is not up to date: {detail}")]
    Behind { detail: String },
    #[error("the cluster's store is out of space and takes no changes: {detail}")]
    Full { detail: String },
    #[error("the cluster's store refused: {detail}")]
    Refused { detail: String },
    #[error("the cluster's store cannot be spoken to: {option}: {detail}")]
    Options { option: &'static str, detail: String },
    #[error(
        "{detail}: use https:// with --etcd-ca and a client certificate (--etcd-cert, --etcd-key) or a user, at `nagaya cluster store` if this node is a member already; or name the risk with --insecure"
    )]
    Insecure { detail: String },
    #[error(
        "the store of cluster '{cluster}' has format {found}, this program knows formats up to {known}: use the nagaya that the other nodes have"
    )]
    Version { cluster: String, found: String, known: u64 },
    #[error(
        "the store of cluster '{cluster}' has format {found} until all members know a newer one, and rules need format {needed}: update nagaya on {behind}, or remove nodes that are gone for good with `nagaya cluster remove`"
    )]
    NotRaised { cluster: String, found: u64, needed: u64, behind: String },
    #[error("there is no cluster '{cluster}' in the store: make it with `nagaya cluster init`")]
    NotInitialised { cluster: String },
    #[error(
        "the cluster '{cluster}' is being filled, or that was interrupted: repeat the `nagaya cluster init` that began it"
    )]
    BeingFilled { cluster: String },
    #[error("there is a cluster '{cluster}' in the store already: join it, or choose another name")]
    NotEmpty { cluster: String },
    #[error(
        "the name '{name}' belongs to another machine of the cluster, of {peer}: choose another name, or remove that node first"
    )]
    NameTaken { name: String, peer: String },
    #[error("node '{name}' is not in the cluster")]
    NoNode { name: String },
    #[error(
        "node '{name}' still has {count} applications, such as '{first}': drain it first, or force its removal"
    )]
    NodeInUse { name: String, count: usize, first: String },
    #[error("others changed records all the time; the change was given up after {tries} tries: try again")]
    Contended { tries: u32 },
    #[error(
        "only {done} of {parts} parts of the change were stored: {cause}; every record is whole: do the same again to complete it"
    )]
    Partly { done: usize, parts: usize, cause: Box<ClusterError> },
    #[error("{tenants} tenants exchange their uids in one change: at most {max} can: do it in steps")]
    Entangled { tenants: usize, max: usize },
    #[error(
        "{place} in the cluster's store does not count: {why}; `nagaya cluster repair` writes what this node knows in its place"
    )]
    Forged { place: String, why: String },
    #[error("this node's file of the cluster's records failed: {detail}")]
    Replica { detail: String, code: Code },
}

impl ClusterError {
    pub fn code(&self) -> Code {
        match self {
            Self::Unreachable { .. } | Self::Behind { .. } => Code(230),
            Self::Full { .. } => Code(231),
            Self::Refused { .. } | Self::Options { .. } => Code(232),
            Self::Version { .. } => Code(233),
            Self::NotRaised { .. } => Code(237),
            Self::NotInitialised { .. } | Self::BeingFilled { .. } | Self::NotEmpty { .. } => Code(234),
            Self::NameTaken { .. } | Self::NoNode { .. } | Self::NodeInUse { .. } => Code(235),
            Self::Forged { .. } => Code(238),
            Self::Insecure { .. } => Code(239),
            Self::Contended { .. } | Self::Partly { .. } | Self::Entangled { .. } => Code(236),
            Self::Replica { code, .. } => *code,
        }
    }
}

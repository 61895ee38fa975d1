//! The other nodes of the cluster, as the edge meets them: requests passed on to them, requests they pass on to us, and
//! whether they are there.
//!
//! In reading order: `fields` (what is said of a request between nodes), `acceptor` (their connections to us), `pool` (ours
//! to them), `carry` (one request on its way), `lull` (answers that pause), `images` (what goes beside requests), `watch` (whether they
//! are there, as one thread wants to know it), `probe` (as all do), `tally` (what is counted of them), `credentials`. Not here: which node a site runs on (`cluster`), what becomes of a request whose node is lost (`place`).

pub mod acceptor;
pub mod carry;
mod credentials;
pub mod fields;
pub mod images;
mod lull;
mod pool;
pub mod probe;
mod splice;
mod tally;
mod upload;
mod watch;

pub use credentials::{Credentials, CredentialsError};
pub use fields::{Carried, Denied};
pub use pool::{NoPeer, Pool, Seat};
pub use probe::Probes;
pub use tally::Tallies;

/// What all threads share about other nodes.
#[derive(Debug, Default)]
pub struct Peers {
    pub probes: Probes,
    pub tallies: Tallies,
    /// Images that are to come here.
    pub images: images::Orders,
}

#[cfg(test)]
mod tests;

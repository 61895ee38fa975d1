//! The prefix of the numbers of all tickets that one node of a cluster gives.
//!
//! Not here: tickets (`admission::tickets`).

use nagaya_admission::Nonce;

/// Prefix of the numbers of all tickets that one node of a cluster issues. It is the beginning of
/// the id that the node drew when it joined. Two nodes with the same prefix do not accept each
/// other's tickets. Nothing worse happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoncePrefix(pub u32);

impl NoncePrefix {
    /// Returns the prefix of a node with this id of hexadecimal digits.
    pub fn of(id: &str) -> Option<Self> {
        u32::from_str_radix(id.get(..8)?, 16).ok().map(Self)
    }

    pub fn is_in(self, nonce: Nonce) -> bool {
        nonce.0 >> 96 == u128::from(self.0)
    }
}

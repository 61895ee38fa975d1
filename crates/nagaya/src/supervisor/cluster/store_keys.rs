//! Where the keys of members lie in the cluster's store, and how they are written there.

/// The keys of members.
pub const AUTHORITY: &str = "authority";

/// Those that join tokens open: one key each below this.
pub const TOKENS: &str = "tokens/";

pub fn to_bytes(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("it has text keys, and writing to memory works")
}

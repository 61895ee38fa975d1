//! Rules that the store keeps: the text of a rule file under a name, the same on every node.
//!
//! Not here: Ruby (`nagaya_rules`; who stores a rule has compiled it), when it runs (each node's configuration).

use serde::{Deserialize, Serialize};

use crate::names::RuleName;

/// Longest text, in bytes. As JSON it is longer, because line ends and quotes are two bytes there, and has to fit a record as well.
pub const RULE_TEXT_LEN_MAX: usize = 48 << 10;

/// Most rules a store holds: each is a file on every node.
pub const RULES_MAX: u64 = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub name: RuleName,
    /// Ruby, at most `RULE_TEXT_LEN_MAX` bytes.
    pub text: Box<str>,
}

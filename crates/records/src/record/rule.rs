//! Rules in the store: the text of a rule file under a name, the same on every node.
//!
//! Not here: Ruby (`nagaya_rules`; a rule is compiled before it is stored), when it runs (each
//! node's configuration).

use serde::{Deserialize, Serialize};

use crate::names::RuleName;

/// Longest text, in bytes. It has to fit a record as JSON, which is longer because line ends and
/// quotes are two bytes there.
pub const RULE_TEXT_LEN_MAX: usize = 48 << 10;

/// Most rules in a store: each is a file on every node.
pub const RULES_MAX: u64 = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleRecord {
    pub name: RuleName,
    /// Ruby, at most `RULE_TEXT_LEN_MAX` bytes.
    pub text: Box<str>,
}

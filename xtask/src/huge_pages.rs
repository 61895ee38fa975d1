//! The machine's switch for pages of 64 KiB: experiments set it, and restore it.
//!
//! Not here: how a node sets it (`huge_pages` in its configuration).

use std::fs;

use anyhow::{Context as _, Result};
use nagaya_keeper::HUGE_PAGES_SWITCH as SWITCH;

/// Restores the switch when dropped.
#[derive(Debug)]
pub struct HugePageGuard {
    /// `None` if this kernel has no such pages.
    before: Option<String>,
}

/// Remembers the present value.
pub fn keep() -> HugePageGuard {
    let text = fs::read_to_string(SWITCH).ok();
    let word = text.as_deref().and_then(|text| text.split_once('[')?.1.split_once(']'));
    HugePageGuard { before: word.map(|(word, _)| word.to_owned()) }
}

/// Returns whether this kernel has such pages.
pub fn are_known() -> bool {
    fs::exists(SWITCH).unwrap_or(false)
}

/// Sets whether all programs get such pages from now on.
pub fn set(used: bool) -> Result<()> {
    fs::write(SWITCH, if used { "always" } else { "never" }).with_context(|| format!("writing {SWITCH}"))
}

impl Drop for HugePageGuard {
    fn drop(&mut self) {
        if let Some(word) = &self.before
            && let Err(error) = fs::write(SWITCH, word)
        {
            eprintln!("{SWITCH} could not be made '{word}' again: {error}");
        }
    }
}

//! The machine's switch for pages of 64 KiB: experiments set it, and leave it as it was.
//!
//! Not here: how a node sets it (`huge_pages` in its configuration).

use std::fs;

use anyhow::{Context as _, Result};
use nagaya_keeper::huge_pages::SWITCH;

/// Puts the switch back at its end.
#[derive(Debug)]
pub struct Kept {
    /// None: this kernel has no such pages.
    before: Option<String>,
}

/// Remembers what holds now.
pub fn keep() -> Kept {
    let text = fs::read_to_string(SWITCH).ok();
    let word = text.as_deref().and_then(|text| text.split_once('[')?.1.split_once(']'));
    Kept { before: word.map(|(word, _)| word.to_owned()) }
}

/// Whether this kernel has such pages.
pub fn are_known() -> bool {
    fs::exists(SWITCH).unwrap_or(false)
}

/// Whether all programs get such pages from now on.
pub fn set(used: bool) -> Result<()> {
    fs::write(SWITCH, if used { "always" } else { "never" }).with_context(|| format!("writing {SWITCH}"))
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(word) = &self.before
            && let Err(error) = fs::write(SWITCH, word)
        {
            eprintln!("{SWITCH} could not be made '{word}' again: {error}");
        }
    }
}

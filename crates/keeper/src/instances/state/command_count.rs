//! How many operators' commands run, in one instance or on the node.
//!
//! Not here: running them (`exec`).

use std::cell::Cell;

use nagaya_keeper_api::protocol::FailureKind;

use crate::fault::{self, Fault};

#[derive(Debug, Default)]
pub struct CommandCount(Cell<usize>);

/// Counts one command until it is dropped.
pub struct CommandGuard<'a>(&'a CommandCount);

impl CommandCount {
    /// Counts one more, unless `max` are counted already. `whose` names in words where they run.
    pub fn take(&self, max: usize, whose: &str) -> Result<CommandGuard<'_>, Fault> {
        if self.0.get() >= max {
            let why = format!("{max} commands run in {whose} already; wait for one to end");
            return Err(Fault::new(FailureKind::Busy, fault::EXEC, why));
        }
        self.0.set(self.0.get() + 1);
        Ok(CommandGuard(self))
    }
}

impl Drop for CommandGuard<'_> {
    fn drop(&mut self) {
        self.0.0.set(self.0.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back() {
        let count = CommandCount::default();
        let first = count.take(1, "it").unwrap();
        assert!(count.take(1, "it").is_err());
        drop(first);
        assert!(count.take(1, "it").is_ok());
    }
}

//! What leaves claim of the processor, and which directories are idle by that: those beneath which somebody wants what is
//! left over, and nobody a share.
//!
//! A process that is idle by itself gives way to those in its own directory only; a directory gives way to those beside it. So it
//! must be all the way up to the tenant's. Each directory counts what is beneath it: nobody looks for who else is there. Not
//! here: the kernel's files (`lines`), when an instance is quiet (`instances::rest`).

use std::sync::Arc;

use super::dir::Dir;

/// What is in a leaf wants so much of the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    Share,
    /// What nobody else wants.
    LeftOver,
    /// It stands still, or waits until it is told to go on.
    Nothing,
}

/// How many leaves beneath a directory claim what.
#[derive(Debug, Default)]
pub struct Claims {
    shares: usize,
    left_overs: usize,
}

impl Claims {
    /// One leaf claims something else now.
    pub fn change(&mut self, from: Claim, to: Claim) {
        if let Some(count) = self.of(from) {
            *count -= 1;
        }
        if let Some(count) = self.of(to) {
            *count += 1;
        }
    }

    fn of(&mut self, claim: Claim) -> Option<&mut usize> {
        match claim {
            Claim::Share => Some(&mut self.shares),
            Claim::LeftOver => Some(&mut self.left_overs),
            Claim::Nothing => None,
        }
    }

    /// Where nothing runs at all, there is nothing to be told: who comes next finds it as it was.
    pub fn are_idle(&self) -> bool {
        self.shares == 0 && self.left_overs > 0
    }
}

/// What one leaf claims, in its directory and all above it, until it is dropped.
#[derive(Debug)]
pub struct Claimant {
    dir: Arc<Dir>,
    claim: Claim,
}

impl Claimant {
    /// Of a leaf with this directory: from now on it has its share, and no directory above it is idle.
    pub fn new(dir: Arc<Dir>) -> Self {
        let mut new = Self { dir, claim: Claim::Nothing };
        new.set(Claim::Share);
        new
    }

    /// Holds when it returns.
    pub fn set(&mut self, to: Claim) {
        let from = std::mem::replace(&mut self.claim, to);
        if from == to {
            return;
        }
        let mut next = Some(&self.dir);
        // Not the keeper's own directory: each request would pay there for quiet ones of other tenants.
        while let Some(dir) = next.filter(|dir| dir.above.is_some()) {
            dir.claim(from, to);
            next = dir.above.as_ref();
        }
    }
}

impl Drop for Claimant {
    fn drop(&mut self) {
        self.set(Claim::Nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_idle_while_somebody_wants_what_is_left_over_and_nobody_a_share() {
        use Claim::{LeftOver, Nothing, Share};
        let mut claims = Claims::default();
        assert!(!claims.are_idle());
        for (from, to, idle) in [
            (Nothing, Share, false),
            (Share, LeftOver, true),
            (Nothing, LeftOver, true),
            // A request comes, and goes.
            (Nothing, Share, false),
            (Share, Nothing, true),
            // A worker that waits.
            (Nothing, Share, false),
            (Share, Nothing, true),
            (LeftOver, Nothing, true),
            (LeftOver, Share, false),
            (Share, LeftOver, true),
            (LeftOver, Nothing, false),
        ] {
            claims.change(from, to);
            assert_eq!(claims.are_idle(), idle, "{from:?} {to:?} {claims:?}");
        }
    }
}

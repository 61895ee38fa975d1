//! CPU demand of leaves, and the directories that are idle because of it. Some leaf below wants
//! leftover CPU time, and none a share.
//!
//! A process that is idle by itself gives way only to those in its own directory. A directory gives
//! way to those beside it. So all directories up to the tenant's must be idle. Each directory
//! counts the demand below it, so nothing has to be searched. Not here: the kernel's files
//! (`lines`), when an instance is quiet (`instances::rest`).

use std::sync::Arc;

use crate::cells::dir::CgroupDir;

/// CPU demand of the processes in a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuDemand {
    Share,
    /// CPU time that nobody else wants.
    LeftOver,
    /// No CPU time: it is frozen, or waits until it is continued.
    Nothing,
}

/// Number of leaves below a directory with each demand.
#[derive(Debug, Default)]
pub struct CpuDemandCounts {
    shares: usize,
    left_overs: usize,
}

impl CpuDemandCounts {
    /// Changes the demand of one leaf.
    pub fn change(&mut self, from: CpuDemand, to: CpuDemand) {
        if let Some(count) = self.of(from) {
            *count -= 1;
        }
        if let Some(count) = self.of(to) {
            *count += 1;
        }
    }

    fn of(&mut self, claim: CpuDemand) -> Option<&mut usize> {
        match claim {
            CpuDemand::Share => Some(&mut self.shares),
            CpuDemand::LeftOver => Some(&mut self.left_overs),
            CpuDemand::Nothing => None,
        }
    }

    /// Whether the directory should be idle. With no demand at all it stays as it is for the next
    /// process.
    pub fn are_idle(&self) -> bool {
        self.shares == 0 && self.left_overs > 0
    }
}

/// Demand of one leaf, in its directory and all above it, until it is dropped.
#[derive(Debug)]
pub struct CpuDemandGuard {
    dir: Arc<CgroupDir>,
    claim: CpuDemand,
}

impl CpuDemandGuard {
    /// Registers a leaf with this directory: it gets its share, and no directory above it is idle.
    pub fn new(dir: Arc<CgroupDir>) -> Self {
        let mut new = Self { dir, claim: CpuDemand::Nothing };
        new.set(CpuDemand::Share);
        new
    }

    /// Sets the demand. It is in effect when this returns.
    pub fn set(&mut self, to: CpuDemand) {
        let from = std::mem::replace(&mut self.claim, to);
        if from == to {
            return;
        }
        let mut next = Some(&self.dir);
        // Not the keeper's own directory: there each request would pay for quiet ones of other
        // tenants.
        while let Some(dir) = next.filter(|dir| dir.above.is_some()) {
            dir.claim(from, to);
            next = dir.above.as_ref();
        }
    }
}

impl Drop for CpuDemandGuard {
    fn drop(&mut self) {
        self.set(CpuDemand::Nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_idle_while_only_leftover_time_is_claimed() {
        use CpuDemand::{LeftOver, Nothing, Share};
        let mut claims = CpuDemandCounts::default();
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

//! Sets of controllers, and the limits of a cell that belong to each.
//!
//! Not here: what the kernel's files for them are called (`lines`), where they are mounted
//! (`mounts`).

use std::fmt;

use nagaya_records::cell::{CgroupController, LimitSet};

/// The two versions of the cgroup interface. Both can be mounted at once, each with some of the
/// controllers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// A set of controllers, one bit for each.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ControllerSet(u8);

impl ControllerSet {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self((1 << CgroupController::ALL.len()) - 1);

    pub const fn only(controller: CgroupController) -> Self {
        Self(1 << controller as u8)
    }

    pub fn of(list: &[CgroupController]) -> Self {
        list.iter().fold(Self::NONE, |set, controller| set.with(*controller))
    }

    /// Returns the controllers that `limits` sets something for.
    pub fn limited_by(limits: &LimitSet) -> Self {
        let said = [
            (CgroupController::Cpu, limits.cpu.is_some() || limits.cpu_shares.is_some()),
            (CgroupController::Cpuset, limits.cpus.is_some() || limits.mems.is_some()),
            (CgroupController::Blkio, !limits.io.is_empty()),
            (CgroupController::Memory, limits.memory.is_some()),
            (CgroupController::Pids, limits.processes.is_some()),
        ];
        said.into_iter().filter(|(_, said)| *said).fold(Self::NONE, |set, (one, _)| set.with(one))
    }

    pub const fn has(self, controller: CgroupController) -> bool {
        self.0 & Self::only(controller).0 != 0
    }

    pub const fn with(self, controller: CgroupController) -> Self {
        Self(self.0 | Self::only(controller).0)
    }

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn iter(self) -> impl Iterator<Item = CgroupController> {
        CgroupController::ALL.into_iter().filter(move |controller| self.has(*controller))
    }
}

impl fmt::Display for ControllerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, controller) in self.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { "+" }, controller.as_str())?;
        }
        Ok(())
    }
}

impl fmt::Debug for ControllerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Returns cgroup v2's name of a controller. CPU time is counted there without one.
pub fn v2_name(controller: CgroupController) -> Option<&'static str> {
    match controller {
        CgroupController::Cpuacct => None,
        CgroupController::Blkio => Some("io"),
        other => Some(other.as_str()),
    }
}

/// Returns the part of `limits` that these controllers apply.
pub fn only(limits: &LimitSet, controllers: ControllerSet) -> LimitSet {
    let has = |controller| controllers.has(controller);
    LimitSet {
        cpu: limits.cpu.filter(|_| has(CgroupController::Cpu)),
        cpu_shares: limits.cpu_shares.filter(|_| has(CgroupController::Cpu)),
        io: if has(CgroupController::Blkio) { limits.io.clone() } else { Vec::new() },
        processes: limits.processes.filter(|_| has(CgroupController::Pids)),
        memory: limits.memory.filter(|_| has(CgroupController::Memory)),
        cpus: limits.cpus.clone().filter(|_| has(CgroupController::Cpuset)),
        mems: limits.mems.clone().filter(|_| has(CgroupController::Cpuset)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_written_in_one_order() {
        let set = ControllerSet::of(&[CgroupController::Pids, CgroupController::Cpu]);
        assert_eq!(set.to_string(), "cpu+pids");
        assert_eq!(ControllerSet::ALL.iter().count(), CgroupController::ALL.len());
        assert_eq!(ControllerSet::ALL.minus(set).and(set), ControllerSet::NONE);
    }

    #[test]
    fn limits_are_parted_by_controller_without_loss() {
        let limits = LimitSet {
            cpu_shares: Some(25),
            processes: Some(3),
            memory: Some(1 << 20),
            cpus: Some("0".into()),
            ..LimitSet::default()
        };
        let mut together = LimitSet::default();
        for controller in CgroupController::ALL {
            let part = only(&limits, ControllerSet::only(controller));
            assert!(ControllerSet::limited_by(&part).minus(ControllerSet::only(controller)).is_empty());
            together = together.overlaid(&part);
        }
        assert_eq!(together, limits);
    }
}

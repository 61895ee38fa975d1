//! Sets of controllers, and which of a cell's limits belong to which.
//!
//! Not here: what the kernel's files for them are called (`lines`), where they are mounted (`mounts`).

use std::fmt;

use nagaya_cmdb::cell::{Controller, Limits};

/// The two versions of the cgroup interface. Both can be mounted at once, each with some of the controllers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

impl Version {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// A set of controllers, a bit for each.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Controllers(u8);

impl Controllers {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self((1 << Controller::ALL.len()) - 1);

    pub const fn only(controller: Controller) -> Self {
        Self(1 << controller as u8)
    }

    pub fn of(list: &[Controller]) -> Self {
        list.iter().fold(Self::NONE, |set, controller| set.with(*controller))
    }

    /// Those that `limits` say something about.
    pub fn limited_by(limits: &Limits) -> Self {
        let said = [
            (Controller::Cpu, limits.cpu.is_some() || limits.cpu_shares.is_some()),
            (Controller::Cpuset, limits.cpus.is_some() || limits.mems.is_some()),
            (Controller::Blkio, !limits.io.is_empty()),
            (Controller::Memory, limits.memory.is_some()),
            (Controller::Pids, limits.processes.is_some()),
        ];
        said.into_iter().filter(|(_, said)| *said).fold(Self::NONE, |set, (one, _)| set.with(one))
    }

    pub const fn has(self, controller: Controller) -> bool {
        self.0 & Self::only(controller).0 != 0
    }

    pub const fn with(self, controller: Controller) -> Self {
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

    pub fn iter(self) -> impl Iterator<Item = Controller> {
        Controller::ALL.into_iter().filter(move |controller| self.has(*controller))
    }
}

impl fmt::Display for Controllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, controller) in self.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { "+" }, controller.as_str())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Controllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What cgroup v2 calls a controller. CPU time is counted there without one.
pub fn v2_name(controller: Controller) -> Option<&'static str> {
    match controller {
        Controller::Cpuacct => None,
        Controller::Blkio => Some("io"),
        other => Some(other.as_str()),
    }
}

/// The part of `limits` that these controllers keep.
pub fn only(limits: &Limits, controllers: Controllers) -> Limits {
    let has = |controller| controllers.has(controller);
    Limits {
        cpu: limits.cpu.filter(|_| has(Controller::Cpu)),
        cpu_shares: limits.cpu_shares.filter(|_| has(Controller::Cpu)),
        io: if has(Controller::Blkio) { limits.io.clone() } else { Vec::new() },
        processes: limits.processes.filter(|_| has(Controller::Pids)),
        memory: limits.memory.filter(|_| has(Controller::Memory)),
        cpus: limits.cpus.clone().filter(|_| has(Controller::Cpuset)),
        mems: limits.mems.clone().filter(|_| has(Controller::Cpuset)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_written_in_one_order() {
        let set = Controllers::of(&[Controller::Pids, Controller::Cpu]);
        assert_eq!(set.to_string(), "cpu+pids");
        assert_eq!(Controllers::ALL.iter().count(), Controller::ALL.len());
        assert_eq!(Controllers::ALL.minus(set).and(set), Controllers::NONE);
    }

    #[test]
    fn limits_are_parted_by_controller_without_loss() {
        let limits = Limits {
            cpu_shares: Some(25),
            processes: Some(3),
            memory: Some(1 << 20),
            cpus: Some("0".into()),
            ..Limits::default()
        };
        let mut together = Limits::default();
        for controller in Controller::ALL {
            let part = only(&limits, Controllers::only(controller));
            assert!(Controllers::limited_by(&part).minus(Controllers::only(controller)).is_empty());
            together = together.overlaid(&part);
        }
        assert_eq!(together, limits);
    }
}

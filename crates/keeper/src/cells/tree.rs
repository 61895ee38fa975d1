//! State that all cells of one keeper share, on any thread: its own directory in each hierarchy,
//! disks, warnings.
//!
//! Not here: finding the hierarchies (`hierarchy`), the directories below (`dir`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use nagaya_records::cell::{CgroupController, LimitSet};

use super::complaints::CellWarnings;
use super::controllers::CgroupVersion;
use super::device::{self, DeviceNumber, DiskResolver};
use super::dir::CgroupDir;
use super::files;

/// Mechanism that keeps a process tree together, so that it can be ended as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessTracking {
    CgroupV2,
    CgroupV1,
    ProcessGroup,
}

impl ProcessTracking {
    /// Returns its name in status and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CgroupV2 => "cgroup-v2",
            Self::CgroupV1 => "cgroup-v1",
            Self::ProcessGroup => "process-group",
        }
    }
}

/// Data that leaves also need, on any thread.
#[derive(Debug)]
pub struct CellTree {
    /// The keeper's own directory in each hierarchy.
    pub trees: Vec<Arc<CgroupDir>>,
    /// Its directory in the freezer of v1, made when it is needed.
    pub freezer: Option<PathBuf>,
    pub disks: DiskResolver,
    pub complaints: Arc<CellWarnings>,
    /// Free leaves of all branches.
    pub free: AtomicUsize,
    pub free_max: usize,
}

impl CellTree {
    pub fn resolve(&self, limits: &LimitSet, roots: &[DeviceNumber]) -> LimitSet {
        self.disks.resolve(limits, roots, &self.complaints)
    }
}

impl CellTree {
    /// Makes v1 count bytes of all disks. It counts only disks for which a limit was ever set, and
    /// a limit that limits nothing is enough.
    pub fn count_disks(&self) {
        let v1 = |tree: &&Arc<CgroupDir>| {
            tree.hierarchy.version == CgroupVersion::V1
                && tree.hierarchy.controllers.has(CgroupController::Blkio)
        };
        for tree in self.trees.iter().filter(v1) {
            for (major, minor) in device::physical() {
                let file = tree.file("blkio.throttle.read_bps_device");
                if let Err(error) = files::write(&file, &format!("{major}:{minor} 0")) {
                    tracing::info!(%error, "bytes of disk {major}:{minor} may not be counted");
                }
            }
        }
    }
}

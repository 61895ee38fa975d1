//! Cells: where each request runs, how much it may use there, what it used, and how everything in it is ended.
//!
//! One `Cells` for each keeper process, used on its one thread; each call takes microseconds. Not here: what a
//! request asks for (`cmdb::cell`), who may ask for it (`confinement`), the life of a process (`process`).

use std::io;
use std::sync::Arc;

use nagaya_base::Code;
use nagaya_cmdb::cell::{CellChange, Confinement, Controller, Limits, Usage};
use nagaya_cmdb::{Site, Table, Tenant};
use rustix::process::Pid;

use crate::options::BackEnd;
use crate::sys::Entrance;
use crate::tree::{self, Fence};

pub use crate::tree::{Kind, LOOK_AGAIN_MAX};

/// For whom a request runs.
#[derive(Debug, Clone)]
pub struct Home {
    pub tenant: Arc<Tenant>,
    /// None: beneath the tenant alone, as a worker that has served nobody yet.
    pub site: Option<Arc<Site>>,
    /// `st_dev` of the site's files as major and minor number, for `Device::Root`. None: the tenant's home is looked at.
    pub device: Option<(u32, u32)>,
}

/// Why a request has no cell.
#[derive(Debug, thiserror::Error)]
#[error("{code}: {message}")]
pub struct CellError {
    pub code: Code,
    pub message: String,
}

/// A controller that limits nothing here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// `None`: the fence.
    pub controller: Option<Controller>,
    pub why: String,
}

/// All cells of this keeper.
#[derive(Debug)]
pub struct Cells {
    fence: Fence,
}

impl Cells {
    /// Finds out what can be used here, after removing what dead keepers left behind. `processes_per_tenant` holds for
    /// tenants whose record gives no number.
    pub fn open(back_end: BackEnd, _processes_per_tenant: u32) -> Self {
        Self { fence: Fence::open(back_end) }
    }

    /// What keeps a tree together.
    pub fn fence(&self) -> Kind {
        self.fence.kind()
    }

    /// What is not limited here, and why.
    pub fn report(&self) -> &[Missing] {
        &[]
    }

    /// A leaf of its own for one request (or one worker), with the limits of its site's record and over them those of
    /// `confinement`. `usage` counts from here.
    pub fn leaf(&self, _home: &Home, _confinement: &Confinement) -> Result<Arc<Leaf>, CellError> {
        let leaf =
            self.fence.leaf().map_err(|error| CellError { code: Code(340), message: error.to_string() })?;
        Ok(Arc::new(Leaf(leaf)))
    }

    /// Gives a leaf that a worker is in the limits of its next request, if that is to run in the same place. False:
    /// take another `leaf`, and `adopt` the worker there.
    pub fn refit(&self, _leaf: &Leaf, _home: &Home, _confinement: &Confinement) -> Result<bool, CellError> {
        Ok(false)
    }

    /// To be called when records or `processes_per_tenant` have changed: existing cells follow.
    pub fn apply_records(&self, _table: &Table, _processes_per_tenant: u32) {}

    pub fn change(&self, _change: &CellChange) -> Result<(), CellError> {
        Ok(())
    }

    /// The tree with its limits and use, for `nagaya cells`.
    pub fn show(&self) -> serde_json::Value {
        serde_json::json!({"controllers": {}, "missing": [], "cells": [], "left_out": 0})
    }

    /// Removes cells nobody has used for a while. To be called every few seconds.
    pub fn sweep(&self) {}

    /// Removes everything that nothing lives in.
    pub fn close(&self) {
        self.fence.close();
    }
}

/// The cell of one request. It goes by `release`, not by dropping: a tree that still runs keeps its leaf.
#[derive(Debug)]
pub struct Leaf(tree::Leaf);

impl Leaf {
    /// For `sys::spawn`.
    pub fn entrance(&self) -> Entrance {
        self.0.entrance()
    }

    /// Moves a running process of one thread here from the leaf it is in. Only hierarchies in which the two differ.
    pub fn adopt(&self, _pid: Pid, _from: &Self) -> Result<(), CellError> {
        Ok(())
    }

    /// `usage` counts from now.
    pub fn begin(&self) {}

    /// What was used here since `begin`.
    pub fn usage(&self) -> Usage {
        Usage::default()
    }

    /// Puts these limits in the place of those it has, while work runs in it.
    pub fn set(&self, _limits: &Limits) {}

    /// The limits it has.
    pub fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Kills everything in it; what dies slowly is still there afterwards. `leader` is the first process,
    /// which must not be reaped yet: its number stands for its group.
    pub fn end(&self, leader: Option<Pid>) -> io::Result<()> {
        self.0.end(leader)
    }

    /// True once nothing lives in it: then it is for the next request, and no longer for this one.
    pub fn release(&self) -> io::Result<bool> {
        self.0.remove()
    }

    /// Where it is in the tree, as `nagaya cells` shows it: `demo/wiki/r12`.
    pub fn name(&self) -> &str {
        ""
    }

    /// What lives in it.
    pub fn pids(&self) -> io::Result<Vec<Pid>> {
        Ok(Vec::new())
    }
}

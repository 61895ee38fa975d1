//! The tree of cells with limits, use and pressure, for `nagaya cells`.
//!
//! Not here: the use of one request (`leaf`).

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nagaya_records::cell::{CgroupController, LimitSet};
use serde_json::{Map, Value, json};

use crate::cells::cell_path::{CellPath, LevelKind};

use super::branch::CellBranch;
use super::controllers::{CgroupVersion, v2_name};
use super::dir::CgroupDir;
use super::leaf::Leaf;
use super::tree::ProcessTracking;
use super::usage::{self, CellCounters, CellMeter, CounterSource};
use super::{CellsState, KeeperCells};

/// Maximum number of cells listed. Each costs some reads, on a worker thread.
pub const LISTED_MAX: usize = 2_000;

/// Numbers of cells, for metrics and the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellCounts {
    pub tenants: usize,
    pub sites: usize,
    pub named: usize,
    /// Tenants with lowered CPU priority.
    pub giving_way: usize,
    /// Leaves in use: of requests, idle workers and applications.
    pub requests: usize,
    /// Leaves that wait for the next request.
    pub free: usize,
    /// Leaves ever made, and how often an existing one was taken.
    pub made: u64,
    pub reused: u64,
}

/// One line of the list.
struct CellRow {
    path: String,
    kind: &'static str,
    tenant: Option<String>,
    site: Option<String>,
    limits: LimitSet,
    dirs: Vec<Arc<CgroupDir>>,
    leaf: Option<Arc<Leaf>>,
    requests: usize,
}

impl KeeperCells {
    pub fn numbers(&self) -> CellCounts {
        let state = self.state.lock();
        let count = |wanted: fn(&LevelKind) -> bool| state.dirs.keys().filter(|what| wanted(what)).count();
        CellCounts {
            tenants: count(|what| matches!(what, LevelKind::Tenant(_))),
            sites: count(|what| matches!(what, LevelKind::Site(_))),
            named: state.desired.named().count(),
            giving_way: state.desired.giving_way(),
            requests: state.branches.values().map(|branch| branch.live().len()).sum(),
            free: self.shared.free.load(Ordering::Relaxed),
            made: state.leaves_made,
            reused: state.leaves_reused,
        }
    }

    /// Returns the tree with its limits and use.
    pub fn show(&self) -> Value {
        let state = self.state.lock();
        let mut rows = self.node(&state);
        rows.extend(levels(&state));
        rows.extend(requests(&state));
        let left_out = rows.len().saturating_sub(LISTED_MAX);
        rows.truncate(LISTED_MAX);
        drop(state);
        let missing = self.missing.iter().map(|missing| {
            let controller = missing.controller.map_or("fence", CgroupController::as_str);
            json!({"controller": controller, "code": missing.code.to_string(), "why": missing.why})
        });
        json!({
            "controllers": self.controllers(),
            "missing": missing.collect::<Vec<_>>(),
            "cells": rows.iter().map(CellRow::show).collect::<Vec<_>>(),
            "left_out": left_out,
            "complaints": self.shared.complaints.show(),
        })
    }

    /// Returns named cells alone, for rules that read them.
    pub fn show_named(&self) -> Value {
        let state = self.state.lock();
        let mut rows: Vec<CellRow> = levels(&state).into_iter().filter(|row| row.kind == "named").collect();
        let left_out = rows.len().saturating_sub(LISTED_MAX);
        rows.truncate(LISTED_MAX);
        drop(state);
        json!({"cells": rows.iter().map(CellRow::show).collect::<Vec<_>>(), "left_out": left_out})
    }

    /// Returns the version in which each controller is used, and the mechanism that keeps trees
    /// together.
    fn controllers(&self) -> Map<String, Value> {
        let version = |controller| {
            let tree = self.shared.trees.iter().find(|tree| tree.hierarchy.controllers.has(controller));
            json!(tree.map(|tree| tree.hierarchy.version.as_str()))
        };
        let mut all: Map<String, Value> =
            CgroupController::ALL.into_iter().map(|one| (one.as_str().to_owned(), version(one))).collect();
        let fence = match self.fence() {
            ProcessTracking::CgroupV2 => json!("v2"),
            ProcessTracking::CgroupV1 => json!("v1"),
            ProcessTracking::ProcessGroup => Value::Null,
        };
        all.insert("fence".into(), fence);
        all
    }

    fn node(&self, state: &CellsState) -> Vec<CellRow> {
        vec![CellRow {
            path: String::new(),
            kind: "node",
            tenant: None,
            site: None,
            limits: LimitSet::default(),
            dirs: self.shared.trees.clone(),
            leaf: None,
            requests: state.branches.values().map(|branch| branch.live().len()).sum(),
        }]
    }
}

/// Lists tenants, sites and named cells.
fn levels(state: &CellsState) -> Vec<CellRow> {
    let mut counts: HashMap<LevelKind, usize> = HashMap::new();
    let mut tenants: HashMap<&str, &str> = HashMap::new();
    for branch in state.branches.values() {
        let CellPath { tenant, site, attached } = &branch.place;
        let live = branch.live().len();
        tenants.extend(site.as_ref().map(|site| (site.as_str(), tenant.as_str())));
        let mut whats = vec![LevelKind::Tenant(tenant.clone())];
        whats.extend(site.clone().map(LevelKind::Site));
        for what in attached.iter().map(|one| branch.place.what(one)) {
            // A request that is attached to one cell by several controllers is one request in it.
            if !whats.contains(&what) {
                whats.push(what);
            }
        }
        for what in whats {
            *counts.entry(what).or_default() += live;
        }
    }
    let here = state.dirs.keys().filter(|what| !matches!(what, LevelKind::Named { .. })).cloned();
    let whats = here.chain(state.desired.named().map(|(what, ..)| what));
    let row = |what: LevelKind| {
        let (path, kind, tenant, site) = match &what {
            LevelKind::Tenant(name) => (name.to_string(), "tenant", Some(name.to_string()), None),
            LevelKind::Site(name) => {
                let tenant = tenants.get(name.as_str()).copied().unwrap_or_default();
                (format!("{tenant}/{name}"), "site", Some(tenant.to_owned()), Some(name.to_string()))
            }
            LevelKind::Named { name, tenant: None } => (format!("named/{name}"), "named", None, None),
            LevelKind::Named { name, tenant: Some(tenant) } => {
                (format!("{tenant}/named/{name}"), "named", Some(tenant.to_string()), None)
            }
        };
        let held = state.dirs.get(&what).into_iter().flatten();
        CellRow {
            path,
            kind,
            tenant,
            site,
            limits: state.desired.of(&what).0,
            dirs: held.filter_map(|held| held.dir.upgrade()).collect(),
            leaf: None,
            requests: counts.get(&what).copied().unwrap_or(0),
        }
    };
    let mut rows: Vec<CellRow> = whats.map(row).collect();
    rows.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    rows
}

fn requests(state: &CellsState) -> Vec<CellRow> {
    let of_branch = |branch: &Arc<CellBranch>| {
        let place = branch.place.clone();
        branch.live().into_iter().map(move |leaf| CellRow {
            path: leaf.name().to_owned(),
            kind: "request",
            tenant: Some(place.tenant.to_string()),
            site: place.site.as_ref().map(ToString::to_string),
            limits: leaf.limits(),
            dirs: leaf.dirs(),
            leaf: Some(leaf),
            requests: 1,
        })
    };
    let mut rows: Vec<CellRow> = state.branches.values().flat_map(of_branch).collect();
    rows.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    rows
}

impl CellRow {
    fn show(&self) -> Value {
        json!({
            "path": self.path,
            "kind": self.kind,
            "tenant": self.tenant,
            "site": self.site,
            "limits": self.limits,
            "usage": self.usage(),
            "pressure": self.pressure(),
            "requests": self.requests,
        })
    }

    /// Use of a request since it began; of other cells, since their directories were made.
    fn usage(&self) -> Value {
        let counters = match &self.leaf {
            Some(leaf) => {
                let usage = leaf.usage();
                CellCounters {
                    cpu_us: usage.cpu_us,
                    throttled_us: usage.throttled_us,
                    read_bytes: usage.read_bytes,
                    write_bytes: usage.write_bytes,
                }
            }
            None => self.counters(),
        };
        let processes = match &self.leaf {
            Some(leaf) => leaf.pids().ok().map(|pids| pids.len() as u64),
            None => self.sum(CgroupController::Pids, "pids.current", "pids.current"),
        };
        json!({
            "cpu_us": counters.cpu_us,
            "throttled_us": counters.throttled_us,
            "read_bytes": counters.read_bytes,
            "write_bytes": counters.write_bytes,
            "processes": processes,
            "memory_bytes": self.sum(CgroupController::Memory, "memory.usage_in_bytes", "memory.current"),
        })
    }

    fn counters(&self) -> CellCounters {
        let mut meter = CellMeter::default();
        for dir in &self.dirs {
            let (version, has) = (dir.hierarchy.version, |one| dir.hierarchy.controllers.has(one));
            let mut add = |source| meter.add(source, &dir.path).unwrap_or(false);
            if has(CgroupController::Cpuacct) {
                add(if version == CgroupVersion::V1 {
                    CounterSource::CpuacctUsage
                } else {
                    CounterSource::CpuStatUsage
                });
            }
            if has(CgroupController::Cpu) {
                add(CounterSource::CpuStatThrottled);
            }
            if has(CgroupController::Blkio) {
                add(if version == CgroupVersion::V1 {
                    CounterSource::BlkioBytesRecursive
                } else {
                    CounterSource::IoStat
                });
            }
        }
        // A cell that is going away while it is shown has used nothing.
        meter.read().unwrap_or_default()
    }

    /// Sums all its directories that have this controller. `None` if none has.
    fn sum(&self, controller: CgroupController, v1: &str, v2: &str) -> Option<u64> {
        let with = self.dirs.iter().filter(|dir| dir.hierarchy.controllers.has(controller));
        let numbers = with.filter_map(|dir| {
            let file = if dir.hierarchy.version == CgroupVersion::V1 { v1 } else { v2 };
            fs::read_to_string(dir.file(file)).ok()?.trim_end().parse::<u64>().ok()
        });
        numbers.fold(None, |sum, number| Some(sum.unwrap_or(0) + number))
    }

    /// Returns the highest pressure of its directories. Only v2 reports it, with or without
    /// controllers.
    fn pressure(&self) -> Value {
        let v2: Vec<_> = self.dirs.iter().filter(|dir| dir.hierarchy.version == CgroupVersion::V2).collect();
        let worst = |controller: CgroupController| {
            let file = format!("{}.pressure", v2_name(controller).unwrap_or_default());
            let texts = v2.iter().filter_map(|dir| fs::read_to_string(dir.file(&file)).ok());
            texts
                .filter_map(|text| usage::pressure(&text))
                .fold(None, |worst: Option<f64>, one| Some(worst.map_or(one, |worst| worst.max(one))))
        };
        let [cpu, io, memory] =
            [CgroupController::Cpu, CgroupController::Blkio, CgroupController::Memory].map(worst);
        match (cpu, io, memory) {
            (None, None, None) => Value::Null,
            _ => json!({"cpu": cpu, "io": io, "memory": memory}),
        }
    }
}

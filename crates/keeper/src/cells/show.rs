//! The tree of cells with limits, use and pressure, for `nagaya cells`.
//!
//! Not here: what one request used (`leaf`).

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nagaya_cmdb::cell::{Controller, Limits};
use serde_json::{Map, Value, json};

use super::branch::Branch;
use super::controllers::{Version, v2_name};
use super::dir::Dir;
use super::leaf::Leaf;
use super::place::{Place, What};
use super::usage::{self, Counters, Meter, Source};
use super::{Cells, Kind, State};

/// Cells listed at most. Each costs some reads, on a thread for what blocks.
pub const LISTED_MAX: usize = 2_000;

/// How many cells there are, for metrics and the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pub tenants: usize,
    pub sites: usize,
    pub named: usize,
    /// Tenants that give way to others on the processor.
    pub giving_way: usize,
    /// Leaves in use: of requests, idle workers and applications.
    pub requests: usize,
    /// Leaves that wait for the next request.
    pub free: usize,
    /// Leaves that were ever made, and how often one was taken that was there.
    pub made: u64,
    pub reused: u64,
}

/// One line of the list.
struct Row {
    path: String,
    kind: &'static str,
    tenant: Option<String>,
    site: Option<String>,
    limits: Limits,
    dirs: Vec<Arc<Dir>>,
    leaf: Option<Arc<Leaf>>,
    requests: usize,
}

impl Cells {
    pub fn numbers(&self) -> Numbers {
        let state = self.state.lock();
        let count = |wanted: fn(&What) -> bool| state.dirs.keys().filter(|what| wanted(what)).count();
        Numbers {
            tenants: count(|what| matches!(what, What::Tenant(_))),
            sites: count(|what| matches!(what, What::Site(_))),
            named: state.desired.named().count(),
            giving_way: state.desired.giving_way(),
            requests: state.branches.values().map(|branch| branch.live().len()).sum(),
            free: self.shared.free.load(Ordering::Relaxed),
            made: state.leaves_made,
            reused: state.leaves_reused,
        }
    }

    /// The tree with its limits and use.
    pub fn show(&self) -> Value {
        let state = self.state.lock();
        let mut rows = self.node(&state);
        rows.extend(levels(&state));
        rows.extend(requests(&state));
        let left_out = rows.len().saturating_sub(LISTED_MAX);
        rows.truncate(LISTED_MAX);
        drop(state);
        let missing = self.missing.iter().map(|missing| {
            let controller = missing.controller.map_or("fence", Controller::as_str);
            json!({"controller": controller, "code": missing.code.to_string(), "why": missing.why})
        });
        json!({
            "controllers": self.controllers(),
            "missing": missing.collect::<Vec<_>>(),
            "cells": rows.iter().map(Row::show).collect::<Vec<_>>(),
            "left_out": left_out,
            "complaints": self.shared.complaints.show(),
        })
    }

    /// Named cells alone, for rules that ask.
    pub fn show_named(&self) -> Value {
        let state = self.state.lock();
        let mut rows: Vec<Row> = levels(&state).into_iter().filter(|row| row.kind == "named").collect();
        let left_out = rows.len().saturating_sub(LISTED_MAX);
        rows.truncate(LISTED_MAX);
        drop(state);
        json!({"cells": rows.iter().map(Row::show).collect::<Vec<_>>(), "left_out": left_out})
    }

    /// The version each controller is used in, and the fence.
    fn controllers(&self) -> Map<String, Value> {
        let version = |controller| {
            let tree = self.shared.trees.iter().find(|tree| tree.hierarchy.controllers.has(controller));
            json!(tree.map(|tree| tree.hierarchy.version.as_str()))
        };
        let mut all: Map<String, Value> =
            Controller::ALL.into_iter().map(|one| (one.as_str().to_owned(), version(one))).collect();
        let fence = match self.fence() {
            Kind::CgroupV2 => json!("v2"),
            Kind::CgroupV1 => json!("v1"),
            Kind::ProcessGroup => Value::Null,
        };
        all.insert("fence".into(), fence);
        all
    }

    fn node(&self, state: &State) -> Vec<Row> {
        vec![Row {
            path: String::new(),
            kind: "node",
            tenant: None,
            site: None,
            limits: Limits::default(),
            dirs: self.shared.trees.clone(),
            leaf: None,
            requests: state.branches.values().map(|branch| branch.live().len()).sum(),
        }]
    }
}

/// Tenants, sites and named cells.
fn levels(state: &State) -> Vec<Row> {
    let mut counts: HashMap<What, usize> = HashMap::new();
    let mut tenants: HashMap<&str, &str> = HashMap::new();
    for branch in state.branches.values() {
        let Place { tenant, site, attached } = &branch.place;
        let live = branch.live().len();
        tenants.extend(site.as_ref().map(|site| (site.as_str(), tenant.as_str())));
        let mut whats = vec![What::Tenant(tenant.clone())];
        whats.extend(site.clone().map(What::Site));
        for what in attached.iter().map(|one| branch.place.what(one)) {
            // Attached to one cell by several controllers, a request is one in it.
            if !whats.contains(&what) {
                whats.push(what);
            }
        }
        for what in whats {
            *counts.entry(what).or_default() += live;
        }
    }
    let here = state.dirs.keys().filter(|what| !matches!(what, What::Named { .. })).cloned();
    let whats = here.chain(state.desired.named().map(|(what, ..)| what));
    let row = |what: What| {
        let (path, kind, tenant, site) = match &what {
            What::Tenant(name) => (name.to_string(), "tenant", Some(name.to_string()), None),
            What::Site(name) => {
                let tenant = tenants.get(name.as_str()).copied().unwrap_or_default();
                (format!("{tenant}/{name}"), "site", Some(tenant.to_owned()), Some(name.to_string()))
            }
            What::Named { name, tenant: None } => (format!("named/{name}"), "named", None, None),
            What::Named { name, tenant: Some(tenant) } => {
                (format!("{tenant}/named/{name}"), "named", Some(tenant.to_string()), None)
            }
        };
        let held = state.dirs.get(&what).into_iter().flatten();
        Row {
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
    let mut rows: Vec<Row> = whats.map(row).collect();
    rows.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    rows
}

fn requests(state: &State) -> Vec<Row> {
    let of_branch = |branch: &Arc<Branch>| {
        let place = branch.place.clone();
        branch.live().into_iter().map(move |leaf| Row {
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
    let mut rows: Vec<Row> = state.branches.values().flat_map(of_branch).collect();
    rows.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    rows
}

impl Row {
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

    /// Of a request since it began; of what lasts, since its directories were made.
    fn usage(&self) -> Value {
        let counters = match &self.leaf {
            Some(leaf) => {
                let usage = leaf.usage();
                Counters {
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
            None => self.sum(Controller::Pids, "pids.current", "pids.current"),
        };
        json!({
            "cpu_us": counters.cpu_us,
            "throttled_us": counters.throttled_us,
            "read_bytes": counters.read_bytes,
            "write_bytes": counters.write_bytes,
            "processes": processes,
            "memory_bytes": self.sum(Controller::Memory, "memory.usage_in_bytes", "memory.current"),
        })
    }

    fn counters(&self) -> Counters {
        let mut meter = Meter::default();
        for dir in &self.dirs {
            let (version, has) = (dir.hierarchy.version, |one| dir.hierarchy.controllers.has(one));
            let mut add = |source| meter.add(source, &dir.path).unwrap_or(false);
            if has(Controller::Cpuacct) {
                add(if version == Version::V1 { Source::CpuacctUsage } else { Source::CpuStatUsage });
            }
            if has(Controller::Cpu) {
                add(Source::CpuStatThrottled);
            }
            if has(Controller::Blkio) {
                add(if version == Version::V1 { Source::BlkioBytesRecursive } else { Source::IoStat });
            }
        }
        // A cell that is going away while it is shown has used nothing.
        meter.read().unwrap_or_default()
    }

    /// Of all its directories that have this controller; None: none has.
    fn sum(&self, controller: Controller, v1: &str, v2: &str) -> Option<u64> {
        let with = self.dirs.iter().filter(|dir| dir.hierarchy.controllers.has(controller));
        let numbers = with.filter_map(|dir| {
            let file = if dir.hierarchy.version == Version::V1 { v1 } else { v2 };
            fs::read_to_string(dir.file(file)).ok()?.trim_end().parse::<u64>().ok()
        });
        numbers.fold(None, |sum, number| Some(sum.unwrap_or(0) + number))
    }

    /// v2 alone tells it, with or without controllers. The worst of its directories.
    fn pressure(&self) -> Value {
        let v2: Vec<_> = self.dirs.iter().filter(|dir| dir.hierarchy.version == Version::V2).collect();
        let worst = |controller: Controller| {
            let file = format!("{}.pressure", v2_name(controller).unwrap_or_default());
            let texts = v2.iter().filter_map(|dir| fs::read_to_string(dir.file(&file)).ok());
            texts
                .filter_map(|text| usage::pressure(&text))
                .fold(None, |worst: Option<f64>, one| Some(worst.map_or(one, |worst| worst.max(one))))
        };
        let [cpu, io, memory] = [Controller::Cpu, Controller::Blkio, Controller::Memory].map(worst);
        match (cpu, io, memory) {
            (None, None, None) => Value::Null,
            _ => json!({"cpu": cpu, "io": io, "memory": memory}),
        }
    }
}

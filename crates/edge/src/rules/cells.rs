//! Caches the node's named cells for this process. Rules ask whether one exists and about its
//! usage.
//!
//! The keeper owns them. While rules ask, it is asked once a second. Changes by verdicts of this
//! process count at once. So a rule's question costs a table look-up, and is at most a second
//! behind the changes of others.
//!
//! Not here: the cells (`keeper::cells`), the rules' operations on them (`nagaya_rules`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use foldhash::fast::RandomState;
use nagaya_records::cell::{
    CPU_SHARES_DEFAULT, CellChange, CellName, CellScope, IoLimit, LimitSet, NamedCell,
};
use parking_lot::RwLock;
use serde::Deserialize;

/// Maximum number of names. Further ones count as missing, so a rule makes them once more, which
/// changes nothing.
const NAMES_MAX: usize = 16_384;

/// One named cell of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownCell {
    pub limits: LimitSet,
    pub use_: CellUsage,
}

/// Usage of a cell, as the keeper reports it. A new cell has used nothing yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CellUsage {
    pub cpu_us: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub throttled_us: u64,
    pub processes: u64,
    pub memory_bytes: u64,
}

/// Value in cgroup v1 of a cell without a quota, and of one without a memory limit.
const NO_QUOTA: &str = "-1";
const CFS_PERIOD_US: u32 = 100_000;
const NO_MEMORY_LIMIT: u64 = 0x7fff_ffff_ffff_f000;

impl KnownCell {
    /// Returns the content of a cgroup v1 file with this name. `None` if it is not known here.
    pub fn value(&self, key: &str) -> Option<String> {
        let Self { limits, use_ } = self;
        let bps = |of: fn(&IoLimit) -> Option<u64>| {
            let lines = limits.io.iter().filter_map(|io| Some(format!("{} {}", io.device, of(io)?)));
            Some(lines.collect::<Vec<_>>().join("\n")).filter(|text| !text.is_empty())
        };
        Some(match key {
            "cpu.shares" => limits.cpu_shares.unwrap_or(CPU_SHARES_DEFAULT).to_string(),
            "cpu.cfs_quota_us" => limits.cpu.map_or_else(|| NO_QUOTA.into(), |cpu| cpu.quota_us.to_string()),
            "cpu.cfs_period_us" => limits.cpu.map_or(CFS_PERIOD_US, |cpu| cpu.period_us).to_string(),
            "cpu.stat" => format!("throttled_time {}", use_.throttled_us.saturating_mul(1000)),
            "cpuacct.usage" => use_.cpu_us.saturating_mul(1000).to_string(),
            "cpuset.cpus" => limits.cpus.as_deref()?.into(),
            "cpuset.mems" => limits.mems.as_deref()?.into(),
            "blkio.throttle.read_bps_device" => bps(|io| io.read_bps)?,
            "blkio.throttle.write_bps_device" => bps(|io| io.write_bps)?,
            "blkio.throttle.read_iops_device" => bps(|io| io.read_iops)?,
            "blkio.throttle.write_iops_device" => bps(|io| io.write_iops)?,
            "memory.limit_in_bytes" => limits.memory.unwrap_or(NO_MEMORY_LIMIT).to_string(),
            "memory.usage_in_bytes" => use_.memory_bytes.to_string(),
            "pids.max" => limits.processes.map_or_else(|| "max".into(), |max| max.to_string()),
            "pids.current" => use_.processes.to_string(),
            _ => return None,
        })
    }
}

/// The cache, shared by all threads.
#[derive(Debug, Default)]
pub struct NamedCells {
    /// Some rule has asked since the last question to the keeper.
    asked: AtomicBool,
    table: RwLock<CellTable>,
    /// Counts possible changes of the table. Read without its lock.
    moment: AtomicU64,
}

#[derive(Debug, Default)]
struct CellTable {
    cells: HashMap<CellName, CellEntry, RandomState>,
    /// Counts changes by verdicts.
    changes: u64,
}

#[derive(Debug)]
struct CellEntry {
    /// `None` if a verdict removed it.
    cell: Option<Arc<KnownCell>>,
    /// Number of the change that made or removed it. 0 if the keeper reported it.
    change: u64,
}

impl NamedCells {
    /// Returns the cell with this name, if it exists.
    pub fn get(&self, name: &CellName) -> Option<Arc<KnownCell>> {
        self.note_asked();
        self.table.read().cells.get(name)?.cell.clone()
    }

    /// Records that some rule relies on this cache.
    pub fn note_asked(&self) {
        // Written only to change it, so that the cache line stays shared between threads.
        if !self.asked.load(Ordering::Relaxed) {
            self.asked.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a rule asked since the last call.
    pub fn take_asked(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }

    /// Records that a verdict attached a request to these. So those that were to be made exist
    /// now.
    pub fn attached(&self, named: &[NamedCell]) {
        for NamedCell { name, scope, limits, .. } in named {
            if let (CellScope::Node, Some(limits)) = (scope, limits) {
                self.set(name, limits);
            }
        }
    }

    /// Applies the changes of a verdict. Leaves in `changes` only those that the keeper does not
    /// have already.
    pub fn change(&self, changes: &mut Vec<CellChange>) {
        // Asks for a periodic check that this is still true.
        self.note_asked();
        changes.retain(|change| match change {
            CellChange::Set { name, limits, .. } => self.set(name, limits),
            CellChange::Drop { name, .. } => self.drop(name),
        });
    }

    /// Returns false if nothing changes, which is nearly always so: a rule sets the same for each
    /// request.
    fn set(&self, name: &CellName, limits: &LimitSet) -> bool {
        let before = self.table.read().cells.get(name).and_then(|entry| entry.cell.clone());
        let merged = before.as_ref().map_or_else(|| limits.clone(), |cell| cell.limits.overlaid(limits));
        if before.as_ref().is_some_and(|cell| cell.limits == merged) {
            return false;
        }
        let use_ = before.map_or_else(CellUsage::default, |cell| cell.use_);
        self.put(name, Some(Arc::new(KnownCell { limits: merged, use_ })));
        true
    }

    /// Returns false if a verdict dropped it before and nobody made it since.
    fn drop(&self, name: &CellName) -> bool {
        if self.table.read().cells.get(name).is_some_and(|entry| entry.cell.is_none()) {
            return false;
        }
        self.put(name, None);
        true
    }

    fn put(&self, name: &CellName, cell: Option<Arc<KnownCell>>) {
        let mut table = self.table.write();
        table.changes += 1;
        self.moment.fetch_add(1, Ordering::Release);
        let entry = CellEntry { cell, change: table.changes };
        if table.cells.len() < NAMES_MAX || table.cells.contains_key(name) {
            table.cells.insert(name.clone(), entry);
        }
    }

    /// Returns the number of changes. Read it before the keeper is asked.
    pub fn changes(&self) -> u64 {
        self.table.read().changes
    }

    /// Returns a number that is different after each change of the table, and never 0.
    pub fn moment(&self) -> u64 {
        self.moment.load(Ordering::Acquire) + 1
    }

    /// Takes over the keeper's answer. Changes by verdicts after `changes` are newer and stay.
    ///
    /// # Errors
    /// Fails if the text is not that of a keeper of this version.
    pub fn learn(&self, json: &str, changes: u64) -> serde_json::Result<()> {
        let CellListing { cells } = serde_json::from_str(json)?;
        let mut table = self.table.write();
        self.moment.fetch_add(1, Ordering::Release);
        table.cells.retain(|_, entry| entry.change > changes);
        for cell in cells {
            let Some(name) = cell.name() else { continue };
            if table.cells.len() >= NAMES_MAX {
                break;
            }
            let known = KnownCell { limits: cell.limits, use_: cell.use_ };
            table.cells.entry(name).or_insert_with(|| CellEntry { cell: Some(Arc::new(known)), change: 0 });
        }
        Ok(())
    }
}

/// The used part of the keeper's tree of cells.
#[derive(Deserialize)]
struct CellListing {
    cells: Vec<ListedCell>,
}

#[derive(Deserialize)]
struct ListedCell {
    path: String,
    kind: String,
    #[serde(default)]
    limits: LimitSet,
    #[serde(default, rename = "usage")]
    use_: CellUsage,
}

impl ListedCell {
    /// Returns the name, if it is a named cell of the node.
    fn name(&self) -> Option<CellName> {
        if self.kind != "named" {
            return None;
        }
        CellName::parse(self.path.strip_prefix("named/")?).ok()
    }
}

#[cfg(test)]
mod tests {
    use nagaya_records::cell::CgroupController;

    use super::*;

    fn name(text: &str) -> CellName {
        CellName::parse(text).unwrap()
    }

    fn set(text: &str, shares: u32) -> CellChange {
        let limits = LimitSet { cpu_shares: Some(shares), ..LimitSet::default() };
        CellChange::Set { name: name(text), controllers: vec![CgroupController::Cpu], limits }
    }

    /// What of these the keeper is told.
    fn told(cells: &NamedCells, changes: &[CellChange]) -> usize {
        let mut changes = changes.to_vec();
        cells.change(&mut changes);
        changes.len()
    }

    fn drop(text: &str) -> CellChange {
        CellChange::Drop { name: name(text), controllers: vec![CgroupController::Cpu] }
    }

    const LISTING: &str = r#"{"controllers":{"cpu":"v1"},"missing":[],"left_out":0,"cells":[
        {"path":"","kind":"node","tenant":null,"site":null,"limits":{"io":[]},"usage":{"cpu_us":9},"requests":0},
        {"path":"named/httpd","kind":"named","tenant":null,"site":null,"limits":{"cpu_shares":75,"io":[]},
         "usage":{"cpu_us":5,"processes":2},"pressure":null,"requests":1},
        {"path":"demo/named/own","kind":"named","tenant":"demo","site":null,"limits":{"io":[]},"usage":{},"requests":0}]}"#;

    #[test]
    fn cells_the_keeper_tells_of_are_known_with_their_use() {
        let cells = NamedCells::default();
        assert!(cells.get(&name("httpd")).is_none());
        assert!(cells.take_asked() && !cells.take_asked());
        cells.learn(LISTING, cells.changes()).unwrap();
        let httpd = cells.get(&name("httpd")).unwrap();
        assert_eq!((httpd.limits.cpu_shares, httpd.use_.cpu_us, httpd.use_.processes), (Some(75), 5, 2));
        assert!(cells.get(&name("own")).is_none(), "a tenant's cell is not the node's");
        cells.learn(r#"{"cells":[]}"#, cells.changes()).unwrap();
        assert!(cells.get(&name("httpd")).is_none());
    }

    #[test]
    fn change_by_a_verdict_holds_until_a_later_keeper_listing() {
        let cells = NamedCells::default();
        let before = cells.changes();
        assert_eq!(told(&cells, &[set("new", 10), drop("httpd")]), 2);
        assert_eq!(cells.get(&name("new")).unwrap().limits.cpu_shares, Some(10));
        cells.learn(LISTING, before).unwrap();
        assert!(cells.get(&name("new")).is_some() && cells.get(&name("httpd")).is_none());
        cells.learn(LISTING, cells.changes()).unwrap();
        assert!(cells.get(&name("new")).is_none() && cells.get(&name("httpd")).is_some());
    }

    #[test]
    fn the_keeper_is_told_only_what_is_not_so_already() {
        let cells = NamedCells::default();
        assert_eq!(told(&cells, &[set("a", 10), set("a", 10)]), 1);
        assert_eq!(told(&cells, &[set("a", 10)]), 0);
        assert_eq!(told(&cells, &[set("a", 20), drop("a"), drop("a"), set("a", 20)]), 3);
        assert_eq!(cells.get(&name("a")).unwrap().limits.cpu_shares, Some(20));
        // The keeper says it is gone: somebody else removed it.
        cells.learn(r#"{"cells":[]}"#, cells.changes()).unwrap();
        assert_eq!(told(&cells, &[set("a", 20)]), 1);
    }

    #[test]
    fn values_have_the_names_and_forms_of_cgroup_v1() {
        let io = IoLimit { read_bps: Some(30), write_iops: Some(7), ..IoLimit::of("8:0".parse().unwrap()) };
        let limits =
            LimitSet { cpu_shares: Some(25), io: vec![io], processes: Some(9), ..LimitSet::default() };
        let known = KnownCell {
            limits,
            use_: CellUsage { cpu_us: 3, throttled_us: 4, processes: 2, ..CellUsage::default() },
        };
        for (key, value) in [
            ("cpu.shares", Some("25")),
            ("cpu.cfs_quota_us", Some("-1")),
            ("cpu.cfs_period_us", Some("100000")),
            ("cpu.stat", Some("throttled_time 4000")),
            ("cpuacct.usage", Some("3000")),
            ("blkio.throttle.read_bps_device", Some("8:0 30")),
            ("blkio.throttle.write_bps_device", None),
            ("blkio.throttle.write_iops_device", Some("8:0 7")),
            ("pids.max", Some("9")),
            ("pids.current", Some("2")),
            ("cpuset.cpus", None),
            ("cpu.rt_runtime_us", None),
        ] {
            assert_eq!(known.value(key).as_deref(), value, "{key}");
        }
        assert_eq!(KnownCell::default().value("cpu.shares").as_deref(), Some("1024"));
    }

    #[test]
    fn names_are_bounded() {
        let cells = NamedCells::default();
        for n in 0..NAMES_MAX + 10 {
            cells.set(&name(&format!("n{n}")), &LimitSet::default());
        }
        assert_eq!(cells.table.read().cells.len(), NAMES_MAX);
        assert!(cells.get(&name(&format!("n{NAMES_MAX}"))).is_none());
    }
}

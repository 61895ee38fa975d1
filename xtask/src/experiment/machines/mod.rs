//! The experiments of machines: what idle ones cost a busy one, which lever helps, where a page
//! spends its time, how fast a machine wakes, and how many fit a node.
//!
//! The guests are Debian's kernel for virtual machines, and QEMU translates their code where the
//! node has no KVM that works. Not here: applications without a machine (`instances`).

mod bare;
mod busy;
pub mod density;
pub mod idle;
pub mod levers;
mod scheduler;
pub mod turnaround;
pub mod wake;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use nagaya_records::instance::Tier;
use serde_json::{Value, json};

use super::instances::{AppHosting, RESTLESS};
use crate::content::mariadb::{DatabaseAccount, MariaDb};
use crate::content::population::UID_BASE;
use crate::content::postgresql::PostgreSql;
use crate::content::{AppPage, give};
use crate::experiment::harness::ExperimentSetting;
use crate::guest;
use crate::http::HttpVisit;
use crate::server::instance::InstanceStatus;
use crate::server::nagaya::NagayaSettings;

/// The program of the sites.
const PROGRAM: &str = include_str!("page.py");
const PYTHON: &str = "/usr/bin/python3";

/// Memory of a guest with this program.
const MEMORY: &str = "96M";

/// Longest start of an application whose machine is emulated beside many others, seconds.
const START_SECONDS: u32 = 300;

/// Machines that are started or woken at once.
const AT_ONCE: usize = 4;

/// Processes of one tenant: each machine has about ten threads.
const PROCESSES: u32 = 100_000;

/// Memory that stays free, bytes.
const MEMORY_FREE: f64 = 2.0 * GIB;
const GIB: f64 = 1_073_741_824.0;

/// A path of the socket in a guest.
const MARIADB_INSIDE: &str = "/run/mysqld/mysqld.sock";

/// Uids that no tenant has.
const MARIADB_UID: u32 = UID_BASE - 1;
const POSTGRESQL_UID: u32 = UID_BASE - 2;

/// Path and text of the page of a site without a database.
const PLAIN_PAGE: AppPage = AppPage { path: "/", text: "a page without a database" };

/// Rows of the databases, and words of each.
const ROWS: u32 = 200;
const WORDS: usize = 60;

/// The databases of a busy site.
struct PageDatabases {
    /// It ends after the node, as its value is dropped later.
    _mariadb: MariaDb,
    _postgresql: Option<PostgreSql>,
    account: DatabaseAccount,
    port: Option<u16>,
}

impl PageDatabases {
    /// Starts MariaDB, and PostgreSQL where the machine has it, with the same rows.
    fn start(dir: &Path) -> Result<Self> {
        let mariadb = MariaDb::start(&dir.join("mariadb"), MARIADB_UID)?;
        let account = mariadb.database("pages")?;
        mariadb.execute(&format!("USE pages; {}", statements()))?;
        let postgresql =
            PostgreSql::start(&dir.join("postgresql"), POSTGRESQL_UID, "pages", &account.password)?;
        if let Some(server) = &postgresql {
            server.execute(&statements())?;
        }
        let port = postgresql.as_ref().map(PostgreSql::port);
        Ok(Self { _mariadb: mariadb, _postgresql: postgresql, account, port })
    }

    /// Returns the names of those that run, the paper's first.
    fn names(&self) -> Vec<&'static str> {
        if self.port.is_some() { vec!["postgresql", "mariadb"] } else { vec!["mariadb"] }
    }

    /// Adds what reaches them to a site's backend.
    fn join(&self, backend: &mut Value) {
        let DatabaseAccount { socket, password, .. } = &self.account;
        backend["databases"] = json!([{"socket": socket, "inside": MARIADB_INSIDE}]);
        backend["env"] = json!({"DATABASE_PASSWORD": password, "MARIADB_SOCKET": MARIADB_INSIDE});
        if let Some(port) = self.port {
            backend["outbound"] = json!([format!("127.0.0.1:{port}")]);
            backend["env"]["POSTGRESQL_PORT"] = json!(port.to_string());
        }
    }
}

/// Returns statements that both databases understand.
fn statements() -> String {
    let body = "a word & another <one> ".repeat(WORDS / 6);
    let rows: Vec<String> = (1..=ROWS).map(|id| format!("({id}, 'Entry {id}', '{body}')")).collect();
    format!(
        "CREATE TABLE pages (id INTEGER PRIMARY KEY, title TEXT, body TEXT); INSERT INTO pages VALUES {};",
        rows.join(", ")
    )
}

/// Returns the tree with the kernel of the guests.
fn kernels() -> Result<PathBuf> {
    guest::kernel::own_release()
}

/// Returns the text that follows in the table `[instances]`, and further tables.
fn tables(more: &str) -> Result<String> {
    let kernels = kernels()?;
    Ok(format!(
        "{RESTLESS}kernels = \"{}\"\n{more}[cells]\nprocesses_per_tenant = {PROCESSES}\n",
        kernels.display()
    ))
}

/// Returns the record of a tenant.
fn tenant(name: &str, uid: u32) -> Value {
    json!({"tenant": {"name": name, "uid": uid, "gid": uid}})
}

/// Makes the directory of a tenant's program.
fn program(dir: &Path, tenant: &str, uid: u32) -> Result<PathBuf> {
    let tree = dir.join("apps").join(tenant);
    fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    fs::write(tree.join("page.py"), PROGRAM).context("writing a program")?;
    give(&tree, uid)?;
    Ok(tree)
}

/// Returns the backend of a site that runs the program in a machine.
fn backend(tree: &Path) -> Value {
    json!({
        "kind": "app",
        "command": [PYTHON, "-S", "-E", "page.py"],
        "directory": tree,
        "listen": "fd",
        "start_seconds": START_SECONDS,
        "timeout_seconds": START_SECONDS,
        "warm_up": ["/"],
        "release": "1",
        "machine": {"kernel": "node", "memory": MEMORY, "vcpus": 1},
    })
}

/// Returns the record of a site.
fn site(name: &str, tenant: &str, backend: &Value) -> Value {
    json!({"site": {
        "name": name, "tenant": tenant, "hosts": [super::instances::host(name)], "backend": backend,
    }})
}

/// Starts a node with these records, whose table `[instances]` goes on with `more`.
fn start(
    setting: &ExperimentSetting,
    name: &str,
    records: &[Value],
    more: &str,
    rules: Vec<(&'static str, String)>,
) -> Result<AppHosting> {
    let settings = NagayaSettings { tables: tables(more)?, rules, ..NagayaSettings::default() };
    AppHosting::with_records(setting, name, settings, records)
}

/// Sites of one node that rest and wake together.
struct MachineCrowd {
    names: Vec<String>,
}

impl MachineCrowd {
    /// Makes as many of them run as the machine's memory holds, and forgets the others.
    fn fill(&mut self, hosting: &AppHosting) -> Result<()> {
        let all = std::mem::take(&mut self.names);
        for some in all.chunks(AT_ONCE) {
            if available()? < MEMORY_FREE {
                eprintln!("the memory holds {} of {} machines", self.names.len(), all.len());
                break;
            }
            for (visit, is_right) in visit_all(hosting, some)? {
                ensure!(is_right, "a machine does not run: its page has status {}", visit.status);
            }
            self.names.extend_from_slice(some);
        }
        Ok(())
    }

    /// Brings all of them to a tier. Those that rest deeper run before.
    fn rest(&self, hosting: &AppHosting, tier: Tier) -> Result<()> {
        if self.names.is_empty() {
            return Ok(());
        }
        let all = InstanceStatus::of_all(&hosting.node)?;
        let is_deeper = |name: &&String| all.get(*name).is_none_or(|status| status.tier < tier);
        let deeper: Vec<String> = self.names.iter().filter(is_deeper).cloned().collect();
        for some in deeper.chunks(AT_ONCE) {
            for (visit, is_right) in visit_all(hosting, some)? {
                ensure!(is_right, "a machine does not wake: its page has status {}", visit.status);
            }
        }
        if tier == Tier::Running {
            return Ok(());
        }
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        hosting.rest_all(&names, tier)
    }

    /// Returns the pids of all their processes.
    fn pids(&self, hosting: &AppHosting) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        for name in &self.names {
            pids.extend(InstanceStatus::of(&hosting.node, name)?.pids);
        }
        Ok(pids)
    }
}

/// Gets the plain page of each of these at the same moment.
fn visit_all(hosting: &AppHosting, names: &[String]) -> Result<Vec<(HttpVisit, bool)>> {
    std::thread::scope(|scope| {
        let visitors: Vec<_> =
            names.iter().map(|name| scope.spawn(|| hosting.visit(name, PLAIN_PAGE))).collect();
        visitors.into_iter().map(|one| one.join().map_err(|_| anyhow!("a visitor panicked"))?).collect()
    })
}

/// Returns the memory that new programs can have, bytes (proc(5)).
fn available() -> Result<f64> {
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok());
    Ok(kib.context("/proc/meminfo has no MemAvailable")? * 1024.0)
}

/// Returns the private memory of these processes, bytes (`smaps_rollup`, proc(5)).
fn private_bytes(pids: &[u32]) -> f64 {
    let kib = |pid: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let of = |line: &str| -> Option<f64> {
            let rest = line.strip_prefix("Private_Clean:").or(line.strip_prefix("Private_Dirty:"))?;
            rest.trim().trim_end_matches(" kB").parse().ok()
        };
        text.lines().filter_map(of).sum::<f64>()
    };
    // An empty sum would be a negative zero.
    pids.iter().map(kib).fold(0.0, |sum, kib| sum + kib) * 1024.0
}

/// Returns the time until an application ran, ms: the sum of the stages of its wake.
fn running_ms(status: &InstanceStatus) -> f64 {
    let stages = status.last_wake.iter().flat_map(|wake| &wake.stages);
    stages.map(|(_, us)| Duration::from_micros(*us).as_secs_f64() * 1e3).sum()
}

/// Returns the number of processors of this machine.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the numbers below `count` in an order that looks random, and is the same for a seed.
fn shuffled(count: usize, seed: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    // Knuth's linear congruential generator (MMIX). Its high bits are the better ones.
    let mut state = seed as u64 + 1;
    for last in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let other = usize::try_from(state >> 33).unwrap_or_default() % (last + 1);
        all.swap(last, other);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_numbers_are_all_there() {
        let mut order = shuffled(100, 7);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        assert_eq!(order, shuffled(100, 7));
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
        assert!(shuffled(0, 1).is_empty());
    }
}

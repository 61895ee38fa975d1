//! A lab while it runs: making, opening and ending it, and operations on its machines and their
//! wires.
//!
//! Not here: the command line (`command`), the wire (`network`), processes (`machine`), the
//! programs on the machines (`node`, `store`).

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};

use super::addresses::{CLIENTS_AT, NET, NET_BITS, NODE_PORT, STORES_FROM};
use super::guard::LabGuard;
use super::machine::{LabMachine, MachineCgroups};
use super::network::{LabNetwork, WireFault};

/// Nodes of a lab: their addresses end in 1 to this.
const NODES_MAX: usize = 99;

/// The machine whose network is the clients'.
const CLIENTS: &str = "clients";

/// File with a lab's description, in its directory.
const STATE: &str = "lab.json";

/// Directory that all nodes see, in the lab's directory.
pub(super) const SHARED: &str = "shared";

/// File with the fault of a machine's wire, in the machine's directory.
const FAULT: &str = "fault";

/// Letters of a tag: it is part of names of cgroups.
const TAG_MAX: usize = 24;

/// The relay that makes a wire slow, and its interpreter: Debian's own, whichever Python comes
/// first in `PATH`.
const RELAY: &str = include_str!("relay.py");
const PYTHON: &str = "/usr/bin/python3";

/// Longest wait until the relay connects its two ends.
const RELAY_MAX: Duration = Duration::from_secs(20);

/// Groups whose processes may send ICMP echoes (icmp(7)), in the network of the opening process.
const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";

/// Kind of the nodes' probes, unless a plan says otherwise: the default of the configuration.
pub const PROBE: &str = "udp";

/// The parts of a lab.
#[derive(Debug, Clone)]
pub struct LabPlan {
    pub nodes: usize,
    /// etcd members: 0, 1 or 3. Without any the nodes are alone.
    pub stores: usize,
    /// The nodes' `fence` in `[cluster]`, milliseconds.
    pub fence_ms: u32,
    /// Their `probe` there.
    pub probe: String,
    pub tag: String,
    pub dir: PathBuf,
    pub program: PathBuf,
    /// Make a cluster of the nodes.
    pub is_joined: bool,
    /// Further tables of each node's configuration.
    pub tables: String,
}

/// A running lab. The result of `up` ends with its value; the result of `open` does not.
#[derive(Debug)]
pub struct Lab {
    pub(super) dir: PathBuf,
    pub(super) tag: String,
    pub(super) nodes: usize,
    pub(super) stores: usize,
    pub(super) fence_ms: u32,
    pub(super) program: PathBuf,
    pub(super) network: LabNetwork,
    pub(super) guard: Option<LabGuard>,
}

impl Lab {
    /// Makes one; after a failure, nothing of it is left.
    pub fn up(plan: &LabPlan) -> Result<Self> {
        check(plan)?;
        let mut lab = Self {
            dir: plan.dir.clone(),
            tag: plan.tag.clone(),
            nodes: plan.nodes,
            stores: plan.stores,
            fence_ms: plan.fence_ms,
            program: plan.program.clone(),
            network: LabNetwork::new(&plan.dir),
            guard: None,
        };
        for dir in MachineCgroups::of_lab(&lab.tag)? {
            let word = "choose another --name, or end it: ./dev cluster down --name";
            ensure!(!dir.exists(), "a lab named '{0}' is there already: {word} {0}", lab.tag);
        }
        fs::create_dir(&lab.dir)
            .with_context(|| format!("making the lab's directory {}", lab.dir.display()))?;
        lab.write_state()?;
        lab.guard = Some(LabGuard::start(&lab.dir)?);
        lab.build(plan)?;
        Ok(lab)
    }

    pub(super) fn build(&self, plan: &LabPlan) -> Result<()> {
        // Tenants' processes pass through it to the shared directory.
        for dir in [self.dir.clone(), self.shared()] {
            fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))
                .context("opening the lab to tenants")?;
        }
        self.network.make()?;
        for name in self.machines() {
            self.network.attach(&name, self.ip(&name)?, NET_BITS)?;
            if plan.probe == "icmp" {
                // The default of a new network allows no group.
                let allow = || fs::write(PING_GROUPS, format!("0 {}", i32::MAX));
                self.network.within(&name, allow)?.context("allowing ICMP probes")?;
            }
            let dir = self.dir.join(&name);
            fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        }
        self.network.attach(CLIENTS, self.ip(CLIENTS)?, NET_BITS)?;
        self.start_stores()?;
        for name in self.node_names() {
            self.configure(&name, plan)?;
            self.start(&name)?;
        }
        if plan.is_joined && self.stores > 0 { self.join_all() } else { Ok(()) }
    }

    /// Opens an existing lab, made by any process.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(STATE);
        let text =
            fs::read_to_string(&path).with_context(|| format!("there is no lab in {}", dir.display()))?;
        let state: Value =
            serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
        let number =
            |key: &str| state[key].as_u64().with_context(|| format!("no {key} in {}", path.display()));
        let text = |key: &str| state[key].as_str().with_context(|| format!("no {key} in {}", path.display()));
        Ok(Self {
            dir: dir.into(),
            tag: text("tag")?.into(),
            nodes: usize::try_from(number("nodes")?)?,
            stores: usize::try_from(number("stores")?)?,
            fence_ms: u32::try_from(number("fence_ms")?)?,
            program: text("program")?.into(),
            network: LabNetwork::new(dir),
            guard: None,
        })
    }

    pub(super) fn write_state(&self) -> Result<()> {
        let state = json!({
            "tag": self.tag, "nodes": self.nodes, "stores": self.stores, "fence_ms": self.fence_ms,
            "program": self.program,
        });
        let path = self.dir.join(STATE);
        fs::write(&path, format!("{state}\n")).with_context(|| format!("writing {}", path.display()))
    }

    /// Makes it stay until it is taken down.
    pub fn keep(mut self) -> Result<()> {
        let guard = self.guard.take();
        guard.map_or(Ok(()), LabGuard::dismiss)
    }

    /// Ends everything and removes every trace of it; the error names leftovers.
    pub fn down(mut self) -> Result<()> {
        let guard = self.guard.take();
        let left = self.remove();
        if let Some(guard) = guard {
            guard.end();
        }
        left
    }

    pub(super) fn remove(&self) -> Result<()> {
        let mut cgroups = Vec::new();
        for name in self.machines() {
            cgroups.extend([
                MachineCgroups::of(&self.tag, &name)?,
                MachineCgroups::of(&self.tag, &relay(&name))?,
            ]);
        }
        for one in &cgroups {
            one.kill()?;
        }
        for one in &cgroups {
            one.remove()?;
        }
        if self.exists() {
            self.remove_files()?;
        }
        let left: Vec<_> =
            MachineCgroups::of_lab(&self.tag)?.into_iter().filter(|dir| dir.exists()).collect();
        ensure!(left.is_empty(), "the lab left cgroups behind: {left:?}");
        Ok(())
    }

    /// Returns false once it was taken down.
    pub(super) fn exists(&self) -> bool {
        self.dir.exists()
    }

    pub(super) fn remove_files(&self) -> Result<()> {
        self.network.remove()?;
        let mounted = fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
        let beneath = mounted.lines().filter_map(|line| line.split(' ').nth(4).map(PathBuf::from));
        // The last mounted first.
        for point in beneath.filter(|point| point.starts_with(&self.dir)).collect::<Vec<_>>().iter().rev() {
            unmount(point, UnmountFlags::DETACH)
                .with_context(|| format!("unmounting {}", point.display()))?;
        }
        fs::remove_dir_all(&self.dir).with_context(|| format!("removing {}", self.dir.display()))
    }

    // === Machines ===

    pub fn shared(&self) -> PathBuf {
        self.dir.join(SHARED)
    }

    pub fn node_names(&self) -> Vec<String> {
        (1..=self.nodes).map(|number| format!("n{number}")).collect()
    }

    pub fn store_names(&self) -> Vec<String> {
        (1..=self.stores).map(|number| format!("e{number}")).collect()
    }

    pub(super) fn machines(&self) -> Vec<String> {
        [self.node_names(), self.store_names()].concat()
    }

    pub(super) fn machine(&self, name: &str) -> Result<LabMachine<'_>> {
        let known = self.machines();
        ensure!(known.iter().any(|one| one == name), "no machine '{name}': there are {}", known.join(", "));
        Ok(LabMachine {
            name: name.into(),
            cgroups: MachineCgroups::of(&self.tag, name)?,
            network: &self.network,
            log: self.dir.join(name).join("output.log"),
        })
    }

    pub(super) fn ip(&self, name: &str) -> Result<Ipv4Addr> {
        let [a, b, c] = NET;
        if name == CLIENTS {
            return Ok(Ipv4Addr::new(a, b, c, CLIENTS_AT));
        }
        let number = |prefix| name.strip_prefix(prefix).and_then(|number| number.parse::<usize>().ok());
        let last = number('n').filter(|number| (1..=NODES_MAX).contains(number));
        let last = last.or_else(|| Some(number('e')?.checked_sub(1)? + STORES_FROM));
        let last = last.and_then(|last| u8::try_from(last).ok());
        Ok(Ipv4Addr::new(a, b, c, last.with_context(|| format!("'{name}' is no name of a machine"))?))
    }

    /// Starts a machine's program again.
    pub fn start(&self, name: &str) -> Result<()> {
        match name.starts_with('e') {
            true => self.start_store(name).and_then(|()| self.wait_for_store(name)),
            false => self.start_node(name),
        }
    }

    /// Ends all processes of a machine at one moment; its address stays, so that its kernel refuses
    /// connections.
    pub fn kill(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.kill()
    }

    /// Pauses all of it at one moment, like a suspended machine.
    pub fn pause(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.freeze()
    }

    pub fn resume(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.thaw()
    }

    /// Does the same for this time. Returns the length of the pause, never less.
    pub fn pause_for(&self, name: &str, time: Duration) -> Result<Duration> {
        let cgroups = self.machine(name)?.cgroups;
        cgroups.freeze()?;
        let begun = Instant::now();
        std::thread::sleep(time);
        cgroups.thaw()?;
        Ok(begun.elapsed())
    }

    // === Wires ===

    /// Sets a fault of a machine's wire, replacing the former one.
    pub fn cut(&self, name: &str, fault: WireFault) -> Result<()> {
        let machine = self.machine(name)?;
        // A slow wire is healed first; a cut one stays cut until the new fault is there.
        self.end_relay(name)?;
        self.network.filter(name, fault)?;
        if let WireFault::Slow { ms } = fault {
            self.start_relay(name, ms)?;
        }
        let path = self.dir.join(&machine.name).join(FAULT);
        fs::write(&path, fault.to_string()).with_context(|| format!("writing {}", path.display()))
    }

    /// Heals its wire.
    pub fn heal(&self, name: &str) -> Result<()> {
        let machine = self.machine(name)?;
        self.end_relay(name)?;
        self.network.unfilter(name)?;
        let path = self.dir.join(&machine.name).join(FAULT);
        if path.exists() {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(())
    }

    pub(super) fn start_relay(&self, name: &str, ms: f64) -> Result<()> {
        let [one, two] = self.network.unplug(name)?;
        let cgroups = MachineCgroups::of(&self.tag, &relay(name))?;
        cgroups.make()?;
        let log = self.dir.join(name).join("relay.log");
        fs::write(&log, "").with_context(|| format!("creating {}", log.display()))?;
        let file = self.dir.join("relay.py");
        fs::write(&file, RELAY).with_context(|| format!("writing {}", file.display()))?;
        let command = [PYTHON.into(), file.to_string_lossy().into_owned(), ms.to_string(), one, two];
        cgroups.launch(&self.network.enter_hub(), &command, &log)?;
        let begun = Instant::now();
        loop {
            let said = fs::read_to_string(&log).unwrap_or_default();
            if said.lines().any(|line| line == "ready") {
                return Ok(());
            }
            if cgroups.pids().is_empty() || begun.elapsed() > RELAY_MAX {
                bail!("the relay of {name} does not work: {said}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn end_relay(&self, name: &str) -> Result<()> {
        let cgroups = MachineCgroups::of(&self.tag, &relay(name))?;
        if cgroups.exist() {
            cgroups.kill()?;
            self.network.plug(name)?;
            cgroups.remove()?;
        }
        Ok(())
    }

    // === Who asks ===

    /// Does this as a client: its connections and processes are in the clients' network.
    pub fn as_client<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.network.within(CLIENTS, work)
    }

    /// Does the same as a user of one of its machines.
    pub fn as_machine<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.network.within(&self.machine(name)?.name, work)
    }

    /// Returns the client address of a node's edge.
    pub fn address(&self, name: &str) -> Result<SocketAddr> {
        Ok((self.ip(name)?, NODE_PORT).into())
    }

    /// Returns the parts and their state, for people and scripts.
    pub fn describe(&self) -> Result<Value> {
        let mut machines = Vec::new();
        for name in self.machines() {
            let machine = self.machine(&name)?;
            let fault = fs::read_to_string(self.dir.join(&name).join(FAULT)).ok();
            machines.push(json!({
                "name": name,
                "kind": if name.starts_with('e') { "etcd" } else { "node" },
                "address": self.ip(&name)?,
                "dir": self.dir.join(&name),
                "network": self.network.file(&name),
                "processes": machine.cgroups.pids().len(),
                "paused": machine.cgroups.is_frozen(),
                "fault": fault,
            }));
        }
        Ok(json!({
            "name": self.tag, "dir": self.dir, "shared": self.shared(), "fence_ms": self.fence_ms,
            "program": self.program, "etcd": self.endpoints()?, "machines": machines,
            "clients": {"address": self.ip(CLIENTS)?, "network": self.network.file(CLIENTS)},
        }))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Without a guard it is not ours to end.
        let Some(guard) = self.guard.take() else { return };
        if let Err(error) = self.remove() {
            eprintln!("the lab '{}' is not gone: {error:#}", self.tag);
        }
        guard.end();
    }
}

/// Returns the name under which a machine's relay runs.
fn relay(name: &str) -> String {
    format!("{name}-relay")
}

fn check(plan: &LabPlan) -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "a lab needs root: run 'sudo ./dev cluster up N'");
    ensure!((1..=NODES_MAX).contains(&plan.nodes), "a lab has 1 to {NODES_MAX} nodes, not {}", plan.nodes);
    ensure!([0, 1, 3].contains(&plan.stores), "etcd has 1 or 3 members here, not {}", plan.stores);
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let tag = &plan.tag;
    ensure!(
        (1..=TAG_MAX).contains(&tag.len()) && tag.bytes().all(fits),
        "'{tag}' is no name of a lab: a-z, 0-9 and -, at most {TAG_MAX}"
    );
    ensure!(plan.dir.is_absolute(), "the lab's directory must be an absolute path: {}", plan.dir.display());
    let mut programs = vec!["nsenter", "unshare", "setsid", "ip", "nft"];
    if plan.stores > 0 {
        programs.push("etcd");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    for program in programs {
        let is_there = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
        ensure!(is_there, "{program} is missing: 'sudo ./dev setup cluster' installs it");
    }
    Ok(())
}

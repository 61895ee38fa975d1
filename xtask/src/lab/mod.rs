//! A cluster on one machine, for people, experiments and tests: nodes and etcd members in networks of their own, all of which
//! can be cut off, slowed down, stopped, killed and started again.
//!
//! All that is known of a lab is in its directory and in the kernel, so that any later command finds it, and it can be taken
//! down by whoever is left: the value that made it, or a guard process if this program dies. Not here: the command line
//! (`command`), the wire (`network`), processes (`machine`), what runs on the machines (`node`, `store`).

mod command;
mod guard;
mod machine;
mod network;
mod node;
mod store;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};

pub use self::command::run;
use self::guard::Guard;
use self::machine::{Cgroups, Machine};
pub use self::network::Fault;
use self::network::Network;

/// The lab's addresses. Each lab has its network for itself, so all of them have the same.
const NET: [u8; 3] = [10, 99, 0];
const NET_BITS: u8 = 24;

/// Nodes of a lab: their addresses end in 1 to this.
const NODES_MAX: usize = 99;

/// The last byte of the first etcd member's address, and of the clients'.
const STORES_FROM: usize = 201;
const CLIENTS_AT: u8 = 250;

/// The machine whose network is the clients'.
const CLIENTS: &str = "clients";

/// What describes a lab, in its directory.
const STATE: &str = "lab.json";

/// What all nodes see, in its directory.
const SHARED: &str = "shared";

/// What is wrong with a machine's wire, in the machine's directory.
const FAULT: &str = "fault";

/// Letters of a tag: it is part of names of cgroups.
const TAG_MAX: usize = 24;

/// The relay that makes a wire slow, and what runs it: Debian's own, whichever Python comes first in `PATH`.
const RELAY: &str = include_str!("relay.py");
const PYTHON: &str = "/usr/bin/python3";

/// Longest wait until the relay connects its two ends.
const RELAY_MAX: Duration = Duration::from_secs(20);

/// Whose processes may send ICMP echoes (icmp(7)), in the network of who opens it.
const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";

/// How nodes ask whether another is there, unless a plan says otherwise: as where nothing is configured.
pub const PROBE: &str = "udp";

/// What a lab is made of.
#[derive(Debug, Clone)]
pub struct Plan {
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
    /// Tables of each node's configuration beside those that the lab writes.
    pub tables: String,
}

/// A running lab. What `up` returns ends with its value; what `open` returns does not.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    tag: String,
    nodes: usize,
    stores: usize,
    fence_ms: u32,
    program: PathBuf,
    network: Network,
    guard: Option<Guard>,
}

impl Lab {
    /// Makes one; if that fails, nothing of it is left.
    pub fn up(plan: &Plan) -> Result<Self> {
        check(plan)?;
        let mut lab = Self {
            dir: plan.dir.clone(),
            tag: plan.tag.clone(),
            nodes: plan.nodes,
            stores: plan.stores,
            fence_ms: plan.fence_ms,
            program: plan.program.clone(),
            network: Network::new(&plan.dir),
            guard: None,
        };
        for dir in Cgroups::of_lab(&lab.tag)? {
            let word = "choose another --name, or end it: ./dev cluster down --name";
            ensure!(!dir.exists(), "a lab named '{0}' is there already: {word} {0}", lab.tag);
        }
        fs::create_dir(&lab.dir)
            .with_context(|| format!("making the lab's directory {}", lab.dir.display()))?;
        lab.write_state()?;
        lab.guard = Some(Guard::start(&lab.dir)?);
        lab.build(plan)?;
        Ok(lab)
    }

    fn build(&self, plan: &Plan) -> Result<()> {
        // Tenants' processes pass it to what all nodes share.
        for dir in [self.dir.clone(), self.shared()] {
            fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))
                .context("opening the lab to tenants")?;
        }
        self.network.make()?;
        for name in self.machines() {
            self.network.attach(&name, self.ip(&name)?, NET_BITS)?;
            if plan.probe == "icmp" {
                // The default of a new network is nobody.
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

    /// One that was made before, by any process.
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
            network: Network::new(dir),
            guard: None,
        })
    }

    fn write_state(&self) -> Result<()> {
        let state = json!({
            "tag": self.tag, "nodes": self.nodes, "stores": self.stores, "fence_ms": self.fence_ms,
            "program": self.program,
        });
        let path = self.dir.join(STATE);
        fs::write(&path, format!("{state}\n")).with_context(|| format!("writing {}", path.display()))
    }

    /// From here on it stays until somebody takes it down.
    pub fn keep(mut self) -> Result<()> {
        let guard = self.guard.take();
        guard.map_or(Ok(()), Guard::dismiss)
    }

    /// Ends everything and removes every trace of it; an error says what is left after all.
    pub fn down(mut self) -> Result<()> {
        let guard = self.guard.take();
        let left = self.remove();
        if let Some(guard) = guard {
            guard.end();
        }
        left
    }

    fn remove(&self) -> Result<()> {
        let mut cgroups = Vec::new();
        for name in self.machines() {
            cgroups.extend([Cgroups::of(&self.tag, &name)?, Cgroups::of(&self.tag, &relay(&name))?]);
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
        let left: Vec<_> = Cgroups::of_lab(&self.tag)?.into_iter().filter(|dir| dir.exists()).collect();
        ensure!(left.is_empty(), "the lab left cgroups behind: {left:?}");
        Ok(())
    }

    /// False once somebody has taken it down.
    fn exists(&self) -> bool {
        self.dir.exists()
    }

    fn remove_files(&self) -> Result<()> {
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

    fn machines(&self) -> Vec<String> {
        [self.node_names(), self.store_names()].concat()
    }

    fn machine(&self, name: &str) -> Result<Machine<'_>> {
        let known = self.machines();
        ensure!(known.iter().any(|one| one == name), "no machine '{name}': there are {}", known.join(", "));
        Ok(Machine {
            name: name.into(),
            cgroups: Cgroups::of(&self.tag, name)?,
            network: &self.network,
            log: self.dir.join(name).join("output.log"),
        })
    }

    fn ip(&self, name: &str) -> Result<Ipv4Addr> {
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

    /// Ends all processes of a machine at one moment; its address stays, so that its kernel refuses connections.
    pub fn kill(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.kill()
    }

    /// Everything of it stands still, all at one moment, as on a machine that is suspended.
    pub fn pause(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.freeze()
    }

    pub fn resume(&self, name: &str) -> Result<()> {
        self.machine(name)?.cgroups.thaw()
    }

    /// The same for so long. Returns how long it stood still: never less.
    pub fn pause_for(&self, name: &str, time: Duration) -> Result<Duration> {
        let cgroups = self.machine(name)?.cgroups;
        cgroups.freeze()?;
        let begun = Instant::now();
        std::thread::sleep(time);
        cgroups.thaw()?;
        Ok(begun.elapsed())
    }

    // === Wires ===

    /// Something is wrong with a machine's wire from now on, instead of what was before.
    pub fn cut(&self, name: &str, fault: Fault) -> Result<()> {
        let machine = self.machine(name)?;
        // A wire that was slow is as it was first; one that was cut stays cut until the new fault is there.
        self.end_relay(name)?;
        self.network.filter(name, fault)?;
        if let Fault::Slow { ms } = fault {
            self.start_relay(name, ms)?;
        }
        let path = self.dir.join(&machine.name).join(FAULT);
        fs::write(&path, fault.to_string()).with_context(|| format!("writing {}", path.display()))
    }

    /// Its wire is as it was first.
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

    fn start_relay(&self, name: &str, ms: f64) -> Result<()> {
        let [one, two] = self.network.unplug(name)?;
        let cgroups = Cgroups::of(&self.tag, &relay(name))?;
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

    fn end_relay(&self, name: &str) -> Result<()> {
        let cgroups = Cgroups::of(&self.tag, &relay(name))?;
        if cgroups.exist() {
            cgroups.kill()?;
            self.network.plug(name)?;
            cgroups.remove()?;
        }
        Ok(())
    }

    // === Who asks ===

    /// Does this as a client: connections and processes that it starts are in the clients' network.
    pub fn as_client<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.network.within(CLIENTS, work)
    }

    /// The same, as somebody on one of its machines.
    pub fn as_machine<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.network.within(&self.machine(name)?.name, work)
    }

    /// Where a node's edge answers clients.
    pub fn address(&self, name: &str) -> Result<SocketAddr> {
        Ok((self.ip(name)?, node::PORT).into())
    }

    /// What there is and how it is, for people and scripts.
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

/// The addresses of etcd's members, as filters name them.
fn stores_at() -> String {
    let ([a, b, c], last) = (NET, CLIENTS_AT - 1);
    format!("{a}.{b}.{c}.{STORES_FROM}-{a}.{b}.{c}.{last}")
}

/// The name under which a machine's relay runs.
fn relay(name: &str) -> String {
    format!("{name}-relay")
}

fn check(plan: &Plan) -> Result<()> {
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

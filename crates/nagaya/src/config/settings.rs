//! The node's settings as the rest of the program uses them, with their defaults, and what each process is
//! told of them.
//!
//! Not here: the keys an operator writes (`schema`), reading them (`read`).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nagaya_cmdb::check::IdPolicy;
use nagaya_edge::options::{Options as EdgeOptions, ProbeKind};
use nagaya_keeper::{InstanceOptions, Options as KeeperOptions, ProgramOptions};
use nagaya_rules::RuleFile;

/// Where `nagaya.toml` is looked for when `--config` does not say.
pub const DEFAULT_FILE: &str = "/etc/nagaya/nagaya.toml";

/// The edge's uid where neither the configuration nor the password file names one. Debian keeps 65000 to
/// 65533 unassigned, and 65534 (`nobody`) would share its rights with every other use of that user.
pub const EDGE_UID_FALLBACK: u32 = 65_533;

/// The user whose uid the edge takes if it exists.
pub const EDGE_USER: &str = "nagaya";

/// What stands before the name of a rule of the store, where else the path of a rule file would stand.
pub const STORED: &str = "store:";

/// Everything `nagaya.toml` can say.
#[derive(Debug, Clone)]
pub struct Settings {
    /// None: the machine's host name.
    pub node: Option<String>,
    pub runtime_dir: PathBuf,
    pub state_dir: PathBuf,
    pub log: Log,
    pub listen: Vec<Listen>,
    pub admin: Admin,
    /// Uids that are given to tenants by themselves begin here.
    pub uid_base: u32,
    pub system_ids: SystemIds,
    /// Where images of instances are kept. None: in `state_dir`.
    pub images: Option<PathBuf>,
    /// Where bodies wait on disk. None: `spool` in `state_dir`.
    pub spool: Option<PathBuf>,
    pub identity: EdgeIdentity,
    pub cluster: Cluster,
    pub balance: Balance,
    /// The edge's own settings; its `node` and `keeper` are filled in by [`Settings::edge_options`].
    pub edge: EdgeOptions,
    /// The keeper's own settings; its directories and the edge's uid are filled in by [`Settings::keeper_options`].
    pub keeper: KeeperOptions,
}

/// Logs of the node itself; the access log is the edge's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// A `tracing` filter, e.g. `info` or `info,nagaya_edge=debug`.
    pub level: String,
    pub format: LogFormat,
    /// None: standard error.
    pub file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    Text,
    Json,
}

/// One address that is listened on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    pub address: SocketAddr,
    pub tls: bool,
    /// Each connection begins with a PROXY header.
    pub proxy_protocol: bool,
    /// Whose headers are accepted. Empty: those of trusted proxies.
    pub proxy_protocol_from: Vec<String>,
    /// Nobody asked for this address by name: a machine without its address family goes without it.
    pub by_default: bool,
}

impl Listen {
    /// HTTP without TLS.
    pub fn plain(address: SocketAddr) -> Self {
        Self {
            address,
            tls: false,
            proxy_protocol: false,
            proxy_protocol_from: Vec::new(),
            by_default: false,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Admin {
    pub socket: Option<PathBuf>,
    pub group: Option<String>,
    /// Users, and groups with `@` in front, that have each role.
    pub read: Vec<String>,
    pub operate: Vec<String>,
    pub all: Vec<String>,
}

/// How this node takes part in a cluster, if it is a member of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Checked to be an address and port. None: it can be in no cluster.
    pub listen: Option<String>,
    /// Likewise. None: `listen`.
    pub advertise: Option<String>,
    pub fence_ms: u64,
    pub probe: ProbeKind,
    pub probe_ms: u64,
}

impl Default for Cluster {
    fn default() -> Self {
        Self { listen: None, advertise: None, fence_ms: 300, probe: ProbeKind::default(), probe_ms: 100 }
    }
}

/// What is done for applications that are short of CPU. Without a word on it: percent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balance {
    pub every_ms: u64,
    pub short: u32,
    /// Times a site's own limit.
    pub raise_max: u32,
    pub busy: u32,
    pub move_after_ms: u64,
    pub move_anyway_after_ms: u64,
    pub target: u32,
    pub better_by: u32,
    pub site_rests_ms: u64,
    pub moves_per_minute: u32,
    pub lower_after_ms: u64,
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            every_ms: 1_000,
            short: 25,
            raise_max: 4,
            busy: 85,
            move_after_ms: 15_000,
            move_anyway_after_ms: 60_000,
            target: 65,
            better_by: 20,
            site_rests_ms: 600_000,
            moves_per_minute: 4,
            lower_after_ms: 60_000,
        }
    }
}

/// Users and groups of the system, by name or number, that tenants may have all the same.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemIds {
    pub users: Vec<String>,
    pub groups: Vec<String>,
}

/// Whose rights the edge has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EdgeIdentity {
    pub user: Option<String>,
    pub uid: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            node: None,
            runtime_dir: PathBuf::from("/run/nagaya"),
            state_dir: PathBuf::from("/var/lib/nagaya"),
            log: Log { level: "info".into(), format: LogFormat::Auto, file: None },
            listen: vec![
                Listen { by_default: true, ..Listen::plain(SocketAddr::from(([0, 0, 0, 0], 80))) },
                Listen { by_default: true, ..Listen::plain(SocketAddr::from(([0u16; 8], 80))) },
            ],
            admin: Admin::default(),
            uid_base: 200_000,
            system_ids: SystemIds::default(),
            images: None,
            spool: None,
            identity: EdgeIdentity::default(),
            cluster: Cluster::default(),
            balance: Balance::default(),
            edge: EdgeOptions::default(),
            keeper: KeeperOptions::default(),
        }
    }
}

impl Settings {
    pub fn node_name(&self) -> String {
        self.node.clone().unwrap_or_else(|| {
            let name = rustix::system::uname();
            let name = name.nodename().to_string_lossy().into_owned();
            if name.is_empty() { "localhost".into() } else { name }
        })
    }

    /// The file of the embedded store.
    pub fn store(&self) -> PathBuf {
        self.state_dir.join("nagaya.redb")
    }

    pub fn admin_socket(&self) -> PathBuf {
        self.admin.socket.clone().unwrap_or_else(|| self.runtime_dir.join("admin.sock"))
    }

    pub fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join("keeper.sock")
    }

    /// Where the keeper makes sockets of workers and applications.
    pub fn keeper_dir(&self) -> PathBuf {
        self.runtime_dir.join("keeper")
    }

    /// Where the supervisor puts the rules of the store, each as a file of its own.
    pub fn rules_dir(&self) -> PathBuf {
        self.runtime_dir.join("rules")
    }

    /// The file that has this rule of the store. None: it names no rule of the store.
    pub fn stored_rule(&self, rule: &RuleFile) -> Option<PathBuf> {
        let name = rule.path.to_str()?.strip_prefix(STORED)?;
        Some(rule_file(&self.rules_dir(), name))
    }

    /// Where the keeper keeps images of instances.
    pub fn images_dir(&self) -> PathBuf {
        self.images.clone().unwrap_or_else(|| self.state_dir.join("images"))
    }

    /// Where the edge keeps bodies that are too large for memory.
    pub fn spool_dir(&self) -> PathBuf {
        self.spool.clone().unwrap_or_else(|| self.state_dir.join("spool"))
    }

    /// Where this node keeps what makes it a member of its cluster.
    pub fn cluster_dir(&self) -> PathBuf {
        self.state_dir.join("cluster")
    }

    /// What is in it.
    pub fn member_file(&self) -> PathBuf {
        self.cluster_dir().join("member.json")
    }

    /// Held locked while a node runs from this runtime directory.
    pub fn lock_file(&self) -> PathBuf {
        self.runtime_dir.join("nagaya.lock")
    }

    /// Threads of the edge, and so sockets per address.
    pub fn edge_threads(&self) -> usize {
        match self.edge.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }

    /// What the edge is told.
    pub fn edge_options(&self) -> EdgeOptions {
        let file = |rule: &RuleFile| match self.stored_rule(rule) {
            Some(path) => RuleFile { path, ..rule.clone() },
            None => rule.clone(),
        };
        EdgeOptions {
            rules: self.edge.rules.iter().map(file).collect(),
            node: self.node_name(),
            threads: self.edge_threads(),
            keeper: self.keeper_socket(),
            ..self.edge.clone()
        }
    }

    /// Where sites are served: a site's program may ask its own site.
    fn own_ports(&self) -> Vec<u16> {
        self.listen.iter().map(|listen| listen.address.port()).filter(|port| *port > 0).collect()
    }

    /// What the keeper is told.
    pub fn keeper_options(&self, ids: IdPolicy) -> KeeperOptions {
        KeeperOptions {
            runtime_dir: self.keeper_dir(),
            ids,
            php_workers_per_tenant: self.edge.php_workers,
            raise_max: self.balance.raise_max,
            programs: ProgramOptions { own_ports: self.own_ports(), ..self.keeper.programs.clone() },
            instances: InstanceOptions { images: self.images_dir(), ..self.keeper.instances.clone() },
            ..self.keeper.clone()
        }
    }

    /// The access log's directory, which must exist before the edge opens the file with its own rights.
    pub fn access_log_dir(&self) -> Option<&Path> {
        self.edge.log.access.as_deref().and_then(Path::parent)
    }
}

/// Where a rule of the store lies in their directory.
pub fn rule_file(rules_dir: &Path, name: &str) -> PathBuf {
    rules_dir.join(format!("{name}.rb"))
}

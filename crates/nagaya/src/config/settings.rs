//! The node's settings for the rest of the program, with their defaults, and the part that each
//! process gets.
//!
//! Not here: the keys that an operator writes (`schema`), reading them (`read`).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nagaya_edge::options::{EdgeConfig as EdgeOptions, ProbeKind};
use nagaya_keeper::{InstanceOptions, KeeperConfig as KeeperOptions};
use nagaya_records::check::IdPolicy;
use nagaya_rules::RuleFile;

/// Path of `nagaya.toml` without `--config`.
pub const DEFAULT_FILE: &str = "/etc/nagaya/nagaya.toml";

/// The edge's uid if neither the configuration nor the password file names one. Debian keeps 65000
/// to 65533 unassigned. 65534 (`nobody`) would share its rights with every other use of that user.
pub const EDGE_UID_FALLBACK: u32 = 65_533;

/// The user whose uid the edge takes if it exists.
pub const EDGE_USER: &str = "nagaya";

/// Prefix of a rule of the store, in place of the path of a rule file.
pub const STORED: &str = "store:";

/// All settings in `nagaya.toml`.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// `None` means the machine's host name.
    pub node: Option<String>,
    pub runtime_dir: PathBuf,
    pub state_dir: PathBuf,
    pub log: LogSettings,
    pub listen: Vec<ListenSettings>,
    pub admin: AdminSettings,
    /// Lowest uid that is allocated to tenants automatically.
    pub uid_base: u32,
    pub system_ids: SystemIds,
    /// Directory of instances' images. `None` means in `state_dir`.
    pub images: Option<PathBuf>,
    /// Directory where bodies wait on disk. `None` means `spool` in `state_dir`.
    pub spool: Option<PathBuf>,
    pub identity: EdgeIdentity,
    pub cluster: ClusterSettings,
    pub balance: BalanceSettings,
    /// The edge's own settings; [`NodeSettings::edge_options`] fills in its `node` and `keeper`.
    pub edge: EdgeOptions,
    /// The keeper's own settings; [`NodeSettings::keeper_options`] fills in its directories and the
    /// edge's uid.
    pub keeper: KeeperOptions,
}

/// Logs of the node itself; the access log is the edge's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// A `tracing` filter, for example `info` or `info,nagaya_edge=debug`.
    pub level: String,
    pub format: LogFormat,
    /// `None` means standard error.
    pub file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    Text,
    Json,
}

/// One listening address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenSettings {
    pub address: SocketAddr,
    pub tls: bool,
    /// Each connection begins with a PROXY header.
    pub proxy_protocol: bool,
    /// Peers whose headers are accepted. If empty, the trusted proxies.
    pub proxy_protocol_from: Vec<String>,
    /// The configuration does not name this address: a machine without its address family works
    /// without it.
    pub by_default: bool,
}

impl ListenSettings {
    /// Makes a listener for HTTP without TLS.
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
pub struct AdminSettings {
    pub socket: Option<PathBuf>,
    pub group: Option<String>,
    /// Users, and groups with a leading `@`, that have each role.
    pub read: Vec<String>,
    pub operate: Vec<String>,
    pub all: Vec<String>,
}

/// How this node takes part in a cluster, if it is a member of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// Checked to be an address and port. `None` means that it cannot join a cluster.
    pub listen: Option<String>,
    /// Likewise. `None` means `listen`.
    pub advertise: Option<String>,
    pub fence_ms: u64,
    pub probe: ProbeKind,
    pub probe_ms: u64,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self { listen: None, advertise: None, fence_ms: 300, probe: ProbeKind::default(), probe_ms: 100 }
    }
}

/// Settings of load balancing for applications that are short of CPU. Numbers without a unit are
/// percent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceSettings {
    pub every_ms: u64,
    pub short: u32,
    /// Factor on a site's own limit.
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

impl Default for BalanceSettings {
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

/// System users and groups, by name or number, that tenants may have by exception.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemIds {
    pub users: Vec<String>,
    pub groups: Vec<String>,
}

/// The user and group of the edge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EdgeIdentity {
    pub user: Option<String>,
    pub uid: Option<u32>,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            node: None,
            runtime_dir: PathBuf::from("/run/nagaya"),
            state_dir: PathBuf::from("/var/lib/nagaya"),
            log: LogSettings { level: "info".into(), format: LogFormat::Auto, file: None },
            listen: vec![
                ListenSettings {
                    by_default: true,
                    ..ListenSettings::plain(SocketAddr::from(([0, 0, 0, 0], 80)))
                },
                ListenSettings {
                    by_default: true,
                    ..ListenSettings::plain(SocketAddr::from(([0u16; 8], 80)))
                },
            ],
            admin: AdminSettings::default(),
            uid_base: 200_000,
            system_ids: SystemIds::default(),
            images: None,
            spool: None,
            identity: EdgeIdentity::default(),
            cluster: ClusterSettings::default(),
            balance: BalanceSettings::default(),
            edge: EdgeOptions::default(),
            keeper: KeeperOptions::default(),
        }
    }
}

impl NodeSettings {
    pub fn node_name(&self) -> String {
        self.node.clone().unwrap_or_else(|| {
            let name = rustix::system::uname();
            let name = name.nodename().to_string_lossy().into_owned();
            if name.is_empty() { "localhost".into() } else { name }
        })
    }

    /// Returns the file of the embedded store.
    pub fn store(&self) -> PathBuf {
        self.state_dir.join("nagaya.redb")
    }

    pub fn admin_socket(&self) -> PathBuf {
        self.admin.socket.clone().unwrap_or_else(|| self.runtime_dir.join("admin.sock"))
    }

    pub fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join("keeper.sock")
    }

    /// Returns the directory for the keeper's sockets of workers and applications.
    pub fn keeper_dir(&self) -> PathBuf {
        self.runtime_dir.join("keeper")
    }

    /// Returns the directory in which the supervisor writes each rule of the store as a file.
    pub fn rules_dir(&self) -> PathBuf {
        self.runtime_dir.join("rules")
    }

    /// Returns the file of this rule of the store. `None` if it names no rule of the store.
    pub fn stored_rule(&self, rule: &RuleFile) -> Option<PathBuf> {
        let name = rule.path.to_str()?.strip_prefix(STORED)?;
        Some(rule_file(&self.rules_dir(), name))
    }

    /// Returns the keeper's directory for images of instances.
    pub fn images_dir(&self) -> PathBuf {
        self.images.clone().unwrap_or_else(|| self.state_dir.join("images"))
    }

    /// Returns the edge's directory for bodies that are too large for memory.
    pub fn spool_dir(&self) -> PathBuf {
        self.spool.clone().unwrap_or_else(|| self.state_dir.join("spool"))
    }

    /// Returns the directory of this node's membership in its cluster.
    pub fn cluster_dir(&self) -> PathBuf {
        self.state_dir.join("cluster")
    }

    /// Returns the member file in it.
    pub fn member_file(&self) -> PathBuf {
        self.cluster_dir().join("member.json")
    }

    /// Returns the file that is locked while a node runs from this runtime directory.
    pub fn lock_file(&self) -> PathBuf {
        self.runtime_dir.join("nagaya.lock")
    }

    /// Returns the number of edge threads, which is also the number of sockets per address.
    pub fn edge_threads(&self) -> usize {
        match self.edge.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }

    /// Returns the edge's options.
    pub fn edge_options(&self) -> EdgeOptions {
        let file = |rule: &RuleFile| match self.stored_rule(rule) {
            Some(path) => RuleFile { path, ..rule.clone() },
            None => rule.clone(),
        };
        let mut log = self.edge.log.clone();
        log.access = self.access_log().map(Path::to_owned);
        EdgeOptions {
            log,
            rules: self.edge.rules.iter().map(file).collect(),
            node: self.node_name(),
            threads: self.edge_threads(),
            keeper: self.keeper_socket(),
            ..self.edge.clone()
        }
    }

    /// Returns the keeper's options.
    pub fn keeper_options(&self, ids: IdPolicy) -> KeeperOptions {
        KeeperOptions {
            runtime_dir: self.keeper_dir(),
            ids,
            php_workers_per_tenant: self.edge.php_workers,
            raise_max: self.balance.raise_max,
            instances: InstanceOptions { images: self.images_dir(), ..self.keeper.instances.clone() },
            ..self.keeper.clone()
        }
    }

    /// Returns the access log. The edge opens no devices, and needs none to write nothing.
    pub fn access_log(&self) -> Option<&Path> {
        self.edge.log.access.as_deref().filter(|path| *path != Path::new(NO_ACCESS_LOG))
    }

    /// Returns the access log's directory, which must exist before the edge opens the file with its
    /// own rights.
    pub fn access_log_dir(&self) -> Option<&Path> {
        self.access_log().and_then(Path::parent)
    }
}

/// The path by which an operator disables the access log.
const NO_ACCESS_LOG: &str = "/dev/null";

/// Returns the path of a rule of the store in their directory.
pub fn rule_file(rules_dir: &Path, name: &str) -> PathBuf {
    rules_dir.join(format!("{name}.rb"))
}

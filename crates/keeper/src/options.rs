//! The keeper's settings, as the supervisor sends them in the first frame of the feed.
//!
//! Not here: the file's grammar and its checks (`nagaya::config`), settings of one site
//! (`records::record`).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nagaya_records::check::IdPolicy;
use serde::{Deserialize, Serialize};

use crate::image::ClusterKey;

pub use nagaya_records::record::ProgramNetwork;

/// Node-wide settings. Times are milliseconds. `runtime_dir`, the edge's uid, `back_end` and `node`
/// hold for the life of the process. The others follow a changed configuration at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeeperConfig {
    /// Directory of the sockets of PHP workers and applications. Tenants must be able to traverse
    /// it.
    pub runtime_dir: PathBuf,
    /// Directory of `<name>.pem` files, each a chain and its key. `None`: no name has a
    /// certificate.
    pub certificates: Option<PathBuf>,
    /// Tenants that may be served. Only the edge's uid and root may connect.
    pub ids: IdPolicy,
    pub php_cgi: PathBuf,
    /// Maximum number of PHP workers of one tenant, where its record gives no number.
    pub php_workers_per_tenant: u32,
    /// Maximum number of running CGI programs of one tenant.
    pub cgi_per_tenant_max: u32,
    /// Maximum number of processes of all kinds that the keeper starts. Beyond it, it replies that
    /// it is busy.
    pub processes_max: u32,
    /// Maximum number of open files of a started program (`RLIMIT_NOFILE`).
    pub open_files_max: u64,
    /// Maximum time until an application listens, where its site's record gives no number.
    pub app_start_ms: u64,
    /// Bytes of standard error logged for one program, and per minute for one that is kept.
    pub stderr_bytes_max: u32,
    /// Maximum number of processes and threads of one tenant, where its record gives no number. It
    /// stops a fork bomb.
    pub processes_per_tenant: u32,
    pub back_end: CellMechanism,
    /// Factor on the limit of a site's record, up to which its application may be boosted for a
    /// request. Used where the record gives no limit for that.
    pub raise_max: u32,
    pub instances: InstanceOptions,
    pub programs: ProgramOptions,
    pub mail: MailOptions,
    /// This node's name in its cluster. `None` without a cluster: it runs every site's application.
    pub node: Option<String>,
    /// `host:port` of each endpoint of the cluster's etcd: no tenant reaches it. Empty if there is
    /// none.
    pub etcd: Vec<String>,
}

impl KeeperConfig {
    /// Returns the keeper's directories, which look empty in a sandbox. `/run` is each sandbox's
    /// own anyway.
    pub fn hidden_directories(&self) -> impl Iterator<Item = PathBuf> {
        let own = [Some(&*self.runtime_dir), self.instances.images.parent(), self.certificates.as_deref()];
        let is_there = |path: &&Path| path.is_absolute() && path.parent().is_some() && path.is_dir();
        own.into_iter().flatten().filter(is_there).map(Path::to_path_buf)
    }
}

/// Instances of applications: how they rest, and the limits of their images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstanceOptions {
    /// Directory of images. Holds for the life of the process.
    pub images: PathBuf,
    /// The CRIU program. `None`: the first that works, as `nagaya doctor` says.
    pub criu: Option<PathBuf>,
    /// Tree with the kernels of machines, in `boot` and `lib/modules`.
    pub kernels: PathBuf,
    /// An image of each machine contains its state, as with KVM. Only tests set this.
    pub machines_save_states: bool,
    /// Maximum size of all images together, in bytes. Beyond it the least recently used one is
    /// removed.
    pub image_bytes_max: u64,
    /// An image that was not used for this time is removed.
    pub image_age_max_ms: u64,
    /// Maximum rate of images from and to other nodes, all together, bytes per second. 0: no limit.
    pub image_bandwidth: u64,
    /// Keys of this node's cluster that sign orders to move images and seal these, the newest
    /// first. Empty: no image leaves this node or comes to it.
    pub image_keys: Vec<ClusterKey>,
    /// Maximum size of one file of an instance's log, in bytes.
    pub log_bytes_max: u64,
    /// Maximum number of files of an instance's log, with the one that is written to. 0: none, and
    /// its lines end with the keeper.
    pub log_files_max: u32,
    /// Maximum number of restores and starts at once; the rest wait in order. 0: one per core.
    pub wakes_at_once: u32,
    pub huge_pages: HugePages,
    pub idle: IdleOptions,
}

/// Access of CGI programs and PHP workers to the network and kernel. Holds for those that are
/// started after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramOptions {
    /// For tenants whose record sets nothing.
    pub network: ProgramNetwork,
    /// Ports of services on the node's loopback that all tenants may use.
    pub local_ports: Vec<u16>,
    /// Addresses where this node listens for the public: a site's program may connect to its own
    /// site.
    pub own_addresses: Vec<SocketAddr>,
    pub system_calls: ProgramCalls,
}

/// Mail that tenants' programs send.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MailOptions {
    /// Whether there is a relay.
    pub relay: bool,
    /// The server that accepts it, by SMTP.
    pub server: SocketAddr,
    /// Maximum number of recipients of a tenant within an hour, where its record gives no number.
    /// 0: none.
    pub recipients_per_hour: u32,
    /// Maximum number of recipients of one message.
    pub recipients_max: u32,
    /// Maximum size of one message, bytes.
    pub bytes_max: u64,
    /// Maximum bytes of messages of a tenant within an hour.
    pub bytes_per_hour: u64,
    /// Maximum number of messages of a tenant under way.
    pub at_once: u32,
}

impl Default for MailOptions {
    fn default() -> Self {
        Self {
            relay: true,
            server: SocketAddr::from(([127, 0, 0, 1], 25)),
            recipients_per_hour: 200,
            recipients_max: 50,
            bytes_max: 25 << 20,
            bytes_per_hour: 1 << 30,
            at_once: 4,
        }
    }
}

/// System calls that CGI programs and PHP workers may make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramCalls {
    /// Those on a list.
    #[default]
    Filtered,
    /// All that their rights allow.
    All,
}

/// Mail, and the two databases that sites use most.
const LOCAL_PORTS: [u16; 4] = [25, 587, 3306, 5432];

impl Default for ProgramOptions {
    fn default() -> Self {
        Self {
            network: ProgramNetwork::Own,
            local_ports: LOCAL_PORTS.to_vec(),
            own_addresses: Vec::new(),
            system_calls: ProgramCalls::Filtered,
        }
    }
}

/// Whether the keeper sets the page size of the memory of all the machine's programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HugePages {
    #[default]
    #[serde(rename = "as-is")]
    AsIs,
    #[serde(rename = "64KiB")]
    Of64KiB,
}

/// Time after its last request at which an instance goes down to each tier. Used where its site's
/// record does not set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdleOptions {
    pub quiet_ms: u64,
    pub frozen_ms: u64,
    pub reclaimed_ms: u64,
    pub image_ms: u64,
    /// For an instance without an image: time until its processes end.
    pub cold_ms: u64,
}

/// Mechanism of cells: it limits a process tree, and keeps it together so that it can be ended as
/// one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CellMechanism {
    /// The first that works, in the order of this list.
    #[default]
    Auto,
    CgroupV2,
    CgroupV1,
    /// No cgroup: nothing is limited, and a program that leaves its process group outlives its end.
    ProcessGroup,
}

impl Default for KeeperConfig {
    fn default() -> Self {
        Self {
            runtime_dir: "/run/nagaya".into(),
            certificates: None,
            ids: IdPolicy::default(),
            php_cgi: "/usr/bin/php-cgi".into(),
            php_workers_per_tenant: 4,
            cgi_per_tenant_max: 256,
            processes_max: 4096,
            open_files_max: 1024,
            app_start_ms: 30_000,
            stderr_bytes_max: 64 * 1024,
            processes_per_tenant: 1024,
            back_end: CellMechanism::Auto,
            raise_max: 4,
            instances: InstanceOptions::default(),
            programs: ProgramOptions::default(),
            mail: MailOptions::default(),
            node: None,
            etcd: Vec::new(),
        }
    }
}

impl Default for InstanceOptions {
    fn default() -> Self {
        Self {
            images: "/var/lib/nagaya/images".into(),
            criu: None,
            kernels: "/".into(),
            machines_save_states: false,
            image_bytes_max: 16 << 30,
            image_age_max_ms: 30 * 86_400_000,
            image_bandwidth: 64 << 20,
            image_keys: Vec::new(),
            log_bytes_max: 1 << 20,
            log_files_max: 4,
            wakes_at_once: 0,
            huge_pages: HugePages::AsIs,
            idle: IdleOptions::default(),
        }
    }
}

impl Default for IdleOptions {
    fn default() -> Self {
        Self { quiet_ms: 50, frozen_ms: 10_000, reclaimed_ms: 120_000, image_ms: 900_000, cold_ms: 3_600_000 }
    }
}

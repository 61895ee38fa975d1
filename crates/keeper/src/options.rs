//! The keeper's settings, as the supervisor sends them in the first frame of the feed.
//!
//! Not here: the file's grammar and its checks (`nagaya::config`), settings of one site (`cmdb::record`).

use std::path::PathBuf;

use nagaya_cmdb::check::IdPolicy;
pub use nagaya_cmdb::record::ProgramNetwork;
use serde::{Deserialize, Serialize};

use crate::image::ClusterKey;

/// Node-wide settings. Times are milliseconds. `runtime_dir`, the edge's uid, `back_end` and `node` hold for the life of
/// the process; the others follow a changed configuration at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Sockets of PHP workers and applications are made beneath it. Tenants must be able to traverse it.
    pub runtime_dir: PathBuf,
    /// Directory of `<name>.pem` files, each a chain and its key. None: no name has a certificate.
    pub certificates: Option<PathBuf>,
    /// Which tenants may be served. Only the edge's uid and root may connect.
    pub ids: IdPolicy,
    pub php_cgi: PathBuf,
    /// PHP workers one tenant may have at once, where its record gives no number.
    pub php_workers_per_tenant: u32,
    /// CGI programs one tenant may have running at once.
    pub cgi_per_tenant_max: u32,
    /// Processes of all kinds the keeper starts at once; beyond it, it answers that it is busy.
    pub processes_max: u32,
    /// Largest number of open files of a started program (`RLIMIT_NOFILE`).
    pub open_files_max: u64,
    /// How long an application may take until it listens, where its site's record gives no number.
    pub app_start_ms: u64,
    /// Bytes of standard error logged for one program, and per minute for one that is kept.
    pub stderr_bytes_max: u32,
    /// Processes and threads one tenant may have at once, where its record gives no number: what a fork bomb reaches.
    pub processes_per_tenant: u32,
    pub back_end: BackEnd,
    /// So many times the limit of a site's record its application may have for a request, where the record does not say how far.
    pub raise_max: u32,
    pub instances: InstanceOptions,
    pub programs: ProgramOptions,
    /// This node's name in its cluster. None: it is alone, and runs every site's application.
    pub node: Option<String>,
    /// `host:port` of each endpoint of the cluster's etcd: no tenant gets there. Empty: there is none.
    pub etcd: Vec<String>,
}

/// Instances of applications: how they rest, and what their images may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstanceOptions {
    /// Images are kept beneath it. Holds for the life of the process.
    pub images: PathBuf,
    /// The CRIU program. None: the first that works, as `nagaya doctor` says.
    pub criu: Option<PathBuf>,
    /// All images together, in bytes. Beyond it the one that was used longest ago goes.
    pub image_bytes_max: u64,
    /// An image that was not used for so long goes.
    pub image_age_max_ms: u64,
    /// Images from and to other nodes, all together, bytes per second. 0: as fast as they go.
    pub image_bandwidth: u64,
    /// Keys of this node's cluster that sign orders to move images and seal these, the newest first. Empty: no image leaves this
    /// node or comes to it.
    pub image_keys: Vec<ClusterKey>,
    /// One file of an instance's log, in bytes.
    pub log_bytes_max: u64,
    /// Files of an instance's log, with the one that is written to. 0: none, and what it wrote ends with the keeper.
    pub log_files_max: u32,
    /// Restores and starts at once; the rest wait in order. 0: one per core.
    pub wakes_at_once: u32,
    pub huge_pages: HugePages,
    pub idle: IdleOptions,
}

/// What CGI programs and PHP workers reach. Holds for those that are started after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramOptions {
    /// Of tenants whose record says nothing.
    pub network: ProgramNetwork,
    /// Ports of services on the node's loopback that all tenants may use.
    pub local_ports: Vec<u16>,
    /// Ports on which this node serves sites: a site's program may ask its own site.
    pub own_ports: Vec<u16>,
    pub system_calls: ProgramCalls,
}

/// What CGI programs and PHP workers may ask of the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramCalls {
    /// What is on a list.
    #[default]
    Filtered,
    /// All that their rights let them.
    All,
}

/// Mail, and the two databases that sites use most.
const LOCAL_PORTS: [u16; 4] = [25, 587, 3306, 5432];

impl Default for ProgramOptions {
    fn default() -> Self {
        Self {
            network: ProgramNetwork::Own,
            local_ports: LOCAL_PORTS.to_vec(),
            own_ports: Vec::new(),
            system_calls: ProgramCalls::Filtered,
        }
    }
}

/// Whether the keeper sets in which pages all programs of the machine get their memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HugePages {
    #[default]
    #[serde(rename = "as-is")]
    AsIs,
    #[serde(rename = "64KiB")]
    Of64KiB,
}

/// How long after its last request an instance goes down to each tier, where its site's record does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdleOptions {
    pub quiet_ms: u64,
    pub frozen_ms: u64,
    pub reclaimed_ms: u64,
    pub image_ms: u64,
    /// Of one that has no image: until its processes end.
    pub cold_ms: u64,
}

/// What cells are made of: what limits a process tree, and keeps it together so that it can be ended as one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackEnd {
    /// The first that works, in the order of this list.
    #[default]
    Auto,
    CgroupV2,
    CgroupV1,
    /// No cgroup: nothing is limited, and a program that leaves its process group outlives its end.
    ProcessGroup,
}

impl Default for Options {
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
            back_end: BackEnd::Auto,
            raise_max: 4,
            instances: InstanceOptions::default(),
            programs: ProgramOptions::default(),
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
        Self {
            quiet_ms: 2_000,
            frozen_ms: 10_000,
            reclaimed_ms: 120_000,
            image_ms: 900_000,
            cold_ms: 3_600_000,
        }
    }
}

//! The records: a tenant, a site and how it is served, a setting of rules, a rule. The same JSON is
//! stored, exported, imported and sent to the watching processes.
//!
//! Not here: the store (`store`), the in-memory copy (`table`).

mod admission;
mod app;
mod base;
mod cluster;
mod limits;
mod machine;
mod outbound;
mod rule;
mod setting;
mod tickets;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::names::{HostPattern, NodeName, RuleName, SiteName, TenantName};

pub use admission::{AdmissionSettings, PAGE_LEN_MAX, VISIT_SECONDS};
pub use app::{
    AFTER_WAKE_SIGNALS, APP_LINGER_SECONDS, APP_LINGER_SECONDS_MAX, APP_LIST_LEN_MAX, APP_PORT, AfterWake,
    App, AppDatabase, AppListen, AppProtocol, DATABASE_NAME_LEN_MAX, DatabaseKind, DatabaseTag,
    IDLE_SECONDS_MAX, INSTANCES_MAX, IdleSteps, ImageMemory, ImageWhen, NeverRest, QUESTION_LEN_MAX,
    RELEASE_LEN_MAX, ReadyCheck, START_SECONDS_MAX, STOP_SECONDS, STOP_SECONDS_MAX,
};
pub use base::BaseRecord;
pub use cluster::{NodeRecord, Placement, PlacementReason, PlacementView, Replica, ReplicaRecord};
pub use limits::{
    CPU_THOUSANDTHS_MAX, CPU_THOUSANDTHS_MIN, CellLimits, DeviceLimits, IOPS_MAX, MEMORY_MIN, PROCESSES_MAX,
    UNLIMITED, WrittenAmount, WrittenDemotion,
};
pub use machine::{
    AppMachine, MACHINE_MEMORY_MIB, MACHINE_MEMORY_MIB_MAX, MACHINE_MEMORY_MIB_MIN, MACHINE_VCPUS_MAX,
    MachineKernel,
};
pub use outbound::{EndpointHost, NetworkEndpoint, OutboundRules};
pub use rule::{RULE_TEXT_LEN_MAX, RULES_MAX, RuleRecord};
pub use setting::{
    FIELD_NAME_LEN_MAX, FIELDS_MAX, KEY_LEN_MAX, SETTINGS_MAX, Setting, SettingScalar, SettingValue,
    VALUE_LEN_MAX,
};
pub use tickets::{TicketKey, TicketKeys, TicketSecret};

/// An owner of sites: one uid, one home, limits for all its sites together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    pub name: TenantName,
    /// Its processes run under this uid. Never 0.
    pub uid: u32,
    pub gid: u32,
    /// Relative document roots of its sites are below this directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<PathBuf>,
    /// Requests of all its sites that may run at once. `None` means the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    /// PHP workers that it may have at once. `None` means the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub php_workers: Option<u32>,
    /// Share of the node's permits against other tenants, when all want more than there are. Range
    /// 1 to 10,000; 100 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Limits of its cell: all that runs for it together.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub limits: CellLimits,
    /// Network of its CGI programs and PHP workers. `None` means the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ProgramNetwork>,
    /// Recipients of its programs' mail within an hour. 0 allows none. `None` means the node's
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail_per_hour: Option<u32>,
}

/// The network of CGI programs and PHP workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramNetwork {
    /// Each tenant has its own.
    #[default]
    Own,
    /// The node's, with everything that listens there.
    Host,
}

/// Host names (and below them a path) that are served in one way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    pub name: SiteName,
    pub tenant: TenantName,
    pub hosts: Vec<HostPattern>,
    /// Only requests at or below this path are this site's; the longest match wins. It matches
    /// whole segments: `/blog` matches `/blog` and `/blog/x`, not `/blogger`. It stays part of the
    /// path that the backend sees. A document root is mounted at it (`/blog/x` is `x` in the root).
    #[serde(default = "root_path", skip_serializing_if = "is_root_path")]
    pub path: String,
    pub backend: Backend,
    /// Requests of this site that may run at once. `None` means only its tenant's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    /// Longest time of each stream of its requests, seconds. Streams are the request body, the
    /// response with the wait for its header section, and a tunnel. It holds for any backend and
    /// any version of HTTP. `None` means no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_seconds: Option<u32>,
    /// Handling of more requests than may run.
    #[serde(default, skip_serializing_if = "AdmissionSettings::is_default")]
    pub admission: AdmissionSettings,
    /// Limits of its cell: all that runs for this site together. Without programs (static, HTTP)
    /// only `read` and `write`.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub limits: CellLimits,
    /// Limits of the cell that each of its requests has for itself; a rule's limits are laid over
    /// them. Only `read` and `write` if no program runs for a request, as it does for CGI and PHP.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub request_limits: CellLimits,
    /// Steps in which a request that uses much CPU time is slowed down, in rising order. CGI and
    /// PHP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub demotions: Vec<WrittenDemotion>,
}

impl Site {
    /// Returns on how many nodes of a cluster its application may run at once.
    pub fn instances_max(&self) -> u32 {
        match &self.backend {
            Backend::App(app) => app.max.unwrap_or(1),
            _ => 1,
        }
    }
}

fn root_path() -> String {
    "/".into()
}

fn is_root_path(path: &str) -> bool {
    path == "/"
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// How a site's requests are served: `{"kind": "php", "root": "wiki", ...}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[expect(
    clippy::large_enum_variant,
    reason = "200 bytes a site are less than a box at each use of an application's record"
)]
pub enum Backend {
    /// Files.
    Static(FileRoot),
    /// Files, of which some are programs that run once per request (RFC 3875).
    Cgi(FileRoot),
    /// Files, of which `*.php` run in FastCGI workers that nagaya owns.
    Php(FileRoot),
    /// A server that already runs somewhere.
    Http(Http),
    /// A server that nagaya starts and keeps.
    App(App),
}

impl Backend {
    /// Returns its word in records, commands, logs and metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Static(_) => "static",
            Self::Cgi(_) => "cgi",
            Self::Php(_) => "php",
            Self::Http(_) => "http",
            Self::App(_) => "app",
        }
    }

    /// Returns the document root and its settings, if there is one. An application that speaks
    /// FastCGI has one, too.
    pub fn files(&self) -> Option<&FileRoot> {
        match self {
            Self::Static(files) | Self::Cgi(files) | Self::Php(files) => Some(files),
            Self::App(app) => app.files.as_deref(),
            Self::Http(_) => None,
        }
    }
}

/// A document root, and how its files and their programs are served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRoot {
    /// Document root: below the tenant's home if relative.
    pub root: PathBuf,
    /// Names tried in this order for a directory. If empty, `index.html` (before it `index.php` for
    /// PHP, `index.cgi` for CGI).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub index: Vec<String>,
    /// Lists a directory that has no index.
    #[serde(default, skip_serializing_if = "is_false")]
    pub listing: bool,
    /// Status code (as text) to a file below the root, for example `{"404": "404.html"}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub error_documents: BTreeMap<String, String>,
    /// `Cache-Control` of files; none is sent if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_control: Option<String>,
    /// Path prefixes below the root that are never served, for example `/data`, `/conf` for
    /// DokuWiki. They match whole segments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// Which links below the root may lead out of it.
    #[serde(default, skip_serializing_if = "LinkPolicy::is_default")]
    pub links: LinkPolicy,
    /// A program below the root that also gets every path with no file, for example `index.php` for
    /// WordPress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front_controller: Option<String>,
    /// File name endings that are programs. If empty, `.cgi`, or `.php` for FastCGI. For PHP they
    /// are in addition to `.php`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    /// CGI and PHP: variables for each program, set by the operator.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// CGI and PHP: longest run of one program, seconds. `None` means the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// CGI and PHP: longest run of a program after its client has left, seconds. `None` means
    /// `LINGER_SECONDS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linger_seconds: Option<u32>,
}

/// Which symbolic links below a document root may lead out of it. Links that stay below it are
/// always followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkPolicy {
    /// Links owned by the tenant or by root, to files in the tenant's home that the tenant owns.
    #[default]
    Own,
    None,
}

impl LinkPolicy {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Default and largest value of the time that a program may run after its client has left, seconds.
pub const LINGER_SECONDS: u32 = 30;
pub const LINGER_SECONDS_MAX: u32 = 3600;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// `host:port`, `[v6]:port` or `unix:/path`.
    pub address: String,
    /// Send this as Host instead of the client's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_header: Option<String>,
    /// Trailer fields of a request that it gets. All others end at the node (RFC 9110 section
    /// 6.5.1).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_trailers: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "BodyBuffering::is_default")]
    pub request_buffering: BodyBuffering,
}

/// Whether the body of a request is buffered before its backend gets the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BodyBuffering {
    /// The backend gets all of it at once, with its length.
    #[default]
    On,
    /// The backend gets it as it comes, and stays occupied for that time.
    Off,
}

impl BodyBuffering {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// One step from a state of the store to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordChange {
    PutTenant(Box<Tenant>),
    DropTenant(TenantName),
    PutSite(Box<Site>),
    DropSite(SiteName),
    PutSetting(Setting),
    /// By its key.
    DropSetting(String),
    PutRule(RuleRecord),
    DropRule(RuleName),
    PutNode(Box<NodeRecord>),
    DropNode(NodeName),
    PutPlacement(Placement),
    DropPlacement(SiteName),
    PutTicketKeys(TicketKeys),
    DropTicketKeys,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_reads_and_writes_the_same_json() {
        let text = r#"{"name":"wiki","tenant":"demo","hosts":["wiki.localhost"],"backend":{"kind":"php","root":"wiki","error_documents":{"404":"e/404.html"},"deny":["/data"]}}"#;
        let site: Site = serde_json::from_str(text).unwrap();
        assert_eq!(site.backend.kind(), "php");
        assert_eq!(serde_json::to_string(&site).unwrap(), text);
    }

    #[test]
    fn an_unknown_key_is_refused() {
        let text =
            r#"{"name":"w","tenant":"d","hosts":["w"],"backend":{"kind":"static","root":"w","rooot":"x"}}"#;
        assert!(serde_json::from_str::<Site>(text).is_err());
        let text =
            r#"{"name":"w","tenant":"d","hosts":["w"],"colour":1,"backend":{"kind":"static","root":"w"}}"#;
        assert!(serde_json::from_str::<Site>(text).is_err());
    }
}

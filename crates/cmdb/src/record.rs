//! The records: a tenant, a site and how it is served, a setting of rules, a rule. The same JSON is stored, exported,
//! imported and sent to the processes that watch.
//!
//! Not here: the store (`store`), the in-memory copy (`table`).

mod admission;
mod app;
mod base;
mod cluster;
mod limits;
mod outbound;
mod rule;
mod setting;
mod tickets;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::names::{HostPattern, NodeName, RuleName, SiteName, TenantName};

pub use admission::{Admission, PAGE_LEN_MAX};
pub use app::{
    AFTER_WAKE_SIGNALS, APP_LIST_LEN_MAX, APP_PORT, After, App, Database, IDLE_SECONDS_MAX, INSTANCES_MAX,
    Idle, ImageMemory, ImageWhen, Listen, Never, Protocol, RELEASE_LEN_MAX, Ready, START_SECONDS_MAX,
};
pub use base::Base;
pub use cluster::{Copied, NodeRecord, Part, Placement, Standing, Why};
pub use limits::{
    Amount, CPU_THOUSANDTHS_MAX, CPU_THOUSANDTHS_MIN, CellLimits, Demotion, DeviceLimits, IOPS_MAX,
    MEMORY_MIN, PROCESSES_MAX, UNLIMITED,
};
pub use outbound::{Endpoint, EndpointHost, Outbound};
pub use rule::{RULE_TEXT_LEN_MAX, RULES_MAX, Rule};
pub use setting::{
    FIELD_NAME_LEN_MAX, FIELDS_MAX, KEY_LEN_MAX, SETTINGS_MAX, Scalar, Setting, SettingValue, VALUE_LEN_MAX,
};
pub use tickets::{TicketKey, TicketKeys, TicketSecret};

/// An owner of sites: one uid, one home, limits that hold for all its sites together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    pub name: TenantName,
    /// Its processes run under this uid. Never 0.
    pub uid: u32,
    pub gid: u32,
    /// Relative document roots of its sites lie beneath this directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<PathBuf>,
    /// Requests of all its sites that may run at once. None: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    /// PHP workers it may have at once. None: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub php_workers: Option<u32>,
    /// Share of the node's permits against other tenants, when all want more than there are. 1 to 10,000; 100 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Of its cell: all that runs for it together.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub limits: CellLimits,
    /// Of its CGI programs and PHP workers. `None`: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ProgramNetwork>,
}

/// The network of CGI programs and PHP workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramNetwork {
    /// Each tenant has one of its own.
    #[default]
    Own,
    /// The node's, with whatever listens there.
    Host,
}

/// Host names (and below them a path) served one way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    pub name: SiteName,
    pub tenant: TenantName,
    pub hosts: Vec<HostPattern>,
    /// Only requests at or below this path are this site's; the longest match wins. Segment-wise: `/blog`
    /// matches `/blog` and `/blog/x`, not `/blogger`. It stays part of the path the backend sees; a
    /// document root is mounted at it (`/blog/x` is `x` in the root).
    #[serde(default = "root_path", skip_serializing_if = "is_root_path")]
    pub path: String,
    pub backend: Backend,
    /// Requests of this site that may run at once. None: only its tenant's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    /// What happens when more come than may run.
    #[serde(default, skip_serializing_if = "Admission::is_default")]
    pub admission: Admission,
    /// Of its cell: all that runs for this site together. Without programs (static, HTTP) only `read` and `write`.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub limits: CellLimits,
    /// Of the cell that each of its requests has for itself; a rule's limits are laid over them. Where no program runs for
    /// a request, as for CGI and PHP, only `read` and `write`.
    #[serde(default, skip_serializing_if = "CellLimits::is_empty")]
    pub request_limits: CellLimits,
    /// Steps in which a request that uses much CPU time is slowed down, in rising order. CGI and PHP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub demotions: Vec<Demotion>,
}

impl Site {
    /// On how many nodes of a cluster its application may run at once.
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

/// How a site's requests are answered: `{"kind": "php", "root": "wiki", ...}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[expect(
    clippy::large_enum_variant,
    reason = "200 bytes a site are less than a box at each use of an application's record"
)]
pub enum Backend {
    /// Files.
    Static(Files),
    /// Files, of which some are programs run once per request (RFC 3875).
    Cgi(Files),
    /// Files, of which `*.php` run in FastCGI workers that nagaya owns.
    Php(Files),
    /// A server that already runs somewhere.
    Http(Http),
    /// A server that nagaya starts and keeps.
    App(App),
}

impl Backend {
    /// The word for it in records, commands, logs and metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Static(_) => "static",
            Self::Cgi(_) => "cgi",
            Self::Php(_) => "php",
            Self::Http(_) => "http",
            Self::App(_) => "app",
        }
    }

    /// The document root and what goes with it, where there is one: also of an application that speaks FastCGI.
    pub fn files(&self) -> Option<&Files> {
        match self {
            Self::Static(files) | Self::Cgi(files) | Self::Php(files) => Some(files),
            Self::App(app) => app.files.as_deref(),
            Self::Http(_) => None,
        }
    }
}

/// A document root and how its files, and the programs among them, are served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Document root: beneath the tenant's home if relative.
    pub root: PathBuf,
    /// Tried in this order for a directory. Empty: `index.html` (before it `index.php` for PHP, `index.cgi` for CGI).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub index: Vec<String>,
    /// List a directory that has no index.
    #[serde(default, skip_serializing_if = "is_false")]
    pub listing: bool,
    /// Status code (as text) to a file beneath the root, e.g. `{"404": "404.html"}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub error_documents: BTreeMap<String, String>,
    /// `Cache-Control` of files; none is sent if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_control: Option<String>,
    /// Path prefixes below the root that are never served, e.g. `/data`, `/conf` for DokuWiki. Segment-wise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
    /// A program beneath the root that also gets every path with no file, e.g. `index.php` for WordPress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front_controller: Option<String>,
    /// File name endings that are programs. Empty: `.cgi`, or `.php` for FastCGI. Those of PHP come beside `.php`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    /// CGI and PHP: variables for each program, set by the operator.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// CGI and PHP: longest run of one program, seconds. None: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// `host:port`, `[v6]:port` or `unix:/path`.
    pub address: String,
    /// Send this as Host instead of the client's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_header: Option<String>,
    /// Fields behind a request's body that it gets. All others end at the node (RFC 9110 section 6.5.1).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_trailers: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Buffering::is_default")]
    pub request_buffering: Buffering,
}

/// Whether the body of a request is taken in before its backend gets the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Buffering {
    /// The backend gets all of it at once, with its length.
    #[default]
    On,
    /// The backend gets it as it comes, and is held for as long as that takes.
    Off,
}

impl Buffering {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// One step from a state of the store to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    PutTenant(Box<Tenant>),
    DropTenant(TenantName),
    PutSite(Box<Site>),
    DropSite(SiteName),
    PutSetting(Setting),
    /// By its key.
    DropSetting(String),
    PutRule(Rule),
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

//! Checks a record before it is stored, as far as the record alone allows. Every mistake is found.
//! Each names the field, its value and the remedy.
//!
//! Not here: dependencies on other records, such as a host that another site has (`store::plan`);
//! the shape of the JSON (`record`); names (`names`).

mod app;
mod ids;
mod limits;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddrV6;
use std::ops::RangeInclusive;
use std::path::{Component, Path};

use nagaya_base::limits::HOSTS_PER_SITE_MAX;
use serde::{Deserialize, Serialize};

pub use self::ids::{IdPolicy, OVERFLOW_ID, PRIVILEGED_GROUPS, TENANT_ID_MIN};
use self::limits::LimitLevel;
use crate::names::{HostPattern, RuleName, is_host_name};
use crate::record::{
    AdmissionSettings, Backend, FIELD_NAME_LEN_MAX, FIELDS_MAX, FileRoot, Http, KEY_LEN_MAX,
    LINGER_SECONDS_MAX, PAGE_LEN_MAX, RULE_TEXT_LEN_MAX, RuleRecord, Setting, SettingValue, Site, Tenant,
    VALUE_LEN_MAX,
};

/// Longest URL path at which a site may be mounted, in bytes.
pub const MOUNT_LEN_MAX: usize = 1024;

/// Longest directory that a record may name, in bytes. It is Linux's `PATH_MAX` (4096) less
/// `SITE_PATH_LEN_MAX` (3072) for paths below it.
pub const DIRECTORY_LEN_MAX: usize = 1024;

/// Most entries in each list and each map of a record.
pub const LIST_LEN_MAX: usize = 256;

/// Weights of tenants and sites.
const WEIGHTS: RangeInclusive<u32> = 1..=10_000;

/// Longest value that is quoted in a mistake, in characters.
const QUOTE_LEN_MAX: usize = 120;

/// One mistake in one field of one record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMistake {
    /// `site 'blog'`, `tenant 'demo'`.
    pub record: String,
    pub field: String,
    pub value: String,
    /// The mistake and its remedy.
    pub hint: String,
    /// Position of the record in the list of changes.
    #[serde(skip)]
    pub index: Option<usize>,
}

impl fmt::Display for RecordMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { record, field, value, hint, .. } = self;
        if value.is_empty() {
            write!(f, "{record}: {field}: {hint}")
        } else {
            write!(f, "{record}: {field}: '{value}' {hint}")
        }
    }
}

/// Collects the mistakes of one record.
#[derive(Debug)]
pub struct RecordFindings {
    record: String,
    index: Option<usize>,
    pub mistakes: Vec<RecordMistake>,
}

impl RecordFindings {
    pub fn of_tenant(name: impl fmt::Display, index: Option<usize>) -> Self {
        Self { record: format!("tenant '{name}'"), index, mistakes: Vec::new() }
    }

    pub fn of_site(name: impl fmt::Display, index: Option<usize>) -> Self {
        Self { record: format!("site '{name}'"), index, mistakes: Vec::new() }
    }

    pub fn of_setting(key: &str, index: Option<usize>) -> Self {
        let key: String = key.chars().take(QUOTE_LEN_MAX).flat_map(char::escape_debug).collect();
        Self { record: format!("setting '{key}'"), index, mistakes: Vec::new() }
    }

    pub fn of_rule(name: &RuleName, index: Option<usize>) -> Self {
        Self { record: format!("rule '{name}'"), index, mistakes: Vec::new() }
    }

    pub fn of_cluster(index: Option<usize>) -> Self {
        Self { record: "a node or placement".into(), index, mistakes: Vec::new() }
    }

    pub fn add(&mut self, field: impl Into<String>, value: impl fmt::Display, hint: impl Into<String>) {
        let value = value.to_string().chars().take(QUOTE_LEN_MAX).collect();
        let field = field.into();
        let hint = hint.into();
        self.mistakes.push(RecordMistake {
            record: self.record.clone(),
            field,
            value,
            hint,
            index: self.index,
        });
    }

    fn at_least_one(&mut self, field: &str, number: Option<u32>) {
        if number == Some(0) {
            self.add(field, 0, "is not possible: use 1 or more, or leave the field out");
        }
    }

    fn at_most(&mut self, field: &str, number: Option<u32>, most: u32) {
        if let Some(number) = number.filter(|number| *number > most) {
            self.add(field, number, format!("is too long: at most {most}"));
        }
    }

    fn list_len(&mut self, field: &str, len: usize) {
        if len > LIST_LEN_MAX {
            self.add(field, len, format!("entries are too many: at most {LIST_LEN_MAX}"));
        }
    }
}

pub fn tenant(tenant: &Tenant, to: &mut RecordFindings) {
    for (field, id) in [("uid", tenant.uid), ("gid", tenant.gid)] {
        match id {
            0 => to.add(field, id, "is root's: a tenant needs an id of its own"),
            // The system calls that change ids use -1 for "leave as it is".
            u32::MAX => to.add(field, id, "means \"unchanged\" to the kernel: use a smaller one"),
            _ => {}
        }
    }
    if let Some(home) = &tenant.home {
        if home.is_relative() {
            to.add("home", home.display(), "is relative: use an absolute path");
        }
        directory("home", home, to);
    }
    to.at_least_one("max_concurrent", tenant.max_concurrent);
    to.at_least_one("php_workers", tenant.php_workers);
    within("weight", tenant.weight, WEIGHTS, to);
    limits::cell("limits", &tenant.limits, LimitLevel::TenantOrSite, to);
}

pub fn site(site: &Site, to: &mut RecordFindings) {
    hosts(&site.hosts, to);
    if let Some(hint) = mount_mistake(&site.path) {
        to.add("path", &site.path, hint);
    }
    to.at_least_one("max_concurrent", site.max_concurrent);
    to.at_least_one("stream_seconds", site.stream_seconds);
    admission(&site.admission, to);
    match &site.backend {
        Backend::Static(files) => {
            files_of_any_kind(files, to);
            files_without_programs(files, to);
        }
        Backend::Cgi(files) => files_of_any_kind(files, to),
        Backend::Php(files) => files_of_any_kind(files, to),
        Backend::Http(backend) => http(backend, to),
        Backend::App(backend) => app::app(backend, to),
    }
    limits::of_site(site, to);
}

fn admission(admission: &AdmissionSettings, to: &mut RecordFindings) {
    within("admission.wait_seconds", admission.wait_seconds, 0..=3600, to);
    within("admission.waiting", admission.waiting, 0..=1_000_000, to);
    within("admission.slot_seconds", admission.slot_seconds, 1..=3600, to);
    within("admission.visit_seconds", admission.visit_seconds, 0..=86_400, to);
    within("admission.weight", admission.weight, WEIGHTS, to);
    let len = admission.page.as_ref().map_or(0, String::len);
    if len > PAGE_LEN_MAX {
        to.add("admission.page", format!("{len} bytes"), format!("are too many: at most {PAGE_LEN_MAX}"));
    }
}

fn within(field: &'static str, value: Option<u32>, range: RangeInclusive<u32>, to: &mut RecordFindings) {
    if let Some(value) = value.filter(|value| !range.contains(value)) {
        to.add(field, value, format!("is out of range: use {} to {}", range.start(), range.end()));
    }
}

pub fn setting(setting: &Setting, to: &mut RecordFindings) {
    let Setting { key, value } = setting;
    if !(1..=KEY_LEN_MAX).contains(&key.len()) {
        to.add("key", key, format!("is not possible: use 1 to {KEY_LEN_MAX} bytes"));
    }
    if key.contains(char::is_control) {
        to.add("key", key.escape_debug(), "contains a control character: remove it");
    }
    let len = match value {
        SettingValue::Text(text) => text.len(),
        SettingValue::Fields(fields) => {
            if fields.len() > FIELDS_MAX {
                to.add("value", fields.len(), format!("fields are too many: at most {FIELDS_MAX}"));
            }
            for name in fields.keys().filter(|name| !(1..=FIELD_NAME_LEN_MAX).contains(&name.len())) {
                let hint = format!("is not the name of a field: use 1 to {FIELD_NAME_LEN_MAX} bytes");
                to.add("value", name, hint);
            }
            serde_json::to_string(fields).map_or(usize::MAX, |json| json.len())
        }
    };
    if len > VALUE_LEN_MAX {
        to.add("value", format!("{len} bytes"), format!("are too many: at most {VALUE_LEN_MAX}"));
    }
}

/// Checks a rule. Whether it is valid Ruby is not known here.
pub fn rule(rule: &RuleRecord, to: &mut RecordFindings) {
    let len = rule.text.len();
    if len > RULE_TEXT_LEN_MAX {
        let hint = format!("are too many: at most {RULE_TEXT_LEN_MAX}; keep lists of hosts as settings");
        to.add("text", format!("{len} bytes"), hint);
    }
}

fn hosts(hosts: &[HostPattern], to: &mut RecordFindings) {
    if hosts.is_empty() {
        to.add("hosts", "", "is empty: name at least one host, or '*' for the default site");
    }
    if hosts.len() > HOSTS_PER_SITE_MAX {
        to.add("hosts", hosts.len(), format!("hosts are too many: at most {HOSTS_PER_SITE_MAX}"));
    }
    let mut seen = BTreeSet::new();
    for host in hosts.iter().filter(|host| !seen.insert(host.as_str())) {
        to.add("hosts", host, "is named twice: remove one");
    }
}

/// Returns the mistake in an absolute URL path that means itself and all below it.
fn mount_mistake(path: &str) -> Option<String> {
    let Some(rest) = path.strip_prefix('/') else { return Some("must begin with '/'".into()) };
    if path.len() > MOUNT_LEN_MAX {
        return Some(format!("is longer than {MOUNT_LEN_MAX} bytes"));
    }
    if path.contains(|c: char| c.is_ascii_control() || matches!(c, ' ' | '?' | '#' | '\\' | '%')) {
        return Some(
            "contains a space, a control character or one of ? # \\ %: write the decoded path".into(),
        );
    }
    let sane = rest.is_empty() || rest.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
    (!sane).then(|| "must not end in '/' nor contain '//', '.' or '..' segments".into())
}

fn directory(field: &str, path: &Path, to: &mut RecordFindings) {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() {
        to.add(field, "", "is empty: name a directory ('.' is the tenant's home)");
    }
    if bytes.len() > DIRECTORY_LEN_MAX {
        to.add(field, path.display(), format!("is longer than {DIRECTORY_LEN_MAX} bytes"));
    }
    if bytes.contains(&0) {
        to.add(field, path.display(), "contains a NUL byte");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        to.add(field, path.display(), "contains '..': write the path without it");
    }
}

/// Checks a file that must be below the document root.
fn beneath_root(field: &str, text: &str, to: &mut RecordFindings) {
    let path = Path::new(text);
    let inside = path.components().all(|part| matches!(part, Component::Normal(_)));
    if text.is_empty() || !inside || text.ends_with('/') || text.contains('\0') {
        to.add(field, text, "must be a file below the document root: no leading '/', no '.' or '..'");
    }
}

fn files_of_any_kind(files: &FileRoot, to: &mut RecordFindings) {
    directory("root", &files.root, to);
    to.list_len("index", files.index.len());
    files.index.iter().for_each(|name| beneath_root("index", name, to));
    to.list_len("error_documents", files.error_documents.len());
    for (status, file) in &files.error_documents {
        let known = status.len() == 3 && status.parse().is_ok_and(|code: u16| (400..=599).contains(&code));
        if !known {
            to.add("error_documents", status, "is not an error status: use 400 to 599");
        }
        beneath_root(&format!("error_documents.{status}"), file, to);
    }
    if let Some(value) = &files.cache_control
        && (value.is_empty() || value.contains(|c: char| !matches!(c, ' '..='~')))
    {
        to.add("cache_control", value, "is not a header value: use printable ASCII");
    }
    to.list_len("deny", files.deny.len());
    for prefix in &files.deny {
        if let Some(hint) = mount_mistake(prefix) {
            to.add("deny", prefix, hint);
        }
    }
    if let Some(program) = &files.front_controller {
        beneath_root("front_controller", program, to);
    }
    to.list_len("extensions", files.extensions.len());
    for ending in &files.extensions {
        if ending.len() < 2 || !ending.starts_with('.') || ending.contains(['/', '\0']) {
            to.add("extensions", ending, "is not a file name ending: write it like '.cgi'");
        }
    }
    env(&files.env, to);
    to.at_least_one("timeout_seconds", files.timeout_seconds);
    to.at_most("linger_seconds", files.linger_seconds, LINGER_SECONDS_MAX);
}

/// Checks the files of a static site. It runs nothing, so a field about programs is a
/// misunderstanding worth reporting.
fn files_without_programs(files: &FileRoot, to: &mut RecordFindings) {
    let hint = "has no effect on a static site: use backend cgi or php, or remove it";
    if !files.extensions.is_empty() {
        to.add(
            "extensions",
            files.extensions.join(" "),
            "has no effect on a static site: remove it, or use backend cgi or php",
        );
    }
    if let Some(program) = &files.front_controller {
        to.add("front_controller", program, hint);
    }
    if let Some(name) = files.env.keys().next() {
        to.add("env", name, hint);
    }
    let times = [("timeout_seconds", files.timeout_seconds), ("linger_seconds", files.linger_seconds)];
    for (name, seconds) in times {
        if let Some(seconds) = seconds {
            to.add(name, seconds, hint);
        }
    }
}

fn env(env: &BTreeMap<String, String>, to: &mut RecordFindings) {
    to.list_len("env", env.len());
    for (name, value) in env {
        if !is_variable(name) {
            to.add("env", name, "is not a variable name: use letters, digits and '_', no digit first");
        }
        if value.contains('\0') {
            to.add(format!("env.{name}"), value, "contains a NUL byte");
        }
    }
}

fn is_variable(name: &str) -> bool {
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn http(http: &Http, to: &mut RecordFindings) {
    if !is_backend_address(&http.address) {
        to.add("address", &http.address, "is not an address: use host:port, [v6]:port or unix:/path");
    }
    if let Some(value) = &http.host_header
        && !is_authority(value)
    {
        to.add("host_header", value, "is not a Host value: use host or host:port");
    }
    to.at_least_one("timeout_seconds", http.timeout_seconds);
    trailers(&http.request_trailers, to);
}

fn trailers(names: &[String], to: &mut RecordFindings) {
    to.list_len("request_trailers", names.len());
    for name in names {
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if name.is_empty() || !is_name {
            to.add(
                "request_trailers",
                name,
                "is not the name of a header field: use letters, digits and '-'",
            );
        }
    }
}

fn is_backend_address(text: &str) -> bool {
    // A socket address holds at most 107 bytes and a closing NUL (unix(7)).
    if let Some(path) = text.strip_prefix("unix:") {
        return path.starts_with('/') && (2..=107).contains(&path.len()) && !path.contains('\0');
    }
    text.parse::<SocketAddrV6>().is_ok_and(|address| address.port() != 0)
        || text.rsplit_once(':').is_some_and(|(host, port)| is_host_name(host) && is_port(port))
}

fn is_authority(text: &str) -> bool {
    is_backend_address(text) && !text.starts_with("unix:")
        || is_host_name(text)
        || text.starts_with('[') && HostPattern::new(text).is_ok()
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests;

//! What the admin interface does with records, apart from any socket: the server calls it for a running
//! node, and the command line calls it on the store's file where no node runs, so that both obey one set
//! of rules.
//!
//! Not here: connections and what only a running node can tell (`server`).

use std::borrow::Cow;
use std::io::{BufRead, Write};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use nagaya_cmdb::check::Findings;
use nagaya_cmdb::store::{Committed, Mode, Select, TransactionError, import};
use nagaya_cmdb::{Change, Rule, Setting, Site, Store, StoreError, Tenant};
use nagaya_rules::RuleFault;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{OnChange, Problem, problem};
use crate::config::settings::STORED;
use crate::rule_check;
use crate::tenant_ids::IdSource;

/// Users of the machine in a row, where tenants' uids are to begin, that are passed over for one tenant.
const UIDS_PASSED_OVER_MAX: u32 = 1_000;

pub struct Api {
    store: Arc<dyn Store>,
    on_change: OnChange,
    /// Which ids tenants may have, and get.
    ids: IdSource,
    /// Held by whoever changes records until `on_change` has returned, so that changes are handed on in
    /// order of revision.
    writer: Mutex<()>,
}

/// What a change or an import came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    pub revision: u64,
    pub tenants_put: usize,
    pub tenants_removed: usize,
    pub sites_put: usize,
    pub sites_removed: usize,
    pub settings_put: usize,
    pub settings_removed: usize,
    /// Of a node that does not tell: none.
    #[serde(default)]
    pub rules_put: usize,
    #[serde(default)]
    pub rules_removed: usize,
    /// Whether the node's processes serve by it. None: no node runs, or nothing changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<bool>,
}

impl Summary {
    pub(super) fn is_changed(&self) -> bool {
        let put = self.tenants_put + self.sites_put + self.settings_put + self.rules_put;
        put + self.tenants_removed + self.sites_removed + self.settings_removed + self.rules_removed > 0
    }

    fn of(committed: &Committed) -> Self {
        let mut summary = Self { revision: committed.revision, ..Self::default() };
        for change in &committed.changes {
            *match change {
                Change::PutTenant(_) => &mut summary.tenants_put,
                Change::DropTenant(_) => &mut summary.tenants_removed,
                Change::PutSite(_) => &mut summary.sites_put,
                Change::DropSite(_) => &mut summary.sites_removed,
                Change::PutSetting(_) => &mut summary.settings_put,
                Change::DropSetting(_) => &mut summary.settings_removed,
                Change::PutRule(_) => &mut summary.rules_put,
                Change::DropRule(_) => &mut summary.rules_removed,
                // Of the cluster's own, not of whoever changed records.
                Change::PutNode(_)
                | Change::DropNode(_)
                | Change::PutPlacement(_)
                | Change::DropPlacement(_)
                | Change::PutTicketKeys(_)
                | Change::DropTicketKeys => {
                    continue;
                }
            } += 1;
        }
        summary
    }
}

/// What must hold for a change to happen.
#[derive(Debug, Clone, Copy, Default)]
struct Condition {
    absent: bool,
    revision: Option<u64>,
}

impl Api {
    pub fn new(store: Arc<dyn Store>, ids: IdSource, on_change: OnChange) -> Self {
        Self { store, on_change, ids, writer: Mutex::new(()) }
    }

    /// Answers requests for records. It blocks on the disk.
    pub fn answer(&self, request: &Request<Bytes>) -> Response<Bytes> {
        let body = match self.route(request) {
            Ok(body) => body,
            Err(problem) => return refuse(&problem),
        };
        let mut response = Response::new(Bytes::from(body.to_string()));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(revision) = body.get("revision").and_then(Value::as_u64) {
            let tag = HeaderValue::from_str(&format!("\"{revision}\"")).expect("digits are a header value");
            headers.insert(header::ETAG, tag);
        }
        response
    }

    /// Stores all lines or none, and hands the changes on.
    pub fn import(&self, lines: impl BufRead, mode: Mode) -> Result<Summary, Box<Problem>> {
        let policy = self.ids.policy();
        let checks = import::Checks {
            tenant: &|tenant, to| policy.check(tenant, to),
            rule: &|rule| compile(rule).err().map(|fault| place_and_message(&fault)),
        };
        let batch = import::read(lines, &checks)?;
        let _writer = self.writer.lock();
        let committed = batch.store(&*self.store, mode)?;
        Ok(self.hand_on(committed))
    }

    pub fn export(&self, to: &mut dyn Write) -> Result<u64, StoreError> {
        import::export(&*self.store, to)
    }

    fn route(&self, request: &Request<Bytes>) -> Result<Value, Box<Problem>> {
        let query = Query::read(request.uri().query().unwrap_or_default());
        let condition = condition(request)?;
        let path = request.uri().path();
        let Some((kind, name)) =
            path.strip_prefix("/v1/").map(|rest| rest.split_once('/').unwrap_or((rest, "")))
        else {
            return Err(unknown_path(path));
        };
        let name = &*percent_decode_str(name).decode_utf8_lossy();
        match (kind, name, request.method().as_str()) {
            ("tenants", "", "GET") => self.list_tenants(&query),
            ("sites", "", "GET") => self.list_sites(&query),
            ("settings", "", "GET") => self.list_settings(&query),
            ("rules", "", "GET") => self.list_rules(&query),
            ("tenants" | "sites" | "settings" | "rules", "", _) => Err(wrong_method(request.method(), "GET")),
            ("tenants", name, "GET") => self.show("tenant", name, self.store.tenant(name)?),
            ("sites", name, "GET") => self.show("site", name, self.store.site(name)?),
            ("settings", key, "GET") => self.show("setting", key, self.store.setting(key)?),
            ("rules", name, "GET") => self.show("rule", name, self.store.rule(name)?),
            ("tenants", name, "PUT") => self.put_tenant(name, request.body(), condition),
            ("sites", name, "PUT") => self.put_site(name, request.body(), condition),
            ("settings", key, "PUT") => self.put_setting(key, request.body(), condition),
            ("rules", name, "PUT") => self.put_rule(name, request.body(), condition),
            ("tenants", name, "DELETE") => self.drop_tenant(name, condition),
            ("sites", name, "DELETE") => self.drop_site(name, condition),
            ("settings", key, "DELETE") => self.drop_setting(key, condition),
            ("rules", name, "DELETE") => self.drop_rule(name, condition),
            ("tenants" | "sites" | "settings" | "rules", _, _) => {
                Err(wrong_method(request.method(), "GET, PUT and DELETE"))
            }
            _ => Err(unknown_path(path)),
        }
    }

    fn list_tenants(&self, query: &Query<'_>) -> Result<Value, Box<Problem>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let tenants = self.store.tenants(query.get("after").as_deref(), query.limit()?)?;
        let next = tenants.last().map(|tenant| &tenant.name);
        Ok(json!({ "revision": revision, "tenants": tenants, "next": next }))
    }

    fn list_sites(&self, query: &Query<'_>) -> Result<Value, Box<Problem>> {
        query.allow(&["after", "limit", "tenant", "host"])?;
        let select = Select {
            tenant: query.get("tenant").map(Into::into),
            host: query.get("host").map(Into::into),
            after: query.get("after").map(Into::into),
            limit: query.limit()?,
        };
        let revision = self.store.revision()?;
        let sites = self.store.sites(&select)?;
        let next = sites.last().map(|site| &site.name);
        Ok(json!({ "revision": revision, "sites": sites, "next": next }))
    }

    fn list_settings(&self, query: &Query<'_>) -> Result<Value, Box<Problem>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let settings = self.store.settings(query.get("after").as_deref(), query.limit()?)?;
        let next = settings.last().map(|setting| &setting.key);
        Ok(json!({ "revision": revision, "settings": settings, "next": next }))
    }

    /// Without their texts.
    fn list_rules(&self, query: &Query<'_>) -> Result<Value, Box<Problem>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let (after, limit) = (query.get("after").unwrap_or_default(), query.limit()?);
        let mut rules = self.store.rules()?;
        rules.retain(|rule| rule.name.as_str() > &*after);
        rules.truncate(if limit == 0 { rules.len() } else { limit });
        let row = |rule: &Rule| json!({ "name": rule.name, "bytes": rule.text.len(), "lines": rule.text.lines().count() });
        let next = rules.last().map(|rule| &rule.name);
        Ok(json!({ "revision": revision, "rules": rules.iter().map(row).collect::<Vec<_>>(), "next": next }))
    }

    fn show(&self, kind: &str, name: &str, record: Option<impl Serialize>) -> Result<Value, Box<Problem>> {
        let record = record.ok_or_else(|| Problem::not_found(kind, name))?;
        Ok(json!({ "revision": self.store.revision()?, kind: record }))
    }

    /// A tenant without `uid` keeps the one it has or gets the next free one; without `gid` it gets its uid.
    fn put_tenant(&self, name: &str, body: &[u8], condition: Condition) -> Result<Value, Box<Problem>> {
        let mut record = read_object("name", name, body)?;
        let _writer = self.writer.lock();
        let before = self.store.tenant(name)?;
        self.hold(condition, "tenant", name, before.is_some())?;
        if !record.contains_key("uid") {
            let uid = match &before {
                Some(tenant) => tenant.uid,
                None => self.allocate_uid()?,
            };
            record.insert("uid".into(), uid.into());
        }
        if !record.contains_key("gid") {
            let gid = before.map_or(record["uid"].clone(), |tenant| tenant.gid.into());
            record.insert("gid".into(), gid);
        }
        let tenant: Tenant = read_record(record)?;
        let mut findings = Findings::of_tenant(&tenant.name, None);
        self.ids.policy().check(&tenant, &mut findings);
        if !findings.mistakes.is_empty() {
            return Err(TransactionError::Refused(findings.mistakes).into());
        }
        let summary = self.commit(Change::PutTenant(Box::new(tenant.clone())))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.tenants_put > 0, "tenant": tenant }))
    }

    /// The next uid that nobody on this machine has and that a tenant may have.
    fn allocate_uid(&self) -> Result<u32, StoreError> {
        let mut uid = self.store.allocate_uid(self.ids.uid_base)?;
        // Each one that is passed over stays unused.
        for _ in 0..UIDS_PASSED_OVER_MAX {
            if self.ids.is_free(uid) {
                break;
            }
            uid = self.store.allocate_uid(self.ids.uid_base)?;
        }
        Ok(uid)
    }

    fn put_site(&self, name: &str, body: &[u8], condition: Condition) -> Result<Value, Box<Problem>> {
        let site: Site = read_record(read_object("name", name, body)?)?;
        let _writer = self.writer.lock();
        self.hold(condition, "site", name, self.store.site(name)?.is_some())?;
        let summary = self.commit(Change::PutSite(Box::new(site.clone())))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.sites_put > 0, "site": site }))
    }

    fn put_setting(&self, key: &str, body: &[u8], condition: Condition) -> Result<Value, Box<Problem>> {
        let setting: Setting = read_record(read_object("key", key, body)?)?;
        let _writer = self.writer.lock();
        self.hold(condition, "setting", key, self.store.setting(key)?.is_some())?;
        let summary = self.commit(Change::PutSetting(setting.clone()))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.settings_put > 0, "setting": setting }))
    }

    /// Compiled before it is stored: no node is to meet a rule that cannot be evaluated.
    fn put_rule(&self, name: &str, body: &[u8], condition: Condition) -> Result<Value, Box<Problem>> {
        let rule: Rule = read_record(read_object("name", name, body)?)?;
        compile(&rule).map_err(|fault| Problem::broken_rule(fault.kind.code(), place_and_message(&fault)))?;
        let _writer = self.writer.lock();
        self.hold(condition, "rule", name, self.store.rule(name)?.is_some())?;
        let summary = self.commit(Change::PutRule(rule))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.rules_put > 0, "name": name }))
    }

    fn drop_tenant(&self, name: &str, condition: Condition) -> Result<Value, Box<Problem>> {
        let _writer = self.writer.lock();
        let tenant = self.store.tenant(name)?.ok_or_else(|| Problem::not_found("tenant", name))?;
        self.hold(condition, "tenant", name, true)?;
        let summary = self.commit(Change::DropTenant(tenant.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_site(&self, name: &str, condition: Condition) -> Result<Value, Box<Problem>> {
        let _writer = self.writer.lock();
        let site = self.store.site(name)?.ok_or_else(|| Problem::not_found("site", name))?;
        self.hold(condition, "site", name, true)?;
        let summary = self.commit(Change::DropSite(site.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_setting(&self, key: &str, condition: Condition) -> Result<Value, Box<Problem>> {
        let _writer = self.writer.lock();
        let setting = self.store.setting(key)?.ok_or_else(|| Problem::not_found("setting", key))?;
        self.hold(condition, "setting", key, true)?;
        let summary = self.commit(Change::DropSetting(setting.key.into()))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_rule(&self, name: &str, condition: Condition) -> Result<Value, Box<Problem>> {
        let _writer = self.writer.lock();
        let rule = self.store.rule(name)?.ok_or_else(|| Problem::not_found("rule", name))?;
        self.hold(condition, "rule", name, true)?;
        let summary = self.commit(Change::DropRule(rule.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn hold(&self, condition: Condition, kind: &str, name: &str, exists: bool) -> Result<(), Box<Problem>> {
        if condition.absent && exists {
            return Err(Problem::exists(kind, name));
        }
        let Some(expected) = condition.revision else { return Ok(()) };
        let found = self.store.revision()?;
        if found == expected { Ok(()) } else { Err(Problem::outdated(expected, found)) }
    }

    fn commit(&self, change: Change) -> Result<Summary, Box<Problem>> {
        debug_assert!(self.writer.is_locked(), "changes are handed on in order only under the lock");
        Ok(self.hand_on(self.store.transaction(vec![change], Mode::Merge)?))
    }

    fn hand_on(&self, committed: Committed) -> Summary {
        let summary = Summary::of(&committed);
        if !committed.changes.is_empty() && !self.store.tells_changes() {
            (self.on_change)(committed.changes, committed.revision);
        }
        summary
    }
}

fn compile(rule: &Rule) -> Result<(), RuleFault> {
    rule_check::check(rule.text.as_bytes(), &format!("{STORED}{}", rule.name))
}

/// A problem tells the code apart.
pub fn place_and_message(fault: &RuleFault) -> String {
    let RuleFault { file, line, message, .. } = fault;
    line.map_or_else(|| format!("{file}: {message}"), |line| format!("{file}:{line}: {message}"))
}

// === Requests ===

pub(super) fn unknown_path(path: &str) -> Box<Problem> {
    let detail = format!(
        "there is nothing at '{path}': see /v1/tenants, /v1/sites, /v1/settings, /v1/rules, /v1/import, /v1/export, /v1/instances"
    );
    Problem::request(StatusCode::NOT_FOUND, detail)
}

pub(super) fn wrong_method(method: &Method, instead: &str) -> Box<Problem> {
    let detail = format!("{method} is not possible here: use {instead}");
    Problem::request(StatusCode::METHOD_NOT_ALLOWED, detail)
}

pub(super) fn refuse(problem: &Problem) -> Response<Bytes> {
    let body = serde_json::to_vec(problem).expect("a problem has text keys");
    let mut response = Response::new(body.into());
    *response.status_mut() = problem.status();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
    response
}

pub(super) fn mode(request_query: &str) -> Result<Mode, Box<Problem>> {
    let query = Query::read(request_query);
    query.allow(&["mode"])?;
    match query.get("mode").as_deref() {
        None | Some("merge") => Ok(Mode::Merge),
        Some("replace") => Ok(Mode::Replace),
        Some(other) => {
            let detail = format!("mode '{other}' is unknown: use merge or replace");
            Err(Problem::request(StatusCode::BAD_REQUEST, detail))
        }
    }
}

fn condition(request: &Request<Bytes>) -> Result<Condition, Box<Problem>> {
    let text = |name| request.headers().get(name).map(|value| value.to_str().unwrap_or_default());
    let absent = text(header::IF_NONE_MATCH);
    let revision = text(header::IF_MATCH).map(|tag| tag.trim_matches('"').parse());
    match (absent, revision.transpose()) {
        (None | Some("*"), Ok(revision)) => Ok(Condition { absent: absent.is_some(), revision }),
        _ => Err(Problem::request(
            StatusCode::BAD_REQUEST,
            "If-Match takes one ETag of this interface, and If-None-Match only *",
        )),
    }
}

/// The body as an object that has the name the path says, in its field `field`.
fn read_object(field: &str, name: &str, body: &[u8]) -> Result<serde_json::Map<String, Value>, Box<Problem>> {
    let bad = |detail: String| Problem::request(StatusCode::BAD_REQUEST, detail);
    let mut record: serde_json::Map<String, Value> = serde_json::from_slice(body)
        .map_err(|error| bad(format!("the body is not a JSON object: {error}")))?;
    match record.get(field) {
        None => drop(record.insert(field.into(), name.into())),
        Some(Value::String(same)) if same == name => {}
        Some(other) => return Err(bad(format!("the body names {other}, the path '{name}'"))),
    }
    Ok(record)
}

fn read_record<T: serde::de::DeserializeOwned>(
    record: serde_json::Map<String, Value>,
) -> Result<T, Box<Problem>> {
    serde_json::from_value(Value::Object(record))
        .map_err(|error| Problem::request(StatusCode::UNPROCESSABLE_ENTITY, error))
}

/// `a=b&c=d`, percent-decoded when asked for.
pub(super) struct Query<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Query<'a> {
    pub(super) fn read(text: &'a str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect())
    }

    pub(super) fn get(&self, key: &str) -> Option<Cow<'a, str>> {
        let (_, value) = self.0.iter().find(|(known, _)| *known == key)?;
        Some(percent_decode_str(value).decode_utf8_lossy())
    }

    /// A misspelt condition must not show, or change, more than was meant.
    pub(super) fn allow(&self, known: &[&str]) -> Result<(), Box<Problem>> {
        match self.0.iter().find(|(key, _)| !known.contains(key)) {
            None => Ok(()),
            Some((key, _)) => {
                let detail = format!("'{key}' is unknown here: use {}", known.join(", "));
                Err(Problem::request(StatusCode::BAD_REQUEST, detail))
            }
        }
    }

    pub(super) fn limit(&self) -> Result<usize, Box<Problem>> {
        let Some(text) = self.get("limit") else { return Ok(0) };
        let number = text.parse().ok().filter(|limit| *limit > 0);
        number.ok_or_else(|| {
            Problem::request(StatusCode::BAD_REQUEST, format!("limit '{text}' is not a number above 0"))
        })
    }
}

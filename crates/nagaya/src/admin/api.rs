//! The admin interface's work on records, apart from any socket. The server calls it for a running
//! node. The command line calls it on the store's file if no node runs. So both obey one set of
//! rules.
//!
//! Not here: connections, and replies that need a running node (`server`).

use std::borrow::Cow;
use std::io::{BufRead, Write};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use nagaya_records::check::RecordFindings;
use nagaya_records::{RecordChange, RuleRecord, Setting, Site, Tenant};
use nagaya_rules::RuleFault;
use nagaya_store::{ChangeMode, CommittedChanges, SiteFilter, TransactionError, import};
use nagaya_store::{Store, StoreError};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{OnChange, ProblemReply, problem};
use crate::config::settings::STORED;
use crate::rule_check;
use crate::tenant_ids::IdSource;

/// Users of the machine in a row, at the beginning of tenants' uids, that are skipped for one
/// tenant.
const UIDS_PASSED_OVER_MAX: u32 = 1_000;

pub struct AdminApi {
    store: Arc<dyn Store>,
    on_change: OnChange,
    /// Which ids tenants may have, and get.
    ids: IdSource,
    /// Held by a writer of records until `on_change` has returned, so that changes are handed on in
    /// order of revision.
    writer: Mutex<()>,
}

/// Result of a change or an import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeSummary {
    pub revision: u64,
    pub tenants_put: usize,
    pub tenants_removed: usize,
    pub sites_put: usize,
    pub sites_removed: usize,
    pub settings_put: usize,
    pub settings_removed: usize,
    /// Zero from a node of a version that does not report it.
    #[serde(default)]
    pub rules_put: usize,
    #[serde(default)]
    pub rules_removed: usize,
    /// Whether the node's processes have the change in effect. `None` if no node runs, or if
    /// nothing changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<bool>,
}

impl ChangeSummary {
    pub(super) fn is_changed(&self) -> bool {
        let put = self.tenants_put + self.sites_put + self.settings_put + self.rules_put;
        put + self.tenants_removed + self.sites_removed + self.settings_removed + self.rules_removed > 0
    }

    fn of(committed: &CommittedChanges) -> Self {
        let mut summary = Self { revision: committed.revision, ..Self::default() };
        for change in &committed.changes {
            *match change {
                RecordChange::PutTenant(_) => &mut summary.tenants_put,
                RecordChange::DropTenant(_) => &mut summary.tenants_removed,
                RecordChange::PutSite(_) => &mut summary.sites_put,
                RecordChange::DropSite(_) => &mut summary.sites_removed,
                RecordChange::PutSetting(_) => &mut summary.settings_put,
                RecordChange::DropSetting(_) => &mut summary.settings_removed,
                RecordChange::PutRule(_) => &mut summary.rules_put,
                RecordChange::DropRule(_) => &mut summary.rules_removed,
                // These belong to the cluster, not to the writer of records.
                RecordChange::PutNode(_)
                | RecordChange::DropNode(_)
                | RecordChange::PutPlacement(_)
                | RecordChange::DropPlacement(_)
                | RecordChange::PutTicketKeys(_)
                | RecordChange::DropTicketKeys => {
                    continue;
                }
            } += 1;
        }
        summary
    }
}

/// Condition for a change.
#[derive(Debug, Clone, Copy, Default)]
struct ChangeCondition {
    absent: bool,
    revision: Option<u64>,
}

impl AdminApi {
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
    pub fn import(&self, lines: impl BufRead, mode: ChangeMode) -> Result<ChangeSummary, Box<ProblemReply>> {
        let policy = self.ids.policy();
        let checks = import::RecordChecks {
            tenant: &|tenant, to| policy.check(tenant, to),
            rule: &|rule| compile(rule).err().map(|fault| place_and_message(&fault)),
        };
        let batch = import::read_batch(lines, &checks)?;
        let _writer = self.writer.lock();
        let committed = batch.store(&*self.store, mode)?;
        Ok(self.hand_on(committed))
    }

    pub fn export(&self, to: &mut dyn Write) -> Result<u64, StoreError> {
        import::export(&*self.store, to)
    }

    fn route(&self, request: &Request<Bytes>) -> Result<Value, Box<ProblemReply>> {
        let query = UriQuery::read(request.uri().query().unwrap_or_default());
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

    fn list_tenants(&self, query: &UriQuery<'_>) -> Result<Value, Box<ProblemReply>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let tenants = self.store.tenants(query.get("after").as_deref(), query.limit()?)?;
        let next = tenants.last().map(|tenant| &tenant.name);
        Ok(json!({ "revision": revision, "tenants": tenants, "next": next }))
    }

    fn list_sites(&self, query: &UriQuery<'_>) -> Result<Value, Box<ProblemReply>> {
        query.allow(&["after", "limit", "tenant", "host"])?;
        let select = SiteFilter {
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

    fn list_settings(&self, query: &UriQuery<'_>) -> Result<Value, Box<ProblemReply>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let settings = self.store.settings(query.get("after").as_deref(), query.limit()?)?;
        let next = settings.last().map(|setting| &setting.key);
        Ok(json!({ "revision": revision, "settings": settings, "next": next }))
    }

    /// Lists the rules without their texts.
    fn list_rules(&self, query: &UriQuery<'_>) -> Result<Value, Box<ProblemReply>> {
        query.allow(&["after", "limit"])?;
        let revision = self.store.revision()?;
        let after = query.get("after").unwrap_or_default();
        let limit = query.limit()?;
        let mut rules = self.store.rules()?;
        rules.retain(|rule| rule.name.as_str() > &*after);
        rules.truncate(if limit == 0 { rules.len() } else { limit });
        let row = |rule: &RuleRecord| json!({ "name": rule.name, "bytes": rule.text.len(), "lines": rule.text.lines().count() });
        let next = rules.last().map(|rule| &rule.name);
        Ok(json!({ "revision": revision, "rules": rules.iter().map(row).collect::<Vec<_>>(), "next": next }))
    }

    fn show(
        &self,
        kind: &str,
        name: &str,
        record: Option<impl Serialize>,
    ) -> Result<Value, Box<ProblemReply>> {
        let record = record.ok_or_else(|| ProblemReply::not_found(kind, name))?;
        Ok(json!({ "revision": self.store.revision()?, kind: record }))
    }

    /// Stores a tenant. Without `uid` it keeps its own or gets the next free one; without `gid` it
    /// gets its uid.
    fn put_tenant(
        &self,
        name: &str,
        body: &[u8],
        condition: ChangeCondition,
    ) -> Result<Value, Box<ProblemReply>> {
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
        let mut findings = RecordFindings::of_tenant(&tenant.name, None);
        self.ids.policy().check(&tenant, &mut findings);
        if !findings.mistakes.is_empty() {
            return Err(TransactionError::Refused(findings.mistakes).into());
        }
        let summary = self.commit(RecordChange::PutTenant(Box::new(tenant.clone())))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.tenants_put > 0, "tenant": tenant }))
    }

    /// Allocates the next uid that no user of this machine has and that a tenant may have.
    fn allocate_uid(&self) -> Result<u32, StoreError> {
        let mut uid = self.store.allocate_uid(self.ids.uid_base)?;
        // Each skipped uid stays unused.
        for _ in 0..UIDS_PASSED_OVER_MAX {
            if self.ids.is_free(uid) {
                break;
            }
            uid = self.store.allocate_uid(self.ids.uid_base)?;
        }
        Ok(uid)
    }

    fn put_site(
        &self,
        name: &str,
        body: &[u8],
        condition: ChangeCondition,
    ) -> Result<Value, Box<ProblemReply>> {
        let site: Site = read_record(read_object("name", name, body)?)?;
        let _writer = self.writer.lock();
        self.hold(condition, "site", name, self.store.site(name)?.is_some())?;
        let summary = self.commit(RecordChange::PutSite(Box::new(site.clone())))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.sites_put > 0, "site": site }))
    }

    fn put_setting(
        &self,
        key: &str,
        body: &[u8],
        condition: ChangeCondition,
    ) -> Result<Value, Box<ProblemReply>> {
        let setting: Setting = read_record(read_object("key", key, body)?)?;
        let _writer = self.writer.lock();
        self.hold(condition, "setting", key, self.store.setting(key)?.is_some())?;
        let summary = self.commit(RecordChange::PutSetting(setting.clone()))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.settings_put > 0, "setting": setting }))
    }

    /// Stores a rule. It is compiled first: no node may get a rule that cannot be evaluated.
    fn put_rule(
        &self,
        name: &str,
        body: &[u8],
        condition: ChangeCondition,
    ) -> Result<Value, Box<ProblemReply>> {
        let rule: RuleRecord = read_record(read_object("name", name, body)?)?;
        compile(&rule)
            .map_err(|fault| ProblemReply::broken_rule(fault.kind.code(), place_and_message(&fault)))?;
        let _writer = self.writer.lock();
        self.hold(condition, "rule", name, self.store.rule(name)?.is_some())?;
        let summary = self.commit(RecordChange::PutRule(rule))?;
        Ok(json!({ "revision": summary.revision, "changed": summary.rules_put > 0, "name": name }))
    }

    fn drop_tenant(&self, name: &str, condition: ChangeCondition) -> Result<Value, Box<ProblemReply>> {
        let _writer = self.writer.lock();
        let tenant = self.store.tenant(name)?.ok_or_else(|| ProblemReply::not_found("tenant", name))?;
        self.hold(condition, "tenant", name, true)?;
        let summary = self.commit(RecordChange::DropTenant(tenant.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_site(&self, name: &str, condition: ChangeCondition) -> Result<Value, Box<ProblemReply>> {
        let _writer = self.writer.lock();
        let site = self.store.site(name)?.ok_or_else(|| ProblemReply::not_found("site", name))?;
        self.hold(condition, "site", name, true)?;
        let summary = self.commit(RecordChange::DropSite(site.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_setting(&self, key: &str, condition: ChangeCondition) -> Result<Value, Box<ProblemReply>> {
        let _writer = self.writer.lock();
        let setting = self.store.setting(key)?.ok_or_else(|| ProblemReply::not_found("setting", key))?;
        self.hold(condition, "setting", key, true)?;
        let summary = self.commit(RecordChange::DropSetting(setting.key.into()))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn drop_rule(&self, name: &str, condition: ChangeCondition) -> Result<Value, Box<ProblemReply>> {
        let _writer = self.writer.lock();
        let rule = self.store.rule(name)?.ok_or_else(|| ProblemReply::not_found("rule", name))?;
        self.hold(condition, "rule", name, true)?;
        let summary = self.commit(RecordChange::DropRule(rule.name))?;
        Ok(json!({ "revision": summary.revision, "changed": true }))
    }

    fn hold(
        &self,
        condition: ChangeCondition,
        kind: &str,
        name: &str,
        exists: bool,
    ) -> Result<(), Box<ProblemReply>> {
        if condition.absent && exists {
            return Err(ProblemReply::exists(kind, name));
        }
        let Some(expected) = condition.revision else { return Ok(()) };
        let found = self.store.revision()?;
        if found == expected { Ok(()) } else { Err(ProblemReply::outdated(expected, found)) }
    }

    fn commit(&self, change: RecordChange) -> Result<ChangeSummary, Box<ProblemReply>> {
        debug_assert!(self.writer.is_locked(), "changes are handed on in order only under the lock");
        Ok(self.hand_on(self.store.transaction(vec![change], ChangeMode::Merge)?))
    }

    fn hand_on(&self, committed: CommittedChanges) -> ChangeSummary {
        let summary = ChangeSummary::of(&committed);
        if !committed.changes.is_empty() && !self.store.tells_changes() {
            (self.on_change)(committed.changes, committed.revision);
        }
        summary
    }
}

fn compile(rule: &RuleRecord) -> Result<(), RuleFault> {
    rule_check::check(rule.text.as_bytes(), &format!("{STORED}{}", rule.name))
}

/// Returns place and message; a problem has the code in its own field.
pub fn place_and_message(fault: &RuleFault) -> String {
    let RuleFault { file, line, message, .. } = fault;
    line.map_or_else(|| format!("{file}: {message}"), |line| format!("{file}:{line}: {message}"))
}

// === Requests ===

pub(super) fn unknown_path(path: &str) -> Box<ProblemReply> {
    let detail = format!(
        "there is nothing at '{path}': see /v1/tenants, /v1/sites, /v1/settings, /v1/rules, /v1/import, /v1/export, /v1/instances"
    );
    ProblemReply::request(StatusCode::NOT_FOUND, detail)
}

pub(super) fn wrong_method(method: &Method, instead: &str) -> Box<ProblemReply> {
    let detail = format!("{method} is not possible here: use {instead}");
    ProblemReply::request(StatusCode::METHOD_NOT_ALLOWED, detail)
}

pub(super) fn refuse(problem: &ProblemReply) -> Response<Bytes> {
    let body = serde_json::to_vec(problem).expect("a problem has text keys");
    let mut response = Response::new(body.into());
    *response.status_mut() = problem.status();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(problem::CONTENT_TYPE));
    response
}

pub(super) fn mode(request_query: &str) -> Result<ChangeMode, Box<ProblemReply>> {
    let query = UriQuery::read(request_query);
    query.allow(&["mode"])?;
    match query.get("mode").as_deref() {
        None | Some("merge") => Ok(ChangeMode::Merge),
        Some("replace") => Ok(ChangeMode::Replace),
        Some(other) => {
            let detail = format!("mode '{other}' is unknown: use merge or replace");
            Err(ProblemReply::request(StatusCode::BAD_REQUEST, detail))
        }
    }
}

fn condition(request: &Request<Bytes>) -> Result<ChangeCondition, Box<ProblemReply>> {
    let text = |name| request.headers().get(name).map(|value| value.to_str().unwrap_or_default());
    let absent = text(header::IF_NONE_MATCH);
    let revision = text(header::IF_MATCH).map(|tag| tag.trim_matches('"').parse());
    match (absent, revision.transpose()) {
        (None | Some("*"), Ok(revision)) => Ok(ChangeCondition { absent: absent.is_some(), revision }),
        _ => Err(ProblemReply::request(
            StatusCode::BAD_REQUEST,
            "If-Match takes one ETag of this interface, and If-None-Match only *",
        )),
    }
}

/// Returns the body as an object whose field `field` has the name from the path.
fn read_object(
    field: &str,
    name: &str,
    body: &[u8],
) -> Result<serde_json::Map<String, Value>, Box<ProblemReply>> {
    let bad = |detail: String| ProblemReply::request(StatusCode::BAD_REQUEST, detail);
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
) -> Result<T, Box<ProblemReply>> {
    serde_json::from_value(Value::Object(record))
        .map_err(|error| ProblemReply::request(StatusCode::UNPROCESSABLE_ENTITY, error))
}

/// `a=b&c=d`, percent-decoded on demand.
pub(super) struct UriQuery<'a>(Vec<(&'a str, &'a str)>);

impl<'a> UriQuery<'a> {
    pub(super) fn read(text: &'a str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect())
    }

    pub(super) fn get(&self, key: &str) -> Option<Cow<'a, str>> {
        let (_, value) = self.0.iter().find(|(known, _)| *known == key)?;
        Some(percent_decode_str(value).decode_utf8_lossy())
    }

    /// Fails for unknown conditions. A misspelt condition must not show, or change, more than was
    /// meant.
    pub(super) fn allow(&self, known: &[&str]) -> Result<(), Box<ProblemReply>> {
        match self.0.iter().find(|(key, _)| !known.contains(key)) {
            None => Ok(()),
            Some((key, _)) => {
                let detail = format!("'{key}' is unknown here: use {}", known.join(", "));
                Err(ProblemReply::request(StatusCode::BAD_REQUEST, detail))
            }
        }
    }

    pub(super) fn limit(&self) -> Result<usize, Box<ProblemReply>> {
        let Some(text) = self.get("limit") else { return Ok(0) };
        let number = text.parse().ok().filter(|limit| *limit > 0);
        number.ok_or_else(|| {
            ProblemReply::request(StatusCode::BAD_REQUEST, format!("limit '{text}' is not a number above 0"))
        })
    }
}

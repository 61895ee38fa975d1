//! Provides facts about a request and the node to rules, computed only when a rule asks.
//!
//! Nothing here waits. Everything is in memory, at most a second old if it comes from another
//! process or the kernel. Not here: the methods for rules (`nagaya_rules::api`), their decisions
//! (`nagaya_rules::Verdict`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Version};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::cell::{CellName, CgroupController, RequestUsage};
use nagaya_records::record;
use nagaya_records::record::{Backend, SettingValue};
use nagaya_rules::{FactSource, NumberFact, ScalarValue, TextFact};

use crate::admission::site_lane::SiteLane;
use crate::backends::files::script::ProgramKind;
use crate::backends::programs::environment::document_root;
use crate::http::message::RequestHead;
use crate::http::path::SitePath;
use crate::http::proxy_headers::ForwardingRules;
use crate::record::access_record::{AccessRecord, ProgramUsage};
use crate::rules::shared_rules::SharedRules;

/// One request as rules see it.
pub struct RequestFacts<'a> {
    pub shared: &'a SharedRules,
    pub keeper: &'a Rc<KeeperClient>,
    /// Name of this node.
    pub node: &'a str,
    pub head: &'a RequestHead,
    /// Identifies the client behind trusted proxies.
    pub forwarding: &'a ForwardingRules,
    /// Length of the request's body, if it was announced.
    pub body_len: Option<u64>,
    pub route: &'a SiteLane,
    pub record: &'a AccessRecord,
    /// Fields of the response, once it has ended.
    pub response: Option<&'a HeaderMap>,
}

impl RequestFacts<'_> {
    fn host(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&*self.head.host)).filter(|host| !host.is_empty())
    }

    fn authority(&self) -> Option<Cow<'_, str>> {
        let host = self.host()?;
        Some(match self.head.port {
            Some(port) => format!("{host}:{port}").into(),
            None => host,
        })
    }

    fn raw_target(&self) -> Cow<'_, str> {
        match &self.head.query {
            Some(query) => format!("{}?{query}", self.head.path).into(),
            None => Cow::Borrowed(&*self.head.path),
        }
    }

    fn document_root(&self) -> Option<String> {
        let (site, tenant) = (&self.route.site, &self.route.tenant);
        let root = document_root(site, tenant, site.backend.files()?).ok()?;
        Some(root.to_string_lossy().into_owned())
    }

    /// Returns the file of the path, relative to the document root, and the path info behind a
    /// program's name. It uses the names alone: whether the file exists is found out when it is
    /// served.
    fn file(&self) -> Option<(String, String)> {
        let site = &self.route.site;
        let files = site.backend.files()?;
        let programs = ProgramKind::of(&site.backend);
        let path = SitePath::parse(&self.head.path).ok()?;
        let rel = path.below(&site.path).ok()??.as_str();
        let mut end = 0;
        for segment in rel.split('/') {
            end += segment.len();
            if programs.contains(files, segment) {
                break;
            }
            end = (end + 1).min(rel.len());
        }
        let (file, path_info) = rel.split_at(end);
        let mut name = self.document_root()?;
        if !file.is_empty() {
            let _ = write!(name, "/{file}");
        }
        Some((name, path_info.to_owned()))
    }

    /// Returns the variables of the site's record for its programs.
    fn variables(&self) -> Option<&BTreeMap<String, String>> {
        match &self.route.site.backend {
            Backend::Cgi(files) | Backend::Php(files) => Some(&files.env),
            Backend::App(app) => Some(&app.env),
            Backend::Static(_) | Backend::Http(_) => None,
        }
    }

    fn status_line(&self) -> Option<Cow<'_, str>> {
        let status = self.response.map(|_| self.record.status)?;
        Some(match status.canonical_reason() {
            Some(reason) => format!("{} {reason}", status.as_str()).into(),
            None => Cow::Owned(status.as_str().to_owned()),
        })
    }
}

impl FactSource for RequestFacts<'_> {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        let head = self.head;
        let known = |text| Some(Cow::Borrowed(text));
        match text {
            TextFact::Hostname => self.host(),
            TextFact::Method => known(head.method.as_str()),
            TextFact::Path => SitePath::parse(&head.path).ok().map(SitePath::into_text),
            TextFact::RawTarget => Some(self.raw_target()),
            TextFact::Query => head.query.as_deref().map(Cow::Borrowed),
            TextFact::Protocol => known(protocol(head.version)),
            TextFact::Scheme => known(self.forwarding.view_client(head).scheme),
            TextFact::Authority => self.authority(),
            TextFact::DocumentRoot => self.document_root().map(Cow::Owned),
            TextFact::Filename => self.file().map(|(file, _)| file.into()),
            TextFact::PathInfo => {
                self.file().map(|(_, rest)| rest.into()).filter(|rest: &Cow<str>| !rest.is_empty())
            }
            // Nobody logs in at nagaya itself, and a client's claim is not reliable.
            TextFact::User => None,
            TextFact::ClientIp => Some(self.record.client.to_string().into()),
            TextFact::LocalIp => Some(head.conn.local.ip().to_canonical().to_string().into()),
            TextFact::Site => known(self.route.site.name.as_str()),
            TextFact::Tenant => known(self.route.tenant.name.as_str()),
            TextFact::RequestId => Some(head.id.to_string().into()),
            TextFact::Node => known(self.node),
            TextFact::ContentType => self.response?.get(CONTENT_TYPE).map(text_of),
            TextFact::StatusLine => self.status_line(),
        }
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        let ended = self.response.is_some();
        match number {
            NumberFact::ClientPort => self.forwarding.view_client(self.head).port.map(i64::from),
            NumberFact::LocalPort => Some(self.head.conn.local.port().into()),
            NumberFact::ContentLength => self.body_len.and_then(|len| i64::try_from(len).ok()),
            NumberFact::Status => ended.then(|| self.record.status.as_u16().into()),
            NumberFact::BytesOut => ended.then(|| i64::try_from(self.record.bytes_out).unwrap_or(i64::MAX)),
            NumberFact::Keepalives => None,
            NumberFact::Waiting => Some(self.shared.metrics.waiting.get()),
            NumberFact::Running => {
                i64::try_from(self.shared.load.running(|| u64::from(self.shared.lanes.running()))).ok()
            }
            NumberFact::SiteRunning => Some(self.route.lane.crowded().running.into()),
            NumberFact::SiteWaiting => Some(self.route.lane.crowded().waiting.into()),
            NumberFact::SiteFree => Some(self.route.lane.crowded().free.into()),
            NumberFact::SiteWaitMs => {
                self.route.lane.crowded().wait.and_then(|wait| i64::try_from(wait.as_millis()).ok())
            }
            NumberFact::ArrivedUs => {
                let arrived = SystemTime::now() - self.record.begun.elapsed();
                let since = arrived.duration_since(UNIX_EPOCH).unwrap_or_default();
                i64::try_from(since.as_micros()).ok()
            }
        }
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        if name.eq_ignore_ascii_case(HOST.as_str()) {
            return self.authority();
        }
        self.head.headers.get(name).map(text_of)
    }

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str)) {
        if let Some(authority) = self.authority() {
            each(HOST.as_str(), &authority);
        }
        each_of(&self.head.headers, each);
    }

    fn header_out(&self, name: &str) -> Option<Cow<'_, str>> {
        self.response?.get(name).map(text_of)
    }

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str)) {
        if let Some(headers) = self.response {
            each_of(headers, each);
        }
    }

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        let Some(setting) = self.shared.table.read(|table| table.setting(key)) else { return false };
        match &setting.value {
            SettingValue::Text(text) => each(None, ScalarValue::Text(text)),
            SettingValue::Fields(fields) => {
                for (name, value) in fields {
                    each(Some(name), scalar(value));
                }
            }
        }
        true
    }

    /// The keeper keeps the directories of all controllers of a named cell in step. So it exists
    /// under all or none.
    fn cell_exists(&self, _: CgroupController, name: &CellName) -> bool {
        self.shared.named.get(name).is_some()
    }

    fn cells_moment(&self) -> u64 {
        self.shared.named.note_asked();
        self.shared.named.moment()
    }

    fn cell_value(&self, _: CgroupController, name: &CellName, key: &str) -> Option<String> {
        self.shared.named.get(name)?.value(key)
    }

    fn usage(&self) -> Option<RequestUsage> {
        match self.record.used() {
            ProgramUsage::Known(usage) => Some(usage),
            ProgramUsage::Nothing | ProgramUsage::Unknown => None,
        }
    }

    fn elapsed_us(&self) -> u64 {
        let elapsed = if self.response.is_some() { self.record.took } else { self.record.begun.elapsed() };
        u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
    }

    fn load(&self) -> [f64; 3] {
        self.shared.load.averages()
    }

    fn env(&self, name: &str) -> Option<Cow<'_, str>> {
        self.variables()?.get(name).map(|value| Cow::Borrowed(&**value))
    }

    fn each_env(&self, each: &mut dyn FnMut(&str, &str)) {
        for (name, value) in self.variables().into_iter().flatten() {
            each(name, value);
        }
    }

    fn is_tls(&self) -> bool {
        self.head.conn.tls.is_some()
    }

    fn site_rests(&self) -> bool {
        let site = &self.route.site;
        matches!(site.backend, Backend::App(_)) && self.keeper.rests(&site.name)
    }
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_2 => "HTTP/2.0",
        _ => "HTTP/1.1",
    }
}

/// Returns a field's value as text for Ruby. It may contain any bytes above 127.
fn text_of(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

fn each_of(headers: &HeaderMap, each: &mut dyn FnMut(&str, &str)) {
    for (name, value) in headers {
        each(name.as_str(), &text_of(value));
    }
}

fn scalar(value: &record::SettingScalar) -> ScalarValue<'_> {
    match value {
        record::SettingScalar::Boolean(value) => ScalarValue::Bool(*value),
        record::SettingScalar::Text(text) => ScalarValue::Text(text),
        record::SettingScalar::Number(number) => match number.as_i64() {
            Some(number) => ScalarValue::Int(number),
            None => ScalarValue::Float(number.as_f64().unwrap_or(f64::MAX)),
        },
    }
}

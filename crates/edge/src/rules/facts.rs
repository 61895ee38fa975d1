//! What rules can read of a request and of the node, found out only when a rule asks.
//!
//! Nothing here waits: everything is in memory, at most a second old where it is another process's or the kernel's. Not
//! here: what rules call to get it (`nagaya_rules::api`), what they decide (`nagaya_rules::Verdict`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Version};
use nagaya_cmdb::cell::{CellName, Controller, Usage};
use nagaya_cmdb::record::{self, Backend, SettingValue};
use nagaya_keeper::client::Keeper;
use nagaya_rules::{Facts, Number, Scalar, Text};

use crate::access_log::{AccessRecord, Used};
use crate::files::Programs;
use crate::forward::Forwarding;
use crate::message::Head;
use crate::path::SitePath;
use crate::programs::document_root;
use crate::route::Route;
use crate::shared::Shared;

/// One request as rules see it.
pub struct RequestFacts<'a> {
    pub shared: &'a Shared,
    pub keeper: &'a Rc<Keeper>,
    /// Name of this node.
    pub node: &'a str,
    pub head: &'a Head,
    /// Who the client is behind trusted proxies.
    pub forwarding: &'a Forwarding,
    /// Length of the request's body, where it was announced.
    pub body_len: Option<u64>,
    pub route: &'a Route,
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
        let Route { site, tenant, .. } = self.route;
        let root = document_root(site, tenant, site.backend.files()?).ok()?;
        Some(root.to_string_lossy().into_owned())
    }

    /// The file the path means, beneath the document root, and what follows a program's name in it. By the names alone:
    /// whether there is such a file is found out when it is served.
    fn file(&self) -> Option<(String, String)> {
        let site = &self.route.site;
        let files = site.backend.files()?;
        let programs = Programs::of(&site.backend);
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

    /// What the site's record sets for its programs.
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

impl Facts for RequestFacts<'_> {
    fn text(&self, text: Text) -> Option<Cow<'_, str>> {
        let head = self.head;
        let known = |text| Some(Cow::Borrowed(text));
        match text {
            Text::Hostname => self.host(),
            Text::Method => known(head.method.as_str()),
            Text::Path => SitePath::parse(&head.path).ok().map(SitePath::into_text),
            Text::RawTarget => Some(self.raw_target()),
            Text::Query => head.query.as_deref().map(Cow::Borrowed),
            Text::Protocol => known(protocol(head.version)),
            Text::Scheme => known(self.forwarding.view_client(head).scheme),
            Text::Authority => self.authority(),
            Text::DocumentRoot => self.document_root().map(Cow::Owned),
            Text::Filename => self.file().map(|(file, _)| file.into()),
            Text::PathInfo => {
                self.file().map(|(_, rest)| rest.into()).filter(|rest: &Cow<str>| !rest.is_empty())
            }
            // Nobody logs in at nagaya itself, and what a client claims is not what it is.
            Text::User => None,
            Text::ClientIp => Some(self.record.client.to_string().into()),
            Text::LocalIp => Some(head.conn.local.ip().to_canonical().to_string().into()),
            Text::Site => known(self.route.site.name.as_str()),
            Text::Tenant => known(self.route.tenant.name.as_str()),
            Text::RequestId => Some(head.id.to_string().into()),
            Text::Node => known(self.node),
            Text::ContentType => self.response?.get(CONTENT_TYPE).map(text_of),
            Text::StatusLine => self.status_line(),
        }
    }

    fn number(&self, number: Number) -> Option<i64> {
        let ended = self.response.is_some();
        match number {
            Number::ClientPort => self.forwarding.view_client(self.head).port.map(i64::from),
            Number::LocalPort => Some(self.head.conn.local.port().into()),
            Number::ContentLength => self.body_len.and_then(|len| i64::try_from(len).ok()),
            Number::Status => ended.then(|| self.record.status.as_u16().into()),
            Number::BytesOut => ended.then(|| i64::try_from(self.record.bytes_out).unwrap_or(i64::MAX)),
            Number::Keepalives => None,
            Number::Waiting => Some(self.shared.metrics.waiting.get()),
            Number::Running => {
                i64::try_from(self.shared.load.running(|| u64::from(self.shared.lanes.running()))).ok()
            }
            Number::SiteRunning => Some(self.route.lane.crowded().running.into()),
            Number::SiteWaiting => Some(self.route.lane.crowded().waiting.into()),
            Number::SiteFree => Some(self.route.lane.crowded().free.into()),
            Number::SiteWaitMs => {
                self.route.lane.crowded().wait.and_then(|wait| i64::try_from(wait.as_millis()).ok())
            }
            Number::ArrivedUs => {
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

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, Scalar<'_>)) -> bool {
        let Some(setting) = self.shared.with_table(|table| table.setting(key)) else { return false };
        match &setting.value {
            SettingValue::Text(text) => each(None, Scalar::Text(text)),
            SettingValue::Fields(fields) => {
                for (name, value) in fields {
                    each(Some(name), scalar(value));
                }
            }
        }
        true
    }

    /// The keeper has the directories of all controllers of a named cell in step, so one is there under all or none.
    fn cell_exists(&self, _: Controller, name: &CellName) -> bool {
        self.shared.named.get(name).is_some()
    }

    fn cells_moment(&self) -> u64 {
        self.shared.named.note_asked();
        self.shared.named.moment()
    }

    fn cell_value(&self, _: Controller, name: &CellName, key: &str) -> Option<String> {
        self.shared.named.get(name)?.value(key)
    }

    fn usage(&self) -> Option<Usage> {
        match self.record.used() {
            Used::Known(usage) => Some(usage),
            Used::Nothing | Used::Unknown => None,
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

/// A value of a field may hold any bytes above 127; Ruby gets text.
fn text_of(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

fn each_of(headers: &HeaderMap, each: &mut dyn FnMut(&str, &str)) {
    for (name, value) in headers {
        each(name.as_str(), &text_of(value));
    }
}

fn scalar(value: &record::Scalar) -> Scalar<'_> {
    match value {
        record::Scalar::Boolean(value) => Scalar::Bool(*value),
        record::Scalar::Text(text) => Scalar::Text(text),
        record::Scalar::Number(number) => match number.as_i64() {
            Some(number) => Scalar::Int(number),
            None => Scalar::Float(number.as_f64().unwrap_or(f64::MAX)),
        },
    }
}

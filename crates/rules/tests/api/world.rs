//! A request, a node and a store as rules see them, all made up; and rules run against it by the real engine.
//!
//! Not here: what the rules should decide (the tests beside this file).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use std::rc::Rc;

use nagaya_records::cell::{CellName, CgroupController, RequestUsage};
use nagaya_rules::{
    Engine, FactSource, LogLevel, NumberFact, OnError, RuleBudget, RuleFault, RuleFile, RulePhase, RuleSet,
    ScalarValue, TextFact, Verdict,
};

/// What a field of a setting can be, as a test writes it.
#[derive(Clone)]
pub enum Field {
    Text(&'static str),
    Int(i64),
    Float(f64),
    Bool(bool),
}

#[derive(Default)]
pub struct World {
    pub texts: Vec<(TextFact, String)>,
    pub numbers: Vec<(NumberFact, i64)>,
    pub headers_in: Vec<(String, String)>,
    pub headers_out: Vec<(String, String)>,
    /// A setting's fields; one without a name is a plain value.
    pub settings: BTreeMap<String, Vec<(Option<&'static str>, Field)>>,
    /// What named cells have, by v1 name.
    pub cells: Vec<(CgroupController, &'static str, &'static str, &'static str)>,
    pub usage: Option<RequestUsage>,
    pub load: [f64; 3],
    pub env: Vec<(&'static str, &'static str)>,
    /// The site's application rests.
    pub rests: bool,
}

impl World {
    /// `GET http://host/path?query`.
    pub fn get(url: &str) -> Self {
        Self::request("GET", url)
    }

    pub fn request(method: &str, url: &str) -> Self {
        let (scheme, rest) = url.split_once("://").expect("a URL");
        let (host, target) = rest.split_at(rest.find('/').expect("a path"));
        let (path, query) =
            target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
        let mut world = Self::default()
            .text(TextFact::Method, method)
            .text(TextFact::Scheme, scheme)
            .text(TextFact::Hostname, host)
            .text(TextFact::Authority, host)
            .text(TextFact::RawTarget, target)
            .text(TextFact::Path, path)
            .text(TextFact::Protocol, "HTTP/1.1")
            .text(TextFact::DocumentRoot, "/home/demo/www")
            .text(TextFact::Filename, &format!("/home/demo/www{path}"))
            .text(TextFact::ClientIp, "192.0.2.7")
            .text(TextFact::LocalIp, "198.51.100.1")
            .text(TextFact::Site, "wiki")
            .text(TextFact::Tenant, "demo")
            .text(TextFact::RequestId, "0123456789abcdef")
            .text(TextFact::Node, "n1")
            .number(NumberFact::ClientPort, 40_000)
            .number(NumberFact::LocalPort, 80)
            .number(NumberFact::Keepalives, 2)
            .number(NumberFact::ArrivedUs, 1_768_478_400_000_000)
            .number(NumberFact::Running, 17);
        if let Some(query) = query {
            world = world.text(TextFact::Query, query);
        }
        world
    }

    pub fn text(mut self, text: TextFact, value: &str) -> Self {
        self.texts.retain(|(have, _)| *have != text);
        self.texts.push((text, value.to_owned()));
        self
    }

    pub fn number(mut self, number: NumberFact, value: i64) -> Self {
        self.numbers.retain(|(have, _)| *have != number);
        self.numbers.push((number, value));
        self
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers_in.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn setting(mut self, key: &str, fields: &[(Option<&'static str>, Field)]) -> Self {
        self.settings.insert(key.to_owned(), fields.to_vec());
        self
    }

    pub fn cell(
        mut self,
        controller: CgroupController,
        name: &'static str,
        key: &'static str,
        value: &'static str,
    ) -> Self {
        self.cells.push((controller, name, key, value));
        self
    }

    /// The verdict of a rule that must not fail, in `access_checker`.
    #[track_caller]
    pub fn decide(&self, rule: &str) -> Verdict {
        self.decide_in(RulePhase::AccessChecker, rule)
    }

    #[track_caller]
    pub fn decide_in(&self, phase: RulePhase, rule: &str) -> Verdict {
        let mut verdict = Verdict::default();
        if let Err(fault) = self.evaluate(phase, rule, &mut verdict) {
            panic!("{fault}");
        }
        verdict
    }

    /// How a rule fails that must.
    #[track_caller]
    pub fn fault(&self, rule: &str) -> RuleFault {
        let mut verdict = Verdict::default();
        let Err(fault) = self.evaluate(RulePhase::AccessChecker, rule, &mut verdict) else {
            panic!("no fault: {rule}");
        };
        assert!(verdict.spoke.is_empty() && verdict.answer.is_none(), "it decided something: {verdict:?}");
        fault
    }

    pub fn evaluate(&self, phase: RulePhase, rule: &str, verdict: &mut Verdict) -> Result<(), RuleFault> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rule.rb");
        std::fs::write(&path, rule).expect("the file can be written");
        self.evaluate_file(phase, &path, verdict)
    }

    pub fn evaluate_file(
        &self,
        phase: RulePhase,
        path: &Path,
        verdict: &mut Verdict,
    ) -> Result<(), RuleFault> {
        let file = RuleFile { phase, path: path.to_owned(), cache: true, on_error: OnError::Refuse };
        let rules = RuleSet::new(vec![file], RuleBudget::default());
        let mut shared = Rc::new(std::mem::take(verdict));
        let outcome = Engine::new(rules).evaluate(phase, self, &mut shared);
        *verdict = Rc::unwrap_or_clone(shared);
        outcome
    }

    /// What a rule writes with `Apache.rputs`.
    #[track_caller]
    pub fn written(&self, rule: &str) -> String {
        let answer = self.decide(rule).answer.unwrap_or_default();
        String::from_utf8(answer.body).expect("UTF-8")
    }

    /// The value of an expression, as `inspect` shows it.
    #[track_caller]
    pub fn value(&self, expression: &str) -> String {
        self.written(&format!("Apache.rputs(({expression}).inspect)"))
    }
}

/// The texts of warnings.
pub fn warnings(verdict: &Verdict) -> Vec<&str> {
    verdict
        .log
        .iter()
        .filter(|(level, _)| *level == LogLevel::Warning)
        .map(|(_, text)| text.as_str())
        .collect()
}

impl FactSource for World {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        self.texts.iter().find(|(have, _)| *have == text).map(|(_, value)| value.as_str().into())
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        self.numbers.iter().find(|(have, _)| *have == number).map(|(_, value)| *value)
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        first(&self.headers_in, name)
    }

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str)) {
        self.headers_in.iter().for_each(|(name, value)| each(name, value));
    }

    fn header_out(&self, name: &str) -> Option<Cow<'_, str>> {
        first(&self.headers_out, name)
    }

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str)) {
        self.headers_out.iter().for_each(|(name, value)| each(name, value));
    }

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        let Some(fields) = self.settings.get(key) else {
            return false;
        };
        for (name, field) in fields {
            let scalar = match field {
                Field::Text(text) => ScalarValue::Text(text),
                Field::Int(int) => ScalarValue::Int(*int),
                Field::Float(float) => ScalarValue::Float(*float),
                Field::Bool(bool) => ScalarValue::Bool(*bool),
            };
            each(*name, scalar);
        }
        true
    }

    fn cell_exists(&self, controller: CgroupController, name: &CellName) -> bool {
        self.cells.iter().any(|(of, have, _, _)| *of == controller && *have == name.as_str())
    }

    fn cell_value(&self, controller: CgroupController, name: &CellName, key: &str) -> Option<String> {
        let is_it = |of: CgroupController, have: &str, what: &str| {
            of == controller && have == name.as_str() && what == key
        };
        self.cells
            .iter()
            .find(|(of, have, what, _)| is_it(*of, have, what))
            .map(|(_, _, _, value)| (*value).to_owned())
    }

    fn usage(&self) -> Option<RequestUsage> {
        self.usage
    }

    fn elapsed_us(&self) -> u64 {
        1_500
    }

    fn load(&self) -> [f64; 3] {
        self.load
    }

    fn env(&self, name: &str) -> Option<Cow<'_, str>> {
        self.env.iter().find(|(have, _)| *have == name).map(|(_, value)| (*value).into())
    }

    fn each_env(&self, each: &mut dyn FnMut(&str, &str)) {
        self.env.iter().for_each(|(name, value)| each(name, value));
    }

    fn is_tls(&self) -> bool {
        self.text(TextFact::Scheme).as_deref() == Some("https")
    }

    fn site_rests(&self) -> bool {
        self.rests
    }
}

fn first<'a>(fields: &'a [(String, String)], name: &str) -> Option<Cow<'a, str>> {
    fields.iter().find(|(have, _)| have.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str().into())
}

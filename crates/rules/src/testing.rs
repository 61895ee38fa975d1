//! A request that knows little, for tests of this crate's own machinery.
//!
//! Not here: the requests the API's tests ask about (`tests/api/world.rs`).

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use nagaya_records::cell::{CellName, CgroupController, RequestUsage};
use tempfile::TempDir;

use crate::budget::RuleBudget;
use crate::facts::{FactSource, NumberFact, ScalarValue, TextFact};
use crate::phase::RulePhase;
use crate::{Engine, OnError, RuleFile, RuleSet, Verdict};

/// A request of which a few things are known. It counts what it is asked.
#[derive(Debug, Clone, Default)]
pub struct TestRequest {
    pub host: String,
    pub path: String,
    pub agent: Option<String>,
    pub cells: RefCell<Vec<String>>,
    pub settings: BTreeMap<String, i64>,
    pub arrived: i64,
    pub questions: Cell<u32>,
    /// The site's application rests for so many questions.
    pub rests_for: u32,
    pub rests_asked: Cell<u32>,
}

impl TestRequest {
    pub fn host(host: &str) -> Self {
        Self { host: host.to_owned(), path: "/".into(), ..Self::default() }
    }

    /// A GET of this path, of one host.
    pub fn get(path: &str) -> Self {
        Self { path: path.to_owned(), ..Self::host("www.example.com") }
    }

    fn count(&self) {
        self.questions.set(self.questions.get() + 1);
    }
}

impl FactSource for TestRequest {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        self.count();
        match text {
            TextFact::Hostname => Some(self.host.as_str().into()),
            TextFact::Method => Some("GET".into()),
            TextFact::Path | TextFact::RawTarget => Some(self.path.as_str().into()),
            TextFact::RequestId => Some("1".into()),
            _ => None,
        }
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        (number == NumberFact::ArrivedUs).then_some(self.arrived)
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        self.count();
        self.agent.as_deref().filter(|_| name == "User-Agent").map(Cow::Borrowed)
    }

    fn each_header_in(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn header_out(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_out(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        let found = self.settings.get(key);
        if let Some(value) = found {
            each(None, ScalarValue::Int(*value));
        }
        found.is_some()
    }

    fn cell_exists(&self, _: CgroupController, name: &CellName) -> bool {
        self.cells.borrow().iter().any(|cell| *cell == name.as_str())
    }

    fn cell_value(&self, _: CgroupController, _: &CellName, _: &str) -> Option<String> {
        None
    }

    fn usage(&self) -> Option<RequestUsage> {
        None
    }

    fn elapsed_us(&self) -> u64 {
        7
    }

    fn load(&self) -> [f64; 3] {
        [0.5; 3]
    }

    fn env(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_env(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn is_tls(&self) -> bool {
        false
    }

    fn site_rests(&self) -> bool {
        self.count();
        let asked = self.rests_asked.replace(self.rests_asked.get() + 1);
        asked < self.rests_for
    }
}

/// Rule files in a directory of their own.
pub struct TestRules {
    directory: TempDir,
    files: Vec<RuleFile>,
}

impl TestRules {
    /// One file for the access phase.
    pub fn of(source: &str) -> Self {
        let mut rules = Self { directory: tempfile::tempdir().unwrap(), files: Vec::new() };
        rules.add(source);
        rules
    }

    /// One more, which is named `0.rb`, `1.rb`...
    pub fn add(&mut self, source: &str) -> &mut RuleFile {
        let path = self.path(self.files.len());
        fs::write(&path, source).unwrap();
        let phase = RulePhase::AccessChecker;
        let on_error = OnError::Pass;
        self.files.push(RuleFile { phase, path, cache: false, on_error });
        self.files.last_mut().unwrap()
    }

    /// The first file, to change how it is configured.
    pub fn first(&mut self) -> &mut RuleFile {
        &mut self.files[0]
    }

    pub fn second(&mut self) -> &mut RuleFile {
        &mut self.files[1]
    }

    pub fn path(&self, at: usize) -> PathBuf {
        self.directory.path().join(format!("{at}.rb"))
    }

    pub fn write(&self, at: usize, source: &str) {
        fs::write(self.path(at), source).unwrap();
    }

    pub fn set(&self) -> Arc<RuleSet> {
        RuleSet::new(self.files.clone(), RuleBudget::default())
    }

    pub fn engine(&self) -> (Arc<RuleSet>, Engine) {
        let set = self.set();
        let engine = Engine::new(Arc::clone(&set));
        (set, engine)
    }
}

/// What the rules of the access phase decide, and whether the request is refused.
pub fn evaluate(engine: &mut Engine) -> (Verdict, Result<(), crate::RuleFault>) {
    let mut verdict = engine.blank();
    let outcome =
        engine.evaluate(RulePhase::AccessChecker, &TestRequest::get("/wiki/Main%20Page"), &mut verdict);
    (Verdict::clone(&verdict), outcome)
}

/// What they answer; empty if they do not.
pub fn answer_of(engine: &mut Engine) -> String {
    let (verdict, _) = evaluate(engine);
    verdict.answer.map_or_else(String::new, |answer| String::from_utf8(answer.body).unwrap())
}

/// What one rule writes, which must not fail.
#[track_caller]
pub fn written(source: &str) -> String {
    let (set, mut engine) = TestRules::of(source).engine();
    let answer = answer_of(&mut engine);
    assert_eq!(set.status()[0].last_fault, None);
    answer
}

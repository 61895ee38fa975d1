//! A cache of verdicts, for facts that rules have seen before.
//!
//! While rules run, their queries of facts are noted in order. The first query does not depend on
//! the request. Each next query depends only on the earlier replies. So the queries form a tree,
//! with verdicts as its leaves. A later request follows the tree by its own facts. If it reaches a
//! leaf, no rule has to run.
//!
//! This works only for rules that keep nothing between their runs. They must use only the words in
//! `vocabulary`, and begin with an empty verdict. A run that uses facts which differ each time is
//! not remembered. Not here: running (`engine`).

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::rc::Rc;

use foldhash::fast::RandomState;
use nagaya_records::cell::{CellName, CgroupController, RequestUsage};

use crate::facts::{FactSource, NumberFact, ScalarValue, TextFact};
use crate::verdict::Verdict;

/// Replies kept by one thread for one phase, and the bytes of their texts and of verdicts. Above
/// either, all are forgotten.
const ANSWERS_MAX: usize = 131_072;
const BYTES_MAX: usize = 16 << 20;

/// Queries of one run, and the bytes of a reply. A run with more is not remembered.
const QUESTIONS_MAX: usize = 32;
const ANSWER_LEN_MAX: usize = 1024;

/// Largest remembered verdict, bytes: a rule can answer with a page made of the path.
const VERDICT_LEN_MAX: usize = 16 << 10;

/// Different verdicts that leaves share; above this number each new leaf has its own.
const SHARED_MAX: usize = 64;

/// Runs without remembering, after the cache was used less often than it was filled.
const REST_RUNS: u32 = 1 << 20;

/// A query of a rule that can be repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FactKey {
    Text(TextFact),
    Number(NumberFact),
    HeaderIn(Box<str>),
    HeaderOut(Box<str>),
    Setting(Box<str>),
    CellExists(CgroupController, CellName),
    Variable(Box<str>),
    Tls,
    Rests,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum FactValue {
    Nothing,
    Number(i64),
    Text(Box<str>),
}

#[derive(Debug)]
enum FactNode {
    Asks(Box<FactQuery>),
    /// The verdict, and how many files ran for it.
    Says(Rc<Verdict>, usize),
}

#[derive(Debug)]
struct FactQuery {
    question: FactKey,
    nothing: Option<FactNode>,
    numbers: HashMap<i64, Option<FactNode>, RandomState>,
    texts: HashMap<Box<str>, Option<FactNode>, RandomState>,
    /// For a query about a cell: the last reply, and its moment.
    cell: Cell<(u64, bool)>,
}

/// The tree of one phase.
#[derive(Debug, Default)]
pub struct VerdictCache {
    root: Option<FactNode>,
    shared: Vec<Rc<Verdict>>,
    answers: usize,
    bytes: usize,
    hits: u64,
    misses: u64,
    /// Remaining runs that are not remembered.
    rest: u32,
    /// The rules gave different verdicts for the same facts, which they should not.
    unfit: bool,
    /// A setting as one text.
    scratch: String,
}

impl VerdictCache {
    /// Creates an empty tree. Rules that decide nothing leave this verdict as it is.
    pub fn new(blank: &Rc<Verdict>) -> Self {
        Self { shared: vec![Rc::clone(blank)], ..Self::default() }
    }

    /// Forgets everything.
    fn clear(&mut self) {
        self.shared.truncate(1);
        *self = Self { shared: std::mem::take(&mut self.shared), ..Self::default() };
    }

    /// Returns the rules' verdict, and how many files would run.
    pub fn find(&mut self, facts: &dyn FactSource) -> Option<(Rc<Verdict>, usize)> {
        let Self { root, scratch, hits, .. } = self;
        let mut node = root.as_ref()?;
        loop {
            node = match node {
                FactNode::Says(verdict, files) => {
                    *hits += 1;
                    return Some((Rc::clone(verdict), *files));
                }
                FactNode::Asks(asks) => asks.answer(facts, scratch)?,
            }
        }
    }

    /// Returns whether a run now should be noted.
    pub fn wants(&mut self) -> bool {
        if self.rest > 0 {
            self.rest -= 1;
            return false;
        }
        !self.unfit
    }

    /// Adds the verdict after these queries.
    fn learn(&mut self, trail: Vec<(FactKey, FactValue)>, verdict: &Rc<Verdict>, files: usize) {
        self.misses += 1;
        let weight = verdict.weight();
        if weight > VERDICT_LEN_MAX {
            return;
        }
        if self.answers >= ANSWERS_MAX || self.bytes >= BYTES_MAX {
            let is_worth_it = self.hits >= self.misses;
            let rest = if is_worth_it { 0 } else { REST_RUNS };
            self.clear();
            self.rest = rest;
        }
        let verdict = self.share(verdict, weight);
        let mut place = &mut self.root;
        for (question, told) in trail {
            if let FactValue::Text(text) = &told {
                self.bytes += text.len();
            }
            self.answers += 1;
            let node =
                place.get_or_insert_with(|| FactNode::Asks(Box::new(FactQuery::new(question.clone()))));
            match node {
                FactNode::Asks(asks) if asks.question == question => place = asks.place(told),
                _ => return self.give_up(),
            }
        }
        match place {
            None => *place = Some(FactNode::Says(verdict, files)),
            Some(FactNode::Says(said, _)) if **said == *verdict => {}
            Some(_) => self.give_up(),
        }
    }

    fn give_up(&mut self) {
        self.clear();
        self.unfit = true;
    }

    /// Returns another leaf's equal verdict, if there is one.
    fn share(&mut self, verdict: &Rc<Verdict>, weight: usize) -> Rc<Verdict> {
        if let Some(same) = self.shared.iter().find(|shared| ***shared == **verdict) {
            return Rc::clone(same);
        }
        self.bytes += weight;
        if self.shared.len() < SHARED_MAX {
            self.shared.push(Rc::clone(verdict));
        }
        Rc::clone(verdict)
    }
}

impl FactQuery {
    fn new(question: FactKey) -> Self {
        let numbers = HashMap::default();
        let texts = HashMap::default();
        Self { question, nothing: None, numbers, texts, cell: Cell::new((0, false)) }
    }

    fn place(&mut self, told: FactValue) -> &mut Option<FactNode> {
        // An entry is `None` until its caller fills it.
        match told {
            FactValue::Nothing => &mut self.nothing,
            FactValue::Number(number) => self.numbers.entry(number).or_default(),
            FactValue::Text(text) => self.texts.entry(text).or_default(),
        }
    }

    /// Returns the node to which the request's reply leads.
    fn answer(&self, facts: &dyn FactSource, scratch: &mut String) -> Option<&FactNode> {
        let text = |text: Option<Cow<'_, str>>| match text {
            Some(text) => self.texts.get(&*text).and_then(Option::as_ref),
            None => self.nothing.as_ref(),
        };
        let number = |number: Option<i64>| match number {
            Some(number) => self.numbers.get(&number).and_then(Option::as_ref),
            None => self.nothing.as_ref(),
        };
        match &self.question {
            FactKey::Text(which) => text(facts.text(*which)),
            FactKey::Number(which) => number(facts.number(*which)),
            FactKey::HeaderIn(name) => text(facts.header_in(name)),
            FactKey::HeaderOut(name) => text(facts.header_out(name)),
            FactKey::Variable(name) => text(facts.env(name)),
            FactKey::CellExists(controller, name) => {
                let moment = facts.cells_moment();
                let (of, mut exists) = self.cell.get();
                if of != moment || moment == 0 {
                    exists = facts.cell_exists(*controller, name);
                    self.cell.set((moment, exists));
                }
                number(Some(exists.into()))
            }
            FactKey::Tls => number(Some(facts.is_tls().into())),
            FactKey::Rests => number(Some(facts.site_rests().into())),
            FactKey::Setting(key) => {
                scratch.clear();
                let found = facts.setting(key, &mut |field, scalar| write_setting(scratch, field, scalar));
                text(found.then_some(Cow::Borrowed(&*scratch)))
            }
        }
    }
}

/// Writes one value of a setting, so that different settings have different texts.
fn write_setting(to: &mut String, field: Option<&str>, scalar: ScalarValue<'_>) {
    // Writing to a String does not fail.
    let _ = match scalar {
        ScalarValue::Bool(value) => writeln!(to, "{field:?}b{value}"),
        ScalarValue::Int(value) => writeln!(to, "{field:?}i{value}"),
        ScalarValue::Float(value) => writeln!(to, "{field:?}f{:x}", value.to_bits()),
        ScalarValue::Text(value) => writeln!(to, "{field:?}t{value:?}"),
    };
}

/// The facts of a request, with a record of all queries.
pub struct NotedFacts<'a> {
    facts: &'a dyn FactSource,
    trail: RefCell<Vec<(FactKey, FactValue)>>,
    /// A query was made whose reply differs each time.
    is_lost: Cell<bool>,
}

impl<'a> NotedFacts<'a> {
    pub fn new(facts: &'a dyn FactSource) -> Self {
        Self { facts, trail: RefCell::default(), is_lost: Cell::new(false) }
    }

    /// Remembers the verdict, if the queries can be repeated.
    pub fn into_memory(self, remembered: &mut VerdictCache, verdict: &Rc<Verdict>, files: usize) {
        if !self.is_lost.get() {
            remembered.learn(self.trail.into_inner(), verdict, files);
        }
    }

    fn note(&self, question: FactKey, told: FactValue) {
        if self.is_lost.get() {
            return;
        }
        let mut trail = self.trail.borrow_mut();
        // A second reply equals the first: a run is short, and its facts do not change.
        if trail.iter().any(|(asked, _)| *asked == question) {
            return;
        }
        let is_long = matches!(&told, FactValue::Text(text) if text.len() > ANSWER_LEN_MAX);
        if is_long || trail.len() >= QUESTIONS_MAX {
            self.lose();
        } else {
            trail.push((question, told));
        }
    }

    fn text(&self, question: FactKey, text: Option<Cow<'a, str>>) -> Option<Cow<'a, str>> {
        self.note(question, text.as_deref().map_or(FactValue::Nothing, |text| FactValue::Text(text.into())));
        text
    }

    fn lose(&self) {
        self.is_lost.set(true);
    }
}

impl FactSource for NotedFacts<'_> {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        match text {
            TextFact::RequestId => self.lose(),
            _ => return self.text(FactKey::Text(text), self.facts.text(text)),
        }
        self.facts.text(text)
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        let told = self.facts.number(number);
        match number {
            NumberFact::LocalPort | NumberFact::ContentLength | NumberFact::Status => {
                self.note(FactKey::Number(number), told.map_or(FactValue::Nothing, FactValue::Number));
            }
            NumberFact::ClientPort
            | NumberFact::BytesOut
            | NumberFact::Keepalives
            | NumberFact::ArrivedUs
            | NumberFact::Running
            | NumberFact::Waiting
            | NumberFact::SiteRunning
            | NumberFact::SiteWaiting
            | NumberFact::SiteFree
            | NumberFact::SiteWaitMs => self.lose(),
        }
        told
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        self.text(FactKey::HeaderIn(name.into()), self.facts.header_in(name))
    }

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_header_in(each);
    }

    fn header_out(&self, name: &str) -> Option<Cow<'_, str>> {
        self.text(FactKey::HeaderOut(name.into()), self.facts.header_out(name))
    }

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_header_out(each);
    }

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        let mut text = String::new();
        let found = self.facts.setting(key, &mut |field, scalar| {
            write_setting(&mut text, field, scalar);
            each(field, scalar);
        });
        let told = if found { FactValue::Text(text.into()) } else { FactValue::Nothing };
        self.note(FactKey::Setting(key.into()), told);
        found
    }

    fn cell_exists(&self, controller: CgroupController, name: &CellName) -> bool {
        let exists = self.facts.cell_exists(controller, name);
        self.note(FactKey::CellExists(controller, name.clone()), FactValue::Number(exists.into()));
        exists
    }

    fn cells_moment(&self) -> u64 {
        self.facts.cells_moment()
    }

    fn cell_value(&self, controller: CgroupController, name: &CellName, key: &str) -> Option<String> {
        self.lose();
        self.facts.cell_value(controller, name, key)
    }

    fn usage(&self) -> Option<RequestUsage> {
        self.lose();
        self.facts.usage()
    }

    fn elapsed_us(&self) -> u64 {
        self.lose();
        self.facts.elapsed_us()
    }

    fn load(&self) -> [f64; 3] {
        self.lose();
        self.facts.load()
    }

    fn env(&self, name: &str) -> Option<Cow<'_, str>> {
        self.text(FactKey::Variable(name.into()), self.facts.env(name))
    }

    fn each_env(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_env(each);
    }

    fn is_tls(&self) -> bool {
        let is_tls = self.facts.is_tls();
        self.note(FactKey::Tls, FactValue::Number(is_tls.into()));
        is_tls
    }

    /// It may change from one moment to the next, so it is queried again for each request. Within
    /// one run it stays the same, so that the remembered reply is the one that the run saw.
    fn site_rests(&self) -> bool {
        let told = self.trail.borrow().iter().find_map(|(asked, told)| match (asked, told) {
            (FactKey::Rests, FactValue::Number(rests)) => Some(*rests != 0),
            _ => None,
        });
        let rests = told.unwrap_or_else(|| self.facts.site_rests());
        self.note(FactKey::Rests, FactValue::Number(rests.into()));
        rests
    }
}

#[cfg(test)]
mod tests;

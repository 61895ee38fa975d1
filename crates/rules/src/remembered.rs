//! Verdicts that need not be found twice: what rules said when they were told the same.
//!
//! While rules run, the facts they ask for are noted, in their order. What they ask first does not depend on the request,
//! what they ask next depends on the answer to the first only, and so on: a tree of questions, with verdicts as its
//! leaves. A later request is asked the questions on its way down; if it comes to a leaf, no rule has to run.
//!
//! Only for rules that keep nothing between their runs and use no words but those in `vocabulary`, beginning with an
//! empty verdict; facts that differ each time make a run one that is not remembered. Not here: running (`engine`).

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::rc::Rc;

use foldhash::fast::RandomState;
use nagaya_cmdb::cell::{CellName, Controller, Usage};

use crate::facts::{Facts, Number, Scalar, Text};
use crate::verdict::Verdict;

/// Answers kept by one thread for one phase, and the bytes of their texts and of verdicts. Beyond either all are forgotten.
const ANSWERS_MAX: usize = 131_072;
const BYTES_MAX: usize = 16 << 20;

/// Questions of one run, and the bytes of an answer. With more it is not remembered.
const QUESTIONS_MAX: usize = 32;
const ANSWER_LEN_MAX: usize = 1024;

/// A verdict that weighs more is found anew each time, bytes: a rule can answer with a page made of the path.
const VERDICT_LEN_MAX: usize = 16 << 10;

/// Verdicts that differ are shared by all leaves that have them; beyond so many each new leaf has one of its own.
const SHARED_MAX: usize = 64;

/// After what was remembered served less often than it was filled, nothing is for so many runs.
const REST_RUNS: u32 = 1 << 20;

/// What a rule can ask, as far as the answer can be told again.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Question {
    Text(Text),
    Number(Number),
    HeaderIn(Box<str>),
    HeaderOut(Box<str>),
    Setting(Box<str>),
    CellExists(Controller, CellName),
    Variable(Box<str>),
    Tls,
    Rests,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Told {
    Nothing,
    Number(i64),
    Text(Box<str>),
}

#[derive(Debug)]
enum Node {
    Asks(Box<Asks>),
    /// The verdict, and how many files ran for it.
    Says(Rc<Verdict>, usize),
}

#[derive(Debug)]
struct Asks {
    question: Question,
    nothing: Option<Node>,
    numbers: HashMap<i64, Option<Node>, RandomState>,
    texts: HashMap<Box<str>, Option<Node>, RandomState>,
    /// Of a question about a cell: the last answer, and the moment of which it is.
    cell: Cell<(u64, bool)>,
}

/// One phase's tree.
#[derive(Debug, Default)]
pub struct Remembered {
    root: Option<Node>,
    shared: Vec<Rc<Verdict>>,
    answers: usize,
    bytes: usize,
    hits: u64,
    misses: u64,
    /// Runs that are still not remembered.
    rest: u32,
    /// The rules said different things when told the same, which they should not.
    unfit: bool,
    /// A setting as one text.
    scratch: String,
}

impl Remembered {
    /// Nothing yet. Rules that say nothing leave this verdict as it is.
    pub fn new(blank: &Rc<Verdict>) -> Self {
        Self { shared: vec![Rc::clone(blank)], ..Self::default() }
    }

    /// Forgets everything.
    fn clear(&mut self) {
        self.shared.truncate(1);
        *self = Self { shared: std::mem::take(&mut self.shared), ..Self::default() };
    }

    /// What the rules would say, and how many files would run.
    pub fn find(&mut self, facts: &dyn Facts) -> Option<(Rc<Verdict>, usize)> {
        let Self { root, scratch, hits, .. } = self;
        let mut node = root.as_ref()?;
        loop {
            node = match node {
                Node::Says(verdict, files) => {
                    *hits += 1;
                    return Some((Rc::clone(verdict), *files));
                }
                Node::Asks(asks) => asks.answer(facts, scratch)?,
            }
        }
    }

    /// Whether a run now is worth being noted.
    pub fn wants(&mut self) -> bool {
        if self.rest > 0 {
            self.rest -= 1;
            return false;
        }
        !self.unfit
    }

    /// Takes in what was said after these questions.
    fn learn(&mut self, trail: Vec<(Question, Told)>, verdict: &Rc<Verdict>, files: usize) {
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
            if let Told::Text(text) = &told {
                self.bytes += text.len();
            }
            self.answers += 1;
            let node = place.get_or_insert_with(|| Node::Asks(Box::new(Asks::new(question.clone()))));
            match node {
                Node::Asks(asks) if asks.question == question => place = asks.place(told),
                _ => return self.give_up(),
            }
        }
        match place {
            None => *place = Some(Node::Says(verdict, files)),
            Some(Node::Says(said, _)) if **said == *verdict => {}
            Some(_) => self.give_up(),
        }
    }

    fn give_up(&mut self) {
        self.clear();
        self.unfit = true;
    }

    /// The same verdict as another leaf's, if one has it.
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

impl Asks {
    fn new(question: Question) -> Self {
        let (numbers, texts) = (HashMap::default(), HashMap::default());
        Self { question, nothing: None, numbers, texts, cell: Cell::new((0, false)) }
    }

    fn place(&mut self, told: Told) -> &mut Option<Node> {
        // An entry is `None` for as long as its caller needs to fill it.
        match told {
            Told::Nothing => &mut self.nothing,
            Told::Number(number) => self.numbers.entry(number).or_default(),
            Told::Text(text) => self.texts.entry(text).or_default(),
        }
    }

    /// Where the request's answer leads.
    fn answer(&self, facts: &dyn Facts, scratch: &mut String) -> Option<&Node> {
        let text = |text: Option<Cow<'_, str>>| match text {
            Some(text) => self.texts.get(&*text).and_then(Option::as_ref),
            None => self.nothing.as_ref(),
        };
        let number = |number: Option<i64>| match number {
            Some(number) => self.numbers.get(&number).and_then(Option::as_ref),
            None => self.nothing.as_ref(),
        };
        match &self.question {
            Question::Text(which) => text(facts.text(*which)),
            Question::Number(which) => number(facts.number(*which)),
            Question::HeaderIn(name) => text(facts.header_in(name)),
            Question::HeaderOut(name) => text(facts.header_out(name)),
            Question::Variable(name) => text(facts.env(name)),
            Question::CellExists(controller, name) => {
                let moment = facts.cells_moment();
                let (of, mut exists) = self.cell.get();
                if of != moment || moment == 0 {
                    exists = facts.cell_exists(*controller, name);
                    self.cell.set((moment, exists));
                }
                number(Some(exists.into()))
            }
            Question::Tls => number(Some(facts.is_tls().into())),
            Question::Rests => number(Some(facts.site_rests().into())),
            Question::Setting(key) => {
                scratch.clear();
                let found = facts.setting(key, &mut |field, scalar| write_setting(scratch, field, scalar));
                text(found.then_some(Cow::Borrowed(&*scratch)))
            }
        }
    }
}

/// One value of a setting, so that different settings have different texts.
fn write_setting(to: &mut String, field: Option<&str>, scalar: Scalar<'_>) {
    // Writing to a String does not fail.
    let _ = match scalar {
        Scalar::Bool(value) => writeln!(to, "{field:?}b{value}"),
        Scalar::Int(value) => writeln!(to, "{field:?}i{value}"),
        Scalar::Float(value) => writeln!(to, "{field:?}f{:x}", value.to_bits()),
        Scalar::Text(value) => writeln!(to, "{field:?}t{value:?}"),
    };
}

/// The facts of a request, with a note of what is asked.
pub struct Noted<'a> {
    facts: &'a dyn Facts,
    trail: RefCell<Vec<(Question, Told)>>,
    /// Something was asked whose answer differs each time.
    is_lost: Cell<bool>,
}

impl<'a> Noted<'a> {
    pub fn new(facts: &'a dyn Facts) -> Self {
        Self { facts, trail: RefCell::default(), is_lost: Cell::new(false) }
    }

    /// Remembers the verdict, if what was asked can be asked again.
    pub fn into_memory(self, remembered: &mut Remembered, verdict: &Rc<Verdict>, files: usize) {
        if !self.is_lost.get() {
            remembered.learn(self.trail.into_inner(), verdict, files);
        }
    }

    fn note(&self, question: Question, told: Told) {
        if self.is_lost.get() {
            return;
        }
        let mut trail = self.trail.borrow_mut();
        // A second answer is the first one's: a run is short, and its facts stand still.
        if trail.iter().any(|(asked, _)| *asked == question) {
            return;
        }
        let is_long = matches!(&told, Told::Text(text) if text.len() > ANSWER_LEN_MAX);
        if is_long || trail.len() >= QUESTIONS_MAX {
            self.lose();
        } else {
            trail.push((question, told));
        }
    }

    fn text(&self, question: Question, text: Option<Cow<'a, str>>) -> Option<Cow<'a, str>> {
        self.note(question, text.as_deref().map_or(Told::Nothing, |text| Told::Text(text.into())));
        text
    }

    fn lose(&self) {
        self.is_lost.set(true);
    }
}

impl Facts for Noted<'_> {
    fn text(&self, text: Text) -> Option<Cow<'_, str>> {
        match text {
            Text::RequestId => self.lose(),
            _ => return self.text(Question::Text(text), self.facts.text(text)),
        }
        self.facts.text(text)
    }

    fn number(&self, number: Number) -> Option<i64> {
        let told = self.facts.number(number);
        match number {
            Number::LocalPort | Number::ContentLength | Number::Status => {
                self.note(Question::Number(number), told.map_or(Told::Nothing, Told::Number));
            }
            Number::ClientPort
            | Number::BytesOut
            | Number::Keepalives
            | Number::ArrivedUs
            | Number::Running
            | Number::Waiting
            | Number::SiteRunning
            | Number::SiteWaiting
            | Number::SiteFree
            | Number::SiteWaitMs => self.lose(),
        }
        told
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        self.text(Question::HeaderIn(name.into()), self.facts.header_in(name))
    }

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_header_in(each);
    }

    fn header_out(&self, name: &str) -> Option<Cow<'_, str>> {
        self.text(Question::HeaderOut(name.into()), self.facts.header_out(name))
    }

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_header_out(each);
    }

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, Scalar<'_>)) -> bool {
        let mut text = String::new();
        let found = self.facts.setting(key, &mut |field, scalar| {
            write_setting(&mut text, field, scalar);
            each(field, scalar);
        });
        let told = if found { Told::Text(text.into()) } else { Told::Nothing };
        self.note(Question::Setting(key.into()), told);
        found
    }

    fn cell_exists(&self, controller: Controller, name: &CellName) -> bool {
        let exists = self.facts.cell_exists(controller, name);
        self.note(Question::CellExists(controller, name.clone()), Told::Number(exists.into()));
        exists
    }

    fn cells_moment(&self) -> u64 {
        self.facts.cells_moment()
    }

    fn cell_value(&self, controller: Controller, name: &CellName, key: &str) -> Option<String> {
        self.lose();
        self.facts.cell_value(controller, name, key)
    }

    fn usage(&self) -> Option<Usage> {
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
        self.text(Question::Variable(name.into()), self.facts.env(name))
    }

    fn each_env(&self, each: &mut dyn FnMut(&str, &str)) {
        self.lose();
        self.facts.each_env(each);
    }

    fn is_tls(&self) -> bool {
        let is_tls = self.facts.is_tls();
        self.note(Question::Tls, Told::Number(is_tls.into()));
        is_tls
    }

    /// It may be different from one moment to the next, and is asked anew for each request; within one run it stays what it was, so
    /// that what is remembered of the run is what the run was told.
    fn site_rests(&self) -> bool {
        let told = self.trail.borrow().iter().find_map(|(asked, told)| match (asked, told) {
            (Question::Rests, Told::Number(rests)) => Some(*rests != 0),
            _ => None,
        });
        let rests = told.unwrap_or_else(|| self.facts.site_rests());
        self.note(Question::Rests, Told::Number(rests.into()));
        rests
    }
}

#[cfg(test)]
mod tests;

//! What rules decided about one request. A rule never acts: everything it does ends up here, bounded, and the edge
//! honours it.
//!
//! One verdict lives over all phases of its request, so that notes set in one are read in the next; the edge takes out
//! what it has carried out. Not here: who acts (`edge`, `keeper`), how cells look (`cmdb::cell`).

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::cell::{
    Boost, CellChange, Confinement, Controller, DEMOTIONS_MAX, Demotion, Limits, NAMED_PER_REQUEST_MAX,
    NamedCell,
};

use crate::Phase;

/// Most bytes a rule can answer with.
pub const ANSWER_LEN_MAX: usize = 1 << 20;

/// Most edits of header fields, in each direction.
pub const HEADER_EDITS_MAX: usize = 64;

/// Most notes, and most variables, of one request.
pub const NOTES_MAX: usize = 64;

/// Most changes of named cells one request can ask for.
pub const CHANGES_MAX: usize = 16;

/// Most lines one request can log.
pub const LOG_LINES_MAX: usize = 16;

/// Longest line of the log, in bytes; what is longer is cut.
pub const LOG_LINE_LEN_MAX: usize = 1024;

/// Most refused decisions of one evaluation that are told.
pub const REFUSED_MAX: usize = 8;

/// Longest name of a note, a variable, a header field or a lane, in bytes.
pub const NAME_LEN_MAX: usize = 256;

/// Longest value of a note, a variable, a header field or a rewrite, in bytes.
pub const VALUE_LEN_MAX: usize = 8 << 10;

/// Most evaluations one verdict remembers as having decided something.
const SPOKE_MAX: usize = 64;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    /// Given instead of the site's own response.
    pub answer: Option<Answer>,
    /// Where the request runs.
    pub confinement: Arc<Confinement>,
    /// To be done to named cells, in this order.
    pub changes: Vec<CellChange>,
    pub lane: Option<Lane>,
    /// Goes before who came so many seconds earlier; negative: behind. -100 to 100.
    pub priority: i8,
    /// It is let in whatever runs already.
    pub passes: bool,
    pub rewrites: Rewrites,
    /// In the order they were made.
    pub headers_in: Vec<HeaderEdit>,
    pub headers_out: Vec<HeaderEdit>,
    /// Remembered for later phases of the same request.
    pub notes: Vec<(Box<str>, Box<str>)>,
    /// For the request's programs; `None` takes the variable away.
    pub env: Vec<(Box<str>, Option<Box<str>>)>,
    pub log: Vec<(Level, String)>,
    /// Lines left out of `log` because there were too many.
    pub log_left_out: u32,
    /// Which files decided something, in the order they ran.
    pub spoke: Vec<Spoke>,
    /// What the running evaluation decided so far.
    decided: Decided,
    /// What it could not decide. Whoever runs it takes them out.
    refused: Vec<Refused>,
    /// When its changes of cells were last found to be so already.
    pub settled: Mark,
}

/// One decision that was not taken, because of what it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub line: Option<u32>,
    pub message: String,
}

/// A moment that whoever carries verdicts out notes on one that many requests share. No part of what it says.
#[derive(Debug, Clone, Default)]
pub struct Mark(Cell<u64>);

impl Mark {
    /// The noted moment; 0: never.
    pub fn get(&self) -> u64 {
        self.0.get()
    }

    pub fn set(&self, moment: u64) {
        self.0.set(moment);
    }
}

impl PartialEq for Mark {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// 0: the rule wrote a body and no status; the edge answers 200.
    pub status: u16,
    pub body: Vec<u8>,
    pub content_type: Option<Box<str>>,
    /// Where a redirection leads.
    pub location: Option<Box<str>>,
}

/// How many requests of a lane run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneRun {
    /// At most so many, 1 or more.
    Fixed(u32),
    /// As many as are found to get the most done.
    Auto,
}

/// A queue of the operator's naming within its site's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    pub name: Box<str>,
    pub run: LaneRun,
    /// Longest predicted wait; `None`: its site's.
    pub wait: Option<Duration>,
    /// Tickets are given where the site gives them.
    pub tickets: bool,
}

/// What the request is to be treated as. Each replaces what the edge found out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rewrites {
    /// Decoded path, beginning with `/`.
    pub path: Option<Box<str>>,
    pub query: Option<Box<str>>,
    pub document_root: Option<Box<str>>,
    /// Absolute path of the file to serve or the script to run.
    pub filename: Option<Box<str>>,
    /// The name programs see as `REMOTE_USER`.
    pub user: Option<Box<str>>,
    /// Of the response.
    pub content_type: Option<Box<str>>,
    /// Of the response.
    pub status: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEdit {
    pub name: Box<str>,
    pub action: HeaderAction,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeaderAction {
    /// Replaces all fields of the name.
    Set(Box<str>),
    /// Leaves those that are there.
    Add(Box<str>),
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warning,
    Notice,
    Info,
    Debug,
}

/// One evaluation that decided something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spoke {
    pub phase: Phase,
    pub file: Arc<str>,
    pub decided: Decided,
}

/// One thing a rule can decide about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    Answer,
    Limits,
    Named,
    Demotion,
    Boost,
    Change,
    Lane,
    Rewrite,
    HeaderIn,
    HeaderOut,
    Note,
    Env,
}

/// A set of topics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Decided(u16);

/// A rule asked for more than one request may have, or for something that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("at most {most} {what} for one request")]
    TooMany { what: &'static str, most: usize },
    #[error("{what} is longer than {most} bytes")]
    TooLong { what: &'static str, most: usize },
    #[error("{what} {why}")]
    Bad { what: &'static str, why: &'static str },
}

// === impl Verdict ===

impl Verdict {
    /// Whether no rule decided or logged anything: the request goes on as if there were none.
    pub fn is_silent(&self) -> bool {
        self.decided.is_empty() && self.spoke.is_empty() && self.log.is_empty() && self.log_left_out == 0
    }

    pub fn has(&self, topic: Topic) -> bool {
        self.decided.has(topic) || self.spoke.iter().any(|spoke| spoke.decided.has(topic))
    }

    pub(crate) fn confinement_mut(&mut self) -> &mut Confinement {
        Arc::make_mut(&mut self.confinement)
    }

    /// The answer, made if there is none.
    pub fn answer_mut(&mut self) -> &mut Answer {
        self.decided.add(Topic::Answer);
        self.answer.get_or_insert_default()
    }

    /// Ends the request with this status; what the rule wrote stays its body.
    pub fn set_status(&mut self, status: u16) -> Result<(), Full> {
        if !(200..=599).contains(&status) {
            return Err(Full::Bad { what: "the status", why: "must be 200 to 599" });
        }
        self.answer_mut().status = status;
        Ok(())
    }

    /// Takes back an answer.
    pub fn clear_answer(&mut self) {
        self.decided.add(Topic::Answer);
        self.answer = None;
    }

    /// Adds to the body of the answer.
    pub fn write(&mut self, text: &[u8]) -> Result<(), Full> {
        let body = &mut self.answer_mut().body;
        if text.len() > ANSWER_LEN_MAX - body.len() {
            return Err(Full::TooLong { what: "the body of the answer", most: ANSWER_LEN_MAX });
        }
        body.extend_from_slice(text);
        Ok(())
    }

    /// Limits of the request's own cell, laid over those earlier rules gave it.
    pub fn limit(&mut self, limits: &Limits) {
        self.decided.add(Topic::Limits);
        let confinement = self.confinement_mut();
        confinement.limits = confinement.limits.overlaid(limits);
    }

    /// Limits of the site's application while the request runs, laid over those earlier rules wanted.
    pub fn boost(&mut self, boost: Boost) {
        self.decided.add(Topic::Boost);
        let confinement = self.confinement_mut();
        confinement.boost = confinement.boost.overlaid(boost);
    }

    /// Attaches the request. Each controller is in one named cell: an earlier one loses those this one takes.
    pub fn attach(&mut self, cell: NamedCell) -> Result<(), Full> {
        self.detach(&cell.controllers);
        let named = &mut self.confinement_mut().named;
        if named.len() >= NAMED_PER_REQUEST_MAX {
            return Err(Full::TooMany { what: "named cells", most: NAMED_PER_REQUEST_MAX });
        }
        named.push(cell);
        Ok(())
    }

    /// Takes these controllers out of the named cells they were attached to.
    pub fn detach(&mut self, controllers: &[Controller]) {
        self.decided.add(Topic::Named);
        let named = &mut self.confinement_mut().named;
        for cell in &mut *named {
            cell.controllers.retain(|controller| !controllers.contains(controller));
        }
        named.retain(|cell| !cell.controllers.is_empty());
    }

    /// One more step in which the request is slowed down; kept in rising order, one for each time.
    pub fn demote(&mut self, demotion: Demotion) -> Result<(), Full> {
        let steps = &mut self.confinement_mut().demotions;
        match steps.binary_search_by_key(&demotion.after_cpu_us, |step| step.after_cpu_us) {
            Ok(at) => steps[at].limits = steps[at].limits.overlaid(&demotion.limits),
            Err(_) if steps.len() >= DEMOTIONS_MAX => {
                return Err(Full::TooMany { what: "demotions", most: DEMOTIONS_MAX });
            }
            Err(at) => steps.insert(at, demotion),
        }
        self.decided.add(Topic::Demotion);
        Ok(())
    }

    pub fn change(&mut self, change: CellChange) -> Result<(), Full> {
        if self.changes.len() >= CHANGES_MAX {
            return Err(Full::TooMany { what: "changes of cells", most: CHANGES_MAX });
        }
        self.decided.add(Topic::Change);
        self.changes.push(change);
        Ok(())
    }

    pub fn set_lane(
        &mut self,
        name: &str,
        run: LaneRun,
        wait: Option<Duration>,
        tickets: bool,
    ) -> Result<(), Full> {
        let name = checked(name, "the name of the lane", NAME_LEN_MAX)?;
        if name.is_empty() || run == LaneRun::Fixed(0) {
            return Err(Full::Bad {
                what: "a lane",
                why: "needs a name, and must let at least one request run",
            });
        }
        self.decided.add(Topic::Lane);
        self.lane = Some(Lane { name, run, wait, tickets });
        Ok(())
    }

    /// It goes before who came so many seconds earlier, or behind.
    pub fn set_priority(&mut self, seconds: i8) {
        self.decided.add(Topic::Lane);
        self.priority = seconds;
    }

    pub fn let_pass(&mut self) {
        self.decided.add(Topic::Lane);
        self.passes = true;
    }

    /// For `edit` to fill in one field with what `Verdict::value` gave.
    pub fn rewrite(&mut self, edit: impl FnOnce(&mut Rewrites)) {
        self.decided.add(Topic::Rewrite);
        edit(&mut self.rewrites);
    }

    pub fn edit_header_in(&mut self, name: &str, action: HeaderAction) -> Result<(), Full> {
        edit_header(&mut self.headers_in, name, action)?;
        self.decided.add(Topic::HeaderIn);
        Ok(())
    }

    pub fn edit_header_out(&mut self, name: &str, action: HeaderAction) -> Result<(), Full> {
        edit_header(&mut self.headers_out, name, action)?;
        self.decided.add(Topic::HeaderOut);
        Ok(())
    }

    pub fn note(&self, name: &str) -> Option<&str> {
        self.notes.iter().find(|(have, _)| **have == *name).map(|(_, value)| &**value)
    }

    pub fn set_note(&mut self, name: &str, value: &str) -> Result<(), Full> {
        let value = checked(value, "the note", VALUE_LEN_MAX)?;
        put(&mut self.notes, name, value, "notes")?;
        self.decided.add(Topic::Note);
        Ok(())
    }

    /// What a rule set: `None` if none did, `Some(None)` if one took the variable away.
    pub fn env(&self, name: &str) -> Option<Option<&str>> {
        self.env.iter().find(|(have, _)| **have == *name).map(|(_, value)| value.as_deref())
    }

    pub fn set_env(&mut self, name: &str, value: Option<&str>) -> Result<(), Full> {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(Full::Bad { what: "the variable's name", why: "is empty, or holds '=' or NUL" });
        }
        let value = value.map(|value| Self::value(value, "the variable")).transpose()?;
        put(&mut self.env, name, value, "variables")?;
        self.decided.add(Topic::Env);
        Ok(())
    }

    /// Leaves one decision out.
    pub(crate) fn refuse(&mut self, line: Option<u32>, message: &str) {
        if self.refused.len() < REFUSED_MAX {
            self.refused.push(Refused { line, message: message.to_owned() });
        }
    }

    pub(crate) fn take_refused(&mut self) -> Vec<Refused> {
        std::mem::take(&mut self.refused)
    }

    /// One line for the error log.
    pub fn say(&mut self, level: Level, text: &str) {
        if self.log.len() >= LOG_LINES_MAX {
            self.log_left_out = self.log_left_out.saturating_add(1);
            return;
        }
        let end = text.floor_char_boundary(LOG_LINE_LEN_MAX);
        self.log.push((level, text[..end].to_owned()));
    }

    /// A text that paths, variables and header fields can hold: bounded, without NUL or line ends.
    pub fn value(text: &str, what: &'static str) -> Result<Box<str>, Full> {
        if text.contains(['\0', '\r', '\n']) {
            return Err(Full::Bad { what, why: "holds NUL or the end of a line" });
        }
        checked(text, what, VALUE_LEN_MAX)
    }

    /// Bytes of texts it holds, and what its lists take beside them, roughly.
    pub(crate) fn weight(&self) -> usize {
        let text = |text: &Option<Box<str>>| text.as_deref().map_or(0, str::len);
        let field = |edit: &HeaderEdit| match &edit.action {
            HeaderAction::Set(value) | HeaderAction::Add(value) => edit.name.len() + value.len(),
            HeaderAction::Remove => edit.name.len(),
        };
        let rewrites = &self.rewrites;
        let paths = [&rewrites.path, &rewrites.query, &rewrites.document_root, &rewrites.filename];
        let answer = self
            .answer
            .as_ref()
            .map_or(0, |answer| answer.body.len() + text(&answer.content_type) + text(&answer.location));
        let edits = self.headers_in.iter().chain(&self.headers_out).map(field).sum::<usize>();
        let notes = self.notes.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        let variables = self.env.iter().map(|(name, value)| name.len() + text(value)).sum::<usize>();
        let lists = self.confinement.named.len() + self.confinement.demotions.len() + self.changes.len();
        let fixed = size_of::<Self>() + lists * size_of::<CellChange>();
        let other =
            paths.into_iter().chain([&rewrites.user, &rewrites.content_type]).map(text).sum::<usize>();
        fixed + answer + edits + notes + variables + other
    }

    /// Ends one file's evaluation: remembers who decided what.
    pub(crate) fn spoken(&mut self, phase: Phase, file: &Arc<str>) {
        let decided = std::mem::take(&mut self.decided);
        if !decided.is_empty() && self.spoke.len() < SPOKE_MAX {
            self.spoke.push(Spoke { phase, file: Arc::clone(file), decided });
        }
    }

    /// What to go back to if the coming evaluation fails. Nothing is copied as long as nothing was decided.
    pub(crate) fn checkpoint(&self) -> Option<Box<Self>> {
        (!self.is_silent()).then(|| Box::new(self.clone()))
    }

    /// Drops what a failed evaluation decided. What it logged stays.
    pub(crate) fn roll_back(&mut self, checkpoint: Option<Box<Self>>) {
        let (log, log_left_out) = (std::mem::take(&mut self.log), self.log_left_out);
        *self = Self { log, log_left_out, ..checkpoint.map_or_else(Self::default, |before| *before) };
    }
}

fn checked(text: &str, what: &'static str, most: usize) -> Result<Box<str>, Full> {
    if text.len() > most {
        return Err(Full::TooLong { what, most });
    }
    Ok(text.into())
}

fn put<V>(list: &mut Vec<(Box<str>, V)>, name: &str, value: V, what: &'static str) -> Result<(), Full> {
    if let Some((_, had)) = list.iter_mut().find(|(have, _)| **have == *name) {
        *had = value;
        return Ok(());
    }
    if list.len() >= NOTES_MAX {
        return Err(Full::TooMany { what, most: NOTES_MAX });
    }
    list.push((checked(name, "a name", NAME_LEN_MAX)?, value));
    Ok(())
}

fn edit_header(edits: &mut Vec<HeaderEdit>, name: &str, action: HeaderAction) -> Result<(), Full> {
    // RFC 9110, 5.6.2: a field's name is a token.
    let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err(Full::Bad { what: "the header field's name", why: "is not a token of RFC 9110" });
    }
    let name = checked(name, "the header field's name", NAME_LEN_MAX)?;
    if let HeaderAction::Set(value) | HeaderAction::Add(value) = &action {
        Verdict::value(value, "the header field")?;
    }
    // The last word on a name makes the earlier ones needless, unless it only adds.
    if !matches!(action, HeaderAction::Add(_)) {
        edits.retain(|edit| !edit.name.eq_ignore_ascii_case(&name));
    }
    if edits.len() >= HEADER_EDITS_MAX {
        return Err(Full::TooMany { what: "edits of header fields", most: HEADER_EDITS_MAX });
    }
    edits.push(HeaderEdit { name, action });
    Ok(())
}

// === impl Decided ===

impl Decided {
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn has(self, topic: Topic) -> bool {
        self.0 & topic.bit() != 0
    }

    pub fn topics(self) -> impl Iterator<Item = Topic> {
        Topic::ALL.into_iter().filter(move |topic| self.has(*topic))
    }

    fn add(&mut self, topic: Topic) {
        self.0 |= topic.bit();
    }
}

impl Topic {
    pub const ALL: [Self; 12] = [
        Self::Answer,
        Self::Limits,
        Self::Named,
        Self::Demotion,
        Self::Boost,
        Self::Change,
        Self::Lane,
        Self::Rewrite,
        Self::HeaderIn,
        Self::HeaderOut,
        Self::Note,
        Self::Env,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answer => "answer",
            Self::Limits => "limits",
            Self::Named => "named cell",
            Self::Demotion => "demotion",
            Self::Boost => "boost",
            Self::Change => "cell change",
            Self::Lane => "lane",
            Self::Rewrite => "rewrite",
            Self::HeaderIn => "request header",
            Self::HeaderOut => "response header",
            Self::Note => "note",
            Self::Env => "variable",
        }
    }

    fn bit(self) -> u16 {
        1 << self as u16
    }
}

#[cfg(test)]
mod tests;

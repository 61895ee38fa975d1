//! The rules' decisions about one request. A rule never acts: all its effects are recorded here,
//! bounded, and the edge carries them out.
//!
//! One verdict lives over all phases of its request, so that notes set in one are read in the next.
//! The edge takes out the parts that it has carried out. Not here: the actions (`edge`, `keeper`),
//! the form of cells (`records::cell`).

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::cell::{
    Boost, CellChange, CgroupController, Confinement, DEMOTIONS_MAX, Demotion, LimitSet,
    NAMED_PER_REQUEST_MAX, NamedCell,
};

use crate::phase::RulePhase;

/// Most bytes in a rule's answer.
pub const ANSWER_LEN_MAX: usize = 1 << 20;

/// Most edits of header fields, in each direction.
pub const HEADER_EDITS_MAX: usize = 64;

/// Most notes, and most variables, of one request.
pub const NOTES_MAX: usize = 64;

/// Most changes of named cells for which one request can ask.
pub const CHANGES_MAX: usize = 16;

/// Most lines that one request can log.
pub const LOG_LINES_MAX: usize = 16;

/// Longest line of the log, in bytes; longer ones are cut.
pub const LOG_LINE_LEN_MAX: usize = 1024;

/// Most refused decisions of one evaluation that are reported.
pub const REFUSED_MAX: usize = 8;

/// Longest name of a note, a variable, a header field or a lane, in bytes.
pub const NAME_LEN_MAX: usize = 256;

/// Longest value of a note, a variable, a header field or a rewrite, in bytes.
pub const VALUE_LEN_MAX: usize = 8 << 10;

/// Most evaluations that a verdict records as having decided something.
const SPOKE_MAX: usize = 64;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    /// Sent instead of the site's own response.
    pub answer: Option<RuleResponse>,
    /// The cells and limits of the request.
    pub confinement: Arc<Confinement>,
    /// Changes to named cells, in this order.
    pub changes: Vec<CellChange>,
    pub lane: Option<RuleLane>,
    /// Goes before requests that came up to this many seconds earlier; negative goes behind. -100
    /// to 100.
    pub priority: i8,
    /// It is admitted whatever runs already.
    pub passes: bool,
    pub rewrites: RequestRewrites,
    /// In the order they were made.
    pub headers_in: Vec<HeaderEdit>,
    pub headers_out: Vec<HeaderEdit>,
    /// Kept for later phases of the same request.
    pub notes: Vec<(Box<str>, Box<str>)>,
    /// For the request's programs; `None` removes the variable.
    pub env: Vec<(Box<str>, Option<Box<str>>)>,
    pub log: Vec<(LogLevel, String)>,
    /// Lines left out of `log` because there were too many.
    pub log_left_out: u32,
    /// Files that decided something, in the order they ran.
    pub spoke: Vec<DecidedBy>,
    /// Decisions of the running evaluation so far.
    decided: TopicSet,
    /// Its refused decisions. The caller that runs it takes them out.
    refused: Vec<RefusedDecision>,
    /// When its changes of cells were last found to be in effect already.
    pub settled: CheckedAt,
}

/// One decision that was refused because of its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RefusedDecision {
    pub line: Option<u32>,
    pub message: String,
}

/// A moment that the edge notes on a verdict shared by many requests. It is not part of the
/// verdict's content.
#[derive(Debug, Clone, Default)]
pub struct CheckedAt(Cell<u64>);

impl CheckedAt {
    /// Returns the noted moment; 0 if never.
    pub fn get(&self) -> u64 {
        self.0.get()
    }

    pub fn set(&self, moment: u64) {
        self.0.set(moment);
    }
}

impl PartialEq for CheckedAt {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleResponse {
    /// 0 if the rule wrote a body and no status; the edge answers 200.
    pub status: u16,
    pub body: Vec<u8>,
    pub content_type: Option<Box<str>>,
    /// Target of a redirection.
    pub location: Option<Box<str>>,
}

/// How many requests of a lane run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneRun {
    /// At most this many, 1 or more.
    Fixed(u32),
    /// The number that is found to give the most throughput.
    Auto,
}

/// A queue within its site's, with a name from the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleLane {
    pub name: Box<str>,
    pub run: LaneRun,
    /// Longest predicted wait; `None` means its site's.
    pub wait: Option<Duration>,
    /// Tickets are given where the site gives them.
    pub tickets: bool,
}

/// Replacements for values of the request that the edge found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestRewrites {
    /// Decoded path, beginning with `/`.
    pub path: Option<Box<str>>,
    pub query: Option<Box<str>>,
    pub document_root: Option<Box<str>>,
    /// Absolute path of the file to serve or the script to run.
    pub filename: Option<Box<str>>,
    /// The name that programs see as `REMOTE_USER`.
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
    /// Leaves existing fields.
    Add(Box<str>),
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LogLevel {
    Error,
    Warning,
    Notice,
    Info,
    Debug,
}

/// One evaluation that decided something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecidedBy {
    pub phase: RulePhase,
    pub file: Arc<str>,
    pub decided: TopicSet,
}

/// Subject of a rule's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VerdictTopic {
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
pub struct TopicSet(u16);

/// A rule asked for more than one request may have, or for something impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    #[error("at most {most} {what} for one request")]
    TooMany { what: &'static str, most: usize },
    #[error("{what} is longer than {most} bytes")]
    TooLong { what: &'static str, most: usize },
    #[error("{what} {why}")]
    Bad { what: &'static str, why: &'static str },
}

// === impl Verdict ===

impl Verdict {
    /// Returns whether no rule decided or logged anything: the request continues as without rules.
    pub fn is_silent(&self) -> bool {
        self.decided.is_empty() && self.spoke.is_empty() && self.log.is_empty() && self.log_left_out == 0
    }

    pub fn has(&self, topic: VerdictTopic) -> bool {
        self.decided.has(topic) || self.spoke.iter().any(|spoke| spoke.decided.has(topic))
    }

    pub(crate) fn confinement_mut(&mut self) -> &mut Confinement {
        Arc::make_mut(&mut self.confinement)
    }

    /// Returns the answer, made if there is none.
    pub fn answer_mut(&mut self) -> &mut RuleResponse {
        self.decided.add(VerdictTopic::Answer);
        self.answer.get_or_insert_default()
    }

    /// Ends the request with this status; text from the rule stays its body.
    pub fn set_status(&mut self, status: u16) -> Result<(), OverLimit> {
        if !(200..=599).contains(&status) {
            return Err(OverLimit::Bad { what: "the status", why: "must be 200 to 599" });
        }
        self.answer_mut().status = status;
        Ok(())
    }

    /// Takes back an answer.
    pub fn clear_answer(&mut self) {
        self.decided.add(VerdictTopic::Answer);
        self.answer = None;
    }

    /// Adds to the body of the answer.
    pub fn write(&mut self, text: &[u8]) -> Result<(), OverLimit> {
        let body = &mut self.answer_mut().body;
        if text.len() > ANSWER_LEN_MAX - body.len() {
            return Err(OverLimit::TooLong { what: "the body of the answer", most: ANSWER_LEN_MAX });
        }
        body.extend_from_slice(text);
        Ok(())
    }

    /// Lays limits of the request's own cell over those from earlier rules.
    pub fn limit(&mut self, limits: &LimitSet) {
        self.decided.add(VerdictTopic::Limits);
        let confinement = self.confinement_mut();
        confinement.limits = confinement.limits.overlaid(limits);
    }

    /// Lays limits of the site's application while the request runs over those from earlier rules.
    pub fn boost(&mut self, boost: Boost) {
        self.decided.add(VerdictTopic::Boost);
        let confinement = self.confinement_mut();
        confinement.boost = confinement.boost.overlaid(boost);
    }

    /// Attaches the request. Each controller is in one named cell: an earlier one loses those this
    /// one takes.
    pub fn attach(&mut self, cell: NamedCell) -> Result<(), OverLimit> {
        self.detach(&cell.controllers);
        let named = &mut self.confinement_mut().named;
        if named.len() >= NAMED_PER_REQUEST_MAX {
            return Err(OverLimit::TooMany { what: "named cells", most: NAMED_PER_REQUEST_MAX });
        }
        named.push(cell);
        Ok(())
    }

    /// Takes these controllers out of the named cells to which they were attached.
    pub fn detach(&mut self, controllers: &[CgroupController]) {
        self.decided.add(VerdictTopic::Named);
        let named = &mut self.confinement_mut().named;
        for cell in &mut *named {
            cell.controllers.retain(|controller| !controllers.contains(controller));
        }
        named.retain(|cell| !cell.controllers.is_empty());
    }

    /// Adds a step in which the request is slowed down. Steps are in rising order, one for each
    /// time.
    pub fn demote(&mut self, demotion: Demotion) -> Result<(), OverLimit> {
        let steps = &mut self.confinement_mut().demotions;
        match steps.binary_search_by_key(&demotion.after_cpu_us, |step| step.after_cpu_us) {
            Ok(at) => steps[at].limits = steps[at].limits.overlaid(&demotion.limits),
            Err(_) if steps.len() >= DEMOTIONS_MAX => {
                return Err(OverLimit::TooMany { what: "demotions", most: DEMOTIONS_MAX });
            }
            Err(at) => steps.insert(at, demotion),
        }
        self.decided.add(VerdictTopic::Demotion);
        Ok(())
    }

    pub fn change(&mut self, change: CellChange) -> Result<(), OverLimit> {
        if self.changes.len() >= CHANGES_MAX {
            return Err(OverLimit::TooMany { what: "changes of cells", most: CHANGES_MAX });
        }
        self.decided.add(VerdictTopic::Change);
        self.changes.push(change);
        Ok(())
    }

    pub fn set_lane(
        &mut self,
        name: &str,
        run: LaneRun,
        wait: Option<Duration>,
        tickets: bool,
    ) -> Result<(), OverLimit> {
        let name = checked(name, "the name of the lane", NAME_LEN_MAX)?;
        if name.is_empty() || run == LaneRun::Fixed(0) {
            return Err(OverLimit::Bad {
                what: "a lane",
                why: "needs a name, and must let at least one request run",
            });
        }
        self.decided.add(VerdictTopic::Lane);
        self.lane = Some(RuleLane { name, run, wait, tickets });
        Ok(())
    }

    /// Moves it before requests that came this many seconds earlier, or behind.
    pub fn set_priority(&mut self, seconds: i8) {
        self.decided.add(VerdictTopic::Lane);
        self.priority = seconds;
    }

    pub fn let_pass(&mut self) {
        self.decided.add(VerdictTopic::Lane);
        self.passes = true;
    }

    /// Lets `edit` set one field to a value from `Verdict::value`.
    pub fn rewrite(&mut self, edit: impl FnOnce(&mut RequestRewrites)) {
        self.decided.add(VerdictTopic::Rewrite);
        edit(&mut self.rewrites);
    }

    pub fn edit_header_in(&mut self, name: &str, action: HeaderAction) -> Result<(), OverLimit> {
        edit_header(&mut self.headers_in, name, action)?;
        self.decided.add(VerdictTopic::HeaderIn);
        Ok(())
    }

    pub fn edit_header_out(&mut self, name: &str, action: HeaderAction) -> Result<(), OverLimit> {
        edit_header(&mut self.headers_out, name, action)?;
        self.decided.add(VerdictTopic::HeaderOut);
        Ok(())
    }

    pub fn note(&self, name: &str) -> Option<&str> {
        self.notes.iter().find(|(have, _)| **have == *name).map(|(_, value)| &**value)
    }

    pub fn set_note(&mut self, name: &str, value: &str) -> Result<(), OverLimit> {
        let value = checked(value, "the note", VALUE_LEN_MAX)?;
        put(&mut self.notes, name, value, "notes")?;
        self.decided.add(VerdictTopic::Note);
        Ok(())
    }

    /// Returns a rule's setting: `None` if there is none, `Some(None)` if a rule removed the
    /// variable.
    pub fn env(&self, name: &str) -> Option<Option<&str>> {
        self.env.iter().find(|(have, _)| **have == *name).map(|(_, value)| value.as_deref())
    }

    pub fn set_env(&mut self, name: &str, value: Option<&str>) -> Result<(), OverLimit> {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(OverLimit::Bad { what: "the variable's name", why: "is empty, or holds '=' or NUL" });
        }
        let value = value.map(|value| Self::value(value, "the variable")).transpose()?;
        put(&mut self.env, name, value, "variables")?;
        self.decided.add(VerdictTopic::Env);
        Ok(())
    }

    /// Leaves one decision out.
    pub(crate) fn refuse(&mut self, line: Option<u32>, message: &str) {
        if self.refused.len() < REFUSED_MAX {
            self.refused.push(RefusedDecision { line, message: message.to_owned() });
        }
    }

    pub(crate) fn take_refused(&mut self) -> Vec<RefusedDecision> {
        std::mem::take(&mut self.refused)
    }

    /// Adds one line for the error log.
    pub fn say(&mut self, level: LogLevel, text: &str) {
        if self.log.len() >= LOG_LINES_MAX {
            self.log_left_out = self.log_left_out.saturating_add(1);
            return;
        }
        let end = text.floor_char_boundary(LOG_LINE_LEN_MAX);
        self.log.push((level, text[..end].to_owned()));
    }

    /// Returns a text that is valid in paths, variables and header fields: bounded, without NUL or
    /// line ends.
    pub fn value(text: &str, what: &'static str) -> Result<Box<str>, OverLimit> {
        if text.contains(['\0', '\r', '\n']) {
            return Err(OverLimit::Bad { what, why: "holds NUL or the end of a line" });
        }
        checked(text, what, VALUE_LEN_MAX)
    }

    /// Returns the bytes of its texts, and the size of its lists, roughly.
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

    /// Ends one file's evaluation and records its decisions.
    pub(crate) fn spoken(&mut self, phase: RulePhase, file: &Arc<str>) {
        let decided = std::mem::take(&mut self.decided);
        if !decided.is_empty() && self.spoke.len() < SPOKE_MAX {
            self.spoke.push(DecidedBy { phase, file: Arc::clone(file), decided });
        }
    }

    /// Returns the state to restore if the coming evaluation fails. Nothing is copied while nothing
    /// was decided.
    pub(crate) fn checkpoint(&self) -> Option<Box<Self>> {
        (!self.is_silent()).then(|| Box::new(self.clone()))
    }

    /// Drops the decisions of a failed evaluation. Its log lines stay.
    pub(crate) fn roll_back(&mut self, checkpoint: Option<Box<Self>>) {
        let log = std::mem::take(&mut self.log);
        let log_left_out = self.log_left_out;
        *self = Self { log, log_left_out, ..checkpoint.map_or_else(Self::default, |before| *before) };
    }
}

fn checked(text: &str, what: &'static str, most: usize) -> Result<Box<str>, OverLimit> {
    if text.len() > most {
        return Err(OverLimit::TooLong { what, most });
    }
    Ok(text.into())
}

fn put<V>(list: &mut Vec<(Box<str>, V)>, name: &str, value: V, what: &'static str) -> Result<(), OverLimit> {
    if let Some((_, had)) = list.iter_mut().find(|(have, _)| **have == *name) {
        *had = value;
        return Ok(());
    }
    if list.len() >= NOTES_MAX {
        return Err(OverLimit::TooMany { what, most: NOTES_MAX });
    }
    list.push((checked(name, "a name", NAME_LEN_MAX)?, value));
    Ok(())
}

fn edit_header(edits: &mut Vec<HeaderEdit>, name: &str, action: HeaderAction) -> Result<(), OverLimit> {
    // RFC 9110, 5.6.2: a field's name is a token.
    let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err(OverLimit::Bad { what: "the header field's name", why: "is not a token of RFC 9110" });
    }
    let name = checked(name, "the header field's name", NAME_LEN_MAX)?;
    if let HeaderAction::Set(value) | HeaderAction::Add(value) = &action {
        Verdict::value(value, "the header field")?;
    }
    // A later edit of a name replaces the earlier ones, unless it only adds.
    if !matches!(action, HeaderAction::Add(_)) {
        edits.retain(|edit| !edit.name.eq_ignore_ascii_case(&name));
    }
    if edits.len() >= HEADER_EDITS_MAX {
        return Err(OverLimit::TooMany { what: "edits of header fields", most: HEADER_EDITS_MAX });
    }
    edits.push(HeaderEdit { name, action });
    Ok(())
}

// === impl Decided ===

impl TopicSet {
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn has(self, topic: VerdictTopic) -> bool {
        self.0 & topic.bit() != 0
    }

    pub fn topics(self) -> impl Iterator<Item = VerdictTopic> {
        VerdictTopic::ALL.into_iter().filter(move |topic| self.has(*topic))
    }

    fn add(&mut self, topic: VerdictTopic) {
        self.0 |= topic.bit();
    }
}

impl VerdictTopic {
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

//! Ruby's `Regexp` for rules, on the `regex` crate. One search takes time linear in the text,
//! whatever the pattern or the text. The watchdog of an evaluation ends no call into Rust, so each
//! has bounds of its own. The text's length and the program's size bound one search. CPU time
//! bounds a call that makes several.
//!
//! Look-around and back-references (`(?=`, `(?<!`, `\1`) do not exist there and raise when the rule
//! runs. `regexp.rb` has the Ruby half: `MatchData`, `$~`, and the methods of String. Not here: how
//! natives are called (`native`).

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::time::Duration;

use lru::LruCache;
use regex::bytes::{Captures, Regex, RegexBuilder};
use rustix::time::{ClockId, clock_gettime};

use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue, RubyPrelude};

/// Longest pattern, in bytes.
const PATTERN_LEN_MAX: usize = 4096;

/// Most compiled patterns of one thread; others are compiled again when they are used. With the
/// limits below they hold at most some 50 MiB. The few patterns of usual rules hold some 100 KiB.
const COMPILED_MAX: usize = 64;

/// Limits of one compiled pattern, in bytes: its program, and the cache it fills while searching.
const PROGRAM_LEN_MAX: usize = 256 << 10;
const SEARCH_CACHE_LEN_MAX: usize = 256 << 10;

/// Longest text that is searched, in bytes: by default, all that a client sends in a header
/// section. The worst patterns tried took 0.3 s for one search of it in a build without
/// optimization.
const TEXT_LEN_MAX: usize = 64 << 10;

/// CPU time of all searches of one call. Each of many matches may scan the whole rest of a text.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(100);

/// Most matches that one call returns.
const MATCHES_MAX: usize = 10_000;

/// Longest text that one replacement may make: the longest string of mruby.
const REPLACED_LEN_MAX: usize = 1 << 20;

pub const NATIVES: &[NativeMethod] = &[
    NativeMethod::method("Regexp", "initialize", initialize),
    NativeMethod::method("Regexp", "source", source),
    NativeMethod::method("Regexp", "options", options),
    NativeMethod::method("Regexp", "names", names),
    NativeMethod::method("Regexp", "match?", is_match),
    NativeMethod::method("Regexp", "__find", find),
    NativeMethod::method("Regexp", "__find_all", find_all),
    NativeMethod::method("Regexp", "__replace", replace),
    NativeMethod::method("Regexp", "__split", split),
    NativeMethod::singleton("Regexp", "escape", escape),
    NativeMethod::singleton("Regexp", "quote", escape),
];

pub const PRELUDE: RubyPrelude = RubyPrelude { file: "regexp.rb", source: include_str!("regexp.rb") };

/// State of a Regexp object; the compiled form is in `COMPILED`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RegexpPattern {
    source: Box<str>,
    options: u8,
}

/// Ruby's numbers of the options.
const IGNORE_CASE: u8 = 1;
const EXTENDED: u8 = 2;
/// The dot matches the end of a line, too.
const MULTI_LINE: u8 = 4;

thread_local! {
    static COMPILED: RefCell<LruCache<Rc<RegexpPattern>, Regex>> =
        RefCell::new(LruCache::new(const { NonZeroUsize::new(COMPILED_MAX).expect("not zero") }));
}

fn initialize<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    call.expect(1, 3)?;
    let source = call.text(0)?;
    if source.len() > PATTERN_LEN_MAX {
        return Err(NativeError::argument(format!(
            "a regular expression is longer than {PATTERN_LEN_MAX} bytes"
        )));
    }
    let pattern = Rc::new(RegexpPattern { source: source.into(), options: options_of(call.any(1))? });
    // A pattern that does not compile fails here, not where it is used.
    with_compiled(&pattern, |_| ())?;
    call.keep(pattern);
    Ok(NativeValue::Nil)
}

/// Returns the options of a literal (`"mi"`), or of `Regexp.new`: a number, or true for "ignore
/// case".
fn options_of(given: &NativeArg<'_>) -> Result<u8, NativeError> {
    match given {
        NativeArg::Nil | NativeArg::Bool(false) => Ok(0),
        NativeArg::Bool(true) => Ok(IGNORE_CASE),
        NativeArg::Int(bits) => Ok(u8::try_from(*bits & 7).unwrap_or(0)),
        NativeArg::Text(letters) => letters.iter().try_fold(0, |options, letter| match letter {
            b'i' => Ok(options | IGNORE_CASE),
            b'x' => Ok(options | EXTENDED),
            b'm' => Ok(options | MULTI_LINE),
            // Every literal is compiled once here, anyway.
            b'o' | b'u' | b'n' => Ok(options),
            other => Err(NativeError::argument(format!("'{}' is no option of Regexp", char::from(*other)))),
        }),
        other => Err(NativeError::wrong_type(format!("options of Regexp cannot be {}", other.kind()))),
    }
}

fn source<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    Ok(call.this::<Rc<RegexpPattern>>()?.source.to_string().into())
}

fn options<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    Ok(i64::from(call.this::<Rc<RegexpPattern>>()?.options).into())
}

fn names<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    with_regex(call, |regex| {
        let names = regex.capture_names().map(|name| name.map(str::to_owned).into());
        // The first is the whole match.
        NativeValue::List(names.skip(1).collect())
    })
}

fn is_match<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    let Some(text) = subject(call)? else { return Ok(NativeValue::Bool(false)) };
    with_regex(call, |regex| regex.is_match(text).into())
}

/// Returns the first match from a byte on. It is the character at which the match begins. After it
/// come the bytes at which it and each of its groups begin and end. A group that took no part has
/// -1.
fn find<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    let Some(text) = subject(call)? else { return Ok(NativeValue::Nil) };
    let from = if call.args().len() > 1 { usize::try_from(call.int(1)?).unwrap_or(usize::MAX) } else { 0 };
    if from > text.len() {
        return Ok(NativeValue::Nil);
    }
    with_regex(call, |regex| {
        regex
            .captures_at(text, from)
            .map_or(NativeValue::Nil, |found| NativeValue::List(places(text, &found)))
    })
}

/// Returns all matches that do not overlap, each in the form of `find`.
fn find_all<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    let Some(text) = subject(call)? else { return Ok(NativeValue::List(Vec::new())) };
    with_regex(call, |regex| {
        let clock = SearchClock::start();
        let all = regex.captures_iter(text).take(MATCHES_MAX);
        let listed = all.map(|found| clock.check().map(|()| NativeValue::List(places(text, &found))));
        listed.collect::<Result<_, _>>().map(NativeValue::List)
    })?
}

fn places<'a>(text: &[u8], found: &Captures<'_>) -> Vec<NativeValue<'a>> {
    let int = |at: usize| NativeValue::Int(i64::try_from(at).unwrap_or(i64::MAX));
    let begin = found.get(0).map_or(0, |whole| whole.start());
    // Continuation bytes of a character (10xxxxxx) are not counted.
    let characters = text[..begin].iter().filter(|b| **b & 0xC0 != 0x80).count();
    let groups = found.iter().flat_map(|group| match group {
        Some(group) => [int(group.start()), int(group.end())],
        None => [NativeValue::Int(-1), NativeValue::Int(-1)],
    });
    std::iter::once(int(characters)).chain(groups).collect()
}

/// Returns the text with the first match, or all, replaced; `\0` to `\9` and `\k<name>` refer to
/// groups.
fn replace<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    let Some(text) = subject(call)? else { return Ok(NativeValue::Nil) };
    let with = call.bytes(1)?;
    let all = *call.any(2) == NativeArg::Bool(true);
    with_regex(call, |regex| {
        let mut made = Vec::with_capacity(text.len());
        let mut rest = 0;
        let clock = SearchClock::start();
        for found in regex.captures_iter(text).take(if all { MATCHES_MAX } else { 1 }) {
            clock.check()?;
            let whole = found.get(0).expect("group 0 is the whole match");
            made.extend_from_slice(&text[rest..whole.start()]);
            expand(&found, with, &mut made);
            rest = whole.end();
            if made.len() > REPLACED_LEN_MAX {
                return Err(NativeError::argument(format!(
                    "the replaced text is longer than {REPLACED_LEN_MAX} bytes"
                )));
            }
        }
        made.extend_from_slice(&text[rest..]);
        Ok(NativeValue::from(into_text(made)))
    })?
}

fn expand(found: &Captures<'_>, with: &[u8], made: &mut Vec<u8>) {
    let mut rest = with;
    while let Some(at) = rest.iter().position(|b| *b == b'\\') {
        made.extend_from_slice(&rest[..at]);
        rest = &rest[at + 1..];
        let (group, taken) = match rest.first() {
            Some(digit @ b'0'..=b'9') => (found.get(usize::from(digit - b'0')), 1),
            Some(b'&') => (found.get(0), 1),
            Some(b'k') => match group_name(rest) {
                Some((name, taken)) => (found.name(name), taken),
                None => (None, 0),
            },
            Some(b'\\') => {
                made.push(b'\\');
                (None, 1)
            }
            _ => {
                made.push(b'\\');
                (None, 0)
            }
        };
        made.extend_from_slice(group.map_or(&[], |group| group.as_bytes()));
        rest = &rest[taken..];
    }
    made.extend_from_slice(rest);
}

/// Returns the name in `k<name>...`, and how many bytes it takes.
fn group_name(text: &[u8]) -> Option<(&str, usize)> {
    let inner = text.strip_prefix(b"k<")?;
    let end = inner.iter().position(|b| *b == b'>')?;
    Some((std::str::from_utf8(&inner[..end]).ok()?, end + 3))
}

/// Returns the parts between the matches, at most as many as a positive number says. The matches of
/// groups are between them.
fn split<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    let Some(text) = subject(call)? else { return Ok(NativeValue::List(Vec::new())) };
    let limit = usize::try_from(call.int(1)?).unwrap_or(0);
    let most = if limit == 0 { MATCHES_MAX } else { limit - 1 };
    with_regex(call, |regex| {
        let mut parts = Vec::new();
        let mut rest = 0;
        // An empty match at the beginning or end separates nothing.
        let parting = |found: &Captures<'_>| {
            found.get(0).is_some_and(|whole| !whole.is_empty() || (1..text.len()).contains(&whole.start()))
        };
        let clock = SearchClock::start();
        for found in regex.captures_iter(text).filter(parting).take(most) {
            clock.check()?;
            let whole = found.get(0).expect("group 0 is the whole match");
            parts.push(into_text(text[rest..whole.start()].to_vec()).into());
            parts.extend(
                found.iter().skip(1).flatten().map(|group| into_text(group.as_bytes().to_vec()).into()),
            );
            rest = whole.end();
        }
        parts.push(into_text(text[rest..].to_vec()).into());
        // As Ruby does without a limit.
        while limit == 0 && parts.last() == Some(&NativeValue::from("")) {
            parts.pop();
        }
        Ok(NativeValue::List(parts))
    })?
}

fn escape<'a>(call: &mut NativeCall<'a>) -> Result<NativeValue<'a>, NativeError> {
    call.expect(1, 1)?;
    Ok(regex::escape(call.word(0)?).into())
}

/// Returns the text to search; nil never matches.
fn subject<'a>(call: &NativeCall<'a>) -> Result<Option<&'a [u8]>, NativeError> {
    let text = match call.any(0) {
        NativeArg::Nil => return Ok(None),
        NativeArg::Symbol(name) => name.as_bytes(),
        _ => call.bytes(0)?,
    };
    if text.len() > TEXT_LEN_MAX {
        let why = format!("a text of {} bytes is searched, and {TEXT_LEN_MAX} are the most", text.len());
        return Err(NativeError::argument(why));
    }
    Ok(Some(text))
}

/// Bounds the searches of one call by this thread's CPU time.
struct SearchClock(Duration);

impl SearchClock {
    fn start() -> Self {
        Self(thread_time())
    }

    fn check(&self) -> Result<(), NativeError> {
        if thread_time().saturating_sub(self.0) > SEARCH_TIME_MAX {
            let most = SEARCH_TIME_MAX.as_millis();
            return Err(NativeError::runtime(format!(
                "searching took more than {most} ms of processor time"
            )));
        }
        Ok(())
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Makes a text of pieces of a Ruby string, which need not be UTF-8.
fn into_text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn with_regex<T>(call: &mut NativeCall<'_>, search: impl FnOnce(&Regex) -> T) -> Result<T, NativeError> {
    let pattern = Rc::clone(call.this::<Rc<RegexpPattern>>()?);
    with_compiled(&pattern, search)
}

fn with_compiled<T>(pattern: &Rc<RegexpPattern>, search: impl FnOnce(&Regex) -> T) -> Result<T, NativeError> {
    COMPILED.with_borrow_mut(|compiled| {
        let regex = compiled.try_get_or_insert(Rc::clone(pattern), || compile(pattern))?;
        Ok(search(regex))
    })
}

fn compile(pattern: &RegexpPattern) -> Result<Regex, NativeError> {
    let has = |option| pattern.options & option != 0;
    RegexBuilder::new(&translate(&pattern.source))
        .case_insensitive(has(IGNORE_CASE))
        .ignore_whitespace(has(EXTENDED))
        .dot_matches_new_line(has(MULTI_LINE))
        // In Ruby `^` and `$` always match at a line's ends.
        .multi_line(true)
        .size_limit(PROGRAM_LEN_MAX)
        .dfa_size_limit(SEARCH_CACHE_LEN_MAX)
        .build()
        .map_err(|error| {
            let why = error.to_string();
            // The first lines of a syntax error draw the pattern; the last one says what is wrong.
            let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            NativeError::argument(format!("/{}/: {why}", pattern.source))
        })
}

/// Returns whether this is a valid pattern.
pub(crate) fn is_pattern(source: &str, options: u8) -> bool {
    compile(&RegexpPattern { source: source.into(), options }).is_ok()
}

/// Translates Ruby's syntax to that of the `regex` crate.
fn translate(source: &str) -> String {
    let mut made = String::with_capacity(source.len());
    // If one group has a name, those without one capture nothing.
    let has_names =
        source.split("(?<").skip(1).any(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'));
    let mut class_depth = 0_usize;
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '\\' => {
                let escaped = rest[1..].chars().next();
                match escaped {
                    Some('h') if class_depth > 0 => made.push_str("0-9a-fA-F"),
                    Some('h') => made.push_str("[0-9a-fA-F]"),
                    Some('H') => made.push_str("[^0-9a-fA-F]"),
                    Some('Z') => made.push_str(r"(?:\n?\z)"),
                    Some('e') => made.push_str(r"\x1B"),
                    Some(other) => made.extend(['\\', other]),
                    None => made.push('\\'),
                }
                1 + escaped.map_or(0, char::len_utf8)
            }
            '(' if class_depth == 0 => {
                let group = inline_options(rest);
                made.push_str(&group.replace('m', "s"));
                if has_names && !rest[1..].starts_with('?') {
                    made.push_str("?:");
                }
                group.len()
            }
            other => {
                match other {
                    '[' => class_depth += 1,
                    ']' => class_depth = class_depth.saturating_sub(1),
                    _ => {}
                }
                made.push(other);
                other.len_utf8()
            }
        };
        rest = &rest[len..];
    }
    made
}

/// Returns `(?mi-x` at the beginning of a text that sets options; otherwise the parenthesis alone.
fn inline_options(text: &str) -> &str {
    let is_option = |c: char| matches!(c, 'm' | 'i' | 'x' | '-');
    let options = text.strip_prefix("(?").unwrap_or_default();
    let len = options.find(|c| !is_option(c)).unwrap_or(options.len());
    match options[len..].chars().next() {
        Some(':' | ')') if len > 0 => &text[..2 + len],
        _ => "(",
    }
}

#[cfg(test)]
mod tests;

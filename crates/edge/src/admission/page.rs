//! What those who must come back see: a page for people, in their language, or a problem document for programs.
//!
//! The page needs nothing else: style and script are in it, allowed by their hash alone, and without scripts it works by
//! reloading. It counts down, listens for the call of its holder, and lets people in by itself. What they were about to send
//! is sent again by their browser when they say so. Not here: whether there is a page at all and its header fields (`turned`), the
//! stream it listens to (`events`), who asks for what (`page/asked`), the wording (`page/words`).

mod asked;
mod words;

use std::borrow::Cow;
use std::fmt::Write;
use std::ops::Range;
use std::sync::LazyLock;

use nagaya_admission::Moment;
use nagaya_base::Code;
use ring::digest::{SHA256, digest};

pub use self::asked::{Language, is_crawler, language, wants_html};
use self::words::Words;

const HTML: &str = include_str!("page/wait.html");
const STYLE: &str = include_str!("page/wait.css");
const SCRIPT: &str = include_str!("page/wait.js");

/// The page with its style and script, and the policy that allows just these.
static PAGE: LazyLock<(String, String)> = LazyLock::new(|| {
    let page = fill(HTML, |name| match name {
        "style" => Some(Cow::Borrowed(STYLE)),
        "script" => Some(Cow::Borrowed(SCRIPT)),
        _ => None,
    });
    let hash = |text: &str| base64(digest(&SHA256, text.as_bytes()).as_ref());
    // Nothing about forms: browsers hold to it when they repeat what was sent, and to where the site then leads.
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; \
         base-uri 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT),
    );
    (page, policy)
});

/// What there is to tell.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The host name that was asked for.
    pub site: &'a str,
    /// Requests that go first.
    pub ahead: u32,
    /// Expected wait; `None`: not known.
    pub wait_seconds: Option<u32>,
    /// The wait will hardly be longer; `None`: not known.
    pub at_most_seconds: Option<u32>,
    /// When to come back at the latest, and how long the place is kept from then on.
    pub begins_in_seconds: u32,
    pub window_seconds: u32,
    /// Path of the stream that calls the page.
    pub events_path: &'a str,
    /// The request is one that a browser repeats only when its user says so.
    pub is_post: bool,
    pub language: Language,
    pub request_id: &'a str,
}

/// The value of `Content-Security-Policy` that goes with [`render`].
pub fn csp() -> &'static str {
    &PAGE.1
}

/// The waiting page.
pub fn render(facts: &Facts<'_>) -> String {
    let words = Words::of(facts.language);
    fill(&PAGE.0, |name| {
        Some(match name {
            "lang" => facts.language.tag().into(),
            "post" => if facts.is_post { "yes" } else { "no" }.into(),
            "refresh" => refresh(facts).into(),
            "title" => escape(&fill_in(words.title, &[facts.site])).into_owned().into(),
            "busy" => escape(&fill_in(words.busy, &[facts.site])).into_owned().into(),
            "place" => words.place(facts.ahead).into(),
            "clock" => words.clock(facts.wait_seconds, facts.at_most_seconds).into(),
            "kept" => fill_in(words.kept, &[&words.time(facts.window_seconds)]).into(),
            "with" => if facts.is_post { words.with_post } else { words.with_get }.into(),
            "without" => if facts.is_post { words.without_post } else { words.without_get }.into(),
            "turn" => if facts.is_post { words.turn_post } else { words.turn_get }.into(),
            _ => return words.get(name).map(Cow::Borrowed).or_else(|| placeholder(name, facts)),
        })
    })
}

/// By which the page comes again without scripts. With them nothing else must: two that ask at the same time break off what
/// one of them has begun, and browsers take a `Refresh` of an address with a fragment for a jump within the page.
fn refresh(facts: &Facts<'_>) -> String {
    // What was sent is lost by it.
    if facts.is_post {
        return String::new();
    }
    format!("<meta http-equiv=\"refresh\" content=\"{}\">", facts.begins_in_seconds)
}

/// A site's own waiting page: `template` with these placeholders filled, escaped for text and attributes of HTML.
///
/// | placeholder | what |
/// |---|---|
/// | `{{ahead}}` | requests that go first |
/// | `{{wait}}` | expected wait in seconds; empty if it is not known |
/// | `{{at_most}}` | seconds that the wait will hardly exceed; empty if not known |
/// | `{{begins_in}}` | seconds until its holder may come at the latest |
/// | `{{events}}` | path of the event stream: `come` when it is the holder's turn, `place` with JSON of `ahead`, `wait_seconds`, `at_most_seconds`, `begins_in_seconds` |
/// | `{{request}}` | the request's id, to be found in the log |
///
/// Others are left as they are.
pub fn render_own(template: &str, facts: &Facts<'_>) -> String {
    fill(template, |name| placeholder(name, facts))
}

/// The problem document (RFC 9457) for programs, with the code of the refusal: `slot` is that of the ticket by the wall clock. `not_before` and `not_after` are
/// seconds since the Unix epoch.
pub fn problem_json(facts: &Facts<'_>, ticket: &str, slot: &Range<Moment>, code: Code) -> String {
    let seconds = |moment: Moment| moment.0.div_ceil(1_000_000);
    serde_json::json!({
        "type": format!("urn:nagaya:{code}"),
        "title": "Come back with this ticket",
        "status": 503,
        "detail": format!(
            "{} is busy. A slot is reserved: come back in {} seconds with the ticket in the header field Nagaya-Ticket.",
            facts.site, facts.begins_in_seconds,
        ),
        "code": code.to_string(),
        "position": u64::from(facts.ahead) + 1,
        "predicted_wait_seconds": facts.wait_seconds,
        "at_most_seconds": facts.at_most_seconds,
        "ticket": ticket,
        "not_before": seconds(slot.start),
        "not_after": seconds(slot.end),
        "request": facts.request_id,
    })
    .to_string()
}

fn placeholder<'a>(name: &str, facts: &Facts<'a>) -> Option<Cow<'a, str>> {
    let number = |seconds: Option<u32>| seconds.map_or(String::new(), |seconds| seconds.to_string());
    Some(match name {
        "ahead" => facts.ahead.to_string().into(),
        "wait" => number(facts.wait_seconds).into(),
        "at_most" => number(facts.at_most_seconds).into(),
        "begins_in" => facts.begins_in_seconds.to_string().into(),
        "events" => escape(facts.events_path),
        "request" => escape(facts.request_id),
        _ => return None,
    })
}

/// Replaces each `{{name}}` of `template` for which there is a value. Values are not looked into again.
fn fill<'a>(template: &str, value: impl Fn(&str) -> Option<Cow<'a, str>>) -> String {
    let mut out = String::with_capacity(template.len() + 2048);
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        out.push_str(before);
        let filled = after.split_once("}}").and_then(|(name, behind)| Some((value(name)?, behind)));
        rest = if let Some((text, behind)) = filled {
            out.push_str(&text);
            behind
        } else {
            out.push_str("{{");
            after
        };
    }
    out.push_str(rest);
    out
}

/// Replaces each `{}` by the next of the values.
fn fill_in(text: &str, values: &[&str]) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    let mut values = values.iter();
    for (at, part) in text.split("{}").enumerate() {
        if at > 0 {
            out.push_str(values.next().unwrap_or(&""));
        }
        out.push_str(part);
    }
    out
}

/// Escapes what would be markup in text or in a quoted attribute.
fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '"', '\'']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' | '<' | '>' | '"' | '\'' => {
                write!(out, "&#{};", u32::from(c)).expect("a string takes everything");
            }
            _ => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// RFC 4648 section 4, with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let at = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for place in 0..4 {
            let sextet = (bits >> (18 - 6 * place)) & 63;
            out.push(if place > group.len() { '=' } else { char::from(ALPHABET[sextet as usize]) });
        }
    }
    out
}

#[cfg(test)]
mod tests;

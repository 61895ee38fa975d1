//! Renders the response for clients that must come back, with a ticket or without. People get a
//! page in their language, programs a problem document.
//!
//! The page needs no other file. It contains style and script, which are allowed by their hash
//! alone. Without scripts it works by reloading. It counts down, listens for the call of its
//! holder, and lets people in by itself. If people confirm, their browser sends again what they
//! were about to send. Not here: whether there is a page at all and its header fields (`deferral`),
//! the stream it listens to (`events`), the client and its request (`page/asked`), the wording
//! (`page/words`).

use std::borrow::Cow;
use std::fmt::Write;
use std::ops::Range;
use std::sync::LazyLock;

use nagaya_admission::Moment;
use nagaya_base::Code;
use ring::digest::{SHA256, digest};

use crate::admission::page::messages::PageMessages;
use crate::admission::page::negotiation::PageLanguage;

const HTML: &str = include_str!("page/wait.html");
const STYLE: &str = concat!(include_str!("../http/base.css"), include_str!("page/wait.css"));
const SCRIPT: &str = include_str!("page/wait.js");

/// The page with its style and script, and the policy that allows only these.
static PAGE: LazyLock<(String, String)> = LazyLock::new(|| {
    let page = fill(HTML, |name| match name {
        "style" => Some(Cow::Borrowed(STYLE)),
        "script" => Some(Cow::Borrowed(SCRIPT)),
        _ => None,
    });
    let hash = |text: &str| base64(digest(&SHA256, text.as_bytes()).as_ref());
    // The policy has no directive about forms. Browsers would apply it to the repeated request,
    // and to its redirects.
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; \
         base-uri 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT),
    );
    (page, policy)
});

/// Data of the page.
#[derive(Debug, Clone, Copy)]
pub struct PageFacts<'a> {
    /// The requested host name.
    pub site: &'a str,
    /// Number of requests that go first. `None` if it is not known.
    pub ahead: Option<u32>,
    /// Expected wait. `None` if it is not known.
    pub wait_seconds: Option<u32>,
    /// Probable upper bound of the wait. `None` if it is not known.
    pub at_most_seconds: Option<u32>,
    /// Time to come back: at the latest with a ticket, at the earliest without one.
    pub begins_in_seconds: u32,
    /// `None` if nothing is promised.
    pub kept: Option<TicketOffer<'a>>,
    /// A browser repeats the request only when its user agrees.
    pub is_post: bool,
    pub language: PageLanguage,
    pub request_id: &'a str,
}

/// Additional data with a ticket.
#[derive(Debug, Clone, Copy)]
pub struct TicketOffer<'a> {
    /// Time for which the place is kept once the holder may come.
    pub window_seconds: u32,
    /// Path of the stream that calls the page.
    pub events_path: &'a str,
}

/// A ticket for programs.
pub struct TicketView<'a> {
    pub text: &'a str,
    /// Its slot by the wall clock.
    pub slot: Range<Moment>,
}

/// Returns the value of `Content-Security-Policy` that goes with [`render`].
pub fn csp() -> &'static str {
    &PAGE.1
}

/// Returns the waiting page.
pub fn render(facts: &PageFacts<'_>) -> String {
    let words = PageMessages::of(facts.language, facts.kept.is_some());
    // Without a place there is no turn to wait for. The page counts down to its next attempt.
    let again = PageFacts { wait_seconds: Some(facts.begins_in_seconds), at_most_seconds: None, ..*facts };
    let facts = if facts.kept.is_some() { facts } else { &again };
    let kept = || facts.kept.map(|kept| fill_in(words.kept, &[&words.time(kept.window_seconds)]));
    fill(&PAGE.0, |name| {
        Some(match name {
            "lang" => facts.language.tag().into(),
            "post" => if facts.is_post { "yes" } else { "no" }.into(),
            "refresh" => refresh(facts).into(),
            "title" => escape(&fill_in(words.title, &[facts.site])).into_owned().into(),
            "busy" => escape(&fill_in(words.busy, &[facts.site])).into_owned().into(),
            "place" => facts.ahead.map(|ahead| words.place(ahead)).unwrap_or_default().into(),
            "clock" => words.clock(facts.wait_seconds, facts.at_most_seconds).into(),
            "kept" => kept().unwrap_or_default().into(),
            "with" => if facts.is_post { words.with_post } else { words.with_get }.into(),
            "without" => if facts.is_post { words.without_post } else { words.without_get }.into(),
            "turn" => if facts.is_post { words.turn_post } else { words.turn_get }.into(),
            _ => return words.get(name).map(Cow::Borrowed).or_else(|| placeholder(name, facts)),
        })
    })
}

/// Returns the reload for pages without scripts. With scripts nothing else may reload. Two
/// requests at the same time would cancel each other. Browsers treat a `Refresh` of an address
/// with a fragment as a jump within the page.
fn refresh(facts: &PageFacts<'_>) -> String {
    // A reload would lose the sent form.
    if facts.is_post {
        return String::new();
    }
    format!("<meta http-equiv=\"refresh\" content=\"{}\">", facts.begins_in_seconds)
}

/// Returns a site's own waiting page: `template` with these placeholders filled, escaped for text
/// and attributes of HTML.
///
/// | placeholder | value |
/// |---|---|
/// | `{{ahead}}` | requests that go first; empty if it is not known |
/// | `{{wait}}` | expected wait in seconds; empty if it is not known |
/// | `{{at_most}}` | probable upper bound of the wait in seconds; empty if not known |
/// | `{{begins_in}}` | seconds until its holder may come, or until the next attempt |
/// | `{{events}}` | path of the event stream; empty without a ticket |
/// | `{{request}}` | the request's id, to be found in the log |
///
/// With a ticket, `{{begins_in}}` is the latest time, without one it is the next attempt. The
/// stream sends `come` when it is the holder's turn. It sends `place` with JSON of `ahead`,
/// `wait_seconds`, `at_most_seconds` and `begins_in_seconds`. Other placeholders stay as they
/// are.
pub fn render_own(template: &str, facts: &PageFacts<'_>) -> String {
    fill(template, |name| placeholder(name, facts))
}

/// Returns the problem document (RFC 9457) for programs, with the code of the refusal.
/// `not_before` and `not_after` of a ticket are seconds since the Unix epoch.
pub fn problem_json(facts: &PageFacts<'_>, slip: Option<&TicketView<'_>>, code: Code) -> String {
    let seconds = facts.begins_in_seconds;
    let (title, then) = if slip.is_some() {
        (
            "Come back with this ticket",
            format!(
                "A slot is reserved: come back in {seconds} seconds with the ticket in the header field Nagaya-Ticket."
            ),
        )
    } else {
        ("Come back later", format!("No slot could be reserved: come back in {seconds} seconds."))
    };
    let mut document = serde_json::json!({
        "type": format!("urn:nagaya:{code}"),
        "title": title,
        "status": 503,
        "detail": format!("{} is busy. {then}", facts.site),
        "code": code.to_string(),
        "position": facts.ahead.map(|ahead| u64::from(ahead) + 1),
        "predicted_wait_seconds": facts.wait_seconds,
        "at_most_seconds": facts.at_most_seconds,
        "request": facts.request_id,
    });
    if let Some(TicketView { text, slot }) = slip {
        let seconds = |moment: Moment| moment.0.div_ceil(1_000_000);
        document["ticket"] = (*text).into();
        document["not_before"] = seconds(slot.start).into();
        document["not_after"] = seconds(slot.end).into();
    }
    document.to_string()
}

/// Returns the problem document for a request whose site had no place.
pub fn unplaced_json(site: &str, request: &str, code: Code, again_in: u32, wait: Option<u32>) -> String {
    let document = serde_json::json!({
        "type": format!("urn:nagaya:{code}"),
        "title": "Come back later",
        "status": 503,
        "detail": format!("The application of {site} cannot be run at this moment: come back in {again_in} seconds."),
        "code": code.to_string(),
        "predicted_wait_seconds": wait,
        "request": request,
    });
    document.to_string()
}

fn placeholder<'a>(name: &str, facts: &PageFacts<'a>) -> Option<Cow<'a, str>> {
    let number = |number: Option<u32>| number.map_or(String::new(), |number| number.to_string());
    Some(match name {
        "ahead" => number(facts.ahead).into(),
        "wait" => number(facts.wait_seconds).into(),
        "at_most" => number(facts.at_most_seconds).into(),
        "begins_in" => facts.begins_in_seconds.to_string().into(),
        "events" => escape(facts.kept.map_or("", |kept| kept.events_path)),
        "request" => escape(facts.request_id),
        _ => return None,
    })
}

/// Replaces each `{{name}}` of `template` for which there is a value. Values are not expanded
/// again.
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

/// Encodes by RFC 4648 section 4, with padding.
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

pub mod messages;
pub mod negotiation;
#[cfg(test)]
mod tests;

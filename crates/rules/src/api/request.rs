//! Queries of `Apache`, `Nginx` and nagaya's own words about a request, in one place. They cover
//! texts with the changes of earlier rules, header fields with the edits of rules, answers and log
//! lines.
//!
//! Not here: the names that rules use (`apache`, `nginx`, `dsl`).

use std::borrow::Cow;

use crate::facts::{NumberFact, TextFact};
use crate::native::{NativeArg, NativeCall, NativeError, NativeValue};
use crate::verdict::{HeaderAction, HeaderEdit, LogLevel, Verdict};

pub type Given<'a> = Result<NativeValue<'a>, NativeError>;

/// Returns a text about the request, or a rule's replacement for it.
pub fn text<'a>(call: &NativeCall<'a>, text: TextFact) -> Given<'a> {
    Ok(read(call, text).into())
}

pub fn read<'a>(call: &NativeCall<'a>, text: TextFact) -> Option<Cow<'a, str>> {
    let rewrites = &call.verdict.rewrites;
    let rewritten = match text {
        TextFact::Path => &rewrites.path,
        TextFact::Query => &rewrites.query,
        TextFact::DocumentRoot => &rewrites.document_root,
        TextFact::Filename => &rewrites.filename,
        TextFact::User => &rewrites.user,
        TextFact::ContentType => &rewrites.content_type,
        _ => &None,
    };
    match rewritten {
        Some(rewritten) => Some(Cow::Owned(rewritten.as_ref().to_owned())),
        None if text == TextFact::User => call.facts.text(text).or_else(|| claimed_user(call)),
        None => call.facts.text(text),
    }
}

/// Returns the user that a client claims by `Authorization: Basic` (RFC 7617). The password was not
/// checked.
fn claimed_user<'a>(call: &NativeCall<'a>) -> Option<Cow<'a, str>> {
    let field = field(call, HeaderDirection::In, "Authorization")?;
    let (scheme, credentials) = field.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("Basic") {
        return None;
    }
    let decoded = base64(credentials.trim())?;
    let end = decoded.iter().position(|b| *b == b':')?;
    let name = std::str::from_utf8(&decoded[..end]).ok()?;
    (!name.is_empty() && !name.contains(char::is_control)).then(|| Cow::Owned(name.to_owned()))
}

/// Decodes base64 (RFC 4648, section 4).
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut bits = 0_u32;
    let mut have = 0;
    for b in text.trim_end_matches('=').bytes() {
        let six = match b {
            b'A'..=b'Z' => b - b'A',
            b'a'..=b'z' => b - b'a' + 26,
            b'0'..=b'9' => b - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(six);
        have += 6;
        if have >= 8 {
            have -= 8;
            bytes.push((bits >> have) as u8);
            bits &= (1 << have) - 1;
        }
    }
    Some(bytes)
}

/// Returns a number about the request, or `unknown` if it is not known.
pub fn number<'a>(call: &NativeCall<'a>, number: NumberFact, unknown: i64) -> Given<'a> {
    Ok(NativeValue::Int(call.facts.number(number).unwrap_or(unknown)))
}

/// Returns the request line: `GET /page?x=1 HTTP/1.1`.
pub fn request_line<'a>(call: &NativeCall<'a>) -> Given<'a> {
    let part = |text| call.facts.text(text).unwrap_or_default();
    let method = part(TextFact::Method);
    let target = part(TextFact::RawTarget);
    let protocol = part(TextFact::Protocol);
    Ok(format!("{method} {target} {protocol}").into())
}

pub fn status<'a>(call: &NativeCall<'a>) -> Given<'a> {
    let status =
        call.verdict.rewrites.status.map(i64::from).or_else(|| call.facts.number(NumberFact::Status));
    Ok(NativeValue::Int(status.unwrap_or(200)))
}

/// Returns a rule's text for a field of the verdict: `None` if it gave nil.
pub fn given<'a>(call: &NativeCall<'a>, what: &'static str) -> Result<Option<Box<str>>, NativeError> {
    call.expect(1, 1)?;
    match call.any(0) {
        NativeArg::Nil => Ok(None),
        _ => Ok(Some(Verdict::value(call.text(0)?, what)?)),
    }
}

// === Header fields ===

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderDirection {
    In,
    Out,
}

/// `headers["Name"]`.
pub fn header<'a>(call: &NativeCall<'a>, direction: HeaderDirection) -> Given<'a> {
    call.expect(1, 1)?;
    Ok(field(call, direction, call.text(0)?).into())
}

pub fn field<'a>(call: &NativeCall<'a>, direction: HeaderDirection, name: &str) -> Option<Cow<'a, str>> {
    let (received, edits) = match direction {
        HeaderDirection::In => (call.facts.header_in(name), &call.verdict.headers_in),
        HeaderDirection::Out => (call.facts.header_out(name), &call.verdict.headers_out),
    };
    edits.iter().filter(|edit| edit.name.eq_ignore_ascii_case(name)).fold(received, edited)
}

fn edited<'a>(value: Option<Cow<'a, str>>, edit: &HeaderEdit) -> Option<Cow<'a, str>> {
    match (&edit.action, value) {
        (HeaderAction::Set(set), _) | (HeaderAction::Add(set), None) => {
            Some(Cow::Owned(set.as_ref().to_owned()))
        }
        (HeaderAction::Add(added), Some(value)) => Some(Cow::Owned(format!("{value}, {added}"))),
        (HeaderAction::Remove, _) => None,
    }
}

/// `headers["Name"] = value`; nil removes the field.
pub fn set_header<'a>(call: &mut NativeCall<'a>, direction: HeaderDirection) -> Given<'a> {
    call.expect(2, 2)?;
    let name = call.text(0)?;
    let action = match call.any(1) {
        NativeArg::Nil => HeaderAction::Remove,
        // Each cookie is a field of its own (RFC 6265, section 3).
        _ if direction == HeaderDirection::Out && name.eq_ignore_ascii_case("Set-Cookie") => {
            HeaderAction::Add(call.text(1)?.into())
        }
        _ => HeaderAction::Set(call.text(1)?.into()),
    };
    edit_header(call, direction, name, action)?;
    Ok(echo(call.any(1)))
}

/// `headers.delete("Name")`.
pub fn delete_header<'a>(call: &mut NativeCall<'a>, direction: HeaderDirection) -> Given<'a> {
    call.expect(1, 1)?;
    let name = call.text(0)?;
    let had = field(call, direction, name);
    edit_header(call, direction, name, HeaderAction::Remove)?;
    Ok(had.into())
}

pub fn edit_header(
    call: &mut NativeCall<'_>,
    direction: HeaderDirection,
    name: &str,
    action: HeaderAction,
) -> Result<(), NativeError> {
    match direction {
        HeaderDirection::In => call.verdict.edit_header_in(name, action)?,
        HeaderDirection::Out => call.verdict.edit_header_out(name, action)?,
    }
    Ok(())
}

/// Returns all fields as a Hash. Among fields with the same name the last one is in it, as upstream
/// has it.
pub fn all_headers<'a>(call: &NativeCall<'a>, direction: HeaderDirection) -> Given<'a> {
    let mut all: Vec<(Cow<'a, str>, String)> = Vec::new();
    let mut note = |name: &str, value: &str| match position(&all, name) {
        Some(at) => all[at].1 = value.to_owned(),
        None => all.push((Cow::Owned(name.to_owned()), value.to_owned())),
    };
    let edits = match direction {
        HeaderDirection::In => {
            call.facts.each_header_in(&mut note);
            &call.verdict.headers_in
        }
        HeaderDirection::Out => {
            call.facts.each_header_out(&mut note);
            &call.verdict.headers_out
        }
    };
    for edit in edits {
        let at = position(&all, &edit.name);
        match (&edit.action, at) {
            (HeaderAction::Set(value) | HeaderAction::Add(value), Some(at)) => {
                all[at].1 = value.as_ref().to_owned();
            }
            (HeaderAction::Set(value) | HeaderAction::Add(value), None) => {
                all.push((Cow::Owned(edit.name.as_ref().to_owned()), value.as_ref().to_owned()));
            }
            (HeaderAction::Remove, Some(at)) => drop(all.remove(at)),
            (HeaderAction::Remove, None) => {}
        }
    }
    Ok(NativeValue::Map(all.into_iter().map(|(name, value)| (name, NativeValue::from(value))).collect()))
}

fn position(all: &[(Cow<'_, str>, String)], name: &str) -> Option<usize> {
    all.iter().position(|(have, _)| have.eq_ignore_ascii_case(name))
}

// === Answers and the log ===

/// Takes back the status of an answer. The body that the rule wrote stays: it answers with 200.
pub fn go_on(call: &mut NativeCall<'_>) {
    match &mut call.verdict.answer {
        Some(answer) if !answer.body.is_empty() => answer.status = 0,
        Some(_) => call.verdict.clear_answer(),
        None => {}
    }
}

/// Sets the status of an answer from a rule.
pub fn answer_with(call: &mut NativeCall<'_>, status: i64) -> Result<(), NativeError> {
    let fits = u16::try_from(status)
        .map_err(|_| NativeError::argument(format!("{status} is not an HTTP status")))?;
    call.verdict.set_status(fits).map_err(|full| NativeError::argument(format!("{status}: {full}")))
}

/// `log(level, text)`; levels as Apache numbers them, 0 for emergencies and 7 for debugging.
pub fn log<'a>(call: &mut NativeCall<'a>, levels: &[LogLevel]) -> Result<String, NativeError> {
    let at = usize::try_from(call.int(0)?).unwrap_or(0);
    let level = levels.get(at).copied().unwrap_or(LogLevel::Debug);
    let text = String::from_utf8_lossy(call.bytes(1)?).into_owned();
    call.verdict.say(level, &text);
    Ok(text)
}

/// Returns a setter's value, for a rule that calls it with `send`.
pub fn echo<'a>(arg: &NativeArg<'a>) -> NativeValue<'a> {
    match arg {
        NativeArg::Bool(value) => NativeValue::Bool(*value),
        NativeArg::Int(value) => NativeValue::Int(*value),
        NativeArg::Float(value) => NativeValue::Float(*value),
        NativeArg::Text(bytes) => NativeValue::Text(String::from_utf8_lossy(bytes)),
        NativeArg::Symbol(name) => NativeValue::from(*name),
        NativeArg::Nil | NativeArg::List(_) | NativeArg::Map(_) | NativeArg::Other => NativeValue::Nil,
    }
}

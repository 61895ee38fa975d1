//! What `Apache`, `Nginx` and nagaya's own words ask about a request, in one place: texts as earlier rules left them,
//! header fields with the edits of rules, answers and lines of the log.
//!
//! Not here: the names under which rules ask (`apache`, `nginx`, `dsl`).

use std::borrow::Cow;

use crate::facts::{Number, Text};
use crate::native::{Arg, Call, NativeError, Value};
use crate::verdict::{HeaderAction, HeaderEdit, Level, Verdict};

pub type Given<'a> = Result<Value<'a>, NativeError>;

/// A text about the request, or what a rule has put in its place.
pub fn text<'a>(call: &Call<'a>, text: Text) -> Given<'a> {
    Ok(read(call, text).into())
}

pub fn read<'a>(call: &Call<'a>, text: Text) -> Option<Cow<'a, str>> {
    let rewrites = &call.verdict.rewrites;
    let rewritten = match text {
        Text::Path => &rewrites.path,
        Text::Query => &rewrites.query,
        Text::DocumentRoot => &rewrites.document_root,
        Text::Filename => &rewrites.filename,
        Text::User => &rewrites.user,
        Text::ContentType => &rewrites.content_type,
        _ => &None,
    };
    match rewritten {
        Some(rewritten) => Some(Cow::Owned(rewritten.as_ref().to_owned())),
        None if text == Text::User => call.facts.text(text).or_else(|| claimed_user(call)),
        None => call.facts.text(text),
    }
}

/// Whom a client says it is, by `Authorization: Basic` (RFC 7617). Nobody has checked the password.
fn claimed_user<'a>(call: &Call<'a>) -> Option<Cow<'a, str>> {
    let field = field(call, Direction::In, "Authorization")?;
    let (scheme, credentials) = field.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("Basic") {
        return None;
    }
    let decoded = base64(credentials.trim())?;
    let end = decoded.iter().position(|b| *b == b':')?;
    let name = std::str::from_utf8(&decoded[..end]).ok()?;
    (!name.is_empty() && !name.contains(char::is_control)).then(|| Cow::Owned(name.to_owned()))
}

/// RFC 4648, section 4.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut have) = (0_u32, 0);
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

/// A number about the request, with what stands in its place where it is not known.
pub fn number<'a>(call: &Call<'a>, number: Number, unknown: i64) -> Given<'a> {
    Ok(Value::Int(call.facts.number(number).unwrap_or(unknown)))
}

/// `GET /page?x=1 HTTP/1.1`.
pub fn request_line<'a>(call: &Call<'a>) -> Given<'a> {
    let part = |text| call.facts.text(text).unwrap_or_default();
    let (method, target, protocol) = (part(Text::Method), part(Text::RawTarget), part(Text::Protocol));
    Ok(format!("{method} {target} {protocol}").into())
}

pub fn status<'a>(call: &Call<'a>) -> Given<'a> {
    let status = call.verdict.rewrites.status.map(i64::from).or_else(|| call.facts.number(Number::Status));
    Ok(Value::Int(status.unwrap_or(200)))
}

/// A rule's text for a field of the verdict: `None` if it gave nil.
pub fn given<'a>(call: &Call<'a>, what: &'static str) -> Result<Option<Box<str>>, NativeError> {
    call.expect(1, 1)?;
    match call.any(0) {
        Arg::Nil => Ok(None),
        _ => Ok(Some(Verdict::value(call.text(0)?, what)?)),
    }
}

// === Header fields ===

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
}

/// `headers["Name"]`.
pub fn header<'a>(call: &Call<'a>, direction: Direction) -> Given<'a> {
    call.expect(1, 1)?;
    Ok(field(call, direction, call.text(0)?).into())
}

pub fn field<'a>(call: &Call<'a>, direction: Direction, name: &str) -> Option<Cow<'a, str>> {
    let (received, edits) = match direction {
        Direction::In => (call.facts.header_in(name), &call.verdict.headers_in),
        Direction::Out => (call.facts.header_out(name), &call.verdict.headers_out),
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
pub fn set_header<'a>(call: &mut Call<'a>, direction: Direction) -> Given<'a> {
    call.expect(2, 2)?;
    let name = call.text(0)?;
    let action = match call.any(1) {
        Arg::Nil => HeaderAction::Remove,
        // Each cookie is a field of its own (RFC 6265, section 3).
        _ if direction == Direction::Out && name.eq_ignore_ascii_case("Set-Cookie") => {
            HeaderAction::Add(call.text(1)?.into())
        }
        _ => HeaderAction::Set(call.text(1)?.into()),
    };
    edit_header(call, direction, name, action)?;
    Ok(echo(call.any(1)))
}

/// `headers.delete("Name")`.
pub fn delete_header<'a>(call: &mut Call<'a>, direction: Direction) -> Given<'a> {
    call.expect(1, 1)?;
    let name = call.text(0)?;
    let had = field(call, direction, name);
    edit_header(call, direction, name, HeaderAction::Remove)?;
    Ok(had.into())
}

pub fn edit_header(
    call: &mut Call<'_>,
    direction: Direction,
    name: &str,
    action: HeaderAction,
) -> Result<(), NativeError> {
    match direction {
        Direction::In => call.verdict.edit_header_in(name, action)?,
        Direction::Out => call.verdict.edit_header_out(name, action)?,
    }
    Ok(())
}

/// All fields as a Hash. Of fields with the same name the last is in it, as upstream has it.
pub fn all_headers<'a>(call: &Call<'a>, direction: Direction) -> Given<'a> {
    let mut all: Vec<(Cow<'a, str>, String)> = Vec::new();
    let mut note = |name: &str, value: &str| match position(&all, name) {
        Some(at) => all[at].1 = value.to_owned(),
        None => all.push((Cow::Owned(name.to_owned()), value.to_owned())),
    };
    let edits = match direction {
        Direction::In => {
            call.facts.each_header_in(&mut note);
            &call.verdict.headers_in
        }
        Direction::Out => {
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
    Ok(Value::Map(all.into_iter().map(|(name, value)| (name, Value::from(value))).collect()))
}

fn position(all: &[(Cow<'_, str>, String)], name: &str) -> Option<usize> {
    all.iter().position(|(have, _)| have.eq_ignore_ascii_case(name))
}

// === Answers and the log ===

/// Takes back the status of an answer. What the rule wrote stays: it answers with 200.
pub fn go_on(call: &mut Call<'_>) {
    match &mut call.verdict.answer {
        Some(answer) if !answer.body.is_empty() => answer.status = 0,
        Some(_) => call.verdict.clear_answer(),
        None => {}
    }
}

/// The status of an answer as a rule gave it.
pub fn answer_with(call: &mut Call<'_>, status: i64) -> Result<(), NativeError> {
    let fits = u16::try_from(status)
        .map_err(|_| NativeError::argument(format!("{status} is not an HTTP status")))?;
    call.verdict.set_status(fits).map_err(|full| NativeError::argument(format!("{status}: {full}")))
}

/// `log(level, text)`; levels as Apache numbers them, 0 for emergencies and 7 for debugging.
pub fn log<'a>(call: &mut Call<'a>, levels: &[Level]) -> Result<String, NativeError> {
    let at = usize::try_from(call.int(0)?).unwrap_or(0);
    let level = levels.get(at).copied().unwrap_or(Level::Debug);
    let text = String::from_utf8_lossy(call.bytes(1)?).into_owned();
    call.verdict.say(level, &text);
    Ok(text)
}

/// A setter's value, for a rule that calls it with `send`.
pub fn echo<'a>(arg: &Arg<'a>) -> Value<'a> {
    match arg {
        Arg::Bool(value) => Value::Bool(*value),
        Arg::Int(value) => Value::Int(*value),
        Arg::Float(value) => Value::Float(*value),
        Arg::Text(bytes) => Value::Text(String::from_utf8_lossy(bytes)),
        Arg::Symbol(name) => Value::from(*name),
        Arg::Nil | Arg::List(_) | Arg::Map(_) | Arg::Other => Value::Nil,
    }
}

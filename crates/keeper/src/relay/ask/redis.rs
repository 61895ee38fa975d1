//! The protocol of Redis and Valkey, as far as one query needs it.
//!
//! Source: "Redis serialization protocol specification", RESP2. Words of a command are separated by
//! white space.

use std::io::{Read, Write};

use super::answer::{AskError, BoundedExchange, TOO_LONG};

const NOT_REDIS: AskError = AskError::Wrong("what listens there is not Redis");

/// Maximum length of a line with a kind, a number or an error, bytes.
const LINE_LEN_MAX: usize = 1024;

pub fn ask<S: Read + Write>(
    answer: &mut BoundedExchange<S>,
    database: Option<&str>,
    question: &str,
) -> Result<(), AskError> {
    if let Some(number) = database {
        command(answer, &["SELECT", number])?;
        reply(answer)?;
        answer.said.clear();
    }
    command(answer, &question.split_whitespace().collect::<Vec<_>>())?;
    reply(answer)
}

fn command<S: Read + Write>(answer: &mut BoundedExchange<S>, words: &[&str]) -> Result<(), AskError> {
    let mut text = format!("*{}\r\n", words.len());
    text.extend(words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())));
    answer.write(text.as_bytes())
}

/// Reads one complete reply, with all nested parts.
fn reply<S: Read + Write>(answer: &mut BoundedExchange<S>) -> Result<(), AskError> {
    let mut values: usize = 1;
    while values > 0 {
        values -= 1;
        let line = line(answer)?;
        let (kind, text) = line.split_first().ok_or(NOT_REDIS)?;
        let number = || str::from_utf8(text).ok()?.parse::<i64>().ok();
        match kind {
            b'+' | b':' => {}
            b'-' => return Err(AskError::refused(text)),
            // -1: there is none.
            b'$' | b'*' if number() == Some(-1) => {}
            b'$' => {
                let len = number().and_then(|len| usize::try_from(len).ok()).ok_or(NOT_REDIS)?;
                let text = answer.read(len.checked_add(2).ok_or(TOO_LONG)?)?;
                answer.said.extend(text);
            }
            b'*' => {
                let more = number().and_then(|count| usize::try_from(count).ok()).ok_or(NOT_REDIS)?;
                values = values.checked_add(more).ok_or(TOO_LONG)?;
            }
            _ => return Err(NOT_REDIS),
        }
    }
    Ok(())
}

/// Reads a line without its end. It is a part of the response.
fn line<S: Read + Write>(answer: &mut BoundedExchange<S>) -> Result<Vec<u8>, AskError> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        if line.len() > LINE_LEN_MAX {
            return Err(NOT_REDIS);
        }
        line.extend(answer.read(1)?);
    }
    answer.said.extend(&line);
    line.truncate(line.len() - 2);
    Ok(line)
}

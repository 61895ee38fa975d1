//! PostgreSQL's protocol, as far as one query needs it.
//!
//! Source: "Frontend/Backend Protocol", version 3.0, of its documentation.

use std::io::{Read, Write};

use super::answer::{AskError, BoundedExchange, NO_ROWS, WANTS_PASSWORD};

const VERSION: u32 = 196_608;

const NOT_POSTGRESQL: AskError = AskError::Wrong("what listens there is not PostgreSQL");

pub fn ask<S: Read + Write>(
    answer: &mut BoundedExchange<S>,
    user: &str,
    database: &str,
    question: &str,
) -> Result<(), AskError> {
    let pairs = ["user", user, "database", database, "application_name", "nagaya"];
    let mut body = VERSION.to_be_bytes().to_vec();
    pairs.iter().for_each(|text| put(&mut body, text));
    body.push(0);
    answer.write(&[&len_of(&body)?, &body[..]].concat())?;
    loop {
        match message(answer)? {
            (b'R', said) if said == [0; 4] => {}
            (b'R', _) => return Err(WANTS_PASSWORD),
            (b'Z', _) => break,
            (b'S' | b'K' | b'N' | b'v', _) => {}
            _ => return Err(NOT_POSTGRESQL),
        }
    }
    let mut text = Vec::new();
    put(&mut text, question);
    answer.write(&[b"Q", &len_of(&text)?[..], &text].concat())?;
    let mut has_rows = false;
    loop {
        match message(answer)? {
            (b'T', _) => has_rows = true,
            (b'D', row) => {
                answer.said.extend(len_of(&row)?);
                answer.said.extend(row);
            }
            (b'Z', _) if has_rows => {
                // The database need not wait for it.
                let _ = answer.write(b"X\0\0\0\x04");
                return Ok(());
            }
            (b'Z', _) => return Err(NO_ROWS),
            (b'C' | b'I' | b'N' | b'S' | b'A', _) => {}
            _ => return Err(AskError::Wrong("the question cannot be answered by rows")),
        }
    }
}

/// Returns its kind and its body. A message with an error is an `Err`.
fn message<S: Read + Write>(answer: &mut BoundedExchange<S>) -> Result<(u8, Vec<u8>), AskError> {
    let head = answer.read(5)?;
    let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    let len = usize::try_from(len).ok().and_then(|len| len.checked_sub(4)).ok_or(NOT_POSTGRESQL)?;
    let said = answer.read(len)?;
    if head[0] == b'E' {
        // Fields, each with a letter first; 'M' is the message.
        let words = said.split(|byte| *byte == 0).find_map(|field| field.strip_prefix(b"M"));
        return Err(AskError::refused(words.unwrap_or_default()));
    }
    Ok((head[0], said))
}

/// Returns the length with its own four bytes.
fn len_of(body: &[u8]) -> Result<[u8; 4], AskError> {
    Ok(u32::try_from(body.len() + 4).map_err(AskError::from_display)?.to_be_bytes())
}

fn put(body: &mut Vec<u8>, text: &str) {
    body.extend(text.as_bytes());
    body.push(0);
}

//! MySQL's protocol, as far as one query needs it: MySQL and MariaDB.
//!
//! Source: "Client/Server Protocol" of MariaDB's documentation. Compression, TLS, several
//! statements and `LOAD DATA LOCAL` are not asked for, so that a server may not begin them either.

use std::io::{Read, Write};

use super::answer::{AskError, BoundedExchange, NO_ROWS, TOO_LONG, WANTS_PASSWORD};

/// `CLIENT_PROTOCOL_41`, `CLIENT_SECURE_CONNECTION`, `CLIENT_PLUGIN_AUTH`.
const CAPABILITIES: u32 = 0x200 | 0x8000 | 0x8_0000;
const CONNECT_WITH_DB: u32 = 0x8;

/// `utf8mb4_general_ci`.
const CHARACTERS: u8 = 45;

const PROTOCOL: u8 = 10;
const COM_QUERY: u8 = 3;
const COM_QUIT: u8 = 1;

/// First bytes of packets.
const OK: u8 = 0;
const MORE_DATA: u8 = 1;
const LOCAL_FILE: u8 = 0xfb;
const EOF: u8 = 0xfe;
const ERROR: u8 = 0xff;

/// Maximum number of authentication methods that a server may try one after the other.
const SWITCHES_MAX: usize = 4;

/// A packet of this length continues in the next one: it is longer than any response here.
const LEN_MAX: usize = 0xff_ffff;

const NOT_MYSQL: AskError = AskError::Wrong("what listens there is not MySQL or MariaDB");

pub fn ask<S: Read + Write>(
    answer: &mut BoundedExchange<S>,
    user: &str,
    database: Option<&str>,
    question: &str,
) -> Result<(), AskError> {
    log_in(answer, user, database)?;
    send(answer, 0, &[&[COM_QUERY], question.as_bytes()])?;
    let (_, head) = packet(answer)?;
    match head.first() {
        Some(&OK) | None => return Err(NO_ROWS),
        Some(&LOCAL_FILE) => return Err(AskError::Wrong("the database wants a file instead of answering")),
        _ => {}
    }
    // Names and types of columns, until a packet that ends them; then rows, likewise.
    while !is_end(&packet(answer)?.1) {}
    loop {
        let row = packet(answer)?.1;
        if is_end(&row) {
            // The database need not wait for it.
            let _ = send(answer, 0, &[&[COM_QUIT]]);
            return Ok(());
        }
        answer.said.extend(u32::try_from(row.len()).unwrap_or(u32::MAX).to_le_bytes());
        answer.said.extend(row);
    }
}

fn log_in<S: Read + Write>(
    answer: &mut BoundedExchange<S>,
    user: &str,
    database: Option<&str>,
) -> Result<(), AskError> {
    let head = answer.read(4)?;
    // Its number, and a length that fits one packet. Any other text would be read as a long packet.
    if head[3] != 0 || head[2] != 0 {
        return Err(NOT_MYSQL);
    }
    let (number, greeting) = body_of(answer, &head)?;
    if greeting.first() != Some(&PROTOCOL) {
        return Err(NOT_MYSQL);
    }
    let capabilities = CAPABILITIES | if database.is_some() { CONNECT_WITH_DB } else { 0 };
    let packet_max = u32::try_from(LEN_MAX).unwrap_or(u32::MAX);
    let mut body = [&capabilities.to_le_bytes()[..], &packet_max.to_le_bytes(), &[CHARACTERS]].concat();
    body.extend([0; 23]);
    body.extend(user.as_bytes());
    // The end of the name, and an empty authentication response.
    body.extend([0, 0]);
    if let Some(database) = database {
        body.extend(database.as_bytes());
        body.push(0);
    }
    body.extend(b"mysql_native_password\0");
    send(answer, number.wrapping_add(1), &[&body])?;
    for _ in 0..SWITCHES_MAX {
        let (number, said) = packet(answer)?;
        match said.first() {
            Some(&OK) => return Ok(()),
            // Another method: an empty response for that as well.
            Some(&EOF) => send(answer, number.wrapping_add(1), &[])?,
            Some(&MORE_DATA) => return Err(WANTS_PASSWORD),
            _ => return Err(NOT_MYSQL),
        }
    }
    Err(WANTS_PASSWORD)
}

/// Returns its number and its body. A packet with an error is an `Err`.
fn packet<S: Read + Write>(answer: &mut BoundedExchange<S>) -> Result<(u8, Vec<u8>), AskError> {
    let head = answer.read(4)?;
    body_of(answer, &head)
}

fn body_of<S: Read + Write>(answer: &mut BoundedExchange<S>, head: &[u8]) -> Result<(u8, Vec<u8>), AskError> {
    let len = usize::from(head[0]) | usize::from(head[1]) << 8 | usize::from(head[2]) << 16;
    if len == LEN_MAX {
        return Err(TOO_LONG);
    }
    let said = answer.read(len)?;
    if said.first() == Some(&ERROR) {
        // A number of two bytes; and '#' with a state of five, once the server knows the client's
        // capabilities.
        let words = said.get(3..).unwrap_or_default();
        let words = if words.first() == Some(&b'#') { words.get(6..).unwrap_or_default() } else { words };
        return Err(AskError::refused(words));
    }
    Ok((head[3], said))
}

fn is_end(said: &[u8]) -> bool {
    said.first() == Some(&EOF) && said.len() < 9
}

fn send<S: Read + Write>(
    answer: &mut BoundedExchange<S>,
    number: u8,
    parts: &[&[u8]],
) -> Result<(), AskError> {
    let body = parts.concat();
    let len = u32::try_from(body.len()).map_err(AskError::from_display)?.to_le_bytes();
    answer.write(&[&len[..3], &[number], &body].concat())
}

//! Tickets: promises to deferred clients, as values and as the signed text that a client carries.
//!
//! The text is URL-safe base64 without padding of:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version, [`VERSION`] |
//! | 4 | number of the key that signed it |
//! | 16 | lane |
//! | 8, 8 | begin and end of the slot, microseconds since the epoch |
//! | 4 | epoch |
//! | 16 | nonce |
//! | 32 | HMAC-SHA256 of the context of its [`SigningPurpose`] and all before |
//!
//! Numbers are big-endian. There is exactly one text for a ticket and a key: a text that differs
//! anywhere is rejected.
//!
//! Not here: which slot is free and whether a ticket was used (`calendar`), which request goes when
//! (`machine`), where keys come from and how long they are kept (the caller).

use ring::hmac;

use crate::{LaneName, Moment, Nonce};

/// A promise of one slot of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ticket {
    pub lane: LaneName,
    pub begins: Moment,
    pub ends: Moment,
    /// The life of the lane's calendar in which it was given.
    pub epoch: u32,
    pub nonce: Nonce,
}

/// The only version so far.
const VERSION: u8 = 1;

/// Purpose of a signed text. A signature for one purpose is not valid for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SigningPurpose {
    Ticket,
    /// Its holder was admitted. `begins` and `ends` are those of the visit, and `nonce` identifies
    /// its holder.
    Visit,
}

impl SigningPurpose {
    /// Returns the context. All have the same length.
    fn context(self) -> &'static [u8; CONTEXT_BYTES] {
        match self {
            Self::Ticket => b"nagaya ticket\0",
            Self::Visit => b"nagaya visit\0\0",
        }
    }
}

const CONTEXT_BYTES: usize = 14;

const SIGNED_BYTES: usize = 1 + 4 + 16 + 8 + 8 + 4 + 16;
const BYTES: usize = SIGNED_BYTES + 32;

/// Characters of a ticket's text: always this many.
pub const TICKET_CHARS: usize = (BYTES * 4).div_ceil(3);
const _: () = assert!(TICKET_CHARS <= 128, "a ticket fits into a cookie and a header with room to spare");

/// Keys held at once. With a new one each month, and tickets that live for days, two are in use.
pub const KEYS_MAX: usize = 8;

/// Why a text is not a ticket of this node. No reason reveals anything about the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    #[error("a ticket has {TICKET_CHARS} characters, and this has not")]
    Length,
    #[error("it is not the URL-safe base64 text of a ticket")]
    Text,
    #[error("it is of a version that this program does not know")]
    Version,
    #[error("it was signed with a key that is not, or not any more, in use here")]
    Key,
    #[error("its signature is wrong: it was altered, or is not from here")]
    Signature,
}

/// The keys that sign tickets: the newest signs, all of them verify.
#[derive(Clone)]
pub struct TicketKeyring {
    /// Keys by age; the newest is the last.
    keys: Vec<(u32, hmac::Key)>,
}

/// Omits the keys, so that they never reach a log.
impl std::fmt::Debug for TicketKeyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|(id, _)| id)).finish()
    }
}

impl TicketKeyring {
    /// Creates a set with one key, which signs. `id` names it in tickets; the bytes are random and
    /// secret.
    pub fn new(id: u32, bytes: &[u8; 32]) -> Self {
        Self { keys: vec![(id, hmac::Key::new(hmac::HMAC_SHA256, bytes))] }
    }

    /// Adds a newer key, which signs from now on. Earlier keys still verify; beyond [`KEYS_MAX`]
    /// the oldest goes.
    pub fn rotate(&mut self, id: u32, bytes: &[u8; 32]) {
        self.keys.retain(|(known, _)| *known != id);
        if self.keys.len() >= KEYS_MAX {
            self.keys.remove(0);
        }
        self.keys.push((id, hmac::Key::new(hmac::HMAC_SHA256, bytes)));
    }

    /// Returns the text that a client carries: [`TICKET_CHARS`] characters of `A-Z a-z 0-9 - _`.
    pub fn sign(&self, ticket: &Ticket) -> String {
        self.sign_for(SigningPurpose::Ticket, ticket)
    }

    /// Returns the same for another purpose.
    pub fn sign_for(&self, purpose: SigningPurpose, ticket: &Ticket) -> String {
        let (id, key) = self.keys.last().expect("keys are made with one and never lose the newest");
        let mut bytes = [0; BYTES];
        let mut writer = TicketWriter { bytes: &mut bytes, at: 0 };
        writer.put(&[VERSION]);
        writer.put(&id.to_be_bytes());
        writer.put(&ticket.lane.0);
        writer.put(&ticket.begins.0.to_be_bytes());
        writer.put(&ticket.ends.0.to_be_bytes());
        writer.put(&ticket.epoch.to_be_bytes());
        writer.put(&ticket.nonce.0.to_be_bytes());
        let tag = hmac::sign(key, &message(purpose, &bytes));
        bytes[SIGNED_BYTES..].copy_from_slice(tag.as_ref());
        encode(&bytes)
    }

    /// Returns the ticket of a text, if it was signed here. The caller checks that it is for this
    /// lane, and unused.
    pub fn verify(&self, text: &str) -> Result<Ticket, TicketError> {
        self.verify_for(SigningPurpose::Ticket, text)
    }

    /// Returns the same for another purpose.
    ///
    /// # Errors
    /// Fails if it was not signed here, or for another purpose.
    pub fn verify_for(&self, purpose: SigningPurpose, text: &str) -> Result<Ticket, TicketError> {
        if text.len() != TICKET_CHARS {
            return Err(TicketError::Length);
        }
        let bytes = decode(text.as_bytes()).ok_or(TicketError::Text)?;
        let mut reader = TicketReader { bytes: &bytes, at: 0 };
        if reader.take::<1>() != [VERSION] {
            return Err(TicketError::Version);
        }
        let id = u32::from_be_bytes(reader.take());
        let (_, key) = self.keys.iter().find(|(known, _)| *known == id).ok_or(TicketError::Key)?;
        // Compared in constant time, so that a forger does not learn how far a guess matches.
        hmac::verify(key, &message(purpose, &bytes), &bytes[SIGNED_BYTES..])
            .map_err(|_| TicketError::Signature)?;
        Ok(Ticket {
            lane: LaneName(reader.take()),
            begins: Moment(u64::from_be_bytes(reader.take())),
            ends: Moment(u64::from_be_bytes(reader.take())),
            epoch: u32::from_be_bytes(reader.take()),
            nonce: Nonce(u128::from_be_bytes(reader.take())),
        })
    }
}

/// Returns the signed message.
fn message(purpose: SigningPurpose, bytes: &[u8; BYTES]) -> [u8; CONTEXT_BYTES + SIGNED_BYTES] {
    let mut message = [0; CONTEXT_BYTES + SIGNED_BYTES];
    message[..CONTEXT_BYTES].copy_from_slice(purpose.context());
    message[CONTEXT_BYTES..].copy_from_slice(&bytes[..SIGNED_BYTES]);
    message
}

struct TicketWriter<'a> {
    bytes: &'a mut [u8; BYTES],
    at: usize,
}

impl TicketWriter<'_> {
    fn put(&mut self, part: &[u8]) {
        self.bytes[self.at..self.at + part.len()].copy_from_slice(part);
        self.at += part.len();
    }
}

struct TicketReader<'a> {
    bytes: &'a [u8; BYTES],
    at: usize,
}

impl TicketReader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut part = [0; N];
        part.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        part
    }
}

// === URL-safe base64 without padding (RFC 4648, section 5) ===

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

fn encode(bytes: &[u8; BYTES]) -> String {
    let mut text = String::with_capacity(TICKET_CHARS);
    for group in bytes.chunks(3) {
        let mut bits = [0; 4];
        bits[1..=group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes(bits);
        for at in 0..=group.len() {
            let six = (bits >> (18 - 6 * at)) & 63;
            text.push(char::from(ALPHABET[six as usize]));
        }
    }
    text
}

/// Returns `None` for anything that [`encode`] would not have written, including nonzero spare
/// bits.
fn decode(text: &[u8]) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let mut groups = bytes.chunks_mut(3);
    for chars in text.chunks(4) {
        let group = groups.next()?;
        let mut bits = 0;
        for at in 0..4 {
            let six = chars.get(at).map_or(Some(0), |char| value(*char))?;
            bits = bits << 6 | six;
        }
        let [_, three @ ..] = bits.to_be_bytes();
        let (carried, left) = three.split_at(group.len());
        if chars.len() != group.len() + 1 || left.iter().any(|byte| *byte != 0) {
            return None;
        }
        group.copy_from_slice(carried);
    }
    groups.next().is_none().then_some(bytes)
}

fn value(char: u8) -> Option<u32> {
    let value = match char {
        b'A'..=b'Z' => char - b'A',
        b'a'..=b'z' => char - b'a' + 26,
        b'0'..=b'9' => char - b'0' + 52,
        b'-' => 62,
        b'_' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests;

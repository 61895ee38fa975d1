//! The keys that sign tickets in a cluster. One record holds them for all nodes, so that each node
//! honors the promises of the others.
//!
//! A key signs for a month. Its successor is made in advance and verifies at once. So every node
//! knows it before any signs with it. A key is kept for days after it last signed, until none of
//! its tickets can be out. Not here: signing (`admission`), making the next key (`nagaya`'s
//! supervisor), the keys of a node without a cluster, which are stored with its tickets (`edge`).

use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Time for which a key signs.
const SIGNS_FOR: Duration = Duration::from_secs(30 * 86_400);

/// Time for which a new key is known before it signs. A node that has not heard from the store for
/// longer refuses its tickets.
const KNOWN_BEFORE: Duration = Duration::from_secs(3_600);

/// Time for which a key is kept after it last signed. A slot begins at most a day ahead and lasts
/// no longer than that. A ticket is valid for a quarter of an hour after it.
const KEPT_FOR: Duration = Duration::from_secs(3 * 86_400);

const SECRET_LEN: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TicketKeys {
    /// Number of the key that signs. All of them verify.
    pub signs: u32,
    /// The oldest first.
    pub keys: Vec<TicketKey>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TicketKey {
    /// Random; each ticket names the key that signed it.
    pub id: u32,
    pub secret: TicketSecret,
    /// When it was made, and since when another key signs. Unix time, milliseconds.
    pub made_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
}

/// Never shown: not in a log, not in an error. As JSON, hexadecimal.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketSecret(pub [u8; SECRET_LEN]);

impl TicketKeys {
    /// Returns the keys from now on. `None` if they stay as they are. `fresh` is used if a new key
    /// is needed.
    pub fn next(known: Option<&Self>, now_ms: u64, fresh: TicketKey) -> Option<Self> {
        let Some(known) = known.filter(|known| !known.keys.is_empty()) else {
            return Some(Self { signs: fresh.id, keys: vec![fresh] });
        };
        let mut next = known.clone();
        next.keys.retain(|key| {
            key.id == known.signs || key.ended_ms.is_none_or(|at| !is_past(at, KEPT_FOR, now_ms))
        });
        let newest = next.keys.last()?;
        if newest.id == next.signs {
            // After a clock was corrected, a key from a far future counts as old as one from the
            // far past.
            let age_ms = now_ms.abs_diff(newest.made_ms);
            if age_ms >= millis(SIGNS_FOR - KNOWN_BEFORE) && next.keys.iter().all(|key| key.id != fresh.id) {
                next.keys.push(fresh);
            }
        } else if is_past(newest.made_ms, KNOWN_BEFORE, now_ms) {
            let id = newest.id;
            for key in next.keys.iter_mut().filter(|key| key.id == next.signs) {
                key.ended_ms = Some(now_ms);
            }
            next.signs = id;
        }
        (next != *known).then_some(next)
    }
}

fn is_past(at_ms: u64, span: Duration, now_ms: u64) -> bool {
    at_ms.saturating_add(millis(span)) <= now_ms
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

impl fmt::Debug for TicketSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for TicketSecret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        to.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for TicketSecret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // The error gives no details, because it would show the secret.
        let wrong = || D::Error::custom("a key's secret is 64 hexadecimal digits");
        let text = String::deserialize(from).map_err(|_| wrong())?;
        let mut bytes = [0; SECRET_LEN];
        let is_hex = text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if !is_hex || text.len() != 2 * SECRET_LEN {
            return Err(wrong());
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;
    const DAY: u64 = 24 * HOUR;

    fn key(id: u32, made_ms: u64) -> TicketKey {
        TicketKey { id, secret: TicketSecret([7; SECRET_LEN]), made_ms, ended_ms: None }
    }

    #[test]
    fn each_key_is_known_before_it_signs_and_kept_after_it_did() {
        let mut keys = TicketKeys::next(None, 0, key(1, 0)).unwrap();
        assert_eq!(keys.signs, 1, "the first signs at once");
        let mut told = Vec::new();
        for hour in 1..75 * 24 {
            let fresh = key(u32::try_from(hour).unwrap() + 1, hour * HOUR);
            if let Some(next) = TicketKeys::next(Some(&keys), hour * HOUR, fresh) {
                told.push((hour, next.signs, next.keys.iter().map(|key| key.id).collect::<Vec<_>>()));
                keys = next;
            }
        }
        let month = 30 * 24;
        let first = 720;
        let second = 2 * 720 - 1;
        let expected = [
            (month - 1, 1, vec![1, first]),
            (month, first, vec![1, first]),
            (month + 72, first, vec![first]),
            (2 * month - 2, first, vec![first, second]),
            (2 * month - 1, second, vec![first, second]),
            (2 * month - 1 + 72, second, vec![second]),
        ];
        assert_eq!(told, expected.map(|(hour, signs, ids)| (hour, signs, ids)));
    }

    #[test]
    fn a_taken_number_and_a_wrong_clock_stop_nothing() {
        let keys = TicketKeys { signs: 1, keys: vec![key(1, 0)] };
        assert_eq!(
            TicketKeys::next(Some(&keys), 40 * DAY, key(1, 40 * DAY)),
            None,
            "another number is drawn"
        );
        let ahead = TicketKeys { signs: 1, keys: vec![key(1, 4_000 * DAY)] };
        assert_eq!(TicketKeys::next(Some(&ahead), DAY, key(2, DAY)).unwrap().keys.len(), 2);
        let empty = TicketKeys { signs: 1, keys: Vec::new() };
        assert_eq!(TicketKeys::next(Some(&empty), DAY, key(2, DAY)).unwrap().signs, 2);
    }

    #[test]
    fn a_secret_is_read_as_it_was_written_and_never_shown() {
        let keys = TicketKeys { signs: 1, keys: vec![key(1, 0)] };
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(serde_json::from_str::<TicketKeys>(&text).unwrap(), keys);
        assert!(!format!("{keys:?}").contains("07") && !format!("{keys:?}").contains("7, 7"), "{keys:?}");
        let wrong = "8f14e45fceea167a5a36dedd4bea2543";
        for bad in
            [format!("\"{wrong}\""), format!("\"{wrong}{wrong}0\""), format!("\"{wrong}+{}\"", &wrong[1..])]
        {
            let error = serde_json::from_str::<TicketSecret>(&bad).unwrap_err().to_string();
            assert!(!error.contains("8f14"), "{error}");
        }
    }
}

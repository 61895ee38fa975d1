//! Encodes a probe on the wire. It contains the sender, a number that nobody can guess, and a
//! seal that only members can make.
//!
//! ```text
//!   0  version (1)     3  nonce (16)     19  length of the name (1)
//!   1  kind            (answers repeat   20  name of the sender
//!   2  0                the question's)   .  id of the sender (32)
//!                                         .  HMAC-SHA256 of all before (32)
//! ```
//!
//! Not here: sockets, and the use of a probe (`probe`).

use ring::hmac;

use crate::cluster::member::LocalMember;

const VERSION: u8 = 1;
const NONCE_AT: usize = 3;
const NAME_AT: usize = 20;
const ID_LEN: usize = 32;
const SEAL_LEN: usize = 32;

/// Maximum length of a datagram, with the longest name. Longer ones are ignored.
pub const LEN_MAX: usize = NAME_AT + nagaya_base::limits::NAME_LEN_MAX + ID_LEN + SEAL_LEN;

pub type ProbeNonce = [u8; 16];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatagramKind {
    Question,
    Answer,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeDatagram {
    pub kind: DatagramKind,
    pub nonce: ProbeNonce,
    pub node: String,
    pub id: String,
}

impl ProbeDatagram {
    /// Returns `None` if the name or the id is not valid for a node.
    pub fn write(&self, key: &hmac::Key) -> Option<Vec<u8>> {
        let len = u8::try_from(self.node.len()).ok()?;
        if self.node.len() > nagaya_base::limits::NAME_LEN_MAX || self.id.len() != ID_LEN {
            return None;
        }
        let kind = if self.kind == DatagramKind::Question { 1 } else { 2 };
        let mut out = vec![VERSION, kind, 0];
        out.extend_from_slice(&self.nonce);
        out.push(len);
        out.extend_from_slice(self.node.as_bytes());
        out.extend_from_slice(self.id.as_bytes());
        let seal = hmac::sign(key, &out);
        out.extend_from_slice(seal.as_ref());
        Some(out)
    }

    /// Returns `None` for a datagram that no member sent, without a reason.
    pub fn read(bytes: &[u8], key: &hmac::Key) -> Option<Self> {
        if bytes.len() > LEN_MAX || bytes.len() < NAME_AT + ID_LEN + SEAL_LEN {
            return None;
        }
        let (said, seal) = bytes.split_at(bytes.len() - SEAL_LEN);
        hmac::verify(key, said, seal).ok()?;
        let [VERSION, kind, ..] = *said else { return None };
        let name_len = usize::from(said[NAME_AT - 1]);
        if said.len() != NAME_AT + name_len + ID_LEN {
            return None;
        }
        let (node, id) = said[NAME_AT..].split_at(name_len);
        Some(Self {
            kind: match kind {
                1 => DatagramKind::Question,
                2 => DatagramKind::Answer,
                _ => return None,
            },
            nonce: said[NONCE_AT..NAME_AT - 1].try_into().ok()?,
            node: std::str::from_utf8(node).ok()?.to_owned(),
            id: std::str::from_utf8(id).ok()?.to_owned(),
        })
    }
}

/// Returns this node's name and id.
pub fn own(member: &LocalMember) -> ProbeDatagram {
    ProbeDatagram {
        kind: DatagramKind::Question,
        nonce: [0; 16],
        node: member.node.as_str().to_owned(),
        id: member.options.id.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &[byte; 32])
    }

    fn datagram() -> ProbeDatagram {
        ProbeDatagram {
            kind: DatagramKind::Answer,
            nonce: [7; 16],
            node: "node-a".into(),
            id: "0123456789abcdef0123456789abcdef".into(),
        }
    }

    #[test]
    fn probe_datagram_reads_back_unchanged() {
        let bytes = datagram().write(&key(1)).unwrap();
        assert_eq!(ProbeDatagram::read(&bytes, &key(1)), Some(datagram()));
    }

    #[test]
    fn a_forged_or_altered_datagram_is_nothing() {
        let bytes = datagram().write(&key(1)).unwrap();
        assert_eq!(ProbeDatagram::read(&bytes, &key(2)), None, "another cluster's key");
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            assert_eq!(ProbeDatagram::read(&altered, &key(1)), None, "byte {at}");
        }
    }

    #[test]
    fn a_datagram_that_is_too_short_or_too_long_is_nothing() {
        let bytes = datagram().write(&key(1)).unwrap();
        for len in 0..bytes.len() {
            assert_eq!(ProbeDatagram::read(&bytes[..len], &key(1)), None, "{len} bytes");
        }
        let mut long = bytes[..bytes.len() - SEAL_LEN].to_vec();
        long.resize(LEN_MAX + 1 - SEAL_LEN, b'x');
        let seal = hmac::sign(&key(1), &long);
        long.extend_from_slice(seal.as_ref());
        assert_eq!(ProbeDatagram::read(&long, &key(1)), None);
        // Sealed, and not what it says to be long.
        let mut wrong = bytes[..bytes.len() - SEAL_LEN].to_vec();
        wrong[NAME_AT - 1] = 200;
        let seal = hmac::sign(&key(1), &wrong);
        wrong.extend_from_slice(seal.as_ref());
        assert_eq!(ProbeDatagram::read(&wrong, &key(1)), None);
    }

    #[test]
    fn a_name_that_no_node_has_is_not_sent() {
        let long = ProbeDatagram { node: "x".repeat(nagaya_base::limits::NAME_LEN_MAX + 1), ..datagram() };
        assert!(long.write(&key(1)).is_none());
        assert!(ProbeDatagram { id: "short".into(), ..datagram() }.write(&key(1)).is_none());
    }
}

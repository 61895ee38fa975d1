//! Asks the other members to vouch for this node while the store is down. Passes their questions
//! to the supervisor.
//!
//! ```text
//!   0  version (1)       2  nonce (16)       34  id of the sender (32)
//!   1  kind: 3 asks,    18  round (8)        66  id of the receiver (32)
//!      4 vouches        26  revision (8)     98  HMAC-SHA256 of all before (32)
//! ```
//!
//! The nonce is new in each round and comes back in the answers. So no answer of another round,
//! or of an earlier life of this node, counts. A repeated question only extends a promise. Not
//! here: the value of a vouch (`nagaya_placement::lease`), the decision to vouch (the
//! supervisor), the socket (`probe`).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nagaya_records::NodeRecord;
use nagaya_records::feed::ToSupervisor;
use ring::hmac;

use crate::cluster::member::LocalMember;
use crate::cluster::peers::probe::datagram::{LEN_MAX, ProbeNonce};

const VERSION: u8 = 1;
const ASKS: u8 = 3;
const VOUCHES: u8 = 4;
const ID_LEN: usize = 32;
const SEALED_LEN: usize = 2 + 16 + 8 + 8 + 2 * ID_LEN;
const LEN: usize = SEALED_LEN + 32;

const _: () = assert!(LEN <= LEN_MAX);

/// Maximum number of datagrams to each member in one round. `RESEND` is the time between them.
/// Members that have not answered are asked again.
const SENDS_MAX: u32 = 3;
const RESEND: Duration = Duration::from_millis(25);

/// Maximum number of other members' open questions. `ASKED_FOR` is the time for which each is
/// kept. The supervisor does not answer members for which it does not vouch. Further questions
/// are dropped, and the members ask again.
const ASKED_MAX: usize = 1024;
const ASKED_FOR: Duration = Duration::from_secs(1);

/// An order of the supervisor.
#[derive(Debug)]
pub enum VouchOrder {
    Ask { round: u64, members: Vec<NodeRecord> },
    Vouch { tag: u64, moved: u64 },
}

/// Content of a datagram, without its seal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VouchMessage {
    kind: u8,
    nonce: ProbeNonce,
    round: u64,
    moved: u64,
    from: String,
    to: String,
}

#[derive(Debug, Default)]
pub struct VouchState {
    round: Option<VouchRound>,
    asked: VecDeque<VouchRequest>,
    next_tag: u64,
}

/// This node's own questions.
#[derive(Debug)]
struct VouchRound {
    id: u64,
    nonce: ProbeNonce,
    /// Members that have not answered.
    missing: Vec<(String, SocketAddr)>,
    sends: u32,
    due: Instant,
}

/// Another member's question.
#[derive(Debug)]
struct VouchRequest {
    tag: u64,
    at: Instant,
    said: VouchMessage,
    /// The key of its question, which signs the answer.
    key: hmac::Key,
    from: SocketAddr,
}

/// Returns whether it is such a datagram, and not a probe.
pub fn is_one(bytes: &[u8]) -> bool {
    matches!(bytes, [_, ASKS | VOUCHES, ..])
}

impl VouchState {
    /// Begins a round, which ends the previous one.
    pub fn begin(&mut self, now: Instant, id: u64, members: &[NodeRecord]) {
        let mut nonce = ProbeNonce::default();
        getrandom::fill(&mut nonce).expect("the kernel gives random bytes once it has booted");
        // A member without an address never answers. So this node correctly gets nothing from the
        // round.
        let reach = |record: &NodeRecord| Some((record.id.clone(), record.peer.parse().ok()?));
        let missing = members.iter().filter_map(reach).collect();
        self.round = Some(VouchRound { id, nonce, missing, sends: 0, due: now });
    }

    pub fn due(&self) -> Option<Instant> {
        let round = self.round.as_ref()?;
        (round.sends < SENDS_MAX && !round.missing.is_empty()).then_some(round.due)
    }

    /// Returns the datagrams to send now.
    pub fn questions(&mut self, now: Instant, own: &LocalMember) -> Vec<(Vec<u8>, SocketAddr)> {
        if self.due().is_none_or(|due| due > now) {
            return Vec::new();
        }
        let Some(round) = &mut self.round else { return Vec::new() };
        round.sends += 1;
        round.due = now + RESEND;
        let question = |(to, address): &(String, SocketAddr)| {
            let said = VouchMessage {
                kind: ASKS,
                nonce: round.nonce,
                round: round.id,
                moved: 0,
                from: own.options.id.clone(),
                to: to.clone(),
            };
            Some((said.write(own.credentials.probe_keys.own())?, *address))
        };
        round.missing.iter().filter_map(question).collect()
    }

    /// Reads a datagram. Returns the message for the supervisor, if there is one.
    pub fn take(
        &mut self,
        now: Instant,
        bytes: &[u8],
        from: SocketAddr,
        own: &LocalMember,
    ) -> Option<ToSupervisor> {
        let (said, key) = own.credentials.probe_keys.read(|key| VouchMessage::read(bytes, key))?;
        if said.to != own.options.id {
            return None;
        }
        if said.kind == ASKS {
            return self.asked(now, said, key.clone(), from);
        }
        let round = self.round.as_mut()?;
        if round.id != said.round || round.nonce != said.nonce {
            return None;
        }
        let at = round.missing.iter().position(|(id, _)| *id == said.from)?;
        let (id, _) = round.missing.swap_remove(at);
        Some(ToSupervisor::Vouched { round: said.round, id, moved: said.moved })
    }

    fn asked(
        &mut self,
        now: Instant,
        said: VouchMessage,
        key: hmac::Key,
        from: SocketAddr,
    ) -> Option<ToSupervisor> {
        self.asked.retain(|asked| now.duration_since(asked.at) < ASKED_FOR);
        if self.asked.len() >= ASKED_MAX {
            return None;
        }
        let tag = self.next_tag;
        self.next_tag += 1;
        let id = said.from.clone();
        self.asked.push_back(VouchRequest { tag, at: now, said, key, from });
        Some(ToSupervisor::VouchAsked { tag, id })
    }

    /// Returns the answer to a question, because the supervisor vouches for its sender.
    pub fn vouch(&mut self, tag: u64, moved: u64, own: &LocalMember) -> Option<(Vec<u8>, SocketAddr)> {
        let at = self.asked.iter().position(|asked| asked.tag == tag)?;
        let VouchRequest { said, key, from, .. } = self.asked.remove(at)?;
        let answer =
            VouchMessage { kind: VOUCHES, moved, to: said.from, from: own.options.id.clone(), ..said };
        Some((answer.write(&key)?, from))
    }
}

impl VouchMessage {
    pub(crate) fn write(&self, key: &hmac::Key) -> Option<Vec<u8>> {
        let mut out = vec![VERSION, self.kind];
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.round.to_le_bytes());
        out.extend_from_slice(&self.moved.to_le_bytes());
        out.extend_from_slice(self.from.as_bytes());
        out.extend_from_slice(self.to.as_bytes());
        if self.from.len() != ID_LEN || self.to.len() != ID_LEN {
            return None;
        }
        let seal = hmac::sign(key, &out);
        out.extend_from_slice(seal.as_ref());
        Some(out)
    }

    pub(crate) fn read(bytes: &[u8], key: &hmac::Key) -> Option<Self> {
        if bytes.len() != LEN {
            return None;
        }
        let (said, seal) = bytes.split_at(SEALED_LEN);
        hmac::verify(key, said, seal).ok()?;
        let [VERSION, kind @ (ASKS | VOUCHES), rest @ ..] = said else { return None };
        let (nonce, rest) = rest.split_first_chunk::<16>()?;
        let (round, rest) = rest.split_first_chunk::<8>()?;
        let (moved, rest) = rest.split_first_chunk::<8>()?;
        let (from, to) = rest.split_at(ID_LEN);
        Some(Self {
            kind: *kind,
            nonce: *nonce,
            round: u64::from_le_bytes(*round),
            moved: u64::from_le_bytes(*moved),
            from: std::str::from_utf8(from).ok()?.to_owned(),
            to: std::str::from_utf8(to).ok()?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &[byte; 32])
    }

    fn said() -> VouchMessage {
        VouchMessage {
            kind: VOUCHES,
            nonce: [7; 16],
            round: 5,
            moved: 1 << 40,
            from: "a".repeat(32),
            to: "b".repeat(32),
        }
    }

    #[test]
    fn vouch_message_reads_back_unchanged() {
        let bytes = said().write(&key(1)).unwrap();
        assert_eq!((bytes.len(), is_one(&bytes)), (LEN, true));
        assert_eq!(VouchMessage::read(&bytes, &key(1)), Some(said()));
    }

    #[test]
    fn a_forged_altered_or_cut_vouch_is_nothing() {
        let bytes = said().write(&key(1)).unwrap();
        assert_eq!(VouchMessage::read(&bytes, &key(2)), None, "another cluster's key");
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            assert_eq!(VouchMessage::read(&altered, &key(1)), None, "byte {at}");
            assert_eq!(VouchMessage::read(&bytes[..at], &key(1)), None, "{at} bytes");
        }
        assert!(VouchMessage { from: "short".into(), ..said() }.write(&key(1)).is_none());
    }

    #[test]
    fn a_probe_is_no_vouch_and_a_vouch_is_no_probe() {
        use crate::cluster::peers::probe::datagram::{DatagramKind, ProbeDatagram};
        let id = "0".repeat(32);
        let probe = ProbeDatagram { kind: DatagramKind::Answer, nonce: [1; 16], node: "a".into(), id };
        let probe = probe.write(&key(1)).unwrap();
        assert!(!is_one(&probe));
        assert_eq!(VouchMessage::read(&probe, &key(1)), None);
        assert_eq!(ProbeDatagram::read(&said().write(&key(1)).unwrap(), &key(1)), None);
    }
}

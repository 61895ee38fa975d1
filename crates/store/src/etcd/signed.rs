//! Signed values: a writer of etcd without the cluster's key changes nothing that nodes believe.
//!
//! A signed value is its body, a newline, and `1 KEY SEQUENCE MAC` in ASCII. The MAC is HMAC-SHA256
//! (RFC 2104). It covers the etcd key, the id of the signing key, the sequence and the body. So a
//! value is worth nothing under another key or in another cluster. The body is first because etcd
//! compares values by their beginning (`keys::stands`).
//!
//! Bodies of tenants, sites, settings, rules and ticket keys are sealed as well (AES-256-GCM, RFC
//! 5116): byte 1, nonce, ciphertext. Both keys are derived from one secret (HKDF-SHA256, RFC 5869),
//! with a label each and the cluster's name.
//!
//! The sequence is a revision of etcd that the writer knew. After a later value of the same key was
//! seen, a value that was put there since is refused. One that was there before is not: the reply
//! to a read may come after news of a later change. A value is also refused if it is more than
//! [`GAP_MAX`] revisions older than the write that put it there.
//!
//! Not here: which keys are signed (`keys`), from when on unsigned values do not count (`raise`,
//! the supervisor), signing again (`resign`).

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use parking_lot::{Mutex, RwLock};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac::{self, HMAC_SHA256};
use serde::{Deserialize, Serialize};

use super::error::ClusterError;
use super::keys::KeySpace;
use super::wire::{RequestKind, RequestOp};

/// Bytes of a secret from which both keys are derived.
pub const RECORD_SECRET_LEN: usize = 32;

/// Most revisions between the writer's known revision and its write. A writer hears from etcd
/// several times a second and gives up after 10 s. The write rate of etcd is some ten thousand per
/// second.
pub(super) const GAP_MAX: u64 = 1 << 18;

/// Longest signature with its newline, bytes: two numbers of 20 digits, 43 characters of MAC, and
/// separators.
const SIGNATURE_LEN_MAX: usize = 100;

/// Prefix of a signature that names its scheme.
const SCHEME: &str = "1";

/// First byte of a sealed body. No JSON and no number begins with it.
const SEALED: u8 = 1;

/// Size at which the table of sequences is pruned, unless twice the rest of the last pruning is
/// more.
const SEQUENCES_PRUNE_MIN: usize = 1024;

/// The secrets that sign a cluster's records. All members have the same.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "WrittenKeys", try_from = "WrittenKeys")]
pub struct RecordKeys {
    /// Signs: its id, and the secret.
    pub current: (u32, [u8; RECORD_SECRET_LEN]),
    /// Believed until their values are signed again.
    pub older: Vec<(u32, [u8; RECORD_SECRET_LEN])>,
}

impl RecordKeys {
    /// Makes keys from one secret of 64 hexadecimal digits. `None` if it is not that.
    pub fn from_hex(id: u32, secret: &str) -> Option<Self> {
        Some(Self { current: (id, secret_of(secret)?), older: Vec::new() })
    }
}

impl fmt::Debug for RecordKeys {
    /// Omits the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let older: Vec<u32> = self.older.iter().map(|(id, _)| *id).collect();
        f.debug_struct("RecordKeys").field("current", &self.current.0).field("older", &older).finish()
    }
}

/// The form in a file: ids and hexadecimal digits.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenKeys {
    current: (u32, String),
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    older: Vec<(u32, String)>,
}

impl From<RecordKeys> for WrittenKeys {
    fn from(keys: RecordKeys) -> Self {
        let write = |(id, secret): (u32, [u8; RECORD_SECRET_LEN])| (id, HEXLOWER.encode(&secret));
        Self { current: write(keys.current), older: keys.older.into_iter().map(write).collect() }
    }
}

impl TryFrom<WrittenKeys> for RecordKeys {
    type Error = &'static str;

    fn try_from(written: WrittenKeys) -> Result<Self, Self::Error> {
        let read = |(id, secret): (u32, String)| {
            Ok((id, secret_of(&secret).ok_or("a secret of records is not 64 hexadecimal digits")?))
        };
        let older: Result<_, Self::Error> = written.older.into_iter().map(read).collect();
        Ok(Self { current: read(written.current)?, older: older? })
    }
}

fn secret_of(digits: &str) -> Option<[u8; RECORD_SECRET_LEN]> {
    HEXLOWER.decode(digits.as_bytes()).ok()?.try_into().ok()
}

/// A node's knowledge of a cluster's signatures when it opens the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordSigning {
    /// The cluster was made by a version that signs nothing, and has no secret yet. Everything is
    /// believed.
    Unsigned,
    /// The cluster's records are being signed. Unsigned ones are still believed.
    Optional(RecordKeys),
    /// Unsigned values are refused.
    Required(RecordKeys),
}

/// Why a value does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum SignatureError {
    #[error("it is not signed")]
    Unsigned,
    #[error("it is signed with key {0}, which is not a key of the cluster")]
    UnknownKey(u32),
    #[error("its signature is wrong: somebody else wrote it, or it was signed for another key")]
    Wrong,
    #[error("it is an old value that was put back")]
    Replayed,
    #[error("it cannot be opened: this node has not got the cluster's key")]
    Sealed,
}

/// The keys derived from one secret.
struct DerivedKeys {
    id: u32,
    mac: hmac::Key,
    seal: LessSafeKey,
}

impl DerivedKeys {
    fn derive(cluster: &str, (id, secret): &(u32, [u8; RECORD_SECRET_LEN])) -> Self {
        let root: Prk = Salt::new(HKDF_SHA256, b"nagaya cluster records").extract(secret);
        let mac_info = [&b"sign\0"[..], cluster.as_bytes()];
        let mac = root.expand(&mac_info, HMAC_SHA256).expect("the key is shorter than HKDF's bound");
        let seal_info = [&b"seal\0"[..], cluster.as_bytes()];
        let seal = root.expand(&seal_info, &AES_256_GCM).expect("the key is shorter than HKDF's bound");
        Self { id: *id, mac: mac.into(), seal: LessSafeKey::new(UnboundKey::from(seal)) }
    }

    fn mac(&self, key: &[u8], sequence: u64, body: &[u8]) -> hmac::Tag {
        hmac::sign(&self.mac, &self.signed_text(key, sequence, body))
    }

    fn is_signed(&self, key: &[u8], signature: &ValueSignature, body: &[u8]) -> bool {
        let text = self.signed_text(key, signature.sequence, body);
        hmac::verify(&self.mac, &text, &signature.mac).is_ok()
    }

    /// Returns the signed text. It includes the key's length, so that no two pairs of key and body
    /// are one text.
    fn signed_text(&self, key: &[u8], sequence: u64, body: &[u8]) -> Vec<u8> {
        let len = (key.len() as u64).to_be_bytes();
        [&len[..], key, &self.id.to_be_bytes(), &sequence.to_be_bytes(), body].concat()
    }

    /// Seals a body. The nonce is random. A key seals some millions of records in its life, far
    /// from where 96 bits would repeat.
    fn seal(&self, key: &[u8], mut body: Vec<u8>) -> Result<Vec<u8>, ClusterError> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|error| ClusterError::Behind {
            detail: format!("the system gives no random numbers: {error}"),
        })?;
        self.seal
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(key), &mut body)
            .expect("a record is shorter than what AES-GCM seals at once");
        let mut sealed = Vec::with_capacity(1 + NONCE_LEN + body.len() + SIGNATURE_LEN_MAX);
        sealed.push(SEALED);
        sealed.extend_from_slice(&nonce);
        sealed.append(&mut body);
        Ok(sealed)
    }

    fn unseal(&self, key: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut opened = sealed.to_vec();
        let len = self.seal.open_in_place(nonce, Aad::from(key), &mut opened).ok()?.len();
        opened.truncate(len);
        Some(opened)
    }
}

struct SigningKeys {
    current: DerivedKeys,
    older: Vec<DerivedKeys>,
}

impl SigningKeys {
    fn derive(cluster: &str, keys: &RecordKeys) -> Self {
        let older = keys.older.iter().map(|key| DerivedKeys::derive(cluster, key)).collect();
        Self { current: DerivedKeys::derive(cluster, &keys.current), older }
    }

    fn find(&self, id: u32) -> Option<&DerivedKeys> {
        std::iter::once(&self.current).chain(&self.older).find(|key| key.id == id)
    }
}

/// The end of a signed value.
struct ValueSignature {
    id: u32,
    sequence: u64,
    mac: Vec<u8>,
}

/// Returns the body and the signature of a value. `None` if it has no signature.
fn split(value: &[u8]) -> Option<(&[u8], ValueSignature)> {
    let from = value.len().saturating_sub(SIGNATURE_LEN_MAX);
    let newline = from + value[from..].iter().rposition(|byte| *byte == b'\n')?;
    let mut words = str::from_utf8(&value[newline + 1..]).ok()?.split(' ');
    let signature = match (words.next()?, words.next()?, words.next()?, words.next()?, words.next()) {
        (SCHEME, id, sequence, mac, None) => ValueSignature {
            id: id.parse().ok()?,
            sequence: sequence.parse().ok()?,
            mac: BASE64URL_NOPAD.decode(mac.as_bytes()).ok()?,
        },
        _ => return None,
    };
    Some((&value[..newline], signature))
}

/// A value that counts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OpenedValue {
    pub body: Vec<u8>,
    /// `None` if it is not signed.
    sequence: Option<u64>,
    /// It is signed with the current key, and sealed if required.
    pub is_current: bool,
}

/// Signs and opens the values of one cluster.
pub(super) struct ValueSigner {
    keys: KeySpace,
    ring: RwLock<Option<SigningKeys>>,
    is_required: AtomicBool,
    /// The latest sequence of each key that was seen recently.
    sequences: Mutex<KeySequences>,
}

/// The latest sequence of each key, by a hash of the key that is secret to outsiders. Two of a
/// million keys share one with a chance of one in ten million. Then the older of their values is
/// taken for one that was put back.
#[derive(Default)]
struct KeySequences {
    hasher: RandomState,
    latest: HashMap<u64, SeenSequence>,
    prune_at: usize,
}

/// The sequence of a key's latest value.
#[derive(Debug, Clone, Copy, Default)]
struct SeenSequence {
    sequence: u64,
    /// A revision of etcd at which that value was there.
    revision: u64,
}

impl KeySequences {
    fn of(&self, key: &[u8]) -> Option<SeenSequence> {
        self.latest.get(&self.hasher.hash_one(key)).copied()
    }

    fn note(&mut self, key: &[u8], sequence: u64, revision: u64) {
        let latest = self.latest.entry(self.hasher.hash_one(key)).or_default();
        if sequence >= latest.sequence {
            *latest = SeenSequence { sequence, revision: revision.max(latest.revision) };
        }
    }

    /// Whether a value was put there after one with a later sequence.
    fn is_put_back(&self, key: &[u8], sequence: u64, revision: u64) -> bool {
        self.of(key).is_some_and(|latest| sequence < latest.sequence && revision > latest.revision)
    }

    /// Prunes sequences that are not needed because `GAP_MAX` refuses their values anyway.
    fn prune(&mut self, revision: u64) {
        if self.latest.len() >= self.prune_at.max(SEQUENCES_PRUNE_MIN) {
            self.latest.retain(|_, latest| latest.sequence.saturating_add(GAP_MAX) >= revision);
            self.prune_at = 2 * self.latest.len();
        }
    }
}

impl ValueSigner {
    pub fn new(keys: KeySpace, signing: RecordSigning) -> Self {
        let signer = Self {
            keys,
            ring: RwLock::default(),
            is_required: AtomicBool::new(false),
            sequences: Mutex::default(),
        };
        match signing {
            RecordSigning::Unsigned => {}
            RecordSigning::Optional(keys) => signer.set_keys(&keys),
            RecordSigning::Required(keys) => {
                signer.set_keys(&keys);
                signer.require();
            }
        }
        signer
    }

    pub fn set_keys(&self, keys: &RecordKeys) {
        *self.ring.write() = Some(SigningKeys::derive(self.keys.cluster(), keys));
    }

    pub fn has_keys(&self) -> bool {
        self.ring.read().is_some()
    }

    /// From now on, unsigned values do not count. This is final while the process runs. Returns
    /// whether it is new.
    pub fn require(&self) -> bool {
        !self.is_required.swap(true, Ordering::AcqRel)
    }

    pub fn is_required(&self) -> bool {
        self.is_required.load(Ordering::Acquire)
    }

    /// Returns the value in its form for etcd. `known` is the latest known revision of etcd.
    pub fn sign(&self, key: &[u8], body: Vec<u8>, known: u64) -> Result<Vec<u8>, ClusterError> {
        let ring = self.ring.read();
        let Some(ring) = ring.as_ref().filter(|_| self.keys.is_signed(key)) else { return Ok(body) };
        // It is later than all before it, even if the revisions of etcd were set back.
        let before = self.sequences.lock().of(key);
        let sequence = before.map_or(known, |before| known.max(before.sequence.saturating_add(1)));
        let mut value = if self.keys.is_sealed(key) { ring.current.seal(key, body)? } else { body };
        let mac = ring.current.mac(key, sequence, &value);
        let mac = BASE64URL_NOPAD.encode(mac.as_ref());
        value.extend_from_slice(format!("\n{SCHEME} {} {sequence} {mac}", ring.current.id).as_bytes());
        Ok(value)
    }

    /// Does the same for an operation that puts a value; others stay as they are.
    pub fn sign_put(&self, operation: &mut RequestOp, known: u64) -> Result<(), ClusterError> {
        if let Some(RequestKind::Put(put)) = &mut operation.request {
            put.value = self.sign(&put.key, std::mem::take(&mut put.value), known)?;
        }
        Ok(())
    }

    /// Returns the body of a value that is at this key since `revision`, if it counts.
    pub fn open(&self, key: &[u8], value: &[u8], revision: u64) -> Result<OpenedValue, SignatureError> {
        let bare = |body: &[u8]| OpenedValue { body: body.to_vec(), sequence: None, is_current: false };
        if !self.keys.is_signed(key) {
            return Ok(OpenedValue { is_current: true, ..bare(value) });
        }
        let Some((body, signature)) = split(value) else {
            return if self.is_required() { Err(SignatureError::Unsigned) } else { Ok(bare(value)) };
        };
        let ring = self.ring.read();
        let Some(ring) = ring.as_ref() else {
            // The cluster's records are being signed, and this node has not got the key yet.
            return if body.first() == Some(&SEALED) { Err(SignatureError::Sealed) } else { Ok(bare(body)) };
        };
        let keys = ring.find(signature.id).ok_or(SignatureError::UnknownKey(signature.id))?;
        if !keys.is_signed(key, &signature, body) {
            return Err(SignatureError::Wrong);
        }
        let sequence = signature.sequence;
        let is_late = sequence.saturating_add(GAP_MAX) < revision;
        if is_late || self.sequences.lock().is_put_back(key, sequence, revision) {
            return Err(SignatureError::Replayed);
        }
        let is_sealed = body.first() == Some(&SEALED);
        let opened = if is_sealed {
            keys.unseal(key, &body[1..]).ok_or(SignatureError::Wrong)?
        } else {
            body.to_vec()
        };
        let is_current = keys.id == ring.current.id && is_sealed == self.keys.is_sealed(key);
        Ok(OpenedValue { body: opened, sequence: Some(sequence), is_current })
    }

    /// Notes that the opened value is the latest one of its key. `revision` is etcd's present one.
    pub fn note(&self, key: &[u8], opened: &OpenedValue, revision: u64) {
        let Some(sequence) = opened.sequence else { return };
        if sequence.saturating_add(GAP_MAX) < revision {
            return;
        }
        let mut sequences = self.sequences.lock();
        sequences.prune(revision);
        sequences.note(key, sequence, revision);
    }

    /// Notes that the key has no value any more at this revision: its last one must not come back.
    pub fn note_gone(&self, key: &[u8], revision: u64) {
        let mut sequences = self.sequences.lock();
        if let Some(latest) = sequences.of(key) {
            sequences.note(key, latest.sequence.saturating_add(1), revision);
        }
    }

    /// Forgets all sequences, for another etcd, or one whose past its operator restored.
    pub fn forget_sequences(&self) {
        *self.sequences.lock() = KeySequences::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(id: u32) -> RecordKeys {
        RecordKeys { current: (id, [id as u8; RECORD_SECRET_LEN]), older: Vec::new() }
    }

    fn signer(cluster: &str, id: u32) -> ValueSigner {
        ValueSigner::new(KeySpace::new(cluster), RecordSigning::Required(keys(id)))
    }

    const SITE: &[u8] = b"/nagaya/main/v1/sites/bob";
    const OTHER_SITE: &[u8] = b"/nagaya/main/v1/sites/alice";
    const NODE: &[u8] = b"/nagaya/main/v1/nodes/a";
    const BODY: &[u8] = br#"{"name":"bob","env":{"DB_PASS":"tell-nobody"}}"#;

    #[test]
    fn signed_value_counts_under_its_key_alone() {
        let signer = signer("main", 1);
        let value = signer.sign(SITE, BODY.to_vec(), 7).unwrap();
        let opened = signer.open(SITE, &value, 8).unwrap();
        assert_eq!((&*opened.body, opened.is_current), (BODY, true));
        assert_eq!(signer.open(OTHER_SITE, &value, 8), Err(SignatureError::Wrong));
        assert_eq!(signer.open(SITE, BODY, 8), Err(SignatureError::Unsigned));
        let other = self::signer("main", 2).sign(SITE, BODY.to_vec(), 7).unwrap();
        assert_eq!(signer.open(SITE, &other, 8), Err(SignatureError::UnknownKey(2)));
        // The same secret in another cluster whose key has the same text.
        let foreign = ValueSigner::new(KeySpace::new("other"), RecordSigning::Required(keys(1)));
        let ring = foreign.ring.read();
        let mac = ring.as_ref().unwrap().current.mac(NODE, 7, b"{}");
        let forged = format!("{{}}\n1 1 7 {}", BASE64URL_NOPAD.encode(mac.as_ref()));
        assert_eq!(signer.open(NODE, forged.as_bytes(), 8), Err(SignatureError::Wrong));
    }

    #[test]
    fn every_changed_byte_is_seen() {
        let signer = signer("main", 1);
        for key in [SITE, NODE] {
            let value = signer.sign(key, BODY.to_vec(), 7).unwrap();
            for at in 0..value.len() {
                let mut changed = value.clone();
                changed[at] ^= 1;
                assert!(signer.open(key, &changed, 8).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn sealed_value_shows_nothing_and_a_node_stays_readable() {
        let signer = signer("main", 1);
        let holds = |value: &[u8]| value.windows(11).any(|part| part == b"tell-nobody");
        let sealed = signer.sign(SITE, BODY.to_vec(), 7).unwrap();
        assert!(!holds(&sealed));
        assert_ne!(sealed, signer.sign(SITE, BODY.to_vec(), 7).unwrap(), "a nonce was used twice");
        let open = signer.sign(NODE, BODY.to_vec(), 7).unwrap();
        assert!(open.starts_with(BODY));
        assert_eq!(signer.open(NODE, &open, 8).unwrap().body, BODY);
    }

    #[test]
    fn old_value_does_not_come_back() {
        let signer = signer("main", 1);
        let first = signer.sign(SITE, b"{\"a\":1}".to_vec(), 10).unwrap();
        signer.note(SITE, &signer.open(SITE, &first, 11).unwrap(), 11);
        let second = signer.sign(SITE, b"{\"a\":2}".to_vec(), 11).unwrap();
        signer.note(SITE, &signer.open(SITE, &second, 12).unwrap(), 12);
        assert_eq!(signer.open(SITE, &first, 13), Err(SignatureError::Replayed));
        assert!(signer.open(SITE, &second, 13).is_ok());
        // A reply that was under way when the second one came.
        assert!(signer.open(SITE, &first, 11).is_ok());
        signer.note_gone(SITE, 14);
        assert!(signer.open(SITE, &second, 12).is_ok());
        assert_eq!(signer.open(SITE, &second, 15), Err(SignatureError::Replayed));
        let third = signer.sign(SITE, b"{\"a\":3}".to_vec(), 3).unwrap();
        assert!(signer.open(SITE, &third, 16).is_ok(), "a writer goes on from what was there");
        // Who has not seen the later one refuses it by its age.
        let newcomer = self::signer("main", 1);
        assert!(newcomer.open(SITE, &first, 10 + GAP_MAX).is_ok());
        assert_eq!(newcomer.open(SITE, &first, 11 + GAP_MAX), Err(SignatureError::Replayed));
    }

    #[test]
    fn sequences_that_no_longer_matter_are_forgotten() {
        let signer = signer("main", 1);
        for n in 0..3 * SEQUENCES_PRUNE_MIN as u64 {
            let key = format!("/nagaya/main/v1/sites/s{n}").into_bytes();
            let revision = n * GAP_MAX;
            let value = signer.sign(&key, BODY.to_vec(), revision).unwrap();
            signer.note(&key, &signer.open(&key, &value, revision + 1).unwrap(), revision + 1);
        }
        assert!(signer.sequences.lock().latest.len() <= SEQUENCES_PRUNE_MIN);
    }

    #[test]
    fn older_keys_are_believed_until_they_are_dropped() {
        let old = signer("main", 1);
        let value = old.sign(SITE, BODY.to_vec(), 7).unwrap();
        let both = RecordKeys { older: vec![keys(1).current], ..keys(2) };
        old.set_keys(&both);
        let opened = old.open(SITE, &value, 8).unwrap();
        assert_eq!((&*opened.body, opened.is_current), (BODY, false));
        let anew = old.sign(SITE, BODY.to_vec(), 8).unwrap();
        assert!(old.open(SITE, &anew, 9).unwrap().is_current);
        old.set_keys(&keys(2));
        assert_eq!(old.open(SITE, &value, 8), Err(SignatureError::UnknownKey(1)));
    }

    #[test]
    fn unsigned_values_count_until_signatures_are_required() {
        let signer = ValueSigner::new(KeySpace::new("main"), RecordSigning::Unsigned);
        let opened = signer.open(SITE, BODY, 8).unwrap();
        assert_eq!((&*opened.body, opened.is_current), (BODY, false));
        assert_eq!(signer.sign(SITE, BODY.to_vec(), 7).unwrap(), BODY);
        // Others sign already.
        let others = self::signer("main", 1);
        let node = others.sign(NODE, BODY.to_vec(), 7).unwrap();
        assert_eq!(signer.open(NODE, &node, 8).unwrap().body, BODY);
        let site = others.sign(SITE, BODY.to_vec(), 7).unwrap();
        assert_eq!(signer.open(SITE, &site, 8), Err(SignatureError::Sealed));
        signer.set_keys(&keys(1));
        assert_eq!(signer.open(SITE, &site, 8).unwrap().body, BODY);
        assert!(signer.open(SITE, BODY, 8).is_ok());
        assert!(signer.require());
        assert!(!signer.require());
        assert_eq!(signer.open(SITE, BODY, 8), Err(SignatureError::Unsigned));
    }

    #[test]
    fn keys_are_written_as_hexadecimal_digits_and_not_shown() {
        let keys = RecordKeys { older: vec![(1, [0xcd; RECORD_SECRET_LEN])], ..keys(2) };
        let text = serde_json::to_string(&keys).unwrap();
        assert!(text.contains(&"cd".repeat(RECORD_SECRET_LEN)), "{text}");
        assert_eq!(serde_json::from_str::<RecordKeys>(&text).unwrap(), keys);
        assert_eq!(format!("{keys:?}"), "RecordKeys { current: 2, older: [1] }");
        assert_eq!(RecordKeys::from_hex(2, &"02".repeat(32)).unwrap(), self::keys(2));
        for digits in ["", "02", &"0x".repeat(32)] {
            assert!(RecordKeys::from_hex(2, digits).is_none(), "{digits}");
        }
    }
}

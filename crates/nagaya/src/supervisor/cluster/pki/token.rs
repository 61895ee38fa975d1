//! Join tokens: each lets one machine become a member, within a time limit.
//!
//! For each token the store has the members' keys, sealed with a secret that only the token has.
//! The joining machine takes them away, or they expire. So a reader of the store alone opens
//! nothing, and neither does a later finder of the token.

use std::time::Duration;

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use serde::{Deserialize, Serialize};

use super::{
    KEY_LEN, KnownGeneration, MemberSecrets, PkiError, StoredKeys, from_hex, open, random, seal, to_hex,
    unix_now,
};
use crate::etcd_access::EtcdAccess;

/// Prefix of a token, so that other pasted text is recognised.
pub const PREFIX: &str = "nagaya-";

/// Longest validity of a token.
pub const TTL_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Most valid tokens at one time.
pub const TOKENS_MAX: usize = 32;

/// Bytes of an id in a path of the store.
const ID_LEN: usize = 8;

/// Longest text of a token, bytes: certificates of several kilobytes.
const TEXT_LEN_MAX: usize = 64 << 10;

/// A token as it is carried from one machine to another.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinToken {
    pub cluster: String,
    /// Hexadecimal.
    secret: String,
    /// Unix time, seconds, for people to read. The store ends it, so the joining machine's clock
    /// does not matter.
    pub expires: u64,
    /// How the machine reaches the store, as far as the token's maker specified it.
    pub etcd: EtcdAccess,
}

/// A token's data in the store.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredToken {
    /// Unix time, seconds.
    pub expires: u64,
    /// The member that made it.
    pub by: String,
    sealed: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedKeys {
    known: KnownGeneration,
    keys: MemberSecrets,
}

struct SealLength(usize);

impl KeyType for SealLength {
    fn len(&self) -> usize {
        self.0
    }
}

impl JoinToken {
    pub fn make(cluster: &str, ttl: Duration, etcd: EtcdAccess) -> Result<Self, PkiError> {
        let secret = to_hex(&random::<KEY_LEN>()?);
        let expires = unix_now() + ttl.as_secs();
        Ok(Self { cluster: cluster.into(), secret, expires, etcd })
    }

    pub fn text(&self) -> String {
        let json = serde_json::to_vec(self).expect("it has text keys, and writing to memory works");
        format!("{PREFIX}{}", data_encoding::BASE64URL_NOPAD.encode(&json))
    }

    pub fn read(text: &str) -> Result<Self, PkiError> {
        let text = text.trim();
        let digits = text.strip_prefix(PREFIX).filter(|_| text.len() <= TEXT_LEN_MAX);
        let digits = digits.ok_or(PkiError::NoToken)?;
        let json = data_encoding::BASE64URL_NOPAD.decode(digits.as_bytes()).map_err(|_| PkiError::NoToken)?;
        let token: Self = serde_json::from_slice(&json).map_err(|_| PkiError::NoToken)?;
        let is_whole = from_hex(&token.secret).is_some_and(|secret| secret.len() == KEY_LEN);
        if is_whole { Ok(token) } else { Err(PkiError::NoToken) }
    }

    /// Returns its public name.
    pub fn id(&self) -> String {
        to_hex(&self.derive::<ID_LEN>(b"id"))
    }

    /// Returns the store's data for it.
    pub fn seal(&self, by: &str, stored: &StoredKeys, keys: &MemberSecrets) -> Result<StoredToken, PkiError> {
        let sealed = serde_json::to_vec(&SealedKeys { known: stored.remember(keys)?, keys: keys.clone() })?;
        let sealed = seal(&self.derive(b"seal"), &sealed, &self.bound(self.expires))?;
        Ok(StoredToken { expires: self.expires, by: by.into(), sealed })
    }

    /// Returns the members' keys, and their edition. They are useless to another edition, which has
    /// ended some of them.
    pub fn open(&self, stored: &StoredToken) -> Result<(MemberSecrets, KnownGeneration), PkiError> {
        let bound = self.bound(stored.expires);
        let opened = open(&self.derive(b"seal"), &stored.sealed, &bound).ok_or(PkiError::Spent)?;
        let SealedKeys { known, keys } = serde_json::from_slice(&opened)?;
        Ok((keys, known))
    }

    fn bound(&self, expires: u64) -> Vec<u8> {
        format!("nagaya join token\n{}\n{}\n{expires}", self.cluster, self.id()).into_bytes()
    }

    fn derive<const N: usize>(&self, what: &[u8]) -> [u8; N] {
        let secret = from_hex(&self.secret).unwrap_or_default();
        let mut key = [0; N];
        let info = [what, self.cluster.as_bytes()];
        let salt = Salt::new(HKDF_SHA256, b"nagaya join token");
        salt.extract(&secret)
            .expand(&info, SealLength(N))
            .and_then(|derived| derived.fill(&mut key))
            .expect("the key is shorter than HKDF's bound");
        key
    }
}

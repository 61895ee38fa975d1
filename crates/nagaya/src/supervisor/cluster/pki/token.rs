//! Join tokens: each lets one machine become a member, within a bound of time.
//!
//! The store holds the members' keys for each token, sealed with the secret that only the token has, until the machine that joins takes
//! them away or time is over. So who reads the store alone opens nothing, nor does who finds a token later.

use std::time::Duration;

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use serde::{Deserialize, Serialize};

use super::super::member::Etcd;
use super::{KEY_LEN, Keys, Known, PkiError, Stored, from_hex, open, random, seal, to_hex, unix_now};

/// What a token begins with, so that something else that was pasted is seen as such.
pub const PREFIX: &str = "nagaya-";

/// Longest that a token is good.
pub const TTL_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Tokens that are good at one time.
pub const TOKENS_MAX: usize = 32;

/// Bytes of an id in a path of the store.
const ID_LEN: usize = 8;

/// Longest text of a token, bytes: certificates of several kilobytes.
const TEXT_LEN_MAX: usize = 64 << 10;

/// As it is carried from one machine to another.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    pub cluster: String,
    /// Hexadecimal.
    secret: String,
    /// Unix time, seconds, for people to read: its end is when the store forgets it, so no clock of the machine that joins counts.
    pub expires: u64,
    /// How the machine reaches the store, as far as whoever made the token said so.
    pub etcd: Etcd,
}

/// As the store holds it.
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
struct Sealed {
    known: Known,
    keys: Keys,
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Token {
    pub fn make(cluster: &str, ttl: Duration, etcd: Etcd) -> Result<Self, PkiError> {
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

    /// Names it where everybody may see it.
    pub fn id(&self) -> String {
        to_hex(&self.derive::<ID_LEN>(b"id"))
    }

    /// What the store is to hold for it.
    pub fn seal(&self, by: &str, stored: &Stored, keys: &Keys) -> Result<StoredToken, PkiError> {
        let sealed = serde_json::to_vec(&Sealed { known: stored.known(keys)?, keys: keys.clone() })?;
        let sealed = seal(&self.derive(b"seal"), &sealed, &self.bound(self.expires))?;
        Ok(StoredToken { expires: self.expires, by: by.into(), sealed })
    }

    /// The members' keys, and of which edition they are. To another one they are nothing: it has ended some of them.
    pub fn open(&self, stored: &StoredToken) -> Result<(Keys, Known), PkiError> {
        let bound = self.bound(stored.expires);
        let opened = open(&self.derive(b"seal"), &stored.sealed, &bound).ok_or(PkiError::Spent)?;
        let Sealed { known, keys } = serde_json::from_slice(&opened)?;
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
            .expand(&info, Length(N))
            .and_then(|derived| derived.fill(&mut key))
            .expect("the key is shorter than HKDF's bound");
        key
    }
}

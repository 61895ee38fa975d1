//! Who may speak as a node of a cluster: the cluster's authority, the certificates it gives, and the secret that lets a
//! machine have one.
//!
//! The authority's key lies in the store, sealed (AES-256-GCM, RFC 5116) with a key made from the secret that is in every join
//! token (HKDF-SHA256, RFC 5869). So who can read the store alone cannot make itself a node, nor who has a token and cannot
//! reach the store. Not here: where a node keeps what it got (`member`), TLS (`nagaya_edge`).

use std::time::{Duration, SystemTime};

use nagaya_cmdb::NodeName;
use nagaya_cmdb::store::etcd::RecordKeys;
use nagaya_keeper::image::{ClusterKey, KEY_LEN};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use serde::{Deserialize, Serialize};

/// Bytes of a join token's secret.
const SECRET_LEN: usize = 32;

/// What a token begins with, so that something else that was pasted is seen as such.
const TOKEN_PREFIX: &str = "nagaya-";

/// How long a node's certificate holds. It is made anew when a third of this is left.
pub const CERTIFICATE_AGE_MAX: Duration = Duration::from_secs(365 * 86_400);

/// How long an authority holds: it is exchanged by a command, not by time.
const AUTHORITY_AGE_MAX: Duration = Duration::from_secs(20 * 365 * 86_400);

/// Certificates hold from so long before they were made, for nodes whose clocks are behind.
const CLOCK_MARGIN: Duration = Duration::from_secs(86_400);

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("this is no join token: it begins with '{TOKEN_PREFIX}' and has 64 hexadecimal digits after it")]
    NoToken,
    #[error("the token is not of this cluster: `nagaya cluster token` on a member prints the right one")]
    WrongToken,
    #[error("a key or certificate cannot be made: {0}")]
    Made(#[from] rcgen::Error),
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    #[error("what the store holds of the authority is not understood: {0}")]
    Stored(#[from] serde_json::Error),
}

/// The secret of a cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_LEN]);

impl Secret {
    pub fn generate() -> Result<Self, PkiError> {
        Ok(Self(random()?))
    }

    /// As people carry it from one machine to the next.
    pub fn token(&self) -> String {
        format!("{TOKEN_PREFIX}{}", to_hex(&self.0))
    }

    pub fn from_token(token: &str) -> Result<Self, PkiError> {
        let digits = token.trim().strip_prefix(TOKEN_PREFIX).ok_or(PkiError::NoToken)?;
        let bytes = from_hex(digits).ok_or(PkiError::NoToken)?;
        Ok(Self(bytes.try_into().map_err(|_| PkiError::NoToken)?))
    }

    /// The key that seals. The cluster's name goes in, so that one secret used twice by mistake makes two keys.
    fn key(&self, cluster: &str) -> LessSafeKey {
        let key = Salt::new(HKDF_SHA256, b"nagaya cluster authority").extract(&self.0);
        let info = [cluster.as_bytes()];
        let okm = key.expand(&info, &AES_256_GCM).expect("the key is shorter than HKDF's bound");
        LessSafeKey::new(UnboundKey::from(okm))
    }
}

/// The authority as the store holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// One more with each exchange of the authority.
    pub serial: u64,
    /// PEM: its certificate, and the one before it until all nodes have new ones.
    pub authorities: String,
    /// Hexadecimal: nonce and sealed `Keys`.
    sealed: String,
}

/// What only members know.
#[derive(Clone, Serialize, Deserialize)]
pub struct Keys {
    /// PEM.
    authority: String,
    /// 64 hexadecimal digits.
    pub probe: String,
    /// The secret that signs the cluster's records, 64 hexadecimal digits, and its id. Empty: the cluster was made by a version that
    /// signs none.
    #[serde(default)]
    records: String,
    #[serde(default)]
    records_id: u32,
    /// All records are signed, and none counts that is not.
    #[serde(default)]
    pub records_required: bool,
}

impl Keys {
    /// `None`: the cluster's records are not signed yet.
    pub fn record_keys(&self) -> Option<RecordKeys> {
        RecordKeys::from_hex(self.records_id, &self.records)
    }
}

impl Keys {
    /// The key that signs orders to move images, and seals these. Made of the authority's key, which no edge has; the key of
    /// probes every edge has.
    pub fn image_key(&self) -> ClusterKey {
        struct Len;
        impl KeyType for Len {
            fn len(&self) -> usize {
                KEY_LEN
            }
        }
        let key = Salt::new(HKDF_SHA256, b"nagaya images").extract(self.authority.as_bytes());
        let mut bytes = [0; KEY_LEN];
        let okm = key.expand(&[b"orders and streams"], Len).expect("the key is shorter than HKDF's bound");
        okm.fill(&mut bytes).expect("both have the same length");
        ClusterKey::new(bytes)
    }
}

/// A node's certificate and its key, PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub certificate: String,
    pub key: String,
    /// Serial of the authority that gave it.
    pub serial: u64,
    /// When it has to be made anew, Unix time, seconds.
    pub renew_at: u64,
}

impl Stored {
    /// A cluster's first authority.
    pub fn found(cluster: &str, secret: &Secret) -> Result<Self, PkiError> {
        let key = KeyPair::generate()?;
        let probe = to_hex(&random::<SECRET_LEN>()?);
        let authorities = authority(cluster, 1)?.self_signed(&key)?.pem();
        let records = to_hex(&random::<SECRET_LEN>()?);
        let authority = key.serialize_pem();
        let keys = Keys { authority, probe, records, records_id: 1, records_required: true };
        Self::seal(cluster, secret, 1, authorities, &keys)
    }

    /// The authority after this one. Both are believed until `forget_old`.
    pub fn exchange(&self, cluster: &str, secret: &Secret) -> Result<Self, PkiError> {
        let keys = self.open(cluster, secret)?;
        let key = KeyPair::generate()?;
        let serial = self.serial + 1;
        let newest = authority(cluster, serial)?.self_signed(&key)?.pem();
        let before = first_certificate(&self.authorities);
        let keys = Keys { authority: key.serialize_pem(), ..keys };
        Self::seal(cluster, secret, serial, format!("{newest}{before}"), &keys)
    }

    /// The authority before the newest is believed, too.
    pub fn has_two_authorities(&self) -> bool {
        first_certificate(&self.authorities).len() < self.authorities.len()
    }

    /// Only the newest authority is believed from now on.
    pub fn forget_old(&self) -> Self {
        Self { authorities: first_certificate(&self.authorities).into(), ..self.clone() }
    }

    /// The same authority with a secret that signs records, for a cluster that has none.
    pub fn with_record_secret(&self, cluster: &str, secret: &Secret) -> Result<Self, PkiError> {
        let records = to_hex(&random::<SECRET_LEN>()?);
        let keys = Keys { records, records_id: 1, ..self.open(cluster, secret)? };
        Self::seal(cluster, secret, self.serial, self.authorities.clone(), &keys)
    }

    /// The same authority, which says from now on that all records are signed.
    pub fn with_records_required(&self, cluster: &str, secret: &Secret) -> Result<Self, PkiError> {
        let keys = Keys { records_required: true, ..self.open(cluster, secret)? };
        Self::seal(cluster, secret, self.serial, self.authorities.clone(), &keys)
    }

    /// Opens what is sealed. A wrong secret is told as such.
    pub fn open(&self, cluster: &str, secret: &Secret) -> Result<Keys, PkiError> {
        let mut bytes = from_hex(&self.sealed).ok_or(PkiError::WrongToken)?;
        let (nonce, sealed) = bytes.split_at_mut_checked(NONCE_LEN).ok_or(PkiError::WrongToken)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| PkiError::WrongToken)?;
        let opened = secret.key(cluster).open_in_place(nonce, Aad::empty(), sealed);
        Ok(serde_json::from_slice(opened.map_err(|_| PkiError::WrongToken)?)?)
    }

    /// A certificate for the node, from the newest authority.
    pub fn issue(&self, cluster: &str, keys: &Keys, node: &NodeName) -> Result<Credentials, PkiError> {
        let key = KeyPair::generate()?;
        let signer = Issuer::new(authority(cluster, self.serial)?, KeyPair::from_pem(&keys.authority)?);
        let mut params = CertificateParams::new(vec![dns_name(node)])?;
        params.distinguished_name = name(node.as_str());
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        hold(&mut params, CERTIFICATE_AGE_MAX);
        let renew_at = unix_now() + CERTIFICATE_AGE_MAX.as_secs() / 3 * 2;
        let certificate = params.signed_by(&key, &signer)?.pem();
        Ok(Credentials { certificate, key: key.serialize_pem(), serial: self.serial, renew_at })
    }

    fn seal(
        cluster: &str,
        secret: &Secret,
        serial: u64,
        authorities: String,
        keys: &Keys,
    ) -> Result<Self, PkiError> {
        // At random: a cluster seals a few times in its life, far from where 96 bits would repeat.
        let nonce = random::<NONCE_LEN>()?;
        let mut bytes = serde_json::to_vec(keys)?;
        let key = secret.key(cluster);
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut bytes)
            .expect("a few kilobytes are shorter than what AES-GCM seals at once");
        let sealed = to_hex(&nonce) + &to_hex(&bytes);
        Ok(Self { serial, authorities, sealed })
    }
}

impl Credentials {
    pub fn is_due(&self, serial: u64) -> bool {
        self.serial != serial || unix_now() >= self.renew_at
    }
}

/// The name in a node's certificate.
fn dns_name(node: &NodeName) -> String {
    // A node's name may hold `_`, which a DNS name in a certificate may as well (RFC 5280 leaves it to the profile).
    format!("{node}.nagaya.internal")
}

/// An authority's certificate, the same each time it is asked for, so that only its key has to be kept.
fn authority(cluster: &str, serial: u64) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = name(&format!("nagaya {cluster} authority {serial}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    hold(&mut params, AUTHORITY_AGE_MAX);
    Ok(params)
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn hold(params: &mut CertificateParams, age: Duration) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let now = Duration::from_secs(unix_now());
    params.not_before = epoch + now.saturating_sub(CLOCK_MARGIN);
    params.not_after = epoch + now + age;
}

fn first_certificate(pem: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    pem.find(END).map_or(pem, |at| {
        let end = at + END.len();
        let newline = pem[end..].find(|c: char| !c.is_ascii_whitespace()).unwrap_or(pem.len() - end);
        &pem[..end + newline]
    })
}

fn unix_now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}

/// A new node's id.
pub fn node_id() -> Result<String, PkiError> {
    Ok(to_hex(&random::<16>()?))
}

fn random<const N: usize>() -> Result<[u8; N], PkiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(PkiError::Random)?;
    Ok(bytes)
}

fn to_hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    data_encoding::HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeName {
        NodeName::new("a").unwrap()
    }

    #[test]
    fn a_token_opens_the_authority_of_its_cluster_and_no_other_does() {
        let secret = Secret::generate().unwrap();
        let stored = Stored::found("main", &secret).unwrap();
        let again = Secret::from_token(&secret.token()).unwrap();
        let keys = stored.open("main", &again).unwrap();
        assert_eq!(keys.probe.len(), 64);
        assert!(matches!(stored.open("other", &again), Err(PkiError::WrongToken)));
        let other = Secret::generate().unwrap();
        assert!(matches!(stored.open("main", &other), Err(PkiError::WrongToken)));
        for text in ["", "nagaya-", "nagaya-12", "x", &secret.token()[1..]] {
            assert!(matches!(Secret::from_token(text), Err(PkiError::NoToken)), "{text}");
        }
    }

    #[test]
    fn after_an_exchange_both_authorities_are_believed_until_the_old_is_forgotten() {
        let secret = Secret::generate().unwrap();
        let first = Stored::found("main", &secret).unwrap();
        let second = first.exchange("main", &secret).unwrap();
        assert_eq!(second.serial, 2);
        assert_eq!(second.authorities.matches("BEGIN CERTIFICATE").count(), 2);
        let image_key = |stored: &Stored| stored.open("main", &secret).unwrap().image_key();
        assert_eq!(image_key(&first), image_key(&first), "all members make the same");
        assert_ne!(image_key(&first), image_key(&second));
        let third = second.exchange("main", &secret).unwrap();
        assert_eq!(third.authorities.matches("BEGIN CERTIFICATE").count(), 2);
        assert!(!third.authorities.contains(&first.authorities));
        assert!(!first.has_two_authorities() && third.has_two_authorities());
        let alone = third.forget_old();
        assert!(!alone.has_two_authorities());
        assert_eq!(alone.authorities.matches("BEGIN CERTIFICATE").count(), 1);
        assert!(third.authorities.starts_with(&alone.authorities));
        assert_eq!(
            alone.open("main", &secret).unwrap().probe,
            first.open("main", &secret).unwrap().probe,
            "probes go on meanwhile"
        );
    }

    #[test]
    fn record_secret_stays_over_an_exchange() {
        let secret = Secret::generate().unwrap();
        let stored = Stored::found("main", &secret).unwrap();
        let keys = stored.open("main", &secret).unwrap();
        assert!(keys.records_required, "a new cluster has no record that is not signed");
        let exchanged = stored.exchange("main", &secret).unwrap().open("main", &secret).unwrap();
        assert_eq!(exchanged.record_keys(), keys.record_keys());
        assert!(keys.record_keys().is_some());
    }

    #[test]
    fn authority_of_an_older_version_gets_a_record_secret_once() {
        let secret = Secret::generate().unwrap();
        let stored = Stored::found("main", &secret).unwrap();
        let keys = stored.open("main", &secret).unwrap();
        // As that version sealed it.
        let old = Keys { records: String::new(), records_id: 0, records_required: false, ..keys };
        let old = Stored::seal("main", &secret, 1, stored.authorities.clone(), &old).unwrap();
        assert_eq!(old.open("main", &secret).unwrap().record_keys(), None);
        let given = old.with_record_secret("main", &secret).unwrap();
        let keys = given.open("main", &secret).unwrap();
        assert!(keys.record_keys().is_some());
        assert!(!keys.records_required);
        let required = given.with_records_required("main", &secret).unwrap().open("main", &secret).unwrap();
        assert!(required.records_required);
        assert_eq!(required.record_keys(), keys.record_keys());
    }

    #[test]
    fn a_certificate_is_due_when_the_authority_is_another_or_time_has_passed() {
        let secret = Secret::generate().unwrap();
        let stored = Stored::found("main", &secret).unwrap();
        let keys = stored.open("main", &secret).unwrap();
        let mut credentials = stored.issue("main", &keys, &node()).unwrap();
        assert!(!credentials.is_due(1));
        assert!(credentials.is_due(2));
        credentials.renew_at = 0;
        assert!(credentials.is_due(1));
    }
}

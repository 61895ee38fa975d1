//! The identity of a cluster's nodes: the CA, the keys that only members have, and the certificates
//! of nodes.
//!
//! The store has the members' keys sealed (AES-256-GCM, RFC 5116) under a random key. That key is
//! wrapped for each member's own public key (HPKE, RFC 9180). So only the listed members can open
//! them; an old join token or another member's data does not help. A *generation* is one set of
//! these keys. Everything that the store has of it carries an authenticator (HMAC-SHA256, RFC 2104)
//! by the generation before. So a member takes over no keys that an outsider wrote.
//!
//! Not here: join tokens (`token`), the wrapping (`wrap`), where a node keeps its keys (`member`),
//! TLS (`nagaya_edge`).

pub mod token;
mod wrap;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use nagaya_keeper::image::{self, ClusterKey};
use nagaya_records::NodeName;
use nagaya_store::etcd::{RECORD_SECRET_LEN, RecordKeys};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::hmac;
use serde::{Deserialize, Serialize};

pub use self::wrap::WrapIdentity;

/// Bytes of each secret key here.
const KEY_LEN: usize = 32;

/// Lifetime of a node's certificate. It is renewed when a third of this is left.
pub const CERTIFICATE_AGE_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Lifetime of a CA: a command exchanges it, time does not.
const AUTHORITY_AGE_MAX: Duration = Duration::from_secs(20 * 365 * 86_400);

/// Certificates are valid from this long before they were made, for nodes whose clocks are behind.
const CLOCK_MARGIN: Duration = Duration::from_secs(86_400);

/// Most trusted CAs at once: the newest, and those before it until all nodes have new certificates.
const AUTHORITIES_MAX: usize = 4;

/// Generations that a member may have missed. A member that missed more has to join again.
const GENERATIONS_MAX: usize = 16;

/// Older keys of records that are trusted until their values are signed again.
const RECORDS_BEFORE_MAX: usize = 8;

/// Most members of one cluster: their wrapped keys are in one value of the store.
pub const MEMBERS_MAX: usize = 512;

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error(
        "this is no join token: `nagaya cluster token` on a member prints one, which begins with '{prefix}'",
        prefix = token::PREFIX
    )]
    NoToken,
    #[error("the token is of cluster '{of}', not of '{wanted}'")]
    OtherCluster { of: String, wanted: String },
    #[error(
        "this join token is not good any more: it was used, has run out, was revoked, or the cluster's authority was exchanged since; `nagaya cluster token` on a member prints a new one"
    )]
    Spent,
    #[error(
        "this node is no member of the cluster any more, or never became one: `nagaya cluster join` with a new token (`nagaya cluster token` on a member) makes it one"
    )]
    NotForUs,
    #[error(
        "the keys in the store were not written by a member that this node knows: somebody else has written into etcd, or this node missed more than {GENERATIONS_MAX} exchanges; if so, remove it and join it again"
    )]
    Forged,
    #[error("a cluster has at most {MEMBERS_MAX} nodes")]
    TooMany,
    #[error(
        "several exchanges of keys are not over yet: wait until `nagaya nodes` shows the newest authority at every node"
    )]
    Exchanging,
    #[error("a key or certificate cannot be made: {0}")]
    Made(#[from] rcgen::Error),
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    #[error("the store's data about the certificate authority is not understood: {0}")]
    Stored(#[from] serde_json::Error),
}

/// One generation of the members' keys, as the store has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredKeys {
    /// Grows by one with each exchange.
    pub serial: u64,
    /// Grows by one with each exchange, and when former keys end. A join does not change it.
    pub edition: u64,
    /// PEM: the CA's certificate, and those before it until all nodes have new certificates.
    pub authorities: String,
    /// Members that can open `sealed`.
    pub members: BTreeMap<NodeName, KeyRecipient>,
    /// Hexadecimal: nonce and sealed [`MemberSecrets`].
    sealed: String,
    /// Authenticators of all fields above, by this generation's key and by those of the generations
    /// before.
    proofs: BTreeMap<u64, String>,
}

/// A member, and the key of `sealed` for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecipient {
    /// As in its record.
    pub id: String,
    /// Public half of its [`WrapIdentity`], hexadecimal.
    pub public: String,
    wrapped: String,
}

/// Keys that only members have.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberSecrets {
    /// PEM.
    authority: String,
    /// 64 hexadecimal digits.
    pub probe: String,
    /// Probes signed with these still count, while the former CAs are trusted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes_before: Vec<String>,
    /// Keys that sign the cluster's records.
    pub records: RecordKeys,
    /// Keys of the authenticators, by generation: the newest [`GENERATIONS_MAX`].
    proofs: BTreeMap<u64, String>,
}

/// The newest generation that a node has taken over. A newer one must carry its authenticator.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownGeneration {
    pub serial: u64,
    pub edition: u64,
    proof: String,
}

/// A member that opens the keys.
pub struct KeyOpener<'a> {
    pub cluster: &'a str,
    pub node: &'a NodeName,
    pub id: &'a str,
    pub identity: &'a WrapIdentity,
}

/// Treatment of the former CA, and of the probes' former key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOverlap {
    /// They count until all nodes have new certificates: no request is lost.
    UntilRenewed,
    /// They end now. Nodes may not understand each other for a moment.
    None,
}

impl MemberSecrets {
    /// Returns the key that signs and seals orders to transfer images. It is derived from the CA's
    /// key, which no edge has; every edge has the key of probes.
    pub fn image_key(&self) -> ClusterKey {
        struct Len;
        impl KeyType for Len {
            fn len(&self) -> usize {
                image::KEY_LEN
            }
        }
        let key = Salt::new(HKDF_SHA256, b"nagaya images").extract(self.authority.as_bytes());
        let mut bytes = [0; image::KEY_LEN];
        let okm = key.expand(&[b"orders and streams"], Len).expect("the key is shorter than HKDF's bound");
        okm.fill(&mut bytes).expect("both have the same length");
        ClusterKey::new(bytes)
    }
}

/// A node's certificate and its key, PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCredentials {
    pub certificate: String,
    pub key: String,
    /// Serial of the CA that issued it.
    pub serial: u64,
    /// When it has to be renewed, Unix time, seconds.
    pub renew_at: u64,
}

impl StoredKeys {
    /// Makes a cluster's first generation, with one member.
    pub fn create_first(opener: &KeyOpener<'_>) -> Result<(Self, MemberSecrets), PkiError> {
        let key = KeyPair::generate()?;
        let keys = MemberSecrets {
            authority: key.serialize_pem(),
            probe: random_key()?,
            probes_before: Vec::new(),
            records: RecordKeys { current: (1, random()?), older: Vec::new() },
            proofs: BTreeMap::from([(1, random_key()?)]),
        };
        let authorities = authority(opener.cluster, 1)?.self_signed(&key)?.pem();
        let founder = member(opener.node, opener.id, &opener.identity.public());
        let members = BTreeMap::from([founder]);
        let first = Self {
            serial: 1,
            edition: 1,
            authorities,
            members,
            sealed: String::new(),
            proofs: BTreeMap::new(),
        };
        Ok((first.seal(opener.cluster, &keys)?, keys))
    }

    /// Makes the next generation: each of its keys is new. Only the members in `stays` get it.
    pub fn exchange(
        &self,
        cluster: &str,
        keys: &MemberSecrets,
        overlap: KeyOverlap,
        stays: impl Fn(&NodeName, &KeyRecipient) -> bool,
    ) -> Result<(Self, MemberSecrets), PkiError> {
        let key = KeyPair::generate()?;
        let serial = self.serial + 1;
        let mut authorities = authority(cluster, serial)?.self_signed(&key)?.pem();
        let mut next = MemberSecrets {
            authority: key.serialize_pem(),
            probe: random_key()?,
            probes_before: Vec::new(),
            records: next_records(&keys.records)?,
            proofs: keys.proofs.clone(),
        };
        next.proofs.insert(serial, random_key()?);
        while next.proofs.len() > GENERATIONS_MAX {
            next.proofs.pop_first();
        }
        if overlap == KeyOverlap::UntilRenewed {
            if self.count_authorities() >= AUTHORITIES_MAX || keys.records.older.len() >= RECORDS_BEFORE_MAX {
                return Err(PkiError::Exchanging);
            }
            authorities += &self.authorities;
            next.probes_before.push(keys.probe.clone());
            next.probes_before.extend(keys.probes_before.iter().cloned());
        }
        let stay = self.members.iter().filter(|(node, recipient)| stays(node, recipient));
        let members = stay.map(|(node, recipient)| (node.clone(), recipient.clone())).collect();
        let edition = self.edition + 1;
        let stored = Self { serial, edition, authorities, members, ..self.clone() };
        Ok((stored.seal(cluster, &next)?, next))
    }

    /// Makes only the newest CA and the newest key of probes count from now on.
    pub fn forget_old(&self, cluster: &str, keys: &MemberSecrets) -> Result<Self, PkiError> {
        let authorities = first_certificate(&self.authorities).to_owned();
        let keys = MemberSecrets { probes_before: Vec::new(), ..keys.clone() };
        Self { edition: self.edition + 1, authorities, ..self.clone() }.seal(cluster, &keys)
    }

    /// Makes only the newest key of records count from now on.
    pub fn forget_old_records(&self, cluster: &str, keys: &MemberSecrets) -> Result<Self, PkiError> {
        let records = RecordKeys { older: Vec::new(), ..keys.records.clone() };
        let keys = MemberSecrets { records, ..keys.clone() };
        Self { edition: self.edition + 1, ..self.clone() }.seal(cluster, &keys)
    }

    /// Returns the same generation with one more member.
    pub fn with_member(
        &self,
        cluster: &str,
        keys: &MemberSecrets,
        node: &NodeName,
        id: &str,
        public: &str,
    ) -> Result<Self, PkiError> {
        let mut members = self.members.clone();
        members.extend([member(node, id, public)]);
        if members.len() > MEMBERS_MAX {
            return Err(PkiError::TooMany);
        }
        Self { members, ..self.clone() }.seal(cluster, keys)
    }

    /// Returns whether the former CAs, and the former keys of probes, still count.
    pub fn is_exchanging(&self) -> bool {
        self.count_authorities() > 1
    }

    /// Returns the number of trusted CAs.
    pub fn count_authorities(&self) -> usize {
        self.authorities.matches("-----BEGIN CERTIFICATE-----").count()
    }

    /// Opens the sealed keys. Fails unless a member of the generation `known` wrote them.
    pub fn open(&self, opener: &KeyOpener<'_>, known: &KnownGeneration) -> Result<MemberSecrets, PkiError> {
        self.verify(opener.cluster, known)?;
        self.open_own(opener)
    }

    /// Does the same for the node that founded the cluster, which knows no generation yet.
    pub fn open_own(&self, opener: &KeyOpener<'_>) -> Result<MemberSecrets, PkiError> {
        let recipient = self.members.get(opener.node).filter(|recipient| recipient.id == opener.id);
        let recipient = recipient.ok_or(PkiError::NotForUs)?;
        let info = wrap_info(opener.cluster, self.serial, opener.node, opener.id);
        let key = opener.identity.unwrap(&recipient.wrapped, &info).ok_or(PkiError::NotForUs)?;
        let bytes = open(&key, &self.sealed, &self.body(opener.cluster)).ok_or(PkiError::Forged)?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Checks that the writer had the keys of this generation.
    pub fn verify(&self, cluster: &str, known: &KnownGeneration) -> Result<(), PkiError> {
        // An older one that was put back would restore ended keys.
        if self.serial < known.serial || self.edition < known.edition {
            return Err(PkiError::Forged);
        }
        let proof =
            self.proofs.get(&known.serial).and_then(|proof| from_hex(proof)).ok_or(PkiError::Forged)?;
        let key = proof_key(&known.proof).ok_or(PkiError::Forged)?;
        hmac::verify(&key, &self.proven(cluster), &proof).map_err(|_| PkiError::Forged)
    }

    /// Issues a certificate for the node, from the newest CA.
    pub fn issue(
        &self,
        cluster: &str,
        keys: &MemberSecrets,
        node: &NodeName,
    ) -> Result<NodeCredentials, PkiError> {
        let key = KeyPair::generate()?;
        let signer = Issuer::new(authority(cluster, self.serial)?, KeyPair::from_pem(&keys.authority)?);
        let mut params = CertificateParams::new(vec![dns_name(node)])?;
        params.distinguished_name = common_name(node.as_str());
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        hold(&mut params, CERTIFICATE_AGE_MAX);
        let renew_at = unix_now() + CERTIFICATE_AGE_MAX.as_secs() / 3 * 2;
        let certificate = params.signed_by(&key, &signer)?.pem();
        Ok(NodeCredentials { certificate, key: key.serialize_pem(), serial: self.serial, renew_at })
    }

    /// Returns the data of this generation that a node remembers.
    pub fn remember(&self, keys: &MemberSecrets) -> Result<KnownGeneration, PkiError> {
        let proof = keys.proofs.get(&self.serial).cloned().ok_or(PkiError::Forged)?;
        Ok(KnownGeneration { serial: self.serial, edition: self.edition, proof })
    }

    /// Returns it with these keys sealed for its members.
    fn seal(self, cluster: &str, keys: &MemberSecrets) -> Result<Self, PkiError> {
        let mut stored = self;
        let key = random::<KEY_LEN>()?;
        for (node, recipient) in &mut stored.members {
            let info = wrap_info(cluster, stored.serial, node, &recipient.id);
            // A member with an invalid public key cannot get the keys.
            recipient.wrapped = wrap::wrap(&recipient.public, &key, &info).ok_or(PkiError::NotForUs)?;
        }
        stored.sealed = seal(&key, &serde_json::to_vec(keys)?, &stored.body(cluster))?;
        let proven = stored.proven(cluster);
        stored.proofs.clear();
        for (serial, proof) in &keys.proofs {
            let key = proof_key(proof).ok_or(PkiError::Forged)?;
            stored.proofs.insert(*serial, to_hex(hmac::sign(&key, &proven).as_ref()));
        }
        Ok(stored)
    }

    /// Returns everything except the sealed keys and the authenticators.
    fn body(&self, cluster: &str) -> Vec<u8> {
        let Self { serial, edition, authorities, members, .. } = self;
        let body = ("nagaya members' keys", cluster, serial, edition, authorities, members);
        serde_json::to_vec(&body).expect("it has text keys, and writing to memory works")
    }

    fn proven(&self, cluster: &str) -> Vec<u8> {
        [&self.body(cluster), self.sealed.as_bytes()].concat()
    }
}

const _: () = assert!(RECORD_SECRET_LEN == KEY_LEN);

/// Returns the next key of records. Values of the former ones count until they are signed again.
fn next_records(records: &RecordKeys) -> Result<RecordKeys, PkiError> {
    let (id, _) = records.current;
    let older = std::iter::once(records.current).chain(records.older.iter().copied()).collect();
    Ok(RecordKeys { current: (id + 1, random()?), older })
}

impl NodeCredentials {
    pub fn is_due(&self, serial: u64) -> bool {
        self.serial != serial || unix_now() >= self.renew_at
    }
}

fn member(node: &NodeName, id: &str, public: &str) -> (NodeName, KeyRecipient) {
    (node.clone(), KeyRecipient { id: id.into(), public: public.into(), wrapped: String::new() })
}

/// Binds a wrapped key to its cluster, generation and member.
fn wrap_info(cluster: &str, serial: u64, node: &NodeName, id: &str) -> Vec<u8> {
    format!("nagaya members' keys\n{cluster}\n{serial}\n{node}\n{id}").into_bytes()
}

fn proof_key(text: &str) -> Option<hmac::Key> {
    Some(hmac::Key::new(hmac::HMAC_SHA256, &from_hex(text).filter(|key| key.len() == KEY_LEN)?))
}

/// Returns the name in a node's certificate.
fn dns_name(node: &NodeName) -> String {
    // A node's name may have `_`. So may a DNS name in a certificate (RFC 5280 leaves it to the
    // profile).
    format!("{node}.nagaya.internal")
}

/// Returns a CA's certificate. It is the same each time, so only its key must be stored.
fn authority(cluster: &str, serial: u64) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = common_name(&format!("nagaya {cluster} authority {serial}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    hold(&mut params, AUTHORITY_AGE_MAX);
    Ok(params)
}

fn common_name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// Sets the validity of a certificate.
pub fn hold(params: &mut CertificateParams, age: Duration) {
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

pub fn unix_now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}

/// Returns a new node's id.
pub fn node_id() -> Result<String, PkiError> {
    Ok(to_hex(&random::<16>()?))
}

/// Seals under a key that is random or used once.
fn seal(key: &[u8; KEY_LEN], text: &[u8], bound: &[u8]) -> Result<String, PkiError> {
    // The nonce is random: each key here seals once, far from where 96 bits would repeat.
    let nonce = random::<NONCE_LEN>()?;
    let mut bytes = text.to_vec();
    aead(key)
        .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(bound), &mut bytes)
        .expect("a few kilobytes are shorter than what AES-GCM seals at once");
    Ok(to_hex(&nonce) + &to_hex(&bytes))
}

/// Opens a sealed text. `None` if it was sealed under another key, or bound to something else.
fn open(key: &[u8; KEY_LEN], sealed: &str, bound: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = from_hex(sealed)?;
    let (nonce, sealed) = bytes.split_at_mut_checked(NONCE_LEN)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    Some(aead(key).open_in_place(nonce, Aad::from(bound), sealed).ok()?.to_vec())
}

fn aead(key: &[u8; KEY_LEN]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("AES-256 has keys of 32 bytes"))
}

fn random_key() -> Result<String, PkiError> {
    Ok(to_hex(&random::<KEY_LEN>()?))
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
mod tests;

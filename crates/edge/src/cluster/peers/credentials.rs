//! Holds the TLS credentials between nodes: TLS 1.3 with certificates of the cluster's CA on both
//! sides. Each is for the one name of its node.
//!
//! Not here: certificates of sites (`tls`), the list of members (the records).

use std::sync::Arc;

use nagaya_records::NodeName;
use ring::hmac;
use rustls::client::Resumption;
use rustls::crypto::ring as provider;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use crate::crypto;
use crate::options::ClusterOptions;

/// Suffix of a node's name in its certificate.
const SUFFIX: &str = ".nagaya.internal";

/// The only protocol of both sides.
pub const ALPN: &[u8] = b"h2";

/// Maximum number of sessions kept for resumption, over all peers and threads.
const SESSIONS_MAX: usize = 1024;

/// Length of the probes' key.
const PROBE_KEY_LEN: usize = 32;

/// Credentials of one membership. They are created again whenever the settings change, which
/// invalidates earlier sessions and tickets.
pub struct PeerCredentials {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    pub probe_keys: ProbeKeys,
}

/// Keys of the datagrams between members. During a key change several are valid.
pub struct ProbeKeys {
    /// Signs this node's questions.
    own: hmac::Key,
    also: Vec<hmac::Key>,
}

impl ProbeKeys {
    pub fn own(&self) -> &hmac::Key {
        &self.own
    }

    /// Reads a datagram with the first key that fits. An answer is signed with the key of its
    /// question.
    pub fn read<T>(&self, read: impl Fn(&hmac::Key) -> Option<T>) -> Option<(T, &hmac::Key)> {
        let mut keys = std::iter::once(&self.own).chain(&self.also);
        keys.find_map(|key| Some((read(key)?, key)))
    }
}

impl std::fmt::Debug for PeerCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error("the authorities' certificates cannot be read: {0}")]
    Authorities(String),
    #[error("the node's certificate cannot be read: {0}")]
    Certificate(String),
    #[error("the node's certificate is for {found}, and not for {wanted} alone")]
    Name { wanted: String, found: String },
    #[error("the node's key cannot be read: {0}")]
    Key(String),
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
    #[error("the key of the probes is not {} hexadecimal digits", 2 * PROBE_KEY_LEN)]
    ProbeKey,
}

impl PeerCredentials {
    pub fn new(options: &ClusterOptions) -> Result<Self, CredentialsError> {
        use CredentialsError as E;
        let roots = Arc::new(authorities(&options.authorities)?);
        let chain: Vec<_> = CertificateDer::pem_slice_iter(options.certificate.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| E::Certificate(error.to_string()))?;
        let own = chain.first().ok_or_else(|| E::Certificate("there is none".into()))?;
        let found = node_of(own);
        if found.as_ref().map(NodeName::as_str) != Some(options.node.as_str()) {
            let wanted = format!("{}{SUFFIX}", options.node);
            return Err(E::Name { wanted, found: found.map_or("no node".into(), |name| name.to_string()) });
        }
        let key = || {
            PrivateKeyDer::from_pem_slice(options.key.as_bytes()).map_err(|error| E::Key(error.to_string()))
        };
        let crypto = Arc::new(crypto::provider());
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key()?)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::in_memory_sessions(SESSIONS_MAX);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&crypto))
            .build()
            .map_err(|error| E::Authorities(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(crypto)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key()?)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.ticketer = provider::Ticketer::new()?;
        server.max_early_data_size = 0;
        let key = |text: &String| Ok(hmac::Key::new(hmac::HMAC_SHA256, &probe_key(text)?));
        let also = options.probe_keys_also.iter().map(key).collect::<Result<_, E>>()?;
        let probe_keys = ProbeKeys { own: key(&options.probe_key)?, also };
        Ok(Self { client: Arc::new(client), server: Arc::new(server), probe_keys })
    }
}

fn authorities(pem: &str) -> Result<RootCertStore, CredentialsError> {
    let mut roots = RootCertStore::empty();
    let wrong = |error: String| CredentialsError::Authorities(error);
    for authority in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let authority = authority.map_err(|error| wrong(error.to_string()))?;
        roots.add(authority).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() { Err(wrong("there are none".into())) } else { Ok(roots) }
}

fn probe_key(text: &str) -> Result<[u8; PROBE_KEY_LEN], CredentialsError> {
    let mut key = [0; PROBE_KEY_LEN];
    if text.len() != 2 * PROBE_KEY_LEN || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(CredentialsError::ProbeKey);
    }
    for (byte, at) in key.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| CredentialsError::ProbeKey)?;
    }
    Ok(key)
}

/// Returns the name in the certificate of this node. `None` if no certificate can contain such a
/// name.
pub fn server_name(node: &NodeName) -> Option<ServerName<'static>> {
    ServerName::try_from(format!("{node}{SUFFIX}")).ok()
}

/// Returns the node of a certificate: it has one node's name, and no other.
pub fn node_of(certificate: &CertificateDer<'_>) -> Option<NodeName> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut names = certificate.valid_dns_names();
    let (only, None) = (names.next()?, names.next()) else { return None };
    NodeName::new(only.strip_suffix(SUFFIX)?).ok()
}

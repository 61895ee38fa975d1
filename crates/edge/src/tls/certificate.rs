//! What one certificate file holds: a chain, its private key, and the configuration made of them.
//!
//! Not here: where the file comes from and how long it stays in memory (`store`).

use std::fs::File;
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{Error, InconsistentKeys, ServerConfig};
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Largest file that is read. A chain of three certificates with a key is about 8 KiB.
const CERTIFICATE_BYTES_MAX: u64 = 256 << 10;

/// A certificate, ready for handshakes.
#[derive(Debug)]
pub(super) struct Certificate {
    pub(super) config: Arc<ServerConfig>,
    /// DNS names it is for, lower case.
    pub(super) names: Rc<[Box<str>]>,
}

/// What is wrong with a certificate file.
#[derive(Debug, thiserror::Error)]
pub(super) enum Flaw {
    #[error("it cannot be read: {0}")]
    Read(std::io::Error),
    #[error("it is larger than {CERTIFICATE_BYTES_MAX} bytes")]
    TooLarge,
    #[error("it is not PEM: {0}")]
    Pem(pem::Error),
    #[error("it has no CERTIFICATE section")]
    NoCertificate,
    #[error("it has no PRIVATE KEY section (an encrypted key cannot be used)")]
    NoKey,
    #[error("its first certificate is not for its private key")]
    KeyMismatch,
    #[error("its key or certificate is not usable: {0}")]
    Unusable(Error),
}

impl Certificate {
    /// Reads the file to its end. A few KiB out of the page cache: not worth another thread.
    pub(super) fn read(file: File, base: &ServerConfig) -> Result<Self, Flaw> {
        let mut bytes = Vec::new();
        file.take(CERTIFICATE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Flaw::Read)?;
        if bytes.len() as u64 > CERTIFICATE_BYTES_MAX {
            return Err(Flaw::TooLarge);
        }
        Self::parse(&bytes, base)
    }

    fn parse(bytes: &[u8], base: &ServerConfig) -> Result<Self, Flaw> {
        let chain: Vec<_> =
            CertificateDer::pem_slice_iter(bytes).collect::<Result<_, _>>().map_err(Flaw::Pem)?;
        let first = chain.first().ok_or(Flaw::NoCertificate)?;
        let names = names(first)?;
        let key = PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
            pem::Error::NoItemsFound => Flaw::NoKey,
            other => Flaw::Pem(other),
        })?;
        let key =
            CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| match error {
                Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => Flaw::KeyMismatch,
                other => Flaw::Unusable(other),
            })?;
        let mut config = base.clone();
        config.cert_resolver = Arc::new(SingleCertAndKey::from(key));
        Ok(Self { config: Arc::new(config), names })
    }
}

fn names(certificate: &CertificateDer<'_>) -> Result<Rc<[Box<str>]>, Flaw> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| Flaw::Unusable(Error::General(error.to_string())))?;
    Ok(certificate.valid_dns_names().map(|name| name.to_ascii_lowercase().into()).collect())
}

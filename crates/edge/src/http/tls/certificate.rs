//! Reads one certificate file: a chain, its private key, and the configuration made of them.
//!
//! Not here: the source of the file and its time in memory (`store`).

use std::fs::File;
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{Error, InconsistentKeys, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem};

/// Maximum size of a file that is read. A chain of three certificates with a key is about 8 KiB.
const CERTIFICATE_BYTES_MAX: u64 = 256 << 10;

/// A certificate, ready for handshakes.
#[derive(Debug)]
pub(super) struct ServerCertificate {
    pub(super) config: Arc<ServerConfig>,
    /// Its DNS names, lower case.
    pub(super) names: Rc<[Box<str>]>,
}

/// Fault of a certificate file.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertificateFlaw {
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

impl ServerCertificate {
    /// Reads the file to its end. It is a few KiB in the page cache, so it needs no other thread.
    pub(super) fn read(file: File, base: &ServerConfig) -> Result<Self, CertificateFlaw> {
        let mut bytes = Vec::new();
        file.take(CERTIFICATE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(CertificateFlaw::Read)?;
        if bytes.len() as u64 > CERTIFICATE_BYTES_MAX {
            return Err(CertificateFlaw::TooLarge);
        }
        Self::parse(&bytes, base)
    }

    fn parse(bytes: &[u8], base: &ServerConfig) -> Result<Self, CertificateFlaw> {
        let chain: Vec<_> =
            CertificateDer::pem_slice_iter(bytes).collect::<Result<_, _>>().map_err(CertificateFlaw::Pem)?;
        let first = chain.first().ok_or(CertificateFlaw::NoCertificate)?;
        let names = names(first)?;
        let key = PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
            pem::Error::NoItemsFound => CertificateFlaw::NoKey,
            other => CertificateFlaw::Pem(other),
        })?;
        let key =
            CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| match error {
                Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => CertificateFlaw::KeyMismatch,
                other => CertificateFlaw::Unusable(other),
            })?;
        let mut config = base.clone();
        config.cert_resolver = Arc::new(SingleCertAndKey::from(key));
        Ok(Self { config: Arc::new(config), names })
    }
}

fn names(certificate: &CertificateDer<'_>) -> Result<Rc<[Box<str>]>, CertificateFlaw> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| CertificateFlaw::Unusable(Error::General(error.to_string())))?;
    Ok(certificate.valid_dns_names().map(|name| name.to_ascii_lowercase().into()).collect())
}

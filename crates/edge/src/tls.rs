//! TLS: which certificate for which name, and the handshake with it.
//!
//! The name in the ClientHello decides which certificate is loaded, then the handshake goes on with a
//! configuration made for it. One shared part per process holds what must be the same on every thread: a
//! client that comes back with a session ticket may arrive at another one.
//!
//! Not here: certificates in memory (`store`), their files' content (`certificate`), opening files (the keeper),
//! the time a handshake may take (the caller's `timeout`).

mod certificate;
mod store;

use std::io;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use lru::LruCache;
use nagaya_cmdb::names::is_host_name;
use nagaya_keeper::client::Keeper;
use parking_lot::Mutex;
use rustls::crypto::ring;
use rustls::server::{Acceptor, ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, ProtocolVersion, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::crypto;
use crate::message::TlsInfo;
use crate::metrics::{Handshake, Metrics};
use certificate::Certificate;
pub use store::CertificateSource;
use store::{Found, Stamp, Store};

/// File for clients that send no name, and for names that have no certificate.
const DEFAULT_NAME: &str = "default";

/// In front of `.example.org`, where the certificate is for `*.example.org`.
const WILDCARD: &str = "_wildcard";

/// Broken certificates remembered so that each is reported once; beyond it the oldest may be reported again.
const REPORTED_MAX: usize = 1024;

/// The protocol the client and we settled on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    Http1,
    Http2,
}

/// Why a handshake came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the TLS handshake failed: {0}")]
    Handshake(#[from] io::Error),
    #[error("there is no certificate for '{0}', and no default")]
    NoCertificate(Box<str>),
    #[error("the certificate '{0}' cannot be used")]
    BrokenCertificate(Box<str>),
}

/// What all threads of a process share: above all the keys of session tickets.
static SHARED: LazyLock<Shared> = LazyLock::new(|| {
    Shared::new().expect("the kernel gives random bytes, and the provider knows TLS 1.2 and 1.3")
});

#[derive(Debug)]
struct Shared {
    /// Every certificate's configuration is a copy of this one.
    config: ServerConfig,
    reported: Mutex<LruCache<Box<str>, Stamp>>,
}

impl Shared {
    fn new() -> Result<Self, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::provider()))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Nobody));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Tickets carry the session encrypted, under keys that change every few hours: nothing is kept per
        // client. Early data can be replayed (RFC 8446 section 8), so none is taken.
        config.ticketer = ring::Ticketer::new()?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.max_early_data_size = 0;
        let reported = LruCache::new(NonZeroUsize::new(REPORTED_MAX).expect("not zero"));
        Ok(Self { config, reported: Mutex::new(reported) })
    }

    /// True once for each state of a broken certificate, whatever the thread.
    fn is_first_report(&self, name: &str, stamp: Stamp) -> bool {
        self.reported.lock().put(name.into(), stamp) != Some(stamp)
    }
}

/// Has no certificate: stands in the shared configuration, which no connection uses as it is.
#[derive(Debug)]
struct Nobody;

impl ResolvesServerCert for Nobody {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

/// One thread's TLS.
#[derive(Debug)]
pub struct Tls<S = Rc<Keeper>> {
    store: Store<S>,
    metrics: Arc<Metrics>,
}

impl<S: CertificateSource> Tls<S> {
    pub fn new(source: S, metrics: Arc<Metrics>) -> Self {
        Self { store: Store::new(source, &SHARED, Arc::clone(&metrics)), metrics }
    }

    /// Performs the handshake. Takes as long as the client does: put a timeout around it.
    pub async fn accept<IO>(&self, io: IO) -> Result<(TlsStream<IO>, TlsInfo, Alpn), TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        let result = self.handshake(io).await;
        self.metrics.handshake(match &result {
            Ok(_) => Handshake::Ok,
            Err(TlsError::Handshake(_)) => Handshake::Failed,
            Err(TlsError::NoCertificate(_)) => Handshake::NoCertificate,
            Err(TlsError::BrokenCertificate(_)) => Handshake::BrokenCertificate,
        });
        result
    }

    async fn handshake<IO>(&self, io: IO) -> Result<(TlsStream<IO>, TlsInfo, Alpn), TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        let mut start = LazyConfigAcceptor::new(Acceptor::default(), io).await?;
        let server_name = start.client_hello().server_name().map(normalize_name);
        let certificate = match self.choose(server_name.as_deref()).await {
            Ok(certificate) => certificate,
            Err(error) => {
                let alert = match error {
                    TlsError::NoCertificate(_) => AlertDescription::UnrecognisedName,
                    _ => AlertDescription::InternalError,
                };
                send_alert(&mut start.io, alert).await;
                return Err(error);
            }
        };
        let stream = start.into_stream(Arc::clone(&certificate.config)).await?;
        let (_, connection) = stream.get_ref();
        let info = TlsInfo {
            server_name,
            protocol: match connection.protocol_version() {
                Some(ProtocolVersion::TLSv1_3) => "TLSv1.3",
                _ => "TLSv1.2",
            },
            cipher: connection
                .negotiated_cipher_suite()
                .and_then(|suite| suite.suite().as_str())
                .unwrap_or("unknown"),
            certificate_names: Rc::clone(&certificate.names),
        };
        let alpn = if connection.alpn_protocol() == Some(b"h2") { Alpn::Http2 } else { Alpn::Http1 };
        Ok((stream, info, alpn))
    }

    /// The certificate of the name itself, else the one for its siblings, else the default.
    async fn choose(&self, server_name: Option<&str>) -> Result<Rc<Certificate>, TlsError> {
        let name = server_name.filter(|name| is_host_name(name));
        let wildcard =
            name.and_then(|name| name.split_once('.')).map(|(_, parent)| format!("{WILDCARD}.{parent}"));
        for candidate in [name, wildcard.as_deref(), Some(DEFAULT_NAME)].into_iter().flatten() {
            match self.store.find(candidate).await {
                Found::Certificate(certificate) => return Ok(certificate),
                Found::Broken => return Err(TlsError::BrokenCertificate(candidate.into())),
                Found::Absent => {}
            }
        }
        Err(TlsError::NoCertificate(server_name.unwrap_or_default().into()))
    }
}

/// The name as hosts of requests are written. Some clients send the dot that ends a name that is complete, which RFC 6066
/// section 3 leaves out.
fn normalize_name(server_name: &str) -> Box<str> {
    server_name.strip_suffix('.').unwrap_or(server_name).to_ascii_lowercase().into()
}

/// Tells the client why the handshake ends before there is a configuration to go on with. At this point
/// nothing is encrypted yet, so the record can be written as it stands (RFC 8446 sections 5.1 and 6).
async fn send_alert(io: &mut (impl AsyncWrite + Unpin), alert: AlertDescription) {
    const ALERT_RECORD: u8 = 21;
    const FATAL: u8 = 2;
    let record = [ALERT_RECORD, 3, 3, 0, 2, FATAL, u8::from(alert)];
    // The client may have left; then there is nobody to tell.
    if io.write_all(&record).await.is_ok() {
        let _ = io.shutdown().await;
    }
}

/// Whether a request for `host` (lower case, without port) belongs on a connection with this handshake: it
/// is the name the client asked for, or the certificate it was shown is good for it as well (RFC 9110 section
/// 7.4, RFC 9113 section 9.1.1). A client that sent no name was shown the default and took it.
///
/// This says nothing about trust; that is for the client to check.
pub fn covers(tls: &TlsInfo, host: &str) -> bool {
    let Some(server_name) = tls.server_name.as_deref() else { return true };
    server_name == host || tls.certificate_names.iter().any(|pattern| is_match(pattern, host))
}

/// RFC 6125 section 6.4.3: a star stands for exactly one label, in front.
fn is_match(pattern: &str, host: &str) -> bool {
    match pattern.strip_prefix("*.") {
        Some(parent) => host.split_once('.').is_some_and(|(first, rest)| !first.is_empty() && rest == parent),
        None => pattern == host,
    }
}

#[cfg(test)]
mod tests;

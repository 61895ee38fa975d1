//! Chooses the certificate for a name, and performs the TLS handshake with it.
//!
//! The name in the ClientHello decides which certificate is loaded. Then the handshake continues
//! with a configuration made for it. One part per process is shared, because it must be equal on
//! every thread. A client that comes back with a session ticket may arrive at another one.
//!
//! Not here: certificates in memory (`store`), their files (`certificate`, opened by the keeper),
//! the caller's time limit (`timeout`).

pub mod certificate;
pub mod store;

use std::io;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use lru::LruCache;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::names::is_host_name;
use parking_lot::Mutex;
use rustls::crypto::ring;
use rustls::server::{Acceptor, ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, ProtocolVersion, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::crypto;
use crate::http::message::TlsInfo;
use crate::http::tls::certificate::ServerCertificate;
use crate::http::tls::store::{CertificateSource, CertificateStamp, CertificateStore, FoundCertificate};
use crate::metrics::{EdgeMetrics, HandshakeResult};

/// File for clients that send no name, and for names without a certificate.
const DEFAULT_NAME: &str = "default";

/// Prefix of `.example.org` in the file name of a certificate for `*.example.org`.
const WILDCARD: &str = "_wildcard";

/// Maximum number of broken certificates remembered, so that each is reported once. Beyond it the
/// oldest may be reported again.
const REPORTED_MAX: usize = 1024;

/// The protocol that client and server agreed upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    Http1,
    Http2,
}

/// Reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the TLS handshake failed: {0}")]
    Handshake(#[from] io::Error),
    #[error("there is no certificate for '{0}', and no default")]
    NoCertificate(Box<str>),
    #[error("the certificate '{0}' cannot be used")]
    BrokenCertificate(Box<str>),
}

/// State that all threads of a process share, above all the keys of session tickets.
static SHARED: LazyLock<TlsShared> = LazyLock::new(|| {
    TlsShared::new().expect("the kernel gives random bytes, and the provider knows TLS 1.2 and 1.3")
});

#[derive(Debug)]
struct TlsShared {
    /// Every certificate's configuration is a copy of this one.
    config: ServerConfig,
    reported: Mutex<LruCache<Box<str>, CertificateStamp>>,
}

impl TlsShared {
    fn new() -> Result<Self, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::provider()))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(EmptyResolver));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Tickets carry the session encrypted, under keys that change every few hours: nothing is
        // kept per client. Early data can be replayed (RFC 8446 section 8), so none is accepted.
        config.ticketer = ring::Ticketer::new()?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.max_early_data_size = 0;
        let reported = LruCache::new(NonZeroUsize::new(REPORTED_MAX).expect("not zero"));
        Ok(Self { config, reported: Mutex::new(reported) })
    }

    /// Returns true once for each state of a broken certificate, over all threads.
    fn is_first_report(&self, name: &str, stamp: CertificateStamp) -> bool {
        self.reported.lock().put(name.into(), stamp) != Some(stamp)
    }
}

/// A resolver without a certificate. It is in the shared configuration, which no connection uses
/// directly.
#[derive(Debug)]
struct EmptyResolver;

impl ResolvesServerCert for EmptyResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

/// TLS of one thread.
#[derive(Debug)]
pub struct ThreadTls<S = Rc<KeeperClient>> {
    store: CertificateStore<S>,
    metrics: Arc<EdgeMetrics>,
}

impl<S: CertificateSource> ThreadTls<S> {
    pub fn new(source: S, metrics: Arc<EdgeMetrics>) -> Self {
        Self { store: CertificateStore::new(source, &SHARED, Arc::clone(&metrics)), metrics }
    }

    /// Performs the handshake. The client determines its duration: use a timeout.
    pub async fn accept<IO>(&self, io: IO) -> Result<(TlsStream<IO>, TlsInfo, Alpn), TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        let result = self.handshake(io).await;
        self.metrics.handshake(match &result {
            Ok(_) => HandshakeResult::Ok,
            Err(TlsError::Handshake(_)) => HandshakeResult::Failed,
            Err(TlsError::NoCertificate(_)) => HandshakeResult::NoCertificate,
            Err(TlsError::BrokenCertificate(_)) => HandshakeResult::BrokenCertificate,
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

    /// Returns the certificate of the name itself, else the one for its siblings, else the
    /// default.
    async fn choose(&self, server_name: Option<&str>) -> Result<Rc<ServerCertificate>, TlsError> {
        let name = server_name.filter(|name| is_host_name(name));
        let wildcard =
            name.and_then(|name| name.split_once('.')).map(|(_, parent)| format!("{WILDCARD}.{parent}"));
        for candidate in [name, wildcard.as_deref(), Some(DEFAULT_NAME)].into_iter().flatten() {
            match self.store.find(candidate).await {
                FoundCertificate::Certificate(certificate) => return Ok(certificate),
                FoundCertificate::Broken => return Err(TlsError::BrokenCertificate(candidate.into())),
                FoundCertificate::Absent => {}
            }
        }
        Err(TlsError::NoCertificate(server_name.unwrap_or_default().into()))
    }
}

/// Returns the name in the form of hosts in requests. Some clients send the final dot of a
/// complete name, which RFC 6066 section 3 leaves out.
fn normalize_name(server_name: &str) -> Box<str> {
    server_name.strip_suffix('.').unwrap_or(server_name).to_ascii_lowercase().into()
}

/// Sends the reason of a failure to the client before there is a configuration. Nothing is
/// encrypted at this point, so the record is written in plain form (RFC 8446 sections 5.1 and 6).
async fn send_alert(io: &mut (impl AsyncWrite + Unpin), alert: AlertDescription) {
    const ALERT_RECORD: u8 = 21;
    const FATAL: u8 = 2;
    let record = [ALERT_RECORD, 3, 3, 0, 2, FATAL, u8::from(alert)];
    // The client may have left. Then nobody receives it.
    if io.write_all(&record).await.is_ok() {
        let _ = io.shutdown().await;
    }
}

/// Returns whether a request for `host` (lower case, without port) belongs on a connection with
/// this handshake. The client requested this name, or the certificate in use is valid for it,
/// too. See RFC 9110 section 7.4 and RFC 9113 section 9.1.1. A client that sent no name accepted
/// the default.
///
/// This proves nothing about trust, which the client has to check.
pub fn covers(tls: &TlsInfo, host: &str) -> bool {
    let Some(server_name) = tls.server_name.as_deref() else { return true };
    server_name == host || tls.certificate_names.iter().any(|pattern| is_match(pattern, host))
}

/// Matches a pattern. A star means exactly one label, in front (RFC 6125 section 6.4.3).
fn is_match(pattern: &str, host: &str) -> bool {
    match pattern.strip_prefix("*.") {
        Some(parent) => host.split_once('.').is_some_and(|(first, rest)| !first.is_empty() && rest == parent),
        None => pattern == host,
    }
}

#[cfg(test)]
mod tests;

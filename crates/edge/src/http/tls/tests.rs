//! Tests of TLS: real handshakes with certificates made for them, in a directory as operators keep it.

use std::cell::{Cell, RefCell};
use std::fs;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, SignatureAlgorithm};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, DuplexStream, duplex};
use tokio_rustls::TlsConnector;

use super::*;

/// A directory of `<name>.pem` files, and how often each was asked for.
struct Directory {
    dir: TempDir,
    asked: RefCell<Vec<String>>,
    fails: Cell<bool>,
}

impl Directory {
    fn new() -> Rc<Self> {
        let dir = tempfile::tempdir().unwrap();
        Rc::new(Self { dir, asked: RefCell::default(), fails: Cell::new(false) })
    }

    /// Replaces the file as an operator should: by renaming.
    fn put(&self, name: &str, pem: &str) {
        let new = self.dir.path().join("new");
        fs::write(&new, pem).unwrap();
        fs::rename(new, self.dir.path().join(format!("{name}.pem"))).unwrap();
    }

    fn asked_for(&self, name: &str) -> usize {
        self.asked.borrow().iter().filter(|n| *n == name).count()
    }
}

impl CertificateSource for Rc<Directory> {
    type Error = io::Error;

    async fn open(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        self.asked.borrow_mut().push(name.to_owned());
        // Like a question to another process, the answer takes a turn of the runtime.
        tokio::task::yield_now().await;
        if self.fails.get() {
            return Err(io::Error::other("the keeper is not there"));
        }
        match File::open(self.dir.path().join(format!("{name}.pem"))) {
            Ok(file) => Ok(Some(file.into())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Certificate and key for these names, and the certificate's DER to recognise it by.
fn made(names: &[&str], algorithm: &'static SignatureAlgorithm) -> (String, CertificateDer<'static>) {
    let key = KeyPair::generate_for(algorithm).unwrap();
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
    (certificate.pem() + &key.serialize_pem(), certificate.der().clone())
}

/// The same with an RSA key, for the name `rsa`. No library in use makes RSA keys, so OpenSSL does.
fn made_rsa() -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = |name| dir.path().join(name).into_os_string();
    let command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=rsa -addext subjectAltName=DNS:rsa";
    let output = std::process::Command::new("openssl")
        .args(command.split(' '))
        .args(["-keyout".into(), path("key"), "-out".into(), path("certificate")])
        .output()
        .expect("this test needs the command openssl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(path("certificate")).unwrap() + &fs::read_to_string(path("key")).unwrap()
}

fn certificate(names: &[&str]) -> (String, CertificateDer<'static>) {
    made(names, &rcgen::PKCS_ECDSA_P256_SHA256)
}

/// A client that takes any certificate: the tests look at which one it was.
#[derive(Debug)]
struct TakeAny;

impl ServerCertVerifier for TakeAny {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

fn client(versions: &[&'static rustls::SupportedProtocolVersion], alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(TakeAny))
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
    Arc::new(config)
}

type Client = tokio_rustls::client::TlsStream<DuplexStream>;
type Accepted = Result<(TlsStream<DuplexStream>, TlsInfo, Alpn), TlsError>;

async fn handshake_with(
    tls: &ThreadTls<Rc<Directory>>,
    config: Arc<ClientConfig>,
    name: &str,
) -> (io::Result<Client>, Accepted) {
    let (near, far) = duplex(1 << 16);
    let name = ServerName::try_from(name.to_owned()).unwrap();
    tokio::join!(TlsConnector::from(config).connect(name, near), tls.accept(far))
}

async fn handshake(tls: &ThreadTls<Rc<Directory>>, name: &str) -> (io::Result<Client>, Accepted) {
    handshake_with(tls, client(rustls::DEFAULT_VERSIONS, &[b"h2", b"http/1.1"]), name).await
}

/// The certificate a client of this name is shown.
async fn shown(tls: &ThreadTls<Rc<Directory>>, name: &str) -> CertificateDer<'static> {
    let (client, accepted) = handshake(tls, name).await;
    accepted.unwrap();
    client.unwrap().get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

/// The alert that a client of this name is refused with.
async fn refused(tls: &ThreadTls<Rc<Directory>>, name: &str) -> (String, TlsError) {
    let (client, accepted) = handshake(tls, name).await;
    (client.unwrap_err().to_string(), accepted.err().unwrap())
}

fn tls(directory: &Rc<Directory>) -> (ThreadTls<Rc<Directory>>, Arc<EdgeMetrics>) {
    let metrics = Arc::new(EdgeMetrics::new());
    (ThreadTls::new(Rc::clone(directory), Arc::clone(&metrics)), metrics)
}

fn run<F: Future>(test: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(test)
}

/// Simulated time passes until what is known must be looked at again.
async fn a_moment_later() {
    tokio::time::advance(Duration::from_secs(1)).await;
}

#[test]
fn exact_name_precedes_its_wildcard_and_that_the_default() {
    run(async {
        let directory = Directory::new();
        let (exact, exact_der) = certificate(&["www.example.org"]);
        let (wildcard, wildcard_der) = certificate(&["*.example.org"]);
        let (default, default_der) = certificate(&["node.example.net"]);
        directory.put("www.example.org", &exact);
        directory.put("_wildcard.example.org", &wildcard);
        directory.put("default", &default);
        let (tls, metrics) = tls(&directory);
        assert_eq!(shown(&tls, "www.example.org").await, exact_der);
        assert_eq!(shown(&tls, "WWW.example.org").await, exact_der);
        assert_eq!(shown(&tls, "wiki.example.org").await, wildcard_der);
        assert_eq!(shown(&tls, "a.wiki.example.org").await, default_der);
        assert_eq!(shown(&tls, "192.0.2.1").await, default_der, "an address is not sent as a name");
        assert!(metrics.encode().contains(r#"nagaya_tls_handshakes_total{result="ok"} 5"#));
    });
}

#[test]
fn protocols_and_kinds_of_keys_work() {
    run(async {
        let directory = Directory::new();
        for (name, algorithm) in [
            ("p256", &rcgen::PKCS_ECDSA_P256_SHA256),
            ("p384", &PKCS_ECDSA_P384_SHA384),
            ("ed25519", &PKCS_ED25519),
        ] {
            directory.put(name, &made(&[name], algorithm).0);
        }
        directory.put("rsa", &made_rsa());
        let (tls, _) = tls(&directory);
        for name in ["p256", "p384", "ed25519", "rsa"] {
            for (version, spoken) in
                [(&rustls::version::TLS12, "TLSv1.2"), (&rustls::version::TLS13, "TLSv1.3")]
            {
                for (offered, alpn) in [
                    (&[&b"h2"[..], b"http/1.1"][..], Alpn::Http2),
                    (&[b"http/1.1"], Alpn::Http1),
                    (&[], Alpn::Http1),
                ] {
                    let (client, accepted) = handshake_with(&tls, client(&[version], offered), name).await;
                    let (mut stream, info, chosen) = accepted.unwrap();
                    assert_eq!((info.protocol, chosen), (spoken, alpn), "{name}");
                    assert_eq!(info.server_name.as_deref(), Some(name));
                    assert_eq!(&*info.certificate_names, [name.into()]);
                    stream.write_all(b"hello").await.unwrap();
                    stream.flush().await.unwrap();
                    let mut read = [0; 5];
                    client.unwrap().read_exact(&mut read).await.unwrap();
                    assert_eq!(&read, b"hello");
                }
            }
        }
        let (client, accepted) =
            handshake_with(&tls, client(rustls::DEFAULT_VERSIONS, &[b"spdy/1"]), "p256").await;
        assert!(matches!(accepted, Err(TlsError::Handshake(_))));
        assert!(client.unwrap_err().to_string().contains("NoApplicationProtocol"));
    });
}

#[test]
fn a_replaced_certificate_is_live_and_a_removed_one_is_gone() {
    run(async {
        let directory = Directory::new();
        let (old, old_der) = certificate(&["a.example"]);
        let (new, new_der) = certificate(&["a.example"]);
        directory.put("a.example", &old);
        let (tls, _) = tls(&directory);
        assert_eq!(shown(&tls, "a.example").await, old_der);
        directory.put("a.example", &new);
        a_moment_later().await;
        assert_eq!(shown(&tls, "a.example").await, new_der);
        fs::remove_file(directory.dir.path().join("a.example.pem")).unwrap();
        a_moment_later().await;
        let (alert, error) = refused(&tls, "a.example").await;
        assert!(alert.contains("UnrecognisedName"), "{alert}");
        assert!(matches!(error, TlsError::NoCertificate(_)));
        directory.put("a.example", &old);
        a_moment_later().await;
        assert_eq!(shown(&tls, "a.example").await, old_der);
    });
}

#[test]
fn a_broken_file_does_not_replace_a_good_certificate() {
    run(async {
        let directory = Directory::new();
        let (good, good_der) = certificate(&["a.example"]);
        let (other, _) = certificate(&["a.example"]);
        let certificate_of = |pem: &str| pem[..pem.find("-----BEGIN PRIVATE").unwrap()].to_owned();
        let key_of = |pem: &str| pem[pem.find("-----BEGIN PRIVATE").unwrap()..].to_owned();
        let (tls, _) = tls(&directory);
        let broken = [
            certificate_of(&good) + &key_of(&other),
            certificate_of(&good),
            key_of(&good),
            "no PEM".to_owned(),
            good.replace("MII", "!!!"),
            format!("{good}{}", "#".repeat(300 << 10)),
        ];
        for pem in &broken {
            directory.put("a.example", pem);
            a_moment_later().await;
            let (alert, error) = refused(&tls, "a.example").await;
            assert!(alert.contains("InternalError"), "{alert}");
            assert!(matches!(error, TlsError::BrokenCertificate(_)));
        }
        directory.put("a.example", &good);
        a_moment_later().await;
        assert_eq!(shown(&tls, "a.example").await, good_der);
        for pem in &broken {
            directory.put("a.example", pem);
            a_moment_later().await;
            assert_eq!(shown(&tls, "a.example").await, good_der);
        }
    });
}

#[test]
fn each_state_of_a_broken_file_is_reported_once() {
    let directory = Directory::new();
    directory.put("a", "x");
    let stamp = || CertificateStamp::of(&File::open(directory.dir.path().join("a.pem")).unwrap()).unwrap();
    let shared = TlsShared::new().unwrap();
    let first = stamp();
    assert!(shared.is_first_report("a", first));
    assert!(!shared.is_first_report("a", first));
    directory.put("a", "xy");
    assert!(shared.is_first_report("a", stamp()));
}

#[test]
fn a_keeper_that_is_away_does_not_take_certificates_along() {
    run(async {
        let directory = Directory::new();
        let (pem, der) = certificate(&["a.example"]);
        directory.put("a.example", &pem);
        let (tls, _) = tls(&directory);
        assert_eq!(shown(&tls, "a.example").await, der);
        directory.fails.set(true);
        a_moment_later().await;
        assert_eq!(shown(&tls, "a.example").await, der);
        let (alert, _) = refused(&tls, "b.example").await;
        assert!(alert.contains("InternalError"), "{alert}");
        directory.fails.set(false);
        assert!(refused(&tls, "b.example").await.0.contains("UnrecognisedName"), "asked again at once");
    });
}

#[test]
fn many_clients_of_one_name_ask_once_a_second() {
    run(async {
        let directory = Directory::new();
        directory.put("default", &certificate(&["d"]).0);
        let (tls, metrics) = tls(&directory);
        for round in 1..=2 {
            tokio::join!(shown(&tls, "a.example"), shown(&tls, "a.example"), shown(&tls, "a.example"));
            shown(&tls, "a.example").await;
            for name in ["a.example", "_wildcard.example", "default"] {
                assert_eq!(directory.asked_for(name), round, "{name}");
            }
            a_moment_later().await;
        }
        let text = metrics.encode();
        assert!(text.contains(r#"nagaya_certificate_lookups_total{result="loaded"} 1"#), "{text}");
        assert!(text.contains(r#"nagaya_certificate_lookups_total{result="unchanged"} 1"#), "{text}");
    });
}

#[test]
fn a_client_that_leaves_while_it_waits_leaves_nothing_behind() {
    run(async {
        let directory = Directory::new();
        let (pem, der) = certificate(&["a.example"]);
        directory.put("a.example", &pem);
        let (tls, _) = tls(&directory);
        {
            let mut first = std::pin::pin!(tls.store.find("a.example"));
            let mut second = std::pin::pin!(tls.store.find("a.example"));
            tokio::select! {
                biased;
                _ = &mut first => unreachable!("the answer takes a turn"),
                _ = &mut second => unreachable!("it waits for the first"),
                () = std::future::ready(()) => {}
            }
        }
        assert_eq!(tls.store.asking_len(), 0);
        assert_eq!(shown(&tls, "a.example").await, der);
        assert_eq!(tls.store.asking_len(), 0);
    });
}

#[test]
fn a_returning_client_resumes_its_session_on_any_thread() {
    run(async {
        let directory = Directory::new();
        directory.put("a.example", &certificate(&["a.example"]).0);
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let config = client(&[version], &[]);
            let mut kinds = Vec::new();
            for _ in 0..2 {
                // Another thread has its own `ThreadTls`.
                let (tls, _) = tls(&directory);
                let (client, accepted) = handshake_with(&tls, Arc::clone(&config), "a.example").await;
                let mut client = client.unwrap();
                let mut stream = accepted.unwrap().0;
                stream.write_all(b"x").await.unwrap();
                stream.flush().await.unwrap();
                // Tickets of TLS 1.3 come behind the handshake.
                client.read_exact(&mut [0]).await.unwrap();
                kinds.push(client.get_ref().1.handshake_kind().unwrap());
            }
            assert_eq!(kinds, [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed], "{version:?}");
        }
    });
}

#[test]
fn bytes_that_are_not_tls_are_an_error_and_not_a_panic() {
    run(async {
        let directory = Directory::new();
        let (tls, metrics) = tls(&directory);
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x16\x03\x01\xff\xff", b""] {
            let (mut near, far) = duplex(1 << 10);
            near.write_all(bytes).await.unwrap();
            near.shutdown().await.unwrap();
            assert!(matches!(tls.accept(far).await, Err(TlsError::Handshake(_))));
        }
        assert!(metrics.encode().contains(r#"nagaya_tls_handshakes_total{result="failed"} 3"#));
    });
}

#[test]
fn connection_covers_only_the_names_of_its_certificate() {
    let names = ["example.org", "*.example.org", "*.a.example"];
    let info = |server_name: Option<&str>| TlsInfo {
        server_name: server_name.map(Into::into),
        protocol: "TLSv1.3",
        cipher: "",
        certificate_names: names.iter().map(|n| (*n).into()).collect(),
    };
    let tls = info(Some("other.example"));
    for host in ["other.example", "example.org", "www.example.org", "x.a.example"] {
        assert!(covers(&tls, host), "{host}");
    }
    for host in ["", "org", "a.b.example.org", ".example.org", "a.example", "badexample.org", "*.example.net"]
    {
        assert!(!covers(&tls, host), "{host}");
    }
    assert!(covers(&info(None), "anything.example"));
}

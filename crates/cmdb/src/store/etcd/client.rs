//! Asking etcd: which member, for how long, under whose name, and what its refusals mean. Every call ends within the time its
//! caller gives.
//!
//! Not here: the messages (`wire`), what is asked (`watch`, `write`, `members`).

use std::error::Error as _;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::uri::PathAndQuery;
use parking_lot::{Mutex, RwLock};
use prost::Message;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::error::ClusterError;
use super::wire::{Authenticate, Authenticated, Headed, WatchAnswer, WatchRequest};

/// How to reach etcd, and what is ours in it.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdOptions {
    /// `http://host:port` or `https://host:port` of the members. All are equal; the first that answers is used.
    pub endpoints: Vec<String>,
    /// Name of the cluster: its keys lie below `/nagaya/NAME/`. As a node's name.
    pub cluster: String,
    /// Who signed the members' certificates, PEM. None with `https`: what the system trusts is not asked, and it is refused.
    pub ca: Option<Vec<u8>>,
    /// This node's own certificate and key towards etcd, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// User and password, where etcd has authentication on.
    pub login: Option<(String, String)>,
    /// It may be reached in clear text, or by anybody.
    pub insecure: bool,
}

impl EtcdOptions {
    /// Why others than this cluster's nodes can read or write what is there. `None`: they cannot. An address of this machine's own is no
    /// better: each program on it reaches that.
    pub fn weakness(&self) -> Option<String> {
        let clear = self.endpoints.iter().find(|address| !address.starts_with("https://"));
        let clear = clear.map(|address| format!("{address} is in clear text"));
        let has_login = self.identity.is_some() || self.login.is_some();
        let open = (!has_login).then(|| "it is asked without a client certificate or a user".to_owned());
        let all: Vec<String> = clear.into_iter().chain(open).collect();
        (!all.is_empty())
            .then(|| format!("the cluster's store is not safe from others: {}", all.join(", and ")))
    }

    /// Fails unless the store is safe from others, or need not be.
    pub fn check_access(&self) -> Result<(), ClusterError> {
        match self.weakness() {
            Some(detail) if !self.insecure => Err(ClusterError::Insecure { detail }),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for EtcdOptions {
    /// Without key and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

/// Most members that are asked. etcd itself recommends 7 at most.
pub const ENDPOINTS_MAX: usize = 16;

/// For one member to answer, before the next is asked. A request to etcd takes milliseconds; a disk that is busy, some hundred.
const ATTEMPT: Duration = Duration::from_millis(1000);

/// For a connection to a member to come about.
const CONNECT: Duration = Duration::from_millis(500);

/// Between one round through all members and the next.
const PAUSE: Duration = Duration::from_millis(50);

/// etcd ends connections that are pinged more often than every 5 s.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_WAIT: Duration = Duration::from_secs(3);

/// Longest answer, in bytes. A page of a load is the longest: `watch::PAGE_LEN` records of 64 KiB.
pub(super) const ANSWER_LEN_MAX: usize = 64 << 20;

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
/// Its values are neither signed nor opened: see `Inner::change` and `Inner::found`.
pub(super) const RAW_TXN: &str = "/etcdserverpb.KV/Txn";
pub(super) const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(super) const LEASE_REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
pub(super) const LEASE_KEEP: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// An answer, and whether an earlier attempt may have been carried out although no answer came.
#[derive(Debug)]
pub(super) struct Answer<T> {
    pub value: T,
    pub repeated: bool,
}

#[derive(Debug)]
pub(super) enum Failure {
    /// The revision that was asked for is no longer kept.
    Compacted,
    Error(ClusterError),
}

impl From<Failure> for ClusterError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Compacted => Self::Behind { detail: "what it lacks was compacted away".into() },
            Failure::Error(error) => error,
        }
    }
}

type Token = MetadataValue<Ascii>;

pub(super) struct Client {
    members: Vec<Member>,
    /// The member that answered last.
    preferred: AtomicUsize,
    login: Option<(String, String)>,
    token: RwLock<Option<Token>>,
    /// Held by the one who logs in for all: each login costs the member a tenth of a second of its processor, and if all who
    /// wait did it, and began anew when their time is over, nobody's would ever come to its end.
    logging_in: tokio::sync::Mutex<()>,
    /// Why the last attempt had no answer, until one has.
    latest: Mutex<Option<String>>,
    /// The latest revision of etcd that any answer has told.
    newest: AtomicU64,
}

struct Member {
    address: String,
    channel: Channel,
}

/// Why one member gave no answer that counts.
enum Refusal {
    /// Another member may know.
    Elsewhere(String),
    /// Say again who we are.
    Login,
    Final(Failure),
}

impl Client {
    /// Connects to nobody yet. Must be called within the runtime that is to carry the connections.
    pub fn new(options: &EtcdOptions) -> Result<Self, ClusterError> {
        let wrong = |option, detail: String| ClusterError::Options { option, detail };
        options.check_access()?;
        if !(1..=ENDPOINTS_MAX).contains(&options.endpoints.len()) {
            return Err(wrong("endpoints", format!("give 1 to {ENDPOINTS_MAX} of them")));
        }
        let mut members = Vec::new();
        for address in &options.endpoints {
            let endpoint = Endpoint::from_shared(address.clone())
                .map_err(|error| wrong("endpoints", format!("'{address}': {error}")))?;
            let encrypted = match endpoint.uri().scheme_str() {
                Some("http") => false,
                Some("https") => true,
                _ => return Err(wrong("endpoints", format!("'{address}' is not http:// or https://"))),
            };
            let mut endpoint = endpoint
                .connect_timeout(CONNECT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(PING_WAIT);
            if encrypted {
                let tls = tls(options, address)?;
                endpoint = endpoint.tls_config(tls).map_err(|error| wrong("ca", chain(&error)))?;
            }
            members.push(Member { address: address.clone(), channel: endpoint.connect_lazy() });
        }
        let login = options.login.clone();
        Ok(Self {
            members,
            preferred: AtomicUsize::new(0),
            login,
            token: RwLock::default(),
            logging_in: tokio::sync::Mutex::default(),
            latest: Mutex::default(),
            newest: AtomicU64::new(0),
        })
    }

    /// The latest revision of etcd that is known. 0: none yet.
    pub fn newest(&self) -> u64 {
        self.newest.load(Ordering::Relaxed)
    }

    /// etcd has reached this revision.
    pub fn note_revision(&self, revision: u64) {
        self.newest.fetch_max(revision, Ordering::Relaxed);
    }

    /// Another etcd, or one whose past was restored: it counts from here.
    pub fn reset_revision(&self, revision: u64) {
        self.newest.store(revision, Ordering::Relaxed);
    }

    /// No answer, and why. What tells more is kept.
    fn note(&self, why: String) {
        let mut latest = self.latest.lock();
        if latest.is_none() || !is_vague(&why) {
            *latest = Some(why);
        }
    }

    /// Why nobody has answered lately, if so.
    pub fn latest(&self) -> Option<String> {
        self.latest.lock().clone()
    }

    /// Asks one member after the other, from the one that answered last, until one answers or the time is over.
    pub async fn ask<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        within: Duration,
    ) -> Result<Answer<A>, Failure>
    where
        Q: Message + Clone + 'static,
        A: Message + Headed + Default + 'static,
    {
        let deadline = Instant::now() + within;
        for attempt in 0_usize.. {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            if attempt > 0 && attempt % self.members.len() == 0 {
                sleep(PAUSE.min(left)).await;
            }
            let at = self.preferred.load(Ordering::Relaxed);
            let token = self.token.read().clone();
            match self.ask_one(at, method, request.clone(), left.min(ATTEMPT)).await {
                Ok(value) => {
                    *self.latest.lock() = None;
                    return Ok(Answer { value, repeated: attempt > 0 });
                }
                Err(Refusal::Final(failure)) => return Err(failure),
                Err(Refusal::Elsewhere(why)) => {
                    self.note(why);
                    self.pass_over(at);
                }
                Err(Refusal::Login) => {
                    self.note("the member wants a login".into());
                    self.log_in(at, token, left).await?;
                }
            }
        }
        let detail = self.latest().unwrap_or_else(|| "no time was left to ask".into());
        Err(Failure::Error(self.unreachable(within, detail)))
    }

    /// As [`Client::ask`], for a question whose answer is worth little when late: if the first member has not answered within
    /// a third of the time, a second is asked too, and the first answer counts.
    pub async fn ask_soon<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        within: Duration,
    ) -> Result<A, Failure>
    where
        Q: Message + Clone + 'static,
        A: Message + Headed + Default + 'static,
    {
        let deadline = Instant::now() + within;
        let at = self.preferred.load(Ordering::Relaxed);
        let mut first = pin!(self.ask_one(at, method, request.clone(), within));
        match timeout(within / 3, &mut first).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(Refusal::Final(failure))) => return Err(failure),
            Ok(Err(Refusal::Login | Refusal::Elsewhere(_))) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if self.members.len() > 1 {
                    self.pass_over(at);
                }
                return Ok(self.ask(method, request, left).await?.value);
            }
            Err(_late) => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let next = (at + 1) % self.members.len();
        let mut second = pin!(self.ask_one(next, method, request, left));
        let (answer, is_firsts) = tokio::select! {
            answer = &mut first => (answer, true),
            answer = &mut second => (answer, false),
        };
        // Whichever it was: a member that made us wait is not asked first again.
        self.pass_over(at);
        match answer {
            Ok(value) => Ok(value),
            Err(Refusal::Final(failure)) => Err(failure),
            Err(Refusal::Login | Refusal::Elsewhere(_)) => {
                let late = |_| Failure::Error(self.unreachable(within, "no answer in time".into()));
                let other = if is_firsts { second.await } else { first.await };
                other.map_err(late)
            }
        }
    }

    /// Opens a stream with the member that answered last. Waiting for what comes on it is bounded by the caller, who also
    /// says by [`Client::give_up`] when it does not come.
    pub async fn converse<Q, A>(
        &self,
        method: &'static str,
        requests: ReceiverStream<Q>,
        within: Duration,
    ) -> Result<(Talk, Streaming<A>), Failure>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let at = self.preferred.load(Ordering::Relaxed);
        let token = self.token.read().clone();
        let opening = async {
            let mut grpc = self.grpc(at).await?;
            let path = PathAndQuery::from_static(method);
            let codec = ProstCodec::<Q, A>::default();
            grpc.streaming(self.request(method, requests), path, codec).await.map(tonic::Response::into_inner)
        };
        let refusal = match timeout(within, opening).await {
            Ok(Ok(stream)) => return Ok((Talk(at), stream)),
            Ok(Err(status)) => refusal(&status, &self.members[at].address),
            Err(_) => Refusal::Elsewhere(format!("{}: no answer", self.members[at].address)),
        };
        match refusal {
            Refusal::Final(failure) => Err(failure),
            Refusal::Login => {
                self.log_in(at, token, within).await?;
                Err(Failure::Error(self.unreachable(within, "the member wanted a login".into())))
            }
            Refusal::Elsewhere(why) => {
                self.pass_over(at);
                Err(Failure::Error(self.unreachable(within, why)))
            }
        }
    }

    pub async fn watch(
        &self,
        requests: ReceiverStream<WatchRequest>,
        within: Duration,
    ) -> Result<(Talk, Streaming<WatchAnswer>), Failure> {
        self.converse(WATCH, requests, within).await
    }

    /// A stream fell silent or ended: the next question goes to another member.
    pub fn give_up(&self, talk: &Talk) {
        self.pass_over(talk.0);
    }

    /// What a message of a stream, instead of an answer, means.
    pub fn failure(&self, talk: &Talk, status: &Status) -> Failure {
        match refusal(status, &self.members[talk.0].address) {
            Refusal::Final(failure) => failure,
            Refusal::Login => {
                *self.token.write() = None;
                Failure::Error(self.unreachable(Duration::ZERO, "the member wants a new login".into()))
            }
            Refusal::Elsewhere(why) => Failure::Error(self.unreachable(Duration::ZERO, why)),
        }
    }

    pub fn unreachable(&self, waited: Duration, detail: String) -> ClusterError {
        let members: Vec<&str> = self.members.iter().map(|member| member.address.as_str()).collect();
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        ClusterError::Unreachable { members: members.join(", "), waited_ms, detail }
    }

    async fn ask_one<Q, A>(
        &self,
        at: usize,
        method: &'static str,
        request: Q,
        within: Duration,
    ) -> Result<A, Refusal>
    where
        Q: Message + 'static,
        A: Message + Headed + Default + 'static,
    {
        let address = &self.members[at].address;
        let asking = async {
            if self.login.is_some() && method != AUTHENTICATE && self.token.read().is_none() {
                return Err(Refusal::Login);
            }
            let answer = async {
                let mut grpc = self.grpc(at).await?;
                let codec = ProstCodec::<Q, A>::default();
                grpc.unary(self.request(method, request), PathAndQuery::from_static(method), codec).await
            };
            answer.await.map(tonic::Response::into_inner).map_err(|status| refusal(&status, address))
        };
        match timeout(within, asking).await {
            Ok(answer) => {
                if let Some(header) = answer.as_ref().ok().and_then(A::header) {
                    self.note_revision(u64::try_from(header.revision).unwrap_or(0));
                }
                answer
            }
            Err(_) => Err(Refusal::Elsewhere(format!("{address}: no answer"))),
        }
    }

    async fn grpc(&self, at: usize) -> Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.members[at].channel.clone()).max_decoding_message_size(ANSWER_LEN_MAX);
        grpc.ready().await.map_err(|error| Status::unavailable(chain(&error)))?;
        Ok(grpc)
    }

    fn request<T>(&self, method: &str, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        // A member that has lost its leader says so at once, and ends its watches, instead of answering with what it last knew.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        // Who asks for a new one must not show one that does not do.
        if let Some(token) = self.token.read().as_ref().filter(|_| method != AUTHENTICATE) {
            metadata.insert("token", token.clone());
        }
        request
    }

    /// Gets a token in the place of `before`, which is none or does not do. Also if that could not be done in time, the next
    /// attempt will show it.
    async fn log_in(&self, at: usize, before: Option<Token>, within: Duration) -> Result<(), Failure> {
        let refused = |detail: &str| Failure::Error(ClusterError::Refused { detail: detail.into() });
        let Some((name, password)) = self.login.clone() else {
            return Err(refused("it wants a user and password, and none are configured"));
        };
        let deadline = Instant::now() + within;
        let Ok(_turn) = timeout(within, self.logging_in.lock()).await else { return Ok(()) };
        if *self.token.read() != before {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match self.ask_one::<_, Authenticated>(at, AUTHENTICATE, Authenticate { name, password }, left).await
        {
            Ok(answer) => {
                let token = answer.token.parse().map_err(|_| refused("its token is not one"))?;
                *self.token.write() = Some(token);
                Ok(())
            }
            Err(Refusal::Login) => Err(refused("user or password is wrong")),
            Err(Refusal::Final(failure)) => Err(failure),
            Err(Refusal::Elsewhere(why)) => {
                self.note(why);
                self.pass_over(at);
                Ok(())
            }
        }
    }

    /// Somebody else may have passed over it already; then the choice stays.
    fn pass_over(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        let _ = self.preferred.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// What is shown to a member, and who is believed. What is not PEM is told here: a connection would only say that it failed.
fn tls(options: &EtcdOptions, address: &str) -> Result<ClientTlsConfig, ClusterError> {
    let wrong = |option, detail: String| ClusterError::Options { option, detail };
    let unsigned = || format!("'{address}' is encrypted, and nothing says who signed its certificate");
    let ca = options.ca.as_ref().ok_or_else(|| wrong("ca", unsigned()))?;
    let certificates = |option, pem: &[u8]| {
        let mut all = CertificateDer::pem_slice_iter(pem);
        match all.next() {
            Some(first) if first.is_ok() && all.all(|one| one.is_ok()) => Ok(()),
            _ => Err(wrong(option, "there is no certificate in it, or one that is not PEM".into())),
        }
    };
    certificates("ca", ca)?;
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
    let Some((certificate, key)) = &options.identity else { return Ok(tls) };
    certificates("certificate", certificate)?;
    PrivateKeyDer::from_pem_slice(key).map_err(|error| wrong("key", error.to_string()))?;
    Ok(tls.identity(Identity::from_pem(certificate, key)))
}

/// With which member a stream is.
#[derive(Debug)]
pub(super) struct Talk(usize);

fn refusal(status: &Status, address: &str) -> Refusal {
    let said = status.message();
    // With a source it is no word of the member's, but what became of the connection.
    let detail = format!("{address}: {}", status.source().map_or_else(|| said.to_owned(), chain));
    let refused = |detail: String| Refusal::Final(Failure::Error(ClusterError::Refused { detail }));
    match status.code() {
        Code::Unauthenticated => Refusal::Login,
        Code::InvalidArgument if said.contains("user name is empty") => Refusal::Login,
        // Of a wrong password, so that only a login gets it.
        Code::InvalidArgument if said.contains("authentication failed") => Refusal::Login,
        Code::OutOfRange if said.contains("compacted") => Refusal::Final(Failure::Compacted),
        Code::ResourceExhausted if said.contains("space exceeded") => {
            Refusal::Final(Failure::Error(ClusterError::Full { detail }))
        }
        Code::PermissionDenied | Code::InvalidArgument | Code::FailedPrecondition | Code::NotFound => {
            refused(detail)
        }
        // A certificate that is not believed is reported as a transport error, and is no better elsewhere, but another member
        // may have another one.
        _ => Refusal::Elsewhere(detail),
    }
}

/// A connection that ended tells its reason to one of those who wait for it; to the others only that it ended.
fn is_vague(why: &str) -> bool {
    ["operation was canceled", "broken pipe"].iter().any(|end| why.contains(end))
}

/// An error and all that led to it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

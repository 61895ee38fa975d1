//! The client of etcd: it chooses a member, authenticates, and interprets refusals. Every call ends
//! within the time that its caller gives.
//!
//! Not here: the messages (`wire`), the queries (`watch`, `write`, `members`).

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
use super::wire::{AuthenticateRequest, AuthenticateResponse, HeaderOnly, WatchRequest, WatchResponse};

/// How to reach etcd, and which part of it belongs to this cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdOptions {
    /// `http://host:port` or `https://host:port` of the members. All are equal; the first that
    /// answers is used.
    pub endpoints: Vec<String>,
    /// Name of the cluster: its keys are below `/nagaya/NAME/`. The same rules as for a node's name
    /// apply.
    pub cluster: String,
    /// CA certificate of the members, PEM. `https` without it is refused, as the system's trust
    /// store is not used.
    pub ca: Option<Vec<u8>>,
    /// This node's own client certificate and key for etcd, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// User and password, if etcd has authentication enabled.
    pub login: Option<(String, String)>,
    /// Allows clear text, and an etcd that anybody can reach.
    pub insecure: bool,
}

impl EtcdOptions {
    /// Returns why others than this cluster's nodes can read or write the store. `None` if they
    /// cannot. A local address is no better: each program on the machine reaches it.
    pub fn weakness(&self) -> Option<String> {
        let clear = self.endpoints.iter().find(|address| !address.starts_with("https://"));
        let clear = clear.map(|address| format!("{address} is in clear text"));
        let has_login = self.identity.is_some() || self.login.is_some();
        let open = (!has_login).then(|| "it is asked without a client certificate or a user".to_owned());
        let all: Vec<String> = clear.into_iter().chain(open).collect();
        (!all.is_empty())
            .then(|| format!("the cluster's store is not safe from others: {}", all.join(", and ")))
    }

    /// Checks that the store is safe from others, or that it need not be.
    pub fn check_access(&self) -> Result<(), ClusterError> {
        match self.weakness() {
            Some(detail) if !self.insecure => Err(ClusterError::Insecure { detail }),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for EtcdOptions {
    /// Omits key and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

/// Most members that are tried. etcd itself recommends at most 7.
pub const ENDPOINTS_MAX: usize = 16;

/// Time for one member to answer before the next is tried. A request to etcd takes milliseconds;
/// with a busy disk, some hundred.
const ATTEMPT: Duration = Duration::from_millis(1000);

/// Time for a connection to a member.
const CONNECT: Duration = Duration::from_millis(500);

/// Pause between one round through all members and the next.
const PAUSE: Duration = Duration::from_millis(50);

/// etcd ends connections that are pinged more often than every 5 s.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_WAIT: Duration = Duration::from_secs(3);

/// Longest reply, in bytes. A page of a load is the longest: `watch::PAGE_LEN` records of 64 KiB.
pub(super) const ANSWER_LEN_MAX: usize = 64 << 20;

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
/// Its values are neither signed nor opened: see `StoreInner::change` and `StoreInner::open_found`.
pub(super) const RAW_TXN: &str = "/etcdserverpb.KV/Txn";
pub(super) const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(super) const LEASE_REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
pub(super) const LEASE_KEEP: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// A reply, and whether an earlier attempt without a reply may have been carried out.
#[derive(Debug)]
pub(super) struct EtcdReply<T> {
    pub value: T,
    pub repeated: bool,
}

#[derive(Debug)]
pub(super) enum EtcdFailure {
    /// The requested revision is no longer kept.
    Compacted,
    Error(ClusterError),
}

impl From<EtcdFailure> for ClusterError {
    fn from(failure: EtcdFailure) -> Self {
        match failure {
            EtcdFailure::Compacted => Self::Behind { detail: "what it lacks was compacted away".into() },
            EtcdFailure::Error(error) => error,
        }
    }
}

type Token = MetadataValue<Ascii>;

pub(super) struct EtcdClient {
    members: Vec<EtcdMember>,
    /// The member that answered last.
    preferred: AtomicUsize,
    login: Option<(String, String)>,
    token: RwLock<Option<Token>>,
    /// Held by the task that logs in for all. Each login costs the member a tenth of a second of
    /// CPU time. If all waiting tasks logged in, and started again after their timeout, none would
    /// ever finish.
    logging_in: tokio::sync::Mutex<()>,
    /// Why the last attempt had no reply, until one has.
    latest: Mutex<Option<String>>,
    /// The latest revision of etcd that any reply reported.
    newest: AtomicU64,
}

struct EtcdMember {
    address: String,
    channel: Channel,
}

/// Why one member gave no valid reply.
enum MemberRefusal {
    /// Another member may know.
    Elsewhere(String),
    /// Log in again.
    Login,
    Final(EtcdFailure),
}

impl EtcdClient {
    /// Creates a client; it does not connect yet. Must be called within the runtime of its
    /// connections.
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
            members.push(EtcdMember { address: address.clone(), channel: endpoint.connect_lazy() });
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

    /// Returns the latest known revision of etcd; 0 if there is none yet.
    pub fn newest(&self) -> u64 {
        self.newest.load(Ordering::Relaxed)
    }

    /// Notes that etcd has reached this revision.
    pub fn note_revision(&self, revision: u64) {
        self.newest.fetch_max(revision, Ordering::Relaxed);
    }

    /// Sets the revision of another etcd, or of one whose past was restored.
    pub fn reset_revision(&self, revision: u64) {
        self.newest.store(revision, Ordering::Relaxed);
    }

    /// Notes why there was no reply. The more detailed reason is kept.
    fn note(&self, why: String) {
        let mut latest = self.latest.lock();
        if latest.is_none() || !is_vague(&why) {
            *latest = Some(why);
        }
    }

    /// Returns why no member has answered recently, if so.
    pub fn latest(&self) -> Option<String> {
        self.latest.lock().clone()
    }

    /// Asks one member after the other, from the one that answered last, until one answers or the
    /// time is over.
    pub async fn ask<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        within: Duration,
    ) -> Result<EtcdReply<A>, EtcdFailure>
    where
        Q: Message + Clone + 'static,
        A: Message + HeaderOnly + Default + 'static,
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
                    return Ok(EtcdReply { value, repeated: attempt > 0 });
                }
                Err(MemberRefusal::Final(failure)) => return Err(failure),
                Err(MemberRefusal::Elsewhere(why)) => {
                    self.note(why);
                    self.pass_over(at);
                }
                Err(MemberRefusal::Login) => {
                    self.note("the member wants a login".into());
                    self.log_in(at, token, left).await?;
                }
            }
        }
        let detail = self.latest().unwrap_or_else(|| "no time was left to ask".into());
        Err(EtcdFailure::Error(self.unreachable(within, detail)))
    }

    /// Does the same as [`EtcdClient::ask`], for a query whose reply is worth little when late. If
    /// the first member has not answered within a third of the time, a second is asked, too. The
    /// first reply counts.
    pub async fn ask_soon<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        within: Duration,
    ) -> Result<A, EtcdFailure>
    where
        Q: Message + Clone + 'static,
        A: Message + HeaderOnly + Default + 'static,
    {
        let deadline = Instant::now() + within;
        let at = self.preferred.load(Ordering::Relaxed);
        let mut first = pin!(self.ask_one(at, method, request.clone(), within));
        match timeout(within / 3, &mut first).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(MemberRefusal::Final(failure))) => return Err(failure),
            Ok(Err(MemberRefusal::Login | MemberRefusal::Elsewhere(_))) => {
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
        // In both cases, a member that was slow is not asked first again.
        self.pass_over(at);
        match answer {
            Ok(value) => Ok(value),
            Err(MemberRefusal::Final(failure)) => Err(failure),
            Err(MemberRefusal::Login | MemberRefusal::Elsewhere(_)) => {
                let late = |_| EtcdFailure::Error(self.unreachable(within, "no answer in time".into()));
                let other = if is_firsts { second.await } else { first.await };
                other.map_err(late)
            }
        }
    }

    /// Opens a stream with the member that answered last. The caller bounds its waits on the
    /// stream, and calls [`EtcdClient::give_up`] on a timeout.
    pub async fn converse<Q, A>(
        &self,
        method: &'static str,
        requests: ReceiverStream<Q>,
        within: Duration,
    ) -> Result<(MemberStream, Streaming<A>), EtcdFailure>
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
            Ok(Ok(stream)) => return Ok((MemberStream(at), stream)),
            Ok(Err(status)) => refusal(&status, &self.members[at].address),
            Err(_) => MemberRefusal::Elsewhere(format!("{}: no answer", self.members[at].address)),
        };
        match refusal {
            MemberRefusal::Final(failure) => Err(failure),
            MemberRefusal::Login => {
                self.log_in(at, token, within).await?;
                Err(EtcdFailure::Error(self.unreachable(within, "the member wanted a login".into())))
            }
            MemberRefusal::Elsewhere(why) => {
                self.pass_over(at);
                Err(EtcdFailure::Error(self.unreachable(within, why)))
            }
        }
    }

    pub async fn watch(
        &self,
        requests: ReceiverStream<WatchRequest>,
        within: Duration,
    ) -> Result<(MemberStream, Streaming<WatchResponse>), EtcdFailure> {
        self.converse(WATCH, requests, within).await
    }

    /// Notes that a stream fell silent or ended: the next query goes to another member.
    pub fn give_up(&self, talk: &MemberStream) {
        self.pass_over(talk.0);
    }

    /// Returns the meaning of a stream's message that is not a reply.
    pub fn failure(&self, talk: &MemberStream, status: &Status) -> EtcdFailure {
        match refusal(status, &self.members[talk.0].address) {
            MemberRefusal::Final(failure) => failure,
            MemberRefusal::Login => {
                *self.token.write() = None;
                EtcdFailure::Error(self.unreachable(Duration::ZERO, "the member wants a new login".into()))
            }
            MemberRefusal::Elsewhere(why) => EtcdFailure::Error(self.unreachable(Duration::ZERO, why)),
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
    ) -> Result<A, MemberRefusal>
    where
        Q: Message + 'static,
        A: Message + HeaderOnly + Default + 'static,
    {
        let address = &self.members[at].address;
        let asking = async {
            if self.login.is_some() && method != AUTHENTICATE && self.token.read().is_none() {
                return Err(MemberRefusal::Login);
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
            Err(_) => Err(MemberRefusal::Elsewhere(format!("{address}: no answer"))),
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
        // A member that has lost its leader says so at once, and ends its watches. Otherwise it
        // would answer with old data.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        // A request for a new token must not carry one that is not accepted.
        if let Some(token) = self.token.read().as_ref().filter(|_| method != AUTHENTICATE) {
            metadata.insert("token", token.clone());
        }
        request
    }

    /// Gets a token to replace `before`, which is missing or not accepted. If that was not done in
    /// time, the next attempt will show it.
    async fn log_in(&self, at: usize, before: Option<Token>, within: Duration) -> Result<(), EtcdFailure> {
        let refused = |detail: &str| EtcdFailure::Error(ClusterError::Refused { detail: detail.into() });
        let Some((name, password)) = self.login.clone() else {
            return Err(refused("it requires a user and password, and none are configured"));
        };
        let deadline = Instant::now() + within;
        let Ok(_turn) = timeout(within, self.logging_in.lock()).await else { return Ok(()) };
        if *self.token.read() != before {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        match self
            .ask_one::<_, AuthenticateResponse>(
                at,
                AUTHENTICATE,
                AuthenticateRequest { name, password },
                left,
            )
            .await
        {
            Ok(answer) => {
                let token = answer.token.parse().map_err(|_| refused("its token is not one"))?;
                *self.token.write() = Some(token);
                Ok(())
            }
            Err(MemberRefusal::Login) => Err(refused("user or password is wrong")),
            Err(MemberRefusal::Final(failure)) => Err(failure),
            Err(MemberRefusal::Elsewhere(why)) => {
                self.note(why);
                self.pass_over(at);
                Ok(())
            }
        }
    }

    /// Another task may have passed over it already; then the choice stays.
    fn pass_over(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        let _ = self.preferred.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Returns the identity for a member and the trusted CA. Invalid PEM is reported here: a connection
/// would only say that it failed.
fn tls(options: &EtcdOptions, address: &str) -> Result<ClientTlsConfig, ClusterError> {
    let wrong = |option, detail: String| ClusterError::Options { option, detail };
    let unsigned = || format!("'{address}' uses TLS, and the authority of its certificate is not given");
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

/// The member of a stream.
#[derive(Debug)]
pub(super) struct MemberStream(usize);

fn refusal(status: &Status, address: &str) -> MemberRefusal {
    let said = status.message();
    // With a source, the status is not from the member but from the connection.
    let detail = format!("{address}: {}", status.source().map_or_else(|| said.to_owned(), chain));
    let refused = |detail: String| MemberRefusal::Final(EtcdFailure::Error(ClusterError::Refused { detail }));
    match status.code() {
        Code::Unauthenticated => MemberRefusal::Login,
        Code::InvalidArgument if said.contains("user name is empty") => MemberRefusal::Login,
        // A wrong password, so only a login gets it.
        Code::InvalidArgument if said.contains("authentication failed") => MemberRefusal::Login,
        Code::OutOfRange if said.contains("compacted") => MemberRefusal::Final(EtcdFailure::Compacted),
        Code::ResourceExhausted if said.contains("space exceeded") => {
            MemberRefusal::Final(EtcdFailure::Error(ClusterError::Full { detail }))
        }
        Code::PermissionDenied | Code::InvalidArgument | Code::FailedPrecondition | Code::NotFound => {
            refused(detail)
        }
        // An untrusted certificate is reported as a transport error. It is no better elsewhere, but
        // another member may have another one.
        _ => MemberRefusal::Elsewhere(detail),
    }
}

/// Returns whether a reason is vague. When a connection ends, one waiting task gets the reason; the
/// others learn only that it ended.
fn is_vague(why: &str) -> bool {
    ["operation was canceled", "broken pipe"].iter().any(|end| why.contains(end))
}

/// Returns an error and all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

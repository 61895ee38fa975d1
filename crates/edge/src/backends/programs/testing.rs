//! What tests of programs run on: a real keeper in a thread, one tenant with one site, and requests to it.
//!
//! Not here: the tests (`cgi/tests.rs`, `php/tests.rs`).

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};
use http_body::Frame;
use nagaya_base::RequestId;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::cell::Confinement;
use nagaya_records::feed::{FromSupervisor, ToSupervisor};
use nagaya_records::{RecordChange, Site, Tenant, feed};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::backends::files::root::DirectoryId;
use crate::backends::programs::ProgramRunner;
use crate::backends::programs::pool::PhpPools;
use crate::backends::programs::pool::paths::ScriptPlace;
use crate::backends::programs::script::{ProgramOutcome, ProgramScript, ScriptHooks, ScriptVariable};
use crate::http::body_adapters::PolledBody;
use crate::http::message::{BodyError, ConnInfo, Request, RequestBody, RequestHead, Response, ResponseBody};
use crate::http::proxy_headers::client::ClientView;
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;
use crate::options::{EdgeConfig, EdgeLimits};
use crate::record::execution::CellExecution;

/// Nothing in these tests takes longer than this unless it hangs.
pub(super) const HANG: Duration = Duration::from_secs(20);

/// A node with one site, as far as its programs go.
pub(super) struct World {
    directory: TempDir,
    feed: Option<UnixStream>,
    keeper: Option<JoinHandle<()>>,
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
    pub options: EdgeConfig,
    pub pools: Arc<PhpPools>,
    pub metrics: Arc<EdgeMetrics>,
}

/// One edge thread's part of it.
pub(super) struct Thread {
    pub programs: ProgramRunner,
    pub keeper: Rc<KeeperClient>,
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    execution: RefCell<Rc<CellExecution>>,
    /// The document root of the requests that come.
    pub root: Cell<DirectoryId>,
}

impl World {
    /// `kind` is `cgi` or `php`, `more` is added to the site's backend, e.g. `,"timeout_seconds":1`.
    pub fn new(kind: &str, more: &str, options: EdgeConfig) -> Self {
        Self::start(kind, more, options, "/usr/bin/php-cgi")
    }

    /// Its PHP workers are this program.
    pub fn with_php(program: &str) -> Self {
        Self::start("php", "", EdgeConfig::default(), program)
    }

    fn start(kind: &str, more: &str, options: EdgeConfig, php_cgi: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path();
        std::fs::set_permissions(home, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir(home.join("web")).unwrap();
        // Tenants write there what tests look at.
        std::fs::create_dir(home.join("notes")).unwrap();
        std::fs::set_permissions(home.join("notes"), PermissionsExt::from_mode(0o777)).unwrap();
        let tenant =
            format!(r#"{{"name":"demo","uid":61007,"gid":61007,"home":{home:?},"php_workers":{}}}"#, 4);
        let tenant: Tenant = serde_json::from_str(&tenant).unwrap();
        let site = format!(
            r#"{{"name":"demo","tenant":"demo","hosts":["demo"],"backend":{{"kind":"{kind}","root":"web"{more}}}}}"#
        );
        let site: Site = serde_json::from_str(&site).unwrap();
        let (feed, keeper) = start_keeper(home, &tenant, &site, php_cgi);
        let metrics = Arc::new(EdgeMetrics::new());
        Self {
            feed: Some(feed),
            keeper: Some(keeper),
            site: Arc::new(site),
            tenant: Arc::new(tenant),
            pools: PhpPools::new(&options, Arc::clone(&metrics)),
            options,
            metrics,
            directory,
        }
    }

    /// A file beneath the document root that everybody may read and run.
    pub fn file(&self, name: &str, text: &str) -> &Self {
        let path = self.directory.path().join("web").join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        self
    }

    /// A file that programs find as `../notes/NAME`.
    pub fn note(&self, name: &str) -> PathBuf {
        self.directory.path().join("notes").join(name)
    }

    /// The tenant as another record of it says.
    pub fn change_tenant(&mut self, change: impl FnOnce(&mut Tenant)) {
        let mut tenant = Tenant::clone(&self.tenant);
        change(&mut tenant);
        self.tenant = Arc::new(tenant);
    }

    /// Runs `test` as an edge thread does.
    pub fn run<F: Future>(&self, test: impl FnOnce(Thread) -> F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let keeper = KeeperClient::connect(&self.directory.path().join("keeper")).await.unwrap();
            let programs = ProgramRunner::new(
                Rc::clone(&keeper),
                Arc::clone(&self.pools),
                Arc::default(),
                &self.options,
                Arc::clone(&self.metrics),
            );
            let thread = Thread {
                programs,
                keeper,
                site: Arc::clone(&self.site),
                tenant: Arc::clone(&self.tenant),
                execution: RefCell::new(CellExecution::new(Confinement::default())),
                root: Cell::default(),
            };
            tokio::time::timeout(HANG, test(thread)).await.expect("the test hangs")
        })
    }
}

fn start_keeper(home: &Path, tenant: &Tenant, site: &Site, php_cgi: &str) -> (UnixStream, JoinHandle<()>) {
    let flags = SocketFlags::CLOEXEC;
    let listener: OwnedFd =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(home.join("keeper")).unwrap()).unwrap();
    rustix::net::listen(&listener, 16).unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let keeper = std::thread::spawn(move || {
        nagaya_keeper::run(nagaya_keeper::KeeperStart { listener, feed: theirs, small_pages: false });
    });
    let options = nagaya_keeper::KeeperConfig {
        runtime_dir: home.join("run"),
        php_cgi: php_cgi.into(),
        ids: nagaya_records::check::IdPolicy {
            edge_uid: rustix::process::geteuid().as_raw(),
            ..Default::default()
        },
        // Needs no rights, and the keepers of tests that run at the same time do not meet in it.
        back_end: nagaya_keeper::CellMechanism::ProcessGroup,
        ..nagaya_keeper::KeeperConfig::default()
    };
    std::fs::create_dir(&options.runtime_dir).unwrap();
    feed::write(&mut ours, &FromSupervisor::Options(serde_json::to_value(options).unwrap())).unwrap();
    let changes = vec![
        RecordChange::PutTenant(Box::new(tenant.clone())),
        RecordChange::PutSite(Box::new(site.clone())),
    ];
    feed::write(&mut ours, &FromSupervisor::Apply(changes)).unwrap();
    feed::write(&mut ours, &FromSupervisor::Commit { revision: 1 }).unwrap();
    assert_eq!(feed::read::<ToSupervisor>(&mut ours).unwrap(), Some(ToSupervisor::Ready { revision: 1 }));
    (ours, keeper)
}

impl Drop for World {
    fn drop(&mut self) {
        // The keeper ends everything and itself when its feed does.
        self.feed.take();
        if let Some(keeper) = self.keeper.take() {
            // A test that failed already has said why.
            let _ = keeper.join();
        }
    }
}

impl Thread {
    /// How the next request is confined, and where it says what it used.
    pub fn confine(&self, confinement: Confinement, disclosed: bool) -> Rc<CellExecution> {
        let execution = CellExecution::of(confinement, disclosed);
        *self.execution.borrow_mut() = Rc::clone(&execution);
        execution
    }

    fn execution(&self) -> Rc<CellExecution> {
        Rc::clone(&self.execution.borrow())
    }

    pub async fn ask(&self, file: &str, request: Request) -> Result<ProgramOutcome, Refusal> {
        let (file, path_info) = match file.split_once("//") {
            Some((file, rest)) => (file, format!("/{rest}").into_bytes()),
            None => (file, Vec::new()),
        };
        let script = ProgramScript {
            file: file.to_owned(),
            name: format!("/{file}"),
            path_info,
            variables: Vec::new(),
            client: ClientView::direct(&request.head),
        };
        let Request { head, body } = request;
        let (execution, request) = (self.execution(), (&*head, body));
        match self.site.backend.kind() {
            "cgi" => self.programs.cgi(&self.site, &self.tenant, script, request, &execution).await,
            _ => {
                let (root, directory) = (self.root.get(), self.root.get());
                let looked = self.programs.path_moment();
                let whose = (&self.tenant, ScriptPlace { root, path: "".into(), directory, looked });
                self.programs.php(&self.site, whose, script, request, (&execution, &NoHooks)).await
            }
        }
    }

    pub async fn response(&self, file: &str, request: Request) -> Response {
        match self.ask(file, request).await {
            Ok(ProgramOutcome::Response(response)) => response,
            Ok(ProgramOutcome::LocalRedirect { path, .. }) => panic!("{file} redirects to {path}"),
            Err(refusal) => panic!("{file} is refused: {refusal}"),
        }
    }

    /// The body of an answer to a plain `GET`.
    pub async fn get(&self, file: &str) -> String {
        text(self.response(file, get()).await).await
    }

    pub async fn refusal(&self, file: &str, request: Request) -> Refusal {
        match self.ask(file, request).await {
            Ok(_) => panic!("{file} is not refused"),
            Err(refusal) => refusal,
        }
    }

    /// Process trees of this kind that the keeper still has.
    pub async fn running(&self, kind: &str) -> u64 {
        let status: serde_json::Value = serde_json::from_str(&self.keeper.status().await.unwrap()).unwrap();
        status["processes"][kind]["running"].as_u64().expect("a number of processes")
    }

    pub async fn until_none_runs(&self, kind: &str) {
        while self.running(kind).await > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The usual limits, but for the time to the head of an answer.
pub(super) fn answering_within(answer_ms: u64) -> EdgeLimits {
    let mut limits = EdgeLimits::default();
    limits.backend.answer_ms = answer_ms;
    limits
}

pub(super) fn get() -> Request {
    request(Method::GET, RequestBody::empty())
}

pub(super) fn post(body: impl Into<Bytes>) -> Request {
    request(Method::POST, known(body))
}

pub(crate) fn request(method: Method, body: RequestBody) -> Request {
    let mut headers = HeaderMap::new();
    headers.insert(HeaderName::from_static("content-type"), HeaderValue::from_static("application/x-test"));
    let address = "127.0.0.1:80".parse().unwrap();
    let head = RequestHead {
        id: RequestId(1),
        method,
        path: "/".into(),
        query: None,
        host: "demo".into(),
        port: None,
        version: Version::HTTP_11,
        headers,
        upgrade: None,
        conn: Rc::new(ConnInfo { peer: address, local: address, tls: None, carried: None, network: None }),
    };
    Request { head: Box::new(head), body }
}

/// A body that is there and has a length.
pub(crate) fn known(body: impl Into<Bytes>) -> RequestBody {
    let body = body.into();
    let len = Some(body.len() as u64);
    let (sender, arriving) = arriving(len);
    sender.try_send(Ok(body)).expect("the first piece has room");
    arriving
}

/// A body that arrives as the test sends it.
pub(crate) fn arriving(len: Option<u64>) -> (mpsc::Sender<Result<Bytes, BodyError>>, RequestBody) {
    let (sender, mut pieces) = mpsc::channel(1);
    let body = PolledBody::with_len(len, move |cx| {
        pieces.poll_recv(cx).map(|piece: Option<Result<_, _>>| piece.map(|piece| piece.map(Frame::data)))
    });
    (sender, RequestBody::new(body))
}

/// Goes as far as it comes without waiting, and is given up there.
pub(super) async fn poll_once(work: impl Future) {
    let mut work = std::pin::pin!(work);
    let is_over = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx).is_ready())).await;
    assert!(!is_over, "there was nothing to wait for");
}

/// All of a body, or how it broke off.
pub(super) async fn read(response: &mut Response) -> Result<Vec<u8>, BodyError> {
    let mut all = Vec::new();
    while let Some(piece) = piece(response).await {
        all.extend_from_slice(&piece?);
    }
    Ok(all)
}

pub(super) async fn piece(response: &mut Response) -> Option<Result<Bytes, BodyError>> {
    match &mut response.body {
        ResponseBody::Empty => None,
        ResponseBody::Bytes(bytes) => Some(std::mem::take(bytes)).filter(|bytes| !bytes.is_empty()).map(Ok),
        ResponseBody::Stream(body) => loop {
            match poll_fn(|cx| body.as_mut().poll_frame(cx)).await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => return Some(Ok(data)),
                    Err(_) => continue,
                },
                Err(error) => return Some(Err(error)),
            }
        },
        _ => panic!("programs answer with bytes or a stream"),
    }
}

pub(super) async fn text(mut response: Response) -> String {
    String::from_utf8(read(&mut response).await.expect("a whole body")).unwrap()
}

/// Waits until `ready` says so.
pub(super) async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < HANG, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Of a request about which nothing more is known.
struct NoHooks;

impl ScriptHooks for NoHooks {
    fn variables(&self) -> Vec<ScriptVariable> {
        Vec::new()
    }

    fn explain_refusal(&self, refusal: Refusal, _: &RequestHead) -> Refusal {
        refusal
    }
}

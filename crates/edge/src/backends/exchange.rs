//! Starts the backend of a site in the request's cell and lets it respond, by kind of backend.
//!
//! Not here: each kind of backend (`files`, `programs`, `upstream`), the choice of the cell
//! (`rules`), limits of bodies that no program's cell can enforce (`shaping`), the order of a
//! request's steps (`request`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use nagaya_keeper_api::client::BoostGuard;
use nagaya_keeper_api::protocol::InstanceId;
use nagaya_records::record::{App, AppProtocol, FileRoot, Http};
use nagaya_records::{Backend, Site};

use crate::backends::backend_set::Backends;
use crate::backends::files::FileContext;
use crate::backends::files::root::DocumentRoot;
use crate::backends::files::script::ProgramKind;
use crate::backends::instances::InstanceRef;
use crate::backends::lookup::{FoundHandler, HandlerLookup};
use crate::backends::programs::instance::InstanceCall;
use crate::backends::programs::pool::paths::ScriptPlace;
use crate::backends::programs::script::{ProgramOutcome, ProgramScript, ScriptHooks};
use crate::backends::request_cell::CellConnector;
use crate::backends::upstream::pool::{Connector, NoConnection, UpstreamAddress, UpstreamSocket};
use crate::backends::upstream::{ExchangeTimeouts, FailedExchange, UpstreamHead};
use crate::backends::{boost, lookup, named_file, programs, upstream};
use crate::cluster::retry_budget::RetryBudget;
use crate::cluster::serving_epoch::{HOLD_MAX, ServingEpoch};
use crate::http::message::{Request, RequestBody, RequestHead, Response};
use crate::http::path::SitePath;
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::http::{path, peer_fields, serving};
use crate::record::access_record::AccessRecord;
use crate::record::execution::ExecutionSlot;
use crate::shaping::quota_debt::QuotaDebt;

/// Usual size of the fields of a request to an application, bytes.
const FIELDS_LEN: usize = 1024;

/// Maximum number of local redirects for one request. A program can answer "serve that path
/// instead" (RFC 3875 section 6.2.2).
const LOCAL_REDIRECTS_MAX: u32 = 10;

/// Maximum number of wakes for one request of an instance that ended between two requests.
const RENEWALS_MAX: u32 = 1;

/// A request's hold on its site's instance while it is served.
#[derive(Default)]
pub struct HeldInstance {
    /// Keeps the instance awake.
    pub lease: Option<Rc<InstanceRef>>,
    /// Keeps limits of the instance higher.
    pub boost: Option<BoostGuard>,
}

impl HeldInstance {
    /// The request needs its site's instance, until its answer is complete.
    fn lease(&mut self, backends: &Backends, route: &SiteRoute, epoch: Option<u64>) -> Rc<InstanceRef> {
        let hold = || Rc::new(backends.instances.hold(&route.site.name, epoch));
        Rc::clone(self.lease.get_or_insert_with(hold))
    }
}

/// One request as a backend is given it, with what it may hold and what it writes down.
pub struct BackendCall<'a> {
    pub route: &'a SiteRoute,
    /// Its right to be served here. `None` if its site is not placed.
    pub serving: Option<&'a ServingEpoch>,
    /// How often it may still be sent again.
    pub retries: &'a RetryBudget,
    pub execution: &'a ExecutionSlot,
    pub hooks: &'a dyn ScriptHooks,
    pub held: &'a mut HeldInstance,
    pub record: &'a mut AccessRecord,
}

impl BackendCall<'_> {
    fn epoch(&self) -> Option<u64> {
        self.serving.map(ServingEpoch::epoch)
    }

    /// Has limits of this instance raised for the request, as a rule wants it. An earlier raise for
    /// the request ends.
    async fn boost(&mut self, backends: &Backends, instance: InstanceId) {
        self.held.boost = None;
        self.held.boost = boost::begin(&backends.keeper, instance, self.execution).await;
    }
}

/// Begins to wake an application that rests. That takes long, and can go on while the request waits
/// its turn. Does nothing if only a file is requested. Returns the lease that keeps the application
/// awake.
pub fn prepare(
    backends: &Backends,
    route: &SiteRoute,
    lookup: &HandlerLookup,
    serving: Option<&ServingEpoch>,
) -> Option<Rc<InstanceRef>> {
    let Backend::App(app) = &route.site.backend else { return None };
    if app.files.is_some() && !lookup.is_program() {
        return None;
    }
    serving::need_client();
    let epoch = serving.map(ServingEpoch::epoch);
    Some(Rc::new(backends.instances.hold(&route.site.name, epoch)))
}

/// Lets what answers the site answer this request, if it is not the edge itself with a file.
pub async fn run(
    backends: &Backends,
    call: BackendCall<'_>,
    request: Request,
    lookup: HandlerLookup,
) -> Result<Response, Refusal> {
    let route = call.route;
    match &route.site.backend {
        Backend::Static(files) => Box::pin(from_static(backends, route, files, &request.head)).await,
        // Boxed. Otherwise the state of the largest exchange would be part of every request's,
        // also of a file's.
        Backend::Cgi(files) | Backend::Php(files) => {
            Box::pin(from_files(backends, call, (files, lookup), request)).await
        }
        Backend::Http(http) => {
            Box::pin(from_server(backends, (&route.site, http), request, call.retries)).await
        }
        Backend::App(App { protocol: AppProtocol::FastCgi, files: Some(files), .. }) => {
            Box::pin(from_files(backends, call, (files, lookup), request)).await
        }
        Backend::App(app) => Box::pin(from_app(backends, call, app, request)).await,
    }
}

/// Returns a file.
pub async fn from_static(
    backends: &Backends,
    route: &SiteRoute,
    files: &FileRoot,
    head: &RequestHead,
) -> Result<Response, Refusal> {
    let path = SitePath::parse(&head.path)?;
    let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
    let root = backends.root(&route.site).await?;
    backends
        .files
        .serve(&FileContext { head, files, programs: ProgramKind::None, root: &root, path: &path, rel })
        .await
}

/// Returns a file, or the answer of a program among the files.
async fn from_files(
    backends: &Backends,
    mut call: BackendCall<'_>,
    (files, lookup): (&FileRoot, HandlerLookup),
    mut request: Request,
) -> Result<Response, Refusal> {
    let route = call.route;
    let programs = ProgramKind::of(&route.site.backend);
    let mut looked = lookup.into_found();
    let mount = route.site.path.trim_end_matches('/');
    for _ in 0..=LOCAL_REDIRECTS_MAX {
        let head = &request.head;
        let found = match looked.take() {
            Some(found) => found,
            None => lookup::look(backends, route, files, &head.path).await,
        };
        let FoundHandler { root, program } = found?;
        let Some(program) = program else {
            let path = SitePath::parse(&head.path)?;
            let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
            return backends
                .files
                .serve(&FileContext { head, files, programs, root: &root, path: &path, rel })
                .await;
        };
        serving::need_client();
        // Its path info is then the whole path.
        let is_root = program.is_front && programs == ProgramKind::Cgi;
        let script = ProgramScript {
            name: if is_root { mount.to_owned() } else { [mount, "/", &program.script].concat() },
            file: program.script,
            path_info: program.path_info,
            variables: call.hooks.variables(),
            client: backends.forwarding.view_client(head),
        };
        let Request { head, body } = request;
        let outcome = match programs {
            ProgramKind::Php => {
                let whose = (&route.tenant, place_of(backends, &root, files, &script.file));
                let execution = call.execution.get_or_make();
                backends
                    .programs
                    .php(&route.site, whose, script, (&head, body), (&execution, call.hooks))
                    .await?
            }
            ProgramKind::FastCgi => from_script(backends, &mut call, script, (&head, body)).await?,
            _ => {
                let execution = call.execution.get_or_make();
                backends.programs.cgi(&route.site, &route.tenant, script, (&head, body), &execution).await?
            }
        };
        match outcome {
            ProgramOutcome::Response(response) => {
                let (here, which) = ((route, &root), (files, programs));
                return Box::pin(named_file::apply(&backends.files, here, which, &head, response)).await;
            }
            ProgramOutcome::LocalRedirect { path, query } => {
                request = redirect(head, (path, query), &route.site.path)?;
            }
        }
    }
    Err(Refusal::BackendInvalid(format!(
        "its programs redirect each other more than {LOCAL_REDIRECTS_MAX} times"
    )))
}

/// Returns the request for the path that a program names instead.
fn redirect(
    mut head: Box<RequestHead>,
    (path, query): (String, Option<String>),
    mount: &str,
) -> Result<Request, Refusal> {
    head.path = path.into();
    path::canonicalize(&mut head.path, mount)?;
    head.query = query.map(Into::into);
    if head.method != Method::HEAD {
        head.method = Method::GET;
    }
    Ok(Request { head, body: RequestBody::empty() })
}

/// Returns the present location of a script with this path below the root.
fn place_of(backends: &Backends, root: &DocumentRoot, files: &FileRoot, script: &str) -> ScriptPlace {
    let looked = backends.programs.path_moment();
    let path = script.rsplit_once('/').map_or("", |(directory, _)| directory);
    let directory = backends.files.directory_of(root, files, script).unwrap_or(root.id());
    ScriptPlace { root: root.id(), path: path.into(), directory, looked }
}

/// Forwards the request to a server that runs already.
async fn from_server(
    backends: &Backends,
    (site, http): (&Arc<Site>, &Http),
    request: Request,
    retries: &RetryBudget,
) -> Result<Response, Refusal> {
    serving::need_client();
    let address = UpstreamAddress::of(site, http);
    let Request { head, body } = request;
    let mut proxy = ProxyExchange::new(backends, &head, http.host_header.as_deref(), http.timeout_seconds)?;
    proxy.trailers = &http.request_trailers;
    Ok(proxy.exchange(&address, backends, body, retries).await?)
}

/// Runs a script in the site's instance, over a connection of its own.
async fn from_script(
    backends: &Backends,
    call: &mut BackendCall<'_>,
    script: ProgramScript,
    (head, body): (&RequestHead, RequestBody),
) -> Result<ProgramOutcome, Refusal> {
    let route = call.route;
    let Backend::App(app) = &route.site.backend else {
        return Err(Refusal::SiteBroken(format!("site {} is no application", route.site.name)));
    };
    let limits = backends.limits.get();
    let connect = Duration::from_millis(limits.backend.connect_ms);
    let silence = head_patience(head, limits.backend.answer_ms, app.timeout_seconds);
    let fastcgi = backends.programs.call(&route.site, &route.tenant, script, (head, body), silence).await?;
    let (lease, instance) = ready_instance(backends, call).await?;
    let connector = cell_connector(backends, &lease, call.execution);
    let debt = connector.execution().and_then(QuotaDebt::own);
    let attempt = async |instance, fastcgi: InstanceCall| {
        lease.sends();
        let address = UpstreamAddress::Instance(instance);
        let opened = backends.upstream.open(&address, &connector, connect).await;
        let seat = match &opened {
            Ok(socket) => connector.seat(&address, socket).await,
            Err(_) => None,
        };
        match opened {
            Ok(UpstreamSocket::Unix(stream)) => {
                fastcgi.over(stream, seat).await.map_err(|failed| (failed.refusal, failed.again))
            }
            Ok(UpstreamSocket::Tcp(_)) => {
                let why = "FastCGI goes over a Unix socket: use socket or fd";
                Err((Refusal::SiteBroken(why.into()), None))
            }
            Err(NoConnection::Refused(refusal)) => Err((refusal, Some(fastcgi))),
            Err(silent) => Err((silent.into(), None)),
        }
    };
    let outcome = with_renewals(backends, call, &lease, (instance, fastcgi), attempt).await?;
    Ok(settle(stripped(backends, outcome), debt, &connector).await)
}

/// Lets the instance answer. If it has ended meanwhile and the request may be sent again, the next
/// one answers. A failed attempt returns the reason, and the input of the next attempt. `None` if
/// there must be no other attempt.
async fn with_renewals<N, T>(
    backends: &Backends,
    call: &mut BackendCall<'_>,
    lease: &InstanceRef,
    (mut instance, mut next): (InstanceId, N),
    attempt: impl AsyncFn(InstanceId, N) -> Result<T, (Refusal, Option<N>)>,
) -> Result<T, Refusal> {
    let mut renewals = 0;
    loop {
        let (refusal, again) = match attempt(instance, next).await {
            Ok(answer) => {
                lease.answered(instance);
                return Ok(answer);
            }
            Err(failed) => failed,
        };
        let Some(again) = again else { return Err(refusal) };
        if renewals == RENEWALS_MAX || !call.retries.take() {
            return Err(refusal);
        }
        renewals += 1;
        backends.upstream.count_retry();
        // The instance may have ended meanwhile: then another one is woken. If that fails, the
        // first failure is more useful.
        lease.renew(instance);
        let renewed = match awake(lease, call.record).await {
            Ok(renewed) => renewed,
            // It ended because its site is elsewhere now. The request may follow it.
            Err(away @ (Refusal::Moved | Refusal::Fenced)) => return Err(away),
            Err(_) => return Err(refusal),
        };
        call.boost(backends, renewed).await;
        (instance, next) = (renewed, again);
    }
}

/// Returns the connector that gives the request a cell of its own, if it has limits of its own.
fn cell_connector(backends: &Backends, lease: &Rc<InstanceRef>, execution: &ExecutionSlot) -> CellConnector {
    CellConnector::new(lease, &backends.keeper, backends.programs.after(), execution.get())
}

/// Does what is left to do with the answer to a request that was to have a cell of its own.
async fn settle(
    outcome: ProgramOutcome,
    debt: Option<QuotaDebt>,
    connector: &CellConnector,
) -> ProgramOutcome {
    match connector.execution() {
        Some(execution) => programs::finish(outcome, debt, execution).await,
        None => outcome,
    }
}

fn stripped(backends: &Backends, outcome: ProgramOutcome) -> ProgramOutcome {
    match outcome {
        ProgramOutcome::Response(mut response) if backends.cluster.is_member() => {
            peer_fields::strip(&mut response.headers);
            ProgramOutcome::Response(response)
        }
        outcome => outcome,
    }
}

/// Returns the site's instance, once it can answer and may do so.
async fn ready_instance(
    backends: &Backends,
    call: &mut BackendCall<'_>,
) -> Result<(Rc<InstanceRef>, InstanceId), Refusal> {
    let lease = call.held.lease(backends, call.route, call.epoch());
    let instance = awake(&lease, call.record).await?;
    // If sites are placed, the instance may be awake before it may serve.
    if let Some(serving) = call.serving {
        let fence = serving.begin(HOLD_MAX).await?;
        call.record.add_fence(fence);
    }
    call.boost(backends, instance).await;
    Ok((lease, instance))
}

/// Forwards the request to the site's instance. The keeper wakes it if it rests, and makes the
/// connections to it.
async fn from_app(
    backends: &Backends,
    mut call: BackendCall<'_>,
    app: &App,
    request: Request,
) -> Result<Response, Refusal> {
    let Request { head, body } = request;
    let mut proxy = ProxyExchange::new(backends, &head, None, app.timeout_seconds)?;
    proxy.trailers = &app.request_trailers;
    let (lease, instance) = ready_instance(backends, &mut call).await?;
    let connector = cell_connector(backends, &lease, call.execution);
    let debt = connector.execution().and_then(QuotaDebt::own);
    let retries = call.retries;
    let attempt = async |instance, body: RequestBody| {
        lease.sends();
        let answered = proxy.exchange(&UpstreamAddress::Instance(instance), &connector, body, retries).await;
        answered.map_err(|failed| (failed.refusal, failed.again))
    };
    let response = with_renewals(backends, &mut call, &lease, (instance, body), attempt).await?;
    Ok(match connector.execution() {
        Some(execution) => programs::finish_answer(response, debt, execution).await,
        None => response,
    })
}

/// Returns the maximum wait for the head of the answer. It is the site's limit, bounded by the
/// wait of the forwarding node.
fn head_patience(head: &RequestHead, backend_ms: u64, timeout_seconds: Option<u32>) -> Duration {
    let own = timeout_seconds
        .map_or(Duration::from_millis(backend_ms), |seconds| Duration::from_secs(seconds.into()));
    match &head.conn.carried {
        Some(carried) => own.min(carried.deadline.saturating_duration_since(Instant::now())),
        None => own,
    }
}

/// Waits until the instance can answer, and records the duration.
async fn awake(lease: &InstanceRef, record: &mut AccessRecord) -> Result<InstanceId, Refusal> {
    let since = Instant::now();
    let awake = lease.awake().await?;
    if let Some(wake) = awake.wake {
        record.add_wake(wake, since.elapsed());
    }
    Ok(awake.instance)
}

/// One request on its way to a server.
struct ProxyExchange<'a> {
    backends: &'a Backends,
    head: &'a RequestHead,
    fields: Vec<u8>,
    /// Names of trailer fields that are forwarded. Empty, unless the site's record names some.
    trailers: &'a [String],
    bounds: ExchangeTimeouts,
}

impl<'a> ProxyExchange<'a> {
    fn new(
        backends: &'a Backends,
        head: &'a RequestHead,
        host: Option<&str>,
        timeout_seconds: Option<u32>,
    ) -> Result<Self, Refusal> {
        let limits = backends.limits.get();
        let bounds = ExchangeTimeouts {
            connect: Duration::from_millis(limits.backend.connect_ms),
            head: head_patience(head, limits.backend.answer_ms, timeout_seconds),
            idle: Duration::from_millis(limits.idle_body_ms),
            head_bytes: limits.head_bytes,
        };
        let mut fields = Vec::with_capacity(FIELDS_LEN);
        backends.forwarding.request(head, host, &mut fields)?;
        Ok(Self { backends, head, fields, trailers: &[], bounds })
    }

    async fn exchange(
        &self,
        address: &UpstreamAddress,
        connector: &impl Connector,
        body: RequestBody,
        retries: &RetryBudget,
    ) -> Result<Response, FailedExchange> {
        let outgoing = UpstreamHead { head: self.head, fields: &self.fields, trailers: self.trailers };
        let pool = &self.backends.upstream;
        let mut response =
            upstream::exchange(pool, address, connector, outgoing, body, self.bounds, retries).await?;
        self.backends.forwarding.response(&mut response);
        // Fields between nodes must not come from an application.
        if self.backends.cluster.is_member() {
            peer_fields::strip(&mut response.headers);
        }
        Ok(response)
    }
}

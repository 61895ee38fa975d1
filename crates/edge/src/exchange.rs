//! Brings up what answers a site, in the cell the request was given, and lets it answer, by kind of backend.
//!
//! Not here: how each kind works (`files`, `programs`, `upstream`), which cell that is (`rules`), how bodies are held to
//! limits that no program's cell can hold them to (`pace`), the order of a request's steps (`request`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use nagaya_cmdb::record::{App, Files, Http, Protocol};
use nagaya_cmdb::{Backend, Site};
use nagaya_keeper::protocol::InstanceId;

use crate::account::Account;
use crate::boost;
use crate::buffer;
use crate::files::{Ctx, Programs};
use crate::instances::Hold;
use crate::intake;
use crate::message::{Head, Request, RequestBody, Response};
use crate::named_file;
use crate::node::Node;
use crate::pace::{self, Debt};
use crate::path::{self, SitePath};
use crate::peers::fields;
use crate::place::{self, Retries};
use crate::programs::{self, Outcome, Script, Unanswered};
use crate::refusal::Refusal;
use crate::route::Route;
use crate::rules;
use crate::seat::Seating;
use crate::serving;
use crate::upstream::{self, Address, Bounds, Connector, Failed, NoConnection, Outgoing, Socket};

/// What the fields of a request to an application mostly take, in bytes.
const FIELDS_LEN: usize = 1024;

/// A program may answer "serve that path instead" (RFC 3875 section 6.2.2) this often for one request.
const LOCAL_REDIRECTS_MAX: u32 = 10;

/// An instance that ended between two requests is woken anew this often for one request.
const RENEWALS_MAX: u32 = 1;

/// Begins what takes long and can go on while the request waits its turn: waking an application that rests. Not where a
/// file may be all that is asked for: that is found out when it is looked for.
pub fn prepare(node: &Node, route: &Route, head: &Head, account: &mut Account) {
    let Backend::App(app) = &route.site.backend else { return };
    let names_script =
        |files: &Files| head.path.split('/').any(|name| Programs::FastCgi.contains(files, name));
    if app.files.as_deref().is_none_or(names_script) {
        serving::need_client();
        let epoch = account.stint().map(|stint| stint.epoch());
        account.need(|| node.instances.hold(&route.site.name, epoch));
    }
}

pub async fn run(
    node: &Node,
    route: &Route,
    mut request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    let is_taken_in = request.body.is_empty() || intake::applies(&request.head, &route.site.backend);
    if !is_taken_in {
        let limits = account.confined().map(|stay| Arc::clone(stay.confinement()));
        pace::upload(node, route, account, limits.as_ref(), &mut request);
    }
    let response = match &route.site.backend {
        // The edge itself answers: there is no backend to time.
        Backend::Static(files) => {
            let response = from_static(node, route, files, &request.head).await?;
            return Ok(pace::apply(node, route, account, response));
        }
        // Boxed, or the state of the largest exchange would be part of every request's, a file's too.
        Backend::Cgi(files) | Backend::Php(files) => {
            Box::pin(from_files(node, route, files, request, account)).await
        }
        Backend::Http(http) => {
            Box::pin(from_server(node, (&route.site, http), request, account.retries())).await
        }
        Backend::App(App { protocol: Protocol::FastCgi, files: Some(files), .. }) => {
            Box::pin(from_files(node, route, files, request, account)).await
        }
        Backend::App(app) => Box::pin(from_app(node, route, app, request, account)).await,
    }?;
    account.backend_answered();
    // A request that still comes needs the task of its connection, which polls the answer.
    let response = if is_taken_in {
        buffer::keep(&node.shared.spool, &route.tenant.name, account, response)?
    } else {
        response
    };
    Ok(pace::apply(node, route, account, response))
}

/// A file.
async fn from_static(node: &Node, route: &Route, files: &Files, head: &Head) -> Result<Response, Refusal> {
    let path = SitePath::parse(&head.path)?;
    let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
    let root = node.root(&route.site).await?;
    node.files.serve(&Ctx { head, files, programs: Programs::None, root: &root, path: &path, rel }).await
}

/// A file, or the answer of a program among the files.
async fn from_files(
    node: &Node,
    route: &Route,
    files: &Files,
    mut request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    let programs = Programs::of(&route.site.backend);
    let root = node.root(&route.site).await?;
    for _ in 0..=LOCAL_REDIRECTS_MAX {
        let head = &request.head;
        let path = SitePath::parse(&head.path)?;
        let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
        let Some(program) = node.files.find_program(&root, rel, files, programs).await? else {
            return node.files.serve(&Ctx { head, files, programs, root: &root, path: &path, rel }).await;
        };
        serving::need_client();
        let mount = route.site.path.trim_end_matches('/');
        // What follows it is the whole path then.
        let is_root = program.is_front && programs == Programs::Cgi;
        let script = Script {
            name: if is_root { mount.to_owned() } else { format!("{mount}/{}", program.script) },
            file: program.script,
            path_info: program.path_info,
            variables: rules::variables(account),
            client: node.forwarding.view_client(head),
        };
        let mut again = request.head.clone();
        let outcome = match programs {
            Programs::Php => {
                node.programs.php(&route.site, &route.tenant, script, request, &account.stay()).await?
            }
            Programs::FastCgi => from_script(node, route, script, request, account).await?,
            _ => node.programs.cgi(&route.site, &route.tenant, script, request, &account.stay()).await?,
        };
        match outcome {
            Outcome::Response(response) => {
                let (here, which) = ((route, &root), (files, programs));
                return Box::pin(named_file::apply(node, here, which, &again, response)).await;
            }
            Outcome::LocalRedirect { path, query } => {
                again.path = path.into();
                path::canonicalize(&mut again.path, &route.site.path)?;
                again.query = query.map(Into::into);
                if again.method != Method::HEAD {
                    again.method = Method::GET;
                }
                request = Request { head: again, body: RequestBody::empty() };
            }
        }
    }
    Err(Refusal::BackendInvalid(format!(
        "its programs redirect each other more than {LOCAL_REDIRECTS_MAX} times"
    )))
}

/// A server that already runs somewhere.
async fn from_server(
    node: &Node,
    (site, http): (&Arc<Site>, &Http),
    request: Request,
    retries: &Retries,
) -> Result<Response, Refusal> {
    serving::need_client();
    let address = Address::of(site, http);
    let Request { head, body } = request;
    let mut proxy = Proxy::new(node, &head, http.host_header.as_deref(), http.timeout_seconds)?;
    proxy.trailers = &http.request_trailers;
    Ok(proxy.exchange(&address, node, body, retries).await?)
}

/// A script, run by the site's instance over a connection of its own.
async fn from_script(
    node: &Node,
    route: &Route,
    script: Script,
    request: Request,
    account: &mut Account,
) -> Result<Outcome, Refusal> {
    let Backend::App(app) = &route.site.backend else {
        return Err(Refusal::SiteBroken(format!("site {} is no application", route.site.name)));
    };
    let limits = node.limits();
    let connect = Duration::from_millis(limits.backend.connect_ms);
    let silence = head_patience(&request.head, limits.backend.answer_ms, app.timeout_seconds);
    let mut call = node.programs.call(&route.site, &route.tenant, script, request, silence).await?;
    let (hold, mut instance) = ready_instance(node, route, account).await?;
    let seating = seating(node, &hold, account);
    let debt = seating.stay().and_then(Debt::own);
    let mut renewals = 0;
    loop {
        let address = Address::Instance(instance);
        let opened = node.upstream.open(&address, &seating, connect).await;
        let seat = match &opened {
            Ok(socket) => seating.seat(&address, socket).await,
            Err(_) => None,
        };
        let Unanswered { refusal, again } = match opened {
            Ok(Socket::Unix(stream)) => match call.over(stream, seat).await {
                Ok(outcome) => {
                    hold.answered(instance);
                    return Ok(paid(stripped(node, outcome), debt, &seating).await);
                }
                Err(unanswered) => unanswered,
            },
            Ok(Socket::Tcp(_)) => {
                return Err(Refusal::SiteBroken("FastCGI goes over a Unix socket: use socket or fd".into()));
            }
            Err(NoConnection::Refused(refusal)) => Unanswered { refusal, again: Some(call) },
            Err(silent) => return Err(silent.into()),
        };
        let may = |_: &_| renewals < RENEWALS_MAX && account.retries().take();
        let Some(again) = again.filter(may) else { return Err(refusal) };
        renewals += 1;
        node.upstream.count_retry();
        hold.renew(instance);
        let Ok(renewed) = awake(&hold, account).await else { return Err(refusal) };
        boost::begin(node, renewed, account).await;
        (instance, call) = (renewed, again);
    }
}

/// What gives the request a cell of its own, if it has limits of its own.
fn seating(node: &Node, hold: &Rc<Hold>, account: &Account) -> Seating {
    Seating::new(hold, node.keeper(), node.programs.after(), account.confined())
}

/// What is left to do with the answer to a request that was to have a cell of its own.
async fn paid(outcome: Outcome, debt: Option<Debt>, seating: &Seating) -> Outcome {
    match seating.stay() {
        Some(stay) => programs::finish(outcome, debt, stay).await,
        None => outcome,
    }
}

fn stripped(node: &Node, outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Response(mut response) if node.shared.cluster.is_member() => {
            fields::strip(&mut response.headers);
            Outcome::Response(response)
        }
        outcome => outcome,
    }
}

/// The site's instance, once it can answer and may.
async fn ready_instance(
    node: &Node,
    route: &Route,
    account: &mut Account,
) -> Result<(Rc<Hold>, InstanceId), Refusal> {
    let epoch = account.stint().map(|stint| stint.epoch());
    let hold = account.need(|| node.instances.hold(&route.site.name, epoch));
    let instance = awake(&hold, account).await?;
    // Where sites are placed: the instance may be awake before it may serve.
    if let Some(stint) = account.stint() {
        let fence = stint.begin(place::HOLD_MAX).await?;
        account.was_fenced(fence);
    }
    boost::begin(node, instance, account).await;
    Ok((hold, instance))
}

/// The site's instance, which the keeper wakes if it rests; connections to it come from there.
async fn from_app(
    node: &Node,
    route: &Route,
    app: &App,
    request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    let Request { head, mut body } = request;
    let mut proxy = Proxy::new(node, &head, None, app.timeout_seconds)?;
    proxy.trailers = &app.request_trailers;
    let (hold, mut instance) = ready_instance(node, route, account).await?;
    let seating = seating(node, &hold, account);
    let debt = seating.stay().and_then(Debt::own);
    let mut renewals = 0;
    loop {
        let answered = proxy.exchange(&Address::Instance(instance), &seating, body, account.retries()).await;
        let failed = match answered {
            Ok(response) => {
                hold.answered(instance);
                return Ok(match seating.stay() {
                    Some(stay) => programs::finish_answer(response, debt, stay).await,
                    None => response,
                });
            }
            Err(failed) => failed,
        };
        let may = |_: &_| renewals < RENEWALS_MAX && account.retries().take();
        let Some(again) = failed.again.filter(may) else { return Err(failed.refusal) };
        renewals += 1;
        node.upstream.count_retry();
        // It may have ended meanwhile: then there is another one. If there is none, the first failure says more.
        hold.renew(instance);
        let Ok(renewed) = awake(&hold, account).await else { return Err(failed.refusal) };
        boost::begin(node, renewed, account).await;
        (instance, body) = (renewed, again);
    }
}

/// Until the head of the answer: as the site says, and no longer than the node in front waits.
fn head_patience(head: &Head, backend_ms: u64, timeout_seconds: Option<u32>) -> Duration {
    let own = timeout_seconds
        .map_or(Duration::from_millis(backend_ms), |seconds| Duration::from_secs(seconds.into()));
    match &head.conn.carried {
        Some(carried) => own.min(carried.deadline.saturating_duration_since(Instant::now())),
        None => own,
    }
}

/// Waits until the instance can answer, and notes what that took.
async fn awake(hold: &Hold, account: &mut Account) -> Result<InstanceId, Refusal> {
    let since = Instant::now();
    let awake = hold.awake().await?;
    if let Some(wake) = awake.wake {
        account.woken(wake, since.elapsed());
    }
    Ok(awake.instance)
}

/// One request on its way to a server.
struct Proxy<'a> {
    node: &'a Node,
    head: &'a Head,
    fields: Vec<u8>,
    /// Fields behind the body that go on. None, unless the site's record names some.
    trailers: &'a [String],
    bounds: Bounds,
}

impl<'a> Proxy<'a> {
    fn new(
        node: &'a Node,
        head: &'a Head,
        host: Option<&str>,
        timeout_seconds: Option<u32>,
    ) -> Result<Self, Refusal> {
        let limits = node.limits();
        let bounds = Bounds {
            connect: Duration::from_millis(limits.backend.connect_ms),
            head: head_patience(head, limits.backend.answer_ms, timeout_seconds),
            idle: Duration::from_millis(limits.idle_body_ms),
            head_bytes: limits.head_bytes,
        };
        let mut fields = Vec::with_capacity(FIELDS_LEN);
        node.forwarding.request(head, host, &mut fields)?;
        Ok(Self { node, head, fields, trailers: &[], bounds })
    }

    async fn exchange(
        &self,
        address: &Address,
        connector: &impl Connector,
        body: RequestBody,
        retries: &Retries,
    ) -> Result<Response, Failed> {
        let outgoing = Outgoing { head: self.head, fields: &self.fields, trailers: self.trailers };
        let pool = &self.node.upstream;
        let mut response =
            upstream::exchange(pool, address, connector, outgoing, body, self.bounds, retries).await?;
        self.node.forwarding.response(&mut response);
        // What nodes say to each other is not an application's to say.
        if self.node.shared.cluster.is_member() {
            fields::strip(&mut response.headers);
        }
        Ok(response)
    }
}

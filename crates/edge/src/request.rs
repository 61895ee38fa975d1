//! Runs one request from arrival to release. Start reading nagaya here.
//!
//! route -> place -> rules -> take in -> look up -> admit -> wake -> confine -> exchange -> release
//!
//! - `route` (`router`) finds the site.
//! - `place` (`placement`) finds the node of the cluster that runs the site's application. If that
//!   is another node, the request goes there for the rest of its life.
//! - `rules` asks the operator's Ruby.
//! - `take in` (`intake`) waits for the request's body.
//! - `look up` (`lookup`) finds out whether a file answers.
//! - `admit` waits for the right to run, which a file does not need.
//! - `wake`, `confine` and `exchange` (`backend_step`, `backends::exchange`) bring up the backend,
//!   put it into its cell and let it answer. A wake begins before `admit`, so that both waits are
//!   one.
//!
//! Each step returns what the request then holds, and `run` puts it into the context:
//!
//! | step | holds | until |
//! |---|---|---|
//! | place | `serving`: the right to be served here | the body has been sent |
//! | admit | `work.permit` | the backend's answer is complete |
//! | wake | `work.instance`: the lease of the application | the backend's answer is complete |
//! | confine | `execution`: the cell and its use | what the programs used is known |
//!
//! `release` happens by itself: the context goes with the response (`context`, `work`).
//! `read_ahead` takes in an answer ahead of a slow client. Every early exit is a [`Refusal`];
//! `refusal` alone turns it into a response. Not here: HTTP on the wire (`h1`, `h2`), tenants'
//! processes (`keeper`).

pub mod backend_step;
pub mod context;
pub mod placement;
pub mod router;
pub mod services;
pub mod work;

use std::rc::Rc;

use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};

use crate::admission::permit::Permit;
use crate::admission::site_lane::SiteLane;
use crate::admission::{admit, events};
use crate::backends::files::ErrorDocument;
use crate::backends::lookup::HandlerLookup;
use crate::backends::{exchange, intake, lookup};
use crate::http::message::{Request, Response};
use crate::http::refusal::Refusal;
use crate::http::{deadline, path, tls};
use crate::request::context::RequestContext;
use crate::request::placement::Routed;
use crate::request::services::Services;
use crate::rules;

/// Answers the request in every case, and accounts for it.
pub async fn serve(services: &Services, request: Request) -> Response {
    let mut context = RequestContext::open(services.recorder(), &services.forwarding, &request);
    let response = match run(services, request, &mut context).await {
        Ok(mut response) => {
            context.apply_rules(&mut response);
            admit::note_origins(context.route(), &response.headers);
            response
        }
        Err(refusal) => {
            let mut response = refuse(services, refusal, &mut context).await;
            admit::let_read(context.route(), context.origin(), &mut response.headers);
            response
        }
    };
    context.answer(response)
}

async fn run(
    services: &Services,
    mut request: Request,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    // The request rate of a client's network has the same limit for all sites.
    services.clients.admit_request(&request.head, &services.forwarding)?;

    if &*request.head.path == "*" {
        return Ok(node_options(&request.head.method));
    }

    // Another node may know a site whose record has not arrived here yet.
    if let Some(carried) = &request.head.conn.carried {
        Box::pin(placement::catch_up(&services.placer.cluster, carried)).await;
    }

    // Finds the site. Unknown hosts leave here, before anything costs memory.
    let route = services.router.find(&request.head)?;
    check_certificate(&request)?;
    bound(services, &route, &mut request, context)?;

    // Rules, lanes and receipts are the site's node's. A request for another node ends here.
    let request = match placement::arrive(&services.placer, &route, request, context).await? {
        Routed::Answered(response) => return Ok(response),
        Routed::Here { request, serving } => {
            context.serving = serving;
            request
        }
    };
    run_here(services, &route, request, context).await
}

/// The steps of a request that this node serves.
async fn run_here(
    services: &Services,
    route: &Rc<SiteLane>,
    mut request: Request,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    // The event stream of the waiting page does not wait in a lane.
    if let Some(answer) = events::answer(&services.gate, route, &request)? {
        return Ok(answer);
    }

    // The operator's rules may answer, change the request, or choose lane, limits and cells.
    let (applied, record) = context.verdict_and_record();
    if let Some(answer) = rules::on_arrival(&services.rules, route, &mut request, applied, record)? {
        return Ok(answer);
    }

    // A client that uploads slowly holds none of the resources below.
    take_in(services, route, &mut request, context).await?;

    // Finds out whether a file or a program answers. A file passes no lane.
    let may_move = rules::run_on_admission(&services.rules);
    let lookup = lookup::find(&services.backends, route, &request.head, may_move).await;

    // An application that rests is woken while the request waits its turn. The lease keeps it awake
    // until the answer is complete.
    let lease = exchange::prepare(&services.backends, route, &lookup, context.serving.as_ref());
    context.work.instance.lease = lease;

    // The request waits its turn in line, or is refused with a time to come back. The permit is
    // held until the answer is complete. That may be before the client has taken it.
    context.work.permit = take_turn(services, route, &lookup, &mut request, context).await?;

    // Rules run for the last time here. Then it is known where the request runs.
    let (applied, record) = context.verdict_and_record();
    let applied = applied.as_deref_mut();
    if let Some(answer) = rules::on_admission(&services.rules, route, &mut request, applied, record)? {
        return Ok(answer);
    }
    let renewal = (context.has_waited(), rules::run_on_admission(&services.rules));
    let lookup = lookup.renew(&services.backends, route, &request.head, renewal).await;
    if context.work.permit.is_none() {
        // A rule or the owner may have put a program where there was a file.
        context.work.permit = take_turn(services, route, &lookup, &mut request, context).await?;
    }
    // The cell its programs run in. It is given back when what they used is known.
    let id = context.id();
    let confinement = rules::confine(&services.rules, route, context.applied.as_deref_mut(), id).await;
    if let Some(confinement) = confinement {
        context.execution.confine(confinement);
    }

    // Starts the backend and lets it respond. If the site moves, the request follows it.
    match deadline::of_site(&route.site) {
        None => placement::answer(services, route, request, lookup, context).await,
        Some(end) => {
            let answer = placement::answer(services, route, request, lookup, context);
            Box::pin(deadline::limit_until(end, answer)).await
        }
    }
}

/// The certificate that was shown must be for the host that is asked for.
fn check_certificate(request: &Request) -> Result<(), Refusal> {
    match &request.head.conn.tls {
        Some(tls) if !tls::covers(tls, &request.head.host) => Err(Refusal::Misdirected),
        _ => Ok(()),
    }
}

/// Checks the caller and sets the limits of the body. Tenants' own programs may reach only their
/// own sites. From here on the request carries its route, and nothing that its client may not
/// say.
fn bound(
    services: &Services,
    route: &Rc<SiteLane>,
    request: &mut Request,
    context: &mut RequestContext,
) -> Result<(), Refusal> {
    route.check_caller(request.head.conn.peer.ip())?;
    context.belongs_to(route);
    path::canonicalize(&mut request.head.path, &route.site.path)?;
    services.forwarding.strip_claims(&mut request.head);
    // A body with a too large announced length is refused before the client sends it. Other
    // bodies are refused when they exceed the limit.
    if request.body.len().is_some_and(|len| len > services.limits.get().body_bytes) {
        return Err(Refusal::BodyTooLarge);
    }
    context.count_body(request);
    deadline::limit_body(request, &route.site);
    Ok(())
}

/// Takes in the body, if its backend is to get it whole.
async fn take_in(
    services: &Services,
    route: &SiteLane,
    request: &mut Request,
    context: &RequestContext,
) -> Result<(), Refusal> {
    if request.body.is_empty() || !intake::applies(&request.head, &route.site.backend) {
        return Ok(());
    }
    let limits = rules::arriving(route, context.applied.as_deref());
    services.shaper.upload(route, &context.execution, limits.as_ref(), request);
    intake::take_in(&services.spool, route, request).await
}

/// Waits for the right to run. `None` if what answers the request does not need it.
async fn take_turn(
    services: &Services,
    route: &Rc<SiteLane>,
    lookup: &HandlerLookup,
    request: &mut Request,
    context: &mut RequestContext,
) -> Result<Option<Permit>, Refusal> {
    let (applied, record) = context.verdict_and_record();
    let (lane, hints) = rules::lane(&services.rules, route, applied.as_deref(), record);
    if !lookup.needs_permit(&route.site, lane.is_some()) {
        return Ok(None);
    }
    let begun = record.begun;
    let admitted = admit::admit(&services.gate, route, lane, hints, request, begun).await?;
    Ok(Some(context.note_admission(admitted)))
}

/// Methods that at least one backend of this node may answer.
const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// `OPTIONS *` asks about the node itself (RFC 9110 section 9.3.7).
fn node_options(method: &Method) -> Response {
    debug_assert_eq!(*method, Method::OPTIONS, "both HTTP versions refuse '*' for other methods");
    Response::new(StatusCode::NO_CONTENT).with_header(ALLOW, HeaderValue::from_static(METHODS))
}

/// Returns the response to a refusal: the site's own document if it has one, else nagaya's.
async fn refuse(services: &Services, refusal: Refusal, context: &mut RequestContext) -> Response {
    let row = refusal.row();
    context.refused(&refusal, &row);
    let id = context.id();
    let mut response = refusal.into_response(id);
    if row.has_own_page {
        return response;
    }
    if let Some(document) = error_document(services, context.route(), row.status).await {
        response.headers.insert(CONTENT_TYPE, document.content_type);
        response.body = document.body;
    }
    response
}

async fn error_document(
    services: &Services,
    route: Option<&SiteLane>,
    status: StatusCode,
) -> Option<ErrorDocument> {
    let site = &route?.site;
    let files = site.backend.files().filter(|files| !files.error_documents.is_empty())?;
    let backends = &services.backends;
    let root = backends.root(site).await.ok()?;
    backends.files.error_document(&root, files, status).await
}

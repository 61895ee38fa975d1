//! The life of one request, top to bottom. Start reading nagaya here.
//!
//!   route -> place -> rules -> take in -> admit -> wake -> confine -> exchange -> release
//!
//! `route` finds the site, `place` the node of the cluster that runs its application (if that is another one, the request goes
//! there, and the rest of its life with it), `rules` asks the operator's Ruby, `take in` (`intake.rs`) waits for the request's
//! body, `admit` waits for the right to run, `wake`, `confine` and
//! `exchange` (in `exchange.rs`, by kind of backend; `instances.rs` for applications) bring up what answers, put it into
//! its cell and let it answer; a wake begins before `admit`, so that both waits are one. `release` happens by itself: every
//! guard taken on the way goes with the response, in its account or its body. What the backend was held by is dropped when
//! its answer is complete (`buffer.rs` takes it in ahead of a slow client), all the rest when the body has been sent, or
//! when the client has left.
//!
//! Every early exit is a [`Refusal`]; `refusal.rs` alone turns it into a response. Not here: HTTP on the wire
//! (`http1`, `http2`), tenants' processes (`keeper`).

use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};

use crate::account::Account;
use crate::admission;
use crate::exchange;
use crate::files::ErrorDocument;
use crate::intake;
use crate::message::{Request, Response};
use crate::node::Node;
use crate::path;
use crate::place::{self, Arrival};
use crate::refusal::Refusal;
use crate::route::Route;
use crate::rules;
use crate::tls;

/// Answers the request, whatever happens, and accounts for it.
pub async fn serve(node: &Node, request: Request) -> Response {
    let mut account = Account::open(node, &request);
    let response = match run(node, request, &mut account).await {
        Ok(mut response) => {
            rules::on_response(&mut response, &mut account);
            response
        }
        Err(refusal) => refuse(node, refusal, &mut account).await,
    };
    account.answer(response)
}

async fn run(node: &Node, mut request: Request, account: &mut Account) -> Result<Response, Refusal> {
    // Does its client's network ask too fast? What one network may do is the same for all sites.
    node.clients.admit_request(&request.head, &node.forwarding)?;

    if &*request.head.path == "*" {
        return Ok(node_options(&request.head.method));
    }

    // Another node may know a site that has not come here yet.
    if let Some(carried) = &request.head.conn.carried {
        Box::pin(place::catch_up(node, carried)).await;
    }

    // Who is this for? Unknown hosts leave here, before anything costs memory.
    let route = node.router.find(&request.head)?;
    if let Some(tls) = &request.head.conn.tls
        && !tls::covers(tls, &request.head.host)
    {
        return Err(Refusal::Misdirected);
    }
    account.belongs_to(&route);
    // From here on the request says what it was routed for, and nothing that is not for its client to say.
    path::canonicalize(&mut request.head.path, &route.site.path)?;
    node.forwarding.strip_claims(&mut request.head);
    // A body announced as too long is refused before the client sends it; others when they have become so.
    if request.body.len().is_some_and(|len| len > node.limits().body_bytes) {
        return Err(Refusal::BodyTooLarge);
    }
    account.count_body(&mut request);

    // Which node runs it? Rules, lines and receipts are of that node: what is not for this one ends here, answered by the other.
    let mut request = match place::arrive(node, &route, request, account).await? {
        Arrival::Here(request) => request,
        Arrival::Answered(response) => return Ok(response),
    };

    // The waiting page's own stream stands in no line.
    if let Some(answer) = admission::events(node, &route, &request)? {
        return Ok(answer);
    }

    // What do the operator's rules say? They may answer, change the request, or choose lane, limits and cells.
    if let Some(answer) = rules::on_arrival(node, &route, &mut request, account)? {
        return Ok(answer);
    }

    // A client that uploads slowly holds nothing of what follows.
    intake::take_in(node, &route, &mut request, account).await?;

    // An application that rests is woken while the request waits its turn, and kept awake until its body has ended.
    exchange::prepare(node, &route, &request.head, account);

    // May it run now? It gets its permit, waits its turn in line, or is told when to come back. The account holds the permit
    // until the answer is complete, which may be before the client has taken it.
    let (lane, wish) = rules::lane(node, &route, account);
    admission::admit(node, &route, lane, wish, &mut request, account).await?;

    // The last word of the rules, and where the request is to run after all they said.
    if let Some(answer) = rules::on_admission(node, &route, &mut request, account)? {
        return Ok(answer);
    }
    rules::confine(node, &route, account).await;

    // Bring up what answers this site, and let it answer. If the site moves meanwhile, the request follows it.
    place::answer(node, &route, request, account).await
}

/// What some backend of this node may answer to.
const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// `OPTIONS *` asks about the node itself (RFC 9110 section 9.3.7).
fn node_options(method: &Method) -> Response {
    debug_assert_eq!(*method, Method::OPTIONS, "both HTTP versions refuse '*' for other methods");
    Response::new(StatusCode::NO_CONTENT).with_header(ALLOW, HeaderValue::from_static(METHODS))
}

/// The response to a refusal: the site's own document where it has one, else nagaya's.
async fn refuse(node: &Node, refusal: Refusal, account: &mut Account) -> Response {
    let row = refusal.row();
    account.refused(&refusal, &row);
    let id = account.id();
    let mut response = refusal.into_response(id);
    if row.has_own_page {
        return response;
    }
    if let Some(document) = error_document(node, account.route(), row.status).await {
        response.headers.insert(CONTENT_TYPE, document.content_type);
        response.body = document.body;
    }
    response
}

async fn error_document(node: &Node, route: Option<&Route>, status: StatusCode) -> Option<ErrorDocument> {
    let site = &route?.site;
    let files = site.backend.files().filter(|files| !files.error_documents.is_empty())?;
    let root = node.root(site).await.ok()?;
    node.files.error_document(&root, files, status).await
}

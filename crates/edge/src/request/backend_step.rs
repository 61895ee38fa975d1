//! The step that lets the backend answer. It holds bodies to their rates, and takes in the answer
//! ahead of a slow client.
//!
//! Not here: how each kind of backend answers (`backends::exchange`).

use std::sync::Arc;

use nagaya_base::RequestId;
use nagaya_records::Backend;

use crate::admission::deferral;
use crate::backends::exchange::BackendCall;
use crate::backends::lookup::HandlerLookup;
use crate::backends::programs::script::{ScriptHooks, ScriptVariable};
use crate::backends::{exchange, intake, read_ahead};
use crate::http::message::{Request, RequestHead, Response};
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::request::context::{ContextParts, RequestContext};
use crate::request::services::Services;
use crate::rules;
use crate::rules::AppliedVerdict;

/// Brings up what answers the site, and lets it answer.
pub async fn run(
    services: &Services,
    route: &SiteRoute,
    mut request: Request,
    lookup: HandlerLookup,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    let response = match &route.site.backend {
        // The edge itself answers: there is no backend to time.
        Backend::Static(files) => {
            pace_upload(services, route, &mut request, context);
            exchange::from_static(&services.backends, route, files, &request.head).await?
        }
        _ => run_backend(services, route, request, lookup, context).await?,
    };
    Ok(services.shaper.apply(route, &context.execution, response))
}

/// Holds a body that still comes to the limits of the request.
fn pace_upload(services: &Services, route: &SiteRoute, request: &mut Request, context: &RequestContext) {
    let limits = context.execution.get().map(|execution| Arc::clone(execution.confinement()));
    services.shaper.upload(route, &context.execution, limits.as_ref(), request);
}

async fn run_backend(
    services: &Services,
    route: &SiteRoute,
    mut request: Request,
    lookup: HandlerLookup,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    let is_taken_in = request.body.is_empty() || intake::applies(&request.head, &route.site.backend);
    if !is_taken_in {
        pace_upload(services, route, &mut request, context);
    }
    let id = context.id();
    let ContextParts { applied, serving, retries, execution, held, record } = context.split();
    let hooks = RequestHooks { applied, route, id };
    let call = BackendCall { route, serving, retries, execution, hooks: &hooks, held, record };
    let response = exchange::run(&services.backends, call, request, lookup).await?;
    context.backend_answered();
    // A request whose body still arrives needs the task of its connection, which polls the
    // answer.
    if !is_taken_in {
        return Ok(response);
    }
    let lend = |status| context.lend(status);
    Ok(read_ahead::keep(&services.spool, &route.tenant.name, lend, response)?)
}

/// The parts of a request that only scripts need.
struct RequestHooks<'a> {
    applied: Option<&'a AppliedVerdict>,
    route: &'a SiteRoute,
    id: RequestId,
}

impl ScriptHooks for RequestHooks<'_> {
    fn variables(&self) -> Vec<ScriptVariable> {
        rules::variables(self.applied, self.route, self.id)
    }

    fn explain_refusal(&self, refusal: Refusal, head: &RequestHead) -> Refusal {
        deferral::without_ticket(refusal, None, &self.route.site, head)
    }
}

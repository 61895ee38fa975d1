//! Forwards a request once, to the node that runs its site.
//!
//! The probe of the node goes out after the request, not before it. So a node that answers costs
//! nothing more. A silent one is detected within a tenth of a second, and a slow one gets its time.
//! Not here: the steps after the loss of a node (`placement`).

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_placement::liveness::ProbeResult;
use nagaya_records::{Backend, NodeRecord};
use tokio::time::sleep_until;

use crate::cluster::peers::peer_exchange;
use crate::cluster::peers::peer_exchange::{LostNode as LostLater, PeerOutcome};
use crate::cluster::peers::pool::{NoPeer, StreamSlot};
use crate::cluster::retry_budget::RetryBudget;
use crate::http::message::{RequestHead, Response};
use crate::http::peer_meta::{PeerDenial, PeerRequestMeta};
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::record::access_record::ForwardedTo;
use crate::request::context::RequestContext;
use crate::request::placement::placer::Placer;
use crate::request::placement::replay_body::ReplayBody;
use crate::request::placement::response_buffer;

/// Time added to the other node's own limits, so that it reports its timeout itself.
const GRACE: Duration = Duration::from_secs(5);

const UNSERVED: &str = "the node that was found did not serve it";

/// Reason why a node was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    Silent,
    Refused,
    Fenced,
    /// It does not have the site.
    NotThere,
    /// The connection broke, which says little about the node.
    Broken,
}

impl FailureKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Refused => "refused",
            Self::Fenced => "fenced",
            Self::NotThere => "not_there",
            Self::Broken => "broken",
        }
    }

    pub const fn as_record(self) -> nagaya_records::PlacementReason {
        match self {
            Self::Silent => nagaya_records::PlacementReason::Silent,
            Self::Fenced => nagaya_records::PlacementReason::Fenced,
            Self::Refused | Self::NotThere | Self::Broken => nagaya_records::PlacementReason::Refused,
        }
    }
}

/// A request that a node did not answer.
pub struct ForwardFailure {
    /// `None` if another node would not do better.
    pub why: Option<FailureKind>,
    /// Some of it may have reached the node.
    pub handed: bool,
    pub refusal: Refusal,
}

impl ForwardFailure {
    fn untouched(why: FailureKind) -> Self {
        Self { why: Some(why), handed: false, refusal: Refusal::MovedTooOften(UNSERVED) }
    }

    fn finally(refusal: Refusal) -> Self {
        Self { why: None, handed: true, refusal }
    }
}

/// A response that has begun.
struct BegunResponse {
    response: Response,
    connect: Duration,
    stages: Box<str>,
    lost: LostLater,
}

/// A request that may go to other nodes.
pub struct PeerForward<'a> {
    placer: &'a Placer,
    route: &'a SiteRoute,
    head: &'a RequestHead,
    /// Time when it is given up, on any node.
    deadline: Instant,
}

impl<'a> PeerForward<'a> {
    pub fn new(placer: &'a Placer, route: &'a SiteRoute, head: &'a RequestHead) -> Self {
        let deadline = Instant::now() + patience(placer, route);
        Self { placer, route, head, deadline }
    }

    /// Sends it there, and waits for the beginning of the response.
    pub async fn send(
        &self,
        record: &Arc<NodeRecord>,
        epoch: u64,
        keep: &mut ReplayBody,
        context: &mut RequestContext,
    ) -> Result<Response, ForwardFailure> {
        let began = Instant::now();
        let peers = &self.placer.cluster.peers;
        let handed = Cell::new(false);
        let lent = context.retries.lend();
        let answered = tokio::select! {
            biased;
            answered = self.exchange(record, epoch, (lent, &context.retries), keep, &handed) => answered,
            verdict = self.placer.peers.against(record) => {
                let why = if verdict == ProbeResult::Refuses { FailureKind::Refused } else { FailureKind::Silent };
                self.placer.peers.forget(&record.name);
                Err(ForwardFailure { why: Some(why), handed: handed.get(), refusal: Refusal::MovedTooOften(UNSERVED) })
            }
            () = sleep_until(self.deadline.into()) => Err(ForwardFailure::finally(Refusal::BackendTimeout)),
        };
        let took = began.elapsed();
        let BegunResponse { response, connect, stages, lost } = answered.inspect_err(|lost| {
            peers.tallies.forwarded(&record.name, lost.why.map_or("failed", FailureKind::as_str));
            if !lost.handed {
                context.retries.give_back(lent);
            }
        })?;
        peers.tallies.forwarded(&record.name, "answered");
        self.placer.metrics.forwarded(took);
        context.passed(ForwardedTo { node: record.name.clone(), took, connect, stages }, lost);
        Ok(response)
    }

    async fn exchange(
        &self,
        record: &Arc<NodeRecord>,
        epoch: u64,
        (retries, retries_here): (u32, &RetryBudget),
        keep: &mut ReplayBody,
        handed: &Cell<bool>,
    ) -> Result<BegunResponse, ForwardFailure> {
        let (seat, connect) = self.seat(record).await.map_err(|error| self.unconnected(record, error))?;
        let site = self.route.site.name.clone();
        let carried = PeerRequestMeta { site, epoch, deadline: self.deadline, retries };
        let idle = Duration::from_millis(self.placer.limits.get().idle_body_ms);
        let answer = peer_exchange::send(seat, self.head, &carried, keep.body(), idle, handed).await;
        let answer = answer.map_err(|broken| ForwardFailure {
            why: (!broken.by_client).then_some(FailureKind::Broken),
            handed: handed.get(),
            refusal: broken.why,
        })?;
        self.placer.cluster.peers.probes.heard(&record.name);
        match answer {
            PeerOutcome::Response { response, stages, lost } => {
                let stages = stages.unwrap_or_default();
                self.placer.peers.began(record);
                let response = response_buffer::hold(response).await.map_err(|why| ForwardFailure {
                    why: Some(FailureKind::Broken),
                    handed: true,
                    refusal: Refusal::BackendUnreachable(format!(
                        "the node that runs the application: {why}"
                    )),
                })?;
                Ok(BegunResponse { response, connect: connect.unwrap_or_default(), stages, lost })
            }
            PeerOutcome::Denied(PeerDenial::Fenced { tries }) => {
                Err(denied(FailureKind::Fenced, tries, retries, retries_here))
            }
            PeerOutcome::Denied(PeerDenial::NotPlacedHere { tries, .. }) => {
                Err(denied(FailureKind::NotThere, tries, retries, retries_here))
            }
            PeerOutcome::Denied(PeerDenial::OtherSite) => Err(ForwardFailure::finally(Refusal::Overloaded(
                "the records of the nodes differ for a moment",
            ))),
        }
    }

    /// Gets a stream to the node. A node that accepts connections and stays silent is waited for.
    /// The probe finds out beside this whether it is alive, and the request's deadline limits the
    /// wait.
    async fn seat(&self, record: &Arc<NodeRecord>) -> Result<(StreamSlot, Option<Duration>), NoPeer> {
        let (began, mut was_late) = (Instant::now(), false);
        loop {
            match self.placer.peers.seat(record).await {
                Err(NoPeer::Late) => was_late = true,
                Ok((seat, _)) if was_late => return Ok((seat, Some(began.elapsed()))),
                found => return found,
            }
        }
    }

    fn unconnected(&self, record: &NodeRecord, error: NoPeer) -> ForwardFailure {
        match error {
            NoPeer::Refused(_) => ForwardFailure::untouched(FailureKind::Refused),
            NoPeer::Network(_) => ForwardFailure::untouched(FailureKind::Silent),
            NoPeer::Broken(_) => ForwardFailure::untouched(FailureKind::Broken),
            error => {
                tracing::warn!(code = "NGY0469", node = %record.name, %error, "another node cannot be used");
                let why = format!("the node that runs the application: {error}");
                ForwardFailure { why: None, handed: false, refusal: Refusal::BackendUnreachable(why) }
            }
        }
    }
}

/// Returns the loss after a denial. `tries` of the `lent` attempts went to the application before
/// the node knew that its response would be void.
fn denied(why: FailureKind, tries: u32, lent: u32, retries_here: &RetryBudget) -> ForwardFailure {
    if tries == 0 {
        return ForwardFailure::untouched(why);
    }
    retries_here.give_back(lent.saturating_sub(tries - 1));
    ForwardFailure { handed: true, ..ForwardFailure::untouched(why) }
}

/// Returns the maximum time of the node by its own limits: in line, waking, responding.
fn patience(placer: &Placer, route: &SiteRoute) -> Duration {
    let options = placer.options.get();
    let (starting, answering) = match &route.site.backend {
        Backend::App(app) => (
            Duration::from_secs(nagaya_records::record::START_SECONDS_MAX.into()),
            app.timeout_seconds.map(|seconds| Duration::from_secs(seconds.into())),
        ),
        _ => (Duration::ZERO, None),
    };
    let answering = answering.unwrap_or(Duration::from_millis(options.limits.backend.answer_ms));
    2 * Duration::from_millis(options.wait_ms) + starting + answering + GRACE
}

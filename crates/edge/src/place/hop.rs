//! The one hop of a request to the node that runs its site.
//!
//! The question whether the node is there goes out after the request, not before it: a node that answers costs nothing more,
//! one that is silent is found out within a tenth of a second, and a slow one is waited for. Not here: what comes after a
//! node was lost (`place`).

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::{Backend, NodeRecord};
use nagaya_placement::liveness::Verdict;
use tokio::time::sleep_until;

use super::{Keep, Passed, beginning};
use crate::account::Account;
use crate::message::{Head, Response};
use crate::node::Node;
use crate::peers::carry::{self, Answer, Lost as LostLater};
use crate::peers::{Carried, Denied, NoPeer, Seat};
use crate::refusal::Refusal;
use crate::route::Route;

/// Added to what the other node may take by its own bounds: it is to say itself that it gave up.
const GRACE: Duration = Duration::from_secs(5);

/// How a node was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Silent,
    Refused,
    Fenced,
    /// It does not have the site.
    NotThere,
    /// The connection broke, which says little of the node.
    Broken,
}

impl Why {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Refused => "refused",
            Self::Fenced => "fenced",
            Self::NotThere => "not_there",
            Self::Broken => "broken",
        }
    }

    pub const fn as_record(self) -> nagaya_cmdb::Why {
        match self {
            Self::Silent => nagaya_cmdb::Why::Silent,
            Self::Fenced => nagaya_cmdb::Why::Fenced,
            Self::Refused | Self::NotThere | Self::Broken => nagaya_cmdb::Why::Refused,
        }
    }
}

/// A request that a node did not answer.
pub struct Lost {
    /// None: another node would not do better.
    pub why: Option<Why>,
    /// Some of it may have reached the node.
    pub handed: bool,
    pub refusal: Refusal,
}

impl Lost {
    fn untouched(why: Why) -> Self {
        Self { why: Some(why), handed: false, refusal: Refusal::MovedTooOften }
    }

    fn finally(refusal: Refusal) -> Self {
        Self { why: None, handed: true, refusal }
    }
}

/// An answer that has begun.
struct Begun {
    response: Response,
    connect: Duration,
    stages: Box<str>,
    lost: LostLater,
}

/// A request that may go to other nodes.
pub struct Hop<'a> {
    node: &'a Node,
    route: &'a Route,
    head: &'a Head,
    /// When it is given up, wherever it is.
    deadline: Instant,
}

impl<'a> Hop<'a> {
    pub fn new(node: &'a Node, route: &'a Route, head: &'a Head) -> Self {
        let deadline = Instant::now() + patience(node, route);
        Self { node, route, head, deadline }
    }

    /// Sends it there, and waits for the beginning of the answer.
    pub async fn send(
        &self,
        record: &Arc<NodeRecord>,
        epoch: u64,
        keep: &mut Keep,
        account: &mut Account,
    ) -> Result<Response, Lost> {
        let began = Instant::now();
        let peers = &self.node.shared.cluster.peers;
        let handed = Cell::new(false);
        let lent = account.retries().lend();
        let answered = tokio::select! {
            biased;
            answered = self.exchange(record, epoch, lent, keep, account, &handed) => answered,
            verdict = self.node.peers.against(record) => {
                let why = if verdict == Verdict::Refuses { Why::Refused } else { Why::Silent };
                self.node.peers.forget(&record.name);
                Err(Lost { why: Some(why), handed: handed.get(), refusal: Refusal::MovedTooOften })
            }
            () = sleep_until(self.deadline.into()) => Err(Lost::finally(Refusal::BackendTimeout)),
        };
        let took = began.elapsed();
        let Begun { response, connect, stages, lost } = answered.inspect_err(|lost| {
            peers.tallies.forwarded(&record.name, lost.why.map_or("failed", Why::as_str));
            if !lost.handed {
                account.retries().give_back(lent);
            }
        })?;
        peers.tallies.forwarded(&record.name, "answered");
        self.node.shared.metrics.forwarded(took);
        account.passed(Passed { node: record.name.clone(), took, connect, stages }, lost);
        Ok(response)
    }

    async fn exchange(
        &self,
        record: &Arc<NodeRecord>,
        epoch: u64,
        retries: u32,
        keep: &mut Keep,
        account: &Account,
        handed: &Cell<bool>,
    ) -> Result<Begun, Lost> {
        let (seat, connect) = self.seat(record).await.map_err(|error| self.unconnected(record, error))?;
        let site = self.route.site.name.clone();
        let carried = Carried { site, epoch, deadline: self.deadline, retries };
        let idle = Duration::from_millis(self.node.limits().idle_body_ms);
        let answer = carry::send(seat, self.head, &carried, keep.body(), idle, handed).await;
        let answer = answer.map_err(|broken| Lost {
            why: (!broken.by_client).then_some(Why::Broken),
            handed: handed.get(),
            refusal: broken.why,
        })?;
        self.node.shared.cluster.peers.probes.heard(&record.name);
        match answer {
            Answer::Response { response, stages, lost } => {
                let stages = stages.unwrap_or_default();
                self.node.peers.began(record);
                let response = beginning::hold(response).await.map_err(|why| Lost {
                    why: Some(Why::Broken),
                    handed: true,
                    refusal: Refusal::BackendUnreachable(format!(
                        "the node that runs the application: {why}"
                    )),
                })?;
                Ok(Begun { response, connect: connect.unwrap_or_default(), stages, lost })
            }
            Answer::Denied(Denied::Fenced { tries }) => Err(denied(Why::Fenced, tries, retries, account)),
            Answer::Denied(Denied::NotPlacedHere { tries, .. }) => {
                Err(denied(Why::NotThere, tries, retries, account))
            }
            Answer::Denied(Denied::OtherSite) => {
                Err(Lost::finally(Refusal::Overloaded("the records of the nodes differ for a moment")))
            }
        }
    }

    /// A node that takes connections and says nothing, as one that stands still, is waited for: whether it is there is for the probe
    /// to find out, beside this, and how long is for the request's deadline.
    async fn seat(&self, record: &Arc<NodeRecord>) -> Result<(Seat, Option<Duration>), NoPeer> {
        let (began, mut was_late) = (Instant::now(), false);
        loop {
            match self.node.peers.seat(record).await {
                Err(NoPeer::Late) => was_late = true,
                Ok((seat, _)) if was_late => return Ok((seat, Some(began.elapsed()))),
                found => return found,
            }
        }
    }

    fn unconnected(&self, record: &NodeRecord, error: NoPeer) -> Lost {
        match error {
            NoPeer::Refused(_) => Lost::untouched(Why::Refused),
            NoPeer::Network(_) => Lost::untouched(Why::Silent),
            NoPeer::Broken(_) => Lost::untouched(Why::Broken),
            error => {
                tracing::warn!(code = "NGY0469", node = %record.name, %error, "another node cannot be used");
                let why = format!("the node that runs the application: {error}");
                Lost { why: None, handed: false, refusal: Refusal::BackendUnreachable(why) }
            }
        }
    }
}

/// The node has given the request to the application so often, of those that it might have, before it knew that the answer would be
/// nobody's.
fn denied(why: Why, tries: u32, lent: u32, account: &Account) -> Lost {
    if tries == 0 {
        return Lost::untouched(why);
    }
    account.retries().give_back(lent.saturating_sub(tries - 1));
    Lost { handed: true, ..Lost::untouched(why) }
}

/// Longest that the node may take by its own bounds: in line, waking, answering.
fn patience(node: &Node, route: &Route) -> Duration {
    let options = node.shared.options();
    let (starting, answering) = match &route.site.backend {
        Backend::App(app) => (
            Duration::from_secs(nagaya_cmdb::record::START_SECONDS_MAX.into()),
            app.timeout_seconds.map(|seconds| Duration::from_secs(seconds.into())),
        ),
        _ => (Duration::ZERO, None),
    };
    let answering = answering.unwrap_or(Duration::from_millis(options.limits.backend.answer_ms));
    2 * Duration::from_millis(options.wait_ms) + starting + answering + GRACE
}

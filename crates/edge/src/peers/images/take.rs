//! Images that come here: one at a time, in the order in which the supervisor asks for them.
//!
//! Not here: what the other node does (`give`), which image is to come (the supervisor).

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::{Request, StatusCode};
use nagaya_cmdb::feed::{FETCH_MAX, Fetched, Up};
use nagaya_cmdb::{NodeName, NodeRecord, SiteName};
use nagaya_keeper::client::{ClientError, ImageIntake};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Asked, OFFER_LEN_MAX, Offered, STALL_MAX, TARGET};
use crate::metrics::Direction;
use crate::node::Node;
use crate::peers::pool::{NoPeer, Seat};

/// Orders that wait. The supervisor gives one at a time; more are there only after it has lost patience.
const ORDERS_MAX: usize = 16;

/// Longest until another node says what it has, or begins to send it: its keeper may read the image first.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Bytes of another node's reason that are passed on.
const REASON_LEN_MAX: usize = 1024;

/// An image that is to come.
#[derive(Debug)]
pub struct ImageOrder {
    /// Of the question it answers.
    pub tag: u64,
    pub site: SiteName,
    pub from: NodeName,
    /// What lets both nodes' keepers act.
    pub order: String,
}

/// Where orders are put by the thread that reads the feed, and taken by the one that carries them out.
#[derive(Debug)]
pub struct Orders {
    put: mpsc::Sender<ImageOrder>,
    taken: Mutex<Option<mpsc::Receiver<ImageOrder>>>,
}

impl Default for Orders {
    fn default() -> Self {
        let (put, taken) = mpsc::channel(ORDERS_MAX);
        Self { put, taken: Mutex::new(Some(taken)) }
    }
}

impl Orders {
    /// False: too many wait already.
    pub fn put(&self, order: ImageOrder) -> bool {
        self.put.try_send(order).is_ok()
    }
}

/// Why no image came.
#[derive(Debug, thiserror::Error)]
pub(in crate::peers) enum NotTaken {
    #[error("node '{0}' is no other member")]
    NoNode(NodeName),
    #[error("{node}: {error}")]
    NoPeer { node: NodeName, error: NoPeer },
    #[error("{node}: {error}")]
    Broken { node: NodeName, error: h2::Error },
    #[error("{node} has answered {status}: {reason}")]
    Refused { node: NodeName, status: StatusCode, reason: String },
    #[error("{node} says of its image what cannot be read")]
    Unreadable { node: NodeName },
    #[error("{node} has been silent for too long")]
    Late { node: NodeName },
    #[error("{0}")]
    Keeper(#[from] ClientError),
    #[error("the pipe to the keeper: {0}")]
    Pipe(#[from] io::Error),
    #[error("it did not come within {} s", FETCH_MAX.as_secs())]
    TooLong,
}

/// Carries orders out until the thread ends. One thread of the process does.
pub async fn follow(node: Rc<Node>) {
    let Some(mut orders) = node.shared.cluster.peers.images.taken.lock().take() else { return };
    while let Some(order) = orders.recv().await {
        let taken = timeout(FETCH_MAX, take(&node, &order)).await;
        let fetched = match taken.unwrap_or(Err(NotTaken::TooLong)) {
            Ok(fetched) => fetched,
            Err(error) => {
                node.shared.metrics.image_taken(false);
                tracing::debug!(site = %order.site, "its image does not come: {error}");
                Fetched::Failed { reason: error.to_string() }
            }
        };
        let text = serde_json::to_string(&fetched).expect("it has text keys, and writing to memory works");
        node.shared.cluster.desk.say(Up::Answer { tag: order.tag, text });
    }
}

/// Brings the site's image here, unless there is one.
pub(in crate::peers) async fn take(
    node: &Node,
    ImageOrder { site, from, order, .. }: &ImageOrder,
) -> Result<Fetched, NotTaken> {
    // A keeper that has one, of whichever node, wakes the site from it.
    if let Some(have) = node.keeper().offer_image(site, order).await? {
        return Ok(Fetched::Here { digest: have.digest.into(), bytes: 0 });
    }
    let cluster = &node.shared.cluster;
    let record = node.shared.with_table(|table| cluster.other(table, from));
    let record = record.ok_or_else(|| NotTaken::NoNode(from.clone()))?;
    let peer = Peer { node, record, order };
    let Some(offered) = peer.offered(site).await? else { return Ok(Fetched::None) };
    let intake = node.keeper().fetch_image(site, order, &offered.offer).await?;
    let offset = intake.offset;
    let copied = peer.copy(site, &offered, intake).await;
    // The pipe is closed: the keeper keeps what came, and says what is wrong with it if anything is.
    let fetched = node.keeper().image_fetched(site, order).await;
    match (copied, fetched) {
        (_, Ok(())) => {}
        // It closed the pipe, and says why.
        (Ok(()) | Err(NotTaken::Pipe(_)), Err(error)) => return Err(error.into()),
        (Err(error), Err(_)) => return Err(error),
    }
    node.shared.metrics.image_taken(true);
    Ok(Fetched::Here { digest: offered.digest.into(), bytes: offered.bytes.saturating_sub(offset) })
}

/// The node that has it.
struct Peer<'a> {
    node: &'a Node,
    record: Arc<NodeRecord>,
    order: &'a str,
}

impl Peer<'_> {
    /// None: it has no image either.
    async fn offered(&self, site: &SiteName) -> Result<Option<Offered>, NotTaken> {
        let (_seat, status, mut body) = self.ask(self.asked(site, None)).await?;
        if status == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let mut text = Vec::new();
        while let Some(piece) = self.next(&mut body).await? {
            if text.len() + piece.len() > OFFER_LEN_MAX {
                return Err(NotTaken::Unreadable { node: self.record.name.clone() });
            }
            text.extend_from_slice(&piece);
        }
        let offered = serde_json::from_slice(&text);
        offered.map(Some).map_err(|_| NotTaken::Unreadable { node: self.record.name.clone() })
    }

    /// Writes to the pipe what is missing, and closes it.
    async fn copy(
        &self,
        site: &SiteName,
        offered: &Offered,
        ImageIntake { offset, bytes: mut left, pipe }: ImageIntake,
    ) -> Result<(), NotTaken> {
        let mut pipe = pipe::Sender::from_owned_fd(pipe)?;
        if left == 0 {
            return Ok(());
        }
        let part = Some((offered.digest.to_string(), offset));
        let (_seat, _, mut body) = self.ask(self.asked(site, part)).await?;
        while left > 0 {
            let Some(mut piece) = self.next(&mut body).await? else { break };
            piece.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            let written = timeout(STALL_MAX, pipe.write_all(&piece)).await;
            written.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
            left -= piece.len() as u64;
            self.node.shared.metrics.image_bytes(Direction::In, piece.len());
        }
        Ok(())
    }

    fn asked(&self, site: &SiteName, part: Option<(String, u64)>) -> Asked {
        Asked { site: site.clone(), order: self.order.to_owned(), part }
    }

    async fn ask(&self, asked: Asked) -> Result<(Seat, StatusCode, RecvStream), NotTaken> {
        let name = || self.record.name.clone();
        let seat = self.node.peers.seat(&self.record).await;
        let (seat, _) = seat.map_err(|error| NotTaken::NoPeer { node: name(), error })?;
        let broken = |error: h2::Error| {
            if !error.is_reset() {
                seat.spoil();
            }
            NotTaken::Broken { node: name(), error }
        };
        let mut request = Request::new(());
        *request.uri_mut() = http::Uri::from_static(TARGET);
        asked.write(request.headers_mut());
        let mut sender = seat.sender().ready().await.map_err(broken)?;
        let (answer, _) = sender.send_request(request, true).map_err(broken)?;
        let answer = timeout(ANSWER_MAX, answer).await.map_err(|_| NotTaken::Late { node: name() })?;
        let (head, mut body) = answer.map_err(broken)?.into_parts();
        if head.status.is_success() {
            return Ok((seat, head.status, body));
        }
        let reason = self.next(&mut body).await.ok().flatten().unwrap_or_default();
        let reason = String::from_utf8_lossy(&reason[..reason.len().min(REASON_LEN_MAX)]).into_owned();
        Err(NotTaken::Refused { node: name(), status: head.status, reason })
    }

    async fn next(&self, body: &mut RecvStream) -> Result<Option<Bytes>, NotTaken> {
        let name = || self.record.name.clone();
        let piece = timeout(STALL_MAX, body.data()).await.map_err(|_| NotTaken::Late { node: name() })?;
        let Some(piece) = piece else { return Ok(None) };
        let piece = piece.map_err(|error| NotTaken::Broken { node: name(), error })?;
        // It was taken: so much more may come. A stream that is over has no window.
        let _ = body.flow_control().release_capacity(piece.len());
        Ok(Some(piece))
    }
}

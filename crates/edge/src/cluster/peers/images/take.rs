//! Fetches images, one at a time, in the order of the supervisor's requests.
//!
//! Not here: the other node's part (`give`), the choice of the image (the supervisor).

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::{Request, StatusCode};
use nagaya_keeper_api::client::{ImageIntake, KeeperCallError, KeeperClient};
use nagaya_records::feed::{FETCH_MAX, FetchResult, ToSupervisor};
use nagaya_records::{NodeName, NodeRecord, SiteName};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::time::timeout;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::peers::images::orders::ImageOrder;
use crate::cluster::peers::images::{ImageRequest, OFFER_LEN_MAX, OfferedImage, STALL_MAX, TARGET};
use crate::cluster::peers::pool::{NoPeer, PeerPool, StreamSlot};
use crate::metrics::{EdgeMetrics, ImageDirection};

/// Maximum time until another node describes its image, or begins to send it. Its keeper may read
/// the image first.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Maximum length of another node's reason that is passed on, bytes.
const REASON_LEN_MAX: usize = 1024;

/// Reason why no image was fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTaken {
    #[error("node '{0}' is no other member")]
    NoNode(NodeName),
    #[error("{node}: {error}")]
    NoPeer { node: NodeName, error: NoPeer },
    #[error("{node}: {error}")]
    Broken { node: NodeName, error: h2::Error },
    #[error("{node} has answered {status}: {reason}")]
    Refused { node: NodeName, status: StatusCode, reason: String },
    #[error("{node} describes its image in a way that cannot be read")]
    Unreadable { node: NodeName },
    #[error("{node} has been silent for too long")]
    Late { node: NodeName },
    #[error("{0}")]
    Keeper(#[from] KeeperCallError),
    #[error("the pipe to the keeper: {0}")]
    Pipe(#[from] io::Error),
    #[error("it did not come within {} s", FETCH_MAX.as_secs())]
    TooLong,
}

/// Holds one thread's means to fetch images.
pub struct ImageFetcher {
    pub keeper: Rc<KeeperClient>,
    /// Connections to other nodes.
    pub pool: Rc<PeerPool>,
    pub cluster: Arc<EdgeCluster>,
    pub metrics: Arc<EdgeMetrics>,
}

/// Carries orders out until the thread ends. One thread of the process does this.
pub async fn follow(fetcher: ImageFetcher) {
    let Some(mut orders) = fetcher.cluster.peers.images.take_orders() else { return };
    while let Some(order) = orders.recv().await {
        let taken = timeout(FETCH_MAX, take(&fetcher, &order)).await;
        let fetched = match taken.unwrap_or(Err(NotTaken::TooLong)) {
            Ok(fetched) => fetched,
            Err(error) => {
                fetcher.metrics.image_taken(false);
                tracing::debug!(site = %order.site, "its image does not come: {error}");
                FetchResult::Failed { reason: error.to_string() }
            }
        };
        let text = serde_json::to_string(&fetched).expect("it has text keys, and writing to memory works");
        fetcher.cluster.placement_client.say(ToSupervisor::Answer { tag: order.tag, text });
    }
}

/// Fetches the site's image, unless there is one.
pub(crate) async fn take(
    fetcher: &ImageFetcher,
    ImageOrder { site, from, order, .. }: &ImageOrder,
) -> Result<FetchResult, NotTaken> {
    // A keeper that has an image, of any node, wakes the site from it.
    if let Some(have) = fetcher.keeper.offer_image(site, order).await? {
        return Ok(FetchResult::Here { digest: have.digest.into(), bytes: 0 });
    }
    let cluster = &fetcher.cluster;
    let record = cluster.table.read(|table| cluster.other(table, from));
    let record = record.ok_or_else(|| NotTaken::NoNode(from.clone()))?;
    let peer = ImageSource { fetcher, record, order };
    let Some(offered) = peer.offered(site).await? else { return Ok(FetchResult::None) };
    let intake = fetcher.keeper.fetch_image(site, order, &offered.offer).await?;
    let offset = intake.offset;
    let copied = peer.copy(site, &offered, intake).await;
    // The pipe is closed. The keeper keeps the received bytes, and reports an error if there is
    // one.
    let fetched = fetcher.keeper.image_fetched(site, order).await;
    match (copied, fetched) {
        (_, Ok(())) => {}
        // The keeper closed the pipe, and reports the reason.
        (Ok(()) | Err(NotTaken::Pipe(_)), Err(error)) => return Err(error.into()),
        (Err(error), Err(_)) => return Err(error),
    }
    fetcher.metrics.image_taken(true);
    Ok(FetchResult::Here { digest: offered.digest.into(), bytes: offered.bytes.saturating_sub(offset) })
}

/// The node that has the image.
struct ImageSource<'a> {
    fetcher: &'a ImageFetcher,
    record: Arc<NodeRecord>,
    order: &'a str,
}

impl ImageSource<'_> {
    /// Returns `None` if it has no image either.
    async fn offered(&self, site: &SiteName) -> Result<Option<OfferedImage>, NotTaken> {
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

    /// Writes the missing bytes to the pipe, and closes it.
    async fn copy(
        &self,
        site: &SiteName,
        offered: &OfferedImage,
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
            self.fetcher.metrics.image_bytes(ImageDirection::In, piece.len());
        }
        Ok(())
    }

    fn asked(&self, site: &SiteName, part: Option<(String, u64)>) -> ImageRequest {
        ImageRequest { site: site.clone(), order: self.order.to_owned(), part }
    }

    async fn ask(&self, asked: ImageRequest) -> Result<(StreamSlot, StatusCode, RecvStream), NotTaken> {
        let name = || self.record.name.clone();
        let seat = self.fetcher.pool.seat(&self.record).await;
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
        // The piece was written, so the window grows by it. A stream that is over has no window.
        let _ = body.flow_control().release_capacity(piece.len());
        Ok(Some(piece))
    }
}

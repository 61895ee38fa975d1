//! Takes in a request's body before anything scarce is held for it. So no permit, instance,
//! worker, process or connection waits for a client that uploads slowly.
//!
//! A small body stays in memory, a larger one goes to the spool. Its backend then gets it at
//! once, with its length. Sites of kind `http` and `app` may set `request_buffering = off`: their
//! servers get bodies as they arrive. Not here: the limits of size and rate (the creator of the
//! `RequestBody` enforces them), the files (`spool`).

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use nagaya_records::record::{App, AppProtocol, BodyBuffering, Http};
use nagaya_records::{Backend, TenantName};

use crate::http::body_adapters::PolledBody;
use crate::http::message::{BodyError, BodySource, Request, RequestBody, RequestHead};
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::spool::{MemoryQuota, Spool, SpoolError, SpoolFile};

/// A body up to this length stays in memory, bytes.
pub const MEMORY_MAX: u64 = 64 << 10;

/// A small piece is copied, because a slice of a read buffer keeps all of that buffer.
const COPIED_MAX: usize = 8 << 10;

/// Memory of one piece in addition to its bytes.
const PIECE_BYTES: u64 = 64;

/// Pieces are written together when they reach this number of bytes.
const WRITE_LEN: u64 = 128 << 10;

/// Takes in the whole body of a request whose backend needs it whole. The body then has a length.
///
/// # Errors
/// Fails if the client sends too much or too slowly, or leaves. Fails if there is no space for
/// the body.
pub async fn take_in(spool: &Arc<Spool>, route: &SiteRoute, request: &mut Request) -> Result<(), Refusal> {
    let body = std::mem::replace(&mut request.body, RequestBody::empty());
    let tenant = &route.tenant.name;
    let kept = Box::pin(keep(spool, tenant, body)).await;
    let (body, trailers) = kept.map_err(|error| error.refuse(tenant))?;
    request.body = match trailers {
        Some(trailers) if passes_trailers(&route.site.backend) => with_trailers(body, trailers),
        _ => body,
    };
    Ok(())
}

/// Returns whether the body is taken in before the backend is asked. A file takes no body, and a
/// server may want it as it arrives.
pub fn applies(head: &RequestHead, backend: &Backend) -> bool {
    match backend {
        Backend::Static(_) => false,
        // FastCGI needs a length, and no program changes the protocol.
        Backend::Cgi(_) | Backend::Php(_) | Backend::App(App { protocol: AppProtocol::FastCgi, .. }) => true,
        Backend::Http(Http { request_buffering, .. }) | Backend::App(App { request_buffering, .. }) => {
            *request_buffering == BodyBuffering::On && head.upgrade.is_none()
        }
    }
}

/// Returns whether the backend gets trailer fields. Such a body has no length, because a length
/// leaves no place for trailers.
fn passes_trailers(backend: &Backend) -> bool {
    match backend {
        Backend::Http(http) => !http.request_trailers.is_empty(),
        Backend::App(app) => !app.request_trailers.is_empty(),
        _ => false,
    }
}

/// Reason why a body was not taken in.
#[derive(Debug, thiserror::Error)]
enum IntakeError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

impl IntakeError {
    fn refuse(self, tenant: &TenantName) -> Refusal {
        let error = match self {
            Self::Body(error) => return error.into(),
            Self::Spool(error) => error,
        };
        match error {
            SpoolError::TenantFull => Refusal::SpoolFull("its tenant has as much in the spool as it may"),
            SpoolError::NodeFull => Refusal::SpoolFull("the node's spool is full"),
            SpoolError::Absent => Refusal::SpoolFull("the node has no spool directory"),
            SpoolError::Busy(_) => Refusal::Overloaded("the spool does not keep up"),
            SpoolError::File(error) => {
                tracing::error!(code = "NGY0472", %tenant, "an upload cannot be kept: {error}");
                Refusal::SpoolFull("the spool directory cannot be written to")
            }
        }
    }
}

/// Keeps all of `body`, and returns its trailer fields, if there are any.
async fn keep(
    spool: &Arc<Spool>,
    tenant: &TenantName,
    mut body: RequestBody,
) -> Result<(RequestBody, Option<HeaderMap>), IntakeError> {
    let mut held = HeldPieces { pieces: Vec::new(), bytes: 0, cost: 0, quota: spool.memory() };
    let (mut file, mut trailers): (Option<SpoolFile>, _) = (None, None);
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let data = match frame?.into_data() {
            Ok(data) if data.is_empty() => continue,
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok();
                continue;
            }
        };
        let fits = held.push(data);
        let bound = if file.is_some() { WRITE_LEN } else { MEMORY_MAX };
        if !fits || held.cost > bound {
            let file = match &mut file {
                Some(file) => file,
                None => file.insert(spool.open(tenant).await?),
            };
            file.append(held.take()).await?;
        }
    }
    let kept = match file {
        None if held.bytes == 0 => RequestBody::empty(),
        None => RequestBody::kept(InMemory::new(held)),
        Some(mut file) => {
            if held.bytes > 0 {
                file.append(held.take()).await?;
            }
            RequestBody::kept(InFile { file, offset: 0, reading: None })
        }
    };
    Ok((kept, trailers))
}

/// Returns the body with trailer fields behind it, and without a length.
fn with_trailers(mut body: RequestBody, trailers: HeaderMap) -> RequestBody {
    let mut trailers = Some(trailers);
    RequestBody::new(PolledBody::new(move |cx| {
        let frame = ready!(Pin::new(&mut body).poll_frame(cx));
        Poll::Ready(frame.or_else(|| trailers.take().map(|trailers| Ok(Frame::trailers(trailers)))))
    }))
}

/// Pieces of a body in memory.
struct HeldPieces {
    pieces: Vec<Bytes>,
    bytes: u64,
    /// Includes the memory of each piece in addition to its bytes.
    cost: u64,
    quota: MemoryQuota,
}

impl HeldPieces {
    /// Keeps the piece. Returns false if no further one may be kept.
    fn push(&mut self, data: Bytes) -> bool {
        let data = if data.len() <= COPIED_MAX { Bytes::copy_from_slice(&data) } else { data };
        let cost = data.len() as u64 + PIECE_BYTES;
        self.bytes += data.len() as u64;
        self.cost += cost;
        self.pieces.push(data);
        self.quota.try_grow(cost)
    }

    fn take(&mut self) -> Vec<Bytes> {
        self.quota.shrink(self.cost);
        (self.bytes, self.cost) = (0, 0);
        std::mem::take(&mut self.pieces)
    }
}

/// A body that is all in memory.
struct InMemory {
    pieces: Vec<Bytes>,
    /// Index of the next piece, and the bytes from there on.
    next: usize,
    left: u64,
    len: u64,
    _quota: MemoryQuota,
}

impl InMemory {
    fn new(held: HeldPieces) -> Self {
        Self { pieces: held.pieces, next: 0, left: held.bytes, len: held.bytes, _quota: held.quota }
    }
}

impl Body for InMemory {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(piece) = self.pieces.get(self.next).cloned() else { return Poll::Ready(None) };
        self.next += 1;
        self.left -= piece.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

impl BodySource for InMemory {
    fn is_kept(&self) -> bool {
        true
    }

    fn rewind(mut self: Pin<&mut Self>) {
        self.next = 0;
        self.left = self.len;
    }
}

type SpoolRead = Pin<Box<dyn Future<Output = io::Result<Bytes>>>>;

/// A body that is on disk.
struct InFile {
    file: SpoolFile,
    offset: u64,
    reading: Option<SpoolRead>,
}

impl Body for InFile {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.offset == this.file.len() {
            return Poll::Ready(None);
        }
        let (file, offset) = (&this.file, this.offset);
        let reading = this.reading.get_or_insert_with(|| Box::pin(file.read(offset)));
        let read = ready!(reading.as_mut().poll(cx));
        this.reading = None;
        let bytes = read?;
        this.offset += bytes.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.offset == self.file.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.file.len() - self.offset)
    }
}

impl BodySource for InFile {
    fn is_kept(&self) -> bool {
        true
    }

    fn rewind(mut self: Pin<&mut Self>) {
        self.offset = 0;
        self.reading = None;
    }
}

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::http::body_adapters::testing::of_frames;
    use crate::spool::testing::spool;

    fn pieces(count: usize, len: usize) -> (RequestBody, Vec<u8>) {
        let pieces: Vec<Bytes> = (0..count).map(|n| Bytes::from(vec![n as u8; len])).collect();
        let all = pieces.iter().flatten().copied().collect();
        let frames = pieces.into_iter().map(|piece| Ok(Frame::data(piece)));
        (RequestBody::new(of_frames(None, frames)), all)
    }

    fn tenant() -> TenantName {
        TenantName::new("alice").unwrap()
    }

    #[tokio::test]
    async fn a_body_gets_its_length_and_keeps_its_bytes() {
        let (spool, _directory) = spool(64 << 20, 64 << 20);
        for (count, len) in [(0, 0), (3, 10), (1, 65_000), (9, 100_000), (70_000, 1), (3, 1 << 20)] {
            let (body, all) = pieces(count, len);
            let (body, _) = keep(&spool, &tenant(), body).await.unwrap();
            assert_eq!(body.len(), Some(all.len() as u64));
            assert!(body.collect().await.unwrap().to_bytes() == all, "{count} pieces of {len}");
            assert_eq!(spool.usage(), (0, 0), "its room is given back with it");
        }
    }

    #[tokio::test]
    async fn a_kept_body_can_begin_anew_wherever_it_is() {
        let (spool, _directory) = spool(64 << 20, 64 << 20);
        for (count, len) in [(0, 0), (3, 10), (9, 100_000)] {
            let (body, all) = pieces(count, len);
            let (mut body, _) = keep(&spool, &tenant(), body).await.unwrap();
            // After none, some and all of it.
            for frames in [0, 1, usize::MAX] {
                let mut taken = 0;
                while taken < frames && body.frame().await.transpose().unwrap().is_some() {
                    taken += 1;
                }
                assert!(body.is_kept());
                body.rewind();
                assert_eq!(body.len(), Some(all.len() as u64));
            }
            assert!(body.collect().await.unwrap().to_bytes() == all, "{count} pieces of {len}");
        }
        assert!(!pieces(1, 10).0.is_kept());
    }

    #[tokio::test]
    async fn only_large_bodies_go_to_disk() {
        let (spool, _directory) = spool(64 << 20, 64 << 20);
        let small = keep(&spool, &tenant(), pieces(1, 60_000).0).await.unwrap();
        assert_eq!(spool.usage().1, 0);
        let large = keep(&spool, &tenant(), pieces(2, 60_000).0).await.unwrap();
        assert!(spool.usage().1 > 0);
        drop((small, large));
    }

    #[tokio::test]
    async fn a_body_beyond_the_quota_is_refused_with_its_reason() {
        let (spool, _directory) = spool(8 << 20, 1 << 20);
        let refused = keep(&spool, &tenant(), pieces(3, 1 << 20).0).await.err().unwrap().refuse(&tenant());
        assert_eq!(refused, Refusal::SpoolFull("its tenant has as much in the spool as it may"));
        assert_eq!(spool.usage(), (0, 0));
        assert!(keep(&spool, &tenant(), pieces(1, 5).0).await.is_ok(), "one in memory needs no file");
    }
}

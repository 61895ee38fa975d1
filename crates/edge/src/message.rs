//! A request and a response as the life of a request sees them, whatever HTTP version carried them.
//!
//! Not here: their bytes on the wire (`http1`, `http2`), what happens to them (`request`).

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use nagaya_base::RequestId;

use crate::clients::ClientNetwork;
use crate::pace::Flow;
use crate::peers::Carried;

/// One request: its head, already checked, and its body, still arriving.
pub struct Request {
    /// Boxed, because a request is handed from step to step and its head is large.
    pub head: Box<Head>,
    pub body: RequestBody,
}

/// What the head of a request said. Only heads that are unambiguous get this far.
#[derive(Debug, Clone)]
pub struct Head {
    pub id: RequestId,
    pub method: Method,
    /// The path as sent, percent-encoded, always beginning with `/`; or `*` for `OPTIONS *`.
    pub path: Box<str>,
    /// What followed `?`, without it.
    pub query: Option<Box<str>>,
    /// Host of the target or the Host header, lower case, without port. Empty if an HTTP/1.0 client sent none.
    pub host: Box<str>,
    /// The port as it stood behind the host, if it did.
    pub port: Option<u16>,
    pub version: Version,
    /// As received, without Host and without the hop-by-hop fields of RFC 9110 section 7.6.1.
    pub headers: HeaderMap,
    /// `Upgrade` as asked for (HTTP/1.1 only); `exchange` decides whether it is forwarded.
    pub upgrade: Option<HeaderValue>,
    pub conn: Rc<ConnInfo>,
}

/// What all requests of one connection share.
#[derive(Debug)]
pub struct ConnInfo {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// Present on TLS connections.
    pub tls: Option<TlsInfo>,
    /// The client's connection is another node's, which has passed on this one request of it. Of the client are then
    /// the other fields too.
    pub carried: Option<Box<Carried>>,
    /// The network of a client that limits hold for. `None` for trusted proxies too, whose clients are others.
    pub network: Option<Arc<ClientNetwork>>,
}

#[derive(Debug)]
pub struct TlsInfo {
    /// Server name of the handshake, lower case.
    pub server_name: Option<Box<str>>,
    pub protocol: &'static str,
    pub cipher: &'static str,
    /// DNS names of the certificate that was presented, lower case, `*.` in front of wildcards.
    pub certificate_names: Rc<[Box<str>]>,
}

impl ConnInfo {
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
}

/// The body of a request: data frames, then perhaps trailers. Bounded by whoever made it.
pub struct RequestBody(Option<Pin<Box<dyn BodySource>>>);

/// Where a body comes from.
pub trait BodySource: Body<Data = Bytes, Error = BodyError> {
    /// All of it has arrived and stays until the request is done.
    fn is_kept(&self) -> bool;

    /// Begins anew with the first frame, if it is kept.
    fn rewind(self: Pin<&mut Self>);
}

/// A body that can be had once.
struct Arriving<B>(B);

impl RequestBody {
    pub fn empty() -> Self {
        Self(None)
    }

    /// Of a client, as it comes.
    pub fn new(body: impl Body<Data = Bytes, Error = BodyError> + Unpin + 'static) -> Self {
        Self(Some(Box::pin(Arriving(body))))
    }

    /// Of a source that keeps it until its request is done.
    pub fn kept(body: impl BodySource + 'static) -> Self {
        Self(Some(Box::pin(body)))
    }

    /// All of it has arrived, and can be had as often as it is needed.
    pub fn is_kept(&self) -> bool {
        self.0.as_ref().is_none_or(|body| body.is_kept())
    }

    /// Begins anew, so that the request can be given to another backend. Of a body that is not kept, what was taken is gone.
    pub fn rewind(&mut self) {
        if let Some(body) = &mut self.0 {
            body.as_mut().rewind();
        }
    }

    /// Length in bytes if it was announced (`Content-Length`); `None` for a chunked or HTTP/2 stream of unknown length.
    pub fn len(&self) -> Option<u64> {
        self.0.as_ref().map_or(Some(0), |body| body.size_hint().exact())
    }

    /// True if no byte of body will come.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|body| body.is_end_stream())
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> BodySource for Arriving<B> {
    fn is_kept(&self) -> bool {
        false
    }

    fn rewind(self: Pin<&mut Self>) {}
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for Arriving<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.0 {
            Some(body) => body.as_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), |body| body.size_hint())
    }
}

impl fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestBody({:?} bytes)", self.len())
    }
}

/// Why a body ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the client left before its request was complete")]
    ClientGone,
    #[error("the request body is not well-formed: {0}")]
    Malformed(&'static str),
    #[error("the request body is larger than the limit of {0} bytes")]
    TooLarge(u64),
    #[error("the request body stopped arriving")]
    Stalled,
    #[error("the backend broke off its response: {0}")]
    Backend(String),
    #[error("the node that runs the application was lost: {0}")]
    NodeLost(String),
    #[error("reading a file failed: {0}")]
    File(#[from] std::io::Error),
}

/// One response. What its receipt and its body hold (permit, process, worker) is given back when the body has been
/// sent, or dropped.
pub struct Response {
    pub status: StatusCode,
    /// Without `Date`, `Server`, `Connection`, `Content-Length` and `Transfer-Encoding`: the wire adds those.
    pub headers: Headers,
    pub body: ResponseBody,
    /// Is told how much was sent; writes the request's account when it is dropped.
    pub receipt: Option<Box<dyn Receipt>>,
    /// Holds the body to its limits while it is sent.
    pub flow: Option<Box<Flow>>,
}

/// Header fields of a response: its own, or those that every answer from a kept file has. Shared ones are copied
/// only if somebody changes them.
#[derive(Debug, Clone)]
pub enum Headers {
    Own(HeaderMap),
    Shared(Rc<HeaderMap>),
}

impl Headers {
    pub fn into_map(self) -> HeaderMap {
        match self {
            Self::Own(map) => map,
            Self::Shared(map) => Rc::unwrap_or_clone(map),
        }
    }
}

impl From<HeaderMap> for Headers {
    fn from(map: HeaderMap) -> Self {
        Self::Own(map)
    }
}

impl Deref for Headers {
    type Target = HeaderMap;

    fn deref(&self) -> &HeaderMap {
        match self {
            Self::Own(map) => map,
            Self::Shared(map) => map,
        }
    }
}

impl DerefMut for Headers {
    fn deref_mut(&mut self) -> &mut HeaderMap {
        if let Self::Shared(map) = self {
            *self = Self::Own(HeaderMap::clone(map));
        }
        match self {
            Self::Own(map) => map,
            Self::Shared(_) => unreachable!("made its own above"),
        }
    }
}

/// The account of one request. Dropped without a word from the wire, it counts as broken off.
pub trait Receipt {
    /// `bytes` of body went out; `complete` says whether that is all of it.
    fn sent(&mut self, bytes: u64, complete: bool);
    /// The body ended before its end. Comes before `sent`.
    fn broke(&mut self, _why: &BodyError) {}
}

pub enum ResponseBody {
    Empty,
    Bytes(Bytes),
    /// A range of an open file; plain HTTP/1 hands it to the kernel.
    File {
        file: Arc<OwnedFd>,
        offset: u64,
        len: u64,
    },
    /// Parts in order: multi-range answers.
    Parts(Vec<Part>),
    /// A body produced while it is sent. Its `size_hint().exact()` becomes `Content-Length`.
    Stream(Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>),
    /// `101`: from here on the two connections are one. Only `http1` can do it.
    Tunnel(Box<dyn Duplex>),
}

pub enum Part {
    Bytes(Bytes),
    File { file: Arc<OwnedFd>, offset: u64, len: u64 },
}

impl Part {
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes off the first `max` bytes, or all there is.
    pub fn split_to(&mut self, max: u64) -> Self {
        let taken = max.min(self.len());
        match self {
            Self::Bytes(bytes) => {
                Self::Bytes(bytes.split_to(usize::try_from(taken).expect("not longer than the bytes")))
            }
            Self::File { file, offset, len } => {
                let slice = Self::File { file: Arc::clone(file), offset: *offset, len: taken };
                *offset += taken;
                *len -= taken;
                slice
            }
        }
    }
}

/// The backend's side of an upgraded connection.
pub trait Duplex: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> Duplex for T {}

impl ResponseBody {
    pub fn stream(body: impl Body<Data = Bytes, Error = BodyError> + 'static) -> Self {
        Self::Stream(Box::pin(body))
    }

    /// Length in bytes, where it is known before sending.
    pub fn len(&self) -> Option<u64> {
        match self {
            Self::Empty => Some(0),
            Self::Bytes(bytes) => Some(bytes.len() as u64),
            Self::File { len, .. } => Some(*len),
            Self::Parts(parts) => Some(parts.iter().map(Part::len).sum()),
            Self::Stream(body) => body.size_hint().exact(),
            Self::Tunnel(_) => None,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }
}

impl Response {
    pub fn new(status: StatusCode) -> Self {
        Self {
            status,
            headers: Headers::Own(HeaderMap::new()),
            body: ResponseBody::Empty,
            receipt: None,
            flow: None,
        }
    }

    pub fn with_body(mut self, body: ResponseBody) -> Self {
        self.body = body;
        self
    }

    pub fn with_header(mut self, name: http::HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }
}

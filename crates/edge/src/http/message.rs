//! Defines a request and a response independently of the HTTP version that carried them.
//!
//! Not here: their bytes on the wire (`h1`, `h2`), what happens to them (`request`).

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use nagaya_base::RequestId;

use crate::http::clients::network::ClientNetwork;
use crate::http::peer_meta::PeerRequestMeta;
use crate::http::throttle::flow::BodyPacer;

/// One request: its head, already checked, and its body, which still arrives.
pub struct Request {
    /// Boxed, because a request is handed from step to step and its head is large.
    pub head: Box<RequestHead>,
    pub body: RequestBody,
}

/// The head of a request. Ambiguous heads are refused before.
#[derive(Debug, Clone)]
pub struct RequestHead {
    pub id: RequestId,
    pub method: Method,
    /// The path as sent, percent-encoded, always beginning with `/`; or `*` for `OPTIONS *`.
    pub path: Box<str>,
    /// The query: the part after `?`, without it.
    pub query: Option<Box<str>>,
    /// Host of the target or of the Host field, in lower case, without port. Empty if an HTTP/1.0
    /// client sent none.
    pub host: Box<str>,
    /// The port behind the host, if there was one.
    pub port: Option<u16>,
    pub version: Version,
    /// As received, without Host and without the hop-by-hop fields of RFC 9110 section 7.6.1.
    pub headers: HeaderMap,
    /// The value of `Upgrade` (HTTP/1.1 only). `exchange` decides whether it is forwarded.
    pub upgrade: Option<HeaderValue>,
    pub conn: Rc<ConnInfo>,
}

/// Data that all requests of one connection share.
#[derive(Debug)]
pub struct ConnInfo {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// Present on TLS connections.
    pub tls: Option<TlsInfo>,
    /// Set if the connection is another node's, which has forwarded this one request. Then the
    /// other fields describe the client of that request.
    pub carried: Option<Box<PeerRequestMeta>>,
    /// The client's network, if limits hold for it. `None` also for trusted proxies, because
    /// their clients are others.
    pub network: Option<Arc<ClientNetwork>>,
}

#[derive(Debug)]
pub struct TlsInfo {
    /// Server name of the handshake, lower case.
    pub server_name: Option<Box<str>>,
    pub protocol: &'static str,
    pub cipher: &'static str,
    /// DNS names of the certificate in use, lower case, with `*.` in front of wildcards.
    pub certificate_names: Rc<[Box<str>]>,
}

impl ConnInfo {
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
}

/// The body of a request: data frames, then perhaps trailers. Its creator limits its size.
pub struct RequestBody(Option<Pin<Box<dyn BodySource>>>);

/// Source of a request body.
pub trait BodySource: Body<Data = Bytes, Error = BodyError> {
    /// Returns whether the whole body has arrived and stays until the request is done.
    fn is_kept(&self) -> bool;

    /// Starts again at the first frame, if the body is kept.
    fn rewind(self: Pin<&mut Self>);
}

/// A body that can be read once.
struct BodyOnce<B>(B);

impl RequestBody {
    pub fn empty() -> Self {
        Self(None)
    }

    /// Returns the body of a client as it arrives.
    pub fn new(body: impl Body<Data = Bytes, Error = BodyError> + Unpin + 'static) -> Self {
        Self(Some(Box::pin(BodyOnce(body))))
    }

    /// Returns the body of a source that keeps it until its request is done.
    pub fn kept(body: impl BodySource + 'static) -> Self {
        Self(Some(Box::pin(body)))
    }

    /// Returns whether the whole body has arrived and can be read repeatedly.
    pub fn is_kept(&self) -> bool {
        self.0.as_ref().is_none_or(|body| body.is_kept())
    }

    /// Starts again, so that the request can be given to another backend. If the body is not
    /// kept, the part that was read is lost.
    pub fn rewind(&mut self) {
        if let Some(body) = &mut self.0 {
            body.as_mut().rewind();
        }
    }

    /// Returns the length in bytes if it was announced (`Content-Length`). `None` for a chunked
    /// body or an HTTP/2 stream of unknown length.
    pub fn len(&self) -> Option<u64> {
        self.0.as_ref().map_or(Some(0), |body| body.size_hint().exact())
    }

    /// Returns whether the body has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|body| body.is_end_stream())
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> BodySource for BodyOnce<B> {
    fn is_kept(&self) -> bool {
        false
    }

    fn rewind(self: Pin<&mut Self>) {}
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for BodyOnce<B> {
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

/// Reason why a body ended too early.
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

/// One response. Its receipt and its body hold guards (permit, process, worker). They are given
/// back when the body has been sent or dropped.
pub struct Response {
    pub status: StatusCode,
    /// Header fields without `Date`, `Server`, `Connection`, `Content-Length` and
    /// `Transfer-Encoding`. The wire adds those.
    pub headers: ResponseFields,
    pub body: ResponseBody,
    /// Receives the number of sent bytes. Writes the request's record when it is dropped.
    pub receipt: Option<Box<dyn SendObserver>>,
    /// Holds the body to its rate limits while it is sent.
    pub flow: Option<Box<BodyPacer>>,
}

/// Header fields of a response: its own, or those shared by all responses of a cached file.
/// Shared ones are copied only when they are changed.
#[derive(Debug, Clone)]
pub enum ResponseFields {
    Own(HeaderMap),
    Shared(Rc<HeaderMap>),
}

impl ResponseFields {
    pub fn into_map(self) -> HeaderMap {
        match self {
            Self::Own(map) => map,
            Self::Shared(map) => Rc::unwrap_or_clone(map),
        }
    }
}

impl From<HeaderMap> for ResponseFields {
    fn from(map: HeaderMap) -> Self {
        Self::Own(map)
    }
}

impl Deref for ResponseFields {
    type Target = HeaderMap;

    fn deref(&self) -> &HeaderMap {
        match self {
            Self::Own(map) => map,
            Self::Shared(map) => map,
        }
    }
}

impl DerefMut for ResponseFields {
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

/// Observes how one response is sent. If it is dropped without a call, the response counts as
/// aborted.
pub trait SendObserver {
    /// Reports that `bytes` of body were sent; `complete` is true if that is all of it.
    fn sent(&mut self, bytes: u64, complete: bool);
    /// Reports that the body ended too early. Called before `sent`.
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
    /// Parts in order, for responses with several ranges.
    Parts(Vec<BodyPart>),
    /// A body produced while it is sent. Its `size_hint().exact()` becomes `Content-Length`.
    Stream(Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>),
    /// Response `101`: from here on the two connections are joined. Only `http1` supports it.
    Tunnel(Box<dyn Duplex>),
}

pub enum BodyPart {
    Bytes(Bytes),
    File { file: Arc<OwnedFd>, offset: u64, len: u64 },
}

impl BodyPart {
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits off the first `max` bytes, or all there are.
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

    /// Returns the length in bytes, if it is known before sending.
    pub fn len(&self) -> Option<u64> {
        match self {
            Self::Empty => Some(0),
            Self::Bytes(bytes) => Some(bytes.len() as u64),
            Self::File { len, .. } => Some(*len),
            Self::Parts(parts) => Some(parts.iter().map(BodyPart::len).sum()),
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
            headers: ResponseFields::Own(HeaderMap::new()),
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

pub fn text<'a>(head: &'a RequestHead, name: &HeaderName) -> Option<&'a str> {
    head.headers.get(name)?.to_str().ok()
}

//! The other side of the protocols: the code that serves the requests of a connection.
//!
//! Not here: the protocols (`h1`, `h2`), the steps of a request (`request`).

use std::rc::Rc;

use nagaya_base::RequestId;

use crate::http::connections::ConnectionGuard;
use crate::http::message::{ConnInfo, Request, Response};
use crate::http::refusal::Refusal;
use crate::options::EdgeLimits;

/// Maximum number of streams that a client may reset before they were accepted. Honest clients
/// reset a few at a time.
pub const PENDING_RESETS_MAX: usize = 20;

/// Maximum request body bytes under way before they are read, for one stream.
/// `CONNECTION_WINDOW_BYTES` is the limit for the connection. It limits the memory of a
/// connection while bodies are not read: 1 MiB.
pub const STREAM_WINDOW_BYTES: u32 = 256 << 10;

pub const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// Services of the thread that a connection needs.
pub trait ConnectionHost: 'static {
    fn limits(&self) -> Rc<EdgeLimits>;
    fn request_id(&self) -> RequestId;
    /// Runs the request. It never fails: a refusal is a response, too.
    fn serve(&self, request: Request) -> impl Future<Output = Response>;
    /// Returns the response to input that was no request. `conn` is for the log.
    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response;
    /// Counts the connection while it lives.
    fn enter(&self) -> ConnectionGuard;
    /// Returns whether the thread's own time on each request is measured.
    fn measures(&self) -> bool;
    /// Returns the HTTP/2 windows: request body bytes under way, for one stream and for the
    /// connection.
    fn windows(&self) -> (u32, u32) {
        (STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES)
    }
    /// Returns the maximum number of HTTP/2 streams that may be reset before they were accepted.
    fn pending_resets(&self) -> usize {
        PENDING_RESETS_MAX
    }
}

//! The admin interface's client, for commands: it blocks, one request after the other.
//!
//! Not here: the meaning of the requests (`api`), printing (`cli`).

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use nagaya_records::instance::ExecCommand;
use nagaya_store::ChangeMode;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::stream;
use super::{ChangeSummary, ProblemReply, exec};

/// Longest time for a node to accept the connection.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(5);

/// Longest time for a node to begin a response. It covers an import of a million lines, and the
/// slowest start of an application.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(360);

/// Longest response that is not streamed, in bytes: a page of the longest records.
const ANSWER_LEN_MAX: usize = 128 << 20;

/// Bytes read from a file at once.
const READ_LEN: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{}: {error}", path.display())]
    Connect { path: PathBuf, error: io::Error },
    #[error("{}: the node did not answer as expected: {detail}", path.display())]
    Broken { path: PathBuf, detail: String },
    #[error("{0}")]
    Refused(Box<ProblemReply>),
    #[error("reading what to import: {0}")]
    Source(io::Error),
    #[error("writing the answer: {0}")]
    Write(io::Error),
}

#[derive(Debug)]
pub struct AdminClient {
    path: PathBuf,
    runtime: Runtime,
}

type Body = UnsyncBoxBody<Bytes, io::Error>;

impl AdminClient {
    /// Connects once, to learn whether a node runs.
    pub fn open(path: &Path) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| ClientError::Connect { path: path.into(), error })?;
        let client = Self { path: path.into(), runtime };
        client.runtime.block_on(client.connect())?;
        Ok(client)
    }

    /// Sends a request and returns the whole response, whatever its status.
    pub fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ClientError> {
        let request = request.map(|body| Full::new(body).map_err(|never| match never {}).boxed_unsync());
        self.runtime.block_on(async {
            let (head, body) = self.send(request).await?.into_parts();
            let body = http_body_util::Limited::new(body, ANSWER_LEN_MAX).collect();
            let body = timeout(ANSWER_WAIT_MAX, body).await.map_err(|_| self.silent())?;
            let body = body.map_err(|error| self.broken(error))?.to_bytes();
            Ok(Response::from_parts(head, body))
        })
    }

    /// Requests a command in an instance. The returned connection reports its outcome.
    pub fn exec(&self, site: &str, exec: &ExecCommand) -> Result<OwnedFd, ClientError> {
        let body = serde_json::to_vec(exec).map_err(|error| self.broken(error))?;
        let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
        let mut request = post(&format!("/v1/instances/{site}/exec"), body);
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, exec::PROTOCOL);
        self.runtime.block_on(async {
            let response = self.send(request).await?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.broken(error))?;
                return exec::descriptor(upgraded).map_err(|error| self.broken(error));
            }
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| self.broken(error))?;
            self.read(status, &body.to_bytes())
                .and_then(|_: serde_json::Value| Err(self.broken("it did not take the command")))
        })
    }

    /// Sends all lines of `lines`; if reading them fails, the node stores nothing.
    pub fn import(
        &self,
        mut lines: impl Read + Send + 'static,
        mode: ChangeMode,
    ) -> Result<ChangeSummary, ClientError> {
        let mode = if mode == ChangeMode::Replace { "replace" } else { "merge" };
        let (mut sender, receiver) = stream::channel();
        let failure = Arc::new(Mutex::new(None));
        let failed = failure.clone();
        // This thread is not waited for: the node may respond before all was read, and reading may
        // block.
        std::thread::spawn(move || {
            let mut piece = vec![0; READ_LEN];
            loop {
                match lines.read(&mut piece) {
                    Ok(0) => return drop(sender.finish()),
                    Ok(len) => {
                        if sender.write_all(&piece[..len]).is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        *failed.lock() = Some(error);
                        return;
                    }
                }
            }
        });
        let request = post(&format!("/v1/import?mode={mode}"), receiver.boxed_unsync());
        let answered = self.runtime.block_on(async {
            let response = self.send(request).await?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| self.broken(error))?;
            self.read(status, &body.to_bytes())
        });
        match failure.lock().take() {
            Some(error) => Err(ClientError::Source(error)),
            None => answered,
        }
    }

    pub fn export(&self, to: &mut dyn Write) -> Result<(), ClientError> {
        let empty = Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync();
        self.runtime.block_on(async {
            let response = self.send(get("/v1/export", empty)).await?;
            let status = response.status();
            let mut body = response.into_body();
            if status != StatusCode::OK {
                let body = body.collect().await.map_err(|error| self.broken(error))?;
                return self.read(status, &body.to_bytes());
            }
            while let Some(frame) = timeout(ANSWER_WAIT_MAX, body.frame()).await.map_err(|_| self.silent())? {
                if let Ok(data) = frame.map_err(|error| self.broken(error))?.into_data() {
                    to.write_all(&data).map_err(ClientError::Write)?;
                }
            }
            to.flush().map_err(ClientError::Write)
        })
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let connected = timeout(CONNECT_WAIT_MAX, UnixStream::connect(&self.path)).await;
        connected
            .unwrap_or_else(|elapsed| Err(elapsed.into()))
            .map_err(|error| ClientError::Connect { path: self.path.clone(), error })
    }

    async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, ClientError> {
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(|error| self.broken(error))?;
        // It ends with the response's body; its errors appear in `sender` or in that body.
        tokio::spawn(connection.with_upgrades());
        let response = timeout(ANSWER_WAIT_MAX, sender.send_request(request)).await;
        response.map_err(|_| self.silent())?.map_err(|error| self.broken(error))
    }

    fn read<T: serde::de::DeserializeOwned>(
        &self,
        status: StatusCode,
        body: &[u8],
    ) -> Result<T, ClientError> {
        if status.is_success() {
            return serde_json::from_slice(body).map_err(|error| self.broken(error));
        }
        let problem = serde_json::from_slice(body).map_err(|_| self.broken(status))?;
        Err(ClientError::Refused(problem))
    }

    fn broken(&self, detail: impl std::fmt::Display) -> ClientError {
        ClientError::Broken { path: self.path.clone(), detail: detail.to_string() }
    }

    fn silent(&self) -> ClientError {
        self.broken(format!("no data arrived for {} s", ANSWER_WAIT_MAX.as_secs()))
    }
}

fn get(path: &str, body: Body) -> Request<Body> {
    request(http::Method::GET, path, body)
}

fn post(path: &str, body: Body) -> Request<Body> {
    request(http::Method::POST, path, body)
}

fn request(method: http::Method, path: &str, body: Body) -> Request<Body> {
    // The socket is the host; HTTP/1.1 still requires the field (RFC 9112 section 3.2).
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .body(body)
        .expect("paths of this interface are valid")
}

//! A command in an instance over the admin interface. The request's connection becomes the
//! command's, and goes to the keeper as it is. This module has both ends: the server's and the
//! client's.
//!
//! From then on it carries `nagaya_records::instance::ExecSaid`. Not here: running it
//! (`nagaya_keeper`), pipes and terminals at this end (`cli::exec`).

use std::borrow::Cow;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use nagaya_records::instance::ExecCommand;
use percent_encoding::percent_decode_str;
use tokio::net::UnixStream;

use super::server::{INSTANCES, short_body};
use super::{AdminNode, ProblemReply, api};

/// Protocol to which the connection is upgraded.
pub const PROTOCOL: HeaderValue = HeaderValue::from_static("nagaya-exec");

/// Returns the site of `/v1/instances/SITE/exec`.
pub fn site_of(path: &str) -> Option<Cow<'_, str>> {
    let site = path.strip_prefix(INSTANCES)?.strip_suffix("/exec")?;
    Some(percent_decode_str(site).decode_utf8_lossy())
}

/// Answers the request for a command. The keeper reports faults of the command itself, and of the
/// instance.
pub async fn answer(
    node: &Arc<dyn AdminNode>,
    method: &Method,
    site: String,
    mut request: Request<Incoming>,
) -> Response<Bytes> {
    if *method != Method::POST {
        return api::refuse(&api::wrong_method(method, "POST"));
    }
    if request.headers().get(header::UPGRADE) != Some(&PROTOCOL) {
        let detail = "a command needs a connection of its own: send 'Upgrade: nagaya-exec'";
        return api::refuse(&ProblemReply::request(StatusCode::UPGRADE_REQUIRED, detail));
    }
    let upgrade = hyper::upgrade::on(&mut request);
    let exec = match short_body(request.into_body()).await.and_then(|body| read(site, &body)) {
        Ok(exec) => exec,
        Err(problem) => return api::refuse(&problem),
    };
    let node = Arc::clone(node);
    // It ends with the upgrade, and that with the response below.
    tokio::spawn(async move {
        let passed = match upgrade.await {
            Ok(upgraded) => descriptor(upgraded).map(|connection| node.exec(exec, connection)),
            Err(error) => Err(io::Error::other(error)),
        };
        // In both cases the connection is closed, and the waiting client sees that.
        if let Err(error) = passed {
            tracing::debug!(%error, "a command's connection was lost before it began");
        }
    });
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, PROTOCOL);
    response
}

fn read(site: String, body: &[u8]) -> Result<ExecCommand, Box<ProblemReply>> {
    let exec: ExecCommand = serde_json::from_slice(body)
        .map_err(|error| ProblemReply::request(StatusCode::UNPROCESSABLE_ENTITY, error))?;
    Ok(ExecCommand { site, ..exec })
}

/// Returns the underlying connection. Its other end sends nothing before the response, so nothing
/// of it was read.
pub fn descriptor(upgraded: Upgraded) -> io::Result<OwnedFd> {
    let unexpected = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let parts = upgraded
        .downcast::<TokioIo<UnixStream>>()
        .map_err(|_| unexpected("the connection is no plain socket"))?;
    if !parts.read_buf.is_empty() {
        return Err(unexpected("data arrived before the connection was ready"));
    }
    Ok(StdUnixStream::into(parts.io.into_inner().into_std()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_its_site_in_the_path() {
        assert_eq!(site_of("/v1/instances/w%69ki/exec").as_deref(), Some("wiki"));
        assert_eq!(site_of("/v1/instances/wiki/logs"), None);
        let exec = read("wiki".into(), br#"{"command":["ls"],"wake":true}"#).unwrap();
        assert_eq!((exec.site.as_str(), exec.wake, exec.terminal), ("wiki", true, None));
        assert_eq!(read("wiki".into(), b"{}").unwrap_err().status, 422);
    }
}

//! Defines every way in which nagaya refuses a request, and the one table that turns it into a
//! response.
//!
//! Not here: a backend's own error responses (those are answers), or a tenant's error documents
//! (`files`).

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode};
use nagaya_base::{Code, RequestId};
use nagaya_records::NodeName;

use crate::http::message::{BodyError, Response, ResponseBody};
use crate::http::peer_fields;
use crate::http::peer_meta::PeerDenial;

/// The style of every page that nagaya itself writes.
pub const BASE_STYLE: &str = include_str!("base.css");

/// Reason why a request got no answer from its site.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the request is not valid HTTP: {0}")]
    BadRequest(&'static str),
    #[error("plain HTTP was sent to a port that speaks HTTPS: begin the address with https://")]
    PlainHttp,
    #[error("no site answers to this host name")]
    UnknownHost,
    #[error("this connection's certificate is for another site")]
    Misdirected,
    #[error("nothing is served at this path")]
    NotFound,
    #[error("this path may not be served: {0}")]
    Forbidden(&'static str),
    /// The keeper refuses the link, and reports the reason.
    #[error("this path leads through a link out of the document root: {0}")]
    LinkRefused(String),
    #[error("this method is not allowed here")]
    MethodNotAllowed(&'static str),
    #[error("this method is not known here")]
    MethodUnknown,
    #[error("the request head is too large")]
    HeadTooLarge,
    #[error("the request target is too long")]
    TargetTooLong,
    #[error("the request body is larger than the site allows")]
    BodyTooLarge,
    #[error("the request took too long to arrive")]
    RequestTimeout,
    #[error("the request has an expectation other than 100-continue")]
    ExpectationFailed,
    #[error("this HTTP version is not spoken here")]
    VersionNotSupported,
    #[error("the queue of this site is full")]
    QueueFull { retry_after_seconds: u32, notice: Option<Box<DeferralContent>> },
    #[error("the request waited too long in the queue")]
    QueueTimeout { retry_after_seconds: u32, notice: Option<Box<DeferralContent>> },
    #[error(
        "the site has as many running and waiting requests as allowed; the client got a time to come back"
    )]
    TurnedAway { notice: Box<DeferralContent>, is_early: bool },
    #[error("the ticket is not valid: {0}")]
    TicketInvalid(String),
    #[error("the ticket has been used")]
    TicketUsed,
    #[error("this client's network has too many open connections")]
    TooManyConnections { retry_after_seconds: u32 },
    #[error("this client's network sends more requests per second than allowed")]
    TooManyRequests { retry_after_seconds: u32 },
    #[error("too many connections are open")]
    ConnectionsFull { retry_after_seconds: u32 },
    #[error("the node cannot take this request now: {0}")]
    Overloaded(&'static str),
    #[error("there is no room now for an upload of this size: {0}")]
    SpoolFull(&'static str),
    #[error("a file system does not answer")]
    FilesHang,
    #[error("the backend cannot be reached: {0}")]
    BackendUnreachable(String),
    #[error("the backend's answer is not acceptable: {0}")]
    BackendInvalid(String),
    #[error("the backend did not answer in time")]
    BackendTimeout,
    #[error("the site is not set up correctly: {0}")]
    SiteBroken(String),
    #[error("the request has passed through this node too often")]
    LoopDetected,
    #[error("a rule that must not fail did: {0}")]
    RuleBroken(String),
    #[error("this server's rules do not allow it")]
    Ruled(StatusCode),
    #[error("this node may not run applications now: it has lost touch with its cluster")]
    Fenced,
    #[error("the site's application can run nowhere now: {reason}")]
    Nowhere { reason: String, code: Code, later: RetryHint },
    #[error("the node for the site's application is not known: {why}")]
    Unplaced { why: PlacementError, later: RetryHint },
    #[error("the site has moved more often than a request follows: {0}")]
    MovedTooOften(&'static str),
    /// Node `node` was lost, and the request cannot be sent a second time, because of `reason`.
    #[error(
        "node '{node}' was lost while it had the request, which may have been carried out; it was not sent again: {reason}"
    )]
    MayBeDone { node: NodeName, reason: &'static str },
    /// Never sent to a client, which has received the head already: its response is aborted.
    #[error("the response was cut off: {0}")]
    AnswerBroken(String),
    /// Never sent to a client either.
    #[error("node '{node}' was lost in the middle of its response: {why}")]
    AnswerLost { node: NodeName, why: String },
    /// For another node: its request is for a site that does not run here. The site ran here when
    /// the application was given the request `tries` times.
    #[error("the site does not run on this node, which knows epoch {epoch}")]
    NotPlacedHere { epoch: u64, tries: u32 },
    /// For another node: this one has no lease. The lease may have ended after the application
    /// was given the request `tries` times.
    #[error("this node may not run applications now, and another node sent it a request for one")]
    FencedHere { tries: u32 },
    /// For another node: it routes the request to another site.
    #[error("two nodes know different sites for this request")]
    OtherSite,
    /// The site is not placed here any more. Never sent to a client: the request goes on
    /// elsewhere.
    #[error("the site has moved")]
    Moved,
    #[error("the client left")]
    ClientGone,
}

/// Time to come back for a client that waited in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryHint {
    pub retry_after_seconds: u32,
    /// For programs.
    pub notice: Option<Box<DeferralContent>>,
}

impl Default for RetryHint {
    fn default() -> Self {
        Self { retry_after_seconds: 1, notice: None }
    }
}

/// One row of the table: the client's view, the operator's code, and who is to blame.
pub struct RefusalRow {
    pub status: StatusCode,
    pub code: Code,
    /// Label of the `reason` in metrics and the access log.
    pub reason: &'static str,
    pub blame: RefusalBlame,
    /// A site's error document does not replace the node's page.
    pub has_own_page: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalBlame {
    Client,
    Site,
    Node,
}

fn row(status: StatusCode, code: u16, reason: &'static str, blame: RefusalBlame) -> RefusalRow {
    RefusalRow { status, code: Code(code), reason, blame, has_own_page: false }
}

impl Refusal {
    /// Returns its row of the table.
    pub fn row(&self) -> RefusalRow {
        RefusalRow { has_own_page: self.notice().is_some(), ..self.table_row() }
    }

    /// Holds the table. Only `row` knows whether there is a page.
    fn table_row(&self) -> RefusalRow {
        use RefusalBlame::{Client, Node, Site};
        match self {
            Self::BadRequest(_) => row(StatusCode::BAD_REQUEST, 401, "bad_request", Client),
            Self::PlainHttp => row(StatusCode::BAD_REQUEST, 478, "plain_http", Client),
            Self::UnknownHost => row(StatusCode::NOT_FOUND, 402, "unknown_host", Client),
            Self::Misdirected => row(StatusCode::MISDIRECTED_REQUEST, 403, "misdirected", Client),
            Self::NotFound => row(StatusCode::NOT_FOUND, 404, "not_found", Client),
            Self::Forbidden(_) => row(StatusCode::FORBIDDEN, 405, "forbidden", Client),
            Self::LinkRefused(_) => row(StatusCode::FORBIDDEN, 358, "link_refused", Site),
            Self::MethodNotAllowed(_) => row(StatusCode::METHOD_NOT_ALLOWED, 406, "method", Client),
            Self::MethodUnknown => row(StatusCode::NOT_IMPLEMENTED, 477, "method_unknown", Client),
            Self::HeadTooLarge => {
                row(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, 407, "head_too_large", Client)
            }
            Self::TargetTooLong => row(StatusCode::URI_TOO_LONG, 408, "target_too_long", Client),
            Self::BodyTooLarge => row(StatusCode::PAYLOAD_TOO_LARGE, 409, "body_too_large", Client),
            Self::RequestTimeout => row(StatusCode::REQUEST_TIMEOUT, 410, "request_timeout", Client),
            Self::ExpectationFailed => row(StatusCode::EXPECTATION_FAILED, 411, "expectation", Client),
            Self::VersionNotSupported => row(StatusCode::HTTP_VERSION_NOT_SUPPORTED, 412, "version", Client),
            Self::QueueFull { .. } => row(StatusCode::SERVICE_UNAVAILABLE, 413, "queue_full", Site),
            Self::QueueTimeout { .. } => row(StatusCode::SERVICE_UNAVAILABLE, 414, "queue_timeout", Site),
            Self::TurnedAway { is_early: true, .. } => {
                row(StatusCode::SERVICE_UNAVAILABLE, 451, "too_early", Client)
            }
            // A crowd would fill the node's log. The access log and the metrics have each.
            Self::TurnedAway { .. } => row(StatusCode::SERVICE_UNAVAILABLE, 450, "promised", Client),
            Self::TicketInvalid(_) => row(StatusCode::FORBIDDEN, 452, "ticket_invalid", Client),
            Self::TicketUsed => row(StatusCode::CONFLICT, 453, "ticket_used", Client),
            // The node's log has one line a minute. The access log and the metrics have each.
            Self::TooManyConnections { .. } => {
                row(StatusCode::TOO_MANY_REQUESTS, 480, "network_connections", Client)
            }
            Self::TooManyRequests { .. } => {
                row(StatusCode::TOO_MANY_REQUESTS, 481, "network_requests", Client)
            }
            Self::ConnectionsFull { .. } => {
                row(StatusCode::SERVICE_UNAVAILABLE, 483, "connections_full", Client)
            }
            Self::Overloaded(_) => row(StatusCode::SERVICE_UNAVAILABLE, 415, "overloaded", Node),
            Self::SpoolFull(_) => row(StatusCode::SERVICE_UNAVAILABLE, 471, "spool_full", Node),
            Self::FilesHang => row(StatusCode::SERVICE_UNAVAILABLE, 473, "files_hang", Node),
            Self::BackendUnreachable(_) => row(StatusCode::BAD_GATEWAY, 417, "backend_unreachable", Site),
            Self::BackendInvalid(_) => row(StatusCode::BAD_GATEWAY, 418, "backend_invalid", Site),
            Self::AnswerBroken(_) => row(StatusCode::BAD_GATEWAY, 476, "broken_off", Site),
            Self::BackendTimeout => row(StatusCode::GATEWAY_TIMEOUT, 419, "backend_timeout", Site),
            Self::SiteBroken(_) => row(StatusCode::INTERNAL_SERVER_ERROR, 420, "site_broken", Site),
            Self::Fenced | Self::FencedHere { .. } => {
                row(StatusCode::SERVICE_UNAVAILABLE, 460, "fenced", Node)
            }
            Self::Nowhere { code, .. } => {
                let table = row(StatusCode::SERVICE_UNAVAILABLE, 461, "nowhere", Node);
                RefusalRow { code: *code, ..table }
            }
            Self::NotPlacedHere { .. } | Self::Moved => {
                row(StatusCode::SERVICE_UNAVAILABLE, 462, "not_placed_here", Client)
            }
            Self::MayBeDone { .. } => row(StatusCode::BAD_GATEWAY, 463, "may_be_done", Node),
            Self::AnswerLost { .. } => row(StatusCode::BAD_GATEWAY, 470, "answer_lost", Node),
            Self::MovedTooOften(_) => row(StatusCode::SERVICE_UNAVAILABLE, 464, "moved_too_often", Node),
            Self::Unplaced { .. } => row(StatusCode::SERVICE_UNAVAILABLE, 468, "unplaced", Node),
            Self::OtherSite => row(StatusCode::SERVICE_UNAVAILABLE, 462, "other_site", Node),
            Self::LoopDetected => row(StatusCode::LOOP_DETECTED, 425, "loop", Site),
            Self::RuleBroken(_) => row(StatusCode::SERVICE_UNAVAILABLE, 426, "rule_broken", Node),
            Self::Ruled(status) => row(*status, 428, "ruled", Client),
            Self::ClientGone => row(client_gone(), 421, "client_gone", Client),
        }
    }

    /// Returns the content for people or programs, if there is one.
    fn notice(&self) -> Option<&DeferralContent> {
        match self {
            Self::TurnedAway { notice, .. } => Some(notice),
            Self::QueueFull { notice, .. } | Self::QueueTimeout { notice, .. } => notice.as_deref(),
            Self::Nowhere { later, .. } | Self::Unplaced { later, .. } => later.notice.as_deref(),
            _ => None,
        }
    }

    /// Returns the response. It names the problem and where to look it up, and nothing internal
    /// to the node.
    pub fn into_response(self, id: RequestId) -> Response {
        let row = self.row();
        if let Some(notice) = self.notice() {
            let mut response = Response::new(row.status).with_body(ResponseBody::Bytes(notice.body.clone()));
            response.headers = notice.headers.clone().into();
            response.headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            return response;
        }
        let detail = match &self {
            Self::BadRequest(_) | Self::Forbidden(_) | Self::MethodNotAllowed(_) => self.to_string(),
            Self::LinkRefused(_) => "this path may not be served: it leads out of the document root".into(),
            // Details of a backend are the operator's business: the log has them under the
            // request id.
            Self::BackendUnreachable(_) => "the backend cannot be reached".into(),
            Self::BackendInvalid(_) => "the backend's answer is not acceptable".into(),
            Self::SpoolFull(_) => "there is no room now for an upload of this size".into(),
            Self::SiteBroken(_) => "the site is not set up correctly".into(),
            Self::RuleBroken(_) => "this server cannot decide about requests now".into(),
            Self::Fenced | Self::FencedHere { .. } | Self::Nowhere { .. } | Self::Unplaced { .. } => {
                "the application cannot be run at this moment".into()
            }
            Self::MayBeDone { reason, .. } => format!(
                "the server that had this request was lost. The request may have been carried out, and it was not sent again because {reason}"
            ),
            _ => self.to_string(),
        };
        let reason = row.status.canonical_reason().unwrap_or("Error");
        let page = format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\">\
             <title>{status} {reason}</title><style>{BASE_STYLE}</style>\
             <main><h1>{status} {reason}</h1><p>{detail}.</p><p><small>{code} &middot; request {id}</small></p></main></html>\n",
            status = row.status.as_u16(),
            code = row.code,
        );
        let mut response = Response::new(row.status)
            .with_header(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"))
            .with_header(CACHE_CONTROL, HeaderValue::from_static("no-store"))
            .with_body(ResponseBody::Bytes(Bytes::from(page)));
        match self {
            Self::QueueFull { retry_after_seconds, .. }
            | Self::QueueTimeout { retry_after_seconds, .. }
            | Self::TooManyConnections { retry_after_seconds }
            | Self::TooManyRequests { retry_after_seconds }
            | Self::ConnectionsFull { retry_after_seconds } => {
                response.headers.insert(RETRY_AFTER, HeaderValue::from(retry_after_seconds));
            }
            Self::Nowhere { later, .. } | Self::Unplaced { later, .. } => {
                response.headers.insert(RETRY_AFTER, HeaderValue::from(later.retry_after_seconds));
            }
            Self::SpoolFull(_) | Self::FilesHang => {
                response.headers.insert(RETRY_AFTER, HeaderValue::from_static("30"));
            }
            Self::Overloaded(_) | Self::RuleBroken(_) | Self::Fenced | Self::MovedTooOften(_) => {
                response.headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::NotPlacedHere { epoch, tries } => {
                peer_fields::deny(&mut response.headers, PeerDenial::NotPlacedHere { epoch, tries })
            }
            Self::FencedHere { tries } => {
                peer_fields::deny(&mut response.headers, PeerDenial::Fenced { tries })
            }
            Self::OtherSite => peer_fields::deny(&mut response.headers, PeerDenial::OtherSite),
            Self::MethodNotAllowed(allowed) => {
                response.headers.insert(ALLOW, HeaderValue::from_static(allowed));
            }
            _ => {}
        }
        response
    }
}

/// Returns 499, which is never sent. The access log uses it for a client that left.
fn client_gone() -> StatusCode {
    StatusCode::from_u16(499).expect("a valid status code")
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::ClientGone => Self::ClientGone,
            BodyError::Malformed(what) => Self::BadRequest(what),
            BodyError::TooLarge(_) => Self::BodyTooLarge,
            BodyError::Stalled => Self::RequestTimeout,
            BodyError::Backend(what) | BodyError::NodeLost(what) => Self::BackendInvalid(what),
            BodyError::File(error) => Self::SiteBroken(error.to_string()),
        }
    }
}

/// Response for a deferred client, all but the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeferralContent {
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Maximum wait of a request for the answer. A store that has just lost its leader takes some
/// seconds for a new one. The supervisor answers within 8 s in any case
/// (`nagaya_placement::relocation::WAIT_LONGEST`).
pub const ANSWER_MAX: Duration = Duration::from_secs(9);

/// Reason why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    #[error("the supervisor did not answer within {} s", ANSWER_MAX.as_secs())]
    Late,
    #[error("too many sites are being placed at once")]
    Crowded,
    #[error("the supervisor cannot be asked")]
    Gone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_people_looks_like_the_waiting_page() {
        let id = RequestId(1);
        let ResponseBody::Bytes(body) = Refusal::NotFound.into_response(id).body else {
            panic!("the page is in memory")
        };
        let page = String::from_utf8(body.to_vec()).expect("text");
        assert!(page.contains(&format!("<style>{BASE_STYLE}</style><main><h1>404 Not Found</h1>")), "{page}");
        assert!(page.contains("<meta name=\"viewport\""), "{page}");
        assert!(page.contains("NGY0404 &middot; request "), "{page}");
    }
}

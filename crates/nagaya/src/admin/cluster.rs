//! The cluster over the admin interface: queries and commands, by method and path.
//!
//! Paths and their purposes:
//!
//! - `GET /v1/cluster`: this node as a member, and the age of its knowledge
//! - `POST /v1/cluster`: makes a cluster of this node: [`FoundCommand`]
//! - `POST /v1/cluster/join`: makes this node a member: [`JoinCommand`]
//! - `POST /v1/cluster/tokens`: makes a token by which one machine joins: [`NewToken`]
//! - `GET /v1/cluster/tokens`: the tokens that are still good, without their secrets
//! - `DELETE /v1/cluster/tokens/ID`: ends a token
//! - `POST /v1/cluster/authority?finish=true|false`: exchanges the authority of certificates, in
//!   two steps
//! - `POST /v1/cluster/store`: how this member reaches the store from now on: [`EtcdAccess`]
//! - `POST /v1/cluster/repair`: replaces values that do not count by those that this node knows
//! - `GET /v1/nodes`: the nodes of the cluster
//! - `POST /v1/nodes/NAME/drain`, `/undrain`: drains a node, and ends that
//! - `DELETE /v1/nodes/NAME?force=true&stolen=true`: removes a node
//! - `GET /v1/placements`: where applications run: `after=SITE`, `limit=N`, `node=NAME`
//! - `GET /v1/placements/SITE`: where one runs, the reason, and the history
//! - `POST /v1/placements/SITE/move?to=NODE`: moves one
//! - `GET /v1/events?limit=N`: cluster events seen by this node, the latest first
//!
//! Not here: doing it (`supervisor::cluster`), the commands (`cli::cluster`).

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::api::{self, UriQuery};
use super::server::short_body;
use super::{AdminNode, ProblemReply};
use crate::etcd_access::EtcdAccess;

/// Most placements in one response.
pub const PLACEMENTS_MAX: usize = 1_000;

/// Most events in one response.
pub const EVENTS_MAX: usize = 2_000;

/// A query or command for a cluster.
pub enum ClusterCommand {
    Found(FoundCommand),
    Join(JoinCommand),
    Status,
    Token(NewToken),
    Tokens,
    Revoke {
        id: String,
    },
    /// Exchanges the CA; with `finish`, ends trust in the former one.
    Authority {
        finish: bool,
    },
    /// How this member reaches the store from now on.
    Store(EtcdAccess),
    /// Replaces values that do not count by this node's known ones.
    Repair,
    Nodes,
    Drain {
        node: String,
        on: bool,
    },
    Remove {
        node: String,
        force: bool,
        stolen: bool,
    },
    Placements {
        after: Option<String>,
        limit: usize,
        node: Option<String>,
    },
    Placement {
        site: String,
    },
    Move {
        site: String,
        to: Option<String>,
    },
    Events {
        limit: usize,
    },
}

/// A cluster that begins with this node and its records.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoundCommand {
    pub cluster: String,
    pub etcd: EtcdAccess,
}

/// This node becomes a member of a cluster, and takes over its records.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinCommand {
    /// `None` means the token's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Missing values come from the token.
    pub etcd: EtcdAccess,
    pub token: String,
    /// Records of its own are dropped; otherwise a node that has any is refused.
    #[serde(default)]
    pub discard: bool,
}

/// A token with which one machine becomes a member.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// Time for which it is valid.
    pub ttl_seconds: u64,
    /// PEM: the machine's client certificate for etcd. `None` if it has to bring its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Returns whether this module answers a path.
pub fn is_asked(path: &str) -> bool {
    let first = path.strip_prefix("/v1/").and_then(|rest| rest.split('/').next());
    matches!(first, Some("cluster" | "nodes" | "placements" | "events"))
}

pub async fn answer(node: &dyn AdminNode, request: Request<Incoming>) -> Response<Bytes> {
    let (head, body) = request.into_parts();
    let asked = async {
        let body = short_body(body).await?;
        let ask = read(&head.method, head.uri.path(), head.uri.query().unwrap_or_default(), &body)?;
        node.cluster(ask).await
    };
    match asked.await {
        Ok(value) => {
            let mut response = Response::new(Bytes::from(value.to_string()));
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        Err(problem) => api::refuse(&problem),
    }
}

fn read(method: &Method, path: &str, query: &str, body: &[u8]) -> Result<ClusterCommand, Box<ProblemReply>> {
    let query = UriQuery::read(query);
    let segments: Vec<_> = path.trim_start_matches("/v1/").split('/').collect();
    let name = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let allowed: &[&str] = match segments[..] {
        ["cluster", "authority"] => &["finish"],
        ["nodes", _] => &["force", "stolen"],
        ["placements"] => &["after", "limit", "node"],
        ["placements", _, "move"] => &["to"],
        ["events"] => &["limit"],
        _ => &[],
    };
    query.allow(allowed)?;
    let flag = |key| query.get(key).is_some_and(|value| value == "true");
    let (needed, ask) = match (&segments[..], method) {
        (["cluster"], &Method::POST) => return Ok(ClusterCommand::Found(parse(body)?)),
        (["cluster"], _) => (Method::GET, ClusterCommand::Status),
        (["cluster", "join"], &Method::POST) => return Ok(ClusterCommand::Join(parse(body)?)),
        (["cluster", "join"], _) => return Err(api::wrong_method(method, "POST")),
        (["cluster", "tokens"], &Method::POST) => return Ok(ClusterCommand::Token(parse(body)?)),
        (["cluster", "tokens"], _) => (Method::GET, ClusterCommand::Tokens),
        (["cluster", "tokens", id], _) => (Method::DELETE, ClusterCommand::Revoke { id: name(id) }),
        (["cluster", "authority"], _) => (Method::POST, ClusterCommand::Authority { finish: flag("finish") }),
        (["cluster", "store"], &Method::POST) => return Ok(ClusterCommand::Store(parse(body)?)),
        (["cluster", "store"], _) => return Err(api::wrong_method(method, "POST")),
        (["cluster", "repair"], _) => (Method::POST, ClusterCommand::Repair),
        (["nodes"], _) => (Method::GET, ClusterCommand::Nodes),
        (["nodes", node], _) => {
            let force = flag("force");
            let stolen = flag("stolen");
            (Method::DELETE, ClusterCommand::Remove { node: name(node), force, stolen })
        }
        (["nodes", node, word @ ("drain" | "undrain")], _) => {
            (Method::POST, ClusterCommand::Drain { node: name(node), on: *word == "drain" })
        }
        (["placements"], _) => {
            let after = query.get("after");
            let node = query.get("node");
            let limit = query.limit()?.clamp(1, PLACEMENTS_MAX);
            let own = |text: Option<std::borrow::Cow<'_, str>>| text.map(std::borrow::Cow::into_owned);
            (Method::GET, ClusterCommand::Placements { after: own(after), limit, node: own(node) })
        }
        (["placements", site], _) => (Method::GET, ClusterCommand::Placement { site: name(site) }),
        (["events"], _) => {
            (Method::GET, ClusterCommand::Events { limit: query.limit()?.clamp(1, EVENTS_MAX) })
        }
        (["placements", site, "move"], _) => (
            Method::POST,
            ClusterCommand::Move { site: name(site), to: query.get("to").map(|to| to.into_owned()) },
        ),
        _ => return Err(api::unknown_path(path)),
    };
    if *method == needed { Ok(ask) } else { Err(api::wrong_method(method, needed.as_str())) }
}

fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Box<ProblemReply>> {
    serde_json::from_slice(body).map_err(|error| {
        ProblemReply::request(
            StatusCode::BAD_REQUEST,
            format!("the body is not what this path takes: {error}"),
        )
    })
}

/// Returns a list in the form of the interface.
pub fn list(key: &str, rows: Vec<Value>) -> Value {
    Value::Object([(key.to_owned(), Value::Array(rows))].into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(method: Method, path: &str, query: &str) -> Result<(), u16> {
        read(&method, path, query, b"{}").map(drop).map_err(|problem| problem.status)
    }

    #[test]
    fn each_path_has_its_methods_and_its_words() {
        assert_eq!(status(Method::GET, "/v1/cluster", ""), Ok(()));
        assert_eq!(status(Method::POST, "/v1/cluster", ""), Err(400), "the body is not a cluster");
        assert_eq!(status(Method::DELETE, "/v1/nodes/a", "force=true"), Ok(()));
        assert_eq!(status(Method::DELETE, "/v1/nodes/a", "stolen=true"), Ok(()));
        assert_eq!(status(Method::GET, "/v1/nodes/a", ""), Err(405));
        assert_eq!(status(Method::GET, "/v1/cluster/tokens", ""), Ok(()));
        assert_eq!(status(Method::POST, "/v1/cluster/tokens", ""), Err(400), "the body is not a token");
        assert_eq!(status(Method::DELETE, "/v1/cluster/tokens/12", ""), Ok(()));
        assert_eq!(status(Method::GET, "/v1/cluster/tokens/12", ""), Err(405));
        assert_eq!(status(Method::POST, "/v1/nodes/a/drain", ""), Ok(()));
        assert_eq!(status(Method::POST, "/v1/nodes/a/dance", ""), Err(404));
        assert_eq!(status(Method::GET, "/v1/placements", "after=b&limit=3"), Ok(()));
        assert_eq!(status(Method::GET, "/v1/placements", "colour=red"), Err(400));
        assert_eq!(status(Method::POST, "/v1/placements/wiki/move", "to=b"), Ok(()));
        assert_eq!(status(Method::GET, "/v1/placements/wiki", ""), Ok(()));
        assert_eq!(status(Method::DELETE, "/v1/placements/wiki", ""), Err(405));
        assert_eq!(status(Method::GET, "/v1/events", "limit=5"), Ok(()));
        assert_eq!(status(Method::GET, "/v1/events", "limit=none"), Err(400));
        assert_eq!(status(Method::POST, "/v1/events", ""), Err(405));
        assert_eq!(status(Method::GET, "/v1/cluster/join", ""), Err(405));
        assert_eq!(status(Method::GET, "/v1/cluster/store", ""), Err(405));
        assert_eq!(status(Method::POST, "/v1/cluster/store", ""), Err(400), "the body says nothing");
        assert_eq!(status(Method::POST, "/v1/cluster/repair", ""), Ok(()));
        assert_eq!(status(Method::GET, "/v1/cluster/repair", ""), Err(405));
    }

    #[test]
    fn a_drain_names_its_node_as_it_was_written() {
        let ask = read(&Method::POST, "/v1/nodes/n%2D1/undrain", "", b"").ok();
        assert!(matches!(ask, Some(ClusterCommand::Drain { node, on: false }) if node == "n-1"));
    }
}

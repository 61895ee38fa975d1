//! The admin interface: HTTP over a Unix socket, for operators and the command line to see and
//! change a running node. The kernel identifies the other end, and `roles` says what it may do.
//!
//! | method and path | purpose |
//! |---|---|
//! | `GET /v1/tenants`, `/v1/sites`, `/v1/settings`, `/v1/rules` | a page: `after=`, `limit=` |
//! | `GET /v1/sites` | also with `tenant=`, `host=` |
//! | `GET`, `PUT`, `DELETE /v1/tenants/NAME`, `/v1/sites/NAME` | one record |
//! | `GET`, `PUT`, `DELETE /v1/settings/KEY`, `/v1/rules/NAME` | one record |
//! | `POST /v1/import?mode=merge\|replace`, `GET /v1/export` | JSON lines |
//! | `GET /metrics`, `/healthz`, `/v1/status`, `/v1/cells` | the node |
//! | `GET /v1/requests` | sites, tenants and lanes with running or waiting requests |
//! | `GET /v1/requests/ID` | the receipt of one request |
//! | `GET /v1/instances` | all instances of applications |
//! | `GET /v1/instances/SITE`, `/v1/instances/SITE/logs` | one instance, its last lines |
//! | `POST /v1/instances/SITE/wake`, `/rest?to=TIER` | commands to it |
//! | `POST /v1/instances/SITE/image`, `/restart`, `/stop` | commands to it |
//! | `POST /v1/instances/SITE/exec` | a command in it, over the same connection (`exec`) |
//! | `GET /v1/balance/SITE` | its load, and the decisions that followed |
//! | `/v1/cluster...`, `/v1/nodes...`, `/v1/placements...` | several nodes as one (`cluster`) |
//!
//! Every record and listing carries the store's revision as `ETag`. `If-Match` with it makes a
//! change conditional on nothing having changed since. `If-None-Match: *` makes it conditional on
//! the record not existing yet. A change is answered when this node's processes have it in effect.
//! `"served": false` says that they do not after 10 s. Errors are problem documents (RFC 9457,
//! `application/problem+json`) with a `code`.
//!
//! Not here: the records and their rules (`nagaya_records`), making the socket (`supervisor`), the
//! commands (`cli`).

mod api;
mod client;
mod cluster;
mod exec;
mod instances;
mod problem;
mod roles;
mod server;
mod stream;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use nagaya_records::RecordChange;
use nagaya_records::instance::{ExecCommand, InstanceCommand};
use nagaya_store::Store;

use crate::tenant_ids::IdSource;

pub use api::{AdminApi, ChangeSummary, place_and_message};
pub use client::{AdminClient, ClientError};
pub use cluster::{ClusterCommand, FoundCommand, JoinCommand, NewToken, list};
pub use problem::ProblemReply;
pub use roles::AccessList;
pub use server::serve;

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Called after each transaction that changed something, in order of revision, while no other can
/// begin. It waits for no other process: it hands the changes on, and puts rules where the edge
/// finds them.
pub type OnChange = Arc<dyn Fn(Vec<RecordChange>, u64) + Send + Sync>;

/// The node's parts that the interface needs.
pub struct AdminParts {
    pub store: Arc<dyn Store>,
    pub node: Arc<dyn AdminNode>,
    pub on_change: OnChange,
    /// Which ids tenants may have, and get.
    pub ids: IdSource,
    /// Permissions of users and groups.
    pub access: AccessList,
}

/// The running node, as far as the interface shows it.
pub trait AdminNode: Send + Sync {
    /// Returns all processes' metrics in the Prometheus text format.
    fn metrics(&self) -> BoxFuture<'_, String>;
    fn health(&self) -> BoxFuture<'_, NodeHealth>;
    fn status(&self) -> BoxFuture<'_, serde_json::Value>;
    /// Returns the keeper's tree of cells as JSON. `None` if it did not answer.
    fn cells(&self) -> BoxFuture<'_, Option<String>>;
    /// Returns the keeper's instances as JSON. `None` if it did not answer.
    fn instances(&self) -> BoxFuture<'_, Option<String>>;
    /// Does this to the instance of a site. The reply is JSON; it comes when it is done.
    fn instance(&self, site: String, act: InstanceCommand) -> BoxFuture<'_, Option<String>>;
    /// Runs this in an instance. The connection is the command's from then on, as `ExecSaid` says.
    /// Returns false if there is no keeper.
    fn exec(&self, exec: ExecCommand, connection: OwnedFd) -> bool;
    /// Returns the known load of a site's application on this node, and the decisions that
    /// followed, as JSON.
    fn balance(&self, site: &str) -> serde_json::Value;
    /// Returns the sites, tenants and lanes of the edge's running and waiting requests, as JSON.
    /// `None` if it did not answer.
    fn requests(&self) -> BoxFuture<'_, Option<String>>;
    /// Runs a query or command for the cluster. The reply is JSON; it comes when it is done.
    fn cluster(&self, ask: ClusterCommand) -> BoxFuture<'_, Result<serde_json::Value, Box<ProblemReply>>>;
    /// Waits until edge and keeper have this revision of the store in effect. Returns false if they
    /// do not yet.
    fn serves_by(&self, revision: u64) -> BoxFuture<'_, bool>;
    /// Returns the edge's receipt of the request with this id, as JSON. `None` if it did not
    /// answer.
    fn explain(&self, id: String) -> BoxFuture<'_, Option<String>>;
}

/// Whether the node serves; `text` says what is wrong if it does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeHealth {
    pub ok: bool,
    pub text: String,
}

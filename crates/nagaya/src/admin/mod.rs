//! The admin interface: HTTP over a Unix socket, by which operators and the command line see and change a
//! running node. The kernel says who is at the other end, and `roles` what that one may do.
//!
//! | method and path | what |
//! |---|---|
//! | `GET /v1/tenants`, `/v1/sites`, `/v1/settings`, `/v1/rules` | a page: `after=NAME`, `limit=N`; sites also `tenant=`, `host=` |
//! | `GET`, `PUT`, `DELETE /v1/tenants/NAME`, `/v1/sites/NAME`, `/v1/settings/KEY`, `/v1/rules/NAME` | one record |
//! | `POST /v1/import?mode=merge\|replace`, `GET /v1/export` | JSON lines |
//! | `GET /metrics`, `/healthz`, `/v1/status`, `/v1/cells` | the node |
//! | `GET /v1/requests` | sites, tenants and lanes of which requests run or wait |
//! | `GET /v1/requests/ID` | the receipt of one request |
//! | `GET /v1/instances` | all instances of applications |
//! | `GET /v1/instances/SITE`, `/v1/instances/SITE/logs` | one instance, its last lines |
//! | `POST /v1/instances/SITE/wake`, `/rest?to=TIER`, `/image`, `/restart`, `/stop` | what is done to it |
//! | `POST /v1/instances/SITE/exec` | a command in it; the connection becomes the command's (`exec`) |
//! | `GET /v1/balance/SITE` | how busy it is, and what was decided for that |
//! | `/v1/cluster...`, `/v1/nodes...`, `/v1/placements...` | several nodes as one (`cluster`) |
//!
//! Every record and listing carries the store's revision as `ETag`; `If-Match` with it makes a change
//! conditional on nothing having changed since, and `If-None-Match: *` on the record not existing yet.
//! A change is answered when this node's processes serve by it; `"served": false` says that they do not after 10 s.
//! Errors are `application/problem+json` (RFC 9457) with a `code`.
//!
//! Not here: the records and their rules (`nagaya_cmdb`), making the socket (`supervisor`), the commands
//! (`cli`).

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

use nagaya_cmdb::instance::{Act, Exec};
use nagaya_cmdb::{Change, Store};

use crate::tenant_ids::IdSource;

pub use api::{Api, Summary, place_and_message};
pub use client::{Client, ClientError};
pub use cluster::{Ask, Found, Join, NewToken, list};
pub use problem::Problem;
pub use roles::AccessList;
pub use server::serve;

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Called after each transaction that changed something, in order of revision, while no other can begin.
/// It waits for no other process: it hands the changes on, and puts rules where the edge finds them.
pub type OnChange = Arc<dyn Fn(Vec<Change>, u64) + Send + Sync>;

/// What the interface needs of the node it belongs to.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub node: Arc<dyn Node>,
    pub on_change: OnChange,
    /// Which ids tenants may have, and get.
    pub ids: IdSource,
    /// Who may do what.
    pub access: AccessList,
}

/// The running node, as far as the interface shows it.
pub trait Node: Send + Sync {
    /// All processes' metrics in the Prometheus text format.
    fn metrics(&self) -> BoxFuture<'_, String>;
    fn health(&self) -> BoxFuture<'_, Health>;
    fn status(&self) -> BoxFuture<'_, serde_json::Value>;
    /// The keeper's tree of cells as JSON. None: it did not answer.
    fn cells(&self) -> BoxFuture<'_, Option<String>>;
    /// The keeper's instances as JSON. None: it did not answer.
    fn instances(&self) -> BoxFuture<'_, Option<String>>;
    /// Does this to the instance of a site. The answer is JSON; it comes when it is done.
    fn instance(&self, site: String, act: Act) -> BoxFuture<'_, Option<String>>;
    /// Runs this in an instance. The connection is from then on that of the command, as `ExecSaid` says. False: there is
    /// no keeper.
    fn exec(&self, exec: Exec, connection: OwnedFd) -> bool;
    /// What is known of the load of a site's application on this node, and what was decided because of it, as JSON.
    fn balance(&self, site: &str) -> serde_json::Value;
    /// Of whom the edge has requests that run or wait, as JSON. None: it did not answer.
    fn requests(&self) -> BoxFuture<'_, Option<String>>;
    /// What is asked of the cluster, or done to it. The answer is JSON; it comes when it is done.
    fn cluster(&self, ask: Ask) -> BoxFuture<'_, Result<serde_json::Value, Box<Problem>>>;
    /// Waits until edge and keeper serve by this revision of the store. False: they do not yet.
    fn serves_by(&self, revision: u64) -> BoxFuture<'_, bool>;
    /// What the edge says of the request with this id, as JSON. None: it did not answer.
    fn explain(&self, id: String) -> BoxFuture<'_, Option<String>>;
}

/// Whether the node serves; `text` says what is wrong if it does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    pub ok: bool,
    pub text: String,
}

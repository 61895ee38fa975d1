//! The facts that a rule can read through one trait: the request, the node's cells and the store's
//! settings.
//!
//! Not here: the source of the data (`edge` implements the trait), the functions of rules for it
//! (`api`), decisions (`verdict`).

use std::borrow::Cow;

use nagaya_records::cell::{CellName, CgroupController, RequestUsage};

/// A text about the request. `None` if it is not known in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TextFact {
    /// Host of the request, in lower case and without its port.
    Hostname,
    Method,
    /// Decoded, without the query.
    Path,
    /// Path and query as received, not decoded.
    RawTarget,
    /// The part after `?`, not decoded; `None` without one.
    Query,
    /// `HTTP/1.1`.
    Protocol,
    /// `http` or `https`.
    Scheme,
    /// As the client wrote it, with its port.
    Authority,
    DocumentRoot,
    /// The file or script of the request, as an absolute path.
    Filename,
    /// The path after the script.
    PathInfo,
    /// The name as which a client authenticated.
    User,
    ClientIp,
    LocalIp,
    Site,
    Tenant,
    RequestId,
    Node,
    /// Of the response.
    ContentType,
    /// `200 OK`.
    StatusLine,
}

/// A number about the request. `None` if it is not known in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumberFact {
    ClientPort,
    LocalPort,
    /// Bytes of the request's body, if its header section says so.
    ContentLength,
    Status,
    /// Bytes of the response's body sent so far.
    BytesOut,
    /// Requests on this connection before this one.
    Keepalives,
    /// When the request arrived, microseconds since 1970.
    ArrivedUs,
    /// Requests that run on the node, without those that wait.
    Running,
    /// Requests of all tenants that wait for their turn.
    Waiting,
    /// Requests of the site that run.
    SiteRunning,
    /// Requests in the site's own queue.
    SiteWaiting,
    /// Further requests of the site that may run at once, within its own limit, its tenant's and
    /// the node's.
    SiteFree,
    /// Predicted wait of a request that joined the site's queue now, milliseconds.
    SiteWaitMs,
}

/// One value of a setting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScalarValue<'a> {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
}

/// Queries of one evaluation. Each method is called only when a rule needs it, and answers from
/// memory: an evaluation blocks its thread.
pub trait FactSource {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>>;

    fn number(&self, number: NumberFact) -> Option<i64>;

    /// Returns the first field of the request with this name, in any case.
    fn header_in(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str));

    /// Returns the first field of the response with this name. `None` before there is a response.
    fn header_out(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str));

    /// Passes the setting with this key: a plain value once, without a field; an object's values
    /// each with its field. Returns false if the store has no such setting.
    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool;

    /// Returns whether a named cell of the node with this name exists under this controller.
    fn cell_exists(&self, controller: CgroupController, name: &CellName) -> bool;

    /// Returns a number that changes after any named cell has come or gone; 0 if that is not
    /// counted.
    fn cells_moment(&self) -> u64 {
        0
    }

    /// Returns a named cell's value of its controller's key, by its v1 name: `cpu.shares`,
    /// `cpuacct.usage`.
    fn cell_value(&self, controller: CgroupController, name: &CellName, key: &str) -> Option<String>;

    /// Returns the request's usage so far; complete in the log phase. `None` if nothing ran in a
    /// cell.
    fn usage(&self) -> Option<RequestUsage>;

    /// Returns the time since the request arrived, microseconds.
    fn elapsed_us(&self) -> u64;

    /// Returns the machine's load averages of 1, 5 and 15 minutes.
    fn load(&self) -> [f64; 3];

    /// Returns a variable of the request's programs.
    fn env(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_env(&self, each: &mut dyn FnMut(&str, &str));

    fn is_tls(&self) -> bool;

    /// Returns whether the site's application rests, so that a request would wake it. False for
    /// sites of other kinds.
    fn site_rests(&self) -> bool;
}

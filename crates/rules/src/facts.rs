//! What a rule can read: the request, the node's cells and the settings of the store, through one trait.
//!
//! Not here: where the answers come from (`edge` implements the trait), what rules call to get them (`api`), what they
//! decide (`verdict`).

use std::borrow::Cow;

use nagaya_cmdb::cell::{CellName, Controller, Usage};

/// A text about the request. What is not known in a phase is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Text {
    /// Of the request, lower-case and without its port.
    Hostname,
    Method,
    /// Decoded, without the query.
    Path,
    /// As it came: path and query, not decoded.
    RawTarget,
    /// What follows `?`, not decoded; `None` without one.
    Query,
    /// `HTTP/1.1`.
    Protocol,
    /// `http` or `https`.
    Scheme,
    /// As the client wrote it, with its port.
    Authority,
    DocumentRoot,
    /// The file or script the request is for, as an absolute path.
    Filename,
    /// What follows the script in the path.
    PathInfo,
    /// The name a client authenticated as.
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

/// A number about the request. What is not known in a phase is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Number {
    ClientPort,
    LocalPort,
    /// Bytes of the request's body, where its head says so.
    ContentLength,
    Status,
    /// Bytes of the response's body sent so far.
    BytesOut,
    /// Requests this connection had before this one.
    Keepalives,
    /// When the request arrived, microseconds since 1970.
    ArrivedUs,
    /// Requests the node is working on, those that wait left out.
    Running,
    /// Requests that wait their turn, of all tenants.
    Waiting,
    /// Requests of the site that run.
    SiteRunning,
    /// Requests in the site's own line.
    SiteWaiting,
    /// So many more requests of the site may run at once: what its bound, its tenant's and the node's leave.
    SiteFree,
    /// The wait that one who came into the site's line now is predicted, milliseconds.
    SiteWaitMs,
}

/// One value of a setting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar<'a> {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
}

/// What one evaluation can ask. Each method is called only when a rule asks, and answers from memory: an evaluation
/// holds up its thread.
pub trait Facts {
    fn text(&self, text: Text) -> Option<Cow<'_, str>>;

    fn number(&self, number: Number) -> Option<i64>;

    /// The first field of the request with this name, in whatever case.
    fn header_in(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str));

    /// The first field of the response with this name. `None` before there is a response.
    fn header_out(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_header_out(&self, each: &mut dyn FnMut(&str, &str));

    /// Shows the setting with this key: a plain value once, without a field; an object's values each with its field.
    /// False if the store has no such setting.
    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, Scalar<'_>)) -> bool;

    /// Whether a named cell of the node with this name is there under this controller.
    fn cell_exists(&self, controller: Controller, name: &CellName) -> bool;

    /// A number that is another one after any named cell has come or gone; 0 if that is not counted.
    fn cells_moment(&self) -> u64 {
        0
    }

    /// What a named cell has for a key of its controller, by its v1 name: `cpu.shares`, `cpuacct.usage`.
    fn cell_value(&self, controller: Controller, name: &CellName, key: &str) -> Option<String>;

    /// What the request used so far; complete in the log phase. `None` where nothing ran in a cell.
    fn usage(&self) -> Option<Usage>;

    /// Since the request arrived, microseconds.
    fn elapsed_us(&self) -> u64;

    /// The machine's load averages of 1, 5 and 15 minutes.
    fn load(&self) -> [f64; 3];

    /// A variable the request's programs will see.
    fn env(&self, name: &str) -> Option<Cow<'_, str>>;

    fn each_env(&self, each: &mut dyn FnMut(&str, &str));

    fn is_tls(&self) -> bool;

    /// Whether the site's application rests, so that a request would wake it. False for sites of other kinds.
    fn site_rests(&self) -> bool;
}

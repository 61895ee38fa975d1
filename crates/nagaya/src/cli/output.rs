//! Shared parts of the commands about records: access, errors, and printing. Access is to a running
//! node, or to the store's file if none runs.
//!
//! Not here: the commands themselves (`site`, `tenant`, `transfer`).

use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use nagaya_base::Code;
use nagaya_records::instance::ExecCommand;
use nagaya_store::{RedbStore, StoreError};
use serde_json::Value;

use crate::admin::{AdminApi, AdminClient, ClientError, ProblemReply};
use crate::tenant_ids::IdSource;

/// How often a change that others overtake is repeated. Each time another change has succeeded.
const UPDATE_TRIES_MAX: u32 = 20;

/// Records requested at once when a listing is printed.
const PAGE_LEN: usize = nagaya_store::PAGE_LEN_MAX;

/// Widest column of a table, in characters; longer texts are cut, `--json` shows them whole.
const COLUMN_WIDTH_MAX: usize = 48;

/// The same for a last column of sentences: nothing has to line up after it.
const SENTENCE_WIDTH_MAX: usize = 1000;

/// Where the commands find the records.
#[derive(Debug, Clone)]
pub struct RecordSource {
    pub admin_socket: PathBuf,
    pub store: PathBuf,
    /// If this exists, the node is a member of a cluster, and its store is a copy.
    pub member: PathBuf,
    /// Which ids tenants may have and get, if no node runs.
    pub ids: IdSource,
}

#[derive(Debug, clap::Args, Clone, Copy)]
pub struct OutputFormat {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error("{0}")]
    Refused(Box<ProblemReply>),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("{}: a process has the store open, but no node answers at {}: wait for the other command, or look whether the node hangs", store.display(), socket.display())]
    LockedWithoutNode { store: PathBuf, socket: PathBuf },
    #[error("there is no store at {} and no node at {}: start one with `nagaya serve`, or add a tenant", store.display(), socket.display())]
    NoStore { store: PathBuf, socket: PathBuf },
    #[error(
        "this node is a member of a cluster and does not run: start it, or make the change on another node"
    )]
    StoppedMember,
    #[error("{0}: as root, or as a member of the socket's group?")]
    Client(ClientError),
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("writing the output: {0}")]
    Output(io::Error),
    #[error("{0}")]
    Usage(String),
    /// A command in an instance that did not run to its end.
    #[error("{error}")]
    Exec { error: String, code: String },
    /// The same, whatever the reason.
    #[error("{0}")]
    NotRun(Box<CliError>),
    #[error("tenant '{tenant}' is stored, but its home {} was not made: {error}", home.display())]
    Home { tenant: String, home: PathBuf, error: io::Error },
}

impl CliError {
    /// Returns the code. `None` if the message is about the command line itself.
    pub fn code(&self) -> Option<String> {
        match self {
            Self::Refused(problem) => Some(problem.code.clone()),
            Self::Store(error) => Some(error.code().to_string()),
            Self::LockedWithoutNode { .. } => Some(Code(202).to_string()),
            Self::NoStore { .. } | Self::Client(_) => Some(Code(221).to_string()),
            Self::StoppedMember => Some(Code(245).to_string()),
            Self::Exec { code, .. } => Some(code.clone()),
            Self::NotRun(error) => error.code(),
            Self::Home { .. } => Some(Code(222).to_string()),
            Self::Io { .. } | Self::Output(_) | Self::Usage(_) => None,
        }
    }

    /// Returns the exit code. Status 1 means refused or failed. Status 2 means that the command
    /// line was wrong. Status 125 means that a command was not run, which differs from its own
    /// status.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::NotRun(_) => 125,
            Self::Usage(_) => 2,
            _ => 1,
        })
    }

    /// Returns whether a reader, such as `head`, closed its end: that is not a failure.
    fn is_closed_pipe(&self) -> bool {
        match self {
            Self::Output(error) | Self::Client(ClientError::Write(error)) => {
                error.kind() == io::ErrorKind::BrokenPipe
            }
            Self::Store(StoreError::Visitor(error)) => error.kind() == io::ErrorKind::BrokenPipe,
            _ => false,
        }
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(problem) => Self::Refused(problem),
            other => Self::Client(other),
        }
    }
}

/// Turns a command's end into an exit code. With `--json` an error is a JSON object on standard
/// error. Otherwise the caller prints it.
pub fn end(result: Result<(), CliError>, format: OutputFormat) -> Result<ExitCode, CliError> {
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is_closed_pipe() => Ok(ExitCode::SUCCESS),
        Err(error) if format.json => {
            let report = match &error {
                CliError::Refused(problem) => serde_json::to_value(problem).unwrap_or_default(),
                other => serde_json::json!({ "code": other.code(), "detail": other.to_string() }),
            };
            // If standard error is closed, too, nothing can be reported.
            let _ = writeln!(io::stderr(), "{report}");
            Ok(error.exit_code())
        }
        Err(error) => Err(error),
    }
}

// === Access ===

/// A node over its socket, or the store's own file. Both answer the same requests.
pub enum RecordAccess {
    Node(AdminClient),
    File(AdminApi),
}

/// Whether a command may make a missing store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessIntent {
    Look,
    Change,
}

impl RecordAccess {
    pub fn open(place: &RecordSource, intent: AccessIntent) -> Result<Self, CliError> {
        match AdminClient::open(&place.admin_socket) {
            Ok(client) => return Ok(Self::Node(client)),
            // No socket, or a leftover of a killed node.
            Err(ClientError::Connect { error, .. }) if is_absent(&error) => {}
            Err(error) => return Err(error.into()),
        }
        let store = place.store.clone();
        let socket = place.admin_socket.clone();
        let exists = store.try_exists().map_err(|error| CliError::Io { path: store.clone(), error })?;
        if !exists && intent == AccessIntent::Look {
            return Err(CliError::NoStore { store, socket });
        }
        if intent == AccessIntent::Change && place.member.exists() {
            return Err(CliError::StoppedMember);
        }
        match RedbStore::open(&store) {
            // Without a node, changes need no notification: a node reads the store when it starts.
            Ok(opened) => {
                Ok(Self::File(AdminApi::new(Arc::new(opened), place.ids.clone(), Arc::new(|_, _| {}))))
            }
            Err(StoreError::Locked { .. }) => Err(CliError::LockedWithoutNode { store, socket }),
            Err(error) => Err(error.into()),
        }
    }

    pub fn get(&self, path: &str) -> Result<ChangeReply, CliError> {
        self.call(Method::GET, path, None, None)
    }

    /// Adds a record. Refused if it exists already.
    pub fn add(&self, path: &str, record: &Value) -> Result<ChangeReply, CliError> {
        self.call(Method::PUT, path, Some((header::IF_NONE_MATCH, "*")), Some(record))
    }

    /// Adds a record, or replaces any earlier one.
    pub fn put(&self, path: &str, record: &Value) -> Result<ChangeReply, CliError> {
        self.call(Method::PUT, path, None, Some(record))
    }

    /// Changes the present record. A faster writer is not overwritten: then the change is made
    /// again on that record.
    pub fn update(
        &self,
        path: &str,
        mut change: impl FnMut(&Value) -> Result<Value, CliError>,
    ) -> Result<ChangeReply, CliError> {
        let outdated = Code(216).to_string();
        let mut tries = 0;
        loop {
            let seen = self.get(path)?;
            tries += 1;
            match self.replace(path, &change(&seen.0)?, &seen) {
                Err(CliError::Refused(problem)) if problem.code == outdated && tries < UPDATE_TRIES_MAX => {}
                done => return done,
            }
        }
    }

    /// Replaces a record. Refused if anything changed since `seen`.
    fn replace(&self, path: &str, record: &Value, seen: &ChangeReply) -> Result<ChangeReply, CliError> {
        let tag = seen.0["revision"].to_string();
        self.call(Method::PUT, path, Some((header::IF_MATCH, &tag)), Some(record))
    }

    pub fn remove(&self, path: &str) -> Result<ChangeReply, CliError> {
        self.call(Method::DELETE, path, None, None)
    }

    /// Passes every record of a listing whose name comes after `after`, page by page. `path` has
    /// the conditions, if any, after a `?`.
    pub fn each(
        &self,
        path: &str,
        key: &str,
        after: Option<&str>,
        mut print: impl FnMut(&Value) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let joint = if path.contains('?') { '&' } else { '?' };
        let condition = |last: &str| format!("&after={}", escape(last));
        let mut after = after.map_or_else(String::new, condition);
        loop {
            let page = self.get(&format!("{path}{joint}limit={PAGE_LEN}{after}"))?;
            let records = page.0[key].as_array().map_or(&[][..], Vec::as_slice);
            records.iter().try_for_each(&mut print)?;
            match page.0["next"].as_str() {
                Some(last) if records.len() == PAGE_LEN => after = condition(last),
                _ => return Ok(()),
            }
        }
    }

    /// Sends a command that is not a record.
    fn post(&self, path: &str) -> Result<ChangeReply, CliError> {
        self.call(Method::POST, path, None, None)
    }

    fn call(
        &self,
        method: Method,
        path: &str,
        condition: Option<(header::HeaderName, &str)>,
        record: Option<&Value>,
    ) -> Result<ChangeReply, CliError> {
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
        if let Some((name, value)) = condition {
            request = request.header(name, value);
        }
        let body = record.map_or_else(Bytes::new, |record| record.to_string().into());
        // A name that no record can have need not be requested.
        let request = request.body(body).map_err(|error| CliError::Usage(format!("{path}: {error}")))?;
        let response = match self {
            Self::Node(client) => client.call(request)?,
            Self::File(api) => api.answer(&request),
        };
        let reply = ChangeReply::read(&response)?;
        say_unserved(reply.0["served"].as_bool());
        Ok(reply)
    }
}

/// Warns that a change is stored but not in effect yet. The change is not lost, so this is not a
/// failure.
pub fn say_unserved(served: Option<bool>) {
    if served == Some(false) {
        // If standard error is closed, nothing can be reported.
        let _ = writeln!(
            io::stderr(),
            "stored, but this node does not serve by it yet: 'nagaya status' shows by which revision each process does"
        );
    }
}

/// Queries a node, which must run, for its own state.
pub fn ask_node(place: &RecordSource, path: &str) -> Result<Value, CliError> {
    running(place)?.get(path).map(|reply| reply.0)
}

/// Orders a node, which must run, to do something.
pub fn tell_node(place: &RecordSource, path: &str) -> Result<Value, CliError> {
    running(place)?.post(path).map(|reply| reply.0)
}

/// Sends a node, which must run, the data for an action.
pub fn send_node(place: &RecordSource, path: &str, body: &Value) -> Result<Value, CliError> {
    running(place)?.call(Method::POST, path, None, Some(body)).map(|reply| reply.0)
}

/// Makes a node, which must run, delete something.
pub fn remove_at_node(place: &RecordSource, path: &str) -> Result<Value, CliError> {
    running(place)?.remove(path).map(|reply| reply.0)
}

/// Requests a command in an instance from a node, which must run. The returned connection reports
/// its outcome.
pub fn exec_on_node(place: &RecordSource, site: &str, exec: &ExecCommand) -> Result<OwnedFd, CliError> {
    Ok(client(place)?.exec(&escape(site).to_string(), exec)?)
}

fn running(place: &RecordSource) -> Result<RecordAccess, CliError> {
    client(place).map(RecordAccess::Node)
}

fn client(place: &RecordSource) -> Result<AdminClient, CliError> {
    AdminClient::open(&place.admin_socket).map_err(|error| match error {
        ClientError::Connect { path, error } if is_absent(&error) => CliError::Usage(format!(
            "no node runs here: nothing answers at {}; `nagaya serve` starts one",
            path.display()
        )),
        other => other.into(),
    })
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// The JSON of a reply that is not an error.
#[derive(Debug)]
pub struct ChangeReply(pub Value);

impl ChangeReply {
    fn read(response: &Response<Bytes>) -> Result<Self, CliError> {
        let broken = |detail: String| {
            let status = StatusCode::BAD_GATEWAY;
            CliError::Refused(ProblemReply::request(status, format!("the node answered {detail}")))
        };
        if response.status().is_success() {
            return serde_json::from_slice(response.body())
                .map(Self)
                .map_err(|error| broken(error.to_string()));
        }
        match serde_json::from_slice(response.body()) {
            Ok(problem) => Err(CliError::Refused(problem)),
            Err(_) => Err(broken(response.status().to_string())),
        }
    }
}

/// Returns a name as part of a request's path.
pub fn escape(name: &str) -> impl std::fmt::Display + '_ {
    percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC)
}

// === Printing ===

pub fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").map_err(CliError::Output)
}

/// Prints one JSON value, in several lines on a terminal.
pub fn print_json(value: &Value) -> Result<(), CliError> {
    if io::stdout().is_terminal() { print(&format!("{value:#}")) } else { print(&value.to_string()) }
}

/// Prints all records as one JSON array, written as they come.
pub fn print_json_list(
    access: &RecordAccess,
    path: &str,
    key: &str,
    after: Option<&str>,
) -> Result<(), CliError> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut before = "[\n";
    access.each(path, key, after, |record| {
        let done = write!(out, "{before}{record}").map_err(CliError::Output);
        before = ",\n";
        done
    })?;
    let end = if before == "[\n" { "[]" } else { "\n]" };
    writeln!(out, "{end}").and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Rows in columns as wide as their longest text. A listing is held whole, for the widths.
#[derive(Debug)]
pub struct TableColumns {
    rows: Vec<Vec<String>>,
    last_width_max: usize,
}

impl TableColumns {
    pub fn new(head: &[&str]) -> Self {
        let rows = vec![head.iter().map(ToString::to_string).collect()];
        Self { rows, last_width_max: COLUMN_WIDTH_MAX }
    }

    /// Makes a table whose last column has sentences, which are shown whole.
    pub fn with_sentences(head: &[&str]) -> Self {
        Self { last_width_max: SENTENCE_WIDTH_MAX, ..Self::new(head) }
    }

    pub fn add(&mut self, row: impl IntoIterator<Item = String>) {
        let last = self.rows[0].len() - 1;
        let width_max = |at: usize| if at == last { self.last_width_max } else { COLUMN_WIDTH_MAX };
        let row = row.into_iter().enumerate().map(|(at, text)| shorten(&text, width_max(at))).collect();
        self.rows.push(row);
    }

    pub fn print(&self) -> Result<(), CliError> {
        let mut out = io::BufWriter::new(io::stdout().lock());
        self.write(&mut out).and_then(|()| out.flush()).map_err(CliError::Output)
    }

    /// Returns the printed text.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        self.write(&mut out).expect("writing to memory does not fail");
        String::from_utf8(out).expect("columns are text")
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (text, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{text:width$}  "));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn shorten(text: &str, width_max: usize) -> String {
    match text.char_indices().nth(width_max) {
        None => text.to_owned(),
        Some(_) => text.chars().take(width_max - 1).chain(['…']).collect(),
    }
}

/// Prints a record as `key  value` lines; a nested field is named `backend.root`.
pub fn print_fields(record: &Value) -> Result<(), CliError> {
    let columns = fields(record);
    let width = columns.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    for (key, value) in columns {
        print(format!("{key:width$}  {value}").trim_end())?;
    }
    Ok(())
}

/// Returns each value of a record with its dotted name.
pub fn fields(record: &Value) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    flatten("", record, &mut fields);
    fields
}

fn flatten(prefix: &str, value: &Value, to: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&name, value, to);
            }
        }
        Value::Array(items) => {
            to.push((prefix.into(), items.iter().map(in_a_list).collect::<Vec<_>>().join(" ")))
        }
        other => to.push((prefix.into(), plain(other))),
    }
}

/// Returns one value of a list: an object as `key=value` pairs.
fn in_a_list(value: &Value) -> String {
    match value {
        Value::Object(_) => {
            let pairs = fields(value).into_iter().map(|(key, value)| format!("{key}={value}"));
            pairs.collect::<Vec<_>>().join(",")
        }
        other => plain(other),
    }
}

/// Returns a text without its quotes; `-` for null.
pub fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the two largest units, such as `3d 4h`.
pub fn short_time(time: Duration) -> String {
    let parts = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let mut rest = time.as_secs();
    let mut words = Vec::new();
    for (unit, name) in parts {
        if rest >= unit || (unit == 1 && words.is_empty()) {
            words.push(format!("{}{name}", rest / unit));
            rest %= unit;
        }
    }
    words.truncate(2);
    words.join(" ")
}

/// Returns a time such as `950 us`, `12.3 ms`, `4.2 s`.
pub fn short_us(us: u64) -> String {
    let tenths = |unit: u64| format!("{}.{}", us / unit, us % unit * 10 / unit);
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{} ms", tenths(1_000)),
        _ => format!("{} s", tenths(1_000_000)),
    }
}

/// Returns an outside text without characters that a terminal would obey.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_long_texts_are_cut() {
        let mut columns = TableColumns::new(&["NAME", "HOSTS"]);
        columns.add(["a".into(), "x".repeat(100)]);
        columns.add(["longer".into(), "y".into()]);
        let mut out = Vec::new();
        columns.write(&mut out).unwrap();
        let cut = "x".repeat(COLUMN_WIDTH_MAX - 1);
        let expected = format!("NAME    HOSTS\na       {cut}…\nlonger  y\n");
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn sentences_in_the_last_column_are_whole() {
        let mut columns = TableColumns::with_sentences(&["SITE", "NOTE"]);
        let sentence = "it has no image: ".to_owned() + &"why ".repeat(30);
        columns.add(["x".repeat(100), sentence.trim_end().into()]);
        let cut = "x".repeat(COLUMN_WIDTH_MAX - 1);
        assert_eq!(columns.text().lines().nth(1), Some(&*format!("{cut}…  {}", sentence.trim_end())));
        columns.add(["s".into(), "x".repeat(SENTENCE_WIDTH_MAX * 2)]);
        assert_eq!(columns.rows[2][1].chars().count(), SENTENCE_WIDTH_MAX);
    }

    #[test]
    fn nested_fields_get_dotted_names() {
        let shown = |value| fields(&value);
        let found = shown(serde_json::json!({"a": {"b": ["x", 1]}, "c": "t", "d": null}));
        assert_eq!(found, [("a.b".into(), "x 1".into()), ("c".into(), "t".into()), ("d".into(), "-".into())]);
        let found = shown(serde_json::json!({"needs": [{"site": "a", "n": 1}, {"site": "b", "n": null}]}));
        assert_eq!(found, [("needs".into(), "n=1,site=a n=-,site=b".into())]);
    }

    #[test]
    fn short_durations_have_the_unit_that_fits() {
        let shown = [0, 999, 1_000, 12_345, 999_999, 1_000_000, 61_500_000].map(short_us);
        assert_eq!(shown, ["0 us", "999 us", "1.0 ms", "12.3 ms", "999.9 ms", "1.0 s", "61.5 s"]);
    }

    #[test]
    fn long_times_have_their_two_largest_units() {
        let shown = [0, 59, 61, 93_784].map(|seconds| short_time(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0s", "59s", "1m 1s", "1d 2h"]);
    }
}

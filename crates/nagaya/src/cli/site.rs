//! `nagaya site`: host names and how they are served.
//!
//! Not here: what a site must be (`nagaya_cmdb::check`), where commands work (`output`).

mod admission;
mod file_warnings;

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Map, Value, json};

use self::admission::AdmissionFields;
use super::output::{self, Access, CliError, Columns, Format, Intent, Place, escape, plain};
use super::{limits, tenant, transfer};

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Add a site
    Add(Add),
    /// Change a site; only what is given changes, a list is replaced as a whole
    Set(Set),
    /// Show one site
    Show {
        name: String,
        #[command(flatten)]
        format: Format,
    },
    /// List sites
    List {
        /// Only this tenant's
        #[arg(long)]
        tenant: Option<String>,
        /// Only those with exactly this host pattern
        #[arg(long)]
        host: Option<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Remove a site; its files stay
    Remove {
        name: String,
        #[command(flatten)]
        format: Format,
    },
    /// Add or replace tenants and sites from JSON lines, all or none
    Import(transfer::Import),
    /// Write all tenants and sites as JSON lines
    Export(transfer::Export),
}

#[derive(Debug, clap::Args)]
pub struct Add {
    pub name: String,
    #[command(flatten)]
    pub format: Format,
    #[command(flatten)]
    pub fields: Box<Fields>,
}

#[derive(Debug, clap::Args)]
pub struct Set {
    pub name: String,
    /// Take a field out, so that its default holds again: any option of this command without its dashes, limits or
    /// request-limits for all of them
    #[arg(long, value_name = "FIELD")]
    pub unset: Vec<String>,
    #[command(flatten)]
    pub format: Format,
    #[command(flatten)]
    pub fields: Box<Fields>,
}

/// No shell reads a command, so that one word with spaces is the name of one program.
fn check_command(words: &[String]) -> Result<(), CliError> {
    let [word] = words else { return Ok(()) };
    if !word.trim().contains(char::is_whitespace) || Path::new(word).exists() {
        return Ok(());
    }
    let rest = word.split_whitespace().map(|word| format!(" {}", word.escape_debug())).collect::<String>();
    Err(CliError::Usage(format!(
        "--command '{word}' is one word, the name of a program with spaces in it; no shell splits it: write the words behind '--', as last on the line: --{rest}"
    )))
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Kind {
    /// Files
    Static,
    /// Files, of which some are programs run once per request
    Cgi,
    /// Files, of which *.php run in workers
    Php,
    /// A server that already runs at --address
    Http,
    /// A server that nagaya starts with --command
    App,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Listen {
    /// A Unix socket: {socket} in the command, $NAGAYA_SOCKET
    Socket,
    /// A loopback port: {port} in the command, $PORT
    Port,
    /// A Unix socket that it gets as descriptor 3: LISTEN_FDS=1
    Fd,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Buffering {
    /// The server gets a request when all of its body is there
    On,
    /// The server gets the body as it comes, and is held as long
    Off,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ImageMemory {
    /// Mapped for Apache, PHP-FPM, Python and Ruby, copied for others
    Auto,
    /// Pages are read as they are touched
    Mapped,
    /// All pages are read at each wake
    Copied,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ImageWhen {
    /// Right after its start, before its first visitor
    Start,
    /// Each time it goes to rest: what it has in memory survives, secrets too
    Rest,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Protocol {
    /// HTTP/1.1
    Http,
    /// FastCGI: it gets requests for scripts, and the other files below --root are served without it
    #[value(name = "fastcgi")]
    FastCgi,
}

#[derive(Debug, Default, clap::Args)]
pub struct Fields {
    /// The tenant it belongs to
    #[arg(long)]
    pub tenant: Option<String>,
    /// Host it answers to: name, *.name, or * for the default site; repeat for more
    #[arg(long = "host", value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Only requests at or below this path are its
    #[arg(long)]
    pub path: Option<String>,
    /// How it is served
    #[arg(long, value_enum)]
    pub backend: Option<Kind>,
    /// Requests that may run at once
    #[arg(long, value_name = "N")]
    pub max_concurrent: Option<u32>,
    /// Variable for its programs (cgi, php, app); repeat for more
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Longest run of a program or wait for a server, in seconds
    #[arg(long, value_name = "N")]
    pub timeout_seconds: Option<u32>,
    #[command(flatten)]
    pub files: FileFields,
    #[command(flatten)]
    pub server: ServerFields,
    #[command(flatten)]
    pub instance: InstanceFields,
    #[command(flatten)]
    pub admission: AdmissionFields,
    #[command(flatten)]
    pub limits: limits::CellFields,
    #[command(flatten)]
    pub request_limits: limits::RequestFields,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Files (static, cgi, php, app with --protocol fastcgi)")]
pub struct FileFields {
    /// Document root, beneath the tenant's home if relative
    #[arg(long, value_name = "DIR")]
    pub root: Option<String>,
    /// File tried for a directory; repeat for more
    #[arg(long, value_name = "FILE")]
    pub index: Vec<String>,
    /// List directories without an index
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub listing: Option<bool>,
    /// File for an error status, like 404=404.html; repeat for more
    #[arg(long = "error-document", value_name = "STATUS=FILE", value_parser = pair)]
    pub error_documents: Vec<(String, String)>,
    /// Cache-Control of files
    #[arg(long, value_name = "VALUE")]
    pub cache_control: Option<String>,
    /// Path below the root that is never served, like /data; repeat for more
    #[arg(long, value_name = "PATH")]
    pub deny: Vec<String>,
    /// Program that also gets every path without a file, like index.php
    #[arg(long, value_name = "FILE")]
    pub front_controller: Option<String>,
    /// File name ending of programs, like .cgi; repeat for more. Of php they come beside .php
    #[arg(long = "extension", value_name = "ENDING")]
    pub extensions: Vec<String>,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Servers (http, app)")]
pub struct ServerFields {
    /// Where it runs (http): host:port, [v6]:port or unix:/path
    #[arg(long)]
    pub address: Option<String>,
    /// Host it is sent instead of the client's (http)
    #[arg(long, value_name = "HOST")]
    pub host_header: Option<String>,
    /// Trailer field of requests to pass on: none without this; repeat for more
    #[arg(long = "request-trailer", value_name = "NAME")]
    pub request_trailers: Vec<String>,
    /// Whether request bodies are taken in before it gets the request (http, app)
    #[arg(long, value_enum)]
    pub request_buffering: Option<Buffering>,
    /// Program or argument (app); repeat for each word, or write all words behind '--'
    #[arg(long = "command", value_name = "WORD", allow_hyphen_values = true)]
    pub command: Vec<String>,
    /// The command of an application, word by word
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "command")]
    pub command_words: Vec<String>,
    /// Working directory (app), beneath the tenant's home if relative
    #[arg(long, value_name = "DIR")]
    pub directory: Option<String>,
    /// What it listens on (app)
    #[arg(long, value_enum)]
    pub listen: Option<Listen>,
    /// What is spoken with it (app)
    #[arg(long, value_enum)]
    pub protocol: Option<Protocol>,
    /// How long it may take until it listens (app), in seconds
    #[arg(long, value_name = "N")]
    pub start_seconds: Option<u32>,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Instance (app)")]
pub struct InstanceFields {
    /// Variable whose value is in a file, like KEY=secrets/key.txt, beneath the tenant's home if relative; repeat for more
    #[arg(long = "secret", value_name = "NAME=FILE", value_parser = pair)]
    pub secrets: Vec<(String, String)>,
    /// Directory that it sees as /, read-only, instead of the node's own; or an image: oci:LAYOUT or oci:LAYOUT:TAG
    #[arg(long, value_name = "DIR|oci:LAYOUT[:TAG]")]
    pub base: Option<String>,
    /// Directory it may write to, instead of its working directory; repeat for more
    #[arg(long, value_name = "DIR")]
    pub writable: Vec<String>,
    /// Path that must answer before requests go in
    #[arg(long, value_name = "PATH")]
    pub ready: Option<String>,
    /// How long that may take once it listens, in seconds
    #[arg(long, value_name = "N")]
    pub ready_within_seconds: Option<u32>,
    /// Name of what is deployed: with another one a new image is taken
    #[arg(long, value_name = "NAME")]
    pub release: Option<String>,
    /// How its memory comes back from an image (app)
    #[arg(long, value_enum)]
    pub image_memory: Option<ImageMemory>,
    /// Which moment of it its image is of (app)
    #[arg(long, value_enum)]
    pub image_when: Option<ImageWhen>,
    /// File, or directory with its entries, that ends its image when it changes; beneath --directory if relative; repeat for more
    #[arg(long, value_name = "PATH")]
    pub image_watch: Vec<String>,
    /// Path that nagaya gets, or signal (SIGHUP) that it gets, when it is back from an image; repeat for more
    #[arg(long, value_name = "PATH|SIGNAL")]
    pub after_wake: Vec<String>,
    /// Path that nagaya gets before it takes an image, so that what it loads is in it; repeat for more
    #[arg(long = "warm-up", value_name = "PATH")]
    pub warm_up: Vec<String>,
    /// Seconds without a request until it rests at quiet, frozen, reclaimed, image or cold; or never; repeat for more
    #[arg(long, value_name = "TIER=SECONDS", value_parser = idle)]
    pub idle: Vec<(String, Value)>,
    /// 1: it is started without a request, and always has its processes
    #[arg(long, value_name = "N")]
    pub min: Option<u32>,
    /// How many of it there may be, each on another node of a cluster: 1 to 16
    #[arg(long, value_name = "N")]
    pub max: Option<u32>,
    /// How far its CPU limit (--cpu) may be raised, while it is short of CPU and by rules (boost), like 200%
    #[arg(long, value_name = "SHARE")]
    pub cpu_max: Option<String>,
    /// What of the network it reaches: none, nat (all outside of the node, by TCP), host (all that the node does), or HOST:PORT; repeat for more
    #[arg(long, value_name = "PLACE")]
    pub outbound: Vec<String>,
    /// Socket of a database on this node, and where it finds it if that is not the same path; repeat for more
    #[arg(long = "database", value_name = "SOCKET[=PATH]")]
    pub databases: Vec<String>,
}

/// A step of rest and its time. Which steps there are is for the store's checks.
fn idle(text: &str) -> Result<(String, Value), String> {
    let (tier, time) = pair(text)?;
    let time = match time.parse::<u32>() {
        Ok(seconds) => json!(seconds),
        Err(_) if time == "never" => json!(time),
        Err(_) => return Err("after '=' comes a number of seconds, or never".into()),
    };
    Ok((tier, time))
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("it has no '='")?;
    Ok((key.into(), value.into()))
}

pub fn run(command: Command, place: &Place) -> Result<ExitCode, CliError> {
    let (result, format) = match &command {
        Command::Add(add) => (self::add(add, place), add.format),
        Command::Set(set) => (self::set(set, place), set.format),
        Command::Show { name, format } => (show(name, *format, place), *format),
        Command::List { tenant, host, format } => {
            (list(tenant.as_deref(), host.as_deref(), *format, place), *format)
        }
        Command::Remove { name, format } => (remove(name, *format, place), *format),
        Command::Import(import) => (transfer::import(import, place), import.format),
        Command::Export(export) => (transfer::export(export, place), export.format),
    };
    output::end(result, format)
}

fn path(name: &str) -> String {
    format!("/v1/sites/{}", escape(name))
}

fn add(command: &Add, place: &Place) -> Result<(), CliError> {
    let mut record = Map::new();
    command.fields.apply(&mut record)?;
    for (key, option) in [("tenant", "--tenant"), ("hosts", "--host"), ("backend", "--backend")] {
        let missing = match key {
            "backend" => record[key].get("kind").is_none(),
            _ => !record.contains_key(key),
        };
        if missing {
            return Err(CliError::Usage(format!("a site needs {option}: see `nagaya site add --help`")));
        }
    }
    let access = Access::open(place, Intent::Change)?;
    let reply = access.add(&path(&command.name), &Value::Object(record))?;
    warn_of_files(&access, &reply.0["site"]);
    // The site is there; without its tenant there is only less to say.
    let tenant = format!("/v1/tenants/{}", escape(&plain(&reply.0["site"]["tenant"])));
    if let Ok(found) = access.get(&tenant) {
        tenant::warn_of_home(&found.0["tenant"]);
    }
    match command.format.json {
        true => output::print_json(&reply.0["site"]),
        false => output::print(&format!("site '{}' was added", command.name)),
    }
}

fn set(command: &Set, place: &Place) -> Result<(), CliError> {
    let access = Access::open(place, Intent::Change)?;
    let reply = access.update(&path(&command.name), |seen| {
        let mut record = seen["site"].as_object().cloned().unwrap_or_default();
        for field in &command.unset {
            unset(field, &mut record)?;
        }
        command.fields.apply(&mut record)?;
        Ok(Value::Object(record))
    })?;
    if command.fields.backend.is_some() || command.fields.files.root.is_some() {
        warn_of_files(&access, &reply.0["site"]);
    }
    if command.format.json {
        return output::print_json(&reply.0["site"]);
    }
    let what = if reply.0["changed"] == json!(true) { "was changed" } else { "is as it was" };
    output::print(&format!("site '{}' {what}", command.name))
}

/// Says what of the site's files would surprise who comes from another server. It is a help, so nothing of it can fail.
fn warn_of_files(access: &Access, site: &Value) {
    let tenant =
        site["tenant"].as_str().and_then(|name| access.get(&format!("/v1/tenants/{}", escape(name))).ok());
    let home = tenant.as_ref().and_then(|reply| reply.0["tenant"]["home"].as_str());
    for warning in file_warnings::warn_of_files(site, home) {
        eprintln!("nagaya: warning: {warning}");
    }
}

/// Takes an option's field out of the record, or out of its backend.
fn unset(option: &str, record: &mut Map<String, Value>) -> Result<(), CliError> {
    if limits::unset(option, record)? || admission::unset(option, record)? {
        return Ok(());
    }
    let field = match option {
        "error-document" => "error_documents".into(),
        "extension" => "extensions".into(),
        "request-trailer" => "request_trailers".into(),
        "secret" => "secrets".into(),
        "database" => "databases".into(),
        "tenant" | "host" | "backend" => {
            return Err(CliError::Usage(format!("a site cannot be without {option}")));
        }
        other => other.replace('-', "_"),
    };
    let backend = record.get_mut("backend").and_then(Value::as_object_mut);
    let removed = backend
        .and_then(|backend| {
            let own = backend.remove(&field);
            own.or_else(|| backend.get_mut("files")?.as_object_mut()?.remove(&field))
        })
        .or_else(|| record.remove(&field));
    match removed {
        Some(_) => Ok(()),
        None => Err(CliError::Usage(format!("the site has no {option} to unset"))),
    }
}

impl Fields {
    /// Puts what was given into the record. Fields that do not go with its kind are left for the store's
    /// checks to name.
    fn apply(&self, record: &mut Map<String, Value>) -> Result<(), CliError> {
        check_command(&self.server.command)?;
        put(record, "tenant", self.tenant.as_ref());
        put_list(record, "hosts", &self.hosts);
        put(record, "path", self.path.as_ref());
        put(record, "max_concurrent", self.max_concurrent);
        self.limits.apply(record);
        self.request_limits.apply(record);
        let old = record.remove("backend");
        let mut backend = old.as_ref().and_then(Value::as_object).cloned().unwrap_or_default();
        if let Some(kind) = self.backend {
            backend = for_kind(backend, kind);
        }
        if backend.get("kind").and_then(Value::as_str) == Some(word(&Kind::App).as_str()) {
            let mut files = part(&backend, "files");
            self.files.apply(&mut files);
            put_part(&mut backend, "files", files);
        } else {
            self.files.apply(&mut backend);
        }
        self.server.apply(&mut backend);
        self.instance.apply(&mut backend);
        put_map(&mut backend, "env", &self.env);
        put(&mut backend, "timeout_seconds", self.timeout_seconds);
        record.insert("backend".into(), Value::Object(backend));
        self.admission.apply(record)
    }
}

impl FileFields {
    fn apply(&self, backend: &mut Map<String, Value>) {
        put(backend, "root", self.root.as_ref());
        put_list(backend, "index", &self.index);
        put(backend, "listing", self.listing);
        put_map(backend, "error_documents", &self.error_documents);
        put(backend, "cache_control", self.cache_control.as_ref());
        put_list(backend, "deny", &self.deny);
        put(backend, "front_controller", self.front_controller.as_ref());
        put_list(backend, "extensions", &self.extensions);
    }
}

impl ServerFields {
    fn apply(&self, backend: &mut Map<String, Value>) {
        put(backend, "address", self.address.as_ref());
        put(backend, "host_header", self.host_header.as_ref());
        put_list(backend, "request_trailers", &self.request_trailers);
        put(backend, "request_buffering", self.request_buffering.map(|buffering| word(&buffering)));
        put_list(backend, "command", &self.command);
        put_list(backend, "command", &self.command_words);
        put(backend, "directory", self.directory.as_ref());
        put(backend, "listen", self.listen.map(|listen| word(&listen)));
        put(backend, "protocol", self.protocol.map(|protocol| word(&protocol)));
        put(backend, "start_seconds", self.start_seconds);
    }
}

impl InstanceFields {
    /// What has parts of its own, like `idle`, keeps those that were not given.
    fn apply(&self, backend: &mut Map<String, Value>) {
        put_map(backend, "secrets", &self.secrets);
        put(backend, "base", self.base.as_ref());
        put_list(backend, "writable", &self.writable);
        let mut ready = part(backend, "ready");
        put(&mut ready, "path", self.ready.as_ref());
        put(&mut ready, "within_seconds", self.ready_within_seconds);
        put_part(backend, "ready", ready);
        put(backend, "release", self.release.as_ref());
        put(backend, "image_memory", self.image_memory.map(|memory| word(&memory)));
        put(backend, "image_when", self.image_when.map(|when| word(&when)));
        put_list(backend, "image_watch", &self.image_watch);
        put_list(backend, "after_wake", &self.after_wake);
        put_list(backend, "warm_up", &self.warm_up);
        let mut steps = part(backend, "idle");
        steps.extend(self.idle.iter().cloned());
        put_part(backend, "idle", steps);
        put(backend, "min", self.min);
        put(backend, "max", self.max);
        put(backend, "cpu_max", self.cpu_max.as_ref());
        put(backend, "outbound", outbound(&self.outbound));
        let databases: Vec<Value> = self.databases.iter().map(|text| database(text)).collect();
        put(backend, "databases", (!databases.is_empty()).then_some(databases));
    }
}

/// A word alone is one of those a record knows; which, is for the store's checks.
fn outbound(places: &[String]) -> Option<Value> {
    match places {
        [] => None,
        [word] if !word.contains(':') => Some(json!(word)),
        places => Some(json!(places)),
    }
}

fn database(text: &str) -> Value {
    match text.split_once('=') {
        Some((socket, inside)) => json!({ "socket": socket, "inside": inside }),
        None => json!({ "socket": text }),
    }
}

fn part(backend: &Map<String, Value>, key: &str) -> Map<String, Value> {
    backend.get(key).and_then(Value::as_object).cloned().unwrap_or_default()
}

fn put_part(backend: &mut Map<String, Value>, key: &str, part: Map<String, Value>) {
    put(backend, key, (!part.is_empty()).then_some(part));
}

/// The kinds with files share their fields; between others nothing is kept.
fn for_kind(old: Map<String, Value>, kind: Kind) -> Map<String, Value> {
    let had_files = matches!(old.get("kind").and_then(Value::as_str), Some("static" | "cgi" | "php"));
    let same = old.get("kind").and_then(Value::as_str) == Some(word(&kind).as_str());
    let has_files = matches!(kind, Kind::Static | Kind::Cgi | Kind::Php);
    let mut backend = if same || (had_files && has_files) { old } else { Map::new() };
    backend.insert("kind".into(), word(&kind).into());
    backend
}

/// The word an option's value has on the command line, which is the record's word too.
fn word(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn put(to: &mut Map<String, Value>, key: &str, value: Option<impl serde::Serialize>) {
    if let Some(value) = value {
        to.insert(key.into(), json!(value));
    }
}

fn put_list(to: &mut Map<String, Value>, key: &str, values: &[String]) {
    put(to, key, (!values.is_empty()).then_some(values));
}

fn put_map(to: &mut Map<String, Value>, key: &str, pairs: &[(String, String)]) {
    let map = || pairs.iter().map(|(key, value)| (key.clone(), json!(value))).collect::<Map<_, _>>();
    put(to, key, (!pairs.is_empty()).then(map));
}

fn show(name: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let reply = Access::open(place, Intent::Look)?.get(&path(name))?;
    match format.json {
        true => output::print_json(&reply.0["site"]),
        false => output::print_fields(&reply.0["site"]),
    }
}

fn list(tenant: Option<&str>, host: Option<&str>, format: Format, place: &Place) -> Result<(), CliError> {
    let access = Access::open(place, Intent::Look)?;
    let conditions: Vec<String> = [("tenant", tenant), ("host", host)]
        .into_iter()
        .filter_map(|(key, value)| value.map(|value| format!("{key}={}", escape(value))))
        .collect();
    let path = match conditions.is_empty() {
        true => "/v1/sites".to_owned(),
        false => format!("/v1/sites?{}", conditions.join("&")),
    };
    if format.json {
        return output::print_json_list(&access, &path, "sites", None);
    }
    let mut columns = Columns::new(&["NAME", "TENANT", "BACKEND", "PATH", "HOSTS"]);
    access.each(&path, "sites", None, |site| {
        let hosts = site["hosts"].as_array().map_or(&[][..], Vec::as_slice);
        let hosts: Vec<String> = hosts.iter().map(plain).collect();
        let path = site["path"].as_str().unwrap_or("/").to_owned();
        let (name, tenant) = (plain(&site["name"]), plain(&site["tenant"]));
        columns.add([name, tenant, plain(&site["backend"]["kind"]), path, hosts.join(" ")]);
        Ok(())
    })?;
    columns.print()
}

fn remove(name: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let reply = Access::open(place, Intent::Look)?.remove(&path(name))?;
    match format.json {
        true => output::print_json(&reply.0),
        false => output::print(&format!("site '{name}' was removed")),
    }
}

#[cfg(test)]
mod tests;

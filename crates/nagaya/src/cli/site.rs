//! `nagaya site`: host names and how they are served.
//!
//! Not here: the check of a site (`nagaya_records::check`), access to records (`output`).

mod admission;
mod file_warnings;

use std::path::Path;
use std::process::ExitCode;

use nix::unistd::Uid;
use serde_json::{Map, Value, json};

use self::admission::AdmissionFields;
use super::output::{
    self, AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource, TableColumns, escape, plain,
};
use super::{limits, tenant, transfer};

#[derive(Debug, clap::Subcommand)]
pub enum SiteArgs {
    /// Add a site
    Add(SiteAddArgs),
    /// Change a site. Only the given options change; a given list replaces the whole old list
    Set(SiteSetArgs),
    /// Show one site
    Show {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// List sites
    List {
        /// Show only sites of this tenant
        #[arg(long)]
        tenant: Option<String>,
        /// Show only sites with exactly this host pattern
        #[arg(long)]
        host: Option<String>,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Remove a site; its files stay
    Remove {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Add or replace tenants and sites from JSON lines: all of them, or none
    Import(transfer::ImportArgs),
    /// Write all tenants and sites as JSON lines
    Export(transfer::ExportArgs),
}

#[derive(Debug, clap::Args)]
pub struct SiteAddArgs {
    pub name: String,
    #[command(flatten)]
    pub format: OutputFormat,
    #[command(flatten)]
    pub fields: Box<SiteFields>,
}

#[derive(Debug, clap::Args)]
pub struct SiteSetArgs {
    pub name: String,
    /// Remove a field, so that its default applies again. FIELD is an option of this command
    /// without its dashes. limits and request-limits remove all of those limits
    #[arg(long, value_name = "FIELD")]
    pub unset: Vec<String>,
    #[command(flatten)]
    pub format: OutputFormat,
    #[command(flatten)]
    pub fields: Box<SiteFields>,
}

/// Checks a command. No shell reads it, so one word with spaces is the name of one program.
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
pub enum BackendKind {
    /// Files
    Static,
    /// Files; some of them are programs that run once per request
    Cgi,
    /// Files; those named *.php run in workers
    Php,
    /// A server that already runs at --address
    Http,
    /// A server that nagaya starts with --command
    App,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ListenArg {
    /// A Unix socket: {socket} in the command, $NAGAYA_SOCKET
    Socket,
    /// A loopback port: {port} in the command, $PORT
    Port,
    /// A Unix socket that already listens, passed as descriptor 3: LISTEN_FDS=1
    Fd,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum BufferingArg {
    /// The server gets a request after its whole body arrived
    On,
    /// The server gets the body as it arrives, and is occupied for that time
    Off,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum LinkPolicyArg {
    /// Follow links of the tenant or of root to the tenant's own files in its home
    Own,
    /// Follow none; such a path gets 403
    None,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ImageMemory {
    /// Mapped for Apache, PHP-FPM, Python and Ruby, copied for others
    Auto,
    /// Each page is read when it is first used
    Mapped,
    /// All pages are read at each wake
    Copied,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ImageWhen {
    /// Right after its start, before its first request
    Start,
    /// Each time it goes to rest; everything in its memory survives, also secrets
    Rest,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum ProtocolArg {
    /// HTTP/1.1
    Http,
    /// FastCGI: it gets the requests for scripts; nagaya serves the other files below --root
    #[value(name = "fastcgi")]
    FastCgi,
}

#[derive(Debug, Default, clap::Args)]
pub struct SiteFields {
    /// Tenant that owns the site
    #[arg(long)]
    pub tenant: Option<String>,
    /// Host name of the site: name, *.name, or * for the default site; repeat for more
    #[arg(long = "host", value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Path of the site: it gets only requests at or below this path
    #[arg(long)]
    pub path: Option<String>,
    /// How the site is served
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// Requests that may run at once
    #[arg(long, value_name = "N")]
    pub max_concurrent: Option<u32>,
    /// Longest duration of a request body, a response or a tunnel, in seconds
    #[arg(long, value_name = "N")]
    pub stream_seconds: Option<u32>,
    /// Environment variable for its programs (cgi, php, app); repeat for more
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Longest run of a program or wait for a server, in seconds
    #[arg(long, value_name = "N")]
    pub timeout_seconds: Option<u32>,
    /// Time that a program may run on after its client left (cgi, php; default 30), in seconds. For
    /// app: time that it may compute after its last request before it rests anyway (default 600)
    #[arg(long, value_name = "N")]
    pub linger_seconds: Option<u32>,
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
    /// Document root; below the tenant's home if relative
    #[arg(long, value_name = "DIR")]
    pub root: Option<String>,
    /// Index file of a directory; repeat for more
    #[arg(long, value_name = "FILE")]
    pub index: Vec<String>,
    /// List directories without an index
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub listing: Option<bool>,
    /// File for an error status, like 404=404.html; repeat for more
    #[arg(long = "error-document", value_name = "STATUS=FILE", value_parser = pair)]
    pub error_documents: Vec<(String, String)>,
    /// Cache-Control field of files
    #[arg(long, value_name = "VALUE")]
    pub cache_control: Option<String>,
    /// Path below the root that is never served, like /data; repeat for more
    #[arg(long, value_name = "PATH")]
    pub deny: Vec<String>,
    /// Symbolic links below the root that may lead out of it (default own)
    #[arg(long, value_enum)]
    pub links: Option<LinkPolicyArg>,
    /// Program that also gets every path without a file, like index.php
    #[arg(long, value_name = "FILE")]
    pub front_controller: Option<String>,
    /// File name ending of programs, like .cgi; repeat for more. For php, .php always counts as
    /// well
    #[arg(long = "extension", value_name = "ENDING")]
    pub extensions: Vec<String>,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Servers (http, app)")]
pub struct ServerFields {
    /// Address of the server (http): host:port, [v6]:port or unix:/path
    #[arg(long)]
    pub address: Option<String>,
    /// Host field that the server gets instead of the client's (http)
    #[arg(long, value_name = "HOST")]
    pub host_header: Option<String>,
    /// Trailer field of requests to pass on; repeat for more. Without this option none is passed on
    #[arg(long = "request-trailer", value_name = "NAME")]
    pub request_trailers: Vec<String>,
    /// Read the whole request body before the server gets the request (http, app)
    #[arg(long, value_enum)]
    pub request_buffering: Option<BufferingArg>,
    /// Program or argument (app); repeat for each word, or write all words after '--'
    #[arg(long = "command", value_name = "WORD", allow_hyphen_values = true)]
    pub command: Vec<String>,
    /// The command of an application, word by word
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "command")]
    pub command_words: Vec<String>,
    /// Working directory (app); below the tenant's home if relative
    #[arg(long, value_name = "DIR")]
    pub directory: Option<String>,
    /// Socket on which the application listens (app)
    #[arg(long, value_enum)]
    pub listen: Option<ListenArg>,
    /// Protocol that the application speaks (app)
    #[arg(long, value_enum)]
    pub protocol: Option<ProtocolArg>,
    /// Time limit of a start, until the application listens (app), in seconds
    #[arg(long, value_name = "N")]
    pub start_seconds: Option<u32>,
    /// Time from SIGTERM until the application is killed (app; default 2), in seconds
    #[arg(long, value_name = "N")]
    pub stop_seconds: Option<u32>,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Instance (app)")]
pub struct InstanceFields {
    /// Environment variable whose value is in a file, like KEY=secrets/key.txt; repeat for more. A
    /// relative path is below the tenant's home
    #[arg(long = "secret", value_name = "NAME=FILE", value_parser = pair)]
    pub secrets: Vec<(String, String)>,
    /// Directory that the application sees as /, read-only, instead of the node's own. Or an OCI
    /// image: oci:LAYOUT or oci:LAYOUT:TAG
    #[arg(long, value_name = "DIR|oci:LAYOUT[:TAG]")]
    pub base: Option<String>,
    /// Kernel of its own, in a virtual machine: node for the newest one of this node that is made
    /// for virtual machines (linux-image-cloud-amd64), or a file
    #[arg(long, value_name = "node|FILE")]
    pub kernel: Option<String>,
    /// Memory of that machine, like 128M
    #[arg(long, value_name = "SIZE")]
    pub vm_memory: Option<String>,
    /// Number of its processors
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u32>,
    /// Directory the application may write to, instead of its working directory; repeat for more
    #[arg(long, value_name = "DIR")]
    pub writable: Vec<String>,
    /// Path that must respond before the application gets requests
    #[arg(long, value_name = "PATH")]
    pub ready: Option<String>,
    /// Time limit of --ready, from when the application listens, in seconds
    #[arg(long, value_name = "N")]
    pub ready_within_seconds: Option<u32>,
    /// Name of the deployed release; a new name causes a new image
    #[arg(long, value_name = "NAME")]
    pub release: Option<String>,
    /// How a wake loads memory from the image (app)
    #[arg(long, value_enum)]
    pub image_memory: Option<ImageMemory>,
    /// When the image is taken (app)
    #[arg(long, value_enum)]
    pub image_when: Option<ImageWhen>,
    /// File, or directory with its direct entries; repeat for more. When it changes, the image is
    /// no longer used. A relative path is below --directory
    #[arg(long, value_name = "PATH")]
    pub image_watch: Vec<String>,
    /// Query that nagaya sends at each wake to a database of --database; repeat for other sockets.
    /// If the result differs, the image is no longer used. KIND is mysql, postgresql or redis.
    /// DATABASE is [USER@]NAME, or - for none
    #[arg(long, value_name = "KIND SOCKET DATABASE QUESTION", value_parser = image_tag)]
    pub image_tag: Vec<ImageTag>,
    /// Path that nagaya requests, or signal that it sends (like SIGHUP), after a wake from an
    /// image; repeat for more
    #[arg(long, value_name = "PATH|SIGNAL")]
    pub after_wake: Vec<String>,
    /// Path that nagaya requests before it takes an image, so that the image contains the loaded
    /// code; repeat for more
    #[arg(long = "warm-up", value_name = "PATH")]
    pub warm_up: Vec<String>,
    /// Seconds without a request until it rests at a tier, or never; repeat for more. TIER is
    /// quiet, frozen, reclaimed, image or cold
    #[arg(long, value_name = "TIER=SECONDS", value_parser = idle)]
    pub idle: Vec<(String, Value)>,
    /// Least number of instances, 0 or 1. With 1 the application starts without a request and
    /// always has its processes
    #[arg(long, value_name = "N")]
    pub min: Option<u32>,
    /// Most instances at once, each on another node of a cluster: 1 to 16
    #[arg(long, value_name = "N")]
    pub max: Option<u32>,
    /// Highest raised CPU limit, like 200%. Its limit (--cpu) is raised while it is short of CPU,
    /// or by a rule's boost
    #[arg(long, value_name = "SHARE")]
    pub cpu_max: Option<String>,
    /// Network access: none, nat (everything outside the node, by TCP), host (everything that the
    /// node reaches), or HOST:PORT; repeat for more
    #[arg(long, value_name = "PLACE")]
    pub outbound: Vec<String>,
    /// Socket of a database on this node; repeat for more. PATH is where the application sees it,
    /// if not at the same path
    #[arg(long = "database", value_name = "SOCKET[=PATH]")]
    pub databases: Vec<String>,
}

/// Parses a tier of rest and its time. The store's checks know the valid tiers.
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

pub fn run(command: SiteArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let (result, format) = match &command {
        SiteArgs::Add(add) => (self::add(add, place), add.format),
        SiteArgs::Set(set) => (self::set(set, place), set.format),
        SiteArgs::Show { name, format } => (show(name, *format, place), *format),
        SiteArgs::List { tenant, host, format } => {
            (list(tenant.as_deref(), host.as_deref(), *format, place), *format)
        }
        SiteArgs::Remove { name, format } => (remove(name, *format, place), *format),
        SiteArgs::Import(import) => (transfer::import(import, place), import.format),
        SiteArgs::Export(export) => (transfer::export(export, place), export.format),
    };
    output::end(result, format)
}

fn path(name: &str) -> String {
    format!("/v1/sites/{}", escape(name))
}

fn add(command: &SiteAddArgs, place: &RecordSource) -> Result<(), CliError> {
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
    let access = RecordAccess::open(place, AccessIntent::Change)?;
    let reply = access.add(&path(&command.name), &Value::Object(record))?;
    warn_of_files(&access, &reply.0["site"]);
    // The site is stored; without its tenant there are only fewer warnings.
    let tenant = format!("/v1/tenants/{}", escape(&plain(&reply.0["site"]["tenant"])));
    if let Ok(found) = access.get(&tenant) {
        tenant::warn_of_home(&found.0["tenant"]);
    }
    if command.format.json {
        output::print_json(&reply.0["site"])
    } else {
        output::print(&format!("site '{}' was added", command.name))
    }
}

fn set(command: &SiteSetArgs, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Change)?;
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

/// Warns of files that would surprise people who come from another server. It is only a help, so it
/// never fails.
fn warn_of_files(access: &RecordAccess, site: &Value) {
    let home = home_of(access, site);
    for warning in file_warnings::warn_of_files(site, home.as_deref()) {
        eprintln!("nagaya: warning: {warning}");
    }
    warn_of_hidden_root(site, home.as_deref());
}

/// Warns of a document root that programs do not see. Without root they see what all see.
fn warn_of_hidden_root(site: &Value, home: Option<&str>) {
    let warning = file_warnings::warn_of_hidden_root(site, home);
    if let Some(warning) = warning.filter(|_| Uid::effective().is_root()) {
        eprintln!("nagaya: warning: {warning}");
    }
}

/// Returns the home of the site's tenant, if that can be found out.
fn home_of(access: &RecordAccess, site: &Value) -> Option<String> {
    let tenant = access.get(&format!("/v1/tenants/{}", escape(site["tenant"].as_str()?))).ok()?;
    tenant.0["tenant"]["home"].as_str().map(str::to_owned)
}

/// Removes the tags of databases; the databases stay, and are not queried any more.
fn unset_image_tags(record: &mut Map<String, Value>) -> Result<(), CliError> {
    let databases =
        record.get_mut("backend").and_then(|backend| backend.get_mut("databases")?.as_array_mut());
    let databases = databases.into_iter().flatten().filter_map(Value::as_object_mut);
    let removed = databases.filter_map(|database| database.remove("tag")).count();
    match removed {
        0 => Err(CliError::Usage("the site has no image-tag to unset".into())),
        _ => Ok(()),
    }
}

/// Removes an option's field from the record, or from its backend.
fn unset(option: &str, record: &mut Map<String, Value>) -> Result<(), CliError> {
    if limits::unset(option, record)? || admission::unset(option, record)? {
        return Ok(());
    }
    if option == "image-tag" {
        return unset_image_tags(record);
    }
    let field = match option {
        "error-document" => "error_documents".into(),
        "extension" => "extensions".into(),
        "request-trailer" => "request_trailers".into(),
        "secret" => "secrets".into(),
        "database" => "databases".into(),
        // Without a kernel of its own there is no machine.
        "kernel" => "machine".into(),
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

impl SiteFields {
    /// Puts the given options into the record. The store's checks report fields that do not go with
    /// its kind.
    fn apply(&self, record: &mut Map<String, Value>) -> Result<(), CliError> {
        check_command(&self.server.command)?;
        put(record, "tenant", self.tenant.as_ref());
        put_list(record, "hosts", &self.hosts);
        put(record, "path", self.path.as_ref());
        put(record, "max_concurrent", self.max_concurrent);
        put(record, "stream_seconds", self.stream_seconds);
        self.limits.apply(record);
        self.request_limits.apply(record);
        let old = record.remove("backend");
        let mut backend = old.as_ref().and_then(Value::as_object).cloned().unwrap_or_default();
        if let Some(kind) = self.backend {
            backend = for_kind(backend, kind);
        }
        if backend.get("kind").and_then(Value::as_str) == Some(word(&BackendKind::App).as_str()) {
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
        put(&mut backend, "linger_seconds", self.linger_seconds);
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
        put(backend, "links", self.links.map(|links| word(&links)));
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
        put(backend, "stop_seconds", self.stop_seconds);
    }
}

impl InstanceFields {
    /// Puts the options into the backend. A field with parts, such as `idle`, keeps the parts that
    /// were not given.
    fn apply(&self, backend: &mut Map<String, Value>) {
        put_map(backend, "secrets", &self.secrets);
        put(backend, "base", self.base.as_ref());
        let mut machine = part(backend, "machine");
        put(&mut machine, "kernel", self.kernel.as_ref());
        put(&mut machine, "memory", self.vm_memory.as_ref());
        put(&mut machine, "vcpus", self.vcpus);
        put_part(backend, "machine", machine);
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
        self.image_tag.iter().for_each(|tag| tag.put(backend));
    }
}

/// Returns the value of `outbound`. A word alone is one that a record knows; the store's checks
/// know which.
fn outbound(places: &[String]) -> Option<Value> {
    match places {
        [] => None,
        [word] if !word.contains(':') => Some(json!(word)),
        places => Some(json!(places)),
    }
}

/// A query, and its database's socket.
#[derive(Debug, Clone)]
pub struct ImageTag {
    socket: String,
    tag: Value,
}

impl ImageTag {
    /// Puts it into the database with this socket. A database that the record does not have is
    /// added.
    fn put(&self, backend: &mut Map<String, Value>) {
        let databases = backend.entry("databases").or_insert_with(|| json!([]));
        let Some(databases) = databases.as_array_mut() else { return };
        match databases.iter_mut().find(|database| database["socket"] == self.socket.as_str()) {
            Some(database) => database["tag"] = self.tag.clone(),
            None => databases.push(json!({ "socket": self.socket, "tag": self.tag })),
        }
    }
}

/// Parses a query; the store checks it.
fn image_tag(text: &str) -> Result<ImageTag, String> {
    let mut rest = text;
    let mut word = || {
        let (word, behind) = rest.trim_start().split_once(char::is_whitespace)?;
        rest = behind;
        Some(word)
    };
    let (Some(kind), Some(socket), Some(database)) = (word(), word(), word()) else {
        return Err(
            "write four parts, such as 'mysql /run/mysqld/mysqld.sock blog SELECT version FROM settings'"
                .into(),
        );
    };
    let (user, name) = database.split_once('@').map_or((None, database), |(user, name)| (Some(user), name));
    let mut tag = json!({ "kind": kind, "ask": rest.trim() });
    if let Some(user) = user {
        tag["user"] = json!(user);
    }
    if name != "-" {
        tag["database"] = json!(name);
    }
    Ok(ImageTag { socket: socket.to_owned(), tag })
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

/// Returns the fields to keep. The kinds with files share their fields; between other kinds nothing
/// is kept.
fn for_kind(old: Map<String, Value>, kind: BackendKind) -> Map<String, Value> {
    let had_files = matches!(old.get("kind").and_then(Value::as_str), Some("static" | "cgi" | "php"));
    let same = old.get("kind").and_then(Value::as_str) == Some(word(&kind).as_str());
    let has_files = matches!(kind, BackendKind::Static | BackendKind::Cgi | BackendKind::Php);
    let mut backend = if same || (had_files && has_files) { old } else { Map::new() };
    backend.insert("kind".into(), word(&kind).into());
    backend
}

/// Returns the word of an option's value on the command line, which is also the record's word.
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

fn show(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    let reply = access.get(&path(name))?;
    warn_of_hidden_root(&reply.0["site"], home_of(&access, &reply.0["site"]).as_deref());
    if format.json { output::print_json(&reply.0["site"]) } else { output::print_fields(&reply.0["site"]) }
}

fn list(
    tenant: Option<&str>,
    host: Option<&str>,
    format: OutputFormat,
    place: &RecordSource,
) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    let conditions: Vec<String> = [("tenant", tenant), ("host", host)]
        .into_iter()
        .filter_map(|(key, value)| value.map(|value| format!("{key}={}", escape(value))))
        .collect();
    let path = if conditions.is_empty() {
        "/v1/sites".to_owned()
    } else {
        format!("/v1/sites?{}", conditions.join("&"))
    };
    if format.json {
        return output::print_json_list(&access, &path, "sites", None);
    }
    let mut columns = TableColumns::new(&["NAME", "TENANT", "BACKEND", "PATH", "HOSTS"]);
    access.each(&path, "sites", None, |site| {
        let hosts = site["hosts"].as_array().map_or(&[][..], Vec::as_slice);
        let hosts: Vec<String> = hosts.iter().map(plain).collect();
        let path = site["path"].as_str().unwrap_or("/").to_owned();
        let name = plain(&site["name"]);
        let tenant = plain(&site["tenant"]);
        columns.add([name, tenant, plain(&site["backend"]["kind"]), path, hosts.join(" ")]);
        Ok(())
    })?;
    columns.print()
}

fn remove(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let reply = RecordAccess::open(place, AccessIntent::Look)?.remove(&path(name))?;
    if format.json {
        output::print_json(&reply.0)
    } else {
        output::print(&format!("site '{name}' was removed"))
    }
}

#[cfg(test)]
mod tests;

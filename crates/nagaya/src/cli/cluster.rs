//! `nagaya cluster`, `nagaya nodes`, `nagaya placements`: a node becomes one of several, and what runs where.
//!
//! Not here: doing it (`supervisor::cluster`), the paths it is asked for by (`admin::cluster`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use super::output::{self, CliError, Columns, Format, Place, escape, plain, short_time};
use crate::admin::{Found, Join};
use crate::supervisor::Etcd;

/// Placements printed if nobody says how many.
const PLACEMENTS_SHOWN: usize = 1_000;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Make a cluster of this node: its records move to etcd, while it serves on
    Init {
        /// A name for the cluster; several may share one etcd
        #[arg(long, default_value = "main")]
        name: String,
        #[command(flatten)]
        store: StoreAt,
        #[command(flatten)]
        format: Format,
    },
    /// Make this node a member of a cluster: it takes over the cluster's records
    Join {
        /// The cluster's name
        #[arg(long, default_value = "main")]
        name: String,
        #[command(flatten)]
        store: StoreAt,
        /// File with what `nagaya cluster token` prints on a member; `-` is standard input
        #[arg(long, value_name = "FILE")]
        token_file: PathBuf,
        /// Drop the tenants, sites, settings and rules this node has of its own
        #[arg(long)]
        discard: bool,
        #[command(flatten)]
        format: Format,
    },
    /// Show this node as a member, and how old what it knows is
    Status(Format),
    /// Change how this member reaches etcd, such as from http:// to https:// with a certificate
    Store {
        #[command(flatten)]
        store: StoreAt,
    },
    /// Write what this node knows in the place of values in etcd that do not count
    Repair,
    /// Print what another machine needs to join
    Token,
    /// Exchange the authority of the nodes' certificates: once, and after all nodes have new ones again with --finish
    Rotate {
        /// Certificates of the authority before are not believed any more
        #[arg(long)]
        finish: bool,
    },
    /// Move all applications away from a node, without an error, and place none there
    Drain { node: String },
    /// Let a drained node have applications again
    Undrain { node: String },
    /// Take a node out of the cluster
    Remove {
        node: String,
        /// Although applications are placed there: they move when somebody asks for them
        #[arg(long)]
        force: bool,
    },
    /// Move one application to another node, without an error
    Move {
        site: String,
        /// The node; else the best one
        #[arg(long, value_name = "NODE")]
        to: Option<String>,
    },
}

/// Where the cluster's records are.
#[derive(Debug, clap::Args)]
pub struct StoreAt {
    /// etcd's client addresses, as http://ADDRESS:PORT or https://NAME:PORT
    #[arg(long = "etcd", value_name = "URL", required = true, value_delimiter = ',')]
    pub endpoints: Vec<String>,
    /// PEM file of who signed etcd's certificate
    #[arg(long = "etcd-ca", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// PEM file of the certificate to show etcd
    #[arg(long = "etcd-cert", value_name = "FILE", requires = "key")]
    pub certificate: Option<PathBuf>,
    /// PEM file of its key
    #[arg(long = "etcd-key", value_name = "FILE", requires = "certificate")]
    pub key: Option<PathBuf>,
    #[arg(long = "etcd-user", value_name = "NAME", requires = "password")]
    pub user: Option<String>,
    #[arg(long = "etcd-password-file", value_name = "FILE", id = "password", requires = "user")]
    pub password: Option<PathBuf>,
    /// Although etcd is reached in clear text or without a login: whoever reaches it, each tenant too, can stop the cluster
    #[arg(long)]
    pub insecure: bool,
}

#[derive(Debug, clap::Args)]
pub struct Placements {
    /// Only those on this node
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
    /// Only sites after this one, in order of name
    #[arg(long, value_name = "SITE")]
    pub after: Option<String>,
    /// Show so many at most
    #[arg(long, value_name = "N", default_value_t = PLACEMENTS_SHOWN)]
    pub limit: usize,
    #[command(flatten)]
    pub format: Format,
}

impl StoreAt {
    fn read(&self) -> Result<Etcd, CliError> {
        Ok(Etcd {
            endpoints: self.endpoints.clone(),
            ca: self.ca.as_deref().map(file).transpose()?,
            certificate: self.certificate.as_deref().map(file).transpose()?,
            key: self.key.as_deref().map(file).transpose()?,
            user: self.user.clone(),
            password: self.password.as_deref().map(file).transpose()?.map(|text| text.trim().to_owned()),
            insecure: self.insecure,
        })
    }
}

/// The whole text of a file, or of standard input.
fn file(path: &Path) -> Result<String, CliError> {
    let read = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(path),
    };
    read.map_err(|error| CliError::Io { path: path.into(), error })
}

pub fn run(command: Command, place: &Place) -> Result<ExitCode, CliError> {
    let text = Format { json: false };
    let (result, format) = match &command {
        Command::Init { name, store, format } => (init(name, store, *format, place), *format),
        Command::Join { name, store, token_file, discard, format } => {
            (join(name, store, token_file, *discard, *format, place), *format)
        }
        Command::Status(format) => (status(*format, place), *format),
        Command::Store { store } => (change_store(store, place), text),
        Command::Repair => (repair(place), text),
        Command::Token => (token(place), text),
        Command::Rotate { finish } => (rotate(*finish, place), text),
        Command::Drain { node } => (drain(node, "drain", place), text),
        Command::Undrain { node } => (drain(node, "undrain", place), text),
        Command::Remove { node, force } => (remove(node, *force, place), text),
        Command::Move { site, to } => (relocate(site, to.as_deref(), place), text),
    };
    output::end(result, format)
}

fn init(name: &str, store: &StoreAt, format: Format, place: &Place) -> Result<(), CliError> {
    let found = Found { cluster: name.into(), etcd: store.read()? };
    let made = output::send_node(place, "/v1/cluster", &json!(found))?;
    if format.json {
        return output::print_json(&made);
    }
    output::print(&format!(
        "cluster '{name}' begins with node '{}' and its {} sites\nother machines join with: nagaya cluster join --name {name} --etcd {}{} --token-file FILE\nFILE: what `nagaya cluster token` prints here; keep it as secret as a key",
        plain(&made["node"]),
        made["sites"],
        store.endpoints.join(","),
        if store.insecure { " --insecure" } else { "" }
    ))
}

fn join(
    name: &str,
    store: &StoreAt,
    token_file: &Path,
    discard: bool,
    format: Format,
    place: &Place,
) -> Result<(), CliError> {
    let token = file(token_file)?.trim().to_owned();
    let join = Join { cluster: name.into(), etcd: store.read()?, token, discard };
    let made = output::send_node(place, "/v1/cluster/join", &json!(join))?;
    if format.json {
        return output::print_json(&made);
    }
    output::print(&format!(
        "node '{}' is a member of cluster '{name}', which has {} nodes and {} sites",
        plain(&made["node"]),
        made["nodes"],
        made["sites"]
    ))
}

fn status(format: Format, place: &Place) -> Result<(), CliError> {
    let status = output::ask_node(place, "/v1/cluster")?;
    if format.json { output::print_json(&status) } else { output::print_fields(&status) }
}

fn change_store(store: &StoreAt, place: &Place) -> Result<(), CliError> {
    let done = output::send_node(place, "/v1/cluster/store", &json!(store.read()?))?;
    output::print(match done["needs_restart"] == true {
        true => "this node reaches the store so when it is started anew: systemctl restart nagaya",
        false => "this node reaches the store so",
    })
}

fn repair(place: &Place) -> Result<(), CliError> {
    let done = output::tell_node(place, "/v1/cluster/repair")?;
    output::print(&format!(
        "{} values that did not count were written from what this node knows, {} were signed anew",
        done["repaired"], done["signed"]
    ))
}

fn token(place: &Place) -> Result<(), CliError> {
    output::print(&plain(&output::ask_node(place, "/v1/cluster/token")?["token"]))
}

fn rotate(finish: bool, place: &Place) -> Result<(), CliError> {
    let done = output::tell_node(place, &format!("/v1/cluster/authority?finish={finish}"))?;
    output::print(&match finish {
        false => format!(
            "authority {} is believed beside the one before; when `nagaya nodes` shows it at every node: nagaya cluster rotate --finish",
            done["serial"]
        ),
        true => format!("only authority {} is believed", done["serial"]),
    })
}

fn drain(node: &str, word: &str, place: &Place) -> Result<(), CliError> {
    let done = output::tell_node(place, &format!("/v1/nodes/{}/{word}", escape(node)))?;
    output::print(&match word {
        "drain" => format!(
            "node '{node}' gives away its {} applications; `nagaya nodes` shows how far it is",
            done["placements"]
        ),
        _ => format!("node '{node}' may have applications again"),
    })
}

fn remove(node: &str, force: bool, place: &Place) -> Result<(), CliError> {
    output::remove_at_node(place, &format!("/v1/nodes/{}?force={force}", escape(node)))?;
    output::print(&format!("node '{node}' is no member any more"))
}

fn relocate(site: &str, to: Option<&str>, place: &Place) -> Result<(), CliError> {
    let to = to.map_or_else(String::new, |to| format!("?to={}", escape(to)));
    let done = output::tell_node(place, &format!("/v1/placements/{}/move{to}", escape(site)))?;
    output::print(&format!("'{site}' runs on '{}' from epoch {} on", plain(&done["node"]), done["epoch"]))
}

/// `nagaya nodes`.
pub fn nodes(format: Format, place: &Place) -> Result<ExitCode, CliError> {
    output::end(list_nodes(format, place), format)
}

fn list_nodes(format: Format, place: &Place) -> Result<(), CliError> {
    let answer = output::ask_node(place, "/v1/nodes")?;
    if format.json {
        return output::print_json(&answer["nodes"]);
    }
    let mut columns = Columns::new(&[
        "NODE",
        "STATE",
        "PEER",
        "APPLICATIONS",
        "CPU",
        "MEMORY FREE",
        "REQUESTS/S",
        "WAKES",
        "AUTHORITY",
        "VERSION",
    ]);
    for node in answer["nodes"].as_array().into_iter().flatten() {
        let percent =
            |value: &Value| value.as_f64().map_or("?".into(), |part| format!("{:.0} %", part * 100.0));
        columns.add([
            plain(&node["name"]),
            plain(&node["state"]),
            plain(&node["peer"]),
            node["placements"].to_string(),
            percent(&node["cpu_used"]),
            percent(&node["memory_free"]),
            node["requests_per_second"].as_f64().map_or("?".into(), |rate| format!("{rate:.1}")),
            node["wakes"].as_u64().map_or("?".into(), |wakes| wakes.to_string()),
            node["authority"].as_u64().map_or("?".into(), |serial| serial.to_string()),
            plain(&node["version"]),
        ]);
    }
    columns.print()
}

/// The other nodes that have a site. One that it is still being started on has a `*`.
fn copies(told: &serde_json::Value) -> String {
    let name = |copy: &serde_json::Value| {
        let star = if copy["ready"] == true { "" } else { "*" };
        format!("{}{star}", plain(&copy["node"]))
    };
    let names: Vec<_> = told.as_array().into_iter().flatten().map(name).collect();
    if names.is_empty() { "-".into() } else { names.join(",") }
}

/// `nagaya placements`.
pub fn placements(command: &Placements, place: &Place) -> Result<ExitCode, CliError> {
    output::end(list_placements(command, place), command.format)
}

fn list_placements(command: &Placements, place: &Place) -> Result<(), CliError> {
    let mut path = format!("/v1/placements?limit={}", command.limit);
    for (key, value) in [("node", &command.node), ("after", &command.after)] {
        if let Some(value) = value {
            path += &format!("&{key}={}", escape(value));
        }
    }
    let answer = output::ask_node(place, &path)?;
    if command.format.json {
        return output::print_json(&answer["placements"]);
    }
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let mut columns =
        Columns::new(&["SITE", "NODE", "COPIES", "EPOCH", "SINCE", "WHY", "FALLBACK", "IMAGE HERE"]);
    for placement in answer["placements"].as_array().into_iter().flatten() {
        let since = Duration::from_millis(placement["since_ms"].as_u64().unwrap_or_default());
        columns.add([
            plain(&placement["site"]),
            plain(&placement["node"]),
            copies(&placement["copies"]),
            placement["epoch"].to_string(),
            short_time(now.saturating_sub(since)),
            plain(&placement["why"]),
            plain(&placement["fallback"]),
            if placement["image_here"] == true { "yes".into() } else { "no".into() },
        ]);
    }
    columns.print()
}

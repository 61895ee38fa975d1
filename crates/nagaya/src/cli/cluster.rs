//! `nagaya cluster`, `nagaya nodes`, `nagaya placements`: a node becomes one of several, and what runs where.
//!
//! Not here: doing it (`supervisor::cluster`), the paths it is asked for by (`admin::cluster`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use nagaya_base::units::parse_duration;

use super::etcd_certs::{self, EtcdCerts};
use super::output::{self, CliError, Columns, Format, Place, escape, plain, short_time};
use crate::admin::{Found, Join, NewToken};
use crate::supervisor::Etcd;

/// Placements printed if nobody says how many.
const PLACEMENTS_SHOWN: usize = 1_000;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Make certificates for etcd and for the nodes that use it, in files; no node need run
    EtcdCerts(EtcdCerts),
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
        /// The cluster's name, if it is to be checked: the token has it
        #[arg(long)]
        name: Option<String>,
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
    /// Print a token by which one other machine joins, once and within --ttl
    Token(TokenWords),
    /// Exchange all keys that members have: the authority of their certificates, and what they sign with. No request is lost
    Rotate {
        /// The keys before end now, not when all nodes have new certificates; refused while one has not
        #[arg(long)]
        finish: bool,
    },
    /// Move all applications away from a node, without an error, and place none there
    Drain { node: String },
    /// Let a drained node have applications again
    Undrain { node: String },
    /// Take a node out of the cluster, and every key that it has out of use
    Remove {
        node: String,
        /// Although applications are placed there: they move when somebody asks for them
        #[arg(long)]
        force: bool,
        /// Somebody else may have its keys: they end at once. Requests between the other nodes may wait meanwhile. Implies --force
        #[arg(long)]
        stolen: bool,
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
    /// etcd's client addresses, as https://ADDRESS:PORT; a join token has them
    #[arg(long = "etcd", value_name = "URL", value_delimiter = ',')]
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
pub struct TokenWords {
    /// The token is good for so long, as 30m or 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    pub ttl: Duration,
    /// PEM file of the certificate that the machine is to show etcd; the token has it then, and is as secret as its key for as long
    #[arg(long = "etcd-cert", value_name = "FILE", requires = "key")]
    pub certificate: Option<PathBuf>,
    /// PEM file of its key
    #[arg(long = "etcd-key", value_name = "FILE", requires = "certificate")]
    pub key: Option<PathBuf>,
    /// Show the tokens that are still good, without their secrets
    #[arg(long, conflicts_with_all = ["certificate", "key", "revoke"])]
    pub list: bool,
    /// End a token, by the id that --list shows
    #[arg(long, value_name = "ID", conflicts_with_all = ["certificate", "key"])]
    pub revoke: Option<String>,
    #[command(flatten)]
    pub format: Format,
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
    /// Where no token says it.
    fn refuse_none(&self) -> Result<(), CliError> {
        if self.endpoints.is_empty() {
            return Err(CliError::Usage("say where etcd is: --etcd https://ADDRESS:2379".into()));
        }
        Ok(())
    }

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
        Command::EtcdCerts(words) => (etcd_certs::run(words), text),
        Command::Init { name, store, format } => (init(name, store, *format, place), *format),
        Command::Join { name, store, token_file, discard, format } => {
            (join(name.as_deref(), store, token_file, *discard, *format, place), *format)
        }
        Command::Status(format) => (status(*format, place), *format),
        Command::Store { store } => (change_store(store, place), text),
        Command::Repair => (repair(place), text),
        Command::Token(words) => (token(words, place), words.format),
        Command::Rotate { finish } => (rotate(*finish, place), text),
        Command::Drain { node } => (drain(node, "drain", place), text),
        Command::Undrain { node } => (drain(node, "undrain", place), text),
        Command::Remove { node, force, stolen } => (remove(node, *force, *stolen, place), text),
        Command::Move { site, to } => (relocate(site, to.as_deref(), place), text),
    };
    output::end(result, format)
}

fn init(name: &str, store: &StoreAt, format: Format, place: &Place) -> Result<(), CliError> {
    store.refuse_none()?;
    let found = Found { cluster: name.into(), etcd: store.read()? };
    let made = output::send_node(place, "/v1/cluster", &json!(found))?;
    if format.json {
        return output::print_json(&made);
    }
    output::print(&format!(
        "cluster '{name}' begins with node '{}' and its {} sites\neach other machine joins with: nagaya cluster join{} --token-file FILE\nFILE: what `nagaya cluster token` prints here, one for each machine",
        plain(&made["node"]),
        made["sites"],
        if store.insecure { " --insecure" } else { "" },
    ))
}

fn join(
    name: Option<&str>,
    store: &StoreAt,
    token_file: &Path,
    discard: bool,
    format: Format,
    place: &Place,
) -> Result<(), CliError> {
    let token = file(token_file)?.trim().to_owned();
    let join = Join { cluster: name.map(Into::into), etcd: store.read()?, token, discard };
    let made = output::send_node(place, "/v1/cluster/join", &json!(join))?;
    if format.json {
        return output::print_json(&made);
    }
    output::print(&format!(
        "node '{}' is a member of cluster '{}', which has {} nodes and {} sites",
        plain(&made["node"]),
        plain(&made["cluster"]),
        made["nodes"],
        made["sites"]
    ))
}

fn status(format: Format, place: &Place) -> Result<(), CliError> {
    let status = output::ask_node(place, "/v1/cluster")?;
    if format.json { output::print_json(&status) } else { output::print_fields(&status) }
}

fn change_store(store: &StoreAt, place: &Place) -> Result<(), CliError> {
    store.refuse_none()?;
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

fn token(words: &TokenWords, place: &Place) -> Result<(), CliError> {
    if let Some(id) = &words.revoke {
        output::remove_at_node(place, &format!("/v1/cluster/tokens/{}", escape(id)))?;
        return output::print(&format!("nobody joins by token {id} any more"));
    }
    if words.list {
        return list_tokens(words.format, place);
    }
    let new = NewToken {
        ttl_seconds: words.ttl.as_secs(),
        certificate: words.certificate.as_deref().map(file).transpose()?,
        key: words.key.as_deref().map(file).transpose()?,
    };
    let made = output::send_node(place, "/v1/cluster/tokens", &json!(new))?;
    if words.format.json {
        return output::print_json(&made);
    }
    // Beside the token, which is most often sent into a file.
    eprintln!("token {}: one machine joins by it, within {}", plain(&made["id"]), short_time(words.ttl));
    output::print(&plain(&made["token"]))
}

fn list_tokens(format: Format, place: &Place) -> Result<(), CliError> {
    let answer = output::ask_node(place, "/v1/cluster/tokens")?;
    if format.json {
        return output::print_json(&answer["tokens"]);
    }
    let mut columns = Columns::new(&["TOKEN", "MADE BY", "GOOD FOR"]);
    for token in answer["tokens"].as_array().into_iter().flatten() {
        let left = Duration::from_secs(token["seconds_left"].as_u64().unwrap_or_default());
        columns.add([plain(&token["id"]), plain(&token["by"]), short_time(left)]);
    }
    columns.print()
}

fn rotate(finish: bool, place: &Place) -> Result<(), CliError> {
    let done = output::tell_node(place, &format!("/v1/cluster/authority?finish={finish}"))?;
    output::print(&match finish {
        false => format!(
            "authority {} is believed beside the one before, which ends when `nagaya nodes` shows the new one at every node",
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

fn remove(node: &str, force: bool, stolen: bool, place: &Place) -> Result<(), CliError> {
    let path = format!("/v1/nodes/{}?force={force}&stolen={stolen}", escape(node));
    let done = output::remove_at_node(place, &path)?;
    let keys =
        if stolen { "the keys that it had count no more" } else { "the keys that it had end within seconds" };
    output::print(&format!(
        "node '{node}' is no member any more; {keys}, those of authority {} follow",
        done["serial"]
    ))
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
    nodes_table(&answer["nodes"]).print()
}

fn nodes_table(nodes: &Value) -> Columns {
    let mut columns = Columns::new(&[
        "NODE",
        "STATE",
        "PEER",
        "APPLICATIONS",
        "CPU USED",
        "MEMORY FREE",
        "REQUESTS/S",
        "WAKES",
        "AUTHORITY",
        "VERSION",
    ]);
    for node in nodes.as_array().into_iter().flatten() {
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
    columns
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
    placements_table(&answer["placements"], now).print()
}

/// `now` is Unix time.
fn placements_table(placements: &Value, now: Duration) -> Columns {
    let mut columns =
        Columns::new(&["SITE", "NODE", "COPIES", "EPOCH", "SINCE", "WHY", "FALLBACK", "IMAGE HERE"]);
    for placement in placements.as_array().into_iter().flatten() {
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
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_say_which_part_of_the_processors_is_used() {
        let table = nodes_table(&json!([
            { "name": "a", "state": "up", "peer": "10.0.0.1:7", "placements": 2, "cpu_used": 0.04, "memory_free": 0.5,
              "requests_per_second": 1.25, "wakes": 3, "authority": 1, "version": "0.1.0" },
            { "name": "b", "state": "gone", "peer": "10.0.0.2:7", "placements": 0, "version": null },
        ]));
        assert_eq!(
            table.text(),
            "NODE  STATE  PEER        APPLICATIONS  CPU USED  MEMORY FREE  REQUESTS/S  WAKES  AUTHORITY  VERSION\n\
             a     up     10.0.0.1:7  2             4 %       50 %         1.2         3      1          0.1.0\n\
             b     gone   10.0.0.2:7  0             ?         ?            ?           ?      ?          -\n"
        );
    }

    #[test]
    fn a_placement_without_a_fallback_shows_a_dash() {
        let table = placements_table(
            &json!([{ "site": "s", "node": "a", "epoch": 1, "since_ms": 1_000, "why": "first", "fallback": null, "image_here": false }]),
            Duration::from_secs(62),
        );
        assert_eq!(
            table.text(),
            "SITE  NODE  COPIES  EPOCH  SINCE  WHY    FALLBACK  IMAGE HERE\n\
             s     a     -       1      1m 1s  first  -         no\n"
        );
    }
}

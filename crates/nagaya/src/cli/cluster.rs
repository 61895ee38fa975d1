//! `nagaya cluster`, `nagaya nodes`, `nagaya placements`: membership of nodes, and where sites run.
//!
//! Not here: doing it (`supervisor::cluster`), the paths of the requests (`admin::cluster`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use nagaya_base::units::parse_duration;

use super::etcd_certs::{self, EtcdCerts};
use super::output::{self, CliError, OutputFormat, RecordSource, TableColumns, escape, plain, short_time};
use crate::admin::{FoundCommand, JoinCommand, NewToken};
use crate::etcd_access::EtcdAccess;

/// Default number of printed placements.
const PLACEMENTS_SHOWN: usize = 1_000;

#[derive(Debug, clap::Subcommand)]
pub enum ClusterArgs {
    /// Make certificates for etcd and for the nodes that use it, in files. No node has to run
    EtcdCerts(EtcdCerts),
    /// Make a cluster of this node. Its records move to etcd, and it keeps serving
    Init {
        /// Name of the cluster; several clusters can share one etcd
        #[arg(long, default_value = "main")]
        name: String,
        #[command(flatten)]
        store: StoreAt,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Make this node a member of a cluster. It takes over the cluster's records
    Join {
        /// Name of the cluster, to check the name in the token
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        store: StoreAt,
        /// File with the output of `nagaya cluster token` on a member; `-` is standard input
        #[arg(long, value_name = "FILE")]
        token_file: PathBuf,
        /// Delete this node's own tenants, sites, settings and rules
        #[arg(long)]
        discard: bool,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Show the membership of this node, and the age of its data
    Status(OutputFormat),
    /// Change how this member reaches etcd, for example from http:// to https:// with a certificate
    Store {
        #[command(flatten)]
        store: StoreAt,
    },
    /// Replace invalid values in etcd by those that this node knows
    Repair,
    /// Print a token. One other machine can join with it, once and within --ttl
    Token(TokenWords),
    /// Replace all keys of the members: their certificate authority and their signing keys. No
    /// request is lost
    Rotate {
        /// End the old keys now. Refused while a node has no new certificate
        #[arg(long)]
        finish: bool,
    },
    /// Move all applications away from a node without errors, and place no others there
    Drain { node: String },
    /// Allow applications on a drained node again
    Undrain { node: String },
    /// Remove a node from the cluster, and end all keys that it has
    Remove {
        /// Name of the node
        node: String,
        /// Remove the node although applications are placed there. Each moves at its next request
        #[arg(long)]
        force: bool,
        /// End the node's keys at once, because somebody else may have them. Requests between the
        /// other nodes may wait meanwhile. Implies --force
        #[arg(long)]
        stolen: bool,
    },
    /// Move one application to another node without errors
    Move {
        /// Site of the application
        site: String,
        /// Node to move to; without it, the best one
        #[arg(long, value_name = "NODE")]
        to: Option<String>,
    },
}

/// Where the cluster's records are.
#[derive(Debug, clap::Args)]
pub struct StoreAt {
    /// Client addresses of etcd, as https://ADDRESS:PORT; a join token contains them
    #[arg(long = "etcd", value_name = "URL", value_delimiter = ',')]
    pub endpoints: Vec<String>,
    /// PEM file of the authority that signed etcd's certificate
    #[arg(long = "etcd-ca", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// PEM file of the client certificate for etcd
    #[arg(long = "etcd-cert", value_name = "FILE", requires = "key")]
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's key
    #[arg(long = "etcd-key", value_name = "FILE", requires = "certificate")]
    pub key: Option<PathBuf>,
    /// User name for etcd
    #[arg(long = "etcd-user", value_name = "NAME", requires = "password")]
    pub user: Option<String>,
    /// File with the password of that user
    #[arg(long = "etcd-password-file", value_name = "FILE", id = "password", requires = "user")]
    pub password: Option<PathBuf>,
    /// Accept etcd in clear text or without a login. Then everybody who reaches etcd can stop the
    /// cluster, each tenant too
    #[arg(long)]
    pub insecure: bool,
}

#[derive(Debug, clap::Args)]
pub struct TokenWords {
    /// Time for which the token is valid, like 30m or 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    pub ttl: Duration,
    /// PEM file of the client certificate with which the machine reaches etcd. The token then
    /// contains it and is as secret as its key
    #[arg(long = "etcd-cert", value_name = "FILE", requires = "key")]
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's key
    #[arg(long = "etcd-key", value_name = "FILE", requires = "certificate")]
    pub key: Option<PathBuf>,
    /// Show the valid tokens, without their secrets
    #[arg(long, conflicts_with_all = ["certificate", "key", "revoke"])]
    pub list: bool,
    /// End a token by its id, as --list shows it
    #[arg(long, value_name = "ID", conflicts_with_all = ["certificate", "key"])]
    pub revoke: Option<String>,
    #[command(flatten)]
    pub format: OutputFormat,
}

#[derive(Debug, clap::Args)]
pub struct PlacementsArgs {
    /// Show only applications on this node
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
    /// Show only sites after this one, ordered by name
    #[arg(long, value_name = "SITE")]
    pub after: Option<String>,
    /// Show at most this many applications
    #[arg(long, value_name = "N", default_value_t = PLACEMENTS_SHOWN)]
    pub limit: usize,
    #[command(flatten)]
    pub format: OutputFormat,
}

impl StoreAt {
    /// Refuses options that only apply without a token.
    fn refuse_none(&self) -> Result<(), CliError> {
        if self.endpoints.is_empty() {
            return Err(CliError::Usage("say where etcd is: --etcd https://ADDRESS:2379".into()));
        }
        Ok(())
    }

    fn read(&self) -> Result<EtcdAccess, CliError> {
        Ok(EtcdAccess {
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

/// Returns the whole text of a file, or of standard input.
fn file(path: &Path) -> Result<String, CliError> {
    let read = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(path),
    };
    read.map_err(|error| CliError::Io { path: path.into(), error })
}

pub fn run(command: ClusterArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let text = OutputFormat { json: false };
    let (result, format) = match &command {
        ClusterArgs::EtcdCerts(words) => (etcd_certs::run(words), text),
        ClusterArgs::Init { name, store, format } => (init(name, store, *format, place), *format),
        ClusterArgs::Join { name, store, token_file, discard, format } => {
            (join(name.as_deref(), store, token_file, *discard, *format, place), *format)
        }
        ClusterArgs::Status(format) => (status(*format, place), *format),
        ClusterArgs::Store { store } => (change_store(store, place), text),
        ClusterArgs::Repair => (repair(place), text),
        ClusterArgs::Token(words) => (token(words, place), words.format),
        ClusterArgs::Rotate { finish } => (rotate(*finish, place), text),
        ClusterArgs::Drain { node } => (drain(node, "drain", place), text),
        ClusterArgs::Undrain { node } => (drain(node, "undrain", place), text),
        ClusterArgs::Remove { node, force, stolen } => (remove(node, *force, *stolen, place), text),
        ClusterArgs::Move { site, to } => (relocate(site, to.as_deref(), place), text),
    };
    output::end(result, format)
}

fn init(name: &str, store: &StoreAt, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    store.refuse_none()?;
    let found = FoundCommand { cluster: name.into(), etcd: store.read()? };
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
    format: OutputFormat,
    place: &RecordSource,
) -> Result<(), CliError> {
    let token = file(token_file)?.trim().to_owned();
    let join = JoinCommand { cluster: name.map(Into::into), etcd: store.read()?, token, discard };
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

fn status(format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let status = output::ask_node(place, "/v1/cluster")?;
    if format.json { output::print_json(&status) } else { output::print_fields(&status) }
}

fn change_store(store: &StoreAt, place: &RecordSource) -> Result<(), CliError> {
    store.refuse_none()?;
    let done = output::send_node(place, "/v1/cluster/store", &json!(store.read()?))?;
    output::print(if done["needs_restart"] == true {
        "this node reaches the store so when it is started anew: systemctl restart nagaya"
    } else {
        "this node reaches the store so"
    })
}

fn repair(place: &RecordSource) -> Result<(), CliError> {
    let done = output::tell_node(place, "/v1/cluster/repair")?;
    output::print(&format!(
        "{} invalid values were replaced by those that this node knows, {} were signed again",
        done["repaired"], done["signed"]
    ))
}

fn token(words: &TokenWords, place: &RecordSource) -> Result<(), CliError> {
    if let Some(id) = &words.revoke {
        output::remove_at_node(place, &format!("/v1/cluster/tokens/{}", escape(id)))?;
        return output::print(&format!("token {id} is no longer valid"));
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
    // Separate from the token, which usually goes into a file.
    eprintln!("token {}: one machine joins by it, within {}", plain(&made["id"]), short_time(words.ttl));
    output::print(&plain(&made["token"]))
}

fn list_tokens(format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let answer = output::ask_node(place, "/v1/cluster/tokens")?;
    if format.json {
        return output::print_json(&answer["tokens"]);
    }
    let mut columns = TableColumns::new(&["TOKEN", "MADE BY", "GOOD FOR"]);
    for token in answer["tokens"].as_array().into_iter().flatten() {
        let left = Duration::from_secs(token["seconds_left"].as_u64().unwrap_or_default());
        columns.add([plain(&token["id"]), plain(&token["by"]), short_time(left)]);
    }
    columns.print()
}

fn rotate(finish: bool, place: &RecordSource) -> Result<(), CliError> {
    let done = output::tell_node(place, &format!("/v1/cluster/authority?finish={finish}"))?;
    output::print(&if finish {
        format!("only authority {} is believed", done["serial"])
    } else {
        format!(
            "authority {} is believed beside the one before, which ends when `nagaya nodes` shows the new one at every node",
            done["serial"]
        )
    })
}

fn drain(node: &str, word: &str, place: &RecordSource) -> Result<(), CliError> {
    let done = output::tell_node(place, &format!("/v1/nodes/{}/{word}", escape(node)))?;
    output::print(&match word {
        "drain" => format!(
            "node '{node}' gives away its {} applications; `nagaya nodes` shows how far it is",
            done["placements"]
        ),
        _ => format!("node '{node}' may have applications again"),
    })
}

fn remove(node: &str, force: bool, stolen: bool, place: &RecordSource) -> Result<(), CliError> {
    let path = format!("/v1/nodes/{}?force={force}&stolen={stolen}", escape(node));
    let done = output::remove_at_node(place, &path)?;
    let keys =
        if stolen { "the keys that it had count no more" } else { "the keys that it had end within seconds" };
    output::print(&format!(
        "node '{node}' is no member any more; {keys}, those of authority {} follow",
        done["serial"]
    ))
}

fn relocate(site: &str, to: Option<&str>, place: &RecordSource) -> Result<(), CliError> {
    let to = to.map_or_else(String::new, |to| format!("?to={}", escape(to)));
    let done = output::tell_node(place, &format!("/v1/placements/{}/move{to}", escape(site)))?;
    output::print(&format!("'{site}' runs on '{}' from epoch {} on", plain(&done["node"]), done["epoch"]))
}

/// `nagaya nodes`.
pub fn nodes(format: OutputFormat, place: &RecordSource) -> Result<ExitCode, CliError> {
    output::end(list_nodes(format, place), format)
}

fn list_nodes(format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let answer = output::ask_node(place, "/v1/nodes")?;
    if format.json {
        return output::print_json(&answer["nodes"]);
    }
    nodes_table(&answer["nodes"]).print()
}

fn nodes_table(nodes: &Value) -> TableColumns {
    let mut columns = TableColumns::new(&[
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

/// Returns the other nodes that have a site. A node on which it is still starting has a `*`.
fn copies(told: &serde_json::Value) -> String {
    let name = |copy: &serde_json::Value| {
        let star = if copy["ready"] == true { "" } else { "*" };
        format!("{}{star}", plain(&copy["node"]))
    };
    let names: Vec<_> = told.as_array().into_iter().flatten().map(name).collect();
    if names.is_empty() { "-".into() } else { names.join(",") }
}

/// `nagaya placements`.
pub fn placements(command: &PlacementsArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    output::end(list_placements(command, place), command.format)
}

fn list_placements(command: &PlacementsArgs, place: &RecordSource) -> Result<(), CliError> {
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

/// Returns the table. `now` is Unix time.
fn placements_table(placements: &Value, now: Duration) -> TableColumns {
    let mut columns =
        TableColumns::new(&["SITE", "NODE", "COPIES", "EPOCH", "SINCE", "WHY", "FALLBACK", "IMAGE HERE"]);
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

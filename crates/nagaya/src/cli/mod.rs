//! The command line: what `nagaya` can be told.
//!
//! One file per command; here they are named and dispatched. Not here: what they do to records (`admin::Api`), running
//! a node (`supervisor`).

mod balance;
mod cells;
mod cluster;
mod config;
mod doctor;
mod error;
mod etcd_certs;
mod events;
mod exec;
mod explain;
mod instance;
mod lanes;
mod limits;
mod output;
mod rule;
mod setting;
mod shell;
mod site;
mod status;
mod tenant;
mod top;
mod transfer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use self::output::{CliError, Format, Place};
use crate::supervisor::{self, Serve};

const EXAMPLES: &str = "\
Examples:
  nagaya serve                                 run a node with /etc/nagaya/nagaya.toml
  nagaya tenant add demo
  nagaya site add wiki --tenant demo --host wiki.example.org --backend php --root wiki
  nagaya status
  nagaya error NGY0501                         what an error code means";

/// A web hosting engine for very many sites.
#[derive(Debug, Parser)]
#[command(name = "nagaya", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    /// Configuration file [default: /etc/nagaya/nagaya.toml, if it is there]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a node
    #[command(after_help = SERVE_EXAMPLES)]
    Serve {
        /// Log level or filter; overrides the configuration, e.g. debug or info,nagaya_edge=debug
        #[arg(long, value_name = "FILTER")]
        log: Option<String>,
    },
    /// Report every mistake in the configuration file
    #[command(
        after_help = "Examples:\n  nagaya check-config\n  nagaya --config ./nagaya.toml check-config --json"
    )]
    CheckConfig(Format),
    /// Print the configuration: all keys, or what holds now
    #[command(subcommand)]
    Config(config::Command),
    /// Show the running node
    #[command(after_help = "Examples:\n  nagaya status\n  nagaya status --json | jq .processes")]
    Status(Format),
    /// Show who uses how much, and their limits
    #[command(after_help = CELLS_EXAMPLES)]
    Cells(cells::Cells),
    /// Running applications and how deep each rests
    #[command(subcommand, after_help = INSTANCE_EXAMPLES)]
    Instance(instance::Command),
    /// Show live who runs, rests, waits and uses CPU time
    #[command(after_help = TOP_EXAMPLES)]
    Top(top::Top),
    /// Show who runs, who waits and for how long
    #[command(
        after_help = "Examples:\n  nagaya lanes\n  nagaya lanes --watch\n  nagaya lanes --json | jq '.[] | select(.waiting > 0)'"
    )]
    Lanes(lanes::Lanes),
    /// Explain one request (where its time went, and what limited it), or why a site's requests wait, why it is where it is, and what its load called for
    #[command(
        after_help = "Examples:\n  nagaya explain 4bf92f3577b34da6a3ce929d0e0e4736\n  nagaya explain 4bf92f3577b34da6a3ce929d0e0e4736 --json\n  nagaya explain blog"
    )]
    Explain {
        /// A request as error pages, the access log and Nagaya-Receipt show it, 32 hexadecimal digits; or a site
        id: String,
        #[command(flatten)]
        format: Format,
    },
    /// Show what this machine offers, what is off, and how to turn it on
    #[command(
        after_help = "Examples:\n  nagaya doctor\n  nagaya doctor --json | jq '.[] | select(.state != \"ok\")'"
    )]
    Doctor(Format),
    /// Explain an error code
    #[command(after_help = "Examples:\n  nagaya error NGY0501\n  nagaya error 501")]
    Error {
        /// NGYnnnn, or its number
        code: String,
    },
    /// Owners of sites
    #[command(
        subcommand,
        after_help = "Examples:\n  nagaya tenant add demo --home /srv/demo\n  nagaya tenant list --json"
    )]
    Tenant(tenant::Command),
    /// Host names and how they are served
    #[command(subcommand, after_help = SITE_EXAMPLES)]
    Site(site::Command),
    /// What rules look up by key
    #[command(subcommand, after_help = SETTING_EXAMPLES)]
    Setting(setting::Command),
    /// Rules that the store keeps, for all nodes
    #[command(subcommand, after_help = RULE_EXAMPLES)]
    Rule(rule::Command),
    /// Several nodes as one
    #[command(subcommand, after_help = CLUSTER_EXAMPLES)]
    Cluster(cluster::Command),
    /// The cluster's nodes, and how much each has left
    #[command(
        after_help = "Examples:\n  nagaya nodes\n  nagaya nodes --json | jq '.[] | select(.state != \"up\")'"
    )]
    Nodes(Format),
    /// Which node runs which application
    #[command(after_help = "Examples:\n  nagaya placements --node a\n  nagaya placements --json")]
    Placements(cluster::Placements),
    /// What happened in the cluster lately, as this node saw it
    #[command(
        after_help = "Examples:\n  nagaya events\n  nagaya events --json | jq '.[] | select(.event == \"moved\")'"
    )]
    Events(events::Events),
    /// Print what a shell needs to complete commands and options
    #[command(
        after_help = "Examples:\n  nagaya completion bash > /etc/bash_completion.d/nagaya\n  nagaya completion zsh > /usr/local/share/zsh/site-functions/_nagaya"
    )]
    Completion(shell::Completion),
    /// Print the manual page, or write those of all commands
    #[command(
        after_help = "Examples:\n  nagaya man | man -l -\n  nagaya man --dir /usr/local/share/man/man1"
    )]
    Man(shell::Manual),
    /// Print the version
    Version(Format),
    #[command(hide = true)]
    Edge,
    #[command(hide = true)]
    Keeper,
    /// Checks the rule on standard input without any rights; messages call it FILE
    #[command(hide = true)]
    RuleCheck { file: String },
    /// Runs the rule on standard input once without any rights
    #[command(hide = true)]
    RuleTry { file: String },
}

const SERVE_EXAMPLES: &str = "\
Signals:
  SIGTERM, SIGINT  finish what runs, then end; the second one ends at once
  SIGHUP           read the configuration again
  SIGUSR1          open log files anew

Examples:
  nagaya serve
  nagaya --config ./nagaya.toml serve --log debug";

const SITE_EXAMPLES: &str = "\
Examples:
  nagaya site add docs --tenant demo --host docs.example.org --backend static --root docs
  nagaya site list --tenant demo
  nagaya site export --json > sites.jsonl";

const CLUSTER_EXAMPLES: &str = "\
Examples:
  nagaya cluster init --etcd http://10.0.0.9:2379
  nagaya cluster join --etcd http://10.0.0.9:2379 --token-file token
  nagaya cluster drain a";

const CELLS_EXAMPLES: &str = "\
Examples:
  nagaya cells --watch                         who uses how much now
  nagaya cells --tenant demo --json";

const INSTANCE_EXAMPLES: &str = "\
Tiers, the deepest last: running, quiet, frozen, reclaimed, image, cold

Examples:
  nagaya instance list --tenant demo
  nagaya instance rest wiki --to image
  nagaya instance exec --wake wiki -- ls -l
  nagaya instance logs wiki";

const TOP_EXAMPLES: &str = "\
Examples:
  nagaya top
  nagaya top --once --json";

const SETTING_EXAMPLES: &str = "\
Examples:
  nagaya setting set www.example.org 20%
  nagaya setting set shop.example.org --json '{\"cpu\":50,\"night\":true}'
  nagaya setting list --after www.example.org --json";

const RULE_EXAMPLES: &str = "\
A node runs a rule if its configuration names it: [[rules]] with file = \"store:NAME\" and a phase.

Examples:
  nagaya rule set limits limits.rb
  nagaya rule test limits.rb --host www.example.org --path '/search?q=1'
  nagaya rule show limits > limits.rb
  nagaya rule list --json";

/// Runs what the command line says.
pub fn run() -> ExitCode {
    let Cli { config, command } = Cli::parse();
    let result = match command {
        Command::Edge => return supervisor::run_edge(),
        Command::Keeper => return supervisor::run_keeper(),
        Command::RuleTry { file } => return supervisor::run_rule_try(&file),
        Command::RuleCheck { file } => return supervisor::run_rule_check(&file),
        Command::Serve { log } => return serve(Serve { config, log }),
        Command::CheckConfig(format) => config::check(config.as_deref(), format),
        Command::Config(command) => config::run(&command, config.as_deref()),
        Command::Status(format) => place(config.as_deref()).and_then(|place| status::run(&place, format)),
        Command::Cells(command) => place(config.as_deref()).and_then(|place| cells::run(&command, &place)),
        Command::Instance(command) => {
            place(config.as_deref()).and_then(|place| instance::run(&command, &place))
        }
        Command::Lanes(command) => place(config.as_deref()).and_then(|place| lanes::run(&command, &place)),
        Command::Top(command) => place(config.as_deref()).and_then(|place| top::run(&command, &place)),
        Command::Explain { id, format } => {
            place(config.as_deref()).and_then(|place| explain::run(&id, format, &place))
        }
        Command::Doctor(format) => doctor::run(config.as_deref(), format),
        Command::Error { code } => error::run(&code),
        Command::Tenant(command) => place(config.as_deref()).and_then(|place| tenant::run(command, &place)),
        Command::Site(command) => place(config.as_deref()).and_then(|place| site::run(command, &place)),
        Command::Setting(command) => place(config.as_deref()).and_then(|place| setting::run(command, &place)),
        Command::Rule(command) => place(config.as_deref()).and_then(|place| rule::run(command, &place)),
        Command::Cluster(command) => place(config.as_deref()).and_then(|place| cluster::run(command, &place)),
        Command::Nodes(format) => place(config.as_deref()).and_then(|place| cluster::nodes(format, &place)),
        Command::Placements(command) => {
            place(config.as_deref()).and_then(|place| cluster::placements(&command, &place))
        }
        Command::Events(command) => place(config.as_deref()).and_then(|place| events::run(&command, &place)),
        Command::Completion(completion) => shell::complete(Cli::command(), &completion),
        Command::Man(manual) => shell::manual(Cli::command(), manual),
        Command::Version(format) => version(format),
    };
    // A reader of the output that has had enough is no error.
    result.or_else(|error| output::end(Err(error), Format { json: false })).unwrap_or_else(|error| {
        match error.code() {
            Some(code) => eprintln!("nagaya: {error} [{code}]"),
            None => eprintln!("nagaya: {error}"),
        }
        error.exit_code()
    })
}

fn serve(serve: Serve) -> ExitCode {
    match supervisor::serve(serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            match error.code() {
                Some(code) => eprintln!("nagaya: {error} [{code}]"),
                None => eprintln!("{error}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn version(format: Format) -> Result<ExitCode, CliError> {
    let version = env!("CARGO_PKG_VERSION");
    if format.json {
        output::print_json(&serde_json::json!({ "version": version }))?;
    } else {
        output::print(&format!("nagaya {version}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the node and its store are, from the configuration.
fn place(config: Option<&Path>) -> Result<Place, CliError> {
    let settings = settings(config)?;
    Ok(Place {
        admin_socket: settings.admin_socket(),
        store: settings.store(),
        member: settings.member_file(),
        ids: crate::tenant_ids::IdSource::of(&settings),
    })
}

fn settings(config: Option<&Path>) -> Result<crate::config::Settings, CliError> {
    crate::config::load(config).map(|loaded| loaded.settings).map_err(|mistakes| {
        let lines: Vec<_> = mistakes.iter().map(ToString::to_string).collect();
        CliError::Usage(format!("the configuration has mistakes\n{}", lines.join("\n")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_shown_command_is_explained() {
        let mut command = Cli::command();
        command.build();
        command.clone().debug_assert();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            assert!(sub.get_about().is_some(), "{}", sub.get_name());
        }
    }

    #[test]
    fn the_examples_of_the_help_are_commands() {
        let lines = [
            EXAMPLES,
            SERVE_EXAMPLES,
            SITE_EXAMPLES,
            CELLS_EXAMPLES,
            CLUSTER_EXAMPLES,
            INSTANCE_EXAMPLES,
            TOP_EXAMPLES,
            SETTING_EXAMPLES,
            RULE_EXAMPLES,
        ]
        .join("\n");
        let examples: Vec<_> = lines.lines().filter_map(|line| line.trim().strip_prefix("nagaya ")).collect();
        assert!(examples.len() >= 8);
        for example in examples {
            let example = example.split("   ").next().unwrap_or(example);
            let words = example.split(['>', '|']).next().unwrap_or(example).split_whitespace();
            if let Err(error) = Cli::try_parse_from(["nagaya"].into_iter().chain(words)) {
                panic!("{example}: {error}");
            }
        }
    }
}

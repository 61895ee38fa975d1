//! The command line of `nagaya`.
//!
//! There is one file per command; here they are named and dispatched. Not here: their effect on
//! records (`admin::Api`), running a node (`supervisor`).

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

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use self::output::{CliError, OutputFormat, RecordSource};
use crate::supervisor::{self, ServeOptions};

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
struct NagayaArgs {
    /// Configuration file [default: /etc/nagaya/nagaya.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: NagayaCommand,
}

#[derive(Debug, Subcommand)]
enum NagayaCommand {
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
    CheckConfig(OutputFormat),
    /// Print the configuration: all keys, or the settings in effect
    #[command(subcommand)]
    Config(config::ConfigArgs),
    /// Show the running node
    #[command(after_help = "Examples:\n  nagaya status\n  nagaya status --json | jq .processes")]
    Status(OutputFormat),
    /// Show the resource use and the limits of tenants, sites and requests
    #[command(after_help = CELLS_EXAMPLES)]
    Cells(cells::CellsCommand),
    /// Show and control the instances of applications
    #[command(subcommand, after_help = INSTANCE_EXAMPLES)]
    Instance(instance::InstanceArgs),
    /// Show live which sites run, rest, wait and use CPU time
    #[command(after_help = TOP_EXAMPLES)]
    Top(top::TopArgs),
    /// Show how many requests run and wait in each lane, and for how long
    #[command(
        after_help = "Examples:\n  nagaya lanes\n  nagaya lanes --watch\n  nagaya lanes --json | jq '.[] | select(.waiting > 0)'"
    )]
    Lanes(lanes::LanesArgs),
    /// Explain one request or one site. For a request: where its time went, and what limited it.
    /// For a site: why its requests wait, why it runs where it runs, and what its load caused
    #[command(
        after_help = "Examples:\n  nagaya explain 4bf92f3577b34da6a3ce929d0e0e4736\n  nagaya explain 4bf92f3577b34da6a3ce929d0e0e4736 --json\n  nagaya explain blog"
    )]
    Explain {
        /// Id of a request: 32 hexadecimal digits, as in error pages, the access log and
        /// Nagaya-Receipt. Or the name of a site
        id: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Show which features this machine offers, which are off, and how to turn them on
    #[command(
        after_help = "Examples:\n  nagaya doctor\n  nagaya doctor --json | jq '.[] | select(.state != \"ok\")'"
    )]
    Doctor(OutputFormat),
    /// Explain an error code
    #[command(after_help = "Examples:\n  nagaya error NGY0501\n  nagaya error 501")]
    Error {
        /// The code NGYnnnn, or only its number
        code: String,
    },
    /// Manage tenants, the owners of sites
    #[command(
        subcommand,
        after_help = "Examples:\n  nagaya tenant add demo --home /srv/demo\n  nagaya tenant list --json"
    )]
    Tenant(tenant::TenantArgs),
    /// Manage sites: host names and how they are served
    #[command(subcommand, after_help = SITE_EXAMPLES)]
    Site(site::SiteArgs),
    /// Manage settings: values that rules look up by key
    #[command(subcommand, after_help = SETTING_EXAMPLES)]
    Setting(setting::SettingArgs),
    /// Manage the rules in the store, which all nodes share
    #[command(subcommand, after_help = RULE_EXAMPLES)]
    Rule(rule::RuleArgs),
    /// Manage a cluster: several nodes that serve the same sites
    #[command(subcommand, after_help = CLUSTER_EXAMPLES)]
    Cluster(cluster::ClusterArgs),
    /// Show the cluster's nodes, with the load and the free memory of each
    #[command(
        after_help = "Examples:\n  nagaya nodes\n  nagaya nodes --json | jq '.[] | select(.state != \"up\")'"
    )]
    Nodes(OutputFormat),
    /// Show which node runs which application
    #[command(after_help = "Examples:\n  nagaya placements --node a\n  nagaya placements --json")]
    Placements(cluster::PlacementsArgs),
    /// Show recent events of the cluster, as this node saw them
    #[command(
        after_help = "Examples:\n  nagaya events\n  nagaya events --json | jq '.[] | select(.event == \"moved\")'"
    )]
    Events(events::EventsArgs),
    /// Print a script with which a shell completes commands and options
    #[command(
        after_help = "Examples:\n  nagaya completion bash > /etc/bash_completion.d/nagaya\n  nagaya completion zsh > /usr/local/share/zsh/site-functions/_nagaya"
    )]
    Completion(shell::CompletionArgs),
    /// Print the manual page, or write the pages of all commands
    #[command(
        after_help = "Examples:\n  nagaya man | man -l -\n  nagaya man --dir /usr/local/share/man/man1"
    )]
    Man(shell::ManualArgs),
    /// Send the message on standard input through the mail relay, as `sendmail` does. Programs of
    /// tenants find this command as `sendmail`
    #[command(
        after_help = "Examples:\n  nagaya sendmail -t -i < message\n  nagaya sendmail -f me@example.org you@example.org < message"
    )]
    Sendmail {
        /// Arguments as in sendmail(8): -t, -i, -f ADDRESS, -F NAME, and recipients
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<OsString>,
    },
    /// Print the version
    Version(OutputFormat),
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
  SIGTERM, SIGINT  finish running requests, then end; a second one ends at once
  SIGHUP           read the configuration again
  SIGUSR1          open the log files again

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
  nagaya cells --watch                         live, with rates
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

/// Runs the command line.
pub fn run() -> ExitCode {
    let NagayaArgs { config, command } = NagayaArgs::parse();
    let result = match command {
        NagayaCommand::Edge => return supervisor::run_edge(),
        NagayaCommand::Keeper => return supervisor::run_keeper(),
        NagayaCommand::RuleTry { file } => return supervisor::run_rule_try(&file),
        NagayaCommand::RuleCheck { file } => return supervisor::run_rule_check(&file),
        NagayaCommand::Serve { log } => return serve(ServeOptions { config, log }),
        NagayaCommand::CheckConfig(format) => config::check(config.as_deref(), format),
        NagayaCommand::Config(command) => config::run(&command, config.as_deref()),
        NagayaCommand::Status(format) => {
            place(config.as_deref()).and_then(|place| status::run(&place, format))
        }
        NagayaCommand::Cells(command) => {
            place(config.as_deref()).and_then(|place| cells::run(&command, &place))
        }
        NagayaCommand::Instance(command) => {
            place(config.as_deref()).and_then(|place| instance::run(&command, &place))
        }
        NagayaCommand::Lanes(command) => {
            place(config.as_deref()).and_then(|place| lanes::run(&command, &place))
        }
        NagayaCommand::Top(command) => place(config.as_deref()).and_then(|place| top::run(&command, &place)),
        NagayaCommand::Explain { id, format } => {
            place(config.as_deref()).and_then(|place| explain::run(&id, format, &place))
        }
        NagayaCommand::Doctor(format) => doctor::run(config.as_deref(), format),
        NagayaCommand::Error { code } => error::run(&code),
        NagayaCommand::Tenant(command) => {
            place(config.as_deref()).and_then(|place| tenant::run(command, &place))
        }
        NagayaCommand::Site(command) => place(config.as_deref()).and_then(|place| site::run(command, &place)),
        NagayaCommand::Setting(command) => {
            place(config.as_deref()).and_then(|place| setting::run(command, &place))
        }
        NagayaCommand::Rule(command) => place(config.as_deref()).and_then(|place| rule::run(command, &place)),
        NagayaCommand::Cluster(command) => {
            place(config.as_deref()).and_then(|place| cluster::run(command, &place))
        }
        NagayaCommand::Nodes(format) => {
            place(config.as_deref()).and_then(|place| cluster::nodes(format, &place))
        }
        NagayaCommand::Placements(command) => {
            place(config.as_deref()).and_then(|place| cluster::placements(&command, &place))
        }
        NagayaCommand::Events(command) => {
            place(config.as_deref()).and_then(|place| events::run(&command, &place))
        }
        NagayaCommand::Completion(completion) => shell::complete(NagayaArgs::command(), &completion),
        NagayaCommand::Man(manual) => shell::manual(NagayaArgs::command(), manual),
        NagayaCommand::Sendmail { arguments } => return nagaya_sendmail::run(&arguments),
        NagayaCommand::Version(format) => version(format),
    };
    // A reader that closes the output early is not an error.
    result.or_else(|error| output::end(Err(error), OutputFormat { json: false })).unwrap_or_else(|error| {
        match error.code() {
            Some(code) => eprintln!("nagaya: {error} [{code}]"),
            None => eprintln!("nagaya: {error}"),
        }
        error.exit_code()
    })
}

fn serve(serve: ServeOptions) -> ExitCode {
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

fn version(format: OutputFormat) -> Result<ExitCode, CliError> {
    let version = env!("CARGO_PKG_VERSION");
    if format.json {
        output::print_json(&serde_json::json!({ "version": version }))?;
    } else {
        output::print(&format!("nagaya {version}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns where the node and its store are, from the configuration.
fn place(config: Option<&Path>) -> Result<RecordSource, CliError> {
    let settings = settings(config)?;
    Ok(RecordSource {
        admin_socket: settings.admin_socket(),
        store: settings.store(),
        member: settings.member_file(),
        ids: crate::tenant_ids::IdSource::of(&settings),
    })
}

fn settings(config: Option<&Path>) -> Result<crate::config::NodeSettings, CliError> {
    crate::config::load(config).map(|loaded| loaded.settings).map_err(|mistakes| {
        let lines: Vec<_> = mistakes.iter().map(ToString::to_string).collect();
        CliError::Usage(format!("the configuration has mistakes\n{}", lines.join("\n")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_explained() {
        let mut command = NagayaArgs::command();
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
            if let Err(error) = NagayaArgs::try_parse_from(["nagaya"].into_iter().chain(words)) {
                panic!("{example}: {error}");
            }
        }
    }
}

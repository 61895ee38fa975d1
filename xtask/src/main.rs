//! The tasks of `./dev`: tests, conformance, fuzzing, lints, the demo, clusters on one machine and
//! the experiments. `./dev` installs packages and builds this.
//!
//! Not here: anything that ships; nothing depends on this program.

mod clients;
mod conformance;
mod content;
mod demo;
mod experiment;
mod facts;
mod fuzz;
mod guest;
mod h2load;
mod http;
mod huge_pages;
mod interrupt;
mod lab;
mod lint;
mod load;
mod measurements;
mod plot;
mod process;
mod report;
mod server;
mod swap;
mod test;
mod test_sum;
mod workspace;

use std::process::ExitCode;

use anyhow::{Result, bail};

/// nagaya's own allocator: experiments that measure a part alone use the same one.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("dev: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<ExitCode> {
    let Some((verb, rest)) = arguments.split_first() else { bail!("no verb: see ./dev") };
    match verb.as_str() {
        "test" => test::run(rest),
        "guest" => guest::run(rest),
        "conformance" => conformance::run(rest),
        "fuzz" => fuzz::run(rest),
        "lint" => lint::run(rest),
        "docs" => lint::write_generated_pages().map(|()| ExitCode::SUCCESS),
        "demo" => demo::run(rest).map(|()| ExitCode::SUCCESS),
        "cluster" => lab::run(rest),
        "experiment" if rest.first().is_some_and(|word| word == "--report") => {
            measurements::run(rest).map(|()| ExitCode::SUCCESS)
        }
        "experiment" => experiment::registry::run(rest).map(|()| ExitCode::SUCCESS),
        other => bail!("unknown verb '{other}': see ./dev"),
    }
}

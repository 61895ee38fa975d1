//! The `nagaya` command: a node, and all commands of an operator.
//!
//! Start reading at `supervisor` for the life of a node, at `cli` for the commands. Not here: HTTP
//! (`nagaya_edge`), processes of tenants (`nagaya_keeper`), records (`nagaya_records`).

mod admin;
mod certificates;
mod cli;
mod config;
mod doctor;
mod etcd_access;
mod identity;
mod inherit;
mod logging;
mod rule_check;
mod rule_test;
mod supervisor;
mod tenant_ids;

use std::path::Path;
use std::process::ExitCode;

/// With it, processes use a quarter less memory than with the system's allocator after an import of
/// 100,000 sites.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let is_sendmail =
        arguments.next().is_some_and(|name| Path::new(&name).file_name() == Some("sendmail".as_ref()));
    if is_sendmail {
        return nagaya_sendmail::run(&arguments.collect::<Vec<_>>());
    }
    // In the sandbox of a machine.
    let words: Vec<_> = arguments.collect();
    let ended = words.split_first().and_then(|(word, others)| nagaya_machine::run_program(word, others));
    match ended {
        None => cli::run(),
        Some(Ok(status)) => status.into(),
        Some(Err(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

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
    let word = arguments.next();
    let ended = match word.as_ref().and_then(|word| word.to_str()) {
        Some("vm-run") => nagaya_machine::run::run().map_err(|error| error.to_string()),
        Some("vm-template") => nagaya_machine::template::run().map(|()| 0).map_err(|error| error.to_string()),
        Some("vm-exec") => {
            nagaya_machine::exec::run(&arguments.collect::<Vec<_>>()).map_err(|error| error.to_string())
        }
        _ => return cli::run(),
    };
    match ended {
        Ok(status) => status.into(),
        Err(error) => {
            eprintln!("nagaya {}: {error}", word.unwrap_or_default().display());
            ExitCode::FAILURE
        }
    }
}

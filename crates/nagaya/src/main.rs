//! The `nagaya` command: a node, and everything an operator does with it.
//!
//! Start reading at `supervisor` for the life of a node, at `cli` for the commands. Not here: HTTP
//! (`nagaya_edge`), processes of tenants (`nagaya_keeper`), records (`nagaya_cmdb`).

mod admin;
mod certificates;
mod cli;
mod config;
mod doctor;
mod inherit;
mod logging;
mod rule_check;
mod rule_test;
mod supervisor;
mod tenant_ids;

use std::process::ExitCode;

/// After an import of 100,000 sites into a running node, its processes keep a quarter less memory than with the
/// system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::run()
}

//! The process that checks one text of a rule. It gives up all rights, compiles the text, and
//! reports its fault.
//!
//! The text comes on its standard input. The verdict goes to its standard output as JSON: `null` or
//! a fault. Invariant: no byte of the text is read before the rights are gone and the system-call
//! filter is on.
//!
//! Not here: starting it and its time limit (`crate::rule_check`), compiling (`nagaya_rules`).

use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;

use nagaya_rules::{RuleFault, SOURCE_LEN_MAX};
use nix::unistd::Uid;
use rustix::process::{Resource, Rlimit};
use serde::Serialize;

use super::call_filter;
use super::rights::{self, RightsError};
use crate::inherit;
use crate::rule_test::{self, RuleQuestion, TestCase};

/// The user and group that it takes if root starts it: those that own nothing by convention.
const NOBODY: u32 = 65_534;

/// Longest input of a dry run, bytes: a text and the settings.
const QUESTION_LEN_MAX: u64 = 64 << 20;

/// Limits of the process in case its own limits (`nagaya_rules`) fail: seconds of CPU time, and
/// bytes of address space. The allocator reserves 1 GiB of address space at once.
const PROCESSOR_SECONDS_MAX: u64 = 3;
const ADDRESS_BYTES_MAX: u64 = 4 << 30;

/// `nagaya rule-check`.
pub fn run_rule_check(file: &str) -> ExitCode {
    run(|| answer(file))
}

/// `nagaya rule-try`: the same for a dry run.
pub fn run_rule_try(file: &str) -> ExitCode {
    run(|| try_out(file))
}

fn run(act: impl FnOnce() -> io::Result<()>) -> ExitCode {
    let done = give_up_all().and_then(|()| act().map_err(rights::system("the text or the verdict")));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // It is not read if the supervisor has started this process.
            eprintln!("nagaya rule-check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn give_up_all() -> Result<(), RightsError> {
    // The supervisor may be passing sockets to another process at this moment.
    inherit::close_all_but_standard().map_err(rights::system("inherited descriptors cannot be closed"))?;
    for (resource, most) in
        [(Resource::Cpu, PROCESSOR_SECONDS_MAX), (Resource::As, ADDRESS_BYTES_MAX), (Resource::Core, 0)]
    {
        rustix::process::setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
            .map_err(rights::system("a limit cannot be set"))?;
    }
    let identity = Uid::effective().is_root().then_some((NOBODY, NOBODY));
    rights::give_up(identity)?;
    // The compiler's watchdog is a thread, and the filter allows no new one.
    let _ = rule_test::run(&RuleQuestion { text: String::new(), case: TestCase::default() }, "empty");
    call_filter::install_for_rule_check()
        .map_err(rights::system("the filter of system calls cannot be put on"))
}

fn try_out(file: &str) -> io::Result<()> {
    let mut input = Vec::new();
    io::stdin().lock().take(QUESTION_LEN_MAX).read_to_end(&mut input)?;
    let question = serde_json::from_slice(&input)?;
    print(&rule_test::run(&question, file))
}

fn print(verdict: &impl Serialize) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(&serde_json::to_vec(verdict)?)?;
    output.flush()
}

fn answer(file: &str) -> io::Result<()> {
    let mut text = Vec::new();
    io::stdin().lock().take(SOURCE_LEN_MAX as u64 + 1).read_to_end(&mut text)?;
    let verdict: Option<RuleFault> = nagaya_rules::check(&text, file).err();
    print(&verdict)
}

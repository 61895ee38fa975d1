//! Checks the text of a rule in a separate process that has no rights.
//!
//! Texts come from files, from the admin interface and from other nodes, and mruby's parser is C.
//! The supervisor and the commands run as root, so neither parses them. This program is started
//! again, gives up all rights, and answers on its standard output. An edge compiles in its own
//! process, which has no rights, either.
//!
//! Not here: the work of the process (`supervisor::rule_checker`), compiling (`nagaya_rules`).

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nagaya_rules::{FaultKind, RuleFault};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use serde::de::DeserializeOwned;

use crate::rule_test::{self, CaseOutcome, RuleQuestion};

/// The hidden subcommands.
pub const SUBCOMMAND: &str = "rule-check";
const TEST_SUBCOMMAND: &str = "rule-try";

/// Longest time from the start of the process to its verdict. It may use much less CPU time.
const CHECK_TIME_MAX: Duration = Duration::from_secs(20);

/// Longest verdict in bytes. A message of mruby has at most 1 KiB, and a dry run reports each
/// decision.
const VERDICT_LEN_MAX: usize = 1 << 20;

/// Checks that this text is valid as a rule file. Messages call it `file`. Blocks until the process
/// has ended.
pub fn check(text: &[u8], file: &str) -> Result<(), RuleFault> {
    // A binary of unit tests has no such subcommand; the end-to-end tests run the real one.
    if cfg!(test) {
        return nagaya_rules::check(text, file);
    }
    let verdict: Option<RuleFault> =
        ask_process(SUBCOMMAND, text, file).unwrap_or_else(|error| Some(no_verdict(file, &error)));
    verdict.map_or(Ok(()), |fault| Err(RuleFault { file: file.into(), ..fault }))
}

/// Returns the text's decisions about an imagined request. Blocks until the process has ended.
pub fn test(question: &RuleQuestion, file: &str) -> CaseOutcome {
    if cfg!(test) {
        return rule_test::run(question, file);
    }
    let asked = serde_json::to_vec(question).map_err(io::Error::other);
    let outcome = asked.and_then(|asked| ask_process(TEST_SUBCOMMAND, &asked, file));
    outcome.unwrap_or_else(|error| CaseOutcome {
        faults: vec![no_verdict(file, &error)],
        ..CaseOutcome::default()
    })
}

fn no_verdict(file: &str, error: &io::Error) -> RuleFault {
    let message = format!("the process that checks it gave no verdict: {error}");
    RuleFault { kind: FaultKind::Check, file: file.into(), line: None, message }
}

/// Returns the process's result for the input.
fn ask_process<T: DeserializeOwned>(subcommand: &str, text: &[u8], file: &str) -> io::Result<T> {
    // It is not a pipe, so no writer is needed while the process runs.
    let mut input = File::from(rustix::fs::memfd_create("rule", MemfdFlags::CLOEXEC)?);
    input.write_all(text)?;
    input.rewind()?;
    let mut child = Command::new("/proc/self/exe")
        .arg0("nagaya-rule-check")
        .args([subcommand, "--", file])
        .env_clear()
        .current_dir("/")
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    let verdict = read_verdict(&mut child);
    // It has ended, or must end.
    let _ = child.kill();
    let status = child.wait()?;
    match verdict? {
        None => Err(io::Error::other(format!("it did not end within {} s", CHECK_TIME_MAX.as_secs()))),
        Some(_) if !status.success() => Err(io::Error::other(format!("it ended with {status}"))),
        Some(verdict) => Ok(serde_json::from_slice(&verdict)?),
    }
}

/// Reads to the end of the process's output. `None` if that takes too long.
fn read_verdict(child: &mut Child) -> io::Result<Option<Vec<u8>>> {
    let Some(mut output) = child.stdout.take() else { return Ok(Some(Vec::new())) };
    let deadline = Instant::now() + CHECK_TIME_MAX;
    let mut verdict = Vec::new();
    let mut buffer = [0; 4096];
    while wait_readable(&output, deadline)? {
        match output.read(&mut buffer)? {
            0 => {
                // The process ends right after its output, unless it was taken over.
                return Ok(wait_ended(child, deadline)?.then_some(verdict));
            }
            len => verdict.extend_from_slice(&buffer[..len]),
        }
        if verdict.len() > VERDICT_LEN_MAX {
            return Err(io::Error::other(format!("it wrote more than {VERDICT_LEN_MAX} bytes")));
        }
    }
    Ok(None)
}

fn wait_readable(output: &ChildStdout, deadline: Instant) -> io::Result<bool> {
    poll_until(PollFd::new(output, PollFlags::IN), deadline)
}

/// Returns whether the process ended in time.
fn wait_ended(child: &Child, deadline: Instant) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("it has no pid"))?;
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    poll_until(PollFd::new(&pidfd, PollFlags::IN), deadline)
}

fn poll_until(fd: PollFd<'_>, deadline: Instant) -> io::Result<bool> {
    let mut fds = [fd];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.try_into().map_err(io::Error::other)?;
        match poll(&mut fds, Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A binary of tests takes the command for a filter of tests, finds none, and writes no verdict.
    #[test]
    fn a_process_without_a_verdict_is_told() {
        let error = ask_process::<Option<RuleFault>>(SUBCOMMAND, b"answer 410", "a.rb").unwrap_err();
        let fault = no_verdict("a.rb", &error);
        assert!(
            fault.to_string().starts_with("NGY0611: a.rb: the process that checks it gave no verdict: "),
            "{fault}"
        );
    }

    fn verdict_of(program: &str) -> io::Result<Option<Vec<u8>>> {
        let mut child = Command::new("sh").args(["-c", program]).stdout(Stdio::piped()).spawn()?;
        let verdict = read_verdict(&mut child);
        let _ = child.kill();
        child.wait()?;
        verdict
    }

    #[test]
    fn a_verdict_is_read_to_its_end_and_bounded() {
        assert_eq!(verdict_of("printf nu; printf ll").unwrap().as_deref(), Some(&b"null"[..]));
        assert!(verdict_of("yes").unwrap_err().to_string().contains("more than"), "it would never end");
    }
}

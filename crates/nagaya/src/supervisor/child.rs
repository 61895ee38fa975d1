//! Starts a process of the node by re-executing this program, watches it and ends it.
//!
//! Not here: when to do so (`supervisor`), the first steps of the process (`rights`), its
//! inheritance (`inherit`).

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::inherit::{InheritedFds, PassedFds, VARIABLE};
use crate::logging::LogSink;

/// The processes that a supervisor starts, in the order in which they start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessRole {
    Keeper,
    Edge,
}

impl ProcessRole {
    pub const ALL: [Self; 2] = [Self::Keeper, Self::Edge];

    /// Returns the hidden subcommand, which is also its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Keeper => "keeper",
            Self::Edge => "edge",
        }
    }
}

impl fmt::Display for ProcessRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A running process. Dropping it ends it: nothing of a node outlives its supervisor.
#[derive(Debug)]
pub struct ChildProcess {
    pub pid: i32,
    /// Names this very process, even after it was reaped and its pid was reused.
    pidfd: OwnedFd,
}

impl ChildProcess {
    pub fn signal(&self, signal: Signal) {
        // The only possible failure is that it has ended, which is the goal.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Processes that are started meanwhile begin without transparent huge pages. This process has
/// none, either, until this is dropped.
struct SmallPages;

impl SmallPages {
    fn begin() -> io::Result<Self> {
        rustix::thread::disable_transparent_huge_pages(true)?;
        Ok(Self)
    }
}

impl Drop for SmallPages {
    fn drop(&mut self) {
        // It fails only if the first call has failed.
        let _ = rustix::thread::disable_transparent_huge_pages(false);
    }
}

/// Starts the process with the descriptors that `inherited` describes. Returns the future of its
/// end. It must be called on the thread that lives as long as the supervisor. The kernel ends the
/// process together with the thread that started it.
pub fn spawn(
    role: ProcessRole,
    inherited: &InheritedFds,
    descriptors: Vec<BorrowedFd<'_>>,
    sink: &LogSink,
) -> io::Result<(ChildProcess, impl Future<Output = io::Result<ExitStatus>> + use<>)> {
    let passing = PassedFds::new(descriptors)?;
    // The running program, even if an upgrade replaced the file meanwhile: the processes speak one
    // version.
    let mut command = tokio::process::Command::new("/proc/self/exe");
    command
        .arg0(format!("nagaya-{role}"))
        .arg(role.name())
        .env(VARIABLE, serde_json::to_string(inherited)?)
        .stdin(Stdio::null())
        // Ctrl-C is meant for the supervisor, which then ends the others in order.
        .process_group(0)
        .kill_on_drop(true);
    if sink.is_file() {
        command.stderr(Stdio::piped());
    }
    let small_pages = inherited.small_pages.then(SmallPages::begin).transpose()?;
    let mut process = command.spawn()?;
    drop((passing, small_pages));
    let pid = process.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let pid = pid.expect("a process that was not waited for has a pid");
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    if let Some(stderr) = process.stderr.take() {
        sink.copy_from(std::fs::File::from(stderr.into_owned_fd()?))?;
    }
    Ok((ChildProcess { pid: pid.as_raw_nonzero().get(), pidfd }, async move { process.wait().await }))
}

/// Returns how a process ended, for a log line.
pub fn reason(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => match nix::sys::signal::Signal::try_from(signal) {
                Ok(named) => format!("signal {signal} ({named})"),
                Err(_) => format!("signal {signal}"),
            },
            (None, None) => "no exit status".into(),
        },
        Err(error) => format!("an end that could not be learned: {error}"),
    }
}

/// Returns the resident memory of a process in bytes, if it still runs.
pub fn rss_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.split_ascii_whitespace().next()?;
    Some(kib.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_as_status_or_signal() {
        assert_eq!(reason(Ok(ExitStatus::from_raw(3 << 8))), "exit status 3");
        assert_eq!(reason(Ok(ExitStatus::from_raw(9))), "signal 9 (SIGKILL)");
    }

    #[test]
    fn a_running_process_has_memory_and_an_impossible_one_has_none() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(rss_bytes(own).unwrap() > 100_000);
        assert_eq!(rss_bytes(i32::MAX), None);
    }
}

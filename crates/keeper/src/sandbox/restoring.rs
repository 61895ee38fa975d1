//! A restore, while a tool brings an image's processes back, and before any of them runs.
//!
//! The tool is behind a filter that asks the init about calls that the filter of tenants would
//! refuse (`filter::of_restores`). The restored processes inherit it. So:
//!
//! - While it works all such calls go on: it needs some of them, and so does its code in the
//!   processes it makes.
//! - It lets go of a thread with a call of `ptrace`, and that call waits: first for the memory that
//!   is written meanwhile (`filling`), then for the comparison of all threads' rights with those of
//!   the sandbox (`rights`). If one has others, all of it is killed.
//! - From then on nobody but the tool gets such a call through; and once the tool has ended nobody
//!   answers, and the kernel refuses them (`ENOSYS`). So the filter of tenants holds whatever
//!   filters an image names. A process of an image that the keeper took has its own one, too, and
//!   that one answers first.
//!
//! Not here: which calls are held (`filter`), the keeper's use of the result (`image`).

use std::io;
use std::os::fd::OwnedFd;

use nagaya_keeper_api::protocol::ProcessExit;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::filling::MemoryFilling;
use super::filter::PTRACE_DETACH;
use super::kernel::{self, NotificationReply, SeccompNotification};
use super::rights::ThreadRights;

/// One restore.
#[derive(Debug)]
pub struct RestoreState {
    /// Number of the tool. `None` if it has not started.
    tool: Option<u32>,
    /// `None` if no memory is written beside it.
    filling: Option<MemoryFilling>,
    rights: ThreadRights,
    /// The tool's first call that releases a thread, while memory is still written.
    held: Option<SeccompNotification>,
    /// Result of the comparison. `None` if the tool has released no thread.
    compared: Option<Result<(), String>>,
}

impl RestoreState {
    pub fn new(filling: Option<MemoryFilling>, rights: ThreadRights) -> Self {
        Self { tool: None, filling, rights, held: None, compared: None }
    }

    pub fn started(&mut self, tool: u32) {
        self.tool = Some(tool);
    }

    /// A process has ended, which may have been the one that writes memory.
    pub fn ended(&mut self, pid: u32, exit: &ProcessExit, questions: Option<&OwnedFd>) -> io::Result<()> {
        if let Some(filling) = &mut self.filling {
            filling.ended(pid, exit);
        }
        match (self.held, questions) {
            (Some(question), Some(questions)) if self.is_filled() => {
                self.held = None;
                let answer = self.let_go(&question);
                kernel::answer(questions, question, answer)
            }
            _ => Ok(()),
        }
    }

    /// Answers the next held call, or keeps it waiting.
    pub fn answer(&mut self, questions: &OwnedFd) -> io::Result<()> {
        let Some(question) = kernel::next_question(questions)? else { return Ok(()) };
        let lets_go = question.is_ptrace(PTRACE_DETACH);
        if lets_go && !self.is_filled() {
            self.held = Some(question);
            return Ok(());
        }
        let answer = match lets_go {
            true => self.let_go(&question),
            false => self.decide(&question),
        };
        kernel::answer(questions, question, answer)
    }

    /// Whether all memory is written.
    fn is_filled(&self) -> bool {
        self.filling.as_ref().is_none_or(MemoryFilling::is_done)
    }

    /// Decides about any other call that the filter of tenants refuses.
    fn decide(&self, question: &SeccompNotification) -> NotificationReply {
        let is_tools = u32::try_from(question.pid).is_ok_and(|pid| Some(pid) == self.tool);
        match self.compared {
            // Only the tool's own code runs.
            None => NotificationReply::GoOn,
            Some(_) if is_tools => NotificationReply::GoOn,
            Some(_) => NotificationReply::Error(libc::EPERM),
        }
    }

    fn let_go(&mut self, question: &SeccompNotification) -> NotificationReply {
        if let Some(errno) = self.fill_errno() {
            return NotificationReply::Error(errno);
        }
        let compared = match &self.compared {
            None => self.rights.compare_all(self.tool.unwrap_or(0)),
            Some(before) => before.clone(),
        };
        // The first comparison covered all threads that there were. Each is checked once more when
        // it is its turn.
        let thread = u32::try_from(question.args[1] & u64::from(u32::MAX)).unwrap_or(0);
        let compared = compared.and_then(|()| self.rights.compare_thread(thread));
        let is_right = compared.is_ok();
        self.compared = Some(compared);
        if is_right {
            return NotificationReply::GoOn;
        }
        // Everything but this init, in its pid namespace. No process there has run, and none will.
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
        NotificationReply::Error(libc::EPERM)
    }

    /// Returns why memory was not written.
    pub fn fill_errno(&self) -> Option<i32> {
        self.filling.as_ref().and_then(MemoryFilling::errno)
    }

    /// Describes the thread that would have had other rights.
    pub fn wrong_rights(&self) -> Option<&str> {
        self.compared.as_ref().and_then(|compared| compared.as_ref().err()).map(String::as_str)
    }

    /// Whether all of it was compared and is correct.
    pub fn is_good(&self) -> bool {
        self.is_filled() && self.fill_errno().is_none() && matches!(self.compared, Some(Ok(())))
    }
}

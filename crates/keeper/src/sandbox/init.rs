//! The first process of a sandbox: starts programs for the keeper, and reaps all processes that
//! end.
//!
//! It is root of the sandbox and of nothing else, runs no tenant's code, and cannot be traced or
//! signalled by any: theirs have another uid and no rights. When the keeper closes its connection
//! it ends, and the kernel ends all others with it. Not here: how a child becomes a program
//! (`program`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sched_slice;

use super::checkpoint::{self, CheckpointStop};
use super::filling::MemoryFilling;
use super::kernel::{self, SingleThreaded};
use super::order::{ChildStep, InitReply, InitRequest, ProcessRole, RunRequest};
use super::program::{self, NotRun};
use super::restoring::RestoreState;
use super::rights::ThreadRights;
use super::{channel, session};

/// Maximum number of processes whose end is reported to the keeper at once.
const WATCHED_MAX: usize = 256;

/// Facts about its sandbox.
#[derive(Debug, Clone, Copy)]
pub struct InitIdentity {
    /// Uid of the tenant.
    pub uid: u32,
    pub gid: u32,
    pub shm_device: u64,
}

struct SandboxInit<'a> {
    alone: &'a SingleThreaded,
    keeper: &'a OwnedFd,
    own: InitIdentity,
    children: SignalFd,
    /// Pipes to which ends of processes are written.
    watched: HashMap<u32, OwnedFd>,
    /// Held system calls of a tool.
    questions: Option<OwnedFd>,
    /// State of the last checkpoint, until it is read.
    standstill: Option<CheckpointStop>,
    /// State of the last restore.
    restoring: Option<RestoreState>,
    /// Filters that its tool has put on restored processes.
    guards: u32,
    /// A running tool, and the last number that was given out before it.
    tool: Option<(u32, String)>,
}

/// File with the last process number given out here. The next process gets the next free one.
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";

/// Serves until the keeper closes the connection.
pub fn run(alone: &SingleThreaded, keeper: &OwnedFd, own: InitIdentity) -> u8 {
    sched_slice::request_short_slice();
    let served = begin(alone, keeper, own).and_then(|mut init| {
        while init.turn()? {}
        Ok(())
    });
    u8::from(served.is_err())
}

fn begin<'a>(
    alone: &'a SingleThreaded,
    keeper: &'a OwnedFd,
    own: InitIdentity,
) -> io::Result<SandboxInit<'a>> {
    // The launcher lets the kernel reap. Here every end counts.
    kernel::default_signals();
    let mut child = SigSet::empty();
    child.add(Signal::SIGCHLD);
    child.thread_block()?;
    let children = SignalFd::with_flags(&child, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let watched = HashMap::new();
    Ok(SandboxInit {
        alone,
        keeper,
        own,
        children,
        watched,
        questions: None,
        standstill: None,
        restoring: None,
        guards: 0,
        tool: None,
    })
}

impl SandboxInit<'_> {
    /// Waits for the next event and handles it. Returns false if the keeper has gone.
    fn turn(&mut self) -> io::Result<bool> {
        let mut events = vec![
            PollFd::new(self.keeper, PollFlags::IN),
            PollFd::from_borrowed_fd(self.children.as_fd(), PollFlags::IN),
        ];
        events.extend(self.questions.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        match poll(&mut events, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let happened: Vec<PollFlags> = events.iter().map(PollFd::revents).collect();
        if !happened[1].is_empty() {
            while self.children.read_signal()?.is_some() {}
            self.reap()?;
        }
        if let Some(asked) = happened.get(2).filter(|asked| !asked.is_empty()) {
            self.answer(*asked);
        }
        if happened[0].is_empty() {
            return Ok(true);
        }
        match channel::receive::<InitRequest>(self.keeper)? {
            Some((ask, fds)) => self.serve(ask, fds).map(|()| true),
            None => Ok(false),
        }
    }

    fn reap(&mut self) -> io::Result<()> {
        while let Some((pid, exit)) = kernel::reap_any()? {
            if let Some((_, before)) = self.tool.take_if(|(tool, _)| *tool == pid) {
                // Otherwise numbers continue from the tool's: nothing depends on it.
                let _ = std::fs::write(LAST_PID, before);
                // From here on, calls that a restore's filter holds are refused: a restored process
                // may make them.
                self.questions = None;
            }
            if let Some(restoring) = &mut self.restoring
                && restoring.ended(pid, &exit, self.questions.as_ref()).is_err()
            {
                self.questions = None;
            }
            if let Some(end) = self.watched.remove(&pid) {
                let bytes = postcard::to_stdvec(&exit).unwrap_or_default();
                // A keeper without interest has closed its end.
                let _ = rustix::io::write(end, &bytes);
            }
        }
        Ok(())
    }

    /// Answers a tool's held calls in place of the kernel. A tool that has ended makes none.
    fn answer(&mut self, asked: PollFlags) {
        let questions = self.questions.as_ref().filter(|_| asked.contains(PollFlags::IN));
        let is_answered = match (questions, &mut self.standstill, &mut self.restoring) {
            (Some(questions), Some(standstill), _) => checkpoint::answer(questions, standstill).is_ok(),
            (Some(questions), None, Some(restoring)) => restoring.answer(questions).is_ok(),
            _ => false,
        };
        if !is_answered {
            self.questions = None;
        }
    }

    fn serve(&mut self, ask: InitRequest, fds: Vec<OwnedFd>) -> io::Result<()> {
        let done = match ask {
            InitRequest::Run(run) => self.run(&run, &fds),
            InitRequest::Adopt { pid } => {
                self.check_restored().and_then(|()| adopt(pid)).map(|pidfd| (pid, pidfd))
            }
            InitRequest::EndSession { pid } => {
                session::end(pid)?;
                // The end of its first process is reported before.
                self.reap()?;
                return channel::send(self.keeper, &InitReply::SessionEnded, &[]);
            }
            InitRequest::Restored => {
                let errno = self.restoring.as_ref().and_then(RestoreState::fill_errno);
                let wrong_rights = self.restoring.as_ref().and_then(RestoreState::wrong_rights);
                let wrong_rights = wrong_rights.map(ToOwned::to_owned);
                return channel::send(self.keeper, &InitReply::Restored { errno, wrong_rights }, &[]);
            }
            InitRequest::Kept => {
                let kept = self.standstill.take().map_or(Ok(()), CheckpointStop::kept);
                let errno = kept.err().map(|error| errno(&error));
                return channel::send(self.keeper, &InitReply::Kept { errno }, &[]);
            }
        };
        let watched = done.and_then(|(pid, pidfd)| Ok((pid, pidfd, self.watch(pid)?)));
        match watched {
            Ok((pid, pidfd, end)) => {
                channel::send(self.keeper, &InitReply::Runs { pid }, &[pidfd.as_fd(), end.as_fd()])
            }
            Err(NotRun { step, error }) => {
                channel::send(self.keeper, &InitReply::NotRun { step, errno: errno(&error) }, &[])
            }
        }
    }

    fn run(&mut self, run: &RunRequest, fds: &[OwnedFd]) -> Result<(u32, OwnedFd), NotRun> {
        if run.role == ProcessRole::Tenant {
            let started = program::start(self.alone, run, fds, self.own.uid, self.own.gid)?;
            return Ok((started.pid, started.pidfd));
        }
        // Forks of a tool get numbers after its own: the low ones are those of an image.
        let failed = |error: io::Error| NotRun { step: ChildStep::Fork, error };
        let before = std::fs::read_to_string(LAST_PID).map_err(failed)?;
        std::fs::write(LAST_PID, run.pid.unwrap_or(0).to_string()).map_err(failed)?;
        self.standstill = self.standstill(run, fds).map_err(failed)?;
        if let ProcessRole::Tool { brings_back: true, shown, .. } = &run.role {
            self.guards = program::guards(shown);
            let InitIdentity { uid, gid, .. } = self.own;
            let filling = MemoryFilling::start(self.alone, run, fds).map_err(failed)?;
            let rights = ThreadRights { uid, gid, filters: self.guards + 1 };
            self.restoring = Some(RestoreState::new(filling, rights));
        }
        let started = program::start(self.alone, run, fds, self.own.uid, self.own.gid)?;
        if let (Some(restoring), ProcessRole::Tool { brings_back: true, .. }) =
            (&mut self.restoring, &run.role)
        {
            restoring.started(started.pid);
        }
        self.questions = started.questions;
        self.tool = Some((started.pid, before));
        Ok((started.pid, started.pidfd))
    }

    /// Fails unless a restored process may be used: its memory is written, and its rights are the
    /// sandbox'.
    fn check_restored(&self) -> Result<(), NotRun> {
        match &self.restoring {
            Some(restoring) if restoring.is_good() => Ok(()),
            Some(restoring) => {
                let errno = restoring.fill_errno();
                let step = if errno.is_some() { ChildStep::Memory } else { ChildStep::Rights };
                let errno = errno.unwrap_or(Errno::PERM.raw_os_error());
                Err(NotRun { step, error: io::Error::from_raw_os_error(errno) })
            }
            None => Err(NotRun { step: ChildStep::Rights, error: Errno::SRCH.into() }),
        }
    }

    /// Makes the state for a tool that takes a checkpoint.
    fn standstill(&self, run: &RunRequest, fds: &[OwnedFd]) -> io::Result<Option<CheckpointStop>> {
        let ProcessRole::Tool { takes_into: Some(image), .. } = &run.role else { return Ok(None) };
        let found = run.fds.iter().zip(fds).find(|(number, _)| *number == image);
        let (_, image) = found.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Some(CheckpointStop::new(image.try_clone()?, self.own.shm_device, self.guards)))
    }

    /// Returns a pipe that reports the end of a process that has not been reaped.
    fn watch(&mut self, pid: u32) -> Result<OwnedFd, NotRun> {
        let failed = |error: io::Error| NotRun { step: ChildStep::Descriptors, error };
        if self.watched.len() >= WATCHED_MAX {
            return Err(failed(io::ErrorKind::QuotaExceeded.into()));
        }
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
            .map_err(|e| failed(e.into()))?;
        self.watched.insert(pid, write);
        Ok(read)
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

fn adopt(pid: u32) -> Result<OwnedFd, NotRun> {
    let opened = || -> io::Result<OwnedFd> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        Ok(pidfd_open(number, PidfdFlags::empty())?)
    };
    opened().map_err(|error| NotRun { step: ChildStep::Fork, error })
}

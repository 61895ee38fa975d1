//! The first process of a sandbox: starts what the keeper asks for, and reaps whatever ends.
//!
//! It is root of the sandbox and of nothing else, runs no tenant's code, and cannot be traced or signalled by any:
//! theirs have another uid and no rights. When the keeper closes its connection it ends, and the kernel ends all
//! others with it. Not here: how a child becomes a program (`program`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::checkpoint::{self, Standstill};
use super::filling::Filling;
use super::kernel::{self, Alone};
use super::order::{Ask, Role, Run, Step, Told};
use super::program::{self, NotRun};
use super::restoring::Restoring;
use super::rights::Rights;
use super::{channel, session};
use crate::slice;

/// Ends of processes the keeper wants to be told about at once.
const WATCHED_MAX: usize = 256;

/// What it must know of its sandbox.
#[derive(Debug, Clone, Copy)]
pub struct Own {
    /// Of the tenant.
    pub uid: u32,
    pub gid: u32,
    pub shm_device: u64,
}

struct Init<'a> {
    alone: &'a Alone,
    keeper: &'a OwnedFd,
    own: Own,
    children: SignalFd,
    /// Where the end of a process is written.
    watched: HashMap<u32, OwnedFd>,
    /// System calls of a tool that wait for answers.
    questions: Option<OwnedFd>,
    /// Of the checkpoint that ran last, until it is asked for.
    standstill: Option<Standstill>,
    /// Of the restore that ran last.
    restoring: Option<Restoring>,
    /// Filters that its tool has put on what it brought back.
    guards: u32,
    /// A tool that runs, and the last number that was given out before it.
    tool: Option<(u32, String)>,
}

/// The last number that was given to a process here. The next one gets the next that is free.
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";

/// Serves until the keeper closes the connection.
pub fn run(alone: &Alone, keeper: &OwnedFd, own: Own) -> u8 {
    slice::shorten();
    let served = begin(alone, keeper, own).and_then(|mut init| {
        while init.turn()? {}
        Ok(())
    });
    u8::from(served.is_err())
}

fn begin<'a>(alone: &'a Alone, keeper: &'a OwnedFd, own: Own) -> io::Result<Init<'a>> {
    // The launcher lets the kernel reap; here every end counts.
    kernel::default_signals();
    let mut child = SigSet::empty();
    child.add(Signal::SIGCHLD);
    child.thread_block()?;
    let children = SignalFd::with_flags(&child, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let watched = HashMap::new();
    Ok(Init {
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

impl Init<'_> {
    /// Waits for the next thing to do and does it. False: the keeper has gone.
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
        match channel::receive::<Ask>(self.keeper)? {
            Some((ask, fds)) => self.serve(ask, fds).map(|()| true),
            None => Ok(false),
        }
    }

    fn reap(&mut self) -> io::Result<()> {
        while let Some((pid, exit)) = kernel::reap_any()? {
            if let Some((_, before)) = self.tool.take_if(|(tool, _)| *tool == pid) {
                // Otherwise numbers go on from the tool's: nothing depends on it.
                let _ = std::fs::write(LAST_PID, before);
                // From here on what a restore's filter asks about is refused: it may be what was brought back that asks.
                self.questions = None;
            }
            if let Some(restoring) = &mut self.restoring
                && restoring.ended(pid, &exit, self.questions.as_ref()).is_err()
            {
                self.questions = None;
            }
            if let Some(end) = self.watched.remove(&pid) {
                let bytes = postcard::to_stdvec(&exit).unwrap_or_default();
                // A keeper that does not want to know has closed its end.
                let _ = rustix::io::write(end, &bytes);
            }
        }
        Ok(())
    }

    /// Answers for the kernel what a tool asks it. One that has ended asks no more.
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

    fn serve(&mut self, ask: Ask, fds: Vec<OwnedFd>) -> io::Result<()> {
        let done = match ask {
            Ask::Run(run) => self.run(&run, &fds),
            Ask::Adopt { pid } => self.check_restored().and_then(|()| adopt(pid)).map(|pidfd| (pid, pidfd)),
            Ask::EndSession { pid } => {
                session::end(pid)?;
                // Who waits for the end of its first process is told before.
                self.reap()?;
                return channel::send(self.keeper, &Told::SessionEnded, &[]);
            }
            Ask::Restored => {
                let errno = self.restoring.as_ref().and_then(Restoring::fill_errno);
                let wrong_rights = self.restoring.as_ref().and_then(Restoring::wrong_rights);
                let wrong_rights = wrong_rights.map(ToOwned::to_owned);
                return channel::send(self.keeper, &Told::Restored { errno, wrong_rights }, &[]);
            }
            Ask::Kept => {
                let kept = self.standstill.take().map_or(Ok(()), Standstill::kept);
                let errno = kept.err().map(|error| errno(&error));
                return channel::send(self.keeper, &Told::Kept { errno }, &[]);
            }
        };
        let watched = done.and_then(|(pid, pidfd)| Ok((pid, pidfd, self.watch(pid)?)));
        match watched {
            Ok((pid, pidfd, end)) => {
                channel::send(self.keeper, &Told::Runs { pid }, &[pidfd.as_fd(), end.as_fd()])
            }
            Err(NotRun { step, error }) => {
                channel::send(self.keeper, &Told::NotRun { step, errno: errno(&error) }, &[])
            }
        }
    }

    fn run(&mut self, run: &Run, fds: &[OwnedFd]) -> Result<(u32, OwnedFd), NotRun> {
        if run.role == Role::Tenant {
            let started = program::start(self.alone, run, fds, self.own.uid, self.own.gid)?;
            return Ok((started.pid, started.pidfd));
        }
        // What a tool forks gets numbers after its own: the low ones are those of an image.
        let failed = |error: io::Error| NotRun { step: Step::Fork, error };
        let before = std::fs::read_to_string(LAST_PID).map_err(failed)?;
        std::fs::write(LAST_PID, run.pid.unwrap_or(0).to_string()).map_err(failed)?;
        self.standstill = self.standstill(run, fds).map_err(failed)?;
        if let Role::Tool { brings_back: true, shown, .. } = &run.role {
            self.guards = program::guards(shown);
            let Own { uid, gid, .. } = self.own;
            let filling = Filling::start(self.alone, run, fds).map_err(failed)?;
            let rights = Rights { uid, gid, filters: self.guards + 1 };
            self.restoring = Some(Restoring::new(filling, rights));
        }
        let started = program::start(self.alone, run, fds, self.own.uid, self.own.gid)?;
        if let (Some(restoring), Role::Tool { brings_back: true, .. }) = (&mut self.restoring, &run.role) {
            restoring.started(started.pid);
        }
        self.questions = started.questions;
        self.tool = Some((started.pid, before));
        Ok((started.pid, started.pidfd))
    }

    /// What a restore has brought back may be used: its memory is written, and its rights are the sandbox'.
    fn check_restored(&self) -> Result<(), NotRun> {
        match &self.restoring {
            Some(restoring) if restoring.is_good() => Ok(()),
            Some(restoring) => {
                let errno = restoring.fill_errno();
                let step = if errno.is_some() { Step::Memory } else { Step::Rights };
                let errno = errno.unwrap_or(Errno::PERM.raw_os_error());
                Err(NotRun { step, error: io::Error::from_raw_os_error(errno) })
            }
            None => Err(NotRun { step: Step::Rights, error: Errno::SRCH.into() }),
        }
    }

    /// Of a tool that takes a checkpoint.
    fn standstill(&self, run: &Run, fds: &[OwnedFd]) -> io::Result<Option<Standstill>> {
        let Role::Tool { takes_into: Some(image), .. } = &run.role else { return Ok(None) };
        let found = run.fds.iter().zip(fds).find(|(number, _)| *number == image);
        let (_, image) = found.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Some(Standstill::new(image.try_clone()?, self.own.shm_device, self.guards)))
    }

    /// A pipe that tells of the end of a process that has not been reaped.
    fn watch(&mut self, pid: u32) -> Result<OwnedFd, NotRun> {
        let failed = |error: io::Error| NotRun { step: Step::Descriptors, error };
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
    opened().map_err(|error| NotRun { step: Step::Fork, error })
}

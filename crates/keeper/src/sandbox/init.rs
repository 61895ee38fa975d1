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
    filling: Option<Filling>,
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
        filling: None,
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
        let is_answerable = self.filling.as_ref().is_none_or(Filling::is_done);
        let questions = self.questions.as_ref().filter(|_| is_answerable);
        events.extend(questions.map(|fd| PollFd::new(fd, PollFlags::IN)));
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
            }
            if let Some(filling) = &mut self.filling {
                filling.ended(pid, &exit);
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
        let is_answered = match (questions, &mut self.standstill, &self.filling) {
            (Some(questions), Some(standstill), _) => checkpoint::answer(questions, standstill).is_ok(),
            (Some(questions), None, Some(filling)) => filling.answer(questions).is_ok(),
            _ => false,
        };
        if !is_answered {
            self.questions = None;
        }
    }

    fn serve(&mut self, ask: Ask, fds: Vec<OwnedFd>) -> io::Result<()> {
        let done = match ask {
            Ask::Run(run) => self.run(&run, &fds),
            Ask::Adopt { pid } => self.filled().and_then(|()| adopt(pid)).map(|pidfd| (pid, pidfd)),
            Ask::EndSession { pid } => {
                session::end(pid)?;
                // Who waits for the end of its first process is told before.
                self.reap()?;
                return channel::send(self.keeper, &Told::SessionEnded, &[]);
            }
            Ask::Filled => {
                let errno = self.filling.as_ref().and_then(Filling::errno);
                return channel::send(self.keeper, &Told::Filled { errno }, &[]);
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
        self.standstill = standstill(run, fds, self.own.shm_device).map_err(failed)?;
        self.filling = Filling::start(self.alone, run, fds).map_err(failed)?;
        let started = program::start(self.alone, run, fds, self.own.uid, self.own.gid)?;
        self.questions = started.questions;
        self.tool = Some((started.pid, before));
        Ok((started.pid, started.pidfd))
    }

    /// What a restore has brought back may be used.
    fn filled(&self) -> Result<(), NotRun> {
        match &self.filling {
            Some(filling) if !filling.is_done() || filling.errno().is_some() => {
                let error =
                    io::Error::from_raw_os_error(filling.errno().unwrap_or(Errno::AGAIN.raw_os_error()));
                Err(NotRun { step: Step::Memory, error })
            }
            _ => Ok(()),
        }
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

/// Of a tool that takes a checkpoint.
fn standstill(run: &Run, fds: &[OwnedFd], shm_device: u64) -> io::Result<Option<Standstill>> {
    let Role::Tool { takes_into: Some(image), .. } = &run.role else { return Ok(None) };
    let found = run.fds.iter().zip(fds).find(|(number, _)| *number == image);
    let (_, image) = found.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(Some(Standstill::new(image.try_clone()?, shm_device)))
}

fn adopt(pid: u32) -> Result<OwnedFd, NotRun> {
    let opened = || -> io::Result<OwnedFd> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        Ok(pidfd_open(number, PidfdFlags::empty())?)
    };
    opened().map_err(|error| NotRun { step: Step::Fork, error })
}

//! The launcher's process: a copy of the keeper from before it had threads. It forks once for each
//! sandbox, and a few times ahead when it has nothing else to do.
//!
//! It exists for two reasons. Only a process with one thread can be forked into a working whole.
//! And a fork of it is cheap: it has touched almost no memory, and that in small pages
//! (`Start::small_pages`). A launcher and its hundreds of forks share pages. Kernel code that
//! searches the users of a page walks through all of them. For a huge page it does so 512 times in
//! each. The launcher ends with the keeper, and every sandbox with it. Not here: the parts of a
//! sandbox (`birth`), the keeper's end of the connection (`super::Launcher`).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::libc;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, Signal};

use super::kernel::{self, ForkOptions, SingleThreaded};
use super::order::LauncherCommand;
use super::{birth, channel, warden};

/// Maximum number of births that wait for their orders. They hold hardly any memory. More than so
/// many wakes at once are no faster for them, because then CPUs are short.
pub const AHEAD_MAX: usize = 4;

/// Time without an order before something is made ahead: a recent order needs the CPUs more.
const QUIET: Duration = Duration::from_millis(20);

/// Serves orders until the keeper has gone.
pub fn run(alone: &SingleThreaded, orders: &OwnedFd, keeper: i32) -> u8 {
    match set_up(orders, keeper).and_then(|()| serve(alone, orders)) {
        Ok(()) => 0,
        Err(error) => {
            // Only the log that standard error goes to can be notified.
            eprintln!("the launcher of sandboxes ends: {error}");
            1
        }
    }
}

fn set_up(orders: &OwnedFd, keeper: i32) -> io::Result<()> {
    rustix::thread::set_name(c"nagaya-launcher")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // If the keeper died before that line, there is no one left to send the signal.
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != keeper) {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the keeper has ended"));
    }
    // A terminal's Ctrl-C and a service's end reach the whole process group. Only the keeper acts
    // on them.
    kernel::ignore_signals(&[
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGTERM,
        libc::SIGQUIT,
        libc::SIGPIPE,
        libc::SIGCHLD,
    ]);
    let nothing = OwnedFd::from(File::options().read(true).write(true).open("/dev/null")?);
    for standard in [0, 1] {
        kernel::place(nothing.as_fd(), standard)?;
    }
    kernel::close_all_but(&mut [0, 1, 2, orders.as_raw_fd()])?;
    // Closed just now.
    std::mem::forget(nothing);
    Ok(())
}

fn serve(alone: &SingleThreaded, orders: &OwnedFd) -> io::Result<()> {
    // Connections of births that are not forked yet.
    let mut unborn = VecDeque::new();
    // Closed by the other side when the last forked birth has its namespaces, or has an order.
    let mut making: Option<OwnedFd> = None;
    loop {
        let Some(index) = ripe(orders, &unborn, &mut making)? else {
            match channel::receive::<LauncherCommand>(orders) {
                Ok(Some((order, fds))) => match (order, fds.into_iter().next()) {
                    (LauncherCommand::Sandbox, Some(keeper)) => unborn.push_back(keeper),
                    (LauncherCommand::Warden, Some(keeper)) => fork(alone, |_| warden::run(keeper)),
                    (_, None) => {}
                },
                Ok(None) => return Ok(()),
                // Its descriptors are closed, which the caller notices.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    eprintln!("the launcher of sandboxes got a bad order: {error}");
                }
                Err(error) => return Err(error),
            }
            continue;
        };
        if let Some(keeper) = unborn.remove(index) {
            let (made, begun) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            fork(alone, |alone| birth::run(alone, &keeper, begun));
            // The end of an ordered birth is not reported: the keeper waits for it.
            making = Some(made);
        }
    }
}

/// Waits until something is to be done. Returns the birth to fork now. It is one that has its
/// order. It is the first if nothing is ordered for a moment and no other is being made. `None`:
/// there is a message from the keeper.
fn ripe(
    orders: &OwnedFd,
    unborn: &VecDeque<OwnedFd>,
    making: &mut Option<OwnedFd>,
) -> io::Result<Option<usize>> {
    if unborn.len() > AHEAD_MAX {
        return Ok(Some(0));
    }
    loop {
        let quiet = (!unborn.is_empty() && making.is_none()).then(|| kernel::timespec(QUIET));
        let mut watched: Vec<_> = unborn
            .iter()
            .chain([orders])
            .chain(making.as_ref())
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        match poll(&mut watched, quiet.as_ref()) {
            Ok(0) => return Ok(Some(0)),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let ready = watched.iter().position(|one| !one.revents().is_empty());
        match ready.filter(|index| *index <= unborn.len()) {
            Some(index) => return Ok((index < unborn.len()).then_some(index)),
            None => *making = None,
        }
    }
}

/// Forks a child, which answers the keeper itself. If that fails its connection is closed, which is
/// an answer, too.
fn fork(alone: &SingleThreaded, child: impl FnOnce(&SingleThreaded) -> u8) {
    if let Err(error) = alone.fork(&ForkOptions::default(), child) {
        eprintln!("the launcher of sandboxes cannot fork: {error}");
    }
}

//! The launcher's process: a copy of the keeper from before it had threads. It makes one more copy for each sandbox.
//!
//! It exists because only a process with one thread can be forked into a working whole, and because a fork of it is
//! cheap: it has touched almost no memory. It ends with the keeper, and every sandbox with it. Not here: what a sandbox
//! is made of (`birth`), the keeper's end of the connection (`super::Launcher`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::libc;
use rustix::process::{DumpableBehavior, Signal};

use super::kernel::{self, Alone, Fork};
use super::order::Order;
use super::{birth, channel, warden};

/// Serves orders until the keeper has gone.
pub fn run(alone: &Alone, orders: &OwnedFd, keeper: i32) -> u8 {
    match set_up(orders, keeper).and_then(|()| serve(alone, orders)) {
        Ok(()) => 0,
        Err(error) => {
            // Nobody is left to be told but the log that standard error goes to.
            eprintln!("the launcher of sandboxes ends: {error}");
            1
        }
    }
}

fn set_up(orders: &OwnedFd, keeper: i32) -> io::Result<()> {
    rustix::thread::set_name(c"nagaya-launcher")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // A keeper that died before that line left no one to send the signal.
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != keeper) {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the keeper has ended"));
    }
    // A terminal's Ctrl-C and a service's end reach the whole process group; the keeper alone acts on them.
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

fn serve(alone: &Alone, orders: &OwnedFd) -> io::Result<()> {
    loop {
        let (order, fds) = match channel::receive::<Order>(orders) {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(()),
            // Its descriptors are closed, which tells who gave the order.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                eprintln!("the launcher of sandboxes got a bad order: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        // It answers the keeper itself. A fork that fails closes the keeper's connection, which is an answer too.
        let forked = alone.fork(&Fork::default(), |alone| match order {
            Order::Sandbox(birth) => birth::run(alone, &birth, fds),
            Order::Warden => warden::run(fds),
        });
        if let Err(error) = forked {
            eprintln!("the launcher of sandboxes cannot fork: {error}");
        }
    }
}

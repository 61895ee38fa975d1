//! The one thread of the edge that runs before all others of the machine: it answers the other nodes' questions whether this node is
//! there, and a machine with much to do is not to look dead.
//!
//! The supervisor does it from outside, so the edge needs no right for it, and can give it to no other thread. Not here: the thread
//! (`nagaya_edge::peers::probe`), the warden, which runs before it (`nagaya_keeper`).

#![allow(unsafe_code)]

use std::fs;
use std::io;

use nagaya_edge::peers::probe;
use nix::libc;
use rustix::process::{Pid, setpriority_process};

/// The lowest there is: before all that have none. The warden has the next.
const REAL_TIME_PRIORITY: i32 = 1;

/// Without this a node is only taken for silent more easily. A node that is in no cluster has no such thread.
pub fn have_one_thread_first(edge: i32) {
    let Some(thread) = thread_of(edge, probe::THREAD) else { return };
    if let Err(error) = real_time(thread) {
        // Not as root, or in a group that has no real time: most have none, where the kernel has such groups.
        let nice = setpriority_process(Some(thread), -20);
        let is_first = nice.is_ok();
        tracing::debug!(%error, is_first, "the thread that other nodes ask has no real-time priority, and is first among equals at best");
    }
}

fn thread_of(process: i32, name: &str) -> Option<Pid> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten();
    let has_name = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let mut named = tasks.filter(has_name);
    Pid::from_raw(named.next()?.file_name().to_str()?.parse().ok()?)
}

fn real_time(thread: Pid) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: REAL_TIME_PRIORITY };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` outlives the call, which takes numbers otherwise.
    let set = unsafe { libc::sched_setscheduler(thread.as_raw_nonzero().get(), policy, &raw const param) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_found_by_its_name() {
        let own = i32::try_from(std::process::id()).unwrap();
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("found-by-name".into());
        let (say, said) = std::sync::mpsc::channel();
        let running = thread.spawn(move || {
            say.send(rustix::thread::gettid()).unwrap();
            let _ = told.recv();
        });
        // A thread names itself when it begins.
        let is = said.recv().ok();
        assert_eq!(thread_of(own, "found-by-name"), is);
        assert_eq!(thread_of(own, "nobody"), None);
        drop(tell);
        running.unwrap().join().unwrap();
    }
}

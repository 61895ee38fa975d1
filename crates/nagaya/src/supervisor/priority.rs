//! Gives real-time priority to one thread of the edge, which answers other nodes' probes. A busy
//! machine must not look dead.
//!
//! The supervisor does it from outside. So the edge needs no right for it, and can give it to no
//! other thread.
//!
//! Not here: the thread (`nagaya_edge::cluster::peers::probe`), the warden, which runs before it
//! (`nagaya_keeper`).

#![allow(unsafe_code)]

use std::fs;
use std::io;

use nagaya_edge::PROBE_THREAD;
use nix::libc;
use rustix::process::{Pid, setpriority_process};

/// The lowest real-time priority: before all threads without one. The warden has the next.
const REAL_TIME_PRIORITY: i32 = 1;

/// Raises the thread's priority. Without it, a node counts as silent more easily. A node that is in
/// no cluster has no such thread.
pub fn have_one_thread_first(edge: i32) {
    let Some(thread) = thread_of(edge, PROBE_THREAD) else { return };
    if let Err(error) = real_time(thread) {
        // Not root, or a group without real-time: most groups have none, if the kernel has such
        // groups.
        let nice = setpriority_process(Some(thread), -20);
        let is_first = nice.is_ok();
        tracing::debug!(%error, is_first, "the thread that answers probes of other nodes has no real-time priority, and may wait for a CPU");
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
    // SAFETY: `param` outlives the call, whose other arguments are numbers.
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

//! Ends a session: the processes that a command in a sandbox has started, except those with
//! sessions of their own.
//!
//! Runs in the init of a sandbox, whose `/proc` has nothing but the sandbox in it. Not here: when a
//! session is ended (`instances::exec`).

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, kill_process};

/// Maximum number of passes over all processes, in case one forks while others are killed. Any
/// process left then is about to be killed by the kernel, or forks faster than the passes. Its cell
/// bounds that.
const ROUNDS_MAX: usize = 16;

/// Kills all of the session that this process began.
pub fn end(leader: u32) -> io::Result<()> {
    for _ in 0..ROUNDS_MAX {
        let mut is_empty = true;
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // A process that has ended meanwhile is in no session.
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            if session_of(&stat) != Some(leader) {
                continue;
            }
            is_empty = false;
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if is_empty {
            break;
        }
    }
    Ok(())
}

/// Parses a line of `/proc/<pid>/stat` (proc_pid_stat(5)). `None` if it has ended and waits to be
/// reaped.
fn session_of(stat: &str) -> Option<u32> {
    // The name is in parentheses, and may contain some itself.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let session = fields.nth(2)?;
    if state == "Z" { None } else { session.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_read_past_any_name() {
        assert_eq!(session_of("12 (a) b) S 1 12 7 0 -1"), Some(7));
        assert_eq!(session_of("12 (sh) Z 1 12 7 0 -1"), None);
        assert_eq!(session_of("12 (sh"), None);
    }
}

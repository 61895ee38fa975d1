//! The rights of a sandbox' processes, compared with the rights that the sandbox gives.
//!
//! An image says of each thread which ids, capabilities and filters it had, and CRIU gives it these
//! again. So a forged image could bring back root of the sandbox, or a process without the filter
//! of system calls. Here the kernel is asked what each thread really has
//! (`/proc/PID/task/TID/status`, proc_pid_status(5)), and in which namespaces it is
//! (namespaces(7)). The caller must have stopped all of these threads.
//!
//! Not here: when that is (`restoring`), how a program gives its rights up (`program`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Namespaces of a sandbox. No process of its tenant's is in others.
const NAMESPACES: [&str; 7] = ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"];

/// Number of the init.
const INIT_PID: u32 = 1;

/// Rights of every thread of the tenant's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadRights {
    pub uid: u32,
    pub gid: u32,
    /// Filters of system calls that it is behind.
    pub filters: u32,
}

impl ThreadRights {
    /// Compares all threads of all processes but the init and this tool. The error describes a
    /// thread with other rights.
    pub fn compare_all(&self, tool: u32) -> Result<(), String> {
        let own =
            own_namespaces().map_err(|error| format!("this sandbox' namespaces are not known: {error}"))?;
        let unknown = |error: io::Error| format!("its processes are not known: {error}");
        for process in numbers("/proc").map_err(unknown)? {
            if process == INIT_PID || process == tool {
                continue;
            }
            for thread in numbers(format!("/proc/{process}/task")).map_err(unknown)? {
                self.compare(process, thread, &own)?;
            }
        }
        Ok(())
    }

    /// Compares one thread.
    pub fn compare_thread(&self, thread: u32) -> Result<(), String> {
        let own =
            own_namespaces().map_err(|error| format!("this sandbox' namespaces are not known: {error}"))?;
        // Threads have no entry in a listing of /proc, but can be opened there.
        self.compare(thread, thread, &own)
    }

    fn compare(&self, process: u32, thread: u32, own: &[PathBuf]) -> Result<(), String> {
        let dir = PathBuf::from(format!("/proc/{process}/task/{thread}"));
        let wrong = |why: String| format!("thread {thread} of process {process} {why}");
        let status = fs::read_to_string(dir.join("status"))
            .map_err(|error| wrong(format!("cannot be looked at: {error}")))?;
        if has_ended(&status) {
            return Ok(());
        }
        self.compare_status(&status).map_err(wrong)?;
        let namespaces = namespaces_of(&dir)
            .map_err(|error| wrong(format!("is in namespaces that are not known: {error}")))?;
        match namespaces.iter().zip(own).zip(NAMESPACES).find(|((its, own), _)| its != own) {
            Some((_, name)) => Err(wrong(format!("is in another {name} namespace"))),
            None => Ok(()),
        }
    }

    /// The error is in words that follow the thread's number.
    fn compare_status(&self, status: &str) -> Result<(), String> {
        let ids = |id: u32| vec![id.to_string(); 4];
        let expected = [
            ("Uid:", ids(self.uid)),
            ("Gid:", ids(self.gid)),
            ("Groups:", Vec::new()),
            ("NoNewPrivs:", vec!["1".into()]),
            // SECCOMP_MODE_FILTER.
            ("Seccomp:", vec!["2".into()]),
            ("Seccomp_filters:", vec![self.filters.to_string()]),
        ];
        for (name, expected) in expected {
            let found = field(status, name)?;
            if found != expected {
                return Err(format!("has {name} {}, not {}", found.join(" "), expected.join(" ")));
            }
        }
        for name in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            let found = field(status, name)?;
            if found.is_empty() || !found.iter().all(|set| set.bytes().all(|digit| digit == b'0')) {
                return Err(format!("has {name} {}, not none", found.join(" ")));
            }
        }
        Ok(())
    }
}

/// Returns the words behind this name. Fails if the name is missing, or occurs twice.
fn field<'a>(status: &'a str, name: &str) -> Result<Vec<&'a str>, String> {
    let mut lines = status.lines().filter_map(|line| line.strip_prefix(name));
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line.split_whitespace().collect()),
        _ => Err(format!("has no {name} that the kernel tells")),
    }
}

/// Whether it has ended, so that its rights do not matter.
fn has_ended(status: &str) -> bool {
    field(status, "State:").is_ok_and(|words| words.first().is_some_and(|state| ["Z", "X"].contains(state)))
}

fn own_namespaces() -> io::Result<Vec<PathBuf>> {
    namespaces_of(Path::new("/proc/self"))
}

fn namespaces_of(dir: &Path) -> io::Result<Vec<PathBuf>> {
    NAMESPACES.iter().map(|name| fs::read_link(dir.join("ns").join(name))).collect()
}

/// Returns the entries of a directory that are numbers.
fn numbers(dir: impl AsRef<Path>) -> io::Result<Vec<u32>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<io::Result<Vec<_>>>()?;
    Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RIGHTS: ThreadRights = ThreadRights { uid: 61_001, gid: 61_002, filters: 2 };

    const STATUS: &str = "Name:\tpython3\nUmask:\t0022\nState:\tt (tracing stop)\nTgid:\t10\nUid:\t61001\t61001\t61001\t61001\n\
        Gid:\t61002\t61002\t61002\t61002\nFDSize:\t64\nGroups:\t \nNStgid:\t10\n\
        CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
        CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t2\n";

    #[test]
    fn a_thread_with_the_rights_of_its_sandbox_passes() {
        assert_eq!(RIGHTS.compare_status(STATUS), Ok(()));
    }

    #[test]
    fn each_other_right_is_told() {
        for (from, to, told) in [
            ("Uid:\t61001\t", "Uid:\t0\t", "Uid:"),
            ("\t61001\nGid", "\t0\nGid", "Uid:"),
            ("Gid:\t61002\t", "Gid:\t0\t", "Gid:"),
            ("Groups:\t \n", "Groups:\t0 \n", "Groups:"),
            ("CapInh:\t00", "CapInh:\t01", "CapInh:"),
            ("CapPrm:\t00", "CapPrm:\t01", "CapPrm:"),
            ("CapEff:\t0000000000000000", "CapEff:\t000001ffffffffff", "CapEff:"),
            ("CapBnd:\t00", "CapBnd:\t01", "CapBnd:"),
            ("CapAmb:\t00", "CapAmb:\t01", "CapAmb:"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "NoNewPrivs:"),
            ("Seccomp:\t2", "Seccomp:\t0", "Seccomp:"),
            ("Seccomp_filters:\t2", "Seccomp_filters:\t1", "Seccomp_filters:"),
            ("Seccomp_filters:\t2", "Seccomp_filters:\t3", "Seccomp_filters:"),
        ] {
            let changed = STATUS.replacen(from, to, 1);
            assert_ne!(changed, STATUS, "{from}");
            let why = RIGHTS.compare_status(&changed).unwrap_err();
            assert!(why.contains(told), "{why}");
        }
    }

    #[test]
    fn right_missing_from_the_status_is_not_assumed() {
        for line in STATUS.lines() {
            let missing = STATUS.replacen(&format!("{line}\n"), "", 1);
            let is_needed = ["Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp"];
            let is_needed = is_needed.iter().any(|name| line.starts_with(name));
            assert_eq!(RIGHTS.compare_status(&missing).is_err(), is_needed, "without {line}");
        }
        // A name with a line of its own in it: the kernel escapes it, and nothing is believed that
        // is there twice.
        let twice = format!("{STATUS}NoNewPrivs:\t1\n");
        assert!(RIGHTS.compare_status(&twice).is_err());
    }

    #[test]
    fn only_who_has_ended_is_passed_over() {
        assert!(!has_ended(STATUS));
        assert!(has_ended(&STATUS.replacen("t (tracing stop)", "Z (zombie)", 1)));
        assert!(!has_ended(&STATUS.replacen("State", "Stat", 1)));
    }
}

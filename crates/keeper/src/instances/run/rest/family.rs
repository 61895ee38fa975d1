//! Lets parents continue after their children when an application is thawed.
//!
//! A process that watches its workers by the time of their last sign of life takes a freeze for a
//! hang, and kills them: gunicorn's master does so. Which of both runs first is chance. So parents
//! are stopped by `SIGSTOP` before all of it is let go on, and go on when each thread of the others
//! has run and sleeps again, or has run for a while, or after a bound. Workers that are overdue
//! with a sign of life give it as soon as they run.
//!
//! It looks at processes of one cell alone, as many as have a bound, and signals them by
//! descriptors. Each look is short: an application whose threads never sleep holds up nobody but
//! its own parents. Not here: the freeze (`rest`), when looks are taken (`instances::watchdog`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::instances::run::rest::signs;

/// Maximum number of processes and threads of one application that are checked. A larger one
/// continues all at once.
const PROCESSES_MAX: usize = 128;
const THREADS_MAX: usize = 512;

/// Maximum number of threads that are read again before the thaw: some 30 microseconds each, for
/// which a visitor waits.
const READ_ANEW_MAX: usize = 64;

/// Clock ticks (of 10 ms) after which a thread that does not sleep has run. The first may have
/// begun before the freeze.
const TICKS_MIN: u64 = 2;

/// After a shorter freeze nothing is overdue.
pub const FREEZE_MIN: Duration = Duration::from_millis(500);

/// A process of a frozen application.
#[derive(Debug, PartialEq, Eq)]
struct FrozenProcess {
    pid: i32,
    parent: i32,
    /// It is the first process of its sandbox, which is nagaya's.
    is_init: bool,
}

/// A thread, and its work so far.
#[derive(Debug)]
struct SleepingThread {
    pid: i32,
    tid: i32,
    done: ThreadWork,
}

/// The work of a thread since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ThreadWork {
    /// Number of times it went to sleep.
    sleeps: u64,
    /// Clock ticks for which it ran on a CPU.
    ticks: u64,
    /// It sleeps now, and waits for no CPU and no disk.
    is_asleep: bool,
}

impl ThreadWork {
    /// Whether it has run since then for as long as it wants, or for long enough. One that has
    /// slept and waits for a CPU may have slept on its way out of the freeze, before it did
    /// anything.
    fn has_run_since(self, before: Self) -> bool {
        self.is_asleep && self.sleeps > before.sleeps || self.ticks >= before.ticks + TICKS_MIN
    }
}

/// The parents and children of a frozen application.
#[derive(Debug)]
pub struct ProcessFamily {
    parents: Vec<OwnedFd>,
    sleepers: Vec<SleepingThread>,
    /// Processes without children.
    children: Vec<i32>,
    /// All processes.
    pids: Vec<i32>,
    frozen_at: Instant,
    /// The same moment by the clock of files.
    frozen_since: SystemTime,
}

impl ProcessFamily {
    /// Groups these processes, which must be frozen. `None` if none is another's parent, or they
    /// are too many.
    pub fn of(pids: &[Pid]) -> Option<Self> {
        if pids.len() < 2 || pids.len() > PROCESSES_MAX {
            return None;
        }
        let members: Vec<FrozenProcess> =
            pids.iter().filter_map(|pid| member(pid.as_raw_nonzero().get()).ok()).collect();
        let (parents, children) = divide(&members);
        if parents.is_empty() {
            return None;
        }
        let mut sleepers = Vec::new();
        for pid in &children {
            sleepers.extend(threads(*pid).ok()?);
            if sleepers.len() > THREADS_MAX {
                return None;
            }
        }
        let open = |pid: &i32| pidfd_open(Pid::from_raw(*pid)?, PidfdFlags::empty()).ok();
        let parents = parents.iter().filter_map(open).collect();
        let pids = members.iter().map(|member| member.pid).collect();
        Some(Self {
            parents,
            sleepers,
            children,
            pids,
            frozen_at: Instant::now(),
            frozen_since: SystemTime::now(),
        })
    }

    /// Stops the parents. They do not run between the thaw and `HeldParents::release`. `None` if it
    /// was frozen for a moment only.
    ///
    /// The kernel calls a cell frozen when its last thread is about to leave its CPU. The thread
    /// leaves it a moment later, on a busy machine much later, and that counts as a sleep. So the
    /// work of threads is read again.
    pub fn hold(mut self) -> Option<HeldParents> {
        if self.frozen_at.elapsed() < FREEZE_MIN {
            return None;
        }
        for sleeper in self.sleepers.iter_mut().take(READ_ANEW_MAX) {
            if let Ok(Some(done)) = done(sleeper.pid, sleeper.tid) {
                sleeper.done = done;
            }
        }
        let held = HeldParents { family: self, is_released: AtomicBool::new(false) };
        held.signal(Signal::STOP);
        Some(held)
    }
}

/// Parents that are stopped. They continue when this is dropped.
#[derive(Debug)]
pub struct HeldParents {
    family: ProcessFamily,
    is_released: AtomicBool,
}

impl HeldParents {
    fn signal(&self, signal: Signal) {
        for parent in &self.family.parents {
            // A process that has ended needs no signal.
            let _ = pidfd_send_signal(parent, signal);
        }
    }

    /// Lets the parents continue.
    pub fn release(&self) {
        if !self.is_released.swap(true, Ordering::AcqRel) {
            self.signal(Signal::CONT);
        }
    }

    pub fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }

    /// Whether each thread of the children has run, or has ended. Reads some files of `/proc` for
    /// each.
    pub fn have_children_run(&self) -> bool {
        let has_run = |one: &SleepingThread| {
            let now = done(one.pid, one.tid).unwrap_or_default();
            now.is_none_or(|now| now.has_run_since(one.done))
        };
        self.family.sleepers.iter().all(has_run)
    }

    /// Makes the signs of life of the children as old as they were at the freeze. `now` returns the
    /// processes of its cell.
    pub fn renew_signs(&self, now: &dyn Fn() -> Vec<Pid>) {
        let opened: Vec<_> = self.family.children.iter().filter_map(|pid| signs::open(*pid)).collect();
        // Read after the files were opened: a number that another process has got meanwhile belongs
        // to another cell.
        let now: Vec<i32> = now().iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        let mut left = signs::FILES_MAX;
        for files in opened.iter().filter(|files| now.contains(&files.pid)) {
            files.renew(self.family.frozen_since, self.family.frozen_at.elapsed(), &mut left);
        }
    }

    /// Compares with these processes, which live now. Returns how many children have ended since
    /// the freeze, and how many processes are new.
    pub fn compare(&self, now: &[Pid]) -> (usize, usize) {
        let now: Vec<i32> = now.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        let ended = self.family.children.iter().filter(|pid| !now.contains(pid)).count();
        let born = now.iter().filter(|pid| !self.family.pids.contains(pid)).count();
        (ended, born)
    }
}

impl Drop for HeldParents {
    fn drop(&mut self) {
        self.release();
    }
}

/// Splits processes into those with a child among them, and those without. Nagaya's own process is
/// neither.
fn divide(members: &[FrozenProcess]) -> (Vec<i32>, Vec<i32>) {
    let ours = members.iter().filter(|member| !member.is_init);
    let has_child = |member: &&FrozenProcess| members.iter().any(|other| other.parent == member.pid);
    let (parents, children): (Vec<&FrozenProcess>, Vec<&FrozenProcess>) = ours.partition(has_child);
    let pids = |of: Vec<&FrozenProcess>| of.iter().map(|member| member.pid).collect();
    (pids(parents), pids(children))
}

fn member(pid: i32) -> io::Result<FrozenProcess> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let parent = field(&status, "PPid:").and_then(|text| text.parse().ok()).unwrap_or(0);
    let is_init =
        field(&status, "NSpid:").is_some_and(|text| text.split_ascii_whitespace().last() == Some("1"));
    Ok(FrozenProcess { pid, parent, is_init })
}

fn threads(pid: i32) -> io::Result<Vec<SleepingThread>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))?.take(THREADS_MAX + 1) {
        let name = task?.file_name();
        if let Some(tid) = name.to_str().and_then(|name| name.parse().ok())
            && let Some(done) = done(pid, tid)?
        {
            threads.push(SleepingThread { pid, tid, done });
        }
    }
    Ok(threads)
}

/// Reads the work of a thread. `None` if nobody waits for it to run, because it is stopped (`T`,
/// `t`) or has ended.
fn done(pid: i32, tid: i32) -> io::Result<Option<ThreadWork>> {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"))?;
    let state = field(&status, "State:").unwrap_or_default();
    if state.starts_with(['T', 't', 'Z', 'X']) {
        return Ok(None);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"))?;
    let sleeps = field(&status, "voluntary_ctxt_switches:").and_then(|text| text.parse().ok());
    let both = sleeps.zip(ticks(&stat)).map(|(sleeps, ticks)| ThreadWork {
        sleeps,
        ticks,
        is_asleep: state.starts_with('S'),
    });
    both.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads the ticks of the thread's own time and the kernel's for it: fields 14 and 15
/// (proc_pid_stat(5)). The thread's name, which may contain anything, is in parentheses before
/// them.
fn ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut times = behind.split_ascii_whitespace().skip(11).map_while(|text| text.parse::<u64>().ok());
    Some(times.next()?.saturating_add(times.next()?))
}

/// Returns the value of this name (proc_pid_status(5)).
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_told_from_children() {
        let of = |pid, parent, is_init| FrozenProcess { pid, parent, is_init };
        let members = [of(10, 1, true), of(11, 10, false), of(12, 11, false), of(13, 11, false)];
        assert_eq!(divide(&members), (vec![11], vec![12, 13]));
        assert_eq!(divide(&members[..2]), (vec![], vec![11]), "one alone has nobody to wait for");
    }

    #[test]
    fn process_that_sleeps_again_or_computes_has_run() {
        let before = ThreadWork { sleeps: 3, ticks: 7, is_asleep: true };
        let has_run =
            |sleeps, ticks, is_asleep| ThreadWork { sleeps, ticks, is_asleep }.has_run_since(before);
        assert!(!has_run(3, 7, true) && !has_run(3, 8, false));
        assert!(has_run(4, 7, true) && has_run(3, 9, false));
        assert!(!has_run(4, 7, false), "it waits for a CPU");
    }

    #[test]
    fn a_process_is_read_as_the_kernel_tells_it() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(member(own).unwrap().parent, rustix::process::getppid().unwrap().as_raw_nonzero().get());
        assert!(!threads(own).unwrap().is_empty());
        assert_eq!(ticks("7 (a) b (c)) S 1 7 7 0 -1 4194304 1 2 3 4 11 6 0 0 20 0 1 0"), Some(17));
        assert_eq!(ticks("7 (sh) S 1 7"), None);
        let text = "Name:\tsh\nPPid:\t7\nNSpid:\t812\t1\nvoluntary_ctxt_switches:\t19\n";
        assert_eq!((field(text, "PPid:"), field(text, "NSpid:")), (Some("7"), Some("812\t1")));
    }
}

//! Moves an instance down the tiers without ending anything, and up again. Quiet: it gets only CPU
//! time that nobody else wants. Frozen: it gets none. Reclaimed: its memory is in swap.
//!
//! At a thaw, parents continue after their children (`family`). Each step includes those above it.
//! A step that is impossible here is left out and reported, and the instance then rests less deep.
//! All of it blocks, for a millisecond, or for a second while memory goes out. So call it from
//! `workers`. Not here: when (`policy`), the freezer's files (`cells`).

mod calls;
mod family;
mod signs;

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nagaya_records::instance::Tier;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, getpriority_process, pidfd_open, setpriority_process};

use crate::cells::{CpuDemand, FrozenTree, Leaf};
use crate::sys::mapping;

use calls::SchedPolicy;
use family::ProcessFamily;

pub use family::HeldParents;

/// Least urgent (sched(7)).
const NICE_MOST: i32 = 19;

/// Timer slack of a quiet process, nanoseconds, so that many timers expire together. The kernel's
/// default is 50 us.
const SLACK_NS: &str = "50000000";

/// Maximum number of rounds. Each finds threads that were born during the one before.
const ROUNDS_MAX: usize = 4;

/// Memory is moved out in pieces of this many bytes, so that a wake waits for one of them only.
const PIECE_BYTES: usize = 8 << 20;

/// The present depth of one instance's rest, and the steps there and back.
pub struct TierControl {
    leaf: Arc<Leaf>,
    /// The valid operation. An older one that has not begun must not begin, and one under way
    /// stops.
    latest: AtomicU64,
    state: Mutex<TierState>,
    /// Parents that do not run yet.
    held: Mutex<Option<Arc<HeldParents>>>,
}

#[derive(Default)]
struct TierState {
    /// Threads that are quiet, with their earlier settings.
    quiet: Vec<QuietThread>,
    is_quiet: bool,
    frozen: Option<FrozenTree>,
    /// Processes of the frozen instance.
    family: Option<ProcessFamily>,
    is_reclaimed: bool,
}

/// Settings of a thread before it became quiet.
struct QuietThread {
    tid: i32,
    policy: SchedPolicy,
    nice: i32,
}

/// Which processes continue first after a freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThawOrder {
    AllAtOnce,
    /// Processes with children wait for these, until `TierControl::held` is released.
    ParentsLast,
}

/// Result of a step down.
#[derive(Debug, PartialEq, Eq)]
pub struct ReachedTier {
    pub tier: Tier,
    /// Why it is not deeper.
    pub why: Option<String>,
}

impl TierControl {
    pub fn new(leaf: Arc<Leaf>) -> Self {
        Self { leaf, latest: AtomicU64::new(0), state: Mutex::default(), held: Mutex::default() }
    }

    /// Makes the operation with this number the only valid one.
    pub fn begin(&self, op: u64) {
        self.latest.store(op, Ordering::Release);
    }

    fn holds(&self, op: u64) -> bool {
        self.latest.load(Ordering::Acquire) == op
    }

    /// Goes down to this tier, as far as possible and while the operation is valid.
    pub fn down(&self, op: u64, to: Tier) -> ReachedTier {
        let mut state = self.state.lock();
        self.release_held();
        let mut why = None;
        let mut failed = |step: &str, error: &dyn std::fmt::Display| {
            why.get_or_insert_with(|| format!("{step}: {error}"));
        };
        if to <= Tier::Quiet && self.holds(op) && !state.is_quiet {
            match self.hush(&mut state) {
                Ok(()) => state.is_quiet = true,
                Err(error) => failed("it cannot get idle CPU time alone", &error),
            }
        }
        if to <= Tier::Frozen && self.holds(op) && state.frozen.is_none() {
            // A thread stops when it next runs, and not all CPUs have idle time.
            self.leaf.claim(CpuDemand::Share);
            match self.leaf.freeze() {
                Ok(freezer) => {
                    state.frozen = Some(freezer);
                    state.family = self.leaf.pids().ok().and_then(|pids| ProcessFamily::of(&pids));
                }
                Err(error) => failed("it cannot be frozen", &error),
            }
        }
        if to <= Tier::Reclaimed && self.holds(op) && state.frozen.is_some() && !state.is_reclaimed {
            match self.reclaim(op) {
                Ok(()) => state.is_reclaimed = true,
                Err(error) => failed("its memory stays where it is", &error),
            }
        }
        let tier = state.tier();
        self.leaf.claim(match tier {
            Tier::Running => CpuDemand::Share,
            Tier::Quiet => CpuDemand::LeftOver,
            _ => CpuDemand::Nothing,
        });
        ReachedTier { tier, why }
    }

    /// Brings it back to running. Must be called for every need, whatever tier was reached before.
    pub fn up(&self, op: u64, order: ThawOrder) -> io::Result<()> {
        let mut state = self.state.lock();
        if !self.holds(op) {
            return Ok(());
        }
        self.leaf.claim(CpuDemand::Share);
        self.release_held();
        // No thread is born in a frozen cell, so none is missed. After the thaw it gets its share
        // at once.
        if std::mem::take(&mut state.is_quiet) {
            self.unhush(&mut state);
        }
        if let Some(freezer) = state.frozen.take() {
            let family = state.family.take().filter(|_| order == ThawOrder::ParentsLast);
            let held = family.and_then(ProcessFamily::hold);
            let thawed = freezer.thaw();
            if thawed.is_err() {
                state.frozen = Some(freezer);
            }
            thawed?;
            *self.held.lock() = held.map(Arc::new);
        }
        state.is_reclaimed = false;
        Ok(())
    }

    /// Returns the parents that are stopped since the thaw.
    pub fn held(&self) -> Option<Arc<HeldParents>> {
        self.held.lock().clone()
    }

    /// Releases stopped parents: nothing rests, or ends, while they are stopped.
    fn release_held(&self) {
        if let Some(held) = self.held.lock().take() {
            held.release();
        }
    }

    fn tids(&self) -> io::Result<Vec<i32>> {
        let pids = self.leaf.pids()?;
        let threads = pids.iter().flat_map(|pid| {
            // A process that has ended meanwhile has no threads.
            let tasks =
                fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).into_iter().flatten().flatten();
            tasks.filter_map(|task| task.file_name().to_str()?.parse().ok())
        });
        Ok(threads.collect())
    }

    fn hush(&self, state: &mut TierState) -> io::Result<()> {
        for _ in 0..ROUNDS_MAX {
            let mut is_new = false;
            for tid in self.tids()? {
                match hush_thread(tid) {
                    Ok(Some(before)) => {
                        is_new = true;
                        state.quiet.push(before);
                    }
                    Ok(None) => {}
                    Err(error) if is_gone(&error) => {}
                    Err(error) => {
                        self.unhush(state);
                        return Err(error);
                    }
                }
            }
            if !is_new {
                return Ok(());
            }
        }
        // It makes threads without end. Those born of quiet threads are quiet.
        Ok(())
    }

    fn unhush(&self, state: &mut TierState) {
        let before = std::mem::take(&mut state.quiet);
        let Ok(tids) = self.tids() else { return };
        for tid in
            tids.into_iter().filter(|tid| calls::policy(*tid).is_ok_and(|policy| policy == SchedPolicy::IDLE))
        {
            // Born while it was quiet: it gets the settings that the program would have given it.
            let plain = QuietThread { tid, policy: SchedPolicy::OTHER, nice: 0 };
            let was = before.iter().find(|thread| thread.tid == tid).unwrap_or(&plain);
            if let Err(error) = unhush_thread(was)
                && !is_gone(&error)
            {
                tracing::warn!(tid, %error, "a thread that was quiet keeps some of it");
            }
        }
    }

    fn reclaim(&self, op: u64) -> io::Result<()> {
        if !has_swap(&fs::read_to_string("/proc/swaps")?) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this node has no swap"));
        }
        for pid in self.leaf.pids()? {
            match self.page_out(op, pid) {
                Err(error) if !is_gone(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn page_out(&self, op: u64, pid: Pid) -> io::Result<()> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let pieces: Vec<(usize, usize)> = maps.lines().filter_map(writable).flat_map(in_pieces).collect();
        let mut rest = &pieces[..];
        while !rest.is_empty() && self.holds(op) {
            let mut bytes = 0;
            let fits = |piece: &&(usize, usize)| {
                bytes += piece.1;
                bytes <= PIECE_BYTES
            };
            let count = rest.iter().take(calls::AREAS_MAX).take_while(fits).count().max(1);
            match calls::page_out(pidfd.as_fd(), &rest[..count]) {
                Ok(_) => {}
                // Areas that cannot be paged out, such as locked ones, end a call. They stay.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
            rest = &rest[count..];
        }
        Ok(())
    }
}

impl TierState {
    fn tier(&self) -> Tier {
        match (self.is_reclaimed, &self.frozen, self.is_quiet) {
            (true, Some(_), _) => Tier::Reclaimed,
            (_, Some(_), _) => Tier::Frozen,
            (_, None, true) => Tier::Quiet,
            (_, None, false) => Tier::Running,
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    let gone = [rustix::io::Errno::SRCH, rustix::io::Errno::NOENT].map(|errno| errno.raw_os_error());
    error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
}

/// Makes a thread quiet. Returns `None` if the thread is left as it is. It is quiet already, or the
/// program chose a class of its own.
fn hush_thread(tid: i32) -> io::Result<Option<QuietThread>> {
    let policy = calls::policy(tid)?;
    if policy != SchedPolicy::OTHER && policy != SchedPolicy::BATCH {
        return Ok(None);
    }
    let pid = Pid::from_raw(tid);
    let nice = getpriority_process(pid)?;
    calls::set_policy(tid, SchedPolicy::IDLE)?;
    // Without the right to undo this, the idle class is enough.
    if rustix::process::geteuid().is_root() {
        setpriority_process(pid, NICE_MOST)?;
        slack(tid, SLACK_NS);
    }
    Ok(Some(QuietThread { tid, policy, nice }))
}

fn unhush_thread(was: &QuietThread) -> io::Result<()> {
    calls::set_policy(was.tid, was.policy)?;
    if rustix::process::geteuid().is_root() {
        setpriority_process(Pid::from_raw(was.tid), was.nice)?;
        // Zero means the thread's own default.
        slack(was.tid, "0");
    }
    Ok(())
}

/// Sets the timer slack. A kernel without the file is no reason not to rest.
fn slack(tid: i32, ns: &str) {
    let _ = fs::write(format!("/proc/{tid}/timerslack_ns"), ns);
}

/// Whether the table of `/proc/swaps` has an entry below its heading.
fn has_swap(table: &str) -> bool {
    table.lines().skip(1).any(|line| !line.trim().is_empty())
}

/// Returns start and length of a line of `/proc/<pid>/maps`, if the process may write there.
fn writable(line: &str) -> Option<(usize, usize)> {
    let (area, rest) = mapping(line)?;
    (rest.as_bytes().get(1) == Some(&b'w') && area.1 > 0).then_some(area)
}

fn in_pieces((start, len): (usize, usize)) -> impl Iterator<Item = (usize, usize)> {
    (0..len.div_ceil(PIECE_BYTES)).map(move |piece| {
        let offset = piece * PIECE_BYTES;
        (start + offset, (len - offset).min(PIECE_BYTES))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_written_is_moved_out() {
        let line = "7f0010000000-7f0010021000 rw-p 00000000 00:00 0 ";
        assert_eq!(writable(line), Some((0x7f00_1000_0000, 0x21000)));
        assert_eq!(writable(&line.replace("rw-p", "r-xp")), None);
        assert_eq!(writable(&line.replace("rw-p", "rw-s")).map(|area| area.1), Some(0x21000));
        assert_eq!(writable("nonsense"), None);
    }

    #[test]
    fn large_areas_are_moved_in_pieces() {
        let pieces: Vec<_> = in_pieces((0x1000, PIECE_BYTES + 5)).collect();
        assert_eq!(pieces, [(0x1000, PIECE_BYTES), (0x1000 + PIECE_BYTES, 5)]);
    }

    #[test]
    fn swap_is_there_if_the_table_has_a_line() {
        let heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!has_swap(heading));
        assert!(has_swap(&format!("{heading}/dev/zram0 partition 1048572 0 100\n")));
    }
}

//! The warden's process: it freezes the instances placed on this node when the node's lease ends.
//!
//! It is a separate process, so that a keeper that is busy, stopped or stuck does not delay it. It
//! waits only for its clock and its messages, and allocates nothing when the time has come. It runs
//! before everything without a real-time priority. It begins without a lease. It has the freezer
//! file of each tree open. It ends with the keeper, as all guarded trees do. Not here: which trees
//! are guarded and until when (`authority`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use crate::sys::mapping;

use super::order::{FreezerVersion, WardenCommand, WardenReport};
use super::{channel, kernel};

const NS_PER_S: u64 = 1_000_000_000;

/// Maximum size of a mapping that is loaded into memory whole, bytes. The program is smaller. The
/// allocator's reservation is larger: 1 GiB. The warden touches some hundred kilobytes of it, all
/// before its time can come.
const BROUGHT_IN_MAX: usize = 256 << 20;

/// One tree of processes.
struct GuardedTree {
    number: u64,
    version: FreezerVersion,
    own: OwnedFd,
    /// The same for all that `own` freezes: two runs of one site that overlap.
    inode: u64,
    /// It never continues.
    is_held: bool,
    /// Nothing of it is left. It is forgotten when the others continue.
    is_gone: bool,
}

struct Warden {
    keeper: OwnedFd,
    clock: OwnedFd,
    until_ns: u64,
    is_fenced: bool,
    guarded: Vec<GuardedTree>,
    /// Freezes all of v1 by one write.
    all: Option<OwnedFd>,
}

/// Serves until the keeper has gone.
pub fn run(keeper: OwnedFd) -> u8 {
    match set_up(keeper).and_then(|mut warden| warden.serve()) {
        Ok(()) => 0,
        Err(error) => {
            // The keeper sees it end, and ends with all guarded trees.
            eprintln!("the warden ends: {error}");
            1
        }
    }
}

fn set_up(keeper: OwnedFd) -> io::Result<Warden> {
    use std::os::fd::AsRawFd;
    rustix::thread::set_name(c"nagaya-warden")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    kernel::close_all_but(&mut [0, 1, 2, keeper.as_raw_fd()])?;
    // Killed last for lack of memory: without it all guarded trees end, too.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    if let Err(error) = kernel::run_first() {
        // A kernel with groups of real-time processes gives them no time in most groups.
        eprintln!("the warden has no real-time priority ({error}), and is only first among equals");
        let _ = rustix::process::setpriority_process(None, -20);
    }
    if let Err(error) = stay_in_memory() {
        eprintln!("the warden's memory may be swapped out ({error}), and it may wait for a disk");
    }
    let clock = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    Ok(Warden { keeper, clock, until_ns: 0, is_fenced: true, guarded: Vec::new(), all: None })
}

/// Locks its memory, so that it never waits for a disk.
fn stay_in_memory() -> io::Result<()> {
    kernel::stay_in_memory()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    maps.lines().filter_map(brought_in).try_for_each(kernel::bring_in)
}

/// Returns start and length of a line of `/proc/self/maps`, if it must be in memory before it is
/// touched.
fn brought_in(line: &str) -> Option<(usize, usize)> {
    let (area, rest) = mapping(line)?;
    // The kernel's own pages, `[vvar]` and the like, are always there.
    let is_kernels = rest.split_whitespace().nth(4).is_some_and(|path| path.starts_with("[v"));
    (rest.starts_with('r') && !is_kernels && area.1 <= BROUGHT_IN_MAX).then_some(area)
}

/// Reads CLOCK_BOOTTIME, which continues while the machine is suspended.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec) * NS_PER_S + part(now.tv_nsec)
}

impl Warden {
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut watched =
                [PollFd::new(&self.clock, PollFlags::IN), PollFd::new(&self.keeper, PollFlags::IN)];
            match poll(&mut watched, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            let has_rung = !watched[0].revents().is_empty();
            let is_told = !watched[1].revents().is_empty();
            // First, whatever there is to read.
            self.look()?;
            if has_rung && self.is_fenced {
                self.silence();
            }
            if is_told {
                match channel::receive::<WardenCommand>(&self.keeper)? {
                    Some((ward, fds)) => self.obey(ward, fds)?,
                    None => return Ok(()),
                }
            }
        }
    }

    /// Freezes all if their time has passed.
    fn look(&mut self) -> io::Result<()> {
        let now = now_ns();
        if self.is_fenced || now < self.until_ns {
            return Ok(());
        }
        self.is_fenced = true;
        self.stop_all();
        let after_ns = now_ns().saturating_sub(self.until_ns);
        let count = u32::try_from(self.guarded.len()).unwrap_or(u32::MAX);
        self.tell(WardenReport::Fenced { after_ns, count })
    }

    /// Stops a clock that rings while all is frozen. It wakes only this process, which would
    /// otherwise never sleep again. It would run without pause, before everything else of the
    /// machine. The clock rings then because a time arrived when it was over, or just after that
    /// was noticed here.
    fn silence(&self) {
        let mut buffer = [0; 8];
        // Nothing to read is fine, too.
        let _ = rustix::io::read(&self.clock, &mut buffer);
    }

    fn obey(&mut self, ward: WardenCommand, fds: Vec<OwnedFd>) -> io::Result<()> {
        match ward {
            WardenCommand::Until(until_ns) => self.extend(until_ns),
            WardenCommand::Add { number, version } => self.add(number, version, fds),
            WardenCommand::Hold { number } => {
                if let Some(one) = self.guarded.iter_mut().find(|one| one.number == number) {
                    one.is_held = true;
                    let failed = one.stop();
                    self.complain(failed)?;
                }
                Ok(())
            }
            WardenCommand::Remove { number } => {
                self.remove(number);
                Ok(())
            }
        }
    }

    fn extend(&mut self, until_ns: u64) -> io::Result<()> {
        // It never decreases, in whatever order the times arrive.
        self.until_ns = self.until_ns.max(until_ns);
        let [seconds, nanos] = [self.until_ns / NS_PER_S, self.until_ns % NS_PER_S];
        let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let at = Timespec { tv_sec: part(seconds), tv_nsec: part(nanos) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
        timerfd_settime(&self.clock, TimerfdTimerFlags::ABSTIME, &once)?;
        if self.is_fenced && now_ns() < self.until_ns {
            self.is_fenced = false;
            self.release_all();
            self.tell(WardenReport::Freed)?;
        }
        Ok(())
    }

    fn add(&mut self, number: u64, version: FreezerVersion, fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut fds = fds.into_iter();
        let Some(own) = fds.next() else { return Err(io::ErrorKind::InvalidData.into()) };
        if let Some(all) = fds.next() {
            if self.is_fenced {
                let _ = rustix::io::write(&all, word(FreezerVersion::V1, true));
            }
            self.all = Some(all);
        }
        let inode = rustix::fs::fstat(&own)?.st_ino;
        let one = GuardedTree { number, version, own, inode, is_held: false, is_gone: false };
        let stopped = if self.is_fenced && version == FreezerVersion::V2 { one.stop() } else { Ok(()) };
        self.guarded.push(one);
        match stopped {
            Ok(()) => self.tell(WardenReport::Added { number }),
            Err(failed) => self.complain(Err(failed)),
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(at) = self.guarded.iter().position(|one| one.number == number) else { return };
        if self.is_fenced {
            // Its directory may belong to another one, too, which comes next to it.
            self.guarded[at].is_gone = true;
        } else {
            let one = self.guarded.swap_remove(at);
            if one.is_held && !self.is_held_by_another(&one) {
                one.release();
            }
        }
    }

    fn stop_all(&mut self) {
        if let Some(all) = &self.all {
            let _ = rustix::io::write(all, word(FreezerVersion::V1, true));
        }
        for at in 0..self.guarded.len() {
            if self.guarded[at].version == FreezerVersion::V2 {
                let failed = self.guarded[at].stop();
                // A keeper that cannot be notified any more has gone.
                let _ = self.complain(failed);
            }
        }
    }

    fn release_all(&mut self) {
        for one in &self.guarded {
            let is_free = one.is_gone || (one.version == FreezerVersion::V2 && !one.is_held);
            if is_free && !self.is_held_by_another(one) {
                one.release();
            }
        }
        if let Some(all) = &self.all {
            let _ = rustix::io::write(all, word(FreezerVersion::V1, false));
        }
        self.guarded.retain(|one| !one.is_gone);
    }

    fn is_held_by_another(&self, one: &GuardedTree) -> bool {
        let same = |other: &&GuardedTree| other.inode == one.inode && other.number != one.number;
        self.guarded.iter().filter(same).any(|other| other.is_held && !other.is_gone)
    }

    fn complain(&self, stopped: Result<(), (u64, Errno)>) -> io::Result<()> {
        match stopped {
            Ok(()) => Ok(()),
            Err((number, errno)) => self.tell(WardenReport::Failed { number, errno: errno.raw_os_error() }),
        }
    }

    /// Sends a message. A keeper that reads nothing is stopped, or busy. It learns the last state
    /// when it continues, and the clock must not wait for it.
    fn tell(&self, told: WardenReport) -> io::Result<()> {
        let mut writable = [PollFd::new(&self.keeper, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut writable, Some(&now)) {
            Ok(0) => Ok(()),
            Ok(_) => channel::send(self.keeper.as_fd(), &told, &[]),
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl GuardedTree {
    /// Freezes the tree. The kernel stops each thread before it next runs a line of its program.
    fn stop(&self) -> Result<(), (u64, Errno)> {
        match rustix::io::write(&self.own, word(self.version, true)) {
            // Its directory went with the last of its processes.
            Ok(_) | Err(Errno::NODEV) => Ok(()),
            Err(errno) => Err((self.number, errno)),
        }
    }

    fn release(&self) {
        // A tree that cannot continue is noticed by its next request.
        let _ = rustix::io::write(&self.own, word(self.version, false));
    }
}

fn word(version: FreezerVersion, is_stopped: bool) -> &'static [u8] {
    match (version, is_stopped) {
        (FreezerVersion::V1, true) => b"FROZEN",
        (FreezerVersion::V1, false) => b"THAWED",
        (FreezerVersion::V2, true) => b"1",
        (FreezerVersion::V2, false) => b"0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_brought_in_and_what_is_only_reserved_is_not() {
        let line = "7f8412267000-7f84123bd000 r-xp 00026000 fe:00 1234 /usr/lib/x86_64-linux-gnu/libc.so.6";
        assert_eq!(brought_in(line), Some((0x7f84_1226_7000, 0x15_6000)));
        assert_eq!(brought_in(&line.replace("r-xp", "---p")), None);
        let stack = "7ffdf7d4c000-7ffdf7dbe000 rw-p 00000000 00:00 0 [stack]";
        assert_eq!(brought_in(stack).map(|area| area.1), Some(0x7_2000));
        assert_eq!(brought_in(&stack.replace("stack", "vvar")), None);
        assert_eq!(brought_in("20000000000-20040000000 rw-p 00000000 00:00 0 "), None);
        assert_eq!(brought_in("nonsense"), None);
    }
}

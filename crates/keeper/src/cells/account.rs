//! The account of one cell: the use of its present request, from counters that only rise.
//!
//! A reading of all counters takes some microseconds. A short request of a process that has no
//! limits is worth less: its CPU time is read from the clock of the process alone. The counters
//! are read once for many such requests. Invariant: all use is counted once. A short request's
//! disk use, and the CPU time of programs that it started, are in the next reading.
//!
//! Not here: the counters (`usage`), the cell that they belong to (`leaf`).

use std::time::{Duration, Instant};

use nagaya_records::cell::RequestUsage;
use nix::time::ClockId;
use rustix::process::Pid;

use super::usage::{self, CellCounters};

/// Maximum time between two readings of the counters while requests are short.
const READING_AGE_MAX: Duration = Duration::from_millis(100);

/// The counters at the begin of a request, and the use that is in no counter.
#[derive(Debug, Default)]
pub(super) struct CellAccount {
    began: CellCounters,
    /// No directory counts its disk alone, so its processes are read: the last values, and those at
    /// its begin.
    reads_processes: bool,
    of_processes: CellCounters,
    of_processes_began: CellCounters,
    quick: Option<QuickAccount>,
}

/// The CPU time of requests that were too short to read the counters.
#[derive(Debug)]
struct QuickAccount {
    pid: Pid,
    clock: ClockId,
    /// CPU time of the process when its present request began.
    began: Duration,
    /// CPU time of all such requests since the counters were read.
    used: Duration,
    read_at: Instant,
}

impl CellAccount {
    /// `reads_processes`: no directory counts the cell's disk use alone.
    pub fn new(reads_processes: bool) -> Self {
        Self { reads_processes, ..Self::default() }
    }

    pub fn reads_processes(&self) -> bool {
        self.reads_processes
    }

    /// Counts from these counters on.
    pub fn begin(&mut self, counters: CellCounters) {
        (self.began, self.of_processes_began) = (counters, self.of_processes);
        self.quick = None;
    }

    /// As `begin`, for a cell with this process alone. Its next requests may be short.
    pub fn begin_process(&mut self, counters: CellCounters, pid: Pid) {
        let known = self.quick.take().filter(|quick| quick.pid == pid).map(|quick| quick.clock);
        self.begin(counters);
        self.quick = known.map_or_else(|| clock_of(pid), Some).and_then(|clock| {
            let (used, read_at) = (Duration::ZERO, Instant::now());
            Some(QuickAccount { pid, clock, began: read(clock)?, used, read_at })
        });
    }

    /// Sets the counters at a begin that is past.
    pub fn began_at(&mut self, counters: CellCounters) {
        self.began = counters;
    }

    /// Returns the use since the begin, for these counters.
    pub fn used(&self, counters: CellCounters) -> RequestUsage {
        let mut used = counters - self.began;
        if let Some(quick) = &self.quick {
            used.cpu_us = used.cpu_us.saturating_sub(micros(quick.used));
        }
        if self.reads_processes {
            let disk = self.of_processes - self.of_processes_began;
            (used.read_bytes, used.write_bytes) = (disk.read_bytes, disk.write_bytes);
        }
        used.into()
    }

    /// Ends the account of a short request of this process, and begins the next one. `None`, and
    /// nothing is changed, if the counters have to be read.
    pub fn take_quick(&mut self, pid: Pid) -> Option<RequestUsage> {
        let quick = self.quick.as_mut().filter(|quick| quick.pid == pid)?;
        if quick.read_at.elapsed() > READING_AGE_MAX {
            return None;
        }
        let now = read(quick.clock)?;
        // Whole microseconds: what is left of one belongs to the next request.
        let cpu_us = micros(now.saturating_sub(quick.began));
        if cpu_us == 0 {
            return None;
        }
        let used = Duration::from_micros(cpu_us);
        (quick.began, quick.used) = (quick.began + used, quick.used + used);
        Some(RequestUsage { cpu_us, ..RequestUsage::default() })
    }

    /// Notes what these processes read from and wrote to disks, where no directory counts it. The
    /// numbers of a process that ends are lost, or added to those of its waiting parent. So the sum
    /// is the maximum seen.
    pub fn note_disk_use(&mut self, pids: &[Pid]) {
        let now = usage::of_processes(pids);
        let seen = &mut self.of_processes;
        seen.read_bytes = seen.read_bytes.max(now.read_bytes);
        seen.write_bytes = seen.write_bytes.max(now.write_bytes);
    }
}

/// Returns the clock of a process's CPU time (clock_getcpuclockid(3)).
fn clock_of(pid: Pid) -> Option<ClockId> {
    ClockId::pid_cpu_clock_id(nix::unistd::Pid::from_raw(pid.as_raw_nonzero().get())).ok()
}

/// Reads the clock. `None` if the process has ended. It includes the time that a process runs just
/// now, which the counters do not.
fn read(clock: ClockId) -> Option<Duration> {
    clock.now().ok().map(Duration::from)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(cpu_us: u64) -> CellCounters {
        CellCounters { cpu_us, ..CellCounters::default() }
    }

    fn burn() {
        let clock = ClockId::CLOCK_PROCESS_CPUTIME_ID;
        let begun = read(clock).unwrap();
        while read(clock).unwrap() - begun < Duration::from_micros(300) {}
    }

    #[test]
    fn short_requests_are_taken_from_the_next_reading() {
        let own = rustix::process::getpid();
        let mut account = CellAccount::new(false);
        account.begin_process(counters(1_000), own);
        let mut quick = 0;
        for _ in 0..3 {
            burn();
            let Some(used) = account.take_quick(own) else { continue };
            assert!(used.cpu_us >= 300, "{used:?}");
            quick += used.cpu_us;
        }
        assert_eq!(account.used(counters(1_000 + quick + 77)).cpu_us, 77, "all use is counted once");
        account.begin_process(counters(5_000), own);
        assert_eq!(account.used(counters(5_010)).cpu_us, 10, "the next account begins anew");
    }

    #[test]
    fn only_the_process_that_began_is_read_quickly() {
        let own = rustix::process::getpid();
        let mut account = CellAccount::new(false);
        assert_eq!(account.take_quick(own), None, "nothing has begun");
        account.begin_process(counters(0), own);
        burn();
        assert_eq!(account.take_quick(Pid::INIT), None);
        account.begin(counters(0));
        assert_eq!(account.take_quick(own), None, "the process is not known any more");
        account.begin_process(counters(0), own);
        burn();
        account.quick.as_mut().unwrap().read_at -= 2 * READING_AGE_MAX;
        assert_eq!(account.take_quick(own), None, "the counters are to be read");
    }
}

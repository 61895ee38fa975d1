//! Measures the CPU pressure of the node and of one lane's programs, for lanes with an adaptive
//! limit.
//!
//! Not here: the limit itself (`nagaya_admission`), averages over minutes for rules
//! (`rules::load`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nagaya_admission::CpuPressure;

/// Number of bytes read of each file. Only its first line counts.
const LINE_MAX: usize = 512;

/// Difference of two samples of the kernel's counters.
#[derive(Debug)]
pub struct PressureGauge {
    /// The file `/proc/stat` (proc_stat(5)).
    stat: Option<File>,
    /// The file `/proc/pressure/cpu` (Documentation/accounting/psi.rst). Kernels without it
    /// report only how busy they are.
    psi: Option<File>,
    last: PressureSample,
}

#[derive(Debug, Clone, Copy)]
struct PressureSample {
    at: Instant,
    /// Ticks of all cores, and their idle ticks.
    ticks: u64,
    idle: u64,
    /// Microseconds in which some task waited for a core.
    starved_us: u64,
}

impl PressureGauge {
    pub fn new() -> Self {
        let stat = File::open("/proc/stat").ok();
        let psi = File::open("/proc/pressure/cpu").ok();
        let last = look(stat.as_ref(), psi.as_ref());
        Self { stat, psi, last }
    }

    /// Returns the pressure since the last call.
    pub fn read(&mut self) -> CpuPressure {
        let now = look(self.stat.as_ref(), self.psi.as_ref());
        let last = std::mem::replace(&mut self.last, now);
        let part = |of: u64, all: u64| if all == 0 { 0.0 } else { (of as f32 / all as f32).clamp(0.0, 1.0) };
        let ticks = now.ticks.saturating_sub(last.ticks);
        let idle = now.idle.saturating_sub(last.idle).min(ticks);
        let passed = u64::try_from(now.at.duration_since(last.at).as_micros()).unwrap_or(u64::MAX);
        CpuPressure {
            busy: part(ticks - idle, ticks),
            starved: part(now.starved_us.saturating_sub(last.starved_us), passed),
        }
    }
}

/// Share of time for which a used-up CPU quota stopped a lane's programs. The quota is their own,
/// their tenant's, or that of a rule's cell. The node may be idle meanwhile.
#[derive(Debug, Default)]
pub struct ThrottleShare {
    still_us: AtomicU64,
    service_us: AtomicU64,
    /// Share at the last call with ended requests (bits of an `f32`).
    part: AtomicU32,
}

impl ThrottleShare {
    /// Adds the usage of a request's programs.
    pub fn add(&self, still_us: u64, service: Duration) {
        let service_us = u64::try_from(service.as_micros()).unwrap_or(u64::MAX);
        // Several that run at once stop at once.
        self.still_us.fetch_add(still_us.min(service_us), Ordering::Relaxed);
        self.service_us.fetch_add(service_us, Ordering::Relaxed);
    }

    /// Returns the share among requests that ended since the last call. Without any, returns the
    /// previous value.
    pub fn read(&self) -> f32 {
        let service_us = self.service_us.swap(0, Ordering::Relaxed);
        let still_us = self.still_us.swap(0, Ordering::Relaxed);
        if service_us == 0 {
            return f32::from_bits(self.part.load(Ordering::Relaxed));
        }
        let part = (still_us as f32 / service_us as f32).min(1.0);
        self.part.store(part.to_bits(), Ordering::Relaxed);
        part
    }
}

fn look(stat: Option<&File>, psi: Option<&File>) -> PressureSample {
    let (ticks, idle) = stat.and_then(first_line).and_then(|line| cpu_ticks(&line)).unwrap_or_default();
    let starved_us = psi.and_then(first_line).and_then(|line| total_us(&line)).unwrap_or_default();
    PressureSample { at: Instant::now(), ticks, idle, starved_us }
}

fn first_line(file: &File) -> Option<String> {
    let mut bytes = [0; LINE_MAX];
    let len = file.read_at(&mut bytes, 0).ok()?;
    String::from_utf8_lossy(&bytes[..len]).lines().next().map(str::to_owned)
}

/// Parses `cpu  user nice system idle iowait irq softirq steal ...`. Returns the sum, and idle
/// with iowait.
fn cpu_ticks(line: &str) -> Option<(u64, u64)> {
    let ticks: Vec<u64> =
        line.strip_prefix("cpu ")?.split_whitespace().take(8).flat_map(str::parse).collect();
    (ticks.len() >= 5).then(|| (ticks.iter().sum(), ticks[3] + ticks[4]))
}

/// Parses `some avg10=0.00 avg60=0.00 avg300=0.00 total=12345`.
fn total_us(line: &str) -> Option<u64> {
    line.strip_prefix("some ")?.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        assert_eq!(cpu_ticks("cpu  10 1 5 80 4 0 0 0 0 0"), Some((100, 84)));
        assert_eq!(cpu_ticks("cpu0 10 1 5 80"), None);
        assert_eq!(total_us("some avg10=0.00 avg60=0.00 avg300=0.00 total=4711"), Some(4711));
        assert_eq!(total_us("full avg10=0.00 total=1"), None);
    }

    #[test]
    fn throttled_share_counts_only_programs_that_ended() {
        let throttled = ThrottleShare::default();
        assert_eq!(throttled.read(), 0.0);
        let second = Duration::from_secs(1);
        throttled.add(400_000, second);
        throttled.add(0, second);
        assert_eq!(throttled.read(), 0.2);
        assert_eq!(throttled.read(), 0.2, "none has ended since");
        throttled.add(9_000_000, second);
        assert_eq!(throttled.read(), 1.0, "ten processes of one request stood still at once");
        throttled.add(0, second);
        assert_eq!(throttled.read(), 0.0);
    }

    #[test]
    fn a_node_at_work_is_seen_to_be() {
        let mut gauge = PressureGauge::new();
        let begun = Instant::now();
        let mut pressure = gauge.read();
        // The kernel counts ticks of 10 ms or less; one core of few is enough to be above nothing.
        while pressure.busy == 0.0 && begun.elapsed().as_secs() < 60 {
            std::hint::black_box((0..1_000_000_u64).sum::<u64>());
            pressure = gauge.read();
        }
        assert!(pressure.busy > 0.0 && pressure.busy <= 1.0, "{pressure:?}");
    }
}

//! Memory pressure: while the node is short of memory, those that were idle longest go deeper
//! before their time.
//!
//! Not here: the choice of the step (`policy`).

use std::fs;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep;

use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::run::driver::dispatch;
use crate::instances::run::work::unless_at_work;
use crate::instances::state::shared::NodeInstances;

/// Time between two checks: the kernel's own shortest average is over ten seconds.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Percent of the last ten seconds in which something waited for memory.
const STALLED_MAX: f64 = 5.0;

/// Percent of available memory. Above the first value, waits have another reason, and resting
/// instances have nothing to give. Such reasons are a tenant's own limit, or a disk from which
/// cached pages are read again. Below the second value, memory is short in any case.
const PLENTY: u64 = 25;
const AVAILABLE_MIN: u64 = 5;

/// Number of instances sent deeper at each check. The memory they give back has an effect by the
/// next.
const AT_ONCE: usize = 8;

/// Checks from time to time. Never returns.
pub async fn watch_pressure(instances: &Rc<NodeInstances>) {
    loop {
        sleep(LOOK_INTERVAL).await;
        // Without idle instances nothing can be gained.
        let longest = instances.deadlines.longest_idle(AT_ONCE);
        if longest.is_empty() || !is_short() {
            continue;
        }
        tracing::debug!(instances = longest.len(), "memory is short: the longest idle instances go deeper");
        for key in longest {
            if let Some(instance) = instances.table.get(key) {
                dispatch(instances, &instance, unless_at_work(&instance, LifecycleEvent::Pressure));
            }
        }
    }
}

/// The kernel makes both files as they are read: nothing here waits for a disk.
fn is_short() -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    judge(stalled(&read("/proc/pressure/memory")), available(&read("/proc/meminfo")))
}

/// On a kernel without one of the figures, the other one decides.
fn judge(stalled: Option<f64>, available: Option<u64>) -> bool {
    let waits = stalled.is_some_and(|percent| percent > STALLED_MAX);
    match available {
        Some(percent) => percent < AVAILABLE_MIN || waits && percent < PLENTY,
        None => waits,
    }
}

/// Returns the value of `some avg10=0.12 avg60=...` (Documentation/accounting/psi.rst).
fn stalled(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

fn available(text: &str) -> Option<u64> {
    let kib = |name| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    kib("MemAvailable")?.checked_mul(100)?.checked_div(kib("MemTotal")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_if_little_with_waiters_or_hardly_any() {
        assert!(judge(Some(12.0), Some(20)) && judge(Some(12.0), None) && judge(None, Some(4)));
        assert!(judge(Some(0.0), Some(4)));
        assert!(!judge(Some(12.0), Some(80)), "who waits there waits for something else");
        assert!(!judge(Some(1.0), Some(20)) && !judge(None, Some(20)) && !judge(None, None));
    }

    #[test]
    fn pressure_is_read_as_the_kernel_writes_it() {
        let text = "some avg10=12.50 avg60=0.00 avg300=0.00 total=5\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(stalled(text), Some(12.5));
        assert_eq!(stalled("full avg10=1.00"), None);
        let text = "MemTotal:        4000 kB\nMemFree: 1 kB\nMemAvailable:     1000 kB\n";
        assert_eq!((available(text), available("")), (Some(25), None));
    }
}

//! The frequency of the node's time stamp counter. A guest without a timer of QEMU's cannot measure
//! it on a busy node. Its kernel's words say it (`tsc_early_khz`,
//! Documentation/admin-guide/kernel-parameters.txt).
//!
//! Not here: the guest's clock (`run`).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time of one measurement, and their number. The shortest one counts: nothing has interrupted it.
const MEASURED: Duration = Duration::from_millis(50);
const ROUNDS: u32 = 3;

/// Returns the frequency, kHz, exact to a few millionths: less than a second in a day. It is
/// measured once, in 150 ms. `None` where it cannot be read.
pub fn tsc_khz() -> Option<u32> {
    static KHZ: OnceLock<Option<u32>> = OnceLock::new();
    *KHZ.get_or_init(|| {
        (0..ROUNDS).filter_map(|_| measure()).min_by_key(|(spread, _)| *spread).map(|(_, khz)| khz)
    })
}

/// Measures once. Returns how long the two readings of both clocks took, nanoseconds, and the
/// frequency.
fn measure() -> Option<(u128, u32)> {
    let (begun, first, before) = read()?;
    std::thread::sleep(MEASURED);
    let (ended, last, after) = read()?;
    let nanos = ended.duration_since(begun).as_nanos();
    let khz = u128::from(last.checked_sub(first)?) * 1_000_000 / nanos;
    Some((before + after, u32::try_from(khz).ok()?))
}

/// Reads both clocks, and how long that took.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "no safe function reads the counter")]
fn read() -> Option<(Instant, u64, u128)> {
    let begun = Instant::now();
    // SAFETY: the instruction only reads a counter, and every x86-64 has it.
    let counter = unsafe { std::arch::x86_64::_rdtsc() };
    Some((begun, counter, begun.elapsed().as_nanos()))
}

#[cfg(not(target_arch = "x86_64"))]
fn read() -> Option<(Instant, u64, u128)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frequency_is_that_of_a_processor_and_stays_the_same() {
        let khz = tsc_khz().unwrap();
        assert!((100_000..20_000_000).contains(&khz), "{khz}");
        assert_eq!(tsc_khz(), Some(khz));
    }
}

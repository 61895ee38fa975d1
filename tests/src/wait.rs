//! Waiting for a condition, with a deadline. The only place where tests sleep.
//!
//! Time counts only as far as the machine gets on with its work: while somebody waits for a processor, which the kernel tells
//! (Documentation/accounting/psi.rst), a deadline moves away, up to [`STRETCH_MAX`] times. So a test ends when nothing
//! happens any more, and not because its machine is busy. Not here: waiting for bytes; sockets have read timeouts (`client`).

use std::path::Path;
use std::time::{Duration, Instant};

/// How long anything may take that should happen "soon". Generous, because it is only reached when a test fails.
pub const SOON: Duration = Duration::from_secs(20);

/// How many times longer than on an idle machine a wait may be.
pub const STRETCH_MAX: u32 = 6;

const POLL: Duration = Duration::from_millis(5);

/// Where the kernel tells how long somebody waited for a processor; absent where it does not count that.
const PRESSURE: &str = "/proc/pressure/cpu";

/// Waits until `condition` holds, for at most [`SOON`].
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    until_some(what, || condition().then_some(()));
}

/// Waits until there is a value, for at most [`SOON`].
#[track_caller]
pub fn until_some<T>(what: &str, value: impl FnMut() -> Option<T>) -> T {
    within(SOON, value).unwrap_or_else(|| panic!("waited {SOON:?} of a free machine's time in vain: {what}"))
}

/// Waits until a program has written this file, and returns its text. A file that is there and empty was only opened.
#[track_caller]
pub fn until_written(path: &Path) -> String {
    let text = || std::fs::read_to_string(path).ok().filter(|text| !text.is_empty());
    until_some(&format!("{} has text", path.display()), text)
}

/// The first value there is within `limit`, as a free machine would count it.
pub fn within<T>(limit: Duration, mut value: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    let stalled_before = stalled();
    loop {
        if let Some(value) = value() {
            return Some(value);
        }
        let elapsed = begun.elapsed();
        if elapsed >= limit {
            let stalled_meanwhile = stalled().saturating_sub(stalled_before);
            if is_over(limit, elapsed, stalled_meanwhile) {
                return None;
            }
        }
        std::thread::sleep(POLL);
    }
}

/// Lets this much time pass: what a test plays takes so long.
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn is_over(limit: Duration, elapsed: Duration, stalled: Duration) -> bool {
    elapsed.saturating_sub(stalled) >= limit || elapsed >= limit * STRETCH_MAX
}

/// How long somebody on this machine has waited for a processor since it was started.
fn stalled() -> Duration {
    let text = std::fs::read_to_string(PRESSURE).unwrap_or_default();
    let total = text.lines().next().and_then(|some| some.rsplit_once("total=")?.1.parse().ok());
    Duration::from_micros(total.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_moves_with_the_machine_and_not_for_ever() {
        let seconds = Duration::from_secs;
        assert!(is_over(seconds(20), seconds(20), seconds(0)));
        assert!(!is_over(seconds(20), seconds(20), seconds(1)));
        assert!(!is_over(seconds(20), seconds(100), seconds(81)));
        assert!(is_over(seconds(20), seconds(100), seconds(80)));
        assert!(is_over(seconds(20), seconds(120), seconds(120)));
    }
}

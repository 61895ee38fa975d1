//! Waiting for a condition, with a deadline. The only place where tests sleep.
//!
//! Not here: waiting for bytes; sockets have read timeouts (`client`).

use std::time::{Duration, Instant};

/// How long anything may take that should happen "soon". Generous, because it is only reached when a test fails.
pub const SOON: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(5);

/// Waits until `condition` holds, for at most [`SOON`].
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    until_some(what, || condition().then_some(()));
}

/// Waits until there is a value, for at most [`SOON`].
#[track_caller]
pub fn until_some<T>(what: &str, value: impl FnMut() -> Option<T>) -> T {
    within(SOON, value).unwrap_or_else(|| panic!("waited {SOON:?} in vain: {what}"))
}

/// The first value there is within `limit`.
pub fn within<T>(limit: Duration, mut value: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = value() {
            return Some(value);
        }
        if begun.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(POLL);
    }
}

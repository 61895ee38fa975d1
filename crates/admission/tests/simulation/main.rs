//! Simulated crowds: the machine driven by the same seeds through the same bursts, cancels, changes and restarts each time.
//!
//! Not here: the parts alone (beside each of them in `src`), real servers and clients (`./dev experiment admission-*`).

mod chance;
mod crowd;
mod fairness;
mod lender;
mod model;
mod prediction;
mod promises;
mod server;

/// How many times as many arrivals as usual: set `NAGAYA_SIMULATE` to a number for a long run.
fn times() -> u64 {
    std::env::var("NAGAYA_SIMULATE").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

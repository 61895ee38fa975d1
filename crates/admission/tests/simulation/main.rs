//! Simulated crowds: the machine driven by the same seeds through the same bursts, cancels, changes and restarts each time.
//!
//! `NAGAYA_SIM_SEED=N cargo test -p nagaya-admission --test simulation` runs each of them with this seed alone, e.g. the one that
//! a failure has printed; `N..M` runs those from N up to, not including, M.
//!
//! Not here: the parts alone (beside each of them in `src`), real servers and clients (`./dev experiment admission-*`).

mod chance;
mod crowd;
mod fairness;
mod lender;
mod model;
mod moved;
mod prediction;
mod promises;
mod server;

/// Simulates with each of the usual seeds, or with those of `NAGAYA_SIM_SEED`. The last one printed is the one that fails.
fn with_seeds(usual: impl IntoIterator<Item = u64>, simulate: impl Fn(u64)) {
    let number = |text: &str| text.parse().expect("NAGAYA_SIM_SEED is a number, or two with .. between");
    let seeds: Vec<u64> = match std::env::var("NAGAYA_SIM_SEED") {
        Ok(wanted) => match wanted.split_once("..") {
            Some((first, end)) => (number(first)..number(end)).collect(),
            None => vec![number(&wanted)],
        },
        Err(_) => usual.into_iter().collect(),
    };
    for seed in seeds {
        println!("NAGAYA_SIM_SEED={seed}");
        simulate(seed);
    }
}

/// How many times as many arrivals as usual: set `NAGAYA_SIMULATE` to a number for a long run.
fn times() -> u64 {
    std::env::var("NAGAYA_SIMULATE").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

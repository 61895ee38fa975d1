//! A simulated server behind the machine: requests that need some work, on processors that they share.
//!
//! Not here: who sends what when (`prediction`, `fairness`, `promises`).

use std::collections::{BTreeSet, HashMap};

use nagaya_admission::{Moment, RequestKey};

/// Processor sharing: `cores` processors, each request on at most one at a time. With infinitely many, service does not depend on
/// how many run.
pub struct Server {
    cores: f64,
    speed: f64,
    /// What a request that has run from the beginning would have got done by now, in microseconds of work.
    done: f64,
    at: u64,
    /// By what `done` will be when they end: as the bits of a positive float, which sort as it does.
    jobs: BTreeSet<(u64, RequestKey)>,
    started: HashMap<RequestKey, u64>,
}

impl Server {
    pub fn new(cores: f64) -> Self {
        Self { cores, speed: 1.0, done: 0.0, at: 0, jobs: BTreeSet::new(), started: HashMap::new() }
    }

    /// From now on it is so many times as fast as at first.
    pub fn set_speed(&mut self, now: Moment, speed: f64) {
        self.advance(now.0);
        self.speed = speed;
    }

    pub fn start(&mut self, now: Moment, pass: RequestKey, work_us: f64) {
        self.advance(now.0);
        self.jobs.insert(((self.done + work_us.max(1.0)).to_bits(), pass));
        self.started.entry(pass).or_insert(now.0);
    }

    /// It has begun, and needs no processor yet.
    pub fn sleeps(&mut self, now: Moment, pass: RequestKey) {
        self.started.insert(pass, now.0);
    }

    /// When the next request ends, if nothing else happens before.
    pub fn next_end(&self) -> Option<u64> {
        let (end, _) = self.jobs.first()?;
        let left = (f64::from_bits(*end) - self.done).max(0.0);
        Some(self.at + (left / self.rate()).ceil() as u64)
    }

    /// Ends the one whose time has come: which, and how long it took.
    pub fn end(&mut self, now: Moment) -> Option<(RequestKey, u64)> {
        self.advance(now.0);
        let (_, pass) = self.jobs.pop_first()?;
        Some((pass, now.0 - self.started.remove(&pass)?))
    }

    /// Microseconds of work done for each in a microsecond.
    fn rate(&self) -> f64 {
        self.speed * (self.cores / self.jobs.len().max(1) as f64).min(1.0)
    }

    fn advance(&mut self, now: u64) {
        self.done += (now - self.at.min(now)) as f64 * self.rate();
        self.at = now;
    }
}

#[test]
fn requests_share_the_processors() {
    let mut server = Server::new(2.0);
    for pass in 1..=4 {
        server.start(Moment(1_000), RequestKey(pass), 100.0 * pass as f64);
    }
    let mut ends = Vec::new();
    while let Some(at) = server.next_end() {
        ends.push((at, server.end(Moment(at)).map(|(_, took)| took)));
    }
    // Four on two: half speed until 200; three: two thirds until 350; then full speed.
    assert_eq!(ends, [(1_200, Some(200)), (1_350, Some(350)), (1_450, Some(450)), (1_550, Some(550))]);
}

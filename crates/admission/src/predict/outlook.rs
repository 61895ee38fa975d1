//! Computes when the last request in the queue runs: when permits have done all earlier work.
//!
//! From the end of its present request on, a permit does work from the queue. Queued requests that
//! begin late have not ended by the computed time. Both are sums over kinds of requests. So the
//! time at which they are equal is found by halving, whatever the length of the queue. The
//! distinction matters: a permit that a slow report holds does nothing for the quick reads behind
//! it.
//!
//! Not here: service times of a kind (`predict::pace`), and permits that are shared with other
//! lanes (`machine::waits`).

/// Kinds with requests that run or wait: the distinct ones, and the shared one.
pub(super) const PARTS: usize = 33;
/// Halvings: down to a millionth of the first interval.
const HALVINGS: usize = 24;
/// Doublings until a time is found that is too late.
const DOUBLINGS: usize = 40;

/// Requests of one kind that run and that wait. Times in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ClassWork {
    pub(super) running: f64,
    /// Average remaining service of each running request.
    pub(super) rest: f64,
    pub(super) waiting: f64,
    pub(super) service: f64,
    /// Squared coefficient of variation of the service.
    pub(super) spread: f64,
}

#[derive(Debug)]
pub(super) struct WaitOutlook {
    permits: f64,
    parts: [ClassWork; PARTS],
    len: usize,
}

impl WaitOutlook {
    pub(super) fn new(permits: f64) -> Self {
        Self { permits, parts: [ClassWork::default(); PARTS], len: 0 }
    }

    pub(super) fn add(&mut self, part: ClassWork) {
        if let Some(free) = self.parts.get_mut(self.len) {
            *free = part;
            self.len += 1;
        }
    }

    /// Returns the wait in microseconds. `None` if there is no permit, so it never ends.
    pub(super) fn turn(&self) -> Option<f64> {
        let running: f64 = self.parts().map(|part| part.running).sum();
        if self.permits <= 0.0 || running <= 0.0 {
            return None;
        }
        let first = self.first_end(running);
        let is_late = |time: f64| self.done(time, running) >= self.begun(time);
        let mut early = first;
        let mut late = first.max(1.0);
        for _ in 0..DOUBLINGS {
            if is_late(late) {
                break;
            }
            early = late;
            late *= 2.0;
        }
        for _ in 0..HALVINGS {
            let middle = (early + late) / 2.0;
            if is_late(middle) { late = middle } else { early = middle }
        }
        Some(late)
    }

    fn parts(&self) -> impl Iterator<Item = &ClassWork> {
        self.parts[..self.len].iter()
    }

    /// Returns when the first running request ends: each ends at any time up to twice its average
    /// rest.
    fn first_end(&self, running: f64) -> f64 {
        let ends: f64 = self.parts().map(|part| part.running / (2.0 * part.rest.max(1.0))).sum();
        running / (running + 1.0) / ends
    }

    /// Returns the work that permits will have done for the queue by `time`.
    fn done(&self, time: f64, running: f64) -> f64 {
        let done = |part: &ClassWork| {
            let longest = 2.0 * part.rest.max(1.0);
            part.running * if time < longest { time * time / (2.0 * longest) } else { time - part.rest }
        };
        // A limit below the number that run takes permits away as they come back.
        self.parts().map(done).sum::<f64>() * (self.permits / running)
    }

    /// Returns the queued work that will be done by `time`, if its starts are spread evenly until
    /// then.
    fn begun(&self, time: f64) -> f64 {
        let begun = |part: &ClassWork| {
            let done = if part.service * (1.0 + part.spread) < time {
                part.service * (1.0 - part.service * (1.0 + part.spread) / (2.0 * time))
            } else {
                (time / 2.0).min(part.service)
            };
            // All permits count but the one for which it waits.
            part.waiting * (done + (part.service - done) / self.permits.max(1.0))
        };
        self.parts().map(begun).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(running: f64, rest: f64, waiting: f64, service: f64) -> ClassWork {
        ClassWork { running, rest, waiting, service, spread: 0.0 }
    }

    fn turn(permits: f64, parts: &[ClassWork]) -> f64 {
        let mut outlook = WaitOutlook::new(permits);
        parts.iter().for_each(|part| outlook.add(*part));
        outlook.turn().expect("there is a permit")
    }

    #[test]
    fn the_first_in_line_waits_for_the_first_permit() {
        assert!((turn(1.0, &[kind(1.0, 500.0, 0.0, 1_000.0)]) - 500.0).abs() < 1.0);
        assert!((turn(9.0, &[kind(9.0, 500.0, 0.0, 1_000.0)]) - 100.0).abs() < 1.0);
    }

    #[test]
    fn a_long_line_drains_at_the_rate_of_all_permits() {
        let wait = turn(10.0, &[kind(10.0, 500.0, 1_000.0, 1_000.0)]);
        assert!((wait - 100_050.0).abs() < 20.0, "{wait}");
        let wait = turn(1.0, &[kind(1.0, 300.0, 10.0, 1_000.0)]);
        assert!((wait - 10_300.0).abs() < 200.0, "{wait}");
    }

    #[test]
    fn a_permit_with_a_slow_request_does_nothing_for_quick_ones() {
        let slow = kind(9.0, 1e6, 0.0, 2e6);
        let wait = turn(10.0, &[slow, kind(1.0, 2_500.0, 20.0, 5_000.0)]);
        assert!((80_000.0..105_000.0).contains(&wait), "{wait}");
    }

    #[test]
    fn a_lowered_bound_drains_more_slowly() {
        let parts = [kind(10.0, 500.0, 100.0, 1_000.0)];
        let ratio = turn(5.0, &parts) / turn(10.0, &parts);
        assert!((1.9..2.1).contains(&ratio), "{ratio}");
    }

    #[test]
    fn without_permits_there_is_no_turn() {
        assert_eq!(WaitOutlook::new(1.0).turn(), None);
        let mut closed = WaitOutlook::new(0.0);
        closed.add(kind(1.0, 1.0, 1.0, 1.0));
        assert_eq!(closed.turn(), None);
    }
}

//! How many requests of a lane should run at once, found out by measuring.
//!
//! Not here: who runs next, and in which lane (`machine`), service times for predictions (`predict`).

use std::time::Duration;

use crate::{Moment, Pressure};

/// What was seen when a request that ran in the lane ended, or at a tick.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// Requests that run in the lane, with the one that ends now.
    pub running: u32,
    /// Requests in line for this lane.
    pub waiting: u32,
    /// From its permit to its end; `None` at a tick.
    pub service: Option<Duration>,
    /// Expected service of this request's class, in seconds; 1.0 if unknown.
    pub work: f64,
}

/// The bound of a lane that adapts to what runs in it.
#[derive(Debug, Clone)]
pub struct Auto {
    min: u32,
    max: u32,
    bound: u32,
}

impl Auto {
    /// Between `min` (at least 1) and `max` (at least `min`).
    pub fn new(min: u32, max: u32) -> Self {
        let min = min.max(1);
        Self { min, max: max.max(min), bound: min }
    }

    /// How many may run now.
    pub fn run(&self) -> u32 {
        self.bound
    }

    /// Changes the limits; the bound is brought between them at once.
    pub fn set(&mut self, min: u32, max: u32) {
        self.min = min.max(1);
        self.max = max.max(self.min);
        self.bound = self.bound.clamp(self.min, self.max);
    }

    /// Learns from a request that ended, or from a tick. The new bound, if it changed.
    pub fn observe(&mut self, _now: Moment, observed: Observed) -> Option<u32> {
        let was = self.bound;
        if observed.waiting > 0 && observed.running >= self.bound {
            self.bound = (self.bound + 1).min(self.max);
        }
        (self.bound != was).then_some(self.bound)
    }

    /// Learns how hard it was for what ran in the lane since the last time.
    pub fn feel(&mut self, _now: Moment, _pressure: Pressure) {}
}

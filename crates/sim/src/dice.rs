//! Random numbers from a seed: the same everywhere.
//!
//! Not here: randomness of the machine; nothing in this crate has any.

use std::time::Duration;

/// splitmix64.
#[derive(Debug, Clone)]
pub struct Dice(pub u64);

impl Dice {
    /// Returns one of `0..sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides.max(1)
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.roll(100) < percent
    }

    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = most.saturating_sub(least).as_nanos() as u64;
        least + Duration::from_nanos(self.roll(span + 1))
    }

    /// Returns an index below `count`.
    pub fn index(&mut self, count: usize) -> usize {
        self.roll(count as u64) as usize
    }
}

//! Numbers that look random and are the same for the same seed (splitmix64).
//!
//! Not here: what they decide.

pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to, not including, `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }

    /// From 0 up to, not including, 1.
    pub fn part(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True in so many percent of the cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Microseconds until something that happens, on average, each `mean` microseconds, at random.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.part()).ln() * mean
    }

    /// As often above as below the median, and sometimes far above: `spread` is the standard deviation of its logarithm.
    pub fn lognormal(&mut self, median: f64, spread: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.part()).ln()).sqrt();
        median * (spread * radius * (self.part() * std::f64::consts::TAU).cos()).exp()
    }
}

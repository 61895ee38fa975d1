//! A quantile sketch that forgets: fixed memory, an error of at most 6 %.
//!
//! Buckets grow with their values, so the error is relative. Old values fade because new ones weigh
//! more, which costs nothing per value. All weights are scaled down when they grow large. Very many
//! lanes have a sketch. So only the buckets between the least and the greatest value take memory.
//!
//! Not here: what is measured and what it is used for (`predict`).

/// Buckets for each doubling, evenly spaced. The first bits of a number select one, without a
/// logarithm.
const BUCKETS_PER_DOUBLING: usize = 8;
/// Most buckets. The first holds values below 1. The last holds 2^36 and more, which in
/// microseconds is nineteen hours.
const BUCKETS: usize = 1 + 36 * BUCKETS_PER_DOUBLING;
/// Weights are scaled down before they lose precision.
const WEIGHT_MAX: f32 = 1e12;

/// A decaying histogram of positive numbers, with a resolution from 1 on.
#[derive(Debug, Clone)]
pub struct QuantileSketch {
    /// Weights of the buckets from `lowest` on.
    buckets: Vec<f32>,
    lowest: usize,
    /// Weight of the next value. It grows, so that earlier values fade.
    weight: f32,
    growth: f32,
    count: u64,
}

impl QuantileSketch {
    /// Creates a sketch in which a value's weight has halved after `half_life` further values.
    pub fn new(half_life: u32) -> Self {
        let growth = 2f32.powf(1.0 / half_life.max(1) as f32);
        Self { buckets: Vec::new(), lowest: 0, weight: 1.0, growth, count: 0 }
    }

    pub fn add(&mut self, value: f64) {
        let bucket = bucket(value);
        self.make_room(bucket);
        self.buckets[bucket - self.lowest] += self.weight;
        self.weight *= self.growth;
        self.count += 1;
        if self.weight > WEIGHT_MAX {
            for each in &mut self.buckets {
                *each /= self.weight;
            }
            self.weight = 1.0;
        }
    }

    /// Returns the value that a part `q` (0 to 1) of the values does not exceed. `None` before the
    /// first value.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let total: f64 = self.buckets.iter().map(|weight| f64::from(*weight)).sum();
        let wanted = total * q.clamp(0.0, 1.0);
        let mut sum = 0.0;
        let mut last = None;
        for (at, weight) in self.buckets.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            sum += f64::from(*weight);
            last = Some(middle(self.lowest + at));
            if sum >= wanted {
                break;
            }
        }
        last
    }

    /// Returns the number of values so far, faded ones included.
    pub fn count(&self) -> u64 {
        self.count
    }

    fn make_room(&mut self, bucket: usize) {
        if self.buckets.is_empty() {
            self.lowest = bucket;
        }
        if bucket < self.lowest {
            let missing = self.lowest - bucket;
            self.buckets.splice(0..0, std::iter::repeat_n(0.0, missing));
            self.lowest = bucket;
        }
        if bucket - self.lowest >= self.buckets.len() {
            self.buckets.resize(bucket - self.lowest + 1, 0.0);
        }
    }
}

/// Returns the bucket of a value.
fn bucket(value: f64) -> usize {
    // NaN is not a value, either.
    if value.is_nan() || value < 1.0 {
        return 0;
    }
    // For a positive float, these are the exponent and then the first bits of the mantissa.
    let steps = (value.to_bits() - 1f64.to_bits()) >> MANTISSA_BITS_LEFT;
    usize::try_from(steps).unwrap_or(usize::MAX).min(BUCKETS - 2) + 1
}

/// Bits of the mantissa that make no difference.
const MANTISSA_BITS_LEFT: u32 = f64::MANTISSA_DIGITS - 1 - BUCKETS_PER_DOUBLING.ilog2();

/// Returns the value from which the two ends of a bucket are equally far, relative to themselves.
fn middle(bucket: usize) -> f64 {
    if bucket == 0 {
        return 0.0;
    }
    let end = |bucket: usize| f64::from_bits(1f64.to_bits() + ((bucket as u64) << MANTISSA_BITS_LEFT));
    let begin = end(bucket - 1);
    let end = end(bucket);
    2.0 * begin * end / (begin + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_six_percent() {
        let mut sketch = QuantileSketch::new(1_000_000);
        assert_eq!(sketch.quantile(0.5), None);
        for value in (1..=10_000u32).rev() {
            sketch.add(f64::from(value) * 7.0);
        }
        for q in [0.1, 0.5, 0.9, 0.99] {
            let exact = q * 70_000.0;
            let found = sketch.quantile(q).expect("it has values");
            assert!((found / exact - 1.0).abs() < 0.06, "{q}: {found} instead of {exact}");
        }
    }

    #[test]
    fn old_values_fade_from_the_sketch() {
        let mut sketch = QuantileSketch::new(50);
        for _ in 0..10_000 {
            sketch.add(1_000.0);
        }
        for _ in 0..300 {
            sketch.add(10.0);
        }
        let p90 = sketch.quantile(0.9).expect("it has values");
        assert!((9.0..11.0).contains(&p90), "{p90}");
    }

    #[test]
    fn zero_negative_and_huge_values_have_a_bucket() {
        let mut sketch = QuantileSketch::new(10);
        for value in [0.0, -1.0, f64::NAN] {
            sketch.add(value);
            assert_eq!(sketch.quantile(0.5), Some(0.0));
        }
        for _ in 0..100 {
            sketch.add(f64::INFINITY);
        }
        assert!(sketch.quantile(0.5).is_some_and(|value| value > 1e9));
        assert_eq!(sketch.count(), 103);
        assert!(sketch.buckets.len() <= BUCKETS);
    }
}

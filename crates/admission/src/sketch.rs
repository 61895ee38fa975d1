//! A quantile sketch that forgets: fixed memory, 6 % off at most.
//!
//! Buckets grow with the values in them, so the error is relative. Old values fade by making new ones weigh more, which costs
//! nothing per value; all is scaled down when the weights grow large. Only the buckets between the least and the greatest value
//! seen take memory, as there is a sketch for each of very many lanes.
//!
//! Not here: what is measured and what it is used for (`predict`).

/// Buckets for each doubling, evenly spaced: they are told by the first bits of a number, without a logarithm.
const BUCKETS_PER_DOUBLING: usize = 8;
/// Most buckets. The first holds what is less than 1, the last what is 2^36 and more, which in microseconds is nineteen hours.
const BUCKETS: usize = 1 + 36 * BUCKETS_PER_DOUBLING;
/// Weights are scaled down before they lose precision.
const WEIGHT_MAX: f32 = 1e12;

/// A decaying histogram of positive numbers, told apart from 1 on.
#[derive(Debug, Clone)]
pub struct Sketch {
    /// Weights of the buckets from `lowest` on.
    buckets: Vec<f32>,
    lowest: usize,
    /// Weight of the next value: what makes earlier ones fade.
    weight: f32,
    growth: f32,
    count: u64,
}

impl Sketch {
    /// One in which a value's weight has halved after `half_life` further ones.
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

    /// The value that a part `q` (0 to 1) of the values does not exceed; `None` before the first.
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

    /// Values so far, faded ones too.
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

/// The bucket of a value.
fn bucket(value: f64) -> usize {
    // Not a number is no value either.
    if value.is_nan() || value < 1.0 {
        return 0;
    }
    // Of a positive float, the exponent and then the first bits of the mantissa.
    let steps = (value.to_bits() - 1f64.to_bits()) >> MANTISSA_BITS_LEFT;
    usize::try_from(steps).unwrap_or(usize::MAX).min(BUCKETS - 2) + 1
}

/// Bits of the mantissa that make no difference.
const MANTISSA_BITS_LEFT: u32 = f64::MANTISSA_DIGITS - 1 - BUCKETS_PER_DOUBLING.ilog2();

/// The value from which the two ends of a bucket are equally far, as parts of themselves.
fn middle(bucket: usize) -> f64 {
    if bucket == 0 {
        return 0.0;
    }
    let end = |bucket: usize| f64::from_bits(1f64.to_bits() + ((bucket as u64) << MANTISSA_BITS_LEFT));
    let (begin, end) = (end(bucket - 1), end(bucket));
    2.0 * begin * end / (begin + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_six_percent() {
        let mut sketch = Sketch::new(1_000_000);
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
    fn what_was_long_ago_fades() {
        let mut sketch = Sketch::new(50);
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
        let mut sketch = Sketch::new(10);
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

//! An array of numbers to which many threads add without disturbing each other.
//!
//! Not here: the meaning of the numbers (`series`).

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// Most shards of an array; with more cores, threads share. At 64 shards and 1,000 numbers an array
/// takes 512 KiB.
const SHARDS_MAX: usize = 64;

/// Numbers that share a cache line. It is a pair of lines, because CPUs fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct CacheLine([AtomicU64; LINE]);

const LINE: usize = 16;

/// `width` sums, each spread over one cell per shard.
pub(crate) struct ShardedSums {
    /// `shards * lines_per_shard` lines.
    lines: Box<[CacheLine]>,
    lines_per_shard: usize,
    /// Shards less one: their number is a power of two.
    mask: usize,
    width: usize,
}

impl fmt::Debug for ShardedSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shards").field("lines", &self.lines.len()).finish_non_exhaustive()
    }
}

impl ShardedSums {
    pub(crate) fn new(width: usize) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let shards = cores.next_power_of_two().min(SHARDS_MAX);
        let lines_per_shard = width.div_ceil(LINE).max(1);
        let lines = (0..shards * lines_per_shard).map(|_| CacheLine::default()).collect();
        Self { lines, lines_per_shard, mask: shards - 1, width }
    }

    /// Adds to sum number `index`, which is below `width`.
    #[inline]
    pub(crate) fn add(&self, index: usize, n: u64) {
        debug_assert!(index < self.width, "a label value that was never declared");
        let first = (this_thread() & self.mask) * self.lines_per_shard;
        self.lines[first + index / LINE].0[index % LINE].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn sum(&self, index: usize) -> u64 {
        self.lines
            .chunks_exact(self.lines_per_shard)
            .map(|shard| shard[index / LINE].0[index % LINE].load(Ordering::Relaxed))
            .fold(0, u64::wrapping_add)
    }
}

/// Returns a number for the calling thread, the same for every array.
#[inline]
fn this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    const UNSET: usize = usize::MAX;
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(UNSET) };
    }
    let number = NUMBER.get();
    if number != UNSET {
        return number;
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed) % UNSET;
    NUMBER.set(number);
    number
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn nothing_is_lost_between_threads() {
        let shards = Arc::new(ShardedSums::new(40));
        let threads: Vec<_> = (0..8)
            .map(|t| {
                let shards = Arc::clone(&shards);
                thread::spawn(move || {
                    for _ in 0..1000 {
                        shards.add(t * 5, 2);
                        shards.add(39, 1);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        for t in 0..8 {
            assert_eq!(shards.sum(t * 5), 2000);
        }
        assert_eq!(shards.sum(39), 8000);
        assert_eq!(shards.sum(1), 0);
    }
}

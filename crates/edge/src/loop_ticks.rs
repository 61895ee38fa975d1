//! Counts turns of a thread's event loop, so that one check serves all requests that arrived
//! before it.
//!
//! A check of a file or a descriptor is a system call. Requests that the kernel reports together
//! were sent before that. So the result for the first of them holds for the others, too. Tasks
//! run in the order in which they were woken. A task woken by the first check of a turn runs
//! after all that were reported before it. So it begins the next turn. A request that is sent
//! later is read later, and checks again.
//!
//! Not here: the checked objects (`files`, `rules`).

use std::cell::Cell;

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct LoopTicks {
    number: Cell<u64>,
    /// A check used this turn, so its end matters.
    asked: Cell<bool>,
    /// Turns are counted. Otherwise each check is a turn of its own.
    counted: Cell<bool>,
    over: Notify,
}

impl LoopTicks {
    /// Returns the number of the present turn, which is never 0.
    pub fn now(&self) -> u64 {
        if !self.counted.get() {
            self.number.set(self.number.get() + 1);
        } else if !self.asked.replace(true) {
            self.over.notify_one();
        }
        self.number.get()
    }

    /// Counts turns, while the thread serves.
    pub async fn count(&self) {
        let _uncounted = UncountedGuard(self);
        self.number.set(self.number.get() + 1);
        self.counted.set(true);
        loop {
            self.over.notified().await;
            self.number.set(self.number.get() + 1);
            self.asked.set(false);
        }
    }
}

/// Stops the counting when dropped, so that each check is a turn of its own again.
struct UncountedGuard<'a>(&'a LoopTicks);

impl Drop for UncountedGuard<'_> {
    fn drop(&mut self) {
        self.0.counted.set(false);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;

    #[test]
    fn where_nobody_counts_each_look_is_a_turn() {
        let turns = LoopTicks::default();
        assert!(turns.now() != turns.now() && turns.now() != 0);
    }

    #[tokio::test]
    async fn those_that_were_woken_together_share_a_turn() {
        let turns = Rc::new(LoopTicks::default());
        let all = LocalSet::new();
        all.run_until(async {
            let counting = spawn_local({
                let turns = Rc::clone(&turns);
                async move { turns.count().await }
            });
            yield_now().await;
            let seen = Rc::new(std::cell::RefCell::new(Vec::new()));
            for round in 0..3 {
                let looks: Vec<_> = (0..20)
                    .map(|_| {
                        let (turns, seen) = (Rc::clone(&turns), Rc::clone(&seen));
                        spawn_local(async move { seen.borrow_mut().push((round, turns.now())) })
                    })
                    .collect();
                for look in looks {
                    look.await.unwrap();
                }
                yield_now().await;
            }
            let mut seen = seen.take();
            seen.dedup();
            assert_eq!(seen.len(), 3, "each round is one turn: {seen:?}");
            assert!(seen[0].1 < seen[1].1 && seen[1].1 < seen[2].1);
            counting.abort();
            let _ = counting.await;
            assert!(turns.now() != turns.now());
        })
        .await;
    }
}

//! Turns of a thread's event loop: what one look tells all requests that had come before it.
//!
//! A look at a file or a descriptor is a system call. Requests that the kernel reports together were sent before that, so what
//! the first of them finds holds for the others too. Tasks run in the order in which they were woken: one that is woken
//! by the first look of a turn comes after all that were reported before it, and begins the next turn. A request that is
//! sent later is read later, and looks again.
//!
//! Not here: what is looked at (`files`, `rules`).

use std::cell::Cell;

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct Turns {
    number: Cell<u64>,
    /// Somebody asked in this turn, so that its end matters.
    asked: Cell<bool>,
    /// Turns are counted. Where nobody does, each look is a turn of its own.
    counted: Cell<bool>,
    over: Notify,
}

impl Turns {
    /// The number of the present turn; never 0.
    pub fn now(&self) -> u64 {
        if !self.counted.get() {
            self.number.set(self.number.get() + 1);
        } else if !self.asked.replace(true) {
            self.over.notify_one();
        }
        self.number.get()
    }

    /// Counts turns, as long as the thread serves.
    pub async fn count(&self) {
        let _uncounted = Uncounted(self);
        self.number.set(self.number.get() + 1);
        self.counted.set(true);
        loop {
            self.over.notified().await;
            self.number.set(self.number.get() + 1);
            self.asked.set(false);
        }
    }
}

/// Makes each look a turn of its own again when the counting ends.
struct Uncounted<'a>(&'a Turns);

impl Drop for Uncounted<'_> {
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
        let turns = Turns::default();
        assert!(turns.now() != turns.now() && turns.now() != 0);
    }

    #[tokio::test]
    async fn those_that_were_woken_together_share_a_turn() {
        let turns = Rc::new(Turns::default());
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

//! Splits the time of a request in its application by the questions that it asked databases: before
//! the first, in databases, between them, and after the last answer (paper 003, section 6).
//!
//! Invariant: the four parts add up to the whole time. Not here: the questions (`relay` of the
//! keeper), whose they are (`instances`), the usual times of a site (`site_turnarounds`).

use nagaya_keeper_api::database_waits::DatabaseQuestion;
use smallvec::SmallVec;

/// The parts, in the order of their time, and their names.
pub const PARTS: [&str; 4] = ["before", "db", "between", "after"];

/// The parts of one request's time in its application, microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turnaround {
    /// From the request's head to its first question. All of its time, if it asked nothing.
    pub before_us: u64,
    /// With a question open: from its first byte to the last byte of its answer.
    pub db_us: u64,
    /// Without a question open, between two of them.
    pub between_us: u64,
    /// From the last byte of the last answer to the end of the response.
    pub after_us: u64,
    pub questions: u32,
}

/// Knows the split of a request's time, as far as it has gone.
pub trait TurnaroundSource {
    /// `None` if it is not known.
    fn turnaround(&self) -> Option<Turnaround>;
}

impl Turnaround {
    /// Splits the time of a request by its questions, in any order. Questions that began outside
    /// of that time do not count.
    pub fn of(questions: &[DatabaseQuestion], begun_us: u64, ended_us: u64) -> Self {
        let whole_us = ended_us.saturating_sub(begun_us);
        let is_inside = |question: &&DatabaseQuestion| (begun_us..=ended_us).contains(&question.begun_us);
        // An answer that goes on ends with the request.
        let span = |question: &DatabaseQuestion| {
            let ended = question.ended_us.unwrap_or(ended_us);
            (question.begun_us, ended.clamp(question.begun_us, ended_us))
        };
        let mut spans: SmallVec<[(u64, u64); 16]> = questions.iter().filter(is_inside).map(span).collect();
        spans.sort_unstable();
        let Some(&(first, _)) = spans.first() else { return Self { before_us: whole_us, ..Self::default() } };
        let (mut db_us, mut end) = (0, first);
        for (begun, ended) in &spans {
            db_us += ended.saturating_sub(end.max(*begun));
            end = end.max(*ended);
        }
        let (before_us, after_us) = (first - begun_us, ended_us - end);
        Self {
            before_us,
            db_us,
            between_us: whole_us - before_us - db_us - after_us,
            after_us,
            questions: u32::try_from(spans.len()).unwrap_or(u32::MAX),
        }
    }

    /// Returns the parts in the order of `PARTS`.
    pub fn parts(&self) -> [u64; PARTS.len()] {
        [self.before_us, self.db_us, self.between_us, self.after_us]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn question(begun_us: u64, ended_us: impl Into<Option<u64>>) -> DatabaseQuestion {
        DatabaseQuestion { begun_us, ended_us: ended_us.into(), request: None }
    }

    #[test]
    fn time_is_split_at_the_questions() {
        for (questions, expected, count) in [
            (vec![], [100, 0, 0, 0], 0),
            (vec![question(1030, 1050)], [30, 20, 0, 50], 1),
            (vec![question(1010, 1020), question(1040, 1070)], [10, 40, 20, 30], 2),
            // In any order, and at the same time.
            (vec![question(1040, 1070), question(1010, 1050)], [10, 60, 0, 30], 2),
            (vec![question(1010, 1090), question(1020, 1030)], [10, 80, 0, 10], 2),
            // One goes on after the end, one has no answer, two are outside.
            (vec![question(1050, 2000)], [50, 50, 0, 0], 1),
            (vec![question(1060, None)], [60, 40, 0, 0], 1),
            (vec![question(999, 1010), question(1101, 1102)], [100, 0, 0, 0], 0),
            (vec![question(1000, 1000), question(1100, 1100)], [0, 0, 100, 0], 2),
            // A time that runs backwards.
            (vec![question(1050, 3)], [50, 0, 0, 50], 1),
        ] {
            let split = Turnaround::of(&questions, 1000, 1100);
            assert_eq!((split.parts(), split.questions), (expected, count), "{questions:?}");
        }
        assert_eq!(Turnaround::of(&[question(5, 6)], 9, 3), Turnaround::default());
    }

    proptest! {
        #[test]
        fn parts_add_up_to_the_whole(
            questions in proptest::collection::vec((0_u64..300, proptest::option::of(0_u64..300)), 0..40),
            (begun, len) in (0_u64..200, 0_u64..200),
        ) {
            let questions: Vec<_> = questions.into_iter().map(|(at, end)| question(at, end)).collect();
            let split = Turnaround::of(&questions, begun, begun + len);
            prop_assert_eq!(split.parts().iter().sum::<u64>(), len);
            // Each microsecond is in a database if a question is open in it.
            let is_open = |us: u64| questions.iter().any(|question| {
                (begun..=begun + len).contains(&question.begun_us)
                    && (question.begun_us..question.ended_us.unwrap_or(u64::MAX)).contains(&us)
            });
            let open = (begun..begun + len).filter(|us| is_open(*us)).count();
            prop_assert_eq!(split.db_us, u64::try_from(open).unwrap());
        }
    }
}

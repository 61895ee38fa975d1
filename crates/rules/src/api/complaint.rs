//! Logs a rule's impossible requests where upstream swallows the error, but not with every request.
//!
//! Not here: errors that end an evaluation (`fault`), lines that rules log themselves.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::facts::{FactSource, NumberFact};
use crate::verdict::{LogLevel, Verdict};

/// Time after which the same complaint is logged again, microseconds.
const AGAIN_AFTER_US: i64 = 60_000_000;

/// Most complaints that a thread remembers. Names that contain client input can make any number of
/// them.
const REMEMBERED_MAX: usize = 256;

const TOO_MANY: &str = "more than 256 different complaints about rules in a minute: the rest is left out";

thread_local! {
    /// When each was logged last, by the clock of requests.
    static LOGGED: RefCell<BTreeMap<Box<str>, i64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Logs a warning, unless this thread has done so within a minute.
pub fn complain(facts: &dyn FactSource, verdict: &mut Verdict, text: &str) {
    if let Some(due) = due(text, facts.number(NumberFact::ArrivedUs).unwrap_or(0)) {
        verdict.say(LogLevel::Warning, due);
    }
}

/// Returns the text to log for this complaint at this time, if any.
fn due(text: &str, now: i64) -> Option<&str> {
    let is_recent = |at: i64| (0..AGAIN_AFTER_US).contains(&now.saturating_sub(at));
    LOGGED.with_borrow_mut(|logged| {
        if logged.get(text).is_some_and(|at| is_recent(*at)) {
            return None;
        }
        if logged.len() >= REMEMBERED_MAX {
            logged.retain(|_, at| is_recent(*at));
        }
        // `TOO_MANY` itself takes one more place.
        let text = if logged.len() >= REMEMBERED_MAX { TOO_MANY } else { text };
        if logged.get(text).is_some_and(|at| is_recent(*at)) {
            return None;
        }
        logged.insert(text.into(), now);
        Some(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(at_s: i64, text: &str) -> usize {
        due(text, at_s * 1_000_000).iter().count()
    }

    #[test]
    fn a_complaint_is_logged_once_a_minute() {
        let told = [lines(0, "a"), lines(1, "a"), lines(1, "b"), lines(59, "a"), lines(60, "a")];
        assert_eq!(told, [1, 0, 1, 0, 1]);
    }

    #[test]
    fn different_complaints_are_bounded_too() {
        let logged: usize = (0..10_000).map(|number| lines(5, &number.to_string())).sum();
        assert_eq!(logged, REMEMBERED_MAX + 1);
        assert_eq!(lines(65, "later"), 1);
    }
}

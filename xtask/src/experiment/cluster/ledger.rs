//! Reads a site's ledger, and finds whether two instances of it ever served at the same time.
//!
//! Each line is the begin or the end of one request in one boot. The application itself appends it
//! with one `write` to a file opened with `O_APPEND`. Such writes are ordered one after the other,
//! and each takes effect between its call and its return. So the order of lines is an order in
//! which it happened. Let boot B be newer than A if B's first line comes later. Then:
//!
//! - If two boots never serve at once, lines of A end before the first line of B: boots form
//!   blocks.
//! - If A serves a request while B serves one, A's `end` comes after B's `begin`, or B's before
//!   A's. If A takes a request after B has served one, A's `begin` comes after B's. In both cases a
//!   line of the older boot follows one of the newer, and is found here.
//!
//! There is no lock that could hide it by letting one wait for the other. One case is separate. A
//! machine that paused in the middle of a request cannot know, when it continues, that it was given
//! up. Until its keeper has run, the instance continues, too. An `end` can be late for this reason
//! alone: a whole pause is between `begin` and it. It counts as late, not as served twice, and its
//! delay after the pause is recorded. Its request came in while that was correct.
//!
//! Not here: the program that writes it (`small`).

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

/// A pause of a machine, seconds since 1970.
#[derive(Debug, Clone, Copy)]
pub struct LedgerPause {
    pub from: f64,
    pub to: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LedgerFinding {
    /// Requests whose begin was written.
    pub requests: usize,
    pub boots: usize,
    /// Lines of an older boot after one of a newer.
    pub double_served: usize,
    /// Ends of requests in which the machine paused; not in `double_served`.
    pub late_ends: usize,
    /// The longest time from the end of a pause to such an end.
    pub late_ms_max: f64,
}

impl LedgerFinding {
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.boots += other.boots;
        self.double_served += other.double_served;
        self.late_ends += other.late_ends;
        self.late_ms_max = self.late_ms_max.max(other.late_ms_max);
    }
}

/// Reads one site's ledger.
pub fn read(text: &str, pauses: &[LedgerPause]) -> Result<LedgerFinding> {
    let mut found = LedgerFinding::default();
    // Boots in the order of their first lines.
    let mut boots: Vec<&str> = Vec::new();
    let mut begun: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for line in text.lines() {
        let [what, boot, number, at] = line.split(' ').collect::<Vec<_>>()[..] else {
            bail!("a ledger with the line '{line}'");
        };
        let at: f64 = at.parse().with_context(|| format!("a ledger with the line '{line}'"))?;
        let is_stale = match boots.iter().position(|known| *known == boot) {
            Some(index) => index + 1 < boots.len(),
            None => {
                boots.push(boot);
                false
            }
        };
        match what {
            "begin" => {
                found.requests += 1;
                found.double_served += usize::from(is_stale);
                begun.insert((boot, number), at);
            }
            "end" => {
                let begin = begun.remove(&(boot, number));
                let begin =
                    begin.with_context(|| format!("a ledger with an end without a begin: '{line}'"))?;
                if is_stale {
                    match pauses.iter().rfind(|pause| begin <= pause.to && at >= pause.from) {
                        Some(pause) => {
                            found.late_ends += 1;
                            found.late_ms_max = found.late_ms_max.max((at - pause.to) * 1e3);
                        }
                        None => found.double_served += 1,
                    }
                }
            }
            other => bail!("a ledger with '{other}'"),
        }
    }
    found.boots = boots.len();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, pauses: &[LedgerPause]) -> LedgerFinding {
        read(text, pauses).unwrap()
    }

    #[test]
    fn boots_in_turn_are_right_with_a_request_that_never_ended() {
        let found = of("begin a 1 1.0\nend a 1 1.1\nbegin a 2 1.2\nbegin b 1 2.0\nend b 1 2.1\n", &[]);
        assert_eq!(found, LedgerFinding { requests: 3, boots: 2, ..LedgerFinding::default() });
    }

    #[test]
    fn a_request_into_an_old_boot_was_served_twice() {
        let found =
            of("begin a 1 1.0\nend a 1 1.1\nbegin b 1 2.0\nend b 1 2.1\nbegin a 2 2.2\nend a 2 2.3\n", &[]);
        assert_eq!(found.double_served, 2);
    }

    #[test]
    fn two_at_once_are_found_by_the_end_alone() {
        assert_eq!(of("begin a 1 1.0\nbegin b 1 1.1\nend a 1 1.2\nend b 1 1.3\n", &[]).double_served, 1);
    }

    #[test]
    fn only_an_end_that_a_pause_explains_is_merely_late() {
        let text = "begin a 1 1.0\nbegin b 1 1.4\nend b 1 1.45\nend a 1 1.502\n";
        let found = of(text, &[LedgerPause { from: 1.0, to: 1.5 }]);
        assert_eq!((found.double_served, found.late_ends), (0, 1));
        assert!((found.late_ms_max - 2.0).abs() < 0.01, "{found:?}");
        assert_eq!(of(text, &[LedgerPause { from: 3.0, to: 3.5 }]).double_served, 1);
        let begins = "begin a 1 1.0\nbegin b 1 1.4\nend a 1 1.502\nbegin a 2 1.503\n";
        assert_eq!(of(begins, &[LedgerPause { from: 1.0, to: 1.5 }]).double_served, 1);
    }

    #[test]
    fn a_ledger_that_is_none_is_not_believed() {
        assert!(read("begin a 1\n", &[]).is_err());
        assert!(read("end a 1 1.0\n", &[]).is_err());
        assert!(read("paused a 1 1.0\n", &[]).is_err());
    }
}

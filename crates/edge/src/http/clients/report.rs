//! Logs refused clients: one line per kind and minute, with their number.
//!
//! Not here: the counters (`metrics`), the access log.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::LimitKind;

/// Minimum time between two lines of one kind, in nanoseconds.
const REPORT_EVERY_NS: u64 = 60 * 1_000_000_000;

#[derive(Debug, Default)]
struct LimitReport {
    count: AtomicU64,
    /// Time when the next line may be written, in nanoseconds.
    due_ns: AtomicU64,
}

#[derive(Debug, Default)]
pub struct LimitReports([LimitReport; LimitKind::LABELS.len()]);

impl LimitReports {
    /// Counts one, and writes a line if one is due.
    pub fn note(&self, kind: LimitKind, now_ns: u64, last: impl Display) {
        if let Some(count) = self.count(kind, now_ns) {
            tracing::warn!("{}: {count} {}; the last one was {last}", kind.code(), kind.words());
        }
    }

    /// Returns the number for a line, if one is due.
    fn count(&self, kind: LimitKind, now_ns: u64) -> Option<u64> {
        let report = &self.0[kind as usize];
        report.count.fetch_add(1, Ordering::Relaxed);
        let due = report.due_ns.load(Ordering::Relaxed);
        let next = now_ns.saturating_add(REPORT_EVERY_NS);
        let is_ours = now_ns >= due
            && report.due_ns.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        is_ours.then(|| report.count.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_a_kind_is_written_in_a_minute() {
        let reports = LimitReports::default();
        assert_eq!(reports.count(LimitKind::Full, 0), Some(1));
        assert!((1..1000).all(|n| reports.count(LimitKind::Full, n).is_none()));
        assert_eq!(reports.count(LimitKind::Requests, 1000), Some(1), "another kind has its own");
        assert_eq!(reports.count(LimitKind::Full, REPORT_EVERY_NS), Some(1000));
    }
}

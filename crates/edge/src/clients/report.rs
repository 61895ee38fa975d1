//! What the node's log says of clients that are refused: one line of a kind in a minute, with how many there were.
//!
//! Not here: the counters (`metrics`), the access log.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use nagaya_base::Code;

/// A line of one kind is written no oftener than this, in nanoseconds.
const REPORT_EVERY_NS: u64 = 60 * 1_000_000_000;

/// Why clients are refused, or connections closed. In the order of the metric's labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// As many connections as its network may have are open.
    Connections,
    /// Its network asks faster than it may.
    Requests,
    /// Its network begins TLS handshakes faster than it may.
    Handshakes,
    /// No connection of this thread could be closed for it.
    Full,
    /// It speaks no PROXY protocol where it must, or may not speak it.
    ProxyHeader,
}

impl LimitKind {
    pub const LABELS: &[&str] = &["connections", "requests", "handshakes", "full", "proxy_header"];

    pub fn code(self) -> Code {
        match self {
            Self::Connections => Code(480),
            Self::Requests => Code(481),
            Self::Handshakes => Code(482),
            Self::Full => Code(483),
            Self::ProxyHeader => Code(484),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Connections => "connections were refused: their network has as many open as it may",
            Self::Requests => "requests were refused: their network asks faster than it may",
            Self::Handshakes => {
                "connections were closed: their network begins TLS handshakes faster than it may"
            }
            Self::Full => "connections were refused: an edge thread has as many open as it may",
            Self::ProxyHeader => {
                "connections were closed: they began with no PROXY header that is accepted here"
            }
        }
    }
}

#[derive(Debug, Default)]
struct Report {
    count: AtomicU64,
    /// When the next line may be written, in nanoseconds.
    due_ns: AtomicU64,
}

#[derive(Debug, Default)]
pub struct Reports([Report; LimitKind::LABELS.len()]);

impl Reports {
    /// Counts one, and writes a line if it is time for one.
    pub fn note(&self, kind: LimitKind, now_ns: u64, last: impl Display) {
        if let Some(count) = self.count(kind, now_ns) {
            tracing::warn!("{}: {count} {}; the last one was {last}", kind.code(), kind.words());
        }
    }

    /// How many a line is to tell of, if it is time for one.
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
        let reports = Reports::default();
        assert_eq!(reports.count(LimitKind::Full, 0), Some(1));
        assert!((1..1000).all(|n| reports.count(LimitKind::Full, n).is_none()));
        assert_eq!(reports.count(LimitKind::Requests, 1000), Some(1), "another kind has its own");
        assert_eq!(reports.count(LimitKind::Full, REPORT_EVERY_NS), Some(1000));
    }
}

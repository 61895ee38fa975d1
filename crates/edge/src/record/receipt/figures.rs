//! Holds the figures of one request, the same in the log, in header fields and in explanations.
//!
//! Not here: their output (`access_log`, `disclose`, `explain`).

use std::time::Duration;

use crate::record::access_record::{AccessDetails, AccessRecord, ProgramUsage};
use crate::record::turnaround::Turnaround;

/// Usage and waits of a request. Times are microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiptFigures {
    pub took_us: u64,
    /// Time waiting for its turn.
    pub queue_us: u64,
    pub rules_us: u64,
    /// Waiting for its site's instance to be woken.
    pub wake_us: u64,
    /// Waiting, with the instance ready, for the previous node's lease to expire.
    pub fence_us: u64,
    /// Time in the backend, until the head of its answer.
    pub backend_us: u64,
    /// That and the time after it, until the backend's response was complete, split by its
    /// databases. `None` if the instance has none, or it is not known whose questions they were.
    pub turnaround: Option<Turnaround>,
    /// CPU time of its programs, or of the edge itself if none ran. `None` if a program ran, and
    /// the keeper did not report it.
    pub cpu_us: Option<u64>,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub throttled_us: u64,
    /// Delay of bodies by byte limits, and of their ends by CPU quotas.
    pub paced_us: u64,
    pub demoted: u8,
}

impl ReceiptFigures {
    pub fn of(record: &AccessRecord) -> Self {
        let mut figures = Self {
            queue_us: us(record.queued),
            rules_us: us(record.ruled),
            wake_us: record.woken().map_or(0, |woken| us(woken.waited)),
            fence_us: record.more.as_ref().map_or(0, |more| us(more.fence)),
            backend_us: us(record.backend),
            turnaround: record.more.as_ref().and_then(|more| more.turnaround),
            cpu_us: Some(us(record.edge_cpu)),
            ..Self::default()
        };
        match &record.more {
            Some(more) => figures.update(more, record.took),
            None => figures.took_us = us(record.took),
        }
        figures
    }

    /// Takes over the present values.
    pub fn update(&mut self, more: &AccessDetails, took: Duration) {
        self.took_us = us(took);
        self.paced_us = more.paced_us;
        self.turnaround = more.turnaround.or(self.turnaround);
        match more.used {
            ProgramUsage::Nothing => {}
            ProgramUsage::Unknown => self.cpu_us = None,
            ProgramUsage::Known(usage) => {
                self.cpu_us = Some(usage.cpu_us);
                self.read_bytes = usage.read_bytes;
                self.write_bytes = usage.write_bytes;
                self.throttled_us = usage.throttled_us;
                self.demoted = usage.demoted;
            }
        }
    }

    /// Returns the figures by name, in the order of output. Unknown ones are left out, and a wake
    /// or fence that did not happen.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let woken = (self.wake_us > 0).then_some(("wake_us", self.wake_us));
        let fence = (self.fence_us > 0).then_some(("fence_us", self.fence_us));
        let parts = self.turnaround.map(|split| {
            [
                ("before_us", split.before_us),
                ("db_us", split.db_us),
                ("between_us", split.between_us),
                ("after_us", split.after_us),
                ("questions", split.questions.into()),
            ]
        });
        let cpu = self.cpu_us.map(|cpu_us| ("cpu_us", cpu_us));
        [("took_us", self.took_us), ("queue_us", self.queue_us), ("rules_us", self.rules_us)]
            .into_iter()
            .chain(woken)
            .chain(fence)
            .chain([("backend_us", self.backend_us)])
            .chain(parts.into_iter().flatten())
            .chain(cpu)
            .chain([
                ("read_bytes", self.read_bytes),
                ("write_bytes", self.write_bytes),
                ("throttled_us", self.throttled_us),
                ("paced_us", self.paced_us),
                ("demoted", self.demoted.into()),
            ])
    }
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

//! The figures of one request, the same in the log, in header fields and in explanations.
//!
//! Not here: what each of them is written into (`access_log`, `disclose`, `explain`).

use std::time::Duration;

use crate::access_log::{AccessRecord, More, Used};

/// What a request used and waited for. Times are microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    pub took_us: u64,
    /// Waiting for its turn.
    pub queue_us: u64,
    pub rules_us: u64,
    /// Waiting for its site's instance to be woken.
    pub wake_us: u64,
    /// Waiting, with the instance ready, until no node that had the site before could serve it any more.
    pub fence_us: u64,
    /// In the backend, until the head of its answer.
    pub backend_us: u64,
    /// Of that, and of what came after it, in databases. None: the instance served another request too, or has none.
    pub db_us: Option<u64>,
    /// By its programs, or where none ran by the edge itself. None: a program ran, and the keeper did not say.
    pub cpu_us: Option<u64>,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub throttled_us: u64,
    /// Bodies held to byte limits, and ends held back for CPU quotas.
    pub paced_us: u64,
    pub demoted: u8,
}

impl Figures {
    pub fn of(record: &AccessRecord) -> Self {
        let mut figures = Self {
            queue_us: us(record.queued),
            rules_us: us(record.ruled),
            wake_us: record.woken().map_or(0, |woken| us(woken.waited)),
            fence_us: record.more.as_ref().map_or(0, |more| us(more.fence)),
            backend_us: us(record.backend),
            db_us: record.more.as_ref().and_then(|more| more.database).map(us),
            cpu_us: Some(us(record.edge_cpu)),
            ..Self::default()
        };
        match &record.more {
            Some(more) => figures.update(more, record.took),
            None => figures.took_us = us(record.took),
        }
        figures
    }

    /// Takes over what is known now.
    pub fn update(&mut self, more: &More, took: Duration) {
        self.took_us = us(took);
        self.paced_us = more.paced_us;
        match more.used {
            Used::Nothing => {}
            Used::Unknown => self.cpu_us = None,
            Used::Known(usage) => {
                self.cpu_us = Some(usage.cpu_us);
                self.read_bytes = usage.read_bytes;
                self.write_bytes = usage.write_bytes;
                self.throttled_us = usage.throttled_us;
                self.demoted = usage.demoted;
            }
        }
    }

    /// By name, in the order in which they are written. An unknown one is left out, and a wake or fence that there was not.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let woken = (self.wake_us > 0).then_some(("wake_us", self.wake_us));
        let fence = (self.fence_us > 0).then_some(("fence_us", self.fence_us));
        let db = self.db_us.map(|db_us| ("db_us", db_us));
        let cpu = self.cpu_us.map(|cpu_us| ("cpu_us", cpu_us));
        [("took_us", self.took_us), ("queue_us", self.queue_us), ("rules_us", self.rules_us)]
            .into_iter()
            .chain(woken)
            .chain(fence)
            .chain([("backend_us", self.backend_us)])
            .chain(db)
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

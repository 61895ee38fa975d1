//! Records of one instance's wakes: the one under way, the last, and their number.
//!
//! Not here: the stages of one wake (`decide::wake_timeline`), their costs (`decide::costs`).

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use nagaya_records::instance::{Tier, WakeReport, WakeStage};

use crate::instances::decide::wake_timeline::WakeTimeline;

/// A wake that is over except for its first response.
#[derive(Debug, Clone, Copy)]
pub struct UnansweredWake {
    pub from: Tier,
    pub took: Duration,
    pub since: Instant,
}

#[derive(Debug, Default)]
pub struct WakeStats {
    /// Timeline of the wake under way, or of the last one.
    timeline: RefCell<Option<WakeTimeline>>,
    last: RefCell<Option<WakeReport>>,
    count: Cell<u64>,
    /// Set after a wake, until a waiting request is answered.
    unanswered: Cell<Option<UnansweredWake>>,
    /// Until when it goes first on the processor. `None` if it has no priority.
    priority_until: Cell<Option<Instant>>,
}

impl WakeStats {
    /// A wake from this tier begins.
    pub fn begin(&self, from: Tier, now: Instant) {
        self.timeline.replace(Some(WakeTimeline::new(from, now)));
    }

    /// A stage of the wake under way begins.
    pub fn mark(&self, stage: WakeStage, since: Instant) {
        if let Some(timeline) = &mut *self.timeline.borrow_mut() {
            timeline.mark(stage, since);
        }
    }

    pub fn timeline(&self) -> Option<WakeTimeline> {
        self.timeline.borrow().clone()
    }

    /// Where the wake under way, or the last, has begun.
    pub fn from(&self) -> Tier {
        self.timeline.borrow().as_ref().map_or(Tier::Cold, WakeTimeline::from)
    }

    /// One more is over.
    pub fn add(&self) {
        self.count.set(self.count.get() + 1);
    }

    pub fn count(&self) -> u64 {
        self.count.get()
    }

    pub fn set_last(&self, wake: WakeReport) {
        self.last.replace(Some(wake));
    }

    pub fn last(&self) -> Option<WakeReport> {
        self.last.borrow().clone()
    }

    pub fn set_unanswered(&self, wake: Option<UnansweredWake>) {
        self.unanswered.set(wake);
    }

    pub fn take_unanswered(&self) -> Option<UnansweredWake> {
        self.unanswered.take()
    }

    pub fn has_priority(&self, now: Instant) -> bool {
        self.priority_until.get().is_some_and(|until| until > now)
    }

    pub fn set_priority(&self, until: Instant) {
        self.priority_until.set(Some(until));
    }

    pub fn take_priority(&self) -> Option<Instant> {
        self.priority_until.take()
    }
}

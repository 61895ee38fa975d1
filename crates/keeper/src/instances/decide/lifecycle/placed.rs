//! Effects of the cluster on one instance. Its node loses the lease and gets it back, or its site
//! is placed elsewhere.
//!
//! Not here: all other events (`lifecycle`), freezing and killing in time (`sandbox::warden`).

use std::time::Instant;

use crate::instances::decide::lifecycle::{Lifecycle, LifecycleEffect, LifecycleState, WaitError};

impl Lifecycle {
    /// Returns why nobody gets it now.
    pub(super) fn barred(&self) -> Option<WaitError> {
        match (self.placement.is_here && !self.placement.is_released, self.placement.fenced_since) {
            (false, _) => Some(WaitError::Elsewhere),
            (true, Some(_)) => Some(WaitError::Fenced),
            (true, None) => None,
        }
    }

    /// Its processes are frozen already, and nothing more begins.
    pub(super) fn fence(&mut self, now: Instant) {
        if self.placement.fenced_since.is_some() {
            return;
        }
        self.placement.fenced_since = Some(now);
        self.placement.is_disturbed |= self.is_coming() || self.is_imaging();
        self.answer_all(Err(self.barred().unwrap_or(WaitError::Fenced)));
        if self.state == LifecycleState::Queued {
            self.end();
        }
    }

    /// Gives up a start that was frozen for too long.
    pub(super) fn give_up_if_held(&mut self, now: Instant) {
        if self.is_coming() && self.deadline().is_some_and(|due| due <= now) {
            self.end();
        }
    }

    pub(super) fn unfence(&mut self) {
        let was_fenced = self.placement.fenced_since.take().is_some();
        if was_fenced && self.state == LifecycleState::Off && self.image.retake && self.barred().is_none() {
            self.queue();
        }
    }

    pub(super) fn release(&mut self) {
        self.placement.is_released = true;
        self.image.retake = false;
        self.answer_all(Err(WaitError::Elsewhere));
        if self.users == 0 {
            self.end();
        }
    }

    pub(super) fn moved(&mut self) {
        self.placement.is_released = false;
        if !self.placement.is_here {
            return;
        }
        self.placement.is_here = false;
        self.image.retake = false;
        self.answer_all(Err(WaitError::Elsewhere));
        match self.state {
            LifecycleState::Ending(op) => self.effect(LifecycleEffect::Kill(op)),
            _ => self.end(),
        }
    }
}

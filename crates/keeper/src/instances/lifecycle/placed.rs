//! What the cluster does with the life of one instance: its node loses authority and gets it back, its site is placed elsewhere.
//!
//! Not here: all else that happens to it (`lifecycle`), freezing and killing in time (`sandbox::warden`).

use std::time::Instant;

use super::{Effect, Lifecycle, Refusal, State};

impl Lifecycle {
    /// Why nobody gets it now.
    pub(super) fn barred(&self) -> Option<Refusal> {
        match (self.is_here && !self.is_released, self.fenced_since) {
            (false, _) => Some(Refusal::Elsewhere),
            (true, Some(_)) => Some(Refusal::Fenced),
            (true, None) => None,
        }
    }

    /// What is there already has stopped by itself; nothing more begins.
    pub(super) fn fence(&mut self, now: Instant) {
        if self.fenced_since.is_some() {
            return;
        }
        self.fenced_since = Some(now);
        self.is_disturbed |= self.is_coming() || self.is_imaging();
        self.answer_all(Err(self.barred().unwrap_or(Refusal::Fenced)));
        if self.state == State::Queued {
            self.end();
        }
    }

    /// A start that stands still for too long.
    pub(super) fn give_up_if_held(&mut self, now: Instant) {
        if self.is_coming() && self.deadline().is_some_and(|due| due <= now) {
            self.end();
        }
    }

    pub(super) fn unfence(&mut self) {
        let was_fenced = self.fenced_since.take().is_some();
        if was_fenced && self.state == State::Off && self.retake && self.barred().is_none() {
            self.queue();
        }
    }

    pub(super) fn release(&mut self) {
        self.is_released = true;
        self.retake = false;
        self.answer_all(Err(Refusal::Elsewhere));
        if self.users == 0 {
            self.end();
        }
    }

    pub(super) fn moved(&mut self) {
        self.is_released = false;
        if !self.is_here {
            return;
        }
        self.is_here = false;
        self.retake = false;
        self.answer_all(Err(Refusal::Elsewhere));
        match self.state {
            State::Ending(op) => self.effect(Effect::Kill(op)),
            _ => self.end(),
        }
    }
}

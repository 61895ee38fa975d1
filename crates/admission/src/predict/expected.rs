//! What requests of a kind take while there is a line, as far as that is known.
//!
//! Best from requests that ended while there was one. Else from those of quiet hours, times what a line makes of such times here.
//! Else, where a number is needed all the same, what any request takes: good enough to decide by, and nothing to tell anybody,
//! unless all kinds that are known here take about equally long.
//!
//! Not here: how a pace is learned (`predict::pace`), how waits follow (`predict::outlook`, `predict::replay`).

use super::pace::Pace;
use super::{Kind, Learned, Paces, STRETCH_SCALE, Slot};

/// So many kinds say what one more will be like,
const ALIKE_LEAST: usize = 8;
/// if they take no more than so many times what the middle one does, and no less than a part as small,
const ALIKE_FACTOR: f64 = 2.0;
/// but for one in so many.
const ALIKE_BUT: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    pace: &'a Pace,
    /// What is measured in `pace` takes so many times as long now, in a line.
    stretch: f64,
    /// Not only guessed.
    pub(super) is_known: bool,
}

impl<'a> Expected<'a> {
    /// Of these paces; `None`: nothing is known. `scale`: how much longer all takes now than when it was last seen in a line.
    fn of(paces: &'a Paces, stretch: Option<f64>, scale: f64) -> Option<Self> {
        if paces.queued.is_known() {
            return Some(Self { pace: &paces.queued, stretch: scale, is_known: true });
        }
        // What a line does is learned from all that come, and so has in it how much longer all take now. Without ever having seen
        // a line nobody knows what it does.
        let of_calm =
            Self { pace: &paces.calm, stretch: stretch.unwrap_or(1.0), is_known: stretch.is_some() };
        paces.calm.is_known().then_some(of_calm)
    }

    pub(super) fn service(self) -> f64 {
        self.pace.expected().map_or(0.0, f64::from) * self.stretch
    }

    /// Squared coefficient of variation.
    pub(super) fn spread(self) -> f64 {
        f64::from(self.pace.spread())
    }

    /// What is left, on average, of one that has run for so long.
    pub(super) fn rest(self, has_run: f64) -> f64 {
        self.pace.rest(has_run / self.stretch).unwrap_or(0.0) * self.stretch
    }

    /// The part of them that runs for so long.
    pub(super) fn survival(self, has_run: f64) -> f64 {
        self.pace.survival(has_run / self.stretch)
    }
}

impl Learned {
    pub(super) fn in_line(&self, slot: Slot) -> Option<Expected<'_>> {
        match self.kinds.get(slot.0 as usize).and_then(|kind| self.of_kind(kind, None)) {
            Some(expected) => Some(expected),
            None => self.any_in_line(),
        }
    }

    /// `any`: what it is taken for if nothing is known of it.
    pub(super) fn of_kind<'a>(&self, kind: &'a Kind, any: Option<Expected<'a>>) -> Option<Expected<'a>> {
        Expected::of(&kind.paces, self.stretch(), self.speed.scale(&kind.follower)).or(any)
    }

    /// Of any request: a guess, whatever it is a guess of.
    pub(super) fn any_in_line(&self) -> Option<Expected<'_>> {
        let any = Expected::of(&self.all, self.stretch(), 1.0)?;
        Some(Expected { is_known: false, ..any })
    }

    /// Kinds are so alike here that one of which nothing is known will hardly be different.
    pub(super) fn kinds_are_alike(&self) -> bool {
        let known = self.kinds.iter().filter_map(|kind| self.of_kind(kind, None));
        let known = known.filter(|expected| expected.is_known);
        let mut services: Vec<f64> = known.map(Expected::service).collect();
        services.sort_unstable_by(f64::total_cmp);
        let middle = services.get(services.len() / 2).copied().unwrap_or(0.0);
        let like = middle / ALIKE_FACTOR..=middle * ALIKE_FACTOR;
        let unlike = services.iter().filter(|service| !like.contains(service)).count();
        services.len() >= ALIKE_LEAST && unlike * ALIKE_BUT <= services.len()
    }

    /// `None`: no line has been seen in which kinds ran that are known from quiet hours.
    fn stretch(&self) -> Option<f64> {
        self.stretch.expected().map(|stretch| f64::from(stretch) / STRETCH_SCALE)
    }
}

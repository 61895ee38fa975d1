//! Estimates the service time of a kind while there is a queue.
//!
//! The best source is requests that ended during a queue. The second is requests of quiet hours,
//! times the usual stretch of a queue here. The last, where a number is needed all the same, is the
//! service time of any request. That is good enough for a decision, but it is not shown unless all
//! known kinds take about equally long.
//!
//! Not here: how a pace is learned (`predict::pace`), how waits follow (`predict::outlook`,
//! `predict::replay`).

use super::pace::ServicePace;
use super::{ClassSlot, ClassStats, LaneStats, PacePair, STRETCH_SCALE};

/// Kinds that must be known before they predict an unknown one.
const ALIKE_LEAST: usize = 8;
/// Largest ratio, up or down, to the median kind at which kinds count as alike.
const ALIKE_FACTOR: f64 = 2.0;
/// One kind in this number may differ more than that.
const ALIKE_BUT: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedService<'a> {
    pace: &'a ServicePace,
    /// Factor from the time measured in `pace` to the present time with a queue.
    stretch: f64,
    /// It is not only a guess.
    pub(super) is_known: bool,
}

impl<'a> ExpectedService<'a> {
    /// Makes an estimate from these paces; `None` if nothing is known. `scale` is how much longer
    /// all requests take now than when last seen in a queue.
    fn of(paces: &'a PacePair, stretch: Option<f64>, scale: f64) -> Option<Self> {
        if paces.queued.is_known() {
            return Some(Self { pace: &paces.queued, stretch: scale, is_known: true });
        }
        // The stretch is learned from all requests, so it includes how much longer all take now.
        // Without any queue so far, the stretch is unknown.
        let of_calm =
            Self { pace: &paces.calm, stretch: stretch.unwrap_or(1.0), is_known: stretch.is_some() };
        paces.calm.is_known().then_some(of_calm)
    }

    pub(super) fn service(self) -> f64 {
        self.pace.expected().map_or(0.0, f64::from) * self.stretch
    }

    /// Returns the squared coefficient of variation.
    pub(super) fn spread(self) -> f64 {
        f64::from(self.pace.spread())
    }

    /// Returns the average remaining service of a request that has run for this long.
    pub(super) fn rest(self, has_run: f64) -> f64 {
        self.pace.rest(has_run / self.stretch).unwrap_or(0.0) * self.stretch
    }

    /// Returns the part of the requests that runs for this long.
    pub(super) fn survival(self, has_run: f64) -> f64 {
        self.pace.survival(has_run / self.stretch)
    }
}

impl LaneStats {
    pub(super) fn in_line(&self, slot: ClassSlot) -> Option<ExpectedService<'_>> {
        match self.kinds.get(slot.0 as usize).and_then(|kind| self.of_kind(kind, None)) {
            Some(expected) => Some(expected),
            None => self.any_in_line(),
        }
    }

    /// Estimates a kind. `any` is the estimate if nothing is known of it.
    pub(super) fn of_kind<'a>(
        &self,
        kind: &'a ClassStats,
        any: Option<ExpectedService<'a>>,
    ) -> Option<ExpectedService<'a>> {
        ExpectedService::of(&kind.paces, self.stretch(), self.speed.scale(&kind.follower)).or(any)
    }

    /// Estimates any request. It is a guess, whatever the kind.
    pub(super) fn any_in_line(&self) -> Option<ExpectedService<'_>> {
        let any = ExpectedService::of(&self.all, self.stretch(), 1.0)?;
        Some(ExpectedService { is_known: false, ..any })
    }

    /// Returns whether the kinds here are so alike that an unknown one is hardly different.
    pub(super) fn kinds_are_alike(&self) -> bool {
        let known = self.kinds.iter().filter_map(|kind| self.of_kind(kind, None));
        let known = known.filter(|expected| expected.is_known);
        let mut services: Vec<f64> = known.map(ExpectedService::service).collect();
        services.sort_unstable_by(f64::total_cmp);
        let middle = services.get(services.len() / 2).copied().unwrap_or(0.0);
        let like = middle / ALIKE_FACTOR..=middle * ALIKE_FACTOR;
        let unlike = services.iter().filter(|service| !like.contains(service)).count();
        services.len() >= ALIKE_LEAST && unlike * ALIKE_BUT <= services.len()
    }

    /// Returns the stretch. `None` if no queue was seen with kinds that are known from quiet hours.
    fn stretch(&self) -> Option<f64> {
        self.stretch.expected().map(|stretch| f64::from(stretch) / STRETCH_SCALE)
    }
}

//! The right to run in a lane, given back when dropped.
//!
//! Invariant: a permit is held if and only if the lane counts its request as running.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_admission::{CostClass, RequestKey, ServiceUse};

use crate::admission::guests::GuestGuard;
use crate::admission::lanes::EdgeLane;
use crate::admission::site_lane::SiteLane;

/// One in this many requests on lent permits is a sample for service times.
const SAMPLE: u32 = 16;

/// The right to run in a lane, given back when dropped.
pub struct Permit {
    of: PermitLane,
    pub kind: PermitSource,
    /// Time from its permit to its end, once it has ended properly.
    used: Option<Duration>,
    /// Set if the lane treats the request as a guest.
    guest: Option<GuestGuard>,
}

/// The lane of a permit. A site's lane is reached by its route, of which each thread has its own.
/// So no counter is shared with other threads.
pub enum PermitLane {
    Site(Rc<SiteLane>),
    Lane(Arc<EdgeLane>),
}

pub enum PermitSource {
    /// One of the permits that were lent to the lane. Some are samples for service times.
    Lent(Option<CostClass>),
    Pass(RequestKey),
}

impl Permit {
    /// Takes one of the permits lent to the site, if there is one. Most requests get theirs so.
    pub fn of_site(route: &Rc<SiteLane>, class: impl FnOnce() -> CostClass) -> Option<Self> {
        if !route.lane.enter() {
            return None;
        }
        // Only a sample is timed: most requests end sooner than the clock could be read.
        let kind = PermitSource::Lent(is_sampled().then(class));
        Some(Self { of: PermitLane::Site(Rc::clone(route)), kind, used: None, guest: None })
    }

    /// Returns the permit for one that was taken from those lent to the lane.
    pub fn lent(of: PermitLane) -> Self {
        Self { of, kind: PermitSource::Lent(None), used: None, guest: None }
    }

    pub fn of_pass(lane: &Arc<EdgeLane>, pass: RequestKey) -> Self {
        Self {
            of: PermitLane::Lane(Arc::clone(lane)),
            kind: PermitSource::Pass(pass),
            used: None,
            guest: None,
        }
    }

    /// Set if the lane treats the request as a guest.
    pub fn set_guest(&mut self, guest: Option<GuestGuard>) {
        self.guest = guest;
    }

    /// Returns its lane.
    pub fn lane(&self) -> &Arc<EdgeLane> {
        match &self.of {
            PermitLane::Site(route) => &route.lane,
            PermitLane::Lane(lane) => lane,
        }
    }

    /// Returns whether its service time is a sample.
    pub fn is_timed(&self) -> bool {
        !matches!(self.kind, PermitSource::Lent(None))
    }

    /// Records the end of its request: the service time, and whether the response was complete.
    pub fn ended(&mut self, service: Duration, is_whole: bool) {
        self.used = is_whole.then_some(service);
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Permit")
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let used = ServiceUse { service: self.used.unwrap_or_default(), is_whole: self.used.is_some() };
        match self.kind {
            PermitSource::Lent(class) => {
                self.lane().leave(class.filter(|_| used.is_whole).map(|class| (class, used)))
            }
            PermitSource::Pass(pass) => {
                if let Some(lanes) = self.lane().lanes() {
                    lanes.release(pass, used);
                }
            }
        }
    }
}

fn is_sampled() -> bool {
    thread_local! {
        static TURN: Cell<u32> = const { Cell::new(0) };
    }
    TURN.with(|turn| {
        turn.set(turn.get().wrapping_add(1));
        turn.get().is_multiple_of(SAMPLE)
    })
}

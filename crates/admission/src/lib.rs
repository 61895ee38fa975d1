//! Who runs now, who waits, and who is promised what.
//!
//! A pure state machine: every call says what time it is, nothing here reads a clock, opens a file, sleeps or locks. What it
//! decides comes back as the answer of the call or as [`Effect`]s, which the caller carries out. The same calls in the same
//! order give the same answers, which is how a simulated year of crowds is tested in seconds.
//!
//! Accepted requests form three groups, as in the paper this comes from: *run* (being processed; permits), *wait* (in line,
//! bounded by predicted time) and *next* (turned away with a ticket for a slot that is reserved).
//!
//! Lanes are nested: the node's, in it each tenant's, in it each site's, in it those that rules name. A request stands in
//! one lane's line and needs a permit there and in every lane around it. Between lanes it is fair by weight, within one
//! it is first come, first served.
//!
//! Not here: HTTP, waiting pages, the clock, the store of tickets, who calls whom (`edge`).

mod bound;
mod calendar;
mod fair;
mod lane;
mod machine;
mod predict;
mod sketch;
mod ticket;

pub use bound::{Auto, Observed};
pub use calendar::{CALL_FOR, LATE_FOR};
pub use machine::{Admission, DEPTH_MAX};
pub use sketch::Sketch;
pub use ticket::{Keys, Rejected, Ticket};

use std::time::Duration;

/// A moment: microseconds since the Unix epoch, as the node reckons it. The caller sees to it that it never goes back, whatever
/// the wall clock does.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub struct Moment(pub u64);

/// Who asks, as far as hoarding goes: a keyed hash of the client's address, made by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ClientKey(pub u64);

/// A lane's name through restarts: a hash of its tenant, site and name, made by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct LaneName(pub [u8; 16]);

/// A ticket's own number, random, from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Nonce(pub u128);

/// A lane in this process. One that was removed is never mistaken for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaneId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A request that waits or runs. It keeps its number from the offer to the release; numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass(pub u64);

/// What kind of request it is, for the learning of service times: a hash of what the caller thinks decides about its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class(pub u32);

/// How many may run at once in a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    Fixed(u32),
    /// Between these two, found by [`Auto`].
    Auto {
        min: u32,
        max: u32,
    },
}

/// The bounds of a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounds {
    pub run: Run,
    /// Longest predicted wait of one that may still get in line.
    pub wait: Duration,
    /// Backstops: most that may wait in this lane's own line, and most bytes held for them.
    pub wait_count: u32,
    pub wait_bytes: u64,
    /// Tickets are given when the line is full; `None`: never.
    pub next: Option<Next>,
    /// Share of what is around it, against the other lanes there. 1 to 10,000.
    pub weight: u32,
}

/// How a lane promises.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Next {
    /// Length of a slot: between its beginning and its end a ticket's holder runs.
    pub window: Duration,
    /// How far ahead slots are given.
    pub horizon: Duration,
    /// Most tickets of this lane that may be out at once.
    pub tickets: u32,
    /// Part of the lane's capacity that is promised; the rest is left for who comes by himself. 0.1 to 1.
    pub share: f32,
}

/// A request that wants to run.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    pub class: Class,
    pub client: ClientKey,
    /// Bytes that are held for it while it waits.
    pub bytes: u64,
    /// Goes before who came up to [`PRIORITY_STEP`] times this earlier; negative: behind. -100 to 100.
    pub priority: i8,
    /// The ticket that it shows. Its signature, site and lane have been checked by the caller.
    pub ticket: Option<Ticket>,
    /// Another node gave it: if nothing is known of it here, its slot is taken over.
    pub adopts: bool,
    /// It may be held in line.
    pub can_wait: bool,
    /// It may be given a ticket: with this number, if a new one is made. Crawlers get none.
    pub nonce: Option<Nonce>,
    /// A rule lets it pass: it runs at once, counted but not held back.
    pub passes: bool,
}

/// One step of priority in time: so much longer somebody else must have waited to go first all the same. Nobody starves.
pub const PRIORITY_STEP: Duration = Duration::from_secs(1);

/// What is known of a wait.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Requests that go first.
    pub ahead: u32,
    /// Expected wait; `None`: unknown, as too little has been learned of those ahead.
    pub wait: Option<Duration>,
    /// Nine of ten such waits so far ended within this.
    pub at_most: Option<Duration>,
    /// What is decided by, though it may rest on requests that are merely taken for average ones: good for when to ask again, not
    /// to be told as a wait. `None`: nothing at all has been learned.
    pub guess: Option<Duration>,
}

/// A promise: the signed ticket is made of it by the caller.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promise {
    pub ticket: Ticket,
    /// It was made anew by this call, and is a promise only once it is stored.
    pub is_new: bool,
    /// Tickets of this lane before it, and requests in line that go before its slot begins.
    pub ahead: u32,
}

/// The answer to an offer.
#[derive(Debug, Clone, PartialEq)]
pub enum Offer {
    Run(Pass),
    /// In line. [`Effect::Run`] tells when it is its turn.
    Wait(Pass, Prediction),
    /// Turned away, with a slot.
    Next(Promise),
    /// Turned away: its ticket is for later.
    Early(Promise),
    Refused(Refused),
}

/// Turned away without a promise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refused {
    /// The line is full, and no tickets are given here. The wait there would be.
    Full(Prediction),
    /// All slots within the horizon are promised.
    NoSlot(Prediction),
    /// The ticket was used: its request runs, waits or has run.
    Replayed,
    /// The ticket ended so long ago that nothing is known of it any more.
    Expired,
    /// The lane is gone.
    NoLane,
}

/// What a request that ran was.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    /// From its permit to its end.
    pub service: Duration,
    /// It ended as it should: not by a client that left, not by a failure. Only such ones are learned from.
    pub is_whole: bool,
}

/// What is to be done now.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// It is this one's turn. It has its permit.
    Run(Pass),
    /// Capacity has freed early: the holder of this ticket may come now, and its place is kept until then.
    Call { nonce: Nonce, until: Moment },
    /// It cannot have its turn any more: its lane is gone.
    Dismiss(Pass, Refused),
    /// Permits lent to this lane by [`Admission::lend`] are wanted back.
    Recall(LaneId),
    /// To be stored, before the answer is given.
    Store(Record),
}

/// What outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Record {
    Promised {
        ticket: Ticket,
        client: ClientKey,
    },
    /// The holder was called before his slot: he may come although it has not begun.
    Called {
        nonce: Nonce,
    },
    /// Stored when the request that ran on the ticket has ended: one that a crash cut off may be sent again.
    Spent {
        nonce: Nonce,
        until: Moment,
    },
    Forgotten {
        nonce: Nonce,
    },
    /// What a request of this lane takes while there is a line: the next start gives slots by it before any has ended.
    Paced {
        lane: LaneName,
        service_us: u64,
    },
}

/// How hard it is for what runs in a lane, as measured outside since the last time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pressure {
    /// Part of the node's CPU time that was used. 0 to 1.
    pub busy: f32,
    /// Part of the time in which work of this lane was ready and got no CPU (PSI, or a cell's throttled time). 0 to 1.
    pub starved: f32,
}

/// How a ticket stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Standing {
    /// Its slot has not begun.
    Later {
        begins_in: Duration,
        /// As of a promise.
        ahead: u32,
    },
    /// It may come: its slot is open, or it was called early and its place is kept so long.
    Open {
        for_another: Duration,
    },
    /// Its slot has ended; it may still come, before newcomers.
    Late,
    /// Its request waits, runs or has run.
    Used,
    Unknown,
}

/// What runs and waits in a lane and in those inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crowd {
    pub lane: LaneId,
    /// Lent permits too.
    pub running: u32,
    pub waiting: u32,
    /// Some of them wait for a bound of this lane or of one inside it, not for one around it.
    pub holds_itself: bool,
}

/// A lane as it is now, for people.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Explained {
    pub running: u32,
    /// What may run now: the number set, or the one found.
    pub run: u32,
    pub waiting: u32,
    pub waiting_bytes: u64,
    /// Tickets that are out.
    pub promised: u32,
    /// The wait a newcomer would have; `None`: not known yet.
    pub wait: Option<Duration>,
    /// Since when there has been a line without a break.
    pub queued_since: Option<Moment>,
    /// What holds it back: `"own"`, `"around"` (a lane around it is full), or `""`.
    pub held_by: &'static str,
    /// Requests that end in a second, while there is a line.
    pub drain_per_second: Option<f64>,
    /// Median and nine of ten of the service time.
    pub service_p50: Option<Duration>,
    pub service_p90: Option<Duration>,
    pub counts: Counts,
    pub calibration: Calibration,
}

/// What has happened in a lane since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct Counts {
    pub admitted: u64,
    pub waited: u64,
    pub left: u64,
    pub refused: u64,
    pub promised: u64,
    /// Tickets of other nodes that were taken over, beside those promised here.
    pub adopted: u64,
    /// Holders that came within their slot, or when called, and ran within it.
    pub kept: u64,
    /// Holders that came within their slot and ran after its end.
    pub broken: u64,
    /// Holders that came after their slot's end.
    pub late: u64,
    pub never_came: u64,
    pub called_early: u64,
}

/// How good the predictions were: of those who waited at least 100 ms. Errors and bias are lately's.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct Calibration {
    pub predictions: u64,
    /// Waits of which nothing was told, as too little was known.
    pub untold: u64,
    /// Median, and nine of ten, of |predicted - actual| / actual, in percent.
    pub error_p50_pct: Option<f64>,
    pub error_p90_pct: Option<f64>,
    /// (sum of predicted - sum of actual) / sum of actual, in percent: above 0, people waited less than they were told.
    pub bias_pct: Option<f64>,
}

//! Input and results of callers: bounds of lanes, offers and their answers, effects, and facts
//! about a wait.
//!
//! Not here: deciding (`machine`).

use std::time::Duration;

use crate::ids::{ClientKey, CostClass, LaneId, LaneName, Moment, Nonce, RequestKey};
use crate::ticket::Ticket;

/// How many requests may run at once in a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunLimit {
    Fixed(u32),
    /// Between these two, found by [`Auto`](crate::Auto).
    Auto {
        min: u32,
        max: u32,
    },
}

/// The limits of a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct LaneLimits {
    pub run: RunLimit,
    /// Longest predicted wait of a request that may still queue.
    pub wait: Duration,
    /// Safety limits: requests that may wait in this lane's own queue, and bytes held for them.
    pub wait_count: u32,
    pub wait_bytes: u64,
    /// Tickets are given when the queue is full; `None` gives no tickets.
    pub next: Option<TicketPolicy>,
    /// Share of the lane around it, against the other lanes there. 1 to 10,000.
    pub weight: u32,
}

/// How a lane promises slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TicketPolicy {
    /// Length of a slot. A ticket's holder runs between its beginning and its end.
    pub window: Duration,
    /// How far ahead slots are given.
    pub horizon: Duration,
    /// Most tickets of this lane that may be out at once.
    pub tickets: u32,
    /// Part of the lane's capacity that is promised; the rest is left for requests without tickets.
    /// 0.1 to 1.
    pub share: f32,
}

/// A request that wants to run.
#[derive(Debug, Clone, Copy)]
pub struct AdmissionRequest {
    pub class: CostClass,
    pub client: ClientKey,
    /// Bytes that are held for it while it waits.
    pub bytes: u64,
    /// Goes before requests that came up to [`PRIORITY_STEP`] times this earlier; negative goes
    /// behind. -100 to 100.
    pub priority: i8,
    /// The ticket that it shows. The caller has checked its signature, site and lane.
    pub ticket: Option<Ticket>,
    /// Another node gave the ticket: if it is unknown here, its slot is adopted.
    pub adopts: bool,
    /// It may be held in the queue.
    pub can_wait: bool,
    /// It may get a ticket; a new ticket gets this number. Crawlers get none.
    pub nonce: Option<Nonce>,
    /// It runs at once, counted but not held back. A rule says so, or it only asks for permissions
    /// (a CORS preflight).
    pub passes: bool,
    /// It was admitted before, and its visit goes on. The next free permit is its own, before
    /// newcomers, and it is not deferred.
    pub is_visiting: bool,
}

/// One step of priority in time. A request that has waited this much longer goes first all the
/// same, so none starves.
pub const PRIORITY_STEP: Duration = Duration::from_secs(1);

/// Forecast of a wait.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Requests that go first.
    pub ahead: u32,
    /// Expected wait; `None` if too little has been learned of those ahead.
    pub wait: Option<Duration>,
    /// Nine of ten such waits so far ended within this.
    pub at_most: Option<Duration>,
    /// Wait on which decisions are based, though unknown requests may count as average. It serves
    /// for when to ask again and is not shown as a wait. `None` if nothing at all has been learned.
    pub guess: Option<Duration>,
}

/// A promise. The caller makes the signed ticket from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotPromise {
    pub ticket: Ticket,
    /// This call made it. It is a promise only once it is stored.
    pub is_new: bool,
    /// Tickets of this lane before it, and queued requests that go before its slot begins.
    pub ahead: u32,
}

/// The decision on an offered request.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    Run(RequestKey),
    /// It is queued. [`Effect::RunLimit`] says when it runs.
    Wait(RequestKey, Prediction),
    /// It is deferred with a slot.
    Next(SlotPromise),
    /// It is deferred: its ticket is for later.
    Early(SlotPromise),
    Refused(AdmissionRefusal),
}

/// Reasons to defer a request without a promise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AdmissionRefusal {
    /// The queue is full, and no tickets are given here. Holds the wait there would be.
    Full(Prediction),
    /// All slots within the horizon are promised.
    NoSlot(Prediction),
    /// The ticket was used: its request runs, waits or has run.
    Replayed,
    /// The ticket ended too long ago: nothing is known of it any more.
    Expired,
    /// The lane is gone.
    NoLane,
}

/// Measured service of a request that ran.
#[derive(Debug, Clone, Copy)]
pub struct ServiceUse {
    /// From its permit to its end.
    pub service: Duration,
    /// It ended normally, without a client that left or a failure. Only such requests are learned
    /// from.
    pub is_whole: bool,
}

/// An action that the caller must carry out.
#[derive(Debug, Clone, PartialEq)]
pub enum AdmissionEffect {
    /// The request has its permit and runs now.
    Run(RequestKey),
    /// Capacity has freed early. The holder of this ticket may come now, and its position is kept
    /// until then.
    Call { nonce: Nonce, until: Moment },
    /// The request can no longer run: its lane is gone.
    Dismiss(RequestKey, AdmissionRefusal),
    /// Permits lent to this lane by [`Admission::lend`](crate::Admission::lend) are wanted back.
    Recall(LaneId),
    /// Must be stored before the response is sent.
    Store(TicketRecord),
}

/// State that outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum TicketRecord {
    Promised {
        ticket: Ticket,
        client: ClientKey,
    },
    /// The holder was called before its slot: it may come although the slot has not begun.
    Called {
        nonce: Nonce,
    },
    /// Stored when the request that ran on the ticket has ended. A request that a crash cut off may
    /// be sent again.
    Spent {
        nonce: Nonce,
        until: Moment,
    },
    Forgotten {
        nonce: Nonce,
    },
    /// Service time of this lane's requests while there is a queue. After a restart, slots are
    /// given by it before any request has ended.
    Paced {
        lane: LaneName,
        service_us: u64,
    },
}

/// Resource pressure on a lane's work, measured outside since the last report.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CpuPressure {
    /// Part of the node's CPU time that was used. 0 to 1.
    pub busy: f32,
    /// Part of the time in which work of this lane was ready and got no CPU. 0 to 1. Its source is
    /// PSI, or a cell's throttled time.
    pub starved: f32,
}

/// Status of a ticket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TicketStatus {
    /// Its slot has not begun.
    Later {
        begins_in: Duration,
        /// As in a promise.
        ahead: u32,
    },
    /// It may come: its slot is open, or it was called early and its position is kept for this
    /// long.
    Open {
        for_another: Duration,
    },
    /// Its slot has ended; it may still come, before newcomers.
    Late,
    /// Its request waits, runs or has run.
    Used,
    Unknown,
}

/// Load of a lane and of those inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneLoad {
    pub lane: LaneId,
    /// Includes lent permits.
    pub running: u32,
    pub waiting: u32,
    /// Some requests wait for a limit of this lane or of one inside it, not for one around it.
    pub holds_itself: bool,
}

/// State of a lane, for people.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LaneReport {
    pub running: u32,
    /// Number that may run now: the number set, or the one found.
    pub run: u32,
    pub waiting: u32,
    pub waiting_bytes: u64,
    /// Returns the number of tickets that are out.
    pub promised: u32,
    /// Wait of a newcomer; `None` if it is not known yet.
    pub wait: Option<Duration>,
    /// Since when there has been a queue without a break.
    pub queued_since: Option<Moment>,
    /// The limit that holds it back: `"own"`, `"around"` (a lane around it is full), or `""`.
    pub held_by: &'static str,
    /// Requests that end in a second, while there is a queue.
    pub drain_per_second: Option<f64>,
    /// Median and 90th percentile of the service time.
    pub service_p50: Option<Duration>,
    pub service_p90: Option<Duration>,
    pub counts: LaneCounts,
    pub calibration: PredictionQuality,
}

/// Event counts of a lane since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct LaneCounts {
    pub admitted: u64,
    pub waited: u64,
    pub left: u64,
    pub refused: u64,
    pub promised: u64,
    /// Adopted tickets of other nodes, in addition to those promised here.
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

/// Quality of predictions, over waits of at least 100 ms. Errors and bias cover recent waits.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct PredictionQuality {
    pub predictions: u64,
    /// Waits without a prediction, because too little was known.
    pub untold: u64,
    /// Median and 90th percentile of |predicted - actual| / actual, in percent.
    pub error_p50_pct: Option<f64>,
    pub error_p90_pct: Option<f64>,
    /// (sum of predicted - sum of actual) / sum of actual, in percent. Above 0, waits were shorter
    /// than predicted.
    pub bias_pct: Option<f64>,
}

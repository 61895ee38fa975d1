//! Decides which requests run, wait, or get a ticket for later.
//!
//! A pure state machine: every call says what time it is. Nothing here reads a clock, opens a file,
//! sleeps or locks. Its decisions come back as the answer of the call or as [`AdmissionEffect`]s,
//! which the caller carries out. The same calls in the same order give the same answers. So a
//! simulated year of crowds is tested in seconds.
//!
//! Accepted requests form three groups, as in the paper this comes from. They *run* with permits,
//! or *wait* in a queue that is bounded by predicted time. Or they are *next*: deferred with a
//! ticket for a reserved slot.
//!
//! Lanes are nested: the node's contains each tenant's, which contains each site's, which contains
//! those that rules name. A request waits in the queue of one lane. It needs a permit there and in
//! every lane around it. Lanes share by weight. Within one lane it is first come, first served.
//!
//! Not here: HTTP, waiting pages, the clock, the store of tickets, and the callers (`edge`).

mod bound;
mod calendar;
mod fair;
mod ids;
mod lane;
mod machine;
mod model;
mod predict;
mod sketch;
mod ticket;

pub use bound::{AdaptiveLimit, LimitSample};
pub use calendar::{CALL_FOR, LATE_FOR};
pub use ids::{ClientKey, CostClass, LaneId, LaneName, Moment, Nonce, RequestKey};
pub use machine::{Admission, DEPTH_MAX};
pub use model::{
    AdmissionEffect, AdmissionRefusal, AdmissionRequest, CpuPressure, Decision, LaneCounts, LaneLimits,
    LaneLoad, LaneReport, PRIORITY_STEP, Prediction, PredictionQuality, RunLimit, ServiceUse, SlotPromise,
    TicketPolicy, TicketRecord, TicketStatus,
};
pub use sketch::QuantileSketch;
pub use ticket::{SigningPurpose, Ticket, TicketError, TicketKeyring};

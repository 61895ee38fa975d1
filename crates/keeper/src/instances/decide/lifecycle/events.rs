//! Events that a lifecycle gets, and actions that it returns. Pure.
//!
//! Not here: the consequences of an event (`lifecycle`), the actions themselves (`instances::run`).

use std::time::Duration;

use nagaya_records::instance::Tier;

use crate::instances::decide::policy::IdlePolicy;

/// Number of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpId(pub u64);

/// Number of one tree of processes, from its start or restore to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunId(pub u32);

/// Number of a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifecycleEvent {
    /// A request needs the instance. Answered exactly once, unless it is cancelled before.
    Acquire(WaiterId),
    /// The one who waited has left.
    Cancel(WaiterId),
    /// A user of this run is done with it. Sent once for each `Ok` answer.
    Release(RunId),
    /// It may wake now.
    WakeSlot,
    /// It cannot wait to wake: as many wait already as may.
    WakeQueueFull,
    Done(OpId, OpOutcome),
    /// Measured time of a wake from this tier, until a waiting request was served.
    Returned(Tier, Duration),
    /// Measured memory at this tier, bytes.
    Holds(Tier, u64),
    /// The processes of this run have ended by themselves, and nothing of them is left.
    Died(RunId),
    /// The time of `deadline` has come.
    Alarm,
    /// The node is short of memory.
    Pressure,
    /// The operator wants it to rest this deep; `Tier::Cold`: as deep as it can.
    Rest(Tier),
    /// The operator wants its processes ended.
    Stop,
    /// The operator wants a new image.
    Retake,
    /// Its operator or tenant wants a restart: its processes end, and its image is not used again.
    Restart,
    /// Its record has changed: the present run ends, and another starts if somebody waits.
    RecordChanged(IdlePolicy),
    /// The same where the present run may serve its users to the end, beside the run in its place.
    RecordChangedBeside(IdlePolicy),
    /// Its record or the settings say another time to rest.
    PolicyChanged(IdlePolicy),
    /// It has no image: there never was one, it was collected, or its base has changed.
    ImageMissing,
    /// It has no image, and none can be taken.
    ImageImpossible,
    /// An image of it has come from another node.
    ImageArrived,
    /// Its image was taken long ago.
    ImageStale,
    /// It is idle and computes, so its next step of rest waits.
    Works,
    /// There is no such site any more.
    SiteRemoved,
    /// The node has no lease: all its processes are frozen.
    Fenced,
    /// The node has a lease: its processes continue.
    Unfenced,
    /// It is placed on another node, or on none: its processes end at once.
    PlacedElsewhere,
    /// It is placed on this node, under a new epoch.
    PlacedHere,
    /// Hand the instance over: accept no new users, and end when the last user is done.
    Drain,
}

/// Result of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpOutcome {
    /// Of a start or restore: it can answer.
    Ready,
    /// Of a start or restore: nothing of it is left.
    Failed(FailureCause),
    /// Of taking an image: whether there is one.
    Imaged(bool),
    /// Of taking an image: there is none, for a passing reason outside the application. The next
    /// start tries again.
    NotImagedNow,
    /// Of a step down or up: its tier now.
    Rests(Tier),
    /// Of a step up: it cannot be brought back.
    Stuck,
    /// Nothing of it is left.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// The program's failure: the next try waits.
    Program,
    /// The node's failure, which soon passes.
    Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifecycleEffect {
    /// It waits for its turn.
    Queue,
    /// It no longer waits for its turn.
    Unqueue,
    /// Its turn is over. The value: whether it came to the end of a wake.
    FreeWakeSlot(bool),
    /// Starts the program.
    Boot(OpId, RunId),
    Restore(OpId, RunId),
    TakeImage(OpId),
    /// Moves it from the first of these tiers down to the second.
    Rest(OpId, Tier, Tier),
    /// Brings it from this tier up to running. A step down is stopped on its way.
    Resume(OpId, Tier),
    /// Ends its processes, and the operation on them.
    End(OpId),
    /// As `End`, but kills at once. Also applies to an end that is under way.
    Kill(OpId),
    /// Lets its processes continue for this many users, then end. They no longer belong to this
    /// lifecycle.
    Drain(u32),
    /// Its image is not used again.
    Quarantine(DiscardReason),
    Answer(WaiterId, Result<RunId, WaitError>),
    /// Nothing of it is left, and it is not needed again.
    Closed,
}

/// Why an image is not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardReason {
    /// The driver knows the details.
    NotRestored,
    DiedSoon(Duration),
    Asked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitError {
    /// It could not be started; the driver knows why.
    Failed,
    /// It failed several times, and is tried again only after `left`.
    Backoff { failures: u32, left: Duration },
    /// The maximum number of waiters is reached.
    Full,
    /// The operator ended it.
    Stopped,
    /// Its site was removed.
    Gone,
    /// The node has no lease now.
    Fenced,
    /// It is placed elsewhere.
    Elsewhere,
}

/// Why an operator's command cannot be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ActError {
    #[error("it is in use, or a request waits for it")]
    InUse,
    #[error("it has no processes")]
    NoProcess,
    #[error("its record says that it always runs (min = 1)")]
    Kept,
    #[error("no image can be taken here, see `nagaya doctor`, or of this application, see its log")]
    NoImages,
    #[error("something is being done to it; try again in a moment")]
    Occupied,
    #[error("it is placed on another node, see `nagaya placements`, or this node has no authority now")]
    NotHere,
}

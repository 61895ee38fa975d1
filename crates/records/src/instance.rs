//! Words for instances that keeper, edge, supervisor and command line share: tiers, stages of a
//! wake, and operator commands.
//!
//! Not here: an application's record (`record::App`), the life of an instance (`keeper`).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cell::CpuQuota;
use crate::names::SiteName;

/// How deep an instance rests, from no process and no image to running. A deeper tier compares as
/// less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// No process; waking it starts the program.
    Cold,
    /// No process; waking it restores its image.
    Image,
    /// Frozen, and its memory moved to swap.
    Reclaimed,
    /// It gets no CPU time at all.
    Frozen,
    /// It runs, but only in CPU time that no other work wants.
    Quiet,
    Running,
}

impl Tier {
    /// All tiers from the deepest up; the position of each is its number.
    pub const ALL: [Self; 6] =
        [Self::Cold, Self::Image, Self::Reclaimed, Self::Frozen, Self::Quiet, Self::Running];

    /// Returns its word in records, commands, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Image => "image",
            Self::Reclaimed => "reclaimed",
            Self::Frozen => "frozen",
            Self::Quiet => "quiet",
            Self::Running => "running",
        }
    }

    /// Returns whether an instance at this tier has processes.
    pub fn has_process(self) -> bool {
        self > Self::Image
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A part of a wake, in the order in which the parts come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WakeStage {
    /// From the request to the decision.
    Decide,
    /// Wait for its turn: only a limited number of instances wake at once.
    Queue,
    /// Its processes get CPU time again.
    Thaw,
    /// Namespaces, mounts and cell of a new instance.
    Sandbox,
    /// From the image.
    Restore,
    /// The start of the program.
    Boot,
    /// Until it listens, and answers as its record demands.
    Ready,
    /// Its image is taken, once for each release.
    Image,
    /// The connection for the waiting request.
    Connect,
}

impl WakeStage {
    /// All stages; the position of each is its number.
    pub const ALL: [Self; 9] = [
        Self::Decide,
        Self::Queue,
        Self::Thaw,
        Self::Sandbox,
        Self::Restore,
        Self::Boot,
        Self::Ready,
        Self::Image,
        Self::Connect,
    ];

    /// Returns its word in receipts, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Decide => "decide",
            Self::Queue => "queue",
            Self::Thaw => "thaw",
            Self::Sandbox => "sandbox",
            Self::Restore => "restore",
            Self::Boot => "boot",
            Self::Ready => "ready",
            Self::Image => "image",
            Self::Connect => "connect",
        }
    }
}

/// The wait for an instance that did not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WakeReport {
    /// The tier at which it rested.
    pub from: Tier,
    /// Each stage with its microseconds, as far as this request waited through it. A request that
    /// joined late has waited less.
    pub stages: Vec<(WakeStage, u64)>,
    /// Microseconds that this request was predicted to wait for its turn. `None` if its turn came
    /// at once, or if it joined a wake that had begun.
    pub predicted_us: Option<u64>,
}

/// An operator's command to an instance. The reply is a JSON object: `{"ok": true, ...}`, or
/// `{"error": ...}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceCommand {
    /// Makes it run, and replies once it does.
    Wake,
    /// Makes it rest one tier deeper, or as deep as this. Fails while it is in use.
    Rest { to: Option<Tier> },
    /// Takes a new image of it, and restarts it for that if necessary.
    Image,
    /// Restarts it: running processes are ended, and its image is not used again.
    Restart,
    /// Ends its processes.
    Stop,
    /// In a cluster: gives it up, so that another node may have it. It gets no new users. Present
    /// users may finish within this time, then its processes are ended. `{"ok": true, "epoch": ...,
    /// "cut": ...}` comes only when no process is left: it does not run here again under this
    /// epoch. `cut` is how many uses were cut short.
    Release { within_ms: u64 },
    /// Changes the CPU limit of its site's cell at once, to thousandths of a core, in place of its
    /// record's. `None` restores the record's limit. It holds until the record's limit is changed
    /// or nothing of the site runs. `{"error": ...}` if its cell has no such limit.
    LimitCpu { thousandths: Option<u32> },
    /// Returns all that is known of it.
    Inspect,
    /// Returns the last lines that it wrote.
    Logs,
}

/// Usage of a running instance since its run began. The difference between two queries is the usage
/// between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunUsage {
    pub site: SiteName,
    /// The run: with another number, all counts here restarted.
    pub run: u64,
    pub tier: Tier,
    /// When this was read, microseconds of a clock that never goes back.
    pub at_us: u64,
    pub cpu_us: u64,
    /// Time it had work and no CPU because a quota was used up; the sum over its CPUs.
    pub throttled_us: u64,
    /// Time some of it had work and no CPU, for any reason. `None` if this kernel does not report
    /// it.
    pub waited_us: Option<u64>,
    pub memory_bytes: u64,
    /// The present CPU limit of its site's cell. `None` if there is none.
    pub limit: Option<CpuQuota>,
    /// The limit differs from its record's.
    pub is_limit_changed: bool,
}

/// Requests of one site in flight at the edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandReport {
    pub site: SiteName,
    /// Includes those that wait for it to wake.
    pub requests: u32,
}

/// Present work of a node's process for applications, as reported to planners.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppLoad {
    /// The edge: requests to applications placed here that it has accepted since it began.
    pub requests: u64,
    /// The keeper: wakes in progress and queued.
    pub wakes: u32,
}

/// Most words of a command that is run in an instance.
pub const EXEC_WORDS_MAX: usize = 1024;

/// Most bytes of all words together.
pub const EXEC_BYTES_MAX: usize = 64 * 1024;

/// Default and longest time limit of a command in an instance, seconds.
pub const EXEC_SECONDS: u32 = 3600;
pub const EXEC_SECONDS_MAX: u32 = 86_400;

/// A command that an operator runs in a site's instance, beside its application.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecCommand {
    #[serde(default)]
    pub site: String,
    pub command: Vec<String>,
    /// Wakes the instance if it rests; otherwise a command for a resting instance is refused.
    #[serde(default)]
    pub wake: bool,
    /// Gives it a terminal of its own instead of three pipes. The value is the kind, for `$TERM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<String>,
    /// It is ended after this many seconds. `None` means `EXEC_SECONDS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_max: Option<u32>,
}

/// First byte from the waiting client. The keeper sends nothing before it, because the client could
/// not take descriptors yet.
pub const EXEC_GO: u8 = b'\n';

/// The keeper's reports about the command, one line of JSON each. It ends the command when the
/// other end closes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecSaid {
    /// Carries the other ends of the command's standard input, output and errors, or of its
    /// terminal.
    Runs,
    Exited {
        status: Option<i32>,
        signal: Option<i32>,
    },
    Failed {
        error: String,
        code: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_go_up_and_are_numbered_in_that_order() {
        assert!(Tier::ALL.is_sorted());
        for (number, tier) in Tier::ALL.into_iter().enumerate() {
            assert_eq!(tier as usize, number);
            assert_eq!(serde_json::to_value(tier).unwrap(), tier.as_str());
        }
        assert_eq!(Tier::ALL.map(Tier::has_process), [false, false, true, true, true, true]);
    }

    #[test]
    fn stages_are_numbered_in_their_order() {
        for (number, stage) in WakeStage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, number);
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.as_str());
        }
    }
}

//! The words for instances that keeper, edge, supervisor and command line share: how deep one rests, what waking it took,
//! what an operator can have done to it.
//!
//! Not here: an application's record (`record::App`), the life of an instance (`keeper`).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cell::CpuQuota;
use crate::names::SiteName;

/// How deep an instance rests, from no process and no image to work. Deeper compares as less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// No process; waking it is a start of the program.
    Cold,
    /// No process; waking it restores its image.
    Image,
    /// Frozen, and its memory moved to swap.
    Reclaimed,
    /// It gets no CPU time at all.
    Frozen,
    /// It runs, but only in time nobody else wants.
    Quiet,
    Running,
}

impl Tier {
    /// From the deepest up; the position of each is its number.
    pub const ALL: [Self; 6] =
        [Self::Cold, Self::Image, Self::Reclaimed, Self::Frozen, Self::Quiet, Self::Running];

    /// The word for it in records, commands, logs and metrics.
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

    /// Whether an instance that rests here has processes.
    pub fn has_process(self) -> bool {
        self > Self::Image
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A part of what waking an instance took, in the order in which they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// From the request to what is to be done for it.
    Decide,
    /// For its turn: no more than so many instances wake at once.
    Queue,
    /// Its processes get CPU time again.
    Thaw,
    /// Namespaces, mounts and cell of a new one.
    Sandbox,
    /// From the image.
    Restore,
    /// The start of the program.
    Boot,
    /// Until it listens, and answers what its record says it must.
    Ready,
    /// Its image is taken, once for each release.
    Image,
    /// The connection for the one who asked.
    Connect,
}

impl Stage {
    /// The position of each is its number.
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

    /// The word for it in receipts, logs and metrics.
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

/// What one who asked for an instance waited for, because it did not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wake {
    /// Where it rested.
    pub from: Tier,
    /// Each stage with its microseconds, as far as this one waited through it. Who joins late has waited less.
    pub stages: Vec<(Stage, u64)>,
    /// Microseconds that this one was predicted to wait for its turn, when it asked. None: it was its turn at once, or somebody
    /// else's wake was joined that had begun.
    pub predicted_us: Option<u64>,
}

/// What an operator has done to an instance. The answer is a JSON object: `{"ok": true, ...}`, or `{"error": ...}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// Makes it run, and answers once it does.
    Wake,
    /// Makes it rest one tier deeper, or as deep as this. Not while it is in use.
    Rest { to: Option<Tier> },
    /// Takes a new image of it: it is started anew for that, if need be.
    Image,
    /// Starts it anew: what runs is ended, and its image is not used again.
    Restart,
    /// Ends its processes.
    Stop,
    /// In a cluster: gives it up, so that another node may have it. Nobody gets it any more; who uses it may end that for so
    /// long, then its processes are ended. `{"ok": true, "epoch": ..., "cut": ...}` only when none of them is left: it does not
    /// run here again under this epoch. `cut` is how many uses were cut short.
    Release { within_ms: u64 },
    /// Changes the CPU limit of its site's cell at once, to so many thousandths of a core in the place of what its record says. None:
    /// what its record says. It holds until the record's limit is changed or nothing of the site runs. `{"error": ...}` where
    /// its cell has no such limit.
    LimitCpu { thousandths: Option<u32> },
    /// All that is known of it.
    Inspect,
    /// The last lines it wrote.
    Logs,
}

/// What an instance that runs has used since its run began. Who asks twice knows what it used between.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    pub site: SiteName,
    /// The run: with another number all that is counted here began anew.
    pub run: u64,
    pub tier: Tier,
    /// When this was read, microseconds of a clock that only goes on.
    pub at_us: u64,
    pub cpu_us: u64,
    /// Time it had work and no CPU because a quota was used up; of several CPUs the sum.
    pub throttled_us: u64,
    /// Time some of it had work and no CPU, for any reason. None: this kernel does not tell.
    pub waited_us: Option<u64>,
    pub memory_bytes: u64,
    /// The CPU limit of its site's cell as it is now. None: there is none.
    pub limit: Option<CpuQuota>,
    /// That is not what its record says.
    pub is_limit_changed: bool,
}

/// Requests of one site that are under way at the edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needed {
    pub site: SiteName,
    /// Those that wait for it to wake, too.
    pub requests: u32,
}

/// What one of a node's processes has to do for applications, as planners are told of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Busy {
    /// The edge: requests to applications that are placed here, which it has taken since it began.
    pub requests: u64,
    /// The keeper: wakes under way and in line.
    pub wakes: u32,
}

/// Most words of a command that is run in an instance.
pub const EXEC_WORDS_MAX: usize = 1024;

/// Most bytes of them altogether.
pub const EXEC_BYTES_MAX: usize = 64 * 1024;

/// How long a command in an instance may take if nobody says so, and the longest anybody may say, seconds.
pub const EXEC_SECONDS: u32 = 3600;
pub const EXEC_SECONDS_MAX: u32 = 86_400;

/// A command that an operator runs in a site's instance, beside its application.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    #[serde(default)]
    pub site: String,
    pub command: Vec<String>,
    /// Wakes it if it rests; else a command for one that rests is refused.
    #[serde(default)]
    pub wake: bool,
    /// It gets a terminal of its own instead of three pipes. The value: its kind, for `$TERM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<String>,
    /// It is ended after so many seconds. None: `EXEC_SECONDS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_max: Option<u32>,
}

/// What who waits says first, so that nothing is said to it before it can take descriptors.
pub const EXEC_GO: u8 = b'\n';

/// What the keeper then says about the command, one line of JSON each. It ends the command when the other end closes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecSaid {
    /// With it come the other ends of what the command has: of its standard input, output and errors, or of its terminal.
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
        for (number, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, number);
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.as_str());
        }
    }
}

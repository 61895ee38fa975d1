//! The feed: how the supervisor tells its processes what is hosted here, and how they answer it.
//!
//! A frame is a 4-byte little-endian length and that many bytes of JSON, over a Unix stream socket that
//! the supervisor made. Both ends are one program; a frame that does not decode ends the process that
//! read it, and the supervisor starts it anew. Not here: the sockets (`nagaya`), the copy (`table`).

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::instance::{Act, Exec};
use crate::names::{NodeName, SiteName};
use crate::record::{Change, NodeRecord, Placement, Why};

/// Longest frame, in bytes. The largest is one batch of changes: `BATCH_MAX` records of at most 64 KiB.
pub const FRAME_LEN_MAX: usize = 256 << 20;

/// Most changes sent in one frame.
pub const BATCH_MAX: usize = 4096;

/// Longest that the edge takes to answer `Question::FetchImage`: 16 GiB at 10 MiB a second.
pub const FETCH_MAX: Duration = Duration::from_secs(1800);

/// From the supervisor to a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Down {
    /// Settings of this process (its own `Options` type); first frame, and again when configuration changed.
    Options(serde_json::Value),
    /// These changes, in this order.
    Apply(Vec<Change>),
    /// All changes up to this revision have been sent and now become visible together: what arrived by
    /// `Apply` since the last `Commit` is applied atomically.
    Commit { revision: u64 },
    /// Take no new connections, finish what runs, then exit.
    Drain,
    /// Log files were moved: open them anew.
    ReopenLogs,
    /// Answer with `Up::Answer` and the same tag.
    Ask { tag: u64, question: Question },
    /// The keeper: run this in an instance. With the frame comes the descriptor of a connection, on which it says what
    /// comes of it (`ExecSaid`).
    Exec(Exec),
    /// In a cluster: until when this node may run what is placed on it, as CLOCK_BOOTTIME in nanoseconds. It never becomes
    /// less; when it has passed, the edge serves no placed site from here and the keeper freezes their instances, until
    /// a later one comes. A node without a cluster is never told.
    Authority { until_ns: u64 },
    /// The edge: this site is about to move away from here. Requests that come for it wait until its placement names another
    /// node, or until this is taken back.
    Leaving { site: SiteName, on: bool },
    /// The edge: so many wakes the other nodes have before them, as they told last.
    Wakes { elsewhere: u32 },
    /// The edge: what became of its `Up::Place` with the same tag.
    Placed { tag: u64, placed: Placed },
    /// The edge: asks these members to vouch for this node. Each that does is told by `Up::Vouched`; a later round ends this one.
    Vouch { round: u64, members: Vec<NodeRecord> },
    /// The edge: this node vouches for the member that asked by `Up::VouchAsked` with the same tag. `moved`: the store's
    /// revision that member has to know. There is no other answer: who does not vouch is silent.
    VouchAnswer { tag: u64, moved: u64 },
}

/// Where a site's application runs from now on, or why it runs nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placed {
    At {
        placement: Placement,
        /// Microseconds it took to choose the node, and to have the store agree. Both 0: it had moved already.
        decide_us: u64,
        store_us: u64,
    },
    /// In words for the operator, with the code of the page that helps.
    Nowhere { reason: String, code: String },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// Prometheus text of this process.
    Metrics,
    /// JSON object for `nagaya status`.
    Status,
    /// The keeper: the tree of cells as JSON.
    Cells,
    /// The keeper: all instances as JSON, `{"instances": [...], ...}`. Each has `site`, `tenant`, `tier` and, as far as known,
    /// `state` (what goes on with it now, or why nothing does), `since_seconds` (at this tier), `uses` (edge threads that keep
    /// it awake), `memory_bytes`, `cpu_us` (both of all its processes), `wakes` (since the keeper began), `last_wake` (a
    /// `Wake`), `image` (`{"bytes", ...}` or null) and `note` (why it failed, or cannot have an image).
    Instances,
    /// The keeper: does this to the instance of a site. Answered when it is done, which may take as long as a start:
    /// `{"ok": true, ...}`, `{"error": "...", "code": "NGYnnnn"}`, or `null` where no application has this name. `Inspect`
    /// answers as a row of `Instances`, with more; `Logs` with `lines`, the oldest first.
    Instance { site: String, act: Act },
    /// The keeper: what each instance that runs, or whose limit is not its record's, has used, as a list of `instance::Used`. The edge:
    /// requests of each site whose instance it uses, as a list of `instance::Needed`.
    Load,
    /// What this process has to do for applications, as an `instance::Busy`. Asked for several times a second, so nothing is read for it.
    Busy,
    /// The edge: sites, tenants and lanes of which requests run or wait, as JSON.
    Requests,
    /// The edge: the receipt of the request with this id as JSON.
    Explain { id: String },
    /// The edge: bring the image of a site here from the node that has it, unless this node has one. Answered by a `Fetched`
    /// as JSON when that has ended, within `FETCH_MAX`. `order`: for both nodes' keepers, which give and take nothing without it.
    FetchImage { site: SiteName, from: NodeName, order: String },
}

/// What became of a `Question::FetchImage`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fetched {
    /// There is an image here. `bytes` came for it; 0: it was here already.
    Here { digest: String, bytes: u64 },
    /// The other node has none either.
    None,
    /// In words for the operator. What came in part is kept.
    Failed { reason: String },
}

/// From a process to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Up {
    /// It serves, and knows everything up to this revision. Sent after each `Commit`.
    Ready {
        revision: u64,
    },
    Answer {
        tag: u64,
        text: String,
    },
    /// The edge: this site is to be placed, because it is not, or because the node that has it cannot serve it. `seen` is the
    /// epoch that did not do: if there is a higher one, that is the answer. `lost`: of several nodes that have it, the one that cannot
    /// serve it; else the first. Answered by `Down::Placed`.
    Place {
        tag: u64,
        site: SiteName,
        seen: Option<u64>,
        why: Why,
        lost: Option<NodeName>,
        /// For so long the request that asks waited for that node.
        probe_us: u64,
    },
    /// The edge: this node answers after all, of which a request may have said by `Place` that it does not.
    Heard {
        node: NodeName,
    },
    /// The edge: this node's answer to a probe is late. It may be found silent in a moment.
    Doubt {
        node: NodeName,
    },
    /// The edge: the member with this id asks this node to vouch for it.
    VouchAsked {
        tag: u64,
        id: String,
    },
    /// The edge: the member with this id vouches for this node, in this round.
    Vouched {
        round: u64,
        id: String,
        moved: u64,
    },
}

pub fn encode(frame: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, frame)?;
    let len = bytes.len() - 4;
    if len > FRAME_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("feed frame of {len} bytes")));
    }
    let len = u32::try_from(len).expect("FRAME_LEN_MAX fits 32 bits");
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    Ok(bytes)
}

pub fn write(to: &mut impl Write, frame: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(frame)?)
}

/// The next frame, or `None` where the other end closed between two frames.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut len = [0; 4];
    match from.read_exact(&mut len) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("feed frame of {len} bytes")));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_in_order_and_the_end_is_clean() {
        let mut wire = Vec::new();
        write(&mut wire, &Up::Ready { revision: 7 }).unwrap();
        write(&mut wire, &Up::Answer { tag: 1, text: "x".into() }).unwrap();
        let mut from = wire.as_slice();
        assert_eq!(read::<Up>(&mut from).unwrap(), Some(Up::Ready { revision: 7 }));
        assert_eq!(read::<Up>(&mut from).unwrap(), Some(Up::Answer { tag: 1, text: "x".into() }));
        assert_eq!(read::<Up>(&mut from).unwrap(), None);
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_memory_is_taken() {
        assert!(read::<Up>(&mut [0xff; 8].as_slice()).is_err());
    }
}

//! The feed: the supervisor's messages to its processes about hosted sites, and their replies.
//!
//! A frame is a 4-byte little-endian length and that many bytes of JSON. It goes over a Unix stream
//! socket that the supervisor made. Both ends are one program. A frame that does not decode ends
//! the process that read it, and the supervisor restarts it. Not here: the sockets (`nagaya`), the
//! copy (`table`).

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::instance::{ExecCommand, InstanceCommand};
use crate::names::{NodeName, SiteName};
use crate::record::{NodeRecord, Placement, PlacementReason, RecordChange};

/// Longest frame, in bytes. The largest is one batch of changes: `BATCH_MAX` records of at most 64
/// KiB.
pub const FRAME_LEN_MAX: usize = 256 << 20;

/// Most changes sent in one frame.
pub const BATCH_MAX: usize = 4096;

/// Longest time of the edge's reply to `Question::FetchImage`: 16 GiB at 10 MiB per second.
pub const FETCH_MAX: Duration = Duration::from_secs(1800);

/// A message from the supervisor to a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromSupervisor {
    /// Settings of this process (its own `Options` type). It is the first frame, and comes again
    /// after a change of configuration.
    Options(serde_json::Value),
    /// These changes, in this order.
    Apply(Vec<RecordChange>),
    /// All changes up to this revision have been sent and now become visible together. The `Apply`
    /// frames since the last `Commit` are applied atomically.
    Commit { revision: u64 },
    /// Take no new connections, finish running requests, then exit.
    Drain,
    /// Log files were moved: reopen them.
    ReopenLogs,
    /// Reply with `Up::Answer` and the same tag.
    Ask { tag: u64, question: FeedQuery },
    /// The keeper: run this in an instance. The frame carries the descriptor of a connection, on
    /// which the outcome is reported (`ExecSaid`).
    Exec(ExecCommand),
    /// In a cluster: end of this node's lease, as `CLOCK_BOOTTIME` in nanoseconds. It never becomes
    /// less. After it, the edge serves no placed site from here, and the keeper freezes their
    /// instances. A later one ends that. A node without a cluster never gets this.
    Authority { until_ns: u64 },
    /// The edge: this site is about to move away from here. Requests for it wait until its
    /// placement names another node, or until this is taken back.
    Leaving { site: SiteName, on: bool },
    /// The edge: number of wakes before the other nodes, as they last reported.
    Wakes { elsewhere: u32 },
    /// The edge: the outcome of its `Up::Place` with the same tag.
    Placed { tag: u64, placed: PlaceReply },
    /// The edge: asks these members to vouch for this node. Each vouch comes as `Up::Vouched`; a
    /// later round ends this one.
    Vouch { round: u64, members: Vec<NodeRecord> },
    /// The edge: this node vouches for the member of the `Up::VouchAsked` with the same tag.
    /// `moved` is the store's revision that the member has to know. There is no other reply: a node
    /// that does not vouch is silent.
    VouchAnswer { tag: u64, moved: u64 },
}

/// Where a site's application runs from now on, or why it runs nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceReply {
    At {
        placement: Placement,
        /// Microseconds taken to choose the node, and to have the store agree. Both are 0 if it had
        /// moved already.
        decide_us: u64,
        store_us: u64,
    },
    /// In words for the operator, with the code of the page that helps.
    Nowhere { reason: String, code: String },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedQuery {
    /// Prometheus text of this process.
    Metrics,
    /// JSON object for `nagaya status`.
    Status,
    /// The keeper: the tree of cells as JSON.
    Cells,
    /// The keeper: all instances as JSON, `{"instances": [...], ...}`. Each has `site`, `tenant`,
    /// `tier` and, as far as known, these fields:
    /// - `state`: its present activity, or why there is none
    /// - `since_seconds`: time at this tier
    /// - `uses`: edge threads that keep it awake
    /// - `memory_bytes` and `cpu_us`: of all its processes
    /// - `wakes`: since the keeper began
    /// - `last_wake`: a `Wake`
    /// - `image`: `{"bytes", ...}` or null
    /// - `note`: why it failed, or cannot have an image
    Instances,
    /// The keeper: does this to the instance of a site. The reply comes when it is done, which may
    /// take as long as a start. It is `{"ok": true, ...}`, `{"error": "...", "code": "NGYnnnn"}`,
    /// or `null` if no application has this name. `Inspect` replies with a row of `Instances` and
    /// more; `Logs` with `lines`, the oldest first.
    Instance { site: String, act: InstanceCommand },
    /// The keeper: usage of each instance that runs, or whose limit is not its record's, as a list
    /// of `instance::Used`. The edge: requests of each site whose instance it uses, as a list of
    /// `instance::Needed`.
    Load,
    /// The process's present work for applications, as an `instance::Busy`. It is queried several
    /// times a second, so nothing is read for it.
    Busy,
    /// The edge: sites, tenants and lanes with running or waiting requests, as JSON.
    Requests,
    /// The edge: the receipt of the request with this id as JSON.
    Explain { id: String },
    /// The edge: fetch the image of a site from the node that has it, unless this node has one. The
    /// reply is a `FetchResult` as JSON when that has ended, within `FETCH_MAX`. `order` is for
    /// both nodes' keepers, which give and take nothing without it.
    FetchImage { site: SiteName, from: NodeName, order: String },
}

/// The outcome of a `Question::FetchImage`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FetchResult {
    /// There is an image here. `bytes` came for it; 0 if it was here already.
    Here { digest: String, bytes: u64 },
    /// The other node has none, either.
    None,
    /// In words for the operator. Parts that arrived are kept.
    Failed { reason: String },
}

/// A message from a process to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToSupervisor {
    /// It serves, and knows everything up to this revision. Sent after each `Commit`.
    Ready {
        revision: u64,
    },
    Answer {
        tag: u64,
        text: String,
    },
    /// The edge: place this site, because it is not placed, or because the node that has it cannot
    /// serve it. `seen` is the epoch that failed: if there is a higher one, that is the reply.
    /// `lost` is the one of several nodes that cannot serve it; without it, the first node. The
    /// reply is `Down::PlaceReply`.
    Place {
        tag: u64,
        site: SiteName,
        seen: Option<u64>,
        why: PlacementReason,
        lost: Option<NodeName>,
        /// Microseconds that the request waited for that node.
        probe_us: u64,
    },
    /// The edge: this node answers after all. A request may have reported by `Place` that it does
    /// not.
    Heard {
        node: NodeName,
    },
    /// The edge: this node's reply to a probe is late. It may be found silent in a moment.
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

/// Returns the next frame, or `None` if the other end closed between two frames.
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
        write(&mut wire, &ToSupervisor::Ready { revision: 7 }).unwrap();
        write(&mut wire, &ToSupervisor::Answer { tag: 1, text: "x".into() }).unwrap();
        let mut from = wire.as_slice();
        assert_eq!(read::<ToSupervisor>(&mut from).unwrap(), Some(ToSupervisor::Ready { revision: 7 }));
        assert_eq!(
            read::<ToSupervisor>(&mut from).unwrap(),
            Some(ToSupervisor::Answer { tag: 1, text: "x".into() })
        );
        assert_eq!(read::<ToSupervisor>(&mut from).unwrap(), None);
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_memory_is_taken() {
        assert!(read::<ToSupervisor>(&mut [0xff; 8].as_slice()).is_err());
    }
}

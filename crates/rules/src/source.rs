//! The text of a rule file, read only when the file changed.
//!
//! Not here: what is made of the text (`ruleset`, `vm`).

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest rule file, in bytes.
pub const SOURCE_LEN_MAX: usize = 64 << 10;

/// A file written so shortly before it was read may be written once more without its times changing: kernels before 6.13
/// stamp files with the tick of their clock, up to 10 ms long.
const SETTLES_AFTER: Duration = Duration::from_millis(20);

/// What tells one version of a file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    identity: Identity,
    /// Of a file that may still be written within the same tick: its text decides then.
    unsettled: Option<Box<[u8]>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What became of a file since it was last read.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    Same,
    Text(Box<[u8]>),
    /// Says why, and what to do.
    Unreadable(String),
}

/// Reads the file unless it is as `seen` says, and brings `seen` up to date.
pub fn read(path: &Path, seen: &mut Option<Stamp>) -> Source {
    let source = read_changed(path, seen)
        .unwrap_or_else(|error| Source::Unreadable(format!("cannot be read: {error}")));
    if matches!(source, Source::Unreadable(_)) {
        *seen = None;
    }
    source
}

fn read_changed(path: &Path, seen: &mut Option<Stamp>) -> io::Result<Source> {
    let metadata = fs::metadata(path)?;
    // Before it is opened: opening a FIFO would wait for its writer.
    if !metadata.is_file() {
        return Ok(Source::Unreadable("is not a regular file".into()));
    }
    let is_settled = |seen: &Stamp| seen.unsettled.is_none() && seen.identity == Identity::of(&metadata);
    if seen.as_ref().is_some_and(is_settled) {
        return Ok(Source::Same);
    }
    let now = SystemTime::now();
    let file = File::open(path)?;
    // The identity is taken before the text: what is written in between makes the next look find another identity.
    let identity = Identity::of(&file.metadata()?);
    let mut text = Vec::new();
    file.take(SOURCE_LEN_MAX as u64 + 1).read_to_end(&mut text)?;
    if text.len() > SOURCE_LEN_MAX {
        return Ok(Source::Unreadable(too_long()));
    }
    let text = text.into_boxed_slice();
    let had = seen.take();
    let unsettled = (!identity.is_settled(now)).then(|| text.clone());
    let is_same = had
        .is_some_and(|had| had.identity == identity && had.unsettled.as_ref().is_none_or(|had| *had == text));
    *seen = Some(Stamp { identity, unsettled });
    Ok(if is_same { Source::Same } else { Source::Text(text) })
}

pub fn too_long() -> String {
    format!("is longer than {SOURCE_LEN_MAX} bytes; keep lists of hosts as settings of the store")
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether every write after `now` changes the identity.
    fn is_settled(&self, now: SystemTime) -> bool {
        let (secs, nanos) = self.changed.max(self.modified);
        let written = Duration::new(u64::try_from(secs).unwrap_or(0), u32::try_from(nanos).unwrap_or(0));
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        now.checked_sub(written).is_some_and(|age| age > SETTLES_AFTER)
    }
}

#[cfg(test)]
mod tests;

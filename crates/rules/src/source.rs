//! The text of a rule file, read only when the file changed.
//!
//! Not here: the use of the text (`ruleset`, `vm`).

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest rule file, in bytes.
pub const SOURCE_LEN_MAX: usize = 64 << 10;

/// Time during which a file may be written once more without a change of its times. Kernels before
/// 6.13 stamp files with the tick of their clock, up to 10 ms long.
const SETTLES_AFTER: Duration = Duration::from_millis(20);

/// Identity of one version of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStamp {
    identity: FileIdentity,
    /// Text of a file that may still be written within the same tick: the text decides then.
    unsettled: Option<Box<[u8]>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// State of a file since it was last read.
#[derive(Debug, PartialEq, Eq)]
pub enum SourceRead {
    Same,
    Text(Box<[u8]>),
    /// Says why, and what to do.
    Unreadable(String),
}

/// Reads the file unless it matches `seen`, and updates `seen`.
pub fn read(path: &Path, seen: &mut Option<SourceStamp>) -> SourceRead {
    let source = read_changed(path, seen)
        .unwrap_or_else(|error| SourceRead::Unreadable(format!("cannot be read: {error}")));
    if matches!(source, SourceRead::Unreadable(_)) {
        *seen = None;
    }
    source
}

fn read_changed(path: &Path, seen: &mut Option<SourceStamp>) -> io::Result<SourceRead> {
    let metadata = fs::metadata(path)?;
    // Before it is opened: opening a FIFO would wait for its writer.
    if !metadata.is_file() {
        return Ok(SourceRead::Unreadable("is not a regular file".into()));
    }
    let is_settled =
        |seen: &SourceStamp| seen.unsettled.is_none() && seen.identity == FileIdentity::of(&metadata);
    if seen.as_ref().is_some_and(is_settled) {
        return Ok(SourceRead::Same);
    }
    let now = SystemTime::now();
    let file = File::open(path)?;
    // The identity is taken before the text. After a write in between, the next check finds another
    // identity.
    let identity = FileIdentity::of(&file.metadata()?);
    let mut text = Vec::new();
    file.take(SOURCE_LEN_MAX as u64 + 1).read_to_end(&mut text)?;
    if text.len() > SOURCE_LEN_MAX {
        return Ok(SourceRead::Unreadable(too_long()));
    }
    let text = text.into_boxed_slice();
    let had = seen.take();
    let unsettled = (!identity.is_settled(now)).then(|| text.clone());
    let is_same = had
        .is_some_and(|had| had.identity == identity && had.unsettled.as_ref().is_none_or(|had| *had == text));
    *seen = Some(SourceStamp { identity, unsettled });
    Ok(if is_same { SourceRead::Same } else { SourceRead::Text(text) })
}

pub fn too_long() -> String {
    format!("is longer than {SOURCE_LEN_MAX} bytes; keep lists of hosts as settings of the store")
}

impl FileIdentity {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns whether every write after `now` changes the identity.
    fn is_settled(&self, now: SystemTime) -> bool {
        let (secs, nanos) = self.changed.max(self.modified);
        let written = Duration::new(u64::try_from(secs).unwrap_or(0), u32::try_from(nanos).unwrap_or(0));
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        now.checked_sub(written).is_some_and(|age| age > SETTLES_AFTER)
    }
}

#[cfg(test)]
mod tests;

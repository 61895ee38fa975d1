//! The kernel's events of changed files, as bytes of a fanotify group (fanotify(7)).
//!
//! The group reports each change with the handle of the directory, the name there, and the handle
//! of the file. Names may be out of date when they are read: only handles say which file it was.
//! Invariant: any bytes are read without a panic; what is not understood is an error, because a
//! change that is passed over would be lost. Not here: the group, and the meaning of handles.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Version of the events' layout (`FANOTIFY_METADATA_VERSION`).
const VERSION: u8 = 3;

/// Length of an event before its records, bytes.
const METADATA_LEN: usize = 24;

/// Types of records: a file, a directory with a name, and both of a rename (`linux/fanotify.h`).
const FILE: u8 = 1;
const NAME: u8 = 2;
const OLD_NAME: u8 = 10;
const NEW_NAME: u8 = 12;

/// Length of a record before the bytes of its handle: type, length, file system, and the handle's
/// own head.
const RECORD_HEAD_LEN: usize = 20;

/// Maximum length of a handle, bytes (`MAX_HANDLE_SZ`).
const HANDLE_LEN_MAX: usize = 128;

/// Kinds of changes, as bits of an event (`linux/fanotify.h`).
pub mod kinds {
    pub const MODIFIED: u64 = 0x2;
    pub const ATTRIBUTES: u64 = 0x4;
    pub const CLOSED_WRITTEN: u64 = 0x8;
    pub const CREATED: u64 = 0x100;
    pub const DELETED: u64 = 0x200;
    pub const OVERFLOW: u64 = 0x4000;
    pub const RENAMED: u64 = 0x1000_0000;
    pub const OF_DIRECTORY: u64 = 0x4000_0000;
}

/// A file's identity on its file system (name_to_handle_at(2)). It outlasts renames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileHandle<'a> {
    pub kind: i32,
    pub bytes: &'a [u8],
}

/// A directory, and a name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NamedPlace<'a> {
    pub directory: FileHandle<'a>,
    /// `.` for the directory itself.
    pub name: &'a OsStr,
}

/// One event. Several changes of one file may be in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChangeEvent<'a> {
    /// Bits of `kinds`.
    pub kinds: u64,
    pub place: Option<NamedPlace<'a>>,
    /// The place before a rename.
    pub former: Option<NamedPlace<'a>>,
    /// The file that was changed. `None` if it is gone.
    pub file: Option<FileHandle<'a>>,
}

/// The kernel says what this program does not understand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    #[error("an event of fanotify is cut off")]
    Cut,
    #[error("events of fanotify have version {0}, and {VERSION} is known")]
    Version(u8),
    #[error("a record of a fanotify event has a wrong length")]
    Record,
}

/// Reads the events of a buffer, one after another.
#[derive(Debug, Clone)]
pub struct ChangeEvents<'a>(&'a [u8]);

impl<'a> ChangeEvents<'a> {
    /// `bytes`: the result of one read of the group.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self) -> Result<ChangeEvent<'a>, EventError> {
        let head = self.0.first_chunk::<METADATA_LEN>().ok_or(EventError::Cut)?;
        let [l0, l1, l2, l3, version, _, m0, m1, ..] = *head;
        let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let begin = usize::from(u16::from_ne_bytes([m0, m1]));
        if version != VERSION {
            return Err(EventError::Version(version));
        }
        if begin < METADATA_LEN || begin > len {
            return Err(EventError::Cut);
        }
        let (event, rest) = self.0.split_at_checked(len).ok_or(EventError::Cut)?;
        self.0 = rest;
        let kinds = head[8..16].try_into().map(u64::from_ne_bytes).unwrap_or_default();
        let mut change = ChangeEvent { kinds, ..ChangeEvent::default() };
        let mut records = &event[begin..];
        while !records.is_empty() {
            let [kind, _, l0, l1] = *records.first_chunk::<4>().ok_or(EventError::Record)?;
            let len = usize::from(u16::from_ne_bytes([l0, l1]));
            if len < 4 {
                return Err(EventError::Record);
            }
            let (record, others) = records.split_at_checked(len).ok_or(EventError::Record)?;
            records = others;
            match kind {
                FILE => change.file = Some(handle(record)?.0),
                NAME | NEW_NAME => change.place = Some(place(record)?),
                OLD_NAME => change.former = Some(place(record)?),
                // Others add facts that nobody here asked for.
                _ => {}
            }
        }
        Ok(change)
    }
}

impl<'a> Iterator for ChangeEvents<'a> {
    type Item = Result<ChangeEvent<'a>, EventError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let event = self.take();
        if event.is_err() {
            self.0 = &[];
        }
        Some(event)
    }
}

/// Returns the handle of a record, and the bytes after it.
fn handle(record: &[u8]) -> Result<(FileHandle<'_>, &[u8]), EventError> {
    let head = record.first_chunk::<RECORD_HEAD_LEN>().ok_or(EventError::Record)?;
    let word = |at: usize| head[at..at + 4].try_into().map(i32::from_ne_bytes).unwrap_or_default();
    let len = usize::try_from(word(12)).ok().filter(|len| *len <= HANDLE_LEN_MAX);
    let rest = &record[RECORD_HEAD_LEN..];
    let (bytes, rest) = len.and_then(|len| rest.split_at_checked(len)).ok_or(EventError::Record)?;
    Ok((FileHandle { kind: word(16), bytes }, rest))
}

fn place(record: &[u8]) -> Result<NamedPlace<'_>, EventError> {
    let (directory, rest) = handle(record)?;
    let end = rest.iter().position(|byte| *byte == 0).ok_or(EventError::Record)?;
    Ok(NamedPlace { directory, name: OsStr::from_bytes(&rest[..end]) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u8, handle: &[u8], name: Option<&str>) -> Vec<u8> {
        let mut rest = vec![0; 8];
        rest.extend((handle.len() as u32).to_ne_bytes());
        rest.extend(5_i32.to_ne_bytes());
        rest.extend(handle);
        if let Some(name) = name {
            rest.extend(name.as_bytes());
            rest.push(0);
        }
        rest.resize(rest.len().next_multiple_of(4), 0);
        let mut record = vec![kind, 0];
        record.extend((rest.len() as u16 + 4).to_ne_bytes());
        record.extend(rest);
        record
    }

    fn event(kinds: u64, records: &[Vec<u8>]) -> Vec<u8> {
        let records = records.concat();
        let mut event = Vec::new();
        event.extend(((METADATA_LEN + records.len()) as u32).to_ne_bytes());
        event.extend([VERSION, 0]);
        event.extend((METADATA_LEN as u16).to_ne_bytes());
        event.extend(kinds.to_ne_bytes());
        event.extend((-1_i32).to_ne_bytes());
        event.extend(77_i32.to_ne_bytes());
        event.extend(records);
        event
    }

    fn named<'a>(directory: &'a [u8], name: &'a str) -> Option<NamedPlace<'a>> {
        Some(NamedPlace { directory: FileHandle { kind: 5, bytes: directory }, name: OsStr::new(name) })
    }

    #[test]
    fn events_have_their_places_and_files() {
        let bytes = [
            event(kinds::MODIFIED, &[record(NAME, b"dir", Some("a")), record(FILE, b"file", None)]),
            event(kinds::OVERFLOW, &[]),
            event(
                kinds::RENAMED,
                &[
                    record(OLD_NAME, b"one", Some("b")),
                    record(NEW_NAME, b"two", Some("c")),
                    record(99, b"", None),
                ],
            ),
        ]
        .concat();
        let events: Vec<_> = ChangeEvents::new(&bytes).collect::<Result<_, _>>().unwrap();
        let [modified, overflow, renamed] = events[..] else { panic!("{events:?}") };
        assert_eq!((modified.kinds, modified.place), (kinds::MODIFIED, named(b"dir", "a")));
        assert_eq!(modified.file, Some(FileHandle { kind: 5, bytes: b"file" }));
        assert_eq!(overflow, ChangeEvent { kinds: kinds::OVERFLOW, ..ChangeEvent::default() });
        assert_eq!((renamed.former, renamed.place), (named(b"one", "b"), named(b"two", "c")));
    }

    #[test]
    fn what_is_not_understood_is_an_error_and_ends_the_buffer() {
        let good = event(kinds::CREATED, &[record(NAME, b"dir", Some("a"))]);
        let mut version = good.clone();
        version[4] = 4;
        let mut nameless = event(kinds::CREATED, &[record(NAME, b"dir", None)]);
        let end = nameless.len();
        nameless[end - 1] = 1;
        for (bytes, error) in [
            (good[..good.len() - 1].to_vec(), EventError::Cut),
            (version, EventError::Version(4)),
            (nameless, EventError::Record),
        ] {
            let mut events = ChangeEvents::new(&bytes);
            assert_eq!(events.next(), Some(Err(error)));
            assert_eq!(events.next(), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = event(kinds::RENAMED, &[record(OLD_NAME, b"one", Some("b")), record(FILE, b"f", None)]);
            bytes.extend(bytes.clone());
            for (at, byte) in changes {
                let len = bytes.len();
                bytes[at.index(len)] = byte;
            }
            let len = bytes.len();
            bytes.truncate(cut.index(len + 1));
            prop_assert!(ChangeEvents::new(&bytes).count() <= 3 + bytes.len());
        }
    }
}

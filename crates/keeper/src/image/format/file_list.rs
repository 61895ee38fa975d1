//! CRIU's list of all files that processes have open or mapped. Files that CRIU is handed in a wake
//! are added to it.
//!
//! Its format is a magic word, then a protobuf message for each file, after its length. CRIU writes
//! it with the rights of a sandbox, so it is as hostile as the programs there. Existing messages
//! stay as they are, and an added one has a number that none of them has. Not here: the added files
//! (`mapped`, `shared`), who may write these files (`files`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::{self, Write};
use std::path::Path;

use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{self, DecodeContext, WireType};
use rustix::fs::OFlags;

use crate::image::files;
use crate::image::format::pagemap::{append, message};

/// Name of the list.
const NAME: &str = "files.img";
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x38, 0x31, 0x30, 0x56];
const LEN_MAX: u64 = 8 << 20;

/// List of those files that a path alone does not lead to.
const UNNAMED: &str = "remap-fpath.img";
const UNNAMED_MAGIC_LEN: usize = 8;
const UNNAMED_LEN_MAX: u64 = 1 << 20;

/// A regular file (`fd_types`).
const ORDINARY: i32 = 1;

/// Fields of the messages with a file's number, and the field of the first that has the second.
const ID: u32 = 2;
const INNER: u32 = 3;
const INNER_ID: u32 = 1;

/// An open or mapped file (`file_entry`). Other fields are ignored.
#[derive(Clone, PartialEq, Message)]
struct FileEntry {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    ordinary: Option<RegFileEntry>,
}

/// `reg_file_entry`, with its required fields.
#[derive(Clone, PartialEq, Message)]
struct RegFileEntry {
    #[prost(uint32, required, tag = "1")]
    id: u32,
    /// How it is opened: `O_*` of open(2).
    #[prost(uint32, required, tag = "2")]
    flags: u32,
    #[prost(uint64, required, tag = "3")]
    position: u64,
    #[prost(message, required, tag = "5")]
    owner: FownEntry,
    #[prost(string, required, tag = "6")]
    path: String,
}

/// Receiver of its signals (`fown_entry`): nobody.
#[derive(Clone, PartialEq, Message)]
struct FownEntry {
    #[prost(uint32, required, tag = "1")]
    uid: u32,
    #[prost(uint32, required, tag = "2")]
    euid: u32,
    #[prost(uint32, required, tag = "3")]
    signal: u32,
    #[prost(uint32, required, tag = "4")]
    kind: u32,
    #[prost(uint32, required, tag = "5")]
    pid: u32,
}

/// A file whose path alone does not lead to it (`remap_file_path_entry`).
#[derive(Clone, PartialEq, Message)]
struct RemapPathEntry {
    #[prost(uint32, required, tag = "1")]
    id: u32,
}

/// Returns CRIU's path of a file that it is handed: a path of no file.
pub fn handed_path(name: &str) -> String {
    format!(".nagaya/{name}")
}

/// The list of an image.
pub struct FileList {
    bytes: Vec<u8>,
    /// Paths by number. Empty for one that is no regular file.
    paths: HashMap<u32, String>,
    /// `None` if they are not known.
    unnamed: Option<HashSet<u32>>,
    /// From here on all numbers are free.
    free: u32,
    /// The added messages.
    added: Vec<u8>,
}

impl FileList {
    /// Reads the list of an image of these files. `None` if it is not understood, or there is none.
    pub fn read(dir: &Path, names: &BTreeSet<String>) -> io::Result<Option<Self>> {
        if !names.contains(NAME) {
            return Ok(None);
        }
        let Some(bytes) = files::read(dir, NAME, LEN_MAX)? else { return Ok(None) };
        let unnamed = match names.contains(UNNAMED) {
            true => files::read(dir, UNNAMED, UNNAMED_LEN_MAX)?.and_then(|bytes| unnamed(&bytes)),
            false => Some(HashSet::new()),
        };
        Ok(Self::parse(bytes, unnamed))
    }

    /// Parses the list of a file. `None` if it is not understood.
    pub(crate) fn parse(bytes: Vec<u8>, unnamed: Option<HashSet<u32>>) -> Option<Self> {
        let paths = paths(&bytes)?;
        let free = paths.keys().max().map_or(1, |largest| largest.saturating_add(1));
        Some(Self { bytes, paths, unnamed, free, added: Vec::new() })
    }

    pub fn path(&self, id: u32) -> Option<&str> {
        self.paths.get(&id).map(String::as_str)
    }

    /// Adds a regular file that CRIU is handed, opened with these flags. Returns its number. `None`
    /// if no number is left.
    pub fn add(&mut self, name: &str, flags: OFlags) -> Option<u32> {
        let id = self.number()?;
        let (owner, path) = (FownEntry::default(), format!("/{}", handed_path(name)));
        let ordinary = Some(RegFileEntry { id, flags: flags.bits(), position: 0, owner, path });
        append(&mut self.added, &FileEntry { kind: ORDINARY, id, ordinary });
        Some(id)
    }

    /// Adds a file of the list once more. Returns its other number. `None` if it is no regular
    /// file, more than its path leads to it, or no number is left.
    pub fn add_again(&mut self, id: u32) -> Option<u32> {
        if self.unnamed.as_ref().is_none_or(|unnamed| unnamed.contains(&id)) {
            return None;
        }
        let mut rest = self.bytes.strip_prefix(&MAGIC)?;
        let entry = loop {
            let entry = message(&mut rest).ok()?;
            if FileEntry::decode(entry).ok()?.id == id {
                break entry.to_vec();
            }
        };
        let twin = self.number()?;
        let entry = renumbered(&entry, ID, twin, Some(INNER)).ok()?;
        let FileEntry { kind: ORDINARY, id, ordinary: Some(ordinary) } =
            FileEntry::decode(entry.as_slice()).ok()?
        else {
            return None;
        };
        if (id, ordinary.id) != (twin, twin) {
            return None;
        }
        self.added.extend(u32::try_from(entry.len()).ok()?.to_le_bytes());
        self.added.extend(entry);
        Some(twin)
    }

    fn number(&mut self) -> Option<u32> {
        let id = self.free;
        self.free = id.checked_add(1)?;
        Some(id)
    }

    /// Returns the file with the added messages.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.append(&mut self.added);
        self.bytes
    }

    /// Writes the added messages.
    pub fn write(self, dir: &Path) -> io::Result<()> {
        if self.added.is_empty() {
            return Ok(());
        }
        files::open(dir, NAME, OFlags::WRONLY | OFlags::APPEND)?.write_all(&self.added)
    }
}

fn paths(bytes: &[u8]) -> Option<HashMap<u32, String>> {
    let mut rest = bytes.strip_prefix(&MAGIC)?;
    let mut paths = HashMap::new();
    while !rest.is_empty() {
        let FileEntry { id, ordinary, .. } = FileEntry::decode(message(&mut rest).ok()?).ok()?;
        paths.insert(id, ordinary.map(|file| file.path).unwrap_or_default());
    }
    Some(paths)
}

pub(crate) fn unnamed(bytes: &[u8]) -> Option<HashSet<u32>> {
    let mut rest = bytes.get(UNNAMED_MAGIC_LEN..)?;
    let mut ids = HashSet::new();
    while !rest.is_empty() {
        ids.insert(RemapPathEntry::decode(message(&mut rest).ok()?).ok()?.id);
    }
    Some(ids)
}

/// Returns a message with another number in the field `tag`, and in that of the message in the
/// field `inner`. Everything else is unchanged.
pub(crate) fn renumbered(
    mut rest: &[u8],
    tag: u32,
    number: u32,
    inner: Option<u32>,
) -> Result<Vec<u8>, prost::DecodeError> {
    let mut changed = Vec::with_capacity(rest.len() + 16);
    while rest.has_remaining() {
        let whole = rest;
        let (field, kind) = encoding::decode_key(&mut rest)?;
        let mut value = rest;
        encoding::skip_field(kind, field, &mut rest, DecodeContext::default())?;
        if (field, kind) == (tag, WireType::Varint) {
            encoding::uint32::encode(tag, &number, &mut changed);
        } else if (Some(field), kind) == (inner, WireType::LengthDelimited) {
            encoding::decode_varint(&mut value)?;
            let message = renumbered(&value[..value.len() - rest.len()], INNER_ID, number, None)?;
            encoding::bytes::encode(field, &message, &mut changed);
        } else {
            changed.extend_from_slice(&whole[..whole.len() - rest.len()]);
        }
    }
    Ok(changed)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Written by CRIU 4.2: an ordinary file with its size and mode, which are ignored, and a pipe.
    const PROGRAM: [u8; 55] = [
        0x08, 0x01, 0x10, 0x01, 0x1a, 0x31, 0x08, 0x01, 0x10, 0x00, 0x18, 0x00, 0x2a, 0x0a, 0x08, 0x00, 0x10,
        0x00, 0x18, 0x00, 0x20, 0x00, 0x28, 0x00, 0x32, 0x14, 0x2f, 0x75, 0x73, 0x72, 0x2f, 0x73, 0x62, 0x69,
        0x6e, 0x2f, 0x70, 0x68, 0x70, 0x2d, 0x66, 0x70, 0x6d, 0x38, 0x2e, 0x32, 0x40, 0xf8, 0xdb, 0xda, 0x02,
        0x50, 0xed, 0x83, 0x02,
    ];
    const OTHER: [u8; 30] = [
        0x08, 0x02, 0x10, 0x92, 0x01, 0x92, 0x01, 0x16, 0x08, 0x92, 0x01, 0x10, 0xd9, 0xa6, 0x02, 0x18, 0x80,
        0x10, 0x22, 0x0a, 0x08, 0x00, 0x10, 0x00, 0x18, 0x00, 0x20, 0x00, 0x28, 0x00,
    ];
    /// Beginning of a list of unnamed files, and one of them.
    const UNNAMED_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x54, 0x39, 0x13, 0x59];
    const ONE: [u8; 7] = [0x08, 0x8c, 0x01, 0x10, 0x01, 0x18, 0x01];

    pub fn opened_list(paths: &[(u32, &str)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for (id, path) in paths {
            let ordinary = RegFileEntry { id: *id, path: (*path).into(), ..RegFileEntry::default() };
            append(&mut bytes, &FileEntry { kind: ORDINARY, id: *id, ordinary: Some(ordinary) });
        }
        bytes
    }

    fn framed(magic: [u8; 8], messages: &[&[u8]]) -> Vec<u8> {
        let mut bytes = magic.to_vec();
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(*message);
        }
        bytes
    }

    struct Image(tempfile::TempDir);

    impl Image {
        fn new(list: &[u8], unnamed: Option<&[u8]>) -> Self {
            let image = Self(tempfile::tempdir().unwrap());
            std::fs::write(image.0.path().join(NAME), list).unwrap();
            if let Some(unnamed) = unnamed {
                std::fs::write(image.0.path().join(UNNAMED), unnamed).unwrap();
            }
            image
        }

        fn list(&self) -> Option<FileList> {
            let has = |name: &&str| self.0.path().join(name).exists();
            let names =
                [NAME, UNNAMED].iter().filter(|name| has(name)).map(|name| (*name).to_owned()).collect();
            FileList::read(self.0.path(), &names).unwrap()
        }

        fn read(&self) -> Vec<u8> {
            std::fs::read(self.0.path().join(NAME)).unwrap()
        }
    }

    #[test]
    fn files_are_added_behind_those_of_criu() {
        let before = framed(MAGIC, &[&PROGRAM, &OTHER]);
        let image = Image::new(&before, None);
        let mut list = image.list().unwrap();
        assert_eq!(
            (list.path(1), list.path(146), list.path(2)),
            (Some("/usr/sbin/php-fpm8.2"), Some(""), None)
        );
        assert_eq!(list.add("shared-4.img", OFlags::RDWR), Some(147));
        assert_eq!(list.add_again(1), Some(148));
        list.write(image.0.path()).unwrap();
        let after = image.read();
        assert!(after.starts_with(&before));
        let list = image.list().unwrap();
        assert_eq!(list.path(147), Some("/.nagaya/shared-4.img"));
        assert_eq!(list.path(148), Some("/usr/sbin/php-fpm8.2"));
        // All else that it has is the same: its size and its mode.
        let mut rest = &after[before.len()..];
        message(&mut rest).unwrap();
        let again = message(&mut rest).unwrap();
        assert!(rest.is_empty());
        let tail = &PROGRAM[PROGRAM.len() - 9..];
        assert!(again.ends_with(tail), "{again:x?}");
        assert_eq!(renumbered(again, ID, 1, Some(INNER)).unwrap(), PROGRAM);
    }

    #[test]
    fn unnamed_file_is_listed_only_once() {
        let unnamed =
            |bytes: &[u8]| Image::new(&framed(MAGIC, &[&PROGRAM, &OTHER]), Some(bytes)).list().unwrap();
        let mut id = ONE;
        assert_eq!(unnamed(&framed(UNNAMED_MAGIC, &[&ONE])).add_again(1), Some(147), "another file's");
        id[1] = 1;
        let own = [&[0x08, 0x01][..], &id[3..]].concat();
        assert_eq!(unnamed(&framed(UNNAMED_MAGIC, &[&own])).add_again(1), None);
        assert_eq!(unnamed(b"something").add_again(1), None, "it is not known which they are");
        let mut list = Image::new(&framed(MAGIC, &[&PROGRAM, &OTHER]), None).list().unwrap();
        assert_eq!((list.add_again(146), list.add_again(2)), (None, None), "no ordinary one, or none at all");
    }

    #[test]
    fn a_list_that_is_not_understood_is_none() {
        let whole = framed(MAGIC, &[&PROGRAM, &OTHER]);
        for end in 0..whole.len() {
            let is_end = end == MAGIC.len() || end == MAGIC.len() + 4 + PROGRAM.len();
            assert_eq!(Image::new(&whole[..end], None).list().is_some(), is_end, "{end}");
        }
        let image = Image::new(&opened_list(&[(u32::MAX, "/x")]), None);
        assert_eq!(image.list().unwrap().add("a", OFlags::RDONLY), None, "no number is left");
    }
}

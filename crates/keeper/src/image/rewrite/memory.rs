//! Detects memory that an image would restore wrongly, without notice to the program.
//!
//! With the rights of a sandbox CRIU may not open what is mapped (`map_files` of proc(5)). So it
//! takes a mapped memfd for anonymous memory. That is as good while it is shared among mappings
//! alone. But a descriptor of it, open anywhere or in the queue of a socket, is brought back as a
//! memory of its own, and what is written to one is not seen in the other. Of a private mapping the
//! pages that were not written to are lost: they read as zeros.
//!
//! Both are found in what CRIU has written, in which all processes stood still at once; in `/proc`
//! they would be changing. It is written with the rights of a sandbox, so it is as hostile as what
//! runs there. Not here: pages (`pagemap`), who may write these files (`files`).

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

use prost::Message;
use rustix::fs::OFlags;

use crate::image::error::{ImageError, at};
use crate::image::files;
use crate::image::format::mappings::{LEN_MAX, MappingList, MemoryMapping, PRIVATE, SHARED};
use crate::image::format::pagemap::message;

/// Magic word of the list of all memfds.
const MEMFDS_MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x99, 0x34, 0x45, 0x48];

/// List of all memfds with a descriptor. The file is missing if there are none.
const MEMFDS: &str = "memfd.img";

/// `MAP_HUGETLB` of Linux, in `MemoryMapping::flags`. Such memory has a number, even if only one
/// process has it.
const HUGE: u32 = 0x40000;

const SPLIT: &str = "a memfd is mapped as shared memory and open as a descriptor, which would be two memories afterwards: \
                     close all descriptors of it once it is mapped";
const LOST: &str =
    "a memfd is mapped privately, of which pages would be lost: copy it, or map it as shared memory";

/// A memfd with a descriptor (`memfd_inode_entry`).
#[derive(Clone, PartialEq, Message)]
struct MemfdInode {
    /// The lower half of its inode's number.
    #[prost(uint32, required, tag = "5")]
    memory: u32,
}

/// Refuses an image of these files if it would restore memory wrongly, or if that cannot be
/// determined.
pub fn check<'a>(dir: &Path, names: impl Iterator<Item = &'a String> + Clone) -> Result<(), ImageError> {
    let mut open = HashSet::new();
    if names.clone().any(|name| name == MEMFDS) {
        open = look(dir, MEMFDS, memfds)?;
    }
    for name in names.filter(|name| name.starts_with("mm-")) {
        let list = look(dir, name, MappingList::decode)?;
        if let Some(why) = wrong(&list.all, &open) {
            return Err(ImageError::Unfit { reason: why.into() });
        }
    }
    Ok(())
}

/// Reads a file with `decode`, whose error follows the file's name.
fn look<T>(
    dir: &Path,
    name: &str,
    decode: impl FnOnce(&[u8]) -> Result<T, &'static str>,
) -> Result<T, ImageError> {
    let mut bytes = Vec::new();
    let file = files::open(dir, name, OFlags::RDONLY).map_err(at("open", dir.join(name)))?;
    file.take(LEN_MAX + 1).read_to_end(&mut bytes).map_err(at("read", dir.join(name)))?;
    let decoded = if bytes.len() as u64 > LEN_MAX { Err("is too long") } else { decode(&bytes) };
    decoded.map_err(|why| ImageError::Unfit { reason: format!("what CRIU says of its memory: {name} {why}") })
}

pub(crate) fn memfds(bytes: &[u8]) -> Result<HashSet<u32>, &'static str> {
    let mut rest = bytes.strip_prefix(&MEMFDS_MAGIC).ok_or("is no list of memfds")?;
    let mut open = HashSet::new();
    while !rest.is_empty() {
        let memfd = MemfdInode::decode(message(&mut rest)?).map_err(|_| "has what is no memfd")?;
        open.insert(memfd.memory);
    }
    Ok(open)
}

/// Describes a problem with mappings, where these memfds are open.
pub(crate) fn wrong(mappings: &[MemoryMapping], open: &HashSet<u32>) -> Option<&'static str> {
    mappings.iter().find_map(|mapping| {
        let MemoryMapping { memory, flags, status, .. } = *mapping;
        // Two inodes with the same lower half only refuse one image too many.
        let low = u32::try_from(memory & u64::from(u32::MAX)).unwrap_or_default();
        if status & SHARED != 0 && open.contains(&low) {
            Some(SPLIT)
        } else if status & PRIVATE != 0 && memory != 0 && flags & HUGE == 0 {
            Some(LOST)
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::format::mappings::tests::{list, of_criu};

    /// As CRIU 4.2 has written one.
    const MEMFD: [u8; 27] = [
        0x0a, 0x01, 0x78, 0x10, 0xc9, 0xdc, 0x03, 0x18, 0xc9, 0xdc, 0x03, 0x20, 0x80, 0x80, 0x01, 0x28, 0x82,
        0xb6, 0x01, 0x30, 0x01, 0x38, 0x01, 0x48, 0xff, 0x83, 0x02,
    ];

    fn file(magic: [u8; 8], messages: &[&[u8]]) -> Vec<u8> {
        let mut bytes = magic.to_vec();
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(*message);
        }
        bytes
    }

    fn mapping(memory: u64, flags: i32, status: u32) -> MemoryMapping {
        MemoryMapping { memory, flags: flags.cast_unsigned(), status, ..MemoryMapping::default() }
    }

    #[test]
    fn memfds_of_criu_are_understood() {
        let open = file(MEMFDS_MAGIC, &[&MEMFD]);
        assert_eq!(memfds(&open), Ok(HashSet::from([0x5b02])));
        assert_eq!(memfds(&MEMFDS_MAGIC), Ok(HashSet::new()));
        for end in 0..open.len() {
            assert_eq!(memfds(&open[..end]).is_ok(), end == 8, "{end}");
        }
        assert!(memfds(&of_criu()).is_err());
        assert!(memfds(&file(MEMFDS_MAGIC, &[&[0x2a, 0]])).is_err(), "of another kind");
    }

    #[test]
    fn memory_that_would_come_back_wrongly() {
        const OPEN: u32 = 7;
        let rows = [
            ("shared, and no descriptor of it", mapping(8, 0x21, SHARED | 1), None),
            ("shared and open", mapping(OPEN.into(), 0x21, SHARED | 1), Some(SPLIT)),
            (
                "the same behind many inodes",
                mapping(u64::from(OPEN) | 1 << 40, 0x21, SHARED | 1),
                Some(SPLIT),
            ),
            ("shared memory of huge pages, open", mapping(OPEN.into(), 0x40021, SHARED | 1), Some(SPLIT)),
            ("of System V, and no descriptor of it", mapping(8, 0x21, SHARED | 1 << 10 | 1), None),
            ("private memory without a file", mapping(0, 0x22, PRIVATE | 1), None),
            ("a private memfd", mapping(8, 0x22, PRIVATE | 1), Some(LOST)),
            ("an open private memfd", mapping(OPEN.into(), 0x22, PRIVATE | 1), Some(LOST)),
            ("private huge pages", mapping(8, 0x40022, PRIVATE | 1), None),
            // Its number is CRIU's own.
            ("a file, privately", mapping(OPEN.into(), 2, 0x41), None),
            ("a file, shared", mapping(OPEN.into(), 1, 0x81), None),
        ];
        for (what, mapping, expected) in rows {
            let of = [self::mapping(0, 0x22, PRIVATE | 1), mapping];
            assert_eq!(wrong(&of, &HashSet::from([OPEN])), expected, "{what}");
        }
        assert_eq!(wrong(&[], &HashSet::from([OPEN])), None);
    }

    #[test]
    fn an_image_is_refused_for_what_its_files_say() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        let refused = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            check(dir.path(), names.iter()).err().map(|error| error.to_string())
        };
        write("mm-10.img", &list(vec![mapping(1, 2, 0x41)], 1).encode());
        write("mm-11.img", &of_criu());
        write(MEMFDS, &file(MEMFDS_MAGIC, &[&MEMFD]));
        assert_eq!(refused(&["mm-10.img", "mm-11.img", "core-10.img"]), None, "nobody has it open");
        assert_eq!(refused(&["mm-10.img", MEMFDS]), None, "nobody has it mapped");
        let both = refused(&["mm-10.img", "mm-11.img", MEMFDS]).unwrap();
        assert!(both.contains("would be two memories"), "{both}");
        write("mm-12.img", b"something");
        assert!(refused(&["mm-12.img"]).unwrap().contains("mm-12.img is no list"));
        let long = std::fs::File::create(dir.path().join("mm-13.img")).unwrap();
        long.set_len(LEN_MAX + 1).unwrap();
        assert!(refused(&["mm-13.img"]).unwrap().contains("mm-13.img is too long"));
    }
}

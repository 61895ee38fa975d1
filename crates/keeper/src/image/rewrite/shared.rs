//! Shared memory that a wake writes while CRIU runs, and that CRIU maps.
//!
//! CRIU restores shared memory by one fault for each page. Writing the content to a file of memory
//! (memfd) takes less than half of that time. So where all mappings of such memory are understood,
//! they become mappings of a file. Each wake makes a new file, writes it in the sandbox' cell
//! (`sandbox/filling`), and hands it to CRIU. The program sees no difference: its processes share
//! memory that nobody else has.
//!
//! CRIU writes its files with the rights of a sandbox, so they are as hostile as what runs there.
//! Not here: zero pages (`holes`), the form of the lists (`mappings`, `pagemap`, `file_list`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::libc;
use rustix::fs::{MemfdFlags, OFlags};

use crate::image::files;
use crate::image::format::file_list::FileList;
use crate::image::format::mappings::{self, FILE_SHARED, MappingList, MemoryMapping, REGULAR, SHARED};
use crate::image::format::memory_plan::{LEN_MAX, MEMORIES_MAX, PARTS_MAX, SharedMemory};
use crate::image::format::pagemap::{self, Pagemap, pages_name};
use crate::image::rewrite::holes;

/// Fewer pages are not worth a file.
const PAGES_MIN: u64 = 64;

/// Data of one shared memory.
struct SharedPages {
    number: u64,
    pages: Pagemap,
    /// As far as it is mapped.
    len: u64,
}

/// Turns the largest shared memories of an image into files that a wake hands to CRIU. A memory
/// that is not understood stays as it is.
pub fn set_apart(
    dir: &Path,
    names: &mut BTreeSet<String>,
    list: &mut FileList,
) -> io::Result<Vec<SharedMemory>> {
    let mut processes = HashMap::new();
    for name in names.iter().filter(|name| name.starts_with("mm-")) {
        match mappings(dir, name)? {
            Some(mappings) => processes.insert(name.clone(), mappings),
            None => {
                tracing::debug!("shared memory is filled at each wake: {name} is not understood");
                return Ok(Vec::new());
            }
        };
    }
    let (mut all, mut parts) = (Vec::new(), 0);
    for memory in memories(dir, names, &processes)? {
        parts += memory.pages.stretches.len();
        let path = SharedMemory::path(&memory.pages);
        if all.len() >= MEMORIES_MAX || parts > PARTS_MAX {
            break;
        }
        let Some(id) = list.add(&path, OFlags::RDWR) else { break };
        for mapping in processes.values_mut().flat_map(|process| &mut process.all) {
            if is_plain(mapping) && mapping.memory == memory.number {
                mapping.memory = id.into();
                mapping.status = REGULAR | FILE_SHARED;
                mapping.flags &= !libc::MAP_ANONYMOUS.cast_unsigned();
                mapping.file_flags = Some(OFlags::RDWR.bits());
            }
        }
        all.push(memory.set_apart(dir, names)?);
    }
    if !all.is_empty() {
        for (name, process) in processes {
            files::rewrite(dir, &name, &process.encode())?;
        }
    }
    Ok(all)
}

/// Returns those that can be set apart, the largest first.
fn memories(
    dir: &Path,
    names: &BTreeSet<String>,
    processes: &HashMap<String, MappingList>,
) -> io::Result<Vec<SharedPages>> {
    let page_len = rustix::param::page_size() as u64;
    let mut lens: HashMap<u64, u64> = HashMap::new();
    let mut others = HashSet::new();
    for mapping in processes.values().flat_map(|process| &process.all).filter(|one| one.status & SHARED != 0)
    {
        let end = (mapping.end.checked_sub(mapping.start)).and_then(|len| mapping.offset.checked_add(len));
        match end {
            Some(end) if is_plain(mapping) && end <= LEN_MAX => {
                let len = lens.entry(mapping.memory).or_default();
                *len = end.max(*len);
            }
            _ => _ = others.insert(mapping.memory),
        }
    }
    let (mut memories, lists) = (Vec::new(), lists_by_file(dir, names)?);
    for (number, len) in lens.into_iter().filter(|(number, _)| !others.contains(number)) {
        let Some(pages) = pagemap(dir, names, &lists, number)? else { continue };
        let in_memory = pages.stretches.last().is_some_and(|last| {
            // Checked by `pages` before: in order, and no more than possible.
            last.address + last.pages() * page_len <= len
        });
        if pages.pages(page_len).is_some_and(|count| count >= PAGES_MIN) && in_memory {
            memories.push(SharedPages { number, pages, len });
        }
    }
    memories.sort_by_key(|memory| (std::cmp::Reverse(memory.pages.pages(page_len)), memory.number));
    Ok(memories)
}

/// Whether it is unnamed memory that processes share: no huge pages, no System V memory, and
/// nothing unknown.
fn is_plain(mapping: &MemoryMapping) -> bool {
    const ANONYMOUS: u32 = (libc::MAP_SHARED | libc::MAP_ANONYMOUS).cast_unsigned();
    mapping.status == REGULAR | SHARED
        && mapping.flags & !libc::MAP_NORESERVE.cast_unsigned() == ANONYMOUS
        && mapping.memory != 0
}

/// Returns `None` if it is not understood.
fn mappings(dir: &Path, name: &str) -> io::Result<Option<MappingList>> {
    let bytes = files::read(dir, name, mappings::LEN_MAX)?;
    let read = bytes.and_then(|bytes| Some((MappingList::decode(&bytes).ok()?, bytes)));
    Ok(read.and_then(|(mappings, bytes)| (mappings.encode() == bytes).then_some(mappings)))
}

/// Counts how many lists name each file of pages.
fn lists_by_file(dir: &Path, names: &BTreeSet<String>) -> io::Result<HashMap<u32, usize>> {
    let mut lists = HashMap::new();
    for name in names.iter().filter(|name| name.starts_with("pagemap-")) {
        if let Ok(id) = holes::pages_id(dir, name)? {
            *lists.entry(id).or_default() += 1;
        }
    }
    Ok(lists)
}

/// Returns the list of pages of a memory. Its file of pages must be used by no other and be as long
/// as the list says. `None` if it is not understood.
fn pagemap(
    dir: &Path,
    names: &BTreeSet<String>,
    lists: &HashMap<u32, usize>,
    number: u64,
) -> io::Result<Option<Pagemap>> {
    let own = SharedPages::list(number);
    if !names.contains(&own) {
        return Ok(None);
    }
    let bytes = files::read(dir, &own, pagemap::LEN_MAX)?;
    let Some(pages) = bytes.and_then(|bytes| Pagemap::decode(&bytes).ok()) else { return Ok(None) };
    let file = pages_name(pages.pages_id);
    if lists.get(&pages.pages_id) != Some(&1) || !names.contains(&file) {
        return Ok(None);
    }
    let len = files::open(dir, &file, OFlags::RDONLY)?.metadata()?.len();
    let page_len = rustix::param::page_size() as u64;
    let is_whole = pages.pages(page_len).and_then(|count| count.checked_mul(page_len)) == Some(len);
    Ok(is_whole.then_some(pages))
}

impl SharedPages {
    fn list(number: u64) -> String {
        format!("pagemap-shmem-{number}.img")
    }

    /// Renames its file of pages to one that is written in a wake. CRIU's list of them is not
    /// needed any more.
    fn set_apart(self, dir: &Path, names: &mut BTreeSet<String>) -> io::Result<SharedMemory> {
        let page_len = rustix::param::page_size() as u64;
        let (pages, list, file) =
            (pages_name(self.pages.pages_id), Self::list(self.number), SharedMemory::path(&self.pages));
        fs::rename(dir.join(&pages), dir.join(&file))?;
        fs::remove_file(dir.join(&list))?;
        names.remove(&pages);
        names.remove(&list);
        names.insert(file.clone());
        let part =
            |stretch: &pagemap::PagemapEntry| (stretch.address, stretch.address + stretch.pages() * page_len);
        Ok(SharedMemory { file, len: self.len, parts: self.pages.stretches.iter().map(part).collect() })
    }
}

impl SharedMemory {
    /// Makes empty memory of its length.
    pub fn memory(&self) -> io::Result<OwnedFd> {
        let memory = rustix::fs::memfd_create(c"", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, self.len)?;
        Ok(memory)
    }

    fn path(pages: &Pagemap) -> String {
        format!("shared-{}.img", pages.pages_id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nagaya_records::record::ImageMemory;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::image::format::file_list::tests::opened_list;
    use crate::image::format::mappings::tests::list;
    use crate::image::format::pagemap::tests::stretch;
    use crate::image::seal;

    const PAGE: u64 = 4096;
    const NUMBER: u64 = 238;

    fn shared(start: u64, end: u64, number: u64) -> MemoryMapping {
        let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS).cast_unsigned();
        MemoryMapping {
            start: start * PAGE,
            end: end * PAGE,
            memory: number,
            protection: 3,
            flags,
            status: REGULAR | SHARED,
            fd: -1,
            ..MemoryMapping::default()
        }
    }

    /// An image of processes with these mappings, of which one memory has pages: by their first
    /// page, what they are full of.
    struct Image {
        dir: tempfile::TempDir,
        names: BTreeSet<String>,
    }

    impl Image {
        fn new(processes: &[Vec<MemoryMapping>], stretches: &[(u64, Vec<u8>)]) -> Self {
            let mut image = Self { dir: tempfile::tempdir().unwrap(), names: BTreeSet::new() };
            for (index, mappings) in processes.iter().enumerate() {
                image.write(&format!("mm-{}.img", index + 10), &list(mappings.clone(), 3).encode());
            }
            image.write("files.img", &opened_list(&[(3, "/usr/bin/node")]));
            let entry = |(first, pages): &(u64, Vec<u8>)| {
                stretch(first * PAGE, u32::try_from(pages.len()).unwrap(), true)
            };
            let pages = Pagemap { pages_id: 4, stretches: stretches.iter().map(entry).collect() };
            image.write("pagemap-shmem-238.img", &pages.encode());
            let bytes = stretches.iter().flat_map(|(_, pages)| pages).flat_map(|byte| [*byte; PAGE as usize]);
            image.write("pages-4.img", &bytes.collect::<Vec<u8>>());
            image
        }

        fn write(&mut self, name: &str, bytes: &[u8]) {
            fs::write(self.dir.path().join(name), bytes).unwrap();
            self.names.insert(name.into());
        }

        fn set_apart(&mut self) -> Vec<SharedMemory> {
            // Shared memory is the same for programs that nobody knows, and where nothing is to be
            // mapped.
            seal::set_apart(self.dir.path(), &mut self.names, 0, ImageMemory::Copied).unwrap().shared
        }

        fn mappings(&self, name: &str) -> Vec<MemoryMapping> {
            mappings(self.dir.path(), name).unwrap().unwrap().all
        }

        /// All of the files, and whether each is among the names.
        fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            let entries = fs::read_dir(self.dir.path()).unwrap().map(Result::unwrap);
            let files: BTreeMap<_, _> = entries
                .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
                .collect();
            assert!(files.keys().eq(self.names.iter()));
            files
        }
    }

    #[test]
    fn memory_of_two_processes_becomes_a_file() {
        let own = MemoryMapping { offset: 16 * PAGE, ..shared(500, 600, NUMBER) };
        let other = shared(700, 701, 9);
        let mut image = Image::new(
            &[vec![shared(100, 200, NUMBER)], vec![own, other.clone()]],
            &[(0, vec![1; 60]), (80, vec![2; 20])],
        );
        let all = image.set_apart();
        let parts = vec![(0, 60 * PAGE), (80 * PAGE, 100 * PAGE)];
        // One process sees more of it than the other.
        assert_eq!(all, [SharedMemory { file: "shared-4.img".into(), len: 116 * PAGE, parts }]);
        let contents = image.contents();
        assert_eq!(contents["shared-4.img"].len() as u64, 80 * PAGE);
        assert!(!contents.contains_key("pagemap-shmem-238.img") && !contents.contains_key("pages-4.img"));
        let list = FileList::read(image.dir.path(), &image.names).unwrap().unwrap();
        for (name, start, offset) in [("mm-10.img", 100, 0), ("mm-11.img", 500, 16 * PAGE)] {
            let mapping = image.mappings(name).remove(0);
            assert_eq!((mapping.start, mapping.offset, mapping.protection), (start * PAGE, offset, 3));
            assert_eq!(
                (mapping.status, mapping.flags),
                (REGULAR | FILE_SHARED, libc::MAP_SHARED.cast_unsigned())
            );
            assert_eq!(mapping.file_flags, Some(OFlags::RDWR.bits()));
            assert_eq!(list.path(u32::try_from(mapping.memory).unwrap()), Some("/.nagaya/shared-4.img"));
        }
        assert_eq!(image.mappings("mm-11.img")[1], other, "it has no pages");
        let len = |name: &str| contents.get(name).map(|bytes| bytes.len() as u64);
        assert!(SharedMemory::are_sound(&all, len));
    }

    #[test]
    fn image_that_is_not_understood_stays_unchanged() {
        let plain = shared(100, 200, NUMBER);
        let other = |mapping: MemoryMapping| vec![vec![plain.clone()], vec![mapping]];
        let flagged =
            |flag: i32| MemoryMapping { flags: plain.flags | flag.cast_unsigned(), ..plain.clone() };
        let pages = [(0, vec![1; 100])];
        type Spoil = fn(&mut Image);
        let rows: [(&str, Vec<Vec<MemoryMapping>>, Spoil); 9] = [
            (
                "of System V",
                other(MemoryMapping { status: REGULAR | SHARED | 1 << 10, ..plain.clone() }),
                |_| {},
            ),
            ("huge pages", other(flagged(libc::MAP_HUGETLB)), |_| {}),
            ("no memory there can be", other(MemoryMapping { offset: u64::MAX, ..plain.clone() }), |_| {}),
            ("more pages than memory", vec![vec![shared(100, 199, NUMBER)]], |_| {}),
            ("a process that is not understood", other(plain.clone()), |image| {
                image.write("mm-12.img", b"something");
            }),
            ("no list of files", other(plain.clone()), |image| image.write("files.img", b"something")),
            ("a list of pages", other(plain.clone()), |image| {
                image.write("pagemap-shmem-238.img", b"something");
            }),
            ("a file of pages that is too short", other(plain.clone()), |image| {
                image.write("pages-4.img", &[1; 4096]);
            }),
            ("a file of pages of two memories", other(plain.clone()), |image| {
                let list = fs::read(image.dir.path().join("pagemap-shmem-238.img")).unwrap();
                image.write("pagemap-10.img", &list);
            }),
        ];
        for (what, processes, spoil) in rows {
            let mut image = Image::new(&processes, &pages);
            spoil(&mut image);
            let before = image.contents();
            assert_eq!(image.set_apart(), [], "{what}");
            assert_eq!(image.contents(), before, "{what}");
        }
        assert_eq!(Image::new(&[vec![plain]], &[(0, vec![1; 63])]).set_apart(), [], "it is small");
    }

    #[test]
    fn no_header_tells_to_write_where_no_memory_is() {
        let one = SharedMemory { file: "shared-4.img".into(), len: 100, parts: vec![(0, 10), (20, 30)] };
        let are_sound = |all: &[SharedMemory]| {
            SharedMemory::are_sound(all, |name| (name == "shared-4.img").then_some(20))
        };
        assert!(are_sound(&[]) && are_sound(std::slice::from_ref(&one)));
        let with = |parts: &[(u64, u64)]| SharedMemory { parts: parts.to_vec(), ..one.clone() };
        let wrong = [
            SharedMemory { file: "another.img".into(), ..one.clone() },
            SharedMemory { len: 29, ..one.clone() },
            SharedMemory { len: LEN_MAX + 1, ..one.clone() },
            with(&[(0, 10)]),
            with(&[(20, 30), (0, 10)]),
            with(&[(0, 10), (9, 19)]),
            with(&[(30, 20), (40, 50)]),
            with(&[]),
        ];
        for wrong in wrong {
            assert!(!are_sound(std::slice::from_ref(&wrong)), "{wrong:?}");
        }
        assert!(!are_sound(&vec![one.clone(); MEMORIES_MAX + 1]));
        let parts = (0..=PARTS_MAX as u64).map(|at| (2 * at, 2 * at + 1)).collect::<Vec<_>>();
        let many = SharedMemory { len: LEN_MAX, parts, ..one };
        assert!(!SharedMemory::are_sound(std::slice::from_ref(&many), |_| Some(many.parts.len() as u64)));
    }

    proptest! {
        /// Whatever stretches there are: what is written in a wake is what CRIU would have filled.
        #[test]
        fn all_memory_is_what_it_was(pages in vec((0..4_u64, vec(any::<u8>(), 1..60)), 1..8)) {
            let (mut stretches, mut from) = (Vec::new(), 0);
            for (gap, bytes) in pages {
                stretches.push((from + gap, bytes.clone()));
                from += gap + bytes.len() as u64;
            }
            let mut image = Image::new(&[vec![shared(100, 100 + from, NUMBER)]], &stretches);
            let all = image.set_apart();
            prop_assert_eq!(all.is_empty(), stretches.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() < 64);
            for one in all {
                let bytes = &image.contents()[&one.file];
                prop_assert_eq!(one.len, from * PAGE);
                let (mut memory, mut at) = (vec![0; usize::try_from(one.len).unwrap()], 0);
                for (start, end) in one.parts {
                    let part = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
                    let len = part.len();
                    memory[part].copy_from_slice(&bytes[at..at + len]);
                    at += len;
                }
                prop_assert_eq!(at, bytes.len());
                for (first, bytes) in &stretches {
                    for (page, byte) in (*first..).zip(bytes) {
                        let start = usize::try_from(page * PAGE).unwrap();
                        prop_assert!(memory[start..start + 4096].iter().all(|one| one == byte));
                    }
                }
            }
        }
    }
}

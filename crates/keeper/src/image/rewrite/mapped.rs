//! Private memory that a wake maps from a file of the image, and does not fill.
//!
//! Filling memory is most of CRIU's work in a wake. Each page is a fault and a copy, and a first
//! request needs only a part of them. So a process' file of pages becomes one that is mapped. Pages
//! that are still filled are copied to a new file. The lists of mappings say that long runs of
//! pages are private mappings of the first file. The kernel reads their pages as they are touched,
//! and copies those that are written to. This memory behaves like anonymous memory, with two
//! exceptions. They are calls that give pages back to the kernel (`madvise`) and calls that
//! lengthen a mapping (`mremap`). There anonymous memory has zeros, and a file its contents. So in
//! these ranges such calls fail, with errors that they are documented to have, or do nothing
//! (`sandbox/shown`).
//!
//! Memory that is the same in a parent and its child is expensive. CRIU fills it once, moves it
//! three times and compares it page by page. It does not do so for different programs, and nothing
//! is gained by sharing mapped memory. So each process whose memory is set apart gets its own
//! number for the program it runs.
//!
//! CRIU writes its files with the rights of a sandbox, so they are as hostile as the programs
//! there. A process whose lists are not understood to their last byte stays as it is. Not here: the
//! format of those lists (`mappings`, `pagemap`), the descriptors that CRIU is given
//! (`checkpoint`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::Path;

use nagaya_records::record::ImageMemory;
use nix::libc;
use rustix::fs::OFlags;

use crate::image::files;
use crate::image::format::file_list::FileList;
use crate::image::format::mappings::{
    self, FILE_PRIVATE, HEAP, MappingList, MemoryMapping, PRIVATE, REGULAR,
};
use crate::image::format::memory_plan::{MAPPED_FILES_MAX, MappedMemory, RANGES_MAX};
use crate::image::format::pagemap::{self, Pagemap, PagemapEntry, pages_name};

/// Minimum number of pages in a row that are mapped. A mapping of its own costs as much as filling
/// some of them.
const RUN_PAGES_MIN: u64 = 16;

/// Maximum number of runs of one process, of the 65,530 mappings that the kernel allows.
const RUNS_MAX: usize = 2048;

/// Programs whose memory is mapped by default. Their use of `madvise` and `mremap` is known, and
/// they are tested with it. A version number may follow.
const PROGRAMS: [&str; 5] = ["apache2", "httpd", "php-fpm", "python", "ruby"];

/// `MADV_*` that apply to mappings of files as to others. They set how it is read, and that it is
/// in no child, huge, or in no dump.
const ADVICE: u64 = 0b111 | 1 << 10 | 1 << 14 | 1 << 15 | 1 << 16;

/// Pages in a row, in memory and in a file of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PageRun {
    start: u64,
    end: u64,
    /// Position in the file, bytes.
    offset: u64,
    /// It belonged to no file before, so returned pages are zeros.
    is_anonymous: bool,
}

impl PageRun {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// A process with memory that can be mapped.
struct MappedProcess {
    /// Its number, as in the names of its lists.
    pid: String,
    pages: Pagemap,
    mappings: MappingList,
    runs: Vec<PageRun>,
}

/// Moves memory to files that are mapped, and adds their names. `group` can read them.
pub fn set_apart(
    dir: &Path,
    names: &mut BTreeSet<String>,
    list: &mut FileList,
    group: u32,
    memory: ImageMemory,
) -> io::Result<MappedMemory> {
    let mut processes = Vec::new();
    for pid in names.iter().filter_map(|name| name.strip_prefix("mm-")?.strip_suffix(".img")) {
        match process(dir, pid)? {
            Ok(process) if memory == ImageMemory::Mapped || is_known(list, process.mappings.program) => {
                processes.push(process);
            }
            Ok(_) => {}
            Err(why) => tracing::debug!("the memory of process {pid} is filled at each wake: {why}"),
        }
    }
    processes.retain(|process| !process.runs.is_empty());
    processes.sort_by_key(|process| std::cmp::Reverse(process.runs.iter().map(PageRun::len).sum::<u64>()));
    processes.truncate(MAPPED_FILES_MAX);
    let (mut mapped, mut runs) = (MappedMemory::default(), Vec::new());
    for process in processes {
        let file = process.file();
        let Some(id) = list.add(&file, OFlags::RDONLY) else { break };
        // Memory that is the same in its parent is no reason to move memory (see above).
        let program = list.add_again(process.mappings.program).unwrap_or(process.mappings.program);
        process.set_apart(dir, (id, program), group)?;
        names.insert(file.clone());
        mapped.files.push(file);
        runs.extend(process.runs);
    }
    let anonymous = runs.iter().filter(|run| run.is_anonymous);
    mapped.ranges = ranges(anonymous.map(|run| (run.start, run.end)).collect(), RANGES_MAX);
    Ok(mapped)
}

fn is_known(list: &FileList, program: u32) -> bool {
    let name = list.path(program).and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    PROGRAMS.iter().any(|known| {
        let version = name.strip_prefix(known);
        version.is_some_and(|version| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
    })
}

/// The inner error says why its memory stays as it is.
fn process(dir: &Path, pid: &str) -> io::Result<Result<MappedProcess, &'static str>> {
    let lists =
        [(format!("pagemap-{pid}.img"), pagemap::LEN_MAX), (format!("mm-{pid}.img"), mappings::LEN_MAX)];
    let mut contents = Vec::new();
    for (name, len_max) in &lists {
        match files::read(dir, name, *len_max) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err("it has no list of pages"));
            }
            Ok(None) => return Ok(Err("a list is too long")),
            read => contents.extend(read?),
        }
    }
    let (pages, mappings) = match (Pagemap::decode(&contents[0]), MappingList::decode(&contents[1])) {
        (Ok(pages), Ok(mappings)) if mappings.encode() == contents[1] => (pages, mappings),
        (Err(why), _) | (_, Err(why)) => return Ok(Err(why)),
        _ => return Ok(Err("a list of mappings has something that is not known")),
    };
    let page_len = rustix::param::page_size() as u64;
    let len = match files::open(dir, &pages_name(pages.pages_id), OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err("it has no file of pages")),
        file => file?.metadata()?.len(),
    };
    if pages.pages(page_len).and_then(|count| count.checked_mul(page_len)) != Some(len) {
        return Ok(Err("a list of pages does not fit its file"));
    }
    if !mappings.all.is_sorted_by(|a, b| a.start < a.end && a.end <= b.start) {
        return Ok(Err("mappings are not in order"));
    }
    let runs = runs(&pages.stretches, &mappings.all, page_len);
    Ok(Ok(MappedProcess { pid: pid.into(), pages, mappings, runs }))
}

/// Returns the longest runs of pages in memory that can be mapped, in order. Both lists are in
/// order.
fn runs(stretches: &[PagemapEntry], mappings: &[MemoryMapping], page_len: u64) -> Vec<PageRun> {
    let mut whole: Vec<PageRun> = Vec::new();
    let mut offset = 0;
    for stretch in stretches {
        let (start, len) = (stretch.address, stretch.pages() * page_len);
        match whole.last_mut() {
            Some(last) if last.end == start => last.end += len,
            _ => whole.push(PageRun { start, end: start + len, offset, is_anonymous: true }),
        }
        offset += len;
    }
    let mut runs = Vec::new();
    let mut mappings = mappings.iter().peekable();
    for run in whole {
        while mappings.next_if(|mapping| mapping.end <= run.start).is_some() {}
        let mut later = mappings.clone();
        while let Some(mapping) = later.next_if(|mapping| mapping.start < run.end) {
            let (start, end) = (mapping.start.max(run.start), mapping.end.min(run.end));
            let (offset, is_anonymous) = (run.offset + (start - run.start), is_plain(mapping));
            let part = PageRun { start, end, offset, is_anonymous };
            let is_whole = (start, end) == (mapping.start, mapping.end);
            if is_anonymous && part.len() >= RUN_PAGES_MIN * page_len || is_relocated(mapping) && is_whole {
                runs.push(part);
            }
        }
    }
    runs.sort_by_key(|run| std::cmp::Reverse(run.len()));
    runs.truncate(RUNS_MAX);
    runs.sort_by_key(|run| run.start);
    runs
}

/// Whether it is private memory of no file that is not executed and does not grow by itself. It
/// must have no property that only such memory can have.
fn is_plain(mapping: &MemoryMapping) -> bool {
    const ANONYMOUS: u32 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
    mapping.status & !HEAP == REGULAR | PRIVATE
        && mapping.memory == 0
        && mapping.flags & !libc::MAP_NORESERVE.cast_unsigned() == ANONYMOUS
        && mapping.protection & libc::PROT_EXEC.cast_unsigned() == 0
        && mapping.advice.unwrap_or_default() & !ADVICE == 0
}

/// Whether it is private memory of a file that can only be read. All of its pages may have been
/// written to all the same. Then a dynamic loader has put addresses into a library and closed it
/// (`PT_GNU_RELRO`, elf(5)). It belonged to a file before, nobody gives it back, and it does not
/// grow.
fn is_relocated(mapping: &MemoryMapping) -> bool {
    mapping.status == REGULAR | FILE_PRIVATE
        && mapping.flags == libc::MAP_PRIVATE.cast_unsigned()
        && mapping.protection == libc::PROT_READ.cast_unsigned()
        && mapping.advice.unwrap_or_default() & !ADVICE == 0
}

impl MappedProcess {
    /// Returns the file that is mapped.
    fn file(&self) -> String {
        format!("mapped-{}.img", self.pages.pages_id)
    }

    /// Rewrites its lists, for a mapped file and a program with these numbers.
    fn set_apart(&self, dir: &Path, (id, program): (u32, u32), group: u32) -> io::Result<()> {
        let Self { pid, pages, mappings, runs } = self;
        let all = pages_name(pages.pages_id);
        fs::rename(dir.join(&all), dir.join(self.file()))?;
        let from = files::open(dir, &self.file(), OFlags::RDONLY)?;
        let filled = File::options().write(true).create_new(true).mode(0o640).open(dir.join(&all))?;
        fchown(&filled, Some(0), Some(group))?;
        let stretches = copy_filled(&pages.stretches, runs, &from, &filled)?;
        let pages = Pagemap { pages_id: pages.pages_id, stretches };
        files::rewrite(dir, &format!("pagemap-{pid}.img"), &pages.encode())?;
        let mappings = mappings.with(split(&mappings.all, runs, id), program);
        files::rewrite(dir, &format!("mm-{pid}.img"), &mappings.encode())
    }
}

/// Copies pages outside of runs, and returns their entries.
fn copy_filled(
    stretches: &[PagemapEntry],
    runs: &[PageRun],
    mut from: &File,
    mut to: &File,
) -> io::Result<Vec<PagemapEntry>> {
    let page_len = rustix::param::page_size() as u64;
    let mut kept = Vec::new();
    let mut offset = 0;
    for stretch in stretches {
        let end = stretch.address + stretch.pages() * page_len;
        let first = runs.partition_point(|run| run.end <= stretch.address);
        let mut gap = stretch.address;
        let inside = runs[first..].iter().take_while(|run| run.start < end).map(|run| (run.start, run.end));
        for (start, after) in inside.chain([(end, end)]) {
            if start > gap {
                kept.push(stretch.part(
                    (gap - stretch.address) / page_len,
                    (start - gap) / page_len,
                    page_len,
                ));
                from.seek(SeekFrom::Start(offset + (gap - stretch.address)))?;
                let len = start - gap;
                if io::copy(&mut from.take(len), &mut to)? != len {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            gap = after.max(gap);
        }
        offset += end - stretch.address;
    }
    Ok(kept)
}

/// Returns the same memory, with runs as mappings of the file of this number.
fn split(mappings: &[MemoryMapping], runs: &[PageRun], id: u32) -> Vec<MemoryMapping> {
    let mut parts = Vec::with_capacity(mappings.len() + 2 * runs.len());
    let mut runs = runs.iter().peekable();
    for mapping in mappings {
        let mut gap = mapping.start;
        while let Some(run) = runs.next_if(|run| run.start < mapping.end) {
            if run.start > gap {
                parts.push(MemoryMapping { start: gap, end: run.start, ..mapping.clone() });
            }
            parts.push(MemoryMapping {
                start: run.start,
                end: run.end,
                offset: run.offset,
                memory: id.into(),
                flags: mapping.flags & !libc::MAP_ANONYMOUS.cast_unsigned(),
                status: REGULAR | FILE_PRIVATE,
                file_flags: Some(libc::O_RDONLY.cast_unsigned()),
                ..mapping.clone()
            });
            gap = run.end;
        }
        if mapping.end > gap {
            parts.push(MemoryMapping { start: gap, ..mapping.clone() });
        }
    }
    parts
}

/// Merges ranges until there are at most `most`: the smallest gaps are closed.
fn ranges(mut parts: Vec<(u64, u64)>, most: usize) -> Vec<(u64, u64)> {
    parts.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (start, end) in parts {
        match apart.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => apart.push((start, end)),
        }
    }
    let mut gaps: Vec<u64> = apart.windows(2).map(|pair| pair[1].0 - pair[0].1).collect();
    gaps.sort_unstable_by_key(|gap| std::cmp::Reverse(*gap));
    // Gaps at least as large as this one stay open.
    let Some(closed) = most.checked_sub(1).and_then(|open| gaps.get(open).copied()) else { return apart };
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in apart {
        match joined.last_mut() {
            Some(last) if start - last.1 <= closed => last.1 = end,
            _ => joined.push((start, end)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::image::format::file_list::tests::opened_list;
    use crate::image::format::mappings::tests::list;
    use crate::image::format::pagemap::tests::stretch;
    use crate::image::seal;

    const PAGE: u64 = 4096;
    const GROUP: u32 = 0;
    const PYTHON: u32 = 3;
    const LIBRARY: u64 = 4;

    /// A library's that is closed for writing.
    fn relocated(start: u64, end: u64) -> MemoryMapping {
        let (flags, status) = (libc::MAP_PRIVATE.cast_unsigned(), REGULAR | FILE_PRIVATE);
        MemoryMapping {
            start,
            end,
            memory: LIBRARY,
            protection: 1,
            flags,
            status,
            fd: -1,
            ..MemoryMapping::default()
        }
    }

    fn anonymous(start: u64, end: u64) -> MemoryMapping {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
        MemoryMapping {
            start,
            end,
            protection: 3,
            flags,
            status: REGULAR | PRIVATE,
            fd: -1,
            ..MemoryMapping::default()
        }
    }

    /// An image of one process, 10, whose pages are full of the bytes given.
    struct Image {
        dir: tempfile::TempDir,
        names: BTreeSet<String>,
    }

    impl Image {
        /// Stretches by their first page and what their pages are full of.
        fn new(mappings: Vec<MemoryMapping>, stretches: &[(u64, Vec<u8>)]) -> Self {
            let mut image = Self { dir: tempfile::tempdir().unwrap(), names: BTreeSet::new() };
            let entry = |(first, pages): &(u64, Vec<u8>)| {
                stretch(first * PAGE, u32::try_from(pages.len()).unwrap(), true)
            };
            let pages = Pagemap { pages_id: 5, stretches: stretches.iter().map(entry).collect() };
            image.write("pagemap-10.img", &pages.encode());
            image.write("mm-10.img", &list(mappings, PYTHON).encode());
            let library = u32::try_from(LIBRARY).unwrap();
            let opened = [(1, "/dev/null"), (PYTHON, "/usr/bin/python3.11"), (library, "/usr/lib/libc.so.6")];
            image.write("files.img", &opened_list(&opened));
            let bytes = stretches.iter().flat_map(|(_, pages)| pages).flat_map(|byte| [*byte; PAGE as usize]);
            image.write("pages-5.img", &bytes.collect::<Vec<u8>>());
            image
        }

        fn write(&mut self, name: &str, bytes: &[u8]) {
            fs::write(self.dir.path().join(name), bytes).unwrap();
            self.names.insert(name.into());
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.dir.path().join(name)).unwrap()
        }

        fn set_apart(&mut self, memory: ImageMemory) -> MappedMemory {
            seal::set_apart(self.dir.path(), &mut self.names, GROUP, memory).unwrap().mapped
        }

        fn mappings(&self) -> Vec<MemoryMapping> {
            MappingList::decode(&self.read("mm-10.img")).unwrap().all
        }

        /// What each page would be full of after a restore, by its number.
        fn memory(&self) -> BTreeMap<u64, u8> {
            let (pages, mut offset) = (self.read("pages-5.img"), 0);
            let mut memory = BTreeMap::new();
            let byte = |bytes: &[u8], at: usize| {
                let page = &bytes[at..at + PAGE as usize];
                assert!(page.iter().all(|byte| *byte == page[0]));
                page[0]
            };
            for mapping in self.mappings().iter().filter(|mapping| mapping.memory > LIBRARY) {
                assert_eq!(self.path(mapping.memory), "/.nagaya/mapped-5.img");
                let file = self.read("mapped-5.img");
                for (page, at) in
                    (mapping.start..mapping.end).step_by(4096).zip((mapping.offset..).step_by(4096))
                {
                    memory.insert(page / PAGE, byte(&file, usize::try_from(at).unwrap()));
                }
            }
            for stretch in Pagemap::decode(&self.read("pagemap-10.img")).unwrap().stretches {
                for page in 0..stretch.pages() {
                    let before = memory.insert(stretch.address / PAGE + page, byte(&pages, offset));
                    assert_eq!(before, None, "a page is in both");
                    offset += PAGE as usize;
                }
            }
            assert_eq!(offset, pages.len());
            memory
        }

        fn path(&self, id: u64) -> String {
            let list = FileList::read(self.dir.path(), &self.names).unwrap().unwrap();
            list.path(u32::try_from(id).unwrap()).unwrap().to_owned()
        }
    }

    fn expected(stretches: &[(u64, Vec<u8>)]) -> BTreeMap<u64, u8> {
        let each = |(first, pages): &(u64, Vec<u8>)| (*first..).zip(pages.clone()).collect::<Vec<_>>();
        stretches.iter().flat_map(each).collect()
    }

    #[test]
    fn long_runs_are_mapped_and_the_rest_is_filled() {
        let stretches = [(100, vec![1; 20]), (120, vec![2; 4]), (130, vec![3; 3]), (200, vec![4; 40])];
        let mappings = vec![
            anonymous(100 * PAGE, 160 * PAGE),
            anonymous(190 * PAGE, 220 * PAGE),
            anonymous(220 * PAGE, 260 * PAGE),
        ];
        let mut image = Image::new(mappings, &stretches);
        let mapped = image.set_apart(ImageMemory::Auto);
        assert_eq!(mapped.files, ["mapped-5.img"]);
        assert!(image.names.contains("mapped-5.img") && image.names.contains("pages-5.img"));
        let shown: Vec<_> = image
            .mappings()
            .iter()
            .map(|m| (m.start / PAGE, m.end / PAGE, m.status == REGULAR | FILE_PRIVATE))
            .collect();
        let rows = [
            (100, 124, true),
            (124, 160, false),
            (190, 200, false),
            (200, 220, true),
            (220, 240, true),
            (240, 260, false),
        ];
        assert_eq!(shown, rows);
        assert_eq!(mapped.ranges, [(100 * PAGE, 124 * PAGE), (200 * PAGE, 240 * PAGE)]);
        assert_eq!(image.read("pages-5.img").len() as u64, 3 * PAGE);
        assert_eq!(image.memory(), expected(&stretches));
    }

    #[test]
    fn memory_that_is_more_than_private_is_filled() {
        let plain = anonymous(100 * PAGE, 140 * PAGE);
        let or = |flag: i32| plain.flags | flag.cast_unsigned();
        let others = [
            MemoryMapping { status: REGULAR | SHARED_MEMORY, ..plain.clone() },
            MemoryMapping { status: REGULAR | FILE_PRIVATE, ..plain.clone() },
            MemoryMapping { status: REGULAR | PRIVATE | 1 << 1, ..plain.clone() },
            MemoryMapping { memory: 9, ..plain.clone() },
            MemoryMapping { flags: or(libc::MAP_GROWSDOWN), ..plain.clone() },
            MemoryMapping { flags: or(libc::MAP_HUGETLB), ..plain.clone() },
            MemoryMapping { flags: or(libc::MAP_LOCKED), ..plain.clone() },
            MemoryMapping { protection: 7, ..plain.clone() },
            // MADV_MERGEABLE, MADV_WIPEONFORK.
            MemoryMapping { advice: Some(1 << 12), ..plain.clone() },
            MemoryMapping { advice: Some(1 << 18), ..plain.clone() },
        ];
        for other in others {
            assert!(!is_plain(&other), "{other:?}");
            let mut image = Image::new(vec![other], &[(100, vec![1; 40])]);
            assert_eq!(image.set_apart(ImageMemory::Mapped), MappedMemory::default());
            assert!(!image.names.contains("mapped-5.img"));
        }
        for like in [
            plain.clone(),
            MemoryMapping { status: REGULAR | PRIVATE | HEAP, ..plain.clone() },
            MemoryMapping { flags: or(libc::MAP_NORESERVE), ..plain.clone() },
            MemoryMapping { advice: Some(1 << 14), ..plain },
        ] {
            assert!(is_plain(&like), "{like:?}");
        }
    }

    #[test]
    fn libraries_that_were_relocated_are_mapped() {
        let stretches = [(100, vec![1; 4]), (110, vec![2; 8]), (130, vec![3; 4]), (140, vec![4; 1])];
        let mappings = vec![
            relocated(100 * PAGE, 104 * PAGE),
            // A page of it was not written to: it is the library's.
            relocated(109 * PAGE, 118 * PAGE),
            MemoryMapping { protection: 3, ..relocated(130 * PAGE, 134 * PAGE) },
            relocated(140 * PAGE, 141 * PAGE),
        ];
        let mut image = Image::new(mappings, &stretches);
        let mapped = image.set_apart(ImageMemory::Auto);
        assert_eq!(mapped.files, ["mapped-5.img"]);
        assert_eq!(mapped.ranges, [], "it was a file's before");
        let shown: Vec<_> = image.mappings().iter().map(|m| (m.start / PAGE, m.memory > LIBRARY)).collect();
        assert_eq!(shown, [(100, true), (109, false), (130, false), (140, true)]);
        assert_eq!(image.memory(), expected(&stretches));
    }

    #[test]
    fn no_two_processes_run_a_program_of_the_same_number() {
        let mut image = Image::new(vec![anonymous(100 * PAGE, 140 * PAGE)], &[(100, vec![1; 40])]);
        let (pages, mappings) = (image.read("pages-5.img"), image.read("mm-10.img"));
        let list = Pagemap { pages_id: 6, stretches: vec![stretch(100 * PAGE, 40, true)] };
        image.write("pagemap-11.img", &list.encode());
        image.write("mm-11.img", &mappings);
        image.write("pages-6.img", &pages);
        assert_eq!(image.set_apart(ImageMemory::Auto).files.len(), 2);
        let program = |name: &str| MappingList::decode(&image.read(name)).unwrap().program;
        let programs = [program("mm-10.img"), program("mm-11.img")];
        assert!(programs[0] != programs[1] && !programs.contains(&PYTHON), "{programs:?}");
        for program in programs {
            assert_eq!(image.path(program.into()), "/usr/bin/python3.11");
        }
    }

    const SHARED_MEMORY: u32 = crate::image::format::mappings::SHARED;

    #[test]
    fn which_programs_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let is_known = |path: &str| {
            fs::write(dir.path().join("files.img"), opened_list(&[(1, path)])).unwrap();
            let names = BTreeSet::from(["files.img".to_owned()]);
            let list = FileList::read(dir.path(), &names).unwrap().unwrap();
            assert!(!super::is_known(&list, 2), "none of it");
            super::is_known(&list, 1)
        };
        for path in [
            "/usr/bin/python3.11",
            "/usr/bin/ruby3.1",
            "/usr/sbin/php-fpm8.2",
            "/usr/sbin/apache2",
            "/usr/sbin/httpd",
        ] {
            assert!(is_known(path), "{path}");
        }
        for path in ["/usr/bin/node", "/usr/bin/python3-other", "/usr/bin/rubyx", "/python3/app", ""] {
            assert!(!is_known(path), "{path}");
        }
    }

    #[test]
    fn copied_or_unknown_program_maps_no_memory() {
        let (mappings, pages) = (vec![anonymous(100 * PAGE, 140 * PAGE)], [(100, vec![1; 40])]);
        let mut image = Image::new(mappings.clone(), &pages);
        assert_eq!(image.set_apart(ImageMemory::Copied), MappedMemory::default());
        image.write("files.img", &opened_list(&[(PYTHON, "/usr/bin/node")]));
        let before = image.read("mm-10.img");
        assert_eq!(image.set_apart(ImageMemory::Auto), MappedMemory::default());
        assert_eq!(image.read("mm-10.img"), before);
        assert_eq!(image.set_apart(ImageMemory::Mapped).files.len(), 1);
    }

    #[test]
    fn unreadable_image_is_left_unchanged() {
        type Spoil = fn(&mut Image);
        let spoils: [(&str, Spoil); 6] = [
            ("a list of pages", |image| image.write("pagemap-10.img", b"something")),
            ("a list of mappings", |image| image.write("mm-10.img", b"something")),
            ("a list of files", |image| image.write("files.img", b"something")),
            ("more pages than are listed", |image| image.write("pages-5.img", &[0; 41 * 4096])),
            ("mappings out of order", |image| {
                let all = vec![anonymous(200 * PAGE, 300 * PAGE), anonymous(100 * PAGE, 140 * PAGE)];
                image.write("mm-10.img", &list(all, PYTHON).encode());
            }),
            ("no number for a file is left", |image| {
                image.write("files.img", &opened_list(&[(PYTHON, "/usr/bin/python3"), (u32::MAX, "/x")]));
            }),
        ];
        for (what, spoil) in spoils {
            let mut image = Image::new(vec![anonymous(100 * PAGE, 140 * PAGE)], &[(100, vec![1; 40])]);
            spoil(&mut image);
            let before: Vec<_> = image.names.iter().map(|name| image.read(name)).collect();
            assert_eq!(image.set_apart(ImageMemory::Mapped), MappedMemory::default(), "{what}");
            let after: Vec<_> = image.names.iter().map(|name| image.read(name)).collect();
            assert!(before == after, "{what}");
        }
    }

    #[test]
    fn ranges_are_joined_where_they_are_nearest() {
        let parts = vec![(50, 60), (10, 20), (20, 25), (30, 35), (100, 101)];
        assert_eq!(ranges(parts.clone(), 8), [(10, 25), (30, 35), (50, 60), (100, 101)]);
        assert_eq!(ranges(parts.clone(), 3), [(10, 35), (50, 60), (100, 101)]);
        assert_eq!(ranges(parts, 1), [(10, 101)]);
        assert_eq!(ranges(Vec::new(), 1), []);
    }

    proptest! {
        /// Mappings and stretches at random, not aligned with each other: no page is lost, moved or
        /// there twice.
        #[test]
        fn all_memory_is_what_it_was(
            gaps in vec((0..3_u64, 1..60_u64, 0..3_u8), 1..8),
            pages in vec((0..4_u64, vec(any::<u8>(), 1..50)), 0..8),
        ) {
            let (mut mappings, mut at) = (Vec::new(), 100);
            for (gap, len, kind) in gaps {
                let (start, end) = ((at + gap) * PAGE, (at + gap + len) * PAGE);
                mappings.push(match kind {
                    0 => anonymous(start, end),
                    1 => MemoryMapping { protection: 7, ..anonymous(start, end) },
                    _ => relocated(start, end),
                });
                at += gap + len;
            }
            let (mut stretches, mut from) = (Vec::new(), 100);
            for (gap, bytes) in pages {
                let first = from + gap;
                from = first + bytes.len() as u64;
                stretches.push((first, bytes));
            }
            let mut image = Image::new(mappings.clone(), &stretches);
            let mapped = image.set_apart(ImageMemory::Auto);
            prop_assert_eq!(image.memory(), expected(&stretches));
            // The same memory is mapped, with the same rights.
            let pages = |all: &[MemoryMapping]| -> BTreeMap<u64, u32> {
                all.iter().flat_map(|m| (m.start / PAGE..m.end / PAGE).map(|page| (page, m.protection))).collect()
            };
            prop_assert_eq!(pages(&image.mappings()), pages(&mappings));
            // All that a file shows, and was no file's, is in the ranges.
            let was_anonymous = |shown: &&MemoryMapping| {
                shown.memory > LIBRARY
                    && mappings.iter().any(|m| m.start <= shown.start && shown.end <= m.end && m.memory == 0)
            };
            for shown in image.mappings().iter().filter(was_anonymous) {
                prop_assert!(mapped.ranges.iter().any(|(start, end)| *start <= shown.start && shown.end <= *end));
            }
            prop_assert!(mapped.is_sound(|name| image.names.contains(name)));
        }
    }
}

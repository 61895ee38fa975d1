//! Private memory that a wake maps from a file of the image, and does not fill.
//!
//! To fill memory is most of what CRIU does in a wake: each page is a fault and a copy, and a first request needs a part of
//! them. So a process' file of pages becomes one that is mapped, what is still filled is copied to a new one, and the lists of
//! mappings say that long runs of pages are private mappings of the first: the kernel shows their pages as they are touched, and copies those that are written to. It is as good as
//! memory of its own but for what gives pages back to the kernel (`madvise`) or makes a mapping longer (`mremap`): there
//! anonymous memory has zeros, and a file its contents. In the ranges this makes those calls fail, with errors they are
//! documented to have, or do nothing (`sandbox/shown`).
//!
//! Memory that is the same in a parent and its child CRIU fills once, moves three times and compares page by page. Of programs that differ it
//! does not, and what is mapped is no work to have twice: so each process whose memory is set apart gets a number of its own for the
//! program it runs.
//!
//! CRIU writes its files with the rights of a sandbox, so they are as hostile as what runs there. A process whose lists are
//! not understood to their last byte is left as it is. Not here: the form of those lists (`mappings`, `pagemap`), which
//! descriptors CRIU is given (`checkpoint`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::Path;

use nagaya_cmdb::record::ImageMemory;
use nix::libc;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::file_list::FileList;
use super::files;
use super::mappings::{self, FILE_PRIVATE, HEAP, Mapping, Mappings, PRIVATE, REGULAR};
use super::pagemap::{self, Pagemap, Stretch};

/// Processes of one image whose memory is mapped, those with most of it: each file is a descriptor that CRIU is handed.
pub const FILES_MAX: usize = 32;

/// Ranges in which calls fail: the filter that sees to it has about 2,000 of the kernel's 4,096 instructions then.
pub const RANGES_MAX: usize = 64;

/// Pages in a row that are mapped. A mapping of its own costs as much as filling some of them.
const RUN_PAGES_MIN: u64 = 16;

/// Runs of one process, of the 65,530 mappings that the kernel lets it have.
const RUNS_MAX: usize = 2048;

/// Programs whose memory is mapped if nothing else is said: what they do with `madvise` and `mremap` is known, and they are
/// tested with it. Numbers of a version may follow.
const PROGRAMS: [&str; 5] = ["apache2", "httpd", "php-fpm", "python", "ruby"];

/// `MADV_*` that hold for mappings of files as for others: how it is read, and that it is in no child, huge, or in no dump.
const ADVICE: u64 = 0b111 | 1 << 10 | 1 << 14 | 1 << 15 | 1 << 16;

/// What of an image's memory is mapped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapped {
    /// Files of the image that processes map.
    pub files: Vec<String>,
    /// Where, from the first byte to the one behind the last, in order.
    pub ranges: Vec<(u64, u64)>,
}

impl Mapped {
    /// Whether it can be of an image with files of these names.
    pub fn is_sound(&self, is_file: impl Fn(&str) -> bool) -> bool {
        let in_order = self.ranges.windows(2).all(|pair| pair[0].1 < pair[1].0);
        self.files.len() <= FILES_MAX
            && self.ranges.len() <= RANGES_MAX
            && in_order
            && self.ranges.iter().all(|(start, end)| start < end)
            && self.files.iter().all(|name| is_file(name))
    }
}

/// Pages in a row, in memory and in a file of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
    /// Where in the file, bytes.
    offset: u64,
    /// It was no file's before: what is given back is zeros.
    is_anonymous: bool,
}

impl Run {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// A process with memory that can be mapped.
struct Process {
    /// As it stands in the names of its lists.
    pid: String,
    pages: Pagemap,
    mappings: Mappings,
    runs: Vec<Run>,
}

/// Moves memory to files that are mapped, and adds their names. `group` can read them.
pub fn set_apart(
    dir: &Path,
    names: &mut BTreeSet<String>,
    list: &mut FileList,
    group: u32,
    memory: ImageMemory,
) -> io::Result<Mapped> {
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
    processes.sort_by_key(|process| std::cmp::Reverse(process.runs.iter().map(Run::len).sum::<u64>()));
    processes.truncate(FILES_MAX);
    let (mut mapped, mut runs) = (Mapped::default(), Vec::new());
    for process in processes {
        let file = process.file();
        let Some(id) = list.add(&file, OFlags::RDONLY) else { break };
        // What is the same in its parent is no reason to move memory about (see above).
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

/// The inner error is in words: why its memory stays as it is.
fn process(dir: &Path, pid: &str) -> io::Result<Result<Process, &'static str>> {
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
    let (pages, mappings) = match (Pagemap::decode(&contents[0]), Mappings::decode(&contents[1])) {
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
    Ok(Ok(Process { pid: pid.into(), pages, mappings, runs }))
}

pub fn pages_name(id: u32) -> String {
    format!("pages-{id}.img")
}

/// The longest runs of pages in memory that can be mapped, in order. Both lists are in order.
fn runs(stretches: &[Stretch], mappings: &[Mapping], page_len: u64) -> Vec<Run> {
    let mut whole: Vec<Run> = Vec::new();
    let mut offset = 0;
    for stretch in stretches {
        let (start, len) = (stretch.address, stretch.pages() * page_len);
        match whole.last_mut() {
            Some(last) if last.end == start => last.end += len,
            _ => whole.push(Run { start, end: start + len, offset, is_anonymous: true }),
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
            let part = Run { start, end, offset, is_anonymous };
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

/// Private memory of no file, that is not run, does not grow by itself, and has no property that only such memory can have.
fn is_plain(mapping: &Mapping) -> bool {
    const ANONYMOUS: u32 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
    mapping.status & !HEAP == REGULAR | PRIVATE
        && mapping.memory == 0
        && mapping.flags & !libc::MAP_NORESERVE.cast_unsigned() == ANONYMOUS
        && mapping.protection & libc::PROT_EXEC.cast_unsigned() == 0
        && mapping.advice.unwrap_or_default() & !ADVICE == 0
}

/// Private memory of a file that can only be read: if all of its pages were written to all the same, a dynamic loader has put
/// addresses into a library and closed it (`PT_GNU_RELRO`, elf(5)). It belonged to a file before, nobody gives it back, and it does not grow.
fn is_relocated(mapping: &Mapping) -> bool {
    mapping.status == REGULAR | FILE_PRIVATE
        && mapping.flags == libc::MAP_PRIVATE.cast_unsigned()
        && mapping.protection == libc::PROT_READ.cast_unsigned()
        && mapping.advice.unwrap_or_default() & !ADVICE == 0
}

impl Process {
    /// The file that is mapped.
    fn file(&self) -> String {
        format!("mapped-{}.img", self.pages.pages_id)
    }

    /// Writes its lists anew, for a file that is mapped and a program with these numbers.
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

/// Copies pages outside of runs, and tells which they are.
fn copy_filled(
    stretches: &[Stretch],
    runs: &[Run],
    mut from: &File,
    mut to: &File,
) -> io::Result<Vec<Stretch>> {
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

/// The same memory, with runs as mappings of the file of this number.
fn split(mappings: &[Mapping], runs: &[Run], id: u32) -> Vec<Mapping> {
    let mut parts = Vec::with_capacity(mappings.len() + 2 * runs.len());
    let mut runs = runs.iter().peekable();
    for mapping in mappings {
        let mut gap = mapping.start;
        while let Some(run) = runs.next_if(|run| run.start < mapping.end) {
            if run.start > gap {
                parts.push(Mapping { start: gap, end: run.start, ..mapping.clone() });
            }
            parts.push(Mapping {
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
            parts.push(Mapping { start: gap, ..mapping.clone() });
        }
    }
    parts
}

/// At most so many ranges that all of these are in: the smallest gaps are closed.
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
    // Those at least as large as this one stay open.
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

    use super::super::file_list::tests::opened_list;
    use super::super::mappings::tests::list;
    use super::super::pagemap::tests::stretch;
    use super::*;

    const PAGE: u64 = 4096;
    const GROUP: u32 = 0;
    const PYTHON: u32 = 3;
    const LIBRARY: u64 = 4;

    /// A library's that is closed for writing.
    fn relocated(start: u64, end: u64) -> Mapping {
        let (flags, status) = (libc::MAP_PRIVATE.cast_unsigned(), REGULAR | FILE_PRIVATE);
        Mapping { start, end, memory: LIBRARY, protection: 1, flags, status, fd: -1, ..Mapping::default() }
    }

    fn anonymous(start: u64, end: u64) -> Mapping {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
        Mapping { start, end, protection: 3, flags, status: REGULAR | PRIVATE, fd: -1, ..Mapping::default() }
    }

    /// An image of one process, 10, whose pages are full of the bytes given.
    struct Image {
        dir: tempfile::TempDir,
        names: BTreeSet<String>,
    }

    impl Image {
        /// Stretches by their first page and what their pages are full of.
        fn new(mappings: Vec<Mapping>, stretches: &[(u64, Vec<u8>)]) -> Self {
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

        fn set_apart(&mut self, memory: ImageMemory) -> Mapped {
            files::set_apart(self.dir.path(), &mut self.names, GROUP, memory).unwrap().mapped
        }

        fn mappings(&self) -> Vec<Mapping> {
            Mappings::decode(&self.read("mm-10.img")).unwrap().all
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
            Mapping { status: REGULAR | SHARED_MEMORY, ..plain.clone() },
            Mapping { status: REGULAR | FILE_PRIVATE, ..plain.clone() },
            Mapping { status: REGULAR | PRIVATE | 1 << 1, ..plain.clone() },
            Mapping { memory: 9, ..plain.clone() },
            Mapping { flags: or(libc::MAP_GROWSDOWN), ..plain.clone() },
            Mapping { flags: or(libc::MAP_HUGETLB), ..plain.clone() },
            Mapping { flags: or(libc::MAP_LOCKED), ..plain.clone() },
            Mapping { protection: 7, ..plain.clone() },
            // MADV_MERGEABLE, MADV_WIPEONFORK.
            Mapping { advice: Some(1 << 12), ..plain.clone() },
            Mapping { advice: Some(1 << 18), ..plain.clone() },
        ];
        for other in others {
            assert!(!is_plain(&other), "{other:?}");
            let mut image = Image::new(vec![other], &[(100, vec![1; 40])]);
            assert_eq!(image.set_apart(ImageMemory::Mapped), Mapped::default());
            assert!(!image.names.contains("mapped-5.img"));
        }
        for like in [
            plain.clone(),
            Mapping { status: REGULAR | PRIVATE | HEAP, ..plain.clone() },
            Mapping { flags: or(libc::MAP_NORESERVE), ..plain.clone() },
            Mapping { advice: Some(1 << 14), ..plain },
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
            Mapping { protection: 3, ..relocated(130 * PAGE, 134 * PAGE) },
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
        let program = |name: &str| Mappings::decode(&image.read(name)).unwrap().program;
        let programs = [program("mm-10.img"), program("mm-11.img")];
        assert!(programs[0] != programs[1] && !programs.contains(&PYTHON), "{programs:?}");
        for program in programs {
            assert_eq!(image.path(program.into()), "/usr/bin/python3.11");
        }
    }

    const SHARED_MEMORY: u32 = super::super::mappings::SHARED;

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
    fn who_says_copied_or_is_not_known_maps_nothing() {
        let (mappings, pages) = (vec![anonymous(100 * PAGE, 140 * PAGE)], [(100, vec![1; 40])]);
        let mut image = Image::new(mappings.clone(), &pages);
        assert_eq!(image.set_apart(ImageMemory::Copied), Mapped::default());
        image.write("files.img", &opened_list(&[(PYTHON, "/usr/bin/node")]));
        let before = image.read("mm-10.img");
        assert_eq!(image.set_apart(ImageMemory::Auto), Mapped::default());
        assert_eq!(image.read("mm-10.img"), before);
        assert_eq!(image.set_apart(ImageMemory::Mapped).files.len(), 1);
    }

    #[test]
    fn what_is_not_understood_is_left_as_it_is() {
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
            assert_eq!(image.set_apart(ImageMemory::Mapped), Mapped::default(), "{what}");
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
        /// Mappings and stretches at random, not aligned with each other: no page is lost, moved or there twice.
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
                    1 => Mapping { protection: 7, ..anonymous(start, end) },
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
            let pages = |all: &[Mapping]| -> BTreeMap<u64, u32> {
                all.iter().flat_map(|m| (m.start / PAGE..m.end / PAGE).map(|page| (page, m.protection))).collect()
            };
            prop_assert_eq!(pages(&image.mappings()), pages(&mappings));
            // All that a file shows, and was no file's, is in the ranges.
            let was_anonymous = |shown: &&Mapping| {
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

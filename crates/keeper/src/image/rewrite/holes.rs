//! Removes zero pages of shared memory from an image.
//!
//! With the rights of a sandbox CRIU cannot tell which pages of shared memory were ever touched, so
//! it writes all of them, and fills all of them at each restore. Shared memory is restored as a
//! file of its own that is empty at first; what the list of pages does not name stays a hole in it
//! and reads as zeros, as it did before. So stretches of zero pages are taken out of the list and
//! of its file of pages.
//!
//! Private memory stays as it is: a page that is missing there may mean the page of a mapped file,
//! and CRIU asks the kernel which of them were touched. Not here: the form of lists (`pagemap`),
//! who may write these files (`files`).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::OFlags;

use crate::image::error::{ImageError, at};
use crate::image::files;
use crate::image::format::pagemap::{self, Pagemap, PagemapEntry};

/// Minimum number of zero pages in a row that are removed. Fewer are not worth a read of their own
/// at each restore.
const HOLE_PAGES_MIN: u64 = 8;

/// Maximum number of entries of a list that is written. At this number, the rest of the list stays
/// as it is.
const STRETCHES_MAX: usize = 1 << 16;

/// Number of pages read at once.
const CHUNK_PAGES: u64 = 64;

/// Number of bytes written at once, or a page more.
const BUFFER_LEN: usize = 256 * 1024;

/// Maximum size of a page.
const PAGE_LEN_MAX: usize = 64 * 1024;

static ZEROS: [u8; PAGE_LEN_MAX] = [0; PAGE_LEN_MAX];

/// Removes zero pages from all shared memory in an image of these files. A list that is not
/// understood stays as it is.
pub fn leave_out<'a>(dir: &Path, names: impl Iterator<Item = &'a String>) -> Result<(), ImageError> {
    let mut lists = HashMap::new();
    for name in names.filter(|name| name.starts_with("pagemap-")) {
        match pages_id(dir, name).map_err(at("read", dir.join(name)))? {
            Ok(id) => lists.entry(id).or_insert_with(Vec::new).push(name),
            Err(why) => {
                tracing::debug!("zero pages stay in an image: {name} {why}");
                return Ok(());
            }
        }
    }
    for names in lists.into_values() {
        // CRIU makes no file of pages that two lists name.
        let [name] = names[..] else { continue };
        if !name.starts_with("pagemap-shmem-") {
            continue;
        }
        match leave_out_of(dir, name).map_err(at("leave zero pages out of", dir.join(name)))? {
            Ok(pages) => tracing::debug!("{pages} zero pages are left out of {name}"),
            Err(why) => tracing::debug!("zero pages stay in an image: {name} {why}"),
        }
    }
    Ok(())
}

fn start(file: &File, len_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(len_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the number of the file of pages that a list names. The inner error follows its name.
pub fn pages_id(dir: &Path, name: &str) -> io::Result<Result<u32, &'static str>> {
    let bytes = start(&files::open(dir, name, OFlags::RDONLY)?, pagemap::HEAD_LEN as u64)?;
    Ok(Pagemap::pages_id(&bytes))
}

/// Returns how many pages were removed. The inner error says why nothing was done.
fn leave_out_of(dir: &Path, name: &str) -> io::Result<Result<u64, &'static str>> {
    let file = files::open(dir, name, OFlags::RDWR)?;
    let bytes = start(&file, pagemap::LEN_MAX + 1)?;
    if bytes.len() as u64 > pagemap::LEN_MAX {
        return Ok(Err("is too long"));
    }
    let mut list = match Pagemap::decode(&bytes) {
        Ok(list) => list,
        Err(why) => return Ok(Err(why)),
    };
    let page_len = rustix::param::page_size();
    let pages = match files::open(dir, &format!("pages-{}.img", list.pages_id), OFlags::RDWR) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err("has no file of pages")),
        pages => pages?,
    };
    let len = list.pages(page_len as u64).and_then(|count| count.checked_mul(page_len as u64));
    if page_len > PAGE_LEN_MAX || len != Some(pages.metadata()?.len()) {
        return Ok(Err("does not fit its file of pages"));
    }
    let (stretches, left_out) = pack(&list.stretches, &pages, page_len)?;
    if left_out > 0 {
        list.stretches = stretches;
        let bytes = list.encode();
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)?;
    }
    Ok(Ok(left_out))
}

/// Moves the remaining pages to the file's beginning, and truncates it. Returns the file's new
/// entries, and how many pages are missing.
fn pack(stretches: &[PagemapEntry], file: &File, page_len: usize) -> io::Result<(Vec<PagemapEntry>, u64)> {
    let mut packer =
        HolePacker { file, page_len, kept: Vec::new(), left_out: 0, read: 0, written: 0, buffer: Vec::new() };
    for stretch in stretches {
        packer.stretch(stretch)?;
    }
    packer.flush()?;
    if packer.left_out > 0 {
        file.set_len(packer.written)?;
    }
    Ok((packer.kept, packer.left_out))
}

struct HolePacker<'a> {
    file: &'a File,
    page_len: usize,
    kept: Vec<PagemapEntry>,
    /// Number of pages.
    left_out: u64,
    /// Position in the file of the next page to read.
    read: u64,
    /// Position up to which the file is final. Never beyond `read`, with the buffer.
    written: u64,
    buffer: Vec<u8>,
}

impl HolePacker<'_> {
    fn stretch(&mut self, stretch: &PagemapEntry) -> io::Result<()> {
        // Pages of this entry: seen, the first not yet in a finished part, and zeros at the end.
        let (mut seen, mut first, mut zeros) = (0, 0, 0);
        let mut chunk = Vec::new();
        while seen < stretch.pages() {
            let count = CHUNK_PAGES.min(stretch.pages() - seen);
            chunk.resize(usize::try_from(count).map_err(io::Error::other)? * self.page_len, 0);
            self.file.read_exact_at(&mut chunk, self.read)?;
            self.read += chunk.len() as u64;
            for page in chunk.chunks_exact(self.page_len) {
                if *page == ZEROS[..self.page_len] {
                    zeros += 1;
                } else {
                    if self.leave_out(zeros)? {
                        self.end_part(stretch, first, seen - zeros);
                        first = seen;
                    }
                    zeros = 0;
                    self.keep(page)?;
                }
                seen += 1;
            }
        }
        let end = if self.leave_out(zeros)? { seen - zeros } else { seen };
        self.end_part(stretch, first, end);
        Ok(())
    }

    /// Removes a run of zero pages if it is long enough, and returns whether it did.
    fn leave_out(&mut self, zeros: u64) -> io::Result<bool> {
        if zeros >= HOLE_PAGES_MIN && self.kept.len() < STRETCHES_MAX {
            self.left_out += zeros;
            return Ok(true);
        }
        for _ in 0..zeros {
            self.keep(&ZEROS[..self.page_len])?;
        }
        Ok(false)
    }

    fn end_part(&mut self, stretch: &PagemapEntry, first: u64, end: u64) {
        if end > first {
            self.kept.push(stretch.part(first, end - first, self.page_len as u64));
        }
    }

    fn keep(&mut self, page: &[u8]) -> io::Result<()> {
        if self.left_out == 0 {
            // It stays where it is.
            self.written += page.len() as u64;
            return Ok(());
        }
        self.buffer.extend_from_slice(page);
        if self.buffer.len() < BUFFER_LEN { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.written)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::image::format::pagemap::tests::stretch;

    const LIST: &str = "pagemap-shmem-7.img";
    const PAGES: &str = "pages-3.img";

    fn page_len() -> usize {
        rustix::param::page_size()
    }

    /// Memory by the numbers of its pages, and a byte that each is full of.
    type Memory = BTreeMap<u64, u8>;

    /// An image with a list of stretches, given by the page each begins with and what its pages are
    /// full of.
    struct Image(tempfile::TempDir);

    impl Image {
        fn new(stretches: &[(u64, &[u8])], is_new: bool) -> Self {
            let image = Self(tempfile::tempdir().unwrap());
            let entry = |(first, pages): &(u64, &[u8])| {
                stretch(first * page_len() as u64, u32::try_from(pages.len()).unwrap(), is_new)
            };
            image.set_list(&Pagemap { pages_id: 3, stretches: stretches.iter().map(entry).collect() });
            let pages = stretches.iter().flat_map(|(_, pages)| pages.iter());
            image.write(PAGES, &pages.flat_map(|byte| vec![*byte; page_len()]).collect::<Vec<u8>>());
            image
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.0.path().join(name)
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.path(name)).unwrap()
        }

        fn write(&self, name: &str, bytes: &[u8]) {
            fs::write(self.path(name), bytes).unwrap();
        }

        fn list(&self) -> Pagemap {
            Pagemap::decode(&self.read(LIST)).unwrap()
        }

        fn set_list(&self, list: &Pagemap) {
            self.write(LIST, &list.encode());
        }

        fn leave_out(&self) -> Result<(), ImageError> {
            let names = fs::read_dir(self.0.path()).unwrap();
            let names: Vec<String> =
                names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            leave_out(self.0.path(), names.iter())
        }

        /// As a restore makes it: what is not named is zero, and not in this.
        fn memory(&self) -> Memory {
            let (list, pages) = (self.list(), self.read(PAGES));
            assert_eq!(list.pages(page_len() as u64).unwrap() * page_len() as u64, pages.len() as u64);
            let numbers = list.stretches.iter().flat_map(|stretch| {
                let first = stretch.address / page_len() as u64;
                first..first + stretch.pages()
            });
            let one = |(number, page): (u64, &[u8])| {
                assert!(page.iter().all(|byte| *byte == page[0]), "page {number}");
                (number, page[0])
            };
            numbers.zip(pages.chunks(page_len())).map(one).filter(|(_, byte)| *byte != 0).collect()
        }
    }

    #[test]
    fn pages_that_stay_are_packed() {
        /// The page a part begins with, and how many it has.
        type Parts<'a> = &'a [(u64, u64)];
        let cases: [(&[u8], Parts<'_>); 7] = [
            (&[1, 2, 3], &[(5, 3)]),
            (&[0; 8], &[]),
            (&[0; 7], &[(5, 7)]),
            (&[1, 0, 0, 0, 0, 0, 0, 0, 2], &[(5, 9)]),
            (&[1, 0, 0, 0, 0, 0, 0, 0, 0, 2], &[(5, 1), (14, 1)]),
            (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 3], &[(14, 4)]),
            (&[1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[(5, 2)]),
        ];
        for (pages, parts) in cases {
            for is_new in [true, false] {
                let image = Image::new(&[(5, pages)], is_new);
                let memory = image.memory();
                image.leave_out().unwrap();
                let list = image.list();
                let found: Vec<(u64, u64)> =
                    list.stretches.iter().map(|one| (one.address / page_len() as u64, one.pages())).collect();
                assert_eq!(found, parts, "{pages:?}");
                assert_eq!(image.memory(), memory, "{pages:?}");
            }
        }
    }

    #[test]
    fn image_that_is_not_understood_stays_unchanged() {
        let pages: &[u8] = &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
        let page = page_len();
        let with = |change: &dyn Fn(&Image)| {
            let image = Image::new(&[(0, pages)], true);
            change(&image);
            image
        };
        let list = Image::new(&[(0, pages)], true).read(LIST);
        let again = Pagemap { pages_id: 3, stretches: Vec::new() }.encode();
        let over = vec![stretch(0, 6, true), stretch(5 * page as u64, 6, true)];
        let strange = [
            with(&|image| image.write(PAGES, &vec![0; 11 * page])),
            with(&|image| image.write(PAGES, &vec![0; 12 * page + 1])),
            with(&|image| fs::remove_file(image.path(PAGES)).unwrap()),
            with(&|image| image.write(LIST, &[&list[..], &[1]].concat())),
            with(&|image| image.write(LIST, &[&list[..], &vec![0; 1 << 20]].concat())),
            with(&|image| image.write(LIST, &[])),
            with(&|image| image.set_list(&Pagemap { pages_id: 3, stretches: over.clone() })),
            // Whose pages are they?
            with(&|image| image.write("pagemap-10.img", &again)),
            with(&|image| image.write("pagemap-shmem-8.img", &again)),
            with(&|image| image.write("pagemap-10.img", b"of another CRIU")),
            // Of private memory.
            with(&|image| fs::rename(image.path(LIST), image.path("pagemap-10.img")).unwrap()),
        ];
        for (case, image) in strange.iter().enumerate() {
            let before = [LIST, PAGES, "pagemap-10.img"].map(|name| fs::read(image.path(name)).ok());
            image.leave_out().unwrap();
            let after = [LIST, PAGES, "pagemap-10.img"].map(|name| fs::read(image.path(name)).ok());
            assert!(before == after, "case {case}");
        }
        // And with nothing wrong with it:
        let image = Image::new(&[(0, pages)], true);
        image.leave_out().unwrap();
        assert_eq!(image.read(PAGES).len(), 2 * page);
    }

    #[test]
    fn a_link_in_place_of_its_pages_is_not_followed() {
        let image = Image::new(&[(0, &[0; 20])], true);
        fs::rename(image.path(PAGES), image.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", image.path(PAGES)).unwrap();
        image.leave_out().unwrap_err();
        assert_eq!(image.read("elsewhere").len(), 20 * page_len());
    }

    /// The page that a stretch begins with, and what its pages are full of.
    type Place = (u64, Vec<u8>);

    /// Memory in a few stretches, with many zero pages in a row, more than are read and written at
    /// once.
    fn stretches() -> impl Strategy<Value = Vec<Place>> {
        let run = (prop_oneof![Just(0), 0..=3_u8], prop_oneof![1..20_usize, 60..80_usize]);
        let pages = vec(run, 1..6);
        let pages = pages.prop_map(|runs| runs.into_iter().flat_map(|(byte, len)| vec![byte; len]).collect());
        vec((0..5_u64, pages), 0..5).prop_map(|all: Vec<Place>| {
            let mut end = 0;
            let place = |(gap, pages): Place| {
                let first = end + gap;
                end = first + pages.len() as u64;
                (first, pages)
            };
            all.into_iter().map(place).collect()
        })
    }

    fn image_of(stretches: &[Place], is_new: bool) -> Image {
        let stretches: Vec<(u64, &[u8])> =
            stretches.iter().map(|(first, pages)| (*first, pages.as_slice())).collect();
        Image::new(&stretches, is_new)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn memory_is_the_same_without(stretches in stretches(), is_new: bool) {
            let image = image_of(&stretches, is_new);
            let memory = image.memory();
            image.leave_out().unwrap();
            prop_assert_eq!(image.memory(), memory);
            let left = image.read(PAGES);
            let zero = vec![0; HOLE_PAGES_MIN as usize * page_len()];
            let mut at = 0;
            for stretch in image.list().stretches {
                let end = at + usize::try_from(stretch.pages()).unwrap() * page_len();
                let pages: Vec<u8> = left[at..end].iter().copied().step_by(page_len()).collect();
                let rows = pages.windows(HOLE_PAGES_MIN as usize).filter(|row| zero.starts_with(row));
                prop_assert_eq!(rows.count(), 0, "{:?}", pages);
                at = end;
            }
            // There is nothing more to leave out.
            let once = (image.read(LIST), left);
            image.leave_out().unwrap();
            prop_assert!(once == (image.read(LIST), image.read(PAGES)));
        }

        #[test]
        fn a_list_of_anything_is_survived(
            stretches in stretches(),
            changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let image = image_of(&stretches, true);
            let mut list = image.read(LIST);
            for (index, byte) in changes {
                let index = index.index(list.len());
                list[index] = byte;
            }
            image.write(LIST, &list);
            let before = image.read(PAGES);
            let understood = Pagemap::decode(&list).is_ok_and(|list| {
                list.pages_id == 3
                    && list.pages(page_len() as u64).and_then(|pages| pages.checked_mul(page_len() as u64))
                        == Some(before.len() as u64)
            });
            let memory = understood.then(|| image.memory());
            image.leave_out().unwrap();
            match memory {
                Some(memory) => prop_assert_eq!(image.memory(), memory),
                None => prop_assert!((list, before) == (image.read(LIST), image.read(PAGES))),
            }
        }
    }
}

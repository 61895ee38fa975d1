//! Change counts of the path to each document root. The keeper writes them and the edge reads them,
//! without a verb.
//!
//! They are in an unnamed file in memory. The edge gets it for reading only, with the reply to
//! `Hello`. A site's count is in a slot by a digest of its name. Sites that share a slot are
//! reopened together, which costs only a look-up. Not here: noticing a change (`root_watch`),
//! keeping a root open (`nagaya_edge`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nagaya_records::SiteName;
use parking_lot::Mutex;
use ring::digest::{SHA256, digest};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use serde::{Deserialize, Serialize};

use crate::sys::MappedCounts;

/// Number of counts: as many as an edge thread holds roots open.
const PLACES: usize = 4096;

const COUNT_LEN: usize = size_of::<u32>();

/// A site's count at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootMark {
    place: u16,
    count: u32,
}

/// The keeper's end.
#[derive(Debug)]
pub struct RootChanges {
    file: File,
    counts: Mutex<Box<[u32; PLACES]>>,
}

impl RootChanges {
    pub fn new() -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create(
            "nagaya-root-changes",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?);
        // Only its owner can open it again, and so write it.
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        file.set_len((PLACES * COUNT_LEN) as u64)?;
        // A process that has mapped it never finds less.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Ok(Self { file, counts: Mutex::new(Box::new([0; PLACES])) })
    }

    /// Returns how often this site's root has changed until now.
    pub fn mark(&self, site: &SiteName) -> RootMark {
        let place = place_of(site);
        RootMark { place, count: self.counts.lock()[usize::from(place)] }
    }

    /// Counts a change of this site's root, which its readers notice.
    pub fn add(&self, site: &SiteName) -> io::Result<()> {
        let place = usize::from(place_of(site));
        let mut counts = self.counts.lock();
        counts[place] = counts[place].wrapping_add(1);
        self.file.write_all_at(&counts[place].to_ne_bytes(), (place * COUNT_LEN) as u64)
    }

    /// As `add`, for all sites.
    pub fn add_to_all(&self) -> io::Result<()> {
        let mut counts = self.counts.lock();
        counts.iter_mut().for_each(|count| *count = count.wrapping_add(1));
        let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_ne_bytes()).collect();
        self.file.write_all_at(&bytes, 0)
    }

    /// Returns another descriptor of it, for reading.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// The edge's end.
#[derive(Debug)]
pub struct RootChangesReader(MappedCounts);

impl RootChangesReader {
    /// Fails for a file of another form.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        MappedCounts::new(&descriptor, PLACES).map(Self)
    }

    fn is_at(&self, mark: RootMark) -> bool {
        self.0.get(usize::from(mark.place)) == Some(mark.count)
    }
}

/// Shows whether a root that is held open still is the site's. A restarted keeper counts in another
/// file: then this says yes, and the root's age alone counts.
#[derive(Debug, Clone)]
pub struct RootStamp {
    reader: Arc<RootChangesReader>,
    mark: RootMark,
}

impl RootStamp {
    pub fn new(reader: Arc<RootChangesReader>, mark: RootMark) -> Self {
        Self { reader, mark }
    }

    /// Whether no change since it was opened is known. Reads memory.
    pub fn is_current(&self) -> bool {
        self.reader.is_at(self.mark)
    }
}

fn place_of(site: &SiteName) -> u16 {
    let digest = digest(&SHA256, site.as_str().as_bytes());
    let [first, second, ..] = digest.as_ref() else { unreachable!("a digest has 32 bytes") };
    u16::from_le_bytes([*first, *second]) % PLACES as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(name: &str) -> SiteName {
        SiteName::new(name).unwrap()
    }

    #[test]
    fn change_ends_only_its_sites_stamps_and_readers_cannot_write() {
        let changes = RootChanges::new().unwrap();
        let descriptor = changes.reader().unwrap();
        assert!(rustix::io::write(&descriptor, b"x").is_err());
        let reader = Arc::new(RootChangesReader::new(descriptor).unwrap());
        let stamp = |name| RootStamp::new(Arc::clone(&reader), changes.mark(&site(name)));
        let (one, other) = (stamp("one"), stamp("other"));
        changes.add(&site("one")).unwrap();
        assert_eq!((one.is_current(), other.is_current()), (false, true));
        let one = stamp("one");
        assert!(one.is_current());
        changes.add_to_all().unwrap();
        assert_eq!((one.is_current(), other.is_current()), (false, false));
        assert!(stamp("one").is_current());
    }

    #[test]
    fn file_of_another_kind_is_not_read_as_root_changes() {
        RootChangesReader::new(File::open("/dev/null").unwrap().into()).unwrap_err();
        let short = rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        RootChangesReader::new(short).unwrap_err();
    }
}

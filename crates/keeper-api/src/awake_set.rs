//! The set of sites whose instances are awake. The keeper writes it and the edge reads it, without
//! a request.
//!
//! It is in a file in memory that has no name. The edge gets it for reading only, with the keeper's
//! greeting. A site is in it by a digest of its name, in one of the few places of its bucket, so
//! that one short read tells. Not here: when an instance counts as awake (`instances::lifecycle`),
//! who asks (rules, through `client`).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nagaya_records::SiteName;
use ring::digest::{SHA256, digest};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags};

/// Length of a digest that is kept, bytes: nobody finds two names with the same.
const KEY_LEN: usize = 16;

/// Slots of a bucket. With 4096 instances awake the mean is one in each, and more than 16 in one
/// are not expected.
const PLACES: usize = 16;
const BUCKETS: usize = 4096;

const BUCKET_LEN: usize = KEY_LEN * PLACES;

/// A free slot. No name has this digest.
const FREE: Key = [0; KEY_LEN];

type Key = [u8; KEY_LEN];

/// The keeper's end.
#[derive(Debug)]
pub struct AwakeSet {
    file: File,
    /// Position of each site in it.
    places: HashMap<SiteName, u64>,
}

impl AwakeSet {
    pub fn new() -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("nagaya-awake-set", MemfdFlags::CLOEXEC)?);
        // Only its owner can open it again, and so write it.
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        // Pages that are never written take no memory.
        file.set_len((BUCKETS * BUCKET_LEN) as u64)?;
        Ok(Self { file, places: HashMap::new() })
    }

    /// Sets whether this site's instance is awake. If its bucket is full it is left out, and counts
    /// as one that rests.
    pub fn set(&mut self, site: &SiteName, is_awake: bool) -> io::Result<()> {
        match (self.places.get(site), is_awake) {
            (None, true) => {
                let key = key_of(site);
                let at = bucket_of(&key);
                let bucket = read_bucket(&self.file, at)?;
                let Some(place) = bucket.chunks_exact(KEY_LEN).position(|place| place == FREE) else {
                    return Err(io::ErrorKind::StorageFull.into());
                };
                let at = at + (place * KEY_LEN) as u64;
                self.file.write_all_at(&key, at)?;
                self.places.insert(site.clone(), at);
            }
            (Some(at), false) => {
                self.file.write_all_at(&FREE, *at)?;
                self.places.remove(site);
            }
            (None, false) | (Some(_), true) => {}
        }
        Ok(())
    }

    /// Returns another descriptor of it, for reading.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// The edge's end.
#[derive(Debug)]
pub struct AwakeSetReader(File);

impl AwakeSetReader {
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }

    /// `None` if the descriptor is not of such a set.
    pub fn is_awake(&self, site: &SiteName) -> Option<bool> {
        let key = key_of(site);
        let bucket = read_bucket(&self.0, bucket_of(&key)).ok()?;
        Some(bucket.chunks_exact(KEY_LEN).any(|place| place == key))
    }
}

fn key_of(site: &SiteName) -> Key {
    let digest = digest(&SHA256, site.as_str().as_bytes());
    *digest.as_ref().first_chunk().expect("a digest is longer than a key")
}

/// Returns the position of its bucket.
fn bucket_of(key: &Key) -> u64 {
    let bucket = usize::from(u16::from_le_bytes([key[0], key[1]])) % BUCKETS;
    (bucket * BUCKET_LEN) as u64
}

fn read_bucket(file: &File, at: u64) -> io::Result<[u8; BUCKET_LEN]> {
    let mut bucket = [0; BUCKET_LEN];
    file.read_exact_at(&mut bucket, at)?;
    Ok(bucket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(number: u32) -> SiteName {
        SiteName::new(&format!("site-{number}")).unwrap()
    }

    #[test]
    fn awake_sites_are_readable_and_readers_cannot_write() {
        let mut roll = AwakeSet::new().unwrap();
        let descriptor = roll.reader().unwrap();
        assert!(rustix::io::write(&descriptor, b"x").is_err());
        let reader = AwakeSetReader::new(descriptor);
        assert_eq!(reader.is_awake(&site(1)), Some(false));
        for _ in 0..2 {
            roll.set(&site(1), true).unwrap();
            assert_eq!(reader.is_awake(&site(1)), Some(true));
            assert_eq!(reader.is_awake(&site(2)), Some(false));
        }
        roll.set(&site(1), false).unwrap();
        roll.set(&site(2), false).unwrap();
        assert_eq!(reader.is_awake(&site(1)), Some(false));
        let none = AwakeSetReader::new(File::open("/dev/null").unwrap().into());
        assert_eq!(none.is_awake(&site(1)), None);
    }

    #[test]
    fn thousands_find_a_place_and_leave_none_behind() {
        let mut roll = AwakeSet::new().unwrap();
        let reader = AwakeSetReader::new(roll.reader().unwrap());
        (0..4096).for_each(|number| roll.set(&site(number), true).unwrap());
        assert!((0..4096).all(|number| reader.is_awake(&site(number)) == Some(true)));
        (0..4096).for_each(|number| roll.set(&site(number), false).unwrap());
        for bucket in 0..BUCKETS {
            assert_eq!(read_bucket(&roll.file, (bucket * BUCKET_LEN) as u64).unwrap(), [0; BUCKET_LEN]);
        }
    }

    #[test]
    fn a_full_bucket_takes_no_more_until_one_leaves() {
        let mut roll = AwakeSet::new().unwrap();
        let reader = AwakeSetReader::new(roll.reader().unwrap());
        let first = bucket_of(&key_of(&site(0)));
        let mut same = (0..).map(site).filter(|site| bucket_of(&key_of(site)) == first);
        let (fit, over) = (same.by_ref().take(PLACES).collect::<Vec<_>>(), same.next().unwrap());
        fit.iter().for_each(|site| roll.set(site, true).unwrap());
        assert_eq!(roll.set(&over, true).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(reader.is_awake(&over), Some(false));
        roll.set(&fit[3], false).unwrap();
        roll.set(&over, true).unwrap();
        assert_eq!(reader.is_awake(&over), Some(true));
    }
}

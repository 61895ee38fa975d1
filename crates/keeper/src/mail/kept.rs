//! Counts of mail that outlive the keeper: one file in its own directory, which is removed when the
//! node stops.
//!
//! Each tenant has its own slot in it, so that one count costs one short write. Slots of another
//! form, or whose hour is over, are ignored. Not here: the counts as such (`desk`).

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nagaya_base::limits::NAME_LEN_MAX;
use nagaya_records::TenantName;
use rustix::fs::OFlags;

/// Length of one slot, bytes: a name, three numbers, and the end of its line.
const PLACE_LEN: usize = 256;
const _: () = assert!(NAME_LEN_MAX + 3 * 21 < PLACE_LEN);

/// Number of slots of the file. The counts of more tenants restart with the keeper.
const PLACES_MAX: u32 = 65_536;

/// The counts of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptCount {
    pub tenant: TenantName,
    /// When its hour began.
    pub since: SystemTime,
    pub recipients: u32,
    pub bytes: u64,
}

/// Number of a tenant's slot in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountSlot(u32);

/// The file. `None`: nothing is kept.
#[derive(Debug, Default)]
pub struct KeptCounts {
    file: Option<File>,
    free: Vec<CountSlot>,
    next: u32,
}

impl KeptCounts {
    /// Opens the file, and reads the counts of hours that are not over.
    ///
    /// # Errors
    /// If it cannot be opened or read.
    pub fn open(path: &Path, window: Duration) -> io::Result<(Self, Vec<(CountSlot, KeptCount)>)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path)?;
        let mut text = Vec::new();
        (&file).take(u64::from(PLACES_MAX) * PLACE_LEN as u64).read_to_end(&mut text)?;
        let (mut kept, mut found) = (Self { file: Some(file), free: Vec::new(), next: 0 }, Vec::new());
        let (now, mut seen) = (SystemTime::now(), HashSet::new());
        for text in text.chunks(PLACE_LEN) {
            let place = CountSlot(kept.next);
            kept.next += 1;
            // The clock may have been set meanwhile: an hour that has not begun yet is over, too.
            let is_open = |count: &KeptCount| now.duration_since(count.since).is_ok_and(|age| age < window);
            let mut is_new = |count: &KeptCount| seen.insert(count.tenant.clone());
            match read_count(text).filter(is_open).filter(|count| is_new(count)) {
                Some(count) => found.push((place, count)),
                None => kept.free.push(place),
            }
        }
        Ok((kept, found))
    }

    /// Takes a slot for one more tenant. `None`: nothing is kept, or no slot is left.
    pub fn take_place(&mut self) -> Option<CountSlot> {
        self.file.as_ref()?;
        self.free.pop().or_else(|| {
            let place = CountSlot(self.next);
            let is_free = self.next < PLACES_MAX;
            self.next += u32::from(is_free);
            is_free.then_some(place)
        })
    }

    /// Returns a slot to the free ones. Its count is over, and is ignored.
    pub fn give_back(&mut self, place: CountSlot) {
        self.free.push(place);
    }

    /// Keeps a count. A failure is logged once, and nothing is kept any more.
    pub fn write(&mut self, place: CountSlot, count: &KeptCount) {
        let Some(file) = &self.file else { return };
        let written = file.write_all_at(&write_count(count), u64::from(place.0) * PLACE_LEN as u64);
        if let Err(error) = written {
            tracing::warn!(%error, "counts of tenants' mail are not kept: they begin again with the keeper");
            self.file = None;
        }
    }
}

fn write_count(count: &KeptCount) -> Vec<u8> {
    let KeptCount { tenant, since, recipients, bytes } = count;
    let since = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let line = format!("{tenant} {since} {recipients} {bytes}");
    let mut line = format!("{line:<0$}", PLACE_LEN - 1).into_bytes();
    line.push(b'\n');
    line
}

fn read_count(text: &[u8]) -> Option<KeptCount> {
    let line = text.strip_suffix(b"\n").filter(|line| line.len() == PLACE_LEN - 1)?;
    let mut words = str::from_utf8(line).ok()?.split_ascii_whitespace();
    let tenant = TenantName::new(words.next()?).ok()?;
    let since = UNIX_EPOCH.checked_add(Duration::from_secs(words.next()?.parse().ok()?))?;
    let (recipients, bytes) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    words.next().is_none().then_some(KeptCount { tenant, since, recipients, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn count(tenant: &str, age: u64) -> KeptCount {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let since = UNIX_EPOCH + Duration::from_secs(now) - Duration::from_secs(age);
        KeptCount { tenant: TenantName::new(tenant).unwrap(), since, recipients: 7, bytes: u64::MAX }
    }

    #[test]
    fn counts_are_read_again_until_their_hour_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counts");
        let (mut kept, found) = KeptCounts::open(&path, HOUR).unwrap();
        assert!(found.is_empty());
        let places: Vec<_> = (0..3).map(|_| kept.take_place().unwrap()).collect();
        let (old, long, bob) = (count("old", 3600), count(&"a".repeat(NAME_LEN_MAX), 0), count("bob", 3000));
        for (place, count) in places.iter().zip([&old, &long, &bob]) {
            kept.write(*place, count);
        }
        let (mut again, found) = KeptCounts::open(&path, HOUR).unwrap();
        assert_eq!(found, [(places[1], long), (places[2], bob)]);
        assert_eq!(again.take_place(), Some(places[0]), "its hour is over");
        assert_eq!(again.take_place(), Some(CountSlot(3)));
    }

    #[test]
    fn malformed_counts_are_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counts");
        let alice = count("alice", 1);
        let good = write_count(&alice);
        let mut text = vec![b'x'; PLACE_LEN];
        text.extend(&good);
        text.extend(&good);
        text.extend(&good[..PLACE_LEN / 2]);
        std::fs::write(&path, text).unwrap();
        let (kept, found) = KeptCounts::open(&path, HOUR).unwrap();
        assert_eq!(found, [(CountSlot(1), alice)], "and no tenant twice");
        assert_eq!(kept.free, [CountSlot(0), CountSlot(2), CountSlot(3)]);
    }

    #[test]
    fn places_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let (mut kept, _) = KeptCounts::open(&dir.path().join("counts"), HOUR).unwrap();
        kept.next = PLACES_MAX;
        assert_eq!(kept.take_place(), None);
        kept.give_back(CountSlot(5));
        assert_eq!(kept.take_place(), Some(CountSlot(5)));
        assert_eq!(KeptCounts::default().take_place(), None, "without a file there are none");
    }
}

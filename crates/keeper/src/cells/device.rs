//! Disks: the disk of a file, the disk that a limit means, and whether it exists.
//!
//! The kernel limits whole disks, by number. Not here: how limits are written (`lines`).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use nagaya_records::cell::{DEVICES_PER_CELL_MAX, Device, IoLimit, LimitSet};
use parking_lot::Mutex;

use super::codes;
use super::complaints::CellWarnings;

/// Maximum number of device numbers whose disks are cached. A machine has far fewer. When it is
/// reached, all are read again.
const KNOWN_MAX: usize = 1024;

/// Maximum number of a machine's disks that are read.
const PHYSICAL_MAX: usize = 256;

/// A disk's major and minor number.
pub type DeviceNumber = (u32, u32);

#[derive(Debug)]
pub struct DiskResolver {
    /// `/sys/dev/block`.
    sys: PathBuf,
    known: Mutex<HashMap<DeviceNumber, Option<DeviceNumber>>>,
}

impl DiskResolver {
    pub fn new() -> Self {
        Self::at(Path::new("/sys/dev/block"))
    }

    fn at(sys: &Path) -> Self {
        Self { sys: sys.to_path_buf(), known: Mutex::default() }
    }

    /// Returns the whole disk that this is, or is a partition of. `None` if there is no such block
    /// device.
    pub fn whole(&self, number: DeviceNumber) -> Option<DeviceNumber> {
        let mut known = self.known.lock();
        if let Some(whole) = known.get(&number) {
            return *whole;
        }
        let whole = self.look(number);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(number, whole);
        whole
    }

    fn look(&self, (major, minor): DeviceNumber) -> Option<DeviceNumber> {
        // Linux numbers no block device 0. File systems without a device have that as their major
        // number.
        let dir = fs::canonicalize(self.sys.join(format!("{major}:{minor}"))).ok().filter(|_| major != 0)?;
        if !dir.join("partition").exists() {
            return Some((major, minor));
        }
        let text = fs::read_to_string(dir.parent()?.join("dev")).ok()?;
        let (major, minor) = text.trim_end().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// Clears the cache, because disks come and go.
    pub fn forget(&self) {
        self.known.lock().clear();
    }

    /// Resolves the devices of these limits to numbers. `:root` becomes the disks of `roots`, a
    /// partition its disk. A missing device gives a warning and is left out.
    pub fn resolve(&self, limits: &LimitSet, roots: &[DeviceNumber], complaints: &CellWarnings) -> LimitSet {
        let mut io: Vec<IoLimit> = Vec::new();
        for limit in &limits.io {
            let meant: Vec<DeviceNumber> = match limit.device {
                Device::Root => roots.iter().filter_map(|root| self.root(*root, complaints)).collect(),
                Device::Number { major, minor } => {
                    self.number((major, minor), complaints).into_iter().collect()
                }
            };
            for (major, minor) in meant {
                let limit = IoLimit { device: Device::Number { major, minor }, ..limit.clone() };
                let has_room = io.len() < DEVICES_PER_CELL_MAX;
                match io.iter_mut().find(|have| have.device == limit.device) {
                    Some(have) => *have = stricter(have, &limit),
                    None if has_room => io.push(limit),
                    None => {}
                }
            }
        }
        LimitSet { io, ..limits.clone() }
    }

    fn root(&self, number: DeviceNumber, complaints: &CellWarnings) -> Option<DeviceNumber> {
        let whole = self.whole(number);
        if whole.is_none() {
            let (major, minor) = number;
            complaints.add(codes::NO_DISK, &format!("{major}:{minor}"), || {
                format!(
                    "files of sites are on device {major}:{minor}, which is not a disk (overlay, tmpfs, \
                     btrfs or a network): limits of ':root' do not apply there; name the disk below it by \
                     its number"
                )
            });
        }
        whole
    }

    fn number(&self, number: DeviceNumber, complaints: &CellWarnings) -> Option<DeviceNumber> {
        let whole = self.whole(number);
        if whole.is_none() {
            let (major, minor) = number;
            complaints.add(codes::NO_DEVICE, &format!("{major}:{minor}"), || {
                format!(
                    "there is no disk {major}:{minor}, for which a record or rule has limits: use :root for the disk of \
                     the site's files, or a number of `lsblk`"
                )
            });
        }
        whole
    }
}

/// Returns the disks of this machine that are more than a piece of memory or of another disk. These
/// have a device behind them, or are made of several.
pub fn physical() -> Vec<DeviceNumber> {
    let disks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let real = disks.filter(|disk| {
        let name = disk.file_name();
        disk.path().join("device").exists()
            || ["dm-", "md"].iter().any(|kind| name.to_string_lossy().starts_with(kind))
    });
    let numbers = real.filter_map(|disk| {
        let text = fs::read_to_string(disk.path().join("dev")).ok()?;
        let (major, minor) = text.trim_end().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    numbers.take(PHYSICAL_MAX).collect()
}

/// Returns the smaller of each two numbers: the limit of a process that is below both.
pub fn stricter(a: &IoLimit, b: &IoLimit) -> IoLimit {
    let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
    IoLimit {
        device: a.device,
        read_bps: least(a.read_bps, b.read_bps),
        write_bps: least(a.write_bps, b.write_bps),
        read_iops: least(a.read_iops, b.read_iops),
        write_iops: least(a.write_iops, b.write_iops),
    }
}

/// Returns the limit of each device for a process that is below both lists.
pub fn strictest(a: &[IoLimit], b: &[IoLimit]) -> Vec<IoLimit> {
    let mut all = a.to_vec();
    for limit in b {
        match all.iter_mut().find(|have| have.device == limit.device) {
            Some(have) => *have = stricter(have, limit),
            None => all.push(limit.clone()),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn disks() -> (tempfile::TempDir, DiskResolver) {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path().join("dev/block");
        fs::create_dir_all(&sys).unwrap();
        for (path, dev) in
            [("devices/sda", "8:0\n"), ("devices/sda/sda1", "8:1\n"), ("devices/dm-0", "253:0\n")]
        {
            let target = dir.path().join(path);
            fs::create_dir_all(&target).unwrap();
            fs::write(target.join("dev"), dev).unwrap();
            symlink(&target, sys.join(dev.trim_end())).unwrap();
        }
        fs::write(dir.path().join("devices/sda/sda1/partition"), "1\n").unwrap();
        let disks = DiskResolver::at(&sys);
        (dir, disks)
    }

    #[test]
    fn a_partition_stands_for_its_disk() {
        let (_dir, disks) = disks();
        for (number, whole) in [
            ((8, 0), Some((8, 0))),
            ((8, 1), Some((8, 0))),
            ((253, 0), Some((253, 0))),
            ((9, 0), None),
            ((0, 40), None),
        ] {
            assert_eq!(disks.whole(number), whole, "{number:?}");
        }
    }

    #[test]
    fn missing_device_is_reported_and_other_limits_hold() {
        let (_dir, disks) = disks();
        let complaints = CellWarnings::default();
        let of = |device, read| IoLimit { read_bps: Some(read), ..IoLimit::of(device) };
        let number = |major, minor| Device::Number { major, minor };
        let io = vec![of(Device::Root, 5), of(number(8, 0), 3), of(number(9, 9), 1), of(number(253, 0), 7)];
        let limits = LimitSet { io, processes: Some(2), ..LimitSet::default() };
        let resolved = disks.resolve(&limits, &[(8, 1), (0, 26)], &complaints);
        assert_eq!(resolved.io, [of(number(8, 0), 3), of(number(253, 0), 7)]);
        assert_eq!((resolved.processes, complaints.total()), (Some(2), 2));
    }

    #[test]
    fn beneath_two_limits_the_smaller_holds() {
        let device = Device::Number { major: 8, minor: 0 };
        let a = IoLimit { read_bps: Some(5), write_bps: Some(9), ..IoLimit::of(device) };
        let b = IoLimit { write_bps: Some(7), read_iops: Some(1), ..IoLimit::of(device) };
        let both =
            IoLimit { read_bps: Some(5), write_bps: Some(7), read_iops: Some(1), ..IoLimit::of(device) };
        assert_eq!(strictest(std::slice::from_ref(&a), std::slice::from_ref(&b)), [both]);
        assert_eq!(strictest(&[], std::slice::from_ref(&b)), [b]);
    }
}

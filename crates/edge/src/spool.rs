//! Keeps bodies that wait on disk: uploads until their program runs, and answers for slow
//! clients.
//!
//! Small bodies stay in memory. Larger ones go to files without names in a directory of the edge's
//! own. Both have quotas for the whole node. The disk also has a quota for each tenant. All reads
//! and writes of these files run on the blocking pool. Not here: when a request's body is taken in
//! (`intake`), when an answer is kept (`read_ahead`).
//!
//! Invariant: a byte is counted before it is kept. It is given back when the guard that counted
//! it is dropped.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use nagaya_records::TenantName;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};

use crate::blocking::{BlockingDevice, BlockingPool, DeviceShare, PoolBusy};
use crate::options::SpoolOptions;

/// Step in which bytes on disk are reserved, so that quotas are checked seldom.
const RESERVE_STEP: u64 = 1 << 20;

/// Number of bytes read from a file at once.
pub const READ_LEN: usize = 128 << 10;

/// Maximum number of body bytes in memory, for all requests of the node. Further bytes go to disk
/// at once.
const MEMORY_MAX: u64 = 256 << 20;

/// Reason why a body cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    #[error("its tenant has as many bytes in the spool as it may")]
    TenantFull,
    #[error("the node's spool is full")]
    NodeFull,
    #[error("the node has no spool directory")]
    Absent,
    #[error("{0}")]
    Busy(#[from] PoolBusy),
    #[error("the spool cannot be used: {0}")]
    File(#[from] io::Error),
}

/// The spool of one node.
pub struct Spool {
    directory: Option<Arc<OwnedFd>>,
    pool: Arc<BlockingPool>,
    memory: AtomicU64,
    disk: Mutex<DiskUse>,
}

#[derive(Debug, Default)]
struct DiskUse {
    bytes_max: u64,
    tenant_bytes_max: u64,
    bytes: u64,
    /// Bytes of tenants that have any.
    tenants: HashMap<TenantName, u64>,
}

impl Spool {
    /// `directory` is the edge's own. `None` if nothing goes to disk.
    pub fn new(directory: Option<OwnedFd>, options: &SpoolOptions, pool: Arc<BlockingPool>) -> Self {
        let disk = DiskUse {
            bytes_max: options.bytes,
            tenant_bytes_max: options.tenant_bytes,
            ..DiskUse::default()
        };
        Self { directory: directory.map(Arc::new), pool, memory: AtomicU64::new(0), disk: Mutex::new(disk) }
    }

    /// Sets new quotas. They hold for bytes kept from now on.
    pub fn set_options(&self, options: &SpoolOptions) {
        let mut disk = self.disk.lock();
        (disk.bytes_max, disk.tenant_bytes_max) = (options.bytes, options.tenant_bytes);
    }

    /// Returns the present bytes in memory and on disk.
    pub fn usage(&self) -> (u64, u64) {
        (self.memory.load(Ordering::Relaxed), self.disk.lock().bytes)
    }

    /// Opens a file for one body of this tenant.
    ///
    /// # Errors
    /// Fails if there is no directory, or no file can be made in it.
    pub async fn open(self: &Arc<Self>, tenant: &TenantName) -> Result<SpoolFile, SpoolError> {
        let directory = self.directory.clone().ok_or(SpoolError::Absent)?;
        let file = self.pool.run(share(tenant), move || open_unnamed(&directory)).await??;
        let quota = DiskQuota { spool: Arc::clone(self), tenant: tenant.clone(), reserved: 0 };
        Ok(SpoolFile { file: Arc::new(file), len: 0, quota })
    }

    /// Returns a counter of bytes in memory. Dropping it gives them back.
    pub fn memory(self: &Arc<Self>) -> MemoryQuota {
        MemoryQuota { spool: Arc::clone(self), reserved: 0 }
    }

    fn reserve(&self, tenant: &TenantName, bytes: u64) -> Result<(), SpoolError> {
        let mut disk = self.disk.lock();
        let of_tenant = disk.tenants.get(tenant).copied().unwrap_or(0);
        if of_tenant + bytes > disk.tenant_bytes_max {
            return Err(SpoolError::TenantFull);
        }
        if disk.bytes + bytes > disk.bytes_max {
            return Err(SpoolError::NodeFull);
        }
        disk.bytes += bytes;
        disk.tenants.insert(tenant.clone(), of_tenant + bytes);
        Ok(())
    }

    fn give_back(&self, tenant: &TenantName, bytes: u64) {
        let mut disk = self.disk.lock();
        disk.bytes -= bytes;
        if let Some(of_tenant) = disk.tenants.get_mut(tenant) {
            *of_tenant -= bytes;
            if *of_tenant == 0 {
                disk.tenants.remove(tenant);
            }
        }
    }
}

fn share(tenant: &TenantName) -> DeviceShare {
    DeviceShare::new(BlockingDevice::Spool, tenant)
}

fn open_unnamed(directory: &OwnedFd) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let fd = rustix::fs::openat(directory.as_fd(), c".", flags, Mode::RUSR | Mode::WUSR)?;
    Ok(File::from(fd))
}

/// Bytes on disk that one file has reserved.
struct DiskQuota {
    spool: Arc<Spool>,
    tenant: TenantName,
    reserved: u64,
}

impl DiskQuota {
    fn grow_to(&mut self, bytes: u64) -> Result<(), SpoolError> {
        if bytes <= self.reserved {
            return Ok(());
        }
        let step = (bytes - self.reserved).next_multiple_of(RESERVE_STEP);
        self.spool.reserve(&self.tenant, step)?;
        self.reserved += step;
        Ok(())
    }
}

impl Drop for DiskQuota {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.spool.give_back(&self.tenant, self.reserved);
        }
    }
}

/// Bytes in memory that one body has reserved.
pub struct MemoryQuota {
    spool: Arc<Spool>,
    reserved: u64,
}

impl MemoryQuota {
    /// Counts `bytes` more, if they may stay in memory. Returns whether they may.
    pub fn try_grow(&mut self, bytes: u64) -> bool {
        let memory = &self.spool.memory;
        let grow = |now: u64| (now + bytes <= MEMORY_MAX).then_some(now + bytes);
        let may_grow = memory.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok();
        if may_grow {
            self.reserved += bytes;
        }
        may_grow
    }

    /// Gives back bytes that have left memory.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.reserved);
        self.reserved -= bytes;
        self.spool.memory.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for MemoryQuota {
    fn drop(&mut self) {
        self.shrink(self.reserved);
    }
}

/// A file without a name, with its quota. Both go when it is dropped.
pub struct SpoolFile {
    file: Arc<File>,
    len: u64,
    quota: DiskQuota,
}

impl SpoolFile {
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends all of `pieces`.
    ///
    /// # Errors
    /// Fails if a quota is used up, or the disk is full.
    pub async fn append(&mut self, pieces: Vec<Bytes>) -> Result<(), SpoolError> {
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        self.quota.grow_to(self.len + bytes)?;
        let (file, start) = (Arc::clone(&self.file), self.len);
        let write = move || {
            let mut at = start;
            pieces.iter().try_for_each(|piece| {
                let begin = at;
                at += piece.len() as u64;
                file.write_all_at(piece, begin)
            })
        };
        self.quota.spool.pool.run(share(&self.quota.tenant), write).await??;
        self.len += bytes;
        Ok(())
    }

    /// Starts again at the beginning, in the reserved space.
    pub fn rewind(&mut self) {
        self.len = 0;
    }

    /// Reads up to `READ_LEN` bytes from `offset`, which lies before the end. The future holds
    /// the file by itself.
    pub fn read(&self, offset: u64) -> impl Future<Output = io::Result<Bytes>> + use<> {
        let want = usize::try_from(self.len - offset).map_or(READ_LEN, |left| left.min(READ_LEN));
        let (file, pool) = (Arc::clone(&self.file), Arc::clone(&self.quota.spool.pool));
        let share = share(&self.quota.tenant);
        async move {
            let read = move || {
                let mut bytes = vec![0; want];
                file.read_exact_at(&mut bytes, offset).map(|()| Bytes::from(bytes))
            };
            pool.run(share, read).await.map_err(io::Error::other)?
        }
    }
}

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod tests {
    use super::testing::spool;
    use super::*;

    fn tenant(name: &str) -> TenantName {
        TenantName::new(name).unwrap()
    }

    #[tokio::test]
    async fn a_file_keeps_its_bytes_and_gives_its_room_back() {
        let (spool, directory) = spool(8 << 20, 8 << 20);
        let mut file = spool.open(&tenant("alice")).await.unwrap();
        file.append(vec![Bytes::from_static(b"one "), Bytes::from_static(b"two")]).await.unwrap();
        file.append(vec![Bytes::from(vec![7; READ_LEN])]).await.unwrap();
        let first = file.read(0).await.unwrap();
        assert!(first.starts_with(b"one two\x07"));
        assert_eq!(file.read(READ_LEN as u64).await.unwrap().len(), 7);
        assert_eq!(spool.usage(), (0, RESERVE_STEP));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "it has no name");
        drop(file);
        assert_eq!(spool.usage(), (0, 0));
    }

    #[tokio::test]
    async fn quotas_hold_for_a_tenant_and_for_the_node() {
        let (spool, _directory) = spool(3 * RESERVE_STEP, 2 * RESERVE_STEP);
        let whole = || vec![Bytes::from(vec![0; usize::try_from(2 * RESERVE_STEP).unwrap()])];
        let mut first = spool.open(&tenant("alice")).await.unwrap();
        first.append(whole()).await.unwrap();
        let mut more = spool.open(&tenant("alice")).await.unwrap();
        let byte = || vec![Bytes::from_static(b"x")];
        assert!(matches!(more.append(byte()).await, Err(SpoolError::TenantFull)));
        let mut other = spool.open(&tenant("bob")).await.unwrap();
        assert!(matches!(other.append(whole()).await, Err(SpoolError::NodeFull)));
        other.append(byte()).await.unwrap();
        drop(first);
        more.append(byte()).await.unwrap();
    }

    #[test]
    fn memory_is_bounded_for_all() {
        let (spool, _directory) = spool(0, 0);
        let (mut first, mut second) = (spool.memory(), spool.memory());
        assert!(first.try_grow(MEMORY_MAX - 1));
        assert!(second.try_grow(1) && !second.try_grow(1));
        first.shrink(10);
        assert!(second.try_grow(10));
        drop((first, second));
        assert_eq!(spool.usage(), (0, 0));
    }
}

//! Bases of applications that come as OCI image layouts. A base is unpacked once by content, and
//! shared by all whose layout has it.
//!
//! A base is a directory named by the digest of its manifest. Everything in it is root's and for
//! reading; only sandboxes lead there. It stays while somebody holds it, and a day longer. A
//! manifest alone opens no base. A tenant gets one only after its own layout has shown all layers.
//! So nobody sees an image of which it knows no more than the name. All calls but `turn` block:
//! make them from `workers`.
//!
//! In reading order: this file, `layout` (the content that a name means), `layer` (unpacking it).
//! Not here: the parts of a base that a sandbox shows (`sandbox`). Records themselves set an
//! image's entry point, variables and user.

pub(crate) mod layer;
pub(crate) mod layout;
pub(crate) mod zstd;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use nagaya_base::Code;
use nagaya_keeper_api::protocol::FailureKind;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::fault::Fault;
use crate::paths::tenant_path::PathOwner;

use layer::UnpackDir;
use layout::{BaseContent, OciLayout};

/// A base cannot be used.
pub const BASE: Code = Code(326);

/// Number of bases unpacked at once: the disk takes the time.
const UNPACKS_AT_ONCE: usize = 1;

/// Time that a base stays without a holder.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Maximum number of remembered tenants with the bases whose layers they have shown. A forgotten
/// one is shown again.
const SHOWN_MAX: usize = 65_536;

/// Limits of one base.
#[derive(Debug, Clone, Copy)]
pub struct BaseLimits {
    /// Bytes of its layers as they are in the layout, and again unpacked.
    pub bytes_max: u64,
    /// Number of files, directories and links of all layers.
    pub entries_max: u64,
}

impl BaseLimits {
    /// Larger than any image of an application should be; a tenth of a small node's disk.
    pub const NODE: Self = Self { bytes_max: 4 << 30, entries_max: 500_000 };
}

/// Why a base cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    #[error("there is no OCI image layout at {path} that its tenant can read: {error}")]
    NoLayout { path: String, error: io::Error },
    #[error("{what} of the layout is not valid: {why}")]
    Malformed { what: String, why: String },
    #[error("the layout has no image {wanted} for this machine; there are: {found}")]
    NoImage { wanted: String, found: String },
    #[error("{what} (sha256:{digest}) is missing in the layout or cannot be read: {error}")]
    NoBlob { what: &'static str, digest: String, error: io::Error },
    #[error("{what} (sha256:{digest}) was altered: its digest or length differs")]
    Altered { what: &'static str, digest: String },
    #[error("layer sha256:{digest}: {entry}: {why}")]
    Entry { digest: String, entry: String, why: String },
    #[error("it is too large: {what}")]
    TooLarge { what: String },
    #[error("cannot {what}: {error}")]
    Io { what: &'static str, error: io::Error },
}

impl BaseError {
    fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io { what, error }
    }
}

impl From<BaseError> for Fault {
    fn from(error: BaseError) -> Self {
        Self::new(FailureKind::Broken, BASE, format!("its base cannot be used: {error}"))
    }
}

/// A base on disk, which stays while this is held.
#[derive(Debug)]
pub struct UnpackedBase {
    pub path: PathBuf,
    /// Digest of its manifest, hexadecimal.
    pub digest: String,
}

/// Result of a look-up: the base on disk, if its tenant may use it.
pub enum BaseLookup {
    There(Arc<UnpackedBase>),
    Missing(MissingBase),
}

/// A base to unpack, or whose layers must be shown, when it is its turn.
pub struct MissingBase {
    layout: OciLayout,
    content: BaseContent,
    owner: PathOwner,
}

/// All bases of this node.
#[derive(Debug)]
pub struct BaseStore {
    dir: PathBuf,
    bounds: BaseLimits,
    state: Mutex<BaseStoreState>,
    turns: Semaphore,
}

#[derive(Debug, Default)]
struct BaseStoreState {
    held: HashMap<String, Weak<UnpackedBase>>,
    /// Digests of manifests, and owners of layouts that have shown all layers of them.
    shown: HashSet<(String, PathOwner)>,
    /// Directories being filled.
    fresh: HashSet<PathBuf>,
    next: u64,
}

impl BaseStore {
    pub fn new(dir: PathBuf, bounds: BaseLimits) -> Self {
        Self { dir, bounds, state: Mutex::default(), turns: Semaphore::new(UNPACKS_AT_ONCE) }
    }

    /// Waits for a turn to unpack, after all earlier ones.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.turns.acquire().await.ok()
    }

    /// Looks up the content that the layout has under this tag, with its tenant's rights.
    pub fn find(&self, path: &Path, tag: Option<&str>, owner: &PathOwner) -> Result<BaseLookup, BaseError> {
        let layout = OciLayout::open(path, owner)?;
        let content = layout.content(tag)?;
        let is_shown = self.state.lock().shown.contains(&(content.digest.clone(), owner.clone()));
        let held = if is_shown { self.hold(&content.digest)? } else { None };
        Ok(match held {
            Some(there) => BaseLookup::There(there),
            None => BaseLookup::Missing(MissingBase { layout, content, owner: owner.clone() }),
        })
    }

    /// Unpacks a base. If it is unpacked already, reads its layers.
    pub fn unpack(&self, missing: &MissingBase) -> Result<Arc<UnpackedBase>, BaseError> {
        let MissingBase { layout, content, owner } = missing;
        let unpacked = match self.hold(&content.digest)? {
            Some(there) => {
                content.verify(layout, self.bounds)?;
                there
            }
            None => self.make(layout, content)?,
        };
        let mut state = self.state.lock();
        if state.shown.len() >= SHOWN_MAX {
            state.shown.clear();
        }
        state.shown.insert((content.digest.clone(), owner.clone()));
        Ok(unpacked)
    }

    fn make(&self, layout: &OciLayout, content: &BaseContent) -> Result<Arc<UnpackedBase>, BaseError> {
        let digest = &content.digest;
        let made = BaseError::io("make a directory for it");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(&made)?;
        let fresh = StagingDir::new(self);
        fs::DirBuilder::new().mode(0o755).create(&fresh.path).map_err(&made)?;
        let tree = UnpackDir::open(&fresh.path).map_err(&made)?;
        content.unpack(layout, &tree, self.bounds)?;
        tree.sync().map_err(BaseError::io("write it to the disk"))?;
        match fs::rename(&fresh.path, self.dir.join(digest)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            renamed => renamed.map_err(BaseError::io("put it in its place"))?,
        }
        let there = self.hold(digest)?;
        there.ok_or_else(|| BaseError::io("find it again")(io::ErrorKind::NotFound.into()))
    }

    fn hold(&self, digest: &str) -> Result<Option<Arc<UnpackedBase>>, BaseError> {
        let mut state = self.state.lock();
        let path = self.dir.join(digest);
        match fs::File::open(&path) {
            // Its age is counted from this time.
            Ok(dir) => dir.set_modified(SystemTime::now()).map_err(BaseError::io("note its use"))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(BaseError::io("open it")(error)),
        }
        if let Some(held) = state.held.get(digest).and_then(Weak::upgrade) {
            return Ok(Some(held));
        }
        let held = Arc::new(UnpackedBase { path, digest: digest.to_owned() });
        state.held.insert(digest.to_owned(), Arc::downgrade(&held));
        Ok(Some(held))
    }

    /// Removes bases without holders or look-ups for long enough, and those that an earlier keeper
    /// left incomplete.
    pub fn collect(&self) -> io::Result<()> {
        self.collect_before(SystemTime::now() - KEPT_FOR)
    }

    fn collect_before(&self, before: SystemTime) -> io::Result<()> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let Some(gone) = self.put_out_of_use(&entry, before)? else { continue };
            fs::remove_dir_all(&gone)?;
            self.state.lock().fresh.remove(&gone);
        }
        Ok(())
    }

    /// Returns its new path, if it is to be removed. Nobody can hold it any more then.
    fn put_out_of_use(&self, entry: &fs::DirEntry, before: SystemTime) -> io::Result<Option<PathBuf>> {
        let (path, name) = (entry.path(), entry.file_name());
        let mut state = self.state.lock();
        if name.as_encoded_bytes().starts_with(b".") {
            return Ok((!state.fresh.contains(&path)).then_some(path));
        }
        let is_held =
            name.to_str().and_then(|name| state.held.get(name)).is_some_and(|held| held.strong_count() > 0);
        if is_held || entry.metadata()?.modified()? > before {
            return Ok(None);
        }
        if let Some(name) = name.to_str() {
            state.held.remove(name);
        }
        let gone = self.hidden(&mut state);
        fs::rename(&path, &gone)?;
        Ok(Some(gone))
    }

    /// Returns a name that nobody looks up.
    fn hidden(&self, state: &mut BaseStoreState) -> PathBuf {
        state.next += 1;
        let path = self.dir.join(format!(".{}-{}", std::process::id(), state.next));
        state.fresh.insert(path.clone());
        path
    }
}

/// A directory that is being filled. Dropping it removes what is left of it.
struct StagingDir<'a> {
    bases: &'a BaseStore,
    path: PathBuf,
}

impl<'a> StagingDir<'a> {
    fn new(bases: &'a BaseStore) -> Self {
        let path = bases.hidden(&mut bases.state.lock());
        Self { bases, path }
    }
}

impl Drop for StagingDir<'_> {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "{BASE}: {} cannot be removed now; it is tried again", self.path.display());
            }
            _ => {}
        }
        self.bases.state.lock().fresh.remove(&self.path);
    }
}

//! Bases of applications that come as OCI image layouts: unpacked once by content, and shared by all whose layout has it.
//!
//! A base is a directory named by the digest of its manifest. Everything in it is root's and for reading; only sandboxes lead there.
//! It stays as long as somebody holds it, and a day longer. A manifest alone opens no base: a tenant gets one only after its
//! own layout has shown all layers, so that nobody sees an image of which it knows no more than the name. All calls but `turn`
//! block: make them from `workers`.
//!
//! In reading order: this file, `layout` (which content a name means), `layer` (putting it on disk). Not here: what a sandbox shows of
//! a base (`sandbox`), entry point, variables and user of an image, which records say themselves.

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
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::fault::Fault;
use crate::protocol::Failure;
use crate::tenant_path::PathOwner;
use layer::Tree;
use layout::{Content, Layout};

/// A base cannot be used.
pub const BASE: Code = Code(326);

/// Bases that are unpacked at once: it is the disk that takes the time.
const UNPACKS_AT_ONCE: usize = 1;

/// How long a base stays that nobody holds.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// Tenants and the bases whose layers they have shown, remembered. One that is forgotten is shown again.
const SHOWN_MAX: usize = 65_536;

/// What one base may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Of its layers as they are in the layout, and again unpacked.
    pub bytes_max: u64,
    /// Files, directories and links of all layers.
    pub entries_max: u64,
}

impl Bounds {
    /// Larger than any image of an application should be; a tenth of a small node's disk.
    pub const NODE: Self = Self { bytes_max: 4 << 30, entries_max: 500_000 };
}

/// Why a base cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    #[error("there is no OCI image layout at {path} that its tenant can read: {error}")]
    NoLayout { path: String, error: io::Error },
    #[error("{what} of the layout is not as it must be: {why}")]
    Malformed { what: String, why: String },
    #[error("the layout has no image {wanted} for this machine; there are: {found}")]
    NoImage { wanted: String, found: String },
    #[error("{what} (sha256:{digest}) is missing in the layout or cannot be read: {error}")]
    NoBlob { what: &'static str, digest: String, error: io::Error },
    #[error("{what} (sha256:{digest}) was altered: its digest or length is another")]
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
        Self::new(Failure::Broken, BASE, format!("its base cannot be used: {error}"))
    }
}

/// A base on disk, which stays as long as this is held.
#[derive(Debug)]
pub struct Unpacked {
    pub path: PathBuf,
    /// Of its manifest, hexadecimal.
    pub digest: String,
}

/// What a layout means now, and whether that is on disk and its tenant's to use.
pub enum Sought {
    There(Arc<Unpacked>),
    Missing(Missing),
}

/// To be unpacked, or its layers to be shown, when it is its turn.
pub struct Missing {
    layout: Layout,
    content: Content,
    owner: PathOwner,
}

/// All bases of this node.
#[derive(Debug)]
pub struct Bases {
    dir: PathBuf,
    bounds: Bounds,
    state: Mutex<State>,
    turns: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    held: HashMap<String, Weak<Unpacked>>,
    /// Digests of manifests, and whose layouts have shown all layers of them.
    shown: HashSet<(String, PathOwner)>,
    /// Directories being filled.
    fresh: HashSet<PathBuf>,
    next: u64,
}

impl Bases {
    pub fn new(dir: PathBuf, bounds: Bounds) -> Self {
        Self { dir, bounds, state: Mutex::default(), turns: Semaphore::new(UNPACKS_AT_ONCE) }
    }

    /// A turn to unpack: as long as it takes those before.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.turns.acquire().await.ok()
    }

    /// Looks up what the layout means by this tag, with its tenant's rights.
    pub fn find(&self, path: &Path, tag: Option<&str>, owner: &PathOwner) -> Result<Sought, BaseError> {
        let layout = Layout::open(path, owner)?;
        let content = layout.content(tag)?;
        let is_shown = self.state.lock().shown.contains(&(content.digest.clone(), owner.clone()));
        let held = if is_shown { self.hold(&content.digest)? } else { None };
        Ok(match held {
            Some(there) => Sought::There(there),
            None => Sought::Missing(Missing { layout, content, owner: owner.clone() }),
        })
    }

    /// Unpacks it, or reads its layers where somebody has unpacked them already.
    pub fn unpack(&self, missing: &Missing) -> Result<Arc<Unpacked>, BaseError> {
        let Missing { layout, content, owner } = missing;
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

    fn make(&self, layout: &Layout, content: &Content) -> Result<Arc<Unpacked>, BaseError> {
        let digest = &content.digest;
        let made = BaseError::io("make a directory for it");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(&made)?;
        let fresh = Fresh::new(self);
        fs::DirBuilder::new().mode(0o755).create(&fresh.path).map_err(&made)?;
        let tree = Tree::open(&fresh.path).map_err(&made)?;
        content.unpack(layout, &tree, self.bounds)?;
        tree.sync().map_err(BaseError::io("write it to the disk"))?;
        match fs::rename(&fresh.path, self.dir.join(digest)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            renamed => renamed.map_err(BaseError::io("put it in its place"))?,
        }
        let there = self.hold(digest)?;
        there.ok_or_else(|| BaseError::io("find it again")(io::ErrorKind::NotFound.into()))
    }

    fn hold(&self, digest: &str) -> Result<Option<Arc<Unpacked>>, BaseError> {
        let mut state = self.state.lock();
        let path = self.dir.join(digest);
        match fs::File::open(&path) {
            // By this its age is told.
            Ok(dir) => dir.set_modified(SystemTime::now()).map_err(BaseError::io("note its use"))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(BaseError::io("open it")(error)),
        }
        if let Some(held) = state.held.get(digest).and_then(Weak::upgrade) {
            return Ok(Some(held));
        }
        let held = Arc::new(Unpacked { path, digest: digest.to_owned() });
        state.held.insert(digest.to_owned(), Arc::downgrade(&held));
        Ok(Some(held))
    }

    /// Removes those that nobody holds and nobody has asked for in so long, and what a keeper before left half done.
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

    /// Where it is now, if it is to be removed. Nobody can hold it any more then.
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

    /// A name nobody looks for.
    fn hidden(&self, state: &mut State) -> PathBuf {
        state.next += 1;
        let path = self.dir.join(format!(".{}-{}", std::process::id(), state.next));
        state.fresh.insert(path.clone());
        path
    }
}

/// A directory that is being filled; what is left of it goes with this.
struct Fresh<'a> {
    bases: &'a Bases,
    path: PathBuf,
}

impl<'a> Fresh<'a> {
    fn new(bases: &'a Bases) -> Self {
        let path = bases.hidden(&mut bases.state.lock());
        Self { bases, path }
    }
}

impl Drop for Fresh<'_> {
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

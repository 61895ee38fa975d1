//! Images: the memory of an instance right after its start, on disk, from which it goes on in milliseconds.
//!
//! An image is taken by CRIU in the instance's own sandbox, once for each release, and brought back in a fresh one. It
//! is bound to what it was taken of (`Subject`) and where (`header::Environment`), and everything about it is checked
//! before it is used: a wrong one is put aside with its reason, and the instance starts cold instead. Its header names all of its
//! files by their digests and carries an authenticator that only this keeper can make. What an image brings back is compared
//! with what its sandbox gives before any of it runs (`sandbox::rights`).
//!
//! Images hold all secrets of their application in plain text. Only root reaches the directory they are in; CRIU, which
//! runs with a sandbox' rights, gets one image read-only. All calls here block: make them from `workers`.
//!
//! Not here: when images are taken and used (`instances`), sandboxes (`sandbox`).

pub(crate) mod archive;
pub(crate) mod checkpoint;
mod criu;
mod digest;
mod facts;
pub(crate) mod file_list;
mod files;
pub(crate) mod header;
mod holes;
mod incoming;
pub(crate) mod log;
pub(crate) mod mapped;
pub(crate) mod mappings;
pub(crate) mod memory;
pub(crate) mod order;
mod outgoing;
pub(crate) mod pagemap;
pub(crate) mod readings;
mod sealed;
mod shared;
mod store;
mod watched;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nagaya_base::Code;
use nagaya_cmdb::record::ImageMemory;
use serde::{Deserialize, Serialize};

use crate::sandbox::{Launcher, SHM_FILE, Sandbox, SandboxError, Task};
use crate::tenant_path::PathOwner;

use archive::Head;
use checkpoint::{Engine, Needs};
use header::Header;
use incoming::Staged;
use outgoing::{Archive, Pace};
use store::Store;

pub use checkpoint::Handed;
pub use criu::{Criu, Search, find as find_criu};
pub use digest::Digest;
pub use header::{Environment, Subject, base_digest};
pub use order::{ClusterKey, KEY_LEN, OrderError, TransferEnd, TransferOrder, give_order, verify_order};
pub use readings::{ReadRecorder, WatchTerms};
pub use store::{Limits, Listed};
pub use watched::{PathState, Watched};

/// There is no CRIU that works here.
pub const NO_CRIU: Code = Code(334);
/// An instance cannot be imaged.
pub const UNFIT: Code = Code(335);
/// An instance cannot be imaged at this moment.
pub const UNSETTLED: Code = Code(368);
/// An image was put aside.
pub const QUARANTINED: Code = Code(336);
/// The directory of images cannot be used.
pub const STORE: Code = Code(337);
/// An image of another node does not fit this one, or is not the one that was offered.
pub const FOREIGN: Code = Code(364);
/// An image of another node is damaged.
pub const CORRUPT: Code = Code(365);
/// No supervisor has ordered that an image goes or comes.
pub const NOT_ORDERED: Code = Code(366);
/// An image would have brought back a process with other rights than its sandbox gives.
pub const LESS_FENCED: Code = Code(367);

/// Why an image was not taken, or not brought back.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("there is no usable CRIU: {reason}")]
    NoCriu { reason: String },
    #[error("CRIU does not work in a sandbox on this node: {said}")]
    Useless { said: String },
    #[error("it cannot be imaged: {reason}")]
    Unfit { reason: String },
    #[error("it cannot be imaged now: {reason}")]
    Unsettled { reason: String },
    #[error("no space is left for images: {reason}")]
    NoSpace { reason: String },
    #[error("its image would take {bytes} bytes; {bytes_max} are allowed")]
    TooLarge { bytes: u64, bytes_max: u64 },
    #[error("its image cannot be brought back: {reason}")]
    NotRestored { reason: String },
    #[error("its image would bring back a process with other rights than its sandbox gives: {reason}")]
    LessFenced { reason: String },
    #[error("CRIU did not end within {within:?}")]
    Timeout { within: Duration },
    #[error("the image of another node is not taken over: {reason}")]
    Foreign { reason: String },
    #[error("the image of another node is damaged, and was put aside: {reason}")]
    Corrupt { reason: String },
    #[error("cannot {what}: {error}")]
    Io { what: String, error: io::Error },
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

impl ImageError {
    pub fn code(&self) -> Code {
        match self {
            Self::NoCriu { .. } | Self::Useless { .. } => NO_CRIU,
            Self::Unfit { .. } | Self::TooLarge { .. } => UNFIT,
            Self::Unsettled { .. } => UNSETTLED,
            Self::NotRestored { .. } | Self::Timeout { .. } => QUARANTINED,
            Self::LessFenced { .. } => LESS_FENCED,
            Self::NoSpace { .. } | Self::Io { .. } => STORE,
            Self::Foreign { .. } => FOREIGN,
            Self::Corrupt { .. } => CORRUPT,
            Self::Sandbox(error) => error.code(),
        }
    }
}

impl ImageError {
    /// Whether the image may be to blame for a failed restore.
    pub fn is_of_image(&self) -> bool {
        matches!(self, Self::NotRestored { .. } | Self::LessFenced { .. } | Self::Timeout { .. })
    }
}

/// What an I/O error was about: `at("open", path)`.
fn at(verb: &str, what: impl AsRef<Path>) -> impl FnOnce(io::Error) -> ImageError {
    let what = format!("{verb} {}", what.as_ref().display());
    move |error| ImageError::Io { what, error }
}

/// An image that is whole and fits this node.
#[derive(Debug, Clone)]
pub struct Image {
    id: String,
    header: Header,
    watched: Arc<Watched>,
}

/// How an image is taken.
#[derive(Debug, Clone, Default)]
pub struct ImageTerms {
    pub memory: ImageMemory,
    /// What it depends on.
    pub watched: Watched,
}

impl From<ImageMemory> for ImageTerms {
    /// Depends on no file.
    fn from(memory: ImageMemory) -> Self {
        Self { memory, watched: Watched::default() }
    }
}

impl Image {
    pub fn subject(&self) -> &Subject {
        &self.header.subject
    }

    pub fn bytes(&self) -> u64 {
        self.header.bytes()
    }

    /// Seconds since 1970.
    pub fn taken_at(&self) -> u64 {
        self.header.taken_at
    }

    /// What it depends on.
    pub fn watched(&self) -> &Watched {
        &self.watched
    }
}

/// What there is for a subject.
#[derive(Debug)]
pub enum Found {
    Image(Box<Image>),
    /// None, or none that is right: take one.
    Nothing,
    /// The last try has shown that none can be taken, for this reason.
    Unfit(String),
}

/// All images of this node, and the CRIU that makes them.
#[derive(Debug)]
pub struct Images {
    engine: Engine,
    environment: Environment,
    store: Store,
    pace: Pace,
    /// Images that were found to be wrong before anything was tried with them.
    found_wrong: AtomicU64,
}

/// What one node tells another of an image, and another node's keeper decides by whether it wants it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// Of the archive: of its header and all that is in it.
    pub digest: Digest,
    /// Of the archive.
    pub bytes: u64,
    /// Seconds since 1970.
    pub taken_at: u64,
    pub subject: Subject,
    pub environment: Environment,
}

impl Images {
    /// Finds CRIU, lets it look at the kernel, and opens the directory, which is made for root alone.
    pub fn open(
        dir: &Path,
        configured: Option<&Path>,
        launcher: &Launcher,
        limits: Limits,
    ) -> Result<Self, ImageError> {
        let search = criu::find(configured);
        let reason = search.reason();
        let criu = search.found.ok_or(ImageError::NoCriu { reason })?;
        let facts = facts::learn(&criu, launcher)?;
        let environment = Environment::here(&criu).map_err(at("read", "/proc/cpuinfo"))?;
        let store = Store::open(dir, limits)?;
        Ok(Self {
            engine: Engine { criu, facts },
            environment,
            store,
            pace: Pace::default(),
            found_wrong: AtomicU64::new(0),
        })
    }

    pub fn criu(&self) -> &Criu {
        &self.engine.criu
    }

    pub fn set_limits(&self, limits: Limits) {
        self.store.set_limits(limits);
    }

    /// Looks for an image and checks it: cheaply, or wholly where that has not been done since the keeper's start. A
    /// damaged one is put aside.
    pub fn find(&self, subject: &Subject) -> Found {
        let id = subject.id();
        if let Some(reason) = self.store.refusal(&id, subject, &self.environment) {
            return Found::Unfit(reason);
        }
        let header = match self.store.header(&id) {
            Ok(Some(header)) => header,
            Ok(None) => return Found::Nothing,
            Err(why) => {
                self.found_wrong.fetch_add(1, Ordering::Relaxed);
                self.put_aside(&id, subject, &why);
                return Found::Nothing;
            }
        };
        let differs = match header.subject == *subject {
            true => header.environment.differs(&self.environment),
            false if header.subject.base != subject.base => {
                Some("the files it ran on have changed since".into())
            }
            false => Some("it is of something else".into()),
        };
        let is_past_use = self.store.is_past_use(header.taken_at);
        let why = differs.or_else(|| is_past_use.then(|| "it was taken too long ago".into()));
        if let Some(why) = why {
            tracing::info!(site = %subject.site, "its image is not used: {why}");
            return Found::Nothing;
        }
        let watched = self.store.check(&id, &header).and_then(|()| self.store.watched(&id, &header));
        match watched {
            Ok(watched) => {
                self.store.prefetch(&id, &header);
                Found::Image(Box::new(Image { id, header, watched: Arc::new(watched) }))
            }
            Err(why) => {
                self.found_wrong.fetch_add(1, Ordering::Relaxed);
                self.put_aside(&id, subject, &why);
                Found::Nothing
            }
        }
    }

    /// How many were found to be wrong since this was last asked.
    pub fn take_found_wrong(&self) -> u64 {
        self.found_wrong.swap(0, Ordering::Relaxed)
    }

    /// Returns in words which file that the image depends on is not as it was, or `None`. Blocks.
    pub fn find_change(&self, image: &Image, owner: &PathOwner) -> Option<String> {
        image.watched.find_change(owner, &self.store.origin())
    }

    /// Removes the image of a subject, if there is one: it is not to be used again.
    pub fn remove(&self, subject: &Subject) {
        self.store.discard(&subject.id());
    }

    /// Whether another one is to be taken in its place, at a moment at which nobody waits for it.
    pub fn is_old(&self, image: &Image) -> bool {
        self.store.is_old(image.taken_at())
    }

    /// Takes an image of all processes in a sandbox, which go on running, in place of one there may be. What cannot be
    /// imaged is remembered. Not of what an image has brought back, unless CRIU copied all of its memory.
    pub fn take(
        &self,
        subject: &Subject,
        sandbox: &Sandbox,
        handed: &Handed<'_>,
        how: impl Into<ImageTerms>,
    ) -> Result<Image, ImageError> {
        if sandbox.is_of_image() {
            return Err(ImageError::Unfit { reason: "its memory is that of an image already".into() });
        }
        let taken = self.write((subject, how.into()), sandbox, handed);
        if let Err(error @ (ImageError::Unfit { .. } | ImageError::TooLarge { .. })) = &taken {
            self.store.refuse(&subject.id(), subject, &self.environment, &error.to_string());
        }
        taken
    }

    fn write(
        &self,
        (subject, how): (&Subject, ImageTerms),
        sandbox: &Sandbox,
        handed: &Handed<'_>,
    ) -> Result<Image, ImageError> {
        let room = self.store.room()?;
        let image = self.store.work(sandbox)?;
        let work = self.store.work(sandbox)?;
        checkpoint::take(&self.engine, sandbox, handed, &image, &work)?;
        let group = crate::sandbox::root_id(subject.gid);
        let (mut files, apart) = files::take_over(&image.path, group, room, how.memory)?;
        let watched = how.watched.of_node(self.store.origin());
        let list = watched.encode().and_then(|bytes| files::add(&image.path, watched::FILE, &bytes));
        files.insert(watched::FILE.into(), list.map_err(at("write", image.path.join(watched::FILE)))?);
        let header = Header {
            subject: subject.clone(),
            environment: self.environment.clone(),
            taken_at: store::now(),
            handed: handed.known().map_err(at("look at", "what was handed over"))?,
            files,
            mapped: apart.mapped,
            shared: apart.shared,
        };
        self.store.publish(&subject.id(), &header, image)?;
        Ok(Image { id: subject.id(), header, watched: Arc::new(watched) })
    }

    /// Brings the processes of an image back in a fresh sandbox of the same kind. If that fails the sandbox is of no
    /// use any more, and the image is put aside if it is to blame.
    pub fn restore(&self, image: &Image, sandbox: &Sandbox, handed: &Handed<'_>) -> Result<Task, ImageError> {
        self.restore_watched(image, sandbox, handed, || true)
    }

    /// The same where something else may be to blame for a failure, which `is_to_blame` says afterwards.
    pub fn restore_watched(
        &self,
        image: &Image,
        sandbox: &Sandbox,
        handed: &Handed<'_>,
        is_to_blame: impl Fn() -> bool,
    ) -> Result<Task, ImageError> {
        let _in_use = self.store.hold(&image.id);
        let work = self.store.work(sandbox)?;
        let dir = self.store.path(&image.id);
        let Header { handed: known, files, mapped, shared, .. } = &image.header;
        let needs = Needs { known, mapped, shared, has_shm: files.contains_key(SHM_FILE) };
        let restored = checkpoint::restore(&self.engine, sandbox, (handed, needs), &dir, &work);
        match &restored {
            Ok(_) => self.store.touch(&image.id),
            Err(error) if error.is_of_image() && is_to_blame() => {
                self.put_aside(&image.id, image.subject(), &error.to_string());
            }
            // Nothing that happens beside an image gives its processes other rights.
            Err(error @ ImageError::LessFenced { .. }) => {
                self.put_aside(&image.id, image.subject(), &error.to_string());
            }
            Err(_) => {}
        }
        restored
    }

    /// Puts an image aside that has turned out to be wrong, with the reason, so that it is not used again. One that
    /// turns out wrong again and again is not taken again for a while.
    pub fn quarantine(&self, image: &Image, reason: &str) {
        self.put_aside(&image.id, image.subject(), reason);
    }

    /// Removes an image that there is no room for after all.
    pub fn discard(&self, image: &Image) {
        self.store.discard(&image.id);
    }

    fn put_aside(&self, id: &str, subject: &Subject, reason: &str) {
        tracing::warn!(site = %subject.site, "{QUARANTINED}: its image is put aside: {reason}");
        self.store.quarantine(id, subject, &self.environment, reason);
    }

    /// Forgets that a subject could not be imaged.
    pub fn forget_refusal(&self, subject: &Subject) {
        self.store.forget_refusal(&subject.id());
    }

    // === From node to node ===

    /// The archive of an image, with what it expects beside it.
    fn archive(&self, image: &Image, beside: Vec<u8>) -> Result<Archive, ImageError> {
        let dir = self.store.path(&image.id);
        let head = Head::new(image.header.clone(), beside)
            .map_err(|error| at("encode", dir.join(header::NAME))(error.into()))?;
        let files =
            image.header.files.iter().map(|(name, content)| (dir.join(name), content.bytes)).collect();
        Ok(Archive { head, files })
    }

    /// What another node is told of an image.
    pub fn offer(&self, image: &Image, beside: Vec<u8>) -> Result<Offer, ImageError> {
        let Archive { head, .. } = self.archive(image, beside)?;
        Ok(Offer {
            digest: head.digest(),
            bytes: head.bytes(),
            taken_at: image.taken_at(),
            subject: head.header.subject,
            environment: head.header.environment,
        })
    }

    /// Seals the archive of an image for the order's other keeper, from this byte on, and writes it to a pipe, at most so many
    /// bytes a second (0: no limit). It must be the one with this digest.
    pub fn send(
        &self,
        (image, beside): (&Image, Vec<u8>),
        (digest, offset): (Digest, u64),
        (order, to): (&TransferOrder, &OwnedFd),
        per_second: u64,
    ) -> Result<(), ImageError> {
        let _in_use = self.store.hold(&image.id);
        let archive = self.archive(image, beside)?;
        if archive.head.digest() != digest {
            return Err(ImageError::Foreign { reason: "there is another one now".into() });
        }
        match archive.write((order, offset), to, &self.pace, per_second) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written.map_err(at("send", "an image")),
        }
    }

    /// Whether an image of another node can be used here, of what is to be run as this subject.
    pub fn fits(&self, offer: &Offer, subject: &Subject) -> Result<(), ImageError> {
        let Subject { site, release, definition, base, uid, gid } = &offer.subject;
        let differs = if (site, release) != (&subject.site, &subject.release) {
            Some("it is of another site or release".into())
        } else if (definition, uid, gid) != (&subject.definition, &subject.uid, &subject.gid) {
            Some("its site's record, secrets or limits are others here".into())
        } else if *base != subject.base {
            Some("the files it ran on are others here".into())
        } else {
            offer.environment.differs(&self.environment)
        };
        match differs {
            Some(reason) => Err(ImageError::Foreign { reason }),
            None => self.store.room()?.holds(offer.bytes.saturating_mul(2)),
        }
    }

    /// How many bytes of the archive have come before and are right: a transfer goes on from there. And how many bytes the
    /// sealed stream has that brings the rest.
    pub fn resume(&self, offer: &Offer) -> Result<(u64, u64), ImageError> {
        let staged = self.staged(offer);
        let offset = staged.verified()?;
        Ok((offset, staged.terms(offset).sealed_bytes()))
    }

    fn staged(&self, offer: &Offer) -> Staged {
        let path = self.store.staging(&offer.subject.id());
        Staged { path, digest: offer.digest, bytes: offer.bytes }
    }

    /// Opens what is missing of an archive, from a pipe, and makes it an image if all of it is right. `put_beside` puts back
    /// what it expects beside it, before it can be used.
    pub fn receive(
        &self,
        offer: &Offer,
        (order, from): (&TransferOrder, &OwnedFd),
        per_second: u64,
        put_beside: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> Result<Image, ImageError> {
        let (staged, id) = (self.staged(offer), offer.subject.id());
        if let Err(why) = staged.read(from, order, (&self.pace, per_second))? {
            return Err(self.corrupt(&id, &why));
        }
        let work = self.store.closed_work()?;
        let head = match staged.unpack(&work, crate::sandbox::root_id(offer.subject.gid))? {
            Ok(head)
                if head.header.subject == offer.subject && head.header.environment == offer.environment =>
            {
                head
            }
            Ok(_) => return Err(self.corrupt(&id, "its header is of something else than was offered")),
            Err(why) => return Err(self.corrupt(&id, &why)),
        };
        put_beside(&head.beside).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => self.corrupt(&id, &format!("what is beside it: {error}")),
            _ => at("put back", "what an image expects")(error),
        })?;
        self.store.publish(&id, &head.header, work)?;
        let _ = std::fs::remove_file(&staged.path);
        let watched =
            self.store.watched(&id, &head.header).map_err(|reason| ImageError::Corrupt { reason })?;
        Ok(Image { id, header: head.header, watched: Arc::new(watched) })
    }

    fn corrupt(&self, id: &str, reason: &str) -> ImageError {
        self.store.quarantine_staged(id, reason);
        ImageError::Corrupt { reason: reason.into() }
    }

    /// Removes images nobody wants (`wanted` is false), old ones, and those beyond the limits, longest unused first.
    pub fn collect(&self, wanted: impl Fn(&Subject) -> bool) {
        self.store.collect(wanted);
    }

    /// All images, and what was put aside.
    pub fn list(&self) -> Vec<Listed> {
        self.store.list()
    }

    /// Where images are.
    pub fn dir(&self) -> PathBuf {
        self.store.dir().to_path_buf()
    }
}

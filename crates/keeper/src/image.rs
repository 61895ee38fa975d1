//! Images: the memory of an instance right after its start, on disk. From its image an instance
//! continues in milliseconds.
//!
//! CRIU takes an image in the instance's own sandbox, once for each release, and restores it in a
//! fresh one. An image is bound to its `ImageSubject` and to its node (`header::ImageEnvironment`).
//! Everything about it is checked before use. A wrong image is put aside with its reason, and the
//! instance starts cold instead. Its header names all of its files by their digests and carries an
//! authenticator that only this keeper can make. The rights of restored processes are compared with
//! those of their sandbox before any of them runs (`sandbox::rights`).
//!
//! Images hold all secrets of their application in plain text. Only root reaches their directory.
//! CRIU, which runs with a sandbox' rights, gets one image read-only. All calls here block: make
//! them from `workers`.
//!
//! Not here: when images are taken and used (`instances`), sandboxes (`sandbox`).

mod clock;
pub(crate) mod criu;
mod error;
pub(crate) mod files;
pub(crate) mod format;
pub(crate) mod rewrite;
mod seal;
pub(crate) mod store;
pub(crate) mod transfer;
pub(crate) mod watch;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nagaya_records::record::ImageMemory;
use serde::{Deserialize, Serialize};

use crate::image::criu::checkpoint::{CriuEnv, RestoreNeeds};
use crate::image::error::at;
use crate::image::format::archive::ArchiveHead;
use crate::image::format::header::ImageHeader;
use crate::image::store::image_store::ImageStore;
use crate::image::transfer::incoming::StagedArchive;
use crate::image::transfer::outgoing::{OutgoingArchive, TransferPacer};
use crate::paths::tenant_path::PathOwner;
use crate::sandbox::{Launcher, SHM_FILE, Sandbox, SandboxTask};

pub use crate::image::criu::checkpoint::HandedFds;
pub use crate::image::criu::program::{CriuProgram, CriuSearch, find as find_criu};
pub use crate::image::error::{
    CORRUPT, FOREIGN, ImageError, LESS_FENCED, NO_CRIU, NOT_ORDERED, QUARANTINED, STORE, UNFIT, UNSETTLED,
};
pub use crate::image::format::digest::Digest;
pub use crate::image::format::header::{ImageEnvironment, ImageSubject, base_digest};
pub use crate::image::store::image_store::{ImageLimits, ListedImage};
pub use crate::image::transfer::order::{
    ClusterKey, KEY_LEN, OrderError, TransferEnd, TransferOrder, give_order, verify_order,
};
pub use crate::image::watch::readings::{ReadRecorder, WatchTerms};
pub use crate::image::watch::watched::{PathState, WatchedInputs, WatchedTag};

/// An image that is whole and fits this node.
#[derive(Debug, Clone)]
pub struct Image {
    id: String,
    header: ImageHeader,
    watched: Arc<WatchedInputs>,
}

/// How an image is taken.
#[derive(Debug, Clone, Default)]
pub struct ImageTerms {
    pub memory: ImageMemory,
    /// Files and databases that it depends on.
    pub watched: WatchedInputs,
}

impl From<ImageMemory> for ImageTerms {
    /// Makes terms that depend on no file.
    fn from(memory: ImageMemory) -> Self {
        Self { memory, watched: WatchedInputs::default() }
    }
}

impl Image {
    pub fn subject(&self) -> &ImageSubject {
        &self.header.subject
    }

    pub fn bytes(&self) -> u64 {
        self.header.bytes()
    }

    /// Returns when it was taken, in seconds since 1970.
    pub fn taken_at(&self) -> u64 {
        self.header.taken_at
    }

    /// Returns the files and databases that it depends on.
    pub fn watched(&self) -> &WatchedInputs {
        &self.watched
    }
}

/// Result of the search for a subject's image.
#[derive(Debug)]
pub enum ImageLookup {
    Image(Box<Image>),
    /// There is none, or none that is right: take one.
    Nothing,
    /// The last try has shown that none can be taken, for this reason.
    ImageImpossible(String),
}

/// All images of this node, and the CRIU that makes them.
#[derive(Debug)]
pub struct NodeImages {
    engine: CriuEnv,
    environment: ImageEnvironment,
    store: ImageStore,
    pace: TransferPacer,
    /// Images that were found to be wrong before a try.
    found_wrong: AtomicU64,
}

/// Description of an image for another node, whose keeper decides by it whether it wants the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchiveOffer {
    /// Digest of the archive: of its header and all that is in it.
    pub digest: Digest,
    /// Length of the archive.
    pub bytes: u64,
    /// Returns when it was taken, in seconds since 1970.
    pub taken_at: u64,
    pub subject: ImageSubject,
    pub environment: ImageEnvironment,
}

impl NodeImages {
    /// Finds CRIU, lets it check the kernel, and opens the directory, which is made for root alone.
    pub fn open(
        dir: &Path,
        configured: Option<&Path>,
        launcher: &Launcher,
        limits: ImageLimits,
    ) -> Result<Self, ImageError> {
        let search = criu::program::find(configured);
        let reason = search.reason();
        let criu = search.found.ok_or(ImageError::NoCriu { reason })?;
        let facts = criu::facts::learn(&criu, launcher)?;
        let environment =
            ImageEnvironment::here(&criu.version, criu.build).map_err(at("read", "/proc/cpuinfo"))?;
        let store = ImageStore::open(dir, limits)?;
        Ok(Self {
            engine: CriuEnv { criu, facts },
            environment,
            store,
            pace: TransferPacer::default(),
            found_wrong: AtomicU64::new(0),
        })
    }

    pub fn criu(&self) -> &CriuProgram {
        &self.engine.criu
    }

    pub fn set_limits(&self, limits: ImageLimits) {
        self.store.set_limits(limits);
    }

    /// Searches an image and checks it: quickly, or fully if that was not done since the keeper's
    /// start. A damaged one is put aside.
    pub fn find(&self, subject: &ImageSubject) -> ImageLookup {
        let id = subject.id();
        if let Some(reason) = self.store.refusal(&id, subject, &self.environment) {
            return ImageLookup::ImageImpossible(reason);
        }
        let header = match self.store.header(&id) {
            Ok(Some(header)) => header,
            Ok(None) => return ImageLookup::Nothing,
            Err(why) => {
                self.found_wrong.fetch_add(1, Ordering::Relaxed);
                self.put_aside(&id, subject, &why);
                return ImageLookup::Nothing;
            }
        };
        let differs = match header.subject == *subject {
            true => header.environment.differs(&self.environment),
            false if header.subject.base != subject.base => {
                Some("the files it ran on have changed since".into())
            }
            false => Some("it is of another site, release or record".into()),
        };
        let is_past_use = self.store.is_past_use(header.taken_at);
        let why = differs.or_else(|| is_past_use.then(|| "it was taken too long ago".into()));
        if let Some(why) = why {
            tracing::info!(site = %subject.site, "its image is not used: {why}");
            return ImageLookup::Nothing;
        }
        let watched = self.store.check(&id, &header).and_then(|()| self.store.watched(&id, &header));
        match watched {
            Ok(watched) => {
                self.store.prefetch(&id, &header);
                ImageLookup::Image(Box::new(Image { id, header, watched: Arc::new(watched) }))
            }
            Err(why) => {
                self.found_wrong.fetch_add(1, Ordering::Relaxed);
                self.put_aside(&id, subject, &why);
                ImageLookup::Nothing
            }
        }
    }

    /// Returns how many were found to be wrong since the last call.
    pub fn take_found_wrong(&self) -> u64 {
        self.found_wrong.swap(0, Ordering::Relaxed)
    }

    /// Describes a change in a file that the image depends on, or returns `None`. Blocks.
    pub fn find_change(&self, image: &Image, owner: &PathOwner) -> Option<String> {
        image.watched.find_change(owner, &self.store.origin())
    }

    /// Removes the image of a subject, if there is one, because it must not be used again.
    pub fn remove(&self, subject: &ImageSubject) {
        self.store.discard(&subject.id());
    }

    /// Whether another image should replace it, at a moment at which nobody waits for it.
    pub fn is_old(&self, image: &Image) -> bool {
        self.store.is_old(image.taken_at())
    }

    /// Takes an image of all processes in a sandbox, which continue, and replaces an older one. A
    /// failure is remembered. Not for restored processes, unless CRIU copied all of their memory.
    pub fn take(
        &self,
        subject: &ImageSubject,
        sandbox: &Sandbox,
        handed: &HandedFds<'_>,
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
        (subject, how): (&ImageSubject, ImageTerms),
        sandbox: &Sandbox,
        handed: &HandedFds<'_>,
    ) -> Result<Image, ImageError> {
        let room = self.store.room()?;
        let image = self.store.work(sandbox)?;
        let work = self.store.work(sandbox)?;
        criu::checkpoint::take(&self.engine, sandbox, handed, &image, &work)?;
        let group = crate::sandbox::root_id(subject.gid);
        let (mut files, apart) = seal::take_over(&image.path, group, room, how.memory)?;
        let watched = how.watched.of_node(self.store.origin());
        let list = watched.encode().and_then(|bytes| files::add(&image.path, watch::watched::FILE, &bytes));
        files.insert(
            watch::watched::FILE.into(),
            list.map_err(at("write", image.path.join(watch::watched::FILE)))?,
        );
        let header = ImageHeader {
            subject: subject.clone(),
            environment: self.environment.clone(),
            taken_at: clock::unix_now(),
            handed: handed.known().map_err(at("look at", "what was handed over"))?,
            files,
            mapped: apart.mapped,
            shared: apart.shared,
        };
        self.store.publish(&subject.id(), &header, image)?;
        Ok(Image { id: subject.id(), header, watched: Arc::new(watched) })
    }

    /// Restores the processes of an image in a fresh sandbox of the same kind. After a failure the
    /// sandbox is useless. If the image is to blame, it is put aside.
    pub fn restore(
        &self,
        image: &Image,
        sandbox: &Sandbox,
        handed: &HandedFds<'_>,
    ) -> Result<SandboxTask, ImageError> {
        self.restore_watched(image, sandbox, handed, || true)
    }

    /// As `restore`, where something else may be to blame for a failure. `is_to_blame` decides that
    /// afterwards.
    pub fn restore_watched(
        &self,
        image: &Image,
        sandbox: &Sandbox,
        handed: &HandedFds<'_>,
        is_to_blame: impl Fn() -> bool,
    ) -> Result<SandboxTask, ImageError> {
        let _in_use = self.store.hold(&image.id);
        let work = self.store.work(sandbox)?;
        let dir = self.store.path(&image.id);
        let ImageHeader { handed: known, files, mapped, shared, .. } = &image.header;
        let needs = RestoreNeeds { known, mapped, shared, has_shm: files.contains_key(SHM_FILE) };
        let restored = criu::checkpoint::restore(&self.engine, sandbox, (handed, needs), &dir, &work);
        match &restored {
            Ok(_) => self.store.touch(&image.id),
            Err(error) if error.is_of_image() && is_to_blame() => {
                self.put_aside(&image.id, image.subject(), &error.to_string());
            }
            // No outside event gives its processes other rights.
            Err(error @ ImageError::LessFenced { .. }) => {
                self.put_aside(&image.id, image.subject(), &error.to_string());
            }
            Err(_) => {}
        }
        restored
    }

    /// Puts a wrong image aside, with the reason, so that it is not used again. After several wrong
    /// images, none is taken again for a while.
    pub fn quarantine(&self, image: &Image, reason: &str) {
        self.put_aside(&image.id, image.subject(), reason);
    }

    /// Removes an image that has no room after all.
    pub fn discard(&self, image: &Image) {
        self.store.discard(&image.id);
    }

    fn put_aside(&self, id: &str, subject: &ImageSubject, reason: &str) {
        tracing::warn!(site = %subject.site, "{QUARANTINED}: its image is put aside: {reason}");
        self.store.quarantine(id, subject, &self.environment, reason);
    }

    /// Forgets that a subject could not be imaged.
    pub fn forget_refusal(&self, subject: &ImageSubject) {
        self.store.forget_refusal(&subject.id());
    }

    // === From node to node ===

    /// Makes the archive of an image, with the files that it expects beside it.
    fn archive(&self, image: &Image, beside: Vec<u8>) -> Result<OutgoingArchive, ImageError> {
        let dir = self.store.path(&image.id);
        let head = ArchiveHead::new(image.header.clone(), beside)
            .map_err(|error| at("encode", dir.join(format::header::NAME))(error.into()))?;
        let files =
            image.header.files.iter().map(|(name, content)| (dir.join(name), content.bytes)).collect();
        Ok(OutgoingArchive { head, files })
    }

    /// Describes an image for another node.
    pub fn offer(&self, image: &Image, beside: Vec<u8>) -> Result<ArchiveOffer, ImageError> {
        let OutgoingArchive { head, .. } = self.archive(image, beside)?;
        Ok(ArchiveOffer {
            digest: head.digest(),
            bytes: head.bytes(),
            taken_at: image.taken_at(),
            subject: head.header.subject,
            environment: head.header.environment,
        })
    }

    /// Seals the archive of an image for the order's other keeper, from this byte on. Writes it to
    /// a pipe, at most `per_second` bytes a second (0: no limit). It must be the one with this
    /// digest.
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

    /// Whether an image of another node can be used here, for this subject.
    pub fn fits(&self, offer: &ArchiveOffer, subject: &ImageSubject) -> Result<(), ImageError> {
        let ImageSubject { site, release, definition, base, uid, gid } = &offer.subject;
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

    /// Returns how many correct bytes of the archive have come before, from which a transfer
    /// continues. Also returns the length of the sealed stream with the rest.
    pub fn resume(&self, offer: &ArchiveOffer) -> Result<(u64, u64), ImageError> {
        let staged = self.staged(offer);
        let offset = staged.verified()?;
        Ok((offset, staged.terms(offset).sealed_bytes()))
    }

    fn staged(&self, offer: &ArchiveOffer) -> StagedArchive {
        let path = self.store.staging(&offer.subject.id());
        StagedArchive { path, digest: offer.digest, bytes: offer.bytes }
    }

    /// Opens the missing part of an archive, from a pipe. Makes it an image if all of it is
    /// correct. `put_beside` restores the files that it expects beside it, before it can be used.
    pub fn receive(
        &self,
        offer: &ArchiveOffer,
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

    /// Removes unwanted images (`wanted` is false), old ones, and those beyond the limits, longest
    /// unused first.
    pub fn collect(&self, wanted: impl Fn(&ImageSubject) -> bool) {
        self.store.collect(wanted);
    }

    /// Lists all images, and those that were put aside.
    pub fn list(&self) -> Vec<ListedImage> {
        self.store.list()
    }

    /// Returns the directory of images.
    pub fn dir(&self) -> PathBuf {
        self.store.dir().to_path_buf()
    }
}

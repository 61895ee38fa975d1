//! Images: the memory of an instance right after its start, on disk, from which it goes on in milliseconds.
//!
//! An image is taken by CRIU in the instance's own sandbox, once for each release, and brought back in a fresh one. It
//! is bound to what it was taken of (`Subject`) and where (`header::Environment`), and everything about it is checked
//! before it is used: a wrong one is put aside with its reason, and the instance starts cold instead.
//!
//! Images hold all secrets of their application in plain text. Only root reaches the directory they are in; CRIU, which
//! runs with a sandbox' rights, gets one image read-only. All calls here block: make them from `workers`.
//!
//! Not here: when images are taken and used (`instances`), sandboxes (`sandbox`).

mod checkpoint;
mod criu;
mod digest;
mod facts;
mod files;
mod header;
mod log;
mod store;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nagaya_base::Code;

use crate::sandbox::{Launcher, Sandbox, SandboxError, Task};

use checkpoint::Engine;
use header::{Environment, Header};
use store::Store;

pub use checkpoint::Handed;
pub use criu::{Criu, Search, find as find_criu};
pub use digest::Digest;
pub use header::{Subject, base_digest};
pub use store::{Limits, Listed};

/// There is no CRIU that works here.
pub const NO_CRIU: Code = Code(334);
/// An instance cannot be imaged.
pub const UNFIT: Code = Code(335);
/// An image was put aside.
pub const QUARANTINED: Code = Code(336);
/// The directory of images cannot be used.
pub const STORE: Code = Code(337);

/// Why an image was not taken, or not brought back.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("there is no usable CRIU: {reason}")]
    NoCriu { reason: String },
    #[error("CRIU does not work in a sandbox on this node: {said}")]
    Useless { said: String },
    #[error("it cannot be imaged: {reason}")]
    Unfit { reason: String },
    #[error("no space is left for images: {reason}")]
    NoSpace { reason: String },
    #[error("its image would take {bytes} bytes; {bytes_max} are allowed")]
    TooLarge { bytes: u64, bytes_max: u64 },
    #[error("its image cannot be brought back: {reason}")]
    NotRestored { reason: String },
    #[error("CRIU did not end within {within:?}")]
    Timeout { within: Duration },
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
            Self::NotRestored { .. } | Self::Timeout { .. } => QUARANTINED,
            Self::NoSpace { .. } | Self::Io { .. } => STORE,
            Self::Sandbox(error) => error.code(),
        }
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
        Ok(Self { engine: Engine { criu, facts }, environment, store })
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
        if let Some(why) = differs {
            tracing::info!(site = %subject.site, "its image is not used: {why}");
            return Found::Nothing;
        }
        match self.store.check(&id, &header) {
            Ok(()) => {
                self.store.prefetch(&id, &header);
                Found::Image(Box::new(Image { id, header }))
            }
            Err(why) => {
                self.put_aside(&id, subject, &why);
                Found::Nothing
            }
        }
    }

    /// Takes an image of all processes in a sandbox, which go on running, in place of one there may be. What cannot be
    /// imaged is remembered.
    pub fn take(
        &self,
        subject: &Subject,
        sandbox: &Sandbox,
        handed: &Handed<'_>,
    ) -> Result<Image, ImageError> {
        let taken = self.write(subject, sandbox, handed);
        if let Err(error @ (ImageError::Unfit { .. } | ImageError::TooLarge { .. })) = &taken {
            self.store.refuse(&subject.id(), subject, &self.environment, &error.to_string());
        }
        taken
    }

    fn write(&self, subject: &Subject, sandbox: &Sandbox, handed: &Handed<'_>) -> Result<Image, ImageError> {
        let room = self.store.room()?;
        let image = self.store.work(sandbox)?;
        let work = self.store.work(sandbox)?;
        checkpoint::take(&self.engine, sandbox, handed, &image, &work)?;
        let files = files::take_over(&image.path, crate::sandbox::root_id(subject.gid), room)?;
        let header = Header {
            subject: subject.clone(),
            environment: self.environment.clone(),
            taken_at: store::now(),
            handed: handed.known().map_err(at("look at", "what was handed over"))?,
            files,
        };
        self.store.publish(&subject.id(), &header, image)?;
        Ok(Image { id: subject.id(), header })
    }

    /// Brings the processes of an image back in a fresh sandbox of the same kind. If that fails the sandbox is of no
    /// use any more, and the image is put aside if it is to blame.
    pub fn restore(&self, image: &Image, sandbox: &Sandbox, handed: &Handed<'_>) -> Result<Task, ImageError> {
        let _in_use = self.store.hold(&image.id);
        let work = self.store.work(sandbox)?;
        let dir = self.store.path(&image.id);
        let what = (handed, image.header.handed.as_slice());
        let restored = checkpoint::restore(&self.engine, sandbox, what, &dir, &work);
        match &restored {
            Ok(_) => self.store.touch(&image.id),
            Err(error @ (ImageError::NotRestored { .. } | ImageError::Timeout { .. })) => {
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

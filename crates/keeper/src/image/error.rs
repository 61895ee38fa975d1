//! Why an image was not taken, or not brought back: codes for the operator, and what is to blame.
//!
//! Not here: their pages (`docs/errors`).

use std::io;
use std::path::Path;
use std::time::Duration;

use nagaya_base::Code;

use crate::sandbox::SandboxError;

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
/// No supervisor has ordered the transfer of an image.
pub const NOT_ORDERED: Code = Code(366);
/// An image would have restored a process with other rights than its sandbox gives.
pub const LESS_FENCED: Code = Code(367);

/// Why an image was not taken, or not restored.
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

/// Adds verb and path to an I/O error: `at("open", path)`.
pub fn at(verb: &str, what: impl AsRef<Path>) -> impl FnOnce(io::Error) -> ImageError {
    let what = format!("{verb} {}", what.as_ref().display());
    move |error| ImageError::Io { what, error }
}

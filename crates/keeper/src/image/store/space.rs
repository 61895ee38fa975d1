//! Limits the space of one image on the disk.
//!
//! Not here: the limit of all images together (`image_store`).

use crate::image::error::ImageError;

/// Bytes that one image may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceBudget {
    /// By the limit of all images.
    pub limit: u64,
    /// By the space on the disk now.
    pub left: u64,
}

impl SpaceBudget {
    /// Whether an image of this length may be kept. One that is too large only for the disk's
    /// present space may fit another time.
    pub fn holds(self, bytes: u64) -> Result<(), ImageError> {
        if bytes > self.limit {
            return Err(ImageError::TooLarge { bytes, bytes_max: self.limit });
        }
        if bytes > self.left {
            let reason = format!("it would need {bytes} bytes; {} are available", self.left);
            return Err(ImageError::NoSpace { reason });
        }
        Ok(())
    }
}

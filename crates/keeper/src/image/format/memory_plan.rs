//! The part of a header about memory that CRIU does not fill. Such memory is mapped from files, or
//! written while CRIU runs. Pure.
//!
//! Not here: which memory that is (`rewrite`).

use serde::{Deserialize, Serialize};

/// Maximum number of processes of one image whose memory is mapped, those with most of it. Each
/// file is a descriptor that CRIU is handed.
pub const MAPPED_FILES_MAX: usize = 32;

/// Maximum number of ranges in which calls fail. The filter for them then has about 2,000 of the
/// kernel's 4,096 instructions.
pub const RANGES_MAX: usize = 64;

/// Maximum number of shared memories of one image, those with most pages. Each is two descriptors
/// on the way to CRIU.
pub const MEMORIES_MAX: usize = 8;

/// Maximum number of parts of all of them that are written, each by a call of its own.
pub const PARTS_MAX: usize = 1024;

/// Maximum length of one, as far as processes map it, bytes.
pub const LEN_MAX: u64 = 1 << 40;

/// The mapped part of an image's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedMemory {
    /// Files of the image that processes map.
    pub files: Vec<String>,
    /// Mapped ranges, from the first byte to the one behind the last, in order.
    pub ranges: Vec<(u64, u64)>,
}

impl MappedMemory {
    /// Whether it can belong to an image with files of these names.
    pub fn is_sound(&self, is_file: impl Fn(&str) -> bool) -> bool {
        let in_order = self.ranges.windows(2).all(|pair| pair[0].1 < pair[1].0);
        self.files.len() <= MAPPED_FILES_MAX
            && self.ranges.len() <= RANGES_MAX
            && in_order
            && self.ranges.iter().all(|(start, end)| start < end)
            && self.files.iter().all(|name| is_file(name))
    }
}

/// One shared memory of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedMemory {
    /// File of the image with its contents, one part after the other.
    pub file: String,
    /// Length of the memory, bytes.
    pub len: u64,
    /// Ranges with contents, from the first byte to the one behind the last, in order. The rest is
    /// zero.
    pub parts: Vec<(u64, u64)>,
}

impl SharedMemory {
    /// Whether these can belong to an image with files of these names and lengths.
    pub fn are_sound(all: &[Self], len: impl Fn(&str) -> Option<u64>) -> bool {
        let is_sound = |one: &Self| {
            let in_order = one.parts.windows(2).all(|pair| pair[0].1 <= pair[1].0);
            let in_memory = one.parts.iter().all(|(start, end)| start < end && *end <= one.len);
            // In order and in memory, so the sum is at most its length.
            let fits = || len(&one.file) == Some(one.parts.iter().map(|(start, end)| end - start).sum());
            one.len <= LEN_MAX && in_order && in_memory && fits()
        };
        all.len() <= MEMORIES_MAX
            && all.iter().map(|one| one.parts.len()).sum::<usize>() <= PARTS_MAX
            && all.iter().all(is_sound)
    }
}

//! One entry in a file of the log: a head, and the entry's bytes.
//!
//! The head has the length, a checksum (CRC-32), and up to where the log was on the disk when the
//! entry was written. So a reader can tell a tail that a power cut has torn from an entry that was
//! damaged later. Not here: files (`segment_log`), what the bytes mean.

/// First bytes of a head. Frames begin at multiples of `ALIGNMENT`.
const MAGIC: u32 = 0x4e47_564c;

/// Length of a head, bytes: magic, checksum, length, number, and what is on the disk.
pub const HEAD_LEN: usize = 32;

/// Frames begin at multiples of this, bytes.
pub const ALIGNMENT: usize = 8;

/// Maximum length of an entry, bytes. Larger files are stored beside the log.
pub const ENTRY_LEN_MAX: usize = 16 << 20;

/// A frame that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogFrame<'a> {
    /// Number of the frame in the node's log, from 1.
    pub number: u64,
    /// All frames up to this number were on the disk when it was written.
    pub synced: u64,
    pub entry: &'a [u8],
}

impl<'a> LogFrame<'a> {
    /// Returns the length of a frame with an entry of this length, with the padding after it.
    pub const fn len_for(entry_len: usize) -> usize {
        (HEAD_LEN + entry_len).next_multiple_of(ALIGNMENT)
    }

    /// Adds the frame to these bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        let begin = to.len();
        let len = u32::try_from(self.entry.len()).expect("entries have a maximum length");
        to.extend_from_slice(&MAGIC.to_le_bytes());
        to.extend_from_slice(&[0; 4]);
        to.extend_from_slice(&len.to_le_bytes());
        to.extend_from_slice(&[0; 4]);
        to.extend_from_slice(&self.number.to_le_bytes());
        to.extend_from_slice(&self.synced.to_le_bytes());
        to.extend_from_slice(self.entry);
        let sum = crc32fast::hash(&to[begin + 8..]);
        to[begin + 4..begin + 8].copy_from_slice(&sum.to_le_bytes());
        to.resize(begin + Self::len_for(self.entry.len()), 0);
    }

    /// Returns the frame at the begin of these bytes. `None`: there is none, or not the whole of
    /// it.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let head = bytes.get(..HEAD_LEN)?;
        let half = |at: usize| head[at..at + 4].try_into().map(u32::from_le_bytes).unwrap_or_default();
        let whole = |at: usize| head[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
        let len = usize::try_from(half(8)).ok().filter(|len| *len <= ENTRY_LEN_MAX)?;
        if half(0) != MAGIC || half(12) != 0 {
            return None;
        }
        let summed = bytes.get(8..HEAD_LEN + len)?;
        let is_whole = crc32fast::hash(summed) == half(4) && whole(24) < whole(16);
        is_whole.then(|| Self { number: whole(16), synced: whole(24), entry: &summed[HEAD_LEN - 8..] })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(number: u64, synced: u64, entry: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        LogFrame { number, synced, entry }.write(&mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn a_frame_is_read_as_it_was_written(
            number in 1_u64..,
            entry in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let bytes = frame(number, number - 1, &entry);
            prop_assert_eq!(bytes.len(), LogFrame::len_for(entry.len()));
            let read = LogFrame::read(&bytes);
            prop_assert_eq!(read, Some(LogFrame { number, synced: number - 1, entry: &entry }));
        }

        #[test]
        fn a_frame_with_a_wrong_bit_is_none(
            entry in proptest::collection::vec(any::<u8>(), 0..300),
            at in any::<prop::sample::Index>(),
            bit in 0_u8..8,
        ) {
            let mut bytes = frame(7, 3, &entry);
            let at = at.index(HEAD_LEN + entry.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert_eq!(LogFrame::read(&bytes), None);
        }

        #[test]
        fn a_frame_that_is_cut_is_none(entry in proptest::collection::vec(any::<u8>(), 0..100), cut in 1_usize..100) {
            let bytes = frame(7, 3, &entry);
            let whole = HEAD_LEN + entry.len();
            prop_assert_eq!(LogFrame::read(&bytes[..whole.saturating_sub(cut)]), None);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = LogFrame::read(&bytes);
        }
    }
}

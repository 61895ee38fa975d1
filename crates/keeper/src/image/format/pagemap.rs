//! CRIU's lists of pages: the ranges of memory in a file of pages, in that file's order.
//!
//! Two words that say what it is, then messages of protobuf, each behind its length: one that names
//! the file of pages, and one for each stretch. CRIU writes them with the rights of a sandbox, so
//! they are as hostile as what runs there. A list is understood to its last byte or not at all,
//! because what is not understood cannot be written again. Not here: what is done with them
//! (`holes`).

use prost::Message;

/// Maximum length of a list that is read, bytes: some 60,000 entries.
pub const LEN_MAX: u64 = 1 << 20;

/// Magic words of a list: an image, of a list of pages.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];

/// Length of the number before a message, bytes.
const PREFIX: usize = 4;

/// Number of bytes from which its file of pages is known: no head is longer.
pub const HEAD_LEN: usize = MAGIC.len() + PREFIX + 6;

/// Its pages are in the file of pages, and not in an older image.
const PRESENT: u32 = 4;
/// As `PRESENT`, and CRIU could load them later.
const PRESENT_LAZY: u32 = PRESENT | 2;

const CUT: &str = "is cut";
const UNKNOWN: &str = "has something that is not known";

#[derive(Clone, PartialEq, Message)]
struct PagemapHead {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

/// Memory without a gap.
#[derive(Clone, PartialEq, Message)]
pub struct PagemapEntry {
    /// In a list of shared memory, relative to that memory's beginning.
    #[prost(uint64, required, tag = "1")]
    pub address: u64,
    /// Number of pages, until CRIU 4.1; 0 from 4.2 on.
    #[prost(uint32, required, tag = "2")]
    pages_32: u32,
    #[prost(bool, optional, tag = "3")]
    in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    /// Number of pages, from CRIU 4.2 on.
    #[prost(uint64, optional, tag = "5")]
    pages_64: Option<u64>,
}

impl PagemapEntry {
    pub fn pages(&self) -> u64 {
        self.pages_64.unwrap_or(self.pages_32.into())
    }

    /// Returns a part of it: `pages` pages, from page `first` on.
    pub fn part(&self, first: u64, pages: u64, page_len: u64) -> Self {
        let address = self.address.saturating_add(first.saturating_mul(page_len));
        match self.pages_64 {
            Some(_) => Self { address, pages_64: Some(pages), ..self.clone() },
            // No more than the whole, which fits.
            None => Self { address, pages_32: pages.try_into().unwrap_or(u32::MAX), ..self.clone() },
        }
    }

    fn is_plain(&self) -> bool {
        let counts = matches!((self.pages_32, self.pages_64), (0, Some(1..)) | (1.., None));
        counts && self.in_parent.is_none() && matches!(self.flags, Some(PRESENT | PRESENT_LAZY))
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Pagemap {
    /// The number in the name of its file of pages.
    pub pages_id: u32,
    pub stretches: Vec<PagemapEntry>,
}

impl Pagemap {
    /// Returns the number of the file of pages, from a list that begins with these bytes.
    pub fn pages_id(bytes: &[u8]) -> Result<u32, &'static str> {
        let mut rest = bytes.strip_prefix(&MAGIC).ok_or("is no list of pages")?;
        let head = PagemapHead::decode(message(&mut rest)?).map_err(|_| UNKNOWN)?;
        Ok(head.pages_id)
    }

    /// Parses a list. The error follows the list's name.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut list = Self { pages_id: Self::pages_id(bytes)?, stretches: Vec::new() };
        let mut rest = &bytes[MAGIC.len()..];
        message(&mut rest)?;
        while !rest.is_empty() {
            let stretch = PagemapEntry::decode(message(&mut rest)?).map_err(|_| UNKNOWN)?;
            if !stretch.is_plain() {
                return Err("has pages that are elsewhere");
            }
            list.stretches.push(stretch);
        }
        // A reader skips unknown fields of a message.
        if list.encode() == bytes { Ok(list) } else { Err(UNKNOWN) }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        append(&mut bytes, &PagemapHead { pages_id: self.pages_id });
        self.stretches.iter().for_each(|stretch| append(&mut bytes, stretch));
        bytes
    }

    /// Returns its number of pages, if they are in order and all of it can be memory.
    pub fn pages(&self, page_len: u64) -> Option<u64> {
        let (mut all, mut end) = (0_u64, 0_u64);
        for stretch in &self.stretches {
            let follows = stretch.address >= end && stretch.address.is_multiple_of(page_len);
            end = stretch.address.checked_add(stretch.pages().checked_mul(page_len)?)?;
            all = all.checked_add(stretch.pages())?;
            if !follows {
                return None;
            }
        }
        Some(all)
    }
}

/// Returns the next message of an image. The error follows its name.
pub fn message<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], &'static str> {
    let (len, after) = rest.split_first_chunk::<PREFIX>().ok_or(CUT)?;
    let len = usize::try_from(u32::from_le_bytes(*len)).map_err(|_| CUT)?;
    let (message, after) = after.split_at_checked(len).ok_or(CUT)?;
    *rest = after;
    Ok(message)
}

pub fn append(bytes: &mut Vec<u8>, message: &impl Message) {
    // Some tens of bytes.
    let len = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    bytes.extend(len.to_le_bytes());
    bytes.extend(message.encode_to_vec());
}

pub fn pages_name(id: u32) -> String {
    format!("pages-{id}.img")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A stretch as CRIU 4.2 writes it, or as older ones do.
    pub fn stretch(address: u64, pages: u32, is_new: bool) -> PagemapEntry {
        let (pages_32, pages_64) = if is_new { (0, Some(pages.into())) } else { (pages, None) };
        PagemapEntry { address, pages_32, in_parent: None, flags: Some(PRESENT), pages_64 }
    }

    fn list() -> Pagemap {
        Pagemap { pages_id: 3, stretches: vec![stretch(0, 256, true), stretch(0x20_0000, 1, true)] }
    }

    /// As CRIU 4.2.1 has written it.
    #[test]
    fn a_list_of_criu_is_understood() {
        let bytes = [
            &MAGIC[..],
            &[2, 0, 0, 0, 0x08, 3],
            &[9, 0, 0, 0, 0x08, 0, 0x10, 0, 0x20, 4, 0x28, 0x80, 0x02],
            &[11, 0, 0, 0, 0x08, 0x80, 0x80, 0x80, 0x01, 0x10, 0, 0x20, 4, 0x28, 1],
        ]
        .concat();
        assert_eq!(Pagemap::decode(&bytes), Ok(list()));
        assert_eq!(Pagemap::pages_id(&bytes[..HEAD_LEN]), Ok(3));
        assert_eq!(list().encode(), bytes);
    }

    #[test]
    fn a_list_that_is_cut_or_has_more_is_not_understood() {
        let bytes = list().encode();
        let ends = [8 + 6, 8 + 6 + 13, bytes.len()];
        for end in 0..bytes.len() {
            assert_eq!(Pagemap::decode(&bytes[..end]).is_ok(), ends.contains(&end), "{end}");
        }
        assert_eq!(Pagemap::decode(&[&bytes[..], &[0, 0, 0]].concat()), Err(CUT));
        assert_eq!(Pagemap::decode(&[&bytes[..], &[255; 8]].concat()), Err(CUT));
        // A field 6, in the head and in a stretch; a number written longer than need be; one twice.
        for (message, at) in
            [(&[0x08, 3, 0x30, 1][..], 8), (&[0x08, 0x83, 0x00], 8), (&[0x08, 3, 0x08, 3], 8)]
        {
            let mut bytes = bytes[..at].to_vec();
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(message);
            assert_eq!(Pagemap::decode(&bytes), Err(UNKNOWN), "{message:?}");
        }
    }

    #[test]
    fn pages_that_are_elsewhere_are_not_understood() {
        let plain = stretch(0, 1, true);
        let others = [
            PagemapEntry { flags: Some(5), ..plain.clone() },
            PagemapEntry { flags: Some(2), ..plain.clone() },
            PagemapEntry { flags: Some(1), ..plain.clone() },
            PagemapEntry { flags: None, ..plain.clone() },
            PagemapEntry { in_parent: Some(true), ..plain.clone() },
            PagemapEntry { pages_32: 1, ..plain.clone() },
            PagemapEntry { pages_64: Some(0), ..plain.clone() },
            PagemapEntry { pages_64: None, ..plain.clone() },
        ];
        for other in others {
            let list = Pagemap { pages_id: 1, stretches: vec![plain.clone(), other] };
            assert!(Pagemap::decode(&list.encode()).is_err(), "{list:?}");
        }
    }

    #[test]
    fn memory_that_cannot_be_is_not_counted() {
        let pages =
            |stretches: &[PagemapEntry]| Pagemap { pages_id: 1, stretches: stretches.to_vec() }.pages(4096);
        assert_eq!(list().pages(4096), Some(257));
        assert_eq!(pages(&[stretch(0, 2, true), stretch(8192, 1, false)]), Some(3));
        assert_eq!(pages(&[stretch(0, 2, true), stretch(4096, 1, true)]), None, "over another");
        assert_eq!(pages(&[stretch(8192, 1, true), stretch(0, 1, true)]), None, "in another order");
        assert_eq!(pages(&[stretch(100, 1, true)]), None, "in the middle of a page");
        let mut huge = stretch(0, 1, true);
        huge.pages_64 = Some(u64::MAX / 4096 + 1);
        assert_eq!(pages(&[huge]), None, "more than there is");
        assert_eq!(pages(&[stretch(u64::MAX - 4095, 1, true)]), None, "over the end");
    }

    #[test]
    fn a_part_is_written_as_the_whole() {
        assert_eq!(stretch(8192, 9, true).part(2, 3, 4096), stretch(16384, 3, true));
        assert_eq!(stretch(8192, 9, false).part(2, 3, 4096), stretch(16384, 3, false));
    }
}

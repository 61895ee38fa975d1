//! CRIU's lists of mappings: the layout of a process' memory.
//!
//! A word that says what it is, and one message of protobuf behind its length. CRIU writes it with
//! the rights of a sandbox, so it is as hostile as what runs there. To look at one it is enough
//! that it reads; one that is to be written again must come out as it was, because fields that
//! nobody knows would be lost. Not here: what is looked for (`memory`), what is changed (`mapped`),
//! which pages are where (`pagemap`).

use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{self, DecodeContext, WireType};

use crate::image::format::pagemap::message;

/// Maximum length of a list that is read: some 200,000 mappings.
pub const LEN_MAX: u64 = 8 << 20;

/// Magic word of a list: an image, of a process' memory.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];

/// Fields of the message that are read.
const PROGRAM: u32 = 12;
const MAPPING: u32 = 14;

/// Bits of `MemoryMapping::status`: regular memory, memory made by `brk`, and the other kinds.
pub const REGULAR: u32 = 1;
pub const HEAP: u32 = 1 << 5;
pub const FILE_PRIVATE: u32 = 1 << 6;
pub const FILE_SHARED: u32 = 1 << 7;
pub const SHARED: u32 = 1 << 8;
pub const PRIVATE: u32 = 1 << 9;

const UNKNOWN: &str = "has what is no mapping";

/// One mapping (`vma_entry`).
#[derive(Clone, PartialEq, Message)]
pub struct MemoryMapping {
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
    /// Its offset in its file.
    #[prost(uint64, required, tag = "3")]
    pub offset: u64,
    /// The number of its file, or its inode's if it is `SHARED` or `PRIVATE`. 0 for private memory
    /// without a file.
    #[prost(uint64, required, tag = "4")]
    pub memory: u64,
    /// `PROT_*` of mmap(2).
    #[prost(uint32, required, tag = "5")]
    pub protection: u32,
    /// `MAP_*` of mmap(2).
    #[prost(uint32, required, tag = "6")]
    pub flags: u32,
    #[prost(uint32, required, tag = "7")]
    pub status: u32,
    #[prost(sint64, required, tag = "8")]
    pub fd: i64,
    /// A bit for each `MADV_*` of madvise(2) that applies.
    #[prost(uint64, optional, tag = "9")]
    pub advice: Option<u64>,
    /// How its file is opened.
    #[prost(uint32, optional, tag = "10")]
    pub file_flags: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct MappingList {
    pub all: Vec<MemoryMapping>,
    /// The number of the executed file.
    pub program: u32,
    /// Fields before the mappings, and behind them, unchanged.
    before: Vec<u8>,
    behind: Vec<u8>,
}

impl MappingList {
    /// Parses a list. The error follows the list's name.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut rest = bytes.strip_prefix(&MAGIC).ok_or("is no list of mappings")?;
        let mut fields = message(&mut rest)?;
        if !rest.is_empty() {
            return Err("has more than a process' mappings");
        }
        let mut list = Self::default();
        while fields.has_remaining() {
            list.field(&mut fields).map_err(|_| UNKNOWN)?;
        }
        Ok(list)
    }

    fn field(&mut self, rest: &mut &[u8]) -> Result<(), prost::DecodeError> {
        let whole = *rest;
        let (tag, kind) = encoding::decode_key(rest)?;
        if (tag, kind) == (MAPPING, WireType::LengthDelimited) {
            self.all.push(MemoryMapping::decode_length_delimited(rest)?);
            return Ok(());
        }
        if (tag, kind) == (PROGRAM, WireType::Varint) {
            let mut value = *rest;
            self.program = u32::try_from(encoding::decode_varint(&mut value)?).unwrap_or_default();
        }
        encoding::skip_field(kind, tag, rest, DecodeContext::default())?;
        let field = &whole[..whole.len() - rest.len()];
        if self.all.is_empty() { &mut self.before } else { &mut self.behind }.extend_from_slice(field);
        Ok(())
    }

    /// Returns the same process with other mappings, and another number for the executed file.
    pub fn with(&self, all: Vec<MemoryMapping>, program: u32) -> Self {
        let mut behind = self.behind.clone();
        if program != self.program {
            // The last occurrence of a field counts (Protocol Buffers, "Encoding").
            encoding::uint32::encode(PROGRAM, &program, &mut behind);
        }
        Self { all, program, behind, before: self.before.clone() }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut fields = self.before.clone();
        for mapping in &self.all {
            encoding::message::encode(MAPPING, mapping, &mut fields);
        }
        fields.extend_from_slice(&self.behind);
        let mut bytes = MAGIC.to_vec();
        // No longer than the list that was read, and a few hundred bytes for each added mapping.
        bytes.extend(u32::try_from(fields.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(fields);
        bytes
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// As CRIU 4.2 has written them: of a program's text, and of shared memory.
    const TEXT: [u8; 24] = [
        0x08, 0x80, 0x80, 0x80, 0x02, 0x10, 0x80, 0xe0, 0x87, 0x02, 0x18, 0x00, 0x20, 0x01, 0x28, 0x01, 0x30,
        0x02, 0x38, 0x41, 0x40, 0x01, 0x50, 0x00,
    ];
    const MEMORY: [u8; 33] = [
        0x08, 0x80, 0xa0, 0xff, 0xf7, 0xf9, 0xe1, 0x1f, 0x10, 0x80, 0xa0, 0x80, 0xf8, 0xf9, 0xe1, 0x1f, 0x18,
        0x00, 0x20, 0x82, 0xb6, 0x01, 0x28, 0x03, 0x30, 0x21, 0x38, 0x81, 0x02, 0x40, 0x01, 0x50, 0x02,
    ];

    pub fn file(messages: &[&[u8]]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(*message);
        }
        bytes
    }

    /// A list of CRIU's with a field before the mappings, the program's number, and one behind.
    pub fn of_criu() -> Vec<u8> {
        file(&[&[&[0x08, 0x05, 0x60, 0x07][..], &[0x72, 24], &TEXT, &[0x72, 33], &MEMORY, &[0x78, 0x01]]
            .concat()])
    }

    pub fn list(all: Vec<MemoryMapping>, program: u32) -> MappingList {
        let mut before = vec![0x08, 0x05];
        encoding::uint32::encode(PROGRAM, &program, &mut before);
        MappingList { all, program, before, behind: vec![0x78, 0x01] }
    }

    #[test]
    fn mappings_of_criu_are_read_and_written_back_unchanged() {
        let found = MappingList::decode(&of_criu()).unwrap();
        let shown: Vec<_> = found.all.iter().map(|m| (m.start, m.end, m.memory, m.flags, m.status)).collect();
        assert_eq!(shown[0], (0x40_0000, 0x41_f000, 1, 2, REGULAR | FILE_PRIVATE));
        assert_eq!((shown[1].0 & 0xfff, shown[1].1 - shown[1].0), (0, 0x4000));
        assert_eq!((shown[1].2, shown[1].3, shown[1].4), (0x5b02, 0x21, SHARED | REGULAR));
        assert_eq!(found.program, 7);
        assert_eq!(found.encode(), of_criu());
    }

    #[test]
    fn truncated_or_foreign_mappings_are_refused() {
        let all = of_criu();
        for end in 0..all.len() {
            assert!(MappingList::decode(&all[..end]).is_err(), "{end}");
        }
        assert!(MappingList::decode(&file(&[&[], &[]])).is_err(), "two processes");
        assert!(MappingList::decode(&file(&[&[0x72, 9, 1]])).is_err(), "longer than it is");
    }

    #[test]
    fn unknown_mapping_fields_do_not_encode_back_unchanged() {
        let with = |field: &[u8]| {
            let mapping = [&TEXT[..], field].concat();
            file(&[&[&[0x72, u8::try_from(mapping.len()).unwrap()][..], &mapping].concat()])
        };
        assert_eq!(MappingList::decode(&with(&[])).unwrap().encode(), with(&[]));
        for field in [&[0x58, 0x01][..], &[0x50, 0x00], &[0x48, 0x80, 0x00]] {
            assert_ne!(MappingList::decode(&with(field)).unwrap().encode(), with(field), "{field:?}");
        }
        // Mappings on both sides of another field.
        let apart = file(&[&[&[0x72, 24][..], &TEXT, &[0x78, 0x01], &[0x72, 24], &TEXT].concat()]);
        assert_ne!(MappingList::decode(&apart).unwrap().encode(), apart);
    }
}

//! The format of an image in transfer between nodes. It is a line, its header, the files beside it,
//! and its own files, in the order of their names.
//!
//! ```text
//! nagaya-archive 1 <bytes of the header> <bytes of what is beside it>\n
//! <header> <beside> <file> <file> ...
//! ```
//!
//! The same image makes the same bytes, so a transfer can continue anywhere. Its digest covers the
//! header and the files beside it, and the header has the digests of all files. An archive from
//! another node is hostile until all digests are compared. Not here: its source and destination
//! (`incoming`, `outgoing`).

use crate::image::Digest;
use crate::image::format::header::{self, ImageHeader};

const MAGIC: &str = "nagaya-archive 1";

/// Maximum length of the first line, bytes.
const LINE_MAX: usize = 80;

/// Maximum length of the files that an image expects beside it, bytes: two directories, 16 MiB
/// each, and their names.
pub const BESIDE_MAX: usize = 48 << 20;

/// The part before the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveHead {
    pub header: ImageHeader,
    text: String,
    pub beside: Vec<u8>,
}

impl ArchiveHead {
    pub fn new(header: ImageHeader, beside: Vec<u8>) -> Result<Self, serde_json::Error> {
        Ok(Self { text: header.encode()?, header, beside })
    }

    /// Returns the digest of the whole image: two archives with the same digest have the same
    /// bytes.
    pub fn digest(&self) -> Digest {
        Digest::of(&[self.text.as_bytes(), &self.beside])
    }

    /// Returns the length of the archive, bytes.
    pub fn bytes(&self) -> u64 {
        (self.encode().len() as u64).saturating_add(self.header.bytes())
    }

    pub fn encode(&self) -> Vec<u8> {
        Self::frame(&self.text, &self.beside)
    }

    pub(crate) fn frame(text: &str, beside: &[u8]) -> Vec<u8> {
        let line = format!("{MAGIC} {} {}\n", text.len(), beside.len());
        [line.as_bytes(), text.as_bytes(), beside].concat()
    }

    /// Parses the head of an archive that begins with these bytes, and returns its length. `None`
    /// if they are too few. The error follows the words "the archive".
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some(end) = bytes.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
            return if bytes.len() < LINE_MAX { Ok(None) } else { Err("is none of an image".into()) };
        };
        let line = str::from_utf8(&bytes[..end]).map_err(|_| "is none of an image")?;
        let mut lens = line.strip_prefix(MAGIC).ok_or("is of another version of nagaya")?.split(' ').skip(1);
        let mut len = |max: usize| {
            let len = lens.next().and_then(|text| text.parse::<usize>().ok());
            len.filter(|len| *len <= max).ok_or("is none of an image")
        };
        let header_max = usize::try_from(header::LEN_MAX).unwrap_or(usize::MAX);
        let (header_len, beside_len) = (len(header_max)?, len(BESIDE_MAX)?);
        let rest = &bytes[end + 1..];
        if rest.len() < header_len + beside_len {
            return Ok(None);
        }
        let text = str::from_utf8(&rest[..header_len]).map_err(|_| "has a header that is no text")?;
        let header = ImageHeader::decode(text).map_err(|why| format!("is not used: its header {why}"))?;
        let beside = rest[header_len..header_len + beside_len].to_vec();
        let head = Self { header, text: text.to_owned(), beside };
        Ok(Some((head, end + 1 + header_len + beside_len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::format::header::tests::header;

    #[test]
    fn a_written_head_is_read_back_from_as_many_bytes_as_it_has() {
        let head = ArchiveHead::new(header(), vec![7; 1000]).unwrap();
        let mut bytes = head.encode();
        let len = bytes.len();
        for at in 0..len {
            assert_eq!(ArchiveHead::decode(&bytes[..at]), Ok(None), "{at}");
        }
        bytes.extend(b"pages");
        assert_eq!(ArchiveHead::decode(&bytes), Ok(Some((head.clone(), len))));
        assert_eq!(head.bytes(), (len + 5) as u64);
    }

    #[test]
    fn a_head_that_promises_too_much_or_is_another_is_refused() {
        for bad in [
            format!("{MAGIC} 99999999999 0\n"),
            format!("{MAGIC} 5 999999999\n"),
            format!("{MAGIC} x 0\n"),
            "nagaya-archive 2 1 1\n".into(),
            "x".repeat(LINE_MAX),
            format!("{MAGIC} 5 0\nhello"),
        ] {
            assert!(ArchiveHead::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn bytes_beside_the_header_change_the_digest() {
        let [one, other] = [1, 2].map(|byte| ArchiveHead::new(header(), vec![byte]).unwrap().digest());
        assert_ne!(one, other);
    }
}

//! Digests of files and texts: SHA-256, for which current processors have instructions.
//!
//! Not here: the comparisons (`header`, `store`).

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Number of bytes read at once.
const BUFFER_LEN: usize = 256 * 1024;

/// 256 bits, written in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Computes the digest of texts in this order. The position of their ends matters.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut context = Context::new(&SHA256);
        for part in parts {
            context.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
            context.update(part);
        }
        Self::finish(context)
    }

    fn finish(context: Context) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(context.finish().as_ref());
        Self(bytes)
    }

    /// Computes the digest of the rest of a file.
    pub fn of_file(mut file: &File) -> io::Result<Self> {
        Ok(Self::of_copy(&mut file, &mut io::sink())?.0)
    }

    /// Copies the rest of a reader. Returns its digest and length.
    pub fn of_copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<(Self, u64)> {
        let (mut context, mut all) = (Context::new(&SHA256), 0);
        let mut buffer = vec![0; BUFFER_LEN];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok((Self::finish(context), all)),
                Ok(len) => {
                    context.update(&buffer[..len]);
                    to.write_all(&buffer[..len])?;
                    all += len as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err("a digest has 64 hexadecimal digits");
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            let digits = &text[2 * at..2 * at + 2];
            *byte = u8::from_str_radix(digits, 16).map_err(|_| "a digest has hexadecimal digits")?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_part_ends_matters() {
        assert_ne!(Digest::of(&[b"ab", b"c"]), Digest::of(&[b"a", b"bc"]));
        assert_eq!(Digest::of(&[b"ab", b"c"]), Digest::of(&[b"ab", b"c"]));
    }

    #[test]
    fn a_written_digest_is_read_back() {
        let digest = Digest::of(&[b"x"]);
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert!("12".parse::<Digest>().is_err());
        assert!("é".repeat(32).parse::<Digest>().is_err());
    }

    #[test]
    fn a_file_has_the_digest_of_its_content() {
        use std::io::{Seek, Write};
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 3 * BUFFER_LEN + 1]).unwrap();
        file.rewind().unwrap();
        let digest = Digest::of_file(&file).unwrap();
        let whole = ring::digest::digest(&SHA256, &vec![7; 3 * BUFFER_LEN + 1]);
        assert_eq!(digest.0, whole.as_ref());
    }
}

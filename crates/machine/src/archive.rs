//! Writes archives that the kernel unpacks as its initial RAM disk: the format `newc` of
//! Documentation/driver-api/early-userspace/buffer-format.rst. Several may follow each other.
//!
//! Not here: the content (`initramfs`).

/// Types and rights of entries.
pub const DIRECTORY: u32 = 0o040_755;
pub const PROGRAM: u32 = 0o100_755;
pub const SECRET: u32 = 0o100_600;

/// Name of the last entry.
const END: &str = "TRAILER!!!";

/// An archive that is being written.
#[derive(Debug, Default)]
pub struct ArchiveWriter(Vec<u8>);

/// A file, a name or an archive is larger than the format allows.
#[derive(Debug, thiserror::Error)]
#[error("{0} is too large for an initial RAM disk: at most 4 GiB")]
pub struct EntryTooLarge(String);

impl ArchiveWriter {
    /// Adds a file or a directory.
    pub fn add(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<(), EntryTooLarge> {
        let too_large = |_| EntryTooLarge(name.to_owned());
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        // ino, mode, uid, gid, nlink, mtime, filesize, dev (2), rdev (2), namesize, check.
        let fields = [0, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.0.extend(b"070701");
        for field in fields {
            self.0.extend(format!("{field:08x}").bytes());
        }
        self.0.extend(name.bytes());
        self.0.push(0);
        self.pad();
        self.0.extend(content);
        self.pad();
        Ok(())
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Result<Vec<u8>, EntryTooLarge> {
        self.add(END, 0, &[])?;
        Ok(self.0)
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_a_name_and_a_content_each_padded() {
        let mut archive = ArchiveWriter::default();
        archive.add("init", PROGRAM, b"abcde").unwrap();
        let text = String::from_utf8(archive.0).unwrap();
        assert!(text.starts_with("07070100000000000081ed"), "{text}");
        // The header has 110 bytes: with "init" and its end 115, padded to 116.
        assert_eq!(&text[94..102], "00000005");
        assert_eq!(&text[110..], "init\0\0abcde\0\0\0");
    }
}

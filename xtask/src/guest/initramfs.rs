//! The guest's initial RAM disk: busybox, modules and a script, as the archive that the kernel
//! unpacks.
//!
//! The format is `newc` of Documentation/driver-api/early-userspace/buffer-format.rst. Not here:
//! the later root file system (`root`).

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::kernel::GuestKernel;
use crate::content;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// Writes the archive into `dir` and returns its path.
pub fn write(kernel: &GuestKernel, dir: &Path) -> Result<PathBuf> {
    // Unpacked and not installed: it would replace Debian's other package of busybox.
    let tree = content::packages(&["busybox-static".into()])?;
    let busybox = ["bin/busybox", "usr/bin/busybox"].map(|path| tree.join(path));
    let busybox = busybox.iter().find(|path| path.is_file()).context("busybox-static brought no busybox")?;
    let busybox = fs::read(busybox).with_context(|| format!("reading {}", busybox.display()))?;

    let mut archive = Vec::new();
    for name in ["bin", "dev", "modules", "proc", "root", "sys"] {
        entry(&mut archive, name, DIRECTORY, &[])?;
    }
    entry(&mut archive, "bin/busybox", PROGRAM, &busybox)?;
    entry(&mut archive, "init", PROGRAM, include_bytes!("init.sh"))?;
    for (at, (name, module)) in kernel.modules.iter().enumerate() {
        // The shell lists them sorted by name.
        entry(&mut archive, &format!("modules/{at:02}-{name}"), PROGRAM, module)?;
    }
    entry(&mut archive, "TRAILER!!!", 0, &[])?;
    let path = dir.join("initramfs");
    fs::write(&path, archive).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Adds one file: its header, its name and its content, the latter two padded to four bytes.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) -> Result<()> {
    let size = u32::try_from(content.len()).with_context(|| format!("{name} is too large"))?;
    let name_size = u32::try_from(name.len() + 1).context("a name is too long")?;
    let links = if mode == DIRECTORY { 2 } else { 1 };
    // ino, mode, uid, gid, nlink, mtime, filesize, dev (2), rdev (2), namesize, check.
    let fields = [0, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
    archive.extend(b"070701");
    for field in fields {
        write!(archive, "{field:08x}").expect("a Vec takes all that memory holds");
    }
    archive.extend(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend(content);
    pad(archive);
    Ok(())
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_a_name_and_a_content_each_padded() {
        let mut archive = Vec::new();
        entry(&mut archive, "init", PROGRAM, b"abcde").unwrap();
        let text = String::from_utf8(archive).unwrap();
        assert!(text.starts_with("07070100000000000081ed"), "{text}");
        // The header has 110 bytes: with "init" and its end 115, padded to 116.
        assert_eq!(&text[94..102], "00000005");
        assert_eq!(&text[110..], "init\0\0abcde\0\0\0");
    }
}

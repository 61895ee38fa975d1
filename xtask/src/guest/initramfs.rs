//! The guest's initial RAM disk: busybox, modules and a script, as the archive that the kernel
//! unpacks.
//!
//! Not here: the format (`nagaya_machine::archive`), the later root file system (`root`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nagaya_machine::archive::{ArchiveWriter, DIRECTORY, PROGRAM};

use super::kernel::UnpackedKernel;
use crate::content;

/// Writes the archive into `dir` and returns its path.
pub fn write(kernel: &UnpackedKernel, dir: &Path) -> Result<PathBuf> {
    // Unpacked and not installed: it would replace Debian's other package of busybox.
    let tree = content::packages(&["busybox-static".into()])?;
    let busybox = ["bin/busybox", "usr/bin/busybox"].map(|path| tree.join(path));
    let busybox = busybox.iter().find(|path| path.is_file()).context("busybox-static brought no busybox")?;
    let busybox = fs::read(busybox).with_context(|| format!("reading {}", busybox.display()))?;

    let mut archive = ArchiveWriter::default();
    for name in ["bin", "dev", "modules", "proc", "root", "sys"] {
        archive.add(name, DIRECTORY, &[])?;
    }
    archive.add("bin/busybox", PROGRAM, &busybox)?;
    archive.add("init", PROGRAM, include_bytes!("init.sh"))?;
    for (at, (name, module)) in kernel.modules.iter().enumerate() {
        // The shell lists them sorted by name.
        archive.add(&format!("modules/{at:02}-{name}"), PROGRAM, module)?;
    }
    let path = dir.join("initramfs");
    fs::write(&path, archive.finish()?).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

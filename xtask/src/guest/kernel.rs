//! Debian's kernel for virtual machines, unpacked and not installed, and the modules for its disks
//! and the tests.
//!
//! Not here: reading it (`nagaya_machine::kernel`), starting it (`boot`).

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use nagaya_machine::kernel::GuestKernel;

use crate::content;

/// Depends on the newest kernel of the release.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// Modules of the guest's disks, and the one that reports the other end of a Unix socket to the
/// keeper. The kernel may have them built in. A machine loads the last one by itself on demand.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "unix_diag"];

pub struct UnpackedKernel {
    pub image: PathBuf,
    /// Uncompressed, with their names, in the order in which they can be loaded.
    pub modules: Vec<(String, Vec<u8>)>,
}

/// Returns the kernel of an unpacked package, otherwise of this release. These modules are added to
/// those of each guest.
pub fn obtain(unpacked: Option<&Path>, others: &[&str]) -> Result<UnpackedKernel> {
    let tree = match unpacked {
        Some(tree) => tree.to_path_buf(),
        None => own_release()?,
    };
    let kernel = GuestKernel::newest(&tree)?;
    ensure!(kernel.modules.is_some(), "there are no modules for {}", kernel.image.display());
    let names: Vec<&str> = MODULES.iter().chain(others).copied().collect();
    Ok(UnpackedKernel { modules: kernel.read_modules(&names)?, image: kernel.image })
}

/// Returns where this release's newest is unpacked, or an earlier newest one.
pub fn own_release() -> Result<PathBuf> {
    let tree = content::package_dir();
    if GuestKernel::newest(&tree).is_err() {
        content::packages(&dependency()?)?;
    }
    Ok(tree)
}

/// Returns the package of the kernel itself. Without package lists it is unknown; then they are
/// fetched.
fn dependency() -> Result<Vec<String>> {
    let find = || content::libraries(PACKAGE, &["linux-image-"]);
    let mut found = find()?;
    if found.is_empty() {
        content::run(std::process::Command::new("apt-get").args(["update", "-qq"]))?;
        found = find()?;
    }
    ensure!(!found.is_empty(), "apt knows no package {PACKAGE}");
    Ok(found)
}

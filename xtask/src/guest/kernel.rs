//! Debian's kernel for virtual machines, unpacked and not installed, and the modules for its disks
//! and the tests.
//!
//! Not here: starting it (`boot`).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::content;
use crate::workspace;

/// Depends on the newest kernel of the release.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// Modules of the guest's disks, and the one that reports the other end of a Unix socket to the
/// keeper. The kernel may have them built in. A machine loads the last one by itself on demand.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "unix_diag"];

/// Deepest level of module directories: `drivers/net/ethernet/VENDOR/CHIP`.
const DEPTH_MAX: usize = 12;

pub struct GuestKernel {
    pub image: PathBuf,
    /// Uncompressed, with their names, in the order in which they can be loaded.
    pub modules: Vec<(String, Vec<u8>)>,
}

/// Returns the kernel of an unpacked package, otherwise of this release. These modules are added to
/// those of each guest.
pub fn obtain(unpacked: Option<&Path>, others: &[&str]) -> Result<GuestKernel> {
    let tree = match unpacked {
        Some(tree) => tree.to_path_buf(),
        None => own_release()?,
    };
    let image = newest_image(&tree).with_context(|| format!("{} has no boot/vmlinuz", tree.display()))?;
    let version = image.file_name().unwrap_or_default().to_string_lossy().replace("vmlinuz-", "");
    let modules = ["lib/modules", "usr/lib/modules"]
        .map(|dir| tree.join(dir).join(&version))
        .into_iter()
        .find(|dir| dir.is_dir())
        .with_context(|| format!("there are no modules for {}", image.display()))?;
    let mut files = HashMap::new();
    list(&modules, &mut files, DEPTH_MAX)?;
    let mut ordered = Vec::new();
    for name in MODULES.iter().chain(others) {
        add(name, &files, &mut ordered)?;
    }
    Ok(GuestKernel { image, modules: ordered })
}

/// Returns where this release's newest is unpacked, or an earlier newest one.
fn own_release() -> Result<PathBuf> {
    let tree = workspace::cache_dir().join("packages");
    if newest_image(&tree).is_none() {
        content::packages(&dependency()?)?;
    }
    Ok(tree)
}

fn newest_image(tree: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(tree.join("boot")).ok()?;
    let images = entries.flatten().map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with("vmlinuz-") && name.ends_with("-cloud-amd64")
        })
    });
    images.max_by_key(|path| fs::metadata(path).and_then(|file| file.modified()).ok())
}

/// Returns the package of the kernel itself. Without package lists it is unknown; then they are
/// fetched.
fn dependency() -> Result<Vec<String>> {
    let find = || content::libraries(PACKAGE, &["linux-image-"]);
    let mut found = find()?;
    if found.is_empty() {
        content::run(Command::new("apt-get").args(["update", "-qq"]))?;
        found = find()?;
    }
    ensure!(!found.is_empty(), "apt knows no package {PACKAGE}");
    Ok(found)
}

/// Lists all modules by their names; files write `-` where names have `_`.
fn list(dir: &Path, files: &mut HashMap<String, PathBuf>, depth: usize) -> Result<()> {
    ensure!(depth > 0, "{} lies too deep", dir.display());
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry.context("reading a directory")?.path();
        if path.is_dir() && !path.is_symlink() {
            list(&path, files, depth - 1)?;
        } else if let Some((name, _)) = path.file_name().and_then(|name| name.to_str()?.split_once(".ko")) {
            files.insert(name.replace('-', "_"), path.clone());
        }
    }
    Ok(())
}

/// Adds a module after its dependencies. A dependency without a file is part of the kernel.
fn add(name: &str, files: &HashMap<String, PathBuf>, ordered: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let Some(path) = files.get(name) else { return Ok(()) };
    if ordered.iter().any(|(have, _)| have == name) {
        return Ok(());
    }
    let module = uncompressed(path)?;
    for needed in dependencies(&module) {
        add(&needed, files, ordered)?;
    }
    ordered.push((name.into(), module));
    Ok(())
}

fn uncompressed(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    let output = Command::new(program).args(["-d", "-c", "-q"]).arg(path).output();
    let output = output.with_context(|| format!("running {program}"))?;
    ensure!(output.status.success(), "{program} cannot read {}", path.display());
    Ok(output.stdout)
}

/// Returns the entry `depends=` of a module's `.modinfo`: names with commas between them.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_says_what_it_depends_on() {
        let module = b"\x7fELF..\0license=GPL\0depends=virtio,virtio-ring\0retpoline=Y\0";
        assert_eq!(dependencies(module), ["virtio", "virtio_ring"]);
        assert_eq!(dependencies(b"\0license=GPL\0depends=\0name=x\0"), Vec::<String>::new());
        assert_eq!(dependencies(b"nothing"), Vec::<String>::new());
    }

    #[test]
    fn modules_come_after_what_they_need_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = HashMap::new();
        for (name, needs) in [("a", "b,c"), ("b", "c"), ("c", "")] {
            let path = dir.path().join(format!("{name}.ko"));
            fs::write(&path, format!("\0depends={needs}\0")).unwrap();
            files.insert(name.to_string(), path);
        }
        let mut ordered = Vec::new();
        for name in ["a", "b", "built_in"] {
            add(name, &files, &mut ordered).unwrap();
        }
        assert_eq!(ordered.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["c", "b", "a"]);
    }
}

//! The kernel of a guest, and the modules that it needs: those of a package of Debian's for virtual
//! machines, installed or unpacked, or a file that has all of it built in.
//!
//! Not here: the initial RAM disk with the modules (`initramfs`), starting it (`command_line`).

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules for the devices of a machine and its files. A kernel may have them built in.
pub const MODULES: [&str; 7] =
    ["virtio_mmio", "virtio_pci", "virtio_console", "virtio_net", "virtio_rng", "virtio_balloon", "fuse"];

/// Deepest level of module directories: `drivers/net/ethernet/VENDOR/CHIP`.
const DEPTH_MAX: usize = 12;

/// Maximum size of a module, uncompressed, bytes.
const MODULE_LEN_MAX: u64 = 64 << 20;

/// The number at offset 0x202 of a Linux kernel for x86 (Documentation/arch/x86/boot.rst), and the
/// first bytes of an ELF file.
const BOOT_MAGIC: (u64, &[u8; 4]) = (0x202, b"HdrS");
const ELF_MAGIC: (u64, &[u8; 4]) = (0, b"\x7fELF");

/// Bytes of a file that are looked at.
const HEAD_LEN: u64 = 1024;

/// Architecture of an ELF kernel (`e_machine`, elf(5)).
const MACHINE_AT: usize = 18;
const MACHINE_X86_64: [u8; 2] = [62, 0];

/// A kernel that machines can be started with.
#[derive(Debug)]
pub struct GuestKernel {
    pub image: PathBuf,
    /// The directory of its modules. `None`: it has all of it built in.
    pub modules: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error(
        "there is no kernel for virtual machines in {0}: install linux-image-cloud-amd64, or name a file"
    )]
    Missing(PathBuf),
    #[error("{path} cannot be read: {error}")]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{0} is no Linux kernel for x86-64: name a bzImage or an ELF file with a PVH note")]
    Foreign(PathBuf),
    #[error("module {name} needs {needed}, which is neither a file nor built in")]
    Incomplete { name: String, needed: String },
    #[error("{path} cannot be uncompressed: {error}; install xz-utils and zstd")]
    Compressed { path: PathBuf, error: io::Error },
}

impl GuestKernel {
    /// Returns the newest kernel for virtual machines in this tree (`/` or an unpacked package).
    pub fn newest(tree: &Path) -> Result<Self, KernelError> {
        let image = newest_image(tree).ok_or_else(|| KernelError::Missing(tree.join("boot")))?;
        let file =
            fs::File::open(&image).map_err(|error| KernelError::Unreadable { path: image.clone(), error })?;
        check_file(&file, &image)?;
        Ok(Self::in_tree(image, tree))
    }

    /// Returns the kernel in this file of the node, which is not read. Its modules are those that
    /// are installed for the release in its name.
    pub fn of_release(image: PathBuf) -> Self {
        Self::in_tree(image, Path::new("/"))
    }

    fn in_tree(image: PathBuf, tree: &Path) -> Self {
        let directory = |release: String| {
            let all = ["lib/modules", "usr/lib/modules"].map(|dir| tree.join(dir).join(&release));
            all.into_iter().find(|dir| dir.is_dir())
        };
        let modules = release_of(&image).and_then(directory);
        Self { image, modules }
    }

    /// Reads these modules and those that they need, uncompressed, with their names. They are in an
    /// order in which they can be loaded. Those that are built in are left out.
    pub fn read_modules(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>, KernelError> {
        let mut modules = Vec::new();
        if let Some(directory) = &self.modules {
            let mut files = HashMap::new();
            list(directory, &mut files, DEPTH_MAX)?;
            for name in names {
                add(name, &files, &mut modules)?;
            }
        }
        Ok(modules)
    }
}

/// Checks that a file begins as a kernel that can be started.
pub fn check_file(file: &fs::File, path: &Path) -> Result<(), KernelError> {
    let unreadable = |error| KernelError::Unreadable { path: path.to_owned(), error };
    let mut head = Vec::new();
    file.take(HEAD_LEN).read_to_end(&mut head).map_err(unreadable)?;
    let has = |(at, magic): (u64, &[u8; 4])| {
        usize::try_from(at).ok().and_then(|at| head.get(at..at + magic.len())) == Some(&magic[..])
    };
    let is_ours = has(BOOT_MAGIC)
        || (has(ELF_MAGIC) && head.get(MACHINE_AT..MACHINE_AT + 2) == Some(&MACHINE_X86_64[..]));
    if is_ours { Ok(()) } else { Err(KernelError::Foreign(path.to_owned())) }
}

/// Returns the release in the name of a kernel's file: `vmlinuz-6.1.0-56-cloud-amd64`.
fn release_of(image: &Path) -> Option<String> {
    Some(image.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned())
}

fn newest_image(tree: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(tree.join("boot")).ok()?;
    let images = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| release_of(path).is_some_and(|release| release.ends_with("-cloud-amd64")));
    images.max_by_key(|path| fs::metadata(path).and_then(|file| file.modified()).ok())
}

/// Lists all modules by their names; files write `-` where names have `_`.
fn list(dir: &Path, files: &mut HashMap<String, PathBuf>, depth: usize) -> Result<(), KernelError> {
    let unreadable = |error| KernelError::Unreadable { path: dir.to_owned(), error };
    if depth == 0 {
        return Err(unreadable(rustix::io::Errno::LOOP.into()));
    }
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_dir() && !path.is_symlink() {
            list(&path, files, depth - 1)?;
        } else if let Some((name, _)) = path.file_name().and_then(|name| name.to_str()?.split_once(".ko")) {
            files.insert(name.replace('-', "_"), path.clone());
        }
    }
    Ok(())
}

/// Adds a module after its dependencies. One without a file is part of the kernel.
fn add(
    name: &str,
    files: &HashMap<String, PathBuf>,
    ordered: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), KernelError> {
    let Some(path) = files.get(name) else { return Ok(()) };
    if ordered.iter().any(|(have, _)| have == name) {
        return Ok(());
    }
    let module = uncompressed(path)?;
    for needed in dependencies(&module) {
        if !files.contains_key(&needed) {
            return Err(KernelError::Incomplete { name: name.to_owned(), needed });
        }
        add(&needed, files, ordered)?;
    }
    ordered.push((name.to_owned(), module));
    Ok(())
}

fn uncompressed(path: &Path) -> Result<Vec<u8>, KernelError> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => {
            let mut module = Vec::new();
            let read =
                fs::File::open(path).and_then(|file| file.take(MODULE_LEN_MAX).read_to_end(&mut module));
            read.map_err(|error| KernelError::Unreadable { path: path.to_owned(), error })?;
            return Ok(module);
        }
    };
    let failed = |error| KernelError::Compressed { path: path.to_owned(), error };
    let output = Command::new(program).args(["-d", "-c", "-q"]).arg(path).output().map_err(failed)?;
    if !output.status.success() {
        return Err(failed(io::Error::other(format!("{program} ended with {}", output.status))));
    }
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
        for (name, needs) in [("a", "b,c"), ("b", "c"), ("c", ""), ("d", "gone")] {
            let path = dir.path().join(format!("{name}.ko"));
            fs::write(&path, format!("\0depends={needs}\0")).unwrap();
            files.insert(name.to_string(), path);
        }
        let mut ordered = Vec::new();
        for name in ["a", "b", "built_in"] {
            add(name, &files, &mut ordered).unwrap();
        }
        assert_eq!(ordered.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["c", "b", "a"]);
        let error = add("d", &files, &mut ordered).unwrap_err().to_string();
        assert!(error.contains("gone"), "{error}");
    }

    #[test]
    fn files_that_are_no_kernel_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let check = |bytes: &[u8]| {
            let path = dir.path().join("vmlinuz");
            fs::write(&path, bytes).unwrap();
            check_file(&fs::File::open(&path).unwrap(), &path).map_err(|error| error.to_string())
        };
        let mut bzimage = vec![0; 0x300];
        bzimage[0x202..0x206].copy_from_slice(b"HdrS");
        let mut elf = vec![0; 0x100];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 62;
        assert_eq!((check(&bzimage), check(&elf)), (Ok(()), Ok(())));
        elf[18] = 183;
        for wrong in [&elf[..], b"", b"#!/bin/sh\n", &bzimage[..0x203]] {
            let error = check(wrong).unwrap_err();
            assert!(error.contains("is no Linux kernel for x86-64"), "{error}");
        }
    }
}

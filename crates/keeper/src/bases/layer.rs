//! Unpacks one layer over those below it: a tar file, plain or with gzip or zstd (image-spec v1.1,
//! layer.md).
//!
//! It is read twice. The first time nothing is written. It must match its digest, within limits.
//! Its whiteouts are collected: they apply to the layers below, wherever in the file they are.
//! Owners, modes, times and attributes are not applied: everything is root's, readable for all, and
//! executable if it was. No path and no link leads out of the tree: the kernel resolves them with
//! the tree as root. Not here: which layers (`layout`).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use data_encoding::HEXLOWER;
use flate2::read::MultiGzDecoder;
use ring::digest::{Context, SHA256};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use tar::{Archive, EntryType, PaxExtensions};

use super::zstd::ZstdReader;
use super::{BaseError, BaseLimits};

/// Maximum length of a path and of a link's target, bytes (`PATH_MAX`), and depth of nested
/// directories.
const PATH_LEN_MAX: usize = 4096;
const DEPTH_MAX: usize = 128;

/// Maximum length of the data before an entry, bytes: a long name, or attributes.
const EXTENSION_LEN_MAX: u64 = 64 << 10;

/// Hides a name of the layers below, and everything in a directory.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Returns the compression of a layer's media type, as OCI and Docker name them.
    pub fn of(media_type: &str) -> Option<Self> {
        match media_type {
            "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
                Some(Self::None)
            }
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip" => Some(Self::Gzip),
            "application/vnd.oci.image.layer.v1.tar+zstd" => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// A layer of a layout.
pub struct OciLayer<'a> {
    pub file: File,
    pub sha256: &'a str,
    pub len: u64,
    pub compression: Compression,
}

/// Type of an entry, as far as it is used.
pub(crate) enum TarEntryKind {
    Directory,
    File {
        is_executable: bool,
    },
    /// Another name of a file that exists.
    Hard(PathBuf),
    Link(PathBuf),
    /// A device or a pipe: a sandbox has its own.
    Left,
}

/// Name or directory of the layers below that a layer hides.
pub(crate) enum Whiteout {
    Name(PathBuf),
    Below(PathBuf),
}

/// Path and link from the data before an entry.
#[derive(Default)]
struct PaxHeader {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl OciLayer<'_> {
    /// Unpacks the layer. `left` is the rest of a base's limits for all its layers.
    pub fn unpack(
        mut self,
        tree: &UnpackDir,
        left: &mut BaseLimits,
        of: BaseLimits,
    ) -> Result<(), BaseError> {
        let mut whiteouts = Vec::new();
        let mut counted = *left;
        self.read(&mut counted, of, |path, _, _| {
            whiteouts.extend(whiteout(path)?);
            Ok(())
        })?;
        for whiteout in &whiteouts {
            match whiteout {
                Whiteout::Name(path) => tree.remove(path),
                Whiteout::Below(path) => tree.empty(path),
            }
            .map_err(|why| self.wrong(whiteout.path(), &why))?;
        }
        self.read(
            left,
            of,
            |path, kind, content| if is_whiteout(path) { Ok(()) } else { tree.put(path, kind, content) },
        )
    }

    /// Reads all of it and compares it with its digest.
    pub fn verify(self) -> Result<(), BaseError> {
        let mut raw = self.hashed();
        io::copy(&mut raw, &mut io::sink()).map_err(BaseError::io("read a layer"))?;
        if raw.is(self.sha256) { Ok(()) } else { Err(self.altered()) }
    }

    fn hashed(&self) -> HashingReader<'_> {
        HashingReader { file: &self.file, context: Context::new(&SHA256), len: 0, len_max: self.len }
    }

    fn altered(&self) -> BaseError {
        BaseError::Altered { what: "a layer", digest: self.sha256.into() }
    }

    fn wrong(&self, entry: &Path, why: &io::Error) -> BaseError {
        let entry = entry.display().to_string().escape_debug().to_string();
        BaseError::Entry { digest: self.sha256.into(), entry, why: why.to_string() }
    }

    /// Shows each entry, then checks whether all of it was correct.
    pub(crate) fn read(
        &mut self,
        left: &mut BaseLimits,
        of: BaseLimits,
        mut each: impl FnMut(&Path, &TarEntryKind, &mut dyn Read) -> io::Result<()>,
    ) -> Result<(), BaseError> {
        self.file.seek(SeekFrom::Start(0)).map_err(BaseError::io("read a layer"))?;
        let mut raw = self.hashed();
        let shown = {
            let plain: Box<dyn Read + '_> = match self.compression {
                Compression::None => Box::new(&mut raw),
                Compression::Gzip => Box::new(MultiGzDecoder::new(&mut raw)),
                Compression::Zstd => Box::new(ZstdReader::new(&mut raw)),
            };
            let mut counted = BoundedReader { from: plain, left: &mut left.bytes_max };
            let shown = self.entries(&mut counted, &mut left.entries_max, &mut each);
            // The rest behind the last entry belongs to it as well.
            if shown.is_ok() {
                io::copy(&mut counted, &mut io::sink())
                    .map(drop)
                    .map_err(|error| self.wrong(Path::new("its end"), &error))
            } else {
                shown
            }
        };
        if let Err(error) = shown {
            if left.bytes_max == 0 || left.entries_max == 0 {
                let what = format!("more than {} bytes or {} files", of.bytes_max, of.entries_max);
                return Err(BaseError::TooLarge { what });
            }
            // If reading fails because the layer was altered, that error says more.
            let is_whole = io::copy(&mut raw, &mut io::sink()).is_ok() && raw.is(self.sha256);
            return Err(if is_whole { error } else { self.altered() });
        }
        io::copy(&mut raw, &mut io::sink()).map_err(BaseError::io("read a layer"))?;
        if raw.is(self.sha256) { Ok(()) } else { Err(self.altered()) }
    }

    fn entries(
        &self,
        from: &mut dyn Read,
        entries_left: &mut u64,
        each: &mut impl FnMut(&Path, &TarEntryKind, &mut dyn Read) -> io::Result<()>,
    ) -> Result<(), BaseError> {
        let mut archive = Archive::new(from);
        let mut before = PaxHeader::default();
        let mut last = PathBuf::from("its beginning");
        let entries = archive.entries().map_err(|error| self.wrong(&last, &error))?;
        // Raw, because the other iterator gathers long names without limits.
        for entry in entries.raw(true) {
            let mut entry = entry.map_err(|error| self.wrong(&last, &error))?;
            *entries_left = entries_left.saturating_sub(1);
            if *entries_left == 0 {
                return Err(self.wrong(&last, &too_much("too many files")));
            }
            if before.takes(&mut entry).map_err(|error| self.wrong(&last, &error))? {
                continue;
            }
            let said = std::mem::take(&mut before);
            let name = said.path.unwrap_or_else(|| entry.header().path_bytes().into_owned());
            let link = said.link.or_else(|| entry.header().link_name_bytes().map(|name| name.into_owned()));
            last = PathBuf::from(OsStr::from_bytes(&name));
            let path = beneath(&name).map_err(|error| self.wrong(&last, &error))?;
            if path.as_os_str().is_empty() {
                continue;
            }
            let kind = kind(entry.header(), link.as_deref()).map_err(|error| self.wrong(&last, &error))?;
            each(&path, &kind, &mut entry).map_err(|error| self.wrong(&last, &error))?;
        }
        Ok(())
    }
}

impl PaxHeader {
    /// Whether this entry only describes the next one.
    fn takes(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> io::Result<bool> {
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => self.path = Some(name_of(extension(entry)?)),
            EntryType::GNULongLink => self.link = Some(name_of(extension(entry)?)),
            EntryType::XHeader => {
                let bytes = extension(entry)?;
                for said in PaxExtensions::new(&bytes) {
                    let said = said?;
                    match said.key_bytes() {
                        b"path" => self.path = Some(said.value_bytes().to_vec()),
                        b"linkpath" => self.link = Some(said.value_bytes().to_vec()),
                        // Only for entries that no base can have, and for sparse files.
                        b"size" => return Err(wrong("it has a size of its own, which is not supported")),
                        key if key.starts_with(b"GNU.sparse") => {
                            return Err(wrong("it is a sparse file, which is not supported"));
                        }
                        _ => {}
                    }
                }
            }
            // Comments on the whole.
            EntryType::XGlobalHeader => {}
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn extension(entry: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    entry.take(EXTENSION_LEN_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > EXTENSION_LEN_MAX {
        Err(too_much("a name or its attributes are too long"))
    } else {
        Ok(bytes)
    }
}

fn name_of(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

fn kind(header: &tar::Header, link: Option<&[u8]>) -> io::Result<TarEntryKind> {
    let target = || {
        let target = link.filter(|target| !target.is_empty() && target.len() < PATH_LEN_MAX);
        target.ok_or_else(|| wrong("it is a link to nothing"))
    };
    Ok(match header.entry_type() {
        EntryType::Directory => TarEntryKind::Directory,
        EntryType::Regular | EntryType::Continuous => {
            TarEntryKind::File { is_executable: header.mode()? & 0o111 != 0 }
        }
        EntryType::Link => TarEntryKind::Hard(beneath(target()?)?),
        EntryType::Symlink => TarEntryKind::Link(OsStr::from_bytes(target()?).into()),
        EntryType::Char | EntryType::Block | EntryType::Fifo => TarEntryKind::Left,
        other => {
            return Err(wrong(&format!(
                "it is of a kind that is not supported ({:?})",
                char::from(other.as_byte())
            )));
        }
    })
}

/// Returns a path as the tree has it. A path that goes up is refused, not corrected.
fn beneath(name: &[u8]) -> io::Result<PathBuf> {
    if name.len() >= PATH_LEN_MAX || name.contains(&0) {
        return Err(wrong("its name is too long, or has a zero in it"));
    }
    let mut path = PathBuf::new();
    for part in Path::new(OsStr::from_bytes(name)).components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(wrong("its path leaves the root (..)"));
            }
        }
    }
    if path.components().count() > DEPTH_MAX {
        return Err(too_much("it is too many directories deep"));
    }
    Ok(path)
}

fn is_whiteout(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(WHITEOUT))
}

pub(crate) fn whiteout(path: &Path) -> io::Result<Option<Whiteout>> {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let dir = path.parent().unwrap_or(Path::new(""));
    Ok(match name.strip_prefix(WHITEOUT) {
        None => None,
        Some(_) if name == OPAQUE => Some(Whiteout::Below(dir.into())),
        // Some engines reserve these names.
        Some(rest) if rest.starts_with(WHITEOUT) => None,
        Some(b"" | b"." | b"..") => return Err(wrong("it hides no name")),
        Some(hidden) => Some(Whiteout::Name(dir.join(OsStr::from_bytes(hidden)))),
    })
}

impl Whiteout {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Name(path) | Self::Below(path) => path,
        }
    }
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn too_much(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, why)
}

// === Reading ===

/// Reads a file up to a maximum length, and computes its digest.
struct HashingReader<'a> {
    file: &'a File,
    context: Context,
    len: u64,
    len_max: u64,
}

impl HashingReader<'_> {
    fn is(self, sha256: &str) -> bool {
        self.len == self.len_max && HEXLOWER.encode(self.context.finish().as_ref()) == sha256
    }
}

impl Read for HashingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read(buffer)?;
        self.len += len as u64;
        if self.len > self.len_max {
            return Err(wrong("it is longer than it should be"));
        }
        self.context.update(&buffer[..len]);
        Ok(len)
    }
}

/// Limits the length of decompressed data.
struct BoundedReader<'a> {
    from: Box<dyn Read + 'a>,
    left: &'a mut u64,
}

impl Read for BoundedReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.from.read(buffer)?;
        match self.left.checked_sub(len as u64) {
            Some(left) => *self.left = left,
            None => {
                *self.left = 0;
                return Err(too_much("too many bytes"));
            }
        }
        Ok(len)
    }
}

// === Writing ===

/// The directory that is filled.
pub struct UnpackDir(OwnedFd);

impl UnpackDir {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::openat(CWD, path, flags, Mode::empty())?))
    }

    /// Waits until it is on the disk, so that it survives a crash of the node.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.0)?)
    }

    /// Opens a directory of the tree as a program would with the tree as root.
    fn find(&self, path: &Path) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = rustix::fs::openat2(&self.0, path, DIRECTORY, Mode::empty(), resolve)?;
        // Through links it may be deeper than its path shows.
        let place = rustix::fs::readlinkat(CWD, in_proc(&found), Vec::new())?;
        if place.as_bytes().len() > PATH_LEN_MAX / 2 {
            return Err(too_much("it is too deep"));
        }
        Ok(found)
    }

    /// Returns the parent directory of a path, made if it is missing, and the last name.
    fn place<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let name = path.file_name().ok_or_else(|| wrong("it has no name"))?;
        let dir = path.parent().unwrap_or(Path::new(""));
        match self.find(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return Ok((found?, name)),
        }
        let mut done = PathBuf::new();
        let mut at = self.find(&done)?;
        for part in dir.components() {
            match rustix::fs::mkdirat(&at, part.as_os_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
            done.push(part);
            at = self.find(&done)?;
        }
        Ok((at, name))
    }

    fn put(&self, path: &Path, kind: &TarEntryKind, content: &mut dyn Read) -> io::Result<()> {
        if matches!(kind, TarEntryKind::Left) {
            return Ok(());
        }
        let (dir, name) = self.place(path)?;
        let there = kind_at(&dir, name)?;
        match kind {
            TarEntryKind::Directory if there == Some(FileType::Directory) => return Ok(()),
            // It is this file's name already.
            TarEntryKind::Hard(of) if of == path => return Ok(()),
            _ => remove_at(&dir, name, there)?,
        }
        match kind {
            TarEntryKind::Directory => rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755))?,
            TarEntryKind::File { is_executable } => {
                let flags =
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mut file = File::from(rustix::fs::openat(&dir, name, flags, Mode::from_raw_mode(0o600))?);
                io::copy(content, &mut file)?;
                let mode = Mode::from_raw_mode(if *is_executable { 0o755 } else { 0o644 });
                rustix::fs::fchmod(&file, mode)?;
            }
            TarEntryKind::Hard(of) => {
                let (from, of) = self.place(of)?;
                match kind_at(&from, of)? {
                    Some(FileType::RegularFile | FileType::Symlink) => {}
                    _ => return Err(wrong("it is a link to a file that is not there")),
                }
                rustix::fs::linkat(&from, of, &dir, name, AtFlags::empty())?;
            }
            TarEntryKind::Link(target) => rustix::fs::symlinkat(target, &dir, name)?,
            TarEntryKind::Left => {}
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let name = path.file_name().ok_or_else(|| wrong("it has no name"))?;
        match self.find(path.parent().unwrap_or(Path::new(""))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            dir => {
                let dir = dir?;
                let there = kind_at(&dir, name)?;
                remove_at(&dir, name, there)
            }
        }
    }

    fn empty(&self, path: &Path) -> io::Result<()> {
        let dir = match self.find(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            dir => dir?,
        };
        for entry in fs::read_dir(in_proc(&dir))? {
            let name = entry?.file_name();
            let there = kind_at(&dir, &name)?;
            remove_at(&dir, &name, there)?;
        }
        Ok(())
    }
}

fn in_proc(dir: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", dir.as_raw_fd()).into()
}

fn kind_at(dir: &OwnedFd, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn remove_at(dir: &OwnedFd, name: &OsStr, there: Option<FileType>) -> io::Result<()> {
    match there {
        None => Ok(()),
        Some(FileType::Directory) => fs::remove_dir_all(in_proc(dir).join(name)),
        Some(_) => Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?),
    }
}

//! One layer, put over those beneath it: a tar file, plain or with gzip or zstd (image-spec v1.1, layer.md).
//!
//! It is read twice. The first time nothing is written: it must be what its digest says, within bounds, and its whiteouts are
//! found, which are of the layers beneath wherever in the file they stand. Owners, modes, times and attributes are not taken over: everything is
//! root's, for all to read, and executable if it was. No path and no link leads out of the tree, whatever a layer says: the kernel
//! looks them up as if the tree were all there is. Not here: which layers (`layout`).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use ring::digest::{Context, SHA256};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use tar::{Archive, EntryType, PaxExtensions};

use super::layout::hex;
use super::zstd::Zstd;
use super::{BaseError, Bounds};

/// Longest path and longest target of a link, bytes (`PATH_MAX`), and directories in each other.
const PATH_LEN_MAX: usize = 4096;
const DEPTH_MAX: usize = 128;

/// Bytes of what a tar file says before an entry: a long name, or attributes.
const EXTENSION_LEN_MAX: u64 = 64 << 10;

/// Hides a name of the layers beneath, and all that is in a directory.
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
    /// By the kind of a layer, as OCI and Docker name them.
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
pub struct Layer<'a> {
    pub file: File,
    pub sha256: &'a str,
    pub len: u64,
    pub compression: Compression,
}

/// What an entry is, as far as it is used.
pub(crate) enum Kind {
    Directory,
    File {
        is_executable: bool,
    },
    /// Another name of a file that is there.
    Hard(PathBuf),
    Link(PathBuf),
    /// A device or a pipe: a sandbox has its own.
    Left,
}

/// What a layer hides of those beneath.
pub(crate) enum Whiteout {
    Name(PathBuf),
    Below(PathBuf),
}

/// What stands before an entry and is of it.
#[derive(Default)]
struct Before {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl Layer<'_> {
    /// `left` is what the layers of a base may still take together.
    pub fn unpack(mut self, tree: &Tree, left: &mut Bounds, of: Bounds) -> Result<(), BaseError> {
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

    fn hashed(&self) -> Hashing<'_> {
        Hashing { file: &self.file, context: Context::new(&SHA256), len: 0, len_max: self.len }
    }

    fn altered(&self) -> BaseError {
        BaseError::Altered { what: "a layer", digest: self.sha256.into() }
    }

    fn wrong(&self, entry: &Path, why: &io::Error) -> BaseError {
        let entry = entry.display().to_string().escape_debug().to_string();
        BaseError::Entry { digest: self.sha256.into(), entry, why: why.to_string() }
    }

    /// Shows each entry, then looks whether all of it was what it should be.
    pub(crate) fn read(
        &mut self,
        left: &mut Bounds,
        of: Bounds,
        mut each: impl FnMut(&Path, &Kind, &mut dyn Read) -> io::Result<()>,
    ) -> Result<(), BaseError> {
        self.file.seek(SeekFrom::Start(0)).map_err(BaseError::io("read a layer"))?;
        let mut raw = self.hashed();
        let shown = {
            let plain: Box<dyn Read + '_> = match self.compression {
                Compression::None => Box::new(&mut raw),
                Compression::Gzip => Box::new(MultiGzDecoder::new(&mut raw)),
                Compression::Zstd => Box::new(Zstd::new(&mut raw)),
            };
            let mut counted = Counted { from: plain, left: &mut left.bytes_max };
            let shown = self.entries(&mut counted, &mut left.entries_max, &mut each);
            // What follows the last entry belongs to it as well.
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
            // What cannot be read may be so because it was altered, which says more.
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
        each: &mut impl FnMut(&Path, &Kind, &mut dyn Read) -> io::Result<()>,
    ) -> Result<(), BaseError> {
        let mut archive = Archive::new(from);
        let mut before = Before::default();
        let mut last = PathBuf::from("its beginning");
        let entries = archive.entries().map_err(|error| self.wrong(&last, &error))?;
        // Raw: what it would gather by itself it gathers without bounds.
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

impl Before {
    /// Whether this entry is not one of its own but says something of the next.
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
                        // Only for what no base can have, and for sparse files.
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

fn kind(header: &tar::Header, link: Option<&[u8]>) -> io::Result<Kind> {
    let target = || {
        let target = link.filter(|target| !target.is_empty() && target.len() < PATH_LEN_MAX);
        target.ok_or_else(|| wrong("it is a link to nothing"))
    };
    Ok(match header.entry_type() {
        EntryType::Directory => Kind::Directory,
        EntryType::Regular | EntryType::Continuous => {
            Kind::File { is_executable: header.mode()? & 0o111 != 0 }
        }
        EntryType::Link => Kind::Hard(beneath(target()?)?),
        EntryType::Symlink => Kind::Link(OsStr::from_bytes(target()?).into()),
        EntryType::Char | EntryType::Block | EntryType::Fifo => Kind::Left,
        other => {
            return Err(wrong(&format!(
                "it is of a kind that is not supported ({:?})",
                char::from(other.as_byte())
            )));
        }
    })
}

/// A path as the tree has it. One that says it goes up is refused, not corrected.
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
        // What some engines keep for themselves.
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

/// The file as it is, no longer than it may be, and its digest.
struct Hashing<'a> {
    file: &'a File,
    context: Context,
    len: u64,
    len_max: u64,
}

impl Hashing<'_> {
    fn is(self, sha256: &str) -> bool {
        self.len == self.len_max && hex(self.context.finish().as_ref()) == sha256
    }
}

impl Read for Hashing<'_> {
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

/// What comes out, as long as it may.
struct Counted<'a> {
    from: Box<dyn Read + 'a>,
    left: &'a mut u64,
}

impl Read for Counted<'_> {
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
pub struct Tree(OwnedFd);

impl Tree {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::openat(CWD, path, flags, Mode::empty())?))
    }

    /// Waits until it is on the disk, whatever happens to the node then.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.0)?)
    }

    /// A directory of the tree, as a program would find it whose root the tree is.
    fn find(&self, path: &Path) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = rustix::fs::openat2(&self.0, path, DIRECTORY, Mode::empty(), resolve)?;
        // Through links it may be deeper than it says.
        let place = rustix::fs::readlinkat(CWD, in_proc(&found), Vec::new())?;
        if place.as_bytes().len() > PATH_LEN_MAX / 2 {
            return Err(too_much("it is too deep"));
        }
        Ok(found)
    }

    /// The directory a path is in, made if it is not there, and the name in it.
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

    fn put(&self, path: &Path, kind: &Kind, content: &mut dyn Read) -> io::Result<()> {
        if matches!(kind, Kind::Left) {
            return Ok(());
        }
        let (dir, name) = self.place(path)?;
        let there = kind_at(&dir, name)?;
        match kind {
            Kind::Directory if there == Some(FileType::Directory) => return Ok(()),
            // It is this file's name already.
            Kind::Hard(of) if of == path => return Ok(()),
            _ => remove_at(&dir, name, there)?,
        }
        match kind {
            Kind::Directory => rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755))?,
            Kind::File { is_executable } => {
                let flags =
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mut file = File::from(rustix::fs::openat(&dir, name, flags, Mode::from_raw_mode(0o600))?);
                io::copy(content, &mut file)?;
                let mode = Mode::from_raw_mode(if *is_executable { 0o755 } else { 0o644 });
                rustix::fs::fchmod(&file, mode)?;
            }
            Kind::Hard(of) => {
                let (from, of) = self.place(of)?;
                match kind_at(&from, of)? {
                    Some(FileType::RegularFile | FileType::Symlink) => {}
                    _ => return Err(wrong("it is a link to a file that is not there")),
                }
                rustix::fs::linkat(&from, of, &dir, name, AtFlags::empty())?;
            }
            Kind::Link(target) => rustix::fs::symlinkat(target, &dir, name)?,
            Kind::Left => {}
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

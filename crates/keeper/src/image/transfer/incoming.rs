//! Images from other nodes. An archive is read to a staging file, from where the last try ended,
//! and compared piece by piece. It becomes an image only when all of it is correct.
//!
//! The carrier of the bytes is hostile. The other keeper seals them, and their length is agreed on
//! before the first byte. Until they are verified, they are only hashed. Not here: whether the
//! image is wanted (`instances::transfer`), the use of the files beside it
//! (`instances::run::volatile_files`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;

use crate::image::Digest;
use crate::image::error::{ImageError, at};
use crate::image::format::archive::{ArchiveHead, BESIDE_MAX};
use crate::image::format::header;
use crate::image::store::work_dir::CriuWorkDir;
use crate::image::transfer::order::TransferOrder;
use crate::image::transfer::outgoing::{TransferPacer, wait};
use crate::image::transfer::sealed::{PIECE_LEN, SALT_LEN, StreamOpener, StreamTerms, TAG_LEN};

/// Maximum length of a head, bytes.
const HEAD_MAX: u64 = header::LEN_MAX + BESIDE_MAX as u64 + 80;

/// The agreed archive, and where it is staged.
#[derive(Debug, Clone)]
pub struct StagedArchive {
    pub path: PathBuf,
    /// Digest of the archive (`ArchiveHead::digest`).
    pub digest: Digest,
    /// Length of the archive.
    pub bytes: u64,
}

impl StagedArchive {
    fn open(&self) -> Result<File, ImageError> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.path);
        opened.map_err(at("open", &self.path))
    }

    /// Returns how many correct bytes are staged, as far as whole pieces can be compared. Wrong
    /// bytes are cut off.
    pub fn verified(&self) -> Result<u64, ImageError> {
        let mut file = self.open()?;
        let io = |error| at("read", &self.path)(error);
        let len = file.metadata().map_err(io)?.len();
        let good = match self.head(&mut file).map_err(io)? {
            Ok(Some((head, begin))) => self.good_files(&mut file, &head, begin as u64, len).map_err(io)?,
            // Nobody can tell what it is the beginning of.
            Ok(None) | Err(_) => 0,
        };
        file.set_len(good).map_err(at("cut", &self.path))?;
        Ok(good)
    }

    /// Returns the staged head, if it is complete. The inner error: it is not the agreed one.
    fn head(&self, file: &mut File) -> io::Result<Result<Option<(ArchiveHead, usize)>, String>> {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(HEAD_MAX).read_to_end(&mut bytes)?;
        Ok(ArchiveHead::decode(&bytes).and_then(|found| match found {
            Some((head, _)) if head.digest() != self.digest || head.bytes() != self.bytes => {
                Err("is not the one that was offered".into())
            }
            found => Ok(found),
        }))
    }

    fn good_files(&self, file: &mut File, head: &ArchiveHead, begin: u64, len: u64) -> io::Result<u64> {
        let mut at = begin;
        for content in head.header.files.values() {
            // The last piece is compared when it is whole.
            let Some(end) = at.checked_add(content.bytes).filter(|end| *end <= len) else { return Ok(len) };
            file.seek(SeekFrom::Start(at))?;
            if digest_of(file, content.bytes, &mut io::sink())? != content.digest {
                return Ok(at);
            }
            at = end;
        }
        Ok(at)
    }

    /// Reads and opens the missing bytes, and no byte more. If the other end closes early, whole
    /// pieces are kept. The inner error: the bytes were not sealed by the other keeper.
    pub fn read(
        &self,
        from: &OwnedFd,
        order: &TransferOrder,
        (pace, per_second): (&TransferPacer, u64),
    ) -> Result<Result<(), String>, ImageError> {
        rustix::io::ioctl_fionbio(from, true).map_err(|errno| at("read", "an image")(errno.into()))?;
        let mut file = self.open()?;
        let mut have = file.seek(SeekFrom::End(0)).map_err(at("write", &self.path))?;
        if have >= self.bytes {
            return Ok(Ok(()));
        }
        let mut salt = [0; SALT_LEN];
        read_whole(from, &mut salt).map_err(at("read", "an image"))?;
        let mut opener = StreamOpener::new(order, &self.terms(have), &salt);
        let mut buffer = vec![0; PIECE_LEN + TAG_LEN];
        while have < self.bytes {
            let len = usize::try_from(self.bytes - have).unwrap_or(PIECE_LEN).min(PIECE_LEN);
            let piece = &mut buffer[..len + TAG_LEN];
            read_whole(from, piece).map_err(at("read", "an image"))?;
            pace.take(piece.len(), per_second);
            let Some(opened) = opener.open(piece) else {
                return Ok(Err(format!("its stream was changed on its way, at byte {have}")));
            };
            file.write_all(opened).map_err(at("write", &self.path))?;
            have += len as u64;
        }
        Ok(Ok(()))
    }

    /// Returns the terms of the stream that begins at this byte of the archive.
    pub fn terms(&self, offset: u64) -> StreamTerms {
        StreamTerms { digest: self.digest, bytes: self.bytes, offset }
    }

    /// Unpacks it into `work`, and compares every digest on the way. The inner error describes the
    /// problem.
    pub fn unpack(&self, work: &CriuWorkDir, group: u32) -> Result<Result<ArchiveHead, String>, ImageError> {
        let io = |error| at("unpack", &self.path)(error);
        let mut file = self.open()?;
        let (head, begin) = match self.head(&mut file).map_err(io)? {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Err("the archive is cut off".into())),
            Err(why) => return Ok(Err(format!("the archive {why}"))),
        };
        file.seek(SeekFrom::Start(begin as u64)).map_err(io)?;
        for (name, content) in &head.header.files {
            if name == header::NAME {
                return Ok(Err("the archive has a file that no image has".into()));
            }
            let path = work.path.join(name);
            let mut target = create(&path).map_err(at("make", &path))?;
            let digest = digest_of(&mut file, content.bytes, &mut target).map_err(io)?;
            if digest != content.digest {
                return Ok(Err(format!("the content of {name} is not what its header says")));
            }
            give(&target, group, 0o640).map_err(at("take over", &path))?;
        }
        let dir = File::open(&work.path).map_err(io)?;
        give(&dir, group, 0o750).map_err(io)?;
        Ok(Ok(head))
    }
}

/// Fills the buffer from a pipe.
fn read_whole(from: &OwnedFd, buffer: &mut [u8]) -> io::Result<()> {
    let mut have = 0;
    while have < buffer.len() {
        match rustix::io::read(from, &mut buffer[have..]) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends too early")),
            Ok(len) => have += len,
            Err(rustix::io::Errno::AGAIN) => wait(from, PollFlags::IN)?,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Gives a file to this group: CRIU reads it with these rights and no others.
fn give(file: &File, group: u32, mode: u32) -> io::Result<()> {
    fchown(file, Some(0), Some(group))?;
    file.set_permissions(fs::Permissions::from_mode(mode))
}

/// Copies the next bytes, and returns their digest.
fn digest_of(from: &mut File, bytes: u64, to: &mut impl Write) -> io::Result<Digest> {
    let mut left = from.take(bytes);
    let (digest, len) = Digest::of_copy(&mut left, to)?;
    if len == bytes { Ok(digest) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

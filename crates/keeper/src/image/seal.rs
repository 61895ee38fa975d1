//! Takes over the files that CRIU has written. They are closed to all but root, counted, and
//! rewritten so that a wake has less to fill.
//!
//! Root takes over the files. The one group that the sandbox' root is in can read them. CRIU reads
//! them with no more rights than that. The directory above lets only root in. Not here: the
//! rewriting (`rewrite`), the directory of images (`store`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nagaya_records::record::ImageMemory;
use rustix::fs::OFlags;

use crate::image::error::{ImageError, at};
use crate::image::files::open;
use crate::image::format::digest::Digest;
use crate::image::format::file_list::FileList;
use crate::image::format::header::{FILES_MAX, ImageFile, NAME};
use crate::image::format::memory_plan::{MappedMemory, SharedMemory};
use crate::image::rewrite::{holes, mapped, memory, shared};
use crate::image::store::space::SpaceBudget;

/// The part of an image's memory that CRIU does not fill.
pub struct SetApart {
    pub mapped: MappedMemory,
    pub shared: Vec<SharedMemory>,
}

/// Takes over a directory that CRIU has written: from now on nobody can write it, and `group` can
/// read it. Removes unneeded pages, and sets memory apart that need not be filled. Refuses an image
/// that would restore memory wrongly.
pub fn take_over(
    dir: &Path,
    group: u32,
    room: SpaceBudget,
    memory: ImageMemory,
) -> Result<(BTreeMap<String, ImageFile>, SetApart), ImageError> {
    let mut names = close(dir, group)?;
    memory::check(dir, names.iter())?;
    holes::leave_out(dir, names.iter())?;
    let apart = set_apart(dir, &mut names, group, memory).map_err(at("set memory apart in", dir))?;
    let (mut files, mut total) = (BTreeMap::new(), 0);
    for name in names {
        let path = dir.join(&name);
        let file = open(dir, &name, OFlags::RDONLY).map_err(at("open", &path))?;
        let bytes = file.metadata().map_err(at("look at", &path))?.len();
        total += bytes;
        room.holds(total)?;
        let digest = Digest::of_file(&file).map_err(at("read", &path))?;
        files.insert(name, ImageFile { bytes, digest });
    }
    Ok((files, apart))
}

/// Rewrites an image's files so that CRIU has less to fill.
pub fn set_apart(
    dir: &Path,
    names: &mut BTreeSet<String>,
    group: u32,
    memory: ImageMemory,
) -> io::Result<SetApart> {
    let (mut mapped, mut shared) = (MappedMemory::default(), Vec::new());
    if let Some(mut list) = FileList::read(dir, names)? {
        if memory != ImageMemory::Copied {
            mapped = mapped::set_apart(dir, names, &mut list, group, memory)?;
        }
        shared = shared::set_apart(dir, names, &mut list)?;
        list.write(dir)?;
    }
    Ok(SetApart { mapped, shared })
}

/// Makes all files in the directory root's, and returns their names.
fn close(dir: &Path, group: u32) -> Result<BTreeSet<String>, ImageError> {
    let io = |error| at("take over", dir)(error);
    // First the directory: from here on no file is added to it.
    let handle = File::open(dir).map_err(io)?;
    fchown(&handle, Some(0), Some(group)).map_err(io)?;
    handle.set_permissions(fs::Permissions::from_mode(0o750)).map_err(io)?;
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        let file = open(dir, &name, OFlags::RDONLY).map_err(at("open", &path))?;
        let stat = file.metadata().map_err(at("look at", &path))?;
        if !stat.is_file() || stat.nlink() != 1 || names.len() >= FILES_MAX || name == NAME {
            return Err(ImageError::Unfit { reason: format!("CRIU left {name}, which no image has") });
        }
        fchown(&file, Some(0), Some(group)).map_err(at("take over", &path))?;
        file.set_permissions(fs::Permissions::from_mode(0o640)).map_err(at("take over", &path))?;
        names.insert(name);
    }
    Ok(names)
}

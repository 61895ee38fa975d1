//! Links below a document root that lead out of it, to the tenant's own files elsewhere in its
//! home.
//!
//! A path is followed name by name with the tenant's rights. Each name is opened without following
//! it, and all checks are made on the opened file. A name that is replaced meanwhile is either the
//! opened file, or not.
//!
//! Invariants of the result:
//! - each link on the path below the document root is the tenant's or root's, and leads to the
//!   tenant's file;
//! - it is below the tenant's home, and neither the home itself nor a directory above the document
//!   root;
//! - no name on the path from the home is hidden, except those that also lead to the document root;
//! - it is a directory or a file, in no file system of the kernel's own.
//!
//! The path from the home to a file that a record names is followed likewise, unless the kernel
//! follows it. It may have absolute links, as tools that switch releases make them. They may be
//! anybody's, and lead into the home.
//!
//! All of it blocks. Not here: links that stay below the document root, which the root's holder
//! follows itself.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::paths::tenant_path::{
    LINKS_MAX, PathOwner, denied, names, open_name, real_path, refuse_kernel_files,
};
use crate::sys::{AccessRight, check_access};

/// Maximum number of names that are followed for one path, those in links among them.
const NAMES_MAX: usize = 512;

/// Names that begin with a dot are hidden, except this one, which is for the public (RFC 8615).
const WELL_KNOWN: &str = ".well-known";

/// A name, its metadata when it was opened, and the descriptor (`O_PATH`).
struct WalkEntry {
    name: OsString,
    file: OwnedFd,
    stat: Stat,
}

impl WalkEntry {
    fn new(name: OsString, file: OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        Ok(Self { name, file, stat })
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }
}

/// The users that may have made a link.
enum LinkRule {
    /// Anybody. For the path to a file that the record names, below the home.
    Any,
    /// The tenant or root. Its target is this user's.
    Own(u32),
}

/// The path from a base, which is the first entry, to the present position. No entry is a link.
struct PathWalk<'a> {
    /// The home as the record names it.
    home: &'a Path,
    trusted: u32,
    entries: Vec<WalkEntry>,
    /// The base is the home. If not, it is a document root elsewhere.
    is_in_home: bool,
    /// Number of names that may still be followed.
    names_left: usize,
    links_left: usize,
}

impl PathOwner {
    /// Opens (`O_PATH`) the target of a path below the document root, through links of the tenant's
    /// own. Refuses with `PermissionDenied` and the reason.
    pub fn open_by_own_links(&self, root: &Path, path: &Path) -> io::Result<OwnedFd> {
        self.walk_own_links(root, path, |found| match found.kind() {
            FileType::Directory => check_access(found.file.as_fd(), AccessRight::List),
            FileType::RegularFile => check_access(found.file.as_fd(), AccessRight::Read),
            _ => Err(denied("it leads to neither a directory nor a file")),
        })
    }

    /// The same for a program, which the tenant may execute.
    pub fn open_program_by_own_links(&self, root: &Path, path: &Path) -> io::Result<OwnedFd> {
        self.walk_own_links(root, path, |found| match found.kind() {
            FileType::RegularFile => check_access(found.file.as_fd(), AccessRight::Search),
            _ => Err(denied("it is not a regular file")),
        })
    }

    fn walk_own_links(
        &self,
        root: &Path,
        path: &Path,
        check: impl FnOnce(&WalkEntry) -> io::Result<()>,
    ) -> io::Result<OwnedFd> {
        let Some(home) = self.home.as_deref() else {
            return Err(denied("its tenant has no home that links could lead to"));
        };
        let (owner, trusted) = match self.identity {
            Some(identity) => (identity.uid, 0),
            None => (geteuid().as_raw(), geteuid().as_raw()),
        };
        self.act(|| {
            let root = home.join(root);
            let mut walk = PathWalk::begin(home, trusted)?;
            match root.strip_prefix(home) {
                Ok(beneath) => walk.follow(beneath, &LinkRule::Any)?,
                Err(_) => walk.begin_at(self.look_up(&root)?)?,
            }
            let way = walk.names();
            let is_root_in_home = walk.is_in_home;
            walk.follow(path, &LinkRule::Own(owner))?;
            walk.refuse_places(is_root_in_home.then_some(&way[..]))?;
            let found = walk.entries.pop().ok_or(Errno::NOENT)?;
            refuse_kernel_files(&found.file, &found.stat)?;
            check(&found)?;
            Ok(found.file)
        })
    }
}

/// Opens (`O_PATH`) the target of a path below the home, through absolute links into the home, too.
pub(super) fn look_up_in_home(home: &Path, trusted: u32, path: &Path) -> io::Result<OwnedFd> {
    let mut walk = PathWalk::begin(home, trusted)?;
    walk.follow(path, &LinkRule::Any)?;
    let found = walk.entries.pop().ok_or(Errno::NOENT)?;
    refuse_kernel_files(&found.file, &found.stat)?;
    Ok(found.file)
}

/// Returns the part of an absolute link's path below the home. `None` if it leads elsewhere.
pub(super) fn beneath_home(home: &Path, opened: &OwnedFd, to: &Path) -> io::Result<Option<PathBuf>> {
    if let Ok(rest) = to.strip_prefix(home) {
        return Ok(Some(rest.into()));
    }
    // Programs may know the home by its path without links.
    Ok(to.strip_prefix(real_path(opened)?).ok().map(Path::to_path_buf))
}

impl<'a> PathWalk<'a> {
    fn begin(home: &'a Path, trusted: u32) -> io::Result<Self> {
        let (names_left, links_left) = (NAMES_MAX, LINKS_MAX);
        let mut walk = Self { home, trusted, entries: Vec::new(), is_in_home: true, names_left, links_left };
        walk.go_home()?;
        Ok(walk)
    }

    fn go_home(&mut self) -> io::Result<()> {
        let home = super::walk(self.home, self.trusted)?;
        self.entries = vec![WalkEntry::new(OsString::new(), home)?];
        self.is_in_home = true;
        Ok(())
    }

    fn begin_at(&mut self, root: OwnedFd) -> io::Result<()> {
        self.entries = vec![WalkEntry::new(OsString::new(), root)?];
        self.is_in_home = false;
        Ok(())
    }

    fn names(&self) -> Vec<OsString> {
        self.entries.iter().skip(1).map(|entry| entry.name.clone()).collect()
    }

    fn follow(&mut self, path: &Path, rule: &LinkRule) -> io::Result<()> {
        let mut rest: Vec<OsString> = names(path).into_iter().rev().collect();
        // For each link that is being followed: how many names are left after it.
        let mut following: Vec<usize> = Vec::new();
        while let Some(name) = rest.pop() {
            self.names_left = self.names_left.checked_sub(1).ok_or(Errno::LOOP)?;
            if name == ".." {
                self.go_up()?;
            } else if let Some((link, to)) = self.enter(name)? {
                self.links_left = self.links_left.checked_sub(1).ok_or(Errno::LOOP)?;
                self.judge_link(&link, rule)?;
                following.push(rest.len());
                let to = if to.is_absolute() { self.enter_home(&to)? } else { to };
                rest.extend(names(&to).into_iter().rev());
            }
            while following.pop_if(|left| *left == rest.len()).is_some() {
                self.judge_target(rule)?;
            }
        }
        Ok(())
    }

    fn go_up(&mut self) -> io::Result<()> {
        if self.entries.len() > 1 {
            self.entries.pop();
            return Ok(());
        }
        Err(denied(match self.is_in_home {
            true => "it leads out of its tenant's home",
            false => "it leads neither beneath the document root nor into its tenant's home",
        }))
    }

    /// Goes one name further. Returns a link and its target, which is not followed here.
    fn enter(&mut self, name: OsString) -> io::Result<Option<(WalkEntry, PathBuf)>> {
        let at = self.top()?;
        let file = open_name(&at.file, &name)?;
        let entry = WalkEntry::new(name, file)?;
        if entry.stat.st_dev != at.stat.st_dev {
            refuse_kernel_files(&entry.file, &entry.stat)?;
        }
        if entry.kind() != FileType::Symlink {
            self.entries.push(entry);
            return Ok(None);
        }
        let to = rustix::fs::readlinkat(&entry.file, "", Vec::new())?;
        Ok(Some((entry, PathBuf::from(OsString::from_vec(to.into_bytes())))))
    }

    /// Goes to the home, where an absolute link must lead. Returns the rest of its path.
    fn enter_home(&mut self, to: &Path) -> io::Result<PathBuf> {
        self.go_home()?;
        let outside = || denied(&format!("it leads to {}, out of its tenant's home", quoted(to.as_os_str())));
        beneath_home(self.home, &self.top()?.file, to)?.ok_or_else(outside)
    }

    fn judge_link(&self, link: &WalkEntry, rule: &LinkRule) -> io::Result<()> {
        match rule {
            LinkRule::Own(owner) if link.stat.st_uid != *owner && link.stat.st_uid != self.trusted => {
                let (name, uid) = (quoted(&link.name), link.stat.st_uid);
                Err(denied(&format!("the link {name} is of user {uid}, and not its tenant's or root's")))
            }
            _ => Ok(()),
        }
    }

    /// Checks the end of a link.
    fn judge_target(&self, rule: &LinkRule) -> io::Result<()> {
        let LinkRule::Own(owner) = rule else { return Ok(()) };
        let at = self.top()?;
        if at.stat.st_uid == *owner {
            return Ok(());
        }
        let uid = at.stat.st_uid;
        Err(denied(&format!("it leads to what is of user {uid}, and not its tenant's: {}", self.place())))
    }

    /// Refuses forbidden places. `root`: the names from the home to the document root, if it is
    /// below that.
    fn refuse_places(&self, root: Option<&[OsString]>) -> io::Result<()> {
        if !self.is_in_home {
            // Then it is below the document root.
            return Ok(());
        }
        let way = self.names();
        if way.is_empty() && root.is_none_or(|root| !root.is_empty()) {
            return Err(denied("it leads to all of its tenant's home"));
        }
        let root = root.unwrap_or_default();
        let shared = way.iter().zip(root).take_while(|(name, other)| name == other).count();
        if shared == way.len() && way.len() < root.len() {
            return Err(denied(&format!("it leads to {}, above the document root", self.place())));
        }
        let is_hidden =
            |name: &&OsString| name.as_bytes().starts_with(b".") && name.as_os_str() != WELL_KNOWN;
        match way[shared..].iter().find(is_hidden) {
            Some(name) => Err(denied(&format!("it leads to {}: {} is hidden", self.place(), quoted(name)))),
            None => Ok(()),
        }
    }

    fn top(&self) -> io::Result<&WalkEntry> {
        // There is always the base.
        self.entries.last().ok_or_else(|| Errno::NOENT.into())
    }

    /// Returns the present position, for people.
    fn place(&self) -> String {
        let base = if self.is_in_home { self.home } else { Path::new("the document root") };
        quoted(base.join(self.names().iter().collect::<PathBuf>()).as_os_str())
    }
}

/// Quotes a name, because a tenant chooses names.
fn quoted(name: &OsStr) -> String {
    format!("'{}'", name.to_string_lossy().escape_debug())
}

#[cfg(test)]
mod tests;

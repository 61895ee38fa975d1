//! Plans the part of the node's file system that the edge sees, by the present files at each path.
//!
//! A path may lead through symbolic links. The edge gets the same links, and their targets at their
//! own paths. So a link means the same there as on the node. Not here: mounting (`super`).

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags};
use rustix::io::Errno;

/// Links on the way to a file: the kernel's own limit (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// A path that the edge opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedPath {
    /// A rule file. The edge watches its directory, so the whole directory is shown.
    Rule(PathBuf),
    /// This file.
    Read(PathBuf),
    Write(PathBuf),
}

/// Identity of a file or directory: device, inode and mount.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PlanIdentity((u32, u32), u64, u64);

/// A mount for the edge, at its path on the node without links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootPlace {
    pub path: PathBuf,
    pub is_directory: bool,
    pub is_writable: bool,
    pub identity: PlanIdentity,
}

/// Everything that the edge sees.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RootPlan {
    /// Symbolic links, by their paths.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Parents first.
    pub places: Vec<RootPlace>,
}

impl RootPlan {
    /// Makes a plan. Absent files are left out.
    pub fn resolve_paths(wishes: &[WantedPath]) -> Self {
        let mut plan = Self::default();
        let mut files = Vec::new();
        for wish in wishes {
            match wish {
                WantedPath::Rule(path) => files.extend(plan.take_rule(path).map(|path| (path, false))),
                WantedPath::Read(path) => files.extend(plan.resolve(path).ok().map(|path| (path, false))),
                WantedPath::Write(path) => files.extend(plan.resolve(path).ok().map(|path| (path, true))),
            }
        }
        plan.places.sort_by(|a, b| a.path.cmp(&b.path));
        plan.places.dedup_by(|inner, outer| inner.path.starts_with(&outer.path));
        for (path, is_writable) in files {
            let is_shown = plan.places.iter().any(|place| {
                if place.is_directory {
                    !is_writable && path.starts_with(&place.path)
                } else {
                    place.path == path
                }
            });
            if !is_shown {
                plan.places.extend(place(path, is_writable));
            }
        }
        plan.places.sort_by(|a, b| a.path.cmp(&b.path));
        let links = std::mem::take(&mut plan.links);
        plan.links = links.into_iter().filter(|(path, _)| !plan.is_beneath_directory(path)).collect();
        plan
    }

    /// Adds the directory of a rule file, and the one in which it really is. Returns the file
    /// itself if its directory is directly below `/`: that has more than rules, and is not shown.
    fn take_rule(&mut self, path: &Path) -> Option<PathBuf> {
        let parent = path.parent()?;
        let file = self.resolve(path).ok();
        let directories =
            [self.resolve(parent).ok(), file.as_deref().and_then(Path::parent).map(PathBuf::from)];
        let is_wide = |directory: &PathBuf| directory.components().count() <= 2;
        for directory in directories.into_iter().flatten().filter(|directory| !is_wide(directory)) {
            self.places.extend(place(directory, false));
        }
        file.filter(|file| file.parent().is_some_and(|parent| is_wide(&parent.to_path_buf())))
    }

    /// Returns whether a directory is shown that contains this.
    pub fn is_beneath_directory(&self, path: &Path) -> bool {
        let mut directories = self.places.iter().filter(|place| place.is_directory);
        directories.any(|place| path != place.path && path.starts_with(&place.path))
    }

    /// Returns the shown paths that must go, the lowest first, and the places that must be shown.
    pub fn differences(&self, shown: &Self) -> (Vec<PathBuf>, Vec<&RootPlace>) {
        let is_same = |place: &&RootPlace, other: &Self| other.places.contains(place);
        let changed: Vec<&Path> = (shown.places.iter().filter(|place| !is_same(place, self)))
            .chain(self.places.iter().filter(|place| !is_same(place, shown)))
            .map(|place| place.path.as_path())
            .collect();
        // Children go and come with it.
        let is_concerned = |place: &&RootPlace| changed.iter().any(|path| place.path.starts_with(path));
        let stale = shown.places.iter().filter(is_concerned).rev().map(|place| place.path.clone()).collect();
        (stale, self.places.iter().filter(is_concerned).collect())
    }

    /// Returns the path without links. Links on the way are noted.
    fn resolve(&mut self, path: &Path) -> io::Result<PathBuf> {
        let mut at = PathBuf::from("/");
        let mut rest = names(path);
        let mut links = 0;
        while let Some(name) = rest.pop_front() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(&name);
            if !fs::symlink_metadata(&next)?.is_symlink() {
                at = next;
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP.into());
            }
            let target = fs::read_link(&next)?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            rest = names(&target).into_iter().chain(rest).collect();
            self.links.insert(next, target);
        }
        Ok(at)
    }
}

/// Returns the components of a path, including `..`.
fn names(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    named.map(|part| part.as_os_str().to_owned()).collect()
}

/// Returns the place. `None` if it has gone meanwhile.
fn place(path: PathBuf, is_writable: bool) -> Option<RootPlace> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let mask = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    let stat = rustix::fs::statx(CWD, &path, flags, mask).ok()?;
    let is_directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
    let identity = PlanIdentity((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino, stat.stx_mnt_id);
    Some(RootPlace { path, is_directory, is_writable, identity })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Paths of all places beneath a directory, with `/` behind directories and `!` behind what is writable.
    fn shown(plan: &RootPlan, top: &Path) -> Vec<String> {
        let text = |place: &RootPlace| {
            let path = place.path.strip_prefix(top).unwrap().display();
            format!(
                "{path}{}{}",
                if place.is_directory { "/" } else { "" },
                if place.is_writable { "!" } else { "" }
            )
        };
        plan.places.iter().map(text).collect()
    }

    #[test]
    fn a_rules_directory_and_its_links_target_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir_all(top.join("releases/1")).unwrap();
        fs::create_dir(top.join("rules")).unwrap();
        fs::write(top.join("releases/1/a.rb"), "1").unwrap();
        symlink("../releases/1/a.rb", top.join("rules/a.rb")).unwrap();
        symlink("releases/1", top.join("current")).unwrap();
        let rules = ["rules/a.rb", "rules/missing.rb", "current/a.rb", "nowhere/a.rb"];
        let plan = RootPlan::resolve_paths(&rules.map(|rule| WantedPath::Rule(top.join(rule))));
        assert_eq!(shown(&plan, &top), ["releases/1/", "rules/"]);
        let links: Vec<_> = plan.links.iter().collect();
        assert_eq!(
            links,
            [(&top.join("current"), &PathBuf::from("releases/1"))],
            "others are in what is shown"
        );
    }

    #[test]
    fn a_file_that_is_written_is_shown_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir_all(top.join("etc/rules")).unwrap();
        for file in ["etc/rules/a.rb", "etc/b.rb", "etc/rules/access.log", "socket"] {
            fs::write(top.join(file), "").unwrap();
        }
        let plan = RootPlan::resolve_paths(&[
            WantedPath::Read(top.join("socket")),
            WantedPath::Rule(top.join("etc/rules/a.rb")),
            WantedPath::Rule(top.join("etc/b.rb")),
            WantedPath::Write(top.join("etc/rules/access.log")),
            WantedPath::Read(top.join("etc/rules/a.rb")),
            WantedPath::Read(top.join("gone")),
        ]);
        assert_eq!(shown(&plan, &top), ["etc/", "etc/rules/access.log!", "socket"]);
    }

    #[test]
    fn of_a_directory_right_beneath_the_root_only_the_file_is_shown() {
        let plan = RootPlan::resolve_paths(&[WantedPath::Rule("/etc/passwd".into())]);
        let shown: Vec<_> = plan.places.iter().map(|place| (&*place.path, place.is_directory)).collect();
        assert_eq!(shown, [(Path::new("/etc/passwd"), false)]);
    }

    #[test]
    fn only_what_was_replaced_is_taken_away_and_shown_again() {
        let dir = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(dir.path()).unwrap();
        let wishes = [
            WantedPath::Rule(top.join("rules/a.rb")),
            WantedPath::Write(top.join("rules/log")),
            WantedPath::Read(top.join("socket")),
        ];
        let make = || {
            fs::create_dir(top.join("rules")).unwrap();
            fs::write(top.join("rules/log"), "").unwrap();
        };
        make();
        fs::write(top.join("socket"), "").unwrap();
        let first = RootPlan::resolve_paths(&wishes);
        assert_eq!(first.differences(&RootPlan::default()).1.len(), 3);
        assert_eq!(first.differences(&first), (Vec::new(), Vec::new()));
        // A new log: it alone.
        fs::rename(top.join("rules/log"), top.join("rules/log.1")).unwrap();
        fs::write(top.join("rules/log"), "").unwrap();
        let second = RootPlan::resolve_paths(&wishes);
        let (stale, new) = second.differences(&first);
        assert_eq!(stale, [top.join("rules/log")]);
        assert_eq!(new.iter().map(|place| &place.path).collect::<Vec<_>>(), [&top.join("rules/log")]);
        // Another directory: all that lies in it, too.
        fs::rename(top.join("rules"), top.join("old")).unwrap();
        make();
        let third = RootPlan::resolve_paths(&wishes);
        let (stale, new) = third.differences(&second);
        assert_eq!(stale, [top.join("rules/log"), top.join("rules")]);
        assert_eq!(
            new.iter().map(|place| &place.path).collect::<Vec<_>>(),
            [&top.join("rules"), &top.join("rules/log")]
        );
    }
}

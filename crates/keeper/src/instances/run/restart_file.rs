//! The file by which a tenant has an application started again. Also the directories that the
//! application runs from, as they were at its start.
//!
//! Not here: when they are looked at (`restarts`).

use std::path::{Path, PathBuf};

use crate::image::PathState;
use crate::paths::tenant_path::{FileId, PathOwner};
use crate::sys::AccessRight;

/// The file, in the application's directory.
const FILE: &str = "tmp/restart.txt";

/// The file of one run, as it was at its begin, and its directories.
#[derive(Debug)]
pub struct RestartFile {
    owner: PathOwner,
    path: PathBuf,
    state: PathState,
    directories: Vec<(PathBuf, FileId)>,
}

/// Returns its path for an application in this directory. `None` if the directory is not the
/// tenant's, so that others could put the file there.
pub fn path_of(home: Option<&Path>, directory: &Path) -> Option<PathBuf> {
    home.filter(|home| directory.starts_with(home)).map(|_| directory.join(FILE))
}

impl RestartFile {
    /// Reads the present state. Blocks.
    pub fn new(owner: PathOwner, path: PathBuf, directories: Vec<PathBuf>) -> Self {
        let state = PathState::of(&owner, &path);
        let found = |path: PathBuf| id_of(&owner, &path).map(|id| (path, id));
        let directories = directories.into_iter().filter_map(found).collect();
        Self { owner, path, state, directories }
    }

    /// Describes why a restart is needed. Blocks.
    pub fn find_cause(&self) -> Option<String> {
        let now = PathState::of(&self.owner, &self.path);
        // A removed file requests nothing.
        if matches!(now, PathState::Is(_)) && now != self.state {
            return Some(format!("{} was touched", self.path.display()));
        }
        // Nor does a missing directory: the next may be on its way.
        let is_other =
            |(path, id): &&(PathBuf, FileId)| id_of(&self.owner, path).is_some_and(|now| now != *id);
        let (path, _) = self.directories.iter().find(is_other)?;
        Some(format!("{} is another directory than before", path.display()))
    }
}

fn id_of(owner: &PathOwner, directory: &Path) -> Option<FileId> {
    owner.open_directory(directory, AccessRight::Search).and_then(FileId::of).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_file_in_the_tenants_home_restarts() {
        let path = |home: Option<&str>, directory: &str| path_of(home.map(Path::new), Path::new(directory));
        assert_eq!(path(Some("/home/t"), "/home/t/app"), Some("/home/t/app/tmp/restart.txt".into()));
        assert_eq!(path(Some("/home/t"), "/usr/share/redmine"), None);
        assert_eq!(path(None, "/"), None);
    }

    #[test]
    fn a_touch_restarts_and_a_removal_does_not() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("tmp")).unwrap();
        let owner = || PathOwner::new(Some(home.path()), None);
        let file = || RestartFile::new(owner(), home.path().join(FILE), Vec::new());
        let before = file();
        assert_eq!(before.find_cause(), None);
        fs::write(home.path().join(FILE), "").unwrap();
        assert_eq!(before.find_cause(), Some(format!("{} was touched", home.path().join(FILE).display())));
        let now = file();
        assert_eq!(now.find_cause(), None);
        fs::remove_file(home.path().join(FILE)).unwrap();
        assert_eq!(now.find_cause(), None);
    }

    #[test]
    fn another_directory_restarts_and_one_that_is_gone_does_not() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        fs::create_dir_all(at("releases/1")).unwrap();
        fs::create_dir(at("releases/2")).unwrap();
        symlink("releases/1", at("current")).unwrap();
        let owner = PathOwner::new(Some(home.path()), None);
        let file = RestartFile::new(owner, at("current").join(FILE), vec![at("current"), at("missing")]);
        assert_eq!(file.find_cause(), None);
        fs::create_dir(at("missing")).unwrap();
        fs::remove_file(at("current")).unwrap();
        assert_eq!(file.find_cause(), None);
        symlink("releases/2", at("current")).unwrap();
        let said = format!("{} is another directory than before", at("current").display());
        assert_eq!(file.find_cause(), Some(said));
        fs::remove_file(at("current")).unwrap();
        symlink("releases/1", at("current")).unwrap();
        assert_eq!(file.find_cause(), None);
    }
}

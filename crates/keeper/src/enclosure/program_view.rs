//! The files of the node that programs see. Their tenant's own directories hide the node's.
//!
//! Not here: mounting those directories (`files`).

use std::fs;
use std::path::{Path, PathBuf};

use nagaya_keeper_api::protocol::FailureKind;

use crate::fault::{self, Fault};

use super::files::{SCRATCH, SHARED_MEMORY};
use super::is_in_scratch;

/// The files of the node that a tenant's programs see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgramView {
    /// All. The programs run without an enclosure.
    Whole,
    /// All but those in directories of which the tenant has its own. Its home is seen in `/tmp`.
    Enclosed { home: Option<PathBuf> },
}

/// Programs do not see a path of the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "programs do not see {}: their tenant has a {directory} of its own; move the files out of {directory}",
    path.display()
)]
pub struct HiddenPath {
    path: PathBuf,
    directory: &'static str,
}

impl ProgramView {
    /// Checks a path that programs are given.
    pub fn check(&self, path: &Path) -> Result<(), HiddenPath> {
        let Self::Enclosed { home } = self else { return Ok(()) };
        match hiding_directory(path, home.as_deref()) {
            Some(directory) => Err(HiddenPath { path: path.to_owned(), directory }),
            None => Ok(()),
        }
    }

    /// Checks where such a path leads. The tenant's home may itself be behind links. Reads the disk
    /// only for a path that fails the check.
    pub fn check_target(&self, target: &Path) -> Result<(), HiddenPath> {
        self.check(target).or_else(|hidden| match self {
            Self::Enclosed { home: Some(home) }
                if is_in_scratch(home)
                    && fs::canonicalize(home).is_ok_and(|home| target.starts_with(home)) =>
            {
                Ok(())
            }
            _ => Err(hidden),
        })
    }
}

/// Returns the directory of the node that programs of a tenant with this home do not see, if `path`
/// is in one: they see the tenant's own there.
pub fn hiding_directory(path: &Path, home: Option<&Path>) -> Option<&'static str> {
    let is_at_home = home.is_some_and(|home| is_in_scratch(home) && path.starts_with(home));
    let hidden = SCRATCH.into_iter().chain([SHARED_MEMORY]).find(|hidden| path.starts_with(hidden));
    hidden.filter(|_| !is_at_home)
}

impl From<HiddenPath> for Fault {
    fn from(hidden: HiddenPath) -> Self {
        Self::new(FailureKind::Invalid, fault::HIDDEN, hidden.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_home_is_seen_in_a_directory_that_hides_others() {
        for (path, home, expected) in [
            ("/tmp/www", None, Some("/tmp")),
            ("/tmp/www", Some("/srv/alice"), Some("/tmp")),
            ("/tmp/alice/www", Some("/tmp/alice"), None),
            ("/tmp/alice2/www", Some("/tmp/alice"), Some("/tmp")),
            ("/var/tmp/www", None, Some("/var/tmp")),
            ("/dev/shm/www", None, Some("/dev/shm")),
            ("/dev/shm/alice/www", Some("/dev/shm/alice"), Some("/dev/shm")),
            ("/srv/www", None, None),
            ("/tmpx/www", None, None),
        ] {
            assert_eq!(hiding_directory(Path::new(path), home.map(Path::new)), expected, "{path} {home:?}");
        }
    }

    #[test]
    fn programs_without_an_enclosure_see_all() {
        assert_eq!(ProgramView::Whole.check(Path::new("/tmp/www")), Ok(()));
        let hidden = ProgramView::Enclosed { home: None }.check(Path::new("/tmp/www")).unwrap_err();
        let fault = Fault::from(hidden);
        assert_eq!((fault.failure, fault.code), (FailureKind::Invalid, fault::HIDDEN));
        assert!(fault.message.starts_with("programs do not see /tmp/www"), "{fault}");
    }

    #[test]
    fn a_home_behind_a_link_is_seen() {
        let directory = tempfile::tempdir_in("/tmp").unwrap();
        let [real, link] = ["real", "link"].map(|name| directory.path().join(name));
        fs::create_dir_all(real.join("alice")).unwrap();
        symlink(&real, &link).unwrap();
        let view = ProgramView::Enclosed { home: Some(link.join("alice")) };
        assert_eq!(view.check_target(&real.join("alice/www")), Ok(()));
        assert!(view.check_target(&real.join("bob")).is_err());
    }
}

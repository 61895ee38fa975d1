//! Files that an image depends on: their state when its processes read them, and whether it is
//! unchanged.
//!
//! A program keeps the contents of files in memory. So an image is useless once one of these files
//! was changed, replaced or removed. The same holds once a database answers a query of the record
//! differently. Only stamps are checked, when a wake begins. The list is a file of the image
//! (`FILE`), so the header's digest covers it, too. Not here: which files were read (`readings`),
//! how they are looked up (`tenant_path`).

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

use crate::image::Digest;
use crate::paths::tenant_path::PathOwner;

/// Name of the list in an image's directory.
pub const FILE: &str = "watched";

/// Maximum number of paths of one image. Checking so many takes tens of milliseconds.
pub const PATHS_MAX: usize = 8192;

/// Maximum length of the list, bytes. A path and its stamp take about 120. The limit counts paths
/// alone, so that stamps and texts fit beside them.
pub const LEN_MAX: u64 = 8 << 20;
const PATHS_LEN_MAX: usize = 6 << 20;

/// Maximum number of texts about unwatched files.
const GAPS_MAX: usize = 8;

/// A file as it was at one moment. Two equal stamps mean the same file with the same content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentStamp {
    pub device: u64,
    pub inode: u64,
    pub bytes: i64,
    /// Seconds since 1970, and nanoseconds.
    pub modified: (i64, i64),
    pub changed: (i64, i64),
}

impl From<&Stat> for ContentStamp {
    fn from(stat: &Stat) -> Self {
        let time = |seconds, nanoseconds: u64| (seconds, i64::try_from(nanoseconds).unwrap_or_default());
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            bytes: stat.st_size,
            modified: time(stat.st_mtime, stat.st_mtime_nsec),
            changed: time(stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

impl ContentStamp {
    /// Whether it is the same content elsewhere, as far as copies keep their times: other nodes
    /// have other inodes.
    fn is_copy_of(&self, other: &Self) -> bool {
        (self.bytes, self.modified) == (other.bytes, other.modified)
    }
}

/// State of a path when the image was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PathState {
    /// There was nothing.
    Absent,
    /// It changed between its reading and the image: the content in memory is unknown.
    Unsure,
    Is(ContentStamp),
}

impl PathState {
    /// Returns the present state of this path. Blocks.
    pub fn of(owner: &PathOwner, path: &Path) -> Self {
        let mut stats = owner.stat_each(&[path.to_path_buf()]).unwrap_or_default();
        stats.pop().map_or(Self::Unsure, Self::from_stat)
    }

    pub fn from_stat(stat: io::Result<Stat>) -> Self {
        match stat {
            Ok(stat) => Self::Is(ContentStamp::from(&stat)),
            Err(error) if is_absence(&error) => Self::Absent,
            Err(_) => Self::Unsure,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedPath {
    /// Path on the node, as bytes, because names of files are bytes.
    path: Vec<u8>,
    pub state: PathState,
}

impl WatchedPath {
    pub fn new(path: &Path, state: PathState) -> Self {
        Self { path: path.as_os_str().as_bytes().to_vec(), state }
    }

    pub fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.path))
    }
}

/// All that an image depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedInputs {
    /// Name of the node that took the image (`Store::origin`).
    origin: String,
    /// Sorted by their paths.
    paths: Vec<WatchedPath>,
    /// Descriptions of unwatched files. Empty if everything is watched.
    gaps: Vec<String>,
    /// In the order of the record that the image was taken with.
    tags: Vec<WatchedTag>,
}

/// Answer of a database, from before the application was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedTag {
    /// Describes the socket and the query.
    pub asked: String,
    /// Digest of the answer, or why there was none.
    pub answer: Result<Digest, String>,
}

impl WatchedTag {
    /// Describes the difference now. An unknown answer counts as a different one.
    fn compare(&self, now: &Self) -> Option<String> {
        let asked = &now.asked;
        match (&self.answer, &now.answer) {
            (Ok(then), Ok(now)) if then == now => None,
            (Ok(_), Ok(_)) => Some(format!("{asked} is answered otherwise since the application started")),
            (_, Err(why)) => Some(format!("{asked} is not answered: {why}")),
            (Err(why), Ok(_)) => {
                Some(format!("{asked} was not answered when the application started: {why}"))
            }
        }
    }
}

impl WatchedInputs {
    pub fn new(mut paths: Vec<WatchedPath>, mut gaps: Vec<String>) -> Self {
        paths.sort_by(|one, other| one.path.cmp(&other.path));
        paths.dedup_by(|later, earlier| later.path == earlier.path);
        let mut len = 0;
        let fits = |watched: &&WatchedPath| {
            len += watched.path.len();
            len <= PATHS_LEN_MAX
        };
        let kept = paths.iter().take(PATHS_MAX).take_while(fits).count();
        if paths.len() > kept {
            gaps.push(format!("{} paths beyond the first {kept}", paths.len() - kept));
            paths.truncate(kept);
        }
        gaps.truncate(GAPS_MAX);
        Self { origin: String::new(), paths, gaps, tags: Vec::new() }
    }

    /// Returns the same, taken on this node.
    pub fn of_node(self, origin: String) -> Self {
        Self { origin, ..self }
    }

    /// Returns the same, with answers of databases.
    pub fn with_tags(self, tags: Vec<WatchedTag>) -> Self {
        Self { tags, ..self }
    }

    pub fn tags(&self) -> &[WatchedTag] {
        &self.tags
    }

    /// Describes a query whose answer has changed, or returns `None`.
    pub fn find_other_answer(&self, now: &[WatchedTag]) -> Option<String> {
        if self.tags.len() != now.len() {
            return Some("the queries to its databases changed".into());
        }
        self.tags.iter().zip(now).find_map(|(then, now)| then.compare(now))
    }

    pub fn count(&self) -> usize {
        self.paths.len()
    }

    pub fn paths(&self) -> &[WatchedPath] {
        &self.paths
    }

    pub fn gaps(&self) -> &[String] {
        &self.gaps
    }

    pub fn encode(&self) -> io::Result<Vec<u8>> {
        postcard::to_allocvec(self).map_err(io::Error::other)
    }

    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let watched: Self = postcard::from_bytes(bytes).map_err(|error| wrong(error.to_string()))?;
        if watched.paths.len() > PATHS_MAX || watched.gaps.len() > GAPS_MAX {
            return Err(wrong("it names more paths than an image has".into()));
        }
        Ok(watched)
    }

    /// Describes a change, or returns `None` if there is none. `origin` is that of this node.
    /// Blocks.
    pub fn find_change(&self, owner: &PathOwner, origin: &str) -> Option<String> {
        let paths: Vec<PathBuf> = self.paths.iter().map(|one| one.path().to_path_buf()).collect();
        let now = match owner.stat_each(&paths) {
            Ok(now) => now,
            Err(error) => return Some(format!("the files it has read cannot be checked: {error}")),
        };
        let is_own = self.origin == origin;
        self.paths.iter().zip(now).find_map(|(watched, now)| {
            let why = compare(watched.state, now, is_own)?;
            Some(format!("{} {why}", watched.path().display()))
        })
    }
}

/// Describes a difference in words that follow the path. `None` if there is none.
fn compare(then: PathState, now: io::Result<Stat>, is_own: bool) -> Option<String> {
    let now = match now {
        Ok(stat) => Some(ContentStamp::from(&stat)),
        Err(error) if is_absence(&error) => None,
        Err(error) => return Some(format!("can no longer be checked: {error}")),
    };
    match (then, now) {
        (PathState::Unsure, _) => Some("changed while the application started".into()),
        (PathState::Absent, None) => None,
        (PathState::Absent, Some(_)) => Some("is there now and was not when the image was taken".into()),
        (PathState::Is(_), None) => Some("is gone since the image was taken".into()),
        (PathState::Is(then), Some(now)) if then == now => None,
        (PathState::Is(then), Some(now)) if !is_own && then.is_copy_of(&now) => None,
        (PathState::Is(then), Some(now)) if then.inode != now.inode && is_own => {
            Some("was replaced since the image was taken".into())
        }
        (PathState::Is(_), Some(_)) => Some("was changed since the image was taken".into()),
    }
}

/// Whether there is nothing at a path, also because a parent is no directory.
pub fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn stat(path: &Path) -> io::Result<Stat> {
        Ok(rustix::fs::lstat(path)?)
    }

    fn state(path: &Path) -> PathState {
        PathState::Is(ContentStamp::from(&stat(path).unwrap()))
    }

    fn watched(paths: &[&Path]) -> WatchedInputs {
        WatchedInputs::new(paths.iter().map(|path| WatchedPath::new(path, state(path))).collect(), Vec::new())
    }

    fn owner(dir: &Path) -> PathOwner {
        PathOwner::new(Some(dir), None)
    }

    #[test]
    fn nothing_changed_is_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.py");
        fs::write(&file, "one").unwrap();
        assert_eq!(watched(&[&file]).find_change(&owner(dir.path()), ""), None);
    }

    #[test]
    fn changed_or_unknown_database_answer_counts_as_a_change() {
        let tag = |answer: Result<&[u8], &str>| WatchedTag {
            asked: "'SELECT 1' at /run/db".into(),
            answer: answer.map(|said| Digest::of(&[said])).map_err(str::to_owned),
        };
        let then = |answer| WatchedInputs::new(Vec::new(), Vec::new()).with_tags(vec![tag(answer)]);
        let read = WatchedInputs::decode(&then(Ok(b"1")).encode().unwrap()).unwrap();
        assert_eq!(read.find_other_answer(&[tag(Ok(b"1"))]), None);
        for (then, now, why) in [
            (then(Ok(b"1")), Ok(&b"2"[..]), "is answered otherwise since the application started"),
            (then(Ok(b"1")), Err("down"), "is not answered: down"),
            (then(Err("down")), Err("down"), "is not answered: down"),
            (then(Err("down")), Ok(b"1"), "was not answered when the application started: down"),
        ] {
            let told = then.find_other_answer(&[tag(now)]).unwrap();
            assert_eq!(told, format!("'SELECT 1' at /run/db {why}"));
        }
        assert!(then(Ok(b"1")).find_other_answer(&[]).is_some());
    }

    #[test]
    fn three_thousand_files_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for number in 0..3000 {
            let path = dir.path().join(format!("{}/{number}", number % 100));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
            paths.push(path);
        }
        let watched = watched(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        let began = std::time::Instant::now();
        assert_eq!(watched.find_change(&owner(dir.path()), ""), None);
        eprintln!("to look at 3000 files takes {:?}", began.elapsed());
        fs::write(&paths[1234], "other").unwrap();
        assert!(watched.find_change(&owner(dir.path()), "").unwrap().contains("/34/1234 was changed"));
    }

    #[test]
    fn each_change_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["written", "replaced", "removed", "link"] {
            fs::write(at(name), "one").unwrap();
        }
        let each: Vec<WatchedInputs> =
            ["written", "replaced", "removed", "link"].map(|name| watched(&[&at(name)])).into();
        fs::write(at("written"), "two!").unwrap();
        fs::write(at("new"), "one").unwrap();
        fs::rename(at("new"), at("replaced")).unwrap();
        fs::remove_file(at("removed")).unwrap();
        fs::remove_file(at("link")).unwrap();
        std::os::unix::fs::symlink("written", at("link")).unwrap();
        let words = ["was changed", "was replaced", "is gone", "was replaced"];
        for (watched, words) in each.iter().zip(words) {
            let why = watched.find_change(&owner(dir.path()), "").unwrap();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn watched_path_is_reported_once_it_appears() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tmp/restart.txt");
        let watched = WatchedInputs::new(vec![WatchedPath::new(&path, PathState::Absent)], Vec::new());
        assert_eq!(watched.find_change(&owner(dir.path()), ""), None);
        fs::create_dir(dir.path().join("tmp")).unwrap();
        assert_eq!(watched.find_change(&owner(dir.path()), ""), None);
        fs::write(&path, "").unwrap();
        assert!(watched.find_change(&owner(dir.path()), "").unwrap().contains("is there now"));
    }

    #[test]
    fn path_that_changed_during_reading_always_counts_as_changed() {
        let dir = tempfile::tempdir().unwrap();
        let watched = WatchedInputs::new(vec![WatchedPath::new(dir.path(), PathState::Unsure)], Vec::new());
        assert!(watched.find_change(&owner(dir.path()), "").unwrap().contains("while the application"));
    }

    #[test]
    fn a_copy_on_another_node_is_told_by_size_and_time() {
        let dir = tempfile::tempdir().unwrap();
        let (file, copy) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&file, "one").unwrap();
        fs::write(&copy, "one").unwrap();
        let time = fs::metadata(&file).unwrap().modified().unwrap();
        fs::File::options().write(true).open(&copy).unwrap().set_modified(time).unwrap();
        let then = state(&file);
        assert_eq!(compare(then, stat(&copy), false), None);
        assert!(compare(then, stat(&copy), true).is_some());
        fs::write(&copy, "two!").unwrap();
        assert!(compare(then, stat(&copy), false).is_some());
    }

    #[test]
    fn a_written_list_is_read_back_and_is_bounded() {
        let path = |number: usize| format!("/home/t/{number:05}");
        let paths = (0..PATHS_MAX + 5)
            .map(|number| WatchedPath::new(Path::new(&path(number)), PathState::Absent))
            .collect();
        let watched = WatchedInputs::new(paths, Vec::new());
        assert_eq!((watched.count(), watched.gaps().len()), (PATHS_MAX, 1));
        let bytes = watched.encode().unwrap();
        assert!((bytes.len() as u64) < LEN_MAX);
        // Paths as long as the kernel takes them (PATH_MAX).
        let long = |number: usize| format!("{}/{}", path(number), "x/".repeat(2000));
        let paths =
            (0..PATHS_MAX).map(|number| WatchedPath::new(Path::new(&long(number)), PathState::Unsure));
        let long = WatchedInputs::new(paths.collect(), Vec::new());
        assert!((long.encode().unwrap().len() as u64) < LEN_MAX && long.gaps().len() == 1);
        assert_eq!(WatchedInputs::decode(&bytes).unwrap(), watched);
        assert!(WatchedInputs::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}

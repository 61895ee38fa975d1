//! Detects a changed rule file before the next request is answered.
//!
//! Each edge thread watches the directories of all rule files with an inotify descriptor of its
//! own. The kernel adds the event before the call returns that closed the file. So a request sent
//! after that is answered by the new rule: each request asks the descriptor for waiting events. A
//! task reads the events, also while no request comes. A directory that cannot be watched is
//! checked once a second instead.
//!
//! Not here: reading and compiling the files (`nagaya_rules::RuleSet::refresh`).

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use nagaya_base::Code;
use rustix::fs::inotify;
use rustix::fs::inotify::{CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::sys;

const CODE_NOT_WATCHED: Code = Code(427);

/// Interval of the check of a directory that cannot be watched. Watching is then tried again.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Size of the buffer: about 60 events. Further ones are read next.
const EVENTS_LEN: usize = 4096;

/// Events that can replace a file, or make it appear or disappear.
const CHANGES: WatchFlags = WatchFlags::CLOSE_WRITE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Events of the directories.
pub struct DirectoryEvents(AsyncFd<OwnedFd>);

impl DirectoryEvents {
    /// Returns whether there is an unread event.
    pub fn wait(&self) -> bool {
        // If the descriptor cannot be asked, a check of the files is right.
        rustix::io::ioctl_fionread(&self.0).map_or(true, |bytes| bytes > 0)
    }
}

/// One thread's watch on the directories of rule files.
pub struct RuleWatch {
    /// Created when there is something to watch. The kernel may refuse one.
    inotify: Option<Rc<DirectoryEvents>>,
    files: Vec<PathBuf>,
    /// The kernel's numbers of the watched directories.
    watched: BTreeSet<i32>,
    /// Directories that could not be watched at the last attempt. Each is logged once.
    missing: BTreeSet<PathBuf>,
    /// One thread of the process logs for all.
    says: bool,
}

impl RuleWatch {
    /// `says` is true if failures to watch are logged.
    pub fn new(says: bool) -> Self {
        Self { inotify: None, files: Vec::new(), watched: BTreeSet::new(), missing: BTreeSet::new(), says }
    }

    /// Watches the directories of these files and no others. Call it on a runtime.
    pub fn set_files(&mut self, files: Vec<PathBuf>) {
        self.files = files;
        self.begin();
    }

    /// Returns the events for requests. `None` if the kernel gives no descriptor.
    pub fn events(&self) -> Option<Rc<DirectoryEvents>> {
        self.inotify.clone()
    }

    /// Returns true when something has changed, and false every `LOOK_EVERY`. A change above a
    /// directory may replace it, and remote file systems report nothing. Never returns while
    /// there is no file.
    pub async fn changed(&mut self) -> bool {
        if self.files.is_empty() {
            return std::future::pending().await;
        }
        let event = timeout(LOOK_EVERY, self.event()).await.ok();
        if event.unwrap_or(true) {
            self.begin();
        }
        event.is_some()
    }

    /// Waits for events and reads all of them. Returns true if a directory has moved or is gone.
    async fn event(&self) -> bool {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        loop {
            let Ok(mut ready) = inotify.0.readable().await else { return std::future::pending().await };
            if let Ok(taken) = ready.try_io(|fd| take(fd.get_ref())) {
                // After a read error a check of everything is right.
                return taken.unwrap_or(true);
            }
        }
    }

    /// Watches the present directories.
    fn begin(&mut self) {
        let wanted: BTreeSet<_> = self.files.iter().flat_map(|file| directories(file)).collect();
        let mut watched = BTreeSet::new();
        let mut missing = BTreeSet::new();
        for directory in wanted {
            match self.add(&directory) {
                Ok(number) => {
                    watched.insert(number);
                }
                Err(error) => {
                    if self.says && !self.missing.contains(&directory) {
                        tracing::warn!(
                            code = %CODE_NOT_WATCHED,
                            %error,
                            "{} cannot be watched: changes of rules in it are seen within {} s",
                            directory.display(),
                            LOOK_EVERY.as_secs()
                        );
                    }
                    missing.insert(directory);
                }
            }
        }
        if let Some(inotify) = &self.inotify {
            for &number in self.watched.difference(&watched) {
                // It fails for a directory that is gone, whose watch the kernel has ended itself.
                let _ = inotify::remove_watch(&inotify.0, number);
            }
        }
        self.watched = watched;
        self.missing = missing;
    }

    /// Returns the same number again for a directory that is watched already.
    fn add(&mut self, directory: &Path) -> io::Result<i32> {
        let inotify = match &self.inotify {
            Some(inotify) => inotify,
            None => {
                let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
                self.inotify.insert(Rc::new(DirectoryEvents(sys::watch(fd, Interest::READABLE)?)))
            }
        };
        Ok(inotify::add_watch(&inotify.0, directory, CHANGES)?)
    }
}

/// Returns the directory of a file, and the real one if the file is a symbolic link.
fn directories(file: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let of = |file: &Path| file.parent().map(Path::to_path_buf);
    let real = std::fs::canonicalize(file).ok();
    [of(file), real.as_deref().and_then(of)].into_iter().flatten()
}

/// Reads all events. Returns true if a directory has moved or is gone.
fn take(fd: &OwnedFd) -> io::Result<bool> {
    let mut buffer = [MaybeUninit::uninit(); EVENTS_LEN];
    let mut events = inotify::Reader::new(fd, &mut buffer);
    let mut taken = None;
    loop {
        match events.next() {
            Ok(event) => {
                let is_other_place = event.events().intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF);
                taken = Some(taken.unwrap_or(false) | is_other_place);
            }
            Err(Errno::AGAIN) => return taken.ok_or_else(|| Errno::AGAIN.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn watch(file: &Path) -> RuleWatch {
        let mut watch = RuleWatch::new(true);
        watch.set_files(vec![file.to_owned()]);
        watch
    }

    /// Whether there is an event. The clock is simulated: it passes only if nothing else is to come.
    async fn sees(watch: &RuleWatch) -> bool {
        timeout(LOOK_EVERY, watch.event()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn each_way_to_change_a_file_is_seen_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.rb");
        let new = directory.path().join("new");
        let watch = watch(&file);
        let changes: [&dyn Fn(); 5] = [
            &|| fs::write(&file, "1").unwrap(),
            &|| fs::write(&new, "2").unwrap(),
            &|| fs::rename(&new, &file).unwrap(),
            &|| fs::remove_file(&file).unwrap(),
            &|| std::os::unix::fs::symlink("elsewhere", &file).unwrap(),
        ];
        assert!(!sees(&watch).await);
        let events = watch.events().unwrap();
        for change in changes {
            assert!(!events.wait());
            change();
            assert!(events.wait(), "a request that comes now is told");
            assert!(sees(&watch).await);
            assert!(!sees(&watch).await, "all of it was taken");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_behind_a_link_is_seen_where_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().join("real");
        fs::create_dir(&real).unwrap();
        fs::write(real.join("a.rb"), "1").unwrap();
        let link = directory.path().join("a.rb");
        std::os::unix::fs::symlink(real.join("a.rb"), &link).unwrap();
        let watch = watch(&link);
        fs::write(real.join("a.rb"), "2").unwrap();
        assert!(sees(&watch).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_comes_later_is_watched_then() {
        let directory = tempfile::tempdir().unwrap();
        let rules = directory.path().join("rules");
        let mut watch = watch(&rules.join("a.rb"));
        assert_eq!(watch.missing.len(), 1);
        fs::create_dir(&rules).unwrap();
        watch.changed().await;
        assert!(watch.missing.is_empty());
        fs::write(rules.join("a.rb"), "1").unwrap();
        assert!(sees(&watch).await);
        // Another one in its place.
        fs::rename(&rules, directory.path().join("old")).unwrap();
        fs::create_dir(&rules).unwrap();
        watch.changed().await;
        while sees(&watch).await {}
        fs::write(rules.join("a.rb"), "2").unwrap();
        assert!(sees(&watch).await);
        fs::write(directory.path().join("old/a.rb"), "3").unwrap();
        assert!(!sees(&watch).await, "the directory that was moved away is watched no more");
    }

    #[tokio::test(start_paused = true)]
    async fn file_that_is_no_longer_a_rule_is_not_watched() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.rb");
        let mut watch = watch(&file);
        watch.set_files(Vec::new());
        while sees(&watch).await {}
        fs::write(&file, "1").unwrap();
        assert!(!sees(&watch).await);
    }
}

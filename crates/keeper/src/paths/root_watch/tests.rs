//! Ways to document roots, changed as a tenant would, with the kernel's own events.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nagaya_keeper_api::root_changes::{RootChangesReader, RootStamp};
use rustix::fs::{CWD, Mode, OFlags};
use tempfile::TempDir;

use crate::paths::tenant_path::PathOwner;

use super::*;

/// A home with two releases, `current` leading to the first.
struct Scene {
    dir: TempDir,
    watch: RootWatch,
    reader: Arc<RootChangesReader>,
    opened: Cell<usize>,
}

fn site(name: &str, root: &str) -> Site {
    let backend = serde_json::json!({ "kind": "static", "root": root });
    let tenant = if name == "bob" { "bob" } else { "alice" };
    let site = serde_json::json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend });
    serde_json::from_value(site).unwrap()
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for release in ["1", "2"] {
            fs::create_dir_all(dir.path().join("releases").join(release).join("public")).unwrap();
        }
        symlink("releases/1", dir.path().join("current")).unwrap();
        let watch = RootWatch::new();
        let reader = Arc::new(RootChangesReader::new(watch.reader().unwrap()).unwrap());
        Self { dir, watch, reader, opened: Cell::new(0) }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn open(&self, name: &str, root: &str) -> Option<RootStamp> {
        let owner = PathOwner::new(Some(self.dir.path()), None);
        let open = || {
            self.opened.set(self.opened.get() + 1);
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rustix::fs::openat(CWD, self.at(root), flags, Mode::empty()).unwrap();
            Ok(OpenedRoot { dir, is_remote: false, stamp: None })
        };
        let (_, mark) = self.watch.open(&site(name, root), open, || owner.trace(Path::new(root))).unwrap();
        mark.map(|mark| RootStamp::new(Arc::clone(&self.reader), mark))
    }

    /// Reads all events there are.
    fn read(&self) -> HashSet<SiteName> {
        let mut all = HashSet::new();
        while let Ok(changed) = self.watch.take(self.watch.inotify.as_ref().unwrap()) {
            all.extend(changed);
        }
        all
    }

    fn switch(&self, to: &str) {
        symlink(format!("releases/{to}"), self.at("next")).unwrap();
        fs::rename(self.at("next"), self.at("current")).unwrap();
    }

    fn watched(&self) -> usize {
        self.watch.state.lock().directories.len()
    }
}

#[test]
fn a_change_of_each_name_on_the_way_is_seen_and_of_no_other() {
    let scene = Scene::new();
    let open = || scene.open("web", "current/public").expect("it is watched");
    assert!(open().is_current());
    let changes: [(&str, &dyn Fn(), bool); 7] = [
        ("a link that is switched", &|| scene.switch("2"), true),
        ("a link that is gone", &|| fs::rename(scene.at("current"), scene.at("old")).unwrap(), true),
        ("a link that is back", &|| fs::rename(scene.at("old"), scene.at("current")).unwrap(), true),
        (
            "another directory in the root's place",
            &|| {
                fs::rename(scene.at("releases/2/public"), scene.at("releases/2/before")).unwrap();
                fs::create_dir(scene.at("releases/2/public")).unwrap();
            },
            true,
        ),
        ("a file in the root", &|| fs::write(scene.at("releases/2/public/file"), "").unwrap(), false),
        ("a file beside the link", &|| fs::write(scene.at("file"), "").unwrap(), false),
        (
            "a change in the release that was before",
            &|| fs::remove_dir(scene.at("releases/1/public")).unwrap(),
            false,
        ),
    ];
    for (what, change, is_seen) in changes {
        // One that is not there is not opened.
        let stamp = scene.at("current/public").exists().then(open);
        change();
        let changed = scene.read();
        assert_eq!(changed.len(), usize::from(is_seen), "{what}");
        if let Some(stamp) = stamp {
            assert_eq!(stamp.is_current(), !is_seen, "{what}");
        }
    }
}

#[test]
fn a_way_that_stays_is_opened_once() {
    let scene = Scene::new();
    scene.open("web", "current/public").unwrap();
    // Once more, because it was not watched yet at the first time.
    assert_eq!(scene.opened.get(), 2);
    scene.open("web", "current/public").unwrap();
    assert_eq!(scene.opened.get(), 3);
}

#[test]
fn sites_share_directories_and_leave_none_watched() {
    let scene = Scene::new();
    // The home, `releases` and the release.
    scene.open("one", "current/public").unwrap();
    scene.open("two", "releases/1/public").unwrap();
    assert_eq!(scene.watched(), 3);
    scene.switch("2");
    assert_eq!(scene.read().len(), 1);
    let two = scene.open("two", "releases/1/public").unwrap();
    scene.open("one", "current/public").unwrap();
    assert_eq!(scene.watched(), 4);
    assert!(two.is_current());
    scene.watch.drop_idle(Instant::now() + IDLE_MAX + Duration::from_secs(1));
    assert_eq!(scene.watched(), 0);
    // The kernel says that it watches them no more; nobody is told.
    assert!(scene.read().is_empty());
}

#[test]
fn a_directory_that_is_gone_and_made_again_is_watched_again() {
    let scene = Scene::new();
    let stamp = scene.open("web", "releases/1/public").unwrap();
    fs::remove_dir_all(scene.at("releases")).unwrap();
    assert_eq!(scene.read().len(), 1);
    assert!(!stamp.is_current());
    fs::create_dir_all(scene.at("releases/1/public")).unwrap();
    let stamp = scene.open("web", "releases/1/public").unwrap();
    scene.read();
    let stamp = if stamp.is_current() { stamp } else { scene.open("web", "releases/1/public").unwrap() };
    fs::rename(scene.at("releases"), scene.at("moved")).unwrap();
    scene.read();
    assert!(!stamp.is_current());
}

#[test]
fn a_tenant_that_changes_too_much_is_not_watched_for_a_while() {
    let scene = Scene::new();
    let stamp = scene.open("web", "current/public").unwrap();
    for _ in 0..=EVENTS_PER_SECOND_MAX {
        fs::write(scene.at("file"), "").unwrap();
        fs::remove_file(scene.at("file")).unwrap();
    }
    assert_eq!(scene.read().len(), 1);
    assert!(!stamp.is_current());
    assert_eq!(scene.watched(), 0);
    assert!(scene.open("web", "current/public").is_none());
    let tenant = TenantName::new("alice").unwrap();
    scene.watch.state.lock().tenants.get_mut(&tenant).unwrap().since -= HELD_OFF;
    assert!(scene.open("web", "current/public").is_some());
}

#[test]
fn a_way_that_leads_out_of_the_home_is_not_watched() {
    let scene = Scene::new();
    let owner = PathOwner::new(Some(&scene.at("releases")), None);
    symlink("../releases/1", scene.at("releases/up")).unwrap();
    symlink(scene.at("current"), scene.at("releases/absolute")).unwrap();
    symlink(scene.at("releases/1"), scene.at("releases/back")).unwrap();
    assert!(owner.trace(Path::new("up")).is_err());
    assert!(owner.trace(Path::new("absolute")).is_err());
    assert!(owner.trace(&scene.at("current")).unwrap().is_none());
    assert_eq!(owner.trace(Path::new("1/public")).unwrap().unwrap().steps.len(), 2);
    assert_eq!(owner.trace(Path::new("back/public")).unwrap().unwrap().steps.len(), 3);
}

#[test]
fn a_way_that_cannot_be_watched_whole_leaves_no_watch() {
    let scene = Scene::new();
    let inotify = scene.watch.inotify.as_ref().unwrap();
    fs::write(scene.at("file"), "").unwrap();
    let step = |name: &str| {
        let directory =
            rustix::fs::openat(CWD, scene.at(name), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let directory = Rc::new(directory.unwrap());
        PathStep { id: FileId::of(&*directory).unwrap(), directory, name: "name".into() }
    };
    let steps = [step("releases"), step("releases/1"), step("releases"), step("file")];
    let watching = scene.watch.watch(inotify, &site("web", "current"), &steps);
    assert!(matches!(watching, WatchResult::Not));
    let kernels = fs::read_to_string(format!("/proc/self/fdinfo/{}", inotify.as_raw_fd())).unwrap();
    assert!(!kernels.contains("inotify wd"), "{kernels}");
    assert_eq!(scene.watched(), 0);
}

#[test]
fn events_that_were_lost_count_for_all_sites() {
    let scene = Scene::new();
    fs::create_dir_all(scene.at("other/public")).unwrap();
    scene.open("web", "current/public").unwrap();
    // Another tenant's, in directories in which nothing happens.
    let stamp = scene.open("bob", "other/public").unwrap();
    let most = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    for _ in 0..=most.trim().parse::<usize>().unwrap() / 2 {
        fs::write(scene.at("releases/file"), "").unwrap();
        fs::remove_file(scene.at("releases/file")).unwrap();
    }
    scene.read();
    assert!(!stamp.is_current());
}

//! Changes of files on a real file system (ext4 in a file), by each call that makes one: each is
//! found, with its paths as they are.
//!
//! Needs root. Not here: reading what has changed.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use libtest_mimic::{Arguments, Completion, Trial};
use nagaya_volumes::capture::{ChangeCapture, PathChange};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags};

/// A small file system of its own. Everything else on the machine would be seen, too.
struct OwnDisk {
    dir: tempfile::TempDir,
}

impl OwnDisk {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        run(Command::new("mkfs.ext4").arg("-q").arg(&image));
        fs::create_dir(dir.path().join("mount")).unwrap();
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(dir.path().join("mount")));
        let disk = Self { dir };
        fs::create_dir(disk.root()).unwrap();
        disk
    }

    /// The directory that is watched.
    fn root(&self) -> PathBuf {
        self.dir.path().join("mount/volume")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }
}

impl Drop for OwnDisk {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.dir.path().join("mount")));
    }
}

#[track_caller]
fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

fn at(path: &str) -> PathChange {
    PathChange::At(path.into())
}

fn renamed(from: &str, to: &str) -> PathChange {
    PathChange::Renamed { from: from.into(), to: to.into() }
}

/// A change: its name, the call, and the paths that are to be found then.
type Change<'a> = (&'static str, Box<dyn FnOnce() + 'a>, Vec<PathChange>);

/// Changes of files, one after another. `early` is a descriptor of `old` from before the group.
fn changes_of_files<'a>(disk: &'a OwnDisk, early: &'a File) -> Vec<Change<'a>> {
    vec![
        (
            "pwrite by an early descriptor",
            Box::new(move || early.write_all_at(b"x", 0).unwrap()),
            vec![at("old")],
        ),
        ("ftruncate", Box::new(move || early.set_len(3).unwrap()), vec![at("old")]),
        (
            "fallocate",
            Box::new(move || rustix::fs::fallocate(early, FallocateFlags::empty(), 0, 9000).unwrap()),
            vec![at("old")],
        ),
        ("create", Box::new(move || fs::write(disk.at("new"), "x").unwrap()), vec![at("new")]),
        (
            "chmod",
            Box::new(move || fs::set_permissions(disk.at("new"), fs::Permissions::from_mode(0o600)).unwrap()),
            vec![at("new")],
        ),
        (
            "chmod of a directory",
            Box::new(move || fs::set_permissions(disk.at("dir"), fs::Permissions::from_mode(0o700)).unwrap()),
            vec![at("dir")],
        ),
        ("mkdir", Box::new(move || fs::create_dir(disk.at("made")).unwrap()), vec![at("made")]),
        ("symlink", Box::new(move || symlink("/etc/passwd", disk.at("link")).unwrap()), vec![at("link")]),
    ]
}

/// Changes of names. `dir` is the directory that is watched.
fn changes_of_names<'a>(disk: &'a OwnDisk, dir: &'a File) -> Vec<Change<'a>> {
    vec![
        (
            "hard link",
            Box::new(move || fs::hard_link(disk.at("new"), disk.at("other")).unwrap()),
            vec![at("other")],
        ),
        (
            "rename",
            Box::new(move || fs::rename(disk.at("new"), disk.at("name")).unwrap()),
            vec![renamed("new", "name")],
        ),
        (
            "rename of a directory",
            Box::new(move || fs::rename(disk.at("dir"), disk.at("made/dir")).unwrap()),
            vec![renamed("dir", "made/dir")],
        ),
        (
            "exchange",
            Box::new(move || {
                rustix::fs::renameat_with(dir, "old", dir, "name", RenameFlags::EXCHANGE).unwrap();
            }),
            vec![renamed("old", "name"), renamed("name", "old")],
        ),
    ]
}

fn changes_after_those<'a>(disk: &'a OwnDisk, dir: &'a File) -> Vec<Change<'a>> {
    vec![
        (
            "write in a directory that has moved",
            Box::new(move || fs::write(disk.at("made/dir/inner"), "more").unwrap()),
            vec![at("made/dir/inner")],
        ),
        ("unlink", Box::new(move || fs::remove_file(disk.at("other")).unwrap()), vec![at("other")]),
        (
            "rmdir",
            Box::new(move || fs::remove_dir(disk.at("made/dir/sub")).unwrap()),
            vec![at("made/dir/sub")],
        ),
        (
            "a file without a name that gets one",
            Box::new(move || {
                let flags = OFlags::TMPFILE | OFlags::WRONLY;
                let nameless = rustix::fs::openat(dir, ".", flags, Mode::from(0o600)).unwrap();
                rustix::io::write(&nameless, b"x").unwrap();
                let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&nameless));
                rustix::fs::linkat(CWD, link, dir, "named", AtFlags::SYMLINK_FOLLOW).unwrap();
            }),
            vec![at("named")],
        ),
        (
            "xattr",
            Box::new(move || {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(disk.at("named"), "user.test", b"1", flags).unwrap();
            }),
            vec![at("named")],
        ),
    ]
}

/// Each change by itself.
fn every_call_is_seen() {
    let disk = OwnDisk::new();
    let root = disk.root();
    fs::write(disk.at("old"), "content").unwrap();
    fs::create_dir_all(disk.at("dir/sub")).unwrap();
    fs::write(disk.at("dir/inner"), "content").unwrap();
    let early = File::options().write(true).open(disk.at("old")).unwrap();
    let mut capture = ChangeCapture::open(&root).unwrap();
    assert!(capture.drain().unwrap().is_empty());
    let dir = File::open(&root).unwrap();
    let changes = changes_of_files(&disk, &early)
        .into_iter()
        .chain(changes_of_names(&disk, &dir))
        .chain(changes_after_those(&disk, &dir));
    for (what, change, expected) in changes {
        change();
        let found = capture.drain().unwrap();
        for one in &expected {
            assert!(found.contains(one), "{what}: {one:?} is not in {found:?}");
        }
        assert!(!found.contains(&PathChange::Unknown), "{what}: {found:?}");
    }
    // Another directory of the same file system is none of the volume's.
    fs::write(disk.dir.path().join("mount/outside"), "x").unwrap();
    assert_eq!(capture.drain().unwrap(), []);
}

/// A change of another thread is found by whoever has that thread's message.
fn changes_are_there_before_the_message_of_who_made_them() {
    const CHANGES: usize = 3_000;
    let disk = OwnDisk::new();
    let mut capture = ChangeCapture::open(&disk.root()).unwrap();
    let (to, messages) = mpsc::channel();
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let (to, dir) = (to.clone(), disk.root());
            scope.spawn(move || {
                for number in 0..CHANGES {
                    let name = format!("{writer}-{number}");
                    fs::write(dir.join(&name), number.to_string()).unwrap();
                    to.send(name).unwrap();
                }
            });
        }
        drop(to);
        let (mut seen, mut count) = (HashSet::new(), 0);
        for name in messages {
            for change in capture.drain().unwrap() {
                let PathChange::At(path) = change else { panic!("{change:?}") };
                seen.insert(path);
            }
            count += 1;
            assert!(seen.contains(Path::new(&name)), "{name} was changed, and is not seen");
        }
        assert_eq!(count, 3 * CHANGES);
        // After the last message everything was seen.
        assert_eq!(capture.drain().unwrap(), []);
    });
}

/// A large number of changes that nobody reads is not cut off.
fn no_number_of_changes_is_too_large() {
    let disk = OwnDisk::new();
    let mut capture = ChangeCapture::open(&disk.root()).unwrap();
    for number in 0..25_000 {
        let path = disk.at(&format!("{}", number % 5_000));
        let mut file = File::options().create(true).append(true).open(path).unwrap();
        file.write_all(b"x").unwrap();
    }
    let changes = capture.drain().unwrap();
    assert!(!changes.contains(&PathChange::Unknown));
    let paths: HashSet<_> = changes.iter().map(|change| format!("{change:?}")).collect();
    assert_eq!(paths.len(), 5_000);
}

/// Returns what this machine lacks.
fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root");
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("there are no loop devices");
    }
    let has_mkfs = Command::new("mkfs.ext4").arg("-V").output().is_ok();
    (!has_mkfs).then_some("there is no mkfs.ext4 (e2fsprogs)")
}

fn main() {
    let facts: [(&str, fn()); 3] = [
        ("every call that changes a file is seen, with its paths", every_call_is_seen),
        (
            "changes are there before a message of who made them",
            changes_are_there_before_the_message_of_who_made_them,
        ),
        ("no number of changes is too large", no_number_of_changes_is_too_large),
    ];
    let missing = missing();
    let trial = |(name, run): (&'static str, fn())| match missing {
        Some(why) => Trial::ignorable_test(name, move || Ok(Completion::ignored_with(why))),
        None => Trial::test(name, move || {
            run();
            Ok(())
        }),
    };
    libtest_mimic::run(&Arguments::from_args(), facts.map(trial).into()).exit();
}

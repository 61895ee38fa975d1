//! Paths as a tenant would like them. What takes two users is tried in `tests/kernel/links.rs`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use tempfile::TempDir;

use super::*;

fn inode_of(found: &OwnedFd) -> u64 {
    rustix::fs::fstat(found).unwrap().st_ino
}

/// As the user that runs the tests would be trusted.
fn walked(path: &Path) -> io::Result<u64> {
    Ok(inode_of(&walk(path, geteuid().as_raw())?))
}

#[track_caller]
fn assert_denied<T>(opened: io::Result<T>, what: &str) {
    let Err(error) = opened else { panic!("{what} was opened") };
    let is_denied = error.kind() == io::ErrorKind::PermissionDenied
        || [Errno::XDEV, Errno::LOOP].iter().any(|errno| Errno::from_io_error(&error) == Some(*errno));
    assert!(is_denied, "{what}: {error}");
}

/// A home `home` with a file, a directory and links, and beside it what is not the tenant's.
struct Scene {
    dir: TempDir,
    owner: PathOwner,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("home/releases/2")).unwrap();
        fs::create_dir(at("beside")).unwrap();
        fs::write(at("beside/secret"), "secret").unwrap();
        fs::write(at("home/releases/2/file"), "text").unwrap();
        symlink("releases/2", at("home/current")).unwrap();
        for (name, to) in [
            ("up", "../beside".to_owned()),
            ("absolute", at("beside").display().to_string()),
            ("back", at("home/releases").display().to_string()),
            ("root", "/".into()),
            ("process", "/proc/self/cwd".into()),
            ("processes", "/proc".into()),
        ] {
            symlink(to, at("home").join(name)).unwrap();
        }
        let owner = PathOwner::new(Some(&at("home")), None);
        Self { dir, owner }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn a_path_beneath_the_home_never_leaves_it() {
    let scene = Scene::new();
    let expected = fs::metadata(scene.at("home/releases/2")).unwrap().ino();
    let open = |path: &Path| scene.owner.open_directory(path, AccessRight::List);
    for path in [
        "releases/2",
        "current",
        "current/",
        "releases/../current",
        "./current/.",
        "back/2",
        "back/../current",
    ] {
        assert_eq!(inode_of(&open(path.as_ref()).unwrap()), expected, "{path}");
        assert_eq!(inode_of(&open(&scene.at("home").join(path)).unwrap()), expected, "home/{path}");
    }
    let home = fs::metadata(scene.at("home")).unwrap().ino();
    assert_eq!(inode_of(&open("".as_ref()).unwrap()), home);
    let links =
        ["up", "absolute", "root", "process", "processes", "../beside", "root/etc", "back/../../beside"];
    for path in links {
        assert_denied(open(path.as_ref()), path);
        assert_denied(open(&scene.at("home").join(path)), path);
        assert_denied(scene.owner.open_source(path.as_ref()), path);
    }
    for path in ["up/secret", "absolute/secret", "../beside/secret"] {
        assert_denied(scene.owner.open_file(path.as_ref()), path);
    }
    assert!(scene.owner.open_file("current/file".as_ref()).is_ok());
    let error = open("gone".as_ref()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert_eq!(open("current/file".as_ref()).unwrap_err().kind(), io::ErrorKind::NotADirectory);
}

#[test]
fn no_magic_link_leads_to_an_open_descriptor() {
    let scene = Scene::new();
    let held = fs::File::open(scene.at("beside")).unwrap();
    symlink(format!("/proc/self/fd/{}", held.as_raw_fd()), scene.at("home/held")).unwrap();
    assert_denied(scene.owner.open_file("held/secret".as_ref()), "held/secret");
    assert_denied(scene.owner.open_directory(&scene.at("home/held"), AccessRight::Search), "held");
    // Named by the record itself, and through a link that only root can have put there.
    let direct = format!("/proc/self/fd/{}/secret", held.as_raw_fd());
    assert_denied(scene.owner.open_file(direct.as_ref()), &direct);
    symlink(direct, scene.at("link")).unwrap();
    assert_denied(scene.owner.open_file(&scene.at("link")), "link");
}

#[test]
fn kernel_file_systems_are_not_opened() {
    let owner = PathOwner::new(None, None);
    for path in ["/proc", "/proc/self/fd", "/proc/1/root", "/sys", "/sys/kernel", "/dev", "/dev/pts"] {
        assert_denied(owner.open_directory(path.as_ref(), AccessRight::Search), path);
        assert_denied(owner.open_source(path.as_ref()), path);
    }
    for path in ["/proc/version", "/proc/self/environ", "/dev/null", "/dev/zero"] {
        assert_denied(owner.open_file(path.as_ref()), path);
    }
    assert!(owner.open_directory("/usr".as_ref(), AccessRight::List).is_ok());
}

#[test]
fn only_files_are_opened_for_reading() {
    let scene = Scene::new();
    let _listener = UnixListener::bind(scene.at("home/socket")).unwrap();
    rustix::fs::mknodat(CWD, scene.at("home/pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    for path in ["socket", "pipe", "releases"] {
        assert_denied(scene.owner.open_file(path.as_ref()), path);
    }
    let refused = scene.owner.open_source("socket".as_ref()).unwrap_err().to_string();
    assert!(refused.contains("databases"), "{refused}");
    assert_denied(scene.owner.open_source("pipe".as_ref()), "pipe");
    assert!(scene.owner.open_source("releases".as_ref()).unwrap().1, "a directory");
    assert!(!scene.owner.open_source("current/file".as_ref()).unwrap().1, "a file");
    let sockets = [("home/socket", true), ("home/pipe", false), ("home", false)];
    for (path, is_socket) in sockets {
        // Without root nothing here is root's, but no link is on the way.
        assert_eq!(open_socket(&scene.at(path)).is_ok(), is_socket, "{path}");
    }
}

#[test]
fn a_link_of_roots_is_followed_and_leads_where_it_says() {
    let scene = Scene::new();
    symlink(scene.at("beside"), scene.at("link")).unwrap();
    symlink("link/../beside", scene.at("again")).unwrap();
    let expected = fs::metadata(scene.at("beside")).unwrap().ino();
    for path in ["link", "link/", "again", "./link/../again", "home/../again"] {
        assert_eq!(walked(&scene.at(path)).unwrap(), expected, "{path}");
    }
    assert_eq!(walked(&scene.at("link/no-such-file")).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_link_that_anybody_may_have_put_there_is_not_followed() {
    let scene = Scene::new();
    let open = scene.at("open");
    fs::create_dir_all(open.join("inner")).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(open.join("file"), "").unwrap();
    symlink("file", open.join("link")).unwrap();
    symlink(".", open.join("here")).unwrap();
    symlink("../file", open.join("inner/link")).unwrap();
    assert!(walked(&open.join("file")).is_ok());
    for name in ["link", "here/file", "inner/link"] {
        assert_denied(walked(&open.join(name)), name);
    }
    // Where only an owner can rename, its own links are as good as in a directory of its own.
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    assert!(walked(&open.join("link")).is_ok() && walked(&open.join("inner/link")).is_ok());
}

#[test]
fn links_without_end_are_given_up() {
    let scene = Scene::new();
    symlink("a", scene.at("a")).unwrap();
    assert_denied(walked(&scene.at("a")), "a");
    symlink("a", scene.at("home/a")).unwrap();
    assert_denied(scene.owner.open_directory("a".as_ref(), AccessRight::Search), "home/a");
}

#[test]
fn a_tree_is_looked_at_as_if_it_were_all_there_is() {
    let scene = Scene::new();
    symlink("/releases/2/file", scene.at("home/inside")).unwrap();
    let tree = OwnedFd::from(fs::File::open(scene.at("home")).unwrap());
    let inode = |path: &str| Ok::<_, io::Error>(stat_in_tree(&tree, path.as_ref())?.st_ino);
    let expected = fs::metadata(scene.at("home/releases/2/file")).unwrap().ino();
    assert_eq!(inode("inside").unwrap(), expected);
    assert_eq!(inode("root").unwrap(), fs::metadata(scene.at("home")).unwrap().ino());
    assert_eq!(inode("up/secret").unwrap_err().kind(), io::ErrorKind::NotFound);
}

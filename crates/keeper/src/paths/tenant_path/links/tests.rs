//! Each kind of link, by one user. Cases of two users are in `tests/kernel/own_links.rs`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};

use super::*;

/// A home with a document root, and beside it what is not the tenant's to show.
struct Scene {
    dir: tempfile::TempDir,
    owner: PathOwner,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in
            ["home/app/public/css", "home/app/storage/public/sub", "home/.ssh", "home/shared/.git", "beside"]
        {
            fs::create_dir_all(at(name)).unwrap();
        }
        for name in [
            "home/app/storage/public/sub/a.txt",
            "home/.ssh/id",
            "home/app/.env",
            "beside/x",
            "home/app/public/p",
        ] {
            fs::write(at(name), name).unwrap();
        }
        let owner = PathOwner::new(Some(&at("home")), None);
        Self { dir, owner }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn link(&self, name: &str, to: impl AsRef<Path>) {
        symlink(to, self.at("home/app/public").join(name)).unwrap();
    }

    fn open(&self, path: &str) -> io::Result<u64> {
        let found = self.owner.open_by_own_links(Path::new("app/public"), Path::new(path))?;
        Ok(rustix::fs::fstat(&found)?.st_ino)
    }

    #[track_caller]
    fn leads(&self, path: &str, to: &str) {
        let inode = fs::metadata(self.at(to)).unwrap().ino();
        assert_eq!(self.open(path).unwrap_or_else(|error| panic!("{path}: {error}")), inode, "{path}");
    }

    #[track_caller]
    fn is_refused(&self, path: &str, why: &str) {
        let error = self.open(path).expect_err(path);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{path}: {error}");
        assert!(error.to_string().contains(why), "{path}: {error}");
    }
}

#[test]
fn links_to_the_tenants_own_files_are_followed() {
    let scene = Scene::new();
    scene.link("storage", "../storage/public");
    scene.link("absolute", scene.at("home/app/storage/public"));
    scene.link("file", "../storage/public/sub/a.txt");
    scene.link("chain", "storage/sub");
    scene.link("css/up", "../../storage");
    symlink("../app/storage", scene.at("home/shared/back")).unwrap();
    scene.link("detour", "../../shared/back/public");
    scene.link("inside", scene.at("home/app/public/css"));
    scene.link("itself", scene.at("home/app/public"));
    for (path, to) in [
        ("storage", "home/app/storage/public"),
        ("storage/sub/a.txt", "home/app/storage/public/sub/a.txt"),
        ("absolute/sub", "home/app/storage/public/sub"),
        ("file", "home/app/storage/public/sub/a.txt"),
        ("chain", "home/app/storage/public/sub"),
        ("css/up/public", "home/app/storage/public"),
        ("detour", "home/app/storage/public"),
        ("inside", "home/app/public/css"),
        ("itself/css", "home/app/public/css"),
    ] {
        scene.leads(path, to);
    }
    assert_eq!(scene.open("storage/none").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(scene.open("file/none").unwrap_err().kind(), io::ErrorKind::NotADirectory);
}

#[test]
fn a_home_is_known_by_its_path_without_links_too() {
    let scene = Scene::new();
    symlink("home", scene.at("alias")).unwrap();
    scene.link("real", scene.at("home/app/storage/public"));
    let owner = PathOwner::new(Some(&scene.at("alias")), None);
    owner.open_by_own_links(Path::new("app/public"), Path::new("real/sub")).unwrap();
}

#[test]
fn links_elsewhere_are_refused_with_the_reason() {
    let scene = Scene::new();
    fs::create_dir(scene.at("home/app/storage/.well-known")).unwrap();
    for (name, to, why) in [
        ("beside", "../../../beside", "out of its tenant's home"),
        ("file", "../../../beside/x", "out of its tenant's home"),
        ("etc", "/etc/passwd", "out of its tenant's home"),
        ("home", "../..", "all of its tenant's home"),
        ("app", "..", "above the document root"),
        ("keys", "../../.ssh", "'.ssh' is hidden"),
        ("key", "../../.ssh/id", "'.ssh' is hidden"),
        ("env", "../.env", "'.env' is hidden"),
        ("git", "../../shared/.git", "'.git' is hidden"),
        ("proc", "/proc/self/cwd", "out of its tenant's home"),
        ("device", "/dev/null", "out of its tenant's home"),
    ] {
        scene.link(name, to);
        scene.is_refused(name, why);
    }
    scene.link("absolute", scene.at("home/../beside"));
    scene.is_refused("absolute", "out of its tenant's home");
    scene.link("public", "../storage/.well-known");
    scene.leads("public", "home/app/storage/.well-known");
}

#[test]
fn loops_and_long_ways_end() {
    let scene = Scene::new();
    scene.link("loop", "loop");
    scene.link("ping", "pong");
    scene.link("pong", "ping");
    scene.link("long", "./".to_owned() + &"css/../".repeat(400));
    for name in ["loop", "ping", "long"] {
        let error = scene.open(name).expect_err(name);
        assert_eq!(Errno::from_io_error(&error), Some(Errno::LOOP), "{name}");
    }
}

#[test]
fn link_into_the_hidden_directory_above_the_root_is_opened() {
    let scene = Scene::new();
    fs::create_dir_all(scene.at("home/.deploy/releases/1/public")).unwrap();
    fs::create_dir_all(scene.at("home/.deploy/shared/uploads")).unwrap();
    fs::create_dir_all(scene.at("home/.deploy/.keys")).unwrap();
    symlink("releases/1", scene.at("home/.deploy/current")).unwrap();
    let public = scene.at("home/.deploy/releases/1/public");
    symlink("../../../shared/uploads", public.join("uploads")).unwrap();
    symlink("../../../.keys", public.join("keys")).unwrap();
    let open =
        |path: &str| scene.owner.open_by_own_links(Path::new(".deploy/current/public"), Path::new(path));
    open("uploads").unwrap();
    assert!(open("keys").unwrap_err().to_string().contains("hidden"));
}

#[test]
fn root_outside_the_home_links_into_the_home_only() {
    let scene = Scene::new();
    fs::create_dir_all(scene.at("beside/site/sub")).unwrap();
    let root = scene.at("beside/site");
    symlink(scene.at("home/app/storage/public"), root.join("storage")).unwrap();
    symlink("../x", root.join("up")).unwrap();
    symlink(scene.at("home"), root.join("home")).unwrap();
    let open = |path: &str| scene.owner.open_by_own_links(&root, Path::new(path));
    open("storage/sub").unwrap();
    open("sub").unwrap();
    assert!(open("up").unwrap_err().to_string().contains("neither beneath the document root"));
    assert!(open("home").unwrap_err().to_string().contains("all of its tenant's home"));
    let homeless = PathOwner::new(None, None);
    let error = homeless.open_by_own_links(&root, Path::new("storage")).unwrap_err();
    assert!(error.to_string().contains("no home"), "{error}");
}

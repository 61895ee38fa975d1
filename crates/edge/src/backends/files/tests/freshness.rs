//! What is kept is what lies on disk: every change is seen by the next request.

use std::cell::RefCell;
use std::os::unix::fs::{MetadataExt, symlink};

use nagaya_records::record::Backend;
use nagaya_records::{SiteName, TenantName};

use super::*;
use crate::backends::files::cache::LARGE_FILES_MAX;
use crate::backends::files::root::ROOT_AGE_MAX;

/// Writes until the file system's clock has moved on, as it has whenever a file was quiet for the racy margin.
fn rewrite(path: &Path, content: impl AsRef<[u8]>) {
    rewrite_after(path, path, content);
}

/// Writes `path` until it is younger than what `other` is now.
fn rewrite_after(path: &Path, other: &Path, content: impl AsRef<[u8]>) {
    let stamp = |path| fs::metadata(path).map(|meta| (meta.mtime(), meta.mtime_nsec())).expect("a file");
    let before = stamp(other);
    while stamp(path) <= before {
        fs::write(path, &content).expect("a file");
    }
}

#[test]
fn a_small_file_rewritten_in_place_is_seen_at_once() {
    let world = World::new();
    let path = world.write("x.txt", "one");
    let first = world.get("/x.txt");
    assert_eq!((first.text(), world.kept()), ("one", 1));
    rewrite(&path, "two");
    let second = world.get("/x.txt");
    assert_eq!(second.text(), "two");
    assert_ne!(first.header("etag"), second.header("etag"));
}

#[test]
fn a_large_file_truncated_replaced_or_removed_is_seen_at_once() {
    let world = World::new();
    let path = world.write("x.bin", vec![1; 100_000]);
    assert_eq!(world.get("/x.bin").body.len(), 100_000);
    assert_eq!(world.kept(), 1);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(50_000).unwrap();
    assert_eq!(world.get("/x.bin").body, vec![1; 50_000]);
    let new = world.write("new", vec![2; 50_000]);
    fs::rename(new, &path).unwrap();
    assert_eq!(world.get("/x.bin").body, vec![2; 50_000]);
    fs::remove_file(&path).unwrap();
    assert_eq!(world.refusal("/x.bin"), Refusal::NotFound);
    assert_eq!(world.kept(), 0);
}

#[test]
fn replacement_and_removal_of_a_small_file_show_at_once() {
    let world = World::new();
    let path = world.write("x", "one");
    assert_eq!(world.get("/x").text(), "one");
    fs::rename(world.write("new", "two"), &path).unwrap();
    assert_eq!(world.get("/x").text(), "two");
    fs::remove_file(&path).unwrap();
    assert_eq!(world.refusal("/x"), Refusal::NotFound);
    fs::create_dir(&path).unwrap();
    assert_eq!(world.get("/x").status, 301);
}

#[test]
fn a_link_turned_to_another_file_is_seen_at_once() {
    let world = World::new();
    world.write("releases/1/x.txt", "one");
    world.write("releases/2/x.txt", "two");
    symlink("releases/1", world.path("current")).unwrap();
    assert_eq!(world.get("/current/x.txt").text(), "one");
    symlink("releases/2", world.path("next")).unwrap();
    fs::rename(world.path("next"), world.path("current")).unwrap();
    assert_eq!(world.get("/current/x.txt").text(), "two");
}

#[test]
fn a_file_that_just_changed_is_not_kept_and_its_tag_is_weak() {
    let world = World::now();
    world.write("x.txt", "one");
    let young = world.get("/x.txt");
    assert_eq!((young.text(), world.kept()), ("one", 0));
    assert!(young.header("etag").starts_with("W/\""));
    world.clock.pass(LATER);
    let settled = world.get("/x.txt");
    assert_eq!(world.kept(), 1);
    assert_eq!(format!("W/{}", settled.header("etag")), young.header("etag"));
}

#[test]
fn a_sibling_made_later_updated_or_removed_is_seen() {
    let world = World::new();
    let gzip: &[(&str, &str)] = &[("accept-encoding", "gzip")];
    let plain = world.write("x.txt", "plain");
    assert_eq!(world.get_with("/x.txt", gzip).text(), "plain");
    let sibling = world.write("x.txt.gz", "packed 1");
    // A new sibling is only looked for now and then.
    world.clock.pass(Duration::from_secs(2));
    assert_eq!(world.get_with("/x.txt", gzip).text(), "packed 1");
    rewrite(&sibling, "packed 2");
    assert_eq!(world.get_with("/x.txt", gzip).text(), "packed 2");
    rewrite_after(&plain, &sibling, "newer");
    let answer = world.get_with("/x.txt", gzip);
    assert_eq!((answer.text(), answer.header("vary")), ("newer", ""));
    rewrite_after(&sibling, &plain, "packed 3");
    world.clock.pass(Duration::from_secs(2));
    assert_eq!(world.get_with("/x.txt", gzip).text(), "packed 3");
    fs::remove_file(sibling).unwrap();
    assert_eq!(world.get_with("/x.txt", gzip).text(), "newer");
}

#[test]
fn a_changed_cache_control_of_the_site_is_seen_at_once() {
    let mut world = World::new();
    world.write("x.txt", "x");
    assert_eq!(world.get("/x.txt").header("cache-control"), "");
    world.files.cache_control = Some("max-age=60".into());
    assert_eq!(world.get("/x.txt").header("cache-control"), "max-age=60");
}

#[test]
fn the_cache_stays_within_its_bytes_and_descriptors() {
    const BYTES: usize = 1 << 20;
    let world = World::with_cache(BYTES);
    world.clock.pass(LATER);
    for number in 0..600 {
        let name = format!("{number}.bin");
        fs::File::create(world.path(&name)).unwrap().set_len(100_000).unwrap();
        world.get(&format!("/{name}"));
        assert!(world.server.cache.borrow().bytes() <= BYTES);
    }
    assert!(world.kept() > 0 && world.kept() <= LARGE_FILES_MAX);
    for number in 0..100 {
        world.write(&format!("{number}.txt"), vec![b'x'; 20_000]);
        assert_eq!(world.get(&format!("/{number}.txt")).body.len(), 20_000);
        assert!(world.server.cache.borrow().bytes() <= BYTES);
    }
    // The most recent ones are the ones that stayed.
    assert!(world.server.cache.borrow_mut().get(world.root.id(), "99.txt", world.clock.now()).is_some());
    assert!(world.server.cache.borrow_mut().get(world.root.id(), "0.bin", world.clock.now()).is_none());
}

#[test]
fn a_cache_of_no_bytes_keeps_nothing() {
    let world = World::with_cache(0);
    world.clock.pass(LATER);
    world.write("x.txt", "x");
    assert_eq!((world.get("/x.txt").text(), world.kept()), ("x", 0));
}

#[test]
fn an_idle_entry_is_dropped_and_its_descriptor_closed() {
    let world = World::new();
    world.write("old.bin", vec![0; 100_000]);
    world.write("new.txt", "x");
    world.get("/old.bin");
    world.clock.pass(IDLE_MAX);
    world.get("/new.txt");
    world.server.drop_idle(world.clock.now());
    assert_eq!(world.kept(), 1);
    assert!(world.server.cache.borrow_mut().get(world.root.id(), "new.txt", world.clock.now()).is_some());
}

fn site(name: &str, root: &str) -> Site {
    Site {
        name: SiteName::new(name).unwrap(),
        tenant: TenantName::new("tenant").unwrap(),
        hosts: Vec::new(),
        path: "/".into(),
        backend: Backend::Static(FileRoot { root: root.into(), ..FileRoot::default() }),
        max_concurrent: None,
        stream_seconds: None,
        admission: Default::default(),
        limits: Default::default(),
        request_limits: Default::default(),
        demotions: Vec::new(),
    }
}

/// Opens directories of a world as the keeper would, and counts how often it was asked.
struct Opener<'a> {
    world: &'a World,
    asked: RefCell<Vec<String>>,
}

impl Opener<'_> {
    async fn root(&self, site: &Site) -> DocumentRoot {
        let open = async || {
            let name = site.backend.files().expect("it has files").root.to_string_lossy().into_owned();
            let path = self.world.dir.path().join(&name);
            self.asked.borrow_mut().push(name);
            tokio::task::yield_now().await;
            Ok::<_, std::io::Error>(open_dir(&path))
        };
        self.world.server.root(site, open).await.expect("a root")
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_root_is_opened_once_and_again_when_it_is_old_or_another() {
    let world = World::now();
    fs::create_dir(world.dir.path().join("other")).unwrap();
    let opener = Opener { world: &world, asked: RefCell::default() };
    let first = site("a", "root");
    // A crowd asks once.
    let (one, two) = tokio::join!(opener.root(&first), opener.root(&first));
    assert_eq!(one.id(), two.id());
    opener.root(&first).await;
    assert_eq!(*opener.asked.borrow(), ["root"]);
    // The directory is replaced by rename.
    fs::rename(world.dir.path().join("root"), world.dir.path().join("previous")).unwrap();
    fs::create_dir(world.dir.path().join("root")).unwrap();
    assert_eq!(opener.root(&first).await.id(), one.id());
    world.clock.pass(ROOT_AGE_MAX);
    assert_ne!(opener.root(&first).await.id(), one.id());
    assert_eq!(*opener.asked.borrow(), ["root", "root"]);
    // The site's record names another root.
    opener.root(&site("a", "other")).await;
    assert_eq!(*opener.asked.borrow(), ["root", "root", "other"]);
    world.clock.pass(IDLE_MAX);
    world.server.drop_idle(world.clock.now());
    assert_eq!(world.server.roots.len(), 0);
}

#[tokio::test(flavor = "current_thread")]
async fn a_root_that_cannot_be_opened_any_more_is_not_served_from() {
    let world = World::now();
    let opener = Opener { world: &world, asked: RefCell::default() };
    let site = site("a", "root");
    opener.root(&site).await;
    world.clock.pass(ROOT_AGE_MAX);
    let closed = world.server.root(&site, async || Err(std::io::Error::other("closed"))).await;
    assert!(closed.is_err());
    opener.root(&site).await;
    assert_eq!(opener.asked.borrow().len(), 2);
}

//! Layouts as they come, and as nobody should make them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::Value;
use tempfile::TempDir;

use super::*;
use layers::{Layer as Tar, Writer, architecture, zstd};

#[path = "../../tests/kernel/layers.rs"]
mod layers;

struct World {
    dir: TempDir,
    bases: BaseStore,
    writer: Writer,
}

impl World {
    fn with(bounds: BaseLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bases = BaseStore::new(dir.path().join("bases"), bounds);
        let writer = Writer::new(&dir.path().join("layout"));
        Self { dir, bases, writer }
    }

    fn new() -> Self {
        Self::with(BaseLimits { bytes_max: 1 << 20, entries_max: 100 })
    }

    /// One image of these layers.
    fn of(layers: impl IntoIterator<Item = Tar>) -> Self {
        let mut world = Self::new();
        let layers: Vec<Value> = layers.into_iter().map(|layer| world.writer.gzip(layer)).collect();
        world.writer.image("v1", architecture(), &layers);
        world
    }

    fn find(&self, layout: &str, tag: Option<&str>) -> Result<BaseLookup, BaseError> {
        self.bases.find(&self.dir.path().join(layout), tag, &PathOwner::new(None, None))
    }

    fn get(&self, tag: Option<&str>) -> Result<Arc<UnpackedBase>, BaseError> {
        match self.find("layout", tag)? {
            BaseLookup::There(there) => Ok(there),
            BaseLookup::Missing(missing) => self.bases.unpack(&missing),
        }
    }

    #[track_caller]
    fn refused(&self, words: &str) -> BaseError {
        let error = self.get(None).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        let left = fs::read_dir(self.dir.path().join("bases")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "nothing of it is left");
        error
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn layers_are_put_over_each_other_and_are_for_all_to_read() {
    let long = format!("usr/share/{}/file", "long-name/".repeat(15).trim_end_matches('/'));
    let world = World::of([
        Tar::new()
            .dir("./")
            .dir("etc/")
            .dir("usr/lib/")
            .file("etc/one", "1")
            .file("etc/two", "2")
            .link("lib", "usr/lib")
            .program("usr/bin/run", "x"),
        Tar::new()
            .file("lib/deep/file", "in usr")
            .hard("etc/also", "etc/one")
            .file("etc/two", "new")
            .long(&long, b"long")
            .device("dev/sda"),
    ]);
    let base = world.get(Some("v1")).unwrap();
    let at = |path: &str| base.path.join(path);
    let text = |path: &str| fs::read_to_string(at(path)).unwrap();
    assert_eq!((text("etc/one"), text("etc/two"), text(&long)), ("1".into(), "new".into(), "long".into()));
    assert_eq!(text("usr/lib/deep/file"), "in usr", "a layer goes through the links of those beneath");
    assert_eq!(fs::metadata(at("etc/one")).unwrap().ino(), fs::metadata(at("etc/also")).unwrap().ino());
    assert!(!at("dev/sda").exists());
    let mode = |path: &str| fs::metadata(at(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("etc/one"), mode("usr/bin/run"), mode("etc")), (0o644, 0o755, 0o755));
    assert!(Arc::ptr_eq(&base, &world.get(None).unwrap()), "once for all");
}

#[test]
fn layer_hides_only_files_of_the_layers_beneath() {
    let world = World::of([
        Tar::new().file("a/old", "").file("a/keep", "").file("b/old", "").dir("b/sub/").file("c", ""),
        Tar::new()
            .file("b/new", "")
            .file("b/.wh..wh..opq", "")
            .file("a/.wh.old", "")
            .file("c", "again")
            .file(".wh.c", "")
            .file(".wh.never-there", "")
            .file(".wh..wh.plnk", ""),
    ]);
    let base = world.get(None).unwrap();
    assert_eq!(names(&base.path), ["a", "b", "c"]);
    assert_eq!(
        (names(&base.path.join("a")), names(&base.path.join("b"))),
        (vec!["keep".to_owned()], vec!["new".to_owned()])
    );
    assert_eq!(fs::read_to_string(base.path.join("c")).unwrap(), "again");
}

#[test]
fn nothing_is_written_outside_the_tree() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    for (name, layer) in [
        ("a path", Tar::new().file("../../escaped", "x")),
        ("a path in the middle", Tar::new().file("a/../../escaped", "x")),
        ("a hard link", Tar::new().hard("passwd", "../../../../../etc/passwd")),
        ("a whiteout", Tar::new().file("a/.wh...", "")),
    ] {
        let error = World::of([layer]).get(None).unwrap_err();
        let is_said =
            error.to_string().contains("leaves the root") || error.to_string().contains("hides no name");
        assert!(is_said, "{name}: {error}");
    }
    // A link may say what it wants: it leads where a program in the sandbox would come by it.
    let world = World::of([
        Tar::new().link("out", target).link("up", "../../../../../../../../.."),
        Tar::new().file("out/escaped", "x").file("up/at-the-top", "y").file("out/.wh.precious", ""),
    ]);
    fs::write(outside.path().join("precious"), "").unwrap();
    let error = world.get(None).unwrap_err();
    assert!(error.to_string().contains("out/escaped"), "{error}");
    assert_eq!(names(outside.path()), ["precious"]);
    let world = World::of([
        Tar::new().dir("top").link("up", "../../../top"),
        Tar::new().file("up/file", "y").hard("passwd", "/top/file"),
    ]);
    let base = world.get(None).unwrap();
    assert_eq!(fs::read_to_string(base.path.join("top/file")).unwrap(), "y");
    World::of([Tar::new().hard("passwd", "/etc/passwd")]).refused("a file that is not there");
}

#[test]
fn altered_or_missing_blob_is_refused() {
    let layer = || Tar::new().file("etc/one", "1");
    for alter in [0, 20] {
        let mut world = World::new();
        let blob = world.writer.plain(layer());
        world.writer.image("v1", architecture(), std::slice::from_ref(&blob));
        let path = world.writer.blob_path(&blob);
        let mut bytes = fs::read(&path).unwrap();
        if alter == 0 {
            bytes.push(0)
        } else {
            bytes[512 + alter] ^= 1
        }
        fs::write(&path, bytes).unwrap();
        assert!(matches!(world.refused("was altered"), BaseError::Altered { .. }));
        fs::remove_file(&path).unwrap();
        assert!(matches!(world.refused("missing in the layout"), BaseError::NoBlob { .. }));
    }
    let mut world = World::new();
    let blob = world.writer.gzip(layer());
    let manifest = world.writer.image("v1", architecture(), std::slice::from_ref(&blob));
    let path = world.writer.blob_path(&blob);
    let half = fs::read(&path).unwrap();
    fs::write(&path, &half[..half.len() / 2]).unwrap();
    world.refused("was altered");
    fs::write(world.writer.blob_path(&manifest), "{}").unwrap();
    world.refused("a manifest");
}

#[test]
fn a_layer_may_be_compressed_with_zstd() {
    let layer = || Tar::new().dir("etc/").file("etc/one", "1").file("usr/noise", noise(300 << 10));
    let mut world = World::new();
    let blob = world.writer.zstd(layer());
    world.writer.image("v1", architecture(), std::slice::from_ref(&blob));
    let tree = world.get(None).unwrap().path.clone();
    assert_eq!(fs::read_to_string(tree.join("etc/one")).unwrap(), "1");
    assert_eq!(fs::read(tree.join("usr/noise")).unwrap(), noise(300 << 10));
}

#[test]
fn zstd_that_is_none_is_refused() {
    const KIND: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    let tar = Tar::new().file("etc/one", noise(100 << 10)).bytes();
    let (whole, far) = (zstd(&["--check"], &tar), zstd(&["--ultra", "--long=28"], &tar));
    let mut other_sum = whole.clone();
    *other_sum.last_mut().unwrap() ^= 1;
    let rows: [(&str, &[u8]); 6] = [
        ("it is no zstd", b"something"),
        ("it is no zstd", &whole[..whole.len() / 2]),
        ("it is no zstd", &[&whole[..], b"more"].concat()),
        ("checksum", &other_sum),
        // Skips more than there is.
        ("its end", &[&whole[..], b"\x50\x2a\x4d\x18\xff\0\0\0"].concat()),
        ("it is no zstd", &far),
    ];
    for (words, bytes) in rows {
        let mut world = World::new();
        let blob = world.writer.blob(KIND, bytes);
        world.writer.image("v1", architecture(), &[blob]);
        world.refused(words);
    }
    let mut world = World::new();
    let blob = world.writer.blob(KIND, &zstd(&["-19"], &Tar::new().file("zeros", vec![0; 2 << 20]).bytes()));
    world.writer.image("v1", architecture(), &[blob]);
    world.refused("more than 1048576 bytes");
}

/// Bytes that cannot be compressed to nothing, the same in each run.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 & 0x3f
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn oversized_base_is_refused_before_it_fills_the_disk() {
    let world = World::of([Tar::new().file("zeros", vec![0; 2 << 20])]);
    assert!(fs::metadata(world.dir.path().join("layout/index.json")).unwrap().len() < 1 << 20);
    world.refused("more than 1048576 bytes");
    let many = (0..101).fold(Tar::new(), |layer, number| layer.file(&format!("f{number}"), ""));
    World::of([many]).refused("100 files");
    let halves = || Tar::new().file("half", vec![0; 600 << 10]);
    World::of([halves(), halves().file("x", "")]).refused("too large");
    let deep = "d/".repeat(129);
    World::of([Tar::new().long(&deep, b"")]).refused("directories deep");
}

#[test]
fn a_name_means_one_image_for_this_machine() {
    let mut world = World::new();
    let layer = world.writer.plain(Tar::new().file("etc/release", "1"));
    world.writer.image("v1", architecture(), std::slice::from_ref(&layer));
    let other = world.writer.plain(Tar::new().file("etc/release", "2"));
    world.writer.image("v2", architecture(), std::slice::from_ref(&other));
    world.refused("without a tag");
    world.writer.image("foreign", "pdp11", &[layer]);
    let error = world.get(Some("foreign")).unwrap_err().to_string();
    assert!(error.contains("linux/pdp11"), "{error}");
    let error = world.get(Some("v3")).unwrap_err().to_string();
    assert!(error.contains("'v3'") && error.contains("v1, v2"), "{error}");
    let (one, two) = (world.get(Some("v1")).unwrap(), world.get(Some("v2")).unwrap());
    assert_ne!(one.path, two.path);
    let encrypted = world.writer.blob("application/vnd.oci.image.layer.v1.tar+encrypted", b"");
    world.writer.image("e", architecture(), &[encrypted]);
    let error = world.get(Some("e")).unwrap_err().to_string();
    assert!(error.contains("plain or with gzip or zstd"), "{error}");
    fs::remove_file(world.dir.path().join("layout/oci-layout")).unwrap();
    assert!(matches!(world.get(None), Err(BaseError::NoLayout { .. })));
}

#[test]
fn a_base_stays_as_long_as_it_is_held() {
    let world = World::of([Tar::new().file("etc/one", "1")]);
    let base = world.get(None).unwrap();
    let path = base.path.clone();
    fs::create_dir(world.dir.path().join("bases/.7-1")).unwrap();
    let all = SystemTime::now() + Duration::from_secs(60);
    world.bases.collect_before(all).unwrap();
    assert_eq!(
        names(&world.dir.path().join("bases")),
        std::slice::from_ref(&base.digest),
        "what was left half done is gone"
    );
    drop(base);
    world.bases.collect().unwrap();
    assert!(path.exists(), "it was used a moment ago");
    world.bases.collect_before(all).unwrap();
    assert!(!path.exists());
    assert!(world.get(None).unwrap().path.join("etc/one").exists());
}

/// Takes the layers of the layout away, or puts something of the same length there.
fn without_layers(world: &World, layers: &[Value], instead: Option<u8>) {
    for layer in layers {
        let path = world.writer.blob_path(layer);
        let len = fs::metadata(&path).unwrap().len();
        fs::remove_file(&path).unwrap();
        if let Some(byte) = instead {
            fs::write(&path, vec![byte; usize::try_from(len).unwrap()]).unwrap();
        }
    }
}

#[test]
fn a_base_is_had_only_by_who_has_its_layers() {
    let mut world = World::new();
    let layers =
        [world.writer.gzip(Tar::new().file("a", "1")), world.writer.plain(Tar::new().file("b", "2"))];
    world.writer.image("v1", architecture(), &layers);
    let owners =
        [Path::new("/home/alice"), Path::new("/home/bob")].map(|home| PathOwner::new(Some(home), None));
    let get = |owner: &PathOwner| match world.bases.find(&world.dir.path().join("layout"), None, owner)? {
        BaseLookup::There(there) => Ok((there, "at once")),
        BaseLookup::Missing(missing) => world.bases.unpack(&missing).map(|there| (there, "shown")),
    };
    let (first, how) = get(&owners[0]).unwrap();
    assert_eq!(how, "shown");
    let kept: Vec<_> = layers.iter().map(|layer| fs::read(world.writer.blob_path(layer)).unwrap()).collect();
    without_layers(&world, &layers, None);
    assert!(matches!(get(&owners[1]), Err(BaseError::NoBlob { .. })), "it knows no more than the manifest");
    assert!(get(&owners[0]).is_ok_and(|(_, how)| how == "at once"), "who has shown them need not again");
    for (layer, bytes) in layers.iter().zip(&kept) {
        fs::write(world.writer.blob_path(layer), bytes).unwrap();
    }
    without_layers(&world, &layers[1..], Some(0));
    assert!(matches!(get(&owners[1]), Err(BaseError::Altered { .. })), "zeros are no layer");
    fs::write(world.writer.blob_path(&layers[1]), &kept[1]).unwrap();
    let (second, how) = get(&owners[1]).unwrap();
    assert!(how == "shown" && Arc::ptr_eq(&first, &second), "one on disk for both");
    assert_eq!(get(&owners[1]).unwrap().1, "at once");
}

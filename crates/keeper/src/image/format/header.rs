//! The header of an image: its subject, its requirements, and its files.
//!
//! A text of two parts: a line `nagaya-image <version> <digest>`, and JSON that the digest is of.
//! The file `header` has a third part, a line `authenticator <hex>`: HMAC-SHA256 over the text,
//! with a key that only the keeper of this node has. So nobody else can change a file of an image,
//! or make one, and have it used. It stays on the node: other nodes seal what they send (`sealed`).
//!
//! Version 7 has the fields of `ImageHeader`, the authenticator, and a file that names what the
//! image depends on (`watched`). A header of another version is no image any more; there is no
//! migration, because an image can be taken again at any time. Not here: reading and writing the
//! files it names (`store`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use data_encoding::HEXLOWER;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::image::Digest;
use crate::image::format::memory_plan::{MappedMemory, SharedMemory};
use crate::paths::tenant_path::stat_in_tree;

/// Version of the format. Change it with any field.
const VERSION: u32 = 8;

/// First word of the first line.
const MAGIC: &str = "nagaya-image";

/// First word of the last line.
const AUTHENTICATOR: &str = "authenticator ";

/// Name of the file in an image's directory.
pub const NAME: &str = "header";

/// Maximum length of a header, bytes. One file takes 200 bytes.
pub const LEN_MAX: u64 = 1 << 20;

/// Maximum number of files of one image. CRIU writes about three for each process.
pub const FILES_MAX: usize = 4096;

/// The subject of an image. Another release or definition is another image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSubject {
    pub site: String,
    pub release: String,
    /// Digest of all of the site's record that affects how it is run.
    pub definition: Digest,
    /// Digest of the files it runs on: see `base_digest`.
    pub base: Digest,
    pub uid: u32,
    pub gid: u32,
}

impl ImageSubject {
    /// Returns the id under which an image is kept. The base is not part of it: an image of an
    /// older base is replaced.
    pub fn id(&self) -> String {
        let Self { site, release, definition, base: _, uid, gid } = self;
        let ids = format!("{definition} {uid} {gid}");
        let mut id = Digest::of(&[site.as_bytes(), release.as_bytes(), ids.as_bytes()]).to_string();
        id.truncate(ID_LEN);
        id
    }
}

/// Length of an id, characters.
pub const ID_LEN: usize = 32;

/// Properties of a node that must be the same for a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageEnvironment {
    pub kernel: String,
    /// Digest of the processor's features.
    pub processor: Digest,
    pub criu: String,
    /// Digest of CRIU's program.
    pub criu_build: Digest,
}

impl ImageEnvironment {
    /// Returns that of this machine.
    pub fn here(criu_version: &str, criu_build: Digest) -> io::Result<Self> {
        let system = rustix::system::uname();
        let processor = fs::read_to_string("/proc/cpuinfo")?;
        let is_feature = |line: &&str| {
            ["vendor_id", "cpu family", "model\t", "flags", "Features"]
                .iter()
                .any(|name| line.starts_with(name))
        };
        let first = processor.split("\n\n").next().unwrap_or_default();
        let features: Vec<&str> = first.lines().filter(is_feature).collect();
        Ok(Self {
            kernel: format!("{} {}", system.release().to_string_lossy(), system.version().to_string_lossy()),
            processor: Digest::of(&[features.join("\n").as_bytes()]),
            criu: criu_version.to_owned(),
            criu_build,
        })
    }

    /// Describes the difference. `None` if there is none.
    pub fn differs(&self, other: &Self) -> Option<String> {
        if self.kernel != other.kernel {
            return Some(format!("it was taken on kernel '{}'", self.kernel));
        }
        if self.processor != other.processor {
            return Some("it was taken on a processor with other features".into());
        }
        if (&self.criu, self.criu_build) != (&other.criu, other.criu_build) {
            return Some(format!("it was taken by another build of CRIU (version {})", self.criu));
        }
        None
    }
}

/// One file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    pub bytes: u64,
    pub digest: Digest,
}

/// An image's record of a descriptor that was handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownFd {
    /// Its name in CRIU: `socket:[123]`, `pipe:[456]`.
    pub name: String,
    /// The application has made it non-blocking, the keeper's own descriptor included. CRIU does
    /// not change a descriptor that it is handed. A program that waits for events must not wait in
    /// `accept`.
    pub nonblocking: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageHeader {
    pub subject: ImageSubject,
    pub environment: ImageEnvironment,
    /// Seconds since 1970.
    pub taken_at: u64,
    /// Descriptors that were handed over, in the order of `checkpoint::Handed`.
    pub handed: Vec<KnownFd>,
    pub files: BTreeMap<String, ImageFile>,
    /// Memory that its processes map from some of these files.
    pub mapped: MappedMemory,
    /// Memory that its processes share, and that a wake writes from some of these files.
    pub shared: Vec<SharedMemory>,
}

impl ImageHeader {
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|content| content.bytes).sum()
    }

    pub fn encode(&self) -> Result<String, serde_json::Error> {
        Ok(Self::frame(&serde_json::to_string_pretty(self)?))
    }

    /// Adds the first line, with the text's digest.
    pub(crate) fn frame(body: &str) -> String {
        format!("{MAGIC} {VERSION} {}\n{body}\n", Digest::of(&[body.as_bytes()]))
    }

    /// Returns the content of the signed file.
    pub fn sign(&self, key: &hmac::Key) -> Result<String, serde_json::Error> {
        let text = self.encode()?;
        let tag = hmac::sign(key, text.as_bytes());
        Ok(format!("{text}{AUTHENTICATOR}{}\n", HEXLOWER.encode(tag.as_ref())))
    }

    /// Verifies that this key has signed the file, and returns the header. The error follows the
    /// words "its header".
    pub fn verify(file: &str, key: &hmac::Key) -> Result<Self, String> {
        let (text, tag) = split_file(file);
        let header = Self::decode(text)?;
        let tag = tag.and_then(|tag| HEXLOWER.decode(tag.as_bytes()).ok()).ok_or("has no authenticator")?;
        hmac::verify(key, text.as_bytes(), &tag)
            .map_err(|_| "was not written by this node's keeper: its authenticator is wrong".to_owned())?;
        Ok(header)
    }

    /// Reads the header of a file without verification, for a list: its author is unknown.
    pub fn read_unverified(file: &str) -> Result<Self, String> {
        Self::decode(split_file(file).0)
    }

    /// Parses a header. The error follows the words "its header".
    pub fn decode(text: &str) -> Result<Self, String> {
        let (first, body) = text.split_once('\n').ok_or("is cut off")?;
        let mut words = first.split(' ');
        if words.next() != Some(MAGIC) {
            return Err("is none of an image".into());
        }
        if words.next() != Some(&VERSION.to_string()) {
            return Err("is of another version of nagaya".into());
        }
        let body = body.strip_suffix('\n').ok_or("is cut off")?;
        if words.next() != Some(&Digest::of(&[body.as_bytes()]).to_string()) {
            return Err("was changed".into());
        }
        let header: Self = serde_json::from_str(body).map_err(|error| format!("does not read: {error}"))?;
        let is_plain = |name: &String| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        let mut lengths = header.files.values().map(|content| content.bytes);
        let is_countable = lengths.try_fold(0_u64, u64::checked_add).is_some();
        if header.files.len() > FILES_MAX || !is_countable || !header.files.keys().all(is_plain) {
            return Err("names files no image has".into());
        }
        let is_sound = header.mapped.is_sound(|name| header.files.contains_key(name))
            && SharedMemory::are_sound(&header.shared, |name| header.files.get(name).map(|file| file.bytes));
        if is_sound { Ok(header) } else { Err("maps memory no image has".into()) }
    }
}

/// Splits a file into header and authenticator.
fn split_file(file: &str) -> (&str, Option<&str>) {
    let line = file.strip_suffix('\n').and_then(|file| file.rfind('\n')).map_or(0, |end| end + 1);
    let (text, line) = file.split_at(line);
    match line.strip_prefix(AUTHENTICATOR).and_then(|tag| tag.strip_suffix('\n')) {
        Some(tag) => (text, Some(tag)),
        None => (file, None),
    }
}

/// Computes the digest of the files a sandbox runs on, from data that changes when packages are
/// installed or removed. `dir` is the opened path `base`. Reads no contents, because every wake
/// calls it.
pub fn base_digest(base: &Path, dir: &OwnedFd) -> io::Result<Digest> {
    const MARKS: [&str; 10] = [
        "usr",
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "usr/share",
        "usr/local/lib",
        "etc/ld.so.cache",
        "etc/os-release",
        "var/lib/dpkg/status",
        "var/lib/rpm",
    ];
    let mut text = String::new();
    for mark in MARKS {
        let line = match stat_in_tree(dir, Path::new(mark)) {
            Ok(stat) => {
                format!("{mark} {} {} {} {}\n", stat.st_ino, stat.st_size, stat.st_mtime, stat.st_mtime_nsec)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => format!("{mark} absent\n"),
            Err(error) => return Err(error),
        };
        text.push_str(&line);
    }
    Ok(Digest::of(&[base.as_os_str().as_encoded_bytes(), text.as_bytes()]))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn header() -> ImageHeader {
        let digest = Digest::of(&[b"x"]);
        let subject = ImageSubject {
            site: "shop".into(),
            release: "7".into(),
            definition: digest,
            base: digest,
            uid: 1001,
            gid: 1001,
        };
        let environment = ImageEnvironment {
            kernel: "6.1".into(),
            processor: digest,
            criu: "4.1".into(),
            criu_build: digest,
        };
        let files = BTreeMap::from([("pages-1.img".into(), ImageFile { bytes: 5, digest })]);
        let handed = vec![KnownFd { name: "socket:[1]".into(), nonblocking: true }];
        let mapped = MappedMemory { files: vec!["pages-1.img".into()], ranges: vec![(4096, 8192)] };
        ImageHeader { subject, environment, taken_at: 1, handed, files, mapped, shared: Vec::new() }
    }

    #[test]
    fn a_header_with_more_bytes_than_can_be_counted_is_refused() {
        let mut large = header();
        for name in ["a.img", "b.img"] {
            large.files.insert(name.into(), ImageFile { bytes: u64::MAX / 2 + 1, digest: Digest::of(&[]) });
        }
        assert_eq!(ImageHeader::decode(&large.encode().unwrap()), Err("names files no image has".into()));
    }

    #[test]
    fn a_written_header_is_read_back() {
        assert_eq!(ImageHeader::decode(&header().encode().unwrap()), Ok(header()));
    }

    fn key(byte: u8) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &[byte; 32])
    }

    #[test]
    fn a_signed_header_is_read_back_with_its_key_only() {
        let file = header().sign(&key(1)).unwrap();
        assert_eq!(ImageHeader::verify(&file, &key(1)), Ok(header()));
        assert_eq!(ImageHeader::read_unverified(&file), Ok(header()));
        let forged = ImageHeader::verify(&file, &key(2)).unwrap_err();
        assert!(forged.contains("authenticator is wrong"), "{forged}");
        let bare = ImageHeader::verify(&header().encode().unwrap(), &key(1)).unwrap_err();
        assert!(bare.contains("has no authenticator"), "{bare}");
    }

    #[test]
    fn a_header_with_another_digest_is_not_signed() {
        // As somebody changes it who can compute digests and has no key.
        let file = header().sign(&key(1)).unwrap();
        let (_, line) = file.split_at(header().encode().unwrap().len());
        let other = ImageHeader { taken_at: 2, ..header() }.encode().unwrap();
        let forged = ImageHeader::verify(&format!("{other}{line}"), &key(1)).unwrap_err();
        assert!(forged.contains("authenticator is wrong"), "{forged}");
    }

    #[test]
    fn any_change_of_a_signed_header_is_seen() {
        let file = header().sign(&key(1)).unwrap();
        for at in 0..file.len() {
            let mut bytes = file.clone().into_bytes();
            bytes[at] ^= 1;
            let changed = String::from_utf8(bytes).unwrap();
            assert!(ImageHeader::verify(&changed, &key(1)).is_err(), "at {at}: {changed}");
            assert!(ImageHeader::verify(&file[..at], &key(1)).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn any_change_of_a_header_is_seen() {
        let text = header().encode().unwrap();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let changed = String::from_utf8(bytes).unwrap();
            assert!(ImageHeader::decode(&changed).is_err(), "at {at}: {changed}");
            assert!(ImageHeader::decode(&text[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_header_that_names_paths_is_none() {
        let digest = Digest::of(&[b"x"]);
        for name in ["../x", "a/b", "", "."] {
            let mut header = header();
            header.files.insert(name.into(), ImageFile { bytes: 0, digest });
            assert!(ImageHeader::decode(&header.encode().unwrap()).is_err(), "{name}");
        }
    }

    #[test]
    fn a_header_that_maps_what_is_not_there_is_none() {
        let (files, ranges) = (vec!["pages-1.img".to_owned()], vec![(4096, 8192)]);
        let wrong = [
            MappedMemory { files: vec!["pages-2.img".into()], ranges: ranges.clone() },
            MappedMemory {
                files: vec!["pages-1.img".into(); crate::image::format::memory_plan::MAPPED_FILES_MAX + 1],
                ranges,
            },
            MappedMemory { files: files.clone(), ranges: vec![(8192, 4096)] },
            MappedMemory { files: files.clone(), ranges: vec![(4096, 8192), (8192, 9000)] },
            MappedMemory { files, ranges: (1..100).map(|at| (at * 100, at * 100 + 1)).collect() },
        ];
        for mapped in wrong {
            let header = ImageHeader { mapped: mapped.clone(), ..header() };
            assert!(ImageHeader::decode(&header.encode().unwrap()).is_err(), "{mapped:?}");
        }
    }

    #[test]
    fn another_kernel_processor_or_criu_is_told() {
        let here = header().environment;
        assert_eq!(here.differs(&here), None);
        let kernel = ImageEnvironment { kernel: "6.2".into(), ..here.clone() };
        assert!(kernel.differs(&here).unwrap().contains("kernel '6.2'"));
        let criu = ImageEnvironment { criu_build: Digest::of(&[b"y"]), ..here.clone() };
        assert!(criu.differs(&here).unwrap().contains("CRIU"));
        let processor = ImageEnvironment { processor: Digest::of(&[b"y"]), ..here.clone() };
        assert!(processor.differs(&here).unwrap().contains("processor"));
    }

    #[test]
    fn an_id_is_of_what_makes_an_image_another_one() {
        let subject = header().subject;
        assert_eq!(subject.id().len(), ID_LEN);
        assert_eq!(ImageSubject { base: Digest::of(&[b"y"]), ..subject.clone() }.id(), subject.id());
        assert_ne!(ImageSubject { release: "8".into(), ..subject.clone() }.id(), subject.id());
        assert_ne!(ImageSubject { uid: 1002, ..subject.clone() }.id(), subject.id());
    }
}

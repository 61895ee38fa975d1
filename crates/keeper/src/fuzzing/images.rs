//! Images of applications: files of CRIU, and data that another node sends.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use nagaya_base::fuzz::copy_seeds;
use nagaya_records::SiteName;

use crate::image::Digest;
use crate::image::format::archive::ArchiveHead;
use crate::image::format::file_list::{self, FileList};
use crate::image::format::header::{ImageEnvironment, ImageFile, ImageHeader, ImageSubject, KnownFd};
use crate::image::format::mappings::MappingList;
use crate::image::format::memory_plan::MappedMemory;
use crate::image::format::pagemap::Pagemap;
use crate::image::rewrite::memory;
use crate::image::transfer::order::{self, ClusterKey, TransferEnd};
use crate::instances::run::volatile_files;
use crate::sandbox::shm;

const PAGE_LEN: u64 = 4096;

// === Headers and archives ===

fn header() -> String {
    let digest = Digest::of(&[b"x"]);
    let (site, release) = ("shop".into(), "7".into());
    let subject = ImageSubject { site, release, definition: digest, base: digest, uid: 1001, gid: 1001 };
    let environment =
        ImageEnvironment { kernel: "6.1".into(), processor: digest, criu: "4.1".into(), criu_build: digest };
    let files = BTreeMap::from([("pages-1.img".into(), ImageFile { bytes: 5, digest })]);
    let handed = vec![KnownFd { name: "socket:[1]".into(), nonblocking: true }];
    let mapped = MappedMemory { files: vec!["pages-1.img".into()], ranges: vec![(4096, 8192)] };
    let header = ImageHeader { subject, environment, taken_at: 1, handed, files, mapped, shared: Vec::new() };
    serde_json::to_string(&header).unwrap_or_default()
}

pub(super) fn headers() -> Vec<Vec<u8>> {
    let shared =
        header().replace(r#""shared":[]"#, r#""shared":[{"file":"pages-1.img","len":9,"parts":[[0,5]]}]"#);
    let large = header().replace(r#""bytes":5"#, r#""bytes":18446744073709551615"#);
    vec![header().into_bytes(), shared.into_bytes(), large.into_bytes(), b"{}".to_vec()]
}

/// Reads the text without its first line, which has its digest.
pub(super) fn read_header(bytes: &[u8]) {
    let Ok(body) = std::str::from_utf8(bytes) else { return };
    let _ = (ImageHeader::decode(body), ImageHeader::read_unverified(body));
    let Ok(header) = ImageHeader::decode(&ImageHeader::frame(body)) else { return };
    let is_plain = |name: &String| !name.contains('/') && name != "." && name != "..";
    assert!(header.files.keys().all(is_plain));
    let _ = (header.bytes(), header.subject.id());
    let written = header.encode().expect("what was JSON is JSON again");
    assert_eq!(ImageHeader::decode(&written), Ok(header));
}

pub(super) fn archives() -> Vec<Vec<u8>> {
    let text = ImageHeader::frame(&header());
    let archive = ArchiveHead::frame(&text, b"beside");
    vec![
        archive.clone(),
        archive[..40].to_vec(),
        ArchiveHead::frame("", b""),
        b"nagaya-archive 1 99999999 0\n".to_vec(),
    ]
}

/// The head of an archive needs exactly its own number of bytes, and no fewer.
pub(super) fn read_archive(bytes: &[u8]) {
    if let Ok(Some((head, len))) = ArchiveHead::decode(bytes) {
        let _ = (head.bytes(), head.digest());
        assert_eq!(ArchiveHead::decode(&bytes[..len]), Ok(Some((head, len))));
        assert_eq!(ArchiveHead::decode(&bytes[..len - 1]), Ok(None));
    }
    // Past the digest of the header.
    let Ok(body) = std::str::from_utf8(bytes) else { return };
    let text = ImageHeader::frame(body);
    let framed = ArchiveHead::frame(&text, &bytes[..bytes.len() / 2]);
    if let Ok(Some((head, len))) = ArchiveHead::decode(&framed) {
        assert_eq!((head.encode(), len), (framed.clone(), framed.len()));
        let _ = head.bytes();
    }
}

// === Orders ===

const KEY: [u8; 32] = [7; 32];

pub(super) fn orders() -> Vec<Vec<u8>> {
    let wording = r#"{"site":"shop","from":"a","to":"b","given_at":1,"nonce":"00"}"#;
    vec![wording.into(), wording.replace("\"a\"", "\"../a\"").into(), format!("00 {wording}").into_bytes()]
}

/// Reads it as a received text, and as one that a member has signed.
pub(super) fn read_order(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(site) = SiteName::new("shop") else { return };
    let key = ClusterKey::new(KEY);
    let verify = |text: &str| {
        order::verify_order(text, std::slice::from_ref(&key), Some("a"), &site, TransferEnd::Either)
    };
    let _ = (verify(text), verify(&order::sign_text(&key, text)));
    let stranger = order::sign_text(&ClusterKey::new([8; 32]), text);
    assert!(verify(&stranger).is_err(), "no other cluster's order counts");
}

// === Files of CRIU ===

/// Builds messages of CRIU, each with its length.
fn framed(magic: [u8; 8], messages: &[&[u8]]) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    for message in messages {
        bytes.extend(u32::try_from(message.len()).unwrap_or_default().to_le_bytes());
        bytes.extend(*message);
    }
    bytes
}

pub(super) fn pagemaps() -> Vec<Vec<u8>> {
    let magic = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
    let stretches: [&[u8]; 3] = [
        &[0x08, 3],
        &[0x08, 0, 0x10, 0, 0x20, 4, 0x28, 0x80, 0x02],
        &[0x08, 0x80, 0x80, 0x80, 0x01, 0x10, 0, 0x20, 4, 0x28, 1],
    ];
    vec![framed(magic, &stretches), framed(magic, &stretches[..1]), framed(magic, &[&[0x08, 0x83, 0]])]
}

pub(super) fn read_pagemap(bytes: &[u8]) {
    let _ = Pagemap::pages_id(bytes);
    let Ok(list) = Pagemap::decode(bytes) else { return };
    assert_eq!(list.encode(), bytes, "a list has one form");
    if let Some(pages) = list.pages(PAGE_LEN) {
        assert_eq!(pages, list.stretches.iter().map(|stretch| stretch.pages()).sum::<u64>());
    }
}

pub(super) fn mappings() -> Vec<Vec<u8>> {
    let magic = [0x19, 0x43, 0x56, 0x54, 0x20, 0x28, 0x49, 0x57];
    let mapping: &[u8] =
        &[0x08, 0x80, 0x20, 0x10, 0x80, 0x40, 0x18, 0, 0x20, 0, 0x28, 3, 0x30, 0x22, 0x38, 0x81, 4, 0x40, 1];
    let field = [&[0x72, mapping.len() as u8][..], mapping].concat();
    let memfds = framed([0x19, 0x43, 0x56, 0x54, 0x33, 0x14, 0x36, 0x41], &[&[0x0a, 1, 0x78, 0x10, 1]]);
    vec![framed(magic, &[&[&[0x08, 1][..], &field, &field, &[0x60, 5]].concat()]), framed(magic, &[]), memfds]
}

pub(super) fn read_mappings(bytes: &[u8]) {
    let _ = memory::memfds(bytes);
    let Ok(list) = MappingList::decode(bytes) else { return };
    let _ = memory::wrong(&list.all, &HashSet::from([1]));
    let other = list.with(list.all.clone(), list.program.wrapping_add(1));
    for list in [list, other] {
        let again = MappingList::decode(&list.encode()).expect("what we write we read");
        assert_eq!((again.all, again.program), (list.all, list.program));
    }
}

pub(super) fn file_lists() -> Vec<Vec<u8>> {
    let magic = [0x19, 0x43, 0x56, 0x54, 0x38, 0x31, 0x30, 0x56];
    let inner: &[u8] = &[
        0x08, 1, 0x10, 0, 0x18, 0, 0x2a, 10, 0x08, 0, 0x10, 0, 0x18, 0, 0x20, 0, 0x28, 0, 0x32, 2, b'/', b'a',
    ];
    let entry = [&[0x08, 1, 0x10, 1, 0x1a, inner.len() as u8][..], inner].concat();
    let pipe: &[u8] = &[0x08, 2, 0x10, 2, 0x92, 1, 2, 0x08, 2];
    vec![framed(magic, &[&entry, pipe]), framed(magic, &[]), entry]
}

/// An entry that is added twice is the same file under another number.
pub(super) fn read_file_list(bytes: &[u8]) {
    let _ = file_list::unnamed(bytes);
    if let Ok(changed) = file_list::renumbered(bytes, 2, 77, Some(3)) {
        let again = file_list::renumbered(&changed, 2, 77, Some(3));
        assert_eq!(again.as_deref(), Ok(&changed[..]), "what is renumbered has its number");
    }
    let Some(mut list) = FileList::parse(bytes.to_vec(), Some(HashSet::new())) else { return };
    let Some(id) = (0..64).find(|id| list.path(*id).is_some_and(|path| !path.is_empty())) else { return };
    let path = list.path(id).map(str::to_owned);
    let Some(twin) = list.add_again(id) else { return };
    assert_ne!(twin, id);
    let again = FileList::parse(list.into_bytes(), None).expect("what we add is understood");
    assert_eq!((again.path(id), again.path(twin)), (path.as_deref(), path.as_deref()));
}

// === Files that are carried ===

pub(super) fn shm_lists() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x02\x01a\x00\xed\x03\x03a/b\x01\xa4\x03\x05\x01\x00\x05",
        b"\x01\x01l\x02\x05/etc/",
        b"\x02\x01a\x01\x00\x00\x00\x01b\x03\x01a",
        b"\xff\xff\xff\xff\x0f",
    ])
}

pub(super) fn read_shm(bytes: &[u8]) {
    let Ok(entries) = shm::read_list(bytes) else { return };
    assert!(entries.len() <= shm::ENTRIES_MAX);
    let written = postcard::to_stdvec(&entries).expect("what was read can be written");
    assert_eq!(shm::read_list(&written).expect("what we write we read"), entries);
}

pub(super) fn carried() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x03\x00\x01a\x00\xed\x03\x00\x03a/b\x01\xa4\x03\x02hi\x01\x01l\x02\x05/etc/",
        b"\x01\x00\x04../a\x00\xed\x03",
        b"\x01\x00\x03a/b\x01\xa4\x03\x00",
        b"\x01\x05\x01a\x00\x00",
    ])
}

/// Nothing accepted is written outside of the directories.
pub(super) fn read_carried(bytes: &[u8]) {
    let Ok(entries) = volatile_files::check(bytes, 2) else { return };
    for entry in &entries {
        let path = Path::new(OsStr::from_bytes(&entry.path));
        let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
        assert!(entry.place < 2 && is_plain && path.is_relative(), "{path:?} leads elsewhere");
        assert!(!entry.path.is_empty(), "it is no directory that is there already");
    }
}

pub(super) fn criu_logs() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"(00.01) Warn  (criu/x.c:1): no\n(00.02) Error (criu/files-reg.c:1): something first\n",
        b"(00.03) Error (criu/sk-unix.c:842): unix: External socket is used. Consider using --ext-unix-sk\n",
        b"\x00\xff",
    ])
}

pub(super) fn read_criu_log(bytes: &[u8]) {
    let reason = crate::image::criu::log::reason(bytes).expect("memory can be read");
    assert!(reason.line.chars().count() <= 300 && !reason.line.contains('\n'));
}

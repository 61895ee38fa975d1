//! OCI layouts of tenants: documents, layers, and their compression.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Component, Path};

use data_encoding::HEXLOWER;
use nagaya_base::fuzz::copy_seeds;
use ring::digest::{SHA256, digest};
use rustix::fs::MemfdFlags;

use crate::bases::BaseLimits;
use crate::bases::layer::{self, Compression, OciLayer};
use crate::bases::layout::{self, OciIndex, OciManifest, OciPlatform};
use crate::bases::zstd::ZstdReader;

/// Limits of unpacked layers here.
const BOUNDS: BaseLimits = BaseLimits { bytes_max: 4 << 20, entries_max: 1000 };

// === Documents ===

pub(super) fn documents() -> Vec<Vec<u8>> {
    copy_seeds(&[
        br#"{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":7,"annotations":{"org.opencontainers.image.ref.name":"a"},"platform":{"architecture":"amd64","os":"linux"}}]}"#,
        br#"{"config":{"digest":"sha256:00","size":1},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:../../x","size":18446744073709551615}]}"#,
        br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers"}}"#,
    ])
}

/// An accepted digest names a file beside the others and nothing else.
pub(super) fn read_documents(bytes: &[u8]) {
    let index = layout::parse::<OciIndex>("an index", bytes).map(|index| index.manifests);
    let manifest = layout::parse::<OciManifest>("a manifest", bytes);
    let manifest = manifest.map(|manifest| [vec![manifest.config], manifest.layers].concat());
    let _ = layout::parse::<OciPlatform>("a configuration", bytes);
    for one in [index, manifest].into_iter().flatten().flatten() {
        let Ok(one) = one.checked() else { continue };
        assert_eq!(one.sha256.len(), 64);
        assert!(one.sha256.bytes().all(|byte| byte.is_ascii_hexdigit()), "{}", one.sha256);
    }
}

// === Layers ===

/// Builds a header of a tar file, with its checksum, and the content.
fn tar_entry(name: &[u8], kind: u8, link: &[u8], content: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name);
    header[100..108].copy_from_slice(b"0000755\0");
    header[108..124].copy_from_slice(b"0000000\x000000000\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[148..156].fill(b' ');
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link);
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let padding = content.len().next_multiple_of(512) - content.len();
    [&header[..], content, &vec![0; padding]].concat()
}

pub(super) fn layers() -> Vec<Vec<u8>> {
    let all = [
        tar_entry(b"etc/", b'5', b"", b""),
        tar_entry(b"etc/passwd", b'0', b"", b"root:x:0:0"),
        tar_entry(b"etc/link", b'2', b"../../etc/passwd", b""),
        tar_entry(b"etc/hard", b'1', b"etc/passwd", b""),
        tar_entry(b"etc/.wh.gone", b'0', b"", b""),
        tar_entry(b"etc/.wh..wh..opq", b'0', b"", b""),
    ];
    let pax = [
        tar_entry(b"x", b'x', b"", b"16 path=a/../b\n20 linkpath=/x/y/z\n"),
        tar_entry(b"s", b'2', b"t", b""),
    ];
    let long = [tar_entry(b"././@LongLink", b'L', b"", &[b'd'; 300]), tar_entry(b"d", b'0', b"", b"x")];
    let end = [0; 1024];
    let plain = |entries: &[Vec<u8>]| [&[0][..], &entries.concat(), &end].concat();
    let mut gzip = flate2::write::GzEncoder::new(vec![1], flate2::Compression::fast());
    // Into memory.
    let _ = gzip.write_all(&plain(&all)[1..]);
    vec![
        plain(&all),
        plain(&pax),
        plain(&long),
        plain(&[]),
        gzip.finish().unwrap_or_default(),
        vec![2, 0x28, 0xb5, 0x2f, 0xfd],
    ]
}

/// The first byte selects the compression. No content leads to a place outside of the tree.
pub(super) fn read_layer(bytes: &[u8]) {
    let Some((kind, content)) = bytes.split_first() else { return };
    let compression = [Compression::None, Compression::Gzip, Compression::Zstd][usize::from(kind % 3)];
    let sha256 = HEXLOWER.encode(digest(&SHA256, content).as_ref());
    let Ok(fd) = rustix::fs::memfd_create("layer", MemfdFlags::CLOEXEC) else { return };
    let mut file = File::from(fd);
    if file.write_all(content).is_err() {
        return;
    }
    let mut layer = OciLayer { file, sha256: &sha256, len: content.len() as u64, compression };
    let (mut left, mut entries) = (BOUNDS, 0);
    let _ = layer.read(&mut left, BOUNDS, |path, _, content| {
        entries += 1;
        check_beneath(path);
        if let Some(whiteout) = layer::whiteout(path)? {
            check_beneath(whiteout.path());
        }
        std::io::copy(content, &mut std::io::sink()).map(drop)
    });
    assert!(entries <= BOUNDS.entries_max && left.bytes_max <= BOUNDS.bytes_max);
}

fn check_beneath(path: &Path) {
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    assert!(is_plain && path.is_relative(), "{path:?} leads elsewhere");
}

pub(super) fn zstd_frames() -> Vec<Vec<u8>> {
    // A raw block, a run, a skipped frame, and a window that is too large.
    copy_seeds(&[
        b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello",
        b"\x28\xb5\x2f\xfd\x20\x05\x2b\x00\x00h",
        b"\x50\x2a\x4d\x18\x02\x00\x00\x00xx\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello",
        b"\x28\xb5\x2f\xfd\x00\xff\x29\x00\x00hello",
        b"\x28\xb5\x2f\xfd\x24\x05\x29\x00\x00hello\x87\x77\x33\x54",
    ])
}

pub(super) fn read_zstd(bytes: &[u8]) {
    let mut plain = Vec::new();
    let _ = ZstdReader::new(bytes).take(BOUNDS.bytes_max).read_to_end(&mut plain);
}

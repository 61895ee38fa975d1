//! An OCI image layout on disk: `index.json` maps names to images, `blobs/sha256` has their
//! contents (image-spec v1.1, image-layout.md).
//!
//! All of it is a tenant's. It is opened with its rights (`tenant_path`), limited in size, and
//! trusted only if its digest is right. Not here: unpacking layers (`layer`), which of them its
//! tenant has shown already (`super`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use data_encoding::HEXLOWER;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::paths::tenant_path::PathOwner;
use crate::sys::AccessRight;

use super::layer::{Compression, OciLayer, UnpackDir};
use super::{BaseError, BaseLimits};

/// Maximum length of a JSON document, bytes: the limit of registries for manifests.
const JSON_LEN_MAX: u64 = 4 << 20;

/// Maximum depth of nested indexes.
const NESTED_MAX: usize = 3;

/// The maximum that a container engine can stack.
const LAYERS_MAX: usize = 128;

/// Number of names that are shown where none fits.
const SHOWN_MAX: usize = 8;

/// Annotation with the name of an image in an index.
const NAME: &str = "org.opencontainers.image.ref.name";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OciIndex {
    pub manifests: Vec<OciDescriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OciManifest {
    pub config: OciDescriptor,
    pub layers: Vec<OciDescriptor>,
}

/// The platform that an image was built for. The rest of its configuration is not used.
#[derive(Debug, Deserialize)]
pub(crate) struct OciPlatform {
    architecture: String,
    os: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OciDescriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(skip)]
    pub sha256: String,
    platform: Option<PlatformName>,
}

#[derive(Debug, Clone, Deserialize)]
struct PlatformName {
    architecture: String,
    os: String,
}

impl OciDescriptor {
    /// Checks that the digest is safe as a file's name.
    pub(crate) fn checked(mut self) -> Result<Self, BaseError> {
        let hex = self.digest.strip_prefix("sha256:").filter(|hex| {
            hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        });
        let Some(hex) = hex else {
            let why = format!("'{}' is not sha256: and 64 digits", self.digest.escape_debug());
            return Err(BaseError::Malformed { what: "a digest".into(), why });
        };
        self.sha256 = hex.to_owned();
        Ok(self)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains("image.index") || self.media_type.contains("manifest.list")
    }

    fn fits_here(&self) -> bool {
        self.platform.as_ref().is_none_or(|platform| is_ours(&platform.os, &platform.architecture))
    }

    fn name(&self) -> Option<&str> {
        self.annotations.get(NAME).map(String::as_str)
    }
}

/// A layout that is open.
pub struct OciLayout {
    dir: OwnedFd,
    owner: PathOwner,
}

/// The contents of a base.
pub struct BaseContent {
    /// Digest of the manifest, hexadecimal.
    pub digest: String,
    layers: Vec<(OciDescriptor, Compression)>,
}

impl OciLayout {
    pub fn open(path: &Path, owner: &PathOwner) -> Result<Self, BaseError> {
        let absent = |error| BaseError::NoLayout { path: path.display().to_string(), error };
        let dir = owner.open_directory(path, AccessRight::Search).map_err(absent)?;
        let layout = Self { dir, owner: owner.clone() };
        let mark = layout.open_file("oci-layout");
        mark.map_err(|error| absent(io::Error::new(error.kind(), format!("oci-layout: {error}"))))?;
        Ok(layout)
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        self.owner.open_file_beneath(&self.dir, Path::new(name))
    }

    /// Returns the content under this tag. Without a tag the layout must have one image only.
    pub fn content(&self, tag: Option<&str>) -> Result<BaseContent, BaseError> {
        let what = "index.json";
        let file = self
            .open_file(what)
            .map_err(|error| BaseError::Malformed { what: what.into(), why: error.to_string() })?;
        let index: OciIndex = parse(what, &read(what, file)?)?;
        let mut found = self.choose(&index, tag)?;
        for _ in 0..NESTED_MAX {
            if !found.is_index() {
                return self.content_of(&found);
            }
            let inner: OciIndex = parse("an index", &self.document("an index", &found)?)?;
            found = self.choose(&inner, None)?;
        }
        Err(BaseError::Malformed { what: what.into(), why: "indexes are nested too deep".into() })
    }

    fn choose(&self, index: &OciIndex, tag: Option<&str>) -> Result<OciDescriptor, BaseError> {
        let fit = |one: &&OciDescriptor| one.fits_here() && tag.is_none_or(|tag| one.name() == Some(tag));
        let mut fitting: Vec<&OciDescriptor> = index.manifests.iter().filter(fit).collect();
        fitting.dedup_by(|a, b| a.digest == b.digest);
        match fitting[..] {
            [one] => one.clone().checked(),
            _ => {
                let wanted = tag.map_or_else(
                    || "without a tag (name one: oci:PATH:TAG)".into(),
                    |tag| format!("'{tag}'"),
                );
                let names: Vec<String> = index.manifests.iter().take(SHOWN_MAX).map(shown).collect();
                Err(BaseError::NoImage {
                    wanted,
                    found: if names.is_empty() { "none".into() } else { names.join(", ") },
                })
            }
        }
    }

    fn content_of(&self, manifest: &OciDescriptor) -> Result<BaseContent, BaseError> {
        let OciManifest { config, layers } = parse("a manifest", &self.document("a manifest", manifest)?)?;
        let built_for: OciPlatform =
            parse("a configuration", &self.document("a configuration", &config.checked()?)?)?;
        if !is_ours(&built_for.os, &built_for.architecture) {
            let found = format!("{}/{}", built_for.os.escape_debug(), built_for.architecture.escape_debug());
            return Err(BaseError::NoImage { wanted: "that can run".into(), found });
        }
        if layers.len() > LAYERS_MAX {
            return Err(BaseError::TooLarge {
                what: format!("{} layers; at most {LAYERS_MAX}", layers.len()),
            });
        }
        let layers = layers.into_iter().map(|layer| {
            let layer = layer.checked()?;
            let compression = Compression::of(&layer.media_type).ok_or_else(|| BaseError::Malformed {
                what: format!("the kind of layer {}", layer.digest),
                why: format!(
                    "'{}' is not a tar file, plain or with gzip or zstd",
                    layer.media_type.escape_debug()
                ),
            })?;
            Ok((layer, compression))
        });
        Ok(BaseContent { digest: manifest.sha256.clone(), layers: layers.collect::<Result<_, BaseError>>()? })
    }

    fn blob(&self, what: &'static str, blob: &OciDescriptor) -> Result<File, BaseError> {
        let opened = self.open_file(&format!("blobs/sha256/{}", blob.sha256));
        opened.map_err(|error| BaseError::NoBlob { what, digest: blob.sha256.clone(), error })
    }

    /// Reads a JSON document, which must have this digest.
    fn document(&self, what: &'static str, blob: &OciDescriptor) -> Result<Vec<u8>, BaseError> {
        let bytes = read(what, self.blob(what, blob)?)?;
        let is_it = bytes.len() as u64 == blob.size
            && HEXLOWER.encode(digest(&SHA256, &bytes).as_ref()) == blob.sha256;
        if is_it { Ok(bytes) } else { Err(BaseError::Altered { what, digest: blob.sha256.clone() }) }
    }
}

impl BaseContent {
    /// Unpacks all layers into an empty directory, the lowest first.
    pub fn unpack(&self, layout: &OciLayout, tree: &UnpackDir, bounds: BaseLimits) -> Result<(), BaseError> {
        self.check_size(bounds)?;
        let mut left = bounds;
        self.layers(layout).try_for_each(|layer| layer?.unpack(tree, &mut left, bounds))
    }

    /// Reads all layers and compares them with their digests. An owner of this content may use the
    /// unpacked base.
    pub fn verify(&self, layout: &OciLayout, bounds: BaseLimits) -> Result<(), BaseError> {
        self.check_size(bounds)?;
        self.layers(layout).try_for_each(|layer| layer?.verify())
    }

    fn check_size(&self, bounds: BaseLimits) -> Result<(), BaseError> {
        let packed = self.layers.iter().fold(0_u64, |sum, (layer, _)| sum.saturating_add(layer.size));
        if packed > bounds.bytes_max {
            return Err(BaseError::TooLarge {
                what: format!("its layers take {packed} bytes; at most {}", bounds.bytes_max),
            });
        }
        Ok(())
    }

    fn layers<'a>(&'a self, layout: &'a OciLayout) -> impl Iterator<Item = Result<OciLayer<'a>, BaseError>> {
        self.layers.iter().map(move |(blob, compression)| {
            let file = layout.blob("a layer", blob)?;
            Ok(OciLayer { file, sha256: &blob.sha256, len: blob.size, compression: *compression })
        })
    }
}

fn read(what: &str, file: File) -> Result<Vec<u8>, BaseError> {
    let mut bytes = Vec::new();
    file.take(JSON_LEN_MAX + 1).read_to_end(&mut bytes).map_err(BaseError::io("read the layout"))?;
    if bytes.len() as u64 > JSON_LEN_MAX {
        return Err(BaseError::TooLarge { what: format!("{what} has more than {JSON_LEN_MAX} bytes") });
    }
    Ok(bytes)
}

pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, BaseError> {
    serde_json::from_slice(bytes)
        .map_err(|error| BaseError::Malformed { what: what.into(), why: error.to_string() })
}

fn is_ours(os: &str, architecture: &str) -> bool {
    let ours = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    os == "linux" && architecture == ours
}

fn shown(one: &OciDescriptor) -> String {
    let platform =
        one.platform.as_ref().map(|of| format!(" ({}/{})", of.os, of.architecture)).unwrap_or_default();
    let text = format!("{}{platform}", one.name().unwrap_or("one without a tag"));
    text.escape_debug().to_string()
}

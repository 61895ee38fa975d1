//! Writes OCI image layouts, for tests: layers as tar files, with what belongs around them.
//!
//! Shared with the unit tests of `bases`. Not here: what is expected of a layout.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

/// One layer that is being written.
pub struct Layer(Builder<Vec<u8>>);

impl Layer {
    pub fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    /// With this very name, whatever it says.
    fn entry(mut self, kind: EntryType, path: &str, mode: u32, link: Option<&str>, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        if let Some(link) = link {
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        }
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    pub fn file(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Regular, path, 0o600, None, content.as_ref())
    }

    pub fn program(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Regular, path, 0o4711, None, content.as_ref())
    }

    pub fn dir(self, path: &str) -> Self {
        self.entry(EntryType::Directory, path, 0o700, None, b"")
    }

    pub fn link(self, path: &str, to: &str) -> Self {
        self.entry(EntryType::Symlink, path, 0o777, Some(to), b"")
    }

    pub fn hard(self, path: &str, to: &str) -> Self {
        self.entry(EntryType::Link, path, 0o644, Some(to), b"")
    }

    pub fn device(self, path: &str) -> Self {
        self.entry(EntryType::Char, path, 0o666, None, b"")
    }

    /// A name of any length, as GNU tar writes it.
    pub fn long(mut self, path: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        self.0.append_data(&mut header, path, content).unwrap();
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// A layout on disk that is being written.
pub struct Writer {
    dir: PathBuf,
    manifests: Vec<Value>,
}

impl Writer {
    pub fn new(dir: &Path) -> Self {
        fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self { dir: dir.into(), manifests: Vec::new() }
    }

    pub fn blob_path(&self, descriptor: &Value) -> PathBuf {
        let digest = descriptor["digest"].as_str().unwrap();
        self.dir.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())
    }

    pub fn blob(&self, kind: &str, bytes: &[u8]) -> Value {
        let digest: String =
            digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let descriptor =
            json!({"mediaType": kind, "digest": format!("sha256:{digest}"), "size": bytes.len()});
        fs::write(self.blob_path(&descriptor), bytes).unwrap();
        descriptor
    }

    pub fn plain(&self, layer: Layer) -> Value {
        self.blob("application/vnd.oci.image.layer.v1.tar", &layer.bytes())
    }

    pub fn gzip(&self, layer: Layer) -> Value {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&layer.bytes()).unwrap();
        self.blob("application/vnd.oci.image.layer.v1.tar+gzip", &packed.finish().unwrap())
    }

    /// With the tool itself, in two frames and what belongs to neither between them.
    pub fn zstd(&self, layer: Layer) -> Value {
        const NEITHER: [u8; 12] = *b"\x5a\x2a\x4d\x18\x04\0\0\0mine";
        let bytes = layer.bytes();
        let (one, two) = bytes.split_at(bytes.len() / 3);
        let packed = [zstd(&[], one).as_slice(), &NEITHER, &zstd(&["-19", "--check"], two)].concat();
        self.blob("application/vnd.oci.image.layer.v1.tar+zstd", &packed)
    }

    /// An image of these layers, under this name. Returns its manifest.
    pub fn image(&mut self, tag: &str, architecture: &str, layers: &[Value]) -> Value {
        let config = json!({"os": "linux", "architecture": architecture, "config": {"Entrypoint": ["/bin/false"], "User": "root"}});
        let config = self.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let mut manifest =
            self.blob("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes());
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
        self.manifests.push(manifest.clone());
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        fs::write(self.dir.join("index.json"), index.to_string()).unwrap();
        manifest
    }
}

/// As `zstd` packs it with these options.
pub fn zstd(options: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut command = Command::new("zstd");
    command.args(["--stdout", "--quiet"]).args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(bytes).unwrap());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        output.stdout
    })
}

pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

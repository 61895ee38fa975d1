//! Very many static sites, for experiments.
//!
//! Not here: serving them (`server`).

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

/// Sites that share one document root; all servers serve the same files.
const SITES_PER_ROOT: usize = 1_000;

/// Sites of one tenant.
pub const SITES_PER_TENANT: usize = 10;

/// First uid of the experiments' tenants: above those that distributions allocate.
pub const UID_BASE: u32 = 300_000;

/// Very many static sites with their documents: the same for every server.
#[derive(Debug, Clone)]
pub struct SitePopulation {
    pub documents: PathBuf,
    pub count: usize,
}

pub const HELLO: &str = "Hello, world!\n";

impl SitePopulation {
    /// Writes the documents: a hello, 64 KiB and 1 MiB in each root.
    pub fn create(dir: &Path, count: usize) -> Result<Self> {
        let population = Self { documents: dir.join("documents"), count };
        let large: Vec<u8> = (0u32..1 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for root in (0..count).step_by(SITES_PER_ROOT) {
            let root = population.root(root);
            fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
            for (name, bytes) in
                [("hello.txt", HELLO.as_bytes()), ("64k.bin", &large[..64 << 10]), ("1m.bin", &large)]
            {
                let path = root.join(name);
                fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
            }
        }
        Ok(population)
    }

    pub fn documents(&self) -> &Path {
        &self.documents
    }

    pub fn host(&self, site: usize) -> String {
        format!("site-{site}.g{}.example", site / SITES_PER_ROOT)
    }

    pub fn root(&self, site: usize) -> PathBuf {
        self.documents.join(format!("g{}", site / SITES_PER_ROOT))
    }

    /// Returns the root computed from the host's second label, for mass virtual hosting.
    pub fn alias_pattern(&self) -> String {
        format!("{}/%2", self.documents.display())
    }

    /// Returns a thousand hosts spread over the whole population, always the same ones.
    pub fn spread(&self) -> Vec<String> {
        // Steps by a prime that divides no population's size visit every site once before any
        // twice.
        (0..self.count.min(1_000)).map(|i| self.host(i * 7_919 % self.count)).collect()
    }

    /// Writes the records that make nagaya serve this population.
    pub fn write_records(&self, mut to: impl Write) -> Result<()> {
        let mut line = |record: serde_json::Value| writeln!(to, "{record}").context("writing records");
        for tenant in 0..self.count.div_ceil(SITES_PER_TENANT) {
            let uid = UID_BASE + u32::try_from(tenant).context("number of tenants")?;
            line(json!({"tenant": {"name": format!("tenant-{tenant}"), "uid": uid, "gid": uid}}))?;
        }
        for site in 0..self.count {
            line(json!({"site": {
                "name": format!("site-{site}"),
                "tenant": format!("tenant-{}", site / SITES_PER_TENANT),
                "hosts": [self.host(site)],
                "backend": {"kind": "static", "root": self.root(site)},
            }}))?;
        }
        to.flush().context("writing records")
    }
}

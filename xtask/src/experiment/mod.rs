//! Experiments: nagaya and its peers on this machine, interleaved, with raw data, a plot and a verdict.
//!
//! Not here: how servers are configured (`server`), how load is made (`load`), how results are written (`report`).

mod admission;
mod cell_cost;
mod cluster;
mod instances;
mod isolation;
mod php;
mod proxy;
mod rule_cost;
mod sites_scale;
mod static_files;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{Mode, chmod};
use serde_json::json;
use tempfile::TempDir;

use crate::load::{Load, Target};
use crate::report::Report;
use crate::server::Server;
use crate::{http, huge_pages, interrupt, load, workspace};

/// Sites that share one document root; all servers serve the same files.
const SITES_PER_ROOT: usize = 1_000;

/// Sites of one tenant.
const SITES_PER_TENANT: usize = 10;

/// Connections of the main load.
const CONNECTIONS: u32 = 100;

/// Uids of the experiments' tenants begin here: above anything a distribution hands out.
const UID_BASE: u32 = 300_000;

type Experiment = fn(&Setting) -> Result<()>;

const EXPERIMENTS: [(&str, Experiment); 28] = [
    ("static", static_files::run),
    ("proxy", proxy::run),
    ("php", php::run),
    ("sites-scale", sites_scale::run),
    ("isolation-overhead", isolation::overhead::run),
    ("isolation-accuracy", isolation::accuracy::run),
    ("isolation-io", isolation::io::run),
    ("isolation-neighbour", isolation::neighbour::run),
    ("cell-cost", cell_cost::run),
    ("rule-cost", rule_cost::run),
    ("wake", instances::wake::run),
    ("wake-parallel", instances::parallel::run),
    ("rest-cost", instances::rest_cost::run),
    ("wake-faults", instances::faults::run),
    ("sandbox-cost", instances::sandbox_cost::run),
    ("admission-correlation", admission::correlation::run),
    ("admission-prediction", admission::prediction::run),
    ("admission-overflow", admission::overflow::run),
    ("admission-bound", admission::bound::run),
    ("admission-promise", admission::promise::run),
    ("admission-fair", admission::fair::run),
    ("admission-cost", admission::cost::run),
    ("relocation", cluster::relocation::run),
    ("relocation-storm", cluster::storm::run),
    ("false-alarm", cluster::false_alarm::run),
    ("forward-cost", cluster::forward_cost::run),
    ("drain", cluster::drain::run),
    ("cmdb-scale", cluster::cmdb_scale::run),
];

/// What was asked for on the command line, and a directory that lives as long as the experiment.
pub struct Setting {
    quick: bool,
    out: PathBuf,
    dir: TempDir,
    program: PathBuf,
}

/// `NAME [--quick] [--program FILE] --out DIR`.
pub struct Asked {
    pub name: String,
    pub quick: bool,
    pub out: PathBuf,
    program: Option<PathBuf>,
}

impl Asked {
    pub fn read(arguments: &[String]) -> Result<Self> {
        let mut name = None;
        let (mut quick, mut out, mut program) = (false, None, None);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--quick" => quick = true,
                "--out" => out = Some(PathBuf::from(words.next().context("--out needs a directory")?)),
                "--program" => {
                    program = Some(PathBuf::from(words.next().context("--program needs a file")?));
                }
                other if name.is_none() && !other.starts_with('-') => name = Some(other.into()),
                other => bail!("unknown argument '{other}'"),
            }
        }
        let name = name.with_context(|| format!("which experiment? {}", names()))?;
        Ok(Self { name, quick, out: out.context("--out DIR says where the results go")?, program })
    }

    /// The nagaya that is measured: this checkout's, unless another one is named.
    pub fn program(&self) -> Result<PathBuf> {
        match &self.program {
            Some(program) => std::path::absolute(program).context("the program"),
            None => workspace::build_nagaya(workspace::Build::Shipped),
        }
    }
}

fn names() -> String {
    EXPERIMENTS.map(|(name, _)| name).join(", ")
}

/// Runs the experiment with this name.
pub fn run(arguments: &[String]) -> Result<()> {
    let asked = Asked::read(arguments)?;
    let experiment = EXPERIMENTS.iter().find(|(known, _)| *known == asked.name);
    let (_, experiment) =
        experiment.with_context(|| format!("unknown experiment '{}': use one of {}", asked.name, names()))?;
    interrupt::install()?;
    let dir =
        tempfile::Builder::new().prefix("nagaya-experiment-").tempdir().context("making a directory")?;
    // Servers pass it under uids of their own.
    chmod(dir.path(), Mode::from_raw_mode(0o755)).context("opening the directory to the servers")?;
    let program = asked.program()?;
    let _kept = huge_pages::keep();
    experiment(&Setting { quick: asked.quick, out: asked.out, dir, program })
}

impl Setting {
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn rounds(&self) -> usize {
        if self.quick { 5 } else { 9 }
    }

    fn load(&self) -> Load {
        Load { connections: CONNECTIONS, duration: Duration::from_secs(if self.quick { 2 } else { 8 }) }
    }
}

/// The same request sent to several servers, in turn within each round.
pub struct Case<'s> {
    pub name: &'static str,
    pub target: Target,
    pub servers: Vec<(&'static str, &'s Server)>,
}

/// Measures all cases: every server once per case and round, in an order that rotates with the round.
pub fn interleave(report: &mut Report, setting: &Setting, load: &Load, cases: &[Case<'_>]) -> Result<()> {
    const WARM_UP: Duration = Duration::from_secs(1);
    report.note(
        "load",
        json!({
            "generator": "wrk, two threads, closed loop, keep-alive",
            "connections": load.connections,
            "seconds": load.duration.as_secs(),
            "rounds": setting.rounds(),
        }),
    );
    for case in cases {
        for (_, server) in &case.servers {
            check_answer(server, &case.target)?;
            load::run(server.address, &case.target, &Load { duration: WARM_UP, ..*load })?;
        }
    }
    for round in 0..setting.rounds() {
        for case in cases {
            let mut order = case.servers.clone();
            let turns = round % order.len();
            order.rotate_left(turns);
            for (variant, server) in order {
                let cpu = server.process.cpu_seconds();
                let outcome = load::run(server.address, &case.target, load)
                    .with_context(|| format!("{variant} doing {}", case.name))?;
                report.outcome(round, case.name, variant, &outcome, server.process.cpu_seconds() - cpu);
            }
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    Ok(())
}

/// The first and the last host must get a right answer before anything is measured.
fn check_answer(server: &Server, target: &Target) -> Result<()> {
    for host in target.hosts.iter().take(1).chain(target.hosts.last()) {
        let body = http::get_ok(server.address, host, &target.path)?;
        ensure!(
            target.body_bytes.contains(&(body.len() as u64)),
            "http://{host}{} at {}: {} bytes, where {:?} are right",
            target.path,
            server.address,
            body.len(),
            target.body_bytes
        );
    }
    Ok(())
}

/// Very many static sites with their documents: the same for every server.
#[derive(Debug, Clone)]
pub struct Population {
    documents: PathBuf,
    pub count: usize,
}

pub const HELLO: &str = "Hello, world!\n";

impl Population {
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

    /// The root computed from the host's second label, for mass virtual hosting.
    pub fn alias_pattern(&self) -> String {
        format!("{}/%2", self.documents.display())
    }

    /// A thousand hosts spread over the whole population, always the same ones.
    pub fn spread(&self) -> Vec<String> {
        // Steps by a prime that divides no population's size visit every site once before any twice.
        (0..self.count.min(1_000)).map(|i| self.host(i * 7_919 % self.count)).collect()
    }

    /// The records that make nagaya serve this population.
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

//! All experiments by their names, and the command that runs one.
//!
//! Not here: what an experiment gets and how servers take turns (`harness`).

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{Mode, chmod};

use super::harness::ExperimentSetting;
use super::{
    admission, cell_cost, cluster, front, h2, instances, isolation, machines, php, proxy, rule_cost,
    sites_scale, slow, static_files,
};
use crate::{huge_pages, interrupt, workspace};

type Experiment = fn(&ExperimentSetting) -> Result<()>;

const EXPERIMENTS: [(&str, Experiment); 38] = [
    ("front", front::run),
    ("static", static_files::run),
    ("h2", h2::run),
    ("proxy", proxy::run),
    ("slow-clients", slow::clients::run),
    ("buffering", slow::buffering::run),
    ("php", php::run),
    ("sites-scale", sites_scale::run),
    ("isolation-overhead", isolation::overhead::run),
    ("isolation-accuracy", isolation::accuracy::run),
    ("isolation-io", isolation::io::run),
    ("isolation-neighbour", isolation::neighbour::run),
    ("cell-cost", cell_cost::run),
    ("rule-cost", rule_cost::run),
    ("wake", instances::wake::run),
    ("wake-field", instances::field::run),
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
    ("vm-idle", machines::idle::run),
    ("vm-levers", machines::levers::run),
    ("vm-turnaround", machines::turnaround::run),
    ("vm-wake", machines::wake::run),
    ("vm-density", machines::density::run),
];

/// The experiment whose parts can be chosen one by one.
const WITH_PARTS: &str = "wake-field";

/// `NAME [--quick] [--full] [--only PART,...] [--program FILE] --out DIR`.
pub struct ExperimentArgs {
    pub name: String,
    pub quick: bool,
    full: bool,
    only: Vec<String>,
    pub out: PathBuf,
    program: Option<PathBuf>,
}

impl ExperimentArgs {
    pub fn read(arguments: &[String]) -> Result<Self> {
        let mut name = None;
        let (mut quick, mut full, mut only, mut out, mut program) = (false, false, Vec::new(), None, None);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--quick" => quick = true,
                "--full" => full = true,
                "--only" => {
                    let parts =
                        words.next().context("--only needs names of parts, with commas between them")?;
                    only.extend(parts.split(',').map(str::to_owned));
                }
                "--out" => out = Some(PathBuf::from(words.next().context("--out needs a directory")?)),
                "--program" => {
                    program = Some(PathBuf::from(words.next().context("--program needs a file")?));
                }
                other if name.is_none() && !other.starts_with('-') => name = Some(other.into()),
                other => bail!("unknown argument '{other}'"),
            }
        }
        let name = name.with_context(|| format!("which experiment? {}", names()))?;
        let out = out.context("--out DIR says where the results go")?;
        ensure!(only.is_empty() || name == WITH_PARTS, "--only is of {WITH_PARTS}: '{name}' has no parts");
        Ok(Self { name, quick, full, only, out, program })
    }

    /// Returns the measured nagaya: this checkout's, unless another one is named.
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
    let asked = ExperimentArgs::read(arguments)?;
    let experiment = EXPERIMENTS.iter().find(|(known, _)| *known == asked.name);
    let (_, experiment) =
        experiment.with_context(|| format!("unknown experiment '{}': use one of {}", asked.name, names()))?;
    interrupt::install()?;
    let dir =
        tempfile::Builder::new().prefix("nagaya-experiment-").tempdir().context("making a directory")?;
    // Servers pass through it under uids of their own.
    chmod(dir.path(), Mode::from_raw_mode(0o755)).context("opening the directory to the servers")?;
    let program = asked.program()?;
    let _kept = huge_pages::keep();
    experiment(&ExperimentSetting {
        quick: asked.quick,
        full: asked.full,
        only: asked.only,
        out: asked.out,
        dir,
        program,
    })
}

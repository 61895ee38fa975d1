//! nagaya itself: a node in a directory of its own, fed through its command line as an operator would.
//!
//! Not here: the peers.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{CONNECTIONS_MAX, Probe, Server, make_dir, words, write};
use crate::http::free_address;
use crate::process::Process;

/// Longest wait until a new node answers its admin interface.
const START_MAX: Duration = Duration::from_secs(60);

/// A node's files and its program, whether it runs or not.
#[derive(Debug, Clone)]
pub struct Node {
    program: PathBuf,
    dir: PathBuf,
    pub address: SocketAddr,
}

/// Settings that experiments differ in.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub log: bool,
    /// PHP workers of a tenant; 0 leaves the default.
    pub php_workers: u32,
    /// Ruby texts, each with the phase it is for.
    pub rules: Vec<(&'static str, String)>,
    /// Tables of the configuration that nothing above writes.
    pub tables: String,
}

impl Node {
    /// Writes the configuration of a node. Its limits on concurrency are above the load: what is compared is
    /// serving, and no peer refuses anything here.
    pub fn create(program: &Path, dir: &Path, name: &str, settings: Settings) -> Result<Self> {
        let address = free_address()?;
        let dir = make_dir(dir, name)?;
        let mut config = format!(
            "runtime_dir = \"{0}/run\"\nstate_dir = \"{0}/state\"\n\
             [[listen]]\naddress = \"{address}\"\n\
             [tenants]\nmax_concurrent = {CONNECTIONS_MAX}\nmax_waiting = {CONNECTIONS_MAX}\n",
            dir.display()
        );
        if settings.php_workers > 0 {
            config.push_str(&format!("php_workers = {}\n", settings.php_workers));
        }
        if settings.log {
            config.push_str(&format!("[log]\naccess = \"{}/log/access.log\"\n", dir.display()));
        }
        for (index, (phase, text)) in settings.rules.iter().enumerate() {
            let file = dir.join(format!("rule-{index}.rb"));
            write(&file, text)?;
            config.push_str(&format!("[[rules]]\nphase = \"{phase}\"\nfile = \"{}\"\n", file.display()));
        }
        config.push_str(&settings.tables);
        Self::with_config(program, &dir, address, &config)
    }

    /// Where the text of a rule is, counted from 0.
    pub fn rule(&self, index: usize) -> PathBuf {
        self.dir.join(format!("rule-{index}.rb"))
    }

    /// What it reads at its start, and when told to.
    pub fn config_file(&self) -> PathBuf {
        self.dir.join("nagaya.toml")
    }

    /// Where the admin interface listens.
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.join("run/admin.sock")
    }

    /// Where the keeper listens.
    pub fn keeper_socket(&self) -> PathBuf {
        self.dir.join("run/keeper.sock")
    }

    /// Where its images of applications are.
    pub fn images(&self) -> PathBuf {
        self.dir.join("state/images/images")
    }

    /// A node with this configuration, which makes it listen on `address`.
    pub fn with_config(program: &Path, dir: &Path, address: SocketAddr, config: &str) -> Result<Self> {
        write(&dir.join("nagaya.toml"), config)?;
        Ok(Self::at(program, dir, address))
    }

    /// A node whose configuration was written before.
    pub fn at(program: &Path, dir: &Path, address: SocketAddr) -> Self {
        Self { program: program.into(), dir: dir.into(), address }
    }

    /// `nagaya --config ... ARGUMENTS`.
    pub fn command(&self, arguments: &[&str]) -> Vec<String> {
        let config = self.config_file();
        let mut command = words(&[&self.program.to_string_lossy(), "--config", &config.to_string_lossy()]);
        command.extend(words(arguments));
        command
    }

    /// Runs a command of the command line to its end. Its output is the error if it fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let command = self.command(arguments);
        let output = Command::new(&command[0]).args(&command[1..]).output().context("running nagaya")?;
        ensure!(
            output.status.success(),
            "nagaya {} failed: {}{}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts the node without waiting for any site.
    pub fn serve(&self) -> Result<Process> {
        let mut process = Process::start("nagaya", &self.command(&["serve"]), &self.dir.join("output.log"))?;
        process.wait_until(START_MAX, || std::net::TcpStream::connect(self.address).is_ok())?;
        Ok(process)
    }

    /// Starts the node and waits for its first right answer.
    pub fn start(&self, probe: &Probe) -> Result<Server> {
        Server::start("nagaya", &self.command(&["serve"]), &self.dir, self.address, probe)
    }

    /// Imports a file of records and says how long that took.
    pub fn import(&self, records: &Path) -> Result<Duration> {
        let begun = Instant::now();
        self.run(&["site", "import", &records.to_string_lossy()])?;
        Ok(begun.elapsed())
    }

    /// A file of records that is written line by line.
    pub fn records(&self, name: &str) -> Result<(PathBuf, std::io::BufWriter<File>)> {
        let path = self.dir.join(name);
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok((path, std::io::BufWriter::new(file)))
    }
}

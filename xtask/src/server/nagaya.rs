//! nagaya itself: a node in its own directory, fed through its command line as by an operator.
//!
//! Not here: the peers.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{CONNECTIONS_MAX, StartProbe, TestServer, make_dir, words, write};
use crate::http::free_address;
use crate::process::RunningProcess;

/// Longest wait until a new node answers its admin interface.
const START_MAX: Duration = Duration::from_secs(60);

/// A node's files and its program, whether it runs or not.
#[derive(Debug, Clone)]
pub struct NagayaNode {
    program: PathBuf,
    dir: PathBuf,
    pub address: SocketAddr,
}

/// Settings in which experiments differ.
#[derive(Debug, Clone, Default)]
pub struct NagayaSettings {
    pub log: bool,
    /// The limits on a tenant's concurrency are those of a new node.
    pub default_limits: bool,
    /// PHP workers of a tenant; 0 leaves the default.
    pub php_workers: u32,
    /// Ruby texts, each with its phase.
    pub rules: Vec<(&'static str, String)>,
    /// Further tables of the configuration.
    pub tables: String,
}

impl NagayaNode {
    /// Writes the configuration of a node. Unless `default_limits` is set, its limits on
    /// concurrency are above the load. The comparison is about serving, and no peer refuses
    /// anything here.
    pub fn create(program: &Path, dir: &Path, name: &str, settings: NagayaSettings) -> Result<Self> {
        let address = free_address()?;
        let dir = make_dir(dir, name)?;
        let mut config = format!(
            "runtime_dir = \"{0}/run\"\nstate_dir = \"{0}/state\"\n\
             [[listen]]\naddress = \"{address}\"\n[tenants]\n",
            dir.display()
        );
        if !settings.default_limits {
            config
                .push_str(&format!("max_concurrent = {CONNECTIONS_MAX}\nmax_waiting = {CONNECTIONS_MAX}\n"));
        }
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

    /// Returns the path of a rule's text, counted from 0.
    pub fn rule(&self, index: usize) -> PathBuf {
        self.dir.join(format!("rule-{index}.rb"))
    }

    /// Returns the file that it reads at its start, and on a reload.
    pub fn config_file(&self) -> PathBuf {
        self.dir.join("nagaya.toml")
    }

    /// Returns the socket of the admin interface.
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.join("run/admin.sock")
    }

    /// Returns the keeper's socket.
    pub fn keeper_socket(&self) -> PathBuf {
        self.dir.join("run/keeper.sock")
    }

    /// Returns its directory of images of applications.
    pub fn images(&self) -> PathBuf {
        self.dir.join("state/images/images")
    }

    /// Makes a node with this configuration, which makes it listen on `address`.
    pub fn with_config(program: &Path, dir: &Path, address: SocketAddr, config: &str) -> Result<Self> {
        write(&dir.join("nagaya.toml"), config)?;
        Ok(Self::at(program, dir, address))
    }

    /// Returns a node whose configuration was written before.
    pub fn at(program: &Path, dir: &Path, address: SocketAddr) -> Self {
        Self { program: program.into(), dir: dir.into(), address }
    }

    /// Returns `nagaya --config ... ARGUMENTS`.
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
    pub fn serve(&self) -> Result<RunningProcess> {
        let mut process =
            RunningProcess::start("nagaya", &self.command(&["serve"]), &self.dir.join("output.log"))?;
        process.wait_until(START_MAX, || std::net::TcpStream::connect(self.address).is_ok())?;
        Ok(process)
    }

    /// Starts the node and waits for its first right response.
    pub fn start(&self, probe: &StartProbe) -> Result<TestServer> {
        TestServer::start("nagaya", &self.command(&["serve"]), &self.dir, self.address, probe)
    }

    /// Imports a file of records and returns how long that took.
    pub fn import(&self, records: &Path) -> Result<Duration> {
        let begun = Instant::now();
        self.run(&["site", "import", &records.to_string_lossy()])?;
        Ok(begun.elapsed())
    }

    /// Makes a file of records that is written line by line.
    pub fn records(&self, name: &str) -> Result<(PathBuf, std::io::BufWriter<File>)> {
        let path = self.dir.join(name);
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok((path, std::io::BufWriter::new(file)))
    }
}

//! A cluster in a lab of its own, as `./dev cluster` makes it: nodes in networks that tests can cut, slow down and heal, and
//! machines that they can stop and kill.
//!
//! The lab ends with its value, and with the test program however that ends. Not here: clusters on loopback, without a
//! network that can fail.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use tempfile::TempDir;

use crate::world;

/// Labs of this test program.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Bytes of the end of a log that are shown.
const LOG_SHOWN: usize = 20_000;

/// A running lab.
pub struct Lab {
    /// Ends the lab when its standard input closes.
    owner: Child,
    dir: PathBuf,
    name: String,
    /// What `up --json` said.
    pub facts: Value,
    _parent: TempDir,
}

impl Lab {
    /// `words`: the number of nodes and what else follows `./dev cluster up`.
    #[track_caller]
    pub fn up(words: &[&str]) -> Self {
        let parent = tempfile::Builder::new().prefix("nagaya-lab-").tempdir().expect("a temporary directory");
        use std::os::unix::fs::PermissionsExt as _;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(parent.path(), open).expect("our own directory");
        let dir = parent.path().join("lab");
        let name = format!("t{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut owner = Command::new(program())
            .args(["cluster", "up"])
            .args(words)
            .args(["--attached", "--json", "--name", &name])
            .arg("--dir")
            .arg(&dir)
            .arg("--program")
            .arg(world::program())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program of ./dev");
        let mut line = String::new();
        let output = owner.stdout.take().expect("it was asked for");
        BufReader::new(output).read_line(&mut line).expect("its output");
        let facts =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("the lab did not start: see above"));
        Self { owner, dir, name, facts, _parent: parent }
    }

    /// Runs `./dev cluster VERB ...` on this lab, whatever comes of it.
    #[track_caller]
    pub fn output(&self, words: &[&str]) -> Output {
        let (verb, rest) = words.split_first().expect("a verb");
        let mut command = Command::new(program());
        command.args(["cluster", verb, "--dir"]).arg(&self.dir).args(rest);
        command.output().expect("the program of ./dev")
    }

    /// The same, and gives what it printed; panics with its words if it fails.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> String {
        let output = self.output(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "cluster {words:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// What `status` says of a machine.
    #[track_caller]
    pub fn machine(&self, name: &str) -> Value {
        let status: Value = serde_json::from_str(&self.run(&["status", "--json"])).expect("JSON");
        let machines = status["machines"].as_array().expect("a list");
        machines.iter().find(|machine| machine["name"] == name).cloned().expect("a machine of the lab")
    }

    /// The status a client gets from a node's edge for `http://HOST/` within so many seconds; None if there is no answer.
    pub fn get(&self, node: &str, host: &str, seconds: u32) -> Option<String> {
        let address = self.machine(node)["address"].as_str().expect("an address").to_owned();
        let output = self.output(&[
            "in",
            "clients",
            "--",
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-m",
            &seconds.to_string(),
            "-w",
            "%{http_code}",
            "-H",
            &format!("Host: {host}"),
            &format!("http://{address}/"),
        ]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Shows the ends of all machines' logs, for a test that failed.
    fn show_logs(&self) {
        for machine in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let Ok(log) = std::fs::read(machine.path().join("output.log")) else { continue };
            let end = String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_SHOWN)..]);
            eprintln!("--- log of {} ---\n{end}\n---", machine.file_name().to_string_lossy());
        }
    }

    /// The process that ends the lab when it is told to.
    pub fn owner(&mut self) -> &mut Child {
        &mut self.owner
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        drop(self.owner.stdin.take());
        let _ = self.owner.wait();
    }
}

/// The program behind `./dev`.
fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("NAGAYA_XTASK") {
        return path.into();
    }
    // This test is TARGET/PROFILE/deps/e2e-HASH.
    let own = std::env::current_exe().expect("a running program has a file");
    let target = own.ancestors().nth(3).expect("cargo's layout of directories");
    let found = ["debug", "release"].map(|profile| target.join(profile).join("xtask"));
    let found = found.into_iter().find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "no xtask in {}: build it with `cargo build -p xtask`, or name it in NAGAYA_XTASK",
            target.display()
        )
    })
}

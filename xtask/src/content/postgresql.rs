//! A private PostgreSQL server in a directory, on a port of loopback, under an unprivileged uid. It
//! ends with its value.
//!
//! Not here: MariaDB (`mariadb`).

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{run, secret};
use crate::http::free_address;
use crate::process::RunningProcess;
use crate::server::words;

/// Directory of the package's releases.
const RELEASES: &str = "/usr/lib/postgresql";

/// Runs a command with other users, without changing the machine's. A uid without a name may make
/// no database.
const AMONG_USERS: &str = "mount --bind \"$0\" /etc/passwd; exec \"$@\"";

/// Longest wait until a new server answers.
const START_MAX: Duration = Duration::from_secs(60);

/// A running server with one database, whose owner has its name.
#[derive(Debug)]
pub struct PostgreSql {
    process: RunningProcess,
    address: SocketAddr,
    bin: PathBuf,
    name: String,
    password: String,
}

impl PostgreSql {
    /// Starts a new server in `dir` that runs under `uid`. `None` if the machine has none.
    pub fn start(dir: &Path, uid: u32, name: &str, password: &str) -> Result<Option<Self>> {
        let Some(bin) = newest() else { return Ok(None) };
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        chown(dir, Some(uid), Some(uid)).with_context(|| format!("giving {} to uid {uid}", dir.display()))?;
        let word = dir.join("password");
        secret(&word, password)?;
        chown(&word, Some(uid), Some(uid)).context("giving away the password")?;
        let id = uid.to_string();
        let as_uid = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--pdeathsig", "TERM"];
        let [initdb, postgres] =
            ["initdb", "postgres"].map(|program| bin.join(program).display().to_string());
        let [data, place, word] = [&dir.join("data"), dir, &word].map(|path| path.display().to_string());
        let user = format!("--username={name}");
        let password_file = format!("--pwfile={word}");
        let make = [&initdb, "-D", &data, &user, &password_file, "--auth=password", "--no-sync"];
        let users = dir.join("users");
        fs::write(&users, format!("{name}:x:{uid}:{uid}::/:/bin/false\n")).context("writing users")?;
        let mut among_users = Command::new("unshare");
        among_users.args(["--mount", "sh", "-ec", AMONG_USERS]).arg(&users).args(as_uid).args(make);
        run(among_users.current_dir(dir))?;
        let address = free_address()?;
        let port = address.port().to_string();
        let mut serve = words(&as_uid);
        serve.extend(words(&[&postgres, "-D", &data, "-p", &port, "-k", &place]));
        serve.extend(words(&["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=300"]));
        let mut process = RunningProcess::start("PostgreSQL", &serve, &dir.join("output.log"))?;
        // It listens before it answers.
        let is_ready = bin.join("pg_isready");
        process.wait_until(START_MAX, || {
            let mut question = Command::new(&is_ready);
            question
                .args(["-q", "-h", "127.0.0.1", "-p", &port])
                .status()
                .is_ok_and(|status| status.success())
        })?;
        let server = Self { process, address, bin, name: name.into(), password: password.into() };
        server.statement("postgres", &format!("CREATE DATABASE {name}"))?;
        Ok(Some(server))
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Executes statements in its database.
    pub fn execute(&self, statements: &str) -> Result<()> {
        self.statement(&self.name, statements)
    }

    fn statement(&self, database: &str, statements: &str) -> Result<()> {
        let port = self.port().to_string();
        let place = ["-h", "127.0.0.1", "-p", &port, "-U", &self.name, "-d", database];
        run(Command::new(self.bin.join("psql"))
            .args(place)
            .args(["-q", "-v", "ON_ERROR_STOP=1", "-c", statements])
            .env("PGPASSWORD", &self.password))
        .with_context(|| format!("PostgreSQL:\n{}", self.process.log_end()))
    }
}

/// Returns the directory of the newest release's programs.
fn newest() -> Option<PathBuf> {
    let releases = fs::read_dir(RELEASES).ok()?.flatten().map(|entry| entry.path().join("bin"));
    releases.filter(|bin| bin.join("initdb").exists()).max()
}

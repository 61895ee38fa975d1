//! A private MariaDB server in a directory, on a Unix socket, under an unprivileged uid. It runs
//! without a service manager and ends with its value.
//!
//! Not here: the tables in it (`wordpress`).

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{need, random_word, run};
use crate::process::RunningProcess;
use crate::server::words;

/// Programs of the packages `mariadb-server-core` and `mariadb-client-core`. The packages with a
/// system service are not needed.
const PROGRAMS: [&str; 3] = ["/usr/bin/mariadb-install-db", "/usr/sbin/mariadbd", "/usr/bin/mariadb"];

/// Longest wait until a new server answers.
const START_MAX: Duration = Duration::from_secs(60);

/// Enough for small sites' tables, and little beside the applications.
const SETTINGS: [&str; 4] = [
    "--skip-networking",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=16M",
    // The kernel's asynchronous I/O is short of slots on machines with many guests.
    "--innodb-use-native-aio=0",
];

/// A running server.
#[derive(Debug)]
pub struct MariaDb {
    process: RunningProcess,
    socket: PathBuf,
    /// Password of its administrator: every user of the machine can reach the socket.
    password: String,
}

/// A user of one database.
#[derive(Debug, Clone)]
pub struct DatabaseAccount {
    pub socket: PathBuf,
    /// Name of the database and of its user.
    pub name: String,
    pub password: String,
}

impl MariaDb {
    /// Starts a new, empty server in `dir` that runs under `uid`. Takes about three seconds.
    pub fn start(dir: &Path, uid: u32) -> Result<Self> {
        need(&PROGRAMS)?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        chown(dir, Some(uid), Some(uid)).with_context(|| format!("giving {} to uid {uid}", dir.display()))?;
        let data = format!("--datadir={}", dir.join("data").display());
        let socket = dir.join("mariadb.sock");
        let id = uid.to_string();
        let as_uid = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--pdeathsig", "TERM"];

        // Users are defined below, before anybody else can reach it.
        let install = [PROGRAMS[0], "--no-defaults", &data, "--auth-root-authentication-method=normal"];
        let install = [&as_uid[..], &install, &["--skip-test-db", "--skip-name-resolve"]].concat();
        run(Command::new(install[0]).args(&install[1..]).current_dir(dir))?;
        let password = random_word()?;
        let first = dir.join("first.sql");
        super::secret(&first, &format!("ALTER USER root@localhost IDENTIFIED BY '{password}';\n"))?;
        chown(&first, Some(uid), Some(uid)).context("giving away the first statements")?;

        let serve = [PROGRAMS[1].to_owned(), "--no-defaults".into(), data];
        let mut command = [words(&as_uid), serve.into(), words(&SETTINGS)].concat();
        command.push(format!("--socket={}", socket.display()));
        command.push(format!("--init-file={}", first.display()));
        let mut process = RunningProcess::start("MariaDB", &command, &dir.join("output.log"))?;
        // It listens after its first statements were executed.
        process.wait_until(START_MAX, || UnixStream::connect(&socket).is_ok())?;
        Ok(Self { process, socket, password })
    }

    /// Makes an empty database with its own user, which has no other rights.
    pub fn database(&self, name: &str) -> Result<DatabaseAccount> {
        ensure!(name.bytes().all(|byte| byte.is_ascii_lowercase()), "'{name}' is no name of a database");
        let password = random_word()?;
        self.execute(&format!(
            "CREATE DATABASE {name} CHARACTER SET utf8mb4;\
             CREATE USER {name}@localhost IDENTIFIED BY '{password}';\
             GRANT ALL ON {name}.* TO {name}@localhost;"
        ))?;
        Ok(DatabaseAccount { socket: self.socket.clone(), name: name.into(), password })
    }

    /// Executes statements as the administrator.
    pub fn execute(&self, statements: &str) -> Result<()> {
        run(Command::new(PROGRAMS[2])
            .arg("--no-defaults")
            .arg(format!("--socket={}", self.socket.display()))
            .args(["--user=root", "--batch", "--execute", statements])
            .env("MYSQL_PWD", &self.password))
        .with_context(|| format!("MariaDB:\n{}", self.process.log_end()))
    }

    /// Ends it. Returns its leftover processes.
    pub fn stop(&mut self) -> Vec<String> {
        self.process.stop()
    }
}

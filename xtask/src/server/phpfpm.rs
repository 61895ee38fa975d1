//! php-fpm: a fixed pool under the site's own uid, as on a host with one pool per customer.
//!
//! Not here: the web server in front of it (`nginx`).

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{make_dir, words, write};
use crate::process::RunningProcess;

/// A running pool and its address.
#[derive(Debug)]
pub struct PhpFpm {
    pub process: RunningProcess,
    pub socket: PathBuf,
}

const START_MAX: Duration = Duration::from_secs(30);

/// Returns the program's name, which has PHP's version in it.
pub fn program() -> Option<String> {
    fs::read_dir("/usr/sbin")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("php-fpm"))
        .max()
}

/// Starts as many workers as nagaya gets, replaced after as many requests; everything else is as
/// packaged.
pub fn start(dir: &Path, uid: u32, workers: u32, requests_per_worker: u32) -> Result<PhpFpm> {
    let dir = make_dir(dir, "php-fpm")?;
    let socket = dir.join("fpm.sock");
    let config = format!(
        "[global]\nerror_log = {0}/error.log\npid = {0}/fpm.pid\ndaemonize = no\n\
         [site]\nuser = {uid}\ngroup = {uid}\nlisten = {1}\nlisten.owner = www-data\nlisten.group = www-data\n\
         listen.mode = 0600\nlisten.backlog = 1024\npm = static\npm.max_children = {workers}\n\
         pm.max_requests = {requests_per_worker}\n",
        dir.display(),
        socket.display()
    );
    let file = dir.join("fpm.conf");
    write(&file, &config)?;
    let program = program().context("php-fpm is not installed: run 'sudo ./dev setup experiment'")?;
    let command = words(&[&program, "--nodaemonize", "--fpm-config", &file.to_string_lossy()]);
    let mut process = RunningProcess::start("php-fpm", &command, &dir.join("output.log"))?;
    process.wait_until(START_MAX, || UnixStream::connect(&socket).is_ok())?;
    Ok(PhpFpm { process, socket })
}

//! The machine as tests see it: who we are, which processes run, what a program says.
//!
//! Not here: the node (`world`).

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::wait;

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs a program to its end and gives what it printed; panics with its words if it fails.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}{errors}", output.status);
    text
}

/// Runs a program to its end, however it ends.
#[track_caller]
pub fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap_or_else(|error| {
        panic!("{program} cannot be run ({error}): 'sudo ./dev setup test' installs it")
    })
}

/// An argument that marks the processes of one application of one suite of this run: other suites use the same names, and another
/// run may be under way. None is the beginning of another one.
pub fn mark(suite: &str, name: &str) -> String {
    format!("app-named-{name}-of-{suite}-{}.", std::process::id())
}

/// Ids of all processes whose command line or environment-free name mentions `text`.
pub fn processes_with(text: &str) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|id| is_running(*id) && command_line(*id).contains(text)).collect()
}

/// The arguments, separated by spaces. Empty for a process that has ended.
pub fn command_line(id: i32) -> String {
    let bytes = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Whether the process exists and is more than a zombie.
pub fn is_running(id: i32) -> bool {
    let state = status_field(id, "State");
    state.is_some_and(|state| !state.starts_with('Z') && !state.starts_with('X'))
}

/// A field of `/proc/ID/status`.
pub fn status_field(id: i32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Waits until no process mentions `text`.
#[track_caller]
pub fn wait_until_gone(text: &str) {
    wait::until(&format!("no process mentions {text}"), || processes_with(text).is_empty());
}

/// Sends a signal by its number's name, e.g. `KILL`.
#[track_caller]
pub fn signal(id: i32, name: &str) {
    run("kill", &[&format!("-{name}"), &id.to_string()]);
}

/// Writes a file, with its directories.
#[track_caller]
pub fn write(path: &Path, content: impl AsRef<[u8]>) {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }
    fs::write(path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Writes a program.
#[track_caller]
pub fn write_program(path: &Path, content: &str) {
    write(path, content);
    make_executable(path);
}

#[track_caller]
pub fn make_executable(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("our own file");
}

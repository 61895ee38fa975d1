//! The machine of an experiment: CPU, kernel, memory, versions of every program, date and commit.
//!
//! Not here: measured numbers; `report` writes both into one file.

use std::fs;
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::workspace;

/// Returns facts that make a number comparable. An unknown fact is `null`, never guessed.
pub fn gather() -> Map<String, Value> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu =
        cpuinfo.lines().find_map(|line| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim()));
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory_kib: Option<u64> = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    let distribution = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let distribution =
        distribution.lines().find_map(|l| Some(l.strip_prefix("PRETTY_NAME=")?.trim_matches('"')));
    let mut facts = Map::new();
    facts.insert("cpu".into(), json!(cpu));
    facts.insert("cores".into(), json!(cores()));
    facts.insert("memory_mib".into(), json!(memory_kib.map(|kib| kib / 1024)));
    facts.insert("kernel".into(), json!(read_trimmed("/proc/sys/kernel/osrelease")));
    facts.insert("distribution".into(), json!(distribution));
    facts.insert("date".into(), json!(first_line("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"])));
    facts.insert("commit".into(), json!(commit()));
    facts.insert("versions".into(), versions());
    facts
}

/// Returns the cores that this program may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

fn versions() -> Value {
    json!({
        "nagaya": first_line(&workspace::nagaya(workspace::Build::Shipped).to_string_lossy(), &["--version"]),
        "nginx": first_line("nginx", &["-v"]),
        "apache": first_line("apache2", &["-v"]),
        "haproxy": first_line("haproxy", &["-v"]),
        "php-cgi": first_line("php-cgi", &["-v"]),
        "php-fpm": crate::server::phpfpm::program().and_then(|program| first_line(&program, &["-v"])),
        "gunicorn": first_line("gunicorn", &["--version"]),
        "puma": first_line("puma", &["--version"]),
        "mariadb": first_line("mariadbd", &["--version"]),
        "etcd": first_line("etcd", &["--version"]),
        "crun": first_line("crun", &["--version"]),
        "runc": first_line("runc", &["--version"]),
        "wrk": first_line("wrk", &["-v"]),
        "h2load": first_line("h2load", &["--version"]),
        "node": first_line("node", &["--version"]),
        "java": first_line("java", &["--version"]),
        "rustc": first_line("rustc", &["--version"]),
        "dokuwiki": first_line("dpkg-query", &["-W", "-f", "${Version}", "dokuwiki"]),
    })
}

/// Returns the built commit, with a mark if files differ from it.
fn commit() -> Option<String> {
    let root = workspace::root();
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(&root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if changed { format!("{commit}+changes") } else { commit })
}

fn read_trimmed(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// Returns the first line that a program prints, on either output.
fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).lines().map(str::trim).find(|line| !line.is_empty()).map(Into::into)
}

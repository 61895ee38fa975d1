//! A started server with all its descendants: their memory and CPU time, and their end.
//!
//! Not here: the servers and their configuration; see `server`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::interrupt;

/// Time for a server to end after SIGTERM before it is killed.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Interval of checks of a condition that nothing announces.
const POLL: Duration = Duration::from_millis(5);

/// One server: its first process and its descendants. Ends with this value.
#[derive(Debug)]
pub struct RunningProcess {
    child: Child,
    what: String,
    log: PathBuf,
}

impl RunningProcess {
    /// Starts `command` with its output in `log`. If this program dies without a chance to clean
    /// up, the kernel sends the server SIGTERM (`setpriv --pdeathsig`).
    pub fn start(what: &str, command: &[String], log: &Path) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let errors = output.try_clone().context("sharing the log between both outputs")?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "--"])
            .args(command)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            // Ctrl-C in the terminal is for this program; it then stops its servers in order. This
            // does not start wrk and curl, which do get it.
            .process_group_zero()
            .spawn()
            .with_context(|| format!("starting {what} ({})", command.join(" ")))?;
        Ok(Self { child, what: what.into(), log: log.into() })
    }

    /// Waits until `ready` returns true. Fails with the end of the log if the server ends first or
    /// `limit` passes.
    pub fn wait_until(&mut self, limit: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
        let begun = Instant::now();
        while !ready() {
            if let Some(status) = self.child.try_wait().context("asking for a server's state")? {
                bail!("{} ended at its start ({status}):\n{}", self.what, self.log_end());
            }
            if begun.elapsed() > limit {
                bail!("{} did not serve within {limit:?}:\n{}", self.what, self.log_end());
            }
            interrupt::check()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the proportional set size of all its processes, in MiB: shared pages are counted
    /// once.
    pub fn memory_mib(&self) -> Result<f64> {
        let mut kib = 0.0;
        for pid in tree(self.pid()) {
            // A worker may end between listing and reading.
            let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
            let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
            let number =
                line.and_then(|rest| rest.split_whitespace().next()).context("smaps_rollup without Pss")?;
            kib += number.parse::<f64>().context("Pss in smaps_rollup")?;
        }
        Ok(kib / 1024.0)
    }

    /// Returns the CPU time of all its living processes and of the dead ones they waited for, in
    /// seconds.
    pub fn cpu_seconds(&self) -> f64 {
        let ticks: u64 = tree(self.pid())
            .into_iter()
            .filter_map(|pid| ProcessStat::read(pid).map(|stat| stat.ticks))
            .sum();
        seconds(ticks)
    }

    /// Returns the path of its output.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Signals its first process; does nothing if that has ended.
    pub fn signal(&mut self, signal: Signal) {
        send(self.pid(), signal, &mut self.child);
    }

    /// Returns the last lines of its output.
    pub fn log_end(&self) -> String {
        const LINES: usize = 30;
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// Returns true while the first process runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the server and returns its leftover processes (which are killed).
    pub fn stop(&mut self) -> Vec<String> {
        let family = tree(self.pid());
        let family: Vec<(u32, u64)> = family
            .into_iter()
            .filter_map(|pid| ProcessStat::read(pid).map(|stat| (pid, stat.start)))
            .collect();
        send(self.pid(), Signal::TERM, &mut self.child);
        let begun = Instant::now();
        while self.is_alive() && begun.elapsed() < STOP_MAX {
            std::thread::sleep(POLL);
        }
        if self.is_alive() {
            send(self.pid(), Signal::KILL, &mut self.child);
        }
        let _ = self.child.wait();
        leftovers(&family)
    }
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        if self.is_alive() {
            self.stop();
        }
    }
}

trait OwnGroup {
    fn process_group_zero(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    fn process_group_zero(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

/// Signals a child that was not yet waited for: its pid cannot belong to another process.
fn send(pid: u32, signal: Signal, child: &mut Child) {
    if matches!(child.try_wait(), Ok(None))
        && let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
    {
        // It may end by itself in between: then there is nothing left to signal.
        let _ = kill_process(pid, signal);
    }
}

/// Returns those of `family` that still run (same pid, same start time), and kills them.
fn leftovers(family: &[(u32, u64)]) -> Vec<String> {
    /// Children of a server may need a moment to notice that it is gone.
    const GRACE: Duration = Duration::from_secs(2);
    let begun = Instant::now();
    loop {
        let left: Vec<u32> = family
            .iter()
            .filter(|(pid, start)| {
                ProcessStat::read(*pid).is_some_and(|s| s.start == *start && s.state != 'Z')
            })
            .map(|(pid, _)| *pid)
            .collect();
        if left.is_empty() {
            return Vec::new();
        }
        if begun.elapsed() > GRACE {
            return left.into_iter().map(name_and_kill).collect();
        }
        std::thread::sleep(POLL);
    }
}

fn name_and_kill(pid: u32) -> String {
    let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ");
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
    format!("{pid} {command}")
}

/// Returns `root` and all its descendants.
pub fn tree(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(stat) = ProcessStat::read(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut all = vec![root];
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        all.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    all
}

/// The needed fields of `/proc/PID/stat`, proc(5).
struct ProcessStat {
    state: char,
    parent: u32,
    /// utime + stime + cutime + cstime.
    ticks: u64,
    /// Together with the pid it names a process for good.
    start: u64,
}

impl ProcessStat {
    fn read(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold spaces and parentheses itself; the last one ends it.
        let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            ticks: number(11)? + number(12)? + number(13)? + number(14)?,
            start: number(19)?,
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "ticks of a process stay far below 2^53")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

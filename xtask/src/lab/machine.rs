//! The processes of a lab's machine. Everything that it started is in its own cgroups. So all of it
//! can be stopped, continued or killed at one moment.
//!
//! With cgroup v1 it has a directory in each hierarchy that a node uses. A node's keeper makes its
//! own tree below the cgroup in which it was started. So freezing the machine's directory in the
//! hierarchical freezer freezes its instances as well. Cells that a keeper has frozen by itself
//! stay frozen when the machine continues. Without a v1 freezer, it is one directory of v2. Not
//! here: the network (`network`), the programs (`node`, `store`).

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::network::LabNetwork;

/// Controllers of v1 that a node's keeper looks for.
const CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "blkio", "pids", "memory", "freezer"];

/// Longest wait until everything is frozen, or gone.
const SETTLE_MAX: Duration = Duration::from_secs(60);

/// Interval of checks for that.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// Deepest level of directories in a machine's cgroup: the keeper's own tree has four levels.
const DEPTH_MAX: usize = 10;

/// Joins the cgroups named before `--`, then becomes the program named after it.
const JOIN: &str =
    "while [ \"$1\" != -- ]; do echo $$ > \"$1/cgroup.procs\" || exit 1; shift; done; shift; exec \"$@\"";

/// All cgroups of one machine.
#[derive(Debug, Clone)]
pub struct MachineCgroups {
    dirs: Vec<PathBuf>,
    /// The one of `dirs` that can stop it.
    freezer: PathBuf,
    is_v2: bool,
}

impl MachineCgroups {
    /// Returns those of this machine of the lab with this tag, whether they exist or not.
    pub fn of(tag: &str, machine: &str) -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
        let (mounts, own) = (read("/proc/self/mountinfo")?, read("/proc/self/cgroup")?);
        let name = Path::new(&lab_dir(tag)).join(machine);
        let mut v1: Vec<(String, PathBuf)> = Vec::new();
        let mut v2 = None;
        for line in mounts.lines() {
            let Some((place, kind)) = line.split_once(" - ") else { continue };
            let (Some(point), Some(kind), Some(options)) =
                (place.split(' ').nth(4), kind.split(' ').next(), kind.split(' ').nth(2))
            else {
                continue;
            };
            let has = |controller: &str| options.split(',').any(|one| one == controller);
            match kind {
                "cgroup" => {
                    if let Some(one) = CONTROLLERS.into_iter().find(|one| has(one)) {
                        v1.push((options.into(), Path::new(point).join(beneath(&own, one)).join(&name)));
                    }
                }
                "cgroup2" => v2 = v2.or(Some(Path::new(point).join(beneath(&own, "")).join(&name))),
                _ => {}
            }
        }
        let freezer = v1.iter().find(|(options, _)| options.split(',').any(|one| one == "freezer"));
        let freezer = freezer.map(|(_, dir)| dir.clone());
        let is_v2 = freezer.is_none();
        let freezer =
            freezer.or(v2.clone()).context("there is neither a freezer of cgroup v1 nor cgroup v2")?;
        Ok(Self { dirs: v1.into_iter().map(|(_, dir)| dir).chain(v2).collect(), freezer, is_v2 })
    }

    /// Returns where the lab with this tag has its cgroups, to check that none is left.
    pub fn of_lab(tag: &str) -> Result<Vec<PathBuf>> {
        let any = Self::of(tag, "any")?;
        Ok(any.dirs.iter().filter_map(|dir| dir.parent()).map(Into::into).collect())
    }

    pub fn exist(&self) -> bool {
        self.freezer.exists()
    }

    pub fn make(&self) -> Result<()> {
        for dir in &self.dirs {
            fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
            if self.is_v2 && *dir == self.freezer {
                // As much as this kernel and our starter allow: a node itself reports missing
                // controllers.
                for above in dir.ancestors().skip(1).take(2) {
                    for controller in ["+cpu", "+io", "+memory", "+pids"] {
                        let _ = fs::write(above.join("cgroup.subtree_control"), controller);
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts a program in them and in the network of `machine`, detached from this process. Its
    /// output is appended to `log`.
    pub fn launch(&self, network: &[String], command: &[String], log: &Path) -> Result<()> {
        let output = OpenOptions::new().create(true).append(true).open(log);
        let output = output.with_context(|| format!("opening {}", log.display()))?;
        let errors = output.try_clone().context("sharing the log between both outputs")?;
        let status = Command::new("sh")
            .args(["-c", JOIN, "sh"])
            .args(&self.dirs)
            .args(["--", "setsid", "--fork"])
            .args(network)
            .args(command)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .current_dir("/")
            .status()
            .context("running sh")?;
        ensure!(status.success(), "{} did not start: see {}", command.join(" "), log.display());
        Ok(())
    }

    pub fn pids(&self) -> Vec<Pid> {
        let mut pids = Vec::new();
        for dir in tree(&self.freezer, DEPTH_MAX) {
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
        }
        pids
    }

    /// Stops all of it; returns when nothing of it runs any more.
    pub fn freeze(&self) -> Result<()> {
        self.write_state(&self.freezer, true)?;
        wait(&format!("{} stands still", self.freezer.display()), || {
            // A process that could not be stopped on the first command gets another (the kernel's
            // freezer-subsystem.rst).
            self.is_frozen() || (self.write_state(&self.freezer, true).is_ok() && self.is_frozen())
        })
    }

    pub fn thaw(&self) -> Result<()> {
        self.write_state(&self.freezer, false)
    }

    pub fn is_frozen(&self) -> bool {
        let read = |name: &str| fs::read_to_string(self.freezer.join(name)).unwrap_or_default();
        match self.is_v2 {
            true => read("cgroup.events").lines().any(|line| line == "frozen 1"),
            false => read("freezer.state").trim() == "FROZEN",
        }
    }

    /// Kills all of it at one moment, as a power cut would. Nothing of it runs between the first
    /// death and the last.
    pub fn kill(&self) -> Result<()> {
        if !self.exist() {
            return Ok(());
        }
        self.write_state(&self.freezer, true)?;
        let gone = format!("everything in {} is gone", self.freezer.display());
        wait(&gone, || {
            for pid in self.pids() {
                // It may have ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
            // Frozen processes die when they continue, even those that a keeper froze.
            for dir in tree(&self.freezer, DEPTH_MAX) {
                let _ = self.write_state(&dir, false);
            }
            self.pids().is_empty()
        })
    }

    /// Removes them, with all directories that keepers made in them, once nothing runs there.
    pub fn remove(&self) -> Result<()> {
        for top in &self.dirs {
            wait(&format!("{} can be removed", top.display()), || {
                for dir in tree(top, DEPTH_MAX).into_iter().rev() {
                    // The kernel releases a dead process a moment after it is gone.
                    let _ = fs::remove_dir(dir);
                }
                !top.exists()
            })?;
            // The lab's own, with its last machine.
            let _ = top.parent().map(fs::remove_dir);
        }
        Ok(())
    }

    fn write_state(&self, dir: &Path, stop: bool) -> Result<()> {
        let (file, word) = match (self.is_v2, stop) {
            (true, true) => ("cgroup.freeze", "1"),
            (true, false) => ("cgroup.freeze", "0"),
            (false, true) => ("freezer.state", "FROZEN"),
            (false, false) => ("freezer.state", "THAWED"),
        };
        let path = dir.join(file);
        fs::write(&path, word).with_context(|| format!("writing {word} to {}", path.display()))
    }
}

/// One machine: its name is that of its network.
#[derive(Debug, Clone)]
pub struct LabMachine<'l> {
    pub name: String,
    pub cgroups: MachineCgroups,
    pub network: &'l LabNetwork,
    pub log: PathBuf,
}

impl LabMachine<'_> {
    pub fn start(&self, command: &[String]) -> Result<()> {
        ensure!(self.cgroups.pids().is_empty(), "{} runs already", self.name);
        self.cgroups.make()?;
        self.cgroups.launch(&self.network.enter(&self.name), command, &self.log)
    }

    /// Waits until `ready` returns true. Fails with the end of the log if everything ends first.
    pub fn wait_until(&self, limit: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
        let begun = Instant::now();
        while !ready() {
            crate::interrupt::check()?;
            let ended = self.cgroups.pids().is_empty();
            if ended || begun.elapsed() > limit {
                let why = if ended { "ended at its start" } else { "is not ready" };
                bail!("{} {why} after {:.1?}:\n{}", self.name, begun.elapsed(), self.log_end());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the last lines of its output.
    pub fn log_end(&self) -> String {
        const LINES: usize = 30;
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

fn lab_dir(tag: &str) -> String {
    format!("nagaya-lab-{tag}")
}

/// Returns the cgroup of this process, relative to the hierarchy with this controller; without one,
/// that of v2.
fn beneath(own: &str, controller: &str) -> PathBuf {
    let group = own.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|one| one == controller).then_some(path)
    });
    PathBuf::from(group.unwrap_or("/").trim_start_matches('/'))
}

/// Returns a directory and all below it, the outer ones first.
fn tree(dir: &Path, depth: usize) -> Vec<PathBuf> {
    let mut all = vec![dir.to_path_buf()];
    if depth > 0 {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                all.extend(tree(&entry.path(), depth - 1));
            }
        }
    }
    all
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !is_so() {
        ensure!(begun.elapsed() < SETTLE_MAX, "waited {SETTLE_MAX:?} in vain until {what}");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_found_for_each_hierarchy() {
        let own = "5:cpu,cpuacct:/a/b\n4:freezer:/\n0::/c\n";
        assert_eq!(beneath(own, "cpuacct"), Path::new("a/b"));
        assert_eq!(beneath(own, "freezer"), Path::new(""));
        assert_eq!(beneath(own, ""), Path::new("c"));
        assert_eq!(beneath(own, "pids"), Path::new(""));
    }
}

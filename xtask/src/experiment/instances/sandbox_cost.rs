//! `sandbox-cost`: the time to make a sandbox, and to start a program in one, against crun and
//! runc.
//!
//! The keeper itself measures nagaya's part, as for any visitor's wake. The peers are run as their
//! users run them: one process for each container. It is timed from before its start to its end,
//! when the container's program runs in the background. Not here: the time of a whole wake
//! (`wake`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nagaya_records::instance::WakeStage;
use serde_json::{Value, json};

use super::{AppHosting, HostedApp, uid};
use crate::content::{self, AppPage, ContentApp};
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report, median};
use crate::{interrupt, workspace};

/// A program that stays. nagaya needs a response of its applications; the peers need nothing. This
/// makes no start longer: each is measured until the program begins.
const PROGRAM: [&str; 3] = ["/usr/bin/python3", "-c", ANSWER];
const ANSWER: &str = "\
import os, signal, socket
if 'LISTEN_FDS' not in os.environ:
    signal.pause()
while True:
    client, _ = socket.socket(fileno=os.dup(3)).accept()
    if client.recv(65536):
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n')
    client.close()
";

/// The peers with their arguments.
const PEERS: [(&str, &[&str]); 2] = [("crun", &["crun", "--cgroup-manager=disabled"]), ("runc", &["runc"])];

/// Starts of each in a round.
const STARTS: usize = 10;

/// Runs one peer repeatedly, and prints the microseconds of each start. It has its own mount
/// namespace, because crun refuses machines with both versions of cgroups. There the second is
/// hidden from it, and no container needs either.
const TIMES: &str = "\
set -eu
bundle=$1 count=$2
shift 2
umount --lazy /sys/fs/cgroup/unified 2>/dev/null || true
for turn in $(seq \"$count\"); do
    name=nagaya-experiment-$$-$turn
    begun=$EPOCHREALTIME
    \"$@\" run --detach --bundle \"$bundle\" \"$name\" </dev/null >\"$bundle/output\" 2>&1 || { cat \"$bundle/output\" >&2; exit 1; }
    ended=$EPOCHREALTIME
    echo $((${ended/./} - ${begun/./}))
    \"$@\" delete --force \"$name\"
done
";

const GOALS: [Goal; 2] = [
    Goal { key: "sandbox_ms", bound: Bound::AtMost(3.0), aim: 3.0 },
    Goal { key: "ratio_crun", bound: Bound::AtMost(0.5), aim: 0.5 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("sandbox-cost");
    let dir = setting.dir().join("sleeper");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    content::give(&dir, uid(0)?)?;
    let backend =
        json!({"kind": "app", "command": PROGRAM, "directory": dir, "listen": "fd", "ready": {"path": "/"}});
    let app = ContentApp { backend, files: None, page: AppPage { path: "/", text: "" }, login: "/" };
    let hosting = AppHosting::start(
        setting,
        "nagaya",
        &[HostedApp { name: "sleeper".into(), uid: uid(0)?, app }],
        "image_bytes = \"0B\"\n",
    )?;
    let bundle = bundle(setting.dir())?;
    report.note("program", json!(PROGRAM));
    report.note("starts in each round", json!(STARTS));

    for round in 0..setting.rounds() {
        own(&mut report, round, &hosting)?;
        for (peer, command) in PEERS {
            sample(&mut report, round, "start", peer, peer_times(&bundle, command)?)?;
        }
        eprintln!("round {} done", round + 1);
    }
    report.set("sandbox_ms", report.median("sandbox", "nagaya", "ms")?);
    for variant in ["nagaya", "crun", "runc"] {
        report.set(format!("{variant}_start_ms"), report.median("start", variant, "ms")?);
    }
    report.set("ratio_crun", report.ratio("start", "nagaya", "crun", "ms")?);
    report.set("ratio_runc", report.ratio("start", "nagaya", "runc", "ms")?);
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Adds one number for each round, so that rounds can be compared.
fn sample(report: &mut Report, round: usize, case: &str, variant: &str, times: Vec<f64>) -> Result<()> {
    report.sample(round, case, variant, "ms", median(times).context("a round without starts")?);
    Ok(())
}

/// Measures nagaya's starts: the sandbox alone, and everything until the program runs and its
/// socket is open.
fn own(report: &mut Report, round: usize, hosting: &AppHosting) -> Result<()> {
    let (mut sandboxes, mut starts) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        interrupt::check()?;
        hosting.node.run(&["instance", "wake", "sleeper"])?;
        let wake = hosting.status("sleeper")?.last_wake.context("the wake that just was")?;
        #[expect(clippy::cast_precision_loss, reason = "microseconds of a start stay far below 2^53")]
        let ms = |us: u64| us as f64 / 1e3;
        let until =
            |last: WakeStage| wake.stages.iter().filter(|(stage, _)| *stage <= last).map(|(_, us)| us).sum();
        let made = wake.stages.iter().any(|(stage, _)| *stage == WakeStage::Sandbox);
        ensure!(made, "a wake without a sandbox: {:?}", wake.stages);
        sandboxes.push(ms(until(WakeStage::Sandbox)));
        starts.push(ms(until(WakeStage::Boot)));
        hosting.node.run(&["instance", "stop", "sleeper"])?;
    }
    sample(report, round, "sandbox", "nagaya", sandboxes)?;
    sample(report, round, "start", "nagaya", starts)
}

/// Returns the milliseconds of each start.
fn peer_times(bundle: &Path, command: &[&str]) -> Result<Vec<f64>> {
    interrupt::check()?;
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", TIMES, "bash"])
        .arg(bundle)
        .arg(STARTS.to_string())
        .args(command)
        .current_dir(workspace::root())
        .output()
        .context("running unshare")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{} failed: {said}", command.join(" "));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .map(|line| line.parse::<f64>().map(|us| us / 1e3).with_context(|| format!("a time of '{line}'")))
        .collect()
}

/// Makes a container in the format of both peers. It has the node's programs read-only, and its own
/// `/proc`, `/dev` and `/tmp`. It has the namespaces of a sandbox except for the user namespace,
/// which would only slow the peers.
fn bundle(dir: &Path) -> Result<PathBuf> {
    let bundle = dir.join("bundle");
    for name in ["proc", "dev", "tmp", "usr"] {
        let dir = bundle.join("root").join(name);
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    for name in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), bundle.join("root").join(name))
            .context("linking to /usr")?;
    }
    let file = bundle.join("config.json");
    fs::write(&file, config(uid(0)?).to_string()).with_context(|| format!("writing {}", file.display()))?;
    Ok(bundle)
}

fn config(uid: u32) -> Value {
    let namespaces: Vec<Value> = ["pid", "mount", "ipc", "uts", "network", "cgroup"]
        .iter()
        .map(|kind| json!({"type": kind}))
        .collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": uid},
            "args": PROGRAM,
            "env": ["PATH=/usr/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
            "capabilities": {"bounding": [], "effective": [], "permitted": []},
        },
        "root": {"path": "root", "readonly": true},
        "hostname": "sleeper",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]},
        ],
        "linux": {"namespaces": namespaces, "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys"]},
    })
}

fn chart(report: &Report) -> Chart {
    Chart {
        title: "A program in a sandbox".into(),
        subtitle: "from nothing until it runs; median, whiskers: least and greatest".into(),
        panels: vec![
            report.panel("Sandbox alone", "milliseconds", "sandbox", "ms", &["nagaya"]),
            report.panel("With a program", "milliseconds", "start", "ms", &["nagaya", "crun", "runc"]),
        ],
    }
}

//! `wake-faults`: a visitor's view of faults, and whether the next wake works. The faults are bad
//! images, killed processes, misbehaving applications, and a lack of disk or memory. Parts of the
//! node are killed, too.
//!
//! The images are on a small disk in memory, so that it can be filled. Not here: faults that need
//! another kernel.

use std::fs::{self, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nagaya_keeper::image::Digest;
use nagaya_records::instance::Tier;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::{Value, json};

use super::{AppHosting, HostedApp, journals, place, uid};
use crate::clients::to_float;
use crate::content::{AppPage, ContentApp, give};
use crate::experiment::harness::ExperimentSetting;
use crate::http;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::swap;

/// Repetitions of each fault.
const TIMES: usize = 20;
const TIMES_QUICK: usize = 5;

/// Small programs that listen on a Unix socket, with a response to every request.
const PLAIN: &str = "def prepare(): pass\n";
const SERVE: &str = "\
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ['NAGAYA_SOCKET'])
server.listen(64)
while True:
    client, _ = server.accept()
    if client.recv(65536):
        prepare()
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nConnection: close\\r\\n\\r\\nhere')
    client.close()
";
const SOUND: &str = "import os, socket\n";
const DEAF: &str = "import os, signal, socket\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n";
const LATE: &str = "import os, socket, time\ntime.sleep(1)\n";
const FORKS: &str = "\
import os, signal, socket, time
for _ in range(50):
    if os.fork() == 0:
        signal.pause()
";

/// Has a TCP connection from its start on, and needs it for each response. It replaces a closed
/// connection.
const HOLDS: &str = "\
import os, socket, threading
other = socket.create_server(('127.0.0.1', 8007))
def echo():
    while True:
        peer, _ = other.accept()
        try:
            while word := peer.recv(1):
                peer.sendall(word)
        except OSError:
            pass
threading.Thread(target=echo, daemon=True).start()
held = None
def prepare():
    global held
    for _ in range(2):
        try:
            held = held or socket.create_connection(('127.0.0.1', 8007))
            held.sendall(b'x')
            if held.recv(1):
                return
        except OSError:
            pass
        held = None
    raise SystemExit('the connection does not come back')
prepare()
";

/// Releases with which a site's application does not start.
const CRASHES: &str = "raise SystemExit('this release does not run')\n";
const NEVER_LISTENS: &str = "import signal\nsignal.pause()\n";

/// Longest time until an application listens, and longest wait of a visitor for the error.
const START_SECONDS: u32 = 5;
const ERROR_MAX: Duration = Duration::from_secs(10);

/// The visitor's error: a status and a code.
const ERROR: (u16, &str) = (502, "NGY0417");

/// Takes all memory on a certain request, and its cell has little.
const HUNGRY: &str = "\
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ['NAGAYA_SOCKET'])
server.listen(64)
held = []
while True:
    client, _ = server.accept()
    asked = client.recv(65536)
    while asked.startswith(b'POST'):
        held.append(b'x' * (1 << 20))
    if asked:
        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nConnection: close\\r\\n\\r\\nhere')
    client.close()
";
const HUNGRY_SITE: &str = "hungry";
const HUNGRY_MEMORY: &str = "64M";

/// Longest time until the kernel ends it for lack of memory.
const KILLED_MAX: Duration = Duration::from_secs(20);

const JOURNAL: &str = "journal-0";

/// Bytes of the disk of the images: 256 MiB stay free, and the rest holds the images several times.
const DISK: &str = "size=1200m";

/// Free bytes when it is full.
const DISK_LEFT: u64 = 16 << 20;

/// The file that fills it.
const FILLER: &str = "filler";

/// An action on an instance that rests at a tier.
struct ImageFault {
    name: &'static str,
    site: &'static str,
    rests: Tier,
    inject: Act,
    /// The visitor's result.
    gets: FaultGets,
    /// Repairs the fault before the check.
    mend: Act,
}

/// An action on a site.
type Act = fn(&mut FaultScene, &str) -> Result<()>;

#[derive(Clone, Copy)]
enum FaultGets {
    Page,
    /// `ERROR`, soon: there is nothing that could be shown.
    Error,
}

const FAULTS: [ImageFault; 22] = [
    fault("image cut", JOURNAL, Tier::Image, cut),
    fault("image altered", JOURNAL, Tier::Image, alter),
    fault("header altered", JOURNAL, Tier::Image, alter_header),
    fault("image gone", JOURNAL, Tier::Image, remove),
    fault("image of another kernel", JOURNAL, Tier::Image, of_another_kernel),
    fault("image of another CRIU", JOURNAL, Tier::Image, of_another_criu),
    fault("image of another base", JOURNAL, Tier::Image, of_another_base),
    ImageFault { mend: give_criu, ..fault("CRIU missing", JOURNAL, Tier::Image, take_criu) },
    fault("killed while frozen", JOURNAL, Tier::Frozen, kill_first),
    fault("killed while it ran", JOURNAL, Tier::Running, kill_first),
    fault("keeper killed", JOURNAL, Tier::Frozen, kill_keeper),
    fault("edge killed", JOURNAL, Tier::Image, kill_edge),
    fault("ignores SIGTERM", "deaf", Tier::Image, nothing),
    fault("listens late", "late", Tier::Image, remove),
    fault("has many processes", "forks", Tier::Image, nothing),
    fault("TCP connection held frozen", "holds", Tier::Frozen, nothing),
    fault("TCP connection held in image", "holds", Tier::Image, nothing),
    fault("no swap", JOURNAL, Tier::Frozen, reclaim),
    bad_release("crash at boot", |scene, site| scene.release(site, CRASHES)),
    bad_release("never listens", |scene, site| scene.release(site, NEVER_LISTENS)),
    fault("out of memory", HUNGRY_SITE, Tier::Running, exhaust),
    ImageFault { mend: make_room, ..fault("disk full", JOURNAL, Tier::Image, fill) },
];

const fn fault(name: &'static str, site: &'static str, rests: Tier, inject: Act) -> ImageFault {
    ImageFault { name, site, rests, inject, gets: FaultGets::Page, mend: nothing }
}

/// The next release is good again.
const fn bad_release(name: &'static str, inject: Act) -> ImageFault {
    let mend: Act = |scene, site| scene.release(site, &program(SOUND, SERVE));
    ImageFault { gets: FaultGets::Error, mend, ..fault(name, "released", Tier::Image, inject) }
}

const GOALS: [Goal; 2] = [
    Goal { key: "visitor_errors", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "recovered_pct", bound: Bound::AtLeast(100.0), aim: 100.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("wake-faults");
    let mut apps = journals(setting.dir(), 1)?;
    let programs = [
        ("deaf", DEAF, SERVE),
        ("late", LATE, SERVE),
        ("forks", FORKS, SERVE),
        ("holds", HOLDS, SERVE),
        ("released", SOUND, SERVE),
        (HUNGRY_SITE, "", HUNGRY),
    ];
    for (index, (name, begin, serve)) in programs.into_iter().enumerate() {
        apps.push(small(setting.dir(), name, &program(begin, serve), uid(index + 1)?)?);
    }
    let images = setting.dir().join("nagaya/state/images");
    let disk = FaultDisk::mount(&images)?;
    let hosting = AppHosting::start(setting, "nagaya", &apps, "")?;
    hosting.node.run(&["site", "set", HUNGRY_SITE, "--memory", HUNGRY_MEMORY])?;
    let dir = setting.dir().to_path_buf();
    let mut scene = FaultScene { hosting, apps, dir, images: images.join("images"), disk, releases: 1 };
    for hosted in &scene.apps {
        let (visit, is_right) = scene.hosting.visit(&hosted.name, hosted.app.page)?;
        ensure!(is_right, "{} answers {}", hosted.name, visit.status);
    }
    let times = if setting.quick { TIMES_QUICK } else { TIMES };
    report.note("times each", json!(times));
    report.note("CRIU", scene.hosting.criu()?);
    report.note("swap", json!(swap::is_there()));
    let (mut errors, mut recovered) = (0, 0);
    for round in 0..times {
        for fault in &FAULTS {
            let outcome = scene.try_one(fault).with_context(|| fault.name)?;
            errors += usize::from(!outcome.is_right);
            recovered += usize::from(outcome.is_recovered);
            report.sample(round, "fault", fault.name, "visitor_ms", outcome.ms);
            report.sample(round, "fault", fault.name, "right", f64::from(u8::from(outcome.is_right)));
            report.sample(round, "fault", fault.name, "recovered", f64::from(u8::from(outcome.is_recovered)));
        }
        eprintln!("round {} of {times} done", round + 1);
    }
    report.set("visitor_errors", to_float(errors));
    report.set("recovered_pct", to_float(recovered) / to_float(times * FAULTS.len()) * 100.0);
    for fault in &FAULTS {
        let key = format!("{}_ms", fault.name.replace(' ', "_").to_lowercase());
        report.set(key, report.median("fault", fault.name, "visitor_ms")?);
    }
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn program(begin: &str, serve: &str) -> String {
    format!("{PLAIN}{begin}{serve}")
}

/// Returns the path of a site's program.
fn program_file(dir: &Path, site: &str) -> PathBuf {
    place(dir, site).join("server.py")
}

/// Makes a site of a program of a few lines.
fn small(dir: &Path, name: &str, program: &str, uid: u32) -> Result<HostedApp> {
    let tree = place(dir, name);
    fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    let file = program_file(dir, name);
    fs::write(&file, program).with_context(|| format!("writing {}", file.display()))?;
    give(&tree, uid)?;
    let command = ["/usr/bin/python3".into(), file];
    let backend = json!({"kind": "app", "command": command, "directory": tree, "release": "1", "start_seconds": START_SECONDS});
    let app = ContentApp { backend, files: None, page: AppPage { path: "/", text: "here" }, login: "/" };
    Ok(HostedApp { name: name.into(), uid, app })
}

struct FaultScene {
    hosting: AppHosting,
    apps: Vec<HostedApp>,
    /// The experiment's directory.
    dir: PathBuf,
    /// The node's directory of images.
    images: PathBuf,
    disk: FaultDisk,
    /// Of all sites together.
    releases: u32,
}

/// A small disk in memory, which ends with this value.
struct FaultDisk(PathBuf);

impl FaultDisk {
    fn mount(at: &Path) -> Result<Self> {
        fs::create_dir_all(at).with_context(|| format!("creating {}", at.display()))?;
        let options = std::ffi::CString::new(DISK).context("options of a mount")?;
        let flags = rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV;
        rustix::mount::mount("none", at, "tmpfs", flags, options.as_c_str())
            .with_context(|| format!("mounting a disk in memory at {}: is this root?", at.display()))?;
        Ok(Self(at.into()))
    }

    fn fill(&self) -> Result<()> {
        let stat = rustix::fs::statvfs(&self.0).context("looking at the disk")?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let file = fs::File::create(self.0.join(FILLER)).context("filling the disk")?;
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&file, flags, 0, free.saturating_sub(DISK_LEFT)).context("filling the disk")
    }

    fn make_room(&self) -> Result<()> {
        fs::remove_file(self.0.join(FILLER)).context("making room on the disk")
    }
}

impl Drop for FaultDisk {
    fn drop(&mut self) {
        // The experiment's directory is removed anyway; a leftover disk in memory would be noticed
        // there.
        if let Err(error) = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH) {
            eprintln!("{} stays mounted: {error}", self.0.display());
        }
    }
}

struct FaultOutcome {
    /// The visitor got the expected result.
    is_right: bool,
    ms: f64,
    /// The instance has an image again, and wakes from it.
    is_recovered: bool,
}

impl FaultScene {
    fn try_one(&mut self, fault: &ImageFault) -> Result<FaultOutcome> {
        let page = self.page(fault.site)?;
        self.make_rest(fault.site, fault.rests)?;
        (fault.inject)(self, fault.site)?;
        let (visit, is_right) = match fault.gets {
            FaultGets::Page => self.visit(fault.site, page),
            FaultGets::Error => self.visit_in_vain(fault.site, page),
        };
        (fault.mend)(self, fault.site)?;
        let is_recovered = match self.recover(fault.site, page) {
            Ok(is_recovered) => is_recovered,
            Err(error) => {
                eprintln!("{}: no recovery: {error:#}", fault.name);
                false
            }
        };
        Ok(FaultOutcome { is_right, ms: visit, is_recovered })
    }

    /// Returns milliseconds, and whether the page came. No response at all is a visitor's error,
    /// not the experiment's.
    fn visit(&self, site: &str, page: AppPage) -> (f64, bool) {
        let begun = std::time::Instant::now();
        let came = self.hosting.visit(site, page);
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match came {
            Ok((_, is_right)) => (ms, is_right),
            Err(error) => {
                eprintln!("{site}: {error:#}");
                (ms, false)
            }
        }
    }

    /// Does the same if the page cannot come: returns whether the visitor gets the error, and soon.
    fn visit_in_vain(&self, site: &str, page: AppPage) -> (f64, bool) {
        let begun = std::time::Instant::now();
        let came = http::visit(self.hosting.node.address, &super::host(site), page.path);
        let took = begun.elapsed();
        let is_told = came.as_ref().is_ok_and(|visit| {
            let (status, code) = ERROR;
            visit.status == status && String::from_utf8_lossy(&visit.body).contains(code)
        });
        if !is_told || took > ERROR_MAX {
            eprintln!("{site}: after {took:?} {:?}", came.map(|visit| visit.status));
        }
        (took.as_secs_f64() * 1e3, is_told && took <= ERROR_MAX)
    }

    /// Makes another release of a site, with this program.
    fn release(&mut self, site: &str, program: &str) -> Result<()> {
        let file = program_file(&self.dir, site);
        fs::write(&file, program).with_context(|| format!("writing {}", file.display()))?;
        self.releases += 1;
        let release = self.releases.to_string();
        self.hosting.node.run(&["site", "set", site, "--release", &release]).map(drop)
    }

    fn page(&self, site: &str) -> Result<AppPage> {
        let hosted = self.apps.iter().find(|hosted| hosted.name == site);
        Ok(hosted.with_context(|| format!("no application {site}"))?.app.page)
    }

    /// Lets it rest with an image, whatever happened before.
    fn make_rest(&self, site: &str, tier: Tier) -> Result<()> {
        let page = self.page(site)?;
        self.visit(site, page);
        if self.hosting.status(site)?.image_bytes.is_none() {
            self.retake(site)?;
            self.visit(site, page);
        }
        match tier {
            Tier::Running => Ok(()),
            tier => self.hosting.rest(site, tier),
        }
    }

    /// Takes a new image once the instance is no longer in use.
    fn retake(&self, site: &str) -> Result<()> {
        // Frozen means that it is not in use, has processes and needs no image.
        self.hosting.rest(site, Tier::Frozen)?;
        self.hosting.node.run(&["instance", "image", site]).map(drop)
    }

    fn recover(&self, site: &str, page: AppPage) -> Result<bool> {
        self.make_rest(site, Tier::Image)?;
        let (_, is_right) = self.visit(site, page);
        let woken = self.hosting.status(site)?.last_wake.map(|wake| wake.from);
        Ok(is_right && woken == Some(Tier::Image))
    }

    /// Returns the directory of a site's image.
    fn image(&self, site: &str) -> Result<PathBuf> {
        let dirs =
            fs::read_dir(&self.images).with_context(|| format!("reading {}", self.images.display()))?;
        for dir in dirs.flatten() {
            let header = fs::read_to_string(dir.path().join("header")).unwrap_or_default();
            let body = header.split_once('\n').map_or("", |(_, body)| body);
            let header: Value = serde_json::from_str(body).unwrap_or_default();
            if header["subject"]["site"] == site {
                return Ok(dir.path());
            }
        }
        bail!("there is no image of {site} in {}", self.images.display())
    }

    /// Returns the largest file of the image: its memory.
    fn memory(&self, site: &str) -> Result<(fs::File, u64)> {
        let image = self.image(site)?;
        let files = fs::read_dir(&image).with_context(|| format!("reading {}", image.display()))?.flatten();
        let largest = files.max_by_key(|file| file.metadata().map_or(0, |meta| meta.len()));
        let path = largest.context("an image without files")?.path();
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("opening {}", path.display()))?;
        let len = file.metadata().context("looking at an image")?.len();
        Ok((file, len))
    }

    fn kill_part(&self, name: &str) -> Result<()> {
        let status = self.hosting.node.run(&["status", "--json"])?;
        let status: Value = serde_json::from_str(&status).context("reading the status")?;
        let parts = status["processes"].as_array().map_or(&[][..], Vec::as_slice);
        let part = parts.iter().find(|part| part["name"] == name);
        kill(part.and_then(|part| part["pid"].as_u64()).with_context(|| format!("no process of {name}"))?)
    }
}

fn kill(number: u64) -> Result<()> {
    kill_process(pid(number)?, Signal::KILL).context("killing")
}

fn pid(number: impl TryInto<i32>) -> Result<Pid> {
    number.try_into().ok().and_then(Pid::from_raw).context("the number of a process")
}

fn nothing(_: &mut FaultScene, _: &str) -> Result<()> {
    Ok(())
}

/// Leaves no room for an image, when there is none.
fn fill(scene: &mut FaultScene, site: &str) -> Result<()> {
    remove(scene, site)?;
    scene.disk.fill()
}

fn make_room(scene: &mut FaultScene, _: &str) -> Result<()> {
    scene.disk.make_room()
}

/// Makes it take all memory by another request, whose response does not matter.
fn exhaust(scene: &mut FaultScene, site: &str) -> Result<()> {
    // An instance that ends repeatedly is started with pauses, as intended; a new image resets
    // that.
    scene.retake(site)?;
    let pids = scene.hosting.status(site)?.pids;
    let last = pidfd_open(pid(*pids.last().context("an instance without processes")?)?, PidfdFlags::empty())
        .context("opening a process")?;
    let mut stream = std::net::TcpStream::connect(scene.hosting.node.address).context("connecting")?;
    let host = super::host(site);
    write!(stream, "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        .context("sending")?;
    stream.read_to_end(&mut Vec::new()).context("receiving")?;
    // The response may come before the kernel has ended all of it.
    let within = Timespec { tv_sec: KILLED_MAX.as_secs().cast_signed(), tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&last, PollFlags::IN)], Some(&within)).context("waiting")?;
    ensure!(ended == 1, "{site} has as much memory as it wants");
    Ok(())
}

fn cut(scene: &mut FaultScene, site: &str) -> Result<()> {
    let (file, len) = scene.memory(site)?;
    file.set_len(len / 2).context("cutting an image")
}

fn alter(scene: &mut FaultScene, site: &str) -> Result<()> {
    let (file, len) = scene.memory(site)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, len / 2).context("reading an image")?;
    file.write_all_at(&[!byte[0]], len / 2).context("altering an image")
}

fn alter_header(scene: &mut FaultScene, site: &str) -> Result<()> {
    let path = scene.image(site)?.join("header");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    fs::write(&path, text.replacen("\"kernel\": \"", "\"kernel\": \"another ", 1))
        .with_context(|| format!("writing {}", path.display()))
}

/// Changes the header of an image to a complete one with a correct digest.
fn forge(scene: &FaultScene, site: &str, change: impl FnOnce(&mut Value)) -> Result<()> {
    let path = scene.image(site)?.join("header");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let (first, body) = text.split_once('\n').context("a header of one line")?;
    let (version, _) = first.rsplit_once(' ').context("a header without a digest")?;
    let mut header: Value = serde_json::from_str(body).context("reading a header")?;
    change(&mut header);
    let body = serde_json::to_string_pretty(&header).context("writing a header")?;
    let digest = Digest::of(&[body.as_bytes()]);
    fs::write(&path, format!("{version} {digest}\n{body}\n"))
        .with_context(|| format!("writing {}", path.display()))
}

fn of_another_kernel(scene: &mut FaultScene, site: &str) -> Result<()> {
    forge(scene, site, |header| header["environment"]["kernel"] = json!("5.10.0 #1"))
}

fn of_another_criu(scene: &mut FaultScene, site: &str) -> Result<()> {
    forge(scene, site, |header| header["environment"]["criu"] = json!("4.0"))
}

fn of_another_base(scene: &mut FaultScene, site: &str) -> Result<()> {
    forge(scene, site, |header| header["subject"]["base"] = json!(Digest::of(&[b"another"]).to_string()))
}

/// The next keeper finds no CRIU.
fn take_criu(scene: &mut FaultScene, _: &str) -> Result<()> {
    let absent = scene.dir.join("no-criu");
    scene.hosting.reconfigure(&format!("criu = {:?}\n", absent.display().to_string()))?;
    scene.kill_part("keeper")
}

fn give_criu(scene: &mut FaultScene, site: &str) -> Result<()> {
    ensure!(scene.hosting.status(site)?.image_bytes.is_none(), "{site} has an image without a CRIU");
    scene.hosting.reconfigure("")?;
    scene.kill_part("keeper")
}

/// Without swap it stays frozen.
fn reclaim(scene: &mut FaultScene, site: &str) -> Result<()> {
    scene.hosting.node.run(&["instance", "rest", site, "--to", "reclaimed"])?;
    let tier = scene.hosting.status(site)?.tier;
    ensure!(tier == if swap::is_there() { Tier::Reclaimed } else { Tier::Frozen }, "{site} is at {tier}");
    Ok(())
}

fn remove(scene: &mut FaultScene, site: &str) -> Result<()> {
    let image = scene.image(site)?;
    fs::remove_dir_all(&image).with_context(|| format!("removing {}", image.display()))
}

fn kill_first(scene: &mut FaultScene, site: &str) -> Result<()> {
    let pids = scene.hosting.status(site)?.pids;
    // The last of them is the application's own; the first is the sandbox's.
    kill(pids.last().copied().context("an instance without processes")?.into())
}

fn kill_keeper(scene: &mut FaultScene, _: &str) -> Result<()> {
    scene.kill_part("keeper")
}

fn kill_edge(scene: &mut FaultScene, _: &str) -> Result<()> {
    scene.kill_part("edge")
}

fn chart(report: &Report) -> Chart {
    let names = FAULTS.map(|fault| fault.name);
    Chart {
        title: "A visitor when something is wrong".into(),
        subtitle: "whole page, whatever it took to serve it; median, whiskers: least and greatest".into(),
        panels: vec![report.panel("Page after a fault", "milliseconds", "fault", "visitor_ms", &names)],
    }
}

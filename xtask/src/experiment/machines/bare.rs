//! Machines without an application, as the paper's idle ones: a kernel that has started, and the
//! first process of the guest, which waits for its configuration for ever.
//!
//! They are copies of a template, without a sandbox and a node. A guest here may have a periodic
//! tick, as guests had when the paper was written; nagaya's machines have none. Not here: machines
//! of sites (`nagaya_keeper`).

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nagaya_machine::command_line::{self, InheritedSockets, MemoryFile};
use nagaya_machine::kernel::{GuestKernel, MODULES};
use nagaya_machine::monitor::QemuMonitor;
use nagaya_machine::qemu::{self, QemuOrder, StateMemory};
use nagaya_machine::settings::{Accelerator, MachineHardware, MachineOrigin, QemuProgram};
use nagaya_machine::{TEMPLATE_LIBRARY, clock, initramfs};
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, kill_process, setpriority_process};

use crate::content::run;
use crate::interrupt;

const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// The variable by which QEMU's library finds the memory of a template.
const MEMORY_VARIABLE: &str = "NAGAYA_TEMPLATE";

/// Memory of a guest, MiB: the least with which Debian's kernel starts.
const MEMORY_MIB: u32 = 96;

/// Words of the kernel for a tick that does not stop: 250 times a second, as Debian builds it.
const PERIODIC: &str = " nohz=off highres=off";

/// The word before the kernel's words.
const APPEND: &str = "-append";

/// First message of a guest that has started.
const STARTED: &str = "hello\n";

/// Longest start of a guest.
const START_MAX: Duration = Duration::from_secs(180);

/// Longest time until all machines stand still, and the interval of looks.
const STOP_MAX: Duration = Duration::from_secs(60);
const STOP_POLL: Duration = Duration::from_millis(2);

/// How a guest's kernel measures time while it is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestTick {
    Periodic,
    Tickless,
}

/// A machine that has started, as files.
#[derive(Debug)]
pub struct BareTemplate {
    qemu: QemuProgram,
    hardware: MachineHardware,
    memory: PathBuf,
    state: PathBuf,
}

impl BareTemplate {
    /// Makes one in this directory, with the newest kernel of a tree. An emulated CPU needs ten
    /// seconds for it.
    pub fn make(dir: &Path, tree: &Path, tick: GuestTick) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let kernel = GuestKernel::newest(tree).context("the kernel of the guests")?;
        let modules = kernel.read_modules(&MODULES).context("the modules of the guests")?;
        let disk = dir.join("initramfs");
        fs::write(&disk, initramfs::build(&modules)?).context("writing the initial RAM disk")?;
        let library = dir.join("template_memory.so");
        fs::write(&library, TEMPLATE_LIBRARY).context("writing QEMU's library")?;
        let qemu = QemuProgram { words: vec![QEMU.into()], library, modules: None };
        let hardware = MachineHardware {
            accelerator: Accelerator::Tcg,
            memory_mib: MEMORY_MIB,
            vcpus: 1,
            tsc_khz: clock::tsc_khz(),
        };
        let (memory, state) = (dir.join("memory"), dir.join("state"));
        let file = File::create(&memory).context("creating a template")?;
        file.set_len(u64::from(MEMORY_MIB) << 20).context("sizing a template")?;
        let template = Self { qemu, hardware, memory, state };
        let origin = MachineOrigin::Kernel { kernel: kernel.image, initramfs: disk };
        let (machine, agent, mut monitor) = template.begin(&origin, tick)?;
        agent.set_read_timeout(Some(START_MAX)).context("limiting the start of a guest")?;
        let mut said = String::new();
        BufReader::new(agent).read_line(&mut said).context("waiting for the start of a guest")?;
        ensure!(said == STARTED, "a guest has not started: {said}");
        let state = File::create(&template.state).context("creating a template")?;
        qemu::save_state(&mut monitor, &state, StateMemory::LeftOut).context("saving a template")?;
        drop(machine);
        Ok(template)
    }

    /// Starts QEMU. Returns it with the guest's port and its monitor.
    fn begin(
        &self,
        origin: &MachineOrigin,
        tick: GuestTick,
    ) -> Result<(BareMachine, UnixStream, QemuMonitor)> {
        let pair = || -> Result<(UnixStream, UnixStream)> {
            let (ours, its) = UnixStream::pair().context("making a socket")?;
            rustix::io::fcntl_setfd(&its, FdFlags::empty()).context("handing a socket on")?;
            Ok((ours, its))
        };
        let [monitor, agent, log, files] = [pair()?, pair()?, pair()?, pair()?];
        let sockets = InheritedSockets {
            monitor: monitor.1.as_raw_fd(),
            agent: agent.1.as_raw_fd(),
            log: log.1.as_raw_fd(),
            files: files.1.as_raw_fd(),
        };
        let is_new = matches!(origin, MachineOrigin::Kernel { .. });
        let memory = MemoryFile { path: &self.memory, is_shared: is_new };
        let order = QemuOrder {
            qemu: &self.qemu,
            name: "bare",
            hardware: &self.hardware,
            origin,
            memory: Some(memory),
            is_incoming: !is_new,
        };
        let mut words = command_line::arguments(&order, sockets);
        if let (Some(at), GuestTick::Periodic) = (words.iter().position(|word| word == APPEND), tick) {
            words[at + 1].push_str(PERIODIC);
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", QEMU]).args(words).env("LD_PRELOAD", &self.qemu.library);
        if !is_new {
            command.env(MEMORY_VARIABLE, &self.memory);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let child = command.spawn().context("starting QEMU")?;
        let machine = BareMachine { child, _sockets: vec![log.0, files.0] };
        let monitor = QemuMonitor::connect(monitor.0).context("reaching QEMU")?;
        Ok((machine, agent.0, monitor))
    }

    /// Makes one more machine.
    fn copy(&self) -> Result<BareMachine> {
        let origin = MachineOrigin::Template { memory: self.memory.clone(), state: self.state.clone() };
        let (mut machine, agent, mut monitor) = self.begin(&origin, GuestTick::Tickless)?;
        let state = File::open(&self.state).context("opening a template")?;
        qemu::load_state(&mut monitor, &state, StateMemory::LeftOut).context("loading a template")?;
        machine._sockets.push(agent);
        Ok(machine)
    }
}

/// One machine. It ends with this value.
#[derive(Debug)]
struct BareMachine {
    child: Child,
    /// The guest would notice their end.
    _sockets: Vec<UnixStream>,
}

impl Drop for BareMachine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How machines stand back for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BareLever {
    Nice0,
    Nice19,
    /// The scheduler's class for what runs only when nothing else wants to.
    SchedIdle,
}

/// Many machines of one template.
#[derive(Debug)]
pub struct BareCrowd(Vec<BareMachine>);

impl BareCrowd {
    pub fn start(template: &BareTemplate, count: usize) -> Result<Self> {
        let mut crowd = Self(Vec::new());
        for _ in 0..count {
            interrupt::check()?;
            crowd.0.push(template.copy()?);
        }
        Ok(crowd)
    }

    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(|machine| machine.child.id()).collect()
    }

    /// Lets all machines stand still. To the scheduler it is the same as a frozen group.
    pub fn stop(&self) -> Result<()> {
        for pid in self.pids() {
            kill_process(pid_of(pid)?, Signal::STOP).context("stopping a machine")?;
        }
        let begun = Instant::now();
        for pid in self.pids() {
            // A thread must run once more before it stops.
            while threads(pid)?.iter().any(|thread| !is_stopped(pid, *thread)) {
                ensure!(begun.elapsed() < STOP_MAX, "machines do not stand still after {STOP_MAX:?}");
                interrupt::check()?;
                std::thread::sleep(STOP_POLL);
            }
        }
        Ok(())
    }

    /// Lets all machines run, with a lever on all of their threads.
    pub fn apply(&self, lever: BareLever) -> Result<()> {
        for pid in self.pids() {
            let process = pid_of(pid)?;
            let class = if lever == BareLever::SchedIdle { "--idle" } else { "--other" };
            run(Command::new("chrt").args([class, "--all-tasks", "--pid", "0", &pid.to_string()]))?;
            let nice = if lever == BareLever::Nice19 { 19 } else { 0 };
            for thread in threads(pid)? {
                setpriority_process(Some(pid_of(thread)?), nice).context("setting a nice value")?;
            }
            kill_process(process, Signal::CONT).context("letting a machine go on")?;
        }
        Ok(())
    }
}

impl Drop for BareCrowd {
    fn drop(&mut self) {
        // All at once: each needs CPU time to end, which the others have.
        for machine in &mut self.0 {
            let _ = machine.child.kill();
        }
    }
}

fn threads(pid: u32) -> Result<Vec<u32>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).context("listing threads of a machine")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Returns whether this thread stands still (`T` in proc(5)), or has ended.
fn is_stopped(pid: u32, thread: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat"));
    stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
}

fn pid_of(number: u32) -> Result<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw).context("a process has no number")
}

//! Starts QEMU with its four sockets, and saves or loads the state of its machine.
//!
//! The memory of a template is a file, and is not part of that state (QEMU's capability
//! `x-ignore-shared`). Not here: the arguments (`command_line`), the machine's life (`run`,
//! `template`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use serde_json::json;

use crate::command_line::{self, InheritedSockets, MemoryFile};
use crate::monitor::{MonitorError, QemuMonitor};
use crate::settings::{Accelerator, MachineHardware, MachineOrigin, QemuProgram, VARIABLE};

/// Variables for the library that opens files for QEMU (`c/template_memory.c`): the path of the
/// template's memory, and the number of the descriptor of `/dev/kvm`.
const MEMORY_VARIABLE: &str = "NAGAYA_TEMPLATE";
const KVM_VARIABLE: &str = "NAGAYA_KVM";

/// QEMU's own variable for the directory of its modules.
const MODULES_VARIABLE: &str = "QEMU_MODULE_DIR";

/// Time between two questions whether QEMU has saved or loaded a state, and the maximum of all.
const ASK_EVERY: Duration = Duration::from_millis(1);
const STATE_MAX: Duration = Duration::from_secs(60);

/// Bytes in a second that QEMU may save. Its default is 128 MiB.
const BANDWIDTH_MAX: u64 = 1 << 40;

/// Everything that describes one QEMU.
#[derive(Debug, Clone, Copy)]
pub struct QemuOrder<'a> {
    pub qemu: &'a QemuProgram,
    pub name: &'a str,
    pub hardware: &'a MachineHardware,
    pub origin: &'a MachineOrigin,
    pub memory: Option<MemoryFile<'a>>,
    /// It waits for its state.
    pub is_incoming: bool,
}

/// One side of the sockets of a machine's ports. They may outlast a QEMU.
#[derive(Debug)]
pub struct PortSockets {
    pub agent: UnixStream,
    pub log: UnixStream,
    pub files: UnixStream,
}

/// QEMU, and our end of its monitor.
#[derive(Debug)]
pub struct QemuProcess {
    pub child: Child,
    pub monitor: UnixStream,
}

/// Whether the guest's memory is part of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateMemory {
    Contained,
    /// It is a file that others map.
    LeftOut,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{program} cannot be started: {error}; install qemu-system-x86")]
    Program { program: String, error: io::Error },
    #[error("the sockets of QEMU: {0}")]
    Sockets(io::Error),
}

impl PortSockets {
    /// Makes our side, and QEMU's.
    pub fn pair() -> Result<(Self, Self), StartError> {
        let [agent, log, files] = [inherited_pair()?, inherited_pair()?, inherited_pair()?];
        let ours = Self { agent: agent.0, log: log.0, files: files.0 };
        Ok((ours, Self { agent: agent.1, log: log.1, files: files.1 }))
    }
}

/// Makes a pair of sockets. Programs inherit the second one.
fn inherited_pair() -> Result<(UnixStream, UnixStream), StartError> {
    let (ours, its) = UnixStream::pair().map_err(StartError::Sockets)?;
    rustix::io::fcntl_setfd(&its, FdFlags::empty()).map_err(|errno| StartError::Sockets(errno.into()))?;
    Ok((ours, its))
}

impl QemuProcess {
    /// Starts it with its side of the ports. A machine on the processor itself uses `/dev/kvm`,
    /// which is this process's standard input: a sandbox has no devices of the node's.
    pub fn start(order: &QemuOrder<'_>, ports: &PortSockets) -> Result<Self, StartError> {
        let QemuOrder { qemu, hardware, origin, .. } = order;
        let (monitor, its_monitor) = inherited_pair()?;
        let sockets = InheritedSockets {
            monitor: its_monitor.as_raw_fd(),
            agent: ports.agent.as_raw_fd(),
            log: ports.log.as_raw_fd(),
            files: ports.files.as_raw_fd(),
        };
        let program = qemu.words.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(qemu.words.iter().skip(1)).env_remove(VARIABLE).stdin(Stdio::null());
        command.args(command_line::arguments(order, sockets));
        command.env("LD_PRELOAD", &qemu.library);
        if let Some(modules) = &qemu.modules {
            command.env(MODULES_VARIABLE, modules);
        }
        if let MachineOrigin::Template { memory, .. } = origin {
            command.env(MEMORY_VARIABLE, memory);
        }
        let device = match hardware.accelerator {
            Accelerator::Kvm => {
                Some(rustix::io::dup(io::stdin()).map_err(|e| StartError::Sockets(e.into()))?)
            }
            Accelerator::Tcg => None,
        };
        if let Some(device) = &device {
            command.env(KVM_VARIABLE, device.as_raw_fd().to_string());
        }
        let child = command.spawn().map_err(|error| StartError::Program { program, error })?;
        Ok(Self { child, monitor })
    }
}

/// Saves the state of the machine in a file. The machine stands still from then on.
pub fn save_state(monitor: &mut QemuMonitor, file: &File, memory: StateMemory) -> Result<(), MonitorError> {
    monitor.order("stop", serde_json::Value::Null)?;
    set_memory(monitor, memory)?;
    monitor.order("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH_MAX }))?;
    monitor.hand_over("state", file.as_fd())?;
    monitor.order("migrate", json!({ "uri": "fd:state" }))?;
    let until = Instant::now() + STATE_MAX;
    loop {
        let said = monitor.order("query-migrate", serde_json::Value::Null)?;
        match said["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") | None => {
                return Err(MonitorError::Protocol(format!("the state is not saved: {said}")));
            }
            Some(_) => wait(until)?,
        }
    }
}

/// Loads such a state, and lets the machine run.
pub fn load_state(monitor: &mut QemuMonitor, file: &File, memory: StateMemory) -> Result<(), MonitorError> {
    set_memory(monitor, memory)?;
    monitor.hand_over("state", file.as_fd())?;
    monitor.order("migrate-incoming", json!({ "uri": "fd:state" }))?;
    let until = Instant::now() + STATE_MAX;
    loop {
        let said = monitor.order("query-status", serde_json::Value::Null)?;
        match said["status"].as_str() {
            Some("inmigrate") => wait(until)?,
            Some("paused" | "postmigrate" | "prelaunch" | "running") => break,
            _ => return Err(MonitorError::Protocol(format!("the state is not loaded: {said}"))),
        }
    }
    monitor.order("cont", serde_json::Value::Null)?;
    Ok(())
}

fn set_memory(monitor: &mut QemuMonitor, memory: StateMemory) -> Result<(), MonitorError> {
    let is_left_out = memory == StateMemory::LeftOut;
    let capability = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": is_left_out }] });
    monitor.order("migrate-set-capabilities", capability).map(|_| ())
}

fn wait(until: Instant) -> Result<(), MonitorError> {
    if Instant::now() > until {
        return Err(io::Error::from(io::ErrorKind::TimedOut).into());
    }
    thread::sleep(ASK_EVERY);
    Ok(())
}

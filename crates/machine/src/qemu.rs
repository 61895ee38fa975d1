//! Starts QEMU with its four sockets, and saves or loads the state of its devices.
//!
//! Memory that is a file is not part of that state (QEMU's capability `x-ignore-shared`). Not here:
//! the arguments (`command_line`), the machine's life (`run`, `template`).

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

/// QEMU, and our ends of its sockets.
#[derive(Debug)]
pub struct QemuProcess {
    pub child: Child,
    pub monitor: UnixStream,
    pub agent: UnixStream,
    pub log: UnixStream,
    pub files: UnixStream,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{program} cannot be started: {error}; install qemu-system-x86")]
    Program { program: String, error: io::Error },
    #[error("the sockets of QEMU: {0}")]
    Sockets(io::Error),
}

impl QemuProcess {
    /// Starts it. A machine on the processor itself uses `/dev/kvm`, which is this process's
    /// standard input: a sandbox has no devices of the node's.
    pub fn start(
        qemu: &QemuProgram,
        name: &str,
        hardware: &MachineHardware,
        origin: &MachineOrigin,
        memory: Option<MemoryFile<'_>>,
    ) -> Result<Self, StartError> {
        let pair = || -> io::Result<(UnixStream, UnixStream)> {
            let (ours, its) = UnixStream::pair()?;
            rustix::io::fcntl_setfd(&its, FdFlags::empty())?;
            Ok((ours, its))
        };
        let sockets = || Ok([pair()?, pair()?, pair()?, pair()?]);
        let [(monitor, its_monitor), (agent, its_agent), (log, its_log), (files, its_files)] =
            sockets().map_err(StartError::Sockets)?;
        let sockets = InheritedSockets {
            monitor: its_monitor.as_raw_fd(),
            agent: its_agent.as_raw_fd(),
            log: its_log.as_raw_fd(),
            files: its_files.as_raw_fd(),
        };
        let program = qemu.words.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(qemu.words.iter().skip(1)).env_remove(VARIABLE).stdin(Stdio::null());
        command.args(command_line::arguments(name, hardware, origin, memory, sockets));
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
        Ok(Self { child, monitor, agent, log, files })
    }
}

/// Saves the state of the devices in a file. The machine stands still from then on.
pub fn save_state(monitor: &mut QemuMonitor, file: &File) -> Result<(), MonitorError> {
    monitor.order("stop", serde_json::Value::Null)?;
    leave_memory_out(monitor)?;
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
pub fn load_state(monitor: &mut QemuMonitor, file: &File) -> Result<(), MonitorError> {
    leave_memory_out(monitor)?;
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

fn leave_memory_out(monitor: &mut QemuMonitor) -> Result<(), MonitorError> {
    let capability = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
    monitor.order("migrate-set-capabilities", capability).map(|_| ())
}

fn wait(until: Instant) -> Result<(), MonitorError> {
    if Instant::now() > until {
        return Err(io::Error::from(io::ErrorKind::TimedOut).into());
    }
    thread::sleep(ASK_EVERY);
    Ok(())
}

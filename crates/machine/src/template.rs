//! `nagaya vm-template`: starts a kernel once, up to where the guest waits for its configuration,
//! and saves the machine. All machines with this kernel and hardware begin as copies of it.
//!
//! It is also the test of an accelerator: one that does not bring a kernel up makes no template.
//! Invariant: nothing of a tenant is in a template, and no tenant's process has a part in it. The
//! keeper runs this in a sandbox of nobody's and copies the files out. Not here: copies (`run`).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::command_line::MemoryFile;
use crate::monitor::{MonitorError, QemuMonitor};
use crate::qemu::{self, PortSockets, QemuOrder, QemuProcess, StartError, StateMemory};
use crate::settings::{MachineHardware, MachineOrigin, QemuProgram};

/// Variable with the order, as JSON.
pub const TEMPLATE_VARIABLE: &str = "NAGAYA_MACHINE_TEMPLATE";

/// Files of a template in its directory: the guest's memory, and the state of the devices.
pub const MEMORY_FILE: &str = "memory";
pub const STATE_FILE: &str = "state";

/// First words of a guest: it has started, or why not.
const STARTED: &str = "hello";
const FAILED: &str = "failed ";

/// Maximum length of those, bytes.
const WORDS_LEN_MAX: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateOrder {
    pub qemu: QemuProgram,
    pub hardware: MachineHardware,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// The directory for the files.
    pub into: PathBuf,
    /// Maximum time until the guest has started, seconds.
    pub boot_seconds_max: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("the variable {TEMPLATE_VARIABLE} has no order for a template: {0}")]
    Order(String),
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(
        "the kernel has not started within {seconds} s with {memory_mib} MiB of memory and {accelerator}"
    )]
    Silent { seconds: u32, memory_mib: u32, accelerator: &'static str },
    #[error("the guest has ended before it had started")]
    Ended,
    #[error("the guest cannot start: {0}")]
    Guest(String),
    #[error(transparent)]
    Monitor(#[from] MonitorError),
}

/// Makes the template that the environment orders.
pub fn run() -> Result<(), TemplateError> {
    let text = std::env::var(TEMPLATE_VARIABLE).map_err(|error| TemplateError::Order(error.to_string()))?;
    let order = serde_json::from_str(&text).map_err(|error| TemplateError::Order(error.to_string()))?;
    make(&order)
}

/// Makes one. QEMU has ended when it returns.
pub fn make(order: &TemplateOrder) -> Result<(), TemplateError> {
    let (memory, state) = (order.into.join(MEMORY_FILE), order.into.join(STATE_FILE));
    let create = |path: &PathBuf| {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        file.map_err(|error| TemplateError::File { path: path.clone(), error })
    };
    let size = u64::from(order.hardware.memory_mib) << 20;
    // All of it at once: on a full disk QEMU would be killed at any write.
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(create(&memory)?, flags, 0, size)
        .map_err(|error| TemplateError::File { path: memory.clone(), error: error.into() })?;
    let state = create(&state)?;
    let origin = MachineOrigin::Kernel { kernel: order.kernel.clone(), initramfs: order.initramfs.clone() };
    let (ports, its_ports) = PortSockets::pair()?;
    let machine = QemuProcess::start(
        &QemuOrder {
            qemu: &order.qemu,
            name: "template",
            hardware: &order.hardware,
            origin: &origin,
            memory: Some(MemoryFile { path: &memory, is_shared: true }),
            is_incoming: false,
        },
        &its_ports,
    )?;
    drop(its_ports);
    let child = EndedWithUs(machine.child);
    let mut monitor = QemuMonitor::connect(machine.monitor)?;
    wait_until_started(order, ports.agent)?;
    save(&mut monitor, &state)?;
    drop(child);
    Ok(())
}

/// QEMU, which does not outlive this.
struct EndedWithUs(Child);

impl Drop for EndedWithUs {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_until_started(
    order: &TemplateOrder,
    mut agent: std::os::unix::net::UnixStream,
) -> Result<(), TemplateError> {
    let seconds = order.boot_seconds_max;
    let until = Instant::now() + Duration::from_secs(seconds.into());
    let mut words = Vec::new();
    while !words.contains(&b'\n') && words.len() < WORDS_LEN_MAX {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut watched = [PollFd::new(&agent, PollFlags::IN)];
        match poll(&mut watched, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(1..) => {}
            _ => {
                let MachineHardware { memory_mib, accelerator, .. } = order.hardware;
                return Err(TemplateError::Silent { seconds, memory_mib, accelerator: accelerator.word() });
            }
        }
        let mut bytes = [0; WORDS_LEN_MAX];
        match agent.read(&mut bytes) {
            Ok(len @ 1..) => words.extend_from_slice(&bytes[..len]),
            _ => return Err(TemplateError::Ended),
        }
    }
    let words = String::from_utf8_lossy(&words);
    match words.lines().next() {
        Some(STARTED) => Ok(()),
        other => {
            let said = other.unwrap_or_default();
            Err(TemplateError::Guest(said.strip_prefix(FAILED).unwrap_or(said).to_owned()))
        }
    }
}

fn save(monitor: &mut QemuMonitor, state: &File) -> Result<(), TemplateError> {
    qemu::save_state(monitor, state, StateMemory::LeftOut)?;
    // QEMU ends with it, and closes its files.
    Ok(monitor.order("quit", serde_json::Value::Null).map(|_| ())?)
}

//! Signals to a machine: it saves itself before an image of its sandbox is taken, and it wakes.
//!
//! A machine with KVM cannot be in an image. Its first process keeps QEMU's state, and QEMU ends,
//! until the wake. Then the first process gets another descriptor of the device. Any machine learns
//! the time and gets randomness with a wake. Not here: the other side (`nagaya_machine::run`,
//! `nagaya_machine::door`).

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::protocol::FailureKind;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep};

use crate::cells::Leaf;
use crate::context::KeeperContext;
use crate::fault::{self, Fault};
use crate::instances::run::app_launch;
use crate::instances::run::processes::{ImageSource, InstanceProcesses};
use crate::sandbox::{ROOT_PID, SandboxProgram};

/// The signals (`nagaya_machine::run::{WAKE, SAVE}`).
const WAKE: Signal = Signal::ALARM;
const SAVE: Signal = Signal::VTALARM;

/// Maximum time of saving a machine, and of its start from there.
const SAVE_MAX: Duration = Duration::from_secs(30);
const RESUME_MAX: Duration = Duration::from_secs(30);

/// Open files of the program that wakes a machine.
const OPEN_FILES_MAX: u64 = 64;

/// Time between two looks whether it is saved.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Has a machine save itself. Returns when its QEMU has ended.
pub async fn save(context: &KeeperContext, processes: &InstanceProcesses) -> Result<(), Fault> {
    send(context, processes, SAVE).await?;
    let until = Instant::now() + SAVE_MAX;
    loop {
        let leaf = Arc::clone(processes.leaf());
        let is_saved = context.on_worker(move || Ok(has_first_alone(&leaf))).await?;
        match is_saved {
            Ok(true) => return Ok(()),
            Ok(false) if Instant::now() < until => sleep(LOOK_EVERY).await,
            Ok(false) => {
                return Err(failed(&format!(
                    "is not saved within {SAVE_MAX:?}; `nagaya instance logs` says more"
                )));
            }
            Err(error) => return Err(failed(&format!("cannot be looked at: {error}"))),
        }
    }
}

/// Wakes a machine whose processes are back from an image.
pub async fn wake(
    context: &KeeperContext,
    processes: &InstanceProcesses,
    source: Option<&Arc<ImageSource>>,
) -> Result<(), Fault> {
    match source {
        Some(source) if source.launch.saves_state() => resume(context, source).await,
        _ => send(context, processes, WAKE).await,
    }
}

/// Wakes a machine that was saved. Returns when it goes on.
pub async fn resume(context: &KeeperContext, source: &Arc<ImageSource>) -> Result<(), Fault> {
    let source = Arc::clone(source);
    context.on_worker(move || hand_device(&source)).await
}

/// Runs `nagaya vm-wake` in the sandbox to its end. Blocks.
fn hand_device(source: &ImageSource) -> Result<(), Fault> {
    let ImageSource { launch, made } = source;
    let (argv, device) = launch.wake_command()?;
    let program = SandboxProgram {
        argv,
        env: Vec::new(),
        directory: "/".into(),
        stdin: device.as_ref().map(AsFd::as_fd),
        stdout: None,
        stderr: None,
        listener: None,
        pid: None,
        open_files_max: OPEN_FILES_MAX,
        has_terminal: false,
    };
    let task = made.sandbox.run(&program).map_err(|error| app_launch::of_sandbox(&error))?;
    match task.wait(RESUME_MAX) {
        Ok(exit) if exit.status == Some(0) => Ok(()),
        Ok(_) => Err(failed("does not continue from its state; `nagaya instance logs` says more")),
        Err(error) => Err(failed(&format!("does not continue from its state: {error}"))),
    }
}

fn failed(why: &str) -> Fault {
    Fault::new(FailureKind::Broken, fault::MACHINE, format!("the machine {why}"))
}

async fn send(context: &KeeperContext, processes: &InstanceProcesses, signal: Signal) -> Result<(), Fault> {
    let leaf = Arc::clone(processes.leaf());
    let sent = context.on_worker(move || Ok(send_first(&leaf, signal))).await?;
    sent.map_err(|error| failed(&format!("gets no signal: {error}")))
}

/// Signals the first process of an application, whose number in its sandbox is `ROOT_PID`. Blocks.
pub fn send_first(leaf: &Leaf, signal: Signal) -> io::Result<()> {
    for pid in leaf.pids()? {
        // Opened before it is checked: its number cannot become another's meanwhile.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if number_inside(pid) == Some(ROOT_PID) {
            return Ok(pidfd_send_signal(pidfd, signal)?);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Whether the first process of an application has no children, not even dead ones
/// (proc_pid_task(5)). Blocks.
fn has_first_alone(leaf: &Leaf) -> io::Result<bool> {
    let first = leaf.pids()?.into_iter().find(|pid| number_inside(*pid) == Some(ROOT_PID));
    let first = first.ok_or(io::ErrorKind::NotFound)?.as_raw_nonzero();
    Ok(fs::read_to_string(format!("/proc/{first}/task/{first}/children"))?.trim().is_empty())
}

/// Returns its number in the innermost namespace (`NSpid`, proc_pid_status(5)).
fn number_inside(pid: Pid) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_mean_the_same_signals() {
        assert_eq!(WAKE.as_raw(), nagaya_machine::run::WAKE as i32);
        assert_eq!(SAVE.as_raw(), nagaya_machine::run::SAVE as i32);
    }
}

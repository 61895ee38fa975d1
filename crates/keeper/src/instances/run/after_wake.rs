//! Notices to an application that is back from an image, before it gets a request. They are
//! signals, and paths that nagaya requests with GET.
//!
//! A failure of either is logged, and the application is used all the same. Not here: when
//! (`start`).

use std::fs;
use std::time::Duration;

use nagaya_records::record::App;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;

use crate::cells::Leaf;
use crate::context::KeeperContext;
use crate::instances::run::internal_requests::InternalTarget;
use crate::instances::run::processes::InstanceProcesses;
use crate::instances::state::instance::SiteInstance;
use crate::sandbox::ROOT_PID;

/// Signal to the first process of a machine (`nagaya_machine::run::WAKE`).
const MACHINE_WAKE: &str = "SIGALRM";

/// Maximum duration of all of it, while the callers wait.
const AFTER_WAKE_MAX: Duration = Duration::from_secs(5);

/// Sends the record's signals and requests, in this order.
pub async fn tell(
    context: &KeeperContext,
    instance: &SiteInstance,
    app: &App,
    processes: &InstanceProcesses,
) {
    let site = instance.site();
    let until = Instant::now() + AFTER_WAKE_MAX;
    // A machine learns the time, and gets randomness of its own, before anything else.
    let of_machine = app.machine.iter().map(|_| MACHINE_WAKE);
    for word in of_machine.chain(app.after_wake.iter().map(String::as_str)) {
        let said = match signal_of(word) {
            Some(signal) => {
                let leaf = std::sync::Arc::clone(processes.leaf());
                let sent = context.on_worker(move || Ok(send(&leaf, signal))).await;
                sent.map_err(|fault| fault.to_string())
                    .and_then(|sent| sent.map_err(|error| error.to_string()))
            }
            None => get(instance, app, processes, word, until).await,
        };
        if let Err(why) = said {
            tracing::warn!(site = %site.name, "{word} could not be sent after its wake: {why}");
        }
    }
}

async fn get(
    instance: &SiteInstance,
    app: &App,
    processes: &InstanceProcesses,
    path: &str,
    until: Instant,
) -> Result<(), String> {
    let asked =
        InternalTarget::of(&instance.site(), &instance.tenant(), app).map_err(|fault| fault.to_string())?;
    let socket = processes.connect().await.map_err(|error| error.to_string())?;
    let left = until.saturating_duration_since(Instant::now());
    match asked.get(socket, path, left).await {
        Ok(answer) if answer.status < 400 => Ok(()),
        Ok(answer) => Err(format!("it answered with {answer}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns one of the signals that a record may name.
fn signal_of(word: &str) -> Option<Signal> {
    match word {
        MACHINE_WAKE => Some(Signal::ALARM),
        "SIGHUP" => Some(Signal::HUP),
        "SIGUSR1" => Some(Signal::USR1),
        "SIGUSR2" => Some(Signal::USR2),
        "SIGWINCH" => Some(Signal::WINCH),
        _ => None,
    }
}

/// Signals the first process of the application, whose number in its sandbox is `ROOT_PID`.
fn send(leaf: &Leaf, signal: Signal) -> std::io::Result<()> {
    for pid in leaf.pids()? {
        // Opened before it is checked: its number cannot become another's meanwhile.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if number_inside(pid) == Some(ROOT_PID) {
            return Ok(pidfd_send_signal(pidfd, signal)?);
        }
    }
    Err(std::io::ErrorKind::NotFound.into())
}

/// Returns its number in the innermost namespace (`NSpid`, proc_pid_status(5)).
fn number_inside(pid: Pid) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use nagaya_records::record::AFTER_WAKE_SIGNALS;

    use super::*;

    #[test]
    fn each_signal_of_a_record_is_known() {
        for word in AFTER_WAKE_SIGNALS {
            assert!(signal_of(word).is_some(), "{word}");
        }
        assert_eq!(signal_of("/reload"), None);
    }
}

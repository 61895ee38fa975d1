//! What an application is told once it is back from an image and before it gets a request: signals, and paths that nagaya gets.
//!
//! Neither is a reason not to use it: what fails is said in the log. Not here: when (`start`).

use std::fs;
use std::time::Duration;

use nagaya_cmdb::record::App;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;

use super::Instance;
use super::get::Asked;
use super::start::Body;
use crate::cells::Leaf;
use crate::engine::Engine;
use crate::sandbox::ROOT_PID;

/// How long all of it may take together, while those who asked wait.
const AFTER_WAKE_MAX: Duration = Duration::from_secs(5);

/// Says in this order what the record wants said.
pub async fn tell(engine: &Engine, instance: &Instance, app: &App, body: &Body) {
    let site = instance.site();
    let until = Instant::now() + AFTER_WAKE_MAX;
    for word in &app.after_wake {
        let said = match signal_of(word) {
            Some(signal) => {
                let leaf = std::sync::Arc::clone(body.leaf());
                let sent = engine.on_worker(move || Ok(send(&leaf, signal))).await;
                sent.map_err(|fault| fault.to_string())
                    .and_then(|sent| sent.map_err(|error| error.to_string()))
            }
            None => get(instance, app, body, word, until).await,
        };
        if let Err(why) = said {
            tracing::warn!(site = %site.name, "after its wake it could not be told {word}: {why}");
        }
    }
}

async fn get(instance: &Instance, app: &App, body: &Body, path: &str, until: Instant) -> Result<(), String> {
    let asked = Asked::of(&instance.site(), &instance.tenant(), app).map_err(|fault| fault.to_string())?;
    let socket = body.connect().await.map_err(|error| error.to_string())?;
    let left = until.saturating_duration_since(Instant::now());
    match asked.get(socket, path, left).await {
        Ok(answer) if answer.status < 400 => Ok(()),
        Ok(answer) => Err(format!("it answered with {answer}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Those that a record may name.
fn signal_of(word: &str) -> Option<Signal> {
    match word {
        "SIGHUP" => Some(Signal::HUP),
        "SIGUSR1" => Some(Signal::USR1),
        "SIGUSR2" => Some(Signal::USR2),
        "SIGWINCH" => Some(Signal::WINCH),
        _ => None,
    }
}

/// To the first process of the application, which its sandbox knows by `ROOT_PID`.
fn send(leaf: &Leaf, signal: Signal) -> std::io::Result<()> {
    for pid in leaf.pids()? {
        // Opened before it is looked at: its number cannot become another's meanwhile.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if number_inside(pid) == Some(ROOT_PID) {
            return Ok(pidfd_send_signal(pidfd, signal)?);
        }
    }
    Err(std::io::ErrorKind::NotFound.into())
}

/// Its number in the innermost namespace (`NSpid`, proc_pid_status(5)).
fn number_inside(pid: Pid) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::record::AFTER_WAKE_SIGNALS;

    use super::*;

    #[test]
    fn each_signal_of_a_record_is_known() {
        for word in AFTER_WAKE_SIGNALS {
            assert!(signal_of(word).is_some(), "{word}");
        }
        assert_eq!(signal_of("/reload"), None);
    }
}

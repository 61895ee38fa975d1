//! Notices to an application that is back from an image, before it gets a request. They are
//! signals, and paths that nagaya requests with GET.
//!
//! A failure of either is logged, and the application is used all the same. Not here: when
//! (`start`).

use std::time::Duration;

use nagaya_records::record::App;
use rustix::process::Signal;
use tokio::time::Instant;

use crate::context::KeeperContext;
use crate::instances::run::internal_requests::InternalTarget;
use crate::instances::run::machine_state::send_first;
use crate::instances::run::processes::InstanceProcesses;
use crate::instances::state::instance::SiteInstance;

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
    for word in &app.after_wake {
        let said = match signal_of(word) {
            Some(signal) => {
                let leaf = std::sync::Arc::clone(processes.leaf());
                let sent = context.on_worker(move || Ok(send_first(&leaf, signal))).await;
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
        "SIGHUP" => Some(Signal::HUP),
        "SIGUSR1" => Some(Signal::USR1),
        "SIGUSR2" => Some(Signal::USR2),
        "SIGWINCH" => Some(Signal::WINCH),
        _ => None,
    }
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

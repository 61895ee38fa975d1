//! Ctrl-C and SIGTERM as a question that long work asks, so that every guard still runs and nothing is left.
//!
//! Not here: stopping the servers; the guards of `process` do that while the error travels up.

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, atomic::AtomicBool, atomic::Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static ASKED: AtomicBool = AtomicBool::new(false);
static WAKE: OnceLock<Mutex<Receiver<()>>> = OnceLock::new();

/// From here on the two signals no longer end the process.
pub fn install() -> Result<()> {
    let (sender, receiver) = channel();
    WAKE.get_or_init(|| Mutex::new(receiver));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("making a runtime for signals")?;
    let (mut interrupt, mut terminate) = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::interrupt()).context("handling SIGINT")?,
            signal(SignalKind::terminate()).context("handling SIGTERM")?,
        )
    };
    std::thread::spawn(move || {
        runtime.block_on(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            ASKED.store(true, Ordering::SeqCst);
            // A closed channel means that nobody waits any more.
            drop(sender);
            // The handlers stay in place, so that an impatient second Ctrl-C does not cut the cleaning short.
            std::future::pending::<()>().await;
        });
    });
    Ok(())
}

/// An error once somebody asked to stop.
pub fn check() -> Result<()> {
    if ASKED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    Ok(())
}

/// Waits at most so long; true as soon as somebody asks to stop.
pub fn wait(timeout: Duration) -> bool {
    let Some(receiver) = WAKE.get() else {
        std::thread::sleep(timeout);
        return false;
    };
    let receiver = receiver.lock().expect("no holder of this lock panics");
    !matches!(receiver.recv_timeout(timeout), Err(RecvTimeoutError::Timeout))
}

//! Ctrl-C and SIGTERM as a flag that long work checks, so that every guard still runs and nothing
//! is left.
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

/// Makes the two signals no longer end the process.
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
            // A closed channel means that nothing waits any more.
            drop(sender);
            // The handlers stay in place, so that an impatient second Ctrl-C does not interrupt the
            // clean-up.
            std::future::pending::<()>().await;
        });
    });
    Ok(())
}

/// Fails once an interrupt came.
pub fn check() -> Result<()> {
    if ASKED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    Ok(())
}

/// Waits at most this long; returns true as soon as an interrupt comes.
pub fn wait(timeout: Duration) -> bool {
    let Some(receiver) = WAKE.get() else {
        std::thread::sleep(timeout);
        return false;
    };
    let receiver = receiver.lock().expect("no holder of this lock panics");
    !matches!(receiver.recv_timeout(timeout), Err(RecvTimeoutError::Timeout))
}

//! The last holder of sandboxes' mount namespaces: one thread of the keeper's.
//!
//! The kernel takes a mount namespace apart in the process that lets go of it last. That process takes a lock of the whole
//! machine (`exp_mutex` of RCU, in `synchronize_rcu_expedited`), and keeps it until it gets a processor again. A process of a
//! tenant that is short of CPU time would keep it for seconds, and every start and end of every other sandbox would wait.
//! So the keeper holds each namespace, too, and lets go of it when the sandbox has ended.
//!
//! Invariant: a namespace is let go of after the last process of its sandbox has ended, by one thread, one at a time.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use super::channel;

/// Sandboxes that have been ended and may still have processes. More than so many let go of their namespaces themselves.
const ENDING_MAX: usize = 4096;

/// How long one sandbox' processes are waited for. The kernel may keep one that waits for a disk.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The descriptors of a sandbox' first process, which ends last, and of its mount namespace.
struct Ending {
    init: OwnedFd,
    mount_namespace: OwnedFd,
}

/// The way to the thread. It ends with the last clone of this.
#[derive(Debug, Clone, Default)]
pub struct Endings(Arc<OnceLock<Option<SyncSender<Ending>>>>);

impl Endings {
    /// Lets go of the namespace once the process has ended.
    pub fn release_later(&self, init: OwnedFd, mount_namespace: OwnedFd) {
        // Without a thread, for want of memory, the namespace goes now.
        let Some(sender) = self.0.get_or_init(start_thread) else { return };
        match sender.try_send(Ending { init, mount_namespace }) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                tracing::warn!("more than {ENDING_MAX} sandboxes end at once; starts may be slow meanwhile");
            }
        }
    }
}

fn start_thread() -> Option<SyncSender<Ending>> {
    let (sender, receiver) = sync_channel(ENDING_MAX);
    let thread = thread::Builder::new().name("nagaya-ending".into()).spawn(move || release_all(&receiver));
    match thread {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(%error, "no thread takes ended sandboxes apart; starts may be slow on a busy node");
            None
        }
    }
}

fn release_all(endings: &Receiver<Ending>) {
    for Ending { init, mount_namespace } in endings {
        // One that does not end in time lets go of its namespace itself.
        let _ = channel::wait_readable(&init, END_TIMEOUT);
        drop(mount_namespace);
    }
}

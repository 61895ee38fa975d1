//! The last holder of sandboxes' mount namespaces: one thread of the keeper's.
//!
//! The kernel takes a mount namespace apart in the process that releases it last. That process
//! takes a lock of the whole machine (`exp_mutex` of RCU, in `synchronize_rcu_expedited`), and
//! keeps it until it gets a CPU again. A process of a tenant that is short of CPU time would keep
//! it for seconds. Every start and end of every other sandbox would wait. So the keeper holds each
//! namespace, too, and releases it when the sandbox has ended.
//!
//! Invariant: one thread releases a namespace, one at a time, after the last process of its sandbox
//! has ended.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use super::channel;

/// Maximum number of ended sandboxes that may still have processes. Further ones release their
/// namespaces themselves.
const ENDING_MAX: usize = 4096;

/// Maximum wait for one sandbox' processes. The kernel may keep one that waits for a disk.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The descriptors of a sandbox' first process, which ends last, and of its mount namespace.
struct SandboxEnding {
    init: OwnedFd,
    mount_namespace: OwnedFd,
}

/// The queue of the thread, which ends with the last clone of this.
#[derive(Debug, Clone, Default)]
pub struct EndingQueue(Arc<OnceLock<Option<SyncSender<SandboxEnding>>>>);

impl EndingQueue {
    /// Releases the namespace once the process has ended.
    pub fn release_later(&self, init: OwnedFd, mount_namespace: OwnedFd) {
        // Without a thread, for lack of memory, the namespace goes now.
        let Some(sender) = self.0.get_or_init(start_thread) else { return };
        match sender.try_send(SandboxEnding { init, mount_namespace }) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                tracing::warn!("more than {ENDING_MAX} sandboxes end at once; starts may be slow meanwhile");
            }
        }
    }
}

fn start_thread() -> Option<SyncSender<SandboxEnding>> {
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

fn release_all(endings: &Receiver<SandboxEnding>) {
    for SandboxEnding { init, mount_namespace } in endings {
        // A sandbox that does not end in time releases its namespace itself.
        let _ = channel::wait_readable(&init, END_TIMEOUT);
        drop(mount_namespace);
    }
}

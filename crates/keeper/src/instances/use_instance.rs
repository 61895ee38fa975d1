//! Using the instance of a site: it is woken if need be, and kept awake as long as it is in use.
//!
//! Not here: who asks (`server`), what a wake is (`decide::lifecycle`, `run::driver`).

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;

use nagaya_keeper_api::limits::WAKE_MAX;
use nagaya_keeper_api::protocol::{FailureKind, InstanceId};
use nagaya_records::SiteName;
use nagaya_records::instance::WakeReport;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::fault::{self, Fault};
use crate::instances::decide::lifecycle::{LifecycleEvent, RunId, WaitError, WaiterId};
use crate::instances::lookup::instance_of;
use crate::instances::placed::{self, wait_until_placed};
use crate::instances::run::driver::dispatch;
use crate::instances::run::measured::note_first_answer;
use crate::instances::run::priority::end_priority;
use crate::instances::run::restarts::restart_if_touched;
use crate::instances::state::instance::{SiteInstance, WaitResult, parts};
use crate::instances::state::shared::NodeInstances;

/// Number of further tries after an instance ended between its reply and the connection.
const TRIES_MAX: u32 = 3;

/// One use of a running instance, until it is dropped.
pub struct RunRef {
    instances: Rc<NodeInstances>,
    instance: Rc<SiteInstance>,
    run: RunId,
}

/// An instance that can answer now.
pub struct ReadyInstance {
    pub id: InstanceId,
    pub socket: OwnedFd,
    /// How long it waits for databases. `None` if it reaches neither databases nor any place
    /// outside.
    pub tally: Option<OwnedFd>,
    /// Report of the wake that was waited for. `None` if the instance ran.
    pub wake: Option<WakeReport>,
    pub instance_ref: RunRef,
}

/// One who waits for an instance; dropping it before the answer takes the wait back.
struct InstanceWaiter {
    instances: Rc<NodeInstances>,
    instance: Rc<SiteInstance>,
    waiter: WaiterId,
    answer: oneshot::Receiver<WaitResult>,
    is_done: bool,
}

/// Wakes the site's instance if needed, and connects to it. In a cluster it must be placed
/// here, under this epoch or a later one.
pub async fn use_site(
    instances: &Rc<NodeInstances>,
    name: &SiteName,
    epoch: Option<u64>,
) -> Result<ReadyInstance, Fault> {
    wait_until_placed(instances, name, epoch).await?;
    let mut tries = 1;
    loop {
        match try_use(instances, name).await {
            Err(UseError::Ended) if tries < TRIES_MAX => tries += 1,
            Err(UseError::Ended) => {
                let message =
                    format!("the application of '{name}' ends as soon as it runs; its log says why");
                return Err(Fault::new(FailureKind::Broken, fault::APP, message));
            }
            Err(UseError::Fault(fault)) => return Err(fault),
            Ok(using) => return Ok(using),
        }
    }
}

async fn try_use(instances: &Rc<NodeInstances>, name: &SiteName) -> Result<ReadyInstance, UseError> {
    let instance = instance_of(instances, name)?;
    restart_if_touched(instances, &instance).await;
    let asked = Instant::now();
    let was_awake = instance.is_awake();
    let mut waiter = InstanceWaiter::new(instances, &instance);
    let predicted = predicted_us(instances, &instance, asked);
    let answered = timeout(WAKE_MAX, &mut waiter.answer).await;
    let run = match answered {
        Ok(Ok(Ok(run))) => run,
        Ok(Ok(Err(refusal))) => {
            waiter.is_done = true;
            return Err(fault_of(&instance, refusal).into());
        }
        // The sender goes only with the instance.
        Ok(Err(_)) => return Err(fault_of(&instance, WaitError::Gone).into()),
        Err(_) => {
            let message = format!("the application of '{name}' did not come to its turn in {WAKE_MAX:?}");
            return Err(Fault::new(FailureKind::Busy, fault::LIMIT, message).into());
        }
    };
    let instance_ref = waiter.into_ref(run);
    let processes = instance.processes_of(run).ok_or(UseError::Ended)?;
    let answered = Instant::now();
    let socket = match processes.connect().await {
        Ok(socket) => socket,
        Err(_) if instance.is_about_gone(run).await => return Err(UseError::Ended),
        Err(error) => {
            let message = format!("the application of '{name}' does not take a connection: {error}");
            return Err(Fault::new(FailureKind::Broken, fault::APP, message).into());
        }
    };
    let wake = (!was_awake).then(|| instance.wake_of(asked, answered)).flatten();
    let wake = wake.map(|wake| WakeReport { predicted_us: predicted, ..wake });
    Ok(ReadyInstance { id: instance.id(run), socket, tally: processes.tally(), wake, instance_ref })
}

/// Predicts the time until its turn to wake, microseconds. `None` if it does not wait for that.
fn predicted_us(instances: &NodeInstances, instance: &SiteInstance, now: Instant) -> Option<u64> {
    let wait =
        instance.life.borrow().is_queued().then(|| instances.wakes.borrow().predicted(instance.key, now));
    wait.map(|wait| u64::try_from(wait.as_micros()).unwrap_or(u64::MAX))
}

/// Makes one more connection to a run in use.
pub async fn connect(instances: &NodeInstances, id: InstanceId) -> Result<OwnedFd, Fault> {
    let (key, run) = parts(id);
    let ended = || Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("instance {} has ended", id.0));
    let instance = instances.table.get(key).ok_or_else(ended)?;
    let processes = instance.processes_of(run).ok_or_else(ended)?;
    match processes.connect().await {
        Ok(socket) => Ok(socket),
        Err(_) if instance.is_about_gone(run).await => Err(ended()),
        Err(error) => {
            let name = &instance.site().name;
            let message = format!("the application of '{name}' does not take a connection: {error}");
            Err(Fault::new(FailureKind::Broken, fault::APP, message))
        }
    }
}

/// The first answer since the wake of this run has begun.
pub fn note_answered(instances: &Rc<NodeInstances>, id: InstanceId) {
    let (key, run) = parts(id);
    let instance = instances.table.get(key);
    let Some(instance) = instance.filter(|instance| instance.processes_of(run).is_some()) else { return };
    let now = Instant::now();
    end_priority(instances, &instance, now);
    if let Some(event) = note_first_answer(instances, &instance, now) {
        dispatch(instances, &instance, event);
    }
}

/// Why an instance was not used.
enum UseError {
    Fault(Fault),
    /// It ended between its answer and the connection.
    Ended,
}

impl From<Fault> for UseError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

fn fault_of(instance: &SiteInstance, refusal: WaitError) -> Fault {
    let name = &instance.site().name;
    let busy = |code, why: String| Fault::new(FailureKind::Busy, code, why);
    match refusal {
        WaitError::Failed => {
            let unknown = || busy(fault::APP, format!("the application of '{name}' was not started"));
            instance.fault().unwrap_or_else(unknown)
        }
        WaitError::Backoff { failures, left } => {
            let message = format!(
                "the application of '{name}' failed {failures} times and is started again in {:.1} s; its log says why",
                left.as_secs_f32()
            );
            busy(fault::APP_BACKOFF, message)
        }
        WaitError::Full => busy(
            fault::LIMIT,
            format!("too many requests wait for the application of '{name}', or for its turn"),
        ),
        WaitError::Fenced => placed::fenced(name),
        WaitError::Elsewhere => placed::elsewhere(name),
        WaitError::Stopped => {
            busy(fault::APP, format!("the application of '{name}' was ended by its operator"))
        }
        WaitError::Gone => {
            Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("site '{name}' was removed"))
        }
    }
}

impl InstanceWaiter {
    fn new(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) -> Self {
        let (waiter, answer) = instance.waiters.add();
        let waiting = Self {
            instances: Rc::clone(instances),
            instance: Rc::clone(instance),
            waiter,
            answer,
            is_done: false,
        };
        dispatch(instances, instance, LifecycleEvent::Acquire(waiter));
        waiting
    }

    /// Keeps the instance awake from now on.
    fn into_ref(mut self, run: RunId) -> RunRef {
        self.is_done = true;
        RunRef { instances: Rc::clone(&self.instances), instance: Rc::clone(&self.instance), run }
    }
}

impl Drop for InstanceWaiter {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let event = match self.answer.try_recv() {
            // It was answered, and nobody took the answer.
            Ok(Ok(run)) => LifecycleEvent::Release(run),
            Ok(Err(_)) => return,
            Err(_) => {
                self.instance.waiters.remove(self.waiter);
                LifecycleEvent::Cancel(self.waiter)
            }
        };
        dispatch(&self.instances, &self.instance, event);
    }
}

impl Drop for RunRef {
    fn drop(&mut self) {
        self.instance.drains.leave(self.run);
        dispatch(&self.instances, &self.instance, LifecycleEvent::Release(self.run));
    }
}

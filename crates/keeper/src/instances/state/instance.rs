//! One site's instance: its record, its life, its present run, and what is known of it.
//!
//! Invariant: its lifecycle changes by `run::driver` alone. Not here: what all instances of the
//! node share (`shared`), what is to be done with it (`decide`), doing it (`run`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::InstanceId;
use nagaya_records::instance::{Tier, WakeReport, WakeStage};
use nagaya_records::{Backend, Site, Tenant};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;

use crate::bases::UnpackedBase;
use crate::cells::Leaf;
use crate::fault::Fault;
use crate::image::{Image, ImageSubject};
use crate::instances::decide::boosts::BoostSlot;
use crate::instances::decide::lifecycle::{Lifecycle, RunId, WaitError, WaiterId};
use crate::instances::decide::stop_mode::EndRequest;
use crate::instances::decide::wake_queue::InstanceKey;
use crate::instances::decide::work_meter::WorkMeter;
use crate::instances::run::processes::InstanceProcesses;
use crate::instances::state::command_count::CommandCount;
use crate::instances::state::drain_slot::DrainSlot;
use crate::instances::state::wake_stats::WakeStats;
use crate::log::SiteLog;
use crate::sandbox::Sandbox;

/// Maximum delay, on a busy node, until the keeper learns of the end of a process.
const NOTICE_MAX: Duration = Duration::from_millis(500);

/// One site's instance.
pub struct SiteInstance {
    pub key: InstanceKey,
    record: RefCell<InstanceRecord>,
    pub life: RefCell<Lifecycle>,
    pub waiters: InstanceWaiters,
    run: RefCell<PresentRun>,
    /// The previous run, while it lets its requests finish.
    pub drains: DrainSlot,
    pub image: RefCell<ImageInfo>,
    pub wake: WakeStats,
    /// Boosts of requests of the present run, and the part of them that its site's cell has.
    pub boosts: BoostSlot,
    /// Measures its CPU use while nobody uses it.
    pub work: WorkMeter,
    pub status: RefCell<InstanceStatus>,
    /// Number of commands that run beside it.
    pub commands: CommandCount,
    /// Notified on any change of it.
    pub changed: Notify,
}

/// For whom it runs.
struct InstanceRecord {
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    /// Replaced when its site goes to another tenant.
    journal: Rc<SiteLog>,
    /// Set if it is given up: the epoch under which it does not run here again.
    released: Option<Option<u64>>,
}

/// Those who wait for it, and where their answers go.
#[derive(Default)]
pub struct InstanceWaiters {
    waiting: RefCell<HashMap<WaiterId, oneshot::Sender<WaitResult>>>,
    next: Cell<u64>,
}

/// The answer to one who waits.
pub type WaitResult = Result<RunId, WaitError>;

impl InstanceWaiters {
    /// One more waits.
    pub fn add(&self) -> (WaiterId, oneshot::Receiver<WaitResult>) {
        let waiter = WaiterId(self.next.replace(self.next.get() + 1));
        let (sender, answer) = oneshot::channel();
        self.waiting.borrow_mut().insert(waiter, sender);
        (waiter, answer)
    }

    /// It waits no more. Returns where its answer goes, if it has none yet.
    pub fn remove(&self, waiter: WaiterId) -> Option<oneshot::Sender<WaitResult>> {
        self.waiting.borrow_mut().remove(&waiter)
    }
}

struct PresentRun {
    /// `None` until it can answer, and after its end.
    processes: Option<Rc<InstanceProcesses>>,
    /// Sandbox of the present run, while it cannot answer yet.
    coming: Option<Arc<Sandbox>>,
    /// Tells the run's task that its end is wanted.
    end_wanted: watch::Sender<EndRequest>,
}

/// State of its image.
#[derive(Default)]
pub struct ImageInfo {
    /// The image that was last taken of it or last restored.
    pub image: Option<Image>,
    /// Its base, if that is an unpacked image of a layout: it stays on disk while the instance
    /// rests.
    pub base: Option<Arc<UnpackedBase>>,
    /// Subject of the last image that could not be taken.
    pub refused: Option<ImageSubject>,
    /// When the last image was taken whose restoration answered a request. Seconds since 1970.
    pub verified_at: Option<u64>,
    /// Why it has no image.
    pub no_image: Option<String>,
    /// Why its last image was not used, though it was whole.
    pub image_end: Option<String>,
}

/// Status of an instance for operators.
pub struct InstanceStatus {
    /// Its tier when last checked, and since when.
    pub tier: (Tier, Instant),
    pub fault: Option<Fault>,
    /// Why it last ended by itself, or was killed because it did not end, and when.
    pub last_end: Option<(String, Instant)>,
    /// Why it does not rest as deep as it should.
    pub note: Option<String>,
}

/// Splits an id into instance and run.
pub fn parts(id: InstanceId) -> (InstanceKey, RunId) {
    let low = |number: u64| u32::try_from(number & u64::from(u32::MAX)).expect("masked to 32 bits");
    (low(id.0 >> 32), RunId(low(id.0)))
}

impl SiteInstance {
    /// One that has never run.
    pub fn new(
        key: InstanceKey,
        (site, tenant): (Arc<Site>, Arc<Tenant>),
        journal: Rc<SiteLog>,
        life: Lifecycle,
    ) -> Self {
        let tier = (life.tier(), Instant::now());
        Self {
            key,
            record: RefCell::new(InstanceRecord { site, tenant, journal, released: None }),
            life: RefCell::new(life),
            waiters: InstanceWaiters::default(),
            run: RefCell::new(PresentRun {
                processes: None,
                coming: None,
                end_wanted: watch::Sender::new(None),
            }),
            drains: DrainSlot::default(),
            image: RefCell::default(),
            wake: WakeStats::default(),
            boosts: BoostSlot::default(),
            work: WorkMeter::default(),
            status: RefCell::new(InstanceStatus { tier, fault: None, last_end: None, note: None }),
            commands: CommandCount::default(),
            changed: Notify::new(),
        }
    }

    // === Its record ===

    pub fn site(&self) -> Arc<Site> {
        Arc::clone(&self.record.borrow().site)
    }

    pub fn tenant(&self) -> Arc<Tenant> {
        Arc::clone(&self.record.borrow().tenant)
    }

    pub fn journal(&self) -> Rc<SiteLog> {
        Rc::clone(&self.record.borrow().journal)
    }

    pub fn set_record(&self, site: Arc<Site>, tenant: Arc<Tenant>) {
        let mut record = self.record.borrow_mut();
        (record.site, record.tenant) = (site, tenant);
    }

    pub fn set_journal(&self, journal: Rc<SiteLog>) {
        self.record.borrow_mut().journal = journal;
    }

    /// `Some` if it is given up, with the epoch under which it does not run here again.
    pub fn released(&self) -> Option<Option<u64>> {
        self.record.borrow().released
    }

    pub fn set_released(&self, epoch: Option<Option<u64>>) {
        self.record.borrow_mut().released = epoch;
    }

    // === Its present run ===

    pub fn id(&self, run: RunId) -> InstanceId {
        InstanceId(u64::from(self.key) << 32 | u64::from(run.0))
    }

    pub fn is_awake(&self) -> bool {
        let life = self.life.borrow();
        life.tier() == Tier::Running && life.doing().is_none()
    }

    /// It is at this tier, and nothing is being done to it.
    pub fn is_at(&self, tier: Tier) -> bool {
        let life = self.life.borrow();
        life.tier() == tier && life.doing().is_none()
    }

    /// The processes of the present run. `None` until it can answer.
    pub fn processes(&self) -> Option<Rc<InstanceProcesses>> {
        self.run.borrow().processes.clone()
    }

    /// Returns the processes of this run, if it is still the present one and can answer.
    pub fn processes_of(&self, run: RunId) -> Option<Rc<InstanceProcesses>> {
        if self.life.borrow().run() == run { self.processes() } else { None }
    }

    pub fn set_processes(&self, processes: Rc<InstanceProcesses>) {
        self.run.borrow_mut().processes = Some(processes);
    }

    pub fn take_processes(&self) -> Option<Rc<InstanceProcesses>> {
        self.run.borrow_mut().processes.take()
    }

    /// Whether these are the processes of the present run.
    pub fn has_processes(&self, processes: &Rc<InstanceProcesses>) -> bool {
        self.processes().is_some_and(|present| Rc::ptr_eq(&present, processes))
    }

    /// The cell of the present run.
    pub fn leaf(&self) -> Option<Arc<Leaf>> {
        self.processes().map(|processes| Arc::clone(processes.leaf()))
    }

    /// The sandbox of a run that cannot answer yet.
    pub fn coming(&self) -> Option<Arc<Sandbox>> {
        self.run.borrow().coming.clone()
    }

    pub fn set_coming(&self, sandbox: Option<Arc<Sandbox>>) {
        let before = std::mem::replace(&mut self.run.borrow_mut().coming, sandbox);
        drop(before);
    }

    /// Tells the run's task that its end is wanted.
    pub fn want_end(&self, wanted: EndRequest) {
        self.run.borrow().end_wanted.send_replace(wanted);
    }

    pub fn replace_end_wanted(&self, end_wanted: watch::Sender<EndRequest>) -> watch::Sender<EndRequest> {
        std::mem::replace(&mut self.run.borrow_mut().end_wanted, end_wanted)
    }

    pub fn follow_stop(&self) {
        if let (Some(processes), Backend::App(app)) = (self.processes(), &self.site().backend) {
            processes.set_stop(app);
        }
    }

    /// Returns whether this run has ended, or does so at once: its sockets go before the keeper
    /// learns of its end.
    pub async fn is_about_gone(&self, run: RunId) -> bool {
        let gone = async {
            loop {
                let changed = self.changed.notified();
                if self.processes_of(run).is_none() {
                    return;
                }
                changed.await;
            }
        };
        timeout(NOTICE_MAX, gone).await.is_ok()
    }

    /// Returns once it has no process, and no operation is under way.
    pub async fn wait_until_gone(&self) {
        loop {
            let changed = self.changed.notified();
            let is_gone = {
                let life = self.life.borrow();
                !life.tier().has_process() && life.doing().is_none()
            };
            if is_gone {
                return;
            }
            changed.await;
        }
    }

    // === What is known of it ===

    /// Notes that the restore of this image has answered a request.
    pub fn mark_verified(&self, image: &Image) {
        let mut known = self.image.borrow_mut();
        known.verified_at = Some(image.taken_at());
        known.image = Some(image.clone());
    }

    pub fn is_verified(&self, image: &Image) -> bool {
        self.image.borrow().verified_at == Some(image.taken_at())
    }

    /// Forgets troubles with another record: they say nothing about this one.
    pub fn forget_troubles(&self) {
        {
            let mut status = self.status.borrow_mut();
            (status.fault, status.note) = (None, None);
        }
        let mut known = self.image.borrow_mut();
        (known.no_image, known.image_end, known.refused) = (None, None, None);
    }

    pub fn set_note(&self, note: Option<String>) {
        self.status.borrow_mut().note = note;
    }

    pub fn set_fault(&self, fault: Option<Fault>) {
        self.status.borrow_mut().fault = fault;
    }

    pub fn fault(&self) -> Option<Fault> {
        self.status.borrow().fault.clone()
    }

    pub fn set_last_end(&self, why: String) {
        self.status.borrow_mut().last_end = Some((why, Instant::now()));
    }

    /// A stage of the wake under way begins.
    pub fn mark(&self, stage: WakeStage, since: Instant) {
        self.wake.mark(stage, since);
    }

    /// Returns the wake that a caller since `asked` has waited for, including the connection.
    pub fn wake_of(&self, asked: Instant, answered: Instant) -> Option<WakeReport> {
        let mut wake = self.wake.timeline()?.wake(asked, answered);
        let connected = u64::try_from(answered.elapsed().as_micros()).unwrap_or(u64::MAX);
        wake.stages.push((WakeStage::Connect, connected));
        Some(wake)
    }
}

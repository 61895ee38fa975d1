//! All tasks of a node that is a member of a cluster. Each is made here and gets its parts here.
//!
//! Not here: the tasks themselves, becoming a member (`commands`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use nagaya_records::NodeRecord;
use nagaya_store::ClusterStore;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local};

use super::app_load::AppLoadSampler;
use super::clock::now;
use super::context::ClusterContext;
use super::delegated::DelegatedTasks;
use super::events::EventLog;
use super::image_fetcher::ImageFetcher;
use super::lease_manager::LeaseManager;
use super::lease_renewer::LeaseRenewer;
use super::lease_state::LeaseState;
use super::load_publisher::LoadPublisher;
use super::member::{ClusterMember, CurrentMember};
use super::member_keys::MemberKeys;
use super::member_listing::MemberListing;
use super::mover::SiteMover;
use super::node_chooser::NodeChooser;
use super::node_watcher::NodeWatcher;
use super::placement_counter::PlacementCounter;
use super::placement_counts::PlacementCounts;
use super::record_signer::RecordSigner;
use super::relocator::SiteRelocator;
use super::replicas::ReplicaManager;
use super::report::ClusterReport;
use super::takeover_terms::TakeoverTerms;
use super::task_runner::TaskRunner;
use super::ticket_keys::TicketKeyMaker;
use super::tombstones::TombstoneCleaner;
use super::view::ClusterView;
use super::wanted_images::SiteChanges;
use crate::etcd_access::etcd_options;

/// Changed sites as the store's thread reports them, for two tasks.
#[derive(Clone, Default)]
pub struct ChangedSites {
    pub for_images: Arc<SiteChanges>,
    pub for_tombstones: Arc<SiteChanges>,
}

/// The tasks of a member that others call. Dropping it ends all tasks.
pub struct MemberTasks {
    pub view: Rc<ClusterView>,
    pub keys: Rc<MemberKeys>,
    pub signer: Rc<RecordSigner>,
    pub lease: Rc<LeaseRenewer>,
    pub terms: Rc<TakeoverTerms>,
    pub relocator: Rc<SiteRelocator>,
    pub mover: Rc<SiteMover>,
    pub replicas: Rc<ReplicaManager>,
    pub report: ClusterReport,
    running: Vec<AbortHandle>,
}

/// Parts that the tasks share, each made from those before it.
struct SharedParts {
    view: Rc<ClusterView>,
    counts: Rc<PlacementCounts>,
    lease: Rc<LeaseState>,
    events: Rc<EventLog>,
    terms: Rc<TakeoverTerms>,
    images: Rc<ImageFetcher>,
    chooser: Rc<NodeChooser>,
    delegated: Rc<DelegatedTasks>,
    relocator: Rc<SiteRelocator>,
    mover: Rc<SiteMover>,
    replicas: Rc<ReplicaManager>,
    keys: Rc<MemberKeys>,
}

impl SharedParts {
    fn new(
        context: Rc<ClusterContext>,
        member: ClusterMember,
        store: Arc<ClusterStore>,
        for_images: Arc<SiteChanges>,
    ) -> Self {
        let manager = LeaseManager::new(now(), member.node.clone(), context.fence());
        let lease = Rc::new(LeaseState::new(manager));
        let member = Rc::new(CurrentMember::new(member));
        let counts = Rc::new(PlacementCounts::default());
        let view =
            ClusterView::new(context, store, Rc::clone(&member), Rc::clone(&counts), Rc::clone(&lease));
        let view = Rc::new(view);
        let events = Rc::new(EventLog::default());
        let terms = Rc::new(TakeoverTerms::new(Rc::clone(&view), Rc::clone(&lease)));
        let images = Rc::new(ImageFetcher::new(Rc::clone(&view), for_images));
        let chooser = Rc::new(NodeChooser::new(Rc::clone(&view), Rc::clone(&images)));
        let delegated = Rc::new(DelegatedTasks::new(Rc::clone(&view)));
        let relocator =
            SiteRelocator::new(Rc::clone(&view), Rc::clone(&chooser), Rc::clone(&terms), Rc::clone(&events));
        let relocator = Rc::new(relocator);
        let mover = Rc::new(SiteMover {
            view: Rc::clone(&view),
            chooser: Rc::clone(&chooser),
            terms: Rc::clone(&terms),
            events: Rc::clone(&events),
            delegated: Rc::clone(&delegated),
        });
        let replicas = Rc::new(ReplicaManager {
            view: Rc::clone(&view),
            terms: Rc::clone(&terms),
            relocator: Rc::clone(&relocator),
            mover: Rc::clone(&mover),
            images: Rc::clone(&images),
            shifting: RefCell::default(),
        });
        let keys = Rc::new(MemberKeys::new(Rc::clone(&view), member));
        Self {
            view,
            counts,
            lease,
            events,
            terms,
            images,
            chooser,
            delegated,
            relocator,
            mover,
            replicas,
            keys,
        }
    }

    fn start(
        &self,
        record: NodeRecord,
        listed: Rc<Notify>,
        changed: Arc<SiteChanges>,
        lease: &Rc<LeaseRenewer>,
        signer: &Rc<RecordSigner>,
    ) -> Vec<AbortHandle> {
        let view = || Rc::clone(&self.view);
        let app_load = Rc::new(AppLoadSampler::new(view()));
        let publisher = LoadPublisher {
            view: view(),
            keys: Rc::clone(&self.keys),
            app_load: Rc::clone(&app_load),
            images: Rc::clone(&self.images),
            delegated: Rc::clone(&self.delegated),
        };
        let counter = PlacementCounter {
            view: view(),
            counts: Rc::clone(&self.counts),
            replicas: Rc::clone(&self.replicas),
        };
        let runner = Rc::new(TaskRunner {
            view: view(),
            delegated: Rc::clone(&self.delegated),
            mover: Rc::clone(&self.mover),
            images: Rc::clone(&self.images),
        });
        let tombstones = TombstoneCleaner { view: view(), terms: Rc::clone(&self.terms), changed };
        let watcher = NodeWatcher { view: view(), events: Rc::clone(&self.events) };
        let running = [
            spawn_local(Rc::clone(lease).run()),
            spawn_local(MemberListing { view: view(), record, listed }.run()),
            spawn_local(publisher.run()),
            spawn_local(Rc::clone(&self.keys).run()),
            spawn_local(counter.run()),
            spawn_local(Rc::clone(&self.relocator).run()),
            spawn_local(Rc::clone(&self.mover).run()),
            spawn_local(Rc::clone(&self.images).run()),
            spawn_local(app_load.run()),
            spawn_local(watcher.run()),
            spawn_local(tombstones.run()),
            spawn_local(runner.run()),
            spawn_local(TicketKeyMaker { view: view() }.run()),
            spawn_local(Rc::clone(signer).run()),
        ];
        running.iter().map(tokio::task::JoinHandle::abort_handle).collect()
    }
}

impl MemberTasks {
    /// Starts all tasks of a member.
    pub fn begin(
        context: Rc<ClusterContext>,
        member: ClusterMember,
        record: NodeRecord,
        store: Arc<ClusterStore>,
        changed: ChangedSites,
    ) -> Rc<Self> {
        let options = etcd_options(&member.cluster, &member.etcd);
        let parts = SharedParts::new(context, member, store, changed.for_images);
        let view = || Rc::clone(&parts.view);
        let listed = Rc::new(Notify::new());
        let lease = Rc::new(LeaseRenewer {
            view: view(),
            lease: Rc::clone(&parts.lease),
            terms: Rc::clone(&parts.terms),
            events: Rc::clone(&parts.events),
            listed: Rc::clone(&listed),
            introducing: Cell::new(false),
        });
        let signer = Rc::new(RecordSigner { view: view(), keys: Rc::clone(&parts.keys) });
        let running = parts.start(record, listed, changed.for_tombstones, &lease, &signer);
        let report = ClusterReport {
            view: view(),
            images: Rc::clone(&parts.images),
            chooser: Rc::clone(&parts.chooser),
            events: Rc::clone(&parts.events),
            options,
        };
        let SharedParts { view, keys, terms, relocator, mover, replicas, .. } = parts;
        Rc::new(Self { view, keys, signer, lease, terms, relocator, mover, replicas, report, running })
    }

    /// Ends the tasks: they hold what they share, too.
    pub fn end(&self) {
        self.running.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for MemberTasks {
    fn drop(&mut self) {
        self.end();
    }
}

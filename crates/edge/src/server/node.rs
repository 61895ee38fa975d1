//! Holds the state of one thread of the edge: its caches, pools and connections. It also holds
//! the thread's view of the state of all threads.
//!
//! Single-threaded by construction: nothing here is locked. Not here: the thread itself
//! (`server::thread`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use nagaya_base::RequestId;
use nagaya_keeper_api::client::KeeperClient;

use crate::admission::gate::Gate;
use crate::backends::backend_set::Backends;
use crate::backends::files::FileServer;
use crate::backends::instances::InstanceTable;
use crate::backends::programs::ProgramRunner;
use crate::backends::upstream::pool::UpstreamPool;
use crate::cluster::peers::pool::PeerPool as Peers;
use crate::http::clients::limits::ClientLimits;
use crate::http::connections::{ConnectionGuard, OpenConnections};
use crate::http::handler::ConnectionHost;
use crate::http::message::{ConnInfo, Request, Response};
use crate::http::peer_fields;
use crate::http::proxy_headers::ForwardingRules;
use crate::http::refusal::Refusal;
use crate::loop_ticks::LoopTicks;
use crate::options::{EdgeLimits, ThreadLimits};
use crate::record::recorder::RequestRecorder;
use crate::request;
use crate::request::context::RequestContext;
use crate::request::placement::placer::Placer;
use crate::request::router::Router;
use crate::request::services::Services;
use crate::rules::ThreadRules;
use crate::server::shared::SharedContext;
use crate::shaping::limits::Shaper;

/// One thread's parts.
pub struct ThreadContext {
    pub shared: Arc<SharedContext>,
    pub services: Services,
    pub connections: Rc<OpenConnections>,
    pub turns: Rc<LoopTicks>,
    pub keeper: Rc<KeeperClient>,
    /// This thread's last contribution to the gauge of all threads.
    cached_bytes: Cell<i64>,
    ids: RequestIds,
}

impl ThreadContext {
    pub fn new(shared: Arc<SharedContext>, keeper: Rc<KeeperClient>) -> Self {
        let options = shared.options.get();
        let turns = Rc::<LoopTicks>::default();
        let forwarding = Rc::new(ForwardingRules::new(&options));
        let limits = Rc::new(ThreadLimits::new(&options));
        let services = Services {
            clients: Rc::new(ClientLimits::new(
                Arc::clone(&shared.networks),
                Arc::clone(&shared.metrics),
                &options,
            )),
            router: Router::new(
                Arc::clone(&shared.table),
                Arc::clone(&shared.lanes),
                Arc::clone(&shared.options),
            ),
            placer: Placer {
                cluster: Arc::clone(&shared.cluster),
                peers: Rc::new(Peers::new(Arc::clone(&shared.cluster))),
                metrics: Arc::clone(&shared.metrics),
                options: Arc::clone(&shared.options),
                limits: Rc::clone(&limits),
            },
            rules: ThreadRules::new(
                &shared.rules,
                Rc::clone(&keeper),
                Rc::clone(&forwarding),
                Rc::clone(&turns),
            ),
            gate: Gate {
                lanes: Arc::clone(&shared.lanes),
                tickets: Arc::clone(&shared.tickets),
                cluster: Arc::clone(&shared.cluster),
                forwarding: Rc::clone(&forwarding),
                options: Arc::clone(&shared.options),
            },
            shaper: Shaper::new(Arc::clone(&shared.ledger)),
            spool: Arc::clone(&shared.spool),
            backends: backends(&shared, &keeper, &turns, &forwarding, &limits),
            recorder: RefCell::new(recorder(&shared)),
            forwarding,
            limits,
        };
        Self {
            services,
            connections: Rc::default(),
            turns,
            keeper,
            cached_bytes: Cell::new(0),
            ids: RequestIds::new(),
            shared,
        }
    }

    /// Takes over the present shared settings.
    pub fn refresh(&self) {
        let options = self.shared.options.get();
        let services = &self.services;
        services.limits.set_options(&options);
        services.forwarding.set_options(&options);
        services.clients.set_options(&options);
        services.backends.programs.set_options(&options);
        services.rules.refresh();
        services.set_recorder(recorder(&self.shared));
    }

    pub fn limits(&self) -> Rc<EdgeLimits> {
        self.services.limits.get()
    }

    /// Does periodic work: closes idle connections, writes lines of the log.
    pub fn tend(&self) {
        let backends = &self.services.backends;
        let files = &backends.files;
        let (hits, misses, bytes) = files.take_counts();
        let metrics = &self.shared.metrics;
        metrics.file_cache(hits, misses);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        metrics.file_cache_bytes.add(bytes - self.cached_bytes.replace(bytes));
        let (memory, disk) = self.shared.spool.usage();
        metrics.spool_memory_bytes.set(i64::try_from(memory).unwrap_or(i64::MAX));
        metrics.spool_disk_bytes.set(i64::try_from(disk).unwrap_or(i64::MAX));
        backends.upstream.sweep();
        self.services.placer.peers.sweep();
        files.drop_idle(std::time::Instant::now());
        if let Some(log) = &self.services.recorder().log {
            log.flush();
        }
    }
}

fn recorder(shared: &SharedContext) -> Rc<RequestRecorder> {
    RequestRecorder::new(&shared.options.get(), shared.log().as_ref(), &shared.metrics, &shared.receipts)
}

fn backends(
    shared: &SharedContext,
    keeper: &Rc<KeeperClient>,
    turns: &Rc<LoopTicks>,
    forwarding: &Rc<ForwardingRules>,
    limits: &Rc<ThreadLimits>,
) -> Backends {
    let options = shared.options.get();
    let upstream = Rc::new(UpstreamPool::new(Arc::clone(&shared.metrics)));
    Backends {
        files: FileServer::new(
            options.limits.file_cache_bytes,
            Rc::clone(turns),
            Arc::clone(&shared.blocking),
            Rc::<KeeperClient>::clone(keeper),
        ),
        programs: ProgramRunner::new(
            Rc::clone(keeper),
            Arc::clone(&shared.php),
            Arc::clone(&shared.ledger),
            &options,
            Arc::clone(&shared.metrics),
        ),
        instances: InstanceTable::new(
            Rc::clone(keeper),
            Rc::clone(&upstream),
            Arc::clone(&shared.metrics),
            Arc::clone(&shared.needs),
        ),
        upstream,
        forwarding: Rc::clone(forwarding),
        keeper: Rc::clone(keeper),
        limits: Rc::clone(limits),
        cluster: Arc::clone(&shared.cluster),
    }
}

impl ConnectionHost for ThreadContext {
    fn limits(&self) -> Rc<EdgeLimits> {
        Self::limits(self)
    }

    fn request_id(&self) -> RequestId {
        self.ids.next()
    }

    fn serve(&self, mut request: Request) -> impl Future<Output = Response> {
        // A client must not send fields between nodes.
        if self.shared.cluster.is_member() && request.head.conn.carried.is_none() {
            peer_fields::strip(&mut request.head.headers);
        }
        request::serve(&self.services, request)
    }

    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response {
        let mut context = RequestContext::without_request(self.services.recorder(), id, conn);
        context.refused(&refusal, &refusal.row());
        context.answer(refusal.into_response(id))
    }

    fn measures(&self) -> bool {
        self.services.measures()
    }

    fn enter(&self) -> ConnectionGuard {
        self.connections.enter()
    }
}

/// Source of request ids. They are unique over all nodes, and one does not reveal another.
struct RequestIds {
    state: Cell<u128>,
    key: u128,
}

impl RequestIds {
    fn new() -> Self {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).expect("the kernel gives random bytes once it has booted");
        let (state, key) = seed.split_at(16);
        let number = |bytes: &[u8]| u128::from_le_bytes(bytes.try_into().expect("half of 32 bytes"));
        Self { state: Cell::new(number(state)), key: number(key) }
    }

    fn next(&self) -> RequestId {
        let state = self.state.get().wrapping_add(1);
        self.state.set(state);
        // A bijection, so no id appears twice in one run. The constant is 2^128 over the golden
        // ratio.
        let mixed = (state ^ self.key).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        RequestId(mixed ^ (mixed >> 64))
    }
}

#[cfg(test)]
mod tests {
    use super::RequestIds;
    use std::collections::HashSet;

    #[test]
    fn ids_do_not_repeat() {
        let ids = RequestIds::new();
        let seen: HashSet<_> = (0..10_000).map(|_| ids.next()).collect();
        assert_eq!(seen.len(), 10_000);
    }
}

//! What one thread of the edge has: its caches, pools and connections, and its view of what all threads share.
//!
//! Single-threaded by construction: nothing here is locked. Not here: the thread itself (`listen`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use nagaya_base::RequestId;
use nagaya_cmdb::Site;
use nagaya_keeper::client::{ClientError, Keeper};

use crate::account::{Account, Recorder};
use crate::clients::ClientLimits;
use crate::drain::{Connections, Entered};
use crate::files::{FileServer, Root};
use crate::forward::Forwarding;
use crate::http1::connection::Host;
use crate::instances::Instances;
use crate::message::{ConnInfo, Request, Response};
use crate::options::Limits;
use crate::pace::Plans;
use crate::peers::{Pool as Peers, fields};
use crate::programs::Programs;
use crate::refusal::Refusal;
use crate::request;
use crate::route::Router;
use crate::rules::Rules;
use crate::shared::Shared;
use crate::turns::Turns;
use crate::upstream::{Address, Connector, Pool, Socket, dial, watch_socket};

pub struct Node {
    pub shared: Arc<Shared>,
    pub router: Router,
    pub files: FileServer,
    pub programs: Programs,
    pub upstream: Rc<Pool>,
    pub instances: Rc<Instances>,
    /// Connections to other nodes.
    pub peers: Peers,
    pub forwarding: Rc<Forwarding>,
    pub connections: Rc<Connections>,
    /// What networks of clients may do.
    pub clients: Rc<ClientLimits>,
    pub rules: Rc<Rules>,
    pub turns: Rc<Turns>,
    pub plans: Plans,
    keeper: Rc<Keeper>,
    limits: RefCell<Rc<Limits>>,
    recorder: RefCell<Rc<Recorder>>,
    /// What this thread last added to the gauge of all.
    cached_bytes: Cell<i64>,
    ids: Ids,
}

impl Node {
    pub fn new(shared: Arc<Shared>, keeper: Rc<Keeper>) -> Self {
        let options = shared.options();
        let turns = Rc::<Turns>::default();
        let upstream = Rc::new(Pool::new(Arc::clone(&shared.metrics)));
        let forwarding = Rc::new(Forwarding::new(&options));
        Self {
            router: Router::new(Arc::clone(&shared)),
            files: FileServer::new(
                options.limits.file_cache_bytes,
                Rc::clone(&turns),
                Arc::clone(&shared.blocking),
            ),
            programs: Programs::new(
                Rc::clone(&keeper),
                Arc::clone(&shared.php),
                Arc::clone(&shared.ledger),
                &options,
                Arc::clone(&shared.metrics),
            ),
            instances: Instances::new(
                Rc::clone(&keeper),
                Rc::clone(&upstream),
                Arc::clone(&shared.metrics),
                Arc::clone(&shared.needs),
            ),
            upstream,
            peers: Peers::new(Arc::clone(&shared)),
            forwarding: Rc::clone(&forwarding),
            connections: Rc::default(),
            clients: Rc::new(ClientLimits::new(Arc::clone(&shared), &options)),
            rules: Rules::new(&shared, Rc::clone(&keeper), forwarding, Rc::clone(&turns)),
            turns,
            plans: Plans::default(),
            keeper,
            limits: RefCell::new(Rc::new(options.limits.clone())),
            recorder: RefCell::new(Recorder::new(&shared)),
            cached_bytes: Cell::new(0),
            ids: Ids::new(),
            shared,
        }
    }

    /// Takes the shared settings as they are now.
    pub fn refresh(&self) {
        let options = self.shared.options();
        *self.limits.borrow_mut() = Rc::new(options.limits.clone());
        self.forwarding.set_options(&options);
        self.clients.set_options(&options);
        self.programs.set_options(&options);
        self.rules.refresh();
        *self.recorder.borrow_mut() = Recorder::new(&self.shared);
    }

    pub fn limits(&self) -> Rc<Limits> {
        Rc::clone(&self.limits.borrow())
    }

    pub fn recorder(&self) -> Rc<Recorder> {
        Rc::clone(&self.recorder.borrow())
    }

    pub fn keeper(&self) -> &Rc<Keeper> {
        &self.keeper
    }

    /// The site's document root, opened by the keeper under its tenant's rights.
    pub async fn root(&self, site: &Site) -> Result<Root, Refusal> {
        self.files
            // Boxed, because most requests find it open.
            .root(site, async || Box::pin(self.keeper.open_root(&site.name)).await.map_err(RootError::Keeper))
            .await
            .map_err(Refusal::from)
    }

    /// What is done now and then: idle things closed, lines of the log written.
    pub fn tend(&self) {
        let (hits, misses, bytes) = self.files.take_counts();
        let metrics = &self.shared.metrics;
        metrics.file_cache(hits, misses);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        metrics.file_cache_bytes.add(bytes - self.cached_bytes.replace(bytes));
        let (memory, disk) = self.shared.spool.usage();
        metrics.spool_memory_bytes.set(i64::try_from(memory).unwrap_or(i64::MAX));
        metrics.spool_disk_bytes.set(i64::try_from(disk).unwrap_or(i64::MAX));
        self.upstream.sweep();
        self.peers.sweep();
        self.files.drop_idle(std::time::Instant::now());
        if let Some(log) = &self.recorder().log {
            log.flush();
        }
    }
}

enum RootError {
    Keeper(ClientError),
    Io(std::io::Error),
}

impl From<std::io::Error> for RootError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<RootError> for Refusal {
    fn from(error: RootError) -> Self {
        match error {
            RootError::Keeper(ClientError::Gone) => Self::Overloaded("the keeper restarts"),
            RootError::Keeper(ClientError::TimedOut) => Self::Overloaded("the keeper is busy"),
            RootError::Keeper(
                ClientError::Refused { message, .. } | ClientError::Elsewhere { message, .. },
            ) => Self::SiteBroken(message),
            RootError::Io(error) => Self::SiteBroken(error.to_string()),
        }
    }
}

impl Connector for Node {
    async fn connect(&self, address: &Address) -> Result<Socket, Refusal> {
        let unreachable = |error: std::io::Error| Refusal::BackendUnreachable(error.to_string());
        match address {
            Address::Tcp(text) => dial(text).await.map_err(unreachable),
            Address::Unix(server) => {
                let socket = self.keeper.connect_server(server.site()).await.map_err(refuse_connection)?;
                watch_socket(socket).map_err(unreachable)
            }
            Address::Instance(_) => {
                Err(Refusal::SiteBroken("an instance has no connection of its own".into()))
            }
        }
    }
}

/// Why the keeper has made no connection to a server.
fn refuse_connection(error: ClientError) -> Refusal {
    match error {
        ClientError::Gone => Refusal::Overloaded("the keeper restarts"),
        ClientError::TimedOut => Refusal::BackendTimeout,
        // With the code of the page that helps.
        ClientError::Refused { .. } | ClientError::Elsewhere { .. } => {
            Refusal::BackendUnreachable(error.to_string())
        }
    }
}

impl Host for Node {
    fn limits(&self) -> Rc<Limits> {
        Self::limits(self)
    }

    fn request_id(&self) -> RequestId {
        self.ids.next()
    }

    fn serve(&self, mut request: Request) -> impl Future<Output = Response> {
        // What nodes say to each other is made up where a client says it.
        if self.shared.cluster.is_member() && request.head.conn.carried.is_none() {
            fields::strip(&mut request.head.headers);
        }
        request::serve(self, request)
    }

    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response {
        let mut account = Account::without_request(self, id, conn);
        account.refused(&refusal, &refusal.row());
        account.answer(refusal.into_response(id))
    }

    fn measures(&self) -> bool {
        self.recorder.borrow().measures()
    }

    fn enter(&self) -> Entered {
        self.connections.enter()
    }
}

/// Request ids: unique over all nodes, and not to be guessed from another's.
struct Ids {
    state: Cell<u128>,
    key: u128,
}

impl Ids {
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
        // A bijection, so no id comes twice from one start; the constant is 2^128 over the golden ratio.
        let mixed = (state ^ self.key).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        RequestId(mixed ^ (mixed >> 64))
    }
}

#[cfg(test)]
mod tests {
    use super::Ids;
    use std::collections::HashSet;

    #[test]
    fn ids_do_not_repeat() {
        let ids = Ids::new();
        let seen: HashSet<_> = (0..10_000).map(|_| ids.next()).collect();
        assert_eq!(seen.len(), 10_000);
    }
}

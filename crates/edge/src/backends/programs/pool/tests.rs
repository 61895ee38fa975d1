//! Facts about the pools of PHP workers. Workers here are real connections to nothing: what a pool does with them
//! does not depend on what is at their other end, only on whether it is still there.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicUsize;

use nagaya_records::record::ProgramNetwork;

use super::*;
use crate::backends::files::root::DirectoryId;
use crate::backends::programs::testing::HANG;

/// A tenant's pools and the other ends of the workers made for it.
struct World {
    pools: Arc<PhpPools>,
    tenant: Tenant,
    others: RefCell<Vec<std::os::unix::net::UnixStream>>,
    ended: Arc<AtomicUsize>,
}

/// Counts workers whose process was ended.
struct CountedWorker(Arc<AtomicUsize>);

impl WorkerProcess for CountedWorker {
    fn end(self: Box<Self>) -> EndFuture {
        Box::pin(async { None })
    }
}

impl Drop for CountedWorker {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl World {
    fn new(workers: u32, options: EdgeConfig) -> Self {
        let tenant = format!(r#"{{"name":"demo","uid":2000,"gid":2000,"php_workers":{workers}}}"#);
        Self {
            pools: PhpPools::new(&options, Arc::new(EdgeMetrics::new())),
            tenant: serde_json::from_str(&tenant).unwrap(),
            others: RefCell::default(),
            ended: Arc::default(),
        }
    }

    async fn lease(&self) -> Result<WorkerGuard, Refusal> {
        let lease = self.pools.lease(&self.tenant, async |_| self.start());
        tokio::time::timeout(HANG, lease).await.expect("no turn comes")
    }

    fn start(&self) -> Result<PoolWorker, Refusal> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        self.others.borrow_mut().push(theirs);
        Ok(PoolWorker::new(ours.into(), ProcessId(1), CountedWorker(Arc::clone(&self.ended))).unwrap())
    }

    fn made(&self) -> usize {
        self.others.borrow().len()
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }

    fn waiting(&self) -> u32 {
        let pools = self.pools.pools.lock();
        pools.get(&self.tenant.name).map_or(0, |pool| pool.waiting.load(Ordering::Relaxed))
    }
}

fn options(waiting: u32, wait_ms: u64) -> EdgeConfig {
    EdgeConfig { max_waiting: waiting, wait_ms, ..EdgeConfig::default() }
}

#[tokio::test]
async fn a_worker_given_back_is_used_again_and_one_dropped_is_ended() {
    let world = World::new(2, EdgeConfig::default());
    world.lease().await.unwrap().give_back();
    world.lease().await.unwrap().give_back();
    assert_eq!((world.made(), world.ended(), world.pools.workers()), (1, 0, 1));
    drop(world.lease().await.unwrap());
    assert_eq!((world.made(), world.ended(), world.pools.workers()), (1, 1, 0));
    assert_eq!(world.pools.metrics.php_workers.get(), 0);
}

#[tokio::test]
async fn the_worker_used_last_is_used_next() {
    let world = World::new(2, EdgeConfig::default());
    let (mut first, mut second) = (world.lease().await.unwrap(), world.lease().await.unwrap());
    let fd = |lease: &mut WorkerGuard| lease.worker().stream.as_fd().as_raw_fd();
    let (first_fd, second_fd) = (fd(&mut first), fd(&mut second));
    assert_ne!(first_fd, second_fd);
    second.give_back();
    first.give_back();
    assert_eq!(fd(&mut world.lease().await.unwrap()), first_fd);
}

#[tokio::test]
async fn requests_wait_in_order_for_as_many_workers_as_there_may_be() {
    let world = World::new(1, EdgeConfig::default());
    let first = world.lease().await.unwrap();
    let order = RefCell::new(Vec::new());
    let wait = async |name| {
        let lease = world.lease().await.unwrap();
        order.borrow_mut().push(name);
        lease.give_back();
    };
    let release = async {
        assert_eq!(world.waiting(), 3);
        first.give_back();
    };
    tokio::join!(biased; wait("a"), wait("b"), wait("c"), release);
    assert_eq!(*order.borrow(), ["a", "b", "c"]);
    assert_eq!((world.made(), world.waiting()), (1, 0));
}

/// One thread has more requests waiting than may follow each other there; a request of another thread waits too, and
/// is served before they are all done.
#[tokio::test]
async fn a_busy_thread_does_not_keep_a_worker_from_another() {
    const HERE: usize = 10;
    let world = World::new(1, EdgeConfig::default());
    let first = world.lease().await.unwrap();
    let served_here = Arc::new(AtomicUsize::new(0));
    let elsewhere = {
        let (pools, tenant) = (Arc::clone(&world.pools), world.tenant.clone());
        let served_here = Arc::clone(&served_here);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let none = async |_| -> Result<PoolWorker, Refusal> { panic!("there is a worker") };
                let lease = tokio::time::timeout(HANG, pools.lease(&tenant, none)).await.unwrap().unwrap();
                let before = served_here.load(Ordering::SeqCst);
                lease.give_back();
                before
            })
        })
    };
    while world.waiting() < 1 {
        tokio::task::yield_now().await;
    }
    let here = || async {
        let lease = world.lease().await.unwrap();
        // Longer than a worker may stay on this thread, so each request here is the last in its row.
        let since = lease.turn_since;
        while since.elapsed() < handover::IN_ROW_MAX {
            std::thread::yield_now();
        }
        lease.give_back();
        served_here.fetch_add(1, Ordering::SeqCst);
    };
    let mut all: Vec<_> = (0..HERE).map(|_| Box::pin(here())).collect();
    let mut first = Some(first);
    std::future::poll_fn(|cx| {
        all.retain_mut(|one| one.as_mut().poll(cx).is_pending());
        if let Some(first) = first.take() {
            assert_eq!(world.waiting() as usize, HERE + 1);
            first.give_back();
        }
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    let before = elsewhere.join().unwrap();
    assert!(before < HERE, "it was served after all of this thread");
    assert_eq!((world.made(), world.waiting()), (1, 0));
}

#[tokio::test]
async fn a_full_queue_and_a_long_wait_are_refused() {
    let world = World::new(1, options(0, 1500));
    let _busy = world.lease().await.unwrap();
    assert_eq!(world.lease().await.err(), Some(Refusal::QueueFull { retry_after_seconds: 1, notice: None }));
    let world = World::new(1, options(1, 10));
    let _busy = world.lease().await.unwrap();
    assert_eq!(
        world.lease().await.err(),
        Some(Refusal::QueueTimeout { retry_after_seconds: 1, notice: None })
    );
    assert_eq!(world.waiting(), 0);
}

#[tokio::test]
async fn leaving_the_queue_frees_the_place() {
    let world = World::new(1, options(1, 60_000));
    let busy = world.lease().await.unwrap();
    {
        let mut waiting = Box::pin(world.lease());
        assert!(waits(&mut waiting).await);
        assert_eq!(world.waiting(), 1);
        assert!(matches!(world.lease().await, Err(Refusal::QueueFull { .. })));
    }
    assert_eq!(world.waiting(), 0);
    busy.give_back();
    world.lease().await.unwrap();
}

/// Polls once; true if it waits.
async fn waits<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx).is_pending()))
        .await
}

#[tokio::test]
async fn a_worker_that_could_not_be_started_takes_no_place() {
    let world = World::new(1, EdgeConfig::default());
    for _ in 0..3 {
        let failed = world.pools.lease(&world.tenant, async |_| Err(Refusal::BackendTimeout)).await;
        assert_eq!(failed.err(), Some(Refusal::BackendTimeout));
    }
    assert_eq!(world.pools.workers(), 0);
    world.lease().await.unwrap();
}

#[tokio::test]
async fn an_idle_worker_that_closed_or_spoke_is_not_used() {
    for spoke in [false, true] {
        let world = World::new(1, EdgeConfig::default());
        let mut lease = world.lease().await.unwrap();
        let other = world.others.borrow_mut().pop().unwrap();
        if spoke {
            std::io::Write::write_all(&mut &other, b"?").unwrap();
        } else {
            drop(other);
        }
        lease.worker().stream.readable().await.unwrap();
        lease.give_back();
        world.lease().await.unwrap().give_back();
        assert_eq!((world.made(), world.ended(), world.pools.workers()), (1, 1, 1), "spoke: {spoke}");
    }
}

#[tokio::test]
async fn workers_end_when_they_were_idle_too_long() {
    let world = World::new(3, EdgeConfig { php_idle_ms: 1000, ..EdgeConfig::default() });
    let (a, b) = (world.lease().await.unwrap(), world.lease().await.unwrap());
    a.give_back();
    let now = Instant::now();
    world.pools.sweep(now + Duration::from_millis(500));
    assert_eq!(world.ended(), 0);
    world.pools.sweep(now + Duration::from_millis(1000));
    assert_eq!((world.ended(), world.pools.workers()), (1, 1), "one that is busy is not idle");
    drop(b);
    world.pools.sweep(now);
    assert!(world.pools.pools.lock().is_empty(), "a pool that nobody needs is forgotten");
}

#[tokio::test]
async fn idle_workers_are_tended() {
    let world = World::new(1, EdgeConfig { php_idle_ms: 1, ..EdgeConfig::default() });
    world.lease().await.unwrap().give_back();
    let tend = tokio::spawn(Arc::clone(&world.pools).tend());
    while world.pools.workers() > 0 {
        tokio::task::yield_now().await;
    }
    tend.abort();
    assert_eq!(world.ended(), 1);
}

#[tokio::test]
async fn a_tenant_that_is_gone_keeps_no_worker() {
    let world = World::new(2, EdgeConfig::default());
    let (idle, busy) = (world.lease().await.unwrap(), world.lease().await.unwrap());
    idle.give_back();
    world.pools.forget(&world.tenant.name);
    assert_eq!(world.ended(), 1);
    busy.give_back();
    assert_eq!((world.ended(), world.pools.workers()), (2, 0));
}

#[tokio::test]
async fn a_tenant_with_another_uid_or_network_gets_other_workers() {
    let changes: [fn(&mut Tenant); 2] =
        [|tenant| tenant.uid = 2001, |tenant| tenant.network = Some(ProgramNetwork::Host)];
    for change in changes {
        let mut world = World::new(2, EdgeConfig::default());
        let (idle, busy) = (world.lease().await.unwrap(), world.lease().await.unwrap());
        idle.give_back();
        change(&mut world.tenant);
        // One is busy, so this is the second turn of two, and the idle worker is not the one that takes it.
        world.lease().await.unwrap().give_back();
        assert_eq!((world.made(), world.ended()), (3, 1));
        busy.give_back();
        assert_eq!((world.ended(), world.pools.workers()), (2, 1));
    }
}

#[tokio::test]
async fn the_number_of_workers_follows_the_tenants_record() {
    let mut world = World::new(1, options(0, 1000));
    let a = world.lease().await.unwrap();
    world.tenant.php_workers = Some(3);
    let (b, c) = (world.lease().await.unwrap(), world.lease().await.unwrap());
    assert!(matches!(world.lease().await, Err(Refusal::QueueFull { .. })));
    world.tenant.php_workers = Some(1);
    a.give_back();
    b.give_back();
    assert!(matches!(world.lease().await, Err(Refusal::QueueFull { .. })), "c is the one there may be");
    c.give_back();
    let d = world.lease().await.unwrap();
    assert!(matches!(world.lease().await, Err(Refusal::QueueFull { .. })));
    d.give_back();
    assert_eq!(world.pools.workers(), 1);
    world.tenant.php_workers = Some(2);
    let _two = (world.lease().await.unwrap(), world.lease().await.unwrap());
    assert!(matches!(world.lease().await, Err(Refusal::QueueFull { .. })));
}

#[tokio::test]
async fn the_oldest_idle_worker_of_any_tenant_gives_way() {
    let mut world = World::new(1, EdgeConfig::default());
    world.lease().await.unwrap().give_back();
    world.pools.workers.store(WORKERS_MAX, Ordering::Relaxed);
    world.tenant.name = TenantName::new("other").unwrap();
    let _busy = world.lease().await.unwrap();
    assert_eq!((world.made(), world.ended(), world.pools.workers()), (2, 1, WORKERS_MAX));
    world.tenant.name = TenantName::new("third").unwrap();
    assert!(matches!(world.lease().await, Err(Refusal::Overloaded(_))));
}

fn place(world: &World, root: i64, path: &str, directory: i64) -> ScriptPlace {
    let (root, directory) = (DirectoryId::made_at(root), DirectoryId::made_at(directory));
    ScriptPlace { root, path: path.into(), directory, looked: world.pools.path_moment() }
}

async fn settle(world: &World, site: &SiteName, place: ScriptPlace) -> WorkerGuard {
    let mut lease = world.lease().await.unwrap();
    lease.settle(site, place, async |_| world.start()).await.unwrap();
    lease
}

#[tokio::test(flavor = "current_thread")]
async fn a_worker_that_remembers_another_directory_is_replaced() {
    let world = World::new(1, options(1, 1000));
    let [web, shop] = ["web", "shop"].map(|name| SiteName::new(name).unwrap());
    let asked = [
        (&web, (1, "", 1), 1),
        (&web, (1, "current", 7), 1),
        // Of another site nothing is remembered.
        (&shop, (2, "", 2), 1),
        (&shop, (2, "current", 8), 1),
        (&web, (1, "", 1), 1),
        // A link beneath the root was switched.
        (&web, (1, "current", 9), 2),
        (&web, (1, "current", 9), 2),
        // The root was, and the new worker knows the new one.
        (&web, (3, "", 3), 3),
        (&web, (3, "", 3), 3),
        // Back again.
        (&web, (1, "", 1), 4),
    ];
    for (n, (site, (root, path, directory), made)) in asked.into_iter().enumerate() {
        settle(&world, site, place(&world, root, path, directory)).await.give_back();
        assert_eq!((world.made(), world.pools.workers()), (made, 1), "request {n}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn workers_that_share_an_opcache_are_replaced_together() {
    let world = World::new(3, options(1, 1000));
    let [web, shop] = ["web", "shop"].map(|name| SiteName::new(name).unwrap());
    let busy = settle(&world, &shop, place(&world, 2, "", 2)).await;
    let idle = settle(&world, &shop, place(&world, 2, "", 2)).await;
    let late = place(&world, 1, "", 1);
    let last = settle(&world, &web, place(&world, 1, "", 1)).await;
    idle.give_back();
    last.give_back();
    assert_eq!((world.made(), world.ended()), (3, 0));
    // The root of one site was switched: idle workers end at once, and the busy one when it is asked again.
    settle(&world, &web, place(&world, 3, "", 3)).await.give_back();
    assert_eq!((world.made(), world.ended()), (4, 2));
    busy.give_back();
    let [one, other] = [settle(&world, &shop, place(&world, 2, "", 2)).await, world.lease().await.unwrap()];
    assert_eq!((world.made(), world.ended()), (5, 3));
    one.give_back();
    other.give_back();
    // A request that waited since before that is no sign of another switch.
    settle(&world, &web, late).await.give_back();
    assert_eq!((world.made(), world.ended()), (5, 3));
    // A reload may bring other settings of PHP.
    let busy = settle(&world, &shop, place(&world, 2, "", 2)).await;
    world.pools.set_options(&options(1, 1000));
    assert_eq!((world.made(), world.ended()), (5, 4));
    busy.give_back();
    let _lease = settle(&world, &shop, place(&world, 2, "", 2)).await;
    assert_eq!((world.made(), world.ended()), (6, 5));
}

#[tokio::test(flavor = "current_thread")]
async fn the_first_worker_is_alone_until_there_is_another() {
    let world = World::new(2, options(1, 1000));
    let web = SiteName::new("web").unwrap();
    let numbers = RefCell::new(Vec::new());
    let lease = async || {
        let start = async |number: Option<u64>| {
            numbers.borrow_mut().push(number.is_some());
            world.start()
        };
        let mut lease = world.pools.lease(&world.tenant, start).await.unwrap();
        lease.settle(&web, place(&world, 1, "", 1), start).await.unwrap();
        lease
    };
    lease().await.give_back();
    let first = lease().await;
    let second = lease().await;
    assert_eq!(*numbers.borrow(), [false, true]);
    second.give_back();
    first.give_back();
    // The first one is used next, and replaced.
    let [one, other] = [lease().await, lease().await];
    assert_eq!((numbers.borrow().as_slice(), world.ended()), ([false, true, true].as_slice(), 1));
    one.give_back();
    other.give_back();
}

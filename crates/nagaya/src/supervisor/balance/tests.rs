//! The balance against a process that says what a keeper says, over a real feed and real records, and against the orders that the
//! cluster's thread gets.
//!
//! Not here: what is decided when (`nagaya_placement::balance`), a real keeper (`tests/e2e/balance`).

use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use nagaya_records::RecordChange;
use nagaya_records::cell::CpuQuota;
use nagaya_records::feed::{self, FromSupervisor, ToSupervisor};
use nagaya_records::instance::Tier;
use nagaya_store::{ChangeMode, RedbStore, Store};
use serde_json::json;
use tokio::task::LocalSet;

use super::*;
use crate::supervisor::cluster::{self, ClusterOrder};
use crate::supervisor::feed::ProcessFeed;
use crate::supervisor::stored_rules::StoredRules;

/// A cell of 20% of one CPU, in which there is work for this much of the time.
struct Cell {
    wants: f32,
    record: u32,
    limit: u32,
    refuses: bool,
    used: RunUsage,
}

impl Cell {
    fn new() -> Self {
        let used = RunUsage {
            site: SiteName::new("wiki").unwrap(),
            run: 1,
            tier: Tier::Running,
            at_us: 0,
            cpu_us: 0,
            throttled_us: 0,
            waited_us: None,
            memory_bytes: 1 << 20,
            limit: None,
            is_limit_changed: false,
        };
        Self { wants: 1.0, record: 200, limit: 200, refuses: false, used }
    }

    /// One second later.
    fn load(&mut self) -> String {
        let got = self.wants.min(self.limit as f32 / 1000.0);
        self.used.at_us += 1_000_000;
        self.used.cpu_us += (got * 1e6) as u64;
        self.used.throttled_us += ((self.wants - got) * 1e6) as u64;
        self.used.limit = Some(CpuQuota::of_core(self.limit));
        self.used.is_limit_changed = self.limit != self.record;
        json!([self.used]).to_string()
    }

    fn set(&mut self, thousandths: Option<u32>) -> String {
        if self.refuses {
            return json!({ "error": "it is not in the mood" }).to_string();
        }
        self.limit = thousandths.unwrap_or(self.record);
        json!({ "ok": true }).to_string()
    }
}

struct World {
    keeping: BalanceLoop,
    configured: Configured,
    cell: Arc<Mutex<Cell>>,
    /// The limits that were asked for.
    asked: mpsc::Receiver<Option<u32>>,
    second: u64,
    _dir: tempfile::TempDir,
}

fn records(store: &RedbStore) {
    let tenant = json!({ "name": "alice", "uid": 200_001, "gid": 200_001, "home": "/srv/alice" });
    let backend = json!({ "kind": "app", "command": ["x"], "directory": "d" });
    let site = json!({ "name": "wiki", "tenant": "alice", "hosts": ["wiki.test"], "backend": backend, "limits": { "cpu": "20%" } });
    let tenant = RecordChange::PutTenant(Box::new(serde_json::from_value(tenant).unwrap()));
    let site = RecordChange::PutSite(Box::new(serde_json::from_value(site).unwrap()));
    store.transaction(vec![tenant, site], ChangeMode::Merge).unwrap();
}

fn world(cluster: Option<cluster::ClusterHandle>) -> World {
    let dir = tempfile::tempdir().unwrap();
    let store = RedbStore::open(&dir.path().join("s.redb")).unwrap();
    records(&store);
    let store: Arc<dyn Store> = Arc::new(store);
    let rules = StoredRules::make(dir.path().join("rules"), None).unwrap();
    let node =
        Arc::new(SupervisedNode::new("a".into(), Arc::clone(&store), Vec::new(), Vec::new(), cluster, rules));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let keeper = Arc::new(ProcessFeed::new(ours, |_| {}));
    keeper.begin(json!({}), store).unwrap();
    node.process(ProcessRole::Keeper, |process| process.feed = Some(keeper));
    let cell = Arc::new(Mutex::new(Cell::new()));
    let (tell, asked) = mpsc::channel();
    let its = Arc::clone(&cell);
    // It ends with its feed.
    std::thread::spawn(move || {
        while let Ok(Some(down)) = feed::read::<FromSupervisor>(&mut theirs) {
            let FromSupervisor::Ask { tag, question } = down else { continue };
            let text = match question {
                FeedQuery::Load => its.lock().load(),
                FeedQuery::Instance { act: InstanceCommand::LimitCpu { thousandths }, .. } => {
                    let _ = tell.send(thousandths);
                    its.lock().set(thousandths)
                }
                other => panic!("{other:?}"),
            };
            feed::write(&mut theirs, &ToSupervisor::Answer { tag, text }).unwrap();
        }
    });
    let configured = Configured { raise_max: 4, ..Configured::default() };
    World { keeping: BalanceLoop::new(node), configured, cell, asked, second: 0, _dir: dir }
}

impl World {
    /// So many seconds go by on a node that is this busy.
    async fn seconds(&mut self, count: u64, cpu_used: f32) {
        for _ in 0..count {
            self.second += 1;
            let own = node_load("a", cpu_used);
            let now = Moment((1_000 + self.second) * 1_000_000_000);
            self.keeping.look(now, own, &self.configured).await;
            // What was begun beside goes on.
            tokio::task::yield_now().await;
        }
    }

    fn asked(&self) -> Vec<u32> {
        self.asked.try_iter().flatten().collect()
    }

    fn told(&self) -> Value {
        self.keeping.node.balance.told.describe_site("wiki")
    }
}

fn node_load(name: &str, cpu_used: f32) -> NodeLoad {
    NodeLoad { node: name.into(), cpus: 8, cpu_used, memory_free: 1 << 30, is_open: true, arrivals: 0 }
}

async fn run<T>(work: impl Future<Output = T>) -> T {
    LocalSet::new().run_until(work).await
}

#[tokio::test]
async fn short_application_is_raised_to_its_maximum_and_back() {
    let mut world = world(None);
    run(async {
        world.seconds(5, 0.5).await;
        assert_eq!(world.asked(), [400, 800], "four times what its record says");
        let told = world.told();
        let words = told["decisions"][1]["words"].as_str().unwrap();
        assert!(
            words.starts_with("short of CPU 80% of the time at a limit of 0.20 CPUs, and a uses 50%"),
            "{words}"
        );
        world.cell.lock().wants = 0.9;
        world.seconds(3, 0.5).await;
        assert!(world.asked().is_empty(), "what is enough stays");
        world.cell.lock().wants = 0.05;
        world.seconds(70, 0.5).await;
        assert_eq!(world.asked(), [400]);
        world.seconds(70, 0.5).await;
        assert_eq!(world.asked(), [200]);
        world.seconds(10, 0.5).await;
        assert_eq!(world.told()["now"], Value::Null, "of who needs nothing, nothing is to be told");
    })
    .await;
}

#[tokio::test]
async fn on_a_busy_node_without_others_it_is_said_what_holds_it_back() {
    let mut world = world(None);
    run(async {
        world.seconds(30, 0.95).await;
        assert!(world.asked().is_empty());
        let held = world.told()["now"]["held"].as_str().unwrap().to_owned();
        assert_eq!(
            held,
            "a uses 95% of its CPUs, and gives nobody more above 85%; there is no other node that it could be moved to"
        );
        assert_eq!(world.told()["now"]["short_seconds"], 28);
    })
    .await;
}

#[tokio::test]
async fn failed_raise_is_reported_and_tried_again_later() {
    let mut world = world(None);
    world.cell.lock().refuses = true;
    run(async {
        world.seconds(5, 0.5).await;
        assert_eq!(world.asked(), [400]);
        assert_eq!(world.told()["decisions"][0]["end"], "not done: it is not in the mood");
        world.cell.lock().refuses = false;
        world.seconds(20, 0.5).await;
        assert_eq!(world.asked(), [400, 800]);
    })
    .await;
}

#[tokio::test]
async fn a_keeper_that_was_started_anew_is_measured_anew() {
    let mut world = world(None);
    run(async {
        world.seconds(2, 0.95).await;
        world.cell.lock().used.run = 2;
        world.cell.lock().used.cpu_us = 0;
        world.seconds(1, 0.5).await;
        assert!(world.asked().is_empty(), "one look at a new run says nothing");
        world.seconds(1, 0.5).await;
        assert_eq!(world.asked(), [400]);
    })
    .await;
}

#[tokio::test]
async fn nothing_is_moved_for_one_good_second() {
    let mut keeping = world(None).keeping;
    let mut look = |here: f32, there: f32| {
        let nodes = keeping.smoothed(vec![node_load("a", here), node_load("b", there)]);
        (nodes[0].cpu_used, nodes[1].cpu_used)
    };
    assert_eq!(look(1.0, 1.0), (1.0, 1.0), "what is seen first is all that is known");
    assert_eq!(look(1.0, 0.0), (1.0, 0.75));
    assert_eq!(look(1.0, 1.0), (1.0, 0.8125));
    let alone = keeping.smoothed(vec![node_load("a", 0.0)]);
    assert_eq!(alone[0].cpu_used, 0.75);
    let again = keeping.smoothed(vec![node_load("a", 0.75), node_load("b", 0.5)]);
    assert_eq!(again[1].cpu_used, 0.5, "it was not asked in between");
}

#[tokio::test]
async fn a_better_node_gets_it_once_and_an_error_is_told() {
    let (handle, mut orders) = cluster::channel();
    let mut world = world(Some(handle));
    let moves = Rc::new(RefCell::new(Vec::new()));
    let noted = Rc::clone(&moves);
    run(async {
        tokio::task::spawn_local(async move {
            while let Some(order) = orders.recv().await {
                match order {
                    ClusterOrder::Loads(answer) => {
                        let nodes = [node_load("a", 0.1), node_load("b", 0.3), node_load("c", 0.2)];
                        let nodes = nodes.map(|load| MemberLoad { load, shared: Default::default() });
                        let _ = answer.send(nodes.into());
                    }
                    ClusterOrder::Shift { site, shift: RebalanceStep::Move(to), answer } => {
                        noted.borrow_mut().push((site.to_string(), to, answer));
                    }
                    _ => panic!("nothing else is asked"),
                }
            }
        });
        world.seconds(16, 0.95).await;
        assert!(moves.borrow().is_empty(), "it was short for 14 s");
        world.seconds(5, 0.95).await;
        assert_eq!(world.told()["decisions"][0]["end"], "under way");
        let (site, to, answer) = moves.borrow_mut().pop().expect("it is asked for");
        assert_eq!((site.as_str(), to.as_str(), moves.borrow().len()), ("wiki", "c", 0), "and only once");
        let _ = answer.send(Err("c is gone".into()));
        world.seconds(3, 0.95).await;
        assert_eq!(world.told()["decisions"][0]["end"], "not done: c is gone");
        assert!(
            world.told()["decisions"][0]["words"].as_str().unwrap().contains("moved to c, which uses 20%")
        );
        world.seconds(300, 0.95).await;
        assert!(moves.borrow().is_empty(), "a site whose move failed rests, too");
    })
    .await;
}

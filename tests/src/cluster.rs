//! Several nodes that are one cluster, over a real etcd, all on this machine's loopback.
//!
//! Their silence is made by stopping all processes of a node (SIGSTOP), which is what a machine that hangs looks like from
//! outside. Not here: networks that lose packets; the laboratory `./dev cluster` has them.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tempfile::TempDir;

use crate::world::{Builder, World};
use crate::{machine, wait};

/// Clusters are tried one after the other: a machine that runs many at once is slower than a fence lasts, and all would stand still.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// One etcd with a directory and ports of its own.
pub struct Etcd {
    dir: TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    child: Option<Child>,
    _turn: MutexGuard<'static, ()>,
}

impl Etcd {
    #[track_caller]
    pub fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("nagaya-etcd-").tempdir().expect("a temporary directory");
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut etcd = Self { dir, client: free(), peer: free(), child: None, _turn: turn };
        etcd.begin();
        etcd
    }

    /// Starts it on what it kept.
    #[track_caller]
    pub fn begin(&mut self) {
        let log = File::options().create(true).append(true).open(self.dir.path().join("log"));
        let log = log.expect("our own file");
        let (client, peer) = (format!("http://{}", self.client), format!("http://{}", self.peer));
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.dir.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("an open file"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("etcd ({error}): 'sudo ./dev setup test' installs it"));
        self.child = Some(child);
        wait::until("etcd listens", || TcpStream::connect(self.client).is_ok());
    }

    /// As a machine that loses its power.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.client)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An address that was free a moment ago.
fn free() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has ports");
    listener.local_addr().expect("it is bound")
}

/// Nodes `a`, `b`, ... of one cluster, in that order.
pub struct Cluster {
    pub etcd: Etcd,
    pub nodes: Vec<World>,
}

impl Cluster {
    /// The first node has the tenants and sites that `first` makes; the others take them over.
    #[track_caller]
    pub fn start(
        count: usize,
        first: impl Fn(Builder) -> Builder,
        each: impl Fn(Builder) -> Builder,
    ) -> Self {
        let etcd = Etcd::start();
        let mut nodes: Vec<World> = Vec::new();
        for at in 0..count {
            let builder = each(node(at));
            if at == 0 {
                let world = first(builder).start();
                world.cli(&["cluster", "init", "--etcd", &etcd.url()]);
                nodes.push(world);
            } else {
                let world = builder.start();
                join(&world, &nodes[0], &etcd);
                nodes.push(world);
            }
        }
        Self { etcd, nodes }
    }

    /// Where a site's application runs, as this node tells it.
    #[track_caller]
    pub fn placement(&self, asked: usize, site: &str) -> Option<Value> {
        let placements = self.nodes[asked].cli(&["placements", "--json"]);
        let placements: Value = serde_json::from_str(&placements).expect("placements are JSON");
        placements.as_array()?.iter().find(|placement| placement["site"] == site).cloned()
    }

    /// The position of the node that runs a site.
    #[track_caller]
    pub fn node_of(&self, site: &str) -> usize {
        let placement = self.placement(0, site).unwrap_or_else(|| panic!("{site} runs nowhere"));
        let name = placement["node"].as_str().expect("a name").to_owned();
        (0..self.nodes.len()).find(|at| name_of(*at) == name).expect("it is one of ours")
    }

    /// Ends all nodes, and sees that nothing is left of any.
    pub fn stop(self) {
        self.nodes.into_iter().for_each(World::stop);
    }
}

/// A node that can be in a cluster, and is in none yet.
pub fn node(at: usize) -> Builder {
    World::builder()
        .set("", &format!("node = {:?}", name_of(at)))
        // A busy machine with a debug build is not to lose its right by and by.
        .set("cluster", "listen = \"127.0.0.1:0\"\nfence = \"1s\"")
        .set("receipts", "allow = [\"127.0.0.1\"]")
}

pub fn name_of(at: usize) -> String {
    ["a", "b", "c", "d", "e"][at].to_owned()
}

/// Makes a node a member of the cluster that another one is in.
#[track_caller]
pub fn join(world: &World, member: &World, etcd: &Etcd) {
    let token = world.path("token");
    machine::write(&token, member.cli(&["cluster", "token"]));
    let token = token.to_string_lossy();
    world.cli(&["cluster", "join", "--etcd", &etcd.url(), "--token-file", &token]);
}

/// All processes of a node stand still, until this is dropped.
pub struct Frozen {
    processes: Vec<i32>,
}

impl Frozen {
    /// Stops the node's processes and all they started, the newest too.
    #[track_caller]
    pub fn stop(world: &World) -> Self {
        let mut frozen = Self { processes: Vec::new() };
        loop {
            let new: Vec<_> =
                tree(world.pid()).into_iter().filter(|id| !frozen.processes.contains(id)).collect();
            if new.is_empty() {
                return frozen;
            }
            for id in new {
                // It may have ended since it was listed.
                let _ = machine::output("kill", &["-STOP", &id.to_string()]);
                frozen.processes.push(id);
            }
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let processes: Vec<_> = self.processes.iter().map(i32::to_string).collect();
        let mut words = vec!["-CONT"];
        words.extend(processes.iter().map(String::as_str));
        let _ = machine::output("kill", &words);
    }
}

/// A process and all its descendants.
fn tree(root: i32) -> Vec<i32> {
    let parents: Vec<(i32, i32)> = machine::processes_with("")
        .into_iter()
        .filter_map(|id| Some((id, machine::status_field(id, "PPid")?.parse().ok()?)))
        .collect();
    let mut all = vec![root];
    let mut next = 0;
    while next < all.len() {
        let parent = all[next];
        all.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(id, _)| *id));
        next += 1;
    }
    all
}

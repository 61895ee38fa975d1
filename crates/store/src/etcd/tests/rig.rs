//! A real etcd, Debian's, of one or more members that can be killed and started again, and stores that use it. It ends with
//! the test.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::super::client::{EtcdClient, RANGE, RAW_TXN};
use super::super::signed::ValueSigner;
use super::super::wire::{
    EmptyResponse, HeaderOnly, KeyValue, RangeRequest, RangeResponse, RequestKind, RequestOp, TxnRequest,
    TxnResponse,
};
use super::super::{EtcdOptions, RECORD_SECRET_LEN, RecordKeys, RecordSigning, keys, seed};
use crate::etcd::inner::ClusterStore;
use crate::{RedbStore, Store, StoreError};
use nagaya_records::record::RecordChange;
use nagaya_records::table::RecordIndex;

/// For anything that a test waits for. Machines that build meanwhile are slow.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Starts of an etcd whose port somebody else took meanwhile.
const TRIES_MAX: usize = 5;

/// Those of this process so far; the first is 1.
static ETCDS: AtomicU8 = AtomicU8::new(1);

pub struct Etcd {
    members: Vec<Member>,
    /// With what members are started.
    pub extra: Vec<String>,
    /// How the test itself reaches it, and stores that are not told otherwise.
    pub access: Access,
    pub runtime: Runtime,
    pub directory: TempDir,
    clusters: AtomicUsize,
}

/// What a client shows, and whom it believes. With an authority the members speak TLS.
#[derive(Clone, Default)]
pub struct Access {
    pub ca: Option<Vec<u8>>,
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    pub login: Option<(String, String)>,
}

struct Member {
    name: String,
    data: PathBuf,
    client: String,
    peer: String,
    process: Mutex<Option<Child>>,
}

impl Etcd {
    pub fn start(members: usize) -> Self {
        Self::start_with(members, &[])
    }

    pub fn start_with(members: usize, extra: &[&str]) -> Self {
        let extra: Vec<String> = extra.iter().map(|text| (*text).to_owned()).collect();
        Self::start_by(members, |_, _| (extra.clone(), Access::default()))
    }

    /// `set`: gets the members' address and a directory, and says with what they are started and how they are reached.
    pub fn start_by(members: usize, set: impl Fn(Ipv4Addr, &Path) -> (Vec<String>, Access)) -> Self {
        for _ in 0..TRIES_MAX {
            let etcd = Self::prepare(members, &set);
            (0..members).for_each(|n| etcd.revive(n));
            if etcd.is_ready() {
                return etcd;
            }
        }
        panic!("etcd did not start in {TRIES_MAX} tries");
    }

    fn prepare(members: usize, set: impl Fn(Ipv4Addr, &Path) -> (Vec<String>, Access)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // An address that no other test has, so that a port given up while a member is dead becomes nobody else's.
        let [.., high, low] = std::process::id().to_be_bytes();
        let host = Ipv4Addr::new(127, high, low, ETCDS.fetch_add(1, Ordering::Relaxed));
        // All are held until the last is known, so that no two are one.
        let held: Vec<TcpListener> =
            (0..2 * members).map(|_| TcpListener::bind((host, 0)).unwrap()).collect();
        let (extra, access) = set(host, directory.path());
        let scheme = if access.ca.is_some() { "https" } else { "http" };
        let address = |scheme: &str, n: usize| format!("{scheme}://{}", held[n].local_addr().unwrap());
        let members = (0..members)
            .map(|n| Member {
                name: format!("m{n}"),
                data: directory.path().join(format!("m{n}")),
                client: address(scheme, 2 * n),
                peer: address("http", 2 * n + 1),
                process: Mutex::new(None),
            })
            .collect();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { members, extra, access, runtime, directory, clusters: AtomicUsize::new(0) }
    }

    /// Starts a member, which goes on with what it has on disk.
    pub fn revive(&self, n: usize) {
        let member = &self.members[n];
        let all: Vec<String> =
            self.members.iter().map(|member| format!("{}={}", member.name, member.peer)).collect();
        let mut command = Command::new("etcd");
        command.args(["--name", &member.name, "--data-dir"]).arg(&member.data);
        command.args(["--listen-client-urls", &member.client, "--advertise-client-urls", &member.client]);
        command.args(["--listen-peer-urls", &member.peer, "--initial-advertise-peer-urls", &member.peer]);
        command.args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"]);
        command.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        command.args(["--logger", "zap", "--log-level", "error"]).args(&self.extra);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.spawn().unwrap_or_else(|error| {
            panic!("etcd cannot be started ({error}): 'sudo ./dev setup test' installs it")
        });
        let before = member.process.lock().replace(started);
        assert!(before.is_none(), "it was running");
    }

    pub fn kill(&self, n: usize) {
        let mut process = self.members[n].process.lock().take().expect("it was running");
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Until a majority answers. False: a process has ended, as when its port was taken.
    fn is_ready(&self) -> bool {
        let options = self.options("none");
        self.runtime.block_on(async {
            let client = EtcdClient::new(&options).unwrap();
            let end = Instant::now() + PATIENCE;
            while Instant::now() < end {
                let wait = Duration::from_secs(1);
                if client.ask::<_, RangeResponse>(RANGE, keys::get("none"), wait).await.is_ok() {
                    return true;
                }
                let ended = |member: &Member| {
                    member
                        .process
                        .lock()
                        .as_mut()
                        .is_some_and(|process| process.try_wait().unwrap().is_some())
                };
                if self.members.iter().any(ended) {
                    return false;
                }
            }
            false
        })
    }

    pub fn options(&self, cluster: &str) -> EtcdOptions {
        self.options_of(cluster, &self.access)
    }

    pub fn options_of(&self, cluster: &str, access: &Access) -> EtcdOptions {
        let Access { ca, identity, login } = access.clone();
        let endpoints = self.members.iter().map(|member| member.client.clone()).collect();
        EtcdOptions { endpoints, cluster: cluster.into(), ca, identity, login, insecure: true }
    }

    /// A new cluster without records.
    pub fn cluster(&self) -> String {
        let cluster = format!("c{}", self.clusters.fetch_add(1, Ordering::Relaxed));
        let (empty, _directory) = replica();
        self.runtime.block_on(seed(&self.options(&cluster), &record_keys(), &[], &empty)).unwrap();
        cluster
    }

    pub fn node(&self, cluster: &str) -> Node {
        Node::open(&self.options(cluster))
    }

    /// Writes behind the backs of all stores, signed as they do it.
    pub fn write(&self, mut success: Vec<RequestOp>) -> u64 {
        let known = self.write_raw(Vec::new());
        for operation in &mut success {
            if let Some(RequestKind::Put(put)) = &mut operation.request {
                put.value = sign(&put.key, &put.value, known);
            }
        }
        self.write_raw(success)
    }

    /// What lies at a key, as it lies there.
    pub fn read_raw(&self, key: &str) -> Option<KeyValue> {
        self.ask::<_, RangeResponse>(RANGE, keys::get(key)).kvs.into_iter().next()
    }

    /// Everything of a cluster, as it lies there.
    pub fn read_all_raw(&self, cluster: &str) -> Vec<KeyValue> {
        let all = keys::KeySpace::new(cluster).all();
        let range_end = keys::after_all(&all);
        self.ask::<_, RangeResponse>(
            RANGE,
            RangeRequest { key: all.into(), range_end, ..RangeRequest::default() },
        )
        .kvs
    }

    /// Writes as whoever reaches etcd can, without the cluster's key.
    pub fn write_raw(&self, success: Vec<RequestOp>) -> u64 {
        let options = self.options("none");
        let txn = TxnRequest { success, ..TxnRequest::default() };
        self.runtime.block_on(async {
            let client = EtcdClient::new(&options).unwrap();
            let answer = client.ask::<_, TxnResponse>(RAW_TXN, txn, PATIENCE).await.unwrap();
            keys::unsigned(answer.value.header.unwrap().revision)
        })
    }

    /// Forgets all history there is.
    pub fn compact(&self) {
        let revision = i64::try_from(self.write(Vec::new())).unwrap();
        let _: EmptyResponse = self.ask("/etcdserverpb.KV/Compact", Compact { revision, physical: true });
    }

    /// As its operator asks it.
    pub fn ask<Q, A>(&self, method: &'static str, request: Q) -> A
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + HeaderOnly + Default + 'static,
    {
        let options = self.options("none");
        self.runtime.block_on(async {
            let client = EtcdClient::new(&options).unwrap();
            client.ask(method, request, PATIENCE).await.unwrap().value
        })
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Compact {
    #[prost(int64, tag = "1")]
    revision: i64,
    #[prost(bool, tag = "2")]
    physical: bool,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &self.members {
            if let Some(mut process) = member.process.lock().take() {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }
}

/// Looked for in what lies in etcd.
pub const RAW_SECRET: &str = "tell-nobody-in-etcd";

/// Of all clusters here.
pub fn record_keys() -> RecordKeys {
    RecordKeys { current: (1, [7; RECORD_SECRET_LEN]), older: Vec::new() }
}

/// The value as a node of the key's cluster writes it.
pub fn sign(key: &[u8], body: &[u8], known: u64) -> Vec<u8> {
    let Some(cluster) = str::from_utf8(key).unwrap().split('/').nth(2) else { return body.to_vec() };
    let signer = ValueSigner::new(keys::KeySpace::new(cluster), RecordSigning::Required(record_keys()));
    signer.sign(key, body.to_vec(), known).unwrap()
}

pub fn replica() -> (RedbStore, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    (RedbStore::open(&directory.path().join("store.redb")).unwrap(), directory)
}

/// A store, and a process's table that is fed by what it tells.
pub struct Node {
    pub store: Arc<ClusterStore>,
    pub fed: Arc<Mutex<Fed>>,
    pub directory: TempDir,
}

#[derive(Default)]
pub struct Fed {
    pub table: RecordIndex,
    /// Each batch's length, in order.
    pub batches: Vec<usize>,
    revision: u64,
}

impl Node {
    pub fn open(options: &EtcdOptions) -> Self {
        let (replica, directory) = replica();
        Self::open_with(options, replica, directory)
    }

    pub fn open_signing(options: &EtcdOptions, signing: RecordSigning) -> Self {
        let (replica, directory) = replica();
        Self::open_all(options, signing, replica, directory)
    }

    /// The table has what the replica has, as that of a process which was just started.
    pub fn open_with(options: &EtcdOptions, replica: RedbStore, directory: TempDir) -> Self {
        Self::open_all(options, RecordSigning::Required(record_keys()), replica, directory)
    }

    pub fn open_all(
        options: &EtcdOptions,
        signing: RecordSigning,
        replica: RedbStore,
        directory: TempDir,
    ) -> Self {
        let fed = Arc::new(Mutex::new(Fed::default()));
        crate::snapshot_frames(&replica, &mut |mut frame| {
            let Some(nagaya_records::feed::FromSupervisor::Apply(changes)) =
                nagaya_records::feed::read(&mut frame)?
            else {
                panic!("only records")
            };
            fed.lock().take(changes);
            Ok(())
        })
        .unwrap();
        let revision = replica.revision().unwrap();
        {
            let mut fed = fed.lock();
            fed.revision = revision;
            fed.batches.clear();
        }
        let told = fed.clone();
        let on_change = move |changes: Vec<RecordChange>, revision: u64| {
            let mut fed = told.lock();
            assert_eq!(revision, fed.revision + 1, "each batch is one revision more");
            fed.revision = revision;
            fed.take(changes);
        };
        let store = ClusterStore::open(options, signing, Arc::new(replica), Arc::new(on_change)).unwrap();
        Self { store, fed, directory }
    }

    /// Closes the store and gives its file back, as when the node's process ends.
    pub fn close(self) -> (RedbStore, TempDir) {
        let Self { store, directory, .. } = self;
        drop(Arc::try_unwrap(store).ok().expect("nobody else has the store"));
        // A process that another test starts just now has all files of this one until it runs its own program, and their
        // locks with them.
        let mut store = None;
        until("the store's file is free", || match RedbStore::open(&directory.path().join("store.redb")) {
            Err(StoreError::Locked { .. }) => false,
            opened => {
                store = Some(opened.unwrap());
                true
            }
        });
        (store.unwrap(), directory)
    }

    pub fn in_step(&self, etcd: &Etcd) {
        etcd.runtime.block_on(self.store.in_step(PATIENCE)).unwrap();
    }

    pub fn until(&self, what: &str, condition: impl Fn(&ClusterStore) -> bool) {
        until(what, || condition(&self.store));
    }

    /// What was told has made a table that shows what the store shows.
    pub fn is_fed(&self) {
        // It is told just after it is there.
        until("it is told", || self.fed.lock().revision == self.store.revision().unwrap());
        let fed = self.fed.lock();
        let counts = self.store.counts().unwrap();
        assert_eq!(fed.table.tenant_count() as u64, counts.tenants);
        assert_eq!(fed.table.site_count() as u64, counts.sites);
        assert_eq!(fed.table.setting_count() as u64, counts.settings);
        assert_eq!(fed.table.nodes().len(), self.store.nodes().unwrap().len());
        self.store
            .walk(&mut |kind, json| {
                // Rules are no part of a process's table.
                if kind == crate::RecordKind::Rule {
                    return Ok(());
                }
                let name = keys::name_in(kind, json).unwrap();
                let here = match kind {
                    crate::RecordKind::Tenant => serde_json::to_string(&*fed.table.tenant(&name).unwrap()),
                    crate::RecordKind::Site => serde_json::to_string(&*fed.table.site(&name).unwrap()),
                    crate::RecordKind::Setting => serde_json::to_string(&*fed.table.setting(&name).unwrap()),
                    crate::RecordKind::Rule => unreachable!("it was passed over"),
                    crate::RecordKind::Node => serde_json::to_string(&*fed.table.node(&name).unwrap()),
                    crate::RecordKind::Placement => {
                        serde_json::to_string(&fed.table.placement(&name).unwrap())
                    }
                    crate::RecordKind::TicketKeys => serde_json::to_string(fed.table.ticket_keys().unwrap()),
                };
                assert_eq!(here.unwrap(), json);
                Ok(())
            })
            .unwrap();
    }
}

impl Fed {
    /// A table refuses a change twice, and one in the wrong order.
    fn take(&mut self, changes: Vec<RecordChange>) {
        self.batches.push(changes.len());
        for change in changes {
            self.table.apply(change).unwrap();
        }
    }
}

pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(10));
    }
}

//! Several nodes that are one cluster, over a real etcd, all on this machine's loopback.
//!
//! Their silence is made by stopping all processes of a node (SIGSTOP), which is what a machine that hangs looks like from
//! outside. Not here: networks that lose packets; the laboratory `./dev cluster` has them.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use data_encoding::BASE64;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, IsCa, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::world::{Builder, World};
use crate::{machine, wait};

/// Who may do everything in an etcd that wants a password.
const USER: &str = "root";
const PASSWORD: &str = "a word to pass";

/// An etcd with a directory and ports of its own, of one member or several.
pub struct Etcd {
    dir: TempDir,
    members: Vec<Member>,
    /// Its certificates, where it wants some.
    files: Option<Files>,
}

/// One process of etcd.
struct Member {
    client: SocketAddr,
    peer: SocketAddr,
    child: Option<Child>,
}

/// PEM files: an authority, and certificates of it for etcd and for its clients.
struct Files {
    ca: String,
    server: [String; 2],
    client: [String; 2],
}

impl Etcd {
    #[track_caller]
    pub fn start() -> Self {
        Self::start_members(1)
    }

    #[track_caller]
    pub fn start_members(count: usize) -> Self {
        let mut etcd = Self::prepare(count);
        etcd.begin();
        etcd
    }

    /// One that keeps its data where `prepare` makes a place for it.
    #[track_caller]
    pub fn start_in(prepare: impl FnOnce(&Path)) -> Self {
        let mut etcd = Self::prepare(1);
        prepare(&etcd.data(0));
        etcd.begin();
        etcd
    }

    /// Where a member keeps its data.
    pub fn data(&self, at: usize) -> PathBuf {
        self.dir.path().join(name_of(at))
    }

    /// What a member has said.
    pub fn log(&self, at: usize) -> String {
        std::fs::read_to_string(self.dir.path().join(format!("{}.log", name_of(at)))).unwrap_or_default()
    }

    /// One that wants a certificate, and a password as well.
    #[track_caller]
    pub fn start_secured() -> Self {
        let mut etcd = Self::prepare(1);
        etcd.files = Some(Files::write(etcd.dir.path(), etcd.members[0].client.ip()));
        etcd.begin();
        let word = |one: &str, other: &str| format!(r#"{{"name":"{one}","password":"{other}"}}"#);
        etcd.tell("user/add", &word(USER, PASSWORD));
        etcd.tell("role/add", &word(USER, ""));
        etcd.tell("user/grant", &format!(r#"{{"user":"{USER}","role":"{USER}"}}"#));
        etcd.tell("enable", "{}");
        machine::write(&etcd.dir.path().join("password"), PASSWORD);
        etcd
    }

    fn prepare(count: usize) -> Self {
        let dir = tempfile::Builder::new().prefix("nagaya-etcd-").tempdir().expect("a temporary directory");
        let members = (0..count).map(|_| Member { client: free(), peer: free(), child: None }).collect();
        Self { dir, members, files: None }
    }

    /// As its operator says it, by etcd's gateway.
    #[track_caller]
    fn tell(&self, what: &str, body: &str) {
        let files = self.files.as_ref().expect("only where it is secured");
        let url = format!("{}/v3/auth/{what}", self.url());
        let [certificate, key] = &files.client;
        let words = ["-sSf", "--cacert", &files.ca, "--cert", certificate, "--key", key, "-d", body, &url];
        machine::run("curl", &words);
    }

    /// As anybody who reaches it does: writes a value, by etcd's gateway.
    #[track_caller]
    pub fn put(&self, key: &str, value: &[u8]) {
        let body = json!({ "key": BASE64.encode(key.as_bytes()), "value": BASE64.encode(value) });
        self.ask_openly("put", &body);
    }

    #[track_caller]
    pub fn delete(&self, key: &str) {
        self.ask_openly("deleterange", &json!({ "key": BASE64.encode(key.as_bytes()) }));
    }

    /// All keys and values, as they lie there. The gateway leaves out what is empty.
    #[track_caller]
    pub fn values(&self) -> Vec<(String, Vec<u8>)> {
        let all = BASE64.encode(b"\0");
        let told = self.ask_openly("range", &json!({ "key": all, "range_end": all }));
        let read = |field: &Value| {
            BASE64.decode(field.as_str().unwrap_or_default().as_bytes()).expect("the gateway speaks base64")
        };
        let pairs = told["kvs"].as_array().into_iter().flatten();
        pairs
            .map(|kv| (String::from_utf8_lossy(&read(&kv["key"])).into_owned(), read(&kv["value"])))
            .collect()
    }

    #[track_caller]
    fn ask_openly(&self, what: &str, body: &Value) -> Value {
        let url = format!("{}/v3/kv/{what}", self.url_of(&self.members[0]));
        let told = machine::output("curl", &["-sSf", "--max-time", "10", "-d", &body.to_string(), &url]);
        assert!(told.status.success(), "{what}: {}", String::from_utf8_lossy(&told.stderr));
        serde_json::from_slice(&told.stdout).expect("the gateway speaks JSON")
    }

    /// What a node is told of where it is.
    pub fn words(&self) -> Vec<String> {
        let mut words = vec!["--etcd".to_owned(), self.url()];
        if let Some(Files { ca, client: [certificate, key], .. }) = &self.files {
            let password = self.dir.path().join("password");
            let password = password.to_string_lossy();
            let more = ["--etcd-ca", ca, "--etcd-cert", certificate, "--etcd-key", key];
            words.extend(more.iter().map(|word| (*word).to_owned()));
            let login = ["--etcd-user", USER, "--etcd-password-file", &password];
            words.extend(login.iter().map(|word| (*word).to_owned()));
        } else {
            words.push("--insecure".to_owned());
        }
        words
    }

    /// Starts those members that do not run on what they kept. They listen once most of them are there.
    #[track_caller]
    pub fn begin(&mut self) {
        let named = |at: usize, member: &Member| format!("{}=http://{}", name_of(at), member.peer);
        let all: Vec<_> = self.members.iter().enumerate().map(|(at, member)| named(at, member)).collect();
        for at in 0..self.members.len() {
            if self.members[at].child.is_none() {
                self.members[at].child = Some(self.spawn(at, &all.join(",")));
            }
        }
        for member in &self.members {
            wait::until("etcd listens", || TcpStream::connect(member.client).is_ok());
        }
    }

    #[track_caller]
    fn spawn(&self, at: usize, all: &str) -> Child {
        let member = &self.members[at];
        let name = name_of(at);
        let log = File::options().create(true).append(true).open(self.dir.path().join(format!("{name}.log")));
        let log = log.expect("our own file");
        let client = self.url_of(member);
        let peer = format!("http://{}", member.peer);
        let secured = self.files.as_ref().map(|Files { ca, server: [certificate, key], .. }| {
            ["--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", certificate, "--key-file", key]
        });
        Command::new("etcd")
            .args(secured.into_iter().flatten())
            .arg("--data-dir")
            .arg(self.data(at))
            .args(["--name", &name])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", all])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("an open file"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("etcd ({error}): 'sudo ./dev setup test' installs it"))
    }

    /// As machines that lose their power.
    pub fn kill(&mut self) {
        (0..self.members.len()).for_each(|at| self.kill_member(at));
    }

    pub fn kill_member(&mut self, at: usize) {
        if let Some(mut child) = self.members[at].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The member that leads, as soon as one that runs knows of one that does.
    #[track_caller]
    pub fn leader(&self) -> usize {
        wait::until_some("etcd has a leader", || {
            let leads =
                |told: &Value| !told["leader"].is_null() && told["leader"] == told["header"]["member_id"];
            let runs = |at: &usize| self.members[*at].child.is_some();
            (0..self.members.len()).filter(runs).find(|at| self.status_of(*at).as_ref().is_some_and(leads))
        })
    }

    /// None: it does not answer. Whoever has just lost its leader says so.
    fn status_of(&self, at: usize) -> Option<Value> {
        let url = format!("{}/v3/maintenance/status", self.url_of(&self.members[at]));
        let told = machine::output("curl", &["-sf", "--max-time", "2", "-d", "{}", &url]);
        serde_json::from_slice(&told.stdout).ok()
    }

    /// The text that stands at a key, which is to be there.
    #[track_caller]
    pub fn value(&self, key: &str) -> String {
        let told = self.ask_openly("range", &json!({ "key": BASE64.encode(key.as_bytes()) }));
        let value = told["kvs"][0]["value"].as_str().unwrap_or_else(|| panic!("nothing stands at {key}"));
        String::from_utf8(BASE64.decode(value.as_bytes()).expect("it is base64")).expect("it is text")
    }

    fn url_of(&self, member: &Member) -> String {
        let scheme = if self.files.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", member.client)
    }

    /// Of all its members, as a node is told them.
    pub fn url(&self) -> String {
        let all: Vec<_> = self.members.iter().map(|member| self.url_of(member)).collect();
        all.join(",")
    }
}

impl Files {
    fn write(dir: &Path, host: IpAddr) -> Self {
        let file = |name: &str, pem: String| {
            let path = dir.join(name);
            machine::write(&path, pem);
            path.to_string_lossy().into_owned()
        };
        let mut params = CertificateParams::new(Vec::new()).expect("it has no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca =
            CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("it is whole");
        let pair = |name: &str, host: String| {
            let key = KeyPair::generate().expect("a key");
            let mut params = CertificateParams::new(vec![host]).expect("a name");
            // etcd takes a name in it for a user, and its gateway has the member's certificate.
            params.distinguished_name = DistinguishedName::new();
            let certificate = params.signed_by(&key, &ca).expect("it is whole");
            [
                file(&format!("{name}.pem"), certificate.pem()),
                file(&format!("{name}.key"), key.serialize_pem()),
            ]
        };
        let server = pair("server", host.to_string());
        let client = pair("client", "node".into());
        Self { ca: file("ca.pem", ca.pem()), server, client }
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
        Self::start_over(Etcd::start(), count, first, each)
    }

    /// The same, over this etcd.
    #[track_caller]
    pub fn start_over(
        etcd: Etcd,
        count: usize,
        first: impl Fn(Builder) -> Builder,
        each: impl Fn(Builder) -> Builder,
    ) -> Self {
        let mut nodes: Vec<World> = Vec::new();
        for at in 0..count {
            let builder = each(node(at));
            if at == 0 {
                let world = first(builder).start();
                init(&world, &etcd);
                nodes.push(world);
            } else {
                let world = builder.start();
                join(&world, &nodes[0], &etcd);
                nodes.push(world);
            }
        }
        let cluster = Self { etcd, nodes };
        let known = wait::within(wait::SOON, || (0..count).all(|at| cluster.sees_all_up(at)).then_some(()));
        let told = || (0..count).map(|at| cluster.told_of_nodes(at)).collect::<Vec<_>>();
        assert!(known.is_some(), "not every node knows every other: {:?}", told());
        cluster
    }

    fn sees_all_up(&self, asked: usize) -> bool {
        let nodes = self.told_of_nodes(asked);
        let nodes = nodes.as_array().expect("a list");
        nodes.len() == self.nodes.len() && nodes.iter().all(|node| node["state"] == "up")
    }

    /// All nodes, as this one tells of them.
    fn told_of_nodes(&self, asked: usize) -> Value {
        serde_json::from_str(&self.nodes[asked].cli(&["nodes", "--json"])).expect("nodes are JSON")
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

/// How long the store may be silent before a node gives up its applications.
pub const FENCE: &str = "fence = \"1s\"";

/// A node that can be in a cluster, and is in none yet.
pub fn node(at: usize) -> Builder {
    World::builder()
        .set("", &format!("node = {:?}", name_of(at)))
        // A busy machine with a debug build is not to lose its right by and by.
        .set("cluster", &format!("listen = \"127.0.0.1:0\"\n{FENCE}"))
        .set("receipts", "allow = [\"127.0.0.1\"]")
}

pub fn name_of(at: usize) -> String {
    ["a", "b", "c", "d", "e"][at].to_owned()
}

/// Makes a cluster of a node.
#[track_caller]
pub fn init(world: &World, etcd: &Etcd) {
    let store = etcd.words();
    let mut words = vec!["cluster", "init"];
    words.extend(store.iter().map(String::as_str));
    world.cli(&words);
}

/// Makes a node a member of the cluster that another one is in.
#[track_caller]
pub fn join(world: &World, member: &World, etcd: &Etcd) {
    let token = world.path("token");
    machine::write(&token, member.cli(&["cluster", "token"]));
    let store = etcd.words();
    let token = token.to_string_lossy();
    let mut words = vec!["cluster", "join", "--token-file", &token];
    words.extend(store.iter().map(String::as_str));
    world.cli(&words);
}

/// What makes a program's wall clock wrong: a library that is loaded before the system's own, as `faketime` is one.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static time_t ahead(void) { const char *seconds = getenv("CLOCK_AHEAD"); return seconds ? atol(seconds) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (!done && clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return done;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int done = real(now, zone);
    if (!done) now->tv_sec += ahead();
    return done;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The words before a node's program that make its wall clock wrong by so many seconds. None: there is no C compiler here.
#[track_caller]
pub fn clock_ahead(builder: &Builder, seconds: i64) -> Option<Vec<String>> {
    let source = builder.path("clock.c");
    let library = builder.path("clock.so");
    machine::write(&source, CLOCK);
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().ok()?;
    assert!(built.success(), "the library that sets the clock is built");
    // The edge reads it under a user of its own.
    machine::make_executable(&library);
    Some(vec!["env".into(), format!("LD_PRELOAD={}", library.display()), format!("CLOCK_AHEAD={seconds}")])
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

//! A keeper's process with tenants, sites and a log, as each test needs it.
//!
//! Not here: what is tested. Nothing waits by sleeping: ends are seen by pidfds and closed pipes.

use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nagaya_keeper::{CellMechanism, InstanceOptions, KeeperConfig, KeeperStart};
use nagaya_keeper_api::client::{CgiProcess, KeeperCallError, KeeperClient, ProcessGuard};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::Confinement;
use nagaya_records::feed::{self, FeedQuery, FromSupervisor, ToSupervisor};
use nagaya_records::instance::InstanceCommand;
use nagaya_records::{RecordChange, Site, SiteName, Tenant, TenantName};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};
use tempfile::TempDir;

/// No test takes this long unless something hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

const KEEPER: &str = "NAGAYA_TEST_IS_KEEPER";

/// Uids nobody has.
pub const ALICE: u32 = 61_001;
pub const BOB: u32 = 61_002;

pub fn is_keeper() -> bool {
    std::env::var_os(KEEPER).is_some()
}

/// The keeper's process: its listener is standard input, its feed standard output, its log standard error.
pub fn keeper_main() -> ! {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let listener = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let feed = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
    let code = nagaya_keeper::run(KeeperStart { listener, feed: UnixStream::from(feed), small_pages: false });
    std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS))
}

thread_local! {
    /// What worlds of this thread make cells of, where they do not say.
    pub static BACK_END: Cell<CellMechanism> = const { Cell::new(CellMechanism::Auto) };
}

pub struct World {
    pub dir: TempDir,
    pub options: KeeperConfig,
    listener: OwnedFd,
    changes: Vec<RecordChange>,
    /// The cgroup v2 directory the keeper is started in. None: that of this process.
    group: Option<PathBuf>,
    /// What a shell does before it, in a network and mounts of its own.
    prelude: Option<String>,
    starts: AtomicU32,
    running: Mutex<Option<Started>>,
}

struct Started {
    keeper: Child,
    feed: UnixStream,
}

/// A CRIU elsewhere than in the usual places.
pub fn criu() -> Option<PathBuf> {
    std::env::var_os("NAGAYA_TEST_CRIU").map(PathBuf::from)
}

pub fn site_name(name: &str) -> SiteName {
    SiteName::new(name).unwrap()
}

pub fn tenant_name(name: &str) -> TenantName {
    TenantName::new(name).unwrap()
}

impl World {
    /// Tenants alice and bob with homes only they may enter, and no site. Not started yet.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        set_mode(dir.path(), 0o755);
        let socket = SocketFlags::CLOEXEC;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, socket, None).unwrap();
        let path = dir.path().join("keeper.sock");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 64).unwrap();
        // Wider than in use, so that the keeper's own check of its peers is what refuses.
        set_mode(&path, 0o666);
        let back_end = BACK_END.get();
        let images = dir.path().join("state/images");
        let options = KeeperConfig {
            runtime_dir: dir.path().join("run"),
            back_end,
            instances: InstanceOptions { images, criu: criu(), ..InstanceOptions::default() },
            ..KeeperConfig::default()
        };
        let mut world = Self {
            dir,
            options,
            listener,
            changes: Vec::new(),
            group: None,
            prelude: None,
            starts: AtomicU32::new(0),
            running: Mutex::default(),
        };
        for (name, uid) in [("alice", ALICE), ("bob", BOB)] {
            let home = world.home(name);
            fs::create_dir_all(home.join("www")).unwrap();
            world.own(&home.join("www"), uid);
            world.own(&home, uid);
            set_mode(&home, 0o700);
            world.changes.push(world.tenant_with(name, json!({})));
        }
        world
    }

    pub fn with(mut self, change: impl FnOnce(&mut KeeperConfig)) -> Self {
        change(&mut self.options);
        self
    }

    pub fn fenced(self, fence: CellMechanism) -> Self {
        self.with(|options| options.back_end = fence)
    }

    pub fn inside(mut self, group: &Path) -> Self {
        self.group = Some(group.to_owned());
        self
    }

    /// Starts the keeper after this script of a shell, in a network and mounts of its own.
    pub fn after(mut self, prelude: &str) -> Self {
        self.prelude = Some(prelude.to_owned());
        self
    }

    pub fn home(&self, tenant: &str) -> PathBuf {
        self.dir.path().join(tenant)
    }

    /// Gives a file to a tenant. Without root it stays ours, and everything runs as us.
    pub fn own(&self, path: &Path, uid: u32) {
        if rustix::process::geteuid().is_root() {
            chown(path, Some(uid), Some(uid)).unwrap();
        }
    }

    /// A node of the cluster that others reach here.
    pub fn node(&mut self, name: &str, peer: &str) {
        let record = json!({"name": name, "id": "0".repeat(32), "peer": peer, "cpus": 1, "memory_bytes": 1, "version": "0"});
        self.changes.push(RecordChange::PutNode(serde_json::from_value(record).unwrap()));
    }

    pub fn tenant(&mut self, record: Value) {
        self.changes.push(tenant_change(record));
    }

    pub fn site(&mut self, name: &str, tenant: &str, backend: Value) {
        self.site_with(name, tenant, backend, json!({}));
    }

    /// A site with more fields than it must have.
    pub fn site_with(&mut self, name: &str, tenant: &str, backend: Value, more: Value) {
        self.changes.push(site_change(name, tenant, backend, more));
    }

    /// A tenant of `new` with more fields than it has there.
    pub fn tenant_with(&self, name: &str, more: Value) -> RecordChange {
        let uid = if name == "alice" { ALICE } else { BOB };
        let record = json!({"name": name, "uid": uid, "gid": uid, "home": self.home(name), "php_workers": 2});
        tenant_change(merged(record, more))
    }

    /// A file of alice's in her `www`, executable.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        self.script_of("alice", name, text)
    }

    pub fn script_of(&self, tenant: &str, name: &str, text: &str) -> PathBuf {
        let path = self.home(tenant).join("www").join(name);
        fs::write(&path, text).unwrap();
        set_mode(&path, 0o755);
        self.own(&path, if tenant == "alice" { ALICE } else { BOB });
        path
    }

    /// A site `cgi` of alice's with one program `x.cgi`, a shell script.
    pub fn with_cgi(mut self, script: &str) -> Self {
        self.script("x.cgi", &format!("#!/bin/sh\n{script}\n"));
        self.site("cgi", "alice", cgi());
        self
    }

    /// Starts the keeper and returns when it knows all records.
    pub fn start(self) -> Self {
        self.restart();
        self
    }

    pub fn restart(&self) {
        let log = fs::File::options().create(true).append(true).open(self.log_path()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let exe = std::env::current_exe().unwrap();
        let mut command = match (&self.group, &self.prelude) {
            (None, None) => Command::new(exe),
            (_, Some(prelude)) => {
                let mut shell = Command::new("unshare");
                shell.args(["--mount", "--net", "sh", "-ec", &format!("{prelude}; exec \"$0\"")]).arg(exe);
                shell
            }
            (Some(group), None) => {
                let mut shell = Command::new("sh");
                shell.arg("-c").arg("echo 0 > \"$0/cgroup.procs\" && exec \"$1\"").arg(group).arg(exe);
                shell
            }
        };
        self.starts.fetch_add(1, Ordering::Relaxed);
        let keeper = command
            .env(KEEPER, self.mark())
            .stdin(Stdio::from(self.listener.try_clone().unwrap()))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        ours.set_read_timeout(Some(TIMEOUT)).unwrap();
        *self.running() = Some(Started { keeper, feed: ours });
        self.tell(&FromSupervisor::Options(serde_json::to_value(&self.options).unwrap()));
        self.apply(self.changes.clone());
    }

    /// Sends changed settings. They hold before what is sent next.
    pub fn change(&self, change: impl FnOnce(&mut KeeperConfig)) {
        let mut options = self.options.clone();
        change(&mut options);
        self.tell(&FromSupervisor::Options(serde_json::to_value(&options).unwrap()));
        // Answered by who has acted on what came before.
        self.ask(FeedQuery::Status);
    }

    /// Sends changes and waits until they hold.
    pub fn apply(&self, changes: Vec<RecordChange>) {
        self.tell(&FromSupervisor::Apply(changes));
        self.tell(&FromSupervisor::Commit { revision: 7 });
        assert_eq!(self.hear(), ToSupervisor::Ready { revision: 7 }, "{}", self.log());
    }

    pub fn ask(&self, question: FeedQuery) -> String {
        self.tell(&FromSupervisor::Ask { tag: 5, question });
        match self.hear() {
            ToSupervisor::Answer { tag: 5, text } => text,
            other => panic!("{other:?}"),
        }
    }

    /// The tree of cells, as `nagaya cells` gets it.
    pub fn cells(&self) -> Value {
        serde_json::from_str(&self.ask(FeedQuery::Cells)).unwrap()
    }

    /// Does this to the instance of a site; what comes of it.
    pub fn act(&self, site: &str, act: InstanceCommand) -> Value {
        serde_json::from_str(&self.ask(FeedQuery::Instance { site: site.into(), act })).unwrap()
    }

    /// One cell of the tree by its path.
    pub fn cell(&self, path: &str) -> Option<Value> {
        self.cells()["cells"].as_array().unwrap().iter().find(|cell| cell["path"] == path).cloned()
    }

    /// The value of one line of the metrics.
    pub fn metric(&self, line: &str) -> u64 {
        let text = self.ask(FeedQuery::Metrics);
        let found = text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("no {line} in {text}"))
    }

    pub fn tell(&self, frame: &FromSupervisor) {
        feed::write(&mut self.running().as_mut().unwrap().feed, frame).unwrap();
    }

    /// For what is more than a frame.
    pub fn with_feed(&self, act: impl FnOnce(&UnixStream)) {
        act(&self.running().as_ref().unwrap().feed);
    }

    pub fn hear(&self) -> ToSupervisor {
        feed::read(&mut self.running().as_mut().unwrap().feed)
            .unwrap()
            .unwrap_or_else(|| panic!("the keeper ended:\n{}", self.log()))
    }

    /// Ends the keeper by closing its feed. Returns whether it ended well.
    pub fn drain(&self) -> bool {
        let mut running = self.running().take().unwrap();
        running.feed.shutdown(Shutdown::Both).unwrap();
        running.keeper.wait().unwrap().success()
    }

    /// `kill -9`.
    pub fn kill(&self) -> u32 {
        let mut running = self.running().take().unwrap();
        running.keeper.kill().unwrap();
        running.keeper.wait().unwrap();
        running.keeper.id()
    }

    /// A test that failed while it spoke with the keeper has poisoned the lock, and not what is behind it.
    fn running(&self) -> MutexGuard<'_, Option<Started>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn keeper_pid(&self) -> u32 {
        self.running().as_ref().unwrap().keeper.id()
    }

    /// What all copies of the keeper that runs now have in their environment, and no other process has.
    pub fn mark(&self) -> String {
        format!("{} {}", self.dir.path().display(), self.starts.load(Ordering::Relaxed))
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("keeper.sock")
    }

    /// Runs a test's body on a runtime like an edge thread's.
    pub fn run<R>(&self, body: impl AsyncFnOnce(Rc<KeeperClient>) -> R) -> R {
        self.run_within(TIMEOUT, body)
    }

    /// As `run`, for work that takes longer.
    pub fn run_within<R>(&self, limit: Duration, body: impl AsyncFnOnce(Rc<KeeperClient>) -> R) -> R {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let body = async { body(KeeperClient::connect(&self.socket()).await.unwrap()).await };
            tokio::time::timeout(limit, body).await.unwrap_or_else(|_| panic!("it hangs:\n{}", self.log()))
        })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.running().is_some() {
            self.drain();
        }
        if std::thread::panicking() {
            eprintln!("--- the keeper's log:\n{}", self.log());
        }
    }
}

/// A backend whose programs are in `www`.
pub fn cgi() -> Value {
    json!({"kind": "cgi", "root": "www"})
}

pub fn tenant_change(record: Value) -> RecordChange {
    RecordChange::PutTenant(Box::new(serde_json::from_value::<Tenant>(record).unwrap()))
}

pub fn site_change(name: &str, tenant: &str, backend: Value, more: Value) -> RecordChange {
    let record =
        json!({"name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend});
    RecordChange::PutSite(Box::new(serde_json::from_value::<Site>(merged(record, more)).unwrap()))
}

fn merged(mut record: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("{more} is not an object") };
    record.as_object_mut().unwrap().extend(more);
    record
}

pub fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The failure and code of a refused call.
#[track_caller]
pub fn refusal<T>(result: Result<T, KeeperCallError>) -> (FailureKind, u16) {
    match result {
        Err(KeeperCallError::Refused { failure, code, message }) => {
            assert!(!message.is_empty() && message.len() < 2000, "{message}");
            (failure, code)
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it was not refused"),
    }
}

/// Runs the one program of `with_cgi` under no limits of its own.
pub async fn run_cgi(keeper: &KeeperClient) -> CgiProcess {
    run_in(keeper, "cgi", &Confinement::default()).await
}

/// Runs the program `x.cgi` of a site.
pub async fn run_in(keeper: &KeeperClient, site: &str, confinement: &Confinement) -> CgiProcess {
    keeper.spawn_cgi(&site_name(site), "x.cgi", Vec::new(), confinement).await.unwrap()
}

/// Runs it and reads the pid that it says first.
pub async fn run_and_pid(keeper: &KeeperClient, site: &str, confinement: &Confinement) -> (i32, Running) {
    let CgiProcess { stdin, stdout, guard, cell } = run_in(keeper, site, confinement).await;
    let mut out = pipe(stdout);
    let pid = read_line(&mut out).await.parse().unwrap();
    (pid, Running { stdin, out, guard, cell })
}

/// A program whose output is being read.
pub struct Running {
    pub stdin: OwnedFd,
    pub out: tokio::net::unix::pipe::Receiver,
    pub guard: ProcessGuard,
    pub cell: Box<str>,
}

/// Everything until the end.
pub async fn read_all(fd: OwnedFd) -> String {
    use tokio::io::AsyncReadExt;
    let mut text = String::new();
    tokio::net::unix::pipe::Receiver::from_owned_fd(fd).unwrap().read_to_string(&mut text).await.unwrap();
    text
}

/// The next line, without its end.
pub async fn read_line(pipe: &mut tokio::net::unix::pipe::Receiver) -> String {
    use tokio::io::AsyncReadExt;
    let mut line = Vec::new();
    loop {
        match pipe.read_u8().await.unwrap() {
            b'\n' => return String::from_utf8(line).unwrap(),
            byte => line.push(byte),
        }
    }
}

pub fn pipe(fd: OwnedFd) -> tokio::net::unix::pipe::Receiver {
    tokio::net::unix::pipe::Receiver::from_owned_fd(fd).unwrap()
}

/// Everything a non-blocking Unix socket gives until its end.
pub async fn read_socket(fd: OwnedFd) -> String {
    use tokio::io::AsyncReadExt;
    let mut text = String::new();
    let mut stream = tokio::net::UnixStream::from_std(UnixStream::from(fd)).unwrap();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// Looks until it is so; the test's own timeout ends what never is.
pub async fn until_so(mut is_so: impl FnMut() -> bool) {
    let mut interval = tokio::time::interval(Duration::from_millis(5));
    while !is_so() {
        interval.tick().await;
    }
}

/// The keeper with this mark, and the copies it has made of itself.
pub fn keepers_processes(mark: &str) -> Vec<i32> {
    let wanted = format!("{KEEPER}={mark}");
    let has_it = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes())
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has_it).collect()
}

/// Whether a process runs; a zombie nobody has reaped yet does not.
pub fn is_alive(pid: i32) -> bool {
    let mut stat = String::new();
    let read =
        fs::File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read_to_string(&mut stat));
    read.is_ok() && !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Returns once a process has ended; panics if it does not.
pub fn wait_dead(pid: i32) {
    // No such process: it has ended.
    let Ok(pidfd) = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()) else { return };
    let until = Timespec { tv_sec: 30, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&until)).unwrap();
    assert_eq!(ready, 1, "process {pid} still runs");
}

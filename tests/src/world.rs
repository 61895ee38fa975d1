//! A running node in a temporary directory, built up by an operator's means only: `nagaya.toml`, the command line,
//! signals.
//!
//! Not here: what the node is asked (`client`), what stands behind it (`backend`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backend::Backend;
use crate::client::{self, Response};
use crate::{machine, wait};

/// Uids of tenants count up from here; nobody on a common machine has them.
const UID_BASE: u32 = 210_000;

/// A name in a tenant's home of what is root's.
pub const OF_ROOT: &str = "of-root";

/// Bytes of each log shown when a test fails.
const LOG_SHOWN: usize = 6_000;

/// What a node is made of before it starts.
pub struct Builder {
    dir: TempDir,
    sections: BTreeMap<String, String>,
    listen: String,
    tenants: Vec<&'static str>,
    sites: Vec<Value>,
    user: Option<u32>,
    before: Vec<String>,
}

/// A running node.
pub struct World {
    dir: Option<TempDir>,
    program: PathBuf,
    user: Option<u32>,
    before: Vec<String>,
    tenants: Vec<&'static str>,
    node: Mutex<Option<Child>>,
    /// Servers that must live as long as the node.
    kept: Mutex<Vec<Backend>>,
}

impl Builder {
    /// Adds lines to a section of `nagaya.toml`; `""` is the part before the first one.
    pub fn set(mut self, section: &str, lines: &str) -> Self {
        let text = self.sections.entry(section.to_owned()).or_default();
        text.push_str(lines);
        text.push('\n');
        self
    }

    /// Replaces a line that was set before.
    pub fn reset(mut self, section: &str, line: &str, by: &str) -> Self {
        let text = self.sections.get_mut(section).filter(|text| text.contains(line));
        let text = text.unwrap_or_else(|| panic!("[{section}] has no {line}"));
        *text = text.replace(line, by);
        self
    }

    /// Listens with TLS too. Certificates are files in `certificates` of the node's directory.
    pub fn tls(mut self) -> Self {
        let dir = self.path("certificates");
        fs::create_dir(&dir).expect("our own directory");
        self.listen.push_str("[[listen]]\naddress = \"127.0.0.1:0\"\ntls = true\n");
        self.set("tls", &format!("certificates = {dir:?}"))
    }

    /// Listens on this address too.
    pub fn listen(mut self, address: &str) -> Self {
        self.listen.push_str(&format!("[[listen]]\naddress = \"{address}\"\n"));
        self
    }

    /// Listens for proxies at 127.0.0.9 that speak the PROXY protocol, without TLS and with it. Needs `tls`.
    pub fn listen_behind_proxy(mut self) -> Self {
        for tls in [false, true] {
            self.listen.push_str(&format!(
                "[[listen]]\naddress = \"127.0.0.1:0\"\ntls = {tls}\nproxy_protocol = true\nproxy_protocol_from = [\"127.0.0.9\"]\n"
            ));
        }
        self
    }

    /// A rule for requests, as `rules/NAME.rb` in the node's directory. `more` are further lines of its table.
    pub fn rule(mut self, name: &str, phase: &str, text: &str, more: &str) -> Self {
        let file = self.path(&format!("rules/{name}.rb"));
        machine::write(&file, text);
        self.listen.push_str(&format!("[[rules]]\nphase = {phase:?}\nfile = {file:?}\n{more}\n"));
        self
    }

    /// A rule of the store, of which the configuration has only the name.
    pub fn stored_rule(mut self, name: &str, phase: &str, more: &str) -> Self {
        self.listen.push_str(&format!("[[rules]]\nphase = {phase:?}\nfile = \"store:{name}\"\n{more}\n"));
        self
    }

    /// Adds a table of a list to `nagaya.toml`, as it stands there.
    pub fn table(mut self, table: &str) -> Self {
        self.listen.push_str(table);
        self
    }

    /// A tenant with a home that nobody else can look into. Its uid is its own.
    pub fn tenant(mut self, name: &'static str) -> Self {
        self.tenants.push(name);
        let home = self.path("home").join(name);
        fs::create_dir_all(&home).expect("our own directory");
        if machine::is_root() {
            let uid = uid_of(&self.tenants, name);
            std::os::unix::fs::chown(&home, Some(uid), Some(uid)).expect("root may give files away");
            fs::set_permissions(&home, mode(0o700)).expect("our own directory");
        }
        self
    }

    /// Imported once the node runs.
    pub fn site(mut self, record: Value) -> Self {
        self.sites.push(record);
        self
    }

    /// A tenant, unless there is one already, and a site of it at `NAME.test`.
    pub fn site_of(self, tenant: &'static str, name: &str, backend: Value) -> Self {
        let builder = if self.tenants.contains(&tenant) { self } else { self.tenant(tenant) };
        builder.site(
            json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend }),
        )
    }

    /// Starts nagaya with this user's rights.
    pub fn user(mut self, uid: u32) -> Self {
        self.user = Some(uid);
        self
    }

    /// Starts nagaya by another program, e.g. `["prlimit", "--nofile=64"]`.
    pub fn before(mut self, words: &[&str]) -> Self {
        self.before = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the configuration and starts the node.
    #[track_caller]
    pub fn start(self) -> World {
        let sites = self.sites.clone();
        let world = self.prepare();
        world.launch();
        world.import(&sites);
        world
    }

    /// Writes the configuration and starts nothing.
    #[track_caller]
    pub fn prepare(self) -> World {
        let dir = self.dir.path();
        let at = |name: &str| format!("{:?}", dir.join(name));
        let mut sections = self.sections;
        let mut put = |section: &str, line: String| {
            let text = sections.entry(section.to_owned()).or_default();
            // What the test has set stands.
            let key = line.split(' ').next().unwrap_or_default().to_owned();
            if !text.lines().any(|line| line.split(' ').next() == Some(&key)) {
                text.push_str(&line);
                text.push('\n');
            }
        };
        put("", "node = \"test\"".into());
        put("", format!("runtime_dir = {}", at("run")));
        put("", format!("state_dir = {}", at("state")));
        put("log", format!("access = {}", at("log/access.log")));
        put("log", "access_format = \"json\"".into());
        put("edge", "threads = 2".into());
        let mut text = sections.remove("").unwrap_or_default();
        text.push_str(&self.listen);
        for (name, lines) in &sections {
            text.push_str(&format!("[{name}]\n{lines}"));
        }
        machine::write(&dir.join("nagaya.toml"), text);
        let mut program = program();
        if let Some(uid) = self.user {
            // The program may lie where this user cannot go.
            let copy = dir.join("nagaya");
            fs::copy(&program, &copy).expect("the built program can be copied");
            machine::make_executable(&copy);
            program = copy;
            machine::run("chown", &["-R", &format!("{uid}:{uid}"), &dir.to_string_lossy()]);
        }
        World {
            dir: Some(self.dir),
            program,
            user: self.user,
            before: self.before,
            tenants: self.tenants,
            node: Mutex::new(None),
            kept: Mutex::default(),
        }
    }
}

impl World {
    pub fn builder() -> Builder {
        let dir = tempfile::Builder::new().prefix("nagaya-e2e-").tempdir().expect("a temporary directory");
        // Tenants and the edge reach their files through it.
        fs::set_permissions(dir.path(), mode(0o755)).expect("our own directory");
        Builder {
            dir,
            sections: BTreeMap::new(),
            listen: "[[listen]]\naddress = \"127.0.0.1:0\"\n".into(),
            tenants: Vec::new(),
            sites: Vec::new(),
            user: None,
            before: Vec::new(),
        }
    }

    // === The node's process ===

    /// Starts the node and waits until it serves.
    #[track_caller]
    pub fn launch(&self) {
        self.spawn();
        wait::until("the node serves", || {
            let mut node = self.node.lock().expect("no holder panics");
            if let Some(status) = node.as_mut().and_then(|node| node.try_wait().expect("our own child")) {
                drop(node);
                self.show_logs("start");
                panic!("the node ended at its start: {status}");
            }
            drop(node);
            self.try_status().is_some_and(|status| status["healthy"] == true)
        });
        for tenant in &self.tenants {
            let uid = uid_of(&self.tenants, tenant);
            let home = self.home(tenant);
            let record = json!({ "name": tenant, "uid": uid, "gid": uid, "home": home });
            self.import_lines(&format!("{}\n", json!({ "tenant": record })));
        }
    }

    /// Starts the node without waiting.
    #[track_caller]
    pub fn spawn(&self) {
        let log =
            File::options().create(true).append(true).open(self.path("output.log")).expect("our own file");
        let child = self
            .command(&["serve"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("an open file"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", self.program.display()));
        *self.node.lock().expect("no holder panics") = Some(child);
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut words: Vec<String> = self.before.clone();
        if arguments != ["serve"] {
            words.clear();
        }
        if let Some(uid) = self.user {
            let user = [format!("--reuid={uid}"), format!("--regid={uid}"), "--clear-groups".into()];
            words.push("setpriv".into());
            words.extend(user);
        }
        words.push(self.program.to_string_lossy().into_owned());
        words.push("--config".into());
        words.push(self.path("nagaya.toml").to_string_lossy().into_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(arguments);
        command
    }

    /// The supervisor's process id.
    #[track_caller]
    pub fn pid(&self) -> i32 {
        let node = self.node.lock().expect("no holder panics");
        i32::try_from(node.as_ref().expect("the node was started").id()).expect("ids are small")
    }

    /// The process id of `edge` or `keeper`, once it runs.
    #[track_caller]
    pub fn pid_of(&self, process: &str) -> i32 {
        wait::until_some(&format!("the {process} runs"), || {
            let status = self.try_status()?;
            let found = status["processes"].as_array()?.iter().find(|row| row["name"] == process)?.clone();
            i32::try_from(found["pid"].as_i64()?).ok()
        })
    }

    /// How often `edge` or `keeper` was started anew.
    #[track_caller]
    pub fn restarts_of(&self, process: &str) -> u64 {
        let status = self.status();
        let rows = status["processes"].as_array().expect("a list of processes");
        let row = rows.iter().find(|row| row["name"] == process).expect("every process is listed");
        row["restarts"].as_u64().expect("a count")
    }

    /// Waits for the end of a node that was told to end, or that never really began.
    #[track_caller]
    pub fn wait_for_end(&self) -> ExitStatus {
        let mut node = self.node.lock().expect("no holder panics").take().expect("the node was started");
        wait::until_some("the node ends", || node.try_wait().expect("our own child"))
    }

    /// Ends the node and checks that nothing of it is left: no process, no file that cannot be removed.
    pub fn stop(mut self) {
        let processes = [self.pid(), self.pid_of("edge"), self.pid_of("keeper")];
        machine::signal(self.pid(), "TERM");
        let status = self.wait_for_end();
        if !status.success() {
            self.show_logs("stop");
        }
        assert!(status.success(), "the node ended with {status}");
        for id in processes {
            wait::until(&format!("process {id} is gone"), || !machine::is_running(id));
        }
        let groups = cgroups_of(processes[2]);
        assert!(groups.is_empty(), "control groups are left: {groups:?}");
        let dir = self.dir.take().expect("stopped only once");
        machine::wait_until_gone(&dir.path().to_string_lossy());
        // A runtime directory that was there before stays, empty.
        let left: Vec<_> = fs::read_dir(dir.path().join("run")).into_iter().flatten().flatten().collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        dir.close().expect("nothing holds the directory");
    }

    /// Keeps a server behind the node running until the node is stopped.
    pub fn keep(&self, backend: Backend) {
        self.kept.lock().expect("no holder panics").push(backend);
    }

    /// Looks at the `at`th server that was kept.
    #[track_caller]
    pub fn with_kept<T>(&self, at: usize, look: impl FnOnce(&Backend) -> T) -> T {
        look(&self.kept.lock().expect("no holder panics")[at])
    }

    // === Its files ===

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.as_ref().expect("not stopped yet").path().join(name)
    }

    pub fn home(&self, tenant: &str) -> PathBuf {
        self.path("home").join(tenant)
    }

    pub fn uid(&self, tenant: &str) -> u32 {
        uid_of(&self.tenants, tenant)
    }

    /// Writes a file into a tenant's home, world-readable and the tenant's own.
    #[track_caller]
    pub fn write(&self, tenant: &str, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.home(tenant).join(name);
        machine::write(&path, content);
        self.give(tenant);
        path
    }

    /// Writes a program into a tenant's home.
    #[track_caller]
    pub fn write_program(&self, tenant: &str, name: &str, content: &str) -> PathBuf {
        let path = self.write(tenant, name, content);
        machine::make_executable(&path);
        path
    }

    /// Replaces a rule's text, in place as an editor does.
    #[track_caller]
    pub fn write_rule(&self, name: &str, text: &str) {
        machine::write(&self.path(&format!("rules/{name}.rb")), text);
    }

    /// Makes everything in a tenant's home its own, but for what is named `OF_ROOT`. Tests that share a node call this
    /// beside each other.
    #[track_caller]
    pub fn give(&self, tenant: &str) {
        if machine::is_root() {
            // Without root, the node can only open what is its own.
            let uid = self.user.unwrap_or_else(|| self.uid(tenant));
            give_tree(&self.home(tenant), uid);
        }
    }

    /// What the node's processes have logged so far.
    pub fn log(&self) -> String {
        fs::read(self.path("output.log"))
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// The lines of the access log so far.
    pub fn access_log(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("log/access.log")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The line of the access log for a request, once it is written.
    #[track_caller]
    pub fn logged(&self, id: &str) -> Value {
        wait::until_some(&format!("the access log has request {id}"), || {
            self.access_log().into_iter().find(|line| line["id"] == id)
        })
    }

    /// The cells as `nagaya cells --json` lists them.
    #[track_caller]
    pub fn cells(&self) -> Vec<Value> {
        // On a busy machine a keeper may be late, and the command gives it up after a while (NGY0510).
        let told = wait::until_some("the keeper tells its cells", || {
            let told = self.try_cli(&["cells", "--json"]);
            let said = [&told.stdout, &told.stderr].map(|said| String::from_utf8_lossy(said).into_owned());
            let is_late = !told.status.success() && said.iter().any(|said| said.contains("NGY0510"));
            assert!(told.status.success() || is_late, "nagaya cells: {}\n{said:?}", told.status);
            (!is_late).then_some(told.stdout)
        });
        let all: Value = serde_json::from_slice(&told).expect("cells are JSON");
        all["cells"].as_array().expect("a list of cells").clone()
    }

    /// Shows the ends of the logs, for a test that failed.
    pub fn show_logs(&self, test: &str) {
        let log = self.log();
        let from = (0..=log.len().saturating_sub(LOG_SHOWN)).rev().find(|at| log.is_char_boundary(*at));
        let mut err = std::io::stderr().lock();
        let _ = writeln!(err, "--- log of the node of {test} ---\n{}\n---", &log[from.unwrap_or(0)..]);
        for line in self.access_log().iter().rev().take(10) {
            let _ = writeln!(err, "access: {line}");
        }
    }

    // === Its command line and admin interface ===

    /// Runs a command to its end, however it ends.
    #[track_caller]
    pub fn try_cli(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().expect("the program runs")
    }

    /// Runs a command that must succeed.
    #[track_caller]
    pub fn cli(&self, arguments: &[&str]) -> String {
        let output = self.try_cli(arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "nagaya {arguments:?}: {}\n{text}{errors}", output.status);
        text.into_owned()
    }

    /// Puts a rule into the store, however that ends.
    #[track_caller]
    pub fn try_set_rule(&self, name: &str, text: &str) -> Output {
        let file = self.path(&format!("drafts/{name}.rb"));
        machine::write(&file, text);
        self.try_cli(&["rule", "set", name, &file.to_string_lossy()])
    }

    #[track_caller]
    pub fn set_rule(&self, name: &str, text: &str) {
        let output = self.try_set_rule(name, text);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }

    #[track_caller]
    pub fn import(&self, sites: &[Value]) {
        let lines: String = sites.iter().map(|site| format!("{}\n", json!({ "site": site }))).collect();
        if !lines.is_empty() {
            self.import_lines(&lines);
        }
    }

    #[track_caller]
    pub fn import_lines(&self, lines: &str) {
        let output = self.try_import(lines);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "import: {}{errors}", String::from_utf8_lossy(&output.stdout));
    }

    #[track_caller]
    pub fn try_import(&self, lines: &str) -> Output {
        let mut command = self.command(&["site", "import", "-"]);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("the program runs");
        let mut stdin = child.stdin.take().expect("it is piped");
        // A refused import need not have been read to its end.
        let _ = stdin.write_all(lines.as_bytes());
        drop(stdin);
        child.wait_with_output().expect("our own child")
    }

    pub fn try_status(&self) -> Option<Value> {
        serde_json::from_str(&self.admin("/v1/status")?).ok()
    }

    #[track_caller]
    pub fn status(&self) -> Value {
        wait::until_some("the node tells its status", || self.try_status())
    }

    /// The body of a GET on the admin socket.
    pub fn admin(&self, path: &str) -> Option<String> {
        let mut socket = UnixStream::connect(self.path("run/admin.sock")).ok()?;
        socket.set_read_timeout(Some(wait::SOON)).ok()?;
        write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        Some(body.to_owned())
    }

    /// The sum of a metric over its labels, `labels` being a part that must stand in its line.
    #[track_caller]
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        let page = self.admin("/metrics").expect("the admin socket answers");
        let lines = page.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        let values = lines.filter_map(|line| {
            let rest = &line[name.len()..];
            rest.starts_with(['{', ' ']).then(|| line.rsplit(' ').next()?.parse::<f64>().ok()).flatten()
        });
        values.sum()
    }

    // === Its addresses ===

    /// Where it listens without TLS.
    #[track_caller]
    pub fn http(&self) -> SocketAddr {
        self.address("127.0.0.1", false)
    }

    /// Where it listens with TLS.
    #[track_caller]
    pub fn https(&self) -> SocketAddr {
        self.address("127.0.0.1", true)
    }

    /// Where it listens with or without TLS and takes PROXY headers.
    #[track_caller]
    pub fn behind_proxy(&self, tls: bool) -> SocketAddr {
        let status = self.status();
        let rows = status["listen"].as_array().expect("a list of addresses");
        let found = rows.iter().find(|row| row["tls"] == tls && row["proxy_protocol"] == true);
        let address = found.and_then(|row| row["address"].as_str()?.parse().ok());
        address.unwrap_or_else(|| panic!("it takes no PROXY headers: {rows:?}"))
    }

    /// Where it listens on this IP address.
    #[track_caller]
    pub fn address(&self, ip: &str, tls: bool) -> SocketAddr {
        let status = self.status();
        let rows = status["listen"].as_array().expect("a list of addresses");
        let rows = rows.iter().filter(|row| row["tls"] == tls && row["proxy_protocol"] == false);
        let texts = rows.clone().filter_map(|row| row["address"].as_str());
        let found = texts.filter(|text| text.starts_with(ip)).find_map(|text| text.parse().ok());
        found.unwrap_or_else(|| panic!("it does not listen on {ip}: {status}"))
    }

    /// A GET on a connection of its own.
    #[track_caller]
    pub fn get(&self, host: &str, target: &str) -> Response {
        client::get(self.http(), host, target)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let Some(mut node) = self.node.lock().ok().and_then(|mut node| node.take()) else { return };
        if std::thread::panicking() {
            self.show_logs("a test that failed");
        }
        // The test has failed already; what matters now is that nothing stays behind.
        let _ = Command::new("kill").arg(node.id().to_string()).status();
        let ended = wait::within(wait::SOON, || node.try_wait().ok().flatten()).is_some();
        if !ended {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

fn mode(bits: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(bits)
}

fn uid_of(tenants: &[&str], name: &str) -> u32 {
    let at = tenants.iter().position(|known| *known == name).unwrap_or_else(|| panic!("no tenant '{name}'"));
    UID_BASE + u32::try_from(at).expect("a few tenants")
}

/// Control groups that this keeper made, in whichever hierarchy.
pub fn cgroups_of(keeper: i32) -> Vec<PathBuf> {
    let below = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let trees = below("/sys/fs/cgroup".into()).map(|hierarchy| hierarchy.join("nagaya"));
    let groups = trees.chain(["/sys/fs/cgroup/nagaya".into()]).flat_map(below);
    let own = format!("k{keeper}-");
    groups
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&own)))
        .collect()
}

/// The built `nagaya`.
pub fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("NAGAYA_BIN") {
        return path.into();
    }
    // This test is TARGET/PROFILE/deps/e2e-HASH. Of the programs there, the newest is the one that was just built.
    let own = std::env::current_exe().expect("a running program has a file");
    let target = own.ancestors().nth(3).expect("cargo's layout of directories");
    let places = ["release", "debug"].map(|profile| target.join(profile).join("nagaya"));
    let age = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    let found = places.into_iter().filter(|path| path.is_file()).max_by_key(age);
    found.unwrap_or_else(|| {
        panic!(
            "no nagaya in {}: build it with `cargo build -p nagaya`, or name it in NAGAYA_BIN",
            target.display()
        )
    })
}

/// Gives this and all beneath it to a tenant, but for what is its own already: to change an owner is to change a file,
/// which ends images of what has read it. Tests that share a node rename files meanwhile. These give them themselves.
#[track_caller]
fn give_tree(path: &Path, uid: u32) {
    let is_of_root = path.file_name().is_some_and(|name| name == OF_ROOT);
    let Ok(found) = fs::symlink_metadata(path) else { return };
    if is_of_root {
        return;
    }
    if (found.uid(), found.gid()) != (uid, uid) {
        match std::os::unix::fs::lchown(path, Some(uid), Some(uid)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            given => given.unwrap_or_else(|error| panic!("giving {}: {error}", path.display())),
        }
    }
    let entries = if found.is_dir() { fs::read_dir(path).ok() } else { None };
    entries.into_iter().flatten().flatten().for_each(|entry| give_tree(&entry.path(), uid));
}

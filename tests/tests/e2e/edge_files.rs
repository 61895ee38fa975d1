//! What the edge sees of the file system: only what it opens, whatever its user may read; and all of that, also after it was
//! replaced.
//!
//! Not here: other walls around the edge (`tenants`), links in document roots (`static_files`, `tenants`).

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nagaya_tests::backend::Backend;
use nagaya_tests::calls::count_calls;
use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::{Builder, World};
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "edge_files",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            the_edge_sees_only_what_it_opens,
            no_directory_of_the_edge_leads_up,
            the_edge_writes_into_no_document_root,
            the_wall_is_told,
            a_server_is_told_that_the_edge_connects,
            a_server_may_come_later_and_be_replaced,
            a_link_of_a_tenant_leads_to_no_other_server,
            a_server_whose_queue_is_full_is_502,
            a_socket_closed_to_the_edge_is_502,
            a_server_with_a_name_is_reached,
            the_time_costs_no_system_call,
        ],
    ),
};

pub const ALONE: Suite = Suite {
    name: "edge_files",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        rules_in_a_directory_that_is_replaced_hold,
        rules_behind_a_link_that_is_moved_hold,
        a_path_that_cannot_be_shown_hides_no_other,
        a_reload_shows_the_edge_new_paths,
        an_edge_that_is_started_anew_sees_the_same,
        without_the_right_to_mount_it_serves_and_says_so,
    ]),
};

/// What the C library reads before it asks a name server.
const NAME_FILES: [&str; 5] = ["resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf"];

fn http(path: &Path) -> Value {
    json!({ "kind": "http", "address": format!("unix:{}", path.display()) })
}

fn world() -> World {
    let builder = World::builder();
    let outside = builder.path("servers/one.sock");
    fs::create_dir(builder.path("servers")).expect("our own directory");
    let home = builder.path("home/alice");
    let world = builder
        .rule("mark", "fixups", "Apache::Request.new.headers_out[\"X-Mark\"] = \"1\"\n", "")
        .stored_rule("stored", "fixups", "")
        .site_of("alice", "www", json!({ "kind": "static", "root": "www" }))
        .site_of("alice", "outside", http(&outside))
        .site_of("alice", "inside", http(&home.join("app.sock")))
        .site_of("alice", "link", http(&home.join("link.sock")))
        .site_of("alice", "up", http(&home.join("run/app.sock")))
        .start();
    world.set_rule("stored", "Apache::Request.new.headers_out[\"X-Stored\"] = \"1\"\n");
    world.write("alice", "www/index.html", "alice's page");
    world.write("alice", "secret.txt", "readable by all");
    // As an operator opens it, so that the edge's user reaches a socket in it.
    fs::set_permissions(world.home("alice"), fs::Permissions::from_mode(0o711)).expect("ours");
    world
}

/// A server at a Unix socket that answers each connection with this text, as long as the test's program runs. Tells the uid
/// of whoever connects, in `X-Peer`.
fn serve_at(path: &Path, text: &'static str) {
    let listener = UnixListener::bind(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("our own socket");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            answer(stream, text);
        }
    });
}

fn answer(mut stream: UnixStream, text: &str) {
    let peer = rustix::net::sockopt::socket_peercred(&stream).expect("it is connected").uid.as_raw();
    let mut head = [0; 4096];
    let len = text.len();
    // Who has left again wants nothing.
    let _ = stream.read(&mut head);
    let _ = stream.write_all(
        format!(
            "HTTP/1.1 200 OK\r\nX-Peer: {peer}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{text}"
        )
        .as_bytes(),
    );
}

/// Adds everything in a directory and beneath it.
fn list(top: &Path, at: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(top.join(at)).expect("root may look") {
        let entry = entry.expect("nothing goes meanwhile");
        let path = at.join(entry.file_name());
        if entry.file_type().expect("it is there").is_dir() {
            list(top, &path, found);
        }
        found.insert(path);
    }
}

fn seen_by(edge: i32) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    list(&PathBuf::from(format!("/proc/{edge}/root")), Path::new(""), &mut found);
    found
}

fn the_edge_sees_only_what_it_opens(world: &World) {
    world.get("www.test", "/").expect(200);
    let edge = world.pid_of("edge");
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/mnt")).expect("it runs");
    assert_ne!(namespace(edge), namespace(world.pid()));
    assert_eq!(namespace(world.pid_of("keeper")), namespace(world.pid()));
    let files = [
        world.path("log/access.log"),
        world.path("rules/mark.rb"),
        world.path("run/keeper.sock"),
        world.path("run/rules/stored.rb"),
        "/proc/stat".into(),
        "/proc/pressure/cpu".into(),
    ];
    let names = NAME_FILES.map(|name| Path::new("/etc").join(name));
    let real = files.iter().filter_map(|file| fs::canonicalize(file).ok());
    let mut expected: BTreeSet<PathBuf> = BTreeSet::from(["etc".into()]);
    for file in real.chain(names.into_iter().filter(|name| name.exists())) {
        let parts = file.ancestors().filter_map(|part| part.strip_prefix("/").ok());
        expected.extend(parts.filter(|part| !part.as_os_str().is_empty()).map(PathBuf::from));
    }
    assert_eq!(seen_by(edge), expected);
    // What an attacker would look for first.
    for path in ["etc/passwd", "home", "proc/1", "proc/self", "var", "usr", "dev"] {
        assert!(!Path::new(&format!("/proc/{edge}/root/{path}")).exists(), "{path}");
    }
    let copy = |name: &str| fs::read(format!("/proc/{edge}/root/etc/{name}")).ok();
    for name in NAME_FILES {
        assert_eq!(copy(name), fs::read(Path::new("/etc").join(name)).ok(), "{name}");
    }
    assert_eq!(machine::status_field(edge, "NoNewPrivs").as_deref(), Some("1"));
}

/// All directories that the edge has open, by the paths through which root looks at them.
fn directories_of(edge: i32) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{edge}/fd")).expect("root may look");
    let paths = open.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| fs::metadata(path).is_ok_and(|found| found.is_dir())).collect()
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn no_directory_of_the_edge_leads_up(world: &World) {
    let edge = world.pid_of("edge");
    let wanted = ["home/alice/www", "state/spool", "state/tickets"].map(|path| identity(&world.path(path)));
    let mut seen = BTreeSet::new();
    wait::until("the edge has its directories open", || {
        world.get("www.test", "/index.html").expect(200);
        for directory in directories_of(edge) {
            // One may be closed meanwhile, when it is opened anew.
            let (Some(own), Some(above)) = (identity(&directory), identity(&directory.join(".."))) else {
                continue;
            };
            assert_eq!(own, above, "{} leads up", directory.display());
            seen.insert(own);
        }
        wanted.iter().flatten().all(|wanted| seen.contains(wanted))
    });
    assert!(wanted.iter().all(Option::is_some));
    let cwd = PathBuf::from(format!("/proc/{edge}/cwd"));
    assert_eq!(identity(&cwd), identity(&PathBuf::from(format!("/proc/{edge}/root"))));
}

fn the_edge_writes_into_no_document_root(world: &World) {
    let edge = world.pid_of("edge");
    let www = world.home("alice").join("www");
    fs::set_permissions(&www, fs::Permissions::from_mode(0o777)).expect("ours");
    wait::until("a document root is open, and nobody writes through it", || {
        world.get("www.test", "/index.html").expect(200);
        let roots =
            directories_of(edge).into_iter().filter(|directory| identity(directory) == identity(&www));
        let refused: Vec<_> = roots
            .filter_map(|root| match fs::write(root.join("planted"), "") {
                Ok(()) => panic!("it was written through {}", root.display()),
                Err(error) => error.raw_os_error(),
            })
            .filter(|errno| *errno == rustix::io::Errno::ROFS.raw_os_error())
            .collect();
        !refused.is_empty()
    });
    assert!(!www.join("planted").exists());
    let root = PathBuf::from(format!("/proc/{edge}/root"));
    let planted = fs::write(root.join("planted"), "").expect_err("its own root is read-only");
    assert_eq!(planted.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
}

fn the_wall_is_told(world: &World) {
    let status = world.status();
    let rows = status["protections"].as_array().expect("a list").clone();
    let row = rows.iter().find(|row| row["name"] == "edge-files").expect("it is listed");
    assert_eq!(row["on"], true, "{row}");
}

fn a_server_is_told_that_the_edge_connects(world: &World) {
    let path = world.path("servers/one.sock");
    if !path.exists() {
        serve_at(&path, "outside");
    }
    let edge = world.pid_of("edge");
    let uid = machine::status_field(edge, "Uid").expect("it runs");
    let uid = uid.split_ascii_whitespace().next().expect("four of them").to_owned();
    assert_ne!(uid, "0");
    let answer = world.get("outside.test", "/").expect(200);
    assert_eq!((answer.text(), answer.header("x-peer")), ("outside".into(), Some(&*uid)));
}

fn a_server_may_come_later_and_be_replaced(world: &World) {
    let path = world.home("alice").join("app.sock");
    let missing = world.get("inside.test", "/").expect(502);
    assert!(!missing.text().contains(&*path.to_string_lossy()), "visitors learn no paths");
    serve_at(&path, "first");
    assert_eq!(world.get("inside.test", "/").expect(200).text(), "first");
    let next = world.home("alice").join("next.sock");
    serve_at(&next, "second");
    fs::rename(&next, &path).expect("ours");
    assert_eq!(world.get("inside.test", "/").expect(200).text(), "second");
    // A link within the home is the tenant's own matter.
    fs::remove_file(&path).expect("ours");
    serve_at(&next, "third");
    symlink("next.sock", &path).expect("ours");
    world.give("alice");
    assert_eq!(world.get("inside.test", "/").expect(200).text(), "third");
}

fn a_link_of_a_tenant_leads_to_no_other_server(world: &World) {
    let other = world.path("servers/other.sock");
    serve_at(&other, "somebody else's");
    let link = world.home("alice").join("link.sock");
    for to in [other.clone(), "../../servers/other.sock".into(), world.path("run/admin.sock")] {
        // It may be there from the last round.
        let _ = fs::remove_file(&link);
        symlink(&to, &link).expect("ours");
        world.give("alice");
        world.get("link.test", "/v1/status").expect(502);
    }
    // A directory in between, too.
    symlink(world.path("servers"), world.home("alice").join("run")).expect("ours");
    serve_at(&world.path("servers/app.sock"), "somebody else's");
    world.give("alice");
    world.get("up.test", "/").expect(502);
    let told = |line: &str| line.contains("NGY0328") && line.contains("home/alice/run/app.sock");
    wait::until("the operator is told", || world.log().lines().any(told));
}

/// A Unix socket that takes one connection into its queue and accepts none.
fn stuffed(path: &Path) -> (rustix::fd::OwnedFd, Vec<UnixStream>) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("short enough")).expect("a new path");
    rustix::net::listen(&socket, 0).expect("it is bound");
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("our own socket");
    let first = UnixStream::connect(path).expect("there is room for one");
    (socket, vec![first])
}

fn a_server_whose_queue_is_full_is_502(world: &World) {
    let path = world.path("servers/full.sock");
    let full = stuffed(&path);
    world.import(&[
        json!({ "name": "full", "tenant": "alice", "hosts": ["full.test"], "backend": http(&path) }),
    ]);
    world.get("full.test", "/").expect(502);
    // Nothing of the keeper's hangs on it.
    assert_eq!(world.get("www.test", "/").expect(200).text(), "alice's page");
    drop(full);
}

fn a_socket_closed_to_the_edge_is_502(world: &World) {
    let path = world.path("servers/closed.sock");
    serve_at(&path, "closed");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("ours");
    world.import(&[
        json!({ "name": "closed", "tenant": "alice", "hosts": ["closed.test"], "backend": http(&path) }),
    ]);
    world.get("closed.test", "/").expect(502);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    assert_eq!(world.get("closed.test", "/").expect(200).text(), "closed");
}

fn a_server_with_a_name_is_reached(world: &World) {
    let backend = Backend::answering(|peer, _| peer.answer("200 OK", "by its name"));
    let address = format!("localhost:{}", backend.address.port());
    world.import(&[json!({ "name": "named", "tenant": "alice", "hosts": ["named.test"],
        "backend": { "kind": "http", "address": address } })]);
    assert_eq!(world.get("named.test", "/").expect(200).text(), "by its name");
    world.keep(backend);
}

// === What is replaced ===

fn answering(status: u16) -> String {
    format!("answer {status}\n")
}

fn with_page(builder: Builder) -> World {
    let world = builder.site_of("alice", "www", json!({ "kind": "static", "root": "www" })).start();
    world.write("alice", "www/index.html", "page");
    world
}

#[track_caller]
fn wait_for(world: &World, status: u16) {
    wait::until(&format!("the rule answers {status}"), || world.get("www.test", "/").status == status);
}

fn rules_in_a_directory_that_is_replaced_hold() {
    let world = with_page(World::builder().rule("one", "access_checker", &answering(403), ""));
    world.get("www.test", "/").expect(403);
    let old = world.path("rules");
    let new = world.path("new");
    fs::create_dir(&new).expect("our own directory");
    fs::write(new.join("one.rb"), answering(410)).expect("ours");
    fs::rename(&old, world.path("old")).expect("ours");
    fs::rename(&new, &old).expect("ours");
    wait_for(&world, 410);
    // From now on the next request has each change, as before.
    for status in [404, 403, 410] {
        world.write_rule("one", &answering(status));
        world.get("www.test", "/").expect(status);
    }
    fs::write(world.path("old/one.rb"), answering(404)).expect("ours");
    world.get("www.test", "/").expect(410);
    world.stop();
}

fn rules_behind_a_link_that_is_moved_hold() {
    let builder = World::builder();
    for (release, status) in [(1, 403), (2, 410)] {
        machine::write(&builder.path(&format!("releases/{release}/rules/one.rb")), answering(status));
    }
    symlink("1", builder.path("releases/current")).expect("our own directory");
    let file = builder.path("releases/current/rules/one.rb");
    let rule = format!("[[rules]]\nphase = \"access_checker\"\nfile = {file:?}\n");
    let world = with_page(builder.table(&rule));
    world.get("www.test", "/").expect(403);
    symlink("2", world.path("releases/next")).expect("our own directory");
    fs::rename(world.path("releases/next"), world.path("releases/current")).expect("ours");
    wait_for(&world, 410);
    let edge = world.pid_of("edge");
    let root = PathBuf::from(format!("/proc/{edge}/root"));
    let at = |path: PathBuf| root.join(path.strip_prefix("/").expect("absolute"));
    wait::until("the old directory is not shown any more", || {
        !at(world.path("releases/1/rules/one.rb")).exists()
    });
    world.stop();
}

fn a_path_that_cannot_be_shown_hides_no_other() {
    // Mounts that must not be bound are refused by the kernel (mount(8), `--make-unbindable`).
    let builder = World::builder().rule("one", "access_checker", &answering(403), "");
    let logs = builder.path("log");
    fs::create_dir(&logs).expect("our own directory");
    let at = logs.to_string_lossy().into_owned();
    machine::run("mount", &["-t", "tmpfs", "none", &at]);
    machine::run("mount", &["--make-unbindable", &at]);
    let world = with_page(builder);
    world.get("www.test", "/").expect(403);
    for told in ["NGY0518", "NGY0424"] {
        assert!(world.log().contains(told), "{told}");
    }
    world.write_rule("one", &answering(410));
    world.get("www.test", "/").expect(410);
    machine::run("umount", &[&at]);
    // What is there now is shown, and the log begins once that is asked for.
    machine::signal(world.pid(), "USR1");
    wait::until("requests are logged", || {
        world.get("www.test", "/").expect(410);
        !world.access_log().is_empty()
    });
    world.stop();
}

fn a_reload_shows_the_edge_new_paths() {
    let world = with_page(World::builder().rule("one", "access_checker", &answering(403), ""));
    world.get("www.test", "/").expect(403);
    machine::write(&world.path("more/two.rb"), answering(410));
    let file = world.path("nagaya.toml");
    let text = fs::read_to_string(&file).expect("our own file");
    let moved = [("rules/one.rb", "more/two.rb"), ("log/access.log", "logs/other.log")];
    let text = moved.iter().fold(text, |text, (from, to)| text.replace(from, to));
    fs::write(&file, text).expect("our own file");
    machine::signal(world.pid(), "HUP");
    wait_for(&world, 410);
    wait::until("the new log is written", || {
        world.get("www.test", "/").expect(410);
        fs::read_to_string(world.path("logs/other.log")).is_ok_and(|log| log.contains("www.test"))
    });
    assert_eq!(world.restarts_of("edge"), 0);
    world.stop();
}

fn an_edge_that_is_started_anew_sees_the_same() {
    let world = with_page(World::builder().rule("one", "access_checker", &answering(403), ""));
    world.get("www.test", "/").expect(403);
    let before = seen_by(world.pid_of("edge"));
    machine::signal(world.pid_of("edge"), "KILL");
    wait::until("another edge runs", || world.restarts_of("edge") == 1);
    wait_for(&world, 403);
    assert_eq!(seen_by(world.pid_of("edge")), before);
    world.stop();
}

fn without_the_right_to_mount_it_serves_and_says_so() {
    let server = World::builder();
    let path = server.path("app.sock");
    serve_at(&path, "behind");
    let builder = server
        .before(&["setpriv", "--bounding-set", "-sys_admin"])
        .rule("one", "fixups", "Apache::Request.new.headers_out[\"X-One\"] = \"1\"\n", "")
        .site_of("alice", "http", http(&path));
    let world = with_page(builder);
    let answer = world.get("www.test", "/").expect(200);
    assert_eq!((answer.text(), answer.header("x-one")), ("page".into(), Some("1")));
    assert_eq!(world.get("http.test", "/").expect(200).text(), "behind");
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/mnt")).expect("it runs");
    assert_eq!(namespace(world.pid_of("edge")), namespace(world.pid()));
    let status = world.status();
    let rows = status["protections"].as_array().expect("a list").clone();
    let row = rows.iter().find(|row| row["name"] == "edge-files").expect("it is listed");
    assert_eq!(row["on"], false, "{row}");
    // What the other tests look for is there without the wall, so they would find it.
    let edge = world.pid_of("edge");
    assert!(Path::new(&format!("/proc/{edge}/root/etc/passwd")).exists());
    let www = world.home("alice").join("www");
    wait::until("a document root is open that leads up", || {
        world.get("www.test", "/index.html").expect(200);
        let mut roots =
            directories_of(edge).into_iter().filter(|directory| identity(directory) == identity(&www));
        roots.any(|root| identity(&root.join("..")) == identity(&world.home("alice")))
    });
    for told in ["NGY0518", "edge-files is off"] {
        assert!(world.log().contains(told), "{told}");
    }
    world.stop();
}

/// The page by which the kernel tells it is found by `/proc`, of which the edge's root directory shows nothing.
fn the_time_costs_no_system_call(world: &World) {
    const REQUESTS: usize = 400;
    world.write("alice", "www/counted.txt", "counted");
    let mut connection = Connection::open(world.http());
    let mut ask = || {
        connection.send("GET /counted.txt HTTP/1.1\r\nHost: www.test\r\n\r\n");
        assert_eq!(connection.response().expect(200).text(), "counted");
    };
    ask();
    let calls = count_calls(world.pid_of("edge"), &world.path("calls"), || (0..REQUESTS).for_each(|_| ask()));
    let count = |name: &str| calls.get(name).copied().unwrap_or(0);
    assert!(count("recvfrom") >= REQUESTS, "{calls:?}");
    assert!(count("clock_gettime") < REQUESTS / 4, "{calls:?}");
}

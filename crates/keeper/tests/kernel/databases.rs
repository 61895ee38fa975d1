//! Databases on the node that applications reach through the relay: who they say is connected, what an image finds, real
//! MariaDB and PostgreSQL that let users in by their uid.
//!
//! Not here: places outside (`outbound`), what is told of the time in them (`tests/e2e`).

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::database_waits::{DatabaseQuestion, now_us};
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::{Value, json};

use crate::outbound::{is_refused, record, told};
use crate::python::application;
use crate::rest::{get, pids, show, until_idle};
use crate::scene::until;
use crate::wake::until_images;
use crate::world::{ALICE, World, set_mode, site_name, until_so, wait_dead};
use crate::{Fact, FoundFact, image};

pub const ROOT: &[Fact] = &[
    (
        "a database is told that an application's tenant connects, and nothing of the keeper's rights",
        program_connects_as_its_tenant,
    ),
    ("a database that begins anew is found again", begins_anew),
    ("a database that its tenant may not reach is not reached", not_for_the_tenant),
    ("a link of a tenant's leads the keeper to no other socket", no_link_of_its_own),
];

pub const FOUND: &[FoundFact] = &[
    ("MariaDB lets a tenant in by its uid, and as nobody else", mariadb_knows_its_peer),
    ("PostgreSQL lets a tenant in by its uid, and as nobody else", postgresql_knows_its_peer),
    ("each question to MariaDB is written down, also in TLS", mariadb_questions_are_written_down),
    (
        "each question to PostgreSQL is written down, also over TCP and in TLS",
        postgresql_questions_are_written_down,
    ),
    (
        "an image is taken with a connection to MariaDB open, and after the wake the application asks it again",
        imaged_with_a_connection,
    ),
    (
        "a changed row of MariaDB ends the image of an application that asks for it, and an unchanged one does not",
        mariadb_ends_an_image,
    ),
    (
        "a changed row of PostgreSQL ends the image of an application that asks for it",
        postgresql_ends_an_image,
    ),
    ("a changed key of Redis ends the image of an application that asks for it", redis_ends_an_image),
];

/// Whose the databases' processes are.
const SERVER: u32 = 61_009;

/// Listens at the path it is given, and tells each connection who the kernel says has made it, and who has written.
const ASKING: &str = r#"
import ctypes, os, socket, struct, sys, threading
ctypes.CDLL(None).prctl(1, 9)
path, name = sys.argv[1:3]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
os.chmod(path, 0o777)
server.setsockopt(socket.SOL_SOCKET, 16, 1)  # SO_PASSCRED
server.listen(16)
def serve(peer):
    pid, uid, gid = struct.unpack('3i', peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    groups = len(peer.getsockopt(socket.SOL_SOCKET, 59, 400))  # SO_PEERGROUPS
    while True:
        data, control, _, _ = peer.recvmsg(100, 1000)
        if not data: return
        fds = [item for item in control if item[1] == socket.SCM_RIGHTS]
        writer = [struct.unpack('3i', item[2])[1:] for item in control if item[1] == 2]
        peer.sendall(f'{name} {uid} {gid} {groups} {writer} {len(fds)}'.encode())
while True:
    peer, _ = server.accept()
    threading.Thread(target=serve, args=(peer,), daemon=True).start()
"#;

/// An application that asks its database as it is told to, and says what came of it.
const PROGRAM: &str = r#"
import os, socket, subprocess
from urllib.parse import unquote
held = []
def act(words):
    if words[0] == 'ask':
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect(os.environ['DB'])
        connection.sendmsg([b'who?'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'\x01\0\0\0')])
        return connection.recv(1000).decode() or 'closed'
    if words[0] == 'run':
        done = subprocess.run(['sh', '-c', unquote(words[1])], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout.decode()
    if words[0] == 'php':
        if not held:
            held.append(subprocess.Popen(['php', 'ask.php'], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        held[0].stdin.write(unquote(words[1]).encode() + b'\n')
        held[0].stdin.flush()
        return held[0].stdout.readline().decode().strip()
"#;

/// Keeps a connection with the driver that most PHP programs have, and makes another where that one is gone. Says how
/// many it has made.
const ASK_PHP: &str = r#"<?php
mysqli_report(MYSQLI_REPORT_OFF);
[$db, $made] = [null, 0];
while (($line = fgets(STDIN)) !== false) {
    $said = 'nothing';
    for ($try = 0; $try < 2; $try++) {
        if (!$db) { $db = @mysqli_connect('localhost', 'alice', '', 'alice', 0, getenv('DB')) ?: null; $made++; }
        $rows = $db ? @mysqli_query($db, trim($line)) : false;
        if ($rows) { $said = implode(' ', array_map('strval', mysqli_fetch_row($rows))); break; }
        $db = null;
    }
    echo "$made $said\n";
}
"#;

/// A server that ends with this.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended itself, or is to.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A place for servers and what they listen on, for all to enter.
fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    set_mode(dir.path(), 0o755);
    fs::create_dir(dir.path().join("tmp")).unwrap();
    set_mode(&dir.path().join("tmp"), 0o777);
    dir
}

fn asking(path: &Path, name: &str) -> Server {
    let script = path.with_extension("py");
    fs::write(&script, ASKING).unwrap();
    let server = Command::new("python3").arg(&script).arg(path).arg(name).spawn().unwrap();
    until_connected(path);
    Server(server)
}

fn until_connected(path: &Path) {
    until(&format!("a server listens at {}", path.display()), || UnixStream::connect(path).is_ok());
}

/// A site whose application has this socket of the node for its database, at another path.
fn world(socket: &Path, more: Value) -> World {
    let mut world = World::new();
    world.script("program.py", &application(PROGRAM));
    world.script("ask.php", ASK_PHP);
    let fields = json!({"databases": [{"socket": socket, "inside": "/run/db/db.sock"}], "env": {"DB": "/run/db/db.sock"}});
    world.site("app", "alice", record(fields, more));
    world.start()
}

fn last_failure(world: &World) -> String {
    show(world, "app")["outbound"]["last_failure"].as_str().unwrap_or_default().to_owned()
}

fn program_connects_as_its_tenant() {
    let dir = place();
    let _server = asking(&dir.path().join("db.sock"), "db");
    let world = world(&dir.path().join("db.sock"), json!({}));
    world.run(async |keeper| {
        // Its uid and gid, no groups; what is written is nobody's, and no descriptor goes through.
        let nobody = (1_u32 << 31).cast_signed();
        for _ in 0..3 {
            let said = told(&keeper, "/ask").await;
            assert_eq!(said, format!("db {ALICE} {ALICE} 0 [({nobody}, {nobody})] 0"));
        }
        let outbound = show(&world, "app")["outbound"].clone();
        assert_eq!((&outbound["taken"], &outbound["failed"]), (&json!(3), &json!(0)), "{outbound}");
    });
}

fn begins_anew() {
    let dir = place();
    let path = dir.path().join("db.sock");
    let first = asking(&path, "first");
    let world = world(&path, json!({}));
    world.run(async |keeper| {
        assert!(told(&keeper, "/ask").await.starts_with("first "));
        drop(first);
        fs::remove_file(&path).unwrap();
        assert!(is_refused(&told(&keeper, "/ask").await));
        assert!(last_failure(&world).contains("No such file"), "{}", last_failure(&world));
        let _second = asking(&path, "second");
        assert!(told(&keeper, "/ask").await.starts_with("second "));
    });
}

fn not_for_the_tenant() {
    let dir = place();
    let path = dir.path().join("db.sock");
    let _server = asking(&path, "db");
    set_mode(&path, 0o700);
    let world = world(&path, json!({}));
    world.run(async |keeper| {
        assert!(is_refused(&told(&keeper, "/ask").await));
        assert!(last_failure(&world).contains("Permission denied"), "{}", last_failure(&world));
        set_mode(&path, 0o777);
        set_mode(dir.path(), 0o700);
        assert!(is_refused(&told(&keeper, "/ask").await));
        set_mode(dir.path(), 0o755);
        assert!(told(&keeper, "/ask").await.starts_with("db "));
    });
}

fn no_link_of_its_own() {
    let dir = place();
    let (own, other) = (dir.path().join("own.sock"), dir.path().join("other.sock"));
    let _servers = [asking(&own, "own"), asking(&other, "other")];
    // A link in a directory of the tenant's, and one in a directory of root's.
    let world = world(&dir.path().join("link.sock"), json!({}));
    symlink(&own, dir.path().join("link.sock")).unwrap();
    world.run(async |keeper| {
        assert!(told(&keeper, "/ask").await.starts_with("own "));
        fs::remove_file(dir.path().join("link.sock")).unwrap();
        symlink(world.home("alice").join("www/link.sock"), dir.path().join("link.sock")).unwrap();
        let link = "ln -s ".to_owned() + &other.display().to_string() + " link.sock; readlink link.sock";
        let linked = told(&keeper, &format!("/run/{}", encoded(&link))).await;
        assert_eq!(linked.trim(), other.display().to_string());
        assert!(is_refused(&told(&keeper, "/ask").await));
        assert!(last_failure(&world).contains("a link that is not root's"), "{}", last_failure(&world));
    });
}

/// As a part of a path in a request.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' => char::from(byte).to_string(),
            _ => format!("%{byte:02x}"),
        })
        .collect()
}

async fn run(keeper: &KeeperClient, command: &str) -> String {
    told(keeper, &format!("/run/{}", encoded(command))).await.trim().to_owned()
}

// === Real databases ===

/// Users as the databases know them, who look names up by uid.
fn users(dir: &Path) -> PathBuf {
    let path = dir.join("passwd");
    if path.exists() {
        // It is mounted where a server reads it.
        return path;
    }
    let text = format!(
        "root:x:0:0::/root:/bin/sh\nalice:x:{ALICE}:{ALICE}::/:/bin/sh\nserver:x:{SERVER}:{SERVER}::/:/bin/sh\n"
    );
    fs::write(&path, text).unwrap();
    path
}

/// A command under the servers' uid, among those users.
fn as_server(dir: &Path, command: &[&str]) -> Command {
    let uid = SERVER.to_string();
    let mut all = Command::new("unshare");
    all.args(["--mount", "sh", "-ec", "mount --bind \"$0\" /etc/passwd; exec setpriv \"$@\""])
        .arg(users(dir));
    all.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--pdeathsig", "KILL"]).args(command);
    // MariaDB removes others' files from a directory it shares with them.
    all.current_dir(dir).env("TMPDIR", dir.join("tmp")).stdin(Stdio::null());
    all
}

fn done(mut command: Command) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = [stdout, stderr].concat();
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&said));
}

fn has(programs: &[&str]) -> Result<(), String> {
    match programs.iter().find(|program| !Path::new(program).exists()) {
        Some(missing) => Err(format!("there is no {missing}")),
        None => Ok(()),
    }
}

/// A MariaDB whose users are alice and root, each known by its uid alone.
fn mariadb(dir: &Path) -> Result<(Server, PathBuf), String> {
    mariadb_with(dir, &[])
}

/// The same with more options.
fn mariadb_with(dir: &Path, options: &[&str]) -> Result<(Server, PathBuf), String> {
    has(&["/usr/bin/mariadb-install-db", "/usr/sbin/mariadbd", "/usr/bin/mariadb", "/usr/bin/php"])?;
    let home = dir.join("mariadb");
    fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(SERVER), Some(SERVER)).unwrap();
    let data = format!("--datadir={}", home.join("data").display());
    let install =
        ["/usr/bin/mariadb-install-db", "--no-defaults", &data, "--skip-test-db", "--skip-name-resolve"];
    done(as_server(dir, &[&install[..], &["--auth-root-authentication-method=normal"]].concat()));
    let first = dir.join("first.sql");
    let statements = "ALTER USER root@localhost IDENTIFIED VIA unix_socket;\nCREATE DATABASE alice;\n\
        CREATE USER alice@localhost IDENTIFIED VIA unix_socket;\nGRANT ALL ON alice.* TO alice@localhost;\n";
    fs::write(&first, statements).unwrap();
    let socket = home.join("db.sock");
    let (at, first) = (format!("--socket={}", socket.display()), format!("--init-file={}", first.display()));
    let serve = ["/usr/sbin/mariadbd", "--no-defaults", &data, &at, &first, "--skip-networking"];
    let less = ["--innodb-buffer-pool-size=16M", "--innodb-use-native-aio=0"];
    let mut command = as_server(dir, &[&serve[..], &less, options].concat());
    let log = fs::File::create(dir.join("mariadb.log")).unwrap();
    let server = Server(command.stderr(log).spawn().unwrap());
    until_connected(&socket);
    Ok((server, socket))
}

fn mariadb_knows_its_peer() -> Result<(), String> {
    let dir = place();
    let (_server, socket) = mariadb(dir.path())?;
    let world = world(&socket, json!({}));
    world.run(async |keeper| {
        let ask = |user: &str| {
            format!(
                "mariadb --no-defaults --socket=$DB --user={user} --batch --skip-column-names -e 'SELECT CURRENT_USER()'"
            )
        };
        assert_eq!(run(&keeper, &ask("alice")).await, "alice@localhost");
        let queries = show(&world, "app")["outbound"]["queries"].as_u64().unwrap();
        assert!(queries > 0 && show(&world, "app")["outbound"]["database_us"].as_u64().unwrap() > 0);
        for other in ["root", "server", "nobody"] {
            let said = run(&keeper, &ask(other)).await;
            assert!(said.contains("Access denied for user"), "{other}: {said}");
        }
    });
    Ok(())
}

/// Where its programs are.
fn postgresql_bin() -> Result<PathBuf, String> {
    let found = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|entry| entry.path());
    let bin = found.map(|version| version.join("bin")).find(|bin| bin.join("initdb").exists());
    bin.ok_or_else(|| "there is no PostgreSQL in /usr/lib/postgresql".into())
}

/// A PostgreSQL whose users are server and alice, each known by its uid alone; a statement that server makes there, as a command.
fn postgresql(dir: &Path) -> Result<(Server, PathBuf, impl Fn(&str) -> Command + use<>), String> {
    postgresql_with(dir, 5432, &["listen_addresses=".to_owned()])
}

/// The same with this port in the name of its socket, and with these settings. Over TCP it lets everybody in.
fn postgresql_with(
    dir: &Path,
    port: u16,
    settings: &[String],
) -> Result<(Server, PathBuf, impl Fn(&str) -> Command + use<>), String> {
    let bin = postgresql_bin()?;
    let program = |name: &str| bin.join(name).display().to_string();
    let home = dir.join("postgresql");
    fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(SERVER), Some(SERVER)).unwrap();
    let (data, at) = (home.join("data").display().to_string(), home.display().to_string());
    let auth = ["--auth-local=peer", "--auth-host=trust"];
    done(as_server(
        dir,
        &[&[&*program("initdb"), "-D", &data, "-U", "server", "--no-sync"], &auth[..]].concat(),
    ));
    let postgres = program("postgres");
    let mut serve = vec![&*postgres, "-D", &data, "-k", &at, "-c", "fsync=off"];
    serve.extend(settings.iter().flat_map(|setting| ["-c", setting]));
    let log = fs::File::create(dir.join("postgresql.log")).unwrap();
    let server = Server(as_server(dir, &serve).stderr(log).spawn().unwrap());
    let (psql, of) = (program("psql"), dir.to_owned());
    let say = move |statement: &str| {
        let port = port.to_string();
        as_server(&of, &[&psql, "-h", &at, "-p", &port, "-U", "server", "-d", "postgres", "-c", statement])
    };
    until("PostgreSQL answers", || say("SELECT 1").output().unwrap().status.success());
    done(say("CREATE ROLE alice LOGIN"));
    Ok((server, home.join(format!(".s.PGSQL.{port}")), say))
}

fn postgresql_knows_its_peer() -> Result<(), String> {
    let dir = place();
    let (_server, socket, _) = postgresql(dir.path())?;
    let inside = json!([{"socket": socket, "inside": "/run/postgresql/.s.PGSQL.5432"}]);
    let world = world(Path::new("/"), json!({"databases": inside}));
    world.run(async |keeper| {
        let ask = |user: &str| {
            let psql = postgresql_bin().unwrap().join("psql");
            let psql = psql.display();
            format!("{psql} -h /run/postgresql -U {user} -d postgres -Atc 'SELECT session_user'")
        };
        assert_eq!(run(&keeper, &ask("alice")).await, "alice");
        assert!(show(&world, "app")["outbound"]["queries"].as_u64().unwrap() > 0);
        let said = run(&keeper, &ask("server")).await;
        assert!(said.contains("Peer authentication failed for user \"server\""), "{said}");
    });
    Ok(())
}

// === The times of questions ===

/// A question that takes so long in a database, and how to say so, microseconds.
const SLOW_US: u64 = 100_000;
const TAG: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;

/// The questions that a command asks, in their order.
async fn asked_by(keeper: &KeeperClient, command: &str) -> Vec<DatabaseQuestion> {
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    let tally = used.tally.as_ref().expect("it has a database");
    let begun_us = now_us();
    let before = tally.read().expect("it is written").questions;
    let said = get(&used, &format!("/run/{}", encoded(command))).await;
    let questions = || {
        let asked = tally.questions(before, tally.read().expect("it is written").questions);
        let asked = asked.expect("they are not too many").into_iter();
        // Without farewells.
        asked.filter(|question| question.begun_us > 0).collect::<Vec<_>>()
    };
    until_so(|| questions().iter().all(|question| question.ended_us.is_some())).await;
    let (asked, ended_us) = (questions(), now_us());
    for question in &asked {
        let end_us = question.ended_us.expect("each is answered");
        let is_in_order = begun_us <= question.begun_us && question.begun_us <= end_us && end_us <= ended_us;
        assert!(is_in_order, "{question:?} of {begun_us} to {ended_us}: {said}");
    }
    asked
}

/// How many questions took long, and how many of these have the tag.
fn slow_ones(asked: &[DatabaseQuestion]) -> (usize, usize) {
    let is_slow =
        |asked: &&DatabaseQuestion| asked.ended_us.is_some_and(|end| end - asked.begun_us >= SLOW_US);
    let is_tagged = |asked: &&DatabaseQuestion| asked.request == Some(TAG);
    (asked.iter().filter(is_slow).count(), asked.iter().filter(is_slow).filter(is_tagged).count())
}

/// A key and a certificate of its own for a server, in its directory.
fn certified(dir: &Path) -> [PathBuf; 2] {
    let [key, certificate] = ["server.key", "server.crt"].map(|name| dir.join(name));
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    openssl.args(["-subj", "/CN=localhost", "-days", "2", "-keyout"]).arg(&key).arg("-out").arg(&certificate);
    done(openssl);
    for path in [&key, &certificate] {
        std::os::unix::fs::chown(path, Some(SERVER), Some(SERVER)).unwrap();
    }
    [key, certificate]
}

fn mariadb_questions_are_written_down() -> Result<(), String> {
    let dir = place();
    let [key, certificate] = certified(dir.path());
    let tls = [format!("--ssl-key={}", key.display()), format!("--ssl-cert={}", certificate.display())];
    let (_server, socket) = mariadb_with(dir.path(), &[&tls[0], &tls[1]])?;
    let world = world(&socket, json!({}));
    world.run(async |keeper| {
        let statements = format!("SELECT SLEEP(0.1) /*nagaya='{TAG:032x}'*/; SELECT 1; SELECT SLEEP(0.1)");
        let ask = |more: &str| {
            format!(
                "mariadb --no-defaults --comments --socket=$DB --user=alice {more} --batch -e \"{statements}\""
            )
        };
        let asked = asked_by(&keeper, &ask("--skip-ssl")).await;
        assert!(asked.len() >= 4, "a log-in and three queries: {asked:?}");
        assert_eq!(slow_ones(&asked), (2, 1), "{asked:?}");
        let asked = asked_by(&keeper, &ask("--ssl --skip-ssl-verify-server-cert")).await;
        assert_eq!(slow_ones(&asked), (2, 0), "it cannot be read, but it has turns: {asked:?}");
    });
    Ok(())
}

fn postgresql_questions_are_written_down() -> Result<(), String> {
    let dir = place();
    let [key, certificate] = certified(dir.path());
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let settings = [
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={port}"),
        "ssl=on".to_owned(),
        format!("ssl_key_file={}", key.display()),
        format!("ssl_cert_file={}", certificate.display()),
    ];
    let (_server, socket, _) = postgresql_with(dir.path(), port, &settings)?;
    let inside = json!([{"socket": socket, "inside": format!("/run/postgresql/.s.PGSQL.{port}")}]);
    let outbound = json!([format!("127.0.0.1:{port}")]);
    let world = world(Path::new("/"), json!({"databases": inside, "outbound": outbound}));
    world.run(async |keeper| {
        let psql = postgresql_bin().unwrap().join("psql").display().to_string();
        let ask = |host: &str, mode: &str| {
            format!(
                "PGSSLMODE={mode} {psql} -h {host} -p {port} -U alice -d postgres -At -c \"SELECT pg_sleep(0.1) /*nagaya='{TAG:032x}'*/\" -c 'SELECT 1' -c 'SELECT pg_sleep(0.1)'"
            )
        };
        for (host, mode, tagged) in
            [("/run/postgresql", "disable", 1), ("127.0.0.1", "disable", 1), ("127.0.0.1", "require", 0)]
        {
            let asked = asked_by(&keeper, &ask(host, mode)).await;
            assert!(asked.len() >= 4, "{host} {mode}: {asked:?}");
            assert_eq!(slow_ones(&asked), (2, tagged), "{host} {mode}: {asked:?}");
        }
    });
    Ok(())
}

fn imaged_with_a_connection() -> Result<(), String> {
    if let Some(missing) = image::missing() {
        return Err(missing.to_owned());
    }
    let dir = place();
    let (_server, socket) = mariadb(dir.path())?;
    // It connects before its image is taken, as many do at their start.
    let hold = format!("/php/{}", encoded("SELECT CURRENT_USER()"));
    let world = world(&socket, json!({"warm_up": [hold]}));
    world.run(async |keeper| {
        until_images(&world).await;
        // Who was there before its image is told that its connection is gone, and makes another.
        assert_eq!(told(&keeper, &hold).await, "2 alice@localhost", "{}", show(&world, "app"));
        assert!(show(&world, "app")["note"].is_null(), "{}", show(&world, "app"));
        assert_eq!(told(&keeper, &hold).await, "2 alice@localhost", "and keeps it");
        for _ in 0..2 {
            until_idle(&world, "app").await;
            let all = pids(&world, "app");
            let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
            assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("image")), "{row}");
            all.into_iter().for_each(wait_dead);
            let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
            let wake = used.wake.clone().unwrap();
            assert!(wake.stages.iter().any(|(stage, _)| *stage == WakeStage::Restore), "{wake:?}");
            assert_eq!(
                get(&used, &hold).await,
                "2 alice@localhost",
                "as it was, with a connection of its own"
            );
        }
        until_so(|| show(&world, "app")["outbound"]["open"] == 1).await;
    });
    Ok(())
}

// === Rows that end an image ===

/// Reads one setting when it is started, by the command in its environment, and says it to everybody.
const READS_ONCE: &str = r#"
import os, subprocess
setting = subprocess.run(['sh', '-c', os.environ['READ']], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout.decode().strip()
def act(words):
    if words[0] == 'setting':
        return setting
"#;

/// A site that reads its setting by this command, and whose database is asked this at each wake.
fn world_that_asks(socket: &Path, read: &str, tag: Value) -> World {
    let mut world = World::new();
    world.script("program.py", &application(READS_ONCE));
    let databases = json!([{"socket": socket, "inside": "/run/db/db.sock", "tag": tag}]);
    world.site("app", "alice", record(json!({"databases": databases, "env": {"READ": read}}), json!({})));
    world.start()
}

/// Sends it to its image, wakes it, and tells what it says then and whether it came from the image.
async fn wake(world: &World, keeper: &KeeperClient) -> (String, bool) {
    until_images(world).await;
    until_idle(world, "app").await;
    let all = pids(world, "app");
    let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
    assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("image")), "{row}");
    all.into_iter().for_each(wait_dead);
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    let wake = used.wake.clone().unwrap();
    let is_of_image = wake.stages.iter().any(|(stage, _)| *stage == WakeStage::Restore);
    (get(&used, "/setting").await, is_of_image)
}

/// `set` gives the setting another value, as a program that nagaya does not know.
fn other_answers_end_an_image(world: &World, question: &str, set: impl Fn(&str)) {
    world.run(async |keeper| {
        assert_eq!(told(&keeper, "/setting").await, "first");
        assert_eq!(wake(world, &keeper).await, ("first".into(), true), "{}", show(world, "app"));
        let ends = show(world, "app")["image"]["ends_when"].as_str().unwrap_or_default().to_owned();
        assert!(ends.contains(question), "{ends}");
        set("second");
        assert_eq!(wake(world, &keeper).await, ("second".into(), false), "{}", show(world, "app"));
        let end = show(world, "app")["image_end"].to_string();
        assert!(end.contains(question) && end.contains("is answered otherwise"), "{end}");
        assert_eq!(wake(world, &keeper).await, ("second".into(), true), "the new image is of the new answer");
    });
}

fn mariadb_ends_an_image() -> Result<(), String> {
    if let Some(missing) = image::missing() {
        return Err(missing.to_owned());
    }
    let dir = place();
    let (server, socket) = mariadb(dir.path())?;
    let say = |statement: &str| {
        let at = format!("--socket={}", socket.display());
        let mut command = Command::new("mariadb");
        command.args(["--no-defaults", &at, "--user=root", "alice", "-e", statement]);
        done(command);
    };
    say(
        "CREATE TABLE settings (name VARCHAR(9) PRIMARY KEY, value VARCHAR(9)); INSERT INTO settings VALUES ('theme', 'first')",
    );
    let read = "mariadb --no-defaults --socket=/run/db/db.sock --user=alice --batch --skip-column-names alice -e 'SELECT value FROM settings'";
    let question = "SELECT value FROM settings WHERE name = 'theme'";
    let tag = json!({"kind": "mysql", "database": "alice", "ask": question});
    let world = world_that_asks(&socket, read, tag);
    other_answers_end_an_image(&world, question, |value| {
        say(&format!("UPDATE settings SET value = '{value}'"))
    });
    // A question that cannot be answered is no reason to believe an image.
    world.run(async |keeper| {
        say("INSERT INTO settings VALUES ('other', 'x')");
        assert!(wake(&world, &keeper).await.1, "rows that nobody asks for end nothing");
        say("RENAME TABLE settings TO renamed");
        assert!(!wake(&world, &keeper).await.1);
        let end = show(&world, "app")["image_end"].to_string();
        assert!(
            end.contains("is not answered: the database says: Table 'alice.settings' doesn't exist"),
            "{end}"
        );
        drop(server);
        assert!(!wake(&world, &keeper).await.1);
        let end = show(&world, "app")["image_end"].to_string();
        assert!(end.contains("is not answered: it cannot be reached"), "{end}");
    });
    Ok(())
}

fn postgresql_ends_an_image() -> Result<(), String> {
    if let Some(missing) = image::missing() {
        return Err(missing.to_owned());
    }
    let dir = place();
    let (_server, socket, statement) = postgresql(dir.path())?;
    let say = |text: &str| done(statement(text));
    say(
        "CREATE TABLE settings (value text); INSERT INTO settings VALUES ('first'); GRANT SELECT ON settings TO alice",
    );
    let link = "mkdir -p /tmp/pg; ln -sf /run/db/db.sock /tmp/pg/.s.PGSQL.5432; ";
    let psql = postgresql_bin()?.join("psql").display().to_string();
    let read = format!("{link} {psql} -h /tmp/pg -U alice -d postgres -Atc 'SELECT value FROM settings'");
    let tag = json!({"kind": "postgresql", "database": "postgres", "ask": "SELECT value FROM settings"});
    let world = world_that_asks(&socket, &read, tag);
    other_answers_end_an_image(&world, "SELECT value FROM settings", |value| {
        say(&format!("UPDATE settings SET value = '{value}'"));
    });
    Ok(())
}

fn redis_ends_an_image() -> Result<(), String> {
    if let Some(missing) = image::missing() {
        return Err(missing.to_owned());
    }
    // The server's program is one of Debian's `redis-tools`, under another name; the package with its name is a service.
    has(&["/usr/bin/redis-check-rdb", "/usr/bin/redis-cli"])?;
    let dir = place();
    let program = dir.path().join("redis-server");
    symlink("/usr/bin/redis-check-rdb", &program).unwrap();
    let program = program.display().to_string();
    let socket = dir.path().join("tmp/redis.sock");
    let at = socket.display().to_string();
    let serve = [&*program, "--port", "0", "--unixsocket", &at, "--unixsocketperm", "777", "--save", ""];
    let _server = Server(as_server(dir.path(), &serve).stdout(Stdio::null()).spawn().unwrap());
    until_connected(&socket);
    let say = |value: &str| {
        let mut command = Command::new("redis-cli");
        command.args(["-s", &at, "-n", "3", "SET", "settings:theme", value]);
        done(command);
    };
    say("first");
    let tag = json!({"kind": "redis", "database": "3", "ask": "GET settings:theme"});
    let world = world_that_asks(&socket, "redis-cli -s /run/db/db.sock -n 3 GET settings:theme", tag);
    other_answers_end_an_image(&world, "GET settings:theme", say);
    Ok(())
}

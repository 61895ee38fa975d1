//! Enclosures: CGI programs and PHP workers of one tenant find nothing of another's, and reach what they should.
//!
//! Not here: sandboxes of applications (`sandbox`), the same through HTTP (`e2e::tenants`).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nagaya_keeper::ProgramNetwork;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::Confinement;
use nagaya_records::feed::FeedQuery;
use serde_json::{Value, json};

use crate::Fact;
use crate::outbound::until_service;
use crate::php::{Php, with_sites};
use crate::python::SERVICE;
use crate::world::{ALICE, BOB, World, cgi, read_all, refusal, run_cgi, run_in, set_mode, site_name};

pub const ROOT: &[Fact] = &[
    ("a CGI program sees no process of another user", sees_no_process),
    ("a tenant's /tmp and /dev/shm are seen by its programs and by nobody else", has_its_own_scratch),
    ("a CGI program reaches no port of the node's that is not for all tenants", reaches_no_port),
    ("a CGI program reaches what is outside, and its own site on the node", reaches_outside),
    ("programs share the node's network where that is configured", shares_the_network),
    (
        "a tenant's record says which network its programs have, before the node's configuration",
        own_word_on_network,
    ),
    ("a PHP worker is where its tenant's CGI programs are", php_is_enclosed),
    ("a tenant has one enclosure, whatever runs in it", one_for_each_tenant),
    ("a program that its tenant's own /tmp hides is refused", hidden_programs_are_refused),
    ("a PHP worker is given no script that its /tmp hides", hidden_script_stays_at_the_gate),
];

/// The code of a program that its tenant's own directories hide.
const HIDDEN: (FailureKind, u16) = (FailureKind::Invalid, 359);

/// All that a CGI program of this site says.
pub async fn said_by(keeper: &KeeperClient, site: &str) -> String {
    let process = run_in(keeper, site, &Confinement::default()).await;
    read_all(process.stdout).await
}

/// A line of shell that connects, and says what it has read or why it could not.
fn connect(address: &str, port: u16) -> String {
    format!(
        "perl -MIO::Socket::IP -e 'my $s = IO::Socket::IP->new(PeerHost => \"{address}\", PeerPort => {port}, \
         Timeout => 20); if (!$s) {{ print \"no: $!\\n\"; exit }} $s->autoflush; print $s \"hello\\n\"; my $l = <$s>; if (defined $l) {{ chomp $l; print \"got $l\\n\" }} else {{ print \"closed\\n\" }}'"
    )
}

/// Answers each line with itself, as long as the process lives. Returns its port.
fn service() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            // Who has left again wants nothing.
            let _ = BufReader::new(&stream)
                .read_line(&mut line)
                .and_then(|_| (&stream).write_all(line.as_bytes()));
        }
    });
    port
}

fn sees_no_process() {
    let world = World::new()
        .with_cgi("stat -c %u /proc/[0-9]* | sort -u; ls -d /proc/1 2>&1; cat /proc/1/cmdline 2>&1; echo; ls /proc/self/fd")
        .start();
    world.run(async |keeper| {
        let said = said_by(&keeper, "cgi").await;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[0], ALICE.to_string(), "{said}");
        assert!(lines[1].contains("No such file") && lines[2].contains("No such file"), "{said}");
    });
}

fn has_its_own_scratch() {
    let name = format!("nagaya-enclosure-{}", std::process::id());
    let script = |whose: &str| {
        format!(
            "#!/bin/sh\ncat /tmp/{name} /var/tmp/{name} /dev/shm/{name} 2>&1\nfor d in /tmp /dev/shm; do echo {whose} > $d/{name}; done\n"
        )
    };
    let mut world = World::new();
    for tenant in ["alice", "bob"] {
        world.script_of(tenant, "x.cgi", &script(tenant));
        world.site(tenant, tenant, cgi());
    }
    let world = world.start();
    world.run(async |keeper| {
        let first = said_by(&keeper, "alice").await;
        assert_eq!(first.matches("No such file").count(), 3, "{first}");
        assert_eq!(said_by(&keeper, "alice").await, "alice\n".repeat(3), "it is there for the next request");
        let bobs = said_by(&keeper, "bob").await;
        assert_eq!(bobs.matches("No such file").count(), 3, "{bobs}");
        for dir in ["/tmp", "/var/tmp", "/dev/shm"] {
            assert!(!std::path::Path::new(dir).join(&name).exists(), "the node's {dir} has it");
        }
    });
}

fn reaches_no_port() {
    let (closed, open) = (service(), service());
    let lines = [connect("127.0.0.1", closed), connect("::1", closed), connect("127.0.0.1", open)];
    let world = World::new()
        .with(|options| options.programs.local_ports = vec![open])
        .with_cgi(&lines.join("\n"))
        .start();
    world.run(async |keeper| {
        let said = said_by(&keeper, "cgi").await;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines, ["no: Connection refused", "no: Connection refused", "got hello"], "{said}");
    });
}

/// The node is a network of the test's own here, and outside is another one, as in `nat`.
fn reaches_outside() {
    let world = World::new();
    let dir = world.dir.path().to_owned();
    fs::write(dir.join("service.py"), SERVICE).unwrap();
    let d = dir.display();
    let prelude = format!(
        "ip link set lo up; touch {d}/net; unshare --net={d}/net true
         ip link add v0 type veth peer name v1; ip link set v1 netns {d}/net
         nsenter --net={d}/net sh -ec 'ip link set lo up; ip link set v1 up; ip addr add 198.51.100.2/24 dev v1
            ip addr add 203.0.113.77/32 dev lo; ip addr add 169.254.169.254/32 dev lo
            ip addr add 203.0.113.88/32 dev lo; ip addr add 168.63.129.16/32 dev lo'
         ip link set v0 up; ip addr add 198.51.100.1/24 dev v0; ip route add default via 198.51.100.2
         echo nameserver 198.51.100.2 > {d}/resolv.conf; mount --bind {d}/resolv.conf /etc/resolv.conf
         nsenter --net={d}/net python3 {d}/service.py {d}/outside.log 203.0.113.77/7000 198.51.100.2/53 169.254.169.254/80 \
            203.0.113.77/2379 203.0.113.88/3306 203.0.113.88/7443 168.63.129.16/80 &
         python3 {d}/service.py {d}/node.log 198.51.100.1/7009 0.0.0.0/7080 127.0.0.1/7009 &
         true"
    );
    let lines = [
        connect("203.0.113.77", 7000),
        connect("outside.test", 7000),
        connect("198.51.100.1", 7080),
        // What all tenants may use, on another node of the cluster.
        connect("203.0.113.88", 3306),
        connect("203.0.113.88", 7443),
        connect("203.0.113.77", 2379),
        connect("168.63.129.16", 80),
        connect("198.51.100.1", 7009),
        connect("127.0.0.1", 7009),
        connect("169.254.169.254", 80),
    ];
    let mut world = world
        .after(&prelude)
        .with(|options| options.programs.own_addresses = vec!["0.0.0.0:7080".parse().unwrap()])
        .with(|options| options.etcd = vec!["203.0.113.77:2379".into()])
        .with_cgi(&lines.join("\n"));
    world.node("other", "203.0.113.88:7443");
    let world = world.start();
    world.run(async |keeper| {
        until_service(&dir.join("outside.log")).await;
        until_service(&dir.join("node.log")).await;
        let said = said_by(&keeper, "cgi").await;
        let lines: Vec<&str> = said.lines().collect();
        let got = |line: &str| line.starts_with("got ") && line.ends_with("hello");
        assert!(lines.len() == 10 && lines[..4].iter().all(|line| got(line)), "{said}");
        // A connection is there before the relay knows that it must not be.
        assert!(lines[4..].iter().all(|line| line.starts_with("no: ") || *line == "closed"), "{said}");
    });
    for log in ["outside.log", "node.log"] {
        let text = fs::read_to_string(dir.join(log)).unwrap();
        for refused in ["7009", "169.254", "168.63", "7443", "2379"] {
            let came = text.lines().any(|line| line.contains("comes") && line.contains(refused));
            assert!(!came, "{refused}: {text}");
        }
    }
}

fn shares_the_network() {
    let port = service();
    let world = World::new()
        .with(|options| options.programs.network = ProgramNetwork::Host)
        .with_cgi(&format!("{}; ls -d /proc/1 2>&1", connect("127.0.0.1", port)))
        .start();
    world.run(async |keeper| {
        let said = said_by(&keeper, "cgi").await;
        assert!(said.starts_with("got hello\n") && said.contains("No such file"), "{said}");
    });
}

fn own_word_on_network() {
    let port = service();
    for (default, [first, second]) in [
        (ProgramNetwork::Own, [("host", "got hello"), ("own", "no: Connection refused")]),
        (ProgramNetwork::Host, [("own", "no: Connection refused"), ("host", "got hello")]),
    ] {
        let world = World::new()
            .with(|options| options.programs.network = default)
            .with_cgi(&connect("127.0.0.1", port))
            .start();
        world.run(async |keeper| {
            for (network, expected) in [first, second] {
                world.apply(vec![world.tenant_with("alice", json!({ "network": network }))]);
                assert_eq!(said_by(&keeper, "cgi").await.trim(), expected, "{network} before {default:?}");
            }
            // Without a word in the record the node's default holds.
            world.apply(vec![world.tenant_with("alice", json!({}))]);
            assert_eq!(said_by(&keeper, "cgi").await.trim(), second.1, "{default:?}");
        });
    }
}

fn php_is_enclosed() {
    let port = service();
    let name = format!("nagaya-enclosed-php-{}", std::process::id());
    let world = World::new().with_cgi(&format!(
        "cat /tmp/{name}; readlink /proc/self/ns/mnt /proc/self/ns/net /proc/self/ns/ipc"
    ));
    let script = world.script(
        "x.php",
        &format!(
            "<?php file_put_contents('/tmp/{name}', \"php\\n\"); \
             echo @stream_socket_client('tcp://127.0.0.1:{port}', $e, $m) ? 'CONNECTED' : $m, \"\\n\"; \
             foreach (['mnt', 'net', 'ipc'] as $n) echo readlink('/proc/self/ns/' . $n), \"\\n\";"
        ),
    );
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "php").await;
        let said = php.ask(&script, "").await;
        let namespaces = said.strip_prefix("Connection refused\n").unwrap_or_else(|| panic!("{said}"));
        assert_eq!(said_by(&keeper, "cgi").await, format!("php\n{namespaces}"));
    });
}

fn one_for_each_tenant() {
    let mut world = World::new().with_cgi("echo hello");
    world.script_of("bob", "x.cgi", "#!/bin/sh\necho hello\n");
    world.site("bob", "bob", cgi());
    let world = world.start();
    let numbers = || {
        let status: Value = serde_json::from_str(&world.ask(FeedQuery::Status)).unwrap();
        (
            status["enclosures"]["now"].clone(),
            status["enclosures"]["made"].clone(),
            status["enclosures"]["off"].clone(),
        )
    };
    world.run(async |keeper| {
        for _ in 0..3 {
            read_all(run_cgi(&keeper).await.stdout).await;
        }
        assert_eq!(numbers(), (json!(1), json!(1), Value::Null));
        said_by(&keeper, "bob").await;
        assert_eq!(numbers(), (json!(2), json!(2), Value::Null));
        // Another home: another enclosure.
        let moved = world.home("alice").with_file_name("moved");
        fs::create_dir_all(moved.join("www")).unwrap();
        fs::copy(world.home("alice").join("www/x.cgi"), moved.join("www/x.cgi")).unwrap();
        for path in [moved.join("www/x.cgi"), moved.join("www"), moved.clone()] {
            world.own(&path, ALICE);
        }
        world.apply(vec![world.tenant_with("alice", json!({"home": moved}))]);
        said_by(&keeper, "cgi").await;
        assert_eq!(numbers(), (json!(2), json!(3), Value::Null));
    });
}

/// Bob without a home, and his sites: `hidden` is in `/tmp`, `link` leads there from `outside`, and
/// `seen` is in `outside`. Each has a site for CGI and one for PHP.
fn world_without_home(outside: &Path) -> World {
    let mut world = World::new();
    world.tenant(json!({"name": "bob", "uid": BOB, "gid": BOB, "php_workers": 2}));
    world.script_of("bob", "x.cgi", "#!/bin/sh\necho hello\n");
    world.script_of("bob", "x.php", "<?php echo 'hello';");
    let hidden = world.home("bob").join("www");
    let [link, seen] = ["link", "seen"].map(|name| outside.join(name));
    set_mode(outside, 0o755);
    symlink(&hidden, &link).unwrap();
    fs::create_dir(&seen).unwrap();
    for name in ["x.cgi", "x.php"] {
        fs::copy(hidden.join(name), seen.join(name)).unwrap();
    }
    for (name, root) in [("hidden", hidden), ("link", link), ("seen", seen)] {
        for kind in ["cgi", "php"] {
            world.site(&format!("{name}-{kind}"), "bob", json!({"kind": kind, "root": root}));
        }
    }
    world
}

/// A directory of the node that programs see.
fn outside() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("nagaya-seen-").tempdir_in("/var").unwrap()
}

fn hidden_programs_are_refused() {
    let outside = outside();
    let world = world_without_home(outside.path()).start();
    world.run(async |keeper| {
        let run = async |site: &str| {
            keeper.spawn_cgi(&site_name(site), "x.cgi", Vec::new(), &Confinement::default()).await
        };
        for name in ["hidden", "link"] {
            assert_eq!(refusal(run(&format!("{name}-cgi")).await), HIDDEN, "{name}");
            let worker = keeper.spawn_php(&site_name(&format!("{name}-php")), Some(0)).await;
            assert_eq!(refusal(worker), HIDDEN, "{name}");
            keeper.open_root(&site_name(&format!("{name}-php"))).await.expect("the edge serves its files");
        }
        assert_eq!(said_by(&keeper, "seen-cgi").await, "hello\n", "a home is not needed elsewhere");
        let mut php = Php::start_for(&keeper, "seen-php").await;
        assert_eq!(php.ask(&outside.path().join("seen/x.php"), "").await, "hello");
        php.guard.end().await.unwrap();
        // The same directory in a home is the tenant's to see.
        world.apply(vec![world.tenant_with("bob", json!({}))]);
        assert_eq!(said_by(&keeper, "hidden-cgi").await, "hello\n");
        let mut php = Php::start_for(&keeper, "hidden-php").await;
        assert_eq!(php.ask(&world.home("bob").join("www/x.php"), "").await, "hello");
    });
}

/// A worker serves a site that it sees, and then another one.
fn hidden_script_stays_at_the_gate() {
    let outside = outside();
    let world = world_without_home(outside.path()).start();
    let scripts: [(&str, PathBuf); 2] = [
        ("hidden-php", world.home("bob").join("www/x.php")),
        ("link-php", outside.path().join("link/x.php")),
    ];
    world.run(async |keeper| {
        for (site, script) in &scripts {
            let mut php = Php::start_for(&keeper, "seen-php").await;
            assert_eq!(php.ask(&outside.path().join("seen/x.php"), "").await, "hello");
            keeper.enter(php.guard.id(), &site_name(site), &Confinement::default()).await.unwrap();
            let named = [("SCRIPT_FILENAME", script.to_str().unwrap().to_owned())];
            assert_eq!(php.say(&named).await, None, "{site}: the edge takes another worker");
            php.guard.end().await.unwrap();
        }
    });
    world.drain();
    assert_eq!(world.log().matches("NGY0359").count(), scripts.len(), "{}", world.log());
}

//! Two tenants on one node cannot reach each other, whatever way one of them tries; nor can either reach the node.
//!
//! Not here: links out of a document root in general (`static_files`).

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::sync::OnceLock;

use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "tenants",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            no_path_leads_to_another_tenant,
            no_link_leads_to_another_tenant,
            no_document_root_leads_to_another_tenant,
            no_document_root_leads_to_a_log_or_a_rule,
            no_cgi_program_reaches_another_tenant,
            no_php_script_reaches_another_tenant,
            no_tenant_reads_a_log,
            no_tenant_speaks_to_the_node,
            no_tenant_signals_another,
            no_program_reaches_another_tenants_port,
            a_program_reaches_services_for_all_tenants,
            no_program_sees_another_users_processes,
            no_program_finds_another_tenants_temporary_files,
            the_status_says_that_programs_are_kept_apart,
            the_edge_has_no_rights_to_give_away,
            each_thread_of_the_edge_has_a_filter_of_system_calls,
            the_edge_holds_nothing_of_the_store,
            no_tenant_gets_ids_of_the_system_or_of_the_node,
            a_home_that_others_reach_is_told,
            a_root_that_programs_do_not_see_is_told,
        ],
    ),
};

/// What Alice has and nobody else may see.
const SECRET: &str = "alices-own-secret";

/// Answers each connection with a line, as long as the test runs. Returns its port.
fn serve_lines() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Who has left again wants nothing.
            let _ = stream.write_all(b"a service of the node\n");
        }
    });
    port
}

/// A port of the node's that programs of all tenants may use.
fn shared_port() -> u16 {
    static PORT: OnceLock<u16> = OnceLock::new();
    *PORT.get_or_init(serve_lines)
}

fn world() -> World {
    let site = |name: &str, tenant: &str, backend: serde_json::Value| json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend });
    let world = World::builder()
        .set("keeper", &format!("local_ports = [{}]", shared_port()))
        .tenant("alice")
        .tenant("bob")
        .site(site("alice", "alice", json!({ "kind": "php", "root": "www" })))
        .site(site("app", "alice", json!({ "kind": "app", "directory": "app", "command": ["./app.pl"] })))
        .site(site("static", "bob", json!({ "kind": "static", "root": "www", "listing": true })))
        .site(site("cgi", "bob", json!({ "kind": "cgi", "root": "cgi" })))
        .site(site("php", "bob", json!({ "kind": "php", "root": "php" })))
        .start();
    world.write("alice", "secret.txt", SECRET);
    world.write("alice", "www/secret.html", SECRET);
    world.write("alice", "www/pid.php", "<?php echo getmypid();");
    world.write_program("alice", "app/app.pl", programs::ONE_ANSWER_PER_CONNECTION);
    for root in ["www", "cgi", "php"] {
        world.write("bob", &format!("{root}/index.html"), "bob");
    }
    world
}

fn no_tenant_gets_ids_of_the_system_or_of_the_node(world: &World) {
    let ids = |field: &str| {
        let ids = machine::status_field(world.pid_of("edge"), field).expect("the edge runs");
        ids.split_whitespace().next().expect("four ids").to_owned()
    };
    for (option, id, why) in [
        ("--uid", ids("Uid"), "edge process"),
        ("--gid", ids("Gid"), "edge process"),
        ("--uid", "33".into(), "a user of the system"),
        ("--gid", "6".into(), "a group of the system ('disk')"),
        ("--gid", "42".into(), "a group of the system ('shadow')"),
    ] {
        let refused = world.try_cli(&["tenant", "add", "mallory", option, &id]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && said.contains(why) && said.contains("NGY0210"),
            "{option} {id}: {said}"
        );
    }
    let line = format!("{}\n", json!({ "tenant": { "name": "mallory", "uid": 210_900, "gid": 42 } }));
    assert!(!world.try_import(&line).status.success(), "an import is held to the same");
    assert!(!world.cli(&["tenant", "list"]).contains("mallory"));
}

fn a_home_that_others_reach_is_told(world: &World) {
    let home = world.path("open");
    std::fs::create_dir(&home).expect("our own directory");
    std::fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
    let home = home.to_string_lossy().into_owned();
    let added = world.try_cli(&["tenant", "add", "carol", "--home", &home]);
    let said = String::from_utf8_lossy(&added.stderr).into_owned();
    assert!(added.status.success(), "{said}");
    assert!(said.contains("belongs to uid 0") && said.contains("open to others (mode 0777)"), "{said}");
    let status = world.cli(&["status"]);
    assert!(status.contains("tenant 'carol': its home"), "{status}");
    let row = crate::resting::check(world, "tenants");
    assert!(
        row["state"] == "warn" && row["value"].as_str().is_some_and(|text| text.contains("carol")),
        "{row}"
    );
    world.cli(&["tenant", "remove", "carol"]);
    assert!(!world.cli(&["status"]).contains("carol"));
}

/// A tenant without a home, and a document root where its programs have a `/tmp` of their own.
fn a_root_that_programs_do_not_see_is_told(world: &World) {
    let root = world.path("hidden");
    std::fs::create_dir(&root).expect("our own directory");
    machine::write(&root.join("page.html"), "a page");
    machine::write(&root.join("x.php"), "<?php echo 'a program';");
    let root = root.to_string_lossy().into_owned();
    world.cli(&["tenant", "add", "dora"]);
    let site = ["--tenant", "dora", "--host", "hidden.test", "--backend", "php", "--root", &root];
    let warned = "programs do not see the document root";
    for command in [&[&["site", "add", "hidden"], &site[..]].concat(), &["site", "show", "hidden"][..]] {
        let done = world.try_cli(command);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success() && said.contains(warned) && said.contains("NGY0359"), "{said}");
    }
    assert_eq!(world.get("hidden.test", "/page.html").expect(200).text(), "a page");
    let refused = world.get("hidden.test", "/x.php").expect(500).text();
    assert!(refused.contains("NGY0420") && !refused.contains(&root), "{refused}");
    let log = world.log();
    assert!(log.contains(&format!("NGY0359: programs do not see {root}")), "{log}");
    world.cli(&["site", "remove", "hidden"]);
    world.cli(&["tenant", "remove", "dora"]);
}

/// Runs a shell line as Bob's CGI program.
fn as_bob(world: &World, name: &str, line: &str) -> String {
    let text = format!("#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nexec 2>&1\n{line}\necho done\n");
    world.write_program("bob", &format!("cgi/{name}.cgi"), &text);
    let answer = world.get("cgi.test", &format!("/{name}.cgi")).expect(200).text();
    assert!(answer.ends_with("done\n"), "{answer}");
    answer
}

/// What is closed to a program, or, beneath a `/tmp` that is its own, not even there.
fn is_refused(text: &str) -> bool {
    text.contains("ermission denied") || text.contains("No such file")
}

fn no_path_leads_to_another_tenant(world: &World) {
    assert_eq!(world.get("alice.test", "/secret.html").expect(200).text(), SECRET);
    let home = world.home("alice");
    let home = home.to_string_lossy();
    for target in [
        "/../../alice/www/secret.html".to_owned(),
        "/%2e%2e/%2e%2e/alice/www/secret.html".into(),
        "/..%2f..%2falice/www/secret.html".into(),
        format!("/{home}/www/secret.html"),
        "/proc/self/cwd/home/alice/www/secret.html".into(),
    ] {
        for host in ["static.test", "cgi.test", "php.test"] {
            let answer = world.get(host, &target);
            assert!((400..500).contains(&answer.status), "{host}{target}: {answer:?}");
            assert!(!answer.text().contains(SECRET));
        }
    }
}

fn no_link_leads_to_another_tenant(world: &World) {
    let www = world.home("bob").join("www");
    let alice = world.home("alice");
    for (name, target) in [
        ("file.html", alice.join("www/secret.html")),
        ("relative.html", "../../alice/www/secret.html".into()),
        ("dir", alice.join("www")),
        ("process.html", "/proc/self/root/etc/hostname".into()),
    ] {
        symlink(target, www.join(name)).expect("our own directory");
    }
    world.give("bob");
    for target in ["/file.html", "/relative.html", "/dir/secret.html", "/dir/", "/process.html"] {
        let answer = world.get("static.test", target);
        assert!(matches!(answer.status, 403 | 404), "{target}: {answer:?}");
    }
    // A program that is a link to another tenant's is not run either.
    symlink(alice.join("www/pid.php"), world.home("bob").join("php-link.php")).expect("our own directory");
    let answer = world.get("php.test", "/php-link.php");
    assert!(answer.status >= 400, "{answer:?}");
}

fn no_document_root_leads_to_another_tenant(world: &World) {
    // Bob can replace his own root by a link; an operator's mistake in a record must not help him either.
    symlink(world.home("alice").join("www"), world.home("bob").join("linked")).expect("our own directory");
    let site = |name: &str, root: &str| {
        json!({ "name": name, "tenant": "bob", "hosts": [format!("{name}.test")],
            "backend": { "kind": "static", "root": root } })
    };
    world.import(&[
        site("linked", "linked"),
        site("absolute", &world.home("alice").join("www").to_string_lossy()),
    ]);
    for host in ["linked.test", "absolute.test"] {
        let answer = world.get(host, "/secret.html");
        assert!(answer.status >= 400 && !answer.text().contains(SECRET), "{host}: {answer:?}");
    }
    let output = world.try_import(&format!("{}\n", json!({ "site": site("up", "../alice/www") })));
    assert!(!output.status.success(), "a root outside the home is taken");
}

/// Those are files of the edge's, which serves document roots with its own rights.
fn no_document_root_leads_to_a_log_or_a_rule(world: &World) {
    world.get("alice.test", "/secret.html?token=alices-token").expect(200);
    wait::until("the request is logged", || {
        world.access_log().iter().any(|line| line.to_string().contains("alices-token"))
    });
    let directories = [world.path("log"), world.path("run"), world.path("run/rules"), world.path("")];
    let site = |name: &str, root: &std::path::Path| {
        json!({ "name": name, "tenant": "bob", "hosts": [format!("{name}.test")],
            "backend": { "kind": "static", "root": root, "listing": true } })
    };
    let roots = ["elsewhere", "named"].map(|name| world.home("bob").join(name));
    // An operator's mistake: the root is the log's directory itself.
    world.import(&[
        site("elsewhere", &roots[0]),
        site("beneath", "named".as_ref()),
        site("mistake", &directories[0]),
    ]);
    for to in &directories {
        for root in &roots {
            let _ = std::fs::remove_file(root);
            symlink(to, root).expect("our own directory");
        }
        world.give("bob");
        for host in ["elsewhere.test", "beneath.test", "mistake.test"] {
            for target in ["/", "/access.log", "/log/access.log", "/rules/"] {
                let answer = world.get(host, target);
                let text = answer.text();
                assert_eq!(answer.status, 500, "{host}{target} at {}: {text}", to.display());
                assert!(
                    !text.contains("alices-token") && !text.contains("access.log"),
                    "{host}{target}: {text}"
                );
            }
        }
    }
    let log = std::fs::metadata(world.path("log")).expect("it is there");
    let mode = std::os::unix::fs::PermissionsExt::mode(&log.permissions()) & 0o777;
    assert_eq!(mode, 0o710, "only the edge goes through it, and nobody lists it");
}

fn no_cgi_program_reaches_another_tenant(world: &World) {
    let home = world.home("alice");
    let text = as_bob(
        world,
        "reads",
        &format!(
            "cat {0}/secret.txt {0}/www/secret.html; ls {0}; echo x > {0}/www/bobs; cd {0} && pwd",
            home.display()
        ),
    );
    assert!(!text.contains(SECRET) && is_refused(&text), "{text}");
    assert!(!home.join("www/bobs").exists());
}

fn no_php_script_reaches_another_tenant(world: &World) {
    let home = world.home("alice");
    let script = format!(
        "<?php echo @file_get_contents('{0}/secret.txt'); @include '{0}/www/secret.html'; \
         echo json_encode(@scandir('{0}')), json_encode(@file_put_contents('{0}/www/bobs', 'x')); \
         echo ' uid ', trim(shell_exec('id -u')), ' pid ', getmypid();",
        home.display()
    );
    world.write("bob", "php/reads.php", script);
    let text = world.get("php.test", "/reads.php").expect(200).text();
    assert!(!text.contains(SECRET) && text.starts_with("falsefalse uid "), "{text}");
    assert!(text.contains(&format!("uid {} ", world.uid("bob"))), "{text}");
    // No worker serves two tenants.
    let alices = world.get("alice.test", "/pid.php").expect(200).text();
    assert!(!text.ends_with(&format!("pid {alices}")));
}

fn no_tenant_reads_a_log(world: &World) {
    world.get("alice.test", "/secret.html?token=alices-token");
    wait::until("the request is logged", || !world.access_log().is_empty());
    let dir = world.path("");
    let text = as_bob(
        world,
        "logs",
        &format!(
            "cat {0}/log/access.log; echo x >> {0}/log/access.log; rm -f {0}/log/access.log",
            dir.display()
        ),
    );
    assert!(!text.contains("alices-token") && is_refused(&text), "{text}");
    assert!(world.path("log/access.log").exists());
}

fn no_tenant_speaks_to_the_node(world: &World) {
    let run = world.path("run");
    let connect = |socket: &str, kind: &str| {
        format!(
            "perl -MSocket -e 'socket(my $s, AF_UNIX, {kind}, 0) or die; \
             connect($s, sockaddr_un(\"{}/{socket}\")) ? print \"CONNECTED\\n\" : print \"no: $!\\n\"'",
            run.display()
        )
    };
    // Alice's application listens on a socket in its sandbox: outside there is nothing to be found, by root neither.
    world.get("app.test", "/").expect(200);
    let find = format!("find {} -type s", run.join("keeper").display());
    assert_eq!(machine::run("sh", &["-c", &find]).lines().count(), 0, "its socket has a name outside");
    let state = world.path("state");
    let lines = [
        connect("admin.sock", "SOCK_STREAM"),
        connect("keeper.sock", "5"),
        format!("echo $({find} 2>/dev/null | wc -l) sockets"),
        format!("cat {}/nagaya.redb | wc -c", state.display()),
    ];
    let text = as_bob(world, "speaks", &lines.join("\n"));
    assert!(!text.contains("CONNECTED"), "{text}");
    let refused = text.lines().filter(|line| line.starts_with("no: ") && is_refused(line));
    assert_eq!(refused.count(), 2, "{text}");
    assert!(text.contains("\n0 sockets\n"), "a socket of another tenant can be found: {text}");
    assert!(text.contains("\n0\ndone"), "the store can be read: {text}");
}

fn no_tenant_signals_another(world: &World) {
    let alices: i32 = world.get("alice.test", "/pid.php").expect(200).text().parse().expect("a process id");
    let edge = world.pid_of("edge");
    let keeper = world.pid_of("keeper");
    let text = as_bob(
        world,
        "signals",
        &format!(
            "for pid in {alices} {edge} {keeper}; do kill -9 $pid && echo KILLED; cat /proc/$pid/environ; done"
        ),
    );
    assert!(!text.contains("KILLED"), "{text}");
    assert!([alices, edge, keeper].into_iter().all(machine::is_running));
}

/// A line of shell that connects, and says what came of it.
fn connect_to(address: &str, port: u16) -> String {
    format!(
        "perl -MIO::Socket::IP -e 'my $s = IO::Socket::IP->new(PeerHost => \"{address}\", PeerPort => {port}, \
         Timeout => 20); print $s ? \"GOT \" . <$s> : \"no: $!\\n\"'"
    )
}

fn no_program_reaches_another_tenants_port(world: &World) {
    // As of a backend of Alice's, of etcd, or of another node's edge.
    let port = serve_lines();
    let lines: Vec<String> =
        ["127.0.0.1", "127.0.0.2", "::1"].map(|address| connect_to(address, port)).to_vec();
    let text = as_bob(world, "connects", &lines.join("\n"));
    assert_eq!(text, "no: Connection refused\n".repeat(3) + "done\n");
    let script =
        format!("<?php echo @stream_socket_client('tcp://127.0.0.1:{port}', $e, $why) ? 'GOT' : $why;");
    world.write("bob", "php/connects.php", script);
    assert_eq!(world.get("php.test", "/connects.php").expect(200).text(), "Connection refused");
}

fn a_program_reaches_services_for_all_tenants(world: &World) {
    let port = shared_port();
    let text = as_bob(world, "asks", &connect_to("127.0.0.1", port));
    assert_eq!(text, "GOT a service of the node\ndone\n");
    world.write(
        "bob",
        "php/asks.php",
        format!("<?php echo fgets(stream_socket_client('tcp://localhost:{port}'));"),
    );
    assert_eq!(world.get("php.test", "/asks.php").expect(200).text(), "a service of the node\n");
}

fn no_program_sees_another_users_processes(world: &World) {
    // Alice's worker runs.
    world.get("alice.test", "/pid.php").expect(200);
    let own = world.uid("bob").to_string();
    let text = as_bob(world, "processes", "stat -c %u /proc/[0-9]* 2>/dev/null | sort -u");
    assert_eq!(text, format!("{own}\ndone\n"));
    // One that has ended meanwhile has no owner.
    let script = "<?php $uids = []; foreach (glob('/proc/[0-9]*') as $p) $uids[] = @fileowner($p); \
                  echo implode(' ', array_unique(array_filter($uids, 'is_int')));";
    world.write("bob", "php/processes.php", script);
    assert_eq!(world.get("php.test", "/processes.php").expect(200).text(), own);
}

fn no_program_finds_another_tenants_temporary_files(world: &World) {
    let name = format!("nagaya-e2e-{}-{}", std::process::id(), world.uid("alice"));
    let script = format!(
        "<?php echo json_encode(@file_get_contents('/tmp/{name}')); file_put_contents('/tmp/{name}', '{SECRET}');"
    );
    world.write("alice", "www/tmp.php", script);
    assert_eq!(world.get("alice.test", "/tmp.php").expect(200).text(), "false");
    assert_eq!(world.get("alice.test", "/tmp.php").expect(200).text(), format!("\"{SECRET}\""), "it stays");
    let text = as_bob(world, "tmp", &format!("cat /tmp/{name} /var/tmp/{name}; ls -A /tmp | wc -l"));
    assert!(!text.contains(SECRET) && text.matches("No such file").count() == 2, "{text}");
    assert!(!std::path::Path::new("/tmp").join(&name).exists(), "it is the node's");
}

fn the_status_says_that_programs_are_kept_apart(world: &World) {
    as_bob(world, "begins", "true");
    let status = world.status();
    let rows = status["protections"].as_array().expect("a list");
    let row = rows.iter().find(|row| row["name"] == "programs-apart").expect("it is listed");
    assert_eq!(row["on"], true, "{row}");
    assert!(status["keeper"]["enclosures"]["now"].as_u64().is_some_and(|now| now > 0), "{status}");
}

fn the_edge_has_no_rights_to_give_away(world: &World) {
    let edge = world.pid_of("edge");
    let field = |name: &str| machine::status_field(edge, name).unwrap_or_default();
    assert_eq!(field("NoNewPrivs"), "1");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    let ids = |name: &str| field(name).split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for kind in ["Uid", "Gid"] {
        let ids = ids(kind);
        assert!(ids.len() == 4 && ids.iter().all(|id| id != "0" && *id == ids[0]), "{kind}: {ids:?}");
    }
    assert_eq!(ids("Groups").into_iter().filter(|group| group == "0").count(), 0);
    let tenants = [world.uid("alice").to_string(), world.uid("bob").to_string()];
    assert!(!tenants.contains(&ids("Uid")[0]));
    // A process of the same uid must not be able to look into it either.
    assert_eq!(
        machine::run("sh", &["-c", &format!("cat /proc/{edge}/oom_score >/dev/null; echo ok")]),
        "ok\n"
    );
}

fn each_thread_of_the_edge_has_a_filter_of_system_calls(world: &World) {
    let edge = world.pid_of("edge");
    world.get("static.test", "/index.html").expect(200);
    let threads = std::fs::read_dir(format!("/proc/{edge}/task")).expect("root may look");
    let statuses: Vec<_> = threads
        .map(|thread| std::fs::read_to_string(thread.expect("a thread").path().join("status")))
        .map(|status| status.expect("a thread that lives"))
        .collect();
    assert!(statuses.len() > 1);
    for status in statuses {
        assert!(status.contains("Seccomp:\t2\n"), "{status}");
    }
}

fn the_edge_holds_nothing_of_the_store(world: &World) {
    let edge = world.pid_of("edge");
    let entries = std::fs::read_dir(format!("/proc/{edge}/fd")).expect("root may look");
    let open: Vec<_> = entries
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .map(|path| path.to_string_lossy().into_owned())
        .collect();
    assert!(
        !open
            .iter()
            .any(|path| path.contains("nagaya.redb") || path.contains("admin") || path.ends_with(".pem")),
        "{open:?}"
    );
}

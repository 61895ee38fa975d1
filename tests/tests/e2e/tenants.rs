//! Two tenants on one node cannot reach each other, whatever way one of them tries; nor can either reach the node.
//!
//! Not here: links out of a document root in general (`static_files`).

use std::os::unix::fs::symlink;

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
            no_cgi_program_reaches_another_tenant,
            no_php_script_reaches_another_tenant,
            no_tenant_reads_a_log,
            no_tenant_speaks_to_the_node,
            no_tenant_signals_another,
            the_edge_has_no_rights_to_give_away,
            each_thread_of_the_edge_has_a_filter_of_system_calls,
            the_edge_holds_nothing_of_the_store,
        ],
    ),
};

/// What Alice has and nobody else may see.
const SECRET: &str = "alices-own-secret";

fn world() -> World {
    let site = |name: &str, tenant: &str, backend: serde_json::Value| json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend });
    let world = World::builder()
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

/// Runs a shell line as Bob's CGI program.
fn as_bob(world: &World, name: &str, line: &str) -> String {
    let text = format!("#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nexec 2>&1\n{line}\necho done\n");
    world.write_program("bob", &format!("cgi/{name}.cgi"), &text);
    let answer = world.get("cgi.test", &format!("/{name}.cgi")).expect(200).text();
    assert!(answer.ends_with("done\n"), "{answer}");
    answer
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
    assert!(!text.contains(SECRET) && text.contains("ermission denied"), "{text}");
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
    assert!(!text.contains("alices-token") && text.contains("ermission denied"), "{text}");
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
    assert_eq!(text.matches("no: Permission denied").count(), 2, "{text}");
    assert!(text.contains("\n0 sockets\n"), "a socket of another tenant can be found: {text}");
    assert!(text.contains("\n0\ndone"), "the store can be read: {text}");
}

fn no_tenant_signals_another(world: &World) {
    let alices: i32 = world.get("alice.test", "/pid.php").expect(200).text().parse().expect("a process id");
    let (edge, keeper) = (world.pid_of("edge"), world.pid_of("keeper"));
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

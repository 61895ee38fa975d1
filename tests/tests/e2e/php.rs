//! PHP: scripts in workers that nagaya owns, and a real application on them.
//!
//! Not here: CGI (`cgi`), ambiguous requests (`smuggling`).

use std::path::Path;

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{self, Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "php",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_script_is_told_the_request,
            a_worker_runs_as_its_tenant,
            a_worker_serves_many_requests,
            forms_and_uploads_arrive,
            a_front_controller_gets_what_is_no_file,
            a_worker_that_dies_breaks_the_answer_off_and_is_replaced,
            a_worker_that_dies_silently_is_502_and_replaced,
            an_upload_that_meets_a_dead_worker_goes_to_another,
            a_script_that_never_ends_is_504_and_its_worker_replaced,
            a_client_that_leaves_frees_the_worker,
            a_script_that_ignores_the_abort_goes_on_to_its_end,
            scripts_of_clients_that_left_keep_their_workers,
            a_script_that_goes_on_for_too_long_is_ended_and_said,
            want_of_memory_is_named_where_it_ended_a_script,
            a_site_ends_each_stream_in_its_time,
            idle_workers_end,
            a_fatal_error_is_told_and_logged,
            dokuwiki_runs_unmodified,
        ],
    ),
};

fn world() -> World {
    let site = |name: &str, tenant: &str, backend: serde_json::Value| json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend });
    let world = World::builder()
        .set("tenants", "php_workers = 2\nphp_idle_timeout = \"1s\"")
        .tenant("alice")
        .tenant("bob")
        .tenant("carol")
        .site(site("killed", "carol", json!({ "kind": "php", "root": "php" })))
        .site(site("php", "alice", json!({ "kind": "php", "root": "php" })))
        .tenant("dave")
        .tenant("erin")
        .tenant("frank")
        .tenant("grace")
        .site(json!({ "name": "ends", "tenant": "grace", "hosts": ["ends.test"], "stream_seconds": 2,
            "backend": { "kind": "php", "root": "php", "linger_seconds": 0 } }))
        .site(site("goes", "frank", json!({ "kind": "php", "root": "php" })))
        .site(site("works", "dave", json!({ "kind": "php", "root": "php" })))
        .site(site("brief", "dave", json!({ "kind": "php", "root": "php", "linger_seconds": 1 })))
        .site(site("small", "erin", json!({ "kind": "php", "root": "php" })))
        .site(site("impatient", "alice", json!({ "kind": "php", "root": "php", "timeout_seconds": 1 })))
        .site(site(
            "front",
            "alice",
            json!({ "kind": "php", "root": "front", "front_controller": "index.php" }),
        ))
        .site(site("rarely", "bob", json!({ "kind": "php", "root": "php" })))
        .site(site(
            "wiki",
            "bob",
            json!({ "kind": "php", "root": "wiki",
            "deny": ["/data", "/conf", "/bin", "/inc", "/vendor"] }),
        ))
        .start();
    script(&world, "pid", "echo getmypid();");
    script(&world, "info", "echo json_encode($_SERVER);");
    world
}

fn script(world: &World, name: &str, code: &str) {
    world.write("alice", &format!("php/{name}.php"), format!("<?php {code}"));
}

fn a_script_is_told_the_request(world: &World) {
    let text = client::get_with(world.http(), "php.test", "/info.php/a%20b?x=1", "X-Own: yes\r\n")
        .expect(200)
        .text();
    let server: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
    for (name, value) in [
        ("SCRIPT_NAME", "/info.php"),
        ("PATH_INFO", "/a b"),
        ("PHP_SELF", "/info.php/a b"),
        ("QUERY_STRING", "x=1"),
        ("REQUEST_URI", "/info.php/a%20b?x=1"),
        ("HTTP_X_OWN", "yes"),
        ("REMOTE_ADDR", "127.0.0.1"),
        ("HTTP_HOST", "php.test"),
    ] {
        assert_eq!(server[name], value, "{name}");
    }
    assert!(server["SCRIPT_FILENAME"].as_str().is_some_and(|file| file.ends_with("/alice/php/info.php")));
}

fn a_worker_runs_as_its_tenant(world: &World) {
    script(
        world,
        "id",
        "passthru('id -u; id -G; grep Cap /proc/self/status; ls /proc/' . getmypid() . '/fd');",
    );
    let text = world.get("php.test", "/id.php").expect(200).text();
    let uid = world.uid("alice").to_string();
    assert!(text.starts_with(&format!("{uid}\n{uid}\n")), "{text}");
    assert!(
        text.lines().filter(|line| line.starts_with("CapEff")).all(|line| line.ends_with("0000000000000000"))
    );
}

fn a_worker_serves_many_requests(world: &World) {
    let mut pids: Vec<_> = (0..20).map(|_| world.get("php.test", "/pid.php").expect(200).text()).collect();
    pids.sort();
    pids.dedup();
    // Other tests end some of the two workers meanwhile.
    assert!(pids.len() <= 10, "twenty requests took {} workers", pids.len());
}

fn forms_and_uploads_arrive(world: &World) {
    script(
        world,
        "form",
        "echo $_POST['name'], '|', strlen(file_get_contents($_FILES['file']['tmp_name'] ?? '/dev/null'));",
    );
    let content = "x".repeat(300_000);
    let body = format!(
        "--cut\r\nContent-Disposition: form-data; name=\"name\"\r\n\r\nalice\r\n\
         --cut\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{content}\r\n--cut--\r\n"
    );
    let mut connection = Connection::open(world.http());
    connection.send(format!(
        "POST /form.php HTTP/1.1\r\nHost: php.test\r\nContent-Type: multipart/form-data; boundary=cut\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    assert_eq!(connection.response().expect(200).text(), "alice|300000");
    // PHP knows a body only by its length; one of unknown length is measured first.
    let pieces = "7\r\nname=bo\r\n1\r\nb\r\n0\r\n\r\n";
    connection.send(format!(
        "POST /form.php HTTP/1.1\r\nHost: php.test\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Transfer-Encoding: chunked\r\n\r\n{pieces}"
    ));
    assert_eq!(connection.response().expect(200).text(), "bob|0");
}

fn a_front_controller_gets_what_is_no_file(world: &World) {
    world.write("alice", "front/index.php", "<?php echo 'front ', $_SERVER['REQUEST_URI'];");
    world.write("alice", "front/style.css", "a file");
    assert_eq!(
        world.get("front.test", "/2026/11/a-post?x=1").expect(200).text(),
        "front /2026/11/a-post?x=1"
    );
    assert_eq!(world.get("front.test", "/style.css").expect(200).text(), "a file");
    assert_eq!(world.get("front.test", "/").expect(200).text(), "front /");
}

fn a_worker_that_dies_breaks_the_answer_off_and_is_replaced(world: &World) {
    script(world, "dies", "echo str_repeat('x', 100000); flush(); exec('kill -9 ' . getmypid());");
    let mut connection = Connection::open(world.http());
    connection.send("GET /dies.php HTTP/1.1\r\nHost: php.test\r\n\r\n");
    let answer = connection.try_response();
    assert!(answer.is_err(), "half an answer passes for a whole one: {answer:?}");
    for _ in 0..4 {
        world.get("php.test", "/pid.php").expect(200);
    }
}

fn a_worker_that_dies_silently_is_502_and_replaced(world: &World) {
    script(world, "mute", "exec('kill -9 ' . getmypid());");
    world.get("php.test", "/mute.php").expect(502);
    for _ in 0..4 {
        world.get("php.test", "/pid.php").expect(200);
    }
}

/// The next request comes at once, while the worker's end is under way.
fn an_upload_that_meets_a_dead_worker_goes_to_another(world: &World) {
    // Of a tenant of its own: nobody else's request is to be in the worker that is killed.
    world.write("carol", "php/pid.php", "<?php echo getmypid();");
    let len = "<?php echo getmypid(), ' ', strlen(file_get_contents('php://input'));";
    world.write("carol", "php/len.php", len);
    for len in [5, 200_000].repeat(5) {
        let dead = world.get("killed.test", "/pid.php").expect(200).text();
        machine::signal(dead.parse().expect("a process id"), "KILL");
        let answer =
            client::post(world.http(), "killed.test", "/len.php", &"x".repeat(len)).expect(200).text();
        let (pid, read) = answer.split_once(' ').expect("two words");
        assert_eq!(read, len.to_string());
        assert_ne!(pid, dead);
    }
}

fn a_script_that_never_ends_is_504_and_its_worker_replaced(world: &World) {
    script(
        world,
        "never",
        "file_put_contents(__DIR__ . '/never.pid', getmypid()); set_time_limit(0); while (true) { usleep(1000); }",
    );
    world.get("impatient.test", "/never.php").expect(504);
    let pid = std::fs::read_to_string(world.home("alice").join("php/never.pid")).expect("the script has run");
    let pid = pid.parse().expect("a process id");
    wait::until("its worker is gone", || !machine::is_running(pid));
    // A new one may take longer to start than this site waits.
    wait::until("another one serves", || world.get("impatient.test", "/pid.php").status == 200);
}

fn a_client_that_leaves_frees_the_worker(world: &World) {
    script(
        world,
        "left",
        "file_put_contents(__DIR__ . '/left.pid', getmypid()); echo str_repeat('x', 10000); flush(); while (true) { usleep(1000); echo 'x'; flush(); }",
    );
    for _ in 0..3 {
        // Three times with two workers: none of them stays busy.
        let mut connection = Connection::open(world.http());
        connection.send("GET /left.php HTTP/1.1\r\nHost: php.test\r\n\r\n");
        connection.head().expect(200);
    }
    world.get("php.test", "/pid.php").expect(200);
}

/// Asks for it, and leaves when it has begun.
fn ask_and_leave(world: &World, tenant: &str, host: &str, name: &str) {
    let began = world.home(tenant).join(format!("php/{name}.began"));
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET /{name}.php HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    wait::until("the script begins", || began.exists());
}

/// A script that begins, waits for a file, and writes what it was.
fn waiting_script(world: &World, tenant: &str, name: &str, code: &str) {
    let text = format!(
        "<?php {code} touch(__DIR__ . '/{name}.began'); while (!file_exists(__DIR__ . '/{name}.go')) {{ usleep(10000); echo 'x'; flush(); clearstatcache(); }} file_put_contents(__DIR__ . '/{name}.end', connection_aborted());"
    );
    world.write(tenant, &format!("php/{name}.php"), text);
}

fn a_script_that_ignores_the_abort_goes_on_to_its_end(world: &World) {
    for (name, code) in [("goes_on", "ignore_user_abort(true);"), ("is_told", "")] {
        waiting_script(world, "frank", name, code);
    }
    ask_and_leave(world, "frank", "goes.test", "goes_on");
    let php = world.home("frank").join("php");
    // Another, which writes and has not asked to go on, is ended by its writing. By then the first has been told, too.
    let pid = php.join("is_told.pid");
    waiting_script(world, "frank", "is_told", "file_put_contents(__DIR__ . '/is_told.pid', getmypid());");
    ask_and_leave(world, "frank", "goes.test", "is_told");
    let number = std::fs::read_to_string(pid).expect("its number").parse().expect("a process id");
    wait::until("PHP has ended the script that writes", || !machine::is_running(number));
    assert!(!php.join("is_told.end").exists());
    std::fs::write(php.join("goes_on.go"), "").expect("a file");
    assert_eq!(wait::until_written(&php.join("goes_on.end")), "1", "it goes on to its end, and could know");
}

fn scripts_of_clients_that_left_keep_their_workers(world: &World) {
    world.write("dave", "php/third.php", "<?php echo file_exists(__DIR__ . '/first.end') || file_exists(__DIR__ . '/second.end') ? 'after' : 'beside';");
    for name in ["first", "second"] {
        waiting_script(world, "dave", name, "ignore_user_abort(true);");
        ask_and_leave(world, "dave", "works.test", name);
    }
    // Both workers of the tenant are at work, whoever left.
    let mut third = Connection::open(world.http());
    third.send("GET /third.php HTTP/1.1\r\nHost: works.test\r\n\r\n");
    for _ in 0..5 {
        world.get("php.test", "/pid.php").expect(200);
    }
    for name in ["first", "second"] {
        std::fs::write(world.home("dave").join(format!("php/{name}.go")), "").expect("a file");
    }
    assert_eq!(third.response().expect(200).text(), "after");
}

fn a_script_that_goes_on_for_too_long_is_ended_and_said(world: &World) {
    let code = "ignore_user_abort(true); file_put_contents(__DIR__ . '/long.pid', getmypid());";
    waiting_script(world, "dave", "long", code);
    ask_and_leave(world, "dave", "brief.test", "long");
    let pid = std::fs::read_to_string(world.home("dave").join("php/long.pid")).expect("its number");
    let pid = pid.parse().expect("a process id");
    wait::until("it is ended", || !machine::is_running(pid));
    wait::until("that is said", || world.log().contains("NGY0479"));
}

/// Asks for it, and returns what `explain` says of the request.
fn explained(world: &World, host: &str, target: &str) -> String {
    let answer = world.get(host, target).expect(502);
    let text = answer.text();
    let id = text.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 32);
    world.cli(&["explain", id.unwrap_or_else(|| panic!("it has an id: {text}"))])
}

fn want_of_memory_is_named_where_it_ended_a_script(world: &World) {
    world.cli(&["tenant", "set", "erin", "--memory", "128M"]);
    let hungry = "ini_set('memory_limit', -1); $a = []; while (true) $a[] = str_repeat('x', 1 << 20);";
    world.write("erin", "php/hungry.php", format!("<?php {hungry}"));
    world.write("erin", "php/late.php", format!("<?php echo str_repeat('x', 10000); flush(); {hungry}"));
    world.write("erin", "php/other.php", "<?php passthru('kill -9 ' . getmypid());");
    let other = explained(world, "small.test", "/other.php");
    assert!(!other.contains("out of memory"), "it died of another cause: {other}");
    let text = explained(world, "small.test", "/hungry.php");
    assert!(text.contains("out of memory") && text.contains("NGY0324"), "{text}");
    let is_said =
        |what: &str| world.log().lines().any(|line| line.contains("out of memory") && line.contains(what));
    wait::until("the keeper says so, too", || is_said("php process"));
    assert!(!is_said("other.php"));
    let mut connection = Connection::open(world.http());
    connection.send("GET /late.php HTTP/1.1\r\nHost: small.test\r\n\r\n");
    connection.head().expect(200);
    wait::until("an answer that had begun names it", || is_said("NGY0442") || is_said("cut off"));
}

fn a_site_ends_each_stream_in_its_time(world: &World) {
    world.write("grace", "php/pid.php", "<?php echo getmypid();");
    world.write(
        "grace",
        "php/endless.php",
        "<?php while (true) { echo str_repeat('x', 100); flush(); usleep(20000); }",
    );
    world.write("grace", "php/silent.php", "<?php while (true) sleep(1);");
    let pid = || world.get("ends.test", "/pid.php").expect(200).text().parse::<i32>().expect("a process id");
    let first = pid();
    let mut endless = Connection::open(world.http());
    endless.send("GET /endless.php HTTP/1.1\r\nHost: ends.test\r\n\r\n");
    assert!(endless.try_response().is_err());
    // More of them than the tenant has workers: each gives its worker back.
    for _ in 0..3 {
        world.get("ends.test", "/silent.php").expect(504);
    }
    wait::until("a script serves no one any more", || !machine::is_running(first));
    assert_ne!(pid(), first);
}

fn idle_workers_end(world: &World) {
    world.write("bob", "php/pid.php", "<?php echo getmypid();");
    let pid = world.get("rarely.test", "/pid.php").expect(200).text().parse().expect("a process id");
    assert!(machine::is_running(pid));
    wait::until("the idle worker has ended", || !machine::is_running(pid));
}

fn a_fatal_error_is_told_and_logged(world: &World) {
    script(world, "fatal", "ini_set('display_errors', '0'); no_such_function();");
    let answer = world.get("php.test", "/fatal.php").expect(500);
    assert!(!answer.text().contains("no_such_function"));
    wait::until("the error is logged", || world.log().contains("no_such_function"));
}

fn dokuwiki_runs_unmodified(world: &World) {
    let packaged = Path::new("/usr/share/dokuwiki");
    if !packaged.join("doku.php").exists() {
        suite::skip("the package dokuwiki is not installed");
    }
    let wiki = world.home("bob").join("wiki");
    let wiki_text = wiki.to_string_lossy().into_owned();
    machine::run("cp", &["-rL", "/usr/share/dokuwiki", &wiki_text]);
    for part in ["data", "lib"] {
        machine::run("cp", &["-rL", &format!("/var/lib/dokuwiki/{part}"), &wiki_text]);
    }
    // The package looks for its settings beneath /etc unless this file says otherwise.
    machine::write(
        &wiki.join("inc/preload.php"),
        format!("<?php define('DOKU_CONF', '{wiki_text}/conf/');\n"),
    );
    machine::run("cp", &["-rL", "/etc/dokuwiki/.", &format!("{wiki_text}/conf")]);
    machine::write(
        &wiki.join("conf/local.php"),
        format!("<?php $conf['savedir'] = '{wiki_text}/data'; $conf['useacl'] = 0;\n"),
    );
    world.give("bob");
    let page = world.get("wiki.test", "/doku.php?id=start").expect(200);
    assert!(page.text().contains("DokuWiki") && page.text().contains("</html>"), "{page:?}");
    let style = world.get("wiki.test", "/lib/exe/css.php").expect(200);
    assert!(style.header("content-type").is_some_and(|kind| kind.starts_with("text/css")), "{style:?}");
    for secret in ["/conf/local.php", "/data/pages/", "/inc/init.php"] {
        let answer = world.get("wiki.test", secret);
        assert!(matches!(answer.status, 403 | 404), "{secret}: {answer:?}");
    }
}

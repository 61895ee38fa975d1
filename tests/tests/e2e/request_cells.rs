//! Requests to applications that a rule limits: php-fpm, gunicorn and Apache as they are, whose workers serve one request each,
//! and gunicorn with threads, whose limits are its instance's. And those for which a rule raises the limits of their application.
//!
//! Not here: who is moved and when (the keeper's own suite), instances as such (`instances`), cells of programs (`cells`).

use std::path::{Path, PathBuf};

use nagaya_tests::client::{Connection, Response};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::{World, cgroups_of};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "request_cells",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_limited_request_to_php_fpm_is_slowed_alone,
            a_limited_request_to_gunicorn_is_slowed_alone,
            a_limited_request_to_apache_is_slowed_alone,
            worker_with_several_requests_has_its_instances_limits,
            one_that_used_much_is_slowed_down_and_the_next_is_not,
            request_of_a_client_that_left_leaves_no_limit,
            a_boost_raises_an_applications_limit_during_one_request,
        ],
    ),
};

const RULE: &str = "limit cpu: \"10%\" if request.path.start_with?(\"/slow\")\n\
    demote after: \"20ms\", cpu: \"5%\" if request.path.start_with?(\"/long\")\n\
    boost cpu: \"150%\" if request.path == \"/paid\"\n\
    boost cpu: \"900%\" if request.path == \"/most\"\n";

/// Uses as many milliseconds of CPU time as the query says.
const PHP: &str = "<?php $used = function () { $all = getrusage();
    return ($all['ru_utime.tv_sec'] + $all['ru_stime.tv_sec']) * 1e6 + $all['ru_utime.tv_usec'] + $all['ru_stime.tv_usec']; };
    $end = $used() + 1000 * (int) $_SERVER['QUERY_STRING'];
    while ($used() < $end); echo getmypid();";

const FPM: &str = "[global]\nerror_log = /dev/null\n[site]\nlisten = ${NAGAYA_SOCKET}\npm = static\n\
    pm.max_children = 2\nclear_env = no\n";

const WSGI: &str = "import os, time
def application(environ, start_response):
    end = time.thread_time() + int(environ['QUERY_STRING'] or 0) / 1000
    while time.thread_time() < end:
        pass
    start_response('200 OK', [('Content-Type', 'text/plain')])
    return [str(os.getpid()).encode()]
";

/// Says that it has begun, and ends when it is told.
const HOLDS: &str = "import os, time
def application(environ, start_response):
    name = environ['QUERY_STRING']
    if name:
        open(name + '.came', 'w').close()
        while not os.path.exists(name + '.go'):
            time.sleep(0.01)
    start_response('200 OK', [('Content-Type', 'text/plain')])
    return [b'done']
";

const CGI: &str = "#!/usr/bin/perl\nmy $n; do { $n++ for 1 .. 10000 } while ((times)[0] + (times)[1] < $ENV{QUERY_STRING} / 1000);\n\
    print \"Content-Type: text/plain\\n\\n$$\";\n";

const APACHE: &str = "
LoadModule mpm_prefork_module MODULES/mod_mpm_prefork.so
LoadModule authz_core_module MODULES/mod_authz_core.so
LoadModule alias_module MODULES/mod_alias.so
LoadModule cgi_module MODULES/mod_cgi.so
Listen 127.0.0.1:${PORT}
ServerName localhost
PidFile /tmp/apache.pid
ErrorLog /dev/stderr
StartServers 2
MinSpareServers 2
ScriptAliasMatch ^/ HOME/apache/burn.cgi
";

const MODULES: &str = "/usr/lib/apache2/modules";

fn world() -> World {
    World::builder()
        .tenant("alice")
        .rule("slow", "access_checker", RULE, "")
        .set("receipts", "allow = [\"127.0.0.1\"]")
        .set("instances", "image_bytes = \"0B\"")
        .start()
}

fn add(world: &World, name: &str, mut backend: Value) {
    backend["kind"] = "app".into();
    backend["start_seconds"] = 60.into();
    world.give("alice");
    let site =
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend });
    world.import(&[site]);
}

fn add_php(world: &World, name: &str) {
    let names = std::fs::read_dir("/usr/sbin").expect("a directory of programs");
    let found = names.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("php-fpm"));
    let program = found.map_or_else(|| skip("there is no php-fpm here"), |entry| entry.path());
    let config = world.write("alice", &format!("{name}/fpm.conf"), FPM);
    world.write("alice", &format!("{name}/html/index.php"), PHP);
    add(
        world,
        name,
        json!({
            "directory": name, "protocol": "fastcgi",
            "command": [program, "--nodaemonize", "--force-stderr", "--fpm-config", config],
            "files": { "root": format!("{name}/html"), "front_controller": "index.php" },
        }),
    );
}

fn add_gunicorn(world: &World, name: &str, more: &[&str]) {
    let program = Path::new("/usr/bin/gunicorn");
    if !program.exists() {
        skip("there is no gunicorn here");
    }
    world.write("alice", &format!("{name}/burn.py"), WSGI);
    let command = [&["/usr/bin/gunicorn", "--worker-tmp-dir", "/tmp"], more, &["burn"]].concat();
    add(world, name, json!({ "directory": name, "listen": "fd", "command": command }));
}

fn add_apache(world: &World, name: &str) {
    let program = PathBuf::from("/usr/sbin/apache2");
    if !program.exists() {
        skip("there is no Apache here");
    }
    let home = world.home("alice").join(name).display().to_string();
    let config = APACHE.replace("MODULES", MODULES).replace("HOME", &home);
    let config = world.write("alice", &format!("{name}/apache.conf"), config);
    world.write_program("alice", &format!("{name}/apache/burn.cgi"), CGI);
    let command = json!([program, "-DFOREGROUND", "-d", home, "-f", config]);
    add(world, name, json!({ "directory": name, "listen": "port", "command": command }));
}

fn ask(world: &World, name: &str, target: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET {target} HTTP/1.1\r\nHost: {name}.test\r\n\r\n"));
    connection
}

/// The line of the access log for an answer.
fn logged(world: &World, answer: &Response) -> Value {
    world.logged(answer.header("x-request-id").expect("who gets receipts gets its id"))
}

fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// The cells of this site in which something runs, each with its CPU quota if it has one.
fn cells(world: &World, name: &str) -> Vec<(String, Option<u64>, Value)> {
    let of_site = |cell: &Value| cell["kind"] == "request" && cell["site"] == name;
    let told = |cell: Value| {
        let quota = cell["limits"]["cpu"]["quota_us"].as_u64();
        (cell["path"].as_str().expect("a path").to_owned(), quota, cell["usage"].clone())
    };
    world.cells().into_iter().filter(of_site).map(told).collect()
}

/// Once the keeper has put everything back there is one cell, the instance's.
fn until_back(world: &World, name: &str) -> Value {
    wait::until_some("all of it is in the instance's cell", || match &mut cells(world, name)[..] {
        [(_, None, usage)] => Some(usage.take()),
        _ => None,
    })
}

/// Of two requests at once, only the one that the rule names has a limit.
fn slowed_alone(world: &World, name: &str) {
    world.get(&format!("{name}.test"), "/first?0").expect(200);
    // On a busy machine it has computed for a while when its process is in the cell.
    let mut slow = ask(world, name, "/slow?1200");
    wait::until("it has a cell of its own", || {
        cells(world, name).iter().any(|(_, quota, _)| quota.is_some())
    });
    let other = world.get(&format!("{name}.test"), "/other?300").expect(200);
    let slow = slow.response().expect(200);
    let line = logged(world, &slow);
    let other = logged(world, &other);
    assert_eq!(line["cell_of"], "request", "{line}");
    assert!(line["cell"].as_str().is_some_and(|cell| cell.starts_with(&format!("alice/{name}/r"))), "{line}");
    assert!(number(&line, "throttled_us") > 0, "{line}");
    assert!(number(&line, "cpu_us") >= 200_000, "{line}");
    // A tenth of a core: ten times the time.
    assert!(number(&line, "duration_us") * 20 >= number(&line, "cpu_us") * 10 * 19, "{line}");
    let receipt = slow.header("nagaya-receipt").expect("this client gets receipts");
    assert!(receipt.contains("\";of=request"), "{receipt}");
    assert!(other["cell"].is_null() && number(&other, "throttled_us") == 0, "{other}");
    let usage = until_back(world, name);
    assert_eq!(usage["throttled_us"], 0, "what else ran was not slowed: {usage}");
    let id = line["id"].as_str().expect("an id");
    let told = world.cli(&["explain", id]);
    assert!(told.contains(" of the request") && !told.contains("did not hold"), "{told}");
}

fn a_limited_request_to_php_fpm_is_slowed_alone(world: &World) {
    add_php(world, "fpm");
    slowed_alone(world, "fpm");
}

fn a_limited_request_to_gunicorn_is_slowed_alone(world: &World) {
    add_gunicorn(world, "sync", &["-w", "2"]);
    slowed_alone(world, "sync");
}

fn a_limited_request_to_apache_is_slowed_alone(world: &World) {
    add_apache(world, "apache");
    slowed_alone(world, "apache");
}

fn worker_with_several_requests_has_its_instances_limits(world: &World) {
    add_gunicorn(world, "threads", &["-w", "1", "-k", "gthread", "--threads", "4"]);
    world.get("threads.test", "/first?0").expect(200);
    for _ in 0..2 {
        let slow = world.get("threads.test", "/slow?100").expect(200);
        let receipt = slow.header("nagaya-receipt").expect("this client gets receipts");
        assert!(receipt.contains("\";of=instance"), "{receipt}");
        let line = logged(world, &slow);
        assert_eq!(line["cell_of"], "instance", "{line}");
        assert_eq!(number(&line, "throttled_us"), 0, "{line}");
        let told = world.cli(&["explain", line["id"].as_str().expect("an id")]);
        assert!(told.contains(" of the instance") && told.contains("did not hold"), "{told}");
    }
    assert_eq!(until_back(world, "threads")["throttled_us"], 0);
}

fn one_that_used_much_is_slowed_down_and_the_next_is_not(world: &World) {
    add_php(world, "demoted");
    world.get("demoted.test", "/first?0").expect(200);
    let long = logged(world, &world.get("demoted.test", "/long?400").expect(200));
    assert_eq!(number(&long, "demoted"), 1, "{long}");
    assert!(number(&long, "throttled_us") > 0, "{long}");
    let short = logged(world, &world.get("demoted.test", "/long?0").expect(200));
    assert_eq!((number(&short, "demoted"), number(&short, "throttled_us")), (0, 0), "{short}");
    until_back(world, "demoted");
}

fn request_of_a_client_that_left_leaves_no_limit(world: &World) {
    add_gunicorn(world, "leaves", &["-w", "2"]);
    world.get("leaves.test", "/first?0").expect(200);
    let slow = ask(world, "leaves", "/slow?60000");
    wait::until("it has a cell of its own", || {
        cells(world, "leaves").iter().any(|(_, quota, _)| quota.is_some())
    });
    drop(slow);
    until_back(world, "leaves");
}

/// The CPU quota of a site's cell in percent of one core, as the kernel has it. None: no quota, or no cell.
fn quota(world: &World, site: &str) -> Option<u64> {
    let of_site = |root: PathBuf| root.join("tenant-alice").join(format!("site-{site}"));
    let read = |dir: PathBuf| {
        if let Ok(text) = std::fs::read_to_string(dir.join("cpu.max")) {
            let (quota, period) = text.trim().split_once(' ')?;
            return Some(quota.parse::<u64>().ok()? * 100 / period.parse::<u64>().ok()?);
        }
        let number = |file: &str| std::fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        Some(number("cpu.cfs_quota_us")? * 100 / number("cpu.cfs_period_us")?)
    };
    cgroups_of(world.pid_of("keeper")).into_iter().map(of_site).find_map(read)
}

/// A request to the site `boosted` that its application holds until it is told to end.
fn held(world: &World, path: &str, name: &str) -> Connection {
    let connection = ask(world, "boosted", &format!("{path}?{name}"));
    let came = world.home("alice").join(format!("boosted/{name}.came"));
    wait::until("the application has the request", || came.exists());
    connection
}

fn told(world: &World, mut held: Connection, name: &str) -> Value {
    world.write("alice", &format!("boosted/{name}.go"), "");
    logged(world, &held.response().expect(200))
}

fn a_boost_raises_an_applications_limit_during_one_request(world: &World) {
    let cells: Value = serde_json::from_str(&world.admin("/v1/cells").expect("it answers")).expect("JSON");
    if cells["controllers"]["cpu"].is_null() {
        skip("no cell can limit CPU time here");
    }
    add_gunicorn(world, "boosted", &["-w", "1", "-k", "gthread", "--threads", "4"]);
    world.write("alice", "boosted/burn.py", HOLDS);
    world.get("boosted.test", "/").expect(200);
    world.cli(&["site", "set", "boosted", "--cpu", "50%"]);
    assert_eq!(quota(world, "boosted"), Some(50));

    let other = held(world, "/other", "other");
    assert_eq!(quota(world, "boosted"), Some(50), "nobody has asked for more");
    let paid = held(world, "/paid", "paid");
    assert_eq!(quota(world, "boosted"), Some(150));
    let paid = told(world, paid, "paid");
    wait::until("it has its own limit again", || quota(world, "boosted") == Some(50));
    let other = told(world, other, "other");
    assert_eq!(paid["raised"], "cpu=150%", "{paid}");
    assert!(other["raised"].is_null(), "{other}");
    let explained = world.cli(&["explain", paid["id"].as_str().expect("an id")]);
    let raised = explained.lines().find(|line| line.contains("cpu of the site, raised"));
    assert!(raised.is_some_and(|line| line.contains("150%") && line.contains("set by rule")), "{explained}");

    // Never beyond what the record lets it: four times its limit, as the configuration says.
    let most = held(world, "/most", "most");
    assert_eq!(quota(world, "boosted"), Some(200));
    let most = told(world, most, "most");
    assert_eq!(most["raised"], "cpu=200%", "{most}");
    let explained = world.cli(&["explain", most["id"].as_str().expect("an id")]);
    assert!(explained.contains("900% was asked for"), "{explained}");
    wait::until("it has its own limit again", || quota(world, "boosted") == Some(50));

    // Whose client leaves.
    let left = held(world, "/paid", "left");
    assert_eq!(quota(world, "boosted"), Some(150));
    drop(left);
    wait::until("it has its own limit again", || quota(world, "boosted") == Some(50));
    world.write("alice", "boosted/left.go", "");

    // A client that gets receipts, and a site that has no limit.
    world.cli(&["site", "set", "boosted", "--unset", "cpu"]);
    let free = world.get("boosted.test", "/paid").expect(200);
    assert!(!free.header("nagaya-receipt").expect("this client gets receipts").contains("raised="));
    world.cli(&["site", "set", "boosted", "--cpu", "50%"]);
    let paid = world.get("boosted.test", "/paid").expect(200);
    let receipt = paid.header("nagaya-receipt").expect("this client gets receipts");
    assert!(receipt.contains(", raised=\"cpu=150%\""), "{receipt}");
}

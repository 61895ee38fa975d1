//! Real servers with several workers and a master that watches them: after a rest that is longer than their time limit no worker is killed, and
//! the first visitor gets his answer.
//!
//! Not here: made-up parents and children (`keeper/tests/kernel/work`), servers with one process (`recipes`).

use std::path::Path;

use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

use crate::resting::{add_site, builder, get, has, listed, rest, until_image, woken_from};

pub const SUITE: Suite = Suite {
    name: "watchdogs",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            gunicorns_four_workers_outlive_a_rest,
            pumas_cluster_outlives_a_rest,
            workers_that_puma_kills_are_named,
            uwsgis_workers_outlive_a_rest,
            apaches_processes_outlive_a_rest,
        ],
    ),
};

/// The time limit of workers, in seconds. A worker of gunicorn's gives a sign of life after half of it.
const LIMIT: u64 = 4;

/// For so many seconds each rests.
const REST: u64 = LIMIT + 2;

/// Masters look each second.
const LOOKS: u64 = 3;

fn world() -> World {
    builder().start()
}

/// Where one of these programs is missing, the test ends here.
fn need(programs: &[&str]) {
    if !programs.iter().all(|program| Path::new(program).exists()) {
        skip("a program of this test is not installed");
    }
}

/// An application of alice's that is ready when all its workers are there.
fn add(world: &World, name: &str, command: &[&str], more: Value) {
    let backend = json!({
        "kind": "app", "directory": name, "command": command, "start_seconds": 60, "ready": { "path": "/" },
        "env": { "HOME": "/tmp" },
    });
    add_site(world, name, backend, more);
}

/// How long it has been where it is.
fn seconds_there(world: &World, name: &str) -> u64 {
    listed(world, name)["since_seconds"].as_u64().expect("a time")
}

/// It rests at a tier for longer than its master lets workers be silent. The first request takes until the master has looked, and is
/// answered; the workers stay as they are. Returns them.
#[track_caller]
fn outlives(world: &World, name: &str, tier: &str) -> String {
    rest(world, name, tier);
    wait::until("it has rested for longer than the limit", || {
        let row = listed(world, name);
        row["tier"] == tier && row["since_seconds"].as_u64() >= Some(REST)
    });
    let first = get(world, name, "/slow").expect(200);
    assert_eq!(woken_from(&first), tier);
    let workers = first.text();
    wait::until("its master has looked after its workers", || {
        assert_eq!(get(world, name, "/").expect(200).text(), workers, "{name} after {tier}");
        seconds_there(world, name) >= LOOKS
    });
    let row = listed(world, name);
    assert!(!row["note"].as_str().is_some_and(|note| note.contains("NGY0354")), "{row}");
    workers
}

#[track_caller]
fn outlives_each_rest(world: &World, name: &str, workers: usize) {
    let begun = get(world, name, "/").expect(200).text();
    assert_eq!(begun.split(' ').count(), workers, "{begun}");
    assert_eq!(outlives(world, name, "frozen"), begun);
    if has(world, "criu") {
        until_image(world, name);
        for _ in 0..2 {
            let woken = outlives(world, name, "image");
            assert_eq!(woken.split(' ').count(), workers, "{woken}");
        }
    }
}

/// Says which workers its master has; takes its time at `/slow`.
const WATCHED_PY: &str = r#"
import os, time
def parent_of(name):
    try:
        with open(f'/proc/{name}/stat') as file: return int(file.read().rsplit(')', 1)[1].split()[1])
    except OSError: return None
def application(environ, start_response):
    if environ['PATH_INFO'] == '/slow': time.sleep(1.5)
    workers = [name for name in os.listdir('/proc') if name.isdigit() and parent_of(name) == os.getppid()]
    is_ready = len(workers) == int(os.environ['WORKERS'])
    start_response('200 OK' if is_ready else '503 Service Unavailable', [('Content-Type', 'text/plain')])
    return [' '.join(sorted(workers)).encode()]
"#;

fn gunicorns_four_workers_outlive_a_rest(world: &World) {
    need(&["/usr/bin/gunicorn"]);
    world.write("alice", "four/watched.py", WATCHED_PY);
    let limit = LIMIT.to_string();
    let command = [
        "/usr/bin/gunicorn",
        "-w",
        "4",
        "--timeout",
        &limit,
        "--worker-tmp-dir",
        "/tmp",
        "watched:application",
    ];
    add(world, "four", &command, json!({ "listen": "fd", "env": { "WORKERS": "4" } }));
    outlives_each_rest(world, "four", 4);
    let logs = world.cli(&["instance", "logs", "four"]);
    assert!(!logs.contains("WORKER TIMEOUT"), "{logs}");
}

/// The same in Ruby.
const WATCHED_RU: &str = r#"
def parent_of(name)
  File.read("/proc/#{name}/stat").rpartition(')').last.split[1].to_i
rescue SystemCallError
  nil
end
run lambda { |env|
  sleep 1.5 if env['PATH_INFO'] == '/slow'
  workers = Dir.children('/proc').grep(/\A\d+\z/).select { |name| parent_of(name) == Process.ppid }
  [workers.size == 2 ? 200 : 503, { 'Content-Type' => 'text/plain' }, [workers.sort.join(' ')]]
}
"#;

/// Its master reads the signs of life of its workers one by one, and looks at all of them in between: no order of processes helps. With a time limit that no
/// rest reaches nobody is killed.
fn pumas_cluster_outlives_a_rest(world: &World) {
    need(&["/usr/bin/puma"]);
    world.write("alice", "cluster/config.ru", WATCHED_RU);
    let settings = "workers 2\nthreads 1, 5\nworker_check_interval 1\nworker_timeout 31536000\n";
    world.write("alice", "cluster/puma.rb", settings);
    add(world, "cluster", &["/usr/bin/puma", "-C", "puma.rb", "-b", "unix://{socket}"], json!({}));
    outlives_each_rest(world, "cluster", 2);
    let logs = world.cli(&["instance", "logs", "cluster"]);
    assert!(!logs.contains("timed out worker"), "{logs}");
}

/// With a limit that is shorter than the rest, it kills those whose sign of life it has not read yet.
fn workers_that_puma_kills_are_named(world: &World) {
    need(&["/usr/bin/puma"]);
    world.write("alice", "limited/config.ru", WATCHED_RU);
    let settings = "workers 2\nthreads 1, 5\nworker_check_interval 1\nworker_timeout 2\n";
    world.write("alice", "limited/puma.rb", settings);
    add(world, "limited", &["/usr/bin/puma", "-C", "puma.rb", "-b", "unix://{socket}"], json!({}));
    get(world, "limited", "/").expect(200);
    rest(world, "limited", "frozen");
    wait::until("it has rested for longer than the limit", || seconds_there(world, "limited") >= REST);
    world.cli(&["instance", "wake", "limited"]);
    wait::until("its note names those that were killed", || {
        listed(world, "limited")["note"].as_str().is_some_and(|note| note.contains("NGY0354"))
    });
}

/// Its limit (harakiri) is one of requests: what rests has none.
fn uwsgis_workers_outlive_a_rest(world: &World) {
    need(&["/usr/bin/uwsgi-core", "/usr/lib/uwsgi/plugins/python3_plugin.so"]);
    world.write("alice", "harakiri/watched.py", WATCHED_PY);
    let limit = LIMIT.to_string();
    let command = [
        "/usr/bin/uwsgi-core",
        "--plugin",
        "python3",
        "--http-socket",
        "{socket}",
        "--master",
        "--die-on-term",
        "--processes",
        "2",
        "--harakiri",
        &limit,
        "--module",
        "watched",
    ];
    add(world, "harakiri", &command, json!({ "env": { "WORKERS": "2", "HOME": "/tmp" } }));
    outlives_each_rest(world, "harakiri", 2);
    let logs = world.cli(&["instance", "logs", "harakiri"]);
    assert!(!logs.contains("HARAKIRI"), "{logs}");
}

/// The same as a script of Apache's, which is the child of one of its processes.
const WATCHED_CGI: &str = r#"#!/usr/bin/python3
import os, time
def parent_of(name):
    try:
        with open(f'/proc/{name}/stat') as file: return int(file.read().rsplit(')', 1)[1].split()[1])
    except OSError: return None
if os.environ['REQUEST_URI'] == '/slow': time.sleep(1.5)
master = parent_of(os.getppid())
workers = [name for name in os.listdir('/proc') if name.isdigit() and parent_of(name) == master]
print('Status:', 200 if len(workers) == 2 else 503)
print('Content-Type: text/plain\n')
print(' '.join(sorted(workers)), end='')
"#;

const APACHE_CONF: &str = "ServerRoot /etc/apache2\nServerName prefork.test\nListen 127.0.0.1:${PORT}\nPidFile /tmp/apache.pid\n\
    ErrorLog /dev/stderr\nMutex posixsem\nKeepAlive Off\n\
    LoadModule mpm_prefork_module /usr/lib/apache2/modules/mod_mpm_prefork.so\n\
    LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so\n\
    LoadModule alias_module /usr/lib/apache2/modules/mod_alias.so\n\
    LoadModule cgi_module /usr/lib/apache2/modules/mod_cgi.so\n\
    StartServers 2\nMinSpareServers 2\nMaxSpareServers 4\nServerLimit 2\nMaxRequestWorkers 2\nTimeout 4\n\
    ScriptAliasMatch ^/ HERE/watched.cgi\n<Directory HERE>\nRequire all granted\n</Directory>\n";

fn apaches_processes_outlive_a_rest(world: &World) {
    need(&["/usr/sbin/apache2", "/usr/lib/apache2/modules/mod_cgi.so"]);
    let script = world.write_program("alice", "prefork/watched.cgi", WATCHED_CGI);
    let here = script.parent().expect("a file in a directory").to_str().expect("UTF-8");
    let conf = world.write("alice", "prefork/apache.conf", APACHE_CONF.replace("HERE", here));
    let conf = conf.to_str().expect("UTF-8");
    let command = ["/usr/sbin/apache2", "-DFOREGROUND", "-f", conf];
    add(world, "prefork", &command, json!({ "listen": "port" }));
    outlives_each_rest(world, "prefork", 2);
}

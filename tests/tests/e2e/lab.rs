//! The lab itself: that a wire fails as it was told to, that a machine stops as one, and that nothing of it is left.
//!
//! Nodes stand alone in these tests, and etcd is not asked for anything. Here is also what others begin with that need a lab with an
//! application; what a cluster does with failures is told there (`partitions`, `icmp`).

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;

use nagaya_tests::lab::Lab;
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use serde_json::{Value, json};

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "lab",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_silent_node_answers_nobody_until_it_is_healed,
        a_slow_wire_is_slow_each_way_and_loses_nothing,
        a_paused_node_stands_still_as_a_whole,
        a_killed_node_refuses_and_starts_again,
        a_member_of_etcd_stops_and_comes_back_to_the_others,
        etcd_lets_in_nodes_by_their_certificates_alone,
        two_labs_have_the_same_addresses_and_do_not_meet,
        nothing_is_left_after_down,
        nothing_is_left_when_the_owner_is_killed,
    ]),
};

/// A uid that nobody has.
const ALICE: u32 = 210_000;

/// Lease length, milliseconds. The disk under etcd may stand still for most of that. Its nodes
/// keep their leases.
pub const STEADY_FENCE: &str = "1000";

/// Three nodes that are set up in this way, and an application that any of them may run, at `app.test`.
pub fn lab_with_app(words: &[&str]) -> Lab {
    let lab = Lab::up(&[&["3", "--etcd", "1"], words].concat());
    let home = lab.dir().join("shared/alice");
    machine::write_program(&home.join("app/app.py"), programs::INSTANCE);
    for path in [home.clone(), home.join("app"), home.join("app/app.py")] {
        chown(path, Some(ALICE), Some(ALICE)).expect("root may give files away");
    }
    let tenant = json!({ "name": "alice", "uid": ALICE, "gid": ALICE, "home": home });
    let backend = json!({
        "kind": "app", "directory": "app", "command": ["./app.py"], "start_seconds": 20, "env": { "NAME": "app" },
    });
    let site = json!({ "name": "app", "tenant": "alice", "hosts": ["app.test"], "backend": backend });
    let records = lab.dir().join("shared/records");
    machine::write(&records, format!("{}\n{}\n", json!({ "tenant": tenant }), json!({ "site": site })));
    lab.run(&["exec", "n1", "--", "site", "import", &records.to_string_lossy()]);
    lab
}

/// By whose word a node may serve what is placed on it.
#[track_caller]
pub fn authority(lab: &Lab, node: &str) -> Value {
    let status = lab.run(&["exec", node, "--", "cluster", "status", "--json"]);
    let mut status: Value = serde_json::from_str(&status).expect("a status is JSON");
    status["authority"].take()
}

/// Nodes that are in no cluster.
fn alone(nodes: &str) -> Lab {
    Lab::up(&[nodes, "--etcd", "0", "--no-join"])
}

/// No site has this name, so that an answer says only that the edge is there.
const NOBODY: &str = "nobody.test";

/// Seconds an answer may take on a machine that has much else to do.
const ANSWER_MAX: u32 = 15;

fn answers(lab: &Lab, node: &str) -> bool {
    lab.get(node, NOBODY, ANSWER_MAX).as_deref() == Some("404")
}

fn a_silent_node_answers_nobody_until_it_is_healed() {
    let lab = alone("2");
    for words in [
        &["cut", "n1"][..],
        &["cut", "n1", "--one-way", "in"],
        &["cut", "n1", "--one-way", "out"],
        &["cut", "n1", "--loss", "100"],
    ] {
        wait::until("the node answers", || answers(&lab, "n1"));
        lab.run(words);
        assert_eq!(lab.get("n1", NOBODY, 1), None, "{words:?}");
        assert!(answers(&lab, "n2"), "{words:?} concerns another node");
        lab.run(&["heal", "n1"]);
        assert!(answers(&lab, "n1"), "healed after {words:?}");
    }
    assert!(!lab.output(&["cut", "n9"]).status.success());
}

fn a_slow_wire_is_slow_each_way_and_loses_nothing() {
    /// Milliseconds each way.
    const SLOW_MS: f64 = 40.0;
    let lab = alone("1");
    wait::until("the node answers", || answers(&lab, "n1"));
    let connect_ms = || {
        let url = "http://10.99.0.1/";
        let words = ["in", "clients", "--", "curl", "-s", "-o", "/dev/null", "-w", "%{time_connect}", url];
        lab.run(&words).trim().parse::<f64>().expect("seconds") * 1e3
    };
    lab.run(&["cut", "n1", "--slow", "40"]);
    let slow = connect_ms();
    assert!(slow >= 2.0 * SLOW_MS, "a round trip of {slow} ms");
    // Segments of the size that offloading makes, with checksums nobody has finished.
    let words = [
        "in",
        "n1",
        "--",
        "sh",
        "-c",
        "head -c 1000000 /dev/urandom > $0 && exec /usr/bin/python3 -m http.server -d $1 8080",
    ];
    let file = lab.dir().join("shared/large");
    let dir = lab.dir().join("shared");
    let mut server = Command::new("nsenter")
        .arg(format!("--net={}", lab.dir().join("net/n1").display()))
        .args(&words[3..])
        .args([&file, &dir])
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("nsenter");
    let copy = lab.dir().join("copy");
    let fetch = [
        "in",
        "clients",
        "--",
        "curl",
        "-sf",
        "-m",
        "30",
        "-o",
        &copy.to_string_lossy(),
        "http://10.99.0.1:8080/large",
    ];
    wait::until("the file is there", || lab.output(&fetch).status.success());
    let _ = server.kill();
    let _ = server.wait();
    assert!(fs::read(&file).expect("a file") == fs::read(&copy).expect("a copy"), "the copy differs");
    lab.run(&["heal", "n1"]);
    assert!(answers(&lab, "n1"));
}

fn a_paused_node_stands_still_as_a_whole() {
    let lab = alone("1");
    wait::until("the node answers", || answers(&lab, "n1"));
    lab.run(&["pause", "n1"]);
    assert_eq!(lab.machine("n1")["paused"], true);
    assert_eq!(lab.get("n1", NOBODY, 1), None);
    lab.run(&["resume", "n1"]);
    assert!(answers(&lab, "n1"));
    let said = lab.run(&["pause", "n1", "--ms", "100"]);
    assert!(said.contains("stood still for 1"), "{said}");
    assert_eq!(lab.machine("n1")["paused"], false);
}

fn a_killed_node_refuses_and_starts_again() {
    let lab = alone("1");
    wait::until("the node answers", || answers(&lab, "n1"));
    lab.run(&["kill", "n1"]);
    assert_eq!(lab.machine("n1")["processes"], 0);
    let refused = lab.output(&["in", "clients", "--", "curl", "-s", "-m", "5", "http://10.99.0.1/"]);
    assert_eq!(refused.status.code(), Some(7), "curl was not refused");
    // Dead processes that were stopped are dead as well.
    lab.run(&["start", "n1"]);
    wait::until("the node answers again", || answers(&lab, "n1"));
    lab.run(&["pause", "n1"]);
    lab.run(&["kill", "n1"]);
    assert_eq!(lab.machine("n1")["processes"], 0);
}

fn a_member_of_etcd_stops_and_comes_back_to_the_others() {
    let lab = Lab::up(&["1", "--etcd", "3", "--no-join"]);
    let put = |value: &str| {
        let body = format!(r#"{{"key":"YQ==","value":"{value}"}}"#);
        let url = "https://10.99.0.202:2379/v3/kv/put";
        let [ca, certificate, key] = ["ca.pem", "node-n1.pem", "node-n1.key"]
            .map(|name| lab.dir().join("pki").join(name).to_string_lossy().into_owned());
        let curl = ["in", "clients", "--", "curl", "-sf", "-m", "2", "-d", &body];
        let words = ["--cacert", &ca, "--cert", &certificate, "--key", &key, url];
        lab.output(&[&curl[..], &words[..]].concat()).status.success()
    };
    wait::until("three members take a value", || put("MQ=="));
    lab.run(&["etcd", "stop", "1"]);
    wait::until("two members take a value", || put("Mg=="));
    lab.run(&["etcd", "stop", "3"]);
    assert!(!put("Mw=="), "one member of three took a value");
    // Both at once: one alone waits for the other.
    let third = std::thread::scope(|scope| {
        let third = scope.spawn(|| lab.output(&["etcd", "start", "3"]));
        lab.run(&["etcd", "start", "1"]);
        third.join().expect("a thread")
    });
    assert!(third.status.success());
    wait::until("all take a value", || put("NA=="));
}

fn two_labs_have_the_same_addresses_and_do_not_meet() {
    let one = alone("1");
    let other = alone("1");
    wait::until("both answer", || answers(&one, "n1") && answers(&other, "n1"));
    assert_eq!(one.machine("n1")["address"], other.machine("n1")["address"]);
    one.run(&["cut", "n1"]);
    assert!(answers(&other, "n1"));
    drop(one);
    assert!(answers(&other, "n1"));
}

fn etcd_lets_in_nodes_by_their_certificates_alone() {
    let lab = Lab::up(&["2", "--etcd", "1"]);
    let pki = lab.dir().join("pki");
    let file = |name: &str| pki.join(name).to_string_lossy().into_owned();
    let ask = |host: &str, port: u16, words: &[&str]| {
        let url = format!("https://{host}:{port}/version");
        let ca = file("ca.pem");
        let curl = ["in", "clients", "--", "curl", "-sf", "--max-time", "15", "--cacert", &ca];
        lab.output(&[&curl, words, &[&url]].concat()).status.success()
    };
    let etcd = lab.machine("e1")["address"].as_str().expect("an address").to_owned();
    let as_node = |node: &str| [file(&format!("{node}.pem")), file(&format!("{node}.key"))];
    let [certificate, key] = as_node("node-n2");
    let n2 = ["--cert", &certificate, "--key", &key];
    assert!(ask(&etcd, 2379, &n2), "a node is let in");
    assert!(!ask(&etcd, 2379, &[]), "who shows nothing is not");
    let [peer, peer_key] = as_node("member-e1-peer");
    assert!(!ask(&etcd, 2379, &["--cert", &peer, "--key", &peer_key]), "nor who shows another authority's");
    let peers = file("peer-ca.pem");
    let as_peer = ["--cacert", &peers, "--cert", &certificate, "--key", &key];
    assert!(!ask(&etcd, 2380, &as_peer), "a node is no member of etcd");
    // Both nodes are members by these certificates, the second by what its token carried.
    let status: serde_json::Value =
        serde_json::from_str(&lab.run(&["exec", "n2", "--", "cluster", "status", "--json"])).expect("JSON");
    assert!(status["member"] == true && status["in_step"] == true, "{status}");
    assert!(status["etcd"][0].as_str().is_some_and(|url| url.starts_with("https://")), "{status}");
    // Whoever took the node's files has them still.
    let copies = ["copy.pem", "copy.key"].map(|name| lab.dir().join(name));
    for (from, to) in [&certificate, &key].into_iter().zip(&copies) {
        fs::copy(from, to).expect("our own files");
    }
    let [copy, copy_key] = copies.each_ref().map(|path| path.to_string_lossy().into_owned());
    let dir = pki.to_string_lossy();
    lab.run(&["exec", "n1", "--", "cluster", "etcd-certs", "--dir", &dir, "--revoke", "n2"]);
    assert!(!ask(&etcd, 2379, &["--cert", &copy, "--key", &copy_key]), "what was taken back counts no more");
    let [certificate, key] = as_node("node-n1");
    assert!(ask(&etcd, 2379, &["--cert", &certificate, "--key", &key]));
}

fn nothing_is_left_after_down() {
    let lab = Lab::up(&["2", "--etcd", "1", "--no-join"]);
    let name = lab.name().to_owned();
    let dir = lab.dir().to_owned();
    // In the middle of everything.
    lab.run(&["cut", "n1", "--slow", "5"]);
    lab.run(&["pause", "n2"]);
    assert!(!left_of(&name, &dir).is_empty(), "a running lab is seen");
    lab.run(&["down"]);
    let is_guard = |left: &String| ["cluster guard", "cluster up"].iter().any(|word| left.contains(word));
    let left: Vec<String> = left_of(&name, &dir).into_iter().filter(|left| !is_guard(left)).collect();
    assert_eq!(left, Vec::<String>::new());
    wait::until("its guard and its owner have ended", || left_of(&name, &dir).is_empty());
}

fn nothing_is_left_when_the_owner_is_killed() {
    let mut lab = alone("1");
    let name = lab.name().to_owned();
    let dir = lab.dir().to_owned();
    lab.owner().kill().expect("our own child");
    wait::until("its guard has taken the lab down", || left_of(&name, &dir).is_empty());
}

/// Processes, mounts, cgroups and files of a lab.
fn left_of(name: &str, dir: &std::path::Path) -> Vec<String> {
    let mut left = Vec::new();
    let text = dir.to_string_lossy();
    // One that has ended between the two looks has no command line any more.
    let lines = machine::processes_with(&text).into_iter().map(machine::command_line);
    left.extend(lines.filter(|line| !line.is_empty()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc");
    left.extend(mounts.lines().filter(|line| line.contains(&*text)).map(Into::into));
    let hierarchies = fs::read_dir("/sys/fs/cgroup").expect("cgroups").flatten().map(|entry| entry.path());
    let groups = hierarchies
        .chain([PathBuf::from("/sys/fs/cgroup")])
        .map(|place| place.join(format!("nagaya-lab-{name}")));
    left.extend(groups.filter(|group| group.exists()).map(|group| group.display().to_string()));
    left.extend(dir.exists().then(|| text.into_owned()));
    left
}

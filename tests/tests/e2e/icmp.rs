//! Nodes that ask each other's hosts by ICMP whether they are there, in a lab with real networks between them.
//!
//! Not here: the other kinds of probes (`cluster`, `nagaya_edge::peers`), the lab itself (`lab`).

use nagaya_tests::lab::Lab;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use serde_json::Value;

use crate::lab::{STEADY_FENCE, authority, lab_with_app};

pub const SUITE: Suite = Suite {
    name: "icmp",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_cut_off_node_is_silent_and_one_without_nagaya_refuses,
        a_node_that_stands_still_is_awaited_while_its_host_answers,
    ]),
};

const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// Seconds a client waits that is to get no answer: many times what finding out takes, and longer than one node waits for a
/// connection to another.
const NO_ANSWER_AFTER: u32 = 5;

/// Seconds an answer may take on a machine that has much else to do.
const ANSWER_MAX: u32 = 30;

fn answers(lab: &Lab, node: &str) -> bool {
    lab.get(node, "app.test", ANSWER_MAX).as_deref() == Some("200")
}

/// The placement of the application as this node knows it.
#[track_caller]
fn placement(lab: &Lab, by: &str) -> Value {
    let all = lab.run(&["exec", by, "--", "placements", "--json"]);
    let all: Value = serde_json::from_str(&all).expect("placements are JSON");
    all[0].clone()
}

/// Echoes that a node's host was asked for.
#[track_caller]
fn echoes(lab: &Lab, node: &str) -> u64 {
    let text = lab.run(&["in", node, "--", "cat", "/proc/net/snmp"]);
    let lines: Vec<Vec<&str>> =
        text.lines().filter_map(|line| Some(line.strip_prefix("Icmp: ")?.split(' ').collect())).collect();
    let [names, values] = &lines[..] else { panic!("two lines of ICMP: {text}") };
    let at = names.iter().position(|name| *name == "InEchos").expect("the kernel counts them");
    values[at].parse().expect("a number")
}

fn a_cut_off_node_is_silent_and_one_without_nagaya_refuses() {
    let lab = lab_with_app(&["--probe", "icmp", "--fence", STEADY_FENCE]);
    assert!(answers(&lab, "n1"));
    let first = placement(&lab, "n1")["node"].as_str().expect("it runs somewhere").to_owned();
    let others: Vec<&str> = NODES.into_iter().filter(|node| *node != first).collect();
    wait::until("a request that takes its time has the node's host asked", || {
        assert!(answers(&lab, others[0]));
        echoes(&lab, &first) > 0
    });
    let kept = placement(&lab, others[0]);
    assert!(kept["epoch"] == 1, "a host that answers is believed: {kept}");

    lab.run(&["cut", &first]);
    assert!(answers(&lab, others[0]), "it is answered within the request that found out");
    let moved = placement(&lab, others[0]);
    assert!(moved["node"] != *first && moved["epoch"] == 2 && moved["why"] == "silent", "{moved}");
    lab.run(&["heal", &first]);
    wait::until("the first one passes requests on again", || answers(&lab, &first));
    wait::until("all nodes may serve", || NODES.iter().all(|node| authority(&lab, node) == "store"));

    let second = moved["node"].as_str().expect("it runs somewhere").to_owned();
    let asked = NODES.into_iter().find(|node| *node != second).expect("there are three");
    lab.run(&["kill", &second]);
    let url = format!("http://{}/", lab.machine(&second)["address"].as_str().expect("an address"));
    let refused = lab.output(&["in", "clients", "--", "curl", "-s", "-m", "5", &url]);
    assert_eq!(refused.status.code(), Some(7), "its host is there, and refuses");
    assert!(answers(&lab, asked));
    let moved = placement(&lab, asked);
    // The node that was cut off may be taken for one that is not there once more: that costs one move more.
    let epoch = moved["epoch"].as_u64().expect("a number");
    let is_moved = moved["node"] != *second && (3..=4).contains(&epoch) && moved["why"] == "refused";
    assert!(is_moved, "{moved}");
    for node in NODES.into_iter().filter(|node| *node != second) {
        let log =
            std::fs::read_to_string(lab.dir().join(node).join("output.log")).expect("a node writes a log");
        assert!(!log.contains("NGY0467"), "{node} asked otherwise:\n{log}");
    }
}

fn a_node_that_stands_still_is_awaited_while_its_host_answers() {
    let lab = lab_with_app(&["--probe", "icmp", "--fence", STEADY_FENCE]);
    assert!(answers(&lab, "n1"));
    let first = placement(&lab, "n1")["node"].as_str().expect("it runs somewhere").to_owned();
    // One that has no connection to it yet, nor gets one.
    let other = NODES.into_iter().rfind(|node| *node != first).expect("there are three");
    wait::until("it knows where the application is", || placement(&lab, other)["node"] == *first);
    let before = echoes(&lab, &first);
    lab.run(&["pause", &first]);
    assert_eq!(lab.get(other, "app.test", NO_ANSWER_AFTER), None);
    assert!(echoes(&lab, &first) > before, "it was asked, and its host answered");
    let kept = placement(&lab, other);
    assert!(kept["node"] == *first && kept["epoch"] == 1, "{kept}");
    lab.run(&["resume", &first]);
    wait::until("it answers again, where it was", || answers(&lab, other));
    let kept = placement(&lab, other);
    assert!(kept["node"] == *first && kept["epoch"] == 1, "{kept}");
}

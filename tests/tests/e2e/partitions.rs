//! A cluster whose network fails in part, under visitors who do not stop: one node hears or is heard no more, packets are lost, a node
//! loses touch with etcd alone. Nobody sees an error, and no answer comes from an application that has been replaced.
//!
//! Nodes and etcd are in a lab with real networks between them. Not here: nodes that are silent or dead as a whole (`cluster`), etcd that
//! fails for all (`membership`), the lab itself (`lab`).

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nagaya_tests::lab::Lab;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::{machine, wait};
use serde_json::Value;

use crate::lab::{STEADY_FENCE, authority, lab_with_app};

pub const SUITE: Suite = Suite {
    name: "partitions",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_cut_off_node_loses_its_application_and_no_answer_is_lost,
        a_fifth_of_all_packets_lost_costs_time_and_no_answer,
        a_node_without_etcd_stops_serving_and_others_take_over,
    ]),
};

const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// Answers to each visitor that are enough to say that it is being served.
const SOME: usize = 20;

/// Until a visitor has had so many on a network that loses packets.
const VISITS_MAX: Duration = Duration::from_secs(90);

/// There are no images: each start is another run.
fn lab_without_images() -> Lab {
    let tables = tempfile::NamedTempFile::new().expect("a file");
    machine::write(tables.path(), "[instances]\nimage_bytes = \"0B\"\n");
    let tables = tables.path().to_string_lossy();
    let lab = lab_with_app(&["--fence", STEADY_FENCE, "--tables", &tables]);
    for node in NODES {
        wait::until("it answers for the application", || {
            lab.get(node, "app.test", 30).as_deref() == Some("200")
        });
    }
    lab
}

/// The node that runs the application, as `by` knows it, and under which epoch.
#[track_caller]
fn placed(lab: &Lab, by: &str) -> (String, u64) {
    let all = lab.run(&["exec", by, "--", "placements", "--json"]);
    let all: Value = serde_json::from_str(&all).expect("placements are JSON");
    (all[0]["node"].as_str().expect("a name").into(), all[0]["epoch"].as_u64().expect("a number"))
}

fn others(node: &str) -> Vec<&'static str> {
    NODES.into_iter().filter(|one| *one != node).collect()
}

// === Visitors ===

/// Asks one node after its last answer, until its log is gone from where it was. Times are of a clock that all processes share.
const VISITOR: &str = r#"
import http.client, json, os, sys, time
address, log = sys.argv[1:]
out = open(log, "a", buffering=1)
while os.path.exists(log):
    begun = time.monotonic()
    try:
        connection = http.client.HTTPConnection(address, 80, timeout=60)
        connection.request("GET", "/run", headers={"Host": "app.test"})
        answer = connection.getresponse()
        status, said = answer.status, answer.read().decode()
    except Exception as error:
        status, said = 0, repr(error)
    out.write(json.dumps({"begun": begun, "ended": time.monotonic(), "status": status, "said": said}) + "\n")
    time.sleep(0.01)
"#;

#[derive(Debug, Clone)]
struct Visit {
    begun: f64,
    ended: f64,
    /// 0: there was no answer.
    status: u16,
    said: String,
}

impl Visit {
    fn read(line: &str) -> Self {
        let visit: Value = serde_json::from_str(line).expect("a visit is JSON");
        let time = |of: &str| visit[of].as_f64().expect("a time");
        let status = visit["status"].as_u64().and_then(|status| status.try_into().ok());
        Self {
            begun: time("begun"),
            ended: time("ended"),
            status: status.expect("a status"),
            said: visit["said"].as_str().expect("a text").into(),
        }
    }
}

/// Visits the application by one node.
struct Visitor {
    log: PathBuf,
    process: Child,
}

impl Visitor {
    #[track_caller]
    fn begin(lab: &Lab, node: &str) -> Self {
        let log = lab.dir().join(format!("visits-{node}"));
        let program = lab.dir().join("visitor.py");
        machine::write(&program, VISITOR);
        machine::write(&log, "");
        let address = lab.machine(node)["address"].as_str().expect("an address").to_owned();
        let process = Command::new("nsenter")
            .arg(format!("--net={}", lab.dir().join("net/clients").display()))
            .args(["/usr/bin/python3".as_ref(), program.as_os_str(), address.as_ref(), log.as_os_str()])
            .stdin(Stdio::null())
            .spawn()
            .expect("nsenter");
        Self { log, process }
    }

    #[track_caller]
    fn visits(&self) -> Vec<Visit> {
        let text = std::fs::read_to_string(&self.log).expect("a log");
        // The last line may not be whole.
        let lines = text.rsplit_once('\n').map_or("", |(whole, _)| whole).lines();
        lines.map(Visit::read).collect()
    }

    /// The run that answered it last.
    #[track_caller]
    fn run(&self) -> String {
        self.visits().pop().expect("it was answered").said
    }

    /// Waits until it has had some more answers like this.
    #[track_caller]
    fn has_some_more(&self, what: &str, is_like: impl Fn(&Visit) -> bool) {
        let before = self.visits().len();
        let like = || self.visits()[before..].iter().filter(|visit| is_like(visit)).count();
        let seen = wait::within(VISITS_MAX, || (like() >= SOME).then_some(()));
        let last = || self.visits().into_iter().next_back();
        assert!(seen.is_some(), "{what}: {} of {SOME} such answers, the last is {:?}", like(), last());
    }

    #[track_caller]
    fn end(mut self) -> Vec<Visit> {
        let kept = self.log.with_extension("over");
        std::fs::rename(&self.log, &kept).expect("our own file");
        let _ = self.process.wait();
        self.log = kept;
        self.visits()
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// No visit failed, and none that began when a newer run had answered was answered by an older one. Gives the number of runs.
#[track_caller]
fn check(visitors: Vec<Visitor>) -> usize {
    let visits: Vec<Visit> = visitors.into_iter().flat_map(Visitor::end).collect();
    let failed: Vec<_> = visits.iter().filter(|visit| visit.status != 200).collect();
    assert!(failed.is_empty(), "{} of {} failed: {:?}", failed.len(), visits.len(), failed.first());
    // Each run with its first answer and the last visit that it answered.
    let mut runs: Vec<(&str, f64, f64)> = Vec::new();
    for visit in &visits {
        match runs.iter_mut().find(|(run, ..)| *run == visit.said) {
            Some((_, first, last)) => (*first, *last) = (first.min(visit.ended), last.max(visit.begun)),
            None => runs.push((&visit.said, visit.ended, visit.begun)),
        }
    }
    runs.sort_by(|one, other| one.1.total_cmp(&other.1));
    for pair in runs.windows(2) {
        assert!(pair[0].2 <= pair[1].1, "both of two runs answer: {runs:?}");
    }
    runs.len()
}

// === Facts ===

fn a_cut_off_node_loses_its_application_and_no_answer_is_lost() {
    let lab = lab_without_images();
    for way in ["out", "in"] {
        let (first, epoch) = placed(&lab, "n1");
        let visitors: Vec<_> = others(&first).into_iter().map(|node| Visitor::begin(&lab, node)).collect();
        visitors.iter().for_each(|visitor| visitor.has_some_more("before", |visit| visit.status == 200));
        let before = visitors[0].run();
        lab.run(&["cut", &first, "--one-way", way]);
        for visitor in &visitors {
            visitor.has_some_more("of another run", |visit| visit.said != before);
        }
        lab.run(&["heal", &first]);
        wait::until("the node that was cut passes requests on", || {
            lab.get(&first, "app.test", 30).as_deref() == Some("200")
        });
        wait::until("the store confirms again what it may", || authority(&lab, &first) == "store");
        visitors.iter().for_each(|visitor| visitor.has_some_more("after", |visit| visit.status == 200));
        assert!(check(visitors) > 1, "it has moved");
        let by = others(&first)[0];
        assert!(placed(&lab, by).1 > epoch);
        wait::until("all know where it is", || placed(&lab, &first) == placed(&lab, by));
    }
}

fn a_fifth_of_all_packets_lost_costs_time_and_no_answer() {
    let lab = lab_without_images();
    let (first, _) = placed(&lab, "n1");
    // Visitors' own wires lose nothing.
    let visitors: Vec<_> = others(&first).into_iter().map(|node| Visitor::begin(&lab, node)).collect();
    visitors.iter().for_each(|visitor| visitor.has_some_more("before", |visit| visit.status == 200));
    lab.run(&["cut", &first, "--loss", "20"]);
    for _ in 0..3 {
        visitors
            .iter()
            .for_each(|visitor| visitor.has_some_more("on lossy wires", |visit| visit.status == 200));
    }
    lab.run(&["heal", &first]);
    wait::until("all nodes may serve", || NODES.iter().all(|node| authority(&lab, node) == "store"));
    visitors.iter().for_each(|visitor| visitor.has_some_more("after", |visit| visit.status == 200));
    check(visitors);
    wait::until("all know where it is", || {
        NODES.iter().all(|node| placed(&lab, node) == placed(&lab, NODES[0]))
    });
}

fn a_node_without_etcd_stops_serving_and_others_take_over() {
    let lab = lab_without_images();
    let (first, epoch) = placed(&lab, "n1");
    let visitors: Vec<_> = others(&first).into_iter().map(|node| Visitor::begin(&lab, node)).collect();
    visitors.iter().for_each(|visitor| visitor.has_some_more("before", |visit| visit.status == 200));
    let before = visitors[0].run();
    lab.run(&["cut", &first, "--store"]);
    assert_eq!(lab.machine(&first)["fault"], "cut off from etcd");
    for visitor in &visitors {
        visitor.has_some_more("of another run", |visit| visit.said != before);
    }
    // Nobody vouches for it who reaches etcd.
    wait::until("it may serve no application", || authority(&lab, &first) == "none");
    assert_eq!(lab.get(&first, "app.test", 30).as_deref(), Some("503"), "it refuses for its own");
    assert_eq!(lab.get(&first, "nobody.test", 30).as_deref(), Some("404"), "it answers as ever beside that");
    let by = others(&first)[0];
    let moved = placed(&lab, by);
    assert!(moved.0 != first && moved.1 > epoch, "{moved:?}");
    lab.run(&["heal", &first]);
    wait::until("the store confirms again what it may", || authority(&lab, &first) == "store");
    wait::until("it passes requests on", || lab.get(&first, "app.test", 30).as_deref() == Some("200"));
    wait::until("it knows where it is", || placed(&lab, &first) == placed(&lab, by));
    visitors.iter().for_each(|visitor| visitor.has_some_more("after", |visit| visit.status == 200));
    assert!(check(visitors) > 1, "it has moved");
}

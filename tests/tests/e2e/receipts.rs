//! Receipts: what a request used and waited for, in the log, in the answer for whom the operator allows, in the metrics,
//! and explained.
//!
//! Not here: whether the limits behind them hold (`cells`).

use nagaya_tests::client::{self, Response};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "receipts",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            an_allowed_client_gets_a_receipt,
            a_client_that_is_not_allowed_gets_none,
            a_tenant_cannot_forge_a_receipt,
            every_request_is_accounted_in_the_log,
            the_metrics_count_what_cells_used,
            a_request_is_explained,
            an_unknown_request_is_said_to_be_unknown,
            a_paced_file_arrives_whole_and_says_why_it_took_long,
            a_program_too_short_for_the_kernel_is_slowed_too,
        ],
    ),
};

const RULE: &str = "case request.path\n\
    when \"/paced.bin\" then limit read: \"4M\"\n\
    when \"/short.cgi\" then limit cpu: \"10%\"\n\
    end\n";

fn world() -> World {
    let world = World::builder()
        .set("receipts", "allow = [\"127.0.0.1\"]")
        .listen("[::1]:0")
        .site_of("alice", "files", json!({ "kind": "static", "root": "files" }))
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .rule("limits", "access_checker", RULE, "")
        .start();
    world.write("alice", "files/x.txt", "x");
    world.write("alice", "files/paced.bin", vec![7; 3 << 20]);
    for (name, text) in [
        ("x.cgi", "printf 'Content-Type: text/plain\\n\\nfine'"),
        (
            "forge.cgi",
            "printf 'Content-Type: text/plain\\nNagaya-Receipt: cpu=0\\nnagaya-receipt: id=\"forged\"\\n\\nfine'",
        ),
        (
            "short.cgi",
            "i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; printf 'Content-Type: text/plain\\n\\nfine'",
        ),
    ] {
        world.write_program("alice", &format!("cgi/{name}"), &format!("#!/bin/sh\n{text}\n"));
    }
    world
}

#[track_caller]
fn receipt(answer: &Response) -> String {
    answer.header("nagaya-receipt").unwrap_or_else(|| panic!("no receipt in {answer:?}")).to_owned()
}

#[track_caller]
fn logged(world: &World, target: &str) -> Value {
    wait::until_some("the request is logged", || {
        world.access_log().into_iter().find(|line| line["target"] == target)
    })
}

fn an_allowed_client_gets_a_receipt(world: &World) {
    for (host, target) in [("files.test", "/x.txt"), ("cgi.test", "/x.cgi")] {
        let answer = world.get(host, target).expect(200);
        let text = receipt(&answer);
        assert!(text.contains("cpu="), "{text}");
        let timing = answer.header("server-timing").expect("timing goes with the receipt");
        assert!(timing.contains(";dur="), "{timing}");
    }
}

fn a_client_that_is_not_allowed_gets_none(world: &World) {
    let answer = client::get(world.address("[::1]", false), "cgi.test", "/x.cgi").expect(200);
    assert_eq!((answer.header("nagaya-receipt"), answer.header("server-timing")), (None, None), "{answer:?}");
}

fn a_tenant_cannot_forge_a_receipt(world: &World) {
    let mine = receipt(&world.get("cgi.test", "/forge.cgi").expect(200));
    assert!(!mine.contains("forged"), "{mine}");
    let answer = client::get(world.address("[::1]", false), "cgi.test", "/forge.cgi").expect(200);
    assert_eq!(answer.header("nagaya-receipt"), None, "{answer:?}");
}

fn every_request_is_accounted_in_the_log(world: &World) {
    world.get("files.test", "/x.txt?logged").expect(200);
    world.get("cgi.test", "/x.cgi?logged").expect(200);
    world.get("nobody.test", "/?logged").expect(404);
    let file = logged(world, "/x.txt?logged");
    let program = logged(world, "/x.cgi?logged");
    let nobody = logged(world, "/?logged");
    for line in [&file, &program, &nobody] {
        assert_eq!(line["node"], "test", "{line}");
        assert!(line["cpu_us"].is_u64() && line["duration_us"].is_u64(), "{line}");
    }
    assert!(program["cell"].as_str().is_some_and(|cell| cell.starts_with("alice/cgi/")), "{program}");
    assert!(file.get("cell").is_none_or(Value::is_null), "{file}");
}

fn the_metrics_count_what_cells_used(world: &World) {
    let name = "nagaya_cell_cpu_seconds_total";
    let before = world.metric(name, "backend=\"cgi\"");
    world.get("cgi.test", "/short.cgi?counted").expect(200);
    logged(world, "/short.cgi?counted");
    wait::until("the CPU time of programs has grown", || world.metric(name, "backend=\"cgi\"") > before);
}

fn a_request_is_explained(world: &World) {
    world.get("cgi.test", "/short.cgi?explained").expect(200);
    let id =
        logged(world, "/short.cgi?explained")["id"].as_str().expect("every request has an id").to_owned();
    let text = world.cli(&["explain", &id]);
    for part in ["cgi.test", "/short.cgi", "limits.rb", "10%", "cpu"] {
        assert!(text.contains(part), "'{part}' is not in\n{text}");
    }
    let json: Value = serde_json::from_str(&world.cli(&["explain", &id, "--json"])).expect("JSON");
    assert_eq!(json["id"], id.as_str(), "{json}");
    assert!(json["spans"].as_array().is_some_and(|spans| !spans.is_empty()), "{json}");
}

fn an_unknown_request_is_said_to_be_unknown(world: &World) {
    for id in ["00000000000000000000000000000000", "nonsense"] {
        let output = world.try_cli(&["explain", id]);
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(id), "{text}");
    }
}

fn a_paced_file_arrives_whole_and_says_why_it_took_long(world: &World) {
    let answer = world.get("files.test", "/paced.bin").expect(200);
    assert!(answer.body.len() == 3 << 20 && answer.body.iter().all(|byte| *byte == 7));
    let line = logged(world, "/paced.bin");
    assert!(line["paced_us"].as_u64() > Some(0), "{line}");
    let id = line["id"].as_str().expect("every request has an id");
    let text = world.cli(&["explain", id]);
    assert!(text.contains("limits.rb") && text.contains("4M"), "{text}");
}

/// The kernel gives out CPU time in periods: a program that ends within one would not notice its limit.
fn a_program_too_short_for_the_kernel_is_slowed_too(world: &World) {
    world.get("cgi.test", "/short.cgi?settled").expect(200);
    let line = logged(world, "/short.cgi?settled");
    let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"));
    assert!(number("duration_us") * 20 >= number("cpu_us") * 10 * 19, "{line}");
}

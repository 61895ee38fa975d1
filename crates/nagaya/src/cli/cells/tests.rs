//! The tree as a person sees it.
//!
//! Not here: the keeper's side (`nagaya_keeper::cells`).

use serde_json::json;

use super::*;

fn cell(path: &str, cpu_us: u64, more: Value) -> Value {
    let tenant = path.split('/').next().filter(|name| !name.is_empty());
    let mut cell = json!({
        "path": path, "kind": "site", "tenant": tenant, "site": null, "limits": LimitSet::default(),
        "usage": {"cpu_us": cpu_us, "throttled_us": 0, "read_bytes": 0, "write_bytes": 0, "processes": 1,
                  "memory_bytes": null},
        "pressure": null, "requests": 0,
    });
    for (key, value) in more.as_object().unwrap() {
        cell[key] = value.clone();
    }
    cell
}

fn answer() -> Value {
    let limits = json!({
        "cpu": {"quota_us": 5000, "period_us": 10_000}, "cpu_shares": 512, "processes": 64, "memory": 536_870_912,
        "io": [
            {"device": "Root", "read_bps": 5_242_880, "write_bps": null, "read_iops": null, "write_iops": 100},
            {"device": {"Number": {"major": 8, "minor": 0}}, "read_bps": 1000, "write_bps": null, "read_iops": null,
             "write_iops": null},
        ],
        "cpus": null, "mems": null,
    });
    json!({
        "controllers": {"cpu": "v1", "memory": null, "fence": "v2"},
        "missing": [{"controller": "memory", "why": "it is not mounted"}],
        "cells": [
            cell("quiet", 0, json!({})),
            cell("demo/wiki/r1", 1_000_000, json!({"requests": 1})),
            cell("", 9_500_000, json!({"pressure": {"cpu": 12.5, "io": 40.0, "memory": null}})),
            cell("demo", 3_000_000, json!({"limits": limits})),
            cell("demo/wiki", 1_200_000, json!({})),
            cell("demo/front", 1_800_000, json!({})),
            cell("busy", 6_000_000, json!({"usage": {"cpu_us": 6_000_000, "read_bytes": 1536, "memory_bytes": 3_221_225_472_u64}})),
        ],
        "left_out": 3,
    })
}

fn command(tenant: Option<&str>, limit: usize) -> CellsCommand {
    CellsCommand { watch: false, tenant: tenant.map(Into::into), limit, format: OutputFormat { json: false } }
}

fn names(screen: &str) -> Vec<&str> {
    screen
        .lines()
        .skip(1)
        .take_while(|line| !line.is_empty())
        .map(|line| line.split("  0").next().unwrap())
        .collect()
}

#[test]
fn the_busiest_stand_first_on_each_level() {
    let text = screen(&command(None, 30), &parse_cells(answer()).unwrap(), None);
    let order: Vec<&str> =
        text.lines().skip(1).take(7).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(order, ["node", "busy", "demo", "front", "wiki", "r1", "quiet"], "{text}");
    assert!(text.contains("\n    wiki ") && text.contains("\n      r1 "), "{text}");
    for part in [
        "cpu 50%, shares 512, read 5.0M/s, 100 writes/s,…",
        "io 40.0%",
        "9.50s",
        "1.5K",
        "3.0G",
        "\n3 more cells were not looked at\n",
        "\nmemory does nothing here: it is not mounted\n",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

#[test]
fn hidden_cells_are_counted_and_one_tenant_shows_alone() {
    let tree = parse_cells(answer()).unwrap();
    let text = screen(&command(None, 3), &tree, None);
    assert_eq!(names(&text).len(), 3, "{text}");
    assert!(text.contains("\n4 cells that use less are not shown"), "{text}");
    let text = screen(&command(Some("demo"), 30), &tree, None);
    assert_eq!(names(&text).len(), 4, "{text}");
    assert!(text.lines().nth(1).unwrap().starts_with("demo "), "{text}");
    let text = screen(&command(Some("nobody"), 30), &tree, None);
    assert!(text.starts_with("there is no cell of tenant 'nobody' now"), "{text}");
    let mut filtered = answer();
    keep_tenant(&mut filtered, Some("demo"));
    assert_eq!(filtered["cells"].as_array().unwrap().len(), 4);
}

#[test]
fn rates_are_what_was_used_between_two_looks() {
    let first = parse_cells(answer()).unwrap();
    let mut second = answer();
    second["cells"][0]["usage"] =
        json!({"cpu_us": 300_000, "throttled_us": 1_000_000, "read_bytes": 2_097_152, "write_bytes": 512});
    // It began anew, so that it has less than before.
    second["cells"][1]["usage"]["cpu_us"] = json!(5);
    let new = cell("new", 77, json!({}));
    second["cells"].as_array_mut().unwrap().push(new);
    let tree = parse_cells(second.clone()).unwrap();
    let rates = rates(&tree, &usages(&first), Duration::from_secs(2));
    let quiet =
        CellRates { cpu_percent: 15.0, throttled_percent: 50.0, read_bytes: 1_048_576.0, write_bytes: 256.0 };
    assert_eq!(rates["quiet"], quiet);
    assert_eq!(rates["demo/wiki/r1"], CellRates::default());
    assert_eq!(rates.get("new"), None);
    let text = screen(&command(None, 30), &tree, Some(&rates));
    let line = text.lines().nth(1).unwrap();
    let words: Vec<&str> = line.split_whitespace().take(5).collect();
    assert_eq!(words, ["node", "0.0%", "0.0%", "0B", "0B"], "{text}");
    let line = text.lines().find(|line| line.contains("quiet")).unwrap();
    let words: Vec<&str> = line.split_whitespace().take(5).collect();
    assert_eq!(words, ["quiet", "15.0%", "50.0%", "1.0M", "256B"], "{text}");
    let line: Value = serde_json::from_str(&with_rates(second, &command(Some("quiet"), 30), &rates)).unwrap();
    assert_eq!(line["cells"][0]["rates"]["cpu_percent"], json!(15.0));
    assert_eq!(line["cells"].as_array().unwrap().len(), 1);
}

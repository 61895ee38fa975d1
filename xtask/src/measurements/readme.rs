//! The table of numbers in `README.md`, made from stored runs.
//!
//! Each row names the results that it shows, so no number can be without a run. Not here: the page
//! of all numbers (`page`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::stored::StoredRun;
use crate::report::number;

/// The table is between these lines.
const BEGIN: &str = "<!-- made by './dev experiment --report', do not edit -->";
const END: &str = "<!-- end -->";

/// One row: a result of nagaya's, and its peer's.
struct ReadmeRow {
    what: &'static str,
    experiment: &'static str,
    own: ShownResult,
    /// Name of the peer, and its result.
    peer: (&'static str, Option<ShownResult>),
    ratio: ShownRatio,
}

/// A result by its key, with the text that follows it.
struct ShownResult(&'static str, &'static str);

enum ShownRatio {
    /// The experiment's own, paired by round.
    Key(&'static str),
    /// Of the two results shown.
    Quotient,
    None,
}

const ROWS: [ReadmeRow; 11] = [
    ReadmeRow {
        what: "small file of one of 100,000 sites",
        experiment: "front",
        own: ShownResult("static_nginx_rps", "requests/s"),
        peer: ("nginx", Some(ShownResult("static_nginx_peer_rps", ""))),
        ratio: ShownRatio::Key("static_nginx"),
    },
    ReadmeRow {
        what: "the same with a rule that limits it, and receipts",
        experiment: "front",
        own: ShownResult("isolated_nginx_rps", "requests/s"),
        peer: ("nginx without", Some(ShownResult("isolated_nginx_peer_rps", ""))),
        ratio: ShownRatio::Key("isolated_nginx"),
    },
    ReadmeRow {
        what: "small proxied response",
        experiment: "front",
        own: ShownResult("proxy_haproxy_rps", "requests/s"),
        peer: ("HAProxy", Some(ShownResult("proxy_haproxy_peer_rps", ""))),
        ratio: ShownRatio::Key("proxy_haproxy"),
    },
    ReadmeRow {
        what: "DokuWiki page in PHP",
        experiment: "front",
        own: ShownResult("php_page_rps", "requests/s"),
        peer: ("nginx with php-fpm", Some(ShownResult("php_page_peer_rps", ""))),
        ratio: ShownRatio::Key("php_page"),
    },
    ReadmeRow {
        what: "PHP script of one line",
        experiment: "front",
        own: ShownResult("php_trivial_rps", "requests/s"),
        peer: ("nginx with php-fpm", Some(ShownResult("php_trivial_peer_rps", ""))),
        ratio: ShownRatio::Key("php_trivial"),
    },
    ReadmeRow {
        what: "file of 1 KiB over TLS, HTTP/1.1",
        experiment: "front",
        own: ShownResult("tls_nginx_rps", "requests/s"),
        peer: ("nginx", Some(ShownResult("tls_nginx_peer_rps", ""))),
        ratio: ShownRatio::Key("tls_nginx"),
    },
    ReadmeRow {
        what: "the same over HTTP/2, 1,000 streams",
        experiment: "front",
        own: ShownResult("h2_nginx_1000_rps", "requests/s"),
        peer: ("nginx", Some(ShownResult("h2_nginx_1000_peer_rps", ""))),
        ratio: ShownRatio::Key("h2_nginx_1000"),
    },
    ReadmeRow {
        what: "WordPress on Apache wakes from its image, first byte",
        experiment: "wake",
        own: ShownResult("wordpress_apache_image_ms", "ms"),
        peer: ("its cold start", Some(ShownResult("wordpress_apache_cold_ms", ""))),
        ratio: ShownRatio::Quotient,
    },
    ReadmeRow {
        what: "99th percentile of admitted requests, 1,000 clients",
        experiment: "admission-overflow",
        own: ShownResult("p99_ms_1000", "ms"),
        peer: ("150 clients", Some(ShownResult("p99_ms_150", ""))),
        ratio: ShownRatio::Key("p99_admitted_ratio"),
    },
    ReadmeRow {
        what: "killed node with 200 applications, until all respond",
        experiment: "relocation-storm",
        own: ShownResult("all_back_ms", "ms"),
        peer: ("–", None),
        ratio: ShownRatio::None,
    },
    ReadmeRow {
        what: "memory with 100,000 sites, all processes",
        experiment: "static",
        own: ShownResult("nagaya_rss_mb", "MB"),
        peer: ("nginx", Some(ShownResult("nginx_rss_mb", ""))),
        ratio: ShownRatio::Quotient,
    },
];

/// Replaces the table in README's text.
pub fn renew(readme: &str, runs: &[StoredRun]) -> Result<String> {
    let (before, rest) = readme.split_once(BEGIN).with_context(|| format!("README.md has no '{BEGIN}'"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("README.md has no '{END}'"))?;
    Ok(format!("{before}{BEGIN}\n\n{}\n{END}{after}", render(runs)?))
}

fn render(runs: &[StoredRun]) -> Result<String> {
    let runs: BTreeMap<&str, &StoredRun> = runs.iter().map(|run| (&*run.experiment, run)).collect();
    let mut text = "| what | nagaya | compared with | ratio |\n|---|---|---|---|\n".to_owned();
    for row in &ROWS {
        text.push_str(&render_row(row, &runs)?);
    }
    text.push_str("\nRuns, and their commits: ");
    let experiments: BTreeSet<&str> = ROWS.iter().map(|row| row.experiment).collect();
    let told = experiments.into_iter().filter_map(|name| {
        let run = runs.get(name)?;
        let day = run.date().split('T').next().unwrap_or_default();
        Some(format!("`{name}` {day} ({})", run.machine_fact("commit").unwrap_or("unknown")))
    });
    let _ = writeln!(text, "{}.", told.collect::<Vec<_>>().join(",\n"));
    Ok(text)
}

fn render_row(row: &ReadmeRow, runs: &BTreeMap<&str, &StoredRun>) -> Result<String> {
    let ReadmeRow { what, experiment, own, peer: (peer, of_peer), ratio } = row;
    let run = runs.get(experiment).with_context(|| format!("no run of '{experiment}' is stored"))?;
    let find = |key: &str| {
        run.results.get(key).copied().with_context(|| format!("'{experiment}' has no result '{key}'"))
    };
    let own_value = find(own.0)?;
    let compared = match of_peer {
        Some(shown) => format!("{peer}: {}", number(find(shown.0)?)),
        None => (*peer).to_owned(),
    };
    let ratio = match (ratio, of_peer) {
        (ShownRatio::Key(key), _) => number(find(key)?),
        (ShownRatio::Quotient, Some(shown)) => number(own_value / find(shown.0)?),
        (ShownRatio::Quotient | ShownRatio::None, _) => "–".to_owned(),
    };
    Ok(format!("| {what} | {} {} | {compared} | {ratio} |\n", number(own_value), own.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs() -> Vec<StoredRun> {
        let experiments: BTreeSet<&str> = ROWS.iter().map(|row| row.experiment).collect();
        let run = |name: &str| {
            let keys = ROWS.iter().filter(|row| row.experiment == name).flat_map(|row| {
                let ratio = if let ShownRatio::Key(key) = row.ratio { Some(key) } else { None };
                [Some(row.own.0), row.peer.1.as_ref().map(|shown| shown.0), ratio].into_iter().flatten()
            });
            let results: BTreeMap<&str, f64> = keys.map(|key| (key, 1234.0)).collect();
            serde_json::from_value(serde_json::json!({
                "experiment": name, "results": results, "targets": {}, "setting": {},
                "machine": {"date": "2026-01-02T03:04:05Z", "commit": "abc"},
            }))
            .unwrap()
        };
        experiments.into_iter().map(run).collect()
    }

    #[test]
    fn the_table_is_replaced_and_nothing_else() {
        let text = renew(&format!("head\n{BEGIN}\n| former |\n{END}\nfoot\n"), &runs()).unwrap();
        assert!(text.starts_with("head\n") && text.ends_with("foot\n") && !text.contains("former"), "{text}");
        assert!(
            text.contains("| DokuWiki page in PHP | 1,234 requests/s | nginx with php-fpm: 1,234 | 1,234 |")
        );
        assert!(text.contains("`front` 2026-01-02 (abc)"), "{text}");
        assert_eq!(renew(&text, &runs()).unwrap(), text);
    }

    #[test]
    fn a_number_without_a_run_is_an_error() {
        let readme = format!("{BEGIN}\n{END}\n");
        let error = renew(&readme, &runs()[1..]).unwrap_err();
        assert!(error.to_string().contains("no run of"), "{error}");
        let mut lacking = runs();
        lacking.iter_mut().for_each(|run| run.results.retain(|key, _| key != "php_page"));
        assert!(renew(&readme, &lacking).unwrap_err().to_string().contains("'php_page'"));
        assert!(renew("no marks", &runs()).is_err());
    }
}

//! Merges several processes' metrics into one Prometheus page.
//!
//! Not here: measuring (`telemetry`, and each process for itself).

use std::fmt::Write as _;

/// Returns one page of the pages' families, each family once, in order of first appearance.
///
/// The text format demands all samples of a metric in one group with one `HELP` and `TYPE`. The
/// processes share some names, and each page may end with `# EOF`.
pub fn merge(pages: &[String]) -> String {
    let mut families: Vec<MetricFamily<'_>> = Vec::new();
    for page in pages {
        let mut current = None;
        for line in page.lines() {
            match described(line) {
                Some(name) => {
                    let at = find_or_add(&mut families, name);
                    let family = &mut families[at];
                    // A second description of the same kind would make the page invalid.
                    let kind = line.split(' ').nth(1);
                    if !family.described.iter().any(|had| had.split(' ').nth(1) == kind) {
                        family.described.push(line);
                    }
                    current = Some(at);
                }
                None if line.is_empty() || line.starts_with('#') => {}
                None => {
                    let name = line.split(['{', ' ']).next().unwrap_or(line);
                    let at = match current {
                        Some(at) if name.starts_with(families[at].name) => at,
                        _ => find_or_add(&mut families, name),
                    };
                    families[at].samples.push(line);
                }
            }
        }
    }
    let mut out = String::with_capacity(pages.iter().map(String::len).sum());
    for line in families.iter().flat_map(|family| family.described.iter().chain(&family.samples)) {
        let _ = writeln!(out, "{line}");
    }
    out
}

#[derive(Debug)]
struct MetricFamily<'a> {
    name: &'a str,
    described: Vec<&'a str>,
    samples: Vec<&'a str>,
}

fn find_or_add<'a>(families: &mut Vec<MetricFamily<'a>>, name: &'a str) -> usize {
    families.iter().position(|family| family.name == name).unwrap_or_else(|| {
        families.push(MetricFamily { name, described: Vec::new(), samples: Vec::new() });
        families.len() - 1
    })
}

/// Returns the metric of a `# HELP`, `# TYPE` or `# UNIT` line.
fn described(line: &str) -> Option<&str> {
    let mut words = line.strip_prefix("# ")?.split(' ');
    matches!(words.next(), Some("HELP" | "TYPE" | "UNIT")).then(|| words.next()).flatten()
}

/// Writes the families of one process, in the text format.
#[derive(Debug, Default)]
pub struct MetricPage {
    text: String,
}

impl MetricPage {
    /// Writes one family. A sample has labels as `name="value"` pairs joined by commas, or none,
    /// and a value.
    pub fn family(&mut self, name: &str, kind: &str, help: &str, samples: &[(String, u64)]) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = if labels.is_empty() {
                writeln!(self.text, "{name} {value}")
            } else {
                writeln!(self.text, "{name}{{{labels}}} {value}")
            };
        }
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_of_two_processes_appears_once_with_all_samples() {
        let one = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"1\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# EOF\n";
        let two = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"2\"} 3\n# EOF\n";
        let expected = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"1\"} 1\na_total{p=\"2\"} 3\n# HELP b B.\n# TYPE b gauge\nb 2\n";
        assert_eq!(merge(&[one.into(), two.into()]), expected);
    }

    #[test]
    fn the_series_of_a_histogram_stay_together() {
        let page = "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_sum 1\nh_count 1\n";
        let other = "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 2\nh_count 2\n";
        let merged = merge(&[page.into(), other.into()]);
        assert_eq!(merged.matches("# TYPE").count(), 1);
        assert_eq!(merged.lines().filter(|line| line.starts_with("h_")).count(), 6);
    }

    #[test]
    fn a_page_is_written_in_the_text_format() {
        let mut page = MetricPage::default();
        page.family("up", "gauge", "Runs.", &[("process=\"edge\"".into(), 1), (String::new(), 2)]);
        assert_eq!(page.into_text(), "# HELP up Runs.\n# TYPE up gauge\nup{process=\"edge\"} 1\nup 2\n");
    }
}

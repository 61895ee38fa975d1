//! Merges several processes' metrics into one Prometheus page.
//!
//! Not here: measuring, and the text of one process (`telemetry`).

/// Returns one page of the pages' families, each family once, in order of first appearance.
///
/// The text format demands all samples of a metric in one group with one `HELP` and `TYPE`. The
/// processes share some names, and each page may have `# EOF`. Each family begins with its `HELP`.
pub fn merge(pages: &[String]) -> String {
    let mut families: Vec<(&str, Vec<&str>)> = Vec::new();
    for page in pages {
        let mut at = None;
        let mut is_new = false;
        for line in page.lines().filter(|line| *line != "# EOF") {
            if let Some(name) = line.strip_prefix("# HELP ").and_then(|rest| rest.split(' ').next()) {
                let found = families.iter().position(|(known, _)| *known == name);
                is_new = found.is_none();
                at = found.or(Some(families.len()));
                if is_new {
                    families.push((name, Vec::new()));
                }
            }
            let Some(at) = at else { continue };
            if is_new || !line.starts_with('#') {
                families[at].1.push(line);
            }
        }
    }
    let lines = families.into_iter().flat_map(|(_, lines)| lines);
    lines.flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_of_two_processes_appears_once_with_all_samples() {
        let one = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"1\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# EOF\n";
        let two = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"2\"} 3\n# EOF\n# HELP c C.\n# TYPE c gauge\nc 4\n";
        let expected = "# HELP a_total A.\n# TYPE a_total counter\na_total{p=\"1\"} 1\na_total{p=\"2\"} 3\n# HELP b B.\n# TYPE b gauge\nb 2\n# HELP c C.\n# TYPE c gauge\nc 4\n";
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
}

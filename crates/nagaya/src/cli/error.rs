//! `nagaya error CODE`: the page of an error, as embedded when the program was built.
//!
//! Not here: the pages (`docs/errors`), gathering them (`build.rs`).

use std::process::ExitCode;

use super::output::{self, CliError};

include!(concat!(env!("OUT_DIR"), "/error_pages.rs"));

pub fn run(code: &str) -> Result<ExitCode, CliError> {
    let page = number(code).and_then(page);
    match page {
        Some(page) => output::print(page.trim_end())?,
        None => {
            let first = PAGES.first().map_or("none", |(_, text)| title(text));
            let detail = format!(
                "there is no page for '{code}': codes look like NGY0501, and {} are known, the first is {first}",
                PAGES.len()
            );
            return Err(CliError::Usage(detail));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the number: `NGY0501`, `ngy501` and `501` are the same.
fn number(code: &str) -> Option<u16> {
    let digits = code.trim().trim_start_matches(|c: char| c.is_ascii_alphabetic());
    digits.parse().ok()
}

fn page(number: u16) -> Option<&'static str> {
    PAGES.binary_search_by_key(&number, |(code, _)| *code).ok().map(|at| PAGES[at].1)
}

fn title(page: &str) -> &str {
    page.lines().next().unwrap_or_default().trim_start_matches("# ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_found_however_it_is_written() {
        for text in ["NGY0501", "ngy0501", "501", " NGY501"] {
            assert_eq!(number(text), Some(501), "{text}");
        }
        assert!(page(501).unwrap().starts_with("# NGY0501: "));
        assert_eq!(page(9_999), None);
        assert_eq!(number("NGY"), None);
    }

    #[test]
    fn every_page_has_its_own_number_in_its_title() {
        for (code, text) in PAGES {
            assert!(text.starts_with(&format!("# NGY{code:04}: ")), "NGY{code:04}: {}", title(text));
        }
    }
}

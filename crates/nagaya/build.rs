//! Embeds the error pages of `docs/errors`, so that `nagaya error CODE` needs no files.
//!
//! Not here: the text of the pages, and the check that each code in use has one (tidy test).

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    let pages = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../docs/errors");
    println!("cargo::rerun-if-changed={}", pages.display());
    let mut found = Vec::new();
    if let Ok(entries) = fs::read_dir(&pages) {
        for entry in entries {
            let path = entry.expect("a listed page can be looked at").path();
            let code = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_prefix("NGY")?.strip_suffix(".md")?.parse::<u16>().ok());
            if let Some(code) = code {
                found.push((code, fs::canonicalize(&path).expect("a listed page is there")));
            }
        }
    }
    found.sort();
    let mut code = format!("/// All pages, by code.\nstatic PAGES: [(u16, &str); {}] = [\n", found.len());
    for (number, path) in found {
        let _ = writeln!(code, "    ({number}, include_str!({path:?})),");
    }
    code.push_str("];\n");
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("error_pages.rs");
    fs::write(&out, code).expect("the build directory is writable");
}

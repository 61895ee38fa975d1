//! Compiles mruby 3.4.0 and the shim around it (`c/`) into the crate, with a C compiler and nothing else.
//!
//! The source comes from the registry like any dependency: `libnghttp2-sys` carries the complete tree of mruby, is pinned
//! and checked by `Cargo.lock`, and is never compiled as a crate. mruby's own build needs Ruby; this one takes the files
//! that are needed, and the parts of mruby's library that are written in Ruby go in as text, which the first VM of a
//! process compiles.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The package whose source tree holds mruby, and where in it.
const CARRIER: &str = "libnghttp2-sys";
const MRUBY_IN_CARRIER: &str = "nghttp2/third-party/mruby";

/// What of mruby's library rules have. Nothing that opens files, sockets or directories, evaluates text, sleeps or ends
/// the process. A gem stands behind those it needs.
const GEMS: &[&str] = &[
    "mruby-compar-ext",
    "mruby-enum-ext",
    "mruby-string-ext",
    "mruby-numeric-ext",
    "mruby-array-ext",
    "mruby-hash-ext",
    "mruby-range-ext",
    "mruby-proc-ext",
    "mruby-symbol-ext",
    "mruby-object-ext",
    "mruby-kernel-ext",
    "mruby-class-ext",
    "mruby-sprintf",
    "mruby-time",
    "mruby-struct",
    "mruby-math",
    "mruby-random",
    "mruby-metaprog",
    "mruby-fiber",
    "mruby-enumerator",
    "mruby-set",
    "mruby-catch",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=c");
    let mruby = carrier().join(MRUBY_IN_CARRIER);
    println!("cargo:rustc-env=NAGAYA_MRUBY_VERSION={}", version(&mruby));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));

    let mut library = compiler(&mruby);
    library.warnings(false);
    library.files(sources(&mruby.join("src"), "c").iter().filter(|path| !path.ends_with("allocf.c")));
    library.files(["codegen.c", "y.tab.c"].map(|name| mruby.join("mrbgems/mruby-compiler/core").join(name)));
    let mut units = vec![Unit::new(&mruby, "mrblib", &mruby)];
    for gem in GEMS {
        let directory = mruby.join("mrbgems").join(gem);
        library.files(sources(&directory.join("src"), "c"));
        units.push(Unit::new(&mruby, gem, &directory));
    }
    let table = out.join("units.c");
    write(&table, &units_table(&units));
    library.file(table).include("c");
    library.compile("nagaya_mruby");

    compiler(&mruby).warnings(true).extra_warnings(true).file("c/vm.c").compile("nagaya_rules_vm");
    // The shim and mruby call each other; named once more behind the shim, the linker finds what it still misses.
    println!("cargo:rustc-link-lib=static=nagaya_mruby");
    println!("cargo:rustc-link-lib=m");
}

/// What the source says of itself: `3.4.0`.
fn version(mruby: &Path) -> String {
    let path = mruby.join("include/mruby/version.h");
    let header = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let number = |name: &str| {
        let words = header.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let value = words.into_iter().find_map(|words| match words[..] {
            ["#define", word, value] if word == name => Some(value.to_owned()),
            _ => None,
        });
        value.unwrap_or_else(|| panic!("{} does not define {name}", path.display()))
    };
    ["MRUBY_RELEASE_MAJOR", "MRUBY_RELEASE_MINOR", "MRUBY_RELEASE_TEENY"].map(number).join(".")
}

/// The options both parts must share: they decide the layout of mruby's structures.
fn compiler(mruby: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .std("gnu11")
        // Rules are on the path of each request, in builds for tests too.
        .opt_level(2)
        .define("MRB_NO_GEMS", None)
        .define("MRB_NO_PRESYM", None)
        .define("MRB_NO_STDIO", None)
        .define("MRB_USE_DEBUG_HOOK", None)
        .define("MRB_UTF8_STRING", None);
    for directory in ["include", "src", "mrbgems/mruby-compiler/core", "mrbgems/mruby-time/include"] {
        // As the system's: its headers are not ours to warn about.
        build.flag("-isystem").flag(mruby.join(directory));
    }
    build
}

/// Where cargo put the source of the carrier. Asked without network first, so that a build which needs none stays so.
fn carrier() -> PathBuf {
    let ask = |more: &[&str]| {
        Command::new(env::var("CARGO").expect("cargo sets CARGO"))
            .args(["metadata", "--format-version", "1", "--locked"])
            .args(more)
            .current_dir(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo can be started")
    };
    let mut answer = ask(&["--offline"]);
    if !answer.status.success() {
        answer = ask(&[]);
    }
    let told = String::from_utf8_lossy(&answer.stderr);
    assert!(answer.status.success(), "`cargo metadata` does not find the source of mruby: {told}");
    let metadata: serde_json::Value = serde_json::from_slice(&answer.stdout).expect("cargo writes JSON");
    let packages = metadata["packages"].as_array().expect("the metadata lists packages");
    let manifest = packages
        .iter()
        .find(|package| package["name"] == CARRIER)
        .and_then(|package| package["manifest_path"].as_str())
        .expect("the carrier is a dependency of this crate");
    Path::new(manifest).parent().expect("a manifest is in a directory").to_path_buf()
}

/// A part of mruby's library: mrblib, or one gem.
struct Unit {
    name: String,
    /// Its Ruby text.
    source: Vec<u8>,
    /// The function that defines its classes in C.
    init: Option<String>,
}

impl Unit {
    fn new(mruby: &Path, name: &str, directory: &Path) -> Self {
        let texts = if directory == mruby { mruby.join("mrblib") } else { directory.join("mrblib") };
        let mut source = Vec::new();
        for path in sources(&texts, "rb") {
            source.extend(fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
            source.push(b'\n');
        }
        let is_gem_in_c = directory != mruby && !sources(&directory.join("src"), "c").is_empty();
        let init = is_gem_in_c.then(|| format!("mrb_{}_gem_init", name.replace('-', "_")));
        Self { name: name.to_owned(), source, init }
    }
}

/// The tables `c/vm.c` declares.
fn units_table(units: &[Unit]) -> String {
    let mut text = String::from("#include <mruby.h>\n#include \"vm.h\"\n");
    let (mut rows, mut inits) = (String::new(), String::new());
    for (at, unit) in units.iter().enumerate() {
        let bytes: Vec<_> = unit.source.iter().map(u8::to_string).collect();
        let len = unit.source.len();
        // One element more than the text, since C has no empty arrays.
        let _ = writeln!(
            text,
            "static const unsigned char source_{at}[] = {{{}}};",
            [bytes, vec!["0".into()]].concat().join(",")
        );
        let _ = writeln!(rows, "  {{ \"{}\", source_{at}, {len} }},", unit.name);
        if let Some(init) = &unit.init {
            let _ = writeln!(text, "void {init}(mrb_state*);");
        }
        let _ = writeln!(inits, "  {},", unit.init.as_deref().unwrap_or("0"));
    }
    let _ = write!(
        text,
        "const ng_unit ng_all_units[] = {{\n{rows}}};\nvoid (*const ng_all_inits[])(mrb_state*) = {{\n{inits}}};\nconst size_t ng_all_units_len = {};\n",
        units.len()
    );
    text
}

/// The files of a directory with this extension, in order; none if there is no such directory.
fn sources(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("the directory can be read").path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    paths.sort();
    paths
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

//! Compiles mruby 3.4.0 and the shim around it (`c/`) into the crate. It needs only a C compiler.
//!
//! The source comes from the registry like any dependency. `libnghttp2-sys` carries the complete
//! tree of mruby. `Cargo.lock` pins and checks it, and it is never compiled as a crate. The build
//! of mruby itself needs Ruby. This one takes only the needed files. The parts of mruby's library
//! that are written in Ruby go in as text. The first VM of a process compiles them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The package whose source tree has mruby, and where in it.
const CARRIER: &str = "libnghttp2-sys";
const MRUBY_IN_CARRIER: &str = "nghttp2/third-party/mruby";

/// The parts of mruby's library that rules have. Nothing in them opens files, sockets or
/// directories, evaluates text, sleeps or ends the process. A gem comes after those it needs.
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

/// Functions of the C library that mruby calls and that take a lock. A rule that is ended in one of
/// them would keep the lock for ever. `c/vm.c` has a guarded form of each.
const TAKE_LOCKS: &[&str] = &["gmtime_r", "localtime_r", "mktime", "strftime"];

/// Faults of mruby 3.4.0 that a later version corrects, as file, text and replacement. The build
/// fails if the text is missing: a version that does not need the correction must lose its row.
/// `docs/bundled-c.md` explains each.
const CORRECTIONS: &[(&str, &[(&str, &str)])] = &[(
    "src/array.c",
    // CVE-2025-13120: a block that shortens the array it sorts.
    &[
        (
            "  mrb_int cmp;\n\n  if (mrb_nil_p(blk)) {",
            "  mrb_int cmp;\n  const mrb_int had = RARRAY_LEN(ary);\n\n  if (mrb_nil_p(blk)) {",
        ),
        ("RARRAY_PTR(ary) != p || size < a || size < b", "RARRAY_PTR(ary) != p || size != had"),
    ],
)];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=c");
    let mruby = carrier().join(MRUBY_IN_CARRIER);
    println!("cargo:rustc-env=NAGAYA_MRUBY_VERSION={}", version(&mruby));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));

    let mut files = sources(&mruby.join("src"), "c");
    // The allocator is ours.
    files.retain(|path| !path.ends_with("allocf.c"));
    correct(&mruby, &out, &mut files);
    files.extend(["codegen.c", "y.tab.c"].map(|name| mruby.join("mrbgems/mruby-compiler/core").join(name)));
    let mut units = vec![Unit::new(&mruby, "mrblib", &mruby)];
    for gem in GEMS {
        let directory = mruby.join("mrbgems").join(gem);
        files.extend(sources(&directory.join("src"), "c"));
        units.push(Unit::new(&mruby, gem, &directory));
    }
    let generated = out.join("include");
    let symbols = symbols(&mruby, &files, &units);
    fs::create_dir_all(generated.join("mruby/presym")).expect("OUT_DIR can be written");
    write(&generated.join("mruby/presym/id.h"), &symbol_numbers(&symbols));
    write(&generated.join("mruby/presym/table.h"), &symbol_table(&symbols));
    let table = out.join("units.c");
    write(&table, &units_table(&units));

    let mut library = compiler(&mruby, &generated);
    for name in TAKE_LOCKS {
        library.define(name, format!("ng_guarded_{name}").as_str());
    }
    library.warnings(false).files(files).file(table).include("c").compile("nagaya_mruby");
    let mut shim = compiler(&mruby, &generated);
    shim.warnings(true).extra_warnings(true).files(["c/vm.c", "c/watch.c"]).compile("nagaya_rules_vm");
    // The shim and mruby call each other. Listed once more after the shim, the linker finds what it
    // still misses.
    println!("cargo:rustc-link-lib=static=nagaya_mruby");
    println!("cargo:rustc-link-lib=m");
}

/// Puts a corrected copy in place of each file that `CORRECTIONS` names.
fn correct(mruby: &Path, out: &Path, files: &mut [PathBuf]) {
    for (name, replacements) in CORRECTIONS {
        let path = mruby.join(name);
        let mut text =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for (from, to) in *replacements {
            assert_eq!(
                text.matches(from).count(),
                1,
                "{} has another text: is CORRECTIONS still right?",
                path.display()
            );
            text = text.replace(from, to);
        }
        let copy = out.join(path.file_name().expect("a file has a name"));
        write(&copy, &text);
        let place =
            files.iter_mut().find(|file| **file == path).expect("a corrected file is one that is compiled");
        *place = copy;
    }
}

/// Returns the version in the source: `3.4.0`.
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

/// Returns the options that both parts must share: they decide the layout of mruby's structures.
fn compiler(mruby: &Path, generated: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .std("gnu11")
        // Rules are on the path of each request, in builds for tests, too.
        .opt_level(3)
        .force_frame_pointer(false)
        .define("MRB_NO_GEMS", None)
        .define("MRB_NO_STDIO", None)
        .define("MRB_USE_DEBUG_HOOK", None)
        .define("MRB_UTF8_STRING", None)
        .flag("-isystem")
        .flag(generated);
    for directory in ["include", "src", "mrbgems/mruby-compiler/core", "mrbgems/mruby-time/include"] {
        // Treated as system headers: their warnings are not ours.
        build.flag("-isystem").flag(mruby.join(directory));
    }
    build
}

/// Returns where cargo put the source of the carrier. The query goes without network first, so that
/// a build which needs none stays so.
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

/// Returns the tables that `c/vm.c` declares.
fn units_table(units: &[Unit]) -> String {
    let mut text = String::from("#include <mruby.h>\n#include \"vm.h\"\n");
    let mut rows = String::new();
    let mut inits = String::new();
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

/// Operators, and their names in mruby's macro `MRB_OPSYM`.
const OPERATORS: &[(&str, &str)] = &[
    ("!", "not"),
    ("%", "mod"),
    ("&", "and"),
    ("*", "mul"),
    ("+", "add"),
    ("-", "sub"),
    ("/", "div"),
    ("<", "lt"),
    (">", "gt"),
    ("^", "xor"),
    ("`", "tick"),
    ("|", "or"),
    ("~", "neg"),
    ("!=", "neq"),
    ("!~", "nmatch"),
    ("&&", "andand"),
    ("**", "pow"),
    ("+@", "plus"),
    ("-@", "minus"),
    ("<<", "lshift"),
    ("<=", "le"),
    ("==", "eq"),
    ("=~", "match"),
    (">=", "ge"),
    (">>", "rshift"),
    ("[]", "aref"),
    ("||", "oror"),
    ("<=>", "cmp"),
    ("===", "eqq"),
    ("[]=", "aset"),
];

/// Macros that name a symbol, with the text before and after the name in the symbol itself.
const SYMBOL_MACROS: &[(&str, &str, &str)] = &[
    ("MRB_SYM", "", ""),
    ("MRB_SYM_B", "", "!"),
    ("MRB_SYM_Q", "", "?"),
    ("MRB_SYM_E", "", "="),
    ("MRB_IVSYM", "@", ""),
    ("MRB_CVSYM", "@@", ""),
    ("MRB_GVSYM", "$", ""),
];

/// Returns the symbols that get their numbers when mruby is compiled, in the order mruby searches
/// them. A symbol without a number is looked up by its text wherever C code names it. Comparing two
/// strings took two microseconds.
///
/// All symbols in macros must be here. The names of Ruby's library should be: they then cost a VM
/// nothing. A wrong entry costs one row of the table.
fn symbols(mruby: &Path, files: &[PathBuf], units: &[Unit]) -> Vec<String> {
    let mut found: Vec<String> = OPERATORS.iter().map(|(symbol, _)| (*symbol).to_owned()).collect();
    let headers = [
        "include",
        "include/mruby",
        "src",
        "mrbgems/mruby-compiler/core",
        "mrbgems/mruby-time/include/mruby",
    ]
    .map(|directory| sources(&mruby.join(directory), "h"));
    for path in files.iter().chain(headers.iter().flatten()).chain([&PathBuf::from("c/vm.c")]) {
        let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        symbols_of_c(&String::from_utf8_lossy(&text), &mut found);
    }
    for unit in units {
        let text = String::from_utf8_lossy(&unit.source);
        let is_part = |c: char| c.is_ascii_alphanumeric() || "_@$?!=".contains(c);
        found.extend(text.split(|c| !is_part(c)).filter(|word| affixes(word).is_some()).map(str::to_owned));
    }
    found.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    found.dedup();
    found
}

fn symbols_of_c(text: &str, found: &mut Vec<String>) {
    for (at, _) in text.match_indices("MRB_") {
        let rest = &text[at..];
        let Some((name, rest)) = rest.split_once('(') else { continue };
        let name = name.strip_suffix("_2").unwrap_or(name);
        let name = if name == "MRB_ERROR_SYM" { "MRB_SYM" } else { name };
        let Some((_, before, behind)) = SYMBOL_MACROS.iter().find(|(of, ..)| *of == name) else { continue };
        let arguments = rest.split(')').next().unwrap_or_default();
        let argument = arguments.rsplit(',').next().unwrap_or_default().trim();
        let symbol = format!("{before}{argument}{behind}");
        if affixes(&symbol).is_some() {
            found.push(symbol);
        }
    }
    // Names of methods and classes are between quotes.
    found.extend(text.split('"').filter(|text| affixes(text).is_some()).map(str::to_owned));
}

/// Returns the macro and the name of a symbol; `None` if no macro can name it.
fn affixes(symbol: &str) -> Option<(&'static str, &str)> {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    SYMBOL_MACROS.iter().find_map(|(of, before, behind)| {
        let name = symbol.strip_prefix(before)?.strip_suffix(behind)?;
        is_name(name).then_some((*of, name))
    })
}

fn symbol_numbers(symbols: &[String]) -> String {
    let mut text = String::from("enum mruby_presym {\n");
    for (at, symbol) in symbols.iter().enumerate() {
        let operator = OPERATORS.iter().find(|(operator, _)| operator == symbol);
        let (of, name) = operator
            .map(|(_, name)| ("MRB_OPSYM", *name))
            .or_else(|| affixes(symbol))
            .expect("only such symbols are collected");
        // 0 is no symbol.
        let _ = writeln!(text, "  {of}__{name} = {},", at + 1);
    }
    let _ = write!(text, "}};\n#define MRB_PRESYM_MAX {}\n", symbols.len());
    text
}

fn symbol_table(symbols: &[String]) -> String {
    let lengths: Vec<_> = symbols.iter().map(|symbol| symbol.len().to_string()).collect();
    let names: Vec<_> = symbols.iter().map(|symbol| format!("\"{symbol}\"")).collect();
    let lengths = lengths.join(",");
    let names = names.join(",\n");
    format!(
        "static const uint16_t presym_length_table[] = {{{lengths}}};\nstatic const char * const presym_name_table[] = {{\n{names}}};\n"
    )
}

/// Returns the files of a directory with this extension, in order; none if the directory does not
/// exist.
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

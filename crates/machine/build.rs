//! Compiles the first process of a guest (`c/guest_*.c`), without shared libraries: a guest's
//! root may have others. And a library for QEMU (`c/template_memory.c`). The crate contains the
//! bytes of both. It needs only a C compiler.

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=c");
    compile(&["c/guest_init.c", "c/guest_session.c"], "guest_init", &["-static"]);
    compile(&["c/template_memory.c"], "template_memory.so", &["-shared", "-fPIC"]);
}

fn compile(sources: &[&str], name: &str, how: &[&str]) {
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
    let mut build = cc::Build::new();
    build.std("gnu11").opt_level(2).warnings(true).extra_warnings(true);
    let mut compiler = build.get_compiler().to_command();
    let status = compiler.args(how).args(["-s", "-o"]).arg(&out).args(sources).status();
    let status = status.expect("a C compiler can be started");
    assert!(status.success(), "{sources:?} cannot be compiled");
}

//! Compiles the library that makes `php-cgi` a parent of PHP workers (`c/php_parent.c`). The crate
//! contains its bytes. It needs only a C compiler.

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=c");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("php_parent.so");
    let mut build = cc::Build::new();
    build.std("gnu11").opt_level(2).pic(true).warnings(true).extra_warnings(true);
    let mut compiler = build.get_compiler().to_command();
    let status = compiler
        .args(["-shared", "-Wl,-z,relro,-z,now", "-o"])
        .arg(&out)
        .arg("c/php_parent.c")
        .status()
        .expect("a C compiler can be started");
    assert!(status.success(), "c/php_parent.c cannot be compiled");
}

//! The fuzzer: `nagaya-fuzz list`, `nagaya-fuzz seed TARGET DIRECTORY`, or libFuzzer's own arguments with the name of the
//! target in `NAGAYA_FUZZ_TARGET`.
//!
//! Not here: how it is built and called (`xtask/src/fuzz.rs`).
#![no_main]

use std::process::exit;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use nagaya_base::fuzz::FuzzTarget;
use nagaya_fuzz::{list_inputs, list_targets};

static TARGET: OnceLock<FuzzTarget> = OnceLock::new();

fuzz_target!(
    init: {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["list"] => {
                list_targets().iter().for_each(|target| println!("{}", target.name));
                exit(0)
            }
            ["seed", name, directory] => exit(write_seeds(&find_target(name), directory)),
            _ => {}
        }
        let name = std::env::var("NAGAYA_FUZZ_TARGET").unwrap_or_default();
        TARGET.get_or_init(|| find_target(&name));
    },
    |bytes: &[u8]| {
        if let Some(target) = TARGET.get() {
            (target.run)(bytes);
        }
    }
);

fn find_target(name: &str) -> FuzzTarget {
    list_targets().into_iter().find(|target| target.name == name).unwrap_or_else(|| {
        eprintln!("nagaya-fuzz: '{name}' is no target: `./dev fuzz --list` shows all");
        exit(2)
    })
}

/// Returns the exit status.
fn write_seeds(target: &FuzzTarget, directory: &str) -> i32 {
    let written = list_inputs(target).and_then(|inputs| {
        let mut numbered = inputs.iter().enumerate();
        numbered
            .try_for_each(|(number, (_, input))| std::fs::write(format!("{directory}/seed-{number}"), input))
    });
    match written {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("nagaya-fuzz: cannot write seeds to {directory}: {error}");
            1
        }
    }
}

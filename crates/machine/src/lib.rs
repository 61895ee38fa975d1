//! Micro-VMs: an application with a kernel of its own. QEMU runs as the command of an ordinary
//! sandbox, started and driven by `nagaya vm-run`.
//!
//! - `settings`: the order of the keeper to `vm-run`
//! - `kernel`: the kernel of a guest, and the modules that it needs
//! - `archive`, `guest_config`, `initramfs`: the initial RAM disk
//! - `command_line`: QEMU's arguments
//! - `clock`: the frequency of the node's time stamp counter
//! - `monitor`: orders to a running QEMU (QMP)
//! - `qemu`: QEMU's start, and the state of its devices
//! - `door`: `nagaya vm-wake`, the way of a device to a machine that was saved
//! - `share`, `pump`: the guest's files, which are the sandbox's
//! - `template`: `nagaya vm-template`, a machine that others begin as copies of
//! - `run`: `nagaya vm-run`, the life of one machine
//! - `exec`: `nagaya vm-exec`, a command beside the application in it
//!
//! Invariant: `vm-run`, QEMU and the guest have the tenant's rights and no others. Nothing here
//! protects the node from them; the sandbox does. Not here: the sandbox, and when a machine runs or
//! rests (`nagaya_keeper`).

pub mod archive;
pub mod clock;
pub mod command_line;
pub mod door;
pub mod exec;
pub mod guest_config;
pub mod initramfs;
pub mod kernel;
pub mod monitor;
mod pump;
pub mod qemu;
pub mod run;
pub mod settings;
pub mod share;
pub mod template;

use std::ffi::OsString;

/// Files that a sandbox of a machine has, and their paths in it.
pub const DIRECTORY: &str = "/run/nagaya/machine";

/// The library by which QEMU maps a template's memory (`c/template_memory.c`).
pub const TEMPLATE_LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/template_memory.so"));

/// Runs the program of a sandbox that the first of these words names, to its end. Returns its exit
/// status, or why it failed. `None`: the word names none.
pub fn run_program(word: &OsString, others: &[OsString]) -> Option<Result<u8, String>> {
    let ended = match word.to_str()? {
        "vm-run" => run::run().map_err(|error| error.to_string()),
        "vm-template" => template::run().map(|()| 0).map_err(|error| error.to_string()),
        "vm-exec" => exec::run(others).map_err(|error| error.to_string()),
        "vm-wake" => door::hand_over().map(|()| 0).map_err(|error| error.to_string()),
        _ => return None,
    };
    Some(ended.map_err(|error| format!("nagaya {}: {error}", word.display())))
}

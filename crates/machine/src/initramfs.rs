//! The initial RAM disk of a guest: its first process and the kernel's modules. It is the same for
//! all machines of a kernel.
//!
//! Not here: the format (`archive`), the configuration of one machine (`guest_config`).

use crate::archive::{ArchiveWriter, DIRECTORY, EntryTooLarge, PROGRAM, SECRET};

/// The first process (`c/guest_init.c`).
pub const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest_init"));

/// Returns it, with these modules.
pub fn build(modules: &[(String, Vec<u8>)]) -> Result<Vec<u8>, EntryTooLarge> {
    let mut archive = ArchiveWriter::default();
    for name in ["dev", "modules", "proc", "root", "sys"] {
        archive.add(name, DIRECTORY, &[])?;
    }
    archive.add("init", PROGRAM, INIT)?;
    for (name, module) in modules {
        archive.add(&format!("modules/{name}"), PROGRAM, module)?;
    }
    let order: String = modules.iter().map(|(name, _)| format!("module {name}\n")).collect();
    archive.add("order", SECRET, order.as_bytes())?;
    archive.finish()
}

//! A kernel of its own for an application: it runs in a virtual machine.
//!
//! Not here: the machine (`nagaya_machine`), its checks (`check::app`).

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::WrittenAmount;

/// Default memory of a machine, and its bounds, MiB.
pub const MACHINE_MEMORY_MIB: u32 = 128;
pub const MACHINE_MEMORY_MIB_MIN: u32 = 32;
pub const MACHINE_MEMORY_MIB_MAX: u32 = 1 << 20;

/// Least memory with Debian's kernel, MiB. With less it does not start, and says nothing.
pub const NODE_KERNEL_MEMORY_MIB_MIN: u32 = 96;

/// Most processors of a machine.
pub const MACHINE_VCPUS_MAX: u32 = 64;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppMachine {
    pub kernel: MachineKernel,
    /// Memory of the guest: `128M`. `None` means `MACHINE_MEMORY_MIB`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<WrittenAmount>,
    /// Number of its processors. `None` means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
}

/// The kernel of a machine: `node`, or the path of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum MachineKernel {
    /// The newest kernel for virtual machines that the node has.
    Node,
    File(PathBuf),
}

/// The word for the node's kernel.
const NODE: &str = "node";

impl From<String> for MachineKernel {
    fn from(text: String) -> Self {
        if text == NODE { Self::Node } else { Self::File(text.into()) }
    }
}

impl From<MachineKernel> for String {
    fn from(kernel: MachineKernel) -> Self {
        kernel.to_string()
    }
}

impl fmt::Display for MachineKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node => f.write_str(NODE),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl MachineKernel {
    /// Returns its file, if it is named.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Node => None,
            Self::File(path) => Some(path),
        }
    }
}

impl AppMachine {
    /// Returns the memory of the guest, MiB. The error is the mistake, worded to follow the text.
    pub fn memory_mib(&self) -> Result<u32, String> {
        let Some(memory) = &self.memory else { return Ok(MACHINE_MEMORY_MIB) };
        let bytes = memory.memory()?.ok_or("is not possible: a machine has so much memory and no more")?;
        let min = match self.kernel {
            MachineKernel::Node => NODE_KERNEL_MEMORY_MIB_MIN,
            MachineKernel::File(_) => MACHINE_MEMORY_MIB_MIN,
        };
        u32::try_from(bytes >> 20)
            .ok()
            .filter(|mib| (min..=MACHINE_MEMORY_MIB_MAX).contains(mib))
            .ok_or_else(|| format!("is not possible with this kernel: {min}M to {MACHINE_MEMORY_MIB_MAX}M"))
    }

    pub fn vcpus(&self) -> u32 {
        self.vcpus.unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(kernel: &str, memory: &str) -> AppMachine {
        serde_json::from_value(serde_json::json!({"kernel": kernel, "memory": memory})).unwrap()
    }

    #[test]
    fn memory_is_enough_for_the_kernel_that_starts_with_it() {
        assert_eq!(machine("node", "96M").memory_mib(), Ok(96));
        assert_eq!(machine("/srv/vmlinuz", "32M").memory_mib(), Ok(32));
        for (kernel, memory) in
            [("node", "95M"), ("node", "64M"), ("/srv/vmlinuz", "31M"), ("node", "2097152M")]
        {
            let wrong = machine(kernel, memory).memory_mib().unwrap_err();
            assert!(wrong.contains("is not possible with this kernel"), "{wrong}");
        }
        let without = AppMachine { kernel: MachineKernel::Node, memory: None, vcpus: None };
        assert_eq!((without.memory_mib(), without.vcpus()), (Ok(MACHINE_MEMORY_MIB), 1));
    }

    #[test]
    fn a_kernel_is_the_nodes_or_a_file() {
        for text in ["node", "/srv/vmlinuz"] {
            assert_eq!(MachineKernel::from(text.to_owned()).to_string(), text);
        }
        assert_eq!(MachineKernel::from("node".to_owned()).file(), None);
    }
}

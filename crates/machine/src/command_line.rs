//! QEMU's arguments for one machine.
//!
//! The machine has no firmware setup, no disk and no display: a console that is not read, ports for
//! messages, the log and files, a network of QEMU's own, random numbers and a balloon (QEMU's
//! documentation, "microvm" and "Invocation"). Its memory is a file where it has a template, which
//! has the same devices. Not here: running it (`run`, `template`).

use std::path::Path;

use crate::qemu::QemuOrder;
use crate::settings::{Accelerator, MachineOrigin};

/// Numbers of the sockets that QEMU inherits.
#[derive(Debug, Clone, Copy)]
pub struct InheritedSockets {
    pub monitor: i32,
    pub agent: i32,
    pub log: i32,
    pub files: i32,
}

/// The memory of a machine, if it is a file.
#[derive(Debug, Clone, Copy)]
pub struct MemoryFile<'a> {
    pub path: &'a Path,
    /// Writes go to the file. Else they are the machine's own.
    pub is_shared: bool,
}

/// Name of QEMU's network, for `hostfwd_add`.
pub const NETWORK: &str = "n0";

/// Memory for translated code, MiB. QEMU's default is a quarter of a GiB.
const TRANSLATED_MIB: u32 = 32;

/// The kernel's words. It prints only errors to the console, and ends the machine with a fatal one.
/// A guest that was frozen for long is not locked up. The tenant gets all of it: no mitigations
/// between its own processes are switched off.
const WORDS: &str = "console=ttyS0 quiet loglevel=3 reboot=t panic=-1 nowatchdog random.trust_cpu=on \
                     tsc=reliable no_timer_check rdinit=/init";

/// Returns the arguments, without the program. A machine that is incoming waits for its state
/// (`load_state`).
pub fn arguments(order: &QemuOrder<'_>, sockets: InheritedSockets) -> Vec<String> {
    let QemuOrder { name, hardware, origin, memory, is_incoming, .. } = order;
    let mut words: Vec<String> = Vec::new();
    let mut add = |list: &[&str]| words.extend(list.iter().map(|word| (*word).to_owned()));
    let backend = if memory.is_some() { ",memory-backend=m0" } else { "" };
    let machine = "microvm,acpi=on,pcie=off,pit=off,pic=off,rtc=off,isa-serial=on,usb=off";
    add(&["-name", &listed(name), "-machine", &format!("{machine}{backend}")]);
    match hardware.accelerator {
        Accelerator::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
        Accelerator::Tcg => {
            add(&["-accel", &format!("tcg,thread=single,tb-size={TRANSLATED_MIB}"), "-cpu", "max"]);
        }
    }
    add(&["-smp", &hardware.vcpus.to_string(), "-m", &hardware.memory_mib.to_string()]);
    if let Some(MemoryFile { path, is_shared }) = memory {
        let (path, share) = (listed(&path.to_string_lossy()), if *is_shared { "on" } else { "off" });
        let size = hardware.memory_mib;
        add(&["-object", &format!("memory-backend-file,id=m0,size={size}M,mem-path={path},share={share}")]);
    }
    add(&["-no-user-config", "-nodefaults", "-no-reboot", "-display", "none", "-serial", "null"]);
    let InheritedSockets { monitor, agent, log, files } = sockets;
    add(&["-chardev", &format!("socket,id=monitor,fd={monitor}"), "-mon", "chardev=monitor,mode=control"]);
    add(&["-device", "virtio-serial-device"]);
    for (name, fd) in [("agent", agent), ("log", log), ("files", files)] {
        let port = format!("virtserialport,chardev={name},name={name}");
        add(&["-chardev", &format!("socket,id={name},fd={fd}"), "-device", &port]);
    }
    let card = format!("virtio-net-device,netdev={NETWORK}");
    add(&["-netdev", &format!("user,id={NETWORK}"), "-device", &card]);
    add(&["-device", "virtio-rng-device", "-device", "virtio-balloon-device,free-page-reporting=on"]);
    match origin {
        MachineOrigin::Kernel { kernel, initramfs } => {
            let tsc = hardware.tsc_khz.map_or_else(String::new, |khz| format!(" tsc_early_khz={khz}"));
            add(&["-kernel", &kernel.to_string_lossy(), "-initrd", &initramfs.to_string_lossy()]);
            add(&["-append", &format!("{WORDS}{tsc}")]);
        }
        // Its kernel is in its memory.
        MachineOrigin::Template { .. } => {}
    }
    if *is_incoming {
        add(&["-S", "-incoming", "defer"]);
    }
    words
}

/// In QEMU's lists a comma is written twice.
fn listed(text: &str) -> String {
    text.replace(',', ",,")
}

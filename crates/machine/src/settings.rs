//! The order of the keeper to `nagaya vm-run`: how to make one machine, and the application in it.
//!
//! It is one environment variable. The other variables of `vm-run` are the application's. Not here:
//! QEMU's arguments (`command_line`), the guest's part (`guest_config`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Variable with the settings, as JSON.
pub const VARIABLE: &str = "NAGAYA_MACHINE";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSettings {
    /// Name of the site: that of QEMU's process, and the guest's host name.
    pub name: String,
    pub qemu: QemuProgram,
    pub hardware: MachineHardware,
    pub origin: MachineOrigin,
    /// The part of it in an image of its sandbox.
    pub image: ImageContent,
    /// Directory of the sandbox that is the guest's root.
    pub root: PathBuf,
    pub application: GuestApplication,
    /// Port of loopback in the sandbox where the application is reached.
    pub port: u16,
    /// Port of loopback in the sandbox where commands of an operator are taken (`exec`).
    pub exec_port: u16,
}

/// QEMU on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QemuProgram {
    /// The program, and words before all others, such as its directory of firmware.
    pub words: Vec<String>,
    /// The library that opens files for it (`c/template_memory.c`).
    pub library: PathBuf,
    /// The directory of its modules, if that is not where it looks by itself.
    pub modules: Option<PathBuf>,
}

/// The parts of a machine that its template must share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineHardware {
    pub accelerator: Accelerator,
    /// Memory of the guest, MiB.
    pub memory_mib: u32,
    pub vcpus: u32,
    /// Frequency of the node's time stamp counter, kHz. `None` if it is not known.
    pub tsc_khz: Option<u32>,
}

/// How the guest's CPU is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    Kvm,
    /// QEMU translates the guest's code.
    Tcg,
}

impl Accelerator {
    /// Returns QEMU's word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The part of a machine that an image of its processes (CRIU) contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageContent {
    /// QEMU, with its translated code.
    Process,
    /// QEMU's own state, in memory of `vm-run`: CRIU cannot save what runs on the processor itself.
    State,
}

impl ImageContent {
    /// Returns the only one that is possible with KVM, and the better one without.
    pub const fn of(accelerator: Accelerator) -> Self {
        match accelerator {
            Accelerator::Kvm => Self::State,
            Accelerator::Tcg => Self::Process,
        }
    }
}

/// The first state of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineOrigin {
    /// Its kernel starts.
    Kernel { kernel: PathBuf, initramfs: PathBuf },
    /// It is a copy of a machine that has started.
    Template {
        memory: PathBuf,
        /// The state of its devices.
        state: PathBuf,
    },
}

/// The application in a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestApplication {
    pub command: Vec<String>,
    /// The tenant's ids, and the maximum number of open files of the application.
    pub uid: u32,
    pub gid: u32,
    pub open_files_max: u64,
    pub directory: PathBuf,
    pub listen: GuestListen,
    /// Places that it reaches at its own loopback or sockets.
    pub places: Vec<ForwardedPlace>,
}

/// Where the application listens in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestListen {
    /// A port of the guest's loopback.
    Port(u16),
    /// A Unix socket.
    Path(PathBuf),
    /// It gets the socket (sd_listen_fds(3)).
    Socket,
}

/// A place in the sandbox that has the same address in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForwardedPlace {
    /// `127.0.0.1:5432`.
    Address(std::net::SocketAddrV4),
    /// A Unix socket.
    Path(PathBuf),
}

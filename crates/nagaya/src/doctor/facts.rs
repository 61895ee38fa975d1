//! Gathers facts about the machine. Nothing here judges.
//!
//! Not here: the meaning of the facts (`checks`).

use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use nagaya_keeper::machines::MachineProbe;
use nagaya_keeper::sandbox::{self, Launcher};
use nagaya_keeper::{CellMechanism, HUGE_PAGES_SWITCH, are_huge_pages_always};
use rustix::fs::{Access, Mode, OFlags, ResolveFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use rustix::process::Resource;

use super::cgroups::CgroupFacts;
use super::rule_files;
use super::tenants::TenantFinding;
use crate::certificates;
use crate::config::NodeSettings;
use crate::inherit;
use crate::supervisor::{StoreAccess, try_edge_root};

/// Longest time for a program to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of a version text that are read.
const VERSION_LEN_MAX: u64 = 4096;

/// All facts for the checks.
#[derive(Debug, Default)]
pub struct NodeFacts {
    pub kernel: String,
    pub root: bool,
    pub cgroups: CgroupFacts,
    pub openat2: bool,
    pub fd_passing: bool,
    pub state_dir: PathBuf,
    pub device: Option<DeviceFacts>,
    pub open_files_hard: Option<u64>,
    pub file_max: Option<u64>,
    pub pid_max: Option<u64>,
    pub threads_max: Option<u64>,
    pub somaxconn: Option<u64>,
    pub php_cgi: PathBuf,
    pub php_version: Option<String>,
    pub criu: CriuFacts,
    pub swaps: Vec<SwapFacts>,
    /// Whether all programs get pages of 64 KiB. `None` if the kernel does not have such pages.
    pub huge_pages: Option<bool>,
    /// Why the kernel does not report Unix sockets, if it does not.
    pub no_unix_diag: Option<String>,
    /// Why tenants' programs cannot be kept apart from each other, if they cannot.
    pub no_enclosure: Option<String>,
    /// Why the edge can have no root directory of its own, if it cannot.
    pub no_edge_root: Option<String>,
    pub kvm: bool,
    pub clock_synchronised: Option<bool>,
    pub entropy_ready: bool,
    pub user_namespaces: Option<u64>,
    /// Lowest port on which an unprivileged user may listen.
    pub first_free_port: Option<u64>,
    pub lowest_wanted_port: Option<u16>,
    pub edge_user: bool,
    pub back_end: CellMechanism,
    /// `/proc/pressure`.
    pub pressure: bool,
    /// Disks of tenants' homes, each once.
    pub disks: Vec<DiskFacts>,
    /// Whether a sandbox can be made with the rights of this command. `None` without root, when
    /// none is tried.
    pub sandbox: Option<Result<(), String>>,
    /// The running node's result of that, with its own rights. `None` if no node runs, or if it
    /// does not say.
    pub node_sandbox: Option<String>,
    /// The result of starting a machine. `None`: not tried.
    pub machines: Option<Result<MachineProbe, String>>,
    pub tenants: TenantFinding,
    pub cluster_store: StoreAccess,
    /// `None` if no directory of them is configured.
    pub certificates: Option<Result<certificates::CertificateScan, String>>,
    pub rule_files: usize,
    pub rule_troubles: Vec<String>,
}

/// The CRIU that the keeper would run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriuFacts {
    /// `None` if there is no usable one.
    pub path: Option<PathBuf>,
    /// Why this one, and why not others.
    pub reason: String,
}

/// One swap device or file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapFacts {
    pub name: String,
    pub bytes: u64,
}

/// The disk of a tenant's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFacts {
    /// Number of the file system: a partition, or something that is not a block device.
    pub number: (u32, u32),
    /// Number and name of the whole disk. `None` if it is not a block device.
    pub whole: Option<((u32, u32), String)>,
    /// A home on it.
    pub example: PathBuf,
}

/// The block device of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    pub major: u32,
    pub minor: u32,
    /// Its name in /sys, if it is a block device.
    pub name: Option<String>,
}

/// Facts from other sources than the machine.
#[derive(Debug, Default)]
pub struct FactSources {
    /// Known directories of tenants' files.
    pub homes: Vec<PathBuf>,
    pub tenants: TenantFinding,
    pub sandbox: Option<Result<(), String>>,
    pub node_sandbox: Option<String>,
    /// The result of starting a machine. `None`: no sandbox can be made for it.
    pub machines: Option<Result<MachineProbe, String>>,
}

/// Makes a sandbox as for an application, and returns its launcher if that works. `None` without
/// root. It must be called before any thread is started.
pub fn try_sandbox() -> (Option<Launcher>, Option<Result<(), String>>) {
    if !rustix::process::geteuid().is_root() {
        return (None, None);
    }
    let tried = Launcher::start().and_then(|launcher| {
        sandbox::try_sandbox(&launcher)?;
        Ok(launcher)
    });
    match tried {
        Ok(launcher) => (Some(launcher), Some(Ok(()))),
        Err(error) => (None, Some(Err(format!("{}: {}", error.code(), sandbox::explain(&error))))),
    }
}

pub fn gather(settings: &NodeSettings, asked: FactSources) -> NodeFacts {
    NodeFacts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        root: rustix::process::geteuid().is_root(),
        cgroups: CgroupFacts::gather(),
        openat2: openat2(),
        fd_passing: fd_passing().is_ok(),
        state_dir: settings.state_dir.clone(),
        device: device(&settings.state_dir),
        open_files_hard: rustix::process::getrlimit(Resource::Nofile).maximum,
        file_max: number("/proc/sys/fs/file-max"),
        pid_max: number("/proc/sys/kernel/pid_max"),
        threads_max: number("/proc/sys/kernel/threads-max"),
        somaxconn: number("/proc/sys/net/core/somaxconn"),
        php_version: first_line(&settings.keeper.php_cgi, "-v"),
        php_cgi: settings.keeper.php_cgi.clone(),
        criu: criu(settings),
        swaps: swaps(&std::fs::read_to_string("/proc/swaps").unwrap_or_default()),
        huge_pages: std::fs::read_to_string(HUGE_PAGES_SWITCH).ok().map(|text| are_huge_pages_always(&text)),
        no_unix_diag: nagaya_keeper::unix_diag().err(),
        no_enclosure: nagaya_keeper::try_enclosure(&settings.keeper.programs).err(),
        no_edge_root: try_edge_root().err(),
        kvm: rustix::fs::access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).is_ok(),
        clock_synchronised: inherit::clock_is_synchronised().ok(),
        entropy_ready: entropy_ready(),
        user_namespaces: user_namespaces(),
        first_free_port: number("/proc/sys/net/ipv4/ip_unprivileged_port_start"),
        lowest_wanted_port: settings
            .listen
            .iter()
            .map(|listen| listen.address.port())
            .filter(|port| *port > 0)
            .min(),
        edge_user: settings.identity.uid.is_some() || has_edge_user(settings),
        back_end: settings.keeper.back_end,
        pressure: Path::new("/proc/pressure/cpu").exists(),
        disks: disks(&asked.homes),
        sandbox: asked.sandbox,
        node_sandbox: asked.node_sandbox,
        machines: asked.machines,
        tenants: asked.tenants,
        cluster_store: StoreAccess::of_member(&settings.cluster_dir()),
        certificates: certificates(settings),
        rule_files: settings.edge.rules.len(),
        rule_troubles: rule_files::troubles(settings),
    }
}

fn certificates(settings: &NodeSettings) -> Option<Result<certificates::CertificateScan, String>> {
    let dir = settings.keeper.certificates.as_ref()?;
    let found = certificates::scan_directory(dir, certificates::unix_now());
    Some(found.map_err(|error| format!("{}: {error}", dir.display())))
}

fn has_edge_user(settings: &NodeSettings) -> bool {
    let name = settings.identity.user.as_deref().unwrap_or(crate::config::settings::EDGE_USER);
    matches!(nix::unistd::User::from_name(name), Ok(Some(_)))
}

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

pub fn openat2() -> bool {
    rustix::fs::openat2(
        rustix::fs::CWD,
        ".",
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH,
    )
    .is_ok()
}

/// Sends a descriptor over a pair of seqpacket sockets, as edge and keeper do.
fn fd_passing() -> rustix::io::Result<()> {
    let (one, other) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let sent = [one.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&sent));
    rustix::net::sendmsg(&one, &[IoSlice::new(b"x")], &mut control, SendFlags::empty())?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(&other, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if control.drain().next().is_some() { Ok(()) } else { Err(rustix::io::Errno::BADMSG) }
}

fn device(directory: &Path) -> Option<DeviceFacts> {
    let stat = directory.ancestors().find_map(|directory| rustix::fs::stat(directory).ok())?;
    let major = rustix::fs::major(stat.st_dev);
    let minor = rustix::fs::minor(stat.st_dev);
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok();
    let name = link.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    Some(DeviceFacts { major, minor, name })
}

fn disks(homes: &[PathBuf]) -> Vec<DiskFacts> {
    let mut found: Vec<DiskFacts> = Vec::new();
    for home in homes {
        let Some(device) = device(home) else { continue };
        let number = (device.major, device.minor);
        if found.iter().all(|disk| disk.number != number) {
            found.push(DiskFacts { number, whole: whole_disk(number), example: home.clone() });
        }
    }
    found
}

/// Returns the disk with this number, or the one whose partition has it.
fn whole_disk((major, minor): (u32, u32)) -> Option<((u32, u32), String)> {
    let mut dir = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    if dir.join("partition").exists() {
        dir.pop();
    }
    let text = std::fs::read_to_string(dir.join("dev")).ok()?;
    let (major, minor) = text.trim_end().split_once(':')?;
    let name = dir.file_name()?.to_string_lossy().into_owned();
    Some(((major.parse().ok()?, minor.parse().ok()?), name))
}

/// Returns the first line that a program prints, if it exists and answers in time.
fn first_line(program: &Path, argument: &str) -> Option<String> {
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let stdout = child.stdout.take()?;
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        // A text that is not UTF-8 is not a version.
        let _ = stdout.take(VERSION_LEN_MAX).read_to_string(&mut text);
        let _ = tell.send(text);
    });
    let text = told.recv_timeout(VERSION_TIMEOUT).ok();
    // It has either printed its text or taken too long.
    let _ = child.kill();
    let _ = child.wait();
    let line = text?.lines().next()?.trim().to_owned();
    (!line.is_empty()).then_some(line)
}

fn criu(settings: &NodeSettings) -> CriuFacts {
    let search = nagaya_keeper::image::find_criu(settings.keeper.instances.criu.as_deref());
    let reason = search.reason();
    CriuFacts { path: search.found.map(|criu| criu.path), reason }
}

/// Parses `/proc/swaps`: a heading, then name, kind, size in KiB and more in columns (proc(5)).
fn swaps(text: &str) -> Vec<SwapFacts> {
    let swap = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let name = fields.next()?.to_owned();
        Some(SwapFacts { name, bytes: fields.nth(1)?.parse::<u64>().ok()?.saturating_mul(1024) })
    };
    text.lines().skip(1).filter_map(swap).collect()
}

fn entropy_ready() -> bool {
    let mut byte = [0u8; 1];
    rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::NONBLOCK).is_ok()
}

fn user_namespaces() -> Option<u64> {
    // Debian's own switch, if the kernel has it. It concerns unprivileged users.
    let root = rustix::process::geteuid().is_root();
    if !root && number("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        return Some(0);
    }
    number("/proc/sys/user/max_user_namespaces")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_has_no_version() {
        assert_eq!(first_line(Path::new("/proc/nonexistent/php-cgi"), "-v"), None);
        assert_eq!(first_line(Path::new("/bin/echo"), "PHP 8"), Some("PHP 8".into()));
    }

    #[test]
    fn swaps_are_read_from_the_kernels_table() {
        let text = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                    /dev/zram0 partition\t1048572\t\t0\t\t100\n";
        assert_eq!(swaps(text), [SwapFacts { name: "/dev/zram0".into(), bytes: 1_048_572 * 1024 }]);
        assert_eq!(swaps(""), []);
    }

    #[test]
    fn a_descriptor_passes_on_this_machine() {
        fd_passing().unwrap();
    }
}

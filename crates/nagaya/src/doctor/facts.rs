//! Asking the machine. Nothing here judges.
//!
//! Not here: what the answers mean (`checks`).

use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use nagaya_keeper::sandbox::{self, Launcher};
use nagaya_keeper::{BackEnd, huge_pages};
use rustix::fs::{Access, Mode, OFlags, ResolveFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use rustix::process::Resource;

use super::cgroups::Cgroups;
use super::rule_files;
use super::tenants::Found;
use crate::certificates;
use crate::config::Settings;
use crate::inherit;
use crate::supervisor::{StoreAccess, try_edge_root};

/// How long a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of a version text is read, in bytes.
const VERSION_LEN_MAX: u64 = 4096;

/// Everything the checks judge.
#[derive(Debug, Default)]
pub struct Facts {
    pub kernel: String,
    pub root: bool,
    pub cgroups: Cgroups,
    pub openat2: bool,
    pub fd_passing: bool,
    pub state_dir: PathBuf,
    pub device: Option<Device>,
    pub open_files_hard: Option<u64>,
    pub file_max: Option<u64>,
    pub pid_max: Option<u64>,
    pub threads_max: Option<u64>,
    pub somaxconn: Option<u64>,
    pub php_cgi: PathBuf,
    pub php_version: Option<String>,
    pub criu: Criu,
    pub swaps: Vec<Swap>,
    /// Whether all programs get pages of 64 KiB. None: the kernel knows no such pages.
    pub huge_pages: Option<bool>,
    /// Why the kernel does not tell of Unix sockets, if it does not.
    pub no_unix_diag: Option<String>,
    /// Why tenants' programs cannot be kept apart from each other, if they cannot.
    pub no_enclosure: Option<String>,
    /// Why the edge can have no root directory of its own, if it cannot.
    pub no_edge_root: Option<String>,
    pub kvm: bool,
    pub clock_synchronised: Option<bool>,
    pub entropy_ready: bool,
    pub user_namespaces: Option<u64>,
    /// Lowest port a user without rights may listen on.
    pub first_free_port: Option<u64>,
    pub lowest_wanted_port: Option<u16>,
    pub edge_user: bool,
    pub back_end: BackEnd,
    /// `/proc/pressure`.
    pub pressure: bool,
    /// Where homes of tenants are, each disk once.
    pub disks: Vec<Disk>,
    /// Whether a sandbox can be made with the rights of this command. None: without root none is tried.
    pub sandbox: Option<Result<(), String>>,
    /// The running node's answer to that, with the rights it has. None: none runs, or it does not say.
    pub node_sandbox: Option<String>,
    pub tenants: Found,
    pub cluster_store: StoreAccess,
    /// None: no directory of them is configured.
    pub certificates: Option<Result<certificates::Found, String>>,
    pub rule_files: usize,
    pub rule_troubles: Vec<String>,
}

/// Which CRIU the keeper would run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Criu {
    /// None: none that it can use.
    pub path: Option<PathBuf>,
    /// Why this one, and why not others.
    pub reason: String,
}

/// One device or file that memory goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swap {
    pub name: String,
    pub bytes: u64,
}

/// What a tenant's files are on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Of the file system: a partition, or something that is no block device.
    pub number: (u32, u32),
    /// The disk that is, or is part of, and its name. None: no block device.
    pub whole: Option<((u32, u32), String)>,
    /// A home on it.
    pub example: PathBuf,
}

/// The block device under a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
    /// Its name under /sys, if it is a block device.
    pub name: Option<String>,
}

/// Answers of others than the machine.
#[derive(Debug, Default)]
pub struct Asked {
    /// Directories of tenants' files, as far as they are known.
    pub homes: Vec<PathBuf>,
    pub tenants: Found,
    pub sandbox: Option<Result<(), String>>,
    pub node_sandbox: Option<String>,
}

/// Makes a sandbox as an application's is made. None: without root there are none. Before anything has started a thread.
pub fn try_sandbox() -> Option<Result<(), String>> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let tried = Launcher::start().and_then(|launcher| sandbox::try_sandbox(&launcher));
    Some(tried.map_err(|error| format!("{}: {}", error.code(), sandbox::explain(&error))))
}

pub fn gather(settings: &Settings, asked: Asked) -> Facts {
    Facts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        root: rustix::process::geteuid().is_root(),
        cgroups: Cgroups::gather(),
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
        huge_pages: std::fs::read_to_string(huge_pages::SWITCH).ok().map(|text| huge_pages::is_always(&text)),
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
        tenants: asked.tenants,
        cluster_store: StoreAccess::of_member(&settings.cluster_dir()),
        certificates: certificates(settings),
        rule_files: settings.edge.rules.len(),
        rule_troubles: rule_files::troubles(settings),
    }
}

fn certificates(settings: &Settings) -> Option<Result<certificates::Found, String>> {
    let dir = settings.keeper.certificates.as_ref()?;
    let found = certificates::look(dir, certificates::unix_now());
    Some(found.map_err(|error| format!("{}: {error}", dir.display())))
}

fn has_edge_user(settings: &Settings) -> bool {
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

fn device(directory: &Path) -> Option<Device> {
    let stat = directory.ancestors().find_map(|directory| rustix::fs::stat(directory).ok())?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok();
    let name = link.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    Some(Device { major, minor, name })
}

fn disks(homes: &[PathBuf]) -> Vec<Disk> {
    let mut found: Vec<Disk> = Vec::new();
    for home in homes {
        let Some(device) = device(home) else { continue };
        let number = (device.major, device.minor);
        if found.iter().all(|disk| disk.number != number) {
            found.push(Disk { number, whole: whole_disk(number), example: home.clone() });
        }
    }
    found
}

/// The disk with this number, or the one whose partition has it.
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

/// The first line a program prints, if it is there and answers in time.
fn first_line(program: &Path, argument: &str) -> Option<String> {
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let stdout = child.stdout.take()?;
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        // What is not UTF-8 is no version.
        let _ = stdout.take(VERSION_LEN_MAX).read_to_string(&mut text);
        let _ = tell.send(text);
    });
    let text = told.recv_timeout(VERSION_TIMEOUT).ok();
    // It has either said what it had to say or taken too long.
    let _ = child.kill();
    let _ = child.wait();
    let line = text?.lines().next()?.trim().to_owned();
    (!line.is_empty()).then_some(line)
}

fn criu(settings: &Settings) -> Criu {
    let search = nagaya_keeper::image::find_criu(settings.keeper.instances.criu.as_deref());
    let reason = search.reason();
    Criu { path: search.found.map(|criu| criu.path), reason }
}

/// `/proc/swaps`: a heading, then name, kind, size in KiB and more in columns (proc(5)).
fn swaps(text: &str) -> Vec<Swap> {
    let swap = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let name = fields.next()?.to_owned();
        Some(Swap { name, bytes: fields.nth(1)?.parse::<u64>().ok()?.saturating_mul(1024) })
    };
    text.lines().skip(1).filter_map(swap).collect()
}

fn entropy_ready() -> bool {
    let mut byte = [0u8; 1];
    rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::NONBLOCK).is_ok()
}

fn user_namespaces() -> Option<u64> {
    // Debian's own switch, where the kernel has it. It is for those without rights.
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
        assert_eq!(swaps(text), [Swap { name: "/dev/zram0".into(), bytes: 1_048_572 * 1024 }]);
        assert_eq!(swaps(""), []);
    }

    #[test]
    fn a_descriptor_passes_on_this_machine() {
        fd_passing().unwrap();
    }
}

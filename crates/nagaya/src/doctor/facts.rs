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

use rustix::fs::{Access, Mode, OFlags, ResolveFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use rustix::process::Resource;

use crate::config::Settings;
use crate::inherit;

/// How long a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of a version text is read, in bytes.
const VERSION_LEN_MAX: u64 = 4096;

/// Everything the checks judge.
#[derive(Debug, Clone, Default)]
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
    pub criu_version: Option<String>,
    pub kvm: bool,
    pub clock_synchronised: Option<bool>,
    pub entropy_ready: bool,
    pub user_namespaces: Option<u64>,
    /// Lowest port a user without rights may listen on.
    pub first_free_port: Option<u64>,
    pub lowest_wanted_port: Option<u16>,
    pub edge_user: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Cgroups {
    pub v2_mount: Option<PathBuf>,
    pub v2_controllers: Vec<String>,
    pub v2_writable: bool,
    pub v1: Vec<V1Mount>,
}

/// One v1 hierarchy.
#[derive(Debug, Clone)]
pub struct V1Mount {
    pub controllers: Vec<String>,
    pub writable: bool,
}

/// The block device under a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
    /// Its name under /sys, if it is a block device.
    pub name: Option<String>,
}

pub fn gather(settings: &Settings) -> Facts {
    Facts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        root: rustix::process::geteuid().is_root(),
        cgroups: cgroups(),
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
        criu_version: first_line(Path::new("criu"), "--version"),
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
    }
}

fn has_edge_user(settings: &Settings) -> bool {
    let name = settings.identity.user.as_deref().unwrap_or(crate::config::settings::EDGE_USER);
    matches!(nix::unistd::User::from_name(name), Ok(Some(_)))
}

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

/// The hierarchies that are mounted, from /proc/self/mounts: device, place, type, options.
pub fn cgroups() -> Cgroups {
    parse_mounts(&std::fs::read_to_string("/proc/self/mounts").unwrap_or_default())
}

fn parse_mounts(mounts: &str) -> Cgroups {
    let mut found = Cgroups::default();
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let (Some(place), Some(kind), Some(options)) = (fields.nth(1), fields.next(), fields.next()) else {
            continue;
        };
        let writable = options.split(',').any(|option| option == "rw")
            && rustix::fs::access(place, Access::WRITE_OK).is_ok();
        match kind {
            "cgroup2" => {
                let controllers = std::fs::read_to_string(Path::new(place).join("cgroup.controllers"));
                found.v2_controllers =
                    controllers.unwrap_or_default().split_ascii_whitespace().map(str::to_owned).collect();
                found.v2_mount = Some(place.into());
                found.v2_writable = writable;
            }
            "cgroup" => {
                let known = |option: &&str| V1_CONTROLLERS.contains(option);
                let controllers: Vec<_> = options.split(',').filter(known).map(str::to_owned).collect();
                found.v1.push(V1Mount { controllers, writable });
            }
            _ => {}
        }
    }
    found
}

/// The v1 controllers nagaya has a use for; a mount's other options are not controllers, or not for it.
const V1_CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "blkio", "pids", "freezer", "memory"];

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

fn entropy_ready() -> bool {
    let mut byte = [0u8; 1];
    rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::NONBLOCK).is_ok()
}

fn user_namespaces() -> Option<u64> {
    // Debian's own switch, where the kernel has it.
    if number("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        return Some(0);
    }
    number("/proc/sys/user/max_user_namespaces")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_both_versions_are_told_apart() {
        let mounts = "cgroup2 /nonexistent/unified cgroup2 rw,nosuid 0 0\n\
                      cgroup /nonexistent/cpu cgroup rw,nosuid,cpu,cpuacct 0 0\n\
                      cgroup /nonexistent/systemd cgroup rw,xattr,name=systemd 0 0\n\
                      tmpfs /run tmpfs rw 0 0\n";
        let found = parse_mounts(mounts);
        assert_eq!(found.v2_mount.as_deref(), Some(Path::new("/nonexistent/unified")));
        assert!(!found.v2_writable);
        assert_eq!(found.v1[0].controllers, ["cpu", "cpuacct"]);
        assert!(found.v1[1].controllers.is_empty());
        assert_eq!(found.v1.len(), 2);
    }

    #[test]
    fn a_program_that_is_not_there_has_no_version() {
        assert_eq!(first_line(Path::new("/nonexistent/php-cgi"), "-v"), None);
        assert_eq!(first_line(Path::new("/bin/echo"), "PHP 8"), Some("PHP 8".into()));
    }

    #[test]
    fn a_descriptor_passes_on_this_machine() {
        fd_passing().unwrap();
    }
}

//! A test sandbox, made to find out whether one can be made here. It has every step of an
//! application's. They are its namespaces and root file system, binds with a tenant's rights, a
//! program, and its end.
//!
//! Not here: cells, which a sandbox can be without (`cells`), and images (`image::facts`).

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::{CellEntrance, Launcher, SandboxBind, SandboxError, SandboxProgram, SandboxSpec, UnixIdentity};

/// `nobody` and `nogroup`, who own nothing.
pub const NOBODY: UnixIdentity = UnixIdentity { uid: 65_534, gid: 65_534 };

/// Maximum time for a program that does nothing.
const END_TIMEOUT: Duration = Duration::from_secs(20);

const SHM_BYTES: u64 = 1 << 20;
const OPEN_FILES: u64 = 64;

/// Capabilities that nagaya's processes need (capabilities(7)), with their numbers in
/// `linux/capability.h`. The unit in `packaging` leaves nagaya these and no others.
pub const CAPABILITIES: [(&str, u32); 17] = [
    ("CAP_CHOWN", 0),
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_DAC_READ_SEARCH", 2),
    ("CAP_FOWNER", 3),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_SETPCAP", 8),
    ("CAP_NET_BIND_SERVICE", 10),
    ("CAP_NET_ADMIN", 12),
    ("CAP_IPC_LOCK", 14),
    ("CAP_SYS_CHROOT", 18),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_SYS_NICE", 23),
    ("CAP_SYS_RESOURCE", 24),
    ("CAP_MKNOD", 27),
];

/// Makes a sandbox, runs a program in it and ends it. It blocks, as all of the launcher's calls do.
pub fn try_sandbox(launcher: &Launcher) -> Result<(), SandboxError> {
    let sandbox = launcher.create_one(&spec())?;
    let program = SandboxProgram {
        argv: vec!["true".into()],
        env: vec![(OsString::from("PATH"), OsString::from("/usr/bin:/bin"))],
        directory: "/".into(),
        stdin: None,
        stdout: None,
        stderr: None,
        listener: None,
        pid: Some(super::ROOT_PID),
        open_files_max: OPEN_FILES,
        has_terminal: false,
    };
    let exit = sandbox.run(&program)?.wait(END_TIMEOUT).map_err(SandboxError::Ended)?;
    if exit.status == Some(0) {
        return Ok(());
    }
    let error = std::io::Error::other(format!("it ended with {exit:?}"));
    Err(SandboxError::Create { step: "run /usr/bin/true to its end".into(), error })
}

/// Explains why no application can run here, and how to fix it.
pub fn explain(error: &SandboxError) -> String {
    let missing = missing_capabilities(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    let how = match missing.as_slice() {
        [] => format!("`nagaya error {}` says what to look at", error.code()),
        missing => format!(
            "give nagaya {} (CapabilityBoundingSet= in its systemd unit; `packaging/nagaya.service` has them all)",
            missing.join(" ")
        ),
    };
    format!("{error}: {how}")
}

/// Returns the needed capabilities that this process can never have. `status` is its
/// `/proc/self/status`.
pub fn missing_capabilities(status: &str) -> Vec<&'static str> {
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    let Some(bounding) = bounding.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return Vec::new();
    };
    CAPABILITIES.iter().filter(|(_, bit)| bounding & (1 << bit) == 0).map(|(name, _)| *name).collect()
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        home: None,
        base_as_tenant: false,
        identity: NOBODY,
        hostname: "trial".into(),
        base: "/".into(),
        binds: vec![SandboxBind {
            source: "/usr".into(),
            target: "/srv/usr".into(),
            writable: false,
            as_tenant: true,
            is_optional: false,
        }],
        hide: vec![PathBuf::from("/var/cache")],
        tmp: None,
        run: None,
        shm_bytes_max: SHM_BYTES,
        host_network: false,
        entrance: CellEntrance::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        let status = |set: u64| format!("Name:\tx\nCapBnd:\t{set:016x}\nNoNewPrivs:\t0\n");
        assert_eq!(missing_capabilities(&status(u64::MAX)), Vec::<&str>::new());
        assert_eq!(missing_capabilities(&status(!(1 << 27 | 1 << 19))), ["CAP_SYS_PTRACE", "CAP_MKNOD"]);
        assert_eq!(missing_capabilities("Name:\tx\n"), Vec::<&str>::new());
    }

    #[test]
    fn the_shipped_unit_leaves_exactly_what_is_needed() {
        let unit = include_str!("../../../../packaging/nagaya.service");
        let set = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
        let mut left: Vec<&str> = set.split(' ').collect();
        let mut needed: Vec<&str> = CAPABILITIES.iter().map(|(name, _)| *name).collect();
        left.sort_unstable();
        needed.sort_unstable();
        assert_eq!(left, needed);
    }
}

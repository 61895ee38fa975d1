//! What the facts mean for instances of applications: which steps of rest this machine has, and what a sandbox is made of.
//!
//! Pure. Not here: the facts (`facts`, `cgroups`), the rest of the machine (`checks`).

use nagaya_base::units::format_bytes;

use super::cgroups::{Hierarchy, Version};
use super::checks::{Row, State};
use super::facts::Facts;

/// Each sandbox has one; more than a node can host.
const USER_NAMESPACES_WANTED: u64 = 4_096;

pub static ROWS: &[Row] = &[
    Row {
        name: "sandbox",
        why: "each application runs in one; this is one that was made, with a program that ran in it",
        how: "run `nagaya doctor` as root; where it fails as root, the step that failed and its code say what is missing",
        judge: |facts| match &facts.sandbox {
            Some(Ok(())) => (State::Ok, "made".into()),
            Some(Err(why)) => (State::Off, why.clone()),
            None => (State::Off, "not tried without root".into()),
        },
    },
    Row {
        name: "node-sandbox",
        why: "the running node makes sandboxes with the rights that its unit or container leaves it, not with root's here",
        how: "start nagaya by packaging/nagaya.service, or give it the capabilities that are named",
        judge: |facts| match facts.node_sandbox.as_deref() {
            Some("ok") => (State::Ok, "made".into()),
            Some(why) => (State::Off, why.to_owned()),
            None => (State::Ok, "no node that could be asked".into()),
        },
    },
    Row {
        name: "criu",
        why: "applications can rest as images on disk, and come back in milliseconds instead of being started anew",
        how: "install CRIU 4.1 or newer (Debian 13 has it), or name one as criu in [instances] (NGY0334)",
        judge: criu,
    },
    Row {
        name: "user-namespaces",
        why: "each application has one, so that nothing in its sandbox has rights outside of it",
        how: "sysctl -w user.max_user_namespaces=65536 (and kernel.unprivileged_userns_clone=1 on Debian, without root)",
        judge: user_namespaces,
    },
    Row {
        name: "freezer",
        why: "an application that rests frozen uses no CPU time at all",
        how: "mount cgroup2 anywhere (it needs no controllers; Linux 5.2), or the v1 hierarchy of freezer",
        judge: freezer,
    },
    Row {
        name: "swap",
        why: "memory of an application that rests reclaimed goes there; without it, it stays until the application has an image",
        how: "compressed swap costs no disk: modprobe zram, and zramctl, mkswap and swapon it (package zram-tools does it)",
        judge: swap,
    },
    Row {
        name: "unix-diag",
        why: "a rule's limits can hold for one request to an application that listens on a Unix socket",
        how: "modprobe unix_diag, or a kernel with CONFIG_UNIX_DIAG (NGY0351)",
        judge: |facts| match &facts.no_unix_diag {
            None => (State::Ok, "yes".into()),
            Some(why) => (State::Off, why.clone()),
        },
    },
    Row {
        name: "huge-pages",
        why: "in pages of 64 KiB the memory of some applications is filled faster when they come back from their images",
        how: "huge_pages = \"64KiB\" in [instances]; it holds for all programs of the machine and needs Linux 6.8",
        judge: huge_pages,
    },
];

fn criu(facts: &Facts) -> (State, String) {
    match &facts.criu.path {
        Some(path) => (State::Ok, format!("{}: {}", path.display(), facts.criu.reason)),
        None => (State::Off, facts.criu.reason.clone()),
    }
}

fn user_namespaces(facts: &Facts) -> (State, String) {
    match facts.user_namespaces {
        Some(0) | None => (State::Off, "0".into()),
        Some(max) if max < USER_NAMESPACES_WANTED => {
            (State::Warn, format!("{max}, {USER_NAMESPACES_WANTED} wanted"))
        }
        Some(max) => (State::Ok, max.to_string()),
    }
}

/// Cgroup v2 freezes without any controller.
fn freezer(facts: &Facts) -> (State, String) {
    let usable = |version| facts.cgroups.of(version).filter(|hierarchy| hierarchy.is_usable());
    let v1 = usable(Version::V1).find(|hierarchy| hierarchy.has("freezer"));
    let v2 = usable(Version::V2).next();
    let at = |hierarchy: &Hierarchy, how: &str| (State::Ok, format!("{how} ({})", hierarchy.base.display()));
    match (v2, v1) {
        (Some(v2), _) => at(v2, "v2"),
        (None, Some(v1)) => at(v1, "v1"),
        (None, None) => (State::Off, "no usable hierarchy".into()),
    }
}

fn swap(facts: &Facts) -> (State, String) {
    match &facts.swaps[..] {
        [] => (State::Warn, "none".into()),
        swaps => {
            let shown = swaps.iter().map(|swap| {
                let compressed = if swap.name.contains("zram") { ", compressed" } else { "" };
                format!("{} ({}{compressed})", swap.name, format_bytes(swap.bytes))
            });
            (State::Ok, shown.collect::<Vec<_>>().join(", "))
        }
    }
}

/// No advice: some applications gain by them, others lose.
fn huge_pages(facts: &Facts) -> (State, String) {
    match facts.huge_pages {
        Some(true) => (State::Ok, "64 KiB".into()),
        Some(false) => (State::Ok, "4 KiB".into()),
        None => (State::Ok, "4 KiB: this kernel has none of 64 KiB for all programs".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cgroups::hierarchy;
    use super::super::facts::{Criu, Swap};
    use super::*;

    #[test]
    fn which_criu_runs_and_why_is_said() {
        let with = |path: Option<&str>, reason: &str| Facts {
            criu: Criu { path: path.map(Into::into), reason: reason.into() },
            ..Facts::default()
        };
        let shown = (State::Ok, "/opt/criu: the configured one, version 4.2".to_owned());
        assert_eq!(criu(&with(Some("/opt/criu"), "the configured one, version 4.2")), shown);
        assert_eq!(criu(&with(None, "none is installed")), (State::Off, "none is installed".into()));
    }

    #[test]
    fn either_freezer_is_enough_and_v2_needs_no_controller() {
        let mut facts = Facts::default();
        assert_eq!(freezer(&facts).0, State::Off);
        facts.cgroups.hierarchies = vec![hierarchy(Version::V1, &["cpu"])];
        assert_eq!(freezer(&facts).0, State::Off);
        facts.cgroups.hierarchies.push(hierarchy(Version::V1, &["freezer"]));
        assert_eq!(freezer(&facts), (State::Ok, "v1 (/sys/fs/cgroup/x)".into()));
        facts.cgroups.hierarchies.push(hierarchy(Version::V2, &[]));
        assert_eq!(freezer(&facts), (State::Ok, "v2 (/sys/fs/cgroup/x)".into()));
    }

    #[test]
    fn a_kernel_without_unix_diag_is_told() {
        let row = ROWS.iter().find(|row| row.name == "unix-diag").expect("there is such a row");
        let why = "the kernel has no unix_diag".to_owned();
        let facts = Facts { no_unix_diag: Some(why.clone()), ..Facts::default() };
        assert_eq!((row.judge)(&facts), (State::Off, why));
        assert_eq!((row.judge)(&Facts::default()).0, State::Ok);
    }

    #[test]
    fn compressed_swap_is_told_from_a_disk() {
        let swap_of = |name: &str| Swap { name: name.into(), bytes: 2 << 30 };
        let facts = Facts { swaps: vec![swap_of("/dev/zram0"), swap_of("/swap")], ..Facts::default() };
        let shown = "/dev/zram0 (2GiB, compressed), /swap (2GiB)";
        assert_eq!(swap(&facts), (State::Ok, shown.into()));
        assert_eq!(swap(&Facts::default()).0, State::Warn);
    }
}

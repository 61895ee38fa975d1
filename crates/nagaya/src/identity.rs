//! The users of the processes, and the resulting protections on this machine.
//!
//! Not here: taking the rights (`supervisor::rights`), advice to the operator about a machine
//! (`doctor`).

use nix::unistd::{Uid, User};
use serde::Serialize;

use crate::config::NodeSettings;
use crate::config::settings::{EDGE_UID_FALLBACK, EDGE_USER};

/// The edge's uid and gid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIdentity {
    pub uid: u32,
    pub gid: u32,
    /// The configuration does not name it, and no user `nagaya` exists: this is the default number.
    pub fallback: bool,
}

/// Returns the user whose rights the edge takes. `None` without root: then all processes keep the
/// user that started them.
pub fn of_edge(settings: &NodeSettings) -> Option<ProcessIdentity> {
    if !Uid::effective().is_root() {
        return None;
    }
    if let Some(uid) = settings.identity.uid {
        return Some(ProcessIdentity { uid, gid: uid, fallback: false });
    }
    let name = settings.identity.user.as_deref().unwrap_or(EDGE_USER);
    // An error here looks like an absent user; the configuration's check has reported it if it was
    // configured.
    let user = User::from_name(name).ok().flatten().filter(|user| !user.uid.is_root());
    Some(match user {
        Some(user) => ProcessIdentity { uid: user.uid.as_raw(), gid: user.gid.as_raw(), fallback: false },
        None => ProcessIdentity { uid: EDGE_UID_FALLBACK, gid: EDGE_UID_FALLBACK, fallback: true },
    })
}

/// One protection of tenants, and whether it is in effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MissingProtection {
    pub name: &'static str,
    pub on: bool,
    /// Its effect, or the meaning of its absence.
    pub why: &'static str,
    /// How to enable it. Empty while it is on.
    pub how: &'static str,
}

/// Facts that decide about the protections.
#[derive(Debug, Clone, Copy)]
pub struct KernelFacts {
    pub root: bool,
    /// A cgroup hierarchy in which the keeper can make groups.
    pub cgroup: bool,
    /// Kernel 5.6 or newer.
    pub openat2: bool,
    /// The edge has a root directory of its own.
    pub edge_root: bool,
}

/// The keeper knows about this one, once it has tried.
const PROGRAMS_APART: &str = "programs-apart";

/// Adds the keeper's result: why programs are not kept apart, if they are not.
pub fn with_keepers(mut all: Vec<MissingProtection>, off: Option<&str>) -> Vec<MissingProtection> {
    if off.is_some()
        && let Some(row) = all.iter_mut().find(|row| row.name == PROGRAMS_APART)
    {
        let none = protections(KernelFacts { root: false, cgroup: false, openat2: false, edge_root: false });
        *row = none.into_iter().find(|row| row.name == PROGRAMS_APART).expect("it is among all");
    }
    all
}

/// Returns all protections, on or off. Pure.
pub fn protections(facts: KernelFacts) -> Vec<MissingProtection> {
    let row = |name, on, why_on, why_off, how| MissingProtection {
        name,
        on,
        why: if on { why_on } else { why_off },
        how: if on { "" } else { how },
    };
    vec![
        row(
            "tenant-uids",
            facts.root,
            "each tenant's programs run under its own uid",
            "programs of all tenants run under one uid and can read each other's files",
            "start nagaya as root",
        ),
        row(
            "edge-uid",
            facts.root,
            "the process that parses requests has a uid of its own and no capabilities",
            "the process that parses requests has the rights of the user that started nagaya",
            "start nagaya as root",
        ),
        row(
            "edge-files",
            facts.edge_root,
            "the process that parses requests sees nothing of the file system but what it opens itself",
            "the process that parses requests can open each file that its user may read",
            "start nagaya as root; `nagaya error NGY0518` says what else it needs",
        ),
        row("no-new-privileges", true, "the process that parses requests can never gain rights", "", ""),
        row(
            "cgroup-fence",
            facts.cgroup,
            "a program ends together with every process it started",
            "a program that leaves its process group outlives its request",
            "start nagaya as root on a machine with cgroups; `nagaya doctor` says what is missing",
        ),
        row(
            PROGRAMS_APART,
            facts.root,
            "each tenant's CGI programs and PHP workers have a network, /tmp and /proc of their own",
            "CGI programs and PHP workers of all tenants share the node's network, /tmp and /proc",
            "start nagaya as root; `nagaya error NGY0357` says what else it needs",
        ),
        row(
            "openat2",
            facts.openat2,
            "a link in a document root cannot lead out of it",
            "document roots cannot be kept apart, and files are not served",
            "use Linux 5.6 or newer",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_protections_say_what_they_mean_and_how_to_get_them() {
        let all = protections(KernelFacts { root: true, cgroup: true, openat2: true, edge_root: true });
        assert!(all.iter().all(|row| row.on && row.how.is_empty()));
        let none = protections(KernelFacts { root: false, cgroup: false, openat2: false, edge_root: false });
        let off: Vec<_> = none.iter().filter(|row| !row.on).map(|row| row.name).collect();
        assert_eq!(
            off,
            ["tenant-uids", "edge-uid", "edge-files", "cgroup-fence", "programs-apart", "openat2"]
        );
        assert!(none.iter().filter(|row| !row.on).all(|row| !row.how.is_empty() && !row.why.is_empty()));
        assert_eq!(with_keepers(all.clone(), None), all);
        let refused = with_keepers(all, Some("Operation not permitted"));
        let off: Vec<_> = refused.iter().filter(|row| !row.on).map(|row| row.name).collect();
        assert_eq!(off, ["programs-apart"]);
    }
}

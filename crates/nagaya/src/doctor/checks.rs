//! Judges each fact for a node: fine, off, or a limit that is near. One row per check; pure.
//!
//! Not here: the facts (`facts`), printing (`cli::doctor`).

use nagaya_keeper::version;
use serde::Serialize;

use super::cgroups::CgroupVersion;
use super::facts::NodeFacts;
use super::tenants::TenantFinding;
use super::{cells, instances};
use crate::certificates;
use crate::supervisor::StoreAccess;

/// Open files that a node with many connections needs: two for each of 100,000 requests, and room
/// for files.
const OPEN_FILES_WANTED: u64 = 262_144;
/// Processes and threads of all tenants together.
const PIDS_WANTED: u64 = 131_072;
/// Connections that the kernel holds while the edge restarts.
const SOMAXCONN_WANTED: u64 = 4_096;

/// Certificates in one row that end soon, or are invalid.
const TROUBLES_SHOWN: usize = 5;

/// Controllers of cgroup v2 for limits and accounting.
const V2_CONTROLLERS: [&str; 4] = ["cpu", "io", "memory", "pids"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckState {
    Ok,
    /// It is missing, and its users do not work.
    Off,
    /// It works, but not as well as it could.
    Warn,
}

/// One judged fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    pub name: &'static str,
    pub state: CheckState,
    pub value: String,
    /// Why it matters.
    pub why: &'static str,
    /// The remedy. Empty if it is fine.
    pub how: &'static str,
}

pub struct CheckRow {
    pub name: &'static str,
    pub why: &'static str,
    pub how: &'static str,
    pub judge: fn(&NodeFacts) -> (CheckState, String),
}

/// Judges everything, in the order of an operator's questions.
pub fn checks(facts: &NodeFacts) -> Vec<DoctorCheck> {
    ROWS.iter()
        .chain(instances::ROWS)
        .chain(cells::ROWS)
        .map(|row| {
            let (state, value) = (row.judge)(facts);
            DoctorCheck {
                name: row.name,
                state,
                value,
                why: row.why,
                how: if state == CheckState::Ok { "" } else { row.how },
            }
        })
        .collect()
}

static ROWS: &[CheckRow] = &[
    CheckRow {
        name: "kernel",
        why: "openat2 needs 5.6, ending a cgroup at once 5.14",
        how: "install a newer kernel",
        judge: |facts| {
            let state = match version::of(&facts.kernel) {
                Some(version) if version >= (5, 14) => CheckState::Ok,
                Some(version) if version >= (5, 6) => CheckState::Warn,
                _ => CheckState::Off,
            };
            (state, facts.kernel.clone())
        },
    },
    CheckRow {
        name: "root",
        why: "only root can give each tenant its own uid, and the edge one without rights",
        how: "start nagaya as root; it gives up what it does not need",
        judge: |facts| (present(facts.root), yes_no(facts.root)),
    },
    CheckRow {
        name: "edge-user",
        why: "the process that parses requests runs under it",
        how: "useradd --system --no-create-home --shell /usr/sbin/nologin nagaya",
        judge: |facts| {
            (if facts.edge_user { CheckState::Ok } else { CheckState::Warn }, yes_no(facts.edge_user))
        },
    },
    CheckRow {
        name: "cgroup-v2",
        why: "limits and accounting per tenant and request; ends a program with all it started",
        how: "mount it (mount -t cgroup2 none /sys/fs/cgroup), and boot without systemd.unified_cgroup_hierarchy=0; \
              v1 serves too",
        judge: cgroup_v2,
    },
    CheckRow {
        name: "cgroup-v1",
        why: "the same where v2 has no controllers",
        how: "not needed where cgroup-v2 is ok; otherwise mount the cpu, cpuacct, blkio, pids, freezer and memory \
              hierarchies",
        judge: cgroup_v1,
    },
    CheckRow {
        name: "openat2",
        why: "a link in a document root must not lead out of it",
        how: "use Linux 5.6 or newer; in a container, let its seccomp filter allow openat2",
        judge: |facts| (present(facts.openat2), yes_no(facts.openat2)),
    },
    CheckRow {
        name: "programs-apart",
        why: "CGI and PHP programs of one tenant must not reach another's ports, processes and files in /tmp",
        how: "start nagaya as root; `nagaya error NGY0357` says what else it needs",
        judge: |facts| match &facts.no_enclosure {
            None => (CheckState::Ok, "yes".into()),
            Some(why) => (CheckState::Off, why.clone()),
        },
    },
    CheckRow {
        name: "edge-files",
        why: "a fault in the process that parses requests must not open files of the node",
        how: "start nagaya as root; `nagaya error NGY0518` says what else it needs",
        judge: |facts| match &facts.no_edge_root {
            None => (CheckState::Ok, "yes".into()),
            Some(why) => (CheckState::Off, why.clone()),
        },
    },
    CheckRow {
        name: "fd-passing",
        why: "the keeper hands opened files and sockets to the edge over a seqpacket socket",
        how: "let the security module or container allow Unix sockets",
        judge: |facts| (present(facts.fd_passing), yes_no(facts.fd_passing)),
    },
    CheckRow {
        name: "state-device",
        why: "limits of reading and writing are set per block device",
        how: "put state_dir on a file system of a block device (not tmpfs, overlay or NFS)",
        judge: device,
    },
    CheckRow {
        name: "open-files",
        why: "each connection and each open file is one; beyond the limit connections are refused",
        how: "LimitNOFILE=1048576 in the unit, or ulimit -Hn 1048576 before the start",
        judge: |facts| match facts.open_files_hard {
            None => (CheckState::Ok, "unlimited".into()),
            limit => at_least(limit, OPEN_FILES_WANTED),
        },
    },
    CheckRow {
        name: "file-max",
        why: "open files of the whole machine",
        how: "sysctl -w fs.file-max=2097152",
        judge: |facts| at_least(facts.file_max, OPEN_FILES_WANTED),
    },
    CheckRow {
        name: "pid-max",
        why: "each program of each tenant is a process",
        how: "sysctl -w kernel.pid_max=4194304",
        judge: |facts| at_least(facts.pid_max, PIDS_WANTED),
    },
    CheckRow {
        name: "threads-max",
        why: "processes and threads of the whole machine",
        how: "sysctl -w kernel.threads-max=262144, or more memory",
        judge: |facts| at_least(facts.threads_max, PIDS_WANTED),
    },
    CheckRow {
        name: "somaxconn",
        why: "connections held per socket while the edge is restarted",
        how: "sysctl -w net.core.somaxconn=16384",
        judge: |facts| at_least(facts.somaxconn, SOMAXCONN_WANTED),
    },
    CheckRow {
        name: "low-ports",
        why: "without root, ports below the first free one cannot be listened on",
        how: "start as root, or sysctl -w net.ipv4.ip_unprivileged_port_start=80, or listen on ports from 1024",
        judge: ports,
    },
    CheckRow {
        name: "php-cgi",
        why: "sites of kind php run in it",
        how: "apt install php-cgi, or set php_cgi in [keeper]",
        judge: |facts| match &facts.php_version {
            Some(version) => (CheckState::Ok, version.clone()),
            None => (CheckState::Off, format!("{} does not run", facts.php_cgi.display())),
        },
    },
    CheckRow {
        name: "tenants",
        why: "programs of one tenant must not reach files of another tenant or of the system",
        how: "do what each line says; add intended ids of the system to system_users and system_groups of [tenants]",
        judge: |facts| match &facts.tenants {
            TenantFinding { warnings, looked_at, .. } if warnings.is_empty() => {
                (CheckState::Ok, format!("{looked_at} looked at"))
            }
            TenantFinding { warnings, more: 0, .. } => (CheckState::Warn, warnings.join("; ")),
            TenantFinding { warnings, more, .. } => {
                (CheckState::Warn, format!("{}; and {more} more", warnings.join("; ")))
            }
        },
    },
    CheckRow {
        name: "kvm",
        why: "sites with their own kernel run at full speed",
        how: "load kvm_intel or kvm_amd, or let the hypervisor nest",
        judge: |facts| (present(facts.kvm), yes_no(facts.kvm)),
    },
    CheckRow {
        name: "clock",
        why: "certificates, logs and promised times depend on it",
        how: "apt install systemd-timesyncd or chrony",
        judge: |facts| match facts.clock_synchronised {
            Some(true) => (CheckState::Ok, "synchronised".into()),
            Some(false) => (CheckState::Warn, "not synchronised".into()),
            None => (CheckState::Warn, "unknown".into()),
        },
    },
    CheckRow {
        name: "certificates",
        why: "a browser shows a warning in place of a site whose certificate has ended",
        how: "renew them, and check that the program that renews them runs (nagaya error NGY0515)",
        judge: |facts| match &facts.certificates {
            None => (CheckState::Ok, "no directory of them is configured".into()),
            Some(Err(why)) => (CheckState::Warn, format!("unknown: {why}")),
            Some(Ok(found)) => judge_certificates(found),
        },
    },
    CheckRow {
        name: "entropy",
        why: "TLS keys and request ids are random",
        how: "let the machine collect some; a virtual machine needs virtio-rng",
        judge: |facts| (present(facts.entropy_ready), yes_no(facts.entropy_ready)),
    },
    CheckRow {
        name: "cluster-store",
        why: "everybody who reaches etcd can stop the cluster, and programs of tenants reach what this machine reaches",
        how: "give etcd TLS with client certificates, then nagaya cluster store --etcd https://... (nagaya \
              error NGY0239); root can check this",
        judge: |facts| match &facts.cluster_store {
            StoreAccess::None => (CheckState::Ok, "in no cluster".into()),
            StoreAccess::Safe => (CheckState::Ok, "encrypted, with a login".into()),
            StoreAccess::Weak(why) => (CheckState::Warn, format!("INSECURE: {why}")),
            StoreAccess::Unknown(why) => (CheckState::Warn, format!("unknown: {why}")),
        },
    },
];

fn judge_certificates(found: &certificates::CertificateScan) -> (CheckState, String) {
    let now = certificates::unix_now();
    let broken = found.broken.iter().cloned();
    let troubles: Vec<String> = found.ending().map(|one| one.describe(now)).chain(broken).collect();
    match troubles.len() {
        0 => (CheckState::Ok, format!("{} read, none ends within 30 days", found.certificates.len())),
        count if count > TROUBLES_SHOWN => {
            let first = troubles[..TROUBLES_SHOWN].join("; ");
            (CheckState::Warn, format!("{first}; and {} more", count - TROUBLES_SHOWN))
        }
        _ => (CheckState::Warn, troubles.join("; ")),
    }
}

fn present(there: bool) -> CheckState {
    if there { CheckState::Ok } else { CheckState::Off }
}

fn yes_no(there: bool) -> String {
    if there { "yes" } else { "no" }.into()
}

fn at_least(value: Option<u64>, wanted: u64) -> (CheckState, String) {
    match value {
        Some(value) if value >= wanted => (CheckState::Ok, value.to_string()),
        Some(value) => (CheckState::Warn, format!("{value}, {wanted} wanted")),
        None => (CheckState::Warn, "unknown".into()),
    }
}

fn cgroup_v2(facts: &NodeFacts) -> (CheckState, String) {
    let Some(v2) = facts.cgroups.of(CgroupVersion::V2).next() else {
        return (CheckState::Off, "not mounted".into());
    };
    let missing: Vec<_> = V2_CONTROLLERS.into_iter().filter(|name| !v2.has(name)).collect();
    let base = v2.base.display();
    match () {
        () if v2.controllers.is_empty() => (CheckState::Off, format!("{base}: no controllers")),
        () if !v2.is_usable() => (CheckState::Off, format!("{base}: not writable")),
        () if missing.len() == V2_CONTROLLERS.len() => (
            CheckState::Off,
            format!("none of {}; they are in use by v1, or not delegated", V2_CONTROLLERS.join(" ")),
        ),
        () if missing.is_empty() => (CheckState::Ok, v2.controllers.join(" ")),
        () => (CheckState::Warn, format!("without {}", missing.join(" "))),
    }
}

fn cgroup_v1(facts: &NodeFacts) -> (CheckState, String) {
    let usable: Vec<_> = facts
        .cgroups
        .of(CgroupVersion::V1)
        .filter(|mount| mount.is_usable())
        .flat_map(|mount| mount.controllers.clone())
        .collect();
    if usable.is_empty() {
        // With complete v2, v1 would add nothing.
        let state = if cgroup_v2(facts).0 == CheckState::Ok { CheckState::Ok } else { CheckState::Off };
        return (state, "none usable".into());
    }
    let wanted = ["cpu", "cpuacct", "blkio", "pids", "freezer", "memory"];
    let all = wanted.iter().all(|name| usable.iter().any(|has| has == name));
    (if all { CheckState::Ok } else { CheckState::Warn }, usable.join(" "))
}

fn device(facts: &NodeFacts) -> (CheckState, String) {
    let directory = facts.state_dir.display();
    match &facts.device {
        Some(device) => {
            let number = format!("{}:{}", device.major, device.minor);
            match &device.name {
                Some(name) => (CheckState::Ok, format!("{number} ({name}), {directory}")),
                None => (CheckState::Warn, format!("{number} is no block device, {directory}")),
            }
        }
        None => (CheckState::Warn, format!("unknown, {directory}")),
    }
}

fn ports(facts: &NodeFacts) -> (CheckState, String) {
    let first = facts.first_free_port.unwrap_or(1024);
    match facts.lowest_wanted_port {
        Some(port) if !facts.root && u64::from(port) < first => {
            (CheckState::Off, format!("port {port} is configured, the first free one is {first}"))
        }
        _ if facts.root => (CheckState::Ok, "all".into()),
        _ => (CheckState::Ok, format!("from {first}")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::doctor::cgroups::CgroupHierarchy;

    fn state(facts: &NodeFacts, name: &str) -> (CheckState, String) {
        let check = checks(facts).into_iter().find(|check| check.name == name).expect("the row exists");
        (check.state, check.value)
    }

    #[test]
    fn whatever_is_not_fine_says_what_to_do() {
        let all = checks(&NodeFacts::default());
        assert!(all.iter().all(|check| check.state != CheckState::Ok || check.how.is_empty()));
        assert!(all.iter().filter(|check| check.state != CheckState::Ok).all(|check| !check.how.is_empty()));
        assert!(all.iter().all(|check| !check.why.is_empty()));
        assert!(all.iter().filter(|check| check.state == CheckState::Off).count() >= 6, "{all:?}");
    }

    #[test]
    fn a_check_is_json_with_five_texts() {
        let json = serde_json::to_value(&checks(&NodeFacts::default())[0]).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["how", "name", "state", "value", "why"]);
        assert_eq!(json["state"], "off");
        assert!(json.as_object().unwrap().values().all(serde_json::Value::is_string));
    }

    #[test]
    fn store_that_others_reach_is_not_fine() {
        let judged =
            |cluster_store| state(&NodeFacts { cluster_store, ..NodeFacts::default() }, "cluster-store");
        assert_eq!(judged(StoreAccess::Safe).0, CheckState::Ok);
        assert_eq!(judged(StoreAccess::None).0, CheckState::Ok);
        let weak = judged(StoreAccess::Weak("http://a is in clear text".into()));
        assert_eq!(weak, (CheckState::Warn, "INSECURE: http://a is in clear text".into()));
        assert_eq!(judged(StoreAccess::Unknown("no right".into())).0, CheckState::Warn);
    }

    #[test]
    fn a_kernels_version_is_compared_as_numbers() {
        for (kernel, wanted) in [
            ("6.18.2-amd64", CheckState::Ok),
            ("5.14", CheckState::Ok),
            ("5.10.0", CheckState::Warn),
            ("5", CheckState::Off),
        ] {
            let facts = NodeFacts { kernel: kernel.into(), ..NodeFacts::default() };
            assert_eq!(state(&facts, "kernel").0, wanted, "{kernel}");
        }
    }

    #[test]
    fn either_cgroup_version_in_full_is_enough() {
        let mounted = |version, names: &[&str]| CgroupHierarchy {
            version,
            controllers: names.iter().map(|name| (*name).into()).collect(),
            withheld: Vec::new(),
            base: "/sys/fs/cgroup".into(),
            read_only: false,
            writable: true,
            favors_moves: false,
            crowded: false,
            files: BTreeSet::new(),
        };
        let v1 = [&["cpu", "cpuacct"][..], &["blkio"], &["pids"], &["freezer"], &["memory"]];
        let mut facts = NodeFacts::default();
        facts.cgroups.hierarchies = v1.map(|names| mounted(CgroupVersion::V1, names)).into();
        assert_eq!(state(&facts, "cgroup-v1").0, CheckState::Ok);
        facts.cgroups.hierarchies.pop();
        assert_eq!(state(&facts, "cgroup-v1").0, CheckState::Warn);
        facts.cgroups.hierarchies = vec![mounted(CgroupVersion::V2, &V2_CONTROLLERS)];
        assert_eq!(
            (state(&facts, "cgroup-v2").0, state(&facts, "cgroup-v1").0),
            (CheckState::Ok, CheckState::Ok)
        );
        facts.cgroups.hierarchies[0].controllers.clear();
        assert_eq!(state(&facts, "cgroup-v2").0, CheckState::Off);
    }

    #[test]
    fn ports_below_the_first_free_one_need_root() {
        let mut facts =
            NodeFacts { lowest_wanted_port: Some(80), first_free_port: Some(1024), ..NodeFacts::default() };
        assert_eq!(state(&facts, "low-ports").0, CheckState::Off);
        facts.root = true;
        assert_eq!(state(&facts, "low-ports").0, CheckState::Ok);
        facts =
            NodeFacts { lowest_wanted_port: Some(8080), first_free_port: Some(1024), ..NodeFacts::default() };
        assert_eq!(state(&facts, "low-ports").0, CheckState::Ok);
    }
}

//! What each fact means for a node: fine, off, or a wall that is near. One row per check; pure.
//!
//! Not here: the facts (`facts`), printing (`cli::doctor`).

use nagaya_keeper::version;
use serde::Serialize;

use super::cgroups::Version;
use super::facts::Facts;
use super::tenants::Found;
use super::{cells, instances};
use crate::certificates;
use crate::supervisor::StoreAccess;

/// Open files a node with many connections needs: two for each of 100,000 requests, and room for files.
const OPEN_FILES_WANTED: u64 = 262_144;
/// Processes and threads of all tenants together.
const PIDS_WANTED: u64 = 131_072;
/// Connections the kernel holds while the edge restarts.
const SOMAXCONN_WANTED: u64 = 4_096;

/// Certificates that end soon, or are none, in one row.
const TROUBLES_SHOWN: usize = 5;

/// What limits and accounting need in cgroup v2.
const V2_CONTROLLERS: [&str; 4] = ["cpu", "io", "memory", "pids"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// It is not there, and what needs it does not work.
    Off,
    /// It works, and less well than it could.
    Warn,
}

/// One judged fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub state: State,
    pub value: String,
    /// Why it matters.
    pub why: &'static str,
    /// What to do. Empty if it is fine.
    pub how: &'static str,
}

pub struct Row {
    pub name: &'static str,
    pub why: &'static str,
    pub how: &'static str,
    pub judge: fn(&Facts) -> (State, String),
}

/// Judges everything, in the order in which an operator would ask.
pub fn checks(facts: &Facts) -> Vec<Check> {
    ROWS.iter()
        .chain(instances::ROWS)
        .chain(cells::ROWS)
        .map(|row| {
            let (state, value) = (row.judge)(facts);
            Check {
                name: row.name,
                state,
                value,
                why: row.why,
                how: if state == State::Ok { "" } else { row.how },
            }
        })
        .collect()
}

static ROWS: &[Row] = &[
    Row {
        name: "kernel",
        why: "openat2 needs 5.6, ending a cgroup at once 5.14",
        how: "install a newer kernel",
        judge: |facts| {
            let state = match version::of(&facts.kernel) {
                Some(version) if version >= (5, 14) => State::Ok,
                Some(version) if version >= (5, 6) => State::Warn,
                _ => State::Off,
            };
            (state, facts.kernel.clone())
        },
    },
    Row {
        name: "root",
        why: "only root can give each tenant its own uid, and the edge one without rights",
        how: "start nagaya as root; it gives up what it does not need",
        judge: |facts| (present(facts.root), yes_no(facts.root)),
    },
    Row {
        name: "edge-user",
        why: "the process that parses requests runs under it",
        how: "useradd --system --no-create-home --shell /usr/sbin/nologin nagaya",
        judge: |facts| (if facts.edge_user { State::Ok } else { State::Warn }, yes_no(facts.edge_user)),
    },
    Row {
        name: "cgroup-v2",
        why: "limits and accounting per tenant and request; ends a program with all it started",
        how: "mount it (mount -t cgroup2 none /sys/fs/cgroup), and boot without systemd.unified_cgroup_hierarchy=0; \
              v1 serves too",
        judge: cgroup_v2,
    },
    Row {
        name: "cgroup-v1",
        why: "the same where v2 has no controllers",
        how: "not needed where cgroup-v2 is ok; otherwise mount the cpu, cpuacct, blkio, pids, freezer and memory \
              hierarchies",
        judge: cgroup_v1,
    },
    Row {
        name: "openat2",
        why: "a link in a document root must not lead out of it",
        how: "use Linux 5.6 or newer; in a container, let its seccomp filter allow openat2",
        judge: |facts| (present(facts.openat2), yes_no(facts.openat2)),
    },
    Row {
        name: "programs-apart",
        why: "CGI and PHP programs of one tenant must not reach another's ports, processes and files in /tmp",
        how: "start nagaya as root; `nagaya error NGY0357` says what else it needs",
        judge: |facts| match &facts.no_enclosure {
            None => (State::Ok, "yes".into()),
            Some(why) => (State::Off, why.clone()),
        },
    },
    Row {
        name: "edge-files",
        why: "a fault in the process that parses requests must not open files of the node",
        how: "start nagaya as root; `nagaya error NGY0518` says what else it needs",
        judge: |facts| match &facts.no_edge_root {
            None => (State::Ok, "yes".into()),
            Some(why) => (State::Off, why.clone()),
        },
    },
    Row {
        name: "fd-passing",
        why: "the keeper hands opened files and sockets to the edge over a seqpacket socket",
        how: "let the security module or container allow Unix sockets",
        judge: |facts| (present(facts.fd_passing), yes_no(facts.fd_passing)),
    },
    Row {
        name: "state-device",
        why: "limits of reading and writing are set per block device",
        how: "put state_dir on a file system of a block device (not tmpfs, overlay or NFS)",
        judge: device,
    },
    Row {
        name: "open-files",
        why: "each connection and each open file is one; beyond the limit connections are refused",
        how: "LimitNOFILE=1048576 in the unit, or ulimit -Hn 1048576 before the start",
        judge: |facts| match facts.open_files_hard {
            None => (State::Ok, "unlimited".into()),
            limit => at_least(limit, OPEN_FILES_WANTED),
        },
    },
    Row {
        name: "file-max",
        why: "open files of the whole machine",
        how: "sysctl -w fs.file-max=2097152",
        judge: |facts| at_least(facts.file_max, OPEN_FILES_WANTED),
    },
    Row {
        name: "pid-max",
        why: "each program of each tenant is a process",
        how: "sysctl -w kernel.pid_max=4194304",
        judge: |facts| at_least(facts.pid_max, PIDS_WANTED),
    },
    Row {
        name: "threads-max",
        why: "processes and threads of the whole machine",
        how: "sysctl -w kernel.threads-max=262144, or more memory",
        judge: |facts| at_least(facts.threads_max, PIDS_WANTED),
    },
    Row {
        name: "somaxconn",
        why: "connections held per socket while the edge is restarted",
        how: "sysctl -w net.core.somaxconn=16384",
        judge: |facts| at_least(facts.somaxconn, SOMAXCONN_WANTED),
    },
    Row {
        name: "low-ports",
        why: "without root, ports below the first free one cannot be listened on",
        how: "start as root, or sysctl -w net.ipv4.ip_unprivileged_port_start=80, or listen on ports from 1024",
        judge: ports,
    },
    Row {
        name: "php-cgi",
        why: "sites of kind php run in it",
        how: "apt install php-cgi, or set php_cgi in [keeper]",
        judge: |facts| match &facts.php_version {
            Some(version) => (State::Ok, version.clone()),
            None => (State::Off, format!("{} does not run", facts.php_cgi.display())),
        },
    },
    Row {
        name: "tenants",
        why: "programs of one tenant must reach nothing of another's or of the system's",
        how: "do as each line says; ids of the system that are meant go into system_users and system_groups of [tenants]",
        judge: |facts| match &facts.tenants {
            Found { warnings, looked_at, .. } if warnings.is_empty() => {
                (State::Ok, format!("{looked_at} looked at"))
            }
            Found { warnings, more: 0, .. } => (State::Warn, warnings.join("; ")),
            Found { warnings, more, .. } => {
                (State::Warn, format!("{}; and {more} more", warnings.join("; ")))
            }
        },
    },
    Row {
        name: "kvm",
        why: "sites with their own kernel run at full speed",
        how: "load kvm_intel or kvm_amd, or let the hypervisor nest",
        judge: |facts| (present(facts.kvm), yes_no(facts.kvm)),
    },
    Row {
        name: "clock",
        why: "certificates, logs and promised times depend on it",
        how: "apt install systemd-timesyncd or chrony",
        judge: |facts| match facts.clock_synchronised {
            Some(true) => (State::Ok, "synchronised".into()),
            Some(false) => (State::Warn, "not synchronised".into()),
            None => (State::Warn, "unknown".into()),
        },
    },
    Row {
        name: "certificates",
        why: "a browser shows a warning in place of a site whose certificate has ended",
        how: "renew them, and look whether what is to renew them runs (nagaya error NGY0515)",
        judge: |facts| match &facts.certificates {
            None => (State::Ok, "no directory of them is configured".into()),
            Some(Err(why)) => (State::Warn, format!("unknown: {why}")),
            Some(Ok(found)) => judge_certificates(found),
        },
    },
    Row {
        name: "entropy",
        why: "TLS keys and request ids are random",
        how: "let the machine collect some; a virtual machine needs virtio-rng",
        judge: |facts| (present(facts.entropy_ready), yes_no(facts.entropy_ready)),
    },
    Row {
        name: "cluster-store",
        why: "whoever reaches etcd can stop the cluster, and programs of tenants reach what this machine reaches",
        how: "give etcd TLS with client certificates, then nagaya cluster store --etcd https://... (nagaya error NGY0239); as \
              root this can be looked at",
        judge: |facts| match &facts.cluster_store {
            StoreAccess::None => (State::Ok, "in no cluster".into()),
            StoreAccess::Safe => (State::Ok, "encrypted, with a login".into()),
            StoreAccess::Weak(why) => (State::Warn, format!("INSECURE: {why}")),
            StoreAccess::Unknown(why) => (State::Warn, format!("unknown: {why}")),
        },
    },
];

fn judge_certificates(found: &certificates::Found) -> (State, String) {
    let now = certificates::unix_now();
    let broken = found.broken.iter().cloned();
    let troubles: Vec<String> = found.ending().map(|one| one.describe(now)).chain(broken).collect();
    match troubles.len() {
        0 => (State::Ok, format!("{} read, none ends within 30 days", found.certificates.len())),
        count if count > TROUBLES_SHOWN => {
            let first = troubles[..TROUBLES_SHOWN].join("; ");
            (State::Warn, format!("{first}; and {} more", count - TROUBLES_SHOWN))
        }
        _ => (State::Warn, troubles.join("; ")),
    }
}

fn present(there: bool) -> State {
    if there { State::Ok } else { State::Off }
}

fn yes_no(there: bool) -> String {
    if there { "yes" } else { "no" }.into()
}

fn at_least(value: Option<u64>, wanted: u64) -> (State, String) {
    match value {
        Some(value) if value >= wanted => (State::Ok, value.to_string()),
        Some(value) => (State::Warn, format!("{value}, {wanted} wanted")),
        None => (State::Warn, "unknown".into()),
    }
}

fn cgroup_v2(facts: &Facts) -> (State, String) {
    let Some(v2) = facts.cgroups.of(Version::V2).next() else { return (State::Off, "not mounted".into()) };
    let missing: Vec<_> = V2_CONTROLLERS.into_iter().filter(|name| !v2.has(name)).collect();
    let base = v2.base.display();
    match () {
        () if v2.controllers.is_empty() => (State::Off, format!("{base}: no controllers")),
        () if !v2.is_usable() => (State::Off, format!("{base}: not writable")),
        () if missing.len() == V2_CONTROLLERS.len() => (
            State::Off,
            format!("none of {}; they are in use by v1, or not delegated", V2_CONTROLLERS.join(" ")),
        ),
        () if missing.is_empty() => (State::Ok, v2.controllers.join(" ")),
        () => (State::Warn, format!("without {}", missing.join(" "))),
    }
}

fn cgroup_v1(facts: &Facts) -> (State, String) {
    let usable: Vec<_> = facts
        .cgroups
        .of(Version::V1)
        .filter(|mount| mount.is_usable())
        .flat_map(|mount| mount.controllers.clone())
        .collect();
    if usable.is_empty() {
        // With v2 in full there is nothing that v1 would add.
        let state = if cgroup_v2(facts).0 == State::Ok { State::Ok } else { State::Off };
        return (state, "none usable".into());
    }
    let wanted = ["cpu", "cpuacct", "blkio", "pids", "freezer", "memory"];
    let all = wanted.iter().all(|name| usable.iter().any(|has| has == name));
    (if all { State::Ok } else { State::Warn }, usable.join(" "))
}

fn device(facts: &Facts) -> (State, String) {
    let directory = facts.state_dir.display();
    match &facts.device {
        Some(device) => {
            let number = format!("{}:{}", device.major, device.minor);
            match &device.name {
                Some(name) => (State::Ok, format!("{number} ({name}), {directory}")),
                None => (State::Warn, format!("{number} is no block device, {directory}")),
            }
        }
        None => (State::Warn, format!("unknown, {directory}")),
    }
}

fn ports(facts: &Facts) -> (State, String) {
    let first = facts.first_free_port.unwrap_or(1024);
    match facts.lowest_wanted_port {
        Some(port) if !facts.root && u64::from(port) < first => {
            (State::Off, format!("port {port} is configured, the first free one is {first}"))
        }
        _ if facts.root => (State::Ok, "all".into()),
        _ => (State::Ok, format!("from {first}")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::doctor::cgroups::Hierarchy;

    fn state(facts: &Facts, name: &str) -> (State, String) {
        let check = checks(facts).into_iter().find(|check| check.name == name).expect("the row exists");
        (check.state, check.value)
    }

    #[test]
    fn whatever_is_not_fine_says_what_to_do() {
        let all = checks(&Facts::default());
        assert!(all.iter().all(|check| check.state != State::Ok || check.how.is_empty()));
        assert!(all.iter().filter(|check| check.state != State::Ok).all(|check| !check.how.is_empty()));
        assert!(all.iter().all(|check| !check.why.is_empty()));
        assert!(all.iter().filter(|check| check.state == State::Off).count() >= 6, "{all:?}");
    }

    #[test]
    fn a_check_is_json_with_five_texts() {
        let json = serde_json::to_value(&checks(&Facts::default())[0]).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["how", "name", "state", "value", "why"]);
        assert_eq!(json["state"], "off");
        assert!(json.as_object().unwrap().values().all(serde_json::Value::is_string));
    }

    #[test]
    fn store_that_others_reach_is_not_fine() {
        let judged = |cluster_store| state(&Facts { cluster_store, ..Facts::default() }, "cluster-store");
        assert_eq!(judged(StoreAccess::Safe).0, State::Ok);
        assert_eq!(judged(StoreAccess::None).0, State::Ok);
        let weak = judged(StoreAccess::Weak("http://a is in clear text".into()));
        assert_eq!(weak, (State::Warn, "INSECURE: http://a is in clear text".into()));
        assert_eq!(judged(StoreAccess::Unknown("no right".into())).0, State::Warn);
    }

    #[test]
    fn a_kernels_version_is_compared_as_numbers() {
        for (kernel, wanted) in
            [("6.18.2-amd64", State::Ok), ("5.14", State::Ok), ("5.10.0", State::Warn), ("5", State::Off)]
        {
            let facts = Facts { kernel: kernel.into(), ..Facts::default() };
            assert_eq!(state(&facts, "kernel").0, wanted, "{kernel}");
        }
    }

    #[test]
    fn either_cgroup_version_in_full_is_enough() {
        let mounted = |version, names: &[&str]| Hierarchy {
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
        let mut facts = Facts::default();
        facts.cgroups.hierarchies = v1.map(|names| mounted(Version::V1, names)).into();
        assert_eq!(state(&facts, "cgroup-v1").0, State::Ok);
        facts.cgroups.hierarchies.pop();
        assert_eq!(state(&facts, "cgroup-v1").0, State::Warn);
        facts.cgroups.hierarchies = vec![mounted(Version::V2, &V2_CONTROLLERS)];
        assert_eq!((state(&facts, "cgroup-v2").0, state(&facts, "cgroup-v1").0), (State::Ok, State::Ok));
        facts.cgroups.hierarchies[0].controllers.clear();
        assert_eq!(state(&facts, "cgroup-v2").0, State::Off);
    }

    #[test]
    fn ports_below_the_first_free_one_need_root() {
        let mut facts =
            Facts { lowest_wanted_port: Some(80), first_free_port: Some(1024), ..Facts::default() };
        assert_eq!(state(&facts, "low-ports").0, State::Off);
        facts.root = true;
        assert_eq!(state(&facts, "low-ports").0, State::Ok);
        facts = Facts { lowest_wanted_port: Some(8080), first_free_port: Some(1024), ..Facts::default() };
        assert_eq!(state(&facts, "low-ports").0, State::Ok);
    }
}

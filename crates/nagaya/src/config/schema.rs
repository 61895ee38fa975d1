//! Every key of `nagaya.toml`, once: what it takes, its default, what it is for. Reading, checking, printing
//! and the reference page are all driven by these tables.
//!
//! Not here: the defaults' values (`Settings::default` and the processes' own `Options`), the walk (`read`).

use std::net::SocketAddr;
use std::path::PathBuf;

use nagaya_rules::{OnError, Phase, RULE_FILES_MAX, RuleFile};

use super::settings::{Listen, Settings};
use super::value::{Exists, Field, Kind, Value};

/// One key. `T` is what it belongs to: the settings, or one entry of an array of tables.
pub struct Key<T: 'static> {
    pub name: &'static str,
    pub kind: Kind,
    /// First version that knows it.
    pub since: &'static str,
    /// Markdown, one paragraph.
    pub doc: &'static str,
    /// What holds while it is not set, for keys whose default is not a fixed value.
    pub unset: &'static str,
    pub get: fn(&T) -> Value,
    pub set: fn(&mut T, Value),
}

/// One table of the file. An empty path is the part before the first header.
pub struct Section {
    pub path: &'static str,
    pub doc: &'static str,
    pub keys: &'static [Key<Settings>],
}

/// An array of tables: each `[[path]]` in the file is one entry.
pub struct Array<T: 'static> {
    pub path: &'static str,
    pub doc: &'static str,
    pub keys: &'static [Key<T>],
    /// Keys without which an entry means nothing, each with a line that shows it. The first one's value is where an
    /// entry's mistakes are reported.
    pub required: &'static [(&'static str, &'static str)],
    pub entries_max: usize,
    /// What to do where there would be more.
    pub instead: &'static str,
    /// An entry before its keys are read; what is not required stays as it is here.
    pub blank: fn() -> T,
}

macro_rules! key {
    ($name:literal, $since:literal, $kind:expr, $($field:ident).+, $doc:literal $(, unset: $unset:literal)?) => {
        Key {
            name: $name,
            kind: $kind,
            since: $since,
            doc: $doc,
            unset: concat!($($unset)?),
            get: |settings| settings.$($field).+.value(),
            set: |settings, value| settings.$($field).+.assign(value),
        }
    };
}

mod edge;

use self::edge::{LIMITS, NETWORKS, SPOOL};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const SECOND: u64 = 1_000;
const HOUR: u64 = 3_600 * SECOND;
const DAY: u64 = 24 * HOUR;

/// Keys that had another name before, with the name they have now.
pub const RENAMED: [(&str, &str); 1] = [("keeper.fence", "back_end in [cells]")];

const fn path(exists: Exists) -> Kind {
    Kind::Path(exists)
}

const fn count(min: u64, max: u64) -> Kind {
    Kind::Count { min, max }
}

const fn size(min: u64, max: u64) -> Kind {
    Kind::Size { min, max }
}

const fn time(min: u64, max: u64) -> Kind {
    Kind::Time { min, max }
}

pub static LISTEN: Array<Listen> = Array {
    path: "listen",
    doc: "Addresses that are listened on, one `[[listen]]` each. The ones written here replace the default, which is \
          plain HTTP on `0.0.0.0:80` and, where the machine has IPv6, `[::]:80`.",
    keys: &[
        key!(
            "address",
            "0.1",
            Kind::Address,
            address,
            "IP address and port. An IPv6 address takes IPv6 only, so `[::]:80` and `0.0.0.0:80` stand side by side."
        ),
        key!(
            "tls",
            "0.1",
            Kind::Flag,
            tls,
            "Speak TLS here (HTTP/2 and HTTP/1.1 by ALPN). Needs `certificates` in `[tls]`."
        ),
        key!(
            "proxy_protocol",
            "0.1",
            Kind::Flag,
            proxy_protocol,
            "Each connection here begins with the header of the PROXY protocol, version 1 or 2, before TLS. The address it tells is the client's. Others are closed."
        ),
        key!(
            "proxy_protocol_from",
            "0.1",
            Kind::Networks,
            proxy_protocol_from,
            "Proxies that may connect here and are believed, where `proxy_protocol` is set. An empty list means `trusted_proxies` of `[edge]`."
        ),
    ],
    required: &[("address", "address = \"0.0.0.0:80\"")],
    // Each costs one socket per edge thread.
    entries_max: 256,
    instead: "listen on [::] and 0.0.0.0 instead",
    blank: || Listen::plain(SocketAddr::from(([0, 0, 0, 0], 80))),
};

pub static RULES: Array<RuleFile> = Array {
    path: "rules",
    doc: "Files of rules in Ruby, one `[[rules]]` each, run in this order. A file that changes on disk holds from the \
          next request on. What rules can say: [rules.md](rules.md).",
    keys: &[
        key!(
            "phase",
            "0.1",
            Kind::Choice(&["post_read_request", "access_checker", "fixups", "log_transaction"]),
            phase,
            "When it runs: once the head of a request is read, when its site is known, just before the response, or after it."
        ),
        key!(
            "file",
            "0.1",
            Kind::Rule,
            path,
            "The edge reads it with its own rights. `store:limits` is the rule that `nagaya rule set limits FILE` put into the store: the same on all nodes of a cluster. While it is missing or cannot be compiled, `on_error` says what happens."
        ),
        key!("cache", "0.1", Kind::Flag, cache, "Compile it once and do not look at the file again."),
        key!(
            "on_error",
            "0.1",
            Kind::Choice(&["pass", "refuse"]),
            on_error,
            "After an error in it, or when it used more than `[rule_limits]` allows: `pass` lets the request go on under the limits of its site, `refuse` answers 503."
        ),
    ],
    required: &[("file", "file = \"/etc/nagaya/rules/limits.rb\""), ("phase", "phase = \"access_checker\"")],
    entries_max: RULE_FILES_MAX,
    instead: "put rules of one phase into one file",
    blank: || RuleFile {
        phase: Phase::AccessChecker,
        path: PathBuf::new(),
        cache: false,
        on_error: OnError::default(),
    },
};

/// Where arrays of tables are.
pub const ARRAYS: [&str; 2] = [LISTEN.path, RULES.path];

pub static SECTIONS: &[Section] = &[
    Section { path: "", doc: "The node.", keys: NODE },
    Section { path: "log", doc: "Logs.", keys: LOG },
    Section { path: "tls", doc: "Certificates.", keys: TLS },
    Section {
        path: "admin",
        doc: "The admin interface: HTTP over a Unix socket, used by `nagaya site`, `nagaya tenant` and `nagaya status`.",
        keys: ADMIN,
    },
    Section { path: "tenants", doc: "Tenants.", keys: TENANTS },
    Section { path: "edge", doc: "The unprivileged process that speaks HTTP.", keys: EDGE },
    Section {
        path: "edge.limits",
        doc: "Bounds against slow and oversized clients and backends.",
        keys: LIMITS,
    },
    Section {
        path: "edge.networks",
        doc: "What the clients of one network may do together, over all edge threads and sites: one IPv4 address or one IPv6 /64. \
              Browsers and people behind a carrier's NAT are far below the defaults. `0` is no limit. Beyond a limit a client gets \
              429 with `Retry-After`, or is closed where no HTTP is spoken yet. See [operations.md](operations.md#many-connections-from-one-place).",
        keys: NETWORKS,
    },
    Section {
        path: "edge.spool",
        doc: "Bodies that wait on disk: uploads, which are taken in before their program runs, and answers of programs that \
              clients take slowly. See [operations.md](operations.md#slow-clients).",
        keys: SPOOL,
    },
    Section { path: "keeper", doc: "The privileged process that starts programs for tenants.", keys: KEEPER },
    Section {
        path: "cells",
        doc: "Where programs run and what limits them: cgroups of tenants, sites and requests.",
        keys: CELLS,
    },
    Section {
        path: "instances",
        doc: "Running applications (sites of kind `app`): how they rest when nobody asks for them, and their images. What a \
              site's record says goes before these. Times from `reclaimed_after` on follow what was measured of each application \
              ([how](instances.md#what-a-tier-costs)). See [instances.md](instances.md).",
        keys: INSTANCES,
    },
    Section {
        path: "rule_limits",
        doc: "What one evaluation of a rule file may use. Beyond it the evaluation ends, and the `on_error` of the file holds.",
        keys: RULE_LIMITS,
    },
    Section {
        path: "admission",
        doc: "What becomes of those who come when as many requests run as may: see [admission.md](admission.md).",
        keys: ADMISSION,
    },
    Section {
        path: "balance",
        doc: "What is done for applications that are short of CPU, and taken back when they are not any more: see \
              [instances.md](instances.md#when-it-is-short-of-cpu), and for several nodes [cluster.md](cluster.md#load-moves-applications-too).",
        keys: BALANCE,
    },
    Section {
        path: "cluster",
        doc: "How this node takes part in a cluster: see [cluster.md](cluster.md). `nagaya cluster init` or `join` makes it a member; \
              without `listen` it stays alone.",
        keys: CLUSTER,
    },
    Section {
        path: "receipts",
        doc: "Who is told with the response what a request used and waited for.",
        keys: RECEIPTS,
    },
];

const NODE: &[Key<Settings>] = &[
    key!("node", "0.1", Kind::Text, node, "Name of this node in `Via`, receipts and logs.", unset: "the machine's host name"),
    key!(
        "runtime_dir",
        "0.1",
        path(Exists::Later),
        runtime_dir,
        "Sockets and the lock file. Made at start; what nagaya put there is removed at the end."
    ),
    key!(
        "state_dir",
        "0.1",
        path(Exists::Later),
        state_dir,
        "The store of tenants and sites (`nagaya.redb`). Made at start."
    ),
];

const LOG: &[Key<Settings>] = &[
    key!(
        "level",
        "0.1",
        Kind::Filter,
        log.level,
        "What the node's own log shows: a level, or a filter like `info,nagaya_edge=debug`. `--log` overrides it."
    ),
    key!(
        "format",
        "0.1",
        Kind::Choice(&["auto", "text", "json"]),
        log.format,
        "Form of the node's own log. `auto` is text on a terminal and JSON elsewhere."
    ),
    key!("file", "0.1", path(Exists::Later), log.file, "File of the node's own log; opened anew on `SIGUSR1`.", unset: "standard error"),
    key!("access", "0.1", path(Exists::Later), edge.log.access, "Access log, written by the edge with its own rights; opened anew on `SIGUSR1`.", unset: "no access log"),
    key!(
        "access_format",
        "0.1",
        Kind::Choice(&["extended", "combined", "json"]),
        edge.log.format,
        "Form of the access log: the combined log format with host, site, tenant and request id behind it, the same without these, or one JSON object per request."
    ),
];

const ADMIN: &[Key<Settings>] = &[
    key!("socket", "0.1", path(Exists::Later), admin.socket, "Where the admin interface listens.", unset: "`admin.sock` in `runtime_dir`"),
    key!("group", "0.1", Kind::Text, admin.group, "Members of this group may use the admin interface too; they can then do with tenants and sites what root can.", unset: "only the user that runs nagaya"),
    key!(
        "read",
        "0.1",
        Kind::Accounts,
        admin.read,
        "Users, and groups as `@group`, that may look: status, metrics, lists, receipts. Values of applications' variables are hidden from them, and settings and texts of rules are not shown. Roles are read at start ([docs/operations.md](operations.md#who-may-use-the-admin-socket))."
    ),
    key!(
        "operate",
        "0.1",
        Kind::Accounts,
        admin.operate,
        "Users and groups that may also wake, rest, image, stop and move applications, drain nodes, and read applications' logs: nothing that changes a record."
    ),
    key!(
        "all",
        "0.1",
        Kind::Accounts,
        admin.all,
        "Users and groups that may do everything, as members of `group`. That is as much as root may."
    ),
];

const TENANTS: &[Key<Settings>] = &[
    key!(
        "uid_base",
        "0.1",
        count(1_000, 4_000_000_000),
        uid_base,
        "A tenant that is added without a uid gets the first free one from here on."
    ),
    key!(
        "system_users",
        "0.1",
        Kind::Accounts,
        system_ids.users,
        "Users of the system that a tenant may be although their uid is below 1000 or that of `nobody`. The edge's is never \
         allowed. Such a tenant has all that is that user's."
    ),
    key!(
        "system_groups",
        "0.1",
        Kind::Accounts,
        system_ids.groups,
        "Groups of the system that a tenant may be in although their gid is below 1000, or their name is one that leads to \
         root, such as `docker` or `disk`. The edge's and the `group` of `[admin]` are never allowed."
    ),
    key!(
        "max_concurrent",
        "0.1",
        count(1, 1_000_000),
        edge.tenant_max_concurrent,
        "Requests of one tenant that may run at once, where its record gives no number."
    ),
    key!(
        "max_waiting",
        "0.1",
        count(0, 1_000_000),
        edge.max_waiting,
        "Requests that may wait in one lane, whatever is predicted. One more gets a ticket, or 503 with `Retry-After`."
    ),
    key!(
        "wait_timeout",
        "0.1",
        time(0, HOUR),
        edge.wait_ms,
        "Longest predicted wait of a request that may stand in line; who would wait longer gets a ticket, or 503 with `Retry-After`. Nobody waits longer than twice this."
    ),
    key!(
        "php_workers",
        "0.1",
        count(1, 10_000),
        edge.php_workers,
        "PHP workers one tenant may have at once, where its record gives no number."
    ),
    key!(
        "php_requests",
        "0.1",
        count(1, 1_000_000_000),
        edge.php_requests,
        "Requests one PHP worker serves before a new one replaces it, against scripts and modules that leak. Starting one takes longer than most pages."
    ),
    key!(
        "php_idle_timeout",
        "0.1",
        time(SECOND, DAY),
        edge.php_idle_ms,
        "A PHP worker that had nothing to do for this long ends."
    ),
];

const EDGE: &[Key<Settings>] = &[
    key!(
        "user",
        "0.1",
        Kind::Text,
        identity.user,
        "User whose rights the edge has; it should own nothing. Only when nagaya is started by root.",
        unset: "`nagaya` if there is such a user"
    ),
    key!(
        "uid",
        "0.1",
        count(1, 4_294_967_294),
        identity.uid,
        "The same as a number, with the gid of the same number; for machines without that user.",
        unset: "the uid of `user`, or 65533"
    ),
    key!(
        "threads",
        "0.1",
        count(0, 1_024),
        edge.threads,
        "Threads, each with its own listening sockets. `0` is one per core."
    ),
    key!("h2c", "0.1", Kind::Flag, edge.h2c, "Take HTTP/2 by prior knowledge on addresses without TLS."),
    key!(
        "trusted_proxies",
        "0.1",
        Kind::Networks,
        edge.trusted_proxies,
        "Peers that are believed who the client is: `Forwarded`, `X-Forwarded-*` and others (docs/header-fields.md). From everybody else such fields are dropped."
    ),
];

const TLS: &[Key<Settings>] = &[key!(
    "certificates",
    "0.1",
    path(Exists::Directory),
    keeper.certificates,
    "Directory of `<host name>.pem` files, each a chain and its key. Read when a name is asked for, and again when a file has changed.",
    unset: "no TLS"
)];

const KEEPER: &[Key<Settings>] = &[
    key!(
        "php_cgi",
        "0.1",
        path(Exists::File),
        keeper.php_cgi,
        "The FastCGI program of PHP (Debian: package `php-cgi`). It need not exist while no site uses PHP and the key is not set."
    ),
    key!(
        "cgi_per_tenant",
        "0.1",
        count(1, 1_000_000),
        keeper.cgi_per_tenant_max,
        "CGI programs one tenant may have running at once."
    ),
    key!(
        "processes",
        "0.1",
        count(1, 4_000_000),
        keeper.processes_max,
        "Programs and workers of all tenants together. One more is answered 503."
    ),
    key!(
        "open_files",
        "0.1",
        count(32, 1_048_576),
        keeper.open_files_max,
        "Open files of a started program (`RLIMIT_NOFILE`)."
    ),
    key!(
        "app_start_timeout",
        "0.1",
        time(100, HOUR),
        keeper.app_start_ms,
        "How long an application may take until it listens, where its site gives no number."
    ),
    key!(
        "stderr_bytes",
        "0.1",
        size(0, 16 * MIB),
        keeper.stderr_bytes_max,
        "Standard error logged for one program, and per minute for one that is kept."
    ),
    key!(
        "programs_network",
        "0.1",
        Kind::Choice(&["own", "host"]),
        keeper.programs.network,
        "The network of CGI programs and PHP workers. `own`: each tenant has one of its own, from which TCP leads to all that is outside of the node, to `local_ports`, and to the node's own sites; and names are looked up. `host`: all share the node's, and reach whatever listens there, other tenants' servers too. Holds for programs that are started from then on. A tenant's record may say otherwise (`nagaya tenant set NAME --network`)."
    ),
    key!(
        "programs_system_calls",
        "0.1",
        Kind::Choice(&["filtered", "all"]),
        keeper.programs.system_calls,
        "What CGI programs and PHP workers may ask of the kernel. `filtered`: what usual software needs; no new namespaces, mounts, tracing of others, `bpf`, `io_uring` or the like (docs/operations.md has the list), and programs for 32 bits are ended. `all`: what their rights let them. Holds for programs that are started from then on."
    ),
    key!(
        "local_ports",
        "0.1",
        Kind::Ports,
        keeper.programs.local_ports,
        "Services on the node's loopback addresses that CGI programs and PHP workers of all tenants may use, where their network is their own: mail and databases, as a rule. Each must know by itself who may do what."
    ),
];

const CELLS: &[Key<Settings>] = &[
    key!(
        "back_end",
        "0.1",
        Kind::Choice(&["auto", "cgroup-v2", "cgroup-v1", "process-group"]),
        keeper.back_end,
        "What limits a program and keeps it together with all it started, so that they can be ended as one. `auto` takes what the machine has: cgroup v2, then v1, each controller where it is mounted. With `process-group` nothing is limited. `nagaya doctor` says what there is. Holds until the next start."
    ),
    key!(
        "processes_per_tenant",
        "0.1",
        count(16, 4_000_000),
        keeper.processes_per_tenant,
        "Processes and threads one tenant may have at once, where its record gives no number: what a fork bomb can reach."
    ),
];

/// Longest time an instance may be left at a tier: as good as for ever.
const IDLE_MAX: u64 = 365 * DAY;

const INSTANCES: &[Key<Settings>] = &[
    key!(
        "criu",
        "0.1",
        path(Exists::Later),
        keeper.instances.criu,
        "The CRIU program (4.1 or newer). While it is not there, or too old, applications rest in memory only, and start anew after that. Looked for at the keeper's start.",
        unset: "the first that works, as `nagaya doctor` says"
    ),
    key!(
        "images",
        "0.1",
        path(Exists::Later),
        images,
        "Directory of the images, for root alone: an image holds all that the application had in memory, its secrets too. Holds until the next start.",
        unset: "`images` in `state_dir`"
    ),
    key!(
        "image_bytes",
        "0.1",
        size(0, 256 * TIB),
        keeper.instances.image_bytes_max,
        "All images together. Beyond it the one that was used longest ago is removed. `0B`: no image is taken."
    ),
    key!(
        "image_age",
        "0.1",
        time(60 * SECOND, IDLE_MAX),
        keeper.instances.image_age_max_ms,
        "An image that was taken this long ago is taken anew: its instance, when it would rest on it again and nobody asks for it, is started and imaged first. Twice as old it is not used any more. One that was not used for this long is removed."
    ),
    key!(
        "image_bandwidth",
        "0.1",
        size(0, TIB),
        keeper.instances.image_bandwidth,
        "In a cluster: bytes a second that images going to other nodes, or coming from them, may take together. `0B`: no limit."
    ),
    key!(
        "log_bytes",
        "0.1",
        size(64 * KIB, GIB),
        keeper.instances.log_bytes_max,
        "One file of an application's own log, `instance-logs/TENANT/SITE.log` beside the images. A file that would be larger is moved on to `SITE.log.1` first, that to `SITE.log.2`. Half of what all files of a log hold together may be written in a minute; the rest is dropped, which the log says."
    ),
    key!(
        "log_files",
        "0.1",
        count(0, 100),
        keeper.instances.log_files_max,
        "Files of each application's log, with the one that is written to; older ones are removed. `0`: there are none, and what an application wrote is known until the keeper ends."
    ),
    key!(
        "wakes_at_once",
        "0.1",
        count(0, 1_024),
        keeper.instances.wakes_at_once,
        "Applications that are started or restored at once; the others wait in order. More at once make each of them later, and none earlier. A start that sleeps for half a second, stands still by its own CPU limit or takes 10 s gives its place to the next one; where a tenant has four such starts, its next ones wait for them. `0` is one per core."
    ),
    key!(
        "huge_pages",
        "0.1",
        Kind::Choice(&["as-is", "64KiB"]),
        keeper.instances.huge_pages,
        "Pages in which **all programs of the machine** get their memory. With `64KiB` the keeper switches multi-size THP of that size on (Linux 6.8; the kernel's `transhuge.rst`), and some applications are restored from their images sooner, others not (`wake` in docs/experiments.md). Nothing switches it off again but you, or the next start of the machine. `as-is`: the switch is left alone."
    ),
    key!(
        "quiet_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.quiet_ms,
        "Without a request for this long, an application runs only when nobody else wants to. A step whose time is not before that of the next one is left out."
    ),
    key!(
        "frozen_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.frozen_ms,
        "Then it stands still: it keeps its memory and uses no CPU time. Its own timers stand still too; it comes back within milliseconds."
    ),
    key!(
        "reclaimed_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.reclaimed_ms,
        "Then its memory goes to swap, as far as there is any."
    ),
    key!(
        "image_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.image_ms,
        "Then its processes end, and its image on disk stands for it."
    ),
    key!(
        "cold_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.cold_ms,
        "The same for an application without an image: it starts anew when it is next asked for."
    ),
];

const RULE_LIMITS: &[Key<Settings>] = &[
    key!(
        "instructions",
        "0.1",
        count(1_000, 100_000_000),
        edge.rule_limits.instructions,
        "Instructions of the Ruby machine. The default is about a millisecond; a rule that looks a host up needs hundreds."
    ),
    key!(
        "memory",
        "0.1",
        size(MIB, GIB),
        edge.rule_limits.memory,
        "Memory of one edge thread's Ruby machine, with all that rules keep between requests."
    ),
];

const ADMISSION: &[Key<Settings>] = &[
    key!(
        "node_max_concurrent",
        "0.1",
        count(0, 1_000_000),
        edge.admission.node_max_concurrent,
        "Requests of all tenants that may run at once, shared by weight where they want more. `0`: as many as their tenants may."
    ),
    key!(
        "tickets",
        "0.1",
        Kind::Flag,
        edge.admission.tickets,
        "Whoever finds a line too long is given a ticket: a slot that is reserved, and a time to come back. A site's record can say otherwise."
    ),
    key!("slot", "0.1", time(1_000, HOUR), edge.admission.slot_ms, "Length of a ticket's slot."),
    key!(
        "horizon",
        "0.1",
        time(1_000, DAY),
        edge.admission.horizon_ms,
        "How far ahead slots are given. Who would come later gets 503 without a ticket."
    ),
    key!(
        "tickets_max",
        "0.1",
        count(1, 100_000),
        edge.admission.tickets_max,
        "Tickets of one lane that may be out at once."
    ),
    key!(
        "penalty",
        "0.1",
        time(0, 60_000),
        edge.admission.penalty_ms,
        "So long the answer is held back for a client that asks again before the time it was told. It holds no permit meanwhile."
    ),
    key!(
        "body_bytes",
        "0.1",
        size(0, 64 * GIB),
        edge.admission.body_bytes,
        "Bytes of request bodies held in memory for those who wait in one lane, at most 64 KiB of each."
    ),
];

const BALANCE: &[Key<Settings>] = &[
    key!(
        "every",
        "0.1",
        time(100, 60_000),
        balance.every_ms,
        "How often it is looked at what applications use."
    ),
    key!(
        "short",
        "0.1",
        count(1, 100),
        balance.short,
        "Percent of the time with work to do and no CPU for it from which on an application is short of CPU: because its limit is used up, \
         or because others run. It is short no more below a fifth of this."
    ),
    key!(
        "raise_max",
        "0.1",
        count(1, 1_000),
        balance.raise_max,
        "Its CPU limit is raised at once, twofold at a time, up to so many times what its site's record says; never beyond its tenant's limit. \
         A rule's `boost` goes as far. `cpu_max` in a site's record goes before this. `1`: never."
    ),
    key!(
        "busy",
        "0.1",
        count(1, 100),
        balance.busy,
        "Percent of this node's CPUs in use above which nobody is given more here. `100`: somebody always is."
    ),
    key!(
        "lower_after",
        "0.1",
        time(1_000, DAY),
        balance.lower_after_ms,
        "A raised limit of which not half was needed for so long is lowered by one step, and of several nodes that have an application the last gives it up, if all of it was as little for one node fewer."
    ),
    key!(
        "move_after",
        "0.1",
        time(1_000, DAY),
        balance.move_after_ms,
        "In a cluster: short for so long, and not to be given more here, it is moved to a better node as soon as no more than one request is under way. If none is better and its site may run on several nodes (`max`), one more gets it."
    ),
    key!(
        "move_anyway_after",
        "0.1",
        time(1_000, DAY),
        balance.move_anyway_after_ms,
        "After so long it is moved while requests run: those end first, new ones wait."
    ),
    key!(
        "target",
        "0.1",
        count(1, 100),
        balance.target,
        "A better node uses this percent of its CPUs at most, with the application on it."
    ),
    key!("better_by", "0.1", count(1, 100), balance.better_by, "And so many percent less than this node."),
    key!(
        "site_rests",
        "0.1",
        time(1_000, 365 * DAY),
        balance.site_rests_ms,
        "One that was moved for its load is left where it is for so long; longer if it is moved again and again. A node that got it, too, has it for at least as long."
    ),
    key!(
        "moves_per_minute",
        "0.1",
        count(0, 1_000),
        balance.moves_per_minute,
        "Moves and copies for load that a node takes part in. `0`: it gives away nothing for that."
    ),
];

const CLUSTER: &[Key<Settings>] = &[
    key!(
        "listen",
        "0.1",
        Kind::Address,
        cluster.listen,
        "IP address and port at which other nodes reach this one's edge: TCP for requests, UDP for probes. Only holders of a certificate of \
         the cluster are answered.",
        unset: "this node is in no cluster"
    ),
    key!(
        "advertise",
        "0.1",
        Kind::Address,
        cluster.advertise,
        "The same as other nodes must write it, where that is not `listen`: behind address translation, or if `listen` is `0.0.0.0`.",
        unset: "`listen`"
    ),
    key!(
        "fence",
        "0.1",
        time(100, 10 * SECOND),
        cluster.fence_ms,
        "Without word from the store for so long, this node serves no application that is placed on it, and freezes them. A site that is \
         moved away from it while it is silent answers on the new node after this long. Nodes may differ in it."
    ),
    key!(
        "probe",
        "0.1",
        Kind::Choice(&["udp", "connect", "icmp"]),
        cluster.probe,
        "How a node that was not heard from is asked whether it is there: a signed datagram, a TCP connection that is reset at once, or an \
         ICMP echo to its host."
    ),
    key!(
        "probe_max",
        "0.1",
        time(5, 100),
        cluster.probe_ms,
        "Longest that a probe waits for an answer. What is measured only shortens it."
    ),
];

const RECEIPTS: &[Key<Settings>] = &[
    key!(
        "allow",
        "0.1",
        Kind::Networks,
        edge.receipts.allow,
        "Clients whose responses carry `Server-Timing` and `Nagaya-Receipt`. The access log and `/metrics` have the same numbers for all requests."
    ),
    key!(
        "keep",
        "0.1",
        count(0, 1_000_000),
        edge.receipts.keep,
        "Receipts that each edge thread keeps in memory for `nagaya explain`, about 1 KiB each; of requests for files that nothing held up, an eighth as many. `0` keeps none, and the edge does not measure its own time on a request then."
    ),
];

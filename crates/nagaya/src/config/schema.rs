//! Every key of `nagaya.toml`, once: its values, its default, its purpose. Reading, checking,
//! printing and the reference page all use these tables.
//!
//! Not here: the walk (`read`), the defaults' values (`NodeSettings::default` and the processes'
//! own `Options`).

use std::net::SocketAddr;
use std::path::PathBuf;

use nagaya_rules::{OnError, RULE_FILES_MAX, RuleFile, RulePhase};

use super::settings::{ListenSettings, NodeSettings};
use super::value::{ConfigField, ConfigValue, PathKind, ValueKind};

/// One key. `T` is its owner: the settings, or one entry of an array of tables.
pub struct KeyRow<T: 'static> {
    pub name: &'static str,
    pub kind: ValueKind,
    /// First version that knows it.
    pub since: &'static str,
    /// Markdown, one paragraph.
    pub doc: &'static str,
    /// Effect while it is not set, for keys whose default is not a fixed value.
    pub unset: &'static str,
    pub get: fn(&T) -> ConfigValue,
    pub set: fn(&mut T, ConfigValue),
}

/// One table of the file. An empty path is the part before the first header.
pub struct SectionRow {
    pub path: &'static str,
    pub doc: &'static str,
    pub keys: &'static [KeyRow<NodeSettings>],
}

/// An array of tables: each `[[path]]` in the file is one entry.
pub struct ArrayRow<T: 'static> {
    pub path: &'static str,
    pub doc: &'static str,
    pub keys: &'static [KeyRow<T>],
    /// Keys that an entry needs, each with an example line. An entry's mistakes are reported at the
    /// first one's value.
    pub required: &'static [(&'static str, &'static str)],
    pub entries_max: usize,
    /// Advice if there are too many entries.
    pub instead: &'static str,
    /// Returns an entry before its keys are read; other values stay as they are here.
    pub blank: fn() -> T,
}

macro_rules! key {
    ($name:literal, $since:literal, $kind:expr, $($field:ident).+, $doc:literal $(, unset: $unset:literal)?) => {
        KeyRow {
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

/// Keys that had another name before, with their present name.
pub const RENAMED: [(&str, &str); 1] = [("keeper.fence", "back_end in [cells]")];

const fn path(exists: PathKind) -> ValueKind {
    ValueKind::Path(exists)
}

const fn count(min: u64, max: u64) -> ValueKind {
    ValueKind::Count { min, max }
}

const fn size(min: u64, max: u64) -> ValueKind {
    ValueKind::Size { min, max }
}

const fn time(min: u64, max: u64) -> ValueKind {
    ValueKind::Time { min, max }
}

pub static LISTEN: ArrayRow<ListenSettings> = ArrayRow {
    path: "listen",
    doc: "Addresses that the edge listens on, one `[[listen]]` each. They replace the default, which is \
          plain HTTP on `0.0.0.0:80` and, where the machine has IPv6, `[::]:80`.",
    keys: &[
        key!(
            "address",
            "0.1",
            ValueKind::Address,
            address,
            "IP address and port. An IPv6 address takes IPv6 only, so `[::]:80` and `0.0.0.0:80` can be \
             used together."
        ),
        key!(
            "tls",
            "0.1",
            ValueKind::Flag,
            tls,
            "Speak TLS here (HTTP/2 and HTTP/1.1 by ALPN). Needs `certificates` in `[tls]`."
        ),
        key!(
            "proxy_protocol",
            "0.1",
            ValueKind::Flag,
            proxy_protocol,
            "Each connection here must begin with a header of the PROXY protocol, version 1 or 2, before \
             TLS. The header's address is the client's. Other connections are closed."
        ),
        key!(
            "proxy_protocol_from",
            "0.1",
            ValueKind::Networks,
            proxy_protocol_from,
            "Proxies that may connect here and whose header is trusted, where `proxy_protocol` is set. An \
             empty list means `trusted_proxies` of `[edge]`."
        ),
    ],
    required: &[("address", "address = \"0.0.0.0:80\"")],
    // Each costs one socket per edge thread.
    entries_max: 256,
    instead: "listen on [::] and 0.0.0.0 instead",
    blank: || ListenSettings::plain(SocketAddr::from(([0, 0, 0, 0], 80))),
};

pub static RULES: ArrayRow<RuleFile> = ArrayRow {
    path: "rules",
    doc: "Rule files in Ruby, one `[[rules]]` each, which run in this order. A changed file applies from \
          the next request on. [rules.md](rules.md) describes the rules.",
    keys: &[
        key!(
            "phase",
            "0.1",
            ValueKind::Choice(&["init", "post_read_request", "access_checker", "fixups", "log_transaction"]),
            phase,
            "Phase in which the rule runs. `init`: before the first request. `post_read_request`: after the \
             head of a request was read. `access_checker`: when its site is known. `fixups`: just before \
             the response. `log_transaction`: after the response."
        ),
        key!(
            "file",
            "0.1",
            ValueKind::Rule,
            path,
            "File that the edge reads with its own rights. `store:limits` is the rule that `nagaya rule set \
             limits FILE` put into the store; all nodes of a cluster share it. While the file is missing or \
             cannot be compiled, `on_error` applies."
        ),
        key!("cache", "0.1", ValueKind::Flag, cache, "Compile it once and do not look at the file again."),
        key!(
            "on_error",
            "0.1",
            ValueKind::Choice(&["pass", "refuse"]),
            on_error,
            "Action after an error in the rule, or when it used more than `[rule_limits]` allows. `pass`: \
             the request continues under the limits of its site. `refuse`: the response is 503."
        ),
    ],
    required: &[("file", "file = \"/etc/nagaya/rules/limits.rb\""), ("phase", "phase = \"access_checker\"")],
    entries_max: RULE_FILES_MAX,
    instead: "put rules of one phase into one file",
    blank: || RuleFile {
        phase: RulePhase::AccessChecker,
        path: PathBuf::new(),
        cache: false,
        on_error: OnError::default(),
    },
};

/// Paths of the arrays of tables.
pub const ARRAYS: [&str; 2] = [LISTEN.path, RULES.path];

pub static SECTIONS: &[SectionRow] = &[
    SectionRow { path: "", doc: "The node.", keys: NODE },
    SectionRow { path: "log", doc: "Logs.", keys: LOG },
    SectionRow { path: "tls", doc: "Certificates.", keys: TLS },
    SectionRow {
        path: "admin",
        doc: "The admin interface: HTTP over a Unix socket, used by `nagaya site`, `nagaya tenant` and `nagaya status`.",
        keys: ADMIN,
    },
    SectionRow { path: "tenants", doc: "Tenants.", keys: TENANTS },
    SectionRow { path: "edge", doc: "The unprivileged process that speaks HTTP.", keys: EDGE },
    SectionRow {
        path: "edge.limits",
        doc: "Limits against slow and oversized clients and backends.",
        keys: LIMITS,
    },
    SectionRow {
        path: "edge.networks",
        doc: "Limits for all clients of one network together, over all edge threads and sites. A network is \
              one IPv4 address or one IPv6 /64. Browsers, and people behind a carrier's NAT, stay far below \
              the defaults. `0` means no limit. Beyond a limit, a client gets 429 with `Retry-After`. If no \
              HTTP is spoken yet, its connection is closed. See \
              [operations.md](operations.md#many-connections-from-one-place).",
        keys: NETWORKS,
    },
    SectionRow {
        path: "edge.spool",
        doc: "Bodies that wait on disk. These are uploads, which nagaya reads before their program runs, \
              and responses of programs that clients read slowly. See \
              [operations.md](operations.md#slow-clients).",
        keys: SPOOL,
    },
    SectionRow {
        path: "keeper",
        doc: "The privileged process that starts programs for tenants.",
        keys: KEEPER,
    },
    SectionRow {
        path: "mail",
        doc: "Mail from tenants' programs. They use nagaya's own `sendmail`, or SMTP at port 25 of their \
              own loopback. Both lead to the node's mail server in the name of the tenant. See \
              [operations.md](operations.md#mail).",
        keys: MAIL,
    },
    SectionRow {
        path: "cells",
        doc: "Cells: the cgroups of tenants, sites and requests. Programs run in them and are limited by \
              them.",
        keys: CELLS,
    },
    SectionRow {
        path: "instances",
        doc: "Running applications (sites of kind `app`): when they rest, and their images. The record of a \
              site overrides these settings. Times from `reclaimed_after` on follow the measured costs of \
              each application ([how](instances.md#what-a-tier-costs)). See [instances.md](instances.md).",
        keys: INSTANCES,
    },
    SectionRow {
        path: "rule_limits",
        doc: "Limits of one evaluation of a rule file. Beyond a limit the evaluation ends, and the \
              `on_error` of the file applies.",
        keys: RULE_LIMITS,
    },
    SectionRow {
        path: "admission",
        doc: "Requests that come while as many requests run as allowed: see [admission.md](admission.md).",
        keys: ADMISSION,
    },
    SectionRow {
        path: "balance",
        doc: "Measures for applications that are short of CPU, and their end when the shortage is over. See \
              [instances.md](instances.md#when-it-is-short-of-cpu), and for several nodes \
              [cluster.md](cluster.md#load-moves-applications-too).",
        keys: BALANCE,
    },
    SectionRow {
        path: "cluster",
        doc: "Membership of this node in a cluster: see [cluster.md](cluster.md). `nagaya cluster init` or \
              `join` makes it a member. Without `listen` it stays alone.",
        keys: CLUSTER,
    },
    SectionRow {
        path: "receipts",
        doc: "Receipts, which show the resources and the waits of a request.",
        keys: RECEIPTS,
    },
];

const NODE: &[KeyRow<NodeSettings>] = &[
    key!("node", "0.1", ValueKind::Text, node, "Name of this node in `Via`, receipts and logs.", unset: "the machine's host name"),
    key!(
        "runtime_dir",
        "0.1",
        path(PathKind::Later),
        runtime_dir,
        "Directory of the sockets and the lock file. It is made at start. nagaya removes its own files \
         there at the end."
    ),
    key!(
        "state_dir",
        "0.1",
        path(PathKind::Later),
        state_dir,
        "Directory of the store of tenants and sites (`nagaya.redb`). It is made at start."
    ),
];

const LOG: &[KeyRow<NodeSettings>] = &[
    key!(
        "level",
        "0.1",
        ValueKind::Filter,
        log.level,
        "Content of the node's own log: a level, or a filter like `info,nagaya_edge=debug`. `--log` \
         overrides it."
    ),
    key!(
        "format",
        "0.1",
        ValueKind::Choice(&["auto", "text", "json"]),
        log.format,
        "Format of the node's own log. `auto` is text on a terminal and JSON elsewhere."
    ),
    key!("file", "0.1", path(PathKind::Later), log.file, "File of the node's own log; opened anew on `SIGUSR1`.", unset: "standard error"),
    key!("access", "0.1", path(PathKind::Later), edge.log.access, "Access log, written by the edge with its own rights; opened anew on `SIGUSR1`. `/dev/null`: none, as if nothing were said.", unset: "no access log"),
    key!(
        "access_format",
        "0.1",
        ValueKind::Choice(&["extended", "combined", "json"]),
        edge.log.format,
        "Format of the access log. `extended`: the combined log format, followed by host, site, tenant and \
         request id. `combined`: the same without these. `json`: one JSON object for each request."
    ),
];

const ADMIN: &[KeyRow<NodeSettings>] = &[
    key!("socket", "0.1", path(PathKind::Later), admin.socket, "Where the admin interface listens.", unset: "`admin.sock` in `runtime_dir`"),
    key!("group", "0.1", ValueKind::Text, admin.group, "Members of this group may use the admin interface too; they can then do with tenants and sites what root can.", unset: "only the user that runs nagaya"),
    key!(
        "read",
        "0.1",
        ValueKind::Accounts,
        admin.read,
        "Users, and groups as `@group`, that may look at status, metrics, lists and receipts. They do not \
         see values of applications' variables, settings and texts of rules. Roles are read at start \
         ([docs/operations.md](operations.md#who-may-use-the-admin-socket))."
    ),
    key!(
        "operate",
        "0.1",
        ValueKind::Accounts,
        admin.operate,
        "Users and groups that may also wake, rest, image, stop and move applications, drain nodes, and \
         read applications' logs. They cannot change a record."
    ),
    key!(
        "all",
        "0.1",
        ValueKind::Accounts,
        admin.all,
        "Users and groups that may do everything, like members of `group`. That is as much as root may do."
    ),
];

const TENANTS: &[KeyRow<NodeSettings>] = &[
    key!(
        "uid_base",
        "0.1",
        count(1_000, 4_000_000_000),
        uid_base,
        "First uid for tenants that are added without one. Each gets the first free uid from here on."
    ),
    key!(
        "system_users",
        "0.1",
        ValueKind::Accounts,
        system_ids.users,
        "System users that a tenant may be although their uid is below 1000 or that of `nobody`. The edge's \
         user is never allowed. Such a tenant has everything that this user has."
    ),
    key!(
        "system_groups",
        "0.1",
        ValueKind::Accounts,
        system_ids.groups,
        "System groups that a tenant may be in although their gid is below 1000. The same for groups whose \
         name leads to root, such as `docker` or `disk`. The edge's group and the `group` of `[admin]` are \
         never allowed."
    ),
    key!(
        "max_concurrent",
        "0.1",
        count(1, 1_000_000),
        edge.tenant_max_concurrent,
        "Requests of one tenant that may run at once, unless its record has a number."
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
        "Longest predicted wait with which a request may queue. A request that would wait longer gets a \
         ticket, or 503 with `Retry-After`. No request waits longer than twice this time."
    ),
    key!(
        "php_workers",
        "0.1",
        count(1, 10_000),
        edge.php_workers,
        "PHP workers that one tenant may have at once, unless its record has a number."
    ),
    key!(
        "php_requests",
        "0.1",
        count(1, 1_000_000_000),
        edge.php_requests,
        "Requests that one PHP worker serves before a new one replaces it. This helps against scripts and \
         modules that leak memory. Starting a worker takes longer than most pages."
    ),
    key!(
        "php_idle_timeout",
        "0.1",
        time(SECOND, DAY),
        edge.php_idle_ms,
        "Idle time after which a PHP worker ends."
    ),
];

const EDGE: &[KeyRow<NodeSettings>] = &[
    key!(
        "user",
        "0.1",
        ValueKind::Text,
        identity.user,
        "User with whose rights the edge runs; it should own nothing. Used only if root starts nagaya.",
        unset: "`nagaya` if there is such a user"
    ),
    key!(
        "uid",
        "0.1",
        count(1, 4_294_967_294),
        identity.uid,
        "The same user as a number, with the gid of the same number. For machines without that user.",
        unset: "the uid of `user`, or 65533"
    ),
    key!(
        "threads",
        "0.1",
        count(0, 1_024),
        edge.threads,
        "Edge threads, each with its own listening sockets. `0` means one for each core."
    ),
    key!("h2c", "0.1", ValueKind::Flag, edge.h2c, "Take HTTP/2 by prior knowledge on addresses without TLS."),
    key!(
        "trusted_proxies",
        "0.1",
        ValueKind::Networks,
        edge.trusted_proxies,
        "Peers that are trusted to name the client: `Forwarded`, `X-Forwarded-*` and others \
         (docs/header-fields.md). From other peers these fields are dropped."
    ),
];

const TLS: &[KeyRow<NodeSettings>] = &[key!(
    "certificates",
    "0.1",
    path(PathKind::Directory),
    keeper.certificates,
    "Directory of `<host name>.pem` files, each with a chain and its key. nagaya reads a file when its name \
     is requested, and again after a change.",
    unset: "no TLS"
)];

const KEEPER: &[KeyRow<NodeSettings>] = &[
    key!(
        "php_cgi",
        "0.1",
        path(PathKind::File),
        keeper.php_cgi,
        "The FastCGI program of PHP (Debian: package `php-cgi`). It need not exist while no site uses PHP and the key is not set."
    ),
    key!(
        "cgi_per_tenant",
        "0.1",
        count(1, 1_000_000),
        keeper.cgi_per_tenant_max,
        "CGI programs of one tenant that may run at once."
    ),
    key!(
        "processes",
        "0.1",
        count(1, 4_000_000),
        keeper.processes_max,
        "Programs and workers of all tenants together. A request that needs one more gets 503."
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
        "Time in which an application must listen, unless its site has a number."
    ),
    key!(
        "stderr_bytes",
        "0.1",
        size(0, 16 * MIB),
        keeper.stderr_bytes_max,
        "Standard error that is logged for one program. For a program that is kept, this is the limit per \
         minute."
    ),
    key!(
        "programs_network",
        "0.1",
        ValueKind::Choice(&["own", "host"]),
        keeper.programs.network,
        "Network of CGI programs and PHP workers. `own`: each tenant has its own network, in which names \
         are resolved. By TCP it reaches everything outside the node, `local_ports`, and the node's own \
         sites. `host`: all share the node's network and reach everything that listens there, also other \
         tenants' servers. A change applies to programs that start after it. A tenant's record can override \
         it (`nagaya tenant set NAME --network`)."
    ),
    key!(
        "programs_system_calls",
        "0.1",
        ValueKind::Choice(&["filtered", "all"]),
        keeper.programs.system_calls,
        "System calls that CGI programs and PHP workers may use. `filtered`: those that usual software \
         needs. Not possible are new namespaces, mounts, tracing of others, `bpf`, `io_uring` and the like \
         (docs/operations.md has the list). Programs for 32 bits are ended. `all`: everything that their \
         rights allow. A change applies to programs that start after it."
    ),
    key!(
        "local_ports",
        "0.1",
        ValueKind::Ports,
        keeper.programs.local_ports,
        "Services on the node's loopback addresses that CGI programs and PHP workers of all tenants may \
         use. It counts where their network is their own. Usually these are mail and databases. Each \
         service must know by itself who may do what."
    ),
];

const MAIL: &[KeyRow<NodeSettings>] = &[
    key!(
        "relay",
        "0.1",
        ValueKind::Flag,
        keeper.mail.relay,
        "Run the mail relay for programs with a network of their own. Without it, CGI programs and PHP \
         workers reach `local_ports` of `[keeper]`. Mail through a mail server among these is not counted. \
         Applications then reach no mail server."
    ),
    key!(
        "server",
        "0.1",
        ValueKind::Address,
        keeper.mail.server,
        "Mail server that takes messages from the relay by SMTP, without a login. Usually it is the node's \
         own. It must let this node send to others."
    ),
    key!(
        "recipients_per_hour",
        "0.1",
        count(0, 1_000_000),
        keeper.mail.recipients_per_hour,
        "Recipients to whom one tenant may send within an hour, unless its record has a number. `nagaya \
         tenant set NAME --mail-per-hour N` sets that number. `0` means none. The counts survive a restart \
         of the keeper, and begin again with the node."
    ),
    key!("recipients", "0.1", count(1, 10_000), keeper.mail.recipients_max, "Recipients of one message."),
    key!("message_bytes", "0.1", size(1024, 1024 * MIB), keeper.mail.bytes_max, "Bytes of one message."),
    key!(
        "bytes_per_hour",
        "0.1",
        size(1024, 1024 * 1024 * MIB),
        keeper.mail.bytes_per_hour,
        "Bytes of all messages of one tenant within an hour, whether they are delivered or not. This limits \
         how much a tenant adds to the mail server's queue."
    ),
    key!(
        "at_once",
        "0.1",
        count(1, 64),
        keeper.mail.at_once,
        "Messages of one tenant that are sent to the mail server at once; of all tenants together 256. A \
         tenant's programs may have twice as many mail connections open, or 32 if that is more."
    ),
];

const CELLS: &[KeyRow<NodeSettings>] = &[
    key!(
        "back_end",
        "0.1",
        ValueKind::Choice(&["auto", "cgroup-v2", "cgroup-v1", "process-group"]),
        keeper.back_end,
        "Mechanism that limits a program and ends it together with everything that it started. `auto` uses \
         what the machine has: cgroup v2, then v1, each controller where it is mounted. `process-group` \
         limits nothing. `nagaya doctor` shows what the machine has. A change applies at the next start."
    ),
    key!(
        "processes_per_tenant",
        "0.1",
        count(16, 4_000_000),
        keeper.processes_per_tenant,
        "Processes and threads that one tenant may have at once, unless its record has a number. A fork \
         bomb cannot exceed it."
    ),
];

/// Longest time that an instance may stay at a tier: in effect for ever.
const IDLE_MAX: u64 = 365 * DAY;

const INSTANCES: &[KeyRow<NodeSettings>] = &[
    key!(
        "criu",
        "0.1",
        path(PathKind::Later),
        keeper.instances.criu,
        "The CRIU program (4.1 or newer). While it is missing or too old, applications rest only in memory, \
         and start again after that. The keeper looks for it at its start.",
        unset: "the first that works, as `nagaya doctor` says"
    ),
    key!(
        "kernels",
        "0.1",
        path(PathKind::Later),
        keeper.instances.kernels,
        "Where the kernels of applications with `--kernel node` are: `boot/vmlinuz-*-cloud-amd64` and \
         `lib/modules` in this directory, which only root may write. A package that is unpacked and not \
         installed will do."
    ),
    key!(
        "images",
        "0.1",
        path(PathKind::Later),
        images,
        "Directory of the images, for root only. An image contains everything that the application had in \
         memory, also its secrets. A change applies at the next start.",
        unset: "`images` in `state_dir`"
    ),
    key!(
        "image_bytes",
        "0.1",
        size(0, 256 * TIB),
        keeper.instances.image_bytes_max,
        "All images together. Beyond it, the least recently used image is removed. `0B`: no image is taken."
    ),
    key!(
        "image_age",
        "0.1",
        time(60 * SECOND, IDLE_MAX),
        keeper.instances.image_age_max_ms,
        "Age at which an image is replaced. Before its instance rests on it again, without requests, it is \
         started and a new image is taken. An image of twice this age is no longer used. An image that was \
         not used for this time is removed."
    ),
    key!(
        "image_bandwidth",
        "0.1",
        size(0, TIB),
        keeper.instances.image_bandwidth,
        "In a cluster: bytes per second of all images to and from other nodes together. `0B`: no limit."
    ),
    key!(
        "log_bytes",
        "0.1",
        size(64 * KIB, GIB),
        keeper.instances.log_bytes_max,
        "One file of an application's own log, `instance-logs/TENANT/SITE.log` beside the images. Before a \
         file becomes larger, it is renamed to `SITE.log.1`, and that one to `SITE.log.2`. In one minute, \
         an application may write half of what all files of its log hold. The rest is dropped, and the log \
         says so."
    ),
    key!(
        "log_files",
        "0.1",
        count(0, 100),
        keeper.instances.log_files_max,
        "Files of each application's log, with the current one; older ones are removed. `0`: no files. The \
         output of an application is then known until the keeper ends."
    ),
    key!(
        "wakes_at_once",
        "0.1",
        count(0, 1_024),
        keeper.instances.wakes_at_once,
        "Applications that are started or restored at once; the others wait in order. More at once make \
         each of them later, and none earlier. A start gives its place to the next one after 10 s. The same \
         happens if it sleeps for half a second or is stopped by its own CPU limit. If a tenant has four \
         such starts, its next ones wait for them. `0` means one for each core."
    ),
    key!(
        "huge_pages",
        "0.1",
        ValueKind::Choice(&["as-is", "64KiB"]),
        keeper.instances.huge_pages,
        "Size of the pages in which **all programs of the machine** get their memory. With `64KiB` the \
         keeper switches on multi-size THP of that size (Linux 6.8; the kernel's `transhuge.rst`). Some \
         applications are then restored sooner from their images, others not (`wake` in \
         docs/experiments.md). nagaya never switches it off again; you or the next boot of the machine do. \
         `as-is`: the switch is not touched."
    ),
    key!(
        "quiet_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.quiet_ms,
        "After this time without a request, an application runs only when nobody else needs the CPU. The \
         edge says 50 ms after the last request that there is none. A tier is left out if its time is not \
         shorter than that of the next tier."
    ),
    key!(
        "frozen_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.frozen_ms,
        "After this time it is frozen: it keeps its memory and uses no CPU time. Its own timers stop, too. \
         It comes back within milliseconds."
    ),
    key!(
        "reclaimed_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.reclaimed_ms,
        "After this time its memory goes to swap, as far as there is any."
    ),
    key!(
        "image_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.image_ms,
        "After this time its processes end, and only its image on disk remains."
    ),
    key!(
        "cold_after",
        "0.1",
        time(0, IDLE_MAX),
        keeper.instances.idle.cold_ms,
        "The same for an application without an image. It starts again at its next request."
    ),
];

const RULE_LIMITS: &[KeyRow<NodeSettings>] = &[
    key!(
        "instructions",
        "0.1",
        count(1_000, 100_000_000),
        edge.rule_limits.instructions,
        "Instructions of the Ruby machine. The default is about a millisecond; a rule that looks up a host \
         needs hundreds."
    ),
    key!(
        "memory",
        "0.1",
        size(MIB, GIB),
        edge.rule_limits.memory,
        "Memory of the Ruby machine of one edge thread, with everything that rules keep between requests."
    ),
];

const ADMISSION: &[KeyRow<NodeSettings>] = &[
    key!(
        "node_max_concurrent",
        "0.1",
        count(0, 1_000_000),
        edge.admission.node_max_concurrent,
        "Requests of all tenants that may run at once. Tenants share it by weight when they want more. `0`: \
         as many as their tenants may."
    ),
    key!(
        "tickets",
        "0.1",
        ValueKind::Flag,
        edge.admission.tickets,
        "Give a ticket to a client that finds a queue too long: a reserved slot, and a time to come back. A \
         site's record can override it."
    ),
    key!("slot", "0.1", time(1_000, HOUR), edge.admission.slot_ms, "Length of a ticket's slot."),
    key!(
        "horizon",
        "0.1",
        time(1_000, DAY),
        edge.admission.horizon_ms,
        "Time ahead for which slots are given. A client that would come later gets 503 without a ticket."
    ),
    key!(
        "tickets_max",
        "0.1",
        count(1, 100_000),
        edge.admission.tickets_max,
        "Tickets of one lane that may be valid at once."
    ),
    key!(
        "penalty",
        "0.1",
        time(0, 60_000),
        edge.admission.penalty_ms,
        "Delay of the response to a client that comes back before the given time. It holds no permit \
         meanwhile."
    ),
    key!(
        "body_bytes",
        "0.1",
        size(0, 64 * GIB),
        edge.admission.body_bytes,
        "Bytes of request bodies in memory, for the requests that wait in one lane. Of each body at most 64 \
         KiB."
    ),
];

const BALANCE: &[KeyRow<NodeSettings>] = &[
    key!(
        "every",
        "0.1",
        time(100, 60_000),
        balance.every_ms,
        "Interval at which the use of applications is measured."
    ),
    key!(
        "short",
        "0.1",
        count(1, 100),
        balance.short,
        "Percent of time with work to do and without a CPU. From this value on, an application is short of \
         CPU. The reason can be its own limit or other programs. It is no longer short below a fifth of \
         this."
    ),
    key!(
        "raise_max",
        "0.1",
        count(1, 1_000),
        balance.raise_max,
        "The CPU limit is raised at once, twofold at a time. The highest value is this many times the limit \
         in the site's record. It never exceeds the tenant's limit. A rule's `boost` has the same bound. \
         `cpu_max` in a site's record overrides this. `1`: never."
    ),
    key!(
        "busy",
        "0.1",
        count(1, 100),
        balance.busy,
        "Percent of this node's CPUs in use above which no application gets more here. `100`: there is no \
         such bound."
    ),
    key!(
        "lower_after",
        "0.1",
        time(1_000, DAY),
        balance.lower_after_ms,
        "Time after which a raised limit is lowered by one step, if less than half of it was needed. If \
         several nodes have an application, the last one gives it up in the same way. Then its whole use \
         must be less than half for one node fewer."
    ),
    key!(
        "move_after",
        "0.1",
        time(1_000, DAY),
        balance.move_after_ms,
        "In a cluster: time of shortage, without more to get here, after which an application moves to a \
         better node. It moves as soon as at most one request runs. If no node is better and its site may \
         run on several nodes (`max`), one more node gets it."
    ),
    key!(
        "move_anyway_after",
        "0.1",
        time(1_000, DAY),
        balance.move_anyway_after_ms,
        "Time after which it moves while requests run. Those end first; new ones wait."
    ),
    key!(
        "target",
        "0.1",
        count(1, 100),
        balance.target,
        "A better node uses at most this percent of its CPUs, with the application on it."
    ),
    key!(
        "better_by",
        "0.1",
        count(1, 100),
        balance.better_by,
        "A better node also uses this many percent less than this node."
    ),
    key!(
        "site_rests",
        "0.1",
        time(1_000, 365 * DAY),
        balance.site_rests_ms,
        "An application that moved because of its load stays where it is for this time; longer if it moves \
         again and again. An additional node keeps it for at least this time, too."
    ),
    key!(
        "moves_per_minute",
        "0.1",
        count(0, 1_000),
        balance.moves_per_minute,
        "Moves and replicas because of load in which a node takes part. `0`: it gives nothing away because \
         of load."
    ),
];

const CLUSTER: &[KeyRow<NodeSettings>] = &[
    key!(
        "listen",
        "0.1",
        ValueKind::Address,
        cluster.listen,
        "IP address and port at which other nodes reach this node's edge: TCP for requests, UDP for probes. \
         Only holders of a certificate of the cluster get an answer.",
        unset: "this node is in no cluster"
    ),
    key!(
        "advertise",
        "0.1",
        ValueKind::Address,
        cluster.advertise,
        "The same address as other nodes must write it, if that is not `listen`. This is so behind address \
         translation, or if `listen` is `0.0.0.0`.",
        unset: "`listen`"
    ),
    key!(
        "fence",
        "0.1",
        time(100, 10 * SECOND),
        cluster.fence_ms,
        "Length of this node's lease. If the store confirms nothing for this time, the node freezes its \
         placed applications and serves none of them. If a site moves away from a silent node, the new node \
         responds after this time. Nodes may have different values."
    ),
    key!(
        "probe",
        "0.1",
        ValueKind::Choice(&["udp", "connect", "icmp"]),
        cluster.probe,
        "How a silent node is probed. `udp`: a signed datagram. `connect`: a TCP connection that is reset \
         at once. `icmp`: an ICMP echo to its host."
    ),
    key!(
        "probe_max",
        "0.1",
        time(5, 100),
        cluster.probe_ms,
        "Longest time that a probe waits for an answer. Measurements only shorten it."
    ),
];

const RECEIPTS: &[KeyRow<NodeSettings>] = &[
    key!(
        "allow",
        "0.1",
        ValueKind::Networks,
        edge.receipts.allow,
        "Clients whose responses have `Server-Timing` and `Nagaya-Receipt`. The access log and `/metrics` \
         have the same numbers for all requests."
    ),
    key!(
        "keep",
        "0.1",
        count(0, 1_000_000),
        edge.receipts.keep,
        "Receipts that each edge thread keeps in memory for `nagaya explain`, about 1 KiB each. Of requests \
         for files without a delay, it keeps an eighth as many. `0` keeps none, and the edge then does not \
         measure its own time on a request."
    ),
];

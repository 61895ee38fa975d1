//! The table for `Cgroup` of mruby-cgroup.

use crate::api::compatibility::class::MethodRow;
use crate::api::compatibility::class::MethodSupport::{Differs, Missing, Same};
use crate::api::compatibility::class::UpstreamClass;

const NEW: &str = "anything but a String is a `TypeError`; with a name that cannot be (`/` inside, `..`) \
    the object does nothing, and the log says so";
const OPEN: &str = "done when the rules have ended; all three make the group if it is not there";
const DELETE: &str = "done when the rules have ended; a request's own cell is removed by nagaya in any case";
const ATTACH: &str =
    "from when the request runs until its body has ended; another process's id is logged and ignored";
const EXIST: &str = "as it was when the object was made, or true after `create`, `modify` or `open`";
const PERIOD: &str = "a quota without a period is the same share, given in pieces of 10 ms and not 100 \
    ms, so that what is limited stands still for shorter times";
const DEVICES: &str = "also `:root`, the disk of the site's files; several devices can be set, one after \
    the other; one that is not there is logged";
const AS_SEEN: &str = "as nagaya last saw the group; nil if it has none of that name";
const NOT_A_LIMIT: &str = "read back, but not set, and logged: real-time scheduling is no limit of a request";
const NO_SWAP: &str = "read back, but not set, and logged: nagaya sets no limits of swap";
const NO_OOM: &str =
    "read back, but not set, and logged: what runs out of memory is ended, never left standing";

/// Methods that all six classes have.
macro_rules! group {
    ($name:literal, $($row:expr),* $(,)?) => {
        UpstreamClass {
            name: $name,
            rows: &[
                MethodRow(".new", Differs(NEW)),
                MethodRow("create modify open", Differs(OPEN)),
                MethodRow("delete close", Differs(DELETE)),
                MethodRow("attach", Differs(ATTACH)),
                MethodRow("exist?", Differs(EXIST)),
                MethodRow("group_name root_attach", Same),
                $($row),*
            ],
        }
    };
}

pub const CLASSES: &[UpstreamClass] = &[
    UpstreamClass {
        name: "Cgroup",
        rows: &[MethodRow(
            ".create .modify .open .delete .close .attach .exist? .group_name",
            Missing("upstream reads memory that is not there; call them on an object"),
        )],
    },
    group!(
        "Cgroup::CPU",
        MethodRow("detach", Same),
        MethodRow("shares shares=", Differs("2 to 10000; above and below is set to the nearest and logged")),
        MethodRow("cfs_quota_us cfs_quota_us= cfs_period_us cfs_period_us=", Differs(PERIOD)),
        MethodRow("rt_period_us rt_period_us= rt_runtime_us rt_runtime_us=", Differs(NOT_A_LIMIT)),
        MethodRow("stat", Differs(AS_SEEN)),
        MethodRow("cpuacct", Same),
    ),
    group!(
        "Cgroup::CPUACCT",
        MethodRow("usage stat usage_percpu", Differs(AS_SEEN)),
        MethodRow("usage=", Differs("not set, and logged: receipts are made from it")),
    ),
    group!("Cgroup::CPUSET", MethodRow("detach", Same), MethodRow("cpus cpus= mems mems=", Same)),
    group!(
        "Cgroup::BLKIO",
        MethodRow("detach", Same),
        MethodRow("throttle_read_bps_device throttle_read_bps_device=", Differs(DEVICES)),
        MethodRow("throttle_write_bps_device throttle_write_bps_device=", Differs(DEVICES)),
        MethodRow("throttle_read_iops_device throttle_read_iops_device=", Differs(DEVICES)),
        MethodRow("throttle_write_iops_device throttle_write_iops_device=", Differs(DEVICES)),
    ),
    group!(
        "Cgroup::MEMORY",
        MethodRow("limit_in_bytes limit_in_bytes=", Same),
        MethodRow("usage_in_bytes max_usage_in_bytes", Differs(AS_SEEN)),
        MethodRow("memsw_limit_in_bytes memsw_limit_in_bytes=", Differs(NO_SWAP)),
        MethodRow("memsw_usage_in_bytes memsw_max_usage_in_bytes", Differs(AS_SEEN)),
        MethodRow("oom_control oom_control=", Differs(NO_OOM)),
        MethodRow("cgroup_event_control=", Differs("not set, and logged: rules do not wait for events")),
    ),
    group!("Cgroup::PIDS", MethodRow("max max=", Same), MethodRow("current", Differs(AS_SEEN))),
];

//! The table for `Cgroup` of mruby-cgroup.

use super::Class;
use super::Row;
use super::Support::{Differs, Missing, Same};

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

/// What all six classes have.
macro_rules! group {
    ($name:literal, $($row:expr),* $(,)?) => {
        Class {
            name: $name,
            rows: &[
                Row(".new", Differs(NEW)),
                Row("create modify open", Differs(OPEN)),
                Row("delete close", Differs(DELETE)),
                Row("attach", Differs(ATTACH)),
                Row("exist?", Differs(EXIST)),
                Row("group_name root_attach", Same),
                $($row),*
            ],
        }
    };
}

pub const CLASSES: &[Class] = &[
    Class {
        name: "Cgroup",
        rows: &[Row(
            ".create .modify .open .delete .close .attach .exist? .group_name",
            Missing("upstream reads memory that is not there; call them on an object"),
        )],
    },
    group!(
        "Cgroup::CPU",
        Row("detach", Same),
        Row("shares shares=", Differs("2 to 10000; above and below is set to the nearest and logged")),
        Row("cfs_quota_us cfs_quota_us= cfs_period_us cfs_period_us=", Differs(PERIOD)),
        Row("rt_period_us rt_period_us= rt_runtime_us rt_runtime_us=", Differs(NOT_A_LIMIT)),
        Row("stat", Differs(AS_SEEN)),
        Row("cpuacct", Same),
    ),
    group!(
        "Cgroup::CPUACCT",
        Row("usage stat usage_percpu", Differs(AS_SEEN)),
        Row("usage=", Differs("not set, and logged: receipts are made from it")),
    ),
    group!("Cgroup::CPUSET", Row("detach", Same), Row("cpus cpus= mems mems=", Same)),
    group!(
        "Cgroup::BLKIO",
        Row("detach", Same),
        Row("throttle_read_bps_device throttle_read_bps_device=", Differs(DEVICES)),
        Row("throttle_write_bps_device throttle_write_bps_device=", Differs(DEVICES)),
        Row("throttle_read_iops_device throttle_read_iops_device=", Differs(DEVICES)),
        Row("throttle_write_iops_device throttle_write_iops_device=", Differs(DEVICES)),
    ),
    group!(
        "Cgroup::MEMORY",
        Row("limit_in_bytes limit_in_bytes=", Same),
        Row("usage_in_bytes max_usage_in_bytes", Differs(AS_SEEN)),
        Row("memsw_limit_in_bytes memsw_limit_in_bytes=", Differs(NO_SWAP)),
        Row("memsw_usage_in_bytes memsw_max_usage_in_bytes", Differs(AS_SEEN)),
        Row("oom_control oom_control=", Differs(NO_OOM)),
        Row("cgroup_event_control=", Differs("not set, and logged: rules do not wait for events")),
    ),
    group!("Cgroup::PIDS", Row("max max=", Same), Row("current", Differs(AS_SEEN))),
];

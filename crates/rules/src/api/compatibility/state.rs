//! The tables for `Userdata`, `Cache` and `Mutex`, which come with mod_mruby and ngx_mruby.

use crate::api::compatibility::class::MethodRow;
use crate::api::compatibility::class::MethodSupport::{Differs, Missing, Same};
use crate::api::compatibility::class::UpstreamClass;

const COPIES: &str = "one for all threads, and a copy of nil, booleans, numbers, Strings, Symbols, and an Array or a Hash of these, or a \
    Cache or a Mutex; nothing else";
const IN_MEMORY: &str = "in memory, and gone when the server starts anew; `:filename` is a name as `:namespace` is, and no file; \
    `:size_mb` and `:min_alloc_size` mean nothing, the bounds are in rules.md";
const ONE_LOCK: &str = "all that are made without `:name` are one lock, with `:global` or without";
const CLOSED: &str = "on a closed one a `RuntimeError`";

pub const USERDATA: &[UpstreamClass] = &[UpstreamClass {
    name: "Userdata",
    rows: &[MethodRow(".new", Same), MethodRow("method_missing", Differs(COPIES))],
}];

pub const CACHE: &[UpstreamClass] = &[UpstreamClass {
    name: "Cache",
    rows: &[
        MethodRow(".new", Differs(IN_MEMORY)),
        MethodRow("get [] get_by_no_lock", Differs(CLOSED)),
        MethodRow(
            "set []=",
            Differs(
                "a key of 8 KiB and a value of 64 KiB at most; when it is full the entries go that were not set for longest",
            ),
        ),
        MethodRow("delete clear size close", Differs(CLOSED)),
        MethodRow(".drop", Differs("clears it")),
        MethodRow("shm_status", Differs("of all caches together")),
        MethodRow("check_consistency", Differs("true")),
        MethodRow(".enable_test_crash .disable_test_crash", Missing("rules cannot end the server")),
    ],
}];

pub const MUTEX: &[UpstreamClass] = &[UpstreamClass {
    name: "Mutex",
    rows: &[
        MethodRow(".new", Differs(ONE_LOCK)),
        MethodRow("try_lock", Same),
        MethodRow("lock", Differs("waits 50 ms at most, and then raises a `RuntimeError`")),
        MethodRow(
            "unlock",
            Differs("does nothing to a lock of another run; the end of a run gives back what it holds"),
        ),
        MethodRow(
            "try_lock_loop",
            Differs(
                "waits 50 ms at most; then it returns true without running the block, where upstream takes the lock by force",
            ),
        ),
        MethodRow("new2", Missing("use `Mutex.new`")),
    ],
}];

//! `Cgroup` as mruby-cgroup has it: objects that buffer limits under a group's name, and record in the verdict what the
//! rule does with them. Nothing here touches a cgroup.
//!
//! What upstream swallows is swallowed too, but logged: a name that cannot be, a value out of range, a device that is
//! written wrong. Not here: `root_attach` and `cpuacct`, which are Ruby (`prelude/cgroup.rb`); the cells (`keeper`).

use nagaya_cmdb::cell::{
    CPU_PERIOD_DEFAULT_US, CPU_PERIOD_MAX_US, CPU_PERIOD_MIN_US, CPU_QUOTA_MIN_US, CPU_SHARES_MAX,
    CPU_SHARES_MIN, CellChange, CellName, Controller, CpuQuota, DEVICES_PER_CELL_MAX, Device, IoLimit,
    Limits, NamedCell, Scope,
};

use crate::facts::Facts;
use crate::native::{Arg, Call, Native, NativeError, Value};
use crate::verdict::Verdict;

use super::complaint::complain;

/// The kernel's period where a group sets none, microseconds.
const KERNEL_PERIOD_US: u32 = 100_000;

type Given<'a> = Result<Value<'a>, NativeError>;

const ALL: &str = "Cgroup";
const CPU: &str = "Cgroup::CPU";
const CPUACCT: &str = "Cgroup::CPUACCT";
const CPUSET: &str = "Cgroup::CPUSET";
const BLKIO: &str = "Cgroup::BLKIO";
const MEMORY: &str = "Cgroup::MEMORY";
const PIDS: &str = "Cgroup::PIDS";

pub const NATIVES: &[Native] = &[
    Native::method(ALL, "create", save),
    Native::method(ALL, "modify", save),
    Native::method(ALL, "open", save),
    Native::method(ALL, "delete", delete),
    Native::method(ALL, "close", delete),
    Native::method(ALL, "attach", attach),
    Native::method(ALL, "exist?", |call| Ok(call.this::<Group>()?.exists.into())),
    Native::method(ALL, "group_name", |call| Ok(call.this::<Group>()?.name.as_given().into())),
    Native::method(CPU, "initialize", |call| open(call, Controller::Cpu)),
    Native::method(CPU, "detach", detach),
    Native::method(CPU, "shares=", set_shares),
    Native::method(CPU, "shares", |call| {
        number(call, "cpu.shares", |group| group.limits.cpu_shares.map(i64::from))
    }),
    Native::method(CPU, "cfs_quota_us=", |call| {
        let quota = call.int(0)?;
        call.this::<Group>()?.quota_us = Some(quota);
        Ok(Value::This)
    }),
    Native::method(CPU, "cfs_quota_us", |call| number(call, "cpu.cfs_quota_us", |group| group.quota_us)),
    Native::method(CPU, "cfs_period_us=", |call| {
        let period = call.int(0)?;
        call.this::<Group>()?.period_us = Some(period);
        Ok(Value::This)
    }),
    Native::method(CPU, "cfs_period_us", |call| number(call, "cpu.cfs_period_us", |group| group.period_us)),
    Native::method(CPU, "rt_period_us=", |call| keep_number(call, "cpu.rt_period_us", REAL_TIME)),
    Native::method(CPU, "rt_period_us", |call| kept_number(call, "cpu.rt_period_us")),
    Native::method(CPU, "rt_runtime_us=", |call| keep_number(call, "cpu.rt_runtime_us", REAL_TIME)),
    Native::method(CPU, "rt_runtime_us", |call| kept_number(call, "cpu.rt_runtime_us")),
    Native::method(CPU, "stat", |call| text(call, "cpu.stat", |_| None)),
    Native::method(CPUACCT, "initialize", |call| open(call, Controller::Cpuacct)),
    Native::method(CPUACCT, "usage=", |call| keep_number(call, "cpuacct.usage", "receipts are made from it")),
    Native::method(CPUACCT, "usage", |call| number(call, "cpuacct.usage", |_| None)),
    Native::method(CPUACCT, "stat", |call| text(call, "cpuacct.stat", |_| None)),
    Native::method(CPUACCT, "usage_percpu", |call| text(call, "cpuacct.usage_percpu", |_| None)),
    Native::method(CPUSET, "initialize", |call| open(call, Controller::Cpuset)),
    Native::method(CPUSET, "detach", detach),
    Native::method(CPUSET, "cpus=", |call| set_list(call, |limits, list| limits.cpus = Some(list))),
    Native::method(CPUSET, "cpus", |call| text(call, "cpuset.cpus", |group| group.limits.cpus.as_deref())),
    Native::method(CPUSET, "mems=", |call| set_list(call, |limits, list| limits.mems = Some(list))),
    Native::method(CPUSET, "mems", |call| text(call, "cpuset.mems", |group| group.limits.mems.as_deref())),
    Native::method(BLKIO, "initialize", |call| open(call, Controller::Blkio)),
    Native::method(BLKIO, "detach", detach),
    Native::method(BLKIO, "throttle_read_bps_device=", |call| set_device(call, Rate::ReadBps)),
    Native::method(BLKIO, "throttle_read_bps_device", |call| device(call, Rate::ReadBps)),
    Native::method(BLKIO, "throttle_write_bps_device=", |call| set_device(call, Rate::WriteBps)),
    Native::method(BLKIO, "throttle_write_bps_device", |call| device(call, Rate::WriteBps)),
    Native::method(BLKIO, "throttle_read_iops_device=", |call| set_device(call, Rate::ReadIops)),
    Native::method(BLKIO, "throttle_read_iops_device", |call| device(call, Rate::ReadIops)),
    Native::method(BLKIO, "throttle_write_iops_device=", |call| set_device(call, Rate::WriteIops)),
    Native::method(BLKIO, "throttle_write_iops_device", |call| device(call, Rate::WriteIops)),
    Native::method(MEMORY, "initialize", |call| open(call, Controller::Memory)),
    Native::method(MEMORY, "limit_in_bytes=", set_memory),
    Native::method(MEMORY, "limit_in_bytes", |call| {
        number(call, "memory.limit_in_bytes", |group| {
            group.limits.memory.and_then(|bytes| i64::try_from(bytes).ok())
        })
    }),
    Native::method(MEMORY, "usage_in_bytes", |call| number(call, "memory.usage_in_bytes", |_| None)),
    Native::method(MEMORY, "max_usage_in_bytes", |call| number(call, "memory.max_usage_in_bytes", |_| None)),
    Native::method(MEMORY, "memsw_limit_in_bytes=", |call| {
        keep_number(call, "memory.memsw.limit_in_bytes", SWAP)
    }),
    Native::method(MEMORY, "memsw_limit_in_bytes", |call| kept_number(call, "memory.memsw.limit_in_bytes")),
    Native::method(MEMORY, "memsw_usage_in_bytes", |call| {
        number(call, "memory.memsw.usage_in_bytes", |_| None)
    }),
    Native::method(MEMORY, "memsw_max_usage_in_bytes", |call| {
        number(call, "memory.memsw.max_usage_in_bytes", |_| None)
    }),
    Native::method(MEMORY, "oom_control=", set_oom_control),
    Native::method(MEMORY, "oom_control", oom_control),
    Native::method(MEMORY, "cgroup_event_control=", |call| {
        call.text(0)?;
        ignore(call, "cgroup.event_control", "rules do not wait for events");
        Ok(Value::This)
    }),
    Native::method(PIDS, "initialize", |call| open(call, Controller::Pids)),
    Native::method(PIDS, "max=", set_processes),
    Native::method(PIDS, "max", |call| {
        number(call, "pids.max", |group| group.limits.processes.map(i64::from))
    }),
    Native::method(PIDS, "current", |call| number(call, "pids.current", |_| None)),
];

const REAL_TIME: &str = "real-time scheduling is no limit of a request";
const SWAP: &str = "nagaya sets no limits of swap";

/// What one object of a `Cgroup` class holds. Two are made for each request by rules like the paper's, so that nothing
/// is kept twice.
struct Group {
    controller: Controller,
    name: Name,
    /// As `exist?` says it: from when the object was made, or after `create`.
    exists: bool,
    limits: Limits,
    /// CPU time per period as the rule set them, before they are one limit.
    quota_us: Option<i64>,
    period_us: Option<i64>,
    /// Which device of `limits` each rate was last set for, by `Rate`.
    devices: [Option<Device>; 4],
    /// Values that are read back but not applied.
    kept: Vec<(&'static str, i64)>,
}

enum Name {
    Cell {
        name: CellName,
        /// The rule wrote it with a `/` in front, which means nothing.
        slash: bool,
    },
    /// `/`, or nothing: where a process is that is in no group.
    Root(&'static str),
    /// Refused; all that the object does is nothing.
    Bad(Box<str>),
}

impl Name {
    fn as_given(&self) -> String {
        match self {
            Self::Cell { name, slash } => format!("{}{name}", if *slash { "/" } else { "" }),
            Self::Root(given) => (*given).to_owned(),
            Self::Bad(given) => given.to_string(),
        }
    }
}

#[derive(Clone, Copy)]
enum Rate {
    ReadBps,
    WriteBps,
    ReadIops,
    WriteIops,
}

// === Objects ===

fn open<'a>(call: &mut Call<'a>, controller: Controller) -> Given<'a> {
    call.expect(1, 1)?;
    let given = call.text(0)?;
    let name = match CellName::parse(given) {
        _ if given.is_empty() => Name::Root(""),
        _ if given == "/" => Name::Root("/"),
        Ok(name) => Name::Cell { name, slash: given.starts_with('/') },
        Err(error) => {
            let text = format!("Cgroup: {error}; the rule goes on without this group");
            complain(call.facts, call.verdict, &text);
            Name::Bad(given.into())
        }
    };
    let exists = match &name {
        Name::Cell { name, .. } => exists(call, controller, name),
        Name::Root(_) => true,
        Name::Bad(_) => false,
    };
    call.keep(Group {
        controller,
        name,
        exists,
        limits: Limits::default(),
        quota_us: None,
        period_us: None,
        devices: [None; 4],
        kept: Vec::new(),
    });
    Ok(Value::Nil)
}

/// As libcgroup sees it: a group is there if any controller has it, or this rule has made it.
fn exists(call: &Call<'_>, own: Controller, name: &CellName) -> bool {
    let others = Controller::ALL.into_iter().filter(|controller| *controller != own);
    let made = |change: &CellChange| matches!(change, CellChange::Set { name: made, .. } if made == name);
    let attached =
        |cell: &NamedCell| cell.scope == Scope::Node && cell.name == *name && cell.limits.is_some();
    call.verdict.changes.iter().any(made)
        || call.verdict.confinement.named.iter().any(attached)
        || std::iter::once(own).chain(others).any(|controller| call.facts.cell_exists(controller, name))
}

// === What is done with a group ===

/// `create`, `modify` and `open` are one, as upstream: the group is there afterwards, with these limits.
fn save<'a>(call: &mut Call<'a>) -> Given<'a> {
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<Group>()?;
    group.exists = true;
    let limits = group.limits_to_set(facts, verdict);
    match &group.name {
        Name::Cell { name, .. } => set(verdict, group.controller, name, limits)?,
        Name::Root(_) if limits.is_empty() => {}
        Name::Root(_) => complain(
            facts,
            verdict,
            "Cgroup: the group \"/\" is the whole node; limit tenants and sites in their records",
        ),
        Name::Bad(_) => {}
    }
    Ok(Value::This)
}

fn set(
    verdict: &mut Verdict,
    controller: Controller,
    name: &CellName,
    limits: Limits,
) -> Result<(), NativeError> {
    if let Some(cell) = attached_to(verdict, controller, name) {
        cell.limits = Some(cell.limits.take().unwrap_or_default().overlaid(&limits));
        return Ok(());
    }
    if let Some(at) = pending(verdict, controller, name)
        && let CellChange::Set { limits: pending, .. } = &mut verdict.changes[at]
    {
        *pending = pending.overlaid(&limits);
        return Ok(());
    }
    let change = CellChange::Set { name: name.clone(), controllers: vec![controller], limits };
    verdict.change(change).map_err(|full| NativeError::runtime(format!("cgroup_create failed: {full}")))
}

/// Where in the changes this group is set, if nothing drops it afterwards.
fn pending(verdict: &Verdict, controller: Controller, name: &CellName) -> Option<usize> {
    let about = |change: &CellChange| {
        let (CellChange::Set { name: of, controllers, .. } | CellChange::Drop { name: of, controllers }) =
            change;
        of == name && controllers.contains(&controller)
    };
    let last = verdict.changes.iter().rposition(about)?;
    matches!(verdict.changes[last], CellChange::Set { .. }).then_some(last)
}

fn attached_to<'v>(
    verdict: &'v mut Verdict,
    controller: Controller,
    name: &CellName,
) -> Option<&'v mut NamedCell> {
    verdict.confinement_mut().named.iter_mut().find(|cell| {
        cell.scope == Scope::Node && cell.name == *name && cell.controllers.contains(&controller)
    })
}

/// Never raises, as upstream; what cannot be done is logged.
fn attach<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(0, 1)?;
    if !call.args().is_empty() && call.int(0)? != 0 {
        complain(
            call.facts,
            call.verdict,
            "Cgroup: attach(pid) moves no other process; a rule decides about its own request",
        );
        return Ok(Value::This);
    }
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<Group>()?;
    let controller = group.controller;
    match &group.name {
        Name::Bad(_) => {}
        Name::Root(_) => verdict.detach(&[controller]),
        Name::Cell { name, .. } if attached_to(verdict, controller, name).is_some() => {}
        Name::Cell { name, .. } => {
            let saved = pending(verdict, controller, name).map(|at| verdict.changes.remove(at));
            let cell = match saved {
                Some(CellChange::Set { name, controllers, limits }) => {
                    NamedCell { name, scope: Scope::Node, controllers, limits: Some(limits) }
                }
                Some(CellChange::Drop { .. }) | None => {
                    let (name, controllers) = (name.clone(), vec![controller]);
                    NamedCell { name, scope: Scope::Node, controllers, limits: None }
                }
            };
            if let Err(full) = verdict.attach(cell) {
                complain(facts, verdict, &format!("Cgroup: attach: {full}"));
            }
        }
    }
    Ok(Value::This)
}

fn detach<'a>(call: &mut Call<'a>) -> Given<'a> {
    let (group, verdict) = call.this_and_verdict::<Group>()?;
    verdict.detach(&[group.controller]);
    Ok(Value::This)
}

/// The group goes; a request that was attached to it goes on where it would be without.
fn delete<'a>(call: &mut Call<'a>) -> Given<'a> {
    let (group, verdict) = call.this_and_verdict::<Group>()?;
    let Name::Cell { name, .. } = &group.name else {
        return Ok(Value::This);
    };
    if attached_to(verdict, group.controller, name).is_some() {
        verdict.detach(&[group.controller]);
    }
    if let Some(at) = pending(verdict, group.controller, name) {
        verdict.changes.remove(at);
    }
    let change = CellChange::Drop { name: name.clone(), controllers: vec![group.controller] };
    verdict.change(change).map_err(|full| NativeError::runtime(format!("cgroup_delete faild: {full}")))?;
    Ok(Value::This)
}

impl Group {
    /// What the object holds, as limits. What the kernel would refuse is logged and left out.
    fn limits_to_set(&self, facts: &dyn Facts, verdict: &mut Verdict) -> Limits {
        let mut limits = self.limits.clone();
        // A period alone limits nothing: the kernel's quota is unlimited until it is set.
        if let Some(quota) = self.quota_us.filter(|quota| *quota >= 0) {
            match cpu_quota(quota, self.period_us) {
                Ok(quota) => limits.cpu = Some(quota),
                Err(why) => {
                    complain(facts, verdict, &format!("Cgroup::CPU '{}': {why}", self.name.as_given()))
                }
            }
        }
        limits
    }
}

/// A quota without a period of its own is given out in nagaya's shorter periods, where that is exactly the same share.
fn cpu_quota(quota_us: i64, period_us: Option<i64>) -> Result<CpuQuota, String> {
    let quota = u64::try_from(quota_us).unwrap_or(0);
    let period = period_us.unwrap_or(KERNEL_PERIOD_US.into());
    let period = u32::try_from(period).ok().filter(|us| (CPU_PERIOD_MIN_US..=CPU_PERIOD_MAX_US).contains(us));
    let period = period.ok_or_else(|| {
        format!("cfs_period_us is {CPU_PERIOD_MIN_US} to {CPU_PERIOD_MAX_US}, so the quota is not set")
    })?;
    if quota < CPU_QUOTA_MIN_US {
        return Err(format!("cfs_quota_us is {CPU_QUOTA_MIN_US} or more, so it is not set"));
    }
    let shorter = u64::from(KERNEL_PERIOD_US / CPU_PERIOD_DEFAULT_US);
    if period_us.is_none() && quota.is_multiple_of(shorter) && quota / shorter >= CPU_QUOTA_MIN_US {
        return Ok(CpuQuota { quota_us: quota / shorter, period_us: CPU_PERIOD_DEFAULT_US });
    }
    Ok(CpuQuota { quota_us: quota, period_us: period })
}

// === Values ===

fn set_shares<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let shares = call.int(0)?;
    let fits = shares.clamp(CPU_SHARES_MIN.into(), CPU_SHARES_MAX.into());
    if fits != shares {
        complain(call.facts, call.verdict, &format!("Cgroup::CPU: shares {shares} are set as {fits}"));
    }
    call.this::<Group>()?.limits.cpu_shares = u32::try_from(fits).ok();
    Ok(Value::This)
}

/// Negative: no limit, as the kernel has it.
fn set_memory<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let bytes = u64::try_from(call.int(0)?).ok();
    call.this::<Group>()?.limits.memory = bytes;
    Ok(Value::This)
}

fn set_processes<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let given = call.int(0)?;
    let processes = u32::try_from(given).ok().filter(|processes| *processes > 0);
    if processes.is_none() {
        complain(call.facts, call.verdict, &format!("Cgroup::PIDS: max {given} is not set; it is 1 or more"));
    }
    call.this::<Group>()?.limits.processes = processes;
    Ok(Value::This)
}

/// `cpus` and `mems`: lists of numbers and ranges, cpuset(7).
fn set_list<'a>(call: &mut Call<'a>, put: fn(&mut Limits, Box<str>)) -> Given<'a> {
    call.expect(1, 1)?;
    let list = c_text(call)?;
    if super::units::is_cpu_list(list) {
        put(&mut call.this::<Group>()?.limits, list.into());
    } else {
        let shown = list.escape_debug();
        complain(call.facts, call.verdict, &format!("Cgroup::CPUSET: '{shown}' is not a list such as 0-1,3"));
    }
    Ok(Value::This)
}

/// `"8:0 30000000"`. Several devices can be set, one after the other; 0 takes the limit away, as in the kernel.
fn set_device<'a>(call: &mut Call<'a>, rate: Rate) -> Given<'a> {
    call.expect(1, 1)?;
    let text = c_text(call)?;
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<Group>()?;
    let set = device_limit(text).and_then(|(device, limit)| group.limit_device(device, rate, limit));
    if let Err(why) = set {
        let name = group.name.as_given();
        complain(facts, verdict, &format!("Cgroup::BLKIO '{name}': {why}, so it is not limited"));
    }
    Ok(Value::This)
}

fn device_limit(text: &str) -> Result<(Device, u64), String> {
    let mut words = text.split_ascii_whitespace();
    let (Some(device), Some(limit), None) = (words.next(), words.next(), words.next()) else {
        let shown = text.escape_debug();
        return Err(format!("'{shown}' is not a device and a number, such as \"8:0 30000000\""));
    };
    let device = device.parse::<Device>().map_err(|error| error.to_string())?;
    let digits = limit.bytes().all(|b| b.is_ascii_digit());
    let limit = limit.parse().ok().filter(|_| digits);
    limit
        .map(|limit| (device, limit))
        .ok_or_else(|| format!("'{}' does not end in a number", text.escape_debug()))
}

impl Group {
    fn limit_device(&mut self, device: Device, rate: Rate, limit: u64) -> Result<(), String> {
        let io = &mut self.limits.io;
        let at = io.iter().position(|have| have.device == device);
        if at.is_none() && io.len() >= DEVICES_PER_CELL_MAX {
            return Err(format!("at most {DEVICES_PER_CELL_MAX} devices"));
        }
        let at = at.unwrap_or_else(|| {
            io.push(IoLimit::of(device));
            io.len() - 1
        });
        self.devices[rate as usize] = Some(device);
        let limit = (limit > 0).then_some(limit);
        match rate {
            Rate::ReadBps => io[at].read_bps = limit,
            Rate::WriteBps => io[at].write_bps = limit,
            Rate::ReadIops => io[at].read_iops = limit,
            Rate::WriteIops => io[at].write_iops = limit,
        }
        Ok(())
    }
}

impl Rate {
    fn key(self) -> &'static str {
        match self {
            Self::ReadBps => "blkio.throttle.read_bps_device",
            Self::WriteBps => "blkio.throttle.write_bps_device",
            Self::ReadIops => "blkio.throttle.read_iops_device",
            Self::WriteIops => "blkio.throttle.write_iops_device",
        }
    }
}

/// As it was set last, `8:0 30000000`; else what the group has.
fn device<'a>(call: &mut Call<'a>, rate: Rate) -> Given<'a> {
    let group = call.this::<Group>()?;
    let Some(device) = group.devices[rate as usize] else {
        return text(call, rate.key(), |_| None);
    };
    let limit = group.limits.device(device).map(|io| match rate {
        Rate::ReadBps => io.read_bps,
        Rate::WriteBps => io.write_bps,
        Rate::ReadIops => io.read_iops,
        Rate::WriteIops => io.write_iops,
    });
    Ok(format!("{device} {}", limit.flatten().unwrap_or(0)).into())
}

/// A String that C can hold: upstream raises for others too.
fn c_text<'a>(call: &Call<'a>) -> Result<&'a str, NativeError> {
    let text = call.text(0)?;
    if text.contains('\0') {
        return Err(NativeError::argument("string contains null byte"));
    }
    Ok(text)
}

/// What the object holds, else what the group has, else nil.
fn number<'a>(call: &mut Call<'a>, key: &str, own: fn(&Group) -> Option<i64>) -> Given<'a> {
    if let Some(own) = own(call.this::<Group>()?) {
        return Ok(Value::Int(own));
    }
    let stored = stored(call, key)?;
    Ok(stored.and_then(|text| text.trim().parse::<i64>().ok()).into())
}

/// Like [`number`]; an empty text is nil.
fn text<'a>(call: &mut Call<'a>, key: &str, own: impl Fn(&Group) -> Option<&str>) -> Given<'a> {
    if let Some(own) = own(call.this::<Group>()?) {
        return Ok(own.to_owned().into());
    }
    Ok(stored(call, key)?.filter(|text| !text.is_empty()).into())
}

fn stored(call: &mut Call<'_>, key: &str) -> Result<Option<String>, NativeError> {
    let facts = call.facts;
    let group = call.this::<Group>()?;
    Ok(match &group.name {
        Name::Cell { name, .. } => facts.cell_value(group.controller, name, key),
        Name::Root(_) | Name::Bad(_) => None,
    })
}

// === Values that are not limits here ===

/// Kept in the object, so that it reads back as upstream; not applied, and the log says so.
fn keep_number<'a>(call: &mut Call<'a>, key: &'static str, why: &str) -> Given<'a> {
    call.expect(1, 1)?;
    let value = call.int(0)?;
    keep(call, key, value)?;
    ignore(call, key, why);
    Ok(Value::This)
}

fn keep(call: &mut Call<'_>, key: &'static str, value: i64) -> Result<(), NativeError> {
    let kept = &mut call.this::<Group>()?.kept;
    kept.retain(|(have, _)| *have != key);
    kept.push((key, value));
    Ok(())
}

fn ignore(call: &mut Call<'_>, key: &str, why: &str) {
    complain(call.facts, call.verdict, &format!("Cgroup: {key} is not set: {why}"));
}

fn kept_number<'a>(call: &mut Call<'a>, key: &'static str) -> Given<'a> {
    let kept = call.this::<Group>()?.kept.iter().find(|(have, _)| *have == key).map(|(_, value)| *value);
    match kept {
        Some(kept) => Ok(Value::Int(kept)),
        None => number(call, key, |_| None),
    }
}

const OOM_CONTROL: &str = "memory.oom_control";

fn set_oom_control<'a>(call: &mut Call<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    // What upstream reads with "b": every object is true or false.
    let on = !matches!(call.any(0), Arg::Nil | Arg::Bool(false));
    keep(call, OOM_CONTROL, on.into())?;
    ignore(call, OOM_CONTROL, "what runs out of memory is ended, never left standing");
    Ok(Value::This)
}

fn oom_control<'a>(call: &mut Call<'a>) -> Given<'a> {
    Ok(match kept_number(call, OOM_CONTROL)? {
        Value::Int(on) => Value::Bool(on != 0),
        other => other,
    })
}

//! `Cgroup` with the interface of mruby-cgroup. Its objects buffer limits under a group's name, and
//! record the rule's actions in the verdict. Nothing here touches a cgroup.
//!
//! Errors that upstream swallows are swallowed, too, but logged: an invalid name, a value out of
//! range, a malformed device. Not here: `root_attach` and `cpuacct`, which are Ruby
//! (`prelude/cgroup.rb`); the cells (`keeper`).

use nagaya_records::cell::{
    CPU_PERIOD_DEFAULT_US, CPU_PERIOD_MAX_US, CPU_PERIOD_MIN_US, CPU_QUOTA_MIN_US, CPU_SHARES_MAX,
    CPU_SHARES_MIN, CellChange, CellName, CellScope, CgroupController, CpuQuota, DEVICES_PER_CELL_MAX,
    Device, IoLimit, LimitSet, NamedCell,
};

use crate::facts::FactSource;
use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue};
use crate::verdict::Verdict;

use super::complaint::complain;

/// The kernel's period if a group sets none, microseconds.
const KERNEL_PERIOD_US: u32 = 100_000;

type Given<'a> = Result<NativeValue<'a>, NativeError>;

const ALL: &str = "Cgroup";
const CPU: &str = "Cgroup::CPU";
const CPUACCT: &str = "Cgroup::CPUACCT";
const CPUSET: &str = "Cgroup::CPUSET";
const BLKIO: &str = "Cgroup::BLKIO";
const MEMORY: &str = "Cgroup::MEMORY";
const PIDS: &str = "Cgroup::PIDS";

pub const NATIVES: &[NativeMethod] = &[
    NativeMethod::method(ALL, "create", save),
    NativeMethod::method(ALL, "modify", save),
    NativeMethod::method(ALL, "open", save),
    NativeMethod::method(ALL, "delete", delete),
    NativeMethod::method(ALL, "close", delete),
    NativeMethod::method(ALL, "attach", attach),
    NativeMethod::method(ALL, "exist?", |call| Ok(call.this::<CgroupObject>()?.exists.into())),
    NativeMethod::method(ALL, "group_name", |call| Ok(call.this::<CgroupObject>()?.name.as_given().into())),
    NativeMethod::method(CPU, "initialize", |call| open(call, CgroupController::Cpu)),
    NativeMethod::method(CPU, "detach", detach),
    NativeMethod::method(CPU, "shares=", set_shares),
    NativeMethod::method(CPU, "shares", |call| {
        number(call, "cpu.shares", |group| group.limits.cpu_shares.map(i64::from))
    }),
    NativeMethod::method(CPU, "cfs_quota_us=", |call| {
        let quota = call.int(0)?;
        call.this::<CgroupObject>()?.quota_us = Some(quota);
        Ok(NativeValue::This)
    }),
    NativeMethod::method(CPU, "cfs_quota_us", |call| {
        number(call, "cpu.cfs_quota_us", |group| group.quota_us)
    }),
    NativeMethod::method(CPU, "cfs_period_us=", |call| {
        let period = call.int(0)?;
        call.this::<CgroupObject>()?.period_us = Some(period);
        Ok(NativeValue::This)
    }),
    NativeMethod::method(CPU, "cfs_period_us", |call| {
        number(call, "cpu.cfs_period_us", |group| group.period_us)
    }),
    NativeMethod::method(CPU, "rt_period_us=", |call| keep_number(call, "cpu.rt_period_us", REAL_TIME)),
    NativeMethod::method(CPU, "rt_period_us", |call| kept_number(call, "cpu.rt_period_us")),
    NativeMethod::method(CPU, "rt_runtime_us=", |call| keep_number(call, "cpu.rt_runtime_us", REAL_TIME)),
    NativeMethod::method(CPU, "rt_runtime_us", |call| kept_number(call, "cpu.rt_runtime_us")),
    NativeMethod::method(CPU, "stat", |call| text(call, "cpu.stat", |_| None)),
    NativeMethod::method(CPUACCT, "initialize", |call| open(call, CgroupController::Cpuacct)),
    NativeMethod::method(CPUACCT, "usage=", |call| {
        keep_number(call, "cpuacct.usage", "receipts are made from it")
    }),
    NativeMethod::method(CPUACCT, "usage", |call| number(call, "cpuacct.usage", |_| None)),
    NativeMethod::method(CPUACCT, "stat", |call| text(call, "cpuacct.stat", |_| None)),
    NativeMethod::method(CPUACCT, "usage_percpu", |call| text(call, "cpuacct.usage_percpu", |_| None)),
    NativeMethod::method(CPUSET, "initialize", |call| open(call, CgroupController::Cpuset)),
    NativeMethod::method(CPUSET, "detach", detach),
    NativeMethod::method(CPUSET, "cpus=", |call| set_list(call, |limits, list| limits.cpus = Some(list))),
    NativeMethod::method(CPUSET, "cpus", |call| {
        text(call, "cpuset.cpus", |group| group.limits.cpus.as_deref())
    }),
    NativeMethod::method(CPUSET, "mems=", |call| set_list(call, |limits, list| limits.mems = Some(list))),
    NativeMethod::method(CPUSET, "mems", |call| {
        text(call, "cpuset.mems", |group| group.limits.mems.as_deref())
    }),
    NativeMethod::method(BLKIO, "initialize", |call| open(call, CgroupController::Blkio)),
    NativeMethod::method(BLKIO, "detach", detach),
    NativeMethod::method(BLKIO, "throttle_read_bps_device=", |call| set_device(call, RateField::ReadBps)),
    NativeMethod::method(BLKIO, "throttle_read_bps_device", |call| device(call, RateField::ReadBps)),
    NativeMethod::method(BLKIO, "throttle_write_bps_device=", |call| set_device(call, RateField::WriteBps)),
    NativeMethod::method(BLKIO, "throttle_write_bps_device", |call| device(call, RateField::WriteBps)),
    NativeMethod::method(BLKIO, "throttle_read_iops_device=", |call| set_device(call, RateField::ReadIops)),
    NativeMethod::method(BLKIO, "throttle_read_iops_device", |call| device(call, RateField::ReadIops)),
    NativeMethod::method(BLKIO, "throttle_write_iops_device=", |call| set_device(call, RateField::WriteIops)),
    NativeMethod::method(BLKIO, "throttle_write_iops_device", |call| device(call, RateField::WriteIops)),
    NativeMethod::method(MEMORY, "initialize", |call| open(call, CgroupController::Memory)),
    NativeMethod::method(MEMORY, "limit_in_bytes=", set_memory),
    NativeMethod::method(MEMORY, "limit_in_bytes", |call| {
        number(call, "memory.limit_in_bytes", |group| {
            group.limits.memory.and_then(|bytes| i64::try_from(bytes).ok())
        })
    }),
    NativeMethod::method(MEMORY, "usage_in_bytes", |call| number(call, "memory.usage_in_bytes", |_| None)),
    NativeMethod::method(MEMORY, "max_usage_in_bytes", |call| {
        number(call, "memory.max_usage_in_bytes", |_| None)
    }),
    NativeMethod::method(MEMORY, "memsw_limit_in_bytes=", |call| {
        keep_number(call, "memory.memsw.limit_in_bytes", SWAP)
    }),
    NativeMethod::method(MEMORY, "memsw_limit_in_bytes", |call| {
        kept_number(call, "memory.memsw.limit_in_bytes")
    }),
    NativeMethod::method(MEMORY, "memsw_usage_in_bytes", |call| {
        number(call, "memory.memsw.usage_in_bytes", |_| None)
    }),
    NativeMethod::method(MEMORY, "memsw_max_usage_in_bytes", |call| {
        number(call, "memory.memsw.max_usage_in_bytes", |_| None)
    }),
    NativeMethod::method(MEMORY, "oom_control=", set_oom_control),
    NativeMethod::method(MEMORY, "oom_control", oom_control),
    NativeMethod::method(MEMORY, "cgroup_event_control=", |call| {
        call.text(0)?;
        ignore(call, "cgroup.event_control", "rules do not wait for events");
        Ok(NativeValue::This)
    }),
    NativeMethod::method(PIDS, "initialize", |call| open(call, CgroupController::Pids)),
    NativeMethod::method(PIDS, "max=", set_processes),
    NativeMethod::method(PIDS, "max", |call| {
        number(call, "pids.max", |group| group.limits.processes.map(i64::from))
    }),
    NativeMethod::method(PIDS, "current", |call| number(call, "pids.current", |_| None)),
];

const REAL_TIME: &str = "real-time scheduling is no limit of a request";
const SWAP: &str = "nagaya sets no limits of swap";

/// State of one object of a `Cgroup` class. Rules like the paper's make two for each request, so
/// nothing is stored twice.
struct CgroupObject {
    controller: CgroupController,
    name: CgroupName,
    /// Result of `exist?`: from when the object was made, or after `create`.
    exists: bool,
    limits: LimitSet,
    /// CPU time per period as the rule set them, before they become one limit.
    quota_us: Option<i64>,
    period_us: Option<i64>,
    /// Device of `limits` for which each rate was last set, by `RateField`.
    devices: [Option<Device>; 4],
    /// Values that are read back but not applied.
    kept: Vec<(&'static str, i64)>,
}

enum CgroupName {
    Cell {
        name: CellName,
        /// The rule wrote it with a leading `/`, which means nothing.
        slash: bool,
    },
    /// `/`, or nothing: the place of a process that is in no group.
    Root(&'static str),
    /// Refused; all actions of the object do nothing.
    Bad(Box<str>),
}

impl CgroupName {
    fn as_given(&self) -> String {
        match self {
            Self::Cell { name, slash } => format!("{}{name}", if *slash { "/" } else { "" }),
            Self::Root(given) => (*given).to_owned(),
            Self::Bad(given) => given.to_string(),
        }
    }
}

#[derive(Clone, Copy)]
enum RateField {
    ReadBps,
    WriteBps,
    ReadIops,
    WriteIops,
}

// === Objects ===

fn open<'a>(call: &mut NativeCall<'a>, controller: CgroupController) -> Given<'a> {
    call.expect(1, 1)?;
    let given = call.text(0)?;
    let name = match CellName::parse(given) {
        _ if given.is_empty() => CgroupName::Root(""),
        _ if given == "/" => CgroupName::Root("/"),
        Ok(name) => CgroupName::Cell { name, slash: given.starts_with('/') },
        Err(error) => {
            let text = format!("Cgroup: {error}; the rule goes on without this group");
            complain(call.facts, call.verdict, &text);
            CgroupName::Bad(given.into())
        }
    };
    let exists = match &name {
        CgroupName::Cell { name, .. } => exists(call, controller, name),
        CgroupName::Root(_) => true,
        CgroupName::Bad(_) => false,
    };
    call.keep(CgroupObject {
        controller,
        name,
        exists,
        limits: LimitSet::default(),
        quota_us: None,
        period_us: None,
        devices: [None; 4],
        kept: Vec::new(),
    });
    Ok(NativeValue::Nil)
}

/// Returns whether a group exists as libcgroup sees it: any controller has it, or this rule has
/// made it.
fn exists(call: &NativeCall<'_>, own: CgroupController, name: &CellName) -> bool {
    let others = CgroupController::ALL.into_iter().filter(|controller| *controller != own);
    let made = |change: &CellChange| matches!(change, CellChange::Set { name: made, .. } if made == name);
    let attached =
        |cell: &NamedCell| cell.scope == CellScope::Node && cell.name == *name && cell.limits.is_some();
    call.verdict.changes.iter().any(made)
        || call.verdict.confinement.named.iter().any(attached)
        || std::iter::once(own).chain(others).any(|controller| call.facts.cell_exists(controller, name))
}

// === What is done with a group ===

/// Saves the group. `create`, `modify` and `open` are one, as upstream: the group exists
/// afterwards, with these limits.
fn save<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<CgroupObject>()?;
    group.exists = true;
    let limits = group.limits_to_set(facts, verdict);
    match &group.name {
        CgroupName::Cell { name, .. } => set(verdict, group.controller, name, limits)?,
        CgroupName::Root(_) if limits.is_empty() => {}
        CgroupName::Root(_) => complain(
            facts,
            verdict,
            "Cgroup: the group \"/\" is the whole node; limit tenants and sites in their records",
        ),
        CgroupName::Bad(_) => {}
    }
    Ok(NativeValue::This)
}

fn set(
    verdict: &mut Verdict,
    controller: CgroupController,
    name: &CellName,
    limits: LimitSet,
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

/// Returns where in the changes this group is set, if nothing drops it afterwards.
fn pending(verdict: &Verdict, controller: CgroupController, name: &CellName) -> Option<usize> {
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
    controller: CgroupController,
    name: &CellName,
) -> Option<&'v mut NamedCell> {
    verdict.confinement_mut().named.iter_mut().find(|cell| {
        cell.scope == CellScope::Node && cell.name == *name && cell.controllers.contains(&controller)
    })
}

/// Attaches the request. It never raises, as upstream; failures are logged.
fn attach<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(0, 1)?;
    if !call.args().is_empty() && call.int(0)? != 0 {
        complain(
            call.facts,
            call.verdict,
            "Cgroup: attach(pid) moves no other process; a rule decides about its own request",
        );
        return Ok(NativeValue::This);
    }
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<CgroupObject>()?;
    let controller = group.controller;
    match &group.name {
        CgroupName::Bad(_) => {}
        CgroupName::Root(_) => verdict.detach(&[controller]),
        CgroupName::Cell { name, .. } if attached_to(verdict, controller, name).is_some() => {}
        CgroupName::Cell { name, .. } => {
            let saved = pending(verdict, controller, name).map(|at| verdict.changes.remove(at));
            let cell = match saved {
                Some(CellChange::Set { name, controllers, limits }) => {
                    NamedCell { name, scope: CellScope::Node, controllers, limits: Some(limits) }
                }
                Some(CellChange::Drop { .. }) | None => {
                    let name = name.clone();
                    let controllers = vec![controller];
                    NamedCell { name, scope: CellScope::Node, controllers, limits: None }
                }
            };
            if let Err(full) = verdict.attach(cell) {
                complain(facts, verdict, &format!("Cgroup: attach: {full}"));
            }
        }
    }
    Ok(NativeValue::This)
}

fn detach<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let (group, verdict) = call.this_and_verdict::<CgroupObject>()?;
    verdict.detach(&[group.controller]);
    Ok(NativeValue::This)
}

/// Drops the group; a request that was attached to it runs where it would without it.
fn delete<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    let (group, verdict) = call.this_and_verdict::<CgroupObject>()?;
    let CgroupName::Cell { name, .. } = &group.name else {
        return Ok(NativeValue::This);
    };
    if attached_to(verdict, group.controller, name).is_some() {
        verdict.detach(&[group.controller]);
    }
    if let Some(at) = pending(verdict, group.controller, name) {
        verdict.changes.remove(at);
    }
    let change = CellChange::Drop { name: name.clone(), controllers: vec![group.controller] };
    verdict.change(change).map_err(|full| NativeError::runtime(format!("cgroup_delete faild: {full}")))?;
    Ok(NativeValue::This)
}

impl CgroupObject {
    /// Returns the object's values as limits. Values that the kernel would refuse are logged and
    /// left out.
    fn limits_to_set(&self, facts: &dyn FactSource, verdict: &mut Verdict) -> LimitSet {
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

/// Makes a quota. Without a period of its own, it uses nagaya's shorter period, if that gives
/// exactly the same share.
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

fn set_shares<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let shares = call.int(0)?;
    let fits = shares.clamp(CPU_SHARES_MIN.into(), CPU_SHARES_MAX.into());
    if fits != shares {
        complain(call.facts, call.verdict, &format!("Cgroup::CPU: shares {shares} are set as {fits}"));
    }
    call.this::<CgroupObject>()?.limits.cpu_shares = u32::try_from(fits).ok();
    Ok(NativeValue::This)
}

/// Sets the memory limit. A negative value means no limit, as in the kernel.
fn set_memory<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let bytes = u64::try_from(call.int(0)?).ok();
    call.this::<CgroupObject>()?.limits.memory = bytes;
    Ok(NativeValue::This)
}

fn set_processes<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    let given = call.int(0)?;
    let processes = u32::try_from(given).ok().filter(|processes| *processes > 0);
    if processes.is_none() {
        complain(call.facts, call.verdict, &format!("Cgroup::PIDS: max {given} is not set; it is 1 or more"));
    }
    call.this::<CgroupObject>()?.limits.processes = processes;
    Ok(NativeValue::This)
}

/// Sets `cpus` and `mems`: lists of numbers and ranges, cpuset(7).
fn set_list<'a>(call: &mut NativeCall<'a>, put: fn(&mut LimitSet, Box<str>)) -> Given<'a> {
    call.expect(1, 1)?;
    let list = c_text(call)?;
    if super::units::is_cpu_list(list) {
        put(&mut call.this::<CgroupObject>()?.limits, list.into());
    } else {
        let shown = list.escape_debug();
        complain(call.facts, call.verdict, &format!("Cgroup::CPUSET: '{shown}' is not a list such as 0-1,3"));
    }
    Ok(NativeValue::This)
}

/// Sets a rate from `"8:0 30000000"`. Several devices can be set, one after the other; 0 removes
/// the limit, as in the kernel.
fn set_device<'a>(call: &mut NativeCall<'a>, rate: RateField) -> Given<'a> {
    call.expect(1, 1)?;
    let text = c_text(call)?;
    let facts = call.facts;
    let (group, verdict) = call.this_and_verdict::<CgroupObject>()?;
    let set = device_limit(text).and_then(|(device, limit)| group.limit_device(device, rate, limit));
    if let Err(why) = set {
        let name = group.name.as_given();
        complain(facts, verdict, &format!("Cgroup::BLKIO '{name}': {why}, so it is not limited"));
    }
    Ok(NativeValue::This)
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

impl CgroupObject {
    fn limit_device(&mut self, device: Device, rate: RateField, limit: u64) -> Result<(), String> {
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
            RateField::ReadBps => io[at].read_bps = limit,
            RateField::WriteBps => io[at].write_bps = limit,
            RateField::ReadIops => io[at].read_iops = limit,
            RateField::WriteIops => io[at].write_iops = limit,
        }
        Ok(())
    }
}

impl RateField {
    fn key(self) -> &'static str {
        match self {
            Self::ReadBps => "blkio.throttle.read_bps_device",
            Self::WriteBps => "blkio.throttle.write_bps_device",
            Self::ReadIops => "blkio.throttle.read_iops_device",
            Self::WriteIops => "blkio.throttle.write_iops_device",
        }
    }
}

/// Returns the value that was set last, `8:0 30000000`; otherwise the group's.
fn device<'a>(call: &mut NativeCall<'a>, rate: RateField) -> Given<'a> {
    let group = call.this::<CgroupObject>()?;
    let Some(device) = group.devices[rate as usize] else {
        return text(call, rate.key(), |_| None);
    };
    let limit = group.limits.device(device).map(|io| match rate {
        RateField::ReadBps => io.read_bps,
        RateField::WriteBps => io.write_bps,
        RateField::ReadIops => io.read_iops,
        RateField::WriteIops => io.write_iops,
    });
    Ok(format!("{device} {}", limit.flatten().unwrap_or(0)).into())
}

/// Returns a String that C can hold: upstream raises for others, too.
fn c_text<'a>(call: &NativeCall<'a>) -> Result<&'a str, NativeError> {
    let text = call.text(0)?;
    if text.contains('\0') {
        return Err(NativeError::argument("string contains null byte"));
    }
    Ok(text)
}

/// Returns the object's value, otherwise the group's, otherwise nil.
fn number<'a>(call: &mut NativeCall<'a>, key: &str, own: fn(&CgroupObject) -> Option<i64>) -> Given<'a> {
    if let Some(own) = own(call.this::<CgroupObject>()?) {
        return Ok(NativeValue::Int(own));
    }
    let stored = stored(call, key)?;
    Ok(stored.and_then(|text| text.trim().parse::<i64>().ok()).into())
}

/// Like [`number`]; an empty text is nil.
fn text<'a>(call: &mut NativeCall<'a>, key: &str, own: impl Fn(&CgroupObject) -> Option<&str>) -> Given<'a> {
    if let Some(own) = own(call.this::<CgroupObject>()?) {
        return Ok(own.to_owned().into());
    }
    Ok(stored(call, key)?.filter(|text| !text.is_empty()).into())
}

fn stored(call: &mut NativeCall<'_>, key: &str) -> Result<Option<String>, NativeError> {
    let facts = call.facts;
    let group = call.this::<CgroupObject>()?;
    Ok(match &group.name {
        CgroupName::Cell { name, .. } => facts.cell_value(group.controller, name, key),
        CgroupName::Root(_) | CgroupName::Bad(_) => None,
    })
}

// === Values that are not limits here ===

/// Stores a number in the object, so that it reads back as upstream. It is not applied, and the log
/// says so.
fn keep_number<'a>(call: &mut NativeCall<'a>, key: &'static str, why: &str) -> Given<'a> {
    call.expect(1, 1)?;
    let value = call.int(0)?;
    keep(call, key, value)?;
    ignore(call, key, why);
    Ok(NativeValue::This)
}

fn keep(call: &mut NativeCall<'_>, key: &'static str, value: i64) -> Result<(), NativeError> {
    let kept = &mut call.this::<CgroupObject>()?.kept;
    kept.retain(|(have, _)| *have != key);
    kept.push((key, value));
    Ok(())
}

fn ignore(call: &mut NativeCall<'_>, key: &str, why: &str) {
    complain(call.facts, call.verdict, &format!("Cgroup: {key} is not set: {why}"));
}

fn kept_number<'a>(call: &mut NativeCall<'a>, key: &'static str) -> Given<'a> {
    let kept =
        call.this::<CgroupObject>()?.kept.iter().find(|(have, _)| *have == key).map(|(_, value)| *value);
    match kept {
        Some(kept) => Ok(NativeValue::Int(kept)),
        None => number(call, key, |_| None),
    }
}

const OOM_CONTROL: &str = "memory.oom_control";

fn set_oom_control<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    // Upstream reads it with "b": every object is true or false.
    let on = !matches!(call.any(0), NativeArg::Nil | NativeArg::Bool(false));
    keep(call, OOM_CONTROL, on.into())?;
    ignore(call, OOM_CONTROL, "what runs out of memory is ended, never left standing");
    Ok(NativeValue::This)
}

fn oom_control<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    Ok(match kept_number(call, OOM_CONTROL)? {
        NativeValue::Int(on) => NativeValue::Bool(on != 0),
        other => other,
    })
}

//! Checks an edge's requests about cells: every number in range, every list bounded, nothing twice.
//!
//! The edge parses what strangers send; whatever it asks for is looked at as if a stranger had
//! written it. One refusal names the first thing that does not fit. Not here: limits of records,
//! which are checked where they are written (`records::record`), and the cells themselves
//! (`cells`).

use nagaya_keeper_api::limits::TENANTS_MAX;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::{
    Boost, CPU_PERIOD_MAX_US, CPU_PERIOD_MIN_US, CPU_QUOTA_MIN_US, CPU_SHARES_MAX, CPU_SHARES_MIN,
    CellChange, CellScope, CgroupController, Confinement, CpuQuota, DEMOTIONS_MAX, DEVICES_PER_CELL_MAX,
    Demotion, Device, IoLimit, LimitSet, NAMED_PER_REQUEST_MAX, NamedCell,
};
use nagaya_records::record::{IOPS_MAX, MEMORY_MIN, PROCESSES_MAX};
use nagaya_records::{Site, Tenant, TenantName};

use crate::fault::{self, Fault};

/// Maximum number of changes of named cells in one message.
pub const CHANGES_MAX: usize = 256;

/// Maximum quota, microseconds: a thousand cores for the longest period. The kernel's own limit is
/// 2^44.
const CPU_QUOTA_MAX_US: u64 = CPU_PERIOD_MAX_US as u64 * 1000;

/// Widths of a device's numbers (`MINORBITS` of include/linux/kdev_t.h).
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;

/// Maximum length of a list of CPUs or memory nodes, in bytes, and the largest number in it
/// (`NR_CPUS` of x86-64).
const LIST_LEN_MAX: usize = 256;
const LIST_NUMBER_MAX: u32 = 8191;

/// Returns the effective confinement of a request to this site: its own over the one of the site's
/// record.
pub fn of_site(site: &Site, asked: &Confinement) -> Confinement {
    let demotions = match asked.demotions.as_slice() {
        [] => site.demotions.iter().filter_map(|demotion| demotion.demotion()).collect(),
        own => own.to_vec(),
    };
    Confinement {
        limits: site.request_limits.limits().overlaid(&asked.limits),
        named: asked.named.clone(),
        demotions,
        boost: asked.boost,
    }
}

/// Whether any limit of a request to this site names the disk of the site's files in that way.
pub fn names_root_device(tenant: &Tenant, site: &Site, asked: &Confinement) -> bool {
    let named = asked.named.iter().filter_map(|cell| cell.limits.as_ref());
    let demoted = asked.demotions.iter().map(|demotion| &demotion.limits);
    let is_root = |limits: &LimitSet| limits.device(Device::Root).is_some();
    let by_records = [&tenant.limits, &site.limits, &site.request_limits]
        .into_iter()
        .chain(site.demotions.iter().map(|demotion| &demotion.limits));
    [&asked.limits].into_iter().chain(named).chain(demoted).any(is_root)
        || by_records.filter(|limits| !limits.is_empty()).any(|limits| is_root(&limits.limits()))
}

/// Checks a request's confinement.
pub fn check(confinement: &Confinement) -> Result<(), Fault> {
    let Confinement { limits, named, demotions, boost } = confinement;
    of_request(limits, "the request")?;
    at_most(named.len(), NAMED_PER_REQUEST_MAX, "named cells")?;
    let mut joined = Vec::new();
    for cell in named {
        check_named(cell)?;
        joined.extend_from_slice(&cell.controllers);
    }
    once(&joined, "the named cells of one request")?;
    check_demotions(demotions)?;
    check_boost(*boost)
}

/// Checks a boost of an instance. Its record decides how much of it is granted.
pub fn check_boost(Boost { cpu, cpu_shares }: Boost) -> Result<(), Fault> {
    check_limits(&LimitSet { cpu, cpu_shares, ..LimitSet::default() }, "a boost")
}

/// Checks the number of tenants named at once. The choice is not checked: lowered priority costs a
/// tenant only CPU time that others want.
pub fn check_giving_way(give_way: &[TenantName], resume: &[TenantName]) -> Result<(), Fault> {
    at_most(give_way.len().max(resume.len()), TENANTS_MAX, "tenants")
}

/// Checks changes that rules make to named cells.
pub fn check_changes(changes: &[CellChange]) -> Result<(), Fault> {
    at_most(changes.len(), CHANGES_MAX, "changes of cells")?;
    changes.iter().try_for_each(|change| match change {
        CellChange::Set { name, controllers, limits } => {
            check_controllers(name.as_str(), controllers)?;
            of_named(name.as_str(), controllers, limits)
        }
        CellChange::Drop { name, controllers } => check_controllers(name.as_str(), controllers),
    })
}

fn check_named(cell: &NamedCell) -> Result<(), Fault> {
    let name = cell.name.as_str();
    check_controllers(name, &cell.controllers)?;
    if cell.scope == CellScope::Tenant && cell.controllers.len() < CgroupController::ALL.len() {
        return refuse(format!("cell '{name}' of a tenant is joined with some controllers, not with all"));
    }
    cell.limits.as_ref().map_or(Ok(()), |limits| of_named(name, &cell.controllers, limits))
}

fn check_controllers(name: &str, controllers: &[CgroupController]) -> Result<(), Fault> {
    if controllers.is_empty() {
        return refuse(format!("cell '{name}' is named without a controller"));
    }
    once(controllers, &format!("cell '{name}'"))
}

fn once(controllers: &[CgroupController], of: &str) -> Result<(), Fault> {
    let twice = CgroupController::ALL.iter().find(|c| controllers.iter().filter(|had| had == c).count() > 1);
    match twice {
        Some(controller) => refuse(format!("{of}: controller {} is named twice", controller.as_str())),
        None => Ok(()),
    }
}

fn check_demotions(demotions: &[Demotion]) -> Result<(), Fault> {
    at_most(demotions.len(), DEMOTIONS_MAX, "demotions")?;
    if !demotions.is_sorted_by(|a, b| a.after_cpu_us < b.after_cpu_us) {
        return refuse("demotions must be in rising order of CPU time".into());
    }
    demotions.iter().try_for_each(|demotion| of_request(&demotion.limits, "a demotion"))
}

/// Checks limits of a request. It has no memory of its own to limit. Memory shared with the next
/// request in its cell would count for both.
fn of_request(limits: &LimitSet, of: &str) -> Result<(), Fault> {
    if limits.memory.is_some() {
        return refuse(format!(
            "{of} has a limit of memory, which only tenants, sites and named cells can have"
        ));
    }
    check_limits(limits, of)
}

/// Checks limits of a named cell. A limit of a controller that the cell is not named with would
/// have no effect, unnoticed.
fn of_named(name: &str, controllers: &[CgroupController], limits: &LimitSet) -> Result<(), Fault> {
    let needs = [
        (limits.cpu.is_some() || limits.cpu_shares.is_some(), CgroupController::Cpu),
        (!limits.io.is_empty(), CgroupController::Blkio),
        (limits.processes.is_some(), CgroupController::Pids),
        (limits.memory.is_some(), CgroupController::Memory),
        (limits.cpus.is_some() || limits.mems.is_some(), CgroupController::Cpuset),
    ];
    for (is_set, controller) in needs {
        if is_set && !controllers.contains(&controller) {
            let controller = controller.as_str();
            return refuse(format!(
                "cell '{name}' has a limit of {controller} and is named without {controller}"
            ));
        }
    }
    check_limits(limits, &format!("cell '{name}'"))
}

fn check_limits(limits: &LimitSet, of: &str) -> Result<(), Fault> {
    // Destructured in full, so that a new limit cannot be forgotten here.
    let LimitSet { cpu, cpu_shares, io, processes, memory, cpus, mems } = limits;
    if let Some(CpuQuota { quota_us, period_us }) = *cpu {
        within(period_us.into(), CPU_PERIOD_MIN_US.into(), CPU_PERIOD_MAX_US.into(), of, "CPU period in us")?;
        within(quota_us, CPU_QUOTA_MIN_US, CPU_QUOTA_MAX_US, of, "CPU quota in us")?;
    }
    if let Some(shares) = *cpu_shares {
        within(shares.into(), CPU_SHARES_MIN.into(), CPU_SHARES_MAX.into(), of, "CPU shares")?;
    }
    check_io(io, of)?;
    if let Some(processes) = *processes {
        within(processes.into(), 1, PROCESSES_MAX.into(), of, "processes")?;
    }
    if let Some(memory) = *memory {
        within(memory, MEMORY_MIN, i64::MAX.cast_unsigned(), of, "memory in bytes")?;
    }
    for (list, what) in [(cpus, "CPUs"), (mems, "memory nodes")] {
        if list.as_ref().is_some_and(|list| !is_list(list)) {
            return refuse(format!(
                "{of}: the {what} are not a list like '0-1,3' of numbers up to {LIST_NUMBER_MAX}"
            ));
        }
    }
    Ok(())
}

fn check_io(io: &[IoLimit], of: &str) -> Result<(), Fault> {
    at_most(io.len(), DEVICES_PER_CELL_MAX, "devices of one cell")?;
    for (at, limit) in io.iter().enumerate() {
        let IoLimit { device, read_bps, write_bps, read_iops, write_iops } = limit;
        if io[..at].iter().any(|before| before.device == *device) {
            return refuse(format!("{of}: device {device} is limited twice"));
        }
        if let Device::Number { major, minor } = *device
            && (major > MAJOR_MAX || minor > MINOR_MAX)
        {
            return refuse(format!("{of}: there can be no device {device}"));
        }
        for bps in [read_bps, write_bps].into_iter().flatten() {
            within(*bps, 1, i64::MAX.cast_unsigned(), of, "bytes per second")?;
        }
        for iops in [read_iops, write_iops].into_iter().flatten() {
            within(*iops, 1, IOPS_MAX, of, "operations per second")?;
        }
    }
    Ok(())
}

/// Whether it is in the list format of `cpuset(7)`, without strides.
fn is_list(text: &str) -> bool {
    let number = |part: &str| {
        let plain = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        part.parse::<u32>().ok().filter(|number| plain && *number <= LIST_NUMBER_MAX)
    };
    text.len() <= LIST_LEN_MAX
        && text.split(',').all(|range| match range.split_once('-') {
            Some((first, last)) => number(first).zip(number(last)).is_some_and(|(first, last)| first <= last),
            None => number(range).is_some(),
        })
}

fn within(value: u64, least: u64, most: u64, of: &str, what: &str) -> Result<(), Fault> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    refuse(format!("{of}: {what}: {value} is not in {least}..={most}"))
}

fn at_most(count: usize, most: usize, what: &str) -> Result<(), Fault> {
    if count > most {
        refuse(format!("{count} {what} were requested at once; at most {most} are allowed"))
    } else {
        Ok(())
    }
}

fn refuse(why: String) -> Result<(), Fault> {
    Err(Fault::new(FailureKind::Invalid, fault::CONFINEMENT, why))
}

#[cfg(test)]
mod tests;

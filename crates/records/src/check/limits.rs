//! Checks cell limits in records: each amount must be in its range and where it can take effect.
//!
//! Not here: reading one amount (`record::WrittenAmount`), the effect of limits (`cell`,
//! `keeper::cells`).

use super::RecordFindings;
use crate::cell::{CPU_SHARES_MAX, CPU_SHARES_MIN, DEMOTIONS_MAX, DEVICES_PER_CELL_MAX, Device};
use crate::record::{Backend, CellLimits, DeviceLimits, Site, WrittenAmount, WrittenDemotion};

/// The kind of cell to which limits belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LimitLevel {
    TenantOrSite,
    /// It has no memory of its own. Requests share memory, such as files in memory, that belongs to
    /// none of them.
    Request,
}

pub(super) fn of_site(site: &Site, to: &mut RecordFindings) {
    let Site { limits, request_limits, demotions, backend, .. } = site;
    let runs_per_request = matches!(backend, Backend::Cgi(_) | Backend::Php(_));
    let runs_here = runs_per_request || matches!(backend, Backend::App(_));
    cell("limits", limits, LimitLevel::TenantOrSite, to);
    if !runs_here {
        only_bytes("limits", limits, backend, to);
    }
    cell("request_limits", request_limits, LimitLevel::Request, to);
    if !runs_per_request {
        only_bytes("request_limits", request_limits, backend, to);
    }
    if runs_per_request {
        steps(demotions, to);
    } else if !demotions.is_empty() {
        let hint = format!(
            "have no effect on a {} site: only cgi and php run a program per request",
            backend.kind()
        );
        to.add("demotions", "", hint);
    }
}

/// Checks limits where the edge serves bodies itself: it enforces only rates of bytes. All other
/// limits need a program of the tenant. Without one, a limit would seem to hold and would not.
fn only_bytes(field: &str, limits: &CellLimits, backend: &Backend, to: &mut RecordFindings) {
    let CellLimits { cpu, cpu_shares, read: _, write: _, read_iops, write_iops, processes, memory, devices } =
        limits;
    let given = [
        ("cpu", cpu.is_some()),
        ("cpu_shares", cpu_shares.is_some()),
        ("read_iops", read_iops.is_some()),
        ("write_iops", write_iops.is_some()),
        ("processes", processes.is_some()),
        ("memory", memory.is_some() && field == "limits"),
        ("devices", !devices.is_empty()),
    ];
    for (name, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
        let hint = format!("has no effect on a {} site: only read and write hold there", backend.kind());
        to.add(format!("{field}.{name}"), "", hint);
    }
}

pub(super) fn cell(field: &str, limits: &CellLimits, level: LimitLevel, to: &mut RecordFindings) {
    let CellLimits { cpu, cpu_shares, processes, memory, devices, .. } = limits;
    amount(field, "cpu", cpu.as_ref(), WrittenAmount::cpu, to);
    if let Some(shares) = cpu_shares
        && !(CPU_SHARES_MIN..=CPU_SHARES_MAX).contains(shares)
    {
        let hint = format!("is out of range: {CPU_SHARES_MIN} to {CPU_SHARES_MAX}");
        to.add(format!("{field}.cpu_shares"), shares, hint);
    }
    device(field, &limits.root_device(), to);
    amount(field, "processes", processes.as_ref(), WrittenAmount::processes, to);
    match (memory, level) {
        (Some(memory), LimitLevel::Request) => to.add(
            format!("{field}.memory"),
            memory,
            "cannot be limited for one request: limit the site's or the tenant's",
        ),
        (memory, _) => amount(field, "memory", memory.as_ref(), WrittenAmount::memory, to),
    }
    let count = devices.len() + usize::from(limits.root_device() != DeviceLimits::default());
    if count > DEVICES_PER_CELL_MAX {
        to.add(
            format!("{field}.devices"),
            count,
            format!("disks are too many: at most {DEVICES_PER_CELL_MAX}"),
        );
    }
    for (name, limits) in devices {
        let field = format!("{field}.devices");
        match name.parse::<Device>() {
            Ok(Device::Root) => {
                to.add(&field, name, "is the disk without a name: write its limits beside devices");
            }
            Ok(found) if found.to_string() != *name => {
                to.add(&field, name, format!("has zeros too many: write {found}"));
            }
            Ok(_) => {}
            Err(_) => to.add(&field, name, "is not a device: write MAJOR:MINOR as `lsblk` shows it"),
        }
        device(&format!("{field}.{name}"), limits, to);
    }
}

fn device(field: &str, limits: &DeviceLimits, to: &mut RecordFindings) {
    amount(field, "read", limits.read.as_ref(), WrittenAmount::rate, to);
    amount(field, "write", limits.write.as_ref(), WrittenAmount::rate, to);
    amount(field, "read_iops", limits.read_iops.as_ref(), WrittenAmount::iops, to);
    amount(field, "write_iops", limits.write_iops.as_ref(), WrittenAmount::iops, to);
}

fn amount<T>(
    field: &str,
    name: &str,
    amount: Option<&WrittenAmount>,
    read: fn(&WrittenAmount) -> Result<Option<T>, String>,
    to: &mut RecordFindings,
) {
    if let Some(amount) = amount
        && let Err(hint) = read(amount)
    {
        to.add(format!("{field}.{name}"), amount, hint);
    }
}

fn steps(demotions: &[WrittenDemotion], to: &mut RecordFindings) {
    if demotions.len() > DEMOTIONS_MAX {
        to.add("demotions", demotions.len(), format!("steps are too many: at most {DEMOTIONS_MAX}"));
    }
    let mut before = 0;
    for (index, step) in demotions.iter().enumerate() {
        let field = format!("demotions[{index}]");
        match step.after_cpu_us() {
            Ok(us) if us > before => before = us,
            Ok(_) => {
                let hint = "is not more than the step before it: order the steps by after_cpu";
                to.add(format!("{field}.after_cpu"), &step.after_cpu, hint);
            }
            Err(hint) => to.add(format!("{field}.after_cpu"), &step.after_cpu, hint),
        }
        if step.limits.is_empty() {
            to.add(format!("{field}.limits"), "", "are empty: name at least one limit");
        }
        cell(&format!("{field}.limits"), &step.limits, LimitLevel::Request, to);
    }
}

//! Chooses and orders the shown cells, and formats each row.
//!
//! Not here: their source and interval (`cells`).

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use nagaya_records::cell::{IoLimit, LimitSet};

use super::{CellRates, CellTree, CellView, PressureView};
use crate::cli::output::{TableColumns, printable};

/// One cell to be shown.
#[derive(Debug)]
pub struct CellRow<'a> {
    cell: &'a CellView,
    /// Number of shown cells above it.
    depth: usize,
    /// The part of its path that they do not include.
    name: &'a str,
    rates: Option<CellRates>,
}

/// Returns the cells with the highest use, and how many more there are. They form a tree with the
/// busiest first on each level.
pub fn of<'a>(
    tree: &'a CellTree,
    tenant: Option<&str>,
    limit: usize,
    rates: Option<&HashMap<String, CellRates>>,
) -> (Vec<CellRow<'a>>, usize) {
    let mut cells: Vec<&CellView> = tree
        .cells
        .iter()
        .filter(|cell| tenant.is_none_or(|tenant| cell.tenant.as_deref() == Some(tenant)))
        .collect();
    // A cell's use contains that of its children, so the kept cells form a tree.
    cells.sort_by_cached_key(|cell| {
        (Reverse(weight(cell, rates)), cell.path.matches('/').count(), cell.path.clone())
    });
    let hidden = cells.len().saturating_sub(limit);
    cells.truncate(limit);
    let kept: HashSet<&str> = cells.iter().map(|cell| &*cell.path).collect();
    let mut children: HashMap<Option<&str>, Vec<&CellView>> = HashMap::new();
    for cell in cells {
        children.entry(parent(&cell.path, &kept)).or_default().push(cell);
    }
    let mut rows = Vec::new();
    let mut open: Vec<(usize, &CellView)> = beneath(&mut children, None, 0);
    while let Some((depth, cell)) = open.pop() {
        let above = parent(&cell.path, &kept).filter(|above| !above.is_empty());
        let name = above.and_then(|above| cell.path.strip_prefix(above)).unwrap_or(&cell.path);
        let name = if cell.path.is_empty() { "node" } else { name.trim_start_matches('/') };
        let rates = rates.and_then(|rates| rates.get(&cell.path)).copied();
        rows.push(CellRow { cell, depth, name, rates });
        open.extend(beneath(&mut children, Some(&cell.path), depth + 1));
    }
    (rows, hidden)
}

/// Adds the cells below. The last is next: the caller takes from the end.
fn beneath<'a>(
    children: &mut HashMap<Option<&'a str>, Vec<&'a CellView>>,
    above: Option<&'a str>,
    depth: usize,
) -> Vec<(usize, &'a CellView)> {
    children.remove(&above).unwrap_or_default().into_iter().rev().map(|cell| (depth, cell)).collect()
}

/// Returns the nearest shown cell above. The node's own path is empty.
fn parent<'a>(path: &'a str, kept: &HashSet<&str>) -> Option<&'a str> {
    let mut above = path;
    while !above.is_empty() {
        above = above.rsplit_once('/').map_or("", |(above, _)| above);
        if kept.contains(above) {
            return Some(above);
        }
    }
    None
}

/// Returns the sort key: CPU time, then bytes, then memory. It uses present rates if known,
/// otherwise totals since the cell was made.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "only the order matters")]
fn weight(cell: &CellView, rates: Option<&HashMap<String, CellRates>>) -> (u64, u64, u64) {
    let usage = &cell.usage;
    let memory = usage.memory_bytes.unwrap_or(0);
    match rates {
        Some(rates) => {
            let rates = rates.get(&cell.path).copied().unwrap_or_default();
            ((rates.cpu_percent * 10.0) as u64, (rates.read_bytes + rates.write_bytes) as u64, memory)
        }
        None => {
            let bytes = usage.read_bytes.unwrap_or(0).saturating_add(usage.write_bytes.unwrap_or(0));
            (usage.cpu_us.unwrap_or(0), bytes, memory)
        }
    }
}

/// Returns the table. With rates the columns are per second, otherwise totals since the cell was
/// made.
pub fn table(rows: &[CellRow<'_>], rates: bool) -> TableColumns {
    let head = if rates {
        ["CELL", "CPU", "THROTTLED", "READ/s", "WRITE/s"]
    } else {
        ["CELL", "CPU TIME", "THROTTLED", "READ", "WRITTEN"]
    };
    let rest = ["REQUESTS", "PROCESSES", "MEMORY", "PRESSURE", "LIMITS"];
    let mut columns = TableColumns::new(&[&head[..], &rest[..]].concat());
    for row in rows {
        let CellRow { cell, depth, name, .. } = row;
        let usage = &cell.usage;
        let mut line = vec![format!("{:1$}{2}", "", depth * 2, printable(name))];
        match (rates, &row.rates) {
            (true, Some(rates)) => line.extend([
                percent(rates.cpu_percent),
                percent(rates.throttled_percent),
                bytes(rates.read_bytes),
                bytes(rates.write_bytes),
            ]),
            (true, None) => line.extend(["-"; 4].map(String::from)),
            (false, _) => line.extend([
                usage.cpu_us.map_or_else(none, seconds),
                usage.throttled_us.map_or_else(none, seconds),
                usage.read_bytes.map_or_else(none, whole_bytes),
                usage.write_bytes.map_or_else(none, whole_bytes),
            ]),
        }
        line.extend([
            cell.requests.to_string(),
            usage.processes.map_or_else(none, |count| count.to_string()),
            usage.memory_bytes.map_or_else(none, whole_bytes),
            pressure(cell.pressure),
            limits(&cell.limits),
        ]);
        columns.add(line);
    }
    columns
}

fn none() -> String {
    "-".into()
}

fn seconds(us: u64) -> String {
    format!("{}.{:02}s", us / 1_000_000, us % 1_000_000 / 10_000)
}

fn percent(share: f64) -> String {
    format!("{share:.1}%")
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn whole_bytes(count: u64) -> String {
    bytes(count as f64)
}

/// Returns about three digits, in units of 1024, as limits are written.
fn bytes(count: f64) -> String {
    let units = ["B", "K", "M", "G", "T"];
    let mut count = count;
    let mut unit = 0;
    while count >= 1024.0 && unit < units.len() - 1 {
        count /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && count < 100.0);
    format!("{count:.digits$}{}", units[unit])
}

/// Returns the largest of the three, and its resource.
fn pressure(pressure: Option<PressureView>) -> String {
    let Some(PressureView { cpu, io, memory }) = pressure else { return none() };
    let all = [("cpu", cpu), ("io", io), ("memory", memory)];
    let known = all.into_iter().filter_map(|(name, share)| Some((name, share?)));
    match known.max_by(|a, b| a.1.total_cmp(&b.1)) {
        None => none(),
        Some((_, 0.0)) => percent(0.0),
        Some((name, share)) => format!("{name} {}", percent(share)),
    }
}

/// Returns the limits as in records.
fn limits(limits: &LimitSet) -> String {
    let LimitSet { cpu, cpu_shares, io, processes, memory, cpus, mems } = limits;
    let mut words = Vec::new();
    if let Some(cpu) = cpu {
        // Thousandths of a core, as far as they can be written.
        let thousandths = u128::from(cpu.quota_us) * 1000 / u128::from(cpu.period_us.max(1));
        let tenth =
            if thousandths.is_multiple_of(10) { String::new() } else { format!(".{}", thousandths % 10) };
        words.push(format!("cpu {}{tenth}%", thousandths / 10));
    }
    words.extend(cpu_shares.map(|shares| format!("shares {shares}")));
    words.extend(io.iter().map(device));
    words.extend(processes.map(|count| format!("processes {count}")));
    words.extend(memory.map(|count| format!("memory {}", whole_bytes(count))));
    words.extend(cpus.as_ref().map(|list| format!("cpus {list}")));
    words.extend(mems.as_ref().map(|list| format!("mems {list}")));
    if words.is_empty() { none() } else { words.join(", ") }
}

fn device(limit: &IoLimit) -> String {
    let IoLimit { device, read_bps, write_bps, read_iops, write_iops } = limit;
    let rates = [("read", read_bps), ("write", write_bps)];
    let counts = [("read", read_iops), ("write", write_iops)];
    let mut words: Vec<String> = rates
        .into_iter()
        .filter_map(|(name, rate)| Some(format!("{name} {}/s", whole_bytes((*rate)?))))
        .collect();
    words.extend(counts.into_iter().filter_map(|(name, rate)| Some(format!("{} {name}s/s", (*rate)?))));
    let words = words.join(", ");
    match device {
        nagaya_records::cell::Device::Root => words,
        other => format!("{words} ({other})"),
    }
}

//! Computes the load of instances between two samples from their counters, and the limits they have
//! and may get.
//!
//! Not here: counting (`nagaya_keeper`), the decisions (`nagaya_placement::balance`).

use std::collections::HashMap;

use nagaya_records::cell::CpuQuota;
use nagaya_records::instance::{RunUsage, Tier};
use nagaya_records::{Backend, Site, SiteName, Tenant};

/// Load of one instance since the last sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SiteMeasure {
    pub used: RunUsage,
    /// Part of the time with work ready and no CPU for it, 0 to 1.
    pub starved: f32,
    /// Part of the time in which a used-up quota caused that.
    pub throttled: f32,
    /// CPUs in use, on average.
    pub cpus: f32,
}

impl SiteMeasure {
    /// Makes an entry without load, for an instance without processes or without two samples.
    pub fn at_rest(site: SiteName) -> Self {
        let used = RunUsage {
            site,
            run: 0,
            tier: Tier::Cold,
            at_us: 0,
            cpu_us: 0,
            throttled_us: 0,
            waited_us: None,
            memory_bytes: 0,
            limit: None,
            is_limit_changed: false,
        };
        Self { used, starved: 0.0, throttled: 0.0, cpus: 0.0 }
    }
}

/// Remembers the last sample.
#[derive(Debug, Default)]
pub struct SiteMeter {
    last: HashMap<SiteName, RunUsage>,
}

impl SiteMeter {
    /// Returns the load of instances that ran since the last sample. Also returns the sites that
    /// ran then and do not now.
    pub fn take(&mut self, now: Vec<RunUsage>) -> (Vec<SiteMeasure>, Vec<SiteName>) {
        let mut last = HashMap::with_capacity(now.len());
        let mut measured = Vec::new();
        for used in now {
            let before = self.last.remove(&used.site);
            measured.extend(before.and_then(|before| between(&before, &used)));
            last.insert(used.site.clone(), used);
        }
        let gone = std::mem::replace(&mut self.last, last).into_keys().collect();
        (measured, gone)
    }
}

fn between(before: &RunUsage, now: &RunUsage) -> Option<SiteMeasure> {
    let took = now.at_us.checked_sub(before.at_us).filter(|us| *us > 0 && now.run == before.run)?;
    // Microseconds of seconds are far below where a float loses relevant precision.
    let part = |from: u64, to: u64| (to.saturating_sub(from) as f64 / took as f64) as f32;
    let throttled = part(before.throttled_us, now.throttled_us).min(1.0);
    let waited = before.waited_us.zip(now.waited_us).map_or(0.0, |(from, to)| part(from, to));
    // A quiet instance gets only leftover CPU time, and is short of nothing.
    let starved = if now.tier == Tier::Running { throttled.max(waited).min(1.0) } else { 0.0 };
    let throttled = throttled.min(starved);
    Some(SiteMeasure { used: now.clone(), starved, throttled, cpus: part(before.cpu_us, now.cpu_us) })
}

/// CPUs that a site's instance has by its record, and that it may get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeBounds {
    pub base: f32,
    pub max: f32,
    /// It has a limit of its own.
    pub is_limited: bool,
}

/// Least part served. If an instance is short of CPU most of the time, it wants at most four times
/// its usage.
const SERVED_LEAST: f32 = 0.25;

impl NodeBounds {
    /// Returns the bounds. `raise_max` is a factor on its own limit, for a record without a
    /// maximum. No site gets more than its tenant or the node has.
    pub fn compute(site: &Site, tenant: &Tenant, raise_max: u32, cpus: u32) -> Self {
        let around = quota(tenant.limits.limits().cpu).unwrap_or(f32::MAX).min(cpus as f32);
        let Some(own) = quota(site.limits.limits().cpu) else {
            let around = rounded(around);
            return Self { base: around, max: around, is_limited: false };
        };
        let said = match &site.backend {
            Backend::App(app) => app.cpu_max.as_ref().and_then(|most| most.cpu().ok()),
            _ => None,
        };
        let wished = match said {
            Some(thousandths) => thousandths.map_or(f32::MAX, |thousandths| thousandths as f32 / 1000.0),
            None => own * raise_max as f32,
        };
        let base = rounded(own.min(around));
        Self { base, max: rounded(wished.min(around).max(base)), is_limited: true }
    }

    /// Returns the CPUs that this one would use if there were enough.
    pub fn wants(&self, one: &SiteMeasure) -> f32 {
        if self.is_limited {
            one.cpus.max(self.base)
        } else {
            (one.cpus / (1.0 - one.starved).max(SERVED_LEAST)).min(self.max)
        }
    }
}

/// Returns the quota in CPUs.
pub fn quota(cpu: Option<CpuQuota>) -> Option<f32> {
    cpu.map(|cpu| rounded(cpu.quota_us as f32 / cpu.period_us.max(1) as f32))
}

/// Returns thousandths of a CPU, as limits are set.
pub fn thousandths(cpus: f32) -> u32 {
    // More CPUs than any machine has still fit.
    (cpus * 1000.0).round().clamp(1.0, 1e9) as u32
}

/// Returns the value as it is after it was set and read back, so that equal limits compare as
/// equal.
fn rounded(cpus: f32) -> f32 {
    thousandths(cpus) as f32 / 1000.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn used(at_us: u64, cpu_us: u64, throttled_us: u64, waited_us: Option<u64>) -> RunUsage {
        RunUsage {
            site: SiteName::new("wiki").unwrap(),
            run: 1,
            tier: Tier::Running,
            at_us,
            cpu_us,
            throttled_us,
            waited_us,
            memory_bytes: 5,
            limit: None,
            is_limit_changed: false,
        }
    }

    fn measured(first: RunUsage, second: RunUsage) -> Option<(f32, f32)> {
        let mut meter = SiteMeter::default();
        assert_eq!(meter.take(vec![first]), (vec![], vec![]), "one look says nothing");
        meter.take(vec![second]).0.first().map(|one| (one.starved, one.cpus))
    }

    #[test]
    fn usage_between_two_looks_is_known_from_the_second_on() {
        let begun = || used(1_000_000, 500_000, 70_000, None);
        for (second, expected) in [
            (used(2_000_000, 800_000, 670_000, None), Some((0.6, 0.3))),
            // Two threads stood still for most of the time.
            (used(2_000_000, 800_000, 1_800_000, None), Some((1.0, 0.3))),
            (used(3_000_000, 500_000, 70_000, None), Some((0.0, 0.0))),
            (used(1_000_000, 500_000, 70_000, None), None),
            (RunUsage { run: 2, ..used(2_000_000, 10, 10, None) }, None),
            (RunUsage { tier: Tier::Quiet, ..used(2_000_000, 800_000, 670_000, None) }, Some((0.0, 0.3))),
        ] {
            assert_eq!(measured(begun(), second.clone()), expected, "{second:?}");
        }
        let waited = measured(used(0, 0, 0, Some(0)), used(1_000_000, 400_000, 100_000, Some(500_000)));
        assert_eq!(waited, Some((0.5, 0.4)), "for want of a CPU, whatever the reason");
    }

    #[test]
    fn site_that_stopped_is_named_once() {
        let mut meter = SiteMeter::default();
        meter.take(vec![used(1, 1, 1, None)]);
        assert_eq!(meter.take(vec![]).1, [SiteName::new("wiki").unwrap()]);
        assert_eq!(meter.take(vec![]).1, []);
    }

    #[test]
    fn a_limit_is_raised_as_far_as_record_tenant_and_node_allow() {
        let of = |site: Option<&str>, most: Option<&str>, tenant: Option<&str>| {
            let limits = |cpu: Option<&str>| cpu.map_or(json!({}), |cpu| json!({ "cpu": cpu }));
            let mut backend = json!({ "kind": "app", "command": ["x"], "directory": "d" });
            if let Some(most) = most {
                backend["cpu_max"] = json!(most);
            }
            let site = json!({ "name": "s", "tenant": "t", "hosts": ["s.test"], "backend": backend, "limits": limits(site) });
            let tenant = json!({ "name": "t", "uid": 1001, "gid": 1001, "limits": limits(tenant) });
            let site = serde_json::from_value(site).unwrap();
            let tenant = serde_json::from_value(tenant).unwrap();
            let NodeBounds { base, max, .. } = NodeBounds::compute(&site, &tenant, 4, 8);
            (base, max)
        };
        assert_eq!(of(Some("50%"), None, None), (0.5, 2.0));
        assert_eq!(of(Some("50%"), Some("150%"), None), (0.5, 1.5));
        assert_eq!(of(Some("50%"), Some("150%"), Some("100%")), (0.5, 1.0));
        assert_eq!(of(Some("50%"), Some("unlimited"), None), (0.5, 8.0));
        assert_eq!(of(Some("50%"), Some("10%"), None), (0.5, 0.5), "never below its own");
        assert_eq!(of(Some("400%"), None, None), (4.0, 8.0), "the node has no more");
        assert_eq!(of(Some("50%"), None, Some("20%")), (0.2, 0.2));
        assert_eq!(of(None, None, Some("300%")), (3.0, 3.0));
        assert_eq!(of(None, Some("50%"), None), (8.0, 8.0), "what has no limit has all there is");
    }

    #[test]
    fn short_application_wants_its_limit_or_the_missed_time() {
        let one = |starved, cpus| SiteMeasure { used: used(1, 1, 1, None), starved, throttled: 0.0, cpus };
        let limited = NodeBounds { base: 0.5, max: 2.0, is_limited: true };
        let free = NodeBounds { base: 8.0, max: 8.0, is_limited: false };
        assert_eq!(limited.wants(&one(0.9, 0.1)), 0.5);
        assert_eq!(limited.wants(&one(0.5, 1.5)), 1.5);
        assert_eq!(free.wants(&one(0.5, 1.0)), 2.0);
        assert_eq!(free.wants(&one(1.0, 1.0)), 4.0);
        assert_eq!(free.wants(&one(0.9, 4.0)), 8.0, "no more than there is");
    }

    #[test]
    fn limits_are_told_in_thousandths() {
        assert_eq!([thousandths(0.25), thousandths(16.0), thousandths(0.0)], [250, 16_000, 1]);
        assert_eq!(quota(Some(CpuQuota::of_core(1_500))), Some(1.5));
        assert_eq!(quota(None), None);
        for one in 1..20_000 {
            assert_eq!(quota(Some(CpuQuota::of_core(one))).map(thousandths), Some(one));
        }
    }
}

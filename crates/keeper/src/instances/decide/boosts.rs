//! Boosts: limits of an instance that are higher while a request runs for which a rule wants that.
//!
//! The edge asks, and says no more than how much a rule wants. How far an instance is raised is for
//! its records and the configuration to say (`BoostRange`), and of several requests the one that
//! may have most decides (`ActiveBoosts`): both are pure. Not here: giving one
//! (`limits::boost_ref`), who asks (`server`), files of cgroups (`cells`), raising for want of CPU
//! (`nagaya::supervisor::balance`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use nagaya_keeper_api::protocol::BoostId;
use nagaya_records::cell::{Boost, CPU_SHARES_DEFAULT, CPU_SHARES_MAX, CpuQuota};
use nagaya_records::record::CPU_THOUSANDTHS_MAX;
use nagaya_records::{Backend, Site, Tenant};

/// Range in which an instance's limits may be boosted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoostRange {
    /// Thousandths of a core: the record's and the maximum. `None` if it has no limit, so there is
    /// nothing to boost.
    cpu: Option<(u32, u32)>,
    cpu_shares: (u32, u32),
}

impl BoostRange {
    /// Computes the range. CPU: up to `cpu_max` of its record, else `raise_max` times its record's
    /// limit, and never above its tenant's. Shares, which count among sites of its tenant only:
    /// `raise_max` times its record's.
    pub fn of(site: &Site, tenant: &Tenant, raise_max: u32) -> Self {
        let (limits, around) = (site.limits.limits(), tenant.limits.limits().cpu);
        let cpu = limits.cpu.map(|own| {
            let own = own.thousandths();
            let said = match &site.backend {
                Backend::App(app) => app.cpu_max.as_ref().and_then(|most| most.cpu().ok()),
                _ => None,
            };
            let wished = match said {
                Some(thousandths) => thousandths.unwrap_or(CPU_THOUSANDTHS_MAX),
                None => own.saturating_mul(raise_max),
            };
            let around = around.map_or(CPU_THOUSANDTHS_MAX, CpuQuota::thousandths);
            (own, wished.min(around).min(CPU_THOUSANDTHS_MAX).max(own))
        });
        let shares = limits.cpu_shares.unwrap_or(CPU_SHARES_DEFAULT);
        Self { cpu, cpu_shares: (shares, shares.saturating_mul(raise_max).min(CPU_SHARES_MAX)) }
    }

    /// Returns the granted part of a boost. A value that is not above its record's is left out.
    pub fn grants(&self, asked: Boost) -> Boost {
        let raised = |asked: u32, (own, most): (u32, u32)| Some(asked.min(most)).filter(|now| *now > own);
        let cpu = asked.cpu.zip(self.cpu).and_then(|(cpu, range)| raised(cpu.thousandths(), range));
        let cpu_shares = asked.cpu_shares.and_then(|shares| raised(shares, self.cpu_shares));
        Boost { cpu: cpu.map(CpuQuota::of_core), cpu_shares }
    }
}

/// Boosts of running requests, for one run of an instance.
#[derive(Debug, Default)]
pub struct ActiveBoosts {
    asked: BTreeMap<BoostId, Boost>,
}

impl ActiveBoosts {
    fn begin(&mut self, id: BoostId, asked: Boost) {
        self.asked.insert(id, asked);
    }

    /// Returns false if it had ended already.
    fn end(&mut self, id: BoostId) -> bool {
        self.asked.remove(&id).is_some()
    }

    /// Returns the highest value of each kind that is granted now.
    fn now(&self, range: &BoostRange) -> Boost {
        self.asked.values().map(|asked| range.grants(*asked)).fold(Boost::default(), |all, one| Boost {
            cpu: all.cpu.into_iter().chain(one.cpu).max_by_key(|cpu| cpu.thousandths()),
            cpu_shares: all.cpu_shares.max(one.cpu_shares),
        })
    }
}

/// Boosts that requests of an instance's present run want, and the boost that its site's cell has.
#[derive(Debug, Default)]
pub struct BoostSlot {
    boosts: RefCell<ActiveBoosts>,
    granted: Cell<Boost>,
}

impl BoostSlot {
    pub fn begin(&self, id: BoostId, asked: Boost) {
        self.boosts.borrow_mut().begin(id, asked);
    }

    /// Returns whether it had not ended yet.
    pub fn end(&self, id: BoostId) -> bool {
        self.boosts.borrow_mut().end(id)
    }

    pub fn end_all(&self) {
        self.boosts.take();
    }

    /// Sets what the cell has to what is right within this range. Returns what it had, and what it
    /// has now.
    pub fn update(&self, range: &BoostRange) -> (Boost, Boost) {
        let now = self.boosts.borrow().now(range);
        (self.granted.replace(now), now)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn range(site: (Option<&str>, Option<u32>), most: Option<&str>, tenant: Option<&str>) -> BoostRange {
        let mut backend = json!({ "kind": "app", "command": ["x"], "directory": "d" });
        if let Some(most) = most {
            backend["cpu_max"] = json!(most);
        }
        let mut limits = json!({});
        if let Some(cpu) = site.0 {
            limits["cpu"] = json!(cpu);
        }
        if let Some(shares) = site.1 {
            limits["cpu_shares"] = json!(shares);
        }
        let around = tenant.map_or(json!({}), |cpu| json!({ "cpu": cpu }));
        let site =
            json!({ "name": "s", "tenant": "t", "hosts": ["s.test"], "backend": backend, "limits": limits });
        let tenant = json!({ "name": "t", "uid": 1001, "gid": 1001, "limits": around });
        BoostRange::of(&serde_json::from_value(site).unwrap(), &serde_json::from_value(tenant).unwrap(), 4)
    }

    fn cpu(percent: u32) -> Boost {
        Boost { cpu: Some(CpuQuota::of_core(percent * 10)), cpu_shares: None }
    }

    fn shares(shares: u32) -> Boost {
        Boost { cpu: None, cpu_shares: Some(shares) }
    }

    fn none() -> Boost {
        Boost::default()
    }

    #[test]
    fn boost_is_bounded_by_the_record_and_the_tenant() {
        for (site, most, tenant, asked, granted) in [
            (Some("50%"), None, None, cpu(100), cpu(100)),
            (Some("50%"), None, None, cpu(900), cpu(200)),
            (Some("50%"), None, None, cpu(50), none()),
            (Some("50%"), None, None, cpu(10), none()),
            (Some("50%"), Some("150%"), None, cpu(900), cpu(150)),
            (Some("50%"), Some("900%"), None, cpu(900), cpu(900)),
            (Some("50%"), Some("unlimited"), None, cpu(900), cpu(900)),
            (Some("50%"), Some("unlimited"), Some("300%"), cpu(900), cpu(300)),
            (Some("50%"), Some("10%"), None, cpu(900), none()),
            (Some("50%"), None, Some("70%"), cpu(100), cpu(70)),
            (Some("50%"), None, Some("20%"), cpu(100), none()),
            (None, Some("150%"), None, cpu(100), none()),
        ] {
            let range = range((site, None), most, tenant);
            assert_eq!(range.grants(asked), granted, "{site:?} {most:?} {tenant:?} {asked}");
        }
        for (own, asked, granted) in [
            (None, shares(2048), shares(2048)),
            (None, shares(9000), shares(4096)),
            (None, shares(1024), none()),
            (Some(100), shares(9000), shares(400)),
            (Some(5000), shares(10_000), shares(10_000)),
            (Some(5000), shares(4096), none()),
        ] {
            assert_eq!(range((None, own), None, None).grants(asked), granted, "{own:?} {asked}");
        }
    }

    #[test]
    fn no_number_of_an_edge_leads_beyond_the_bound() {
        let range = range((Some("50%"), None), None, None);
        for quota_us in [0, 1, u64::MAX] {
            for period_us in [0, 1, u32::MAX] {
                let asked = Boost { cpu: Some(CpuQuota { quota_us, period_us }), cpu_shares: Some(u32::MAX) };
                let granted = range.grants(asked);
                assert!(
                    granted.cpu.is_none_or(|cpu| (500..=2_000).contains(&cpu.thousandths())),
                    "{asked:?}"
                );
                assert_eq!(granted.cpu_shares, Some(4096));
            }
        }
    }

    #[derive(Clone, Copy)]
    enum Step {
        Begin(u64, Boost),
        End(u64),
        /// Its record says another limit.
        Record(&'static str),
    }

    #[test]
    fn the_one_that_may_have_most_decides_whichever_ends_first() {
        use Step::{Begin, End, Record};
        let both = |percent, more| cpu(percent).overlaid(shares(more));
        let cases: &[&[(Step, Boost)]] = &[
            &[(Begin(1, cpu(100)), cpu(100)), (End(1), none())],
            &[
                (Begin(1, cpu(100)), cpu(100)),
                (Begin(2, cpu(150)), cpu(150)),
                (End(2), cpu(100)),
                (End(1), none()),
            ],
            &[
                (Begin(1, cpu(150)), cpu(150)),
                (Begin(2, cpu(100)), cpu(150)),
                (End(1), cpu(100)),
                (End(1), cpu(100)),
                (End(2), none()),
            ],
            &[
                (Begin(1, cpu(150)), cpu(150)),
                (Begin(2, shares(2048)), both(150, 2048)),
                (Begin(3, both(100, 3000)), both(150, 3000)),
                (End(1), both(100, 3000)),
                (End(3), shares(2048)),
            ],
            // What is asked for stays, what there is of it follows the record.
            &[
                (Begin(1, cpu(300)), cpu(200)),
                (Record("100%"), cpu(300)),
                (Record("400%"), none()),
                (Record("20%"), cpu(80)),
                (End(1), none()),
                (Record("50%"), none()),
            ],
        ];
        for case in cases {
            let (mut boosts, mut own) = (ActiveBoosts::default(), "50%");
            for (at, (step, now)) in case.iter().enumerate() {
                match *step {
                    Begin(id, asked) => boosts.begin(BoostId(id), asked),
                    End(id) => drop(boosts.end(BoostId(id))),
                    Record(cpu) => own = cpu,
                }
                assert_eq!(boosts.now(&range((Some(own), None), None, None)), *now, "step {at}");
            }
        }
    }
}

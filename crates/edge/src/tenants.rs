//! What is counted of each tenant, in the text format of Prometheus: requests by how they ended, bytes, and CPU time of programs.
//!
//! A thread adds to numbers of its own, so that threads do not disturb each other. Each tenant is a label: above a bound, all others
//! are counted together. Not here: metrics with fixed labels (`metrics`), what one request has cost (`account`).

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;
use nagaya_cmdb::TenantName;
use parking_lot::Mutex;

use crate::access_log::{AccessRecord, Used};

/// Tenants with numbers of their own since the process began.
const TENANTS_MAX: usize = 1_000;

/// The label of all others. No tenant has such a name.
const OTHERS: &str = "(others)";

const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// All tenants of a process.
#[derive(Debug)]
pub struct TenantTallies {
    /// Of this one among those of the process: tests make several.
    id: u64,
    all: Mutex<Tallies>,
}

#[derive(Debug, Default)]
struct Tallies {
    /// One tally for each thread that served the tenant.
    named: BTreeMap<TenantName, Vec<Arc<Tally>>>,
    others: Vec<Arc<Tally>>,
}

/// What one thread has counted of one tenant.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Tally {
    requests: [AtomicU64; CLASSES.len()],
    received: AtomicU64,
    sent: AtomicU64,
    cpu_us: AtomicU64,
}

/// A thread's own tallies, and whose they are a part of.
#[derive(Default)]
struct Own {
    id: u64,
    tallies: HashMap<TenantName, Arc<Tally>, RandomState>,
    /// Of all that have none there. Once it is, all that ever get one have theirs.
    others: Option<Arc<Tally>>,
}

thread_local! {
    static OWN: RefCell<Own> = RefCell::default();
}

impl Default for TenantTallies {
    fn default() -> Self {
        // 0 is a thread that has counted nothing.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), all: Mutex::default() }
    }
}

impl TenantTallies {
    /// Counts a request that has ended. One that belongs to no site is nobody's.
    pub fn add(&self, record: &AccessRecord) {
        let Some(site) = &record.site else { return };
        OWN.with_borrow_mut(|own| {
            if own.id != self.id {
                *own = Own { id: self.id, ..Own::default() };
            }
            if !own.tallies.contains_key(&site.tenant) && own.others.is_none() {
                self.begin(&site.tenant, own);
            }
            let tally = own.tallies.get(&site.tenant).or(own.others.as_ref());
            tally.expect("each tenant has one, or all that have none have one").add(record);
        });
    }

    /// Makes this thread's tally of a tenant. Where there are as many tenants as may be, those of all that have one, and that of the
    /// others, so that this thread has nothing left to ask.
    fn begin(&self, tenant: &TenantName, own: &mut Own) {
        let mut all = self.all.lock();
        let add = |list: &mut Vec<Arc<Tally>>| {
            let tally = Arc::new(Tally::default());
            list.push(Arc::clone(&tally));
            tally
        };
        if all.named.contains_key(tenant) || all.named.len() < TENANTS_MAX {
            let tally = add(all.named.entry(tenant.clone()).or_default());
            own.tallies.insert(tenant.clone(), tally);
            return;
        }
        for (name, list) in &mut all.named {
            if !own.tallies.contains_key(name) {
                own.tallies.insert(name.clone(), add(list));
            }
        }
        own.others = Some(add(&mut all.others));
    }

    /// The families, each with a sample for each tenant.
    pub fn text(&self) -> String {
        let sums: Vec<(String, Sum)> = {
            let all = self.all.lock();
            let named = all.named.iter().map(|(name, list)| (name.to_string(), Sum::of(list)));
            let others = (!all.others.is_empty()).then(|| (OTHERS.to_owned(), Sum::of(&all.others)));
            named.chain(others).collect()
        };
        let mut out = String::new();
        let head = |out: &mut String, name: &str, help: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
        };
        head(&mut out, "nagaya_tenant_requests_total", "Requests of a tenant's sites, by class of status");
        for (tenant, sum) in &sums {
            for (class, count) in CLASSES.iter().zip(sum.requests).filter(|(_, count)| *count > 0) {
                let _ = writeln!(
                    out,
                    "nagaya_tenant_requests_total{{tenant=\"{tenant}\",status=\"{class}\"}} {count}"
                );
            }
        }
        let families: [Family; 3] = [
            ("nagaya_tenant_received_bytes_total", "Bytes of request bodies", |sum| sum.received as f64),
            ("nagaya_tenant_sent_bytes_total", "Bytes of response bodies", |sum| sum.sent as f64),
            (
                "nagaya_tenant_cpu_seconds_total",
                "CPU time that requests' programs used, where it is known",
                |sum| sum.cpu_us as f64 / 1e6,
            ),
        ];
        for (name, help, value) in families {
            head(&mut out, name, help);
            for (tenant, sum) in &sums {
                let _ = writeln!(out, "{name}{{tenant=\"{tenant}\"}} {}", value(sum));
            }
        }
        out
    }
}

/// Name and help of a family of metrics, and its value of one tenant.
type Family = (&'static str, &'static str, fn(&Sum) -> f64);

impl Tally {
    fn add(&self, record: &AccessRecord) {
        let class = usize::from(record.status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        self.requests[class].fetch_add(1, Ordering::Relaxed);
        self.received.fetch_add(record.bytes_in, Ordering::Relaxed);
        self.sent.fetch_add(record.bytes_out, Ordering::Relaxed);
        if let Used::Known(usage) = record.used() {
            self.cpu_us.fetch_add(usage.cpu_us, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct Sum {
    requests: [u64; CLASSES.len()],
    received: u64,
    sent: u64,
    cpu_us: u64,
}

impl Sum {
    fn of(tallies: &[Arc<Tally>]) -> Self {
        let mut sum = Self::default();
        for tally in tallies {
            for (to, from) in sum.requests.iter_mut().zip(&tally.requests) {
                *to += from.load(Ordering::Relaxed);
            }
            sum.received += tally.received.load(Ordering::Relaxed);
            sum.sent += tally.sent.load(Ordering::Relaxed);
            sum.cpu_us += tally.cpu_us.load(Ordering::Relaxed);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use nagaya_cmdb::Site;

    use super::*;

    fn record(tenant: &str, status: u16) -> AccessRecord {
        let site = serde_json::json!({ "name": "s", "tenant": tenant, "hosts": ["s"],
            "backend": { "kind": "static", "root": "s" } });
        let site: Site = serde_json::from_value(site).unwrap();
        let mut record = crate::access_log::tests::record("/", None);
        record.site = Some(Arc::new(site));
        (record.status, record.bytes_in, record.bytes_out) = (StatusCode::from_u16(status).unwrap(), 5, 100);
        record
    }

    #[test]
    fn each_tenant_is_counted_over_all_threads() {
        let tallies = TenantTallies::default();
        tallies.add(&record("alice", 200));
        tallies.add(&record("alice", 404));
        std::thread::scope(|scope| {
            scope.spawn(|| tallies.add(&record("alice", 200)));
            scope.spawn(|| tallies.add(&record("bob", 503)));
        });
        let mut nobodys = record("alice", 200);
        nobodys.site = None;
        tallies.add(&nobodys);
        let text = tallies.text();
        for line in [
            "# TYPE nagaya_tenant_requests_total counter",
            "nagaya_tenant_requests_total{tenant=\"alice\",status=\"2xx\"} 2",
            "nagaya_tenant_requests_total{tenant=\"alice\",status=\"4xx\"} 1",
            "nagaya_tenant_requests_total{tenant=\"bob\",status=\"5xx\"} 1",
            "nagaya_tenant_received_bytes_total{tenant=\"alice\"} 15",
            "nagaya_tenant_sent_bytes_total{tenant=\"bob\"} 100",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn above_the_bound_tenants_are_counted_together() {
        let tallies = TenantTallies::default();
        for n in 0..TENANTS_MAX + 3 {
            tallies.add(&record(&format!("t{n}"), 200));
        }
        tallies.add(&record("t0", 200));
        // A thread that comes later knows whose is whose, and none keeps more than there are labels.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for tenant in ["t1001", "t1", "t1002"] {
                    tallies.add(&record(tenant, 200));
                }
                OWN.with_borrow(|own| assert_eq!(own.tallies.len(), TENANTS_MAX));
            });
        });
        assert_eq!(tallies.all.lock().others.len(), 2);
        let text = tallies.text();
        let count = text.lines().filter(|line| line.starts_with("nagaya_tenant_requests_total{")).count();
        assert_eq!(count, TENANTS_MAX + 1);
        assert!(text.contains("{tenant=\"(others)\",status=\"2xx\"} 5\n"));
        for named in ["t0", "t1"] {
            assert!(text.contains(&format!("{{tenant=\"{named}\",status=\"2xx\"}} 2\n")), "{named}");
        }
    }
}

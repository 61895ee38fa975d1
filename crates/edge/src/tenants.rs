//! Counts requests by result, bytes, and CPU time of programs for each tenant.
//!
//! A thread adds to numbers of its own, so that threads do not disturb each other. Each tenant is a
//! label. Above a bound, all others are counted together. Not here: metrics with fixed labels
//! (`metrics`), the cost of one request (`request::context`).

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;
use http::StatusCode;
use nagaya_records::TenantName;
use nagaya_telemetry::{MetricPage, MetricValue};
use parking_lot::Mutex;

/// Maximum number of tenants with numbers of their own since the process began.
const TENANTS_MAX: usize = 1_000;

/// The label of all others. No tenant has such a name.
const OTHERS: &str = "(others)";

const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// All tenants of a process.
#[derive(Debug)]
pub struct TenantMetrics {
    /// Number of this one in the process, because tests make several.
    id: u64,
    all: Mutex<TenantCounterTable>,
}

#[derive(Debug, Default)]
struct TenantCounterTable {
    /// One tally for each thread that served the tenant.
    named: BTreeMap<TenantName, Vec<Arc<TenantCounters>>>,
    others: Vec<Arc<TenantCounters>>,
}

/// The figures of one request that count for its tenant.
#[derive(Debug, Clone, Copy)]
pub struct EndedRequest {
    pub status: StatusCode,
    /// Bytes of the request's body.
    pub bytes_in: u64,
    /// Bytes of the response's body.
    pub bytes_out: u64,
    /// CPU time of its programs, as far as it is known.
    pub cpu_us: u64,
}

/// One thread's counters of one tenant.
#[derive(Debug, Default)]
#[repr(align(128))]
struct TenantCounters {
    requests: [AtomicU64; CLASSES.len()],
    received: AtomicU64,
    sent: AtomicU64,
    cpu_us: AtomicU64,
}

/// A thread's own tallies, and the set they belong to.
#[derive(Default)]
struct ThreadCounters {
    id: u64,
    tallies: HashMap<TenantName, Arc<TenantCounters>, RandomState>,
    /// Counters of all tenants without their own. Once it is set, no further tenant gets its own.
    others: Option<Arc<TenantCounters>>,
}

thread_local! {
    static OWN: RefCell<ThreadCounters> = RefCell::default();
}

impl Default for TenantMetrics {
    fn default() -> Self {
        // 0 is a thread that has counted nothing.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), all: Mutex::default() }
    }
}

impl TenantMetrics {
    /// Counts a request of this tenant that has ended.
    pub fn add(&self, tenant: &TenantName, ended: EndedRequest) {
        OWN.with_borrow_mut(|own| {
            if own.id != self.id {
                *own = ThreadCounters { id: self.id, ..ThreadCounters::default() };
            }
            if !own.tallies.contains_key(tenant) && own.others.is_none() {
                self.begin(tenant, own);
            }
            let tally = own.tallies.get(tenant).or(own.others.as_ref());
            tally.expect("each tenant has one, or all that have none have one").add(ended);
        });
    }

    /// Makes this thread's tally of a tenant. If the maximum number of tenants is reached, it
    /// makes all of them, and that of the others. Then this thread never asks again.
    fn begin(&self, tenant: &TenantName, own: &mut ThreadCounters) {
        let mut all = self.all.lock();
        let add = |list: &mut Vec<Arc<TenantCounters>>| {
            let tally = Arc::new(TenantCounters::default());
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

    /// Adds the families, each with the samples of each tenant.
    pub fn expose(&self, page: &mut MetricPage) {
        let sums: Vec<(String, TenantSum)> = {
            let all = self.all.lock();
            let named = all.named.iter().map(|(name, list)| (name.to_string(), TenantSum::of(list)));
            let others = (!all.others.is_empty()).then(|| (OTHERS.to_owned(), TenantSum::of(&all.others)));
            named.chain(others).collect()
        };
        let requests =
            page.counters("nagaya_tenant_requests_total", "Requests of a tenant's sites, by class of status");
        for (tenant, sum) in &sums {
            for (class, count) in CLASSES.iter().zip(sum.requests).filter(|(_, count)| *count > 0) {
                requests.add([("tenant", tenant), ("status", class)], count);
            }
        }
        let families: [TenantMetricFamily; 3] = [
            ("nagaya_tenant_received_bytes_total", "Bytes of request bodies", |sum| sum.received.into()),
            ("nagaya_tenant_sent_bytes_total", "Bytes of response bodies", |sum| sum.sent.into()),
            (
                "nagaya_tenant_cpu_seconds_total",
                "CPU time that requests' programs used, where it is known",
                |sum| (sum.cpu_us as f64 / 1e6).into(),
            ),
        ];
        for (name, help, value) in families {
            let family = page.counters(name, help);
            for (tenant, sum) in &sums {
                family.add([("tenant", tenant)], value(sum));
            }
        }
    }
}

/// Name and help of a family of metrics, and its value of one tenant.
type TenantMetricFamily = (&'static str, &'static str, fn(&TenantSum) -> MetricValue);

impl TenantCounters {
    fn add(&self, ended: EndedRequest) {
        let class = usize::from(ended.status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        self.requests[class].fetch_add(1, Ordering::Relaxed);
        self.received.fetch_add(ended.bytes_in, Ordering::Relaxed);
        self.sent.fetch_add(ended.bytes_out, Ordering::Relaxed);
        if ended.cpu_us > 0 {
            self.cpu_us.fetch_add(ended.cpu_us, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct TenantSum {
    requests: [u64; CLASSES.len()],
    received: u64,
    sent: u64,
    cpu_us: u64,
}

impl TenantSum {
    fn of(tallies: &[Arc<TenantCounters>]) -> Self {
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
    use super::*;

    fn add(tallies: &TenantMetrics, tenant: &str, status: u16) {
        let status = StatusCode::from_u16(status).unwrap();
        let ended = EndedRequest { status, bytes_in: 5, bytes_out: 100, cpu_us: 250_000 };
        tallies.add(&TenantName::new(tenant).unwrap(), ended);
    }

    fn text(tallies: &TenantMetrics) -> String {
        let mut page = MetricPage::default();
        tallies.expose(&mut page);
        page.encode()
    }

    #[test]
    fn each_tenant_is_counted_over_all_threads() {
        let tallies = TenantMetrics::default();
        add(&tallies, "alice", 200);
        add(&tallies, "alice", 404);
        std::thread::scope(|scope| {
            scope.spawn(|| add(&tallies, "alice", 200));
            scope.spawn(|| add(&tallies, "bob", 503));
        });
        let text = text(&tallies);
        for line in [
            "# HELP nagaya_tenant_requests_total Requests of a tenant's sites, by class of status",
            "# TYPE nagaya_tenant_requests_total counter",
            "nagaya_tenant_requests_total{tenant=\"alice\",status=\"2xx\"} 2",
            "nagaya_tenant_requests_total{tenant=\"alice\",status=\"4xx\"} 1",
            "nagaya_tenant_requests_total{tenant=\"bob\",status=\"5xx\"} 1",
            "nagaya_tenant_received_bytes_total{tenant=\"alice\"} 15",
            "nagaya_tenant_sent_bytes_total{tenant=\"bob\"} 100",
            "# TYPE nagaya_tenant_cpu_seconds_total counter",
            "nagaya_tenant_cpu_seconds_total{tenant=\"bob\"} 0.25",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn above_the_bound_tenants_are_counted_together() {
        let tallies = TenantMetrics::default();
        for n in 0..TENANTS_MAX + 3 {
            add(&tallies, &format!("t{n}"), 200);
        }
        add(&tallies, "t0", 200);
        // A thread that comes later knows whose is whose, and none keeps more than there are labels.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for tenant in ["t1001", "t1", "t1002"] {
                    add(&tallies, tenant, 200);
                }
                OWN.with_borrow(|own| assert_eq!(own.tallies.len(), TENANTS_MAX));
            });
        });
        assert_eq!(tallies.all.lock().others.len(), 2);
        let text = text(&tallies);
        let count = text.lines().filter(|line| line.starts_with("nagaya_tenant_requests_total{")).count();
        assert_eq!(count, TENANTS_MAX + 1);
        assert!(text.contains("{tenant=\"(others)\",status=\"2xx\"} 5\n"));
        for named in ["t0", "t1"] {
            assert!(text.contains(&format!("{{tenant=\"{named}\",status=\"2xx\"}} 2\n")), "{named}");
        }
    }
}

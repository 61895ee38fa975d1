//! Where a thread's records go when their requests are over: log, counters and ring.
//!
//! Not here: the record of one request (`access_record`).

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use nagaya_base::Code;

use crate::http::networks::contains;
use crate::http::proxy_headers;
use crate::metrics::EdgeMetrics;
use crate::options::EdgeConfig;
use crate::record::access_log::{AccessLog, ThreadLog};
use crate::record::access_record::AccessRecord;
use crate::record::receipt::ring::{ReceiptRing, ReceiptRings};
use crate::record::site_turnarounds::SiteTurnarounds;

const CODE_BAD_CLIENT: Code = Code(433);

/// Maximum number of records that a thread keeps for reuse by later requests. That is about the
/// number of requests that run at once or have just ended.
const BLANKS_MAX: usize = 64;

/// Destination of a thread's accounts when they are closed.
pub struct RequestRecorder {
    pub log: Option<Rc<ThreadLog>>,
    pub metrics: Arc<EdgeMetrics>,
    ring: Arc<ReceiptRing>,
    turnarounds: Arc<SiteTurnarounds>,
    /// Number of receipts that the ring keeps.
    keep: usize,
    #[expect(clippy::vec_box, reason = "records move between requests and rings without being copied")]
    blanks: RefCell<Vec<Box<AccessRecord>>>,
    /// Name of this node.
    pub node: Rc<str>,
    /// Clients that get their receipts.
    allow: Vec<IpNet>,
}

impl RequestRecorder {
    /// Returns the calling thread's recorder with the present settings. Call it inside a
    /// `LocalSet`.
    pub fn new(
        options: &EdgeConfig,
        log: Option<&Arc<AccessLog>>,
        metrics: &Arc<EdgeMetrics>,
        receipts: &ReceiptRings,
    ) -> Rc<Self> {
        Rc::new(Self {
            log: log.map(|log| log.for_thread(&options.node)),
            metrics: Arc::clone(metrics),
            ring: receipts.for_thread(),
            turnarounds: Arc::clone(receipts.turnarounds()),
            keep: options.receipts.keep,
            blanks: RefCell::default(),
            node: options.node.as_str().into(),
            allow: allowed(&options.receipts.allow),
        })
    }

    /// Returns whether the edge measures its own CPU time on requests.
    pub fn measures(&self) -> bool {
        self.keep > 0
    }

    pub fn is_allowed(&self, client: IpAddr) -> bool {
        contains(&self.allow, client)
    }

    pub fn blank(&self) -> Option<Box<AccessRecord>> {
        self.blanks.borrow_mut().pop()
    }

    /// Writes the closed record of a request of this age to log, counters and ring.
    pub fn close(&self, mut record: Box<AccessRecord>, age: Duration) {
        self.metrics.request(&record);
        let AccessRecord { site, more, .. } = &mut *record;
        if let (Some(site), Some(more)) = (site, more)
            && let Some(turnaround) = &more.turnaround
        {
            more.usual = self.turnarounds.add(&site.name, turnaround);
        }
        if let Some(log) = &self.log {
            record.started = SystemTime::now() - age;
            log.write(&record);
        }
        // The record must not keep the memory of a connection for data that only the log needs.
        record.detach_from_connection();
        if let Some(blank) = self.ring.push(record, self.keep) {
            let mut blanks = self.blanks.borrow_mut();
            if blanks.len() < BLANKS_MAX {
                blanks.push(blank);
            }
        }
    }
}

fn allowed(networks: &[String]) -> Vec<IpNet> {
    let read = |text: &String| {
        let network = proxy_headers::network(text);
        if network.is_none() {
            tracing::error!(
                "{CODE_BAD_CLIENT}: '{text}' in receipts.allow is not an address or a network like 192.0.2.0/24; no client gets receipts because of it"
            );
        }
        network
    };
    networks.iter().filter_map(read).collect()
}

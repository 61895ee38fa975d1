//! Checks each hour whether a certificate ends soon. The log reports it 30, 7 and 1 days before,
//! and when it has ended.
//!
//! Not here: reading them (`crate::certificates`).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nagaya_telemetry::MetricPage;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::node::SupervisedNode;
use crate::certificates::{self, CertificateScan, HostNearness, TlsCertificate, unix_now};

/// Interval of checks.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Lines that one check writes into the log, and rows that `nagaya status` shows.
const TOLD_MAX: usize = 20;

/// Known state of the node's certificates.
#[derive(Default)]
pub struct CertificateWatch {
    dir: Mutex<Option<PathBuf>>,
    configured: Notify,
    /// `None` before the first check, or without a directory.
    found: Mutex<Option<CertificateScan>>,
}

impl CertificateWatch {
    /// Sets the directory from now on, and checks soon.
    pub fn configure(&self, dir: Option<PathBuf>) {
        *self.dir.lock() = dir;
        self.configured.notify_one();
    }

    /// Returns the value for `nagaya status`: null without a directory.
    pub fn status(&self) -> Value {
        let found = self.found.lock();
        let Some(found) = &*found else { return Value::Null };
        let now = unix_now();
        let ending: Vec<String> = found.ending().take(TOLD_MAX).map(|one| one.describe(now)).collect();
        json!({
            "read": found.certificates.len(),
            "left_out": found.left_out,
            "first": found.certificates.first(),
            "ending_count": found.ending().count(),
            "ending": ending,
            "broken_count": found.broken.len(),
            "broken": found.broken.iter().take(TOLD_MAX).collect::<Vec<_>>(),
        })
    }

    pub fn expose(&self, page: &mut MetricPage) {
        let found = self.found.lock();
        let Some(found) = &*found else { return };
        let of =
            |wanted: HostNearness| found.certificates.iter().filter(|one| one.nearness == wanted).count();
        let states = [
            ("far", of(HostNearness::Far)),
            ("30_days", of(HostNearness::Month)),
            ("7_days", of(HostNearness::Week)),
            ("1_day", of(HostNearness::Day)),
            ("over", of(HostNearness::Over)),
            ("broken", found.broken.len()),
        ];
        let certificates = page.gauges("nagaya_certificates", "Certificates by how soon they end.");
        for (state, count) in states {
            certificates.add([("state", state)], count as u64);
        }
        if let Some(first) = found.certificates.first() {
            let ends = page.gauges(
                "nagaya_certificate_first_end_timestamp_seconds",
                "Unix time at which the first certificate ends.",
            );
            ends.add([], u64::try_from(first.ends).unwrap_or_default());
        }
    }
}

/// Checks at once and each hour, for ever.
pub async fn keep(node: Arc<SupervisedNode>) {
    // Last report of each certificate: a new one with the same name is reported again.
    let mut told: HashMap<String, (i64, HostNearness)> = HashMap::new();
    loop {
        let dir = node.certificates.dir.lock().clone();
        let look = dir
            .clone()
            .map(|dir| tokio::task::spawn_blocking(move || certificates::scan_directory(&dir, unix_now())));
        let found = match look {
            None => None,
            Some(look) => match look.await {
                Ok(Ok(found)) => Some(found),
                Ok(Err(error)) => {
                    let dir = dir.unwrap_or_default();
                    tracing::warn!(code = "NGY0515", %error, "the certificates in {} cannot be read", dir.display());
                    None
                }
                // A panic there has been reported.
                Err(_) => None,
            },
        };
        if let Some(found) = &found {
            tell(found, &mut told);
        }
        *node.certificates.found.lock() = found;
        let _ = tokio::time::timeout(INTERVAL, node.certificates.configured.notified()).await;
    }
}

/// Logs certificates whose end has come nearer since the last check.
fn tell(found: &CertificateScan, told: &mut HashMap<String, (i64, HostNearness)>) {
    let now = unix_now();
    let is_new = |one: &&TlsCertificate| told.get(&one.name) != Some(&(one.ends, one.nearness));
    let new: Vec<&TlsCertificate> = found.ending().filter(is_new).collect();
    for one in new.iter().take(TOLD_MAX) {
        tracing::warn!(code = "NGY0515", name = one.name, "the certificate of {}", one.describe(now));
    }
    if new.len() > TOLD_MAX {
        tracing::warn!(code = "NGY0515", "and those of {} more names end soon", new.len() - TOLD_MAX);
    }
    *told = found.ending().map(|one| (one.name.clone(), (one.ends, one.nearness))).collect();
}

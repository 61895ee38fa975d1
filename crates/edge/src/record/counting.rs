//! Adds a finished request to the counters.
//!
//! Not here: the counters (`metrics`), one line per request (`access_log`).

use nagaya_records::PlacementReason;

use crate::metrics::{
    EdgeMetrics, FIRST_BYTE, METHODS, REASONS, ReceiptMetrics, backend_position, method_position,
    protocol_position, status_position,
};
use crate::record::access_record::{AccessRecord, ProgramUsage, Relocation};
use crate::tenants::EndedRequest;

impl EdgeMetrics {
    /// Counts a request that is over.
    pub fn request(&self, record: &AccessRecord) {
        let backend = backend_position(record.site.as_ref().map(|site| site.backend.kind()));
        let method = record.method.as_ref().map_or(METHODS.values.len() - 1, method_position);
        let status = status_position(record.status);
        self.requests.add([method, protocol_position(record.version), status, backend], 1);
        self.request_duration.observe(backend, record.took);
        if record.bytes_in > 0 {
            self.received.add(record.bytes_in);
        }
        self.sent.add(record.bytes_out);
        self.figures.add(record, backend);
        // A request that belongs to no site is nobody's.
        if let Some(site) = &record.site {
            self.tenants_served.add(&site.tenant, ended_of(record));
        }
        if let Some(woken) = record.woken() {
            self.wakes.waits.observe(woken.wake.from as usize, woken.waited);
            self.wakes.stages.observe(FIRST_BYTE, record.backend);
        }
        if let Some(reason) = record.refusal {
            let last = REASONS.values.len() - 1;
            let at = REASONS.values.iter().position(|r| *r == reason).unwrap_or(last);
            self.refusals.add([at], 1);
        }
    }

    /// Counts a request that has found its site another place.
    pub fn relocated(&self, relocated: &Relocation) {
        let why = PlacementReason::ALL.iter().position(|why| *why == relocated.why).unwrap_or_default();
        self.moves.relocations.add([why], 1);
        let stages = [relocated.detect, relocated.decide, relocated.store, relocated.asked];
        for (at, took) in stages.into_iter().enumerate() {
            self.moves.stages.observe(at, took);
        }
    }
}

fn ended_of(record: &AccessRecord) -> EndedRequest {
    let cpu_us = match record.used() {
        ProgramUsage::Known(usage) => usage.cpu_us,
        ProgramUsage::Nothing | ProgramUsage::Unknown => 0,
    };
    EndedRequest { status: record.status, bytes_in: record.bytes_in, bytes_out: record.bytes_out, cpu_us }
}

impl ReceiptMetrics {
    fn add(&self, record: &AccessRecord, backend: usize) {
        if !record.queued.is_zero() {
            self.queued.add([backend], u64::try_from(record.queued.as_micros()).unwrap_or(u64::MAX));
        }
        let Some(more) = &record.more else { return };
        self.paced.add([backend], more.paced_us);
        if let ProgramUsage::Known(usage) = more.used {
            self.cpu.add([backend], usage.cpu_us);
            self.read.add([backend], usage.read_bytes);
            self.written.add([backend], usage.write_bytes);
            self.throttled.add([backend], usage.throttled_us);
            self.demotions.add([backend], usage.demoted.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use nagaya_telemetry::MetricPage;

    use super::*;
    use crate::record::access_log::tests::record;

    #[test]
    fn a_request_of_no_site_counts_for_no_tenant() {
        let metrics = EdgeMetrics::new();
        let mut nobodys = record("/", None);
        nobodys.site = None;
        metrics.request(&nobodys);
        let mut page = MetricPage::default();
        metrics.expose_tenants(&mut page);
        assert!(!page.encode().contains("tenant="));
    }
}

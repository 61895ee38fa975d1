//! Checks ids and homes of tenants each hour: the log reports a fault once, a metric always.
//!
//! Not here: the faults of a tenant (`doctor::tenants`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::check::IdPolicy;
use nagaya_store::{PAGE_LEN_MAX, Store, StoreError};
use nagaya_telemetry::MetricPage;
use nix::unistd::Uid;
use parking_lot::Mutex;

use super::node::SupervisedNode;
use crate::doctor::tenants::TenantFinding;
use crate::tenant_ids::IdSource;

/// Interval of checks.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Result of the last check.
#[derive(Default)]
pub struct TenantWatch {
    /// `None` before the first check, or without the rights for one.
    warnings: Mutex<Option<usize>>,
}

impl TenantWatch {
    pub fn expose(&self, page: &mut MetricPage) {
        let Some(count) = *self.warnings.lock() else { return };
        let warnings = page.gauges(
            "nagaya_tenant_warnings",
            "Ids and homes of tenants that are not as they should be, at the last look.",
        );
        warnings.add([], count as u64);
    }
}

/// Checks at once and each hour, for ever. Without root a tenant owns nothing, and there is no
/// check.
pub async fn keep(node: Arc<SupervisedNode>, ids: IdSource) {
    if !Uid::effective().is_root() {
        return;
    }
    let mut told = HashSet::new();
    loop {
        let store = Arc::clone(&node.store);
        let policy = ids.policy();
        let look = tokio::task::spawn_blocking(move || look(&*store, &policy));
        // A panic there has been reported.
        if let Ok(Ok(found)) = look.await {
            told = tell(&found, &told);
            *node.tenants.warnings.lock() = Some(found.warnings.len() + found.more);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn look(store: &dyn Store, policy: &IdPolicy) -> Result<TenantFinding, StoreError> {
    let mut found = TenantFinding::default();
    let mut after = None::<String>;
    loop {
        let page = store.tenants(after.as_deref(), PAGE_LEN_MAX)?;
        let Some(last) = page.last() else { return Ok(found) };
        after = Some(last.name.to_string());
        page.iter().for_each(|tenant| found.add(tenant, policy));
    }
}

/// Logs faults that the previous check did not find.
fn tell(found: &TenantFinding, told: &HashSet<String>) -> HashSet<String> {
    for warning in found.warnings.iter().filter(|warning| !told.contains(*warning)) {
        tracing::warn!(code = "NGY0519", "{warning}");
    }
    found.warnings.iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use nagaya_records::record::RecordChange;
    use nagaya_store::ChangeMode;
    use nagaya_store::RedbStore;

    use super::*;

    #[test]
    fn homes_that_are_not_as_they_should_be_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&dir.path().join("store.redb")).unwrap();
        let tenant = |name: &str, uid: u32, home: Option<std::path::PathBuf>| {
            let record = serde_json::json!({ "name": name, "uid": uid, "gid": uid, "home": home });
            RecordChange::PutTenant(serde_json::from_value(record).unwrap())
        };
        let missing = dir.path().join("missing");
        store
            .transaction(vec![tenant("a", 5_000, Some(missing)), tenant("b", 5_001, None)], ChangeMode::Merge)
            .unwrap();
        let watch = TenantWatch::default();
        let found = look(&store, &IdPolicy::default()).unwrap();
        assert_eq!((found.looked_at, found.warnings.len()), (2, 1), "{:?}", found.warnings);
        let told = tell(&found, &HashSet::new());
        assert!(told.iter().all(|warning| warning.contains("tenant 'a': its home")), "{told:?}");
        *watch.warnings.lock() = Some(1);
        let mut page = MetricPage::default();
        watch.expose(&mut page);
        assert!(page.encode().contains("\nnagaya_tenant_warnings 1\n"));
    }
}

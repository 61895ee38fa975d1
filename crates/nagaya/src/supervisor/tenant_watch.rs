//! Looking each hour whether ids and homes of tenants are as they should be: the log says it once, a metric always.
//!
//! Not here: what is wrong with a tenant (`doctor::tenants`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::check::IdPolicy;
use nagaya_cmdb::store::{PAGE_LEN_MAX, Store, StoreError};
use nix::unistd::Uid;
use parking_lot::Mutex;

use super::exposition::Page;
use super::node::Node;
use crate::doctor::tenants::Found;
use crate::tenant_ids::IdSource;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(3600);

/// What the last look has found.
#[derive(Default)]
pub struct Watch {
    /// None: nobody has looked, or there are no rights to.
    warnings: Mutex<Option<usize>>,
}

impl Watch {
    pub fn expose(&self, page: &mut Page) {
        let Some(count) = *self.warnings.lock() else { return };
        page.family(
            "nagaya_tenant_warnings",
            "gauge",
            "Ids and homes of tenants that are not as they should be, at the last look.",
            &[(String::new(), count as u64)],
        );
    }
}

/// Looks, at once and each hour, for ever. Without root nothing is a tenant's own, and nobody looks.
pub async fn keep(node: Arc<Node>, ids: IdSource) {
    if !Uid::effective().is_root() {
        return;
    }
    let mut told = HashSet::new();
    loop {
        let (store, policy) = (Arc::clone(&node.store), ids.policy());
        let look = tokio::task::spawn_blocking(move || look(&*store, &policy));
        // A panic there has been reported.
        if let Ok(Ok(found)) = look.await {
            told = tell(&found, &told);
            *node.tenants.warnings.lock() = Some(found.warnings.len() + found.more);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn look(store: &dyn Store, policy: &IdPolicy) -> Result<Found, StoreError> {
    let (mut found, mut after) = (Found::default(), None::<String>);
    loop {
        let page = store.tenants(after.as_deref(), PAGE_LEN_MAX)?;
        let Some(last) = page.last() else { return Ok(found) };
        after = Some(last.name.to_string());
        page.iter().for_each(|tenant| found.add(tenant, policy));
    }
}

/// Writes into the log what the look before has not found.
fn tell(found: &Found, told: &HashSet<String>) -> HashSet<String> {
    for warning in found.warnings.iter().filter(|warning| !told.contains(*warning)) {
        tracing::warn!(code = "NGY0519", "{warning}");
    }
    found.warnings.iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::RedbStore;
    use nagaya_cmdb::record::Change;
    use nagaya_cmdb::store::Mode;

    use super::*;

    #[test]
    fn homes_that_are_not_as_they_should_be_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&dir.path().join("store.redb")).unwrap();
        let tenant = |name: &str, uid: u32, home: Option<std::path::PathBuf>| {
            let record = serde_json::json!({ "name": name, "uid": uid, "gid": uid, "home": home });
            Change::PutTenant(serde_json::from_value(record).unwrap())
        };
        let missing = dir.path().join("missing");
        store
            .transaction(vec![tenant("a", 5_000, Some(missing)), tenant("b", 5_001, None)], Mode::Merge)
            .unwrap();
        let watch = Watch::default();
        let found = look(&store, &IdPolicy::default()).unwrap();
        assert_eq!((found.looked_at, found.warnings.len()), (2, 1), "{:?}", found.warnings);
        let told = tell(&found, &HashSet::new());
        assert!(told.iter().all(|warning| warning.contains("tenant 'a': its home")), "{told:?}");
        *watch.warnings.lock() = Some(1);
        let mut page = Page::default();
        watch.expose(&mut page);
        assert!(page.into_text().contains("\nnagaya_tenant_warnings 1\n"));
    }
}

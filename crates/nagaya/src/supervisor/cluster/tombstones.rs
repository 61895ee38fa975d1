//! Tombstones: placements of removed sites. While one exists, a new site of that name continues
//! from its epoch. It is taken from its node with all care. So a node that is cut off and missed
//! the removal serves nothing that another node serves.
//!
//! The node of a tombstone deletes it when it has known of the removal for long enough. If there
//! are several nodes, each removes its own part. If the node is not present, another one takes the
//! tombstone over as it would a site. Not here: the store's part (`nagaya_store::etcd`), the
//! processes of a removed site (`nagaya_keeper`).

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_placement::lease::{TERM_MAX, max_elapsed};
use nagaya_records::{NodeName, Placement, PlacementReason, SiteName};
use nagaya_store::{PAGE_LEN_MAX, Store, StoreError};

use super::clock::unix_ms;
use super::takeover_terms::{TakeoverTerms, round_up_ms};
use super::view::ClusterView;
use super::wanted_images::{SiteChanges, TouchedSites};

/// Interval of checks for removed sites.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Time from learning of a removal to the statement that nothing of the site can run here. It is
/// longer than any lease that edge and keeper had before they learned of it (`VOUCH_TERM`). It is
/// also longer than the end of an instance takes (30 s).
const LET_GO_AFTER: Duration = Duration::from_secs(40);

/// Tombstones handled in one check. The rest waits for the next.
const AT_ONCE: usize = 200;

/// Tombstones, each with when this node saw it first.
#[derive(Debug, Default)]
struct TombstoneTable(BTreeMap<SiteName, (Placement, Instant)>);

impl TombstoneTable {
    /// Notes the present tombstones of these names. An unchanged one keeps its time.
    fn look(&mut self, seen: TombstoneScan, now: Instant) {
        let TombstoneScan { found, looked_at } = seen;
        let mut before = match looked_at {
            None => std::mem::take(&mut self.0),
            Some(names) => names.iter().filter_map(|name| self.0.remove_entry(name)).collect(),
        };
        for placement in found {
            let since = match before.remove(&placement.site) {
                Some((known, since)) if known == placement => since,
                _ => now,
            };
            self.0.insert(placement.site.clone(), (placement, since));
        }
    }

    /// Returns those of which nothing can run any more on their node, if that is this one.
    fn due(&self, now: Instant) -> impl Iterator<Item = &Placement> {
        let is_due = move |since: &Instant| now.saturating_duration_since(*since) >= LET_GO_AFTER;
        self.0.values().filter(move |(_, since)| is_due(since)).map(|(placement, _)| placement)
    }
}

/// Result of one read of the records.
struct TombstoneScan {
    found: Vec<Placement>,
    /// `None` means that all names were read.
    looked_at: Option<HashSet<SiteName>>,
}

impl TombstoneScan {
    fn at(records: &dyn Store, changed: TouchedSites) -> Result<Self, StoreError> {
        let mut found = Vec::new();
        let mut add = |placement: Placement| -> Result<(), StoreError> {
            if records.site(placement.site.as_str())?.is_none() {
                found.push(placement);
            }
            Ok(())
        };
        if !changed.is_all {
            for name in &changed.sites {
                records.placement(name.as_str())?.map_or(Ok(()), &mut add)?;
            }
            return Ok(Self { found, looked_at: Some(changed.sites) });
        }
        let mut after: Option<String> = None;
        loop {
            let page = records.placements(after.as_deref(), PAGE_LEN_MAX)?;
            let Some(last) = page.last() else { return Ok(Self { found, looked_at: None }) };
            after = Some(last.site.to_string());
            page.into_iter().try_for_each(&mut add)?;
        }
    }
}

pub struct TombstoneCleaner {
    pub view: Rc<ClusterView>,
    pub terms: Rc<TakeoverTerms>,
    /// Sites whose records or placements have changed.
    pub changed: Arc<SiteChanges>,
}

impl TombstoneCleaner {
    /// Clears tombstones while this node is a member.
    pub async fn run(self) {
        let mut leftovers = TombstoneTable::default();
        // Some may be older than this process.
        let mut is_all = true;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let mut changed = self.changed.take();
            changed.is_all |= is_all;
            let records = Arc::clone(&self.view.context.records);
            match tokio::task::spawn_blocking(move || TombstoneScan::at(&*records, changed)).await {
                Ok(Ok(seen)) => leftovers.look(seen, Instant::now()),
                failed => {
                    tracing::debug!("tombstones of removed sites cannot be read: {:?}", failed.err());
                    is_all = true;
                    continue;
                }
            }
            is_all = false;
            let absent = self.absent();
            let is_ours = |left: &&Placement| {
                left.parts().any(|part| *part.node == self.view.node || absent.is_absent(part.node))
            };
            let due: Vec<_> = leftovers.due(Instant::now()).filter(is_ours).take(AT_ONCE).cloned().collect();
            for placement in due {
                self.see_to(placement, &absent).await;
            }
        }
    }

    /// Returns the nodes whose tombstones this node inherits: the first present node by name does
    /// that.
    fn absent(&self) -> AbsentNodes {
        let present: HashSet<_> =
            self.view.store.presences().into_iter().map(|presence| presence.node).collect();
        let is_heir = present.iter().min() == Some(&self.view.node);
        AbsentNodes { present: is_heir.then_some(present) }
    }

    /// Handles a tombstone. A failure is tried again in the next check.
    async fn see_to(&self, placement: Placement, absent: &AbsentNodes) {
        let Placement { site, epoch, .. } = &placement;
        if let Some(node) = placement.parts().map(|part| part.node).find(|node| absent.is_absent(node)) {
            self.take_over(&placement, node).await;
            return;
        }
        // Other nodes had it, too: each states for itself that nothing of it can run there.
        let rest = placement.without(&self.view.node, placement.since_ms, placement.why);
        let done = match rest {
            Some(rest) => self.view.store.inherit(rest, &self.view.node, &self.view.node).await,
            None => self.view.store.forget(&placement).await,
        };
        match done {
            Ok(true) => tracing::debug!(%site, epoch, "the tombstone of a removed site was cleared here"),
            Ok(false) => {}
            Err(error) => tracing::debug!(%site, "a removed site's placement stays for now: {error}"),
        }
    }

    /// Takes over the part of an absent node.
    async fn take_over(&self, placement: &Placement, node: &NodeName) {
        let site = &placement.site;
        let taking = match self.terms.begin_takeover(node).await {
            Ok(taking) => taking,
            Err(reason) => {
                tracing::debug!(%site, %node, "a removed site's placement stays for now: {reason}");
                return;
            }
        };
        let why = PlacementReason::Silent;
        // No request waits for it, so the wait has the maximum length.
        let wait_ms = round_up_ms(max_elapsed(TERM_MAX));
        let moved = placement.moved(node, self.view.node.clone(), unix_ms(), why, wait_ms);
        // This node has a replica of it already.
        let next = moved.or_else(|| placement.without(node, unix_ms(), why));
        let inherited = match next {
            Some(next) => self.view.store.inherit(next, node, &self.view.node).await,
            None => Ok(false),
        };
        // After a refusal, it is unknown whether an earlier attempt is still on its way.
        self.terms.end_takeover(taking, matches!(inherited, Ok(true)));
        tracing::debug!(%site, %node, ?inherited, "a removed site's placement is taken over");
    }
}

/// The nodes whose tombstones this node handles.
struct AbsentNodes {
    /// `None` if another node handles them.
    present: Option<HashSet<NodeName>>,
}

impl AbsentNodes {
    fn is_absent(&self, node: &NodeName) -> bool {
        self.present.as_ref().is_some_and(|present| !present.contains(node))
    }
}

#[cfg(test)]
mod tests {
    use nagaya_records::{NodeName, RecordChange};
    use nagaya_store::{ChangeMode, RedbStore};

    use super::*;

    fn placement(site: &str, epoch: u64) -> Placement {
        Placement {
            site: SiteName::new(site).unwrap(),
            node: NodeName::new("a").unwrap(),
            epoch,
            since_ms: 0,
            why: PlacementReason::First,
            wait_ms: 0,
            node_epoch: 0,
            copies: Vec::new(),
        }
    }

    fn seen(found: &[&Placement], looked_at: Option<&[&str]>) -> TombstoneScan {
        let names = |names: &[&str]| names.iter().map(|name| SiteName::new(name).unwrap()).collect();
        TombstoneScan { found: found.iter().copied().cloned().collect(), looked_at: looked_at.map(names) }
    }

    fn due(leftovers: &TombstoneTable, now: Instant) -> Vec<&Placement> {
        leftovers.due(now).collect()
    }

    #[test]
    fn a_leftover_is_due_when_it_was_the_same_for_long() {
        let begun = Instant::now();
        let at = |part: u32| begun + LET_GO_AFTER * part / 4;
        let mut leftovers = TombstoneTable::default();
        let one = placement("one", 1);
        let two = placement("two", 1);
        leftovers.look(seen(&[&one, &two], None), at(0));
        // Looked at again, it keeps its time; what is not looked at does, too.
        leftovers.look(seen(&[&one], Some(&["one"])), at(2));
        assert!(due(&leftovers, at(3)).is_empty());
        assert_eq!(due(&leftovers, at(4)), [&one, &two]);
        // A site was added under the name and removed again: its time begins anew.
        leftovers.look(seen(&[], Some(&["one"])), at(4));
        assert_eq!(due(&leftovers, at(5)), [&two]);
        leftovers.look(seen(&[&one], Some(&["one"])), at(5));
        assert_eq!(due(&leftovers, at(8)), [&two]);
        assert_eq!(due(&leftovers, at(9)), [&one, &two]);
        // So it does when it was taken over, and when all is looked at anew.
        let second = placement("two", 2);
        leftovers.look(seen(&[&one, &second], None), at(9));
        assert_eq!(due(&leftovers, at(9)), [&one]);
        leftovers.look(seen(&[&second], None), at(10));
        assert_eq!(due(&leftovers, at(13)), [&second]);
    }

    #[test]
    fn only_placements_without_a_site_are_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let records = RedbStore::open(&dir.path().join("store.redb")).unwrap();
        let tenant = r#"{"name":"t","uid":9,"gid":9,"home":"/srv/t"}"#;
        let site = r#"{"name":"one","tenant":"t","hosts":["one"],"backend":{"kind":"static","root":"w"}}"#;
        let changes = vec![
            RecordChange::PutTenant(serde_json::from_str(tenant).unwrap()),
            RecordChange::PutSite(serde_json::from_str(site).unwrap()),
        ];
        records.transaction(changes, ChangeMode::Merge).unwrap();
        let placed = [placement("one", 1), placement("two", 7)].map(RecordChange::PutPlacement);
        records.replicate(placed.to_vec(), Default::default(), true).unwrap();
        let all = TouchedSites { is_all: true, ..TouchedSites::default() };
        assert_eq!(TombstoneScan::at(&records, all).unwrap().found, [placement("two", 7)]);
        let names = ["one", "two", "three"].map(|name| SiteName::new(name).unwrap());
        let some = TouchedSites { sites: names.into_iter().collect(), ..TouchedSites::default() };
        assert_eq!(TombstoneScan::at(&records, some).unwrap().found, [placement("two", 7)]);
    }
}

//! Placements that removed sites have left behind. As long as one is there, a site that is added under the name goes on from its
//! epoch and is taken from its node with all care, so that a node which is cut off and has not heard of the removal serves
//! nothing that another one serves.
//!
//! The node that a leftover names takes it away when it has known for long that the site is gone; of several each does so for itself. A leftover of a node that is not
//! there is taken over by another one, as a site would be, and is then that one's. Not here: how the store does it
//! (`nagaya_cmdb::store::etcd`), what becomes of a removed site's processes (`nagaya_keeper`).

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::store::{PAGE_LEN_MAX, Store, StoreError};
use nagaya_cmdb::{NodeName, Placement, SiteName, Why};
use nagaya_placement::fence::{TERM_MAX, outlasting};

use super::authority::now;
use super::doubting::whole_ms;
use super::images::Changed;
use super::membership::{Membership, unix_ms};

/// How often it is looked whether sites were removed.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How long this node knows that a site is gone before it says that nothing of it can run here. Longer than any authority that edge
/// and keeper were given before they learned of it (`VOUCH_TERM`), and than the end of an instance takes (30 s).
const LET_GO_AFTER: Duration = Duration::from_secs(40);

/// Leftovers seen to in one look. The rest wait for the next.
const AT_ONCE: usize = 200;

/// Leftovers, each with when this node saw it first.
#[derive(Debug, Default)]
struct Leftovers(BTreeMap<SiteName, (Placement, Instant)>);

impl Leftovers {
    /// What is found now at these names. One that is as it was keeps its time.
    fn look(&mut self, seen: Seen, now: Instant) {
        let Seen { found, looked_at } = seen;
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

    /// Those of which nothing can run any more on their node, if that is this one.
    fn due(&self, now: Instant) -> impl Iterator<Item = &Placement> {
        let is_due = move |since: &Instant| now.saturating_duration_since(*since) >= LET_GO_AFTER;
        self.0.values().filter(move |(_, since)| is_due(since)).map(|(placement, _)| placement)
    }
}

/// What a look at the records has found.
struct Seen {
    found: Vec<Placement>,
    /// None: at all.
    looked_at: Option<HashSet<SiteName>>,
}

impl Seen {
    fn at(records: &dyn Store, changed: Changed) -> Result<Self, StoreError> {
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

impl Membership {
    /// Sees to leftovers for as long as this node is a member.
    pub(super) async fn clear_leftovers(self: Rc<Self>) {
        let mut leftovers = Leftovers::default();
        // Some may be older than this process.
        let mut is_all = true;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let mut changed = self.removed.take();
            changed.is_all |= is_all;
            let records = Arc::clone(&self.context.records);
            match tokio::task::spawn_blocking(move || Seen::at(&*records, changed)).await {
                Ok(Ok(seen)) => leftovers.look(seen, Instant::now()),
                failed => {
                    tracing::debug!("what removed sites have left behind cannot be read: {:?}", failed.err());
                    is_all = true;
                    continue;
                }
            }
            is_all = false;
            let absent = self.absent();
            let is_ours = |left: &&Placement| {
                left.parts().any(|part| *part.node == self.node || absent.is_absent(part.node))
            };
            let due: Vec<_> = leftovers.due(Instant::now()).filter(is_ours).take(AT_ONCE).cloned().collect();
            for placement in due {
                self.see_to(placement, &absent).await;
            }
        }
    }

    /// Whose leftovers this node inherits: of all that are there, the first by name does.
    fn absent(&self) -> Absent {
        let present: HashSet<_> = self.store.presences().into_iter().map(|presence| presence.node).collect();
        let is_heir = present.iter().min() == Some(&self.node);
        Absent { present: is_heir.then_some(present) }
    }

    /// What is not done now is tried again in the next look.
    async fn see_to(&self, placement: Placement, absent: &Absent) {
        let Placement { site, epoch, .. } = &placement;
        if let Some(node) = placement.parts().map(|part| part.node).find(|node| absent.is_absent(node)) {
            self.take_over(&placement, node).await;
            return;
        }
        // Others had it, too: each says for itself that nothing of it can run there.
        let rest = placement.without(&self.node, placement.since_ms, placement.why);
        let done = match rest {
            Some(rest) => self.store.inherit(rest, &self.node, &self.node).await,
            None => self.store.forget(&placement).await,
        };
        match done {
            Ok(true) => tracing::debug!(%site, epoch, "nothing is left here of a site that was removed"),
            Ok(false) => {}
            Err(error) => tracing::debug!(%site, "a removed site's placement stays for now: {error}"),
        }
    }

    /// The part of a node that is not there.
    async fn take_over(&self, placement: &Placement, node: &NodeName) {
        let site = &placement.site;
        let taking = match self.may_take(node).await {
            Ok(taking) => taking,
            Err(reason) => {
                tracing::debug!(%site, %node, "a removed site's placement stays for now: {reason}");
                return;
            }
        };
        let why = Why::Silent;
        // Nobody waits for it, so it is as long as it could be.
        let wait_ms = whole_ms(outlasting(TERM_MAX));
        let moved = placement.moved(node, self.node.clone(), unix_ms(), why, wait_ms);
        // This node has a part in it already.
        let next = moved.or_else(|| placement.without(node, unix_ms(), why));
        let inherited = match next {
            Some(next) => self.store.inherit(next, node, &self.node).await,
            None => Ok(false),
        };
        // Of one that was refused it is not known whether an earlier attempt at it lies somewhere.
        self.trust.borrow_mut().ended(now(), taking, matches!(inherited, Ok(true)));
        tracing::debug!(%site, %node, ?inherited, "a removed site's placement is taken over");
    }
}

/// Whose leftovers are this node's to see to.
struct Absent {
    /// None: another node sees to them.
    present: Option<HashSet<NodeName>>,
}

impl Absent {
    fn is_absent(&self, node: &NodeName) -> bool {
        self.present.as_ref().is_some_and(|present| !present.contains(node))
    }
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::store::{Mode, RedbStore};
    use nagaya_cmdb::{Change, NodeName};

    use super::*;

    fn placement(site: &str, epoch: u64) -> Placement {
        Placement {
            site: SiteName::new(site).unwrap(),
            node: NodeName::new("a").unwrap(),
            epoch,
            since_ms: 0,
            why: Why::First,
            wait_ms: 0,
            node_epoch: 0,
            copies: Vec::new(),
        }
    }

    fn seen(found: &[&Placement], looked_at: Option<&[&str]>) -> Seen {
        let names = |names: &[&str]| names.iter().map(|name| SiteName::new(name).unwrap()).collect();
        Seen { found: found.iter().copied().cloned().collect(), looked_at: looked_at.map(names) }
    }

    fn due(leftovers: &Leftovers, now: Instant) -> Vec<&Placement> {
        leftovers.due(now).collect()
    }

    #[test]
    fn a_leftover_is_due_when_it_was_the_same_for_long() {
        let begun = Instant::now();
        let at = |part: u32| begun + LET_GO_AFTER * part / 4;
        let mut leftovers = Leftovers::default();
        let (one, two) = (placement("one", 1), placement("two", 1));
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
            Change::PutTenant(serde_json::from_str(tenant).unwrap()),
            Change::PutSite(serde_json::from_str(site).unwrap()),
        ];
        records.transaction(changes, Mode::Merge).unwrap();
        let placed = [placement("one", 1), placement("two", 7)].map(Change::PutPlacement);
        records.replicate(placed.to_vec(), Default::default(), true).unwrap();
        let all = Changed { is_all: true, ..Changed::default() };
        assert_eq!(Seen::at(&records, all).unwrap().found, [placement("two", 7)]);
        let names = ["one", "two", "three"].map(|name| SiteName::new(name).unwrap());
        let some = Changed { sites: names.into_iter().collect(), ..Changed::default() };
        assert_eq!(Seen::at(&records, some).unwrap().found, [placement("two", 7)]);
    }
}

//! The nodes and placements of a cluster in a process's copy. A placement holds its node as a
//! number, because placements are as many as applications, and nodes are few.

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use crate::names::{NodeName, SiteName};
use crate::record::{NodeRecord, Placement, PlacementReason, PlacementView, ReplicaRecord};

#[derive(Debug, Default)]
pub(super) struct ClusterTable {
    /// Every name that ever was in a record or placement, at the position that placements hold.
    names: Vec<NodeName>,
    /// Members at the same positions. `None` if it is not a member, or no longer.
    nodes: Vec<Option<Arc<NodeRecord>>>,
    placements: HashTable<PlacementEntry>,
    hasher: RandomState,
}

#[derive(Debug)]
struct PlacementEntry {
    site: SiteName,
    node: u32,
    why: PlacementReason,
    wait_ms: u32,
    epoch: u64,
    since_ms: u64,
    /// Most have none.
    more: Option<Box<ReplicaDetails>>,
}

/// Fields that only a placement needs that ever had replicas.
#[derive(Debug)]
struct ReplicaDetails {
    node_epoch: u64,
    copies: Vec<ReplicaRecord>,
}

impl ClusterTable {
    pub fn put_node(&mut self, node: NodeRecord) {
        let at = self.position(&node.name);
        self.nodes[at] = Some(Arc::new(node));
    }

    pub fn drop_node(&mut self, name: &str) -> bool {
        let at = self.names.iter().position(|known| known.as_str() == name);
        at.is_some_and(|at| self.nodes[at].take().is_some())
    }

    pub fn node(&self, name: &str) -> Option<&Arc<NodeRecord>> {
        let at = self.names.iter().position(|known| known.as_str() == name)?;
        self.nodes[at].as_ref()
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Arc<NodeRecord>> {
        self.nodes.iter().flatten()
    }

    pub fn put_placement(&mut self, placement: Placement) {
        let Placement { site, node, epoch, since_ms, why, wait_ms, node_epoch, copies } = placement;
        let has_more = node_epoch != 0 || !copies.is_empty();
        let more = has_more.then(|| Box::new(ReplicaDetails { node_epoch, copies }));
        let node = u32::try_from(self.position(&node)).expect("nodes are few");
        let hasher = &self.hasher;
        let of = |entry: &PlacementEntry| hasher.hash_one(entry.site.as_str());
        let entry = self.placements.entry(hasher.hash_one(site.as_str()), |other| other.site == site, of);
        entry.insert(PlacementEntry { site, node, why, wait_ms, epoch, since_ms, more });
    }

    pub fn drop_placement(&mut self, site: &str) -> bool {
        let hash = self.hasher.hash_one(site);
        let found = self.placements.find_entry(hash, |entry| entry.site.as_str() == site);
        found.map(|entry| entry.remove()).is_ok()
    }

    pub fn placement(&self, site: &str) -> Option<Placement> {
        let hash = self.hasher.hash_one(site);
        self.placements.find(hash, |entry| entry.site.as_str() == site).map(|entry| self.told(entry))
    }

    /// Returns the same as `Placement::standing`. It copies nothing for the many placements without
    /// replicas.
    pub fn standing(&self, site: &str, node: &NodeName) -> Option<PlacementView> {
        let hash = self.hasher.hash_one(site);
        let entry = self.placements.find(hash, |entry| entry.site.as_str() == site)?;
        if entry.more.is_some() {
            return Some(self.told(entry).standing(node));
        }
        let has_it = self.names[entry.node as usize] == *node;
        Some(PlacementView { newest: entry.epoch, epoch: has_it.then_some(entry.epoch), has_copies: false })
    }

    pub fn placements(&self) -> impl Iterator<Item = Placement> {
        self.placements.iter().map(|entry| self.told(entry))
    }

    pub fn placement_count(&self) -> usize {
        self.placements.len()
    }

    pub fn heap_bytes(&self) -> usize {
        let names: usize = self.placements.iter().map(|entry| entry.site.as_str().len()).sum();
        let more = self.placements.iter().filter_map(|entry| entry.more.as_deref());
        let more = more
            .map(|more| size_of::<ReplicaDetails>() + more.copies.capacity() * size_of::<ReplicaRecord>());
        self.placements.allocation_size() + names + more.sum::<usize>()
    }

    fn told(&self, entry: &PlacementEntry) -> Placement {
        let PlacementEntry { site, node, why, wait_ms, epoch, since_ms, more } = entry;
        let node = self.names[*node as usize].clone();
        let more = more.as_ref().map(|more| (more.node_epoch, more.copies.clone()));
        let (node_epoch, copies) = more.unwrap_or_default();
        Placement {
            site: site.clone(),
            node,
            epoch: *epoch,
            since_ms: *since_ms,
            why: *why,
            wait_ms: *wait_ms,
            node_epoch,
            copies,
        }
    }

    fn position(&mut self, name: &NodeName) -> usize {
        self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.clone());
            self.nodes.push(None);
            self.names.len() - 1
        })
    }
}

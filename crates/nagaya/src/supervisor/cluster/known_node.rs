//! A member with what it told of itself, and the planner's view of it.
//!
//! Not here: the choice (`nagaya_placement::planner`), who is asked for it (`node_chooser`).

use nagaya_placement::liveness::ProbeResult;
use nagaya_placement::planner::NodeCandidate;
use nagaya_records::{NodeRecord, Site, SiteName};

use super::load::NodeReport;

/// A node with its latest report.
pub struct KnownNode {
    pub record: NodeRecord,
    /// `None` if the node has told nothing for some seconds.
    pub load: Option<NodeReport>,
    pub placements: u32,
}

impl KnownNode {
    /// Reports whether the node has the image of a site of which it is the fallback. A node that
    /// does not report its images counts as having it.
    pub fn says_it_has(&self, site: &SiteName) -> bool {
        self.load.as_ref().and_then(|load| load.images.as_ref()).is_none_or(|images| images.has(site))
    }

    /// Describes the node to the planner. `against`: what requests found wrong with it lately.
    pub fn as_candidate(&self, against: Option<ProbeResult>) -> NodeCandidate<'_> {
        let load = self.load.clone().unwrap_or_default();
        NodeCandidate {
            name: self.record.name.as_str(),
            against,
            present: self.load.is_some(),
            draining: self.record.draining,
            cpus: self.record.cpus,
            memory_bytes: self.record.memory_bytes,
            memory_free: load.memory_available,
            cpu_used: load.cpu_used as f32,
            sites: self.placements,
            heat: load.heat,
            has_image: false,
            wakes: load.wakes,
        }
    }
}

/// Returns the memory that the site's instance may use, in bytes. 0 if it has no limit.
pub fn memory_of(site: &Site) -> u64 {
    site.limits.memory.as_ref().and_then(|memory| memory.memory().ok().flatten()).unwrap_or(0)
}

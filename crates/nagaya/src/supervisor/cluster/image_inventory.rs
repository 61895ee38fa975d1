//! Which images are on a node, as it tells the others.

use std::collections::BTreeSet;

use nagaya_records::SiteName;
use serde::{Deserialize, Serialize};

/// The images of a node, of the sites that would move there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInventory {
    /// It has all of them, or none, with these exceptions.
    pub most: bool,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub but: BTreeSet<SiteName>,
}

impl ImageInventory {
    pub fn has(&self, site: &SiteName) -> bool {
        self.most != self.but.contains(site)
    }
}

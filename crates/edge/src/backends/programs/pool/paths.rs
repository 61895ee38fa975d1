//! Where the scripts of a tenant's PHP workers are. PHP remembers where paths lead, and workers
//! that share an opcache remember it together.
//!
//! So when a path leads elsewhere, none of the tenant's workers serves another request. Later ones
//! share another opcache. Invariant: the number of an opcache is that of its first moment. A look
//! at a path that was made before that moment changes nothing: its request may have waited long.
//! Not here: the workers (`pool`), the looks at files (`files`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use nagaya_records::SiteName;

use crate::backends::files::root::DirectoryId;

/// Maximum number of script directories of one site that are recorded. Beyond it, a switched link
/// is seen when PHP checks again.
const DIRECTORIES_MAX: usize = 256;

/// Counts opcaches of all tenants. Its values are also moments between their beginnings.
pub struct OpcacheCount(AtomicU64);

impl OpcacheCount {
    /// Begins after the counts of earlier edges of this node, whose workers may still be there.
    pub fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(AtomicU64::new(u64::try_from(since_epoch.as_nanos()).unwrap_or_default()))
    }

    /// Returns the present moment.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn begin(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Location of a script: names, and their targets when it was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptPlace {
    pub root: DirectoryId,
    /// The script's directory, relative to the root.
    pub path: Box<str>,
    pub directory: DirectoryId,
    /// The moment before the look.
    pub looked: u64,
}

/// The locations of the scripts that a tenant's workers have run.
pub struct KnownPaths {
    opcache: u64,
    sites: HashMap<SiteName, KnownPlaces>,
}

/// The locations of one site's scripts at their first use.
struct KnownPlaces {
    root: DirectoryId,
    directories: HashMap<Box<str>, DirectoryId>,
}

impl KnownPaths {
    pub fn new(count: &OpcacheCount) -> Self {
        Self { opcache: count.begin(), sites: HashMap::new() }
    }

    /// Returns the number of the opcache that workers share now.
    pub fn opcache(&self) -> u64 {
        self.opcache
    }

    /// Records the location of a script that is about to run. Returns true if it is another one
    /// than before: then another opcache has begun.
    pub fn note(&mut self, site: &SiteName, place: ScriptPlace, count: &OpcacheCount) -> bool {
        if let Some(known) = self.sites.get_mut(site) {
            if known.has(&place) || place.looked < self.opcache {
                return false;
            }
            *self = Self::new(count);
            self.sites.insert(site.clone(), KnownPlaces::of(place));
            return true;
        }
        self.sites.insert(site.clone(), KnownPlaces::of(place));
        false
    }
}

impl KnownPlaces {
    fn of(place: ScriptPlace) -> Self {
        Self { root: place.root, directories: HashMap::from([(place.path, place.directory)]) }
    }

    /// Whether nothing else is known in this one's place. From now on this one is.
    fn has(&mut self, place: &ScriptPlace) -> bool {
        if self.root != place.root {
            return false;
        }
        match self.directories.get(&place.path) {
            Some(directory) => *directory == place.directory,
            None => {
                if self.directories.len() < DIRECTORIES_MAX {
                    self.directories.insert(place.path.clone(), place.directory);
                }
                true
            }
        }
    }
}

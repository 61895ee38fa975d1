//! Which instances there are on this node, by site and by number.
//!
//! Not here: making one (`lookup`), what they share besides (`shared`).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use nagaya_records::SiteName;

use crate::instances::decide::wake_queue::InstanceKey;
use crate::instances::state::instance::SiteInstance;

#[derive(Default)]
pub struct InstanceTable {
    sites: RefCell<HashMap<SiteName, Rc<SiteInstance>>>,
    /// Includes those whose site is gone, until their processes are gone.
    all: RefCell<HashMap<InstanceKey, Rc<SiteInstance>>>,
    last_key: Cell<InstanceKey>,
    /// Sites whose record says that they always run.
    always_on: RefCell<BTreeSet<SiteName>>,
}

impl InstanceTable {
    pub fn of_site(&self, name: &SiteName) -> Option<Rc<SiteInstance>> {
        self.sites.borrow().get(name).cloned()
    }

    pub fn get(&self, key: InstanceKey) -> Option<Rc<SiteInstance>> {
        self.all.borrow().get(&key).cloned()
    }

    /// Those of sites that are there.
    pub fn listed(&self) -> Vec<Rc<SiteInstance>> {
        self.sites.borrow().values().cloned().collect()
    }

    /// The same that this is true of.
    pub fn filtered(&self, is_wanted: impl Fn(&SiteName, &SiteInstance) -> bool) -> Vec<Rc<SiteInstance>> {
        let sites = self.sites.borrow();
        let wanted = sites.iter().filter(|(name, instance)| is_wanted(name, instance));
        wanted.map(|(_, instance)| Rc::clone(instance)).collect()
    }

    /// All, also those whose site is gone.
    pub fn all(&self) -> Vec<Rc<SiteInstance>> {
        self.all.borrow().values().cloned().collect()
    }

    /// A number that no instance has had.
    pub fn take_key(&self) -> InstanceKey {
        self.last_key.set(self.last_key.get() + 1);
        self.last_key.get()
    }

    pub fn insert(&self, name: SiteName, instance: &Rc<SiteInstance>) {
        self.sites.borrow_mut().insert(name, Rc::clone(instance));
        self.all.borrow_mut().insert(instance.key, Rc::clone(instance));
    }

    /// Its site is gone; its processes may not be.
    pub fn remove_site(&self, name: &SiteName) {
        self.sites.borrow_mut().remove(name);
    }

    /// Nothing of it is left.
    pub fn remove(&self, key: InstanceKey) {
        self.all.borrow_mut().remove(&key);
    }

    /// The sites that always run. They begin to with the next change of records that is followed.
    pub fn set_always_on(&self, sites: BTreeSet<SiteName>) {
        self.always_on.replace(sites);
    }

    pub fn always_on(&self) -> Vec<SiteName> {
        self.always_on.borrow().iter().cloned().collect()
    }
}

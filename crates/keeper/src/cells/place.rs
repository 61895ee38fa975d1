//! Where a request belongs: the directories above its leaf, in each hierarchy, and how deep a process goes there.
//!
//! Pure. On v1 each controller has a tree of its own, so a request can be in one named cell for the CPU and in another
//! for the disk. v2 has one tree: a branch is made for each distinct set of names, the CPU's name outermost. Not here:
//! the directories (`dir`), named cells and their limits (`named`).

use nagaya_cmdb::cell::{CellName, Controller, Scope};
use nagaya_cmdb::{SiteName, TenantName};

use super::controllers::{Controllers, Version};

/// Which named cell, and with which controllers a request is attached to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Attached {
    pub name: CellName,
    pub scope: Scope,
    pub controllers: Controllers,
}

/// For whom, and attached to what.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub tenant: TenantName,
    pub site: Option<SiteName>,
    pub attached: Vec<Attached>,
}

/// One directory above a leaf, and the controllers whose limits it has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Level {
    pub what: What,
    pub controllers: Controllers,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum What {
    Named {
        name: CellName,
        /// None: of the node.
        tenant: Option<TenantName>,
    },
    Tenant(TenantName),
    Site(SiteName),
}

impl Place {
    /// As `nagaya cells` shows it: `demo/wiki`, `named/limited/demo`, `demo/named/slow`; with more than one named
    /// cell of the node, all of them: `named/a+b/demo`.
    pub fn path(&self) -> String {
        let names = |scope| {
            let mut names: Vec<&str> = Vec::new();
            for attached in self.attached.iter().filter(|attached| attached.scope == scope) {
                if !names.contains(&attached.name.as_str()) {
                    names.push(attached.name.as_str());
                }
            }
            names.join("+")
        };
        let (of_node, of_tenant) = (names(Scope::Node), names(Scope::Tenant));
        let mut path = if of_node.is_empty() { String::new() } else { format!("named/{of_node}/") };
        path.push_str(self.tenant.as_str());
        match &self.site {
            _ if !of_tenant.is_empty() => path = format!("{path}/named/{of_tenant}"),
            Some(site) if of_node.is_empty() => path = format!("{path}/{site}"),
            _ => {}
        }
        path
    }

    /// The level of a named cell it is attached to.
    pub fn what(&self, attached: &Attached) -> What {
        let tenant = (attached.scope == Scope::Tenant).then(|| self.tenant.clone());
        What::Named { name: attached.name.clone(), tenant }
    }

    /// The directories above the leaf in a hierarchy with these controllers, from the top.
    pub fn levels(&self, version: Version, controllers: Controllers) -> Vec<Level> {
        // On v2 the CPU time is counted for every directory: being attached for that alone is no reason for one.
        let counts = Controllers::only(Controller::Cpuacct);
        let kept = match version {
            Version::V2 if controllers != counts => controllers.minus(counts),
            _ => controllers,
        };
        let mut levels = Vec::new();
        self.named(Scope::Node, kept, &mut levels);
        levels.push(Level { what: What::Tenant(self.tenant.clone()), controllers });
        self.named(Scope::Tenant, kept, &mut levels);
        let attached = self.attached.iter().fold(Controllers::NONE, |all, one| all.or(one.controllers));
        let rest = kept.minus(attached);
        if let Some(site) = self.site.as_ref().filter(|_| !rest.is_empty()) {
            let controllers = if attached.is_empty() { controllers } else { rest };
            levels.push(Level { what: What::Site(site.clone()), controllers });
        }
        levels
    }

    /// The CPU's name is outermost, so that all requests with that name share it, whatever else they are attached to.
    fn named(&self, scope: Scope, kept: Controllers, levels: &mut Vec<Level>) {
        let mut level = |one: &Attached, controllers: Controllers| {
            if !controllers.is_empty() {
                levels.push(Level { what: self.what(one), controllers });
            }
        };
        let attached = || self.attached.iter().filter(|attached| attached.scope == scope);
        // One with everything there is has one directory.
        if let Some(whole) = attached().find(|one| kept.minus(one.controllers).is_empty()) {
            return level(whole, kept);
        }
        let cpu = kept.and(Controllers::only(Controller::Cpu));
        for part in [cpu, kept.minus(cpu)] {
            for one in attached() {
                level(one, one.controllers.and(part));
            }
        }
    }
}

impl Level {
    /// The directory's name. Each kind has its prefix, so that neither names of tenants and sites can be taken for
    /// each other, nor for the kernel's files. A part of the controllers is named, because those who are attached
    /// with others have another directory.
    pub fn name(&self, all: Controllers) -> String {
        match &self.what {
            What::Tenant(tenant) => format!("tenant-{tenant}"),
            What::Site(site) => format!("site-{site}"),
            What::Named { name, .. } => {
                let counts = Controllers::only(Controller::Cpuacct);
                match all.minus(self.controllers).minus(counts).is_empty() {
                    true => format!("named-{name}"),
                    false => format!("named-{name}.{}", self.controllers),
                }
            }
        }
    }
}

/// How deep a process goes in one hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Into the leaf.
    Leaf,
    /// Into the directory of this level.
    Level(usize),
    /// Nothing there limits it.
    Out,
}

/// What decides how deep.
#[derive(Debug, Clone, Copy)]
pub struct Wants<'a> {
    pub version: Version,
    /// Of the hierarchy.
    pub controllers: Controllers,
    pub is_fence: bool,
    /// What each level really limits, from the top; named cells of this place among them.
    pub levels: &'a [(Controllers, bool)],
    /// What the leaf limits, now or later.
    pub leaf: Controllers,
}

impl Wants<'_> {
    /// Whether limits of disks stand at more levels than v1 can hold a process to.
    pub fn is_flat_twice(&self) -> bool {
        let is_v1 = self.version == Version::V1 && self.controllers.has(Controller::Blkio);
        let limits = self.levels.iter().map(|(limits, _)| *limits).chain([self.leaf]);
        is_v1 && limits.filter(|limits| limits.has(Controller::Blkio)).count() > 1
    }
}

/// How deep a process goes. On v2 into the leaf, always. On v1 each directory costs a move in its hierarchy, and a leaf
/// is made only where one is needed; limits of disks hold there for the one directory a process is in, so that must be
/// the shared one where requests share a limit.
pub fn depth(wants: Wants<'_>) -> Depth {
    let Wants { version, controllers, is_fence, levels, leaf } = wants;
    let has = |set: Controllers, one| set.and(controllers).has(one);
    let deepest = |one| levels.iter().rposition(|(limits, _)| has(*limits, one));
    // Requests have weights against each other, and are counted, each by itself.
    let always = is_fence || controllers.has(Controller::Cpu) || controllers.has(Controller::Cpuacct);
    let nested = [Controller::Pids, Controller::Memory, Controller::Cpuset];
    if version == Version::V2 || always || nested.into_iter().any(|one| has(leaf, one)) {
        return Depth::Leaf;
    }
    // In the last directory above all levels hold, and one that gets a limit while the process runs holds it at once.
    let last = levels
        .len()
        .checked_sub(1)
        .filter(|_| [Controller::Pids, Controller::Memory].iter().any(|one| controllers.has(*one)));
    let shared = last.max(deepest(Controller::Cpuset)).map_or(Depth::Out, Depth::Level);
    if !controllers.has(Controller::Blkio) {
        return shared;
    }
    let named = levels.iter().rposition(|(limits, is_named)| *is_named && has(*limits, Controller::Blkio));
    match (named, deepest(Controller::Blkio)) {
        (Some(named), _) => Depth::Level(named),
        (None, Some(level)) if !has(leaf, Controller::Blkio) => Depth::Level(level),
        // Nothing shared is limited: in its own directory its bytes are counted.
        _ => Depth::Leaf,
    }
}

#[cfg(test)]
mod tests;

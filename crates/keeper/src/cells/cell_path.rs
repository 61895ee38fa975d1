//! The cell path of a request: the directories above its leaf, in each hierarchy. It also says how
//! deep its processes go there.
//!
//! Pure. On v1 each controller has a tree of its own. So a request can be in one named cell for the
//! CPU and in another for the disk. Version 2 has one tree. A branch is made for each distinct set
//! of names, the CPU's name outermost. Not here: the directories (`dir`), named cells and their
//! limits (`desired`).

use nagaya_records::cell::{CellName, CellScope, CgroupController};
use nagaya_records::{SiteName, TenantName};

use crate::cells::controllers::{CgroupVersion, ControllerSet};

/// A named cell, and the controllers by which a request is attached to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AttachedCell {
    pub name: CellName,
    pub scope: CellScope,
    pub controllers: ControllerSet,
}

/// Tenant, site and named cells of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CellPath {
    pub tenant: TenantName,
    pub site: Option<SiteName>,
    pub attached: Vec<AttachedCell>,
}

/// One directory above a leaf, and the controllers whose limits it has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CellLevel {
    pub what: LevelKind,
    pub controllers: ControllerSet,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LevelKind {
    Named {
        name: CellName,
        /// `None` for a cell of the node.
        tenant: Option<TenantName>,
    },
    Tenant(TenantName),
    Site(SiteName),
}

impl CellPath {
    /// Returns the name that `nagaya cells` shows: `demo/wiki`, `named/limited/demo`,
    /// `demo/named/slow`. Several named cells of the node are all named: `named/a+b/demo`.
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
        let (of_node, of_tenant) = (names(CellScope::Node), names(CellScope::Tenant));
        let mut path = if of_node.is_empty() { String::new() } else { format!("named/{of_node}/") };
        path.push_str(self.tenant.as_str());
        match &self.site {
            _ if !of_tenant.is_empty() => path = format!("{path}/named/{of_tenant}"),
            Some(site) if of_node.is_empty() => path = format!("{path}/{site}"),
            _ => {}
        }
        path
    }

    /// Returns the level of a named cell it is attached to.
    pub fn what(&self, attached: &AttachedCell) -> LevelKind {
        let tenant = (attached.scope == CellScope::Tenant).then(|| self.tenant.clone());
        LevelKind::Named { name: attached.name.clone(), tenant }
    }

    /// Returns the directories above the leaf in a hierarchy with these controllers, from the top.
    pub fn levels(&self, version: CgroupVersion, controllers: ControllerSet) -> Vec<CellLevel> {
        // On v2 the CPU time is counted for every directory, so this controller alone needs none.
        let counts = ControllerSet::only(CgroupController::Cpuacct);
        let kept = match version {
            CgroupVersion::V2 if controllers != counts => controllers.minus(counts),
            _ => controllers,
        };
        let mut levels = Vec::new();
        self.named(CellScope::Node, kept, &mut levels);
        levels.push(CellLevel { what: LevelKind::Tenant(self.tenant.clone()), controllers });
        self.named(CellScope::Tenant, kept, &mut levels);
        let attached = self.attached.iter().fold(ControllerSet::NONE, |all, one| all.or(one.controllers));
        let rest = kept.minus(attached);
        if let Some(site) = self.site.as_ref().filter(|_| !rest.is_empty()) {
            let controllers = if attached.is_empty() { controllers } else { rest };
            levels.push(CellLevel { what: LevelKind::Site(site.clone()), controllers });
        }
        levels
    }

    /// Adds the levels of named cells. The CPU's name is outermost, so that all requests with that
    /// name share it, whatever else they are attached to.
    fn named(&self, scope: CellScope, kept: ControllerSet, levels: &mut Vec<CellLevel>) {
        let mut level = |one: &AttachedCell, controllers: ControllerSet| {
            if !controllers.is_empty() {
                levels.push(CellLevel { what: self.what(one), controllers });
            }
        };
        let attached = || self.attached.iter().filter(|attached| attached.scope == scope);
        // A cell with all controllers has one directory.
        if let Some(whole) = attached().find(|one| kept.minus(one.controllers).is_empty()) {
            return level(whole, kept);
        }
        let cpu = kept.and(ControllerSet::only(CgroupController::Cpu));
        for part in [cpu, kept.minus(cpu)] {
            for one in attached() {
                level(one, one.controllers.and(part));
            }
        }
    }
}

impl CellLevel {
    /// Returns the directory's name. Each kind has its prefix, so that names of tenants, sites and
    /// kernel files cannot be confused. A part of the controllers is named: other requests attached
    /// with another part have another directory.
    pub fn name(&self, all: ControllerSet) -> String {
        match &self.what {
            LevelKind::Tenant(tenant) => format!("tenant-{tenant}"),
            LevelKind::Site(site) => format!("site-{site}"),
            LevelKind::Named { name, .. } => {
                let counts = ControllerSet::only(CgroupController::Cpuacct);
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
pub enum CellDepth {
    /// Into the leaf.
    Leaf,
    /// Into the directory of this level.
    Level(usize),
    /// Nothing there limits it.
    Out,
}

/// Inputs that decide how deep.
#[derive(Debug, Clone, Copy)]
pub struct DepthFactors<'a> {
    pub version: CgroupVersion,
    /// Controllers of the hierarchy.
    pub controllers: ControllerSet,
    pub is_fence: bool,
    /// Effective limits of each level, from the top, with named cells of this path among them.
    pub levels: &'a [(ControllerSet, bool)],
    /// Limits of the leaf, now or later.
    pub leaf: ControllerSet,
}

impl DepthFactors<'_> {
    /// Whether limits of disks apply at more levels than v1 supports for a process.
    pub fn is_flat_twice(&self) -> bool {
        let is_v1 = self.version == CgroupVersion::V1 && self.controllers.has(CgroupController::Blkio);
        let limits = self.levels.iter().map(|(limits, _)| *limits).chain([self.leaf]);
        is_v1 && limits.filter(|limits| limits.has(CgroupController::Blkio)).count() > 1
    }
}

/// Returns how deep a process goes. On v2 always into the leaf. On v1 each directory costs a move
/// in its hierarchy, and a leaf is made only where one is needed. Limits of disks apply there only
/// to the process's own directory. So that must be the shared one where requests share a limit.
pub fn depth(wants: DepthFactors<'_>) -> CellDepth {
    let DepthFactors { version, controllers, is_fence, levels, leaf } = wants;
    let has = |set: ControllerSet, one| set.and(controllers).has(one);
    let deepest = |one| levels.iter().rposition(|(limits, _)| has(*limits, one));
    // Requests have weights against each other, and each is counted by itself.
    let always =
        is_fence || controllers.has(CgroupController::Cpu) || controllers.has(CgroupController::Cpuacct);
    let nested = [CgroupController::Pids, CgroupController::Memory, CgroupController::Cpuset];
    if version == CgroupVersion::V2 || always || nested.into_iter().any(|one| has(leaf, one)) {
        return CellDepth::Leaf;
    }
    // In the last directory all levels above apply. A limit that is set while the process runs
    // applies at once.
    let last = levels.len().checked_sub(1).filter(|_| {
        [CgroupController::Pids, CgroupController::Memory].iter().any(|one| controllers.has(*one))
    });
    let shared = last.max(deepest(CgroupController::Cpuset)).map_or(CellDepth::Out, CellDepth::Level);
    if !controllers.has(CgroupController::Blkio) {
        return shared;
    }
    let named =
        levels.iter().rposition(|(limits, is_named)| *is_named && has(*limits, CgroupController::Blkio));
    match (named, deepest(CgroupController::Blkio)) {
        (Some(named), _) => CellDepth::Level(named),
        (None, Some(level)) if !has(leaf, CgroupController::Blkio) => CellDepth::Level(level),
        // Nothing shared is limited: in its own directory its bytes are counted.
        _ => CellDepth::Leaf,
    }
}

#[cfg(test)]
mod tests;

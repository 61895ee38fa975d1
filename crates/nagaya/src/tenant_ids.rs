//! Decides which ids tenants may have on this machine. Sources are the configuration, the edge's
//! own ids, and the machine's groups.
//!
//! Not here: the judgement (`nagaya_records::check::IdPolicy`), the user of the edge (`identity`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

use nagaya_records::check::{IdPolicy, PRIVILEGED_GROUPS, TENANT_ID_MIN};
use nix::unistd::{Group, User};
use parking_lot::Mutex;

use crate::config::NodeSettings;
use crate::identity;

/// Bytes of the machine's list of groups that are read.
const GROUPS_LEN_MAX: u64 = 1 << 20;

/// The machine's groups (group(5)).
const GROUPS: &str = "/etc/group";

/// The configuration's policy for ids, shared by all users. A reload changes it for all of them.
#[derive(Debug, Clone)]
pub struct IdSource {
    /// Lowest uid for tenants that are added without one.
    pub uid_base: u32,
    known: Arc<Mutex<IdPolicy>>,
}

impl IdSource {
    pub fn of(settings: &NodeSettings) -> Self {
        Self { uid_base: settings.uid_base, known: Arc::new(Mutex::new(policy(settings))) }
    }

    /// Makes a source for an unknown machine.
    #[cfg(test)]
    pub fn from_base(uid_base: u32) -> Self {
        Self { uid_base, known: Arc::default() }
    }

    /// Takes over a changed configuration. The edge's ids hold as long as its process.
    pub fn reload(&self, settings: &NodeSettings) {
        *self.known.lock() = policy(settings);
    }

    /// Returns whether a new tenant may get this uid, and gid. It must be allowed, and no user of
    /// the machine may have it.
    pub fn is_free(&self, uid: u32) -> bool {
        self.policy().takes(uid) && !matches!(User::from_uid(uid.into()), Ok(Some(_)))
    }

    /// Returns the policy with the present groups of the machine.
    pub fn policy(&self) -> IdPolicy {
        IdPolicy { groups: groups(), ..self.known.lock().clone() }
    }
}

/// Returns the policy of this machine.
pub fn policy(settings: &NodeSettings) -> IdPolicy {
    let edge = identity::of_edge(settings);
    let admin = &settings.admin;
    let named = [&admin.read, &admin.operate, &admin.all].into_iter().flatten();
    let groups_of_roles = named.filter_map(|name| name.strip_prefix('@'));
    let admins = admin.group.as_deref().into_iter().chain(groups_of_roles).filter_map(gid_of);
    IdPolicy {
        edge_uid: edge.map_or(0, |edge| edge.uid),
        own_gids: edge.map(|edge| edge.gid).into_iter().chain(admins).collect(),
        allowed_uids: numbers(&settings.system_ids.users, uid_of),
        allowed_gids: numbers(&settings.system_ids.groups, gid_of),
        groups: groups(),
    }
}

/// Returns the ids of names and numbers; `check-config` reports unknown names.
fn numbers(entries: &[String], find: fn(&str) -> Option<u32>) -> BTreeSet<u32> {
    entries.iter().filter_map(|entry| find(entry)).collect()
}

/// Returns the uid of a user's name or number.
pub fn uid_of(user: &str) -> Option<u32> {
    let found = || User::from_name(user).ok().flatten().map(|user| user.uid.as_raw());
    user.parse().ok().or_else(found)
}

/// Returns the gid of a group's name or number.
pub fn gid_of(group: &str) -> Option<u32> {
    let found = || Group::from_name(group).ok().flatten().map(|group| group.gid.as_raw());
    group.parse().ok().or_else(found)
}

fn groups() -> BTreeMap<u32, String> {
    let mut text = Vec::new();
    // Without the list, only numbers decide.
    let _ = File::open(GROUPS).and_then(|file| file.take(GROUPS_LEN_MAX).read_to_end(&mut text));
    notable_groups(&String::from_utf8_lossy(&text))
}

/// Parses lines `name:password:gid:members`.
fn notable_groups(text: &str) -> BTreeMap<u32, String> {
    let notable = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let gid = fields.nth(1)?.parse::<u32>().ok()?;
        (gid < TENANT_ID_MIN || PRIVILEGED_GROUPS.contains(&name)).then(|| (gid, name.to_owned()))
    };
    text.lines().filter_map(notable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_the_system_and_privileged_ones_are_kept() {
        let text = "root:x:0:\ndisk:x:6:\nalice:x:1000:\ndocker:x:1001:alice\nbroken\nodd:x:y:\n";
        let found: Vec<_> = notable_groups(text).into_iter().collect();
        assert_eq!(found, [(0, "root".into()), (6, "disk".into()), (1_001, "docker".into())]);
    }

    #[test]
    fn users_and_groups_are_named_or_numbered() {
        assert_eq!((uid_of("root"), uid_of("33"), uid_of("no such user")), (Some(0), Some(33), None));
        assert_eq!((gid_of("root"), gid_of("2000"), gid_of("no such group")), (Some(0), Some(2000), None));
    }

    #[test]
    fn users_of_machine_and_system_are_not_given_to_tenants() {
        let ids = IdSource::from_base(7000);
        for (uid, is_free) in [(0, false), (33, false), (65_534, false), (u32::MAX - 7, true)] {
            assert_eq!(ids.is_free(uid), is_free, "{uid}");
        }
    }

    #[test]
    fn the_configuration_is_shared_by_all_who_ask() {
        let mut settings = NodeSettings::default();
        let ids = IdSource::of(&settings);
        let other = ids.clone();
        settings.system_ids.groups = vec!["33".into()];
        ids.reload(&settings);
        assert!(other.policy().allowed_gids.contains(&33));
    }
}

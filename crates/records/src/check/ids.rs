//! Decides which uids and gids a tenant may have on this machine. Forbidden are the system's,
//! nagaya's own, and groups whose members have more rights than a tenant.
//!
//! Pure: the caller knows the machine and fills in the policy. Not here: two tenants with one uid
//! (`store::plan`).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::RecordFindings;
use crate::record::Tenant;

/// Ids below this are the system's. Debian, Fedora and others number people from here (`UID_MIN`
/// and `GID_MIN` of login.defs(5)).
pub const TENANT_ID_MIN: u32 = 1_000;

/// `nobody` and `nogroup`. The kernel shows it for ids that it cannot map
/// (`Documentation/admin-guide/sysctl/fs.rst`), and many services run under it.
pub const OVERFLOW_ID: u32 = 65_534;

/// Groups that lead to root or to private data, whatever number a machine gives them.
pub const PRIVILEGED_GROUPS: [&str; 22] = [
    "adm",
    "admin",
    "disk",
    "docker",
    "incus",
    "incus-admin",
    "kmem",
    "kvm",
    "libvirt",
    "lxd",
    "mem",
    "nogroup",
    "nobody",
    "podman",
    "root",
    "shadow",
    "staff",
    "sudo",
    "systemd-journal",
    "tape",
    "video",
    "wheel",
];

/// The ids that a machine refuses its tenants. The default is for an unknown machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdPolicy {
    /// The edge's uid, which nothing allows. 0 if it has none of its own.
    pub edge_uid: u32,
    /// nagaya's own groups: the edge's, and that of its administrators. Nothing allows them,
    /// either.
    pub own_gids: BTreeSet<u32>,
    /// System uids that the configuration allows.
    pub allowed_uids: BTreeSet<u32>,
    pub allowed_gids: BTreeSet<u32>,
    /// System or privileged groups of this machine by their numbers, for messages.
    pub groups: BTreeMap<u32, String>,
}

impl IdPolicy {
    /// Adds the mistakes in a tenant's ids. `check::tenant` covers root's and the kernel's own ids.
    pub fn check(&self, tenant: &Tenant, to: &mut RecordFindings) {
        for (field, id, mistake) in [
            ("uid", tenant.uid, self.uid_mistake(tenant.uid)),
            ("gid", tenant.gid, self.gid_mistake(tenant.gid)),
        ] {
            if let Some(hint) = mistake {
                to.add(field, id, hint);
            }
        }
    }

    /// Returns whether a tenant may have this number as its uid and as its gid.
    pub fn takes(&self, id: u32) -> bool {
        self.uid_mistake(id).is_none() && self.gid_mistake(id).is_none()
    }

    /// Returns the first mistake, as a sentence.
    pub fn refusal(&self, tenant: &Tenant) -> Option<String> {
        let mut to = RecordFindings::of_tenant(&tenant.name, None);
        self.check(tenant, &mut to);
        to.mistakes.first().map(ToString::to_string)
    }

    fn uid_mistake(&self, uid: u32) -> Option<String> {
        if uid != 0 && uid == self.edge_uid {
            return Some("is the uid of nagaya's own edge process: choose another".into());
        }
        let is_refused = (1..TENANT_ID_MIN).contains(&uid) || uid == OVERFLOW_ID;
        (is_refused && !self.allowed_uids.contains(&uid)).then(|| {
            format!(
                "is a user of the system: use {TENANT_ID_MIN} or more (not {OVERFLOW_ID}), or allow it with \
                 `system_users` in [tenants]"
            )
        })
    }

    fn gid_mistake(&self, gid: u32) -> Option<String> {
        if self.own_gids.contains(&gid) {
            return Some(
                "is a group of nagaya's own, of its edge process or its administrators: choose another"
                    .into(),
            );
        }
        // `check::tenant` covers root's group.
        let known = self.groups.get(&gid).filter(|_| gid != 0);
        let is_privileged = known.is_some_and(|name| PRIVILEGED_GROUPS.contains(&name.as_str()));
        let is_refused = (1..TENANT_ID_MIN).contains(&gid) || gid == OVERFLOW_ID || is_privileged;
        (is_refused && !self.allowed_gids.contains(&gid)).then(|| {
            let name = known.map_or(String::new(), |name| format!(" ('{name}')"));
            format!(
                "is a group of the system{name}: use {TENANT_ID_MIN} or more (not {OVERFLOW_ID}), such as the tenant's \
                 uid, or allow it with `system_groups` in [tenants]"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> IdPolicy {
        IdPolicy {
            edge_uid: 65_411,
            own_gids: [65_411, 2_000].into(),
            groups: [(0, "root"), (6, "disk"), (33, "www-data"), (1_500, "docker")]
                .map(|(gid, name)| (gid, name.to_owned()))
                .into(),
            ..IdPolicy::default()
        }
    }

    fn mistakes(policy: &IdPolicy, uid: u32, gid: u32) -> Vec<String> {
        let tenant = format!(r#"{{"name":"t","uid":{uid},"gid":{gid}}}"#);
        let tenant: Tenant = serde_json::from_str(&tenant).unwrap();
        let mut to = RecordFindings::of_tenant(&tenant.name, None);
        policy.check(&tenant, &mut to);
        to.mistakes.into_iter().map(|mistake| mistake.field).collect()
    }

    #[test]
    fn ids_of_the_system_and_of_nagaya_are_refused() {
        for (uid, gid, wrong) in [
            (200_000, 200_000, &[][..]),
            (1_000, 1_000, &[]),
            // Root's are refused elsewhere, once.
            (0, 0, &[]),
            (999, 1_000, &["uid"]),
            (33, 33, &["uid", "gid"]),
            (200_000, 42, &["gid"]),
            (200_000, 999, &["gid"]),
            // A privileged group with a number like people's.
            (200_000, 1_500, &["gid"]),
            // The edge's, and the administrators'.
            (65_411, 200_000, &["uid"]),
            (200_000, 65_411, &["gid"]),
            (200_000, 2_000, &["gid"]),
            (65_534, 65_534, &["uid", "gid"]),
        ] {
            assert_eq!(mistakes(&policy(), uid, gid), wrong, "{uid} {gid}");
        }
    }

    #[test]
    fn the_configuration_allows_the_systems_and_never_nagayas_own() {
        let allowed = BTreeSet::from([33, 1_500, 2_000, 65_411]);
        let policy = IdPolicy { allowed_uids: allowed.clone(), allowed_gids: allowed, ..policy() };
        assert!(mistakes(&policy, 33, 33).is_empty());
        assert!(mistakes(&policy, 200_000, 1_500).is_empty());
        assert_eq!(mistakes(&policy, 65_411, 2_000), ["uid", "gid"]);
        assert_eq!(mistakes(&policy, 34, 6), ["uid", "gid"]);
    }

    #[test]
    fn a_refusal_names_the_group_and_the_way_out() {
        let tenant: Tenant = serde_json::from_str(r#"{"name":"t","uid":5000,"gid":6}"#).unwrap();
        let said = policy().refusal(&tenant).unwrap();
        assert!(said.contains("tenant 't': gid: '6'") && said.contains("'disk'"), "{said}");
        assert!(said.contains("system_groups"), "{said}");
    }
}

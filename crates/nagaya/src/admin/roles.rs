//! Permissions on the admin interface: one table of all its routes, and the users and groups that
//! the configuration names.
//!
//! The kernel identifies the other end of a connection (`SO_PEERCRED` and `SO_PEERGROUPS`,
//! socket(7)). Invariant: a route that is not in the table is never answered, so each route has a
//! role. Not here: the responses (`server`), the socket file (`supervisor::sockets`).

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;

use http::Method;
use serde_json::Value;

use crate::config::settings::AdminSettings;
use crate::inherit::peer_groups;
use crate::tenant_ids::{gid_of, uid_of};

/// Permissions of a user. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdminRole {
    /// Look, without secrets.
    Read,
    /// Wake, rest, move and drain: actions that change no record.
    Operate,
    /// Everything, as much as root may.
    All,
}

impl AdminRole {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::All => "all",
        }
    }
}

impl fmt::Display for AdminRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One row of the table. `*` in a path is any one segment; `**` is the whole rest.
#[derive(Debug)]
pub struct AdminRoute {
    pub method: &'static str,
    pub path: &'static str,
    pub role: AdminRole,
}

const fn route(method: &'static str, path: &'static str, role: AdminRole) -> AdminRoute {
    AdminRoute { method, path, role }
}

use AdminRole::{All, Operate, Read};

/// Every route of the admin interface.
pub static ROUTES: &[AdminRoute] = &[
    route("GET", "/metrics", Read),
    route("GET", "/healthz", Read),
    route("GET", "/v1/status", Read),
    route("GET", "/v1/cells", Read),
    route("GET", "/v1/requests", Read),
    route("GET", "/v1/requests/*", Read),
    route("GET", "/v1/balance/*", Read),
    // Values of variables are hidden from users without all rights.
    route("GET", "/v1/tenants", Read),
    route("GET", "/v1/tenants/*", Read),
    route("GET", "/v1/sites", Read),
    route("GET", "/v1/sites/*", Read),
    route("GET", "/v1/rules", Read),
    // Settings and texts of rules may hold secrets of the rules.
    route("GET", "/v1/rules/*", All),
    route("GET", "/v1/settings", All),
    route("GET", "/v1/settings/**", All),
    route("GET", "/v1/export", All),
    route("POST", "/v1/import", All),
    route("PUT", "/v1/tenants/*", All),
    route("PUT", "/v1/sites/*", All),
    route("PUT", "/v1/settings/**", All),
    route("PUT", "/v1/rules/*", All),
    route("DELETE", "/v1/tenants/*", All),
    route("DELETE", "/v1/sites/*", All),
    route("DELETE", "/v1/settings/**", All),
    route("DELETE", "/v1/rules/*", All),
    route("GET", "/v1/instances", Read),
    route("GET", "/v1/instances/*", Read),
    // Applications print visitors' input.
    route("GET", "/v1/instances/*/logs", Operate),
    route("POST", "/v1/instances/*/wake", Operate),
    route("POST", "/v1/instances/*/rest", Operate),
    route("POST", "/v1/instances/*/image", Operate),
    route("POST", "/v1/instances/*/restart", Operate),
    route("POST", "/v1/instances/*/stop", Operate),
    // A command runs with the tenant's rights.
    route("POST", "/v1/instances/*/exec", All),
    route("GET", "/v1/cluster", Read),
    route("POST", "/v1/cluster", All),
    route("POST", "/v1/cluster/join", All),
    route("GET", "/v1/cluster/tokens", All),
    route("POST", "/v1/cluster/tokens", All),
    route("DELETE", "/v1/cluster/tokens/*", All),
    route("POST", "/v1/cluster/authority", All),
    route("POST", "/v1/cluster/store", All),
    route("POST", "/v1/cluster/repair", All),
    route("GET", "/v1/nodes", Read),
    route("POST", "/v1/nodes/*/drain", Operate),
    route("POST", "/v1/nodes/*/undrain", Operate),
    route("DELETE", "/v1/nodes/*", All),
    route("GET", "/v1/placements", Read),
    route("GET", "/v1/placements/*", Read),
    route("POST", "/v1/placements/*/move", Operate),
    route("GET", "/v1/events", Read),
];

/// The table's result for a request.
#[derive(Debug, PartialEq, Eq)]
pub enum NeededRole {
    Role(AdminRole),
    /// The path exists for these methods only.
    Methods(Vec<&'static str>),
    Unknown,
}

/// Finds the row of a request.
pub fn needed(method: &Method, path: &str) -> NeededRole {
    let rows: Vec<&AdminRoute> = ROUTES.iter().filter(|route| is_match(route.path, path)).collect();
    if let Some(route) = rows.iter().find(|route| route.method == method.as_str()) {
        return NeededRole::Role(route.role);
    }
    let methods: Vec<&str> = rows.iter().map(|route| route.method).collect();
    if methods.is_empty() { NeededRole::Unknown } else { NeededRole::Methods(methods) }
}

fn is_match(pattern: &str, path: &str) -> bool {
    let mut wanted = pattern.split('/');
    let mut found = path.split('/');
    loop {
        match (wanted.next(), found.next()) {
            (None, None) => return true,
            (Some("**"), Some(segment)) => return !segment.is_empty() || found.next().is_some(),
            (Some("*"), Some(segment)) if !segment.is_empty() => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

/// Returns methods as a sentence lists them.
pub fn list_methods(methods: &[&str]) -> String {
    match methods {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// The users and groups with a role, by uid and by gid.
#[derive(Debug, Clone, Default)]
pub struct AccessList {
    /// Uid of this process: it has all rights, as root has.
    own_uid: u32,
    users: HashMap<u32, AdminRole>,
    groups: HashMap<u32, AdminRole>,
}

impl AccessList {
    /// Makes the list. The check of the configuration reports unknown names.
    pub fn new(admin: &AdminSettings, own_uid: u32) -> Self {
        let mut list = Self { own_uid, ..Self::default() };
        if let Some(gid) = admin.group.as_deref().and_then(gid_of) {
            list.groups.insert(gid, All);
        }
        for (names, role) in [(&admin.read, Read), (&admin.operate, Operate), (&admin.all, All)] {
            for name in names {
                list.give(name, role);
            }
        }
        list
    }

    fn give(&mut self, name: &str, role: AdminRole) {
        let (ids, id) = match name.strip_prefix('@') {
            Some(group) => (&mut self.groups, gid_of(group)),
            None => (&mut self.users, uid_of(name)),
        };
        if let Some(id) = id {
            let given = ids.entry(id).or_insert(role);
            *given = role.max(*given);
        }
    }

    /// Returns the highest role of any of its ids.
    fn role_of(&self, uid: u32, groups: &[u32]) -> Option<AdminRole> {
        if self.is_owner(uid) {
            return Some(All);
        }
        let of_groups = groups.iter().filter_map(|gid| self.groups.get(gid));
        self.users.get(&uid).into_iter().chain(of_groups).copied().max()
    }

    pub fn is_owner(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// Identifies the other end of a connection. An end that the kernel does not identify has no
    /// role.
    pub fn identify(&self, connection: impl AsFd) -> AdminPeer {
        let Ok(credentials) = rustix::net::sockopt::socket_peercred(&connection) else {
            return AdminPeer { uid: u32::MAX, role: None };
        };
        let uid = credentials.uid.as_raw();
        // Kernels before 4.13 report the first group only.
        let mut groups = peer_groups(connection).unwrap_or_default();
        groups.push(credentials.gid.as_raw());
        AdminPeer { uid, role: self.role_of(uid, &groups) }
    }
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdminPeer {
    pub uid: u32,
    pub role: Option<AdminRole>,
}

/// Hides the values of applications' variables in records, at any depth.
pub fn hide_values(record: &mut Value) {
    match record {
        Value::Array(list) => list.iter_mut().for_each(hide_values),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::Object(variables) if name == "env" => {
                        variables.values_mut().for_each(|value| *value = HIDDEN.into());
                    }
                    value => hide_values(value),
                }
            }
        }
        _ => {}
    }
}

/// Replacement for a hidden value.
const HIDDEN: &str = "(hidden)";

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use serde_json::json;

    use super::*;

    fn admin(read: &[&str], operate: &[&str], all: &[&str]) -> AdminSettings {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        AdminSettings {
            read: names(read),
            operate: names(operate),
            all: names(all),
            ..AdminSettings::default()
        }
    }

    #[test]
    fn a_request_needs_the_role_of_its_row() {
        let rows = [
            ("GET", "/metrics", NeededRole::Role(Read)),
            ("GET", "/v1/sites/a%2Fb", NeededRole::Role(Read)),
            ("PUT", "/v1/sites/a", NeededRole::Role(All)),
            ("PUT", "/v1/settings/limits/a.test", NeededRole::Role(All)),
            ("GET", "/v1/settings/", NeededRole::Unknown),
            ("POST", "/v1/instances/wiki/wake", NeededRole::Role(Operate)),
            ("POST", "/v1/instances/wiki/exec", NeededRole::Role(All)),
            ("GET", "/v1/instances/wiki/exec", NeededRole::Methods(vec!["POST"])),
            ("PATCH", "/v1/tenants/a", NeededRole::Methods(vec!["GET", "PUT", "DELETE"])),
            ("GET", "/v1/instances/wiki/exec/", NeededRole::Unknown),
            ("GET", "/v1/sites/", NeededRole::Unknown),
            ("GET", "/v1/sites/a/b", NeededRole::Unknown),
            ("GET", "/v1//status", NeededRole::Unknown),
            ("GET", "", NeededRole::Unknown),
        ];
        for (method, path, expected) in rows {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            assert_eq!(needed(&method, path), expected, "{method} {path}");
        }
        assert_eq!(list_methods(&["GET", "PUT", "DELETE"]), "GET, PUT and DELETE");
    }

    #[test]
    fn each_route_is_listed_once() {
        for (at, route) in ROUTES.iter().enumerate() {
            let is_same = |other: &AdminRoute| other.method == route.method && other.path == route.path;
            assert!(!ROUTES[..at].iter().any(is_same), "{} {}", route.method, route.path);
        }
    }

    #[test]
    fn nothing_that_changes_a_record_needs_less_than_all() {
        let is_record = |path: &str| {
            ["tenants", "sites", "settings", "rules", "import"]
                .iter()
                .any(|kind| path.starts_with(&format!("/v1/{kind}")))
        };
        for route in ROUTES.iter().filter(|route| route.method != "GET") {
            assert!(route.role > Read, "{} {}", route.method, route.path);
            assert!(!is_record(route.path) || route.role == All, "{} {}", route.method, route.path);
        }
    }

    #[test]
    fn the_highest_role_of_a_user_and_its_groups_counts() {
        let list = AccessList::new(&admin(&["5001", "@6001"], &["5001", "@6002"], &["@6003"]), 4000);
        let rows = [
            (0, &[][..], Some(All)),
            (4000, &[], Some(All)),
            (5001, &[], Some(Operate)),
            (5002, &[6001], Some(Read)),
            (5002, &[1, 6001, 6002], Some(Operate)),
            (5001, &[6003], Some(All)),
            (5002, &[5001], None),
            (6003, &[], None),
        ];
        for (uid, groups, expected) in rows {
            assert_eq!(list.role_of(uid, groups), expected, "{uid} {groups:?}");
        }
    }

    #[test]
    fn the_kernel_says_who_connects() {
        let (near, _far) = UnixStream::pair().unwrap();
        let uid = nix::unistd::Uid::effective().as_raw();
        let peer = AccessList::new(&AdminSettings::default(), uid).identify(&near);
        assert_eq!(peer, AdminPeer { uid, role: Some(All) });
        let gid = nix::unistd::Gid::effective().as_raw();
        let mut groups = peer_groups(&near).unwrap();
        groups.push(gid);
        for own in nix::unistd::getgroups().unwrap() {
            assert!(groups.contains(&own.as_raw()), "{groups:?}");
        }
    }

    #[test]
    fn values_of_variables_are_hidden_and_nothing_else() {
        let mut listed = json!({ "sites": [{ "name": "a", "backend": { "kind": "app", "env": { "KEY": "s3cret", "N": 1 } } }] });
        hide_values(&mut listed);
        let shown = json!({ "KEY": "(hidden)", "N": "(hidden)" });
        assert_eq!(listed["sites"][0]["backend"], json!({ "kind": "app", "env": shown }));
        assert_eq!(listed["sites"][0]["name"], "a");
    }
}

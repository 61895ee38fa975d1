//! Splits a changed configuration into the part that takes effect at once, and the part for the
//! next start.
//!
//! Not here: reading the file (`config`), informing the processes (`life`).

use crate::config::NodeSettings;
use crate::config::settings::ClusterSettings;

/// Returns the settings from now on: the new ones, except those bound to parts made at start. Also
/// returns the names of the keys whose change has no effect yet. Pure.
pub fn merge(running: &NodeSettings, new: NodeSettings) -> (NodeSettings, Vec<&'static str>) {
    let mut held = Vec::new();
    let mut keep = |name: &'static str, same: bool| {
        if !same {
            held.push(name);
        }
    };
    keep("node", running.node == new.node);
    keep("runtime_dir", running.runtime_dir == new.runtime_dir);
    keep("state_dir", running.state_dir == new.state_dir);
    keep("log.file", running.log.file == new.log.file);
    keep("log.format", running.log.format == new.log.format);
    keep("listen", running.listen == new.listen);
    keep("admin.socket", running.admin.socket == new.admin.socket);
    keep("admin.group", running.admin.group == new.admin.group);
    keep("admin.read", running.admin.read == new.admin.read);
    keep("admin.operate", running.admin.operate == new.admin.operate);
    keep("admin.all", running.admin.all == new.admin.all);
    keep("tenants.uid_base", running.uid_base == new.uid_base);
    keep("edge.user", running.identity.user == new.identity.user);
    keep("edge.uid", running.identity.uid == new.identity.uid);
    keep("edge.threads", running.edge.threads == new.edge.threads);
    keep("cells.back_end", running.keeper.back_end == new.keeper.back_end);
    keep("instances.images", running.images == new.images);
    keep("cluster.listen", running.cluster.listen == new.cluster.listen);
    keep("cluster.advertise", running.cluster.advertise == new.cluster.advertise);
    keep("cluster.fence", running.cluster.fence_ms == new.cluster.fence_ms);
    let mut merged = NodeSettings {
        log: crate::config::settings::LogSettings { level: new.log.level, ..running.log.clone() },
        edge: new.edge,
        keeper: new.keeper,
        balance: new.balance,
        system_ids: new.system_ids,
        cluster: ClusterSettings {
            probe: new.cluster.probe,
            probe_ms: new.cluster.probe_ms,
            ..running.cluster.clone()
        },
        ..running.clone()
    };
    merged.edge.threads = running.edge.threads;
    merged.keeper.back_end = running.keeper.back_end;
    (merged, held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_at_once_and_sockets_from_the_next_start() {
        let running = NodeSettings::default();
        let mut new = NodeSettings::default();
        new.edge.limits.head_bytes = 2048;
        new.edge.threads = 7;
        new.edge.rule_limits.instructions = 5_000;
        new.edge.receipts.allow.push("::1".into());
        new.keeper.processes_per_tenant = 64;
        new.keeper.back_end = nagaya_keeper::CellMechanism::ProcessGroup;
        new.log.level = "debug".into();
        new.listen.clear();
        new.images = Some("/srv/images".into());
        new.keeper.instances.wakes_at_once = 3;
        new.balance.move_after_ms = 5_000;
        let (merged, held) = merge(&running, new);
        assert_eq!(held, ["listen", "edge.threads", "cells.back_end", "instances.images"]);
        assert_eq!((merged.images, merged.keeper.instances.wakes_at_once), (None, 3));
        assert_eq!(merged.balance.move_after_ms, 5_000);
        assert_eq!(merged.edge.limits.head_bytes, 2048);
        assert_eq!(merged.edge.rule_limits.instructions, 5_000);
        assert_eq!(merged.edge.receipts.allow, ["::1"]);
        assert_eq!(merged.keeper.processes_per_tenant, 64);
        assert_eq!(merged.keeper.back_end, running.keeper.back_end);
        assert_eq!(merged.edge.threads, running.edge.threads);
        assert_eq!(merged.listen, running.listen);
        assert_eq!(merged.log.level, "debug");
    }

    #[test]
    fn an_unchanged_configuration_holds_nothing_back() {
        assert_eq!(merge(&NodeSettings::default(), NodeSettings::default()).1, Vec::<&str>::new());
    }
}

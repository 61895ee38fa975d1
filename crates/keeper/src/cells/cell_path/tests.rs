//! Tables: requests and the directories they get on v1 and v2, and how deep they go into them.
//!
//! Not here: directories that are really made (`tests/kernel`).

use CgroupController::{Blkio, Cpu, Cpuacct, Cpuset, Memory, Pids};

use super::*;

fn attached(name: &str, scope: CellScope, controllers: &[CgroupController]) -> AttachedCell {
    AttachedCell { name: CellName::parse(name).unwrap(), scope, controllers: ControllerSet::of(controllers) }
}

fn place(site: Option<&str>, attached: &[AttachedCell]) -> CellPath {
    CellPath {
        tenant: TenantName::new("demo").unwrap(),
        site: site.map(|site| SiteName::new(site).unwrap()),
        attached: attached.to_vec(),
    }
}

fn told(place: &CellPath, version: CgroupVersion, controllers: &[CgroupController]) -> String {
    let all = ControllerSet::of(controllers);
    let levels = place.levels(version, all);
    levels.iter().map(|level| level.name(all)).collect::<Vec<_>>().join("/")
}

#[test]
fn places_without_named_cells_are_tenant_and_site() {
    for (site, expected, path) in
        [(Some("wiki"), "tenant-demo/site-wiki", "demo/wiki"), (None, "tenant-demo", "demo")]
    {
        let place = place(site, &[]);
        assert_eq!(told(&place, CgroupVersion::V1, &[Cpu]), expected);
        assert_eq!(told(&place, CgroupVersion::V2, &CgroupController::ALL), expected);
        assert_eq!(told(&place, CgroupVersion::V2, &[Cpuacct]), expected);
        assert_eq!(place.path(), path);
    }
}

#[test]
fn two_names_are_two_groups_on_v1_and_one_branch_on_v2() {
    let pair = [
        attached("httpd-limiterd", CellScope::Node, &[Cpu]),
        attached("httpd-limited", CellScope::Node, &[Blkio]),
    ];
    let place = place(Some("wiki"), &pair);
    for (controller, expected) in [
        (Cpu, "named-httpd-limiterd/tenant-demo"),
        (Blkio, "named-httpd-limited/tenant-demo"),
        (Pids, "tenant-demo/site-wiki"),
        (Memory, "tenant-demo/site-wiki"),
    ] {
        assert_eq!(told(&place, CgroupVersion::V1, &[controller]), expected);
    }
    assert_eq!(
        told(&place, CgroupVersion::V2, &CgroupController::ALL),
        "named-httpd-limiterd.cpu/named-httpd-limited.blkio/tenant-demo/site-wiki"
    );
    // Where v2 has no controllers it is the fence alone, and names mean nothing to it.
    assert_eq!(told(&place, CgroupVersion::V2, &[Cpuacct]), "tenant-demo/site-wiki");
    assert_eq!(place.path(), "named/httpd-limiterd+httpd-limited/demo");
}

#[test]
fn the_cpu_is_outermost_in_whatever_order_names_come() {
    let pair = [attached("io", CellScope::Node, &[Blkio, Pids]), attached("cpu", CellScope::Node, &[Cpu])];
    assert_eq!(
        told(&place(Some("w"), &pair), CgroupVersion::V2, &[Cpu, Blkio, Pids]),
        "named-cpu.cpu/named-io.blkio+pids/tenant-demo"
    );
}

#[test]
fn the_rest_of_a_site_holds_where_no_name_is_given() {
    let place = place(Some("wiki"), &[attached("slow", CellScope::Node, &[Cpu])]);
    let levels = place.levels(CgroupVersion::V2, ControllerSet::of(&[Cpu, Cpuacct, Blkio, Pids]));
    let told: Vec<String> = levels.iter().map(|level| level.controllers.to_string()).collect();
    assert_eq!(told, ["cpu", "cpu+cpuacct+blkio+pids", "blkio+pids"]);
}

#[test]
fn a_cell_with_all_controllers_has_one_directory() {
    let of_node = place(Some("wiki"), &[attached("x", CellScope::Node, &CgroupController::ALL)]);
    assert_eq!(told(&of_node, CgroupVersion::V2, &CgroupController::ALL), "named-x/tenant-demo");
    assert_eq!(told(&of_node, CgroupVersion::V1, &[Cpu]), "named-x/tenant-demo");
    assert_eq!(told(&of_node, CgroupVersion::V1, &[Cpu, Cpuacct]), "named-x/tenant-demo");
    assert_eq!(of_node.path(), "named/x/demo");
    let of_tenant = place(Some("wiki"), &[attached("x", CellScope::Tenant, &CgroupController::ALL)]);
    assert_eq!(told(&of_tenant, CgroupVersion::V2, &CgroupController::ALL), "tenant-demo/named-x");
    assert_eq!(told(&of_tenant, CgroupVersion::V2, &[Cpuacct]), "tenant-demo/named-x");
    assert_eq!(of_tenant.path(), "demo/named/x");
}

#[test]
fn the_same_name_with_other_controllers_is_another_directory() {
    let cpu = place(Some("w"), &[attached("x", CellScope::Node, &[Cpu])]);
    let both = place(Some("w"), &[attached("x", CellScope::Node, &[Cpu, Blkio])]);
    let all = [Cpu, Blkio, Pids];
    assert_eq!(told(&cpu, CgroupVersion::V2, &all), "named-x.cpu/tenant-demo/site-w");
    // The CPU's part is the same directory for both.
    assert_eq!(told(&both, CgroupVersion::V2, &all), "named-x.cpu/named-x.blkio/tenant-demo/site-w");
}

#[test]
fn no_name_can_be_taken_for_another_kind() {
    let site = place(Some("r12"), &[]);
    assert_eq!(told(&site, CgroupVersion::V1, &[Cpu]), "tenant-demo/site-r12");
    let tricky = place(None, &[attached("site-x", CellScope::Node, &[Cpu])]);
    assert_eq!(told(&tricky, CgroupVersion::V1, &[Cpu]), "named-site-x/tenant-demo");
}

/// Limits of named cell, tenant and site (from the top), of the leaf, and the depth on v1.
fn depths(
    controller: CgroupController,
    levels: &[(&[CgroupController], bool)],
    leaf: &[CgroupController],
) -> CellDepth {
    let levels: Vec<_> = levels.iter().map(|(limits, named)| (ControllerSet::of(limits), *named)).collect();
    depth(DepthFactors {
        version: CgroupVersion::V1,
        controllers: ControllerSet::only(controller),
        is_fence: false,
        levels: &levels,
        leaf: ControllerSet::of(leaf),
    })
}

#[test]
fn a_process_goes_as_deep_as_something_holds_it() {
    let none: [(&[CgroupController], bool); 2] = [(&[], false), (&[], false)];
    for (controller, expected) in [
        (Cpu, CellDepth::Leaf),
        (Cpuacct, CellDepth::Leaf),
        (Blkio, CellDepth::Leaf),
        (Pids, CellDepth::Level(1)),
        (Memory, CellDepth::Level(1)),
        (Cpuset, CellDepth::Out),
    ] {
        assert_eq!(depths(controller, &none, &[]), expected, "{controller:?}");
    }
    let tenant: [(&[CgroupController], bool); 2] = [(&[Cpuset], false), (&[], false)];
    assert_eq!(depths(Cpuset, &tenant, &[]), CellDepth::Level(0));
    for controller in [Pids, Memory, Cpuset] {
        assert_eq!(depths(controller, &none, &[controller]), CellDepth::Leaf);
    }
}

#[test]
fn a_shared_limit_of_a_disk_is_shared_on_v1() {
    let tenant: [(&[CgroupController], bool); 2] = [(&[Blkio], false), (&[], false)];
    let both: [(&[CgroupController], bool); 2] = [(&[Blkio], false), (&[Blkio], false)];
    let named: [(&[CgroupController], bool); 2] = [(&[Blkio], true), (&[Blkio], false)];
    let empty: [(&[CgroupController], bool); 2] = [(&[], true), (&[Blkio], false)];
    for (levels, leaf, expected) in [
        (tenant, &[][..], CellDepth::Level(0)),
        (both, &[], CellDepth::Level(1)),
        // What the request is limited to by itself is the strictest of all.
        (both, &[Blkio], CellDepth::Leaf),
        // Who is attached to a named cell shares it.
        (named, &[], CellDepth::Level(0)),
        (named, &[Blkio], CellDepth::Level(0)),
        (empty, &[], CellDepth::Level(1)),
    ] {
        assert_eq!(depths(Blkio, &levels, leaf), expected, "{levels:?} {leaf:?}");
    }
}

#[test]
fn on_v2_and_in_the_fence_every_process_is_in_its_leaf() {
    let pids = ControllerSet::only(Pids);
    for (version, is_fence) in [(CgroupVersion::V2, false), (CgroupVersion::V1, true)] {
        let wants =
            DepthFactors { version, controllers: pids, is_fence, levels: &[], leaf: ControllerSet::NONE };
        assert_eq!(depth(wants), CellDepth::Leaf);
    }
}

//! Tables: requests and the directories they get on v1 and v2, and how deep they go into them.
//!
//! Not here: directories that are really made (`tests/kernel`).

use Controller::{Blkio, Cpu, Cpuacct, Cpuset, Memory, Pids};

use super::*;

fn attached(name: &str, scope: Scope, controllers: &[Controller]) -> Attached {
    Attached { name: CellName::parse(name).unwrap(), scope, controllers: Controllers::of(controllers) }
}

fn place(site: Option<&str>, attached: &[Attached]) -> Place {
    Place {
        tenant: TenantName::new("demo").unwrap(),
        site: site.map(|site| SiteName::new(site).unwrap()),
        attached: attached.to_vec(),
    }
}

fn told(place: &Place, version: Version, controllers: &[Controller]) -> String {
    let all = Controllers::of(controllers);
    let levels = place.levels(version, all);
    levels.iter().map(|level| level.name(all)).collect::<Vec<_>>().join("/")
}

#[test]
fn places_without_named_cells_are_tenant_and_site() {
    for (site, expected, path) in
        [(Some("wiki"), "tenant-demo/site-wiki", "demo/wiki"), (None, "tenant-demo", "demo")]
    {
        let place = place(site, &[]);
        assert_eq!(told(&place, Version::V1, &[Cpu]), expected);
        assert_eq!(told(&place, Version::V2, &Controller::ALL), expected);
        assert_eq!(told(&place, Version::V2, &[Cpuacct]), expected);
        assert_eq!(place.path(), path);
    }
}

#[test]
fn two_names_are_two_groups_on_v1_and_one_branch_on_v2() {
    let pair =
        [attached("httpd-limiterd", Scope::Node, &[Cpu]), attached("httpd-limited", Scope::Node, &[Blkio])];
    let place = place(Some("wiki"), &pair);
    for (controller, expected) in [
        (Cpu, "named-httpd-limiterd/tenant-demo"),
        (Blkio, "named-httpd-limited/tenant-demo"),
        (Pids, "tenant-demo/site-wiki"),
        (Memory, "tenant-demo/site-wiki"),
    ] {
        assert_eq!(told(&place, Version::V1, &[controller]), expected);
    }
    assert_eq!(
        told(&place, Version::V2, &Controller::ALL),
        "named-httpd-limiterd.cpu/named-httpd-limited.blkio/tenant-demo/site-wiki"
    );
    // Where v2 has no controllers it is the fence alone, and names mean nothing to it.
    assert_eq!(told(&place, Version::V2, &[Cpuacct]), "tenant-demo/site-wiki");
    assert_eq!(place.path(), "named/httpd-limiterd+httpd-limited/demo");
}

#[test]
fn the_cpu_is_outermost_in_whatever_order_names_come() {
    let pair = [attached("io", Scope::Node, &[Blkio, Pids]), attached("cpu", Scope::Node, &[Cpu])];
    assert_eq!(
        told(&place(Some("w"), &pair), Version::V2, &[Cpu, Blkio, Pids]),
        "named-cpu.cpu/named-io.blkio+pids/tenant-demo"
    );
}

#[test]
fn the_rest_of_a_site_holds_where_no_name_is_given() {
    let place = place(Some("wiki"), &[attached("slow", Scope::Node, &[Cpu])]);
    let levels = place.levels(Version::V2, Controllers::of(&[Cpu, Cpuacct, Blkio, Pids]));
    let told: Vec<String> = levels.iter().map(|level| level.controllers.to_string()).collect();
    assert_eq!(told, ["cpu", "cpu+cpuacct+blkio+pids", "blkio+pids"]);
}

#[test]
fn a_cell_with_all_controllers_has_one_directory() {
    let of_node = place(Some("wiki"), &[attached("x", Scope::Node, &Controller::ALL)]);
    assert_eq!(told(&of_node, Version::V2, &Controller::ALL), "named-x/tenant-demo");
    assert_eq!(told(&of_node, Version::V1, &[Cpu]), "named-x/tenant-demo");
    assert_eq!(told(&of_node, Version::V1, &[Cpu, Cpuacct]), "named-x/tenant-demo");
    assert_eq!(of_node.path(), "named/x/demo");
    let of_tenant = place(Some("wiki"), &[attached("x", Scope::Tenant, &Controller::ALL)]);
    assert_eq!(told(&of_tenant, Version::V2, &Controller::ALL), "tenant-demo/named-x");
    assert_eq!(told(&of_tenant, Version::V2, &[Cpuacct]), "tenant-demo/named-x");
    assert_eq!(of_tenant.path(), "demo/named/x");
}

#[test]
fn the_same_name_with_other_controllers_is_another_directory() {
    let cpu = place(Some("w"), &[attached("x", Scope::Node, &[Cpu])]);
    let both = place(Some("w"), &[attached("x", Scope::Node, &[Cpu, Blkio])]);
    let all = [Cpu, Blkio, Pids];
    assert_eq!(told(&cpu, Version::V2, &all), "named-x.cpu/tenant-demo/site-w");
    // The CPU's part is the same directory for both.
    assert_eq!(told(&both, Version::V2, &all), "named-x.cpu/named-x.blkio/tenant-demo/site-w");
}

#[test]
fn no_name_can_be_taken_for_another_kind() {
    let site = place(Some("r12"), &[]);
    assert_eq!(told(&site, Version::V1, &[Cpu]), "tenant-demo/site-r12");
    let tricky = place(None, &[attached("site-x", Scope::Node, &[Cpu])]);
    assert_eq!(told(&tricky, Version::V1, &[Cpu]), "named-site-x/tenant-demo");
}

/// Limits of named cell, tenant and site (from the top), of the leaf, and the depth on v1.
fn depths(controller: Controller, levels: &[(&[Controller], bool)], leaf: &[Controller]) -> Depth {
    let levels: Vec<_> = levels.iter().map(|(limits, named)| (Controllers::of(limits), *named)).collect();
    depth(Wants {
        version: Version::V1,
        controllers: Controllers::only(controller),
        is_fence: false,
        levels: &levels,
        leaf: Controllers::of(leaf),
    })
}

#[test]
fn a_process_goes_as_deep_as_something_holds_it() {
    let none: [(&[Controller], bool); 2] = [(&[], false), (&[], false)];
    for (controller, expected) in [
        (Cpu, Depth::Leaf),
        (Cpuacct, Depth::Leaf),
        (Blkio, Depth::Leaf),
        (Pids, Depth::Level(1)),
        (Memory, Depth::Level(1)),
        (Cpuset, Depth::Out),
    ] {
        assert_eq!(depths(controller, &none, &[]), expected, "{controller:?}");
    }
    let tenant: [(&[Controller], bool); 2] = [(&[Cpuset], false), (&[], false)];
    assert_eq!(depths(Cpuset, &tenant, &[]), Depth::Level(0));
    for controller in [Pids, Memory, Cpuset] {
        assert_eq!(depths(controller, &none, &[controller]), Depth::Leaf);
    }
}

#[test]
fn a_shared_limit_of_a_disk_is_shared_on_v1() {
    let tenant: [(&[Controller], bool); 2] = [(&[Blkio], false), (&[], false)];
    let both: [(&[Controller], bool); 2] = [(&[Blkio], false), (&[Blkio], false)];
    let named: [(&[Controller], bool); 2] = [(&[Blkio], true), (&[Blkio], false)];
    let empty: [(&[Controller], bool); 2] = [(&[], true), (&[Blkio], false)];
    for (levels, leaf, expected) in [
        (tenant, &[][..], Depth::Level(0)),
        (both, &[], Depth::Level(1)),
        // What the request is limited to by itself is the strictest of all.
        (both, &[Blkio], Depth::Leaf),
        // Who is attached to a named cell shares it.
        (named, &[], Depth::Level(0)),
        (named, &[Blkio], Depth::Level(0)),
        (empty, &[], Depth::Level(1)),
    ] {
        assert_eq!(depths(Blkio, &levels, leaf), expected, "{levels:?} {leaf:?}");
    }
}

#[test]
fn on_v2_and_in_the_fence_every_process_is_in_its_leaf() {
    let pids = Controllers::only(Pids);
    for (version, is_fence) in [(Version::V2, false), (Version::V1, true)] {
        let wants = Wants { version, controllers: pids, is_fence, levels: &[], leaf: Controllers::NONE };
        assert_eq!(depth(wants), Depth::Leaf);
    }
}

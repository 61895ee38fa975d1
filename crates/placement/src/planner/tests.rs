//! Tables of who is chosen and why, and how choices spread.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn node(name: &str) -> NodeCandidate<'_> {
    NodeCandidate {
        name,
        against: None,
        present: true,
        draining: false,
        cpus: 4,
        memory_bytes: 8 * GIB,
        memory_free: 7 * GIB,
        cpu_used: 0.1,
        sites: 10,
        heat: 5.0,
        has_image: false,
        wakes: 0,
    }
}

fn need(site: &str) -> SiteDemand<'_> {
    SiteDemand { site, memory_bytes: GIB / 2, from: None }
}

#[test]
fn each_node_is_ruled_out_for_one_reason() {
    type Change = fn(&mut NodeCandidate);
    let table: [(Ineligible, Change); 6] = [
        (Ineligible::Draining, |node| node.draining = true),
        (Ineligible::Absent, |node| node.present = false),
        (Ineligible::Silent, |node| node.against = Some(ProbeResult::Silent)),
        (Ineligible::Refuses, |node| node.against = Some(ProbeResult::Refuses)),
        (Ineligible::TooSmall, |node| node.memory_bytes = GIB / 4),
        (Ineligible::Full, |node| node.memory_free = GIB / 4),
    ];
    for (out, change) in table {
        let mut other = node("a");
        change(&mut other);
        assert_eq!(choose(&need("wiki"), &[other]).unwrap_err().out, [("a".to_owned(), out)]);
        assert_eq!(choose(&need("wiki"), &[other, node("b")]).unwrap().best(), "b");
    }
    let leaves = SiteDemand { from: Some("a"), ..need("wiki") };
    let error = choose(&leaves, &[node("a")]).unwrap_err();
    assert_eq!(error.to_string(), "no node can take it: a is the one it leaves");
    assert_eq!(choose(&leaves, &[]).unwrap_err().to_string(), "there is no node");
}

#[test]
fn a_slow_or_unknown_node_is_not_ruled_out() {
    for against in [None, Some(ProbeResult::Pending), Some(ProbeResult::Answers)] {
        let other = NodeCandidate { against, ..node("a") };
        assert_eq!(choose(&need("wiki"), &[other]).unwrap().best(), "a");
    }
}

#[test]
fn a_refusal_names_some_and_counts_the_rest() {
    let names: Vec<String> = (0..20).map(|at| format!("n{at}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| NodeCandidate { draining: true, ..node(name) }).collect();
    let text = choose(&need("wiki"), &nodes).unwrap_err().to_string();
    assert!(text.starts_with("no node can take it: n0 is being drained; n1 is"), "{text}");
    assert!(text.ends_with("; and 12 more"), "{text}");
}

#[test]
fn the_image_decides_between_equals_and_load_between_images() {
    let image = |name| NodeCandidate { has_image: true, ..node(name) };
    for site in ["a", "b", "c", "d", "e"] {
        assert_eq!(choose(&need(site), &[node("x"), image("y"), node("z")]).unwrap().best(), "y");
        let busy = NodeCandidate { wakes: 40, ..image("y") };
        assert_ne!(choose(&need(site), &[node("x"), busy, node("z")]).unwrap().best(), "y");
    }
}

#[test]
fn work_of_a_node_is_weighed_against_its_spare_capacity() {
    type Change = fn(&mut NodeCandidate);
    // What speaks against the first of a site's order, and whether that is enough for the second to be chosen.
    let table: [(&str, bool, Change); 14] = [
        ("nothing", false, |_| {}),
        ("some requests", false, |node| node.heat = 300.0),
        ("many requests", true, |node| node.heat = 1500.0),
        ("as many on more CPUs", false, |node| (node.heat, node.cpus) = (1500.0, 32)),
        ("one wake with CPUs to spare", false, |node| (node.wakes, node.cpus) = (1, 8)),
        ("a wake for each CPU", true, |node| node.wakes = 4),
        ("as many on more CPUs", false, |node| (node.wakes, node.cpus) = (4, 32)),
        ("busy CPUs", true, |node| node.cpu_used = 0.9),
        ("memory in use that does not matter", false, |node| node.memory_free = 5 * GIB),
        ("memory nearly used up", true, |node| node.memory_free = GIB),
        ("many sites at rest", false, |node| node.sites = 1000),
        ("very many sites at rest", true, |node| node.sites = 8000),
        ("wakes, but the image is there", false, |node| (node.wakes, node.has_image) = (4, true)),
        ("more wakes than an image is worth", true, |node| (node.wakes, node.has_image) = (8, true)),
    ];
    for (what, is_passed_over, change) in table {
        // Each of the two is the first of half of all orders.
        for site in 0..20 {
            let site = format!("site{site}");
            let mut nodes = [node("x"), node("y")];
            let first = choose(&need(&site), &nodes).unwrap().best();
            let at = usize::from(first == "y");
            change(&mut nodes[at]);
            if nodes[at].cpus != 4 {
                // Only the load is to differ, not the order.
                nodes[1 - at].cpus = nodes[at].cpus;
                nodes[0].memory_bytes = 64 * GIB;
                nodes[1].memory_bytes = 64 * GIB;
                nodes[0].memory_free = 63 * GIB;
                nodes[1].memory_free = 63 * GIB;
            }
            let best = choose(&need(&site), &nodes).unwrap().best();
            assert_eq!(best != first, is_passed_over, "{what}: {}", choose(&need(&site), &nodes).unwrap());
        }
    }
}

#[test]
fn an_image_is_worth_what_a_cold_start_takes_and_no_more() {
    let nodes = |cpu_used| [NodeCandidate { has_image: true, cpu_used, ..node("x") }, node("y")];
    for site in 0..20 {
        let site = format!("site{site}");
        let best = |cpu_used| choose(&need(&site), &nodes(cpu_used)).unwrap().best();
        assert_eq!((best(0.1), best(0.5), best(0.95)), ("x", "x", "y"), "{site}");
    }
}

#[test]
fn the_choice_says_why() {
    let nodes =
        [NodeCandidate { has_image: true, ..node("x") }, NodeCandidate { draining: true, ..node("y") }];
    let text = choose(&need("wiki"), &nodes).unwrap().to_string();
    assert!(text.starts_with("x for wiki: first in its order, image there (cost "), "{text}");
    assert!(text.ends_with("; 1 ruled out)"), "{text}");
}

/// How many of `sites` sites go to each of the nodes.
fn shares(nodes: &[NodeCandidate], sites: u32) -> BTreeMap<String, u32> {
    let mut shares = BTreeMap::new();
    for site in 0..sites {
        let site = format!("site{site}");
        let name = choose(&need(&site), nodes).unwrap().best();
        *shares.entry(name.to_owned()).or_default() += 1;
    }
    shares
}

#[test]
fn sites_of_a_dead_node_spread_although_planners_see_the_same() {
    let names: Vec<String> = (0..20).map(|at| format!("n{at}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| node(name)).collect();
    let shares = shares(&nodes, 2000);
    assert_eq!(shares.len(), 20);
    assert!(shares.values().all(|share| (60..=140).contains(share)), "{shares:?}");
}

#[test]
fn a_larger_node_takes_more() {
    let large = NodeCandidate { cpus: 12, memory_bytes: 24 * GIB, memory_free: 23 * GIB, ..node("large") };
    let shares = shares(&[large, node("a"), node("b"), node("c")], 3000);
    assert!((1300..=1700).contains(&shares["large"]), "half of all: {shares:?}");
}

#[test]
fn a_node_that_is_full_of_wakes_is_passed_over() {
    let mut nodes = [node("a"), node("b"), node("c")];
    nodes[0].wakes = 30;
    let shares = shares(&nodes, 300);
    assert!(!shares.contains_key("a"), "{shares:?}");
}

#[test]
fn the_choice_is_the_fallback_while_nothing_is_unusual() {
    let nodes = [node("a"), node("b"), node("c"), node("d")];
    for site in 0..200 {
        let site = format!("site{site}");
        let leaves = SiteDemand { from: Some("a"), ..need(&site) };
        let fallback = fallback(&leaves, &nodes).unwrap();
        let with_image =
            nodes.map(|node| NodeCandidate { has_image: node.name == fallback || node.name == "a", ..node });
        assert_eq!(choose(&leaves, &with_image).unwrap().best(), fallback);
    }
}

proptest! {
    #[test]
    fn a_node_that_comes_or_goes_moves_only_its_own_fallbacks(count in 2usize..20, gone in 0usize..20, site in "[a-z]{1,12}") {
        let gone = gone % count;
        let names: Vec<String> = (0..count).map(|at| format!("n{at}")).collect();
        let nodes: Vec<_> = names.iter().map(|name| node(name)).collect();
        let before = fallback(&need(&site), &nodes).unwrap();
        let mut fewer = nodes.clone();
        fewer.remove(gone);
        let after = fallback(&need(&site), &fewer).unwrap();
        prop_assert!(before == after || before == names[gone]);
        // What changes by the second changes nothing.
        let mut busy = nodes;
        busy.iter_mut().for_each(|node| (node.wakes, node.cpu_used, node.memory_free) = (50, 1.0, 0));
        prop_assert_eq!(fallback(&need(&site), &busy).unwrap(), before);
    }

    #[test]
    fn the_order_of_the_candidates_decides_nothing(count in 1usize..12, site in "[a-z]{1,12}", wakes in prop::collection::vec(0u32..9, 12)) {
        let names: Vec<String> = (0..count).map(|at| format!("n{at}")).collect();
        let mut nodes: Vec<_> = names.iter().zip(&wakes).map(|(name, wakes)| NodeCandidate { wakes: *wakes, ..node(name) }).collect();
        let one = choose(&need(&site), &nodes).unwrap().best().to_owned();
        nodes.reverse();
        let choice = choose(&need(&site), &nodes).unwrap();
        prop_assert_eq!(choice.best(), one);
        prop_assert!(choice.order.len() <= CHOICES_MAX);
        prop_assert!(choice.order.windows(2).all(|pair| pair[0].cost <= pair[1].cost));
    }
}

//! Tables of single steps, and a simulated day of sites whose load comes and goes.

use super::*;

fn at(seconds: u64) -> Moment {
    Moment(1_000_000_000_000 + seconds * 1_000_000_000)
}

fn site(starved: f32, cpus_used: f32) -> SiteLoad<u32, &'static str> {
    SiteLoad {
        site: 7,
        node: "a",
        starved,
        throttled: starved,
        cpus_used,
        wants: cpus_used.max(1.0),
        limit: 1.0,
        limit_base: 1.0,
        limit_max: 4.0,
        in_flight: 0,
        memory_bytes: 1 << 28,
        came: None,
        nodes: vec!["a"],
        nodes_max: 1,
        is_last: false,
        others_used: None,
    }
}

/// One that may run on three nodes, has all that it may have on its own, and is still short.
fn at_its_most(nodes: &[&'static str]) -> SiteLoad<u32, &'static str> {
    SiteLoad { limit: 4.0, wants: 4.0, nodes: nodes.to_vec(), nodes_max: 3, ..site(0.4, 3.9) }
}

fn node(name: &'static str, cpu_used: f32) -> NodeLoad<&'static str> {
    NodeLoad { node: name, cpus: 8, cpu_used, memory_free: 1 << 33, is_open: true, arrivals: 0 }
}

type Small = LoadBalance<u32, &'static str>;

/// The first step within so many seconds of the same load, and after how many it came.
fn first_step(
    balance: &mut Small,
    from: u64,
    seconds: u64,
    load: &SiteLoad<u32, &'static str>,
    nodes: &[NodeLoad<&'static str>],
) -> Option<(u64, BalanceDecision<u32, &'static str>)> {
    (0..seconds).find_map(|second| Some((second, balance.decide_step(at(from + second), load, nodes)?)))
}

#[test]
fn short_site_is_raised_at_once_on_its_own_node() {
    let mut balance = Small::default();
    let (when, decision) =
        first_step(&mut balance, 0, 60, &site(0.4, 0.98), &[node("a", 0.3), node("b", 0.0)]).unwrap();
    assert_eq!((when, decision.step), (0, BalanceStep::Raise(2.0)));
    assert_eq!(
        decision.words,
        "short of CPU 40% of the time at a limit of 1.00 CPUs, and a uses 30% of its own: the limit is raised to 2.00"
    );
    let raised = SiteLoad { limit: 3.0, ..site(0.4, 2.9) };
    assert_eq!(
        first_step(&mut balance, 2, 1, &raised, &[node("a", 0.3)]).unwrap().1.step,
        BalanceStep::Raise(4.0)
    );
}

#[test]
fn a_limit_that_holds_nothing_up_is_not_raised() {
    let mut balance = Small::default();
    let load = SiteLoad { throttled: 0.2, ..site(0.4, 0.2) };
    assert_eq!(first_step(&mut balance, 0, 10, &load, &[node("a", 0.5), node("b", 0.5)]), None);
}

#[test]
fn a_full_node_gives_the_site_away_at_a_quiet_moment() {
    let nodes = [node("a", 0.95), node("b", 0.5), node("c", 0.2)];
    let mut balance = Small::default();
    let busy = SiteLoad { in_flight: 9, ..site(0.4, 0.9) };
    assert_eq!(first_step(&mut balance, 0, 30, &busy, &nodes), None, "there is no quiet moment yet");
    let (_, decision) = first_step(&mut balance, 30, 1, &site(0.4, 0.9), &nodes).unwrap();
    assert_eq!(decision.step, BalanceStep::Move("c"));
    assert!(decision.words.ends_with("moved to c, which uses 20%, at a quiet moment"), "{}", decision.words);

    let mut balance = Small::default();
    let (when, decision) = first_step(&mut balance, 0, 120, &busy, &nodes).unwrap();
    assert_eq!((when, decision.step), (60, BalanceStep::Move("c")), "it does not wait for ever");
}

#[test]
fn nowhere_better_means_no_move() {
    for others in [
        node("b", 0.9),
        NodeLoad { is_open: false, ..node("b", 0.1) },
        NodeLoad { memory_free: 1, ..node("b", 0.1) },
    ] {
        let mut balance = Small::default();
        assert_eq!(first_step(&mut balance, 0, 100, &site(0.4, 0.9), &[node("a", 0.95), others]), None);
    }
    let mut balance = Small::default();
    let at_its_most = SiteLoad { limit: 4.0, ..site(0.4, 3.9) };
    let nodes = [node("a", 0.6), node("b", 0.1)];
    assert_eq!(first_step(&mut balance, 0, 100, &at_its_most, &nodes), None, "it would be as short there");
}

#[test]
fn raised_limit_is_lowered_much_later() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.3), node("b", 0.3)];
    let raised = SiteLoad { limit: 4.0, ..site(0.0, 0.3) };
    let (when, decision) = first_step(&mut balance, 0, 100, &raised, &nodes).unwrap();
    assert_eq!((when, decision.step), (60, BalanceStep::Lower(2.0)));
    let base = site(0.0, 0.1);
    assert_eq!(first_step(&mut balance, 100, 400, &base, &nodes), None, "never below what its record says");
}

#[test]
fn lowered_maximum_lowers_the_limit_at_once() {
    let mut balance = Small::default();
    let load = SiteLoad { limit: 4.0, limit_max: 2.0, ..site(0.5, 3.9) };
    let (when, decision) = first_step(&mut balance, 0, 10, &load, &[node("a", 0.3)]).unwrap();
    assert_eq!((when, decision.step), (0, BalanceStep::Lower(2.0)));
}

#[test]
fn a_site_that_was_moved_rests() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.95), node("b", 0.2)];
    assert!(first_step(&mut balance, 0, 30, &site(0.4, 0.9), &nodes).is_some());
    balance.forget_site(&7);
    // It has come back, and is short again.
    let again = first_step(&mut balance, 60, 2000, &site(0.4, 0.9), &nodes).unwrap();
    assert!(60 + again.0 >= 600, "after {} s", again.0);
}

#[test]
fn a_site_that_came_for_its_load_rests_too() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.95), node("b", 0.2)];
    let mut when = None;
    for second in 0..1000 {
        let load = SiteLoad { came: Some(Duration::from_secs(100 + second)), ..site(0.4, 0.9) };
        if balance.decide_step(at(second), &load, &nodes).is_some() {
            when = Some(second);
            break;
        }
        let left = balance.rests_for(at(second), &7).map(|left| left.as_secs());
        assert_eq!(left, (second < 500).then(|| 500 - second));
    }
    assert_eq!(when, Some(500), "ten minutes after it came");
}

#[test]
fn a_node_that_others_gave_much_to_gets_no_more() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.95), NodeLoad { arrivals: 4, ..node("b", 0.2) }];
    assert_eq!(first_step(&mut balance, 0, 60, &site(0.4, 0.9), &nodes), None);
}

#[test]
fn terms_set_by_an_operator_hold() {
    let nodes = [node("a", 0.95), node("b", 0.2)];
    let second = Duration::from_secs(1);
    let with = |terms: BalanceConfig| {
        let mut balance = Small::default();
        balance.set_terms(terms);
        first_step(&mut balance, 0, 60, &site(0.4, 0.9), &nodes).map(|(when, decision)| (when, decision.step))
    };
    let terms = BalanceConfig::default();
    assert_eq!(with(BalanceConfig { move_after: second, ..terms }), Some((1, BalanceStep::Move("b"))));
    assert_eq!(with(BalanceConfig { busy: 1.0, ..terms }), Some((0, BalanceStep::Raise(2.0))));
    assert_eq!(with(BalanceConfig { short: 0.5, ..terms }), None);
    assert_eq!(with(BalanceConfig { moves_per_minute: 0, ..terms }), None);
    assert_eq!(with(BalanceConfig { target: 0.25, ..terms }), None);
    assert_eq!(with(BalanceConfig { better_by: 0.7, ..terms }), None);
    let mut balance = Small::default();
    balance.set_terms(BalanceConfig { lower_after: second, ..terms });
    let raised = SiteLoad { limit: 4.0, ..site(0.0, 0.3) };
    assert_eq!(first_step(&mut balance, 0, 60, &raised, &nodes).unwrap().0, 1);
}

#[test]
fn a_node_takes_part_in_few_moves_a_minute() {
    let mut balance: LoadBalance<u32, &'static str> = LoadBalance::default();
    let nodes = [node("a", 0.95), node("b", 0.2)];
    let mut times = Vec::new();
    for second in 0..200 {
        for each in 0..20 {
            let load = SiteLoad { site: each, ..site(0.4, 0.9) };
            times.extend(balance.decide_step(at(second), &load, &nodes).map(|_| second));
        }
    }
    assert!(times.len() >= 8, "{times:?}");
    for (index, first) in times.iter().enumerate() {
        let within = times[index..].iter().filter(|time| **time < first + 60).count();
        assert!(within <= BalanceConfig::default().moves_per_minute as usize, "{times:?}");
    }
}

/// A fluid model: a site wants so many CPUs, gets what its limit and its share of the node allow, and is starved for the rest.
struct Model {
    /// For each site: node, limit, wanted.
    sites: Vec<(usize, f32, f32)>,
    moves: Vec<(u64, usize)>,
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

impl Model {
    fn shares(&self) -> [f32; 4] {
        let mut wanted = [0.0; 4];
        self.sites.iter().for_each(|(node, limit, wants)| wanted[*node] += wants.min(*limit));
        wanted
    }

    fn step(&mut self, balance: &mut Small, second: u64) -> f32 {
        let wanted = self.shares();
        let nodes: Vec<_> =
            NAMES.iter().zip(wanted).map(|(name, cpus)| node(name, (cpus / 8.0).min(1.0))).collect();
        let mut worst: f32 = 0.0;
        for index in 0..self.sites.len() {
            let (at_node, limit, wants) = self.sites[index];
            let share = (8.0 / wanted[at_node]).min(1.0);
            let used = wants.min(limit) * share;
            let starved = 1.0 - used / wants.max(0.01);
            worst = worst.max(starved);
            let throttled = 1.0 - wants.min(limit) / wants.max(0.01);
            let own = SiteLoad { site: index as u32, node: NAMES[at_node], ..site(starved, used) };
            let load = SiteLoad { limit, throttled, ..own };
            match balance.decide_step(at(second), &load, &nodes).map(|decision| decision.step) {
                Some(BalanceStep::Raise(cpus) | BalanceStep::Lower(cpus)) => self.sites[index].1 = cpus,
                Some(BalanceStep::Move(to)) => {
                    self.sites[index].0 = NAMES.iter().position(|name| *name == to).unwrap();
                    self.moves.push((second, index));
                }
                Some(BalanceStep::Copy(_) | BalanceStep::Uncopy) => panic!("no record allows several"),
                None => {}
            }
        }
        worst
    }
}

#[test]
fn load_that_fits_is_spread_and_then_left_alone() {
    // All begin on one of four nodes of 8 CPUs, and together want 20.
    let mut model = Model { sites: (0..20).map(|_| (0, 1.0, 1.0)).collect(), moves: Vec::new() };
    let mut balance = Small::default();
    let mut worst = 1.0;
    for second in 0..1800 {
        worst = model.step(&mut balance, second);
    }
    assert!(worst < BalanceConfig::default().short, "somebody is starved for {worst}");
    let last = model.moves.last().unwrap().0;
    assert!(last < 600, "it still moves sites after {last} s: {:?}", model.moves);
    assert!(model.moves.len() <= 20, "{:?}", model.moves);
}

#[test]
fn load_that_comes_and_goes_does_not_make_it_swing() {
    let mut model = Model { sites: (0..16).map(|index| (index % 4, 1.0, 0.5)).collect(), moves: Vec::new() };
    let mut balance = Small::default();
    for second in 0..4 * 3600 {
        // Every two minutes another quarter of the sites wants more than twice its limit.
        let turn = (second / 120 % 4) as usize;
        for (index, each) in model.sites.iter_mut().enumerate() {
            each.2 = if index % 4 == turn { 2.2 } else { 0.5 };
        }
        model.step(&mut balance, second);
    }
    for index in 0..16 {
        let times: Vec<u64> =
            model.moves.iter().filter(|(_, moved)| *moved == index).map(|(at, _)| *at).collect();
        assert!(
            times.windows(2).all(|pair| pair[1] - pair[0] >= BalanceConfig::default().site_rests.as_secs()),
            "{times:?}"
        );
    }
    assert!(model.moves.len() <= 40, "{} moves in four hours", model.moves.len());
}

// === Several nodes for one site ===

#[test]
fn one_more_node_gets_what_no_node_alone_is_better_for() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.6), node("b", 0.3), node("c", 0.2)];
    let (when, decision) = first_step(&mut balance, 0, 100, &at_its_most(&["a"]), &nodes).unwrap();
    assert_eq!((when, decision.step), (15, BalanceStep::Copy("c")));
    assert_eq!(
        decision.words,
        "short of CPU for 15 s at 4.00 CPUs on a, which uses 60% of its own, and no node is better for all of it: c, which uses 20%, gets one, too (2 of 3)"
    );
    // The next one only when what that has changed was measured, and never where it is already.
    let two = at_its_most(&["a", "c"]);
    let (when, decision) = first_step(&mut balance, 16, 100, &two, &nodes).unwrap();
    assert_eq!((when, decision.step), (14, BalanceStep::Copy("b")));
    let three = at_its_most(&["a", "c", "b"]);
    assert_eq!(first_step(&mut balance, 31, 2000, &three, &nodes), None, "its record allows three");
}

#[test]
fn no_node_gets_a_site_it_refuses_or_cannot_fit() {
    let open = |used| [node("a", 0.6), node("b", used)];
    let none = |load: SiteLoad<u32, &'static str>, nodes: [NodeLoad<&'static str>; 2], why: &str| {
        assert_eq!(first_step(&mut Small::default(), 0, 59, &load, &nodes), None, "{why}");
    };
    none(SiteLoad { nodes_max: 1, ..at_its_most(&["a"]) }, open(0.2), "its record does not say so");
    none(at_its_most(&["a"]), open(0.5), "half of it would make that node too busy");
    none(at_its_most(&["a"]), [node("a", 0.6), NodeLoad { is_open: false, ..node("b", 0.1) }], "not open");
    none(at_its_most(&["a"]), [node("a", 0.6), NodeLoad { arrivals: 4, ..node("b", 0.1) }], "no budget");
    let busy = SiteLoad { in_flight: 9, wants: 1.0, ..at_its_most(&["a"]) };
    none(busy, [node("a", 0.95), node("b", 0.1)], "it is moved there at a quiet moment");
}

#[test]
fn while_a_limit_may_be_raised_nothing_else_is_done() {
    let mut balance = Small::default();
    let load = SiteLoad { limit: 1.0, ..at_its_most(&["a"]) };
    let nodes = [node("a", 0.6), node("b", 0.1)];
    for second in 0..60 {
        if let Some(decision) = balance.decide_step(at(second), &load, &nodes) {
            assert_eq!(decision.step, BalanceStep::Raise(2.0));
        }
    }
}

#[test]
fn a_copy_that_came_to_nothing_is_not_tried_again_soon() {
    let mut balance = Small::default();
    let nodes = [node("a", 0.6), node("b", 0.1)];
    let load = at_its_most(&["a"]);
    assert_eq!(first_step(&mut balance, 0, 100, &load, &nodes).unwrap().0, 15);
    assert_eq!(first_step(&mut balance, 16, 5000, &load, &nodes).unwrap().0, 599);
}

#[test]
fn the_last_node_gives_up_what_the_others_can_do_alone() {
    let nodes = [node("a", 0.3), node("b", 0.3)];
    let copy = |others_used, came| SiteLoad {
        nodes: vec!["b", "a"],
        nodes_max: 3,
        is_last: true,
        others_used,
        came: Some(Duration::from_secs(came)),
        ..site(0.0, 0.1)
    };
    let step = |load: &SiteLoad<u32, &'static str>| first_step(&mut Small::default(), 0, 300, load, &nodes);
    let (when, decision) = step(&copy(Some(0.2), 3600)).unwrap();
    assert_eq!((when, decision.step), (60, BalanceStep::Uncopy));
    assert_eq!(decision.words, "its 2 nodes used 0.30 CPUs together for 60 s, little for 1: a gives it up");
    assert_eq!(step(&copy(Some(0.4), 3600)), None, "that would not fit well");
    assert_eq!(step(&copy(None, 3600)), None, "the others do not say what they use");
    assert_eq!(step(&copy(Some(0.2), 30)), None, "it has just come");
    assert_eq!(step(&SiteLoad { is_last: false, ..copy(Some(0.2), 3600) }), None, "the last goes first");
    // A moment of more load, and the minute begins anew.
    let mut balance = Small::default();
    assert_eq!(first_step(&mut balance, 0, 50, &copy(Some(0.2), 3600), &nodes), None);
    assert_eq!(first_step(&mut balance, 50, 1, &copy(Some(0.9), 3600), &nodes), None);
    assert_eq!(first_step(&mut balance, 51, 100, &copy(Some(0.2), 3600), &nodes).unwrap().0, 60);
}

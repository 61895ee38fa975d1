//! Single relocations step by step, and random ones against a store that loses answers.

use proptest::prelude::*;

use super::*;

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000_000)
}

/// For so long others may serve what was committed.
const WAIT: Duration = Duration::from_millis(303);

type Sites = RelocationMachine<u32, u8>;
type Effects = Vec<RelocationEffect<u32, u8>>;

fn new() -> Sites {
    RelocationMachine::new()
}

/// A site that waiter 1 has found silent on node 1 under epoch 4, planned for node 2: the question to the store.
fn asked(sites: &mut Sites, site: u32) -> AskId {
    let mut effects = Vec::new();
    sites.add_waiter(at(0), site, WaiterId(1), Some(4), Some(PlacedAt { node: 1, epoch: 4 }), &mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site, from: Some(1) }]);
    effects.clear();
    sites.note_plan(at(0), &site, PlanResult::Node(2), &mut effects);
    let [RelocationEffect::AskStore { ask, node: 2, from: Some(1), expect: Some(4), .. }] = effects[..]
    else {
        panic!("{effects:?}");
    };
    ask
}

fn served(effects: &Effects) -> Vec<(u64, u8, u64)> {
    let served = effects.iter().filter_map(|effect| match effect {
        RelocationEffect::Serve { waiter, node, epoch, .. } => Some((waiter.0, *node, *epoch)),
        _ => None,
    });
    served.collect()
}

fn refused(effects: &Effects) -> Vec<(u64, PlacementRefusal)> {
    let refused = effects.iter().filter_map(|effect| match effect {
        RelocationEffect::Refuse { waiter, why, .. } => Some((waiter.0, *why)),
        _ => None,
    });
    refused.collect()
}

#[test]
fn a_placement_that_is_newer_than_what_was_seen_is_the_answer() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), Some(4), Some(PlacedAt { node: 3, epoch: 5 }), &mut effects);
    sites.add_waiter(at(0), 7, WaiterId(2), None, Some(PlacedAt { node: 3, epoch: 5 }), &mut effects);
    assert_eq!(served(&effects), [(1, 3, 5), (2, 3, 5)]);
    assert!(sites.is_empty());
}

#[test]
fn all_requests_for_a_site_join_one_relocation() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    for waiter in 2..100 {
        sites.add_waiter(
            at(1),
            7,
            WaiterId(waiter),
            Some(4),
            Some(PlacedAt { node: 1, epoch: 4 }),
            &mut effects,
        );
    }
    assert_eq!(effects, []);
    sites.note_outcome(at(9), &7, ask, CommitOutcome::Committed { at: at(8), wait: WAIT }, &mut effects);
    assert_eq!(served(&effects).len(), 99);
    let committed = Some((at(8), WAIT));
    let is_told = |effect: &RelocationEffect<u32, u8>| matches!(effect, RelocationEffect::Serve { committed: told, .. } if *told == committed);
    assert!(effects.iter().all(is_told));
    assert!(sites.is_empty() && sites.next_at().is_none());
}

#[test]
fn loser_of_a_placement_race_follows_the_winner() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_outcome(
        at(9),
        &7,
        ask,
        CommitOutcome::Conflict(Some(PlacedAt { node: 3, epoch: 5 })),
        &mut effects,
    );
    assert_eq!(served(&effects), [(1, 3, 5)]);
    assert!(sites.is_empty());
}

#[test]
fn unanswered_placement_is_looked_up_before_a_retry() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_outcome(at(9), &7, ask, CommitOutcome::Unknown, &mut effects);
    assert_eq!(effects, []);
    let next = sites.next_at().unwrap();
    sites.tick(next, &mut effects);
    let [RelocationEffect::Look { ask, .. }] = effects[..] else { panic!("{effects:?}") };
    effects.clear();
    // It has not happened yet: the same epoch again, so that only one of both can succeed.
    sites.note_found(next, &7, ask, Ok(Some(PlacedAt { node: 1, epoch: 4 })), &mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site: 7, from: Some(1) }]);
    effects.clear();
    sites.note_plan(next, &7, PlanResult::Node(5), &mut effects);
    let [RelocationEffect::AskStore { ask, expect: Some(4), .. }] = effects[..] else {
        panic!("{effects:?}")
    };
    effects.clear();
    // The first one arrived after all.
    sites.note_outcome(
        next,
        &7,
        ask,
        CommitOutcome::Conflict(Some(PlacedAt { node: 2, epoch: 5 })),
        &mut effects,
    );
    assert_eq!(served(&effects), [(1, 2, 5)]);
}

#[test]
fn an_answer_that_comes_too_late_changes_nothing() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_outcome(at(9), &7, ask, CommitOutcome::Unknown, &mut effects);
    sites.note_outcome(at(9), &7, ask, CommitOutcome::Committed { at: at(9), wait: WAIT }, &mut effects);
    assert_eq!(effects, []);
    assert_eq!(sites.len(), 1);
}

#[test]
fn a_request_with_newer_knowledge_is_not_sent_back() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    // This one has already failed at epoch 5, which another node committed.
    sites.add_waiter(at(1), 7, WaiterId(2), Some(5), Some(PlacedAt { node: 1, epoch: 4 }), &mut effects);
    sites.note_outcome(
        at(9),
        &7,
        ask,
        CommitOutcome::Conflict(Some(PlacedAt { node: 3, epoch: 5 })),
        &mut effects,
    );
    assert_eq!(served(&effects), [(1, 3, 5)]);
    assert!(effects.contains(&RelocationEffect::Plan { site: 7, from: Some(3) }));
}

#[test]
fn request_with_a_newer_epoch_than_the_copy_forces_a_lookup() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), Some(6), Some(PlacedAt { node: 1, epoch: 4 }), &mut effects);
    let [RelocationEffect::Look { ask, .. }] = effects[..] else { panic!("{effects:?}") };
    effects.clear();
    sites.note_found(at(1), &7, ask, Ok(Some(PlacedAt { node: 3, epoch: 6 })), &mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site: 7, from: Some(3) }]);
}

#[test]
fn a_site_dropped_and_made_anew_begins_at_its_new_epoch() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_outcome(
        at(9),
        &7,
        ask,
        CommitOutcome::Conflict(Some(PlacedAt { node: 3, epoch: 1 })),
        &mut effects,
    );
    assert_eq!(served(&effects), [(1, 3, 1)]);
    let ask = asked(&mut sites, 8);
    effects.clear();
    sites.note_outcome(at(9), &8, ask, CommitOutcome::Conflict(None), &mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site: 8, from: None }]);
}

#[test]
fn every_request_ends_though_the_store_never_answers() {
    let mut sites = new();
    asked(&mut sites, 7);
    let mut effects = Vec::new();
    let mut looks = 0;
    while let Some(next) = sites.next_at() {
        assert!(next <= at(0) + WAIT_LONGEST);
        sites.tick(next, &mut effects);
        looks += effects.iter().filter(|effect| matches!(effect, RelocationEffect::Look { .. })).count();
        effects.retain(|effect| matches!(effect, RelocationEffect::Refuse { .. }));
    }
    assert_eq!(refused(&effects), [(1, PlacementRefusal::StoreSilent)]);
    assert!((2..20).contains(&looks), "{looks}");
}

#[test]
fn a_promise_holds_the_commit_until_it_is_over() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_blocked(at(1), &7, ask, MoveBlocked::Promised(at(1500)));
    assert_eq!((effects.len(), sites.next_at()), (0, Some(at(1500))));
    sites.tick(at(1500), &mut effects);
    assert!(matches!(effects[..], [RelocationEffect::AskStore { node: 2, expect: Some(4), .. }]));

    let ask = asked(&mut sites, 8);
    effects.clear();
    sites.note_blocked(at(1), &8, ask, MoveBlocked::NotIntroduced);
    sites.tick(at(100), &mut effects);
    assert!(matches!(effects[..], [RelocationEffect::Look { site: 8, .. }]), "it may have said so by now");
}

#[test]
fn no_node_is_a_refusal() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), None, None, &mut effects);
    sites.note_plan(at(0), &7, PlanResult::Nowhere, &mut effects);
    assert_eq!(refused(&effects), [(1, PlacementRefusal::Nowhere)]);
    assert!(sites.is_empty());
}

#[test]
fn requests_wait_until_a_node_can_take_the_site() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), Some(4), Some(PlacedAt { node: 1, epoch: 4 }), &mut effects);
    effects.clear();
    sites.note_plan(at(0), &7, PlanResult::NotNow, &mut effects);
    assert_eq!(effects, []);
    // By and by it is looked at again, and at once where there is a reason to.
    let next = sites.next_at().expect("it goes on by itself");
    assert!(next.since(at(0)) <= Duration::from_millis(500), "{next:?}");
    sites.tick(next, &mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site: 7, from: Some(1) }]);
    effects.clear();
    sites.note_plan(next, &7, PlanResult::NotNow, &mut effects);
    sites.reconsider(&mut effects);
    assert_eq!(effects, [RelocationEffect::Plan { site: 7, from: Some(1) }]);
    effects.clear();
    sites.note_plan(next, &7, PlanResult::Node(2), &mut effects);
    assert!(matches!(
        effects[..],
        [RelocationEffect::AskStore { node: 2, from: Some(1), expect: Some(4), .. }]
    ));
    // One that asks the store needs no other plan.
    effects.clear();
    sites.reconsider(&mut effects);
    assert_eq!(effects, []);
}

#[test]
fn nobody_waits_longer_for_a_node_to_come_back() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), Some(4), Some(PlacedAt { node: 1, epoch: 4 }), &mut effects);
    let mut last = at(0);
    while refused(&effects).is_empty() {
        if effects.iter().any(|effect| matches!(effect, RelocationEffect::Plan { .. })) {
            effects.clear();
            sites.note_plan(last, &7, PlanResult::NotNow, &mut effects);
        }
        last = sites.next_at().expect("it has an end");
        sites.tick(last, &mut effects);
    }
    assert_eq!((last.since(at(0)), refused(&effects)), (WAIT_LONGEST, vec![(1, PlacementRefusal::Nowhere)]));
    assert!(sites.is_empty());
}

#[test]
fn a_site_whose_node_is_there_after_all_stays_under_its_epoch() {
    let mut sites = new();
    let mut effects = Vec::new();
    let known = Some(PlacedAt { node: 1, epoch: 4 });
    sites.add_waiter(at(0), 7, WaiterId(1), Some(4), known, &mut effects);
    // This one has seen a newer placement, so it is looked up.
    sites.add_waiter(at(0), 7, WaiterId(2), Some(5), known, &mut effects);
    effects.clear();
    sites.note_plan(at(0), &7, PlanResult::Stay, &mut effects);
    assert_eq!(
        effects,
        [RelocationEffect::Serve { waiter: WaiterId(1), site: 7, node: 1, epoch: 4, committed: None }]
    );
    effects.clear();
    sites.tick(sites.next_at().expect("the other one waits"), &mut effects);
    assert!(matches!(effects[..], [RelocationEffect::Look { site: 7, .. }]), "{effects:?}");
}

#[test]
fn a_site_that_never_had_a_node_cannot_stay() {
    let mut sites = new();
    let mut effects = Vec::new();
    sites.add_waiter(at(0), 7, WaiterId(1), None, None, &mut effects);
    effects.clear();
    sites.note_plan(at(0), &7, PlanResult::Stay, &mut effects);
    assert_eq!(refused(&effects), [(1, PlacementRefusal::Nowhere)]);
}

#[test]
fn a_site_that_is_gone_is_not_tried_again() {
    let mut sites = new();
    let ask = asked(&mut sites, 7);
    let mut effects = Vec::new();
    sites.note_outcome(at(9), &7, ask, CommitOutcome::Void, &mut effects);
    assert_eq!(refused(&effects), [(1, PlacementRefusal::Nowhere)]);
    assert!(sites.is_empty());
}

/// A store that does some commits later, or without saying so.
#[derive(Default)]
struct LossyStore {
    sites: BTreeMap<u32, PlacedAt<u8>>,
    delayed: Vec<(u32, u8, Option<u64>)>,
}

impl LossyStore {
    fn at(&self, site: u32) -> Option<PlacedAt<u8>> {
        self.sites.get(&site).copied()
    }

    fn put(&mut self, site: u32, node: u8, expect: Option<u64>) -> bool {
        let is_current = self.at(site).map(|at| at.epoch) == expect;
        if is_current {
            self.sites.insert(site, PlacedAt { node, epoch: expect.map_or(1, |epoch| epoch + 1) });
        }
        is_current
    }

    fn commit(&mut self, roll: u8, now: u64, site: u32, node: u8, expect: Option<u64>) -> CommitOutcome<u8> {
        match roll % 4 {
            3 => {
                self.delayed.push((site, node, expect));
                CommitOutcome::Unknown
            }
            2 => {
                self.put(site, node, expect);
                CommitOutcome::Unknown
            }
            1 => CommitOutcome::NotDone,
            _ if self.put(site, node, expect) => CommitOutcome::Committed { at: at(now), wait: WAIT },
            _ => CommitOutcome::Conflict(self.at(site)),
        }
    }

    /// What was delayed arrives just before or after somebody looks.
    fn look(&mut self, roll: u8, site: u32) -> Option<PlacedAt<u8>> {
        let before = self.at(site);
        if roll.is_multiple_of(2) {
            for (site, node, expect) in std::mem::take(&mut self.delayed) {
                self.put(site, node, expect);
            }
        }
        if roll.is_multiple_of(3) { before } else { self.at(site) }
    }
}

/// Those that are refused when nothing but time goes on.
fn refused_in_the_end(sites: &mut Sites, now: u64) -> Vec<u64> {
    let mut effects = Vec::new();
    let mut rounds = 0;
    while let Some(next) = sites.next_at() {
        sites.tick(next.max(at(now)), &mut effects);
        rounds += 1;
        assert!(rounds < 10_000, "it has no end");
    }
    refused(&effects).into_iter().map(|(waiter, _)| waiter).collect()
}

proptest! {
    /// Three nodes move sites at once through a store that answers late or not at all: epochs go up one by one, no request is lost, and
    /// all end.
    #[test]
    fn epochs_go_up_one_by_one_and_all_requests_end(dice in prop::collection::vec(any::<u8>(), 400)) {
        let mut store = LossyStore::default();
        let mut nodes: Vec<Sites> = (0..3).map(|_| new()).collect();
        let mut open = BTreeSet::new();
        let mut now = 0;
        let mut dice = dice.into_iter();
        let mut waiter = 0;
        for step in 0..4000 {
            let Some(roll) = dice.next().or((step < 3000).then_some(0)) else { break };
            now += u64::from(roll % 7) * 10;
            let index = usize::from(roll) % 3;
            let mut effects = Vec::new();
            if step < 300 && roll % 4 == 0 {
                let site = u32::from(roll / 64);
                let known = store.at(site);
                waiter += 1;
                open.insert(waiter);
                nodes[index].add_waiter(at(now), site, WaiterId(waiter), known.map(|at| at.epoch), known, &mut effects);
            }
            nodes[index].tick(at(now), &mut effects);
            while let Some(effect) = effects.pop() {
                match effect {
                    RelocationEffect::Plan { site, from } => {
                        let node = (0..3).find(|node| Some(*node) != from).expect("there are two others");
                        let plan = match dice.next().unwrap_or(2) % 16 {
                            0 => PlanResult::NotNow,
                            1 => PlanResult::Stay,
                            _ => PlanResult::Node(node),
                        };
                        nodes[index].note_plan(at(now), &site, plan, &mut effects);
                    }
                    RelocationEffect::AskStore { site, ask, node, expect, .. } => {
                        let roll = dice.next().unwrap_or(0);
                        let outcome = store.commit(roll, now, site, node, expect);
                        nodes[index].note_outcome(at(now), &site, ask, outcome, &mut effects);
                    }
                    RelocationEffect::Look { site, ask } => {
                        let found = store.look(dice.next().unwrap_or(0), site);
                        nodes[index].note_found(at(now), &site, ask, Ok(found), &mut effects);
                    }
                    RelocationEffect::Serve { waiter, site, node, epoch, .. } => {
                        prop_assert!(open.remove(&waiter.0), "answered twice");
                        let stored = store.at(site).expect("it was committed");
                        let is_stored = stored.epoch > epoch || stored == PlacedAt { node, epoch };
                        prop_assert!(is_stored);
                    }
                    RelocationEffect::Refuse { waiter, .. } => prop_assert!(open.remove(&waiter.0)),
                }
            }
        }
        for waiter in nodes.iter_mut().flat_map(|sites| refused_in_the_end(sites, now)) {
            prop_assert!(open.remove(&waiter), "answered twice");
        }
        prop_assert!(open.is_empty(), "{open:?} have no end");
    }
}

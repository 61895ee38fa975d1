//! Placements stay in order whatever becomes of etcd's members: what many callers asked and were answered is recorded while
//! members are killed, and then checked for linearizability.
//!
//! Not here: etcd itself (`rig`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::rig::{Etcd, Node, until};
use super::*;

/// One call of `place`.
#[derive(Debug, Clone)]
struct Call {
    /// Its placement; `since_ms` is a number that no other call has.
    wrote: Placement,
    seen: Option<u64>,
    /// Both of one clock, which counts calls' beginnings and ends: if one call ended before another began, it says so.
    began: u64,
    /// None where the outcome is not known: it may have been done at any time after it began, or never.
    ended: Option<(u64, Claim)>,
}

/// Whether there is an order of the calls in which each gets the answer that a register with compare-and-set would give, and
/// that keeps the order of calls of which one ended before the other began. Sites are checked apart, because a history is
/// linearizable if and only if that of each object is.
///
/// A call that succeeds with `seen` writes the epoch after it, so that the register passes through 1, 2, 3, ... and for each
/// epoch one call has written it. So an order of the calls that wrote is forced, and what is left is whether moments can be
/// found: a moment t(e) for each epoch, growing with e, between beginning and end of its writer; and for each call that lost
/// against epoch e, a moment between t(e) and t(e+1), and between its own beginning and end. For that,
///
/// - t(e) is no earlier than its writer's beginning, than t(e-1), and than the beginning of all that lost against e-1;
/// - t(e) is no later than its writer's end, than t(e+1), and than the end of all that lost against e.
///
/// If for each e the latest of the first is before the earliest of the second, t(e) := the latest of the first will do: for a
/// call that lost against e, both t(e) and its beginning are before its end, and both t(e) and its beginning are no later than
/// t(e+1). If for some e it is not, two of these demands contradict each other. A writer whose outcome is not known has no end;
/// if several could have written an epoch, the one that began first demands least.
fn check(calls: &[Call]) -> Result<(), String> {
    let mut sites: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
    for call in calls {
        sites.entry(call.wrote.site.as_str()).or_default().push(call);
    }
    sites.iter().try_for_each(|(site, calls)| check_site(calls).map_err(|why| format!("{site}: {why}")))
}

fn check_site(calls: &[&Call]) -> Result<(), String> {
    let mut observed: BTreeMap<u64, &Placement> = BTreeMap::new();
    let observe = |found: &Placement, by: &Call| -> Result<(), String> {
        let writer = calls.iter().find(|call| call.wrote == *found);
        let could_write = writer.is_some_and(|call| may_have_written(call));
        if !could_write {
            return Err(format!("{by:?} was told of {found:?}, which nobody can have written"));
        }
        Ok(())
    };
    let mut last = 0;
    for call in calls {
        let found = match &call.ended {
            Some((_, Claim::Won)) => &call.wrote,
            Some((_, Claim::Lost(Some(found)))) if Some(found.epoch) == call.seen => {
                return Err(format!("{call:?} lost against what it had seen"));
            }
            Some((_, Claim::Lost(Some(found)))) => found,
            Some((_, Claim::Lost(None) | Claim::Void)) => return Err(format!("{call:?} found nothing")),
            None => continue,
        };
        observe(found, call)?;
        let known = *observed.entry(found.epoch).or_insert(found);
        if known != found {
            return Err(format!("epoch {} is both {known:?} and {found:?}", found.epoch));
        }
        last = last.max(found.epoch);
    }
    let mut earliest = 0;
    let mut bounds = Vec::new();
    for epoch in 1..=last {
        let writer = calls
            .iter()
            .filter(|call| {
                call.wrote.epoch == epoch && observed.get(&epoch).is_none_or(|it| **it == call.wrote)
            })
            .filter(|call| may_have_written(call))
            .min_by_key(|call| call.began)
            .ok_or_else(|| format!("nobody has written epoch {epoch}"))?;
        let lost_before = calls.iter().filter(|call| lost_against(call) == Some(epoch - 1));
        earliest = lost_before.map(|call| call.began).fold(earliest.max(writer.began), u64::max);
        let lost_here = calls.iter().filter(|call| lost_against(call) == Some(epoch));
        let ends = lost_here.chain([writer]).filter_map(|call| call.ended.as_ref()).map(|(ended, _)| *ended);
        bounds.push((epoch, earliest, ends.min().unwrap_or(u64::MAX)));
    }
    let mut latest = u64::MAX;
    for (epoch, earliest, end) in bounds.into_iter().rev() {
        latest = latest.min(end);
        if earliest >= latest {
            return Err(format!("epoch {epoch} was written after {earliest} and before {latest}"));
        }
    }
    Ok(())
}

/// One that lost against a later epoch may have written its own before, and the answer to that was lost with its member. Its
/// end demands nothing then that its loss does not demand already.
fn may_have_written(call: &Call) -> bool {
    match &call.ended {
        None | Some((_, Claim::Won)) => true,
        Some((_, Claim::Lost(Some(found)))) => found.epoch > call.wrote.epoch,
        Some((_, Claim::Lost(None) | Claim::Void)) => false,
    }
}

fn lost_against(call: &Call) -> Option<u64> {
    match &call.ended {
        Some((_, Claim::Lost(Some(found)))) => Some(found.epoch),
        _ => None,
    }
}

// === The checker itself ===

fn call(id: u64, seen: Option<u64>, began: u64, ended: Option<(u64, Claim)>) -> Call {
    let epoch = seen.unwrap_or(0) + 1;
    Call { wrote: Placement { since_ms: id, ..placement("s", "a", epoch) }, seen, began, ended }
}

#[test]
fn the_checker_accepts_what_a_register_could_have_answered() {
    let first = call(1, None, 1, Some((4, Claim::Won)));
    let lost = call(2, None, 2, Some((3, Claim::Lost(Some(first.wrote.clone())))));
    let unknown = call(3, Some(1), 5, None);
    let found = call(4, Some(1), 9, Some((10, Claim::Lost(Some(unknown.wrote.clone())))));
    check(&[first.clone(), lost, unknown.clone(), found]).unwrap();
    // Nobody was told of the second epoch, but the third was built upon it.
    check(&[first.clone(), unknown, call(5, Some(2), 11, Some((12, Claim::Won)))]).unwrap();
    check(&[first, call(6, Some(1), 13, None)]).unwrap();
}

#[test]
fn the_checker_finds_what_no_register_would_have_answered() {
    let first = call(1, None, 1, Some((2, Claim::Won)));
    let second = call(2, Some(1), 3, Some((4, Claim::Won)));
    let lost = |id, seen, began, to: &Call| {
        call(id, seen, began, Some((began + 1, Claim::Lost(Some(to.wrote.clone())))))
    };
    for (wrong, calls) in [
        ("two winners", vec![first.clone(), call(3, None, 5, Some((6, Claim::Won)))]),
        ("an old value after a new one", vec![first.clone(), second.clone(), lost(3, None, 5, &first)]),
        (
            "a new value before it was written",
            vec![first.clone(), second.clone(), lost(3, None, 1, &call(2, Some(1), 3, None))],
        ),
        ("a gap", vec![first.clone(), call(3, Some(5), 5, Some((6, Claim::Won)))]),
        (
            "a value of a loser",
            vec![first.clone(), lost(3, None, 5, &first), lost(4, None, 7, &lost(3, None, 5, &first))],
        ),
        ("lost against what was seen", vec![first.clone(), lost(3, Some(1), 5, &first)]),
        ("an order against time", vec![call(1, None, 5, Some((6, Claim::Won))), second.clone()]),
        ("nothing, after something", vec![first.clone(), call(3, Some(1), 5, Some((6, Claim::Lost(None))))]),
    ] {
        assert!(check(&calls).is_err(), "{wrong}");
    }
}

// === The history ===

const CALLERS: usize = 6;
const SITES: [&str; 3] = ["one", "two", "three"];
/// Between a member's end and its return, and from then to the next one's end.
const CALLS_BETWEEN: u64 = 60;
const ROUNDS: usize = 9;

#[derive(Default)]
struct Recorder {
    clock: AtomicU64,
    calls: Mutex<Vec<Call>>,
    unknown: AtomicU64,
    over: AtomicBool,
}

impl Recorder {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    async fn place(&self, store: &ClusterStore, wrote: Placement, seen: Option<u64>) -> Option<Claim> {
        let began = self.tick();
        let answer = store.place(wrote.clone(), seen, None).await.ok();
        let ended = answer.clone().map(|claim| (self.tick(), claim));
        if ended.is_none() {
            self.unknown.fetch_add(1, Ordering::SeqCst);
        }
        self.calls.lock().push(Call { wrote, seen, began, ended });
        answer
    }

    fn done(&self) -> u64 {
        self.calls.lock().iter().filter(|call| call.ended.is_some()).count() as u64
    }
}

async fn caller(recorder: Arc<Recorder>, store: Arc<ClusterStore>, at: usize) {
    let mut known: BTreeMap<&str, u64> = BTreeMap::new();
    let mut turn = at;
    while !recorder.over.load(Ordering::SeqCst) {
        turn += 1;
        let site = SITES[turn * 7 / 3 % SITES.len()];
        let seen = known.get(site).copied();
        let epoch = seen.unwrap_or(0) + 1;
        let since_ms = (turn * CALLERS + at) as u64;
        let wrote = Placement { since_ms, ..placement(site, &format!("n{at}"), epoch) };
        match recorder.place(&store, wrote, seen).await {
            Some(Claim::Won) => drop(known.insert(site, epoch)),
            Some(Claim::Lost(Some(found))) => drop(known.insert(site, found.epoch)),
            Some(Claim::Lost(None) | Claim::Void) | None => {}
        }
    }
}

#[test]
fn placements_are_linearizable_while_members_are_killed() {
    let etcd = Etcd::start(3);
    let cluster = etcd.cluster();
    // Each asks another member first.
    let nodes: Vec<Node> = (0..3)
        .map(|n| {
            let mut options = etcd.options(&cluster);
            options.endpoints.rotate_left(n);
            Node::open(&options)
        })
        .collect();
    with_sites(&nodes[0], &SITES);
    let recorder = Arc::new(Recorder::default());
    for at in 0..CALLERS {
        let node = format!("n{at}");
        etcd.runtime.block_on(nodes[0].store.join(record(&node, &node))).unwrap();
    }
    let callers: Vec<_> = (0..CALLERS)
        .map(|at| etcd.runtime.spawn(caller(recorder.clone(), nodes[at % 3].store.clone(), at)))
        .collect();
    let some_more = || {
        let until_then = recorder.done() + CALLS_BETWEEN;
        until("more placements", || recorder.done() >= until_then);
    };
    for round in 0..ROUNDS {
        some_more();
        let (one, other) = (round % 3, (round + 1) % 3);
        etcd.kill(one);
        if round % 4 == 3 {
            // Without a quorum nobody knows what became of what was asked.
            let before = recorder.unknown.load(Ordering::SeqCst);
            etcd.kill(other);
            until("calls without an answer", || recorder.unknown.load(Ordering::SeqCst) > before);
            etcd.revive(other);
        }
        some_more();
        etcd.revive(one);
    }
    some_more();
    recorder.over.store(true, Ordering::SeqCst);
    callers.into_iter().for_each(|caller| etcd.runtime.block_on(caller).unwrap());
    // What stands there at the end is part of the history: no placement has epoch 0, so this only looks.
    for (n, site) in SITES.into_iter().enumerate() {
        let looked = Placement { since_ms: n as u64, ..placement(site, "n0", 1) };
        let found = etcd.runtime.block_on(recorder.place(&nodes[n].store, looked, Some(0)));
        let Some(Claim::Lost(Some(found))) = found else { panic!("{found:?}") };
        for node in &nodes {
            node.until("the last placement", |store| store.placement(site).unwrap().as_ref() == Some(&found));
        }
    }
    let calls = recorder.calls.lock();
    check(&calls).unwrap();
    let won = calls.iter().filter(|call| matches!(call.ended, Some((_, Claim::Won)))).count();
    let unknown = calls.iter().filter(|call| call.ended.is_none()).count();
    assert!(won > 100 && unknown > 0, "{won} of {} won, {unknown} are unknown", calls.len());
    nodes.iter().for_each(Node::is_fed);
}

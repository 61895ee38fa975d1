//! Placements and marks stay in order whatever becomes of etcd's members: what many callers asked and were answered is recorded while
//! members are killed, and then checked for linearizability.
//!
//! Not here: etcd itself (`rig`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::rig::{Etcd, Node, until};
use super::*;

/// One call of `place_on`.
#[derive(Debug, Clone)]
struct Call {
    /// Its placement; `since_ms` is a number that no other call has.
    wrote: Placement,
    seen: Option<u64>,
    /// The node that it takes the site from, and the mark against it that it counts on.
    from: Option<String>,
    mark: Option<u64>,
    /// Both of one clock, which counts calls' beginnings and ends: if one call ended before another began, it says so.
    began: u64,
    /// None where the outcome is not known: it may have been done at any time after it began, or never.
    ended: Option<(u64, PlacementOutcome)>,
}

/// One call of `mark_suspect` or `confirm`: a node was marked, or has looked, and a mark that stood was taken away.
#[derive(Debug, Clone)]
struct Look {
    node: String,
    is_doubt: bool,
    began: u64,
    ended: Option<(u64, Found)>,
}

#[derive(Debug, Clone, Copy)]
struct Found {
    /// Of the mark that stands, or of the store without one.
    revision: u64,
    /// Where a node has looked: when it lost a site last.
    left_at: u64,
}

/// Whether there is an order of the calls in which each gets the answer that registers with compare-and-set would give, and
/// that keeps the order of calls of which one ended before the other began.
///
/// A call that places a site with `seen` writes the epoch after it, so that the site's register passes through 1, 2, 3, ... and for
/// each epoch one call has written it. A node's mark is a register, too: it is absent, then a mark stands, then it is absent again, and
/// so on; revisions of the store say which mark a call was told of, and between which two of them a node has looked. So the order of what
/// each register passes through is forced, and what is left is whether moments can be found: a moment t(e) for each state, growing with e,
/// between beginning and end of its writer; and for each call that saw state e, a moment between t(e) and t(e+1), and between its own
/// beginning and end. For that,
///
/// - t(e) is no earlier than its writer's beginning, than t(e-1), and than the beginning of all that saw e-1;
/// - t(e) is no later than its writer's end, than t(e+1), and than the end of all that saw e;
/// - of a placement that counts on a mark, the moment is between those of the mark and of its end, and that of the placement which
///   it follows is before the mark's.
///
/// The last ties registers together, so moments have an order and not a number; if it has no circle, t(e) := the latest of what it may
/// be no earlier than will do, if that is before the earliest of what it may be no later than: for a call that saw e, both t(e) and its
/// beginning are before its end, and both are no later than t(e+1). If for some e it is not, two of these demands contradict each other.
/// A writer whose outcome is not known has no end; if several could have written a state, the one that began first demands least.
fn check(calls: &[Call], looks: &[Look]) -> Result<(), String> {
    let mut moments = Moments::default();
    let mut sites: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
    for call in calls {
        sites.entry(call.wrote.site.as_str()).or_default().push(call);
    }
    for (site, calls) in &sites {
        add_site(&mut moments, site, calls).map_err(|why| format!("{site}: {why}"))?;
    }
    let mut nodes: BTreeMap<&str, Vec<&Look>> = BTreeMap::new();
    for look in looks {
        nodes.entry(&look.node).or_default().push(look);
    }
    for (node, looks) in &nodes {
        let marks = add_marks(&mut moments, node, looks).map_err(|why| format!("{node}: {why}"))?;
        for call in calls.iter().filter(|call| call.from.as_deref() == Some(node)) {
            tie(&mut moments, node, &marks, call)?;
        }
        losses_are_seen(calls, looks).map_err(|why| format!("{node}: {why}"))?;
    }
    moments.can_be()
}

/// Which register, and which of its states.
type State = (String, u64);

/// The moments at which states begin: between which two of the clock, and which is before which.
#[derive(Debug, Default)]
struct Moments {
    within: BTreeMap<State, (u64, u64)>,
    before: Vec<(State, State)>,
}

impl Moments {
    /// The states of a register in order, each with the earliest beginning of who may have written it, the earliest end of all who have
    /// written or seen it, and the latest beginning of all who have seen it.
    fn register(&mut self, name: &str, states: impl Iterator<Item = (u64, [u64; 3])>) {
        let mut last: Option<(u64, u64)> = None;
        for (state, [began, end, seen]) in states {
            let at = (name.to_owned(), state);
            if let Some((last, seen)) = last {
                self.before.push(((name.to_owned(), last), at.clone()));
                self.within.insert(at, (began.max(seen), end));
            } else {
                self.within.insert(at, (began, end));
            }
            last = Some((state, seen));
        }
    }

    /// Takes one after the other that nothing is before any more, with the latest of what it may be no earlier than.
    fn can_be(self) -> Result<(), String> {
        let Self { mut within, before } = self;
        let mut after: BTreeMap<State, Vec<State>> = BTreeMap::new();
        let mut held: BTreeMap<State, usize> = BTreeMap::new();
        for (one, other) in before {
            if within.contains_key(&one) && within.contains_key(&other) {
                *held.entry(other.clone()).or_default() += 1;
                after.entry(one).or_default().push(other);
            }
        }
        let mut free: Vec<State> = within.keys().filter(|state| !held.contains_key(state)).cloned().collect();
        while let Some(state) = free.pop() {
            let (earliest, end) = within.remove(&state).expect("each is taken once");
            if earliest >= end {
                return Err(format!("{state:?} began after {earliest} and before {end}"));
            }
            for next in after.remove(&state).unwrap_or_default() {
                let (begin, _) = within.get_mut(&next).expect("it is still held");
                *begin = (*begin).max(earliest);
                let count = held.get_mut(&next).expect("it is still held");
                *count -= 1;
                if *count == 0 {
                    free.push(next);
                }
            }
        }
        if within.is_empty() { Ok(()) } else { Err(format!("each before the other: {within:?}")) }
    }
}

fn add_site(moments: &mut Moments, site: &str, calls: &[&Call]) -> Result<(), String> {
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
            Some((_, PlacementOutcome::Won)) => &call.wrote,
            Some((_, PlacementOutcome::Lost(Some(found)))) if Some(found.epoch) == call.seen => {
                return Err(format!("{call:?} lost against what it had seen"));
            }
            Some((_, PlacementOutcome::Lost(Some(found)))) => found,
            Some((_, PlacementOutcome::Otherwise)) if call.mark.is_some() => continue,
            Some((
                _,
                PlacementOutcome::Lost(None) | PlacementOutcome::Void | PlacementOutcome::Otherwise,
            )) => {
                return Err(format!("{call:?} found nothing"));
            }
            None => continue,
        };
        observe(found, call)?;
        let known = *observed.entry(found.epoch).or_insert(found);
        if known != found {
            return Err(format!("epoch {} is both {known:?} and {found:?}", found.epoch));
        }
        last = last.max(found.epoch);
    }
    let mut states = Vec::new();
    for epoch in 1..=last {
        let writer = calls
            .iter()
            .filter(|call| {
                call.wrote.epoch == epoch && observed.get(&epoch).is_none_or(|it| **it == call.wrote)
            })
            .filter(|call| may_have_written(call))
            .min_by_key(|call| call.began)
            .ok_or_else(|| format!("nobody has written epoch {epoch}"))?;
        let saw = || calls.iter().filter(|call| has_seen(call) == Some(epoch));
        let ends = saw().chain([writer]).filter_map(|call| call.ended.as_ref()).map(|(ended, _)| *ended);
        let seen = saw().map(|call| call.began).max().unwrap_or(0);
        states.push((epoch, [writer.began, ends.min().unwrap_or(u64::MAX), seen]));
    }
    moments.register(site, states.into_iter());
    Ok(())
}

/// The revisions of a node's marks in order: mark number n is state 2 n, and state 2 n + 1 is that it was taken away.
fn add_marks(moments: &mut Moments, node: &str, looks: &[&Look]) -> Result<Vec<u64>, String> {
    let found = |look: &Look| look.ended.map(|(_, found)| found.revision);
    let doubts = || looks.iter().filter(|look| look.is_doubt);
    let marks: BTreeSet<u64> = doubts().filter_map(|look| found(look)).collect();
    let marks: Vec<u64> = marks.into_iter().collect();
    let saw = |look: &Look| -> Option<u64> {
        let revision = found(look)?;
        let number = marks.partition_point(|mark| *mark <= revision) as u64;
        if look.is_doubt { Some(2 * number) } else { Some(2 * number + 1) }
    };
    if let Some(look) =
        looks.iter().find(|look| !look.is_doubt && found(look).is_some_and(|it| marks.contains(&it)))
    {
        return Err(format!("{look:?} has found no mark where one was made"));
    }
    let mut states = Vec::new();
    for state in 1..=2 * marks.len() as u64 + 1 {
        let is_mark = state % 2 == 0;
        let writers = looks.iter().filter(|look| look.is_doubt == is_mark);
        // Who was told of a later state may have written this one, too: the answer to that was lost, and it asked again.
        let writers = writers.filter(|look| look.ended.is_none() || saw(look) >= Some(state));
        let seen = || looks.iter().filter(|look| saw(look) == Some(state));
        // Before the first mark nobody had to do anything.
        let began = if state == 1 { Some(0) } else { writers.map(|look| look.began).min() };
        let end = seen().filter_map(|look| look.ended).map(|(ended, _)| ended).min().unwrap_or(u64::MAX);
        let began = match began {
            Some(began) => began,
            // It stands to this day.
            None if state == 2 * marks.len() as u64 + 1 => break,
            None => {
                return Err(format!("nobody has taken away a mark before {:?}", marks[state as usize / 2]));
            }
        };
        states.push((state, [began, end, seen().map(|look| look.began).max().unwrap_or(0)]));
    }
    moments.register(node, states.into_iter());
    Ok(marks)
}

/// A placement that counts on a mark was written while that stood, and what it follows before.
fn tie(moments: &mut Moments, node: &str, marks: &[u64], call: &Call) -> Result<(), String> {
    let (Some(mark), Some((_, PlacementOutcome::Won))) = (call.mark, &call.ended) else { return Ok(()) };
    let number = marks.iter().position(|known| *known == mark);
    let number = number.ok_or_else(|| format!("{call:?} counts on a mark that nobody made"))? as u64 + 1;
    let site = call.wrote.site.to_string();
    let epoch = call.wrote.epoch;
    let [before, after] = [epoch - 1, epoch].map(|epoch| (site.clone(), epoch));
    let [made, ended] = [2 * number, 2 * number + 1].map(|state| (node.to_owned(), state));
    moments.before.extend([(before, made.clone()), (made, after.clone()), (after, ended)]);
    Ok(())
}

/// What a node is told of its losses never goes back, and has in it all that was taken from it between two looks.
fn losses_are_seen(calls: &[Call], looks: &[&Look]) -> Result<(), String> {
    let looked = || looks.iter().filter(|look| !look.is_doubt).filter_map(|look| Some((look, look.ended?)));
    for (one, (ended, first)) in looked() {
        for (other, (_, second)) in looked().filter(|(other, _)| ended < other.began) {
            let is_lost = |call: &&Call| {
                let is_won = |(end, claim): &(u64, PlacementOutcome)| {
                    *end < other.began && *claim == PlacementOutcome::Won
                };
                call.from.as_ref() == Some(&one.node)
                    && ended < call.began
                    && call.ended.as_ref().is_some_and(is_won)
            };
            let least =
                if calls.iter().any(|call| is_lost(&call)) { first.revision + 1 } else { first.left_at };
            if second.left_at < least || second.revision < first.revision {
                return Err(format!("{other:?} knows less than {one:?}, or not what was taken between them"));
            }
        }
    }
    Ok(())
}

/// One that lost against a later epoch may have written its own before, and the answer to that was lost with its member. Its
/// end demands nothing then that its loss does not demand already.
fn may_have_written(call: &Call) -> bool {
    match &call.ended {
        None | Some((_, PlacementOutcome::Won)) => true,
        Some((_, PlacementOutcome::Lost(Some(found)))) => found.epoch > call.wrote.epoch,
        Some((_, PlacementOutcome::Lost(None) | PlacementOutcome::Void | PlacementOutcome::Otherwise)) => {
            false
        }
    }
}

/// The epoch that stood there when it was not written.
fn has_seen(call: &Call) -> Option<u64> {
    match &call.ended {
        Some((_, PlacementOutcome::Lost(Some(found)))) => Some(found.epoch),
        Some((_, PlacementOutcome::Otherwise)) => call.seen,
        _ => None,
    }
}

// === The checker itself ===

fn call(id: u64, seen: Option<u64>, began: u64, ended: Option<(u64, PlacementOutcome)>) -> Call {
    let epoch = seen.unwrap_or(0) + 1;
    let wrote = Placement { since_ms: id, ..placement("s", "a", epoch) };
    Call { wrote, seen, from: None, mark: None, began, ended }
}

/// The same, from node `a`, counting on this mark.
fn marked(id: u64, seen: u64, began: u64, mark: u64, claim: PlacementOutcome) -> Call {
    let from = Some("a".into());
    let mark = Some(mark);
    Call { from, mark, ..call(id, Some(seen), began, Some((began + 1, claim))) }
}

fn doubt(began: u64, mark: u64) -> Look {
    let found = Found { revision: mark, left_at: 0 };
    Look { node: "a".into(), is_doubt: true, began, ended: Some((began + 1, found)) }
}

fn confirm(began: u64, revision: u64, left_at: u64) -> Look {
    let found = Found { revision, left_at };
    Look { node: "a".into(), is_doubt: false, began, ended: Some((began + 1, found)) }
}

#[test]
fn the_checker_accepts_what_a_register_could_have_answered() {
    let first = call(1, None, 1, Some((4, PlacementOutcome::Won)));
    let lost = call(2, None, 2, Some((3, PlacementOutcome::Lost(Some(first.wrote.clone())))));
    let unknown = call(3, Some(1), 5, None);
    let found = call(4, Some(1), 9, Some((10, PlacementOutcome::Lost(Some(unknown.wrote.clone())))));
    check(&[first.clone(), lost, unknown.clone(), found], &[]).unwrap();
    // Nobody was told of the second epoch, but the third was built upon it.
    check(&[first.clone(), unknown, call(5, Some(2), 11, Some((12, PlacementOutcome::Won)))], &[]).unwrap();
    check(&[first.clone(), call(6, Some(1), 13, None)], &[]).unwrap();
    // A site is taken by a mark, and by the next one after the node has looked; the first does not count any more then.
    let looks = [confirm(3, 2, 0), doubt(5, 10), confirm(9, 14, 12), doubt(11, 20), confirm(17, 30, 25)];
    let taken = [
        marked(7, 1, 7, 10, PlacementOutcome::Won),
        marked(8, 2, 13, 10, PlacementOutcome::Otherwise),
        marked(9, 2, 15, 20, PlacementOutcome::Won),
    ];
    check(&[[first].as_slice(), &taken].concat(), &looks).unwrap();
    // Who looks takes a mark away, the answer is lost with its member, and where it asks again there is the next mark.
    let twice = Look { began: 5, ..confirm(12, 30, 0) };
    check(&[], &[doubt(3, 10), twice, doubt(9, 20)]).unwrap();
}

#[test]
fn the_checker_finds_what_no_register_would_have_answered() {
    let first = call(1, None, 1, Some((2, PlacementOutcome::Won)));
    let second = call(2, Some(1), 3, Some((4, PlacementOutcome::Won)));
    let lost = |id, seen, began, to: &Call| {
        call(id, seen, began, Some((began + 1, PlacementOutcome::Lost(Some(to.wrote.clone())))))
    };
    for (wrong, calls) in [
        ("two winners", vec![first.clone(), call(3, None, 5, Some((6, PlacementOutcome::Won)))]),
        ("an old value after a new one", vec![first.clone(), second.clone(), lost(3, None, 5, &first)]),
        (
            "a new value before it was written",
            vec![first.clone(), second.clone(), lost(3, None, 1, &call(2, Some(1), 3, None))],
        ),
        ("a gap", vec![first.clone(), call(3, Some(5), 5, Some((6, PlacementOutcome::Won)))]),
        (
            "a value of a loser",
            vec![first.clone(), lost(3, None, 5, &first), lost(4, None, 7, &lost(3, None, 5, &first))],
        ),
        ("lost against what was seen", vec![first.clone(), lost(3, Some(1), 5, &first)]),
        ("an order against time", vec![call(1, None, 5, Some((6, PlacementOutcome::Won))), second.clone()]),
        (
            "nothing, after something",
            vec![first.clone(), call(3, Some(1), 5, Some((6, PlacementOutcome::Lost(None))))],
        ),
    ] {
        assert!(check(&calls, &[]).is_err(), "{wrong}");
    }
    let won = |id, seen, began, mark| marked(id, seen, began, mark, PlacementOutcome::Won);
    for (wrong, calls, looks) in [
        ("by a mark that was taken away", vec![won(2, 1, 9, 10)], vec![doubt(5, 10), confirm(7, 12, 0)]),
        ("by a mark of later", vec![won(2, 1, 3, 10)], vec![doubt(5, 10)]),
        ("by a mark that nobody made", vec![won(2, 1, 9, 11)], vec![doubt(5, 10)]),
        ("twice by one mark", vec![won(2, 1, 9, 10), won(3, 2, 11, 10)], vec![doubt(5, 10)]),
        ("a mark after the next", vec![], vec![doubt(5, 10), confirm(7, 12, 0), doubt(9, 20), doubt(11, 10)]),
        ("two marks at once", vec![], vec![doubt(5, 10), doubt(7, 20)]),
        (
            "two marks at once, and a look after both",
            vec![],
            vec![doubt(5, 10), doubt(7, 20), confirm(9, 30, 0)],
        ),
        ("a look that goes by a mark", vec![], vec![doubt(5, 10), confirm(7, 10, 0), doubt(9, 10)]),
        ("a mark that was back", vec![], vec![doubt(5, 10), confirm(7, 12, 0), doubt(9, 10)]),
        (
            "a loss that is not told",
            vec![won(2, 1, 9, 10)],
            vec![confirm(3, 2, 0), doubt(5, 10), confirm(11, 20, 0)],
        ),
        ("a look of before", vec![], vec![confirm(3, 9, 7), confirm(5, 9, 6)]),
    ] {
        let calls = [[first.clone()].as_slice(), &calls].concat();
        assert!(check(&calls, &looks).is_err(), "{wrong}");
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
    looks: Mutex<Vec<Look>>,
    unknown: AtomicU64,
    over: AtomicBool,
}

impl Recorder {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    async fn place(
        &self,
        store: &ClusterStore,
        wrote: Placement,
        seen: Option<u64>,
        by: Option<(&str, u64)>,
    ) -> Option<PlacementOutcome> {
        let began = self.tick();
        let from = by.map(|(from, _)| name(from));
        let mark = by.map(|(_, mark)| mark);
        let basis = PlacementBasis { mark, ..PlacementBasis::default() };
        let answer = store.place_on(wrote.clone(), seen, from.as_ref(), basis).await.ok();
        let ended = answer.clone().map(|claim| (self.tick(), claim));
        if ended.is_none() {
            self.unknown.fetch_add(1, Ordering::SeqCst);
        }
        let from = from.map(|from| from.to_string());
        self.calls.lock().push(Call { wrote, seen, from, mark, began, ended });
        answer
    }

    async fn doubt(&self, store: &ClusterStore, node: &str) -> Option<u64> {
        let began = self.tick();
        let mark = store.mark_suspect(&record(node, node), &name("n0")).await.ok();
        let mark = mark.map(|mark| mark.expect("its record stays as it is"));
        let ended = mark.map(|revision| (self.tick(), Found { revision, left_at: 0 }));
        self.looks.lock().push(Look { node: node.into(), is_doubt: true, began, ended });
        mark
    }

    async fn confirm(&self, store: &ClusterStore, node: &str) {
        let began = self.tick();
        let ended = match store.confirm(&name(node), node, PATIENCE).await {
            Ok(RecordOwner::Ours { revision, left_at, .. }) => {
                Some((self.tick(), Found { revision, left_at }))
            }
            Ok(other) => panic!("{other:?}: its record stays as it is"),
            Err(_) => None,
        };
        self.looks.lock().push(Look { node: node.into(), is_doubt: false, began, ended });
    }

    fn done(&self) -> u64 {
        self.calls.lock().iter().filter(|call| call.ended.is_some()).count() as u64
    }
}

/// Places sites on its own node: what another one has it marks first, every other time. Its own node looks now and then.
async fn caller(recorder: Arc<Recorder>, store: Arc<ClusterStore>, at: usize) {
    let own = format!("n{at}");
    let mut known: BTreeMap<&str, (u64, String)> = BTreeMap::new();
    let mut turn = at;
    while !recorder.over.load(Ordering::SeqCst) {
        turn += 1;
        if turn.is_multiple_of(4) {
            recorder.confirm(&store, &own).await;
        }
        let site = SITES[turn * 7 / 3 % SITES.len()];
        let (seen, holder) = known.get(site).cloned().unzip();
        let epoch = seen.unwrap_or(0) + 1;
        let since_ms = (turn * CALLERS + at) as u64;
        let wrote = Placement { since_ms, ..placement(site, &own, epoch) };
        let mark = match holder.as_ref().filter(|_| turn.is_multiple_of(2)) {
            Some(holder) => recorder.doubt(&store, holder).await,
            None => None,
        };
        let claimed = recorder.place(&store, wrote, seen, holder.as_deref().zip(mark)).await;
        match claimed {
            Some(PlacementOutcome::Won) => drop(known.insert(site, (epoch, own.clone()))),
            Some(PlacementOutcome::Lost(Some(found))) => {
                drop(known.insert(site, (found.epoch, found.node.to_string())))
            }
            Some(PlacementOutcome::Lost(None) | PlacementOutcome::Void | PlacementOutcome::Otherwise)
            | None => {}
        }
    }
}

#[test]
fn placements_and_marks_stay_linearizable_under_kills() {
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
        let one = round % 3;
        let other = (round + 1) % 3;
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
        let found = etcd.runtime.block_on(recorder.place(&nodes[n].store, looked, Some(0), None));
        let Some(PlacementOutcome::Lost(Some(found))) = found else { panic!("{found:?}") };
        for node in &nodes {
            node.until("the last placement", |store| store.placement(site).unwrap().as_ref() == Some(&found));
        }
    }
    let calls = recorder.calls.lock();
    let looks = recorder.looks.lock();
    check(&calls, &looks).unwrap();
    let won = |is_marked| {
        let is_it = |call: &&Call| {
            call.mark.is_some() == is_marked && matches!(call.ended, Some((_, PlacementOutcome::Won)))
        };
        calls.iter().filter(is_it).count()
    };
    let unknown = calls.iter().filter(|call| call.ended.is_none()).count();
    let plain = won(false);
    let marked = won(true);
    assert!(
        plain > 50 && marked > 20 && unknown > 0,
        "{plain} and {marked} of {} won, {unknown} unknown",
        calls.len()
    );
    nodes.iter().for_each(Node::is_fed);
}

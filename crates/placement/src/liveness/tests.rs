//! Tables of single spells, and properties over random ones.

use proptest::prelude::*;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(ms: u64) -> Moment {
    // Not 0: a machine that has just been switched on is no special case.
    Moment(1_000_000_000 + ms * 1_000_000)
}

fn sent(ask: ProbePlan) -> (PeerProbe, Moment) {
    match ask {
        ProbePlan::Send { probe, until } => (probe, until),
        other => panic!("{other:?} instead of a probe"),
    }
}

/// A peer that has answered `count` probes within `rtt` each, the last one long before `now`.
fn measured(rtt: u64, count: u64) -> (PeerState, u64) {
    let mut peer = PeerState::default();
    let mut now = 0;
    for _ in 0..count {
        let (probe, _) = sent(peer.ask(at(now)));
        peer.answered(at(now + rtt), probe, at(now));
        now += rtt + 1000;
    }
    (peer, now)
}

#[test]
fn a_node_just_heard_from_is_not_asked() {
    let mut peer = PeerState::default();
    peer.heard(at(0));
    assert_eq!(peer.ask(at(4)), ProbePlan::Fresh);
    assert!(matches!(peer.ask(at(5)), ProbePlan::Send { .. }));
}

#[test]
fn many_requests_share_one_probe() {
    let mut peer = PeerState::default();
    let (probe, until) = sent(peer.ask(at(0)));
    assert_eq!(until, at(100), "nothing is measured, so it waits the longest");
    for now in 1..100 {
        assert_eq!(peer.ask(at(now)), ProbePlan::Shared { probe, until });
    }
    assert_eq!(peer.verdict(probe), ProbeResult::Pending);
    peer.answered(at(99), probe, at(0));
    assert_eq!(peer.verdict(probe), ProbeResult::Answers);
}

#[test]
fn the_bound_follows_the_measured_way() {
    // Round trip, answers, bound at least and at most.
    let table = [
        (0, 50, 20, 20),
        (1, 50, 20, 20),
        (20, 1, 65, 65),
        (20, 50, 24, 26),
        (60, 50, 64, 66),
        (90, 50, 94, 100),
    ];
    for (rtt, count, least, most) in table {
        let (peer, now) = measured(rtt, count);
        let bound = peer.bound(at(now));
        assert!(bound >= ms(least) && bound <= ms(most), "{rtt} ms, {count} times: {bound:?}");
        assert_eq!(peer.again(at(now)), bound / 2, "{rtt} ms, {count} times");
    }
    assert_eq!(PeerState::default().again(at(0)), BOUND_MAX / 2, "nothing is measured");
}

#[test]
fn the_operators_bound_is_only_made_shorter() {
    assert_eq!(PeerState::new(ms(40)).bound(at(0)), ms(40));
    assert_eq!(PeerState::new(ms(5000)).bound(at(0)), BOUND_MAX);
    let mut peer = PeerState::new(ms(10));
    let (probe, _) = sent(peer.ask(at(0)));
    peer.answered(at(9), probe, at(0));
    assert_eq!(peer.bound(at(9)), ms(10), "it may be below the usual shortest one");
}

#[test]
fn three_datagrams_leave_within_the_bound() {
    for (rtt, count) in [(0, 0), (1, 20), (30, 20), (80, 20)] {
        let (mut peer, start) = measured(rtt, count);
        let (_, until) = sent(peer.ask(at(start)));
        let mut last = at(start);
        let mut times = 1;
        while let Some(next) = peer.resend_at() {
            assert!(next >= last && next + ms(rtt) <= until, "{rtt} ms: {times} datagrams");
            peer.resent(next);
            last = next;
            times += 1;
        }
        assert_eq!(times, DATAGRAMS_MAX);
    }
}

#[test]
fn an_answered_probe_sends_no_more_datagrams() {
    let mut peer = PeerState::default();
    let (probe, _) = sent(peer.ask(at(0)));
    assert!(peer.resend_at().is_some());
    peer.answered(at(1), probe, at(0));
    assert_eq!(peer.resend_at(), None);
    assert_eq!(peer.expired(at(500)), None);
}

#[test]
fn a_silent_node_is_not_asked_twice() {
    let mut peer = PeerState::default();
    let (probe, until) = sent(peer.ask(at(0)));
    assert_eq!(peer.expired(at(99)), None);
    assert_eq!(peer.expired(until), Some(probe));
    assert_eq!(peer.expired(until), None, "it is told once");
    assert_eq!(peer.verdict(probe), ProbeResult::Silent);
    assert_eq!(peer.known(at(101)), Some(ProbeResult::Silent));
    // Whoever comes now need not wait.
    let ProbePlan::Shared { probe: same, until } = peer.ask(at(349)) else { panic!("it was asked again") };
    assert!(same == probe && until <= at(349));
    // What is known gets old, and then somebody waits once more.
    assert!(matches!(peer.ask(at(350)), ProbePlan::Send { .. }));
    // A planner has other nodes to choose from, for longer.
    assert_eq!(peer.known(at(2099)), Some(ProbeResult::Silent));
    assert_eq!(peer.known(at(2100)), None);
}

#[test]
fn of_a_node_that_stays_silent_few_requests_wait() {
    let mut peer = PeerState::default();
    let mut probes = 0;
    for now in 0..60_000 {
        peer.expired(at(now));
        probes += u32::from(matches!(peer.ask(at(now)), ProbePlan::Send { .. }));
    }
    assert!((25..35).contains(&probes), "{probes} probes in a minute");
    // Once heard from, it begins anew.
    peer.heard(at(60_000));
    let (_, until) = sent(peer.ask(at(61_000)));
    peer.expired(until);
    assert!(matches!(peer.ask(until + ms(249)), ProbePlan::Shared { .. }));
    assert!(matches!(peer.ask(until + ms(250)), ProbePlan::Send { .. }));
}

#[test]
fn a_late_answer_takes_the_verdict_back_and_widens_the_bound() {
    let (mut peer, start) = measured(1, 50);
    let before = peer.bound(at(start));
    let (probe, until) = sent(peer.ask(at(start)));
    assert_eq!(peer.expired(until), Some(probe));
    assert!(!peer.take_return(), "nothing was heard yet");
    peer.answered(at(start + 40), probe, at(start));
    assert_eq!(peer.verdict(probe), ProbeResult::Answers);
    assert_eq!(peer.known(at(start + 40)), None);
    assert!(peer.take_return());
    assert!(!peer.take_return(), "that is said once");
    assert_eq!(peer.ask(at(start + 41)), ProbePlan::Fresh);
    assert_eq!(peer.false_alarms(), 1);
    assert!(peer.bound(at(start + 40)) >= before * 2);
    // The second and third datagram of the same probe are answered as well: one alarm all the same.
    peer.answered(at(start + 41), probe, at(start + 7));
    assert_eq!(peer.false_alarms(), 1);
    // In a minute of quick answers it is as it was.
    let mut now = start + 2000;
    for _ in 0..60 {
        let (probe, _) = sent(peer.ask(at(now)));
        peer.answered(at(now + 1), probe, at(now));
        now += 1000;
    }
    assert_eq!(peer.bound(at(now)), before);
}

#[test]
fn an_answer_to_an_older_probe_counts_against_that_one() {
    let mut peer = PeerState::default();
    let (first, until) = sent(peer.ask(at(0)));
    peer.expired(until);
    let (second, _) = sent(peer.ask(at(1000)));
    peer.answered(at(1010), first, at(0));
    assert_eq!(peer.verdict(first), ProbeResult::Answers);
    assert_eq!(peer.verdict(second), ProbeResult::Answers, "it was heard from meanwhile");
    assert_eq!(peer.false_alarms(), 1);
}

#[test]
fn traffic_is_as_good_as_an_answer() {
    let mut peer = PeerState::default();
    let (probe, until) = sent(peer.ask(at(0)));
    peer.heard(at(50));
    assert_eq!(peer.verdict(probe), ProbeResult::Answers);
    assert_eq!(peer.expired(until), None);
    assert_eq!(peer.round_trip(), None, "nobody knows what it was in answer to");

    let (probe, until) = sent(peer.ask(at(1000)));
    peer.expired(until);
    peer.heard(at(1200));
    assert_eq!(peer.verdict(probe), ProbeResult::Answers);
    assert_eq!(peer.false_alarms(), 1);
}

#[test]
fn a_refusal_is_no_silence_and_soon_asked_again() {
    let mut peer = PeerState::default();
    let (probe, _) = sent(peer.ask(at(0)));
    peer.refused(at(1), probe);
    assert_eq!(peer.verdict(probe), ProbeResult::Refuses);
    assert_eq!(peer.known(at(2)), Some(ProbeResult::Refuses));
    assert!(matches!(peer.ask(at(100)), ProbePlan::Shared { probe: same, .. } if same == probe));
    let (second, _) = sent(peer.ask(at(101)));
    // A late refusal of the first one says nothing about the second.
    peer.refused(at(102), probe);
    assert_eq!(peer.verdict(second), ProbeResult::Pending);
    peer.heard(at(103));
    assert_eq!(peer.false_alarms(), 0, "it was right to say so");
}

#[test]
fn node_that_was_paused_itself_accuses_nobody() {
    let mut peer = PeerState::default();
    let (probe, until) = sent(peer.ask(at(0)));
    // The edge stood still for a second; the answer lies in its socket.
    assert_eq!(peer.expired(at(1100)), None);
    assert_eq!(peer.until(), Some(at(1120)));
    assert!(peer.until() > Some(until));
    assert_eq!(peer.verdict(probe), ProbeResult::Pending);
    // It is given longer once, not for ever.
    assert_eq!(peer.expired(at(9000)), Some(probe));
}

#[test]
fn a_probe_that_nobody_waited_for_says_nothing() {
    let mut peer = PeerState::default();
    let (first, _) = sent(peer.ask(at(0)));
    let (second, _) = sent(peer.ask(at(500)));
    assert_ne!(first, second);
    assert_eq!(peer.verdict(first), ProbeResult::Answers);
    assert_eq!(peer.verdict(second), ProbeResult::Pending);
}

#[derive(Debug, Clone)]
enum Step {
    Ask,
    Heard,
    /// The answer to a datagram of this many milliseconds ago.
    Answered(u64),
    Refused,
    Expired,
    Resent,
}

fn step() -> impl Strategy<Value = (u64, Step)> {
    let step = prop_oneof![
        4 => Just(Step::Ask),
        1 => Just(Step::Heard),
        2 => (0u64..400).prop_map(Step::Answered),
        1 => Just(Step::Refused),
        4 => Just(Step::Expired),
        1 => Just(Step::Resent),
    ];
    (0u64..150, step)
}

proptest! {
    #[test]
    fn a_verdict_always_comes_and_in_time(max in 5u64..200, steps in prop::collection::vec(step(), 1..200)) {
        let mut peer = PeerState::new(ms(max));
        let mut now = 1000;
        let mut last = None;
        for (pause, step) in steps {
            now += pause;
            match step {
                Step::Ask => match peer.ask(at(now)) {
                    ProbePlan::Fresh => prop_assert!(peer.last_heard().is_some_and(|heard| at(now).since(heard) < FRESH)),
                    ProbePlan::Send { probe, until } => {
                        prop_assert!(last.is_none_or(|last| probe > last), "numbers are not used again");
                        prop_assert!(until.since(at(now)) <= ms(max).min(BOUND_MAX));
                        last = Some(probe);
                    }
                    ProbePlan::Shared { probe, until } => {
                        let is_over = until <= at(now);
                        prop_assert_eq!(is_over, peer.verdict(probe) != ProbeResult::Pending);
                        prop_assert!(peer.verdict(probe) != ProbeResult::Answers, "then it would not be asked for");
                    }
                },
                Step::Heard => peer.heard(at(now)),
                Step::Answered(ago) => {
                    if let Some(probe) = last {
                        peer.answered(at(now), probe, at(now - ago.min(now)));
                        prop_assert_eq!(peer.verdict(probe), if peer.verdict(probe) == ProbeResult::Refuses { ProbeResult::Refuses } else { ProbeResult::Answers });
                        prop_assert_eq!(peer.ask(at(now)), ProbePlan::Fresh);
                    }
                }
                Step::Refused => {
                    if let Some(probe) = last {
                        peer.refused(at(now), probe);
                        prop_assert!(peer.verdict(probe) != ProbeResult::Pending);
                    }
                }
                Step::Expired => {
                    if let Some(probe) = peer.expired(at(now)) {
                        prop_assert_eq!(peer.verdict(probe), ProbeResult::Silent);
                    }
                    prop_assert!(peer.until().is_none_or(|until| until > at(now)));
                }
                Step::Resent => {
                    if peer.resend_at().is_some() {
                        peer.resent(at(now));
                    }
                }
            }
            prop_assert!(peer.bound(at(now)) <= ms(max).min(BOUND_MAX));
            prop_assert!(peer.resend_at().is_none_or(|next| Some(next) < peer.until()));
        }
        // Whatever went before, two looks later it is decided.
        if let Some(until) = peer.until() {
            peer.expired(until);
            prop_assert_eq!(peer.until(), None);
        }
    }

    #[test]
    fn quick_answers_are_never_taken_for_silence(rtts in prop::collection::vec(0u64..15, 1..300)) {
        let mut peer = PeerState::default();
        let mut now = 0;
        for rtt in rtts {
            let (probe, until) = sent(peer.ask(at(now)));
            prop_assert!(until > at(now + rtt));
            peer.answered(at(now + rtt), probe, at(now));
            now += rtt + 100;
        }
        prop_assert_eq!(peer.false_alarms(), 0);
    }
}

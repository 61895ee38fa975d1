//! What one member may do and owes, by what it was told and when. Many of them under faults: `nagaya-sim`.

use super::*;

const TERM: Duration = Duration::from_millis(300);

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000_000)
}

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

fn ids(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// Node `b`, which became a member at revision 20.
fn record(knows: u64) -> NodeRecord {
    NodeRecord {
        name: name("b"),
        id: "b1".into(),
        peer: "127.0.0.1:1".into(),
        draining: false,
        cpus: 1,
        memory_bytes: 1,
        version: String::new(),
        knows,
        fence_ms: 300,
        heeds_marks: true,
    }
}

fn word(revision: u64) -> Word {
    Word { left_at: 0, since: 10, revision }
}

/// Node `a` with member `b`, since 0 ms.
fn started() -> Trust {
    let mut trust = Trust::new(at(0), name("a"), TERM);
    trust.look(30, ids(&["b1"]));
    trust
}

fn confirm(trust: &mut Trust, ms: u64, revision: u64) {
    let id = trust.sending(at(ms));
    trust.confirmed(id, at(ms), word(revision));
}

/// One that was started long ago and was confirmed last at 11,000 ms.
fn settled() -> Trust {
    let mut trust = started();
    confirm(&mut trust, 11_000, 30);
    trust
}

#[test]
fn the_vouches_of_all_members_give_authority_from_when_they_were_asked() {
    let mut trust = settled();
    trust.look(31, ids(&["b1", "c1"]));
    assert_eq!(trust.ask(at(11_100)), None, "the store has just confirmed");
    let round = trust.ask(at(11_200)).unwrap();
    trust.vouched(round.0, "b1", 5);
    assert_eq!((trust.by(at(11_299)), trust.by(at(11_300))), (By::Store, By::Nobody));
    trust.vouched(round.0, "c1", 31);
    assert_eq!((trust.by(at(11_300)), trust.by(at(13_199))), (By::Members, By::Members));
    assert_eq!(trust.by(at(13_200)), By::Nobody);
}

#[test]
fn who_does_not_know_of_the_last_move_gets_nothing_until_it_does() {
    let mut trust = settled();
    let round = trust.ask(at(11_200)).unwrap();
    trust.vouched(round.0, "b1", 32);
    assert_eq!(trust.by(at(11_300)), By::Nobody);
    trust.look(32, ids(&["b1"]));
    assert_eq!(trust.by(at(11_300)), By::Members);
}

#[test]
fn vouches_of_an_earlier_round_do_not_count() {
    let mut trust = settled();
    let first = trust.ask(at(11_200)).unwrap();
    assert_eq!(trust.ask(at(11_250)), None, "too soon");
    let second = trust.ask(at(11_300)).unwrap();
    trust.vouched(first.0, "b1", 0);
    assert_eq!(trust.by(at(11_301)), By::Nobody);
    trust.vouched(second.0, "b1", 0);
    assert_eq!(trust.by(at(11_301)), By::Members);
    assert_eq!(trust.ask(at(11_700)), None, "it has vouches for a while");
    assert!(trust.ask(at(11_800)).is_some());
}

#[test]
fn a_node_that_was_started_without_its_store_neither_asks_nor_vouches() {
    let mut trust = Trust::new(at(0), name("a"), TERM);
    trust.look(0, ids(&[]));
    assert_eq!(trust.ask(at(60_000)), None, "its records may be old");
    assert_eq!(trust.vouch(at(60_000), &name("b")), None, "it may have moved sites");
    assert_eq!(trust.by(at(60_000)), By::Nobody);
}

#[test]
fn what_was_sent_before_the_start_is_waited_for_before_anybody_is_vouched_for() {
    let mut trust = started();
    confirm(&mut trust, 9_999, 30);
    assert_eq!(trust.vouch(at(10_500), &name("b")), None);
    assert!(!trust.can_vouch());
    confirm(&mut trust, 10_600, 40);
    assert!(trust.can_vouch());
    assert_eq!(trust.vouch(at(10_650), &name("b")), None, "the store is there: it decides");
    assert_eq!(trust.vouch(at(10_800), &name("b")), Some(Vouch { moved: 40 }));
}

#[test]
fn a_promise_is_kept_and_then_is_over() {
    let mut trust = settled();
    assert!(trust.vouch(at(11_200), &name("b")).is_some());
    confirm(&mut trust, 12_000, 41);
    assert!(matches!(trust.begin(at(12_001), &name("b"), Some(&record(10))), Err(NotNow::Promised(_))));
    assert!(matches!(trust.begin(at(12_001), &name("b"), None), Err(NotNow::Promised(_))), "removed or not");
    confirm(&mut trust, 13_250, 41);
    assert!(trust.begin(at(13_251), &name("b"), Some(&record(10))).is_ok());
}

#[test]
fn nothing_is_taken_without_the_store_or_in_the_first_moments() {
    let mut trust = started();
    assert_eq!(trust.begin(at(1), &name("b"), Some(&record(10))), Err(NotNow::NoStore));
    confirm(&mut trust, 100, 30);
    assert!(matches!(trust.begin(at(101), &name("b"), Some(&record(10))), Err(NotNow::Promised(_))));
    confirm(&mut trust, 2_050, 30);
    assert!(trust.begin(at(2_060), &name("b"), Some(&record(10))).is_ok());
    assert_eq!(trust.begin(at(2_201), &name("b"), Some(&record(10))), Err(NotNow::NoStore));
}

#[test]
fn a_node_is_robbed_only_by_members_that_it_has_said_it_knows() {
    let mut trust = settled();
    assert_eq!(trust.begin(at(11_001), &name("b"), Some(&record(0))), Err(NotNow::NotIntroduced));
    assert_eq!(trust.begin(at(11_001), &name("b"), Some(&record(9))), Err(NotNow::NotIntroduced));
    assert!(trust.begin(at(11_001), &name("b"), Some(&record(10))).is_ok());
    // It knew a member of this name that had joined before.
    let id = trust.sending(at(11_010));
    trust.confirmed(id, at(11_010), Word { since: 50, ..word(51) });
    assert_eq!(trust.begin(at(11_011), &name("b"), Some(&record(10))), Err(NotNow::NotIntroduced));
    assert!(trust.begin(at(11_011), &name("b"), None).is_ok(), "an operator has removed it");
}

#[test]
fn a_new_member_is_told_only_when_what_was_announced_before_is_over() {
    let mut trust = settled();
    assert_eq!(trust.to_say(at(11_001)), Some(30), "once after each start");
    trust.said(30);
    assert_eq!(trust.to_say(at(11_002)), Some(30), "who is known may have become a member just after");
    trust.look(31, ids(&["b1"]));
    trust.said(31);
    assert_eq!(trust.to_say(at(11_002)), None);
    let round = trust.ask(at(11_200)).unwrap();
    trust.vouched(round.0, "b1", 0);
    trust.look(35, ids(&["b1", "c1"]));
    assert_eq!(trust.by(at(11_300)), By::Nobody, "the new one has not vouched");
    trust.look(36, ids(&["b1", "c1"]));
    assert_eq!(trust.to_say(at(13_199)), None);
    assert_eq!(trust.to_say(at(13_200)), Some(36));
    trust.said(34);
    assert_eq!(trust.to_say(at(13_200)), Some(36), "that was before the new one");
    trust.said(35);
    assert_eq!(trust.to_say(at(13_200)), Some(36), "that may have been, too");
    trust.said(36);
    assert_eq!(trust.to_say(at(13_200)), None);
    trust.look(37, ids(&["b1"]));
    assert_eq!(trust.to_say(at(13_200)), None, "who has left need not be told");
    trust.look(38, ids(&["d1"]));
    assert_eq!(trust.to_say(at(13_300)), Some(38), "what the store gives is no reason to wait");
}

#[test]
fn while_a_change_may_still_happen_its_node_is_not_vouched_for() {
    let mut trust = settled();
    let answered = trust.begin(at(11_001), &name("b"), Some(&record(10))).unwrap();
    let unanswered = trust.begin(at(11_002), &name("b"), Some(&record(10))).unwrap();
    trust.ended(at(11_010), answered, true);
    trust.ended(at(11_010), unanswered, false);
    confirm(&mut trust, 11_100, 60);
    assert_eq!(trust.vouch(at(11_500), &name("b")), None, "one of two is not known");
    confirm(&mut trust, 21_000, 70);
    assert_eq!(trust.vouch(at(21_200), &name("b")), None);
    confirm(&mut trust, 21_300, 80);
    assert_eq!(trust.vouch(at(21_500), &name("b")), Some(Vouch { moved: 80 }));
}

#[test]
fn a_node_alone_needs_nobody_and_takes_nothing_from_itself_meanwhile() {
    let mut trust = Trust::new(at(0), name("a"), TERM);
    trust.look(30, ids(&[]));
    confirm(&mut trust, 11_000, 30);
    assert!(trust.ask(at(11_200)).is_some());
    assert_eq!(trust.by(at(13_000)), By::Members);
    confirm(&mut trust, 12_000, 30);
    assert!(matches!(trust.begin(at(12_001), &name("a"), None), Err(NotNow::Promised(_))));
    trust.lost();
    assert_eq!(trust.by(at(12_002)), By::Nobody);
}

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

fn word(revision: u64) -> StoreReply {
    StoreReply { left_at: 0, since: 10, revision }
}

/// Node `a` with member `b`, since 0 ms.
fn started() -> LeaseManager {
    let mut trust = LeaseManager::new(at(0), name("a"), TERM);
    trust.update_members(30, ids(&["b1"]));
    trust
}

fn confirm(trust: &mut LeaseManager, ms: u64, revision: u64) {
    let id = trust.begin_read(at(ms));
    trust.note_confirmed(id, at(ms), word(revision));
}

/// One that was started long ago and was confirmed last at 11,000 ms.
fn settled() -> LeaseManager {
    let mut trust = started();
    confirm(&mut trust, 11_000, 30);
    trust
}

#[test]
fn vouches_of_all_members_hold_from_when_they_were_asked() {
    let mut trust = settled();
    trust.update_members(31, ids(&["b1", "c1"]));
    assert_eq!(trust.begin_vouch_round(at(11_100)), None, "the store has just confirmed");
    let round = trust.begin_vouch_round(at(11_200)).unwrap();
    trust.add_vouch(round.0, "b1", 5);
    assert_eq!(
        (trust.granted_by(at(11_299)), trust.granted_by(at(11_300))),
        (LeaseSource::Store, LeaseSource::Nobody)
    );
    trust.add_vouch(round.0, "c1", 31);
    assert_eq!(
        (trust.granted_by(at(11_300)), trust.granted_by(at(13_199))),
        (LeaseSource::Members, LeaseSource::Members)
    );
    assert_eq!(trust.granted_by(at(13_200)), LeaseSource::Nobody);
}

#[test]
fn a_member_that_missed_the_last_move_gives_no_vouch() {
    let mut trust = settled();
    let round = trust.begin_vouch_round(at(11_200)).unwrap();
    trust.add_vouch(round.0, "b1", 32);
    assert_eq!(trust.granted_by(at(11_300)), LeaseSource::Nobody);
    trust.update_members(32, ids(&["b1"]));
    assert_eq!(trust.granted_by(at(11_300)), LeaseSource::Members);
}

#[test]
fn vouches_of_an_earlier_round_do_not_count() {
    let mut trust = settled();
    let first = trust.begin_vouch_round(at(11_200)).unwrap();
    assert_eq!(trust.begin_vouch_round(at(11_250)), None, "too soon");
    let second = trust.begin_vouch_round(at(11_300)).unwrap();
    trust.add_vouch(first.0, "b1", 0);
    assert_eq!(trust.granted_by(at(11_301)), LeaseSource::Nobody);
    trust.add_vouch(second.0, "b1", 0);
    assert_eq!(trust.granted_by(at(11_301)), LeaseSource::Members);
    assert_eq!(trust.begin_vouch_round(at(11_700)), None, "it has vouches for a while");
    assert!(trust.begin_vouch_round(at(11_800)).is_some());
}

#[test]
fn a_node_started_without_its_store_asks_and_vouches_for_none() {
    let mut trust = LeaseManager::new(at(0), name("a"), TERM);
    trust.update_members(0, ids(&[]));
    assert_eq!(trust.begin_vouch_round(at(60_000)), None, "its records may be old");
    assert_eq!(trust.vouch(at(60_000), &name("b")), None, "it may have moved sites");
    assert_eq!(trust.granted_by(at(60_000)), LeaseSource::Nobody);
}

#[test]
fn changes_sent_before_a_start_end_before_any_vouch() {
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
    assert!(matches!(
        trust.begin_takeover(at(12_001), &name("b"), Some(&record(10))),
        Err(TakeoverError::Promised(_))
    ));
    assert!(
        matches!(trust.begin_takeover(at(12_001), &name("b"), None), Err(TakeoverError::Promised(_))),
        "removed or not"
    );
    confirm(&mut trust, 13_250, 41);
    assert!(trust.begin_takeover(at(13_251), &name("b"), Some(&record(10))).is_ok());
}

#[test]
fn nothing_is_taken_without_the_store_or_in_the_first_moments() {
    let mut trust = started();
    assert_eq!(trust.begin_takeover(at(1), &name("b"), Some(&record(10))), Err(TakeoverError::NoStore));
    confirm(&mut trust, 100, 30);
    assert!(matches!(
        trust.begin_takeover(at(101), &name("b"), Some(&record(10))),
        Err(TakeoverError::Promised(_))
    ));
    confirm(&mut trust, 2_050, 30);
    assert!(trust.begin_takeover(at(2_060), &name("b"), Some(&record(10))).is_ok());
    assert_eq!(trust.begin_takeover(at(2_201), &name("b"), Some(&record(10))), Err(TakeoverError::NoStore));
}

#[test]
fn a_node_is_robbed_only_by_members_that_it_has_said_it_knows() {
    let mut trust = settled();
    assert_eq!(
        trust.begin_takeover(at(11_001), &name("b"), Some(&record(0))),
        Err(TakeoverError::NotIntroduced)
    );
    assert_eq!(
        trust.begin_takeover(at(11_001), &name("b"), Some(&record(9))),
        Err(TakeoverError::NotIntroduced)
    );
    assert!(trust.begin_takeover(at(11_001), &name("b"), Some(&record(10))).is_ok());
    // It knew a member of this name that had joined before.
    let id = trust.begin_read(at(11_010));
    trust.note_confirmed(id, at(11_010), StoreReply { since: 50, ..word(51) });
    assert_eq!(
        trust.begin_takeover(at(11_011), &name("b"), Some(&record(10))),
        Err(TakeoverError::NotIntroduced)
    );
    assert!(trust.begin_takeover(at(11_011), &name("b"), None).is_ok(), "an operator has removed it");
}

#[test]
fn a_new_member_is_introduced_after_old_promises_are_over() {
    let mut trust = settled();
    assert_eq!(trust.revision_to_introduce(at(11_001)), Some(30), "once after each start");
    trust.note_introduced(30);
    assert_eq!(
        trust.revision_to_introduce(at(11_002)),
        Some(30),
        "who is known may have become a member just after"
    );
    trust.update_members(31, ids(&["b1"]));
    trust.note_introduced(31);
    assert_eq!(trust.revision_to_introduce(at(11_002)), None);
    let round = trust.begin_vouch_round(at(11_200)).unwrap();
    trust.add_vouch(round.0, "b1", 0);
    trust.update_members(35, ids(&["b1", "c1"]));
    assert_eq!(trust.granted_by(at(11_300)), LeaseSource::Nobody, "the new one has not vouched");
    trust.update_members(36, ids(&["b1", "c1"]));
    assert_eq!(trust.revision_to_introduce(at(13_199)), None);
    assert_eq!(trust.revision_to_introduce(at(13_200)), Some(36));
    trust.note_introduced(34);
    assert_eq!(trust.revision_to_introduce(at(13_200)), Some(36), "that was before the new one");
    trust.note_introduced(35);
    assert_eq!(trust.revision_to_introduce(at(13_200)), Some(36), "that may have been, too");
    trust.note_introduced(36);
    assert_eq!(trust.revision_to_introduce(at(13_200)), None);
    trust.update_members(37, ids(&["b1"]));
    assert_eq!(trust.revision_to_introduce(at(13_200)), None, "who has left need not be told");
    trust.update_members(38, ids(&["d1"]));
    assert_eq!(
        trust.revision_to_introduce(at(13_300)),
        Some(38),
        "what the store gives is no reason to wait"
    );
}

#[test]
fn while_a_change_may_still_happen_its_node_is_not_vouched_for() {
    let mut trust = settled();
    let answered = trust.begin_takeover(at(11_001), &name("b"), Some(&record(10))).unwrap();
    let unanswered = trust.begin_takeover(at(11_002), &name("b"), Some(&record(10))).unwrap();
    trust.end_takeover(at(11_010), answered, true);
    trust.end_takeover(at(11_010), unanswered, false);
    confirm(&mut trust, 11_100, 60);
    assert_eq!(trust.vouch(at(11_500), &name("b")), None, "one of two is not known");
    confirm(&mut trust, 21_000, 70);
    assert_eq!(trust.vouch(at(21_200), &name("b")), None);
    confirm(&mut trust, 21_300, 80);
    assert_eq!(trust.vouch(at(21_500), &name("b")), Some(Vouch { moved: 80 }));
}

#[test]
fn a_node_alone_needs_nobody_and_takes_nothing_from_itself() {
    let mut trust = LeaseManager::new(at(0), name("a"), TERM);
    trust.update_members(30, ids(&[]));
    confirm(&mut trust, 11_000, 30);
    assert!(trust.begin_vouch_round(at(11_200)).is_some());
    assert_eq!(trust.granted_by(at(13_000)), LeaseSource::Members);
    confirm(&mut trust, 12_000, 30);
    assert!(matches!(trust.begin_takeover(at(12_001), &name("a"), None), Err(TakeoverError::Promised(_))));
    trust.note_removed();
    assert_eq!(trust.granted_by(at(12_002)), LeaseSource::Nobody);
}

//! The steps of the argument, one by one. All of them together, under faults: `nagaya-sim`.

use proptest::prelude::*;

use super::*;

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000_000)
}

fn holder() -> LeaseHolder<u8> {
    let mut holder = LeaseHolder::new(TERM, VOUCH_TERM, 10);
    holder.members(BTreeSet::from([2, 3]));
    holder
}

/// A member that was started long ago and knows node 1, which knows it.
fn voucher() -> VouchPromises<u8> {
    let mut voucher = VouchPromises::new(Moment(0), TERM, VOUCH_TERM);
    voucher.quiet_until = Moment(0);
    voucher.note_synced(5);
    voucher.note_introduced(1);
    voucher
}

#[test]
fn authority_counts_from_when_the_read_was_sent() {
    let mut holder = holder();
    assert!(!holder.may_serve(at(0)));
    let read = holder.begin_read(at(0));
    // The answer took 200 ms; it says what was the case at the earliest when the read was sent.
    holder.note_confirmed(read, 10);
    assert_eq!(holder.lease_end(), at(300));
    assert!(holder.may_serve(at(299)) && !holder.may_serve(at(300)));
}

#[test]
fn a_copy_that_lags_gives_no_authority() {
    let mut holder = holder();
    let read = holder.begin_read(at(0));
    holder.note_confirmed(read, 12);
    assert!(!holder.may_serve(at(1)), "something has happened at 11 or 12 that it does not know");
    holder.applied(11);
    assert!(!holder.may_serve(at(1)));
    holder.applied(12);
    assert!(holder.may_serve(at(1)));
}

#[test]
fn a_read_confirms_once_and_answers_may_come_in_any_order() {
    let mut holder = holder();
    let first = holder.begin_read(at(0));
    let second = holder.begin_read(at(75));
    holder.note_confirmed(second, 10);
    assert_eq!(holder.lease_end(), at(375));
    holder.note_confirmed(first, 10);
    assert_eq!(holder.lease_end(), at(375), "it never becomes less");
    holder.note_confirmed(RenewId(99), 10);
    assert_eq!(holder.lease_end(), at(375));
}

#[test]
fn a_removed_node_gets_no_lease_from_reads_under_way() {
    let mut holder = holder();
    let first = holder.begin_read(at(0));
    let second = holder.begin_read(at(10));
    holder.note_confirmed(first, 10);
    holder.note_lost();
    assert!(!holder.may_serve(at(11)));
    holder.note_confirmed(second, 10);
    assert!(!holder.may_serve(at(12)));
    assert!(!holder.wants_vouches(at(12)));
    holder.note_joined();
    let third = holder.begin_read(at(20));
    holder.note_confirmed(third, 10);
    assert!(holder.may_serve(at(21)));
}

#[test]
fn the_longer_wait_of_node_and_predecessors_counts() {
    let short = TERM / 3;
    let long = TERM * 3;
    let mut ages = RevisionAges::default();
    assert_eq!(ages.remaining_wait(at(0), Some(long), max_elapsed(short)), (max_elapsed(long), None));
    assert_eq!(ages.remaining_wait(at(0), None, Duration::ZERO), (Duration::ZERO, None), "it was given up");
    // How old the placement is is not known: it may have been made just now.
    assert_eq!(ages.remaining_wait(at(0), Some(short), max_elapsed(long)), (max_elapsed(long), None));
    assert_eq!(ages.remaining_wait(at(0), None, max_elapsed(long)), (max_elapsed(long), None));
    // What stood there for so long was.
    ages.note_revision(at(0), 7);
    ages.note_revision(at(100), 8);
    ages.note_revision(at(500), 9);
    assert_eq!(ages.remaining_wait(at(904), Some(short), max_elapsed(long)), (max_elapsed(long), None));
    assert_eq!(ages.remaining_wait(at(910), Some(short), max_elapsed(long)), (max_elapsed(short), Some(7)));
    assert_eq!(ages.remaining_wait(at(1_410), None, max_elapsed(long)), (Duration::ZERO, Some(9)));
}

#[test]
fn ages_are_kept_for_as_long_as_they_are_of_use() {
    let mut ages = RevisionAges::default();
    (0..100_000).step_by(10).for_each(|ms| ages.note_revision(at(ms), ms));
    assert!(ages.read.len() < 50, "{}", ages.read.len());
    let longest = max_elapsed(TERM_MAX);
    let (_, revision) = ages.remaining_wait(at(100_000), None, longest);
    assert!(revision.is_some_and(|revision| revision > 89_000 && revision < 90_000), "{revision:?}");
}

#[test]
fn all_others_must_vouch() {
    let mut holder = holder();
    let (round, asked) = holder.begin_round(at(0));
    assert_eq!(asked, BTreeSet::from([2, 3]));
    holder.add_vouch(round, &2, Vouch { moved: 0 });
    holder.add_vouch(round, &2, Vouch { moved: 0 });
    assert!(!holder.may_serve(at(1)));
    holder.add_vouch(round, &3, Vouch { moved: 7 });
    assert_eq!(holder.lease_end(), at(2000));
    // Vouches of an earlier round do not count for a later one.
    let (later, _) = holder.begin_round(at(500));
    holder.add_vouch(round, &2, Vouch { moved: 0 });
    holder.add_vouch(later, &3, Vouch { moved: 0 });
    assert_eq!(holder.lease_end(), at(2000));
}

#[test]
fn vouches_do_not_help_a_node_unaware_of_a_move() {
    let mut holder = holder();
    let (round, _) = holder.begin_round(at(0));
    holder.add_vouch(round, &2, Vouch { moved: 0 });
    holder.add_vouch(round, &3, Vouch { moved: 12 });
    assert!(!holder.may_serve(at(1)));
    holder.applied(12);
    assert!(holder.may_serve(at(1)));
}

#[test]
fn a_new_member_ends_what_the_others_vouched_for() {
    let mut holder = holder();
    let (round, _) = holder.begin_round(at(0));
    holder.add_vouch(round, &2, Vouch { moved: 0 });
    holder.add_vouch(round, &3, Vouch { moved: 0 });
    holder.members(BTreeSet::from([2]));
    assert!(holder.may_serve(at(1)), "one less takes nothing away");
    holder.members(BTreeSet::from([2, 4]));
    assert!(!holder.may_serve(at(1)));
}

#[test]
fn a_promise_is_kept_for_longer_than_it_is_believed() {
    let mut voucher = voucher();
    assert_eq!(voucher.may_move_from(&1, at(0)), Ok(()));
    assert!(voucher.vouch(at(0), 1, Moment(0)).is_some());
    let Err(MoveBlocked::Promised(until)) = voucher.may_move_from(&1, at(1)) else { panic!("it moves") };
    assert!(until > at(2000));
    assert_eq!(voucher.may_move_from(&1, until), Ok(()));
}

#[test]
fn node_that_reaches_the_store_does_not_vouch() {
    let mut voucher = voucher();
    assert_eq!(voucher.vouch(at(0), 1, at(150)), None);
    assert!(voucher.vouch(at(0), 1, at(149)).is_some());
}

#[test]
fn nothing_is_promised_while_a_commit_is_under_way() {
    let mut voucher = voucher();
    voucher.begin(&1, at(0)).unwrap();
    voucher.begin(&1, at(0)).unwrap();
    assert_eq!(voucher.vouch(at(1), 1, Moment(0)), None);
    voucher.note_settled(&1, Some(20));
    assert_eq!(voucher.vouch(at(1), 1, Moment(0)), None, "one of the two may still happen");
    voucher.note_settled(&1, None);
    assert_eq!(voucher.vouch(at(1), 1, Moment(0)), Some(Vouch { moved: 20 }));
    assert!(voucher.begin(&1, at(2)).is_err());
}

#[test]
fn after_a_restart_neither_moves_nor_promises_for_a_while() {
    let mut voucher: VouchPromises<u8> = VouchPromises::new(at(0), TERM, VOUCH_TERM);
    voucher.note_introduced(1);
    assert!(matches!(voucher.may_move_from(&1, at(2000)), Err(MoveBlocked::Promised(_))));
    assert_eq!(voucher.may_move_from(&1, at(2020)), Ok(()));
    assert_eq!(voucher.vouch(at(2020), 1, Moment(0)), None, "what it moved before is not known yet");
    voucher.note_synced(30);
    voucher.note_synced(40);
    assert_eq!(voucher.vouch(at(2020), 1, Moment(0)), Some(Vouch { moved: 30 }));
}

#[test]
fn a_node_that_does_not_know_the_mover_keeps_its_sites() {
    let voucher = voucher();
    assert_eq!(voucher.may_move_from(&9, at(0)), Err(MoveBlocked::NotIntroduced));
}

#[test]
fn the_node_that_runs_a_site_waits_from_when_it_knows() {
    let mut here = ServeFrom::default();
    assert_eq!(here.from(&7, 2), None);
    here.placed(at(1000), 7, 2, max_elapsed(TERM), Duration::ZERO);
    let by_watch = here.from(&7, 2).expect("it is placed here");
    assert!(by_watch > at(1300));
    // Who committed it says how long ago that was.
    here.placed(at(1010), 7, 2, max_elapsed(TERM), Duration::from_millis(200));
    let told = here.from(&7, 2).expect("it is placed here");
    assert!(told < by_watch && told > at(1110));
    // Hearing of it again, or of an older one, changes nothing.
    here.placed(at(1020), 7, 2, max_elapsed(TERM), Duration::ZERO);
    here.placed(at(1020), 7, 1, Duration::ZERO, Duration::ZERO);
    assert_eq!(here.from(&7, 2), Some(told));
    here.placed(at(1030), 7, 3, Duration::ZERO, Duration::ZERO);
    assert_eq!((here.from(&7, 2), here.from(&7, 3)), (None, Some(at(1030))));
    here.left(&7);
    assert_eq!(here.from(&7, 3), None);
}

proptest! {
    /// The heart of it, without any store: whatever the delays, and with both clocks as far off as is allowed, the old node has
    /// ended before the new one begins.
    #[test]
    fn the_old_node_ends_before_the_new_one_begins(
        sent in 0u64..1_000_000_000,
        term in 10_000_000u64..10_000_000_000,
        after in 0u64..1_000_000_000,
        old_slow in 0u64..=u64::from(DRIFT_PPM),
        new_fast in 0u64..=u64::from(DRIFT_PPM),
    ) {
        let committed = sent + after;
        // Real time at which `term` has passed on a clock that is slow, and the wait on one that is fast.
        let old_ends = sent as f64 + term as f64 / (1.0 - old_slow as f64 / 1e6);
        let wait = max_elapsed(Duration::from_nanos(term)).as_nanos();
        let new_begins = committed as f64 + wait as f64 / (1.0 + new_fast as f64 / 1e6);
        prop_assert!(old_ends < new_begins);
    }
}

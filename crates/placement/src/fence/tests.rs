//! The steps of the argument, one by one. All of them together, under faults: `nagaya-sim`.

use proptest::prelude::*;

use super::*;

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000_000)
}

fn holder() -> Holder<u8> {
    let mut holder = Holder::new(TERM, VOUCH_TERM, 10);
    holder.members(BTreeSet::from([2, 3]));
    holder
}

/// A member that was started long ago and knows node 1, which knows it.
fn voucher() -> Voucher<u8> {
    let mut voucher = Voucher::new(Moment(0), TERM, VOUCH_TERM);
    voucher.quiet_until = Moment(0);
    voucher.synced(5);
    voucher.introduced(1);
    voucher
}

#[test]
fn authority_counts_from_when_the_read_was_sent() {
    let mut holder = holder();
    assert!(!holder.may_serve(at(0)));
    let read = holder.sending(at(0));
    // The answer took 200 ms; it says what was the case at the earliest when the read was sent.
    holder.confirmed(read, 10);
    assert_eq!(holder.until(), at(300));
    assert!(holder.may_serve(at(299)) && !holder.may_serve(at(300)));
}

#[test]
fn a_copy_that_lags_gives_no_authority() {
    let mut holder = holder();
    let read = holder.sending(at(0));
    holder.confirmed(read, 12);
    assert!(!holder.may_serve(at(1)), "something has happened at 11 or 12 that it does not know");
    holder.applied(11);
    assert!(!holder.may_serve(at(1)));
    holder.applied(12);
    assert!(holder.may_serve(at(1)));
}

#[test]
fn a_read_confirms_once_and_answers_may_come_in_any_order() {
    let mut holder = holder();
    let first = holder.sending(at(0));
    let second = holder.sending(at(75));
    holder.confirmed(second, 10);
    assert_eq!(holder.until(), at(375));
    holder.confirmed(first, 10);
    assert_eq!(holder.until(), at(375), "it never becomes less");
    holder.confirmed(RenewId(99), 10);
    assert_eq!(holder.until(), at(375));
}

#[test]
fn a_node_that_was_removed_has_no_authority_from_reads_still_under_way() {
    let mut holder = holder();
    let first = holder.sending(at(0));
    let second = holder.sending(at(10));
    holder.confirmed(first, 10);
    holder.lost();
    assert!(!holder.may_serve(at(11)));
    holder.confirmed(second, 10);
    assert!(!holder.may_serve(at(12)));
    assert!(!holder.wants_vouches(at(12)));
    holder.joined();
    let third = holder.sending(at(20));
    holder.confirmed(third, 10);
    assert!(holder.may_serve(at(21)));
}

#[test]
fn the_longer_of_what_the_node_and_its_predecessors_may_still_serve_is_waited_for() {
    let (short, long) = (TERM / 3, TERM * 3);
    let mut ages = Ages::default();
    assert_eq!(ages.owed(at(0), Some(long), outlasting(short)), (outlasting(long), None));
    assert_eq!(ages.owed(at(0), None, Duration::ZERO), (Duration::ZERO, None), "it was given up");
    // How old the placement is is not known: it may have been made just now.
    assert_eq!(ages.owed(at(0), Some(short), outlasting(long)), (outlasting(long), None));
    assert_eq!(ages.owed(at(0), None, outlasting(long)), (outlasting(long), None));
    // What stood there for so long was.
    ages.read(at(0), 7);
    ages.read(at(100), 8);
    ages.read(at(500), 9);
    assert_eq!(ages.owed(at(904), Some(short), outlasting(long)), (outlasting(long), None));
    assert_eq!(ages.owed(at(910), Some(short), outlasting(long)), (outlasting(short), Some(7)));
    assert_eq!(ages.owed(at(1_410), None, outlasting(long)), (Duration::ZERO, Some(9)));
}

#[test]
fn ages_are_kept_for_as_long_as_they_are_of_use() {
    let mut ages = Ages::default();
    (0..100_000).step_by(10).for_each(|ms| ages.read(at(ms), ms));
    assert!(ages.read.len() < 50, "{}", ages.read.len());
    let longest = outlasting(TERM_MAX);
    let (_, revision) = ages.owed(at(100_000), None, longest);
    assert!(revision.is_some_and(|revision| revision > 89_000 && revision < 90_000), "{revision:?}");
}

#[test]
fn all_others_must_vouch() {
    let mut holder = holder();
    let (round, asked) = holder.asking(at(0));
    assert_eq!(asked, BTreeSet::from([2, 3]));
    holder.vouched(round, &2, Vouch { moved: 0 });
    holder.vouched(round, &2, Vouch { moved: 0 });
    assert!(!holder.may_serve(at(1)));
    holder.vouched(round, &3, Vouch { moved: 7 });
    assert_eq!(holder.until(), at(2000));
    // Vouches of an earlier round do not count for a later one.
    let (later, _) = holder.asking(at(500));
    holder.vouched(round, &2, Vouch { moved: 0 });
    holder.vouched(later, &3, Vouch { moved: 0 });
    assert_eq!(holder.until(), at(2000));
}

#[test]
fn who_does_not_know_of_a_move_is_not_helped_by_vouches() {
    let mut holder = holder();
    let (round, _) = holder.asking(at(0));
    holder.vouched(round, &2, Vouch { moved: 0 });
    holder.vouched(round, &3, Vouch { moved: 12 });
    assert!(!holder.may_serve(at(1)));
    holder.applied(12);
    assert!(holder.may_serve(at(1)));
}

#[test]
fn a_new_member_ends_what_the_others_vouched_for() {
    let mut holder = holder();
    let (round, _) = holder.asking(at(0));
    holder.vouched(round, &2, Vouch { moved: 0 });
    holder.vouched(round, &3, Vouch { moved: 0 });
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
    let Err(Held::Promised(until)) = voucher.may_move_from(&1, at(1)) else { panic!("it moves") };
    assert!(until > at(2000));
    assert_eq!(voucher.may_move_from(&1, until), Ok(()));
}

#[test]
fn who_reaches_the_store_does_not_vouch() {
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
    voucher.settled(&1, Some(20));
    assert_eq!(voucher.vouch(at(1), 1, Moment(0)), None, "one of the two may still happen");
    voucher.settled(&1, None);
    assert_eq!(voucher.vouch(at(1), 1, Moment(0)), Some(Vouch { moved: 20 }));
    assert!(voucher.begin(&1, at(2)).is_err());
}

#[test]
fn after_a_restart_neither_moves_nor_promises_for_a_while() {
    let mut voucher: Voucher<u8> = Voucher::new(at(0), TERM, VOUCH_TERM);
    voucher.introduced(1);
    assert!(matches!(voucher.may_move_from(&1, at(2000)), Err(Held::Promised(_))));
    assert_eq!(voucher.may_move_from(&1, at(2020)), Ok(()));
    assert_eq!(voucher.vouch(at(2020), 1, Moment(0)), None, "what it moved before is not known yet");
    voucher.synced(30);
    voucher.synced(40);
    assert_eq!(voucher.vouch(at(2020), 1, Moment(0)), Some(Vouch { moved: 30 }));
}

#[test]
fn a_node_that_does_not_know_the_mover_keeps_its_sites() {
    let voucher = voucher();
    assert_eq!(voucher.may_move_from(&9, at(0)), Err(Held::NotIntroduced));
}

#[test]
fn the_node_that_runs_a_site_waits_from_when_it_knows() {
    let mut here = Arrivals::default();
    assert_eq!(here.from(&7, 2), None);
    here.placed(at(1000), 7, 2, outlasting(TERM), Duration::ZERO);
    let by_watch = here.from(&7, 2).expect("it is placed here");
    assert!(by_watch > at(1300));
    // Who committed it says how long ago that was.
    here.placed(at(1010), 7, 2, outlasting(TERM), Duration::from_millis(200));
    let told = here.from(&7, 2).expect("it is placed here");
    assert!(told < by_watch && told > at(1110));
    // Hearing of it again, or of an older one, changes nothing.
    here.placed(at(1020), 7, 2, outlasting(TERM), Duration::ZERO);
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
        let wait = outlasting(Duration::from_nanos(term)).as_nanos();
        let new_begins = committed as f64 + wait as f64 / (1.0 + new_fast as f64 / 1e6);
        prop_assert!(old_ends < new_begins);
    }
}

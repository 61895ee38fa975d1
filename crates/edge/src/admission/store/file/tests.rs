//! The file of tickets: what comes back, keys over the months, and what becomes of bytes that are not what they were.

use std::fs;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use nagaya_admission::LATE_FOR;
use tempfile::TempDir;

use super::*;
use crate::admission::store::guarded;

const LANE: LaneName = LaneName(*b"lane of the shop");
const NOW: Moment = Moment(1_800_000_000_000_000);

struct Place {
    dir: TempDir,
    fd: OwnedFd,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fd = File::open(dir.path()).unwrap().into();
        Self { dir, fd }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn open(
        &self,
        keys: &mut Vec<KeyRow>,
        now: Moment,
    ) -> Result<(TicketFile, StoredTickets), TicketFileError> {
        guarded(|| TicketFile::open(self.fd.as_fd(), keys, now))
    }

    fn stored(&self) -> Vec<TicketRecord> {
        let (_, stored) = self.open(&mut Vec::new(), NOW).expect("it can be opened");
        stored.into_iter().map(|(_, record)| record).collect()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn at(seconds: u64) -> Moment {
    after(NOW, Duration::from_secs(seconds))
}

fn days(days: u64) -> Moment {
    at(days * 86_400)
}

fn promised(nonce: u128, begins: Moment) -> TicketRecord {
    let ends = after(begins, Duration::from_secs(60));
    let ticket = Ticket { lane: LANE, begins, ends, epoch: 3, nonce: Nonce(nonce) };
    TicketRecord::Promised { ticket, client: ClientKey(!0 - nonce as u64) }
}

fn spent(nonce: u128, until: Moment) -> TicketRecord {
    TicketRecord::Spent { nonce: Nonce(nonce), until }
}

#[test]
fn stored_promises_come_back_in_the_order_of_slots() {
    let place = Place::new();
    let (mut file, stored) = place.open(&mut Vec::new(), NOW).unwrap();
    assert_eq!(stored, []);
    file.store([promised(1, at(120)), promised(u128::MAX, at(60)), promised(3, at(60))], NOW).unwrap();
    drop(file);
    assert_eq!(place.stored(), [promised(3, at(60)), promised(u128::MAX, at(60)), promised(1, at(120))]);
    assert_eq!(place.names(), [NAME]);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs::metadata(place.path().join(NAME)).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600, "keys are nobody else's business");
}

#[test]
fn a_used_ticket_is_used_and_a_forgotten_one_gone() {
    let place = Place::new();
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store((1..=3).map(|nonce| promised(nonce, at(60))), NOW).unwrap();
    let changes = [spent(1, at(2_000)), TicketRecord::Forgotten { nonce: Nonce(2) }, spent(9, at(2_000))];
    file.store(changes, NOW).unwrap();
    drop(file);
    let (_, stored) = place.open(&mut Vec::new(), NOW).unwrap();
    assert_eq!(stored, [(LANE, promised(3, at(60))), (LANE, spent(1, at(2_000)))]);
}

#[test]
fn called_mark_lasts_until_the_ticket_is_used() {
    let place = Place::new();
    let called = |nonce| TicketRecord::Called { nonce: Nonce(nonce) };
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store((1..=3).map(|nonce| promised(nonce, at(60))), NOW).unwrap();
    file.store([called(1), called(2), called(9)], NOW).unwrap();
    drop(file);
    let expected = [promised(1, at(60)), promised(2, at(60)), promised(3, at(60)), called(1), called(2)];
    assert_eq!(place.stored(), expected);
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store([spent(1, at(2_000)), TicketRecord::Forgotten { nonce: Nonce(2) }], NOW).unwrap();
    let read = file.database.begin_read().unwrap();
    assert_eq!(read.open_table(CALLED).unwrap().len().unwrap(), 0);
}

#[test]
fn a_file_from_before_calls_were_stored_is_as_good() {
    let place = Place::new();
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store([promised(1, at(60))], NOW).unwrap();
    let write = file.database.begin_write().unwrap();
    assert!(write.delete_table(CALLED).unwrap() && write.delete_table(PACED).unwrap());
    write.commit().unwrap();
    drop(file);
    assert_eq!(place.stored(), [promised(1, at(60))]);
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store([TicketRecord::Called { nonce: Nonce(1) }], NOW).unwrap();
    drop(file);
    assert_eq!(place.stored(), [promised(1, at(60)), TicketRecord::Called { nonce: Nonce(1) }]);
}

#[test]
fn number_of_lanes_with_a_stored_pace_is_bounded() {
    let place = Place::new();
    let paced =
        |lane: u128, service_us| TicketRecord::Paced { lane: LaneName(lane.to_be_bytes()), service_us };
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store([paced(7, 1_000), promised(1, at(60)), paced(7, 2_000), paced(8, 3_000)], NOW).unwrap();
    drop(file);
    assert_eq!(place.stored(), [promised(1, at(60)), paced(7, 2_000), paced(8, 3_000)]);
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store((0..u128::from(PACED_MAX)).map(|lane| paced(100 + lane, 1)), at(1)).unwrap();
    file.store([paced(8, 4_000)], at(2)).unwrap();
    drop(file);
    let stored = place.stored();
    assert!(stored.len() as u64 <= PACED_MAX && stored.contains(&paced(8, 4_000)), "{}", stored.len());
}

#[test]
fn expired_records_go_in_passing_and_are_not_returned() {
    let place = Place::new();
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store((1..=1_000).map(|nonce| promised(nonce, at(60))), NOW).unwrap();
    file.store((1..=500).map(|nonce| spent(nonce, after(at(120), LATE_FOR))), NOW).unwrap();
    let over = after(at(120), LATE_FOR);
    drop(file);
    assert_eq!(place.open(&mut Vec::new(), over).unwrap().1, []);
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    for nonce in 2_000..2_010 {
        file.store([promised(nonce, after(over, Duration::from_secs(60)))], over).unwrap();
    }
    let read = file.database.begin_read().unwrap();
    assert_eq!(read.open_table(PROMISED).unwrap().len().unwrap(), 10);
    assert_eq!(read.open_table(SPENT).unwrap().len().unwrap(), 0);
    assert_eq!(read.open_table(OVER).unwrap().len().unwrap(), 10);
}

#[test]
fn years_of_tickets_take_no_more_room_than_a_day() {
    let place = Place::new();
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    let mut size = 0;
    for round in 0..60 {
        let now = at(round * 2_000);
        let nonces = u128::from(round) * 500..u128::from(round + 1) * 500;
        file.store(nonces.map(|nonce| promised(nonce, now)), now).unwrap();
        let len = fs::metadata(place.path().join(NAME)).unwrap().len();
        if round == 10 {
            size = len;
        }
        assert!(round < 10 || len <= size, "{len} bytes after {round} rounds, {size} before");
    }
}

#[test]
fn keys_last_through_restarts_and_rotate_each_month() {
    let place = Place::new();
    let mut keys = Vec::new();
    let (mut file, _) = place.open(&mut keys, NOW).unwrap();
    let first = keys.clone();
    assert_eq!((first.len(), first[0].made, first[0].needed_until), (1, NOW, None));
    assert!(!file.tend(&mut keys, days(29)).unwrap());
    // A ticket for the 40th day is out when the new key comes.
    file.store([promised(1, days(40))], days(29)).unwrap();
    assert!(file.tend(&mut keys, days(30)).unwrap());
    drop(file);
    let mut found = Vec::new();
    let (mut file, _) = place.open(&mut found, days(31)).unwrap();
    found.sort_by_key(|key| key.made);
    assert!(found == keys, "as they were, in a new process");
    assert_eq!((found[0].bytes, found[1].made, found[1].needed_until), (first[0].bytes, days(30), None));
    assert_ne!(found[0].bytes, found[1].bytes);
    let ticket_over = promised(1, days(40)).over_at().unwrap();
    assert_eq!(found[0].needed_until, Some(after(ticket_over, KEY_MARGIN)));
    let TicketRecord::Promised { ticket, .. } = promised(1, days(40)) else {
        unreachable!("it is a promise")
    };
    let (before, now) = (super::keys(&first).unwrap(), super::keys(&found).unwrap());
    assert_eq!(now.verify(&before.sign(&ticket)), Ok(ticket), "signed before, verified after");
    assert!(before.verify(&now.sign(&ticket)).is_err(), "the new one signs");
    assert!(!file.tend(&mut found, days(40)).unwrap());
    assert!(file.tend(&mut found, days(41)).unwrap());
    assert_eq!(found.len(), 1, "the old one is not needed any more");
    assert!(super::keys(&found).unwrap().verify(&before.sign(&ticket)).is_err());
}

#[test]
fn a_clock_that_steps_back_makes_no_new_key() {
    let place = Place::new();
    let mut keys = Vec::new();
    drop(place.open(&mut keys, days(100)).unwrap());
    let (mut file, _) = place.open(&mut keys, NOW).unwrap();
    assert!(!file.tend(&mut keys, at(600)).unwrap());
    assert_eq!((keys.len(), keys[0].made), (1, days(100)));
}

#[test]
fn a_file_that_begins_anew_has_the_keys_that_are_in_use() {
    let place = Place::new();
    let mut keys = Vec::new();
    drop(place.open(&mut keys, NOW).unwrap());
    let before = keys.clone();
    set_aside(place.fd.as_fd(), NOW).unwrap();
    drop(place.open(&mut keys, NOW).unwrap());
    assert!(keys == before);
    let mut found = Vec::new();
    drop(place.open(&mut found, NOW).unwrap());
    assert!(found == before, "in the file too");
}

#[test]
fn a_file_in_use_is_locked_and_free_afterwards() {
    let place = Place::new();
    let (file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    assert!(matches!(place.open(&mut Vec::new(), NOW), Err(TicketFileError::Locked)));
    drop(file);
    assert!(place.open(&mut Vec::new(), NOW).is_ok());
}

#[test]
fn a_file_of_a_newer_program_is_left_alone() {
    let place = Place::new();
    let (file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    let write = file.database.begin_write().unwrap();
    write.open_table(META).unwrap().insert("format", FORMAT + 1).unwrap();
    write.commit().unwrap();
    drop(file);
    assert!(matches!(place.open(&mut Vec::new(), NOW), Err(TicketFileError::Format(2))));
}

#[test]
fn file_without_tickets_counts_as_damaged() {
    for bytes in [&b""[..], b"<html>", &[0; 4_096], &[0xff; 100_000], b"redb\x1a\x0a\xa9\x0d\x0a"] {
        let place = Place::new();
        fs::write(place.path().join(NAME), bytes).unwrap();
        let opened = place.open(&mut Vec::new(), NOW);
        assert!(matches!(opened, Err(TicketFileError::Damaged(_))), "{} bytes: {opened:?}", bytes.len());
    }
}

#[test]
fn a_damaged_file_never_gives_other_tickets_than_were_stored() {
    let place = Place::new();
    let records: Vec<TicketRecord> = (1..=300).map(|nonce| promised(nonce, at(nonce as u64 * 10))).collect();
    let (mut file, _) = place.open(&mut Vec::new(), NOW).unwrap();
    file.store(records.iter().copied(), NOW).unwrap();
    drop(file);
    let whole = fs::read(place.path().join(NAME)).unwrap();
    let mut damaged = 0;
    // A seed and a linear congruence (Knuth, MMIX): the same damage each time.
    let mut random = 42_u64;
    for round in 0..120 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = Place::new();
        let path = place.path().join(NAME);
        let at = (random >> 16) as usize % whole.len();
        if round % 8 == 0 {
            fs::write(&path, &whole[..at]).unwrap();
        } else {
            // Most of the file is room for more: damage is tried where something is.
            let used = whole.iter().enumerate().skip(at).chain(whole.iter().enumerate());
            let at = used.clone().find(|(_, byte)| **byte != 0).expect("it is not empty").0;
            fs::write(&path, &whole).unwrap();
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&[whole[at] ^ (1 << (random >> 60 & 7))], at as u64).unwrap();
        }
        match place.open(&mut Vec::new(), NOW) {
            Ok((_, stored)) => {
                let stored: Vec<TicketRecord> = stored.into_iter().map(|(_, record)| record).collect();
                assert_eq!(stored, records, "round {round}, byte {at}");
            }
            Err(TicketFileError::Damaged(_)) => {
                damaged += 1;
                set_aside(place.fd.as_fd(), NOW).unwrap();
                assert_eq!(place.stored(), []);
            }
            Err(other) => panic!("round {round}, byte {at}: {other}"),
        }
    }
    // In the rest it hit what was written before the last commit, which nothing points to any more.
    assert!(damaged > 10, "{damaged} of 120: the damage was not where anything is");
}

#[test]
fn of_many_damaged_files_the_newest_are_kept() {
    let place = Place::new();
    for second in 0..6 {
        fs::write(place.path().join(NAME), format!("{second}")).unwrap();
        set_aside(place.fd.as_fd(), at(second)).unwrap();
    }
    let expected: Vec<String> = (3..6).map(|second| format!("{NAME}{DAMAGED}{}", at(second).0)).collect();
    assert_eq!(place.names(), expected);
}

#[test]
fn draft_left_by_a_crash_is_removed() {
    let place = Place::new();
    fs::write(place.path().join(format!("{NAME}.12345{DRAFT}")), "half").unwrap();
    fs::write(place.path().join("other.new"), "not ours").unwrap();
    drop(place.open(&mut Vec::new(), NOW).unwrap());
    assert_eq!(place.names(), ["other.new", NAME]);
}

#[test]
fn a_link_in_place_of_the_file_is_not_followed() {
    let place = Place::new();
    let elsewhere = place.path().join("elsewhere");
    fs::write(&elsewhere, "").unwrap();
    std::os::unix::fs::symlink(&elsewhere, place.path().join(NAME)).unwrap();
    assert!(matches!(place.open(&mut Vec::new(), NOW), Err(TicketFileError::Io(_))));
    assert_eq!(fs::read(&elsewhere).unwrap(), b"");
}

//! Conversations with databases that are played from a script. Real ones are asked in
//! `tests/kernel/databases.rs`.

use std::io::Cursor;

use proptest::prelude::*;

use super::answer::ANSWER_LEN_MAX;
use super::*;

/// A database that says the same, whatever it is told.
struct Played {
    says: Cursor<Vec<u8>>,
    told: Vec<u8>,
}

impl Played {
    fn new(says: &[u8]) -> Self {
        Self { says: Cursor::new(says.to_vec()), told: Vec::new() }
    }
}

impl Read for &mut Played {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.says.read(bytes)
    }
}

impl Write for &mut Played {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.told.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn tag(kind: DatabaseKind, database: Option<&str>, ask: &str) -> DatabaseTag {
    DatabaseTag { kind, user: None, database: database.map(str::to_owned), ask: ask.into() }
}

/// The answer, and all that the database was told.
fn play(tag: &DatabaseTag, says: &[u8]) -> (Result<Digest, String>, Vec<u8>) {
    let mut played = Played::new(says);
    let answer = converse(&mut played, tag, "alice").map_err(|error| error.to_string());
    (answer, played.told)
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

// === MySQL ===

fn packet(number: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap().to_le_bytes();
    [&len[..3], &[number], body].concat()
}

fn greeting() -> Vec<u8> {
    packet(0, b"\x0a5.5.5-10.11.6-MariaDB\0\x01\0\0\0abcdefgh\0\xff\xf7\x2d\x02\0")
}

/// One column, and these rows.
fn rows(rows: &[&[u8]]) -> Vec<u8> {
    let mut said =
        [packet(1, b"\x01"), packet(2, b"\x03def\0\0\0\x01v\0"), packet(3, b"\xfe\0\0\0\0")].concat();
    rows.iter().for_each(|row| said.extend(packet(4, row)));
    said.extend(packet(9, b"\xfe\0\0\0\0"));
    said
}

fn mysql(answer: &[u8]) -> Result<Digest, String> {
    let says = [&greeting()[..], &packet(2, b"\0\0\0\x02\0\0\0"), answer].concat();
    play(&tag(DatabaseKind::Mysql, Some("blog"), "SELECT v FROM s"), &says).0
}

#[test]
fn mysql_is_asked_as_the_tenant_and_its_rows_are_the_answer() {
    let says = [greeting(), packet(2, b"\0\0\0\x02\0\0\0"), rows(&[b"\x011"])].concat();
    let (answer, told) = play(&tag(DatabaseKind::Mysql, Some("blog"), "SELECT v FROM s"), &says);
    assert!(answer.is_ok(), "{answer:?}");
    assert!(holds(&told, b"alice\0\0blog\0mysql_native_password\0"), "{}", told.escape_ascii());
    assert!(holds(&told, b"\x10\0\0\0\x03SELECT v FROM s"), "{}", told.escape_ascii());
    assert_eq!(answer, mysql(&rows(&[b"\x011"])));
    for other in [rows(&[b"\x012"]), rows(&[]), rows(&[b"\x011", b"\x011"]), rows(&[b"\x01", b"1"])] {
        assert_ne!(answer, mysql(&other), "{}", other.escape_ascii());
    }
}

#[test]
fn mysql_reply_without_an_answer_is_reported() {
    let error = |words: &[u8]| packet(1, &[b"\xff\x7a\x04#42S02", words].concat());
    let long = rows(&[&vec![b'x'; ANSWER_LEN_MAX]]);
    for (answer, why) in [
        (error(b"Table 's' doesn't exist\n\x1b"), "the database says: Table 's' doesn't exist  "),
        (packet(1, b"\0\x01\0\x02\0\0\0"), "the question has no answer: ask for rows, with SELECT or SHOW"),
        (packet(1, b"\xfb/etc/shadow"), "the database wants a file instead of answering"),
        (long, "the answer is longer than 64 KiB: ask for less, such as a checksum"),
        (rows(&[])[..8].to_vec(), "the database ended the connection in its answer"),
    ] {
        assert_eq!(mysql(&answer).unwrap_err(), why);
    }
    let of = tag(DatabaseKind::Mysql, None, "SELECT 1");
    let denied = [greeting(), packet(2, b"\xff\x15\x04#28000Access denied for user 'alice'")].concat();
    assert_eq!(play(&of, &denied).0.unwrap_err(), "the database says: Access denied for user 'alice'");
    let full = packet(0, b"\xff\x10\x04Too many connections");
    assert_eq!(play(&of, &full).0.unwrap_err(), "the database says: Too many connections");
    assert_eq!(
        play(&of, b"220 mail.example.org ESMTP\r\n\0\0\0").0.unwrap_err(),
        "what listens there is not MySQL or MariaDB"
    );
}

#[test]
fn no_password_is_ever_sent_to_mysql() {
    let of = tag(DatabaseKind::Mysql, None, "SELECT 1");
    let switch = |number: u8| packet(number, b"\xfemysql_native_password\0saltsaltsaltsaltsalt\0");
    let (answer, told) =
        play(&of, &[greeting(), switch(2), packet(4, b"\0\0\0\x02\0\0\0"), rows(&[b"\x011"])].concat());
    assert!(answer.is_ok(), "{answer:?}");
    assert!(holds(&told, b"\0\0\0\x03\x09\0\0\0\x03SELECT 1"), "an empty proof: {}", told.escape_ascii());
    let again = [greeting(), (0..9).flat_map(|number| switch(2 * number)).collect()].concat();
    assert!(play(&of, &again).0.unwrap_err().contains("wants a password"));
    let more = [greeting(), packet(2, b"\x01\x04")].concat();
    assert!(play(&of, &more).0.unwrap_err().contains("wants a password"));
}

// === PostgreSQL ===

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
    [&[kind], &len[..], body].concat()
}

fn postgresql(answer: &[u8]) -> (Result<Digest, String>, Vec<u8>) {
    let says = [
        &message(b'R', &[0; 4])[..],
        &message(b'S', b"TimeZone\0UTC\0"),
        &message(b'K', &[0; 8]),
        &message(b'Z', b"I"),
        answer,
        &message(b'Z', b"I"),
    ];
    play(&tag(DatabaseKind::Postgresql, None, "SELECT 1"), &says.concat())
}

#[test]
fn postgresql_is_asked_as_the_tenant_and_answers_by_rows() {
    let rows = |rows: &[&[u8]]| {
        let rows = rows.iter().flat_map(|row| message(b'D', row)).collect::<Vec<_>>();
        [message(b'T', b"\0\x01v\0"), rows, message(b'C', b"SELECT 1\0")].concat()
    };
    let (answer, told) = postgresql(&rows(&[b"\0\x01\0\0\0\x011"]));
    assert!(answer.is_ok(), "{answer:?}");
    assert!(holds(&told, b"user\0alice\0database\0alice\0"), "{}", told.escape_ascii());
    assert!(holds(&told, b"Q\0\0\0\x0dSELECT 1\0"), "{}", told.escape_ascii());
    assert_eq!(answer, postgresql(&rows(&[b"\0\x01\0\0\0\x011"])).0);
    assert_ne!(answer, postgresql(&rows(&[b"\0\x01\0\0\0\x012"])).0);
    assert_ne!(answer, postgresql(&rows(&[])).0);
}

#[test]
fn postgresql_reply_without_an_answer_is_reported() {
    let error = message(b'E', b"SERROR\0C42P01\0Mrelation \"s\" does not exist\0\0");
    assert_eq!(postgresql(&error).0.unwrap_err(), "the database says: relation \"s\" does not exist");
    let command = message(b'C', b"UPDATE 1\0");
    assert!(postgresql(&command).0.unwrap_err().contains("has no answer"));
    let copy = message(b'G', b"\0\0\0");
    assert!(postgresql(&copy).0.unwrap_err().contains("cannot be answered by rows"));
    let of = tag(DatabaseKind::Postgresql, None, "SELECT 1");
    let password = message(b'R', b"\0\0\0\x0a");
    assert!(play(&of, &password).0.unwrap_err().contains("wants a password"));
    assert!(
        play(&of, b"R\0\0\0\x01").0.unwrap_err().contains("is not PostgreSQL"),
        "a length of less than itself"
    );
}

// === Redis ===

#[test]
fn redis_is_asked_and_its_whole_reply_is_the_answer() {
    let of = tag(DatabaseKind::Redis, Some("2"), "  MGET a  b ");
    let reply = |values: &str| play(&of, format!("+OK\r\n{values}").as_bytes());
    let (answer, told) = reply("*2\r\n$1\r\n1\r\n$-1\r\n");
    assert_eq!(told, b"*2\r\n$6\r\nSELECT\r\n$1\r\n2\r\n*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$1\r\nb\r\n");
    assert!(answer.is_ok(), "{answer:?}");
    assert_eq!(answer, reply("*2\r\n$1\r\n1\r\n$-1\r\n").0);
    for other in
        ["*2\r\n$1\r\n2\r\n$-1\r\n", "*2\r\n$1\r\n1\r\n$0\r\n\r\n", ":1\r\n", "$1\r\n1\r\n", "*-1\r\n"]
    {
        assert_ne!(answer, reply(other).0, "{other:?}");
    }
}

#[test]
fn redis_reply_without_an_answer_is_reported() {
    let of = tag(DatabaseKind::Redis, None, "GET a");
    for (says, why) in [
        ("-NOAUTH Authentication required.\r\n", "the database says: NOAUTH Authentication required."),
        ("HTTP/1.1 400 Bad Request\r\n", "what listens there is not Redis"),
        ("$99999999\r\n", "the answer is longer than 64 KiB: ask for less, such as a checksum"),
        (
            "*9223372036854775807\r\n*9223372036854775807\r\n*9223372036854775807\r\n",
            "the answer is longer than 64 KiB: ask for less, such as a checksum",
        ),
        ("*9\r\n:1\r\n", "the database ended the connection in its answer"),
        ("$-7\r\n", "what listens there is not Redis"),
    ] {
        assert_eq!(play(&of, says.as_bytes()).0.unwrap_err(), why, "{says:?}");
    }
}

// === Any peer ===

proptest! {
    #[test]
    fn whatever_a_peer_says_ends(kind in 0..3_usize, mut says in prop::collection::vec(any::<u8>(), 0..2000), small in any::<bool>()) {
        if small {
            // Lengths that fit, so that many packets follow each other.
            says.iter_mut().skip(1).step_by(5).for_each(|byte| *byte = 0);
            says.iter_mut().skip(2).step_by(5).for_each(|byte| *byte = 0);
        }
        let kind = [DatabaseKind::Mysql, DatabaseKind::Postgresql, DatabaseKind::Redis][kind];
        let mut says = [&[greeting(), packet(2, b"\0")].concat()[..], &says].concat();
        if kind != DatabaseKind::Mysql {
            says.drain(..greeting().len() + 5);
        }
        let of = tag(kind, None, "SELECT 1");
        let (mut played, mut again) = (Played::new(&says), Played::new(&says));
        let answer = converse(&mut played, &of, "alice").map_err(|error| error.to_string());
        prop_assert_eq!(answer, converse(&mut again, &of, "alice").map_err(|error| error.to_string()));
        prop_assert!(played.says.position() <= ANSWER_LEN_MAX as u64);
    }
}

#[test]
fn a_peer_that_says_nothing_is_not_waited_for_longer_than_said() {
    let (one, _other) = UnixStream::pair().unwrap();
    let stream = TimedStream::new(one.into(), Instant::now() + Duration::from_millis(50)).unwrap();
    let error = converse(stream, &tag(DatabaseKind::Mysql, None, "SELECT 1"), "alice").unwrap_err();
    assert_eq!(error.to_string(), "the database has not answered in time");
}

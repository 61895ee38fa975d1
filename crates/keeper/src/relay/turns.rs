//! Follows the turns of a conversation with a database: from a query's first byte to that of its
//! response. Pure.
//!
//! Databases are recognized by their first bytes. MySQL and MariaDB send a greeting, and
//! PostgreSQL's client requests a version that is its own. With MySQL only commands count, as far
//! as they can be read: not its login, nor commands without a response. In an encrypted or
//! compressed conversation, and with PostgreSQL, each client message with a response counts. Not
//! here: adding up (`watched`). Other conversations are not read.

/// Length of the head of a MySQL packet: three bytes of its length, one of its number. And that of
/// its first content.
const MYSQL_HEAD: usize = 4;

/// Version of MySQL's protocol, in its greeting.
const MYSQL_PROTOCOL: u8 = 10;

/// Commands without a response: `COM_QUIT`, `COM_STMT_SEND_LONG_DATA`, `COM_STMT_CLOSE`.
const MYSQL_SILENT: [u8; 3] = [0x01, 0x18, 0x19];

/// Capabilities in a client's response to the greeting: `CLIENT_COMPRESS`, `CLIENT_SSL`,
/// `CLIENT_ZSTD_COMPRESSION_ALGORITHM`. The bytes after it cannot be read any more.
const MYSQL_OPAQUE: u32 = 0x20 | 0x800 | 0x0400_0000;

/// The first number of a client of PostgreSQL: version 3.0, or a request to encrypt (TLS, GSSAPI).
const POSTGRES: [u32; 3] = [196_608, 80_877_103, 80_877_104];

/// A client of PostgreSQL that leaves: `Terminate`, without a response.
const POSTGRES_END: &[u8] = b"X\0\0\0\x04";

#[derive(Debug, Default)]
pub struct QueryTracker {
    kind: ProtocolState,
    /// A query waits for its response.
    is_waiting: bool,
}

#[derive(Debug, Default)]
enum ProtocolState {
    /// Neither side has sent anything.
    #[default]
    Unknown,
    /// Greeted, and the client's packets are read.
    MySql(MySqlPackets),
    /// A database, whose messages are not read.
    Opaque,
    Other,
}

impl QueryTracker {
    /// Processes bytes of the client. Returns true if a query begins.
    pub fn asks(&mut self, said: &[u8]) -> bool {
        if let ProtocolState::Unknown = self.kind {
            self.kind = if is_postgres(said) { ProtocolState::Opaque } else { ProtocolState::Other };
        }
        let is_question = match &mut self.kind {
            ProtocolState::Unknown | ProtocolState::Other => false,
            ProtocolState::Opaque => said != POSTGRES_END,
            ProtocolState::MySql(packets) => {
                let read = packets.read(said);
                if packets.is_opaque {
                    self.kind = ProtocolState::Opaque;
                }
                read
            }
        };
        is_question && !std::mem::replace(&mut self.is_waiting, true)
    }

    /// Processes bytes of the server. Returns true if a query is answered, or its response begins.
    pub fn answers(&mut self, said: &[u8]) -> bool {
        if let ProtocolState::Unknown = self.kind {
            let is_greeting = said.get(3) == Some(&0) && said.get(MYSQL_HEAD) == Some(&MYSQL_PROTOCOL);
            self.kind = if is_greeting {
                ProtocolState::MySql(MySqlPackets::default())
            } else {
                ProtocolState::Other
            };
        }
        std::mem::take(&mut self.is_waiting)
    }

    /// Returns whether the client has logged in, or sends what cannot be read.
    pub fn has_logged_in(&self) -> bool {
        match &self.kind {
            ProtocolState::Unknown | ProtocolState::Other => false,
            ProtocolState::MySql(packets) => packets.has_logged_in,
            ProtocolState::Opaque => true,
        }
    }

    /// Ends the conversation. Returns true if a query was open.
    pub fn end(&mut self) -> bool {
        std::mem::take(&mut self.is_waiting)
    }
}

fn is_postgres(said: &[u8]) -> bool {
    let number = |at: usize| said.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
    let len = number(0).and_then(|len| usize::try_from(len).ok());
    len.is_some_and(|len| len >= 8 && len <= said.len().max(8))
        && number(4).is_some_and(|n| POSTGRES.contains(&n))
}

/// Splits a MySQL client's bytes, in pieces of any length, into packets.
#[derive(Debug, Default)]
struct MySqlPackets {
    /// Head and first bytes of the present packet: its flags are the first four.
    head: Vec<u8>,
    /// Rest of the present packet, bytes, once its head is whole.
    left: usize,
    has_logged_in: bool,
    is_opaque: bool,
}

impl MySqlPackets {
    /// Returns true if a command with a response is among them.
    fn read(&mut self, mut said: &[u8]) -> bool {
        let mut is_question = false;
        while !said.is_empty() && !self.is_opaque {
            if self.left == 0 && self.head.len() >= MYSQL_HEAD {
                self.head.clear();
            }
            if self.head.len() < MYSQL_HEAD {
                let (head, rest) = said.split_at(said.len().min(MYSQL_HEAD - self.head.len()));
                self.head.extend(head);
                said = rest;
                if let [a, b, c, _] = self.head[..] {
                    self.left = u32::from_le_bytes([a, b, c, 0]) as usize;
                }
                continue;
            }
            let (body, rest) = said.split_at(said.len().min(self.left));
            let was_empty = self.head.len() == MYSQL_HEAD;
            let wanted = (MYSQL_HEAD + 4).saturating_sub(self.head.len());
            self.head.extend(body.iter().take(wanted));
            self.left -= body.len();
            said = rest;
            if !self.has_logged_in {
                self.log_in();
            } else if let (true, 0, Some(command)) = (was_empty, self.head[3], body.first()) {
                is_question |= !MYSQL_SILENT.contains(command);
            }
        }
        is_question
    }

    /// Processes the first packet, the response to the greeting. Its first four bytes determine the
    /// rest.
    fn log_in(&mut self) {
        if let Some(flags) = self.head.get(MYSQL_HEAD..MYSQL_HEAD + 4).and_then(|bytes| bytes.try_into().ok())
        {
            self.has_logged_in = true;
            self.is_opaque = u32::from_le_bytes(flags) & MYSQL_OPAQUE != 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(number: u8, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(body.len()).unwrap().to_le_bytes();
        [&len[..3], &[number], body].concat()
    }

    fn greeted(flags: u32) -> QueryTracker {
        let mut turns = QueryTracker::default();
        assert!(!turns.answers(&packet(0, b"\x0a8.0.36\0...")));
        let log_in = packet(1, &[&flags.to_le_bytes()[..], &[0; 60]].concat());
        assert!(!turns.asks(&log_in), "logging in is no query");
        assert!(!turns.answers(&packet(2, b"\0\0\0")));
        turns
    }

    #[test]
    fn a_query_of_mysql_is_open_until_its_answer_begins() {
        let mut turns = greeted(0x0003_a685);
        let query = packet(0, b"\x03SELECT 1");
        assert!(turns.asks(&query));
        assert!(turns.answers(b"\x01"));
        assert!(!turns.answers(b"the rest of it"));
        assert!(turns.asks(&query));
        assert!(turns.end(), "the connection ends with it");
        assert!(!turns.end());
    }

    #[test]
    fn packets_may_come_in_any_pieces() {
        let mut turns = greeted(0);
        // One that is not answered, and then one that is.
        let both = [packet(0, b"\x19\x01\0\0\0"), packet(0, &[b"\x03", &[b'x'; 300][..]].concat())].concat();
        for size in [1, 3, 5, 7, 100, both.len()] {
            let asked = both.chunks(size).filter(|piece| turns.asks(piece)).count();
            assert_eq!(asked, 1, "in pieces of {size}");
            assert!(turns.answers(b"x"));
        }
        assert!(!turns.asks(&packet(0, b"\x01")), "leaving is not answered");
        assert!(!turns.asks(&packet(3, b"\x03")), "one that goes on is no other");
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_said_is_read_the_same_in_any_pieces(
            said in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400),
            short in proptest::prelude::any::<bool>(),
            size in 1_usize..50,
        ) {
            let mut said = said;
            if short {
                // Lengths that fit, so that many packets follow each other.
                said.iter_mut().skip(1).step_by(5).for_each(|byte| *byte = 0);
                said.iter_mut().skip(2).step_by(5).for_each(|byte| *byte = 0);
            }
            let (mut whole, mut pieces) = (MySqlPackets::default(), MySqlPackets::default());
            let at_once = whole.read(&said);
            let in_pieces = said.chunks(size).fold(false, |any, piece| pieces.read(piece) | any);
            proptest::prop_assert_eq!(at_once, in_pieces);
            proptest::prop_assert!(pieces.head.len() <= MYSQL_HEAD + 4);
            let mut turns = QueryTracker::default();
            for piece in said.chunks(size) {
                let begun = turns.asks(piece);
                proptest::prop_assert_eq!(turns.answers(piece), begun, "what begins is answered by whatever comes");
            }
        }
    }

    #[test]
    fn unreadable_traffic_counts_by_turns() {
        for flags in [0x20, 0x800, 0x0400_0000] {
            let mut turns = greeted(flags);
            assert!(turns.asks(b"anything"), "{flags:x}");
            assert!(!turns.asks(b"more of it"));
            assert!(turns.answers(b"x"));
        }
        let mut postgres = QueryTracker::default();
        assert!(postgres.asks(b"\0\0\0\x08\x04\xd2\x16\x2f"));
        assert!(postgres.answers(b"N"));
        assert!(postgres.asks(b"\0\0\0\x14\0\x03\0\0user\0alice\0\0"));
        assert!(postgres.answers(b"R") && !postgres.asks(b"X\0\0\0\x04"), "leaving is not answered");
    }

    #[test]
    fn traffic_of_other_protocols_counts_no_queries() {
        let mut http = QueryTracker::default();
        assert!(!http.asks(b"GET / HTTP/1.1\r\n"));
        assert!(!http.answers(b"HTTP/1.1 200 OK\r\n"));
        let mut smtp = QueryTracker::default();
        assert!(!smtp.answers(b"220 mail\r\n") && !smtp.asks(b"EHLO x\r\n"));
        for short in [&b""[..], b"\0", b"\0\0\0\x08", b"\xff\xff\xff\xff\0\x03\0\0"] {
            assert!(!QueryTracker::default().asks(short), "{}", short.escape_ascii());
        }
    }
}

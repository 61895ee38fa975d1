//! Fuzz targets of the relay for mail: commands of tenants' programs, and replies of a mail server.
//!
//! The server of these targets notes all it is told, and is read as strictly as no server reads.
//! Not here: tenants' own `sendmail` (`nagaya_sendmail::fuzzing`).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use nagaya_base::fuzz::copy_seeds;
use nagaya_records::{SiteName, TenantName};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Runtime;

use crate::mail::{MailDesk, MailSender, SmtpConnection, TextProgress, TextReader, serve_with};
use crate::options::MailOptions;

use super::split_step;

/// Limits that a short input reaches.
const RECIPIENTS_PER_HOUR: u32 = 6;
const RECIPIENTS_MAX: u32 = 3;
const BYTES_MAX: u64 = 256;
const BYTES_PER_HOUR: u64 = 400;

/// Maximum length of the words of a server's reply that are repeated, characters.
const WORDS_MAX: usize = 200;

thread_local! {
    /// For timers, which no target waits for.
    static RUNTIME: Runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime without sockets needs nothing of the machine");
}

// === A text ===

pub(super) fn texts() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x01a\r\n..b\r\n.\r\nrest",
        b"\x02.\r\n",
        b"\x03a\r\n.\r",
        b"\x01ab\ncd",
        b"\x02.\r\r",
        b"\x05a\r\n.\n",
        b"\x01\r\n\r\n.\r\nx",
    ])
}

/// The end is found at the right place, however the text is cut. No line before it can be read in
/// two ways.
pub(super) fn read_text(bytes: &[u8]) {
    let Some((step, text)) = split_step(bytes) else { return };
    let (mut reader, mut at, mut progress) = (TextReader::default(), 0, TextProgress::Open);
    for piece in text.chunks(step) {
        progress = reader.read(piece);
        match progress {
            TextProgress::Open => at += piece.len(),
            TextProgress::Ended(len) => progress = TextProgress::Ended(at + len),
            TextProgress::BareLineEnd => {}
        }
        if progress != TextProgress::Open {
            break;
        }
    }
    assert_eq!(progress, find_end(text));
}

/// Finds the end as in the whole text.
fn find_end(text: &[u8]) -> TextProgress {
    let mut at = 0;
    while let Some(len) = text[at..].iter().position(|byte| b"\r\n".contains(byte)) {
        let (line, rest) = text[at..].split_at(len);
        match rest {
            b"\r" => return TextProgress::Open,
            [b'\r', b'\n', ..] if line == b"." => return TextProgress::Ended(at + len + 2),
            [b'\r', b'\n', ..] => at += len + 2,
            _ => return TextProgress::BareLineEnd,
        }
    }
    TextProgress::Open
}

// === A conversation ===

/// The first byte cuts the input, the second selects the server's refusal.
pub(super) fn sessions() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x01\x00EHLO x\r\nMAIL FROM:<a@b.test> SIZE=9\r\nRCPT TO:<c@d.test>\r\nDATA\r\nSubject: x\r\n\r\n..\r\n.\r\nQUIT\r\n",
        b"\x07\x00MAIL FROM:<>\nRCPT TO:<root>\nRCPT TO:<a+b@c.test>\nDATA\n\r\n.\r\nmail from:<a>\r\nrcpt to:<b>\r\nData\r\nx\r\n.\r\nNOOP\r\n",
        b"\x40\x00HELO x\r\nMAIL FROM:<a@b.test>\r\nRCPT TO:<c@d.test>\r\nDATA\r\na\n.\nMAIL FROM:<b@b.test>\r\n",
        b"\x40\x00MAIL FROM:<a@b.test>\r\nRCPT TO:<|sh>\r\nRCPT TO:</etc/x>\r\nRCPT TO:<a\rb@c>\r\nVRFY a\r\nDATA\r\n",
        b"\x09\x03MAIL FROM:<a@b.test>\r\nRSET\r\nMAIL FROM:<a@b.test>\r\nRCPT TO:<c@d.test>\r\nRCPT TO:<c@d.test>\r\nRCPT TO:<e@d.test>\r\nRCPT TO:<f@d.test>\r\nRCPT TO:<g@d.test>\r\nDATA\r\nx\r\n.\r\n",
        b"\x09\x04MAIL FROM:<a@b.test>\r\nRCPT TO:<c@d.test>\r\nDATA\r\nx\r\n.\r\nMAIL FROM:<a@b.test> SIZE=99999\r\n",
        b"\x20\x80MAIL FROM:<a@b.test>\r\nRCPT TO:<c@d.test>\r\n",
    ])
}

/// Messages that a server has accepted, each with its commands and its text.
#[derive(Debug, Default, PartialEq)]
struct Taken(Vec<(Vec<String>, Vec<u8>)>);

/// The server gets whole messages that name their owner, and the same ones however the program's
/// bytes are cut.
pub(super) fn read_session(bytes: &[u8]) {
    let Some((step, rest)) = split_step(bytes) else { return };
    let Some((mood, said)) = rest.split_first() else { return };
    let whole = hold_session(said, usize::MAX, *mood);
    assert_eq!(hold_session(said, step, *mood), whole, "pieces mean the same as the whole");
}

fn hold_session(said: &[u8], step: usize, mood: u8) -> Taken {
    let options = MailOptions {
        recipients_per_hour: RECIPIENTS_PER_HOUR,
        recipients_max: RECIPIENTS_MAX,
        bytes_max: BYTES_MAX,
        bytes_per_hour: BYTES_PER_HOUR,
        ..MailOptions::default()
    };
    let desk = Arc::new(MailDesk::new(None, options, Arc::default(), Default::default()));
    let name = |name| (TenantName::new(name), SiteName::new(name));
    let (Ok(tenant), Ok(site)) = name("alice") else { return Taken::default() };
    let sender = MailSender { tenant, site: Some(site) };
    let (program, told) = Program::new(said, step);
    let servers = RefCell::new(Vec::new());
    let connect = async |_: SocketAddr| {
        if mood & 0x80 != 0 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let heard = Rc::new(RefCell::new(Vec::new()));
        servers.borrow_mut().push(Rc::clone(&heard));
        Ok(MailServer::new(heard, mood & 0x7f))
    };
    let served = RUNTIME.with(|runtime| runtime.block_on(serve_with(program, &desk, &sender, connect)));
    if let Err(error) = served {
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
    }
    check_answers(&told.borrow());
    let mut taken = Taken::default();
    for heard in servers.into_inner() {
        taken.0.extend(read_heard(&heard.borrow()));
    }
    let recipients =
        taken.0.iter().flat_map(|(commands, _)| commands).filter(|line| line.starts_with("RCPT"));
    assert!(recipients.count() <= RECIPIENTS_PER_HOUR as usize);
    taken
}

/// Each reply consists of lines of three digits and printable words.
fn check_answers(told: &[u8]) {
    let told = str::from_utf8(told).expect("answers are ASCII");
    for line in told.split_terminator("\r\n") {
        assert!(line.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{line:?}");
        let is_code = line.len() > 3 && line.as_bytes()[..3].iter().all(u8::is_ascii_digit);
        assert!(is_code && [b' ', b'-'].contains(&line.as_bytes()[3]), "{line:?}");
    }
}

/// Returns the message of one connection, if it was whole.
fn read_heard(heard: &[u8]) -> Option<(Vec<String>, Vec<u8>)> {
    let (mut commands, mut rest) = (Vec::new(), heard);
    while let Some(len) = rest.iter().position(|byte| b"\r\n".contains(byte)) {
        let (line, behind) = rest.split_at(len);
        let line = str::from_utf8(line).expect("commands are ASCII");
        rest = behind.strip_prefix(b"\r\n").expect("a command ends with CR LF");
        let address = ["MAIL FROM:<", "RCPT TO:<"].iter().find_map(|begin| line.strip_prefix(begin));
        if let Some((address, parameters)) = address.and_then(|line| line.split_once('>')) {
            assert!(["", " BODY=8BITMIME"].contains(&parameters), "{line}");
            assert!(
                address.bytes().all(|byte| byte.is_ascii_graphic() && !b"<|\"\\$%!".contains(&byte)),
                "{line}"
            );
        } else {
            assert!(line == "DATA" || line.starts_with("EHLO "), "{line}");
        }
        commands.push(line.to_owned());
        if line == "DATA" {
            break;
        }
    }
    let TextProgress::Ended(len) = find_end(rest) else { return None };
    assert_eq!(len, rest.len(), "one connection has one message");
    assert!(rest.starts_with(b"Received: from alice.nagaya.invalid (tenant alice, site alice)\r\n\tby "));
    // The next line has the time.
    let lines = rest.windows(2).enumerate().filter(|(_, end)| end == b"\r\n").map(|(at, _)| at + 2);
    let own = lines.clone().nth(2).expect("the field has three lines");
    assert!((rest.len() - own) as u64 <= BYTES_MAX);
    Some((commands, rest[own..].to_vec()))
}

// === A server ===

pub(super) fn server_answers() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x01220 mx\r\n250-mx\r\n250-8bitmime\r\n250 SIZE\r\n250 ok\r\n354 go\r\n250 2.0.0 taken\r\n",
        b"\x08554 no\r\n",
        b"\x02220 mx\n250 mx\n550-a\n550 \xc3\xa4\x07\n",
        b"\x0222",
        b"\x05220 mx\r\n250-\r\n2\xc3\xa40 x\r\n",
    ])
}

/// Programs get short and printable words, and the same ones however they arrive.
pub(super) fn read_server_answers(bytes: &[u8]) {
    let Some((step, said)) = split_step(bytes) else { return };
    assert_eq!(hear_server(said, step), hear_server(said, usize::MAX));
}

fn hear_server(said: &[u8], step: usize) -> Vec<(u16, String)> {
    let (stream, _told) = Program::new(said, step);
    let stream = RefCell::new(Some(stream));
    let connect = async |_: SocketAddr| stream.take().ok_or(io::ErrorKind::ConnectionRefused.into());
    let address = SocketAddr::from(([127, 0, 0, 1], 25));
    let hear = async {
        let mut heard = Vec::new();
        let Ok(mut server) = SmtpConnection::connect(connect, address, "node.test").await else {
            return heard;
        };
        let mut answer = server.mail("a@b.test").await;
        while let Ok(known) = answer {
            assert!(
                known.words.len() <= WORDS_MAX
                    && known.words.bytes().all(|byte| (b' '..=b'~').contains(&byte))
            );
            heard.push((known.code, known.words));
            answer = server.accept().await;
        }
        heard
    };
    RUNTIME.with(|runtime| runtime.block_on(hear))
}

// === Streams ===

/// Sends its bytes in pieces, then leaves, and records its input.
struct Program {
    said: VecDeque<u8>,
    step: usize,
    told: Rc<RefCell<Vec<u8>>>,
}

impl Program {
    fn new(said: &[u8], step: usize) -> (Self, Rc<RefCell<Vec<u8>>>) {
        let told = Rc::new(RefCell::new(Vec::new()));
        (Self { said: said.to_vec().into(), step, told: Rc::clone(&told) }, told)
    }
}

/// Returns available bytes, in pieces of this length. No bytes mean the end.
fn give(from: &mut VecDeque<u8>, step: usize, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
    let len = from.len().min(step).min(into.remaining());
    let piece: Vec<u8> = from.drain(..len).collect();
    into.put_slice(&piece);
    Poll::Ready(Ok(()))
}

impl AsyncRead for Program {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let step = self.step;
        give(&mut self.said, step, into)
    }
}

impl AsyncWrite for Program {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.told.borrow_mut().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A server that replies to each line, refuses one of them, and records all.
struct MailServer {
    heard: Rc<RefCell<Vec<u8>>>,
    answers: VecDeque<u8>,
    /// Begin in `heard` of the line that has not ended.
    line: usize,
    in_text: bool,
    answered: u8,
    /// Number of the reply that is a refusal. 0: none is.
    refused: u8,
}

impl MailServer {
    fn new(heard: Rc<RefCell<Vec<u8>>>, refused: u8) -> Self {
        let answers = b"220 mx.test\r\n".to_vec().into();
        Self { heard, answers, line: 0, in_text: false, answered: 0, refused }
    }

    fn answer(&mut self, line: &[u8]) {
        if self.in_text && line != b"." {
            return;
        }
        self.answered = self.answered.wrapping_add(1);
        let is_refused = self.refused != 0 && self.answered == self.refused;
        self.in_text = line == b"DATA" && !is_refused;
        let answer: &[u8] = match line {
            _ if is_refused => b"550 5.7.1 not this\r\n",
            b"DATA" => b"354 go on\r\n",
            _ if line.starts_with(b"EHLO") => b"250-mx.test\r\n250 8BITMIME\r\n",
            _ => b"250 2.0.0 ok\r\n",
        };
        self.answers.extend(answer);
    }
}

impl AsyncRead for MailServer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        give(&mut self.answers, usize::MAX, into)
    }
}

impl AsyncWrite for MailServer {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.heard.borrow_mut().extend_from_slice(bytes);
        loop {
            let heard = self.heard.borrow()[self.line..].to_vec();
            let Some(len) = heard.windows(2).position(|end| end == b"\r\n") else { break };
            self.line += len + 2;
            self.answer(&heard[..len]);
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

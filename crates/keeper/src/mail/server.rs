//! The keeper's end of a conversation with the node's mail server: SMTP (RFC 5321), one message for
//! each connection.
//!
//! Crates for that bring their own parsers of messages and addresses. Only six commands are needed
//! here. The server's replies are limited, and only some of their words are repeated to programs.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::time::timeout;

/// Time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Time for a reply, and for accepting a piece of the text (RFC 5321 section 4.5.3.2 has minutes;
/// this server is near).
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Time for the reply to a whole message, which may be filtered first.
const ACCEPT_MAX: Duration = Duration::from_secs(300);

/// Maximum length of a reply's line, and maximum number of lines of one.
const LINE_LEN_MAX: u64 = 1024;
const LINES_MAX: usize = 100;

/// Maximum number of characters of a server's words that are repeated.
const WORDS_MAX: usize = 200;

/// A reply of the server.
#[derive(Debug, PartialEq, Eq)]
pub struct SmtpReply {
    pub code: u16,
    /// The last line, printable.
    pub words: String,
    /// Names of its extensions, in a reply to `EHLO`, unchanged.
    lines: Vec<String>,
}

impl SmtpReply {
    pub fn is_positive(&self) -> bool {
        (200..400).contains(&self.code)
    }
}

/// A conversation.
pub struct SmtpConnection<S> {
    stream: BufReader<S>,
    takes_8_bits: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> SmtpConnection<S> {
    /// Connects, and introduces the client.
    pub async fn connect(
        connect: impl AsyncFn(SocketAddr) -> io::Result<S>,
        address: SocketAddr,
        own_name: &str,
    ) -> io::Result<Self> {
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        let stream = timeout(CONNECT_MAX, connect(address)).await.map_err(|_| late())??;
        let mut server = Self { stream: BufReader::new(stream), takes_8_bits: false };
        let greeting = server.answer(ANSWER_MAX).await?;
        if !greeting.is_positive() {
            return Err(unwilling(&greeting));
        }
        let offer = server.ask(&format!("EHLO {own_name}")).await?;
        if !offer.is_positive() {
            return Err(unwilling(&offer));
        }
        server.takes_8_bits = offer.lines.iter().any(|line| line.eq_ignore_ascii_case("8BITMIME"));
        Ok(server)
    }

    /// Begins a message.
    pub async fn mail(&mut self, from: &str) -> io::Result<SmtpReply> {
        let body = if self.takes_8_bits { " BODY=8BITMIME" } else { "" };
        self.ask(&format!("MAIL FROM:<{from}>{body}")).await
    }

    /// Sends one command. The caller ensures that it is one line.
    pub async fn ask(&mut self, command: &str) -> io::Result<SmtpReply> {
        debug_assert!(!command.contains(['\r', '\n']), "checked before");
        self.send(format!("{command}\r\n").as_bytes()).await?;
        self.answer(ANSWER_MAX).await
    }

    /// Sends some of a text.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let sent = timeout(ANSWER_MAX, self.stream.write_all(bytes)).await;
        sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Returns the server's decision about the message.
    pub async fn accept(&mut self) -> io::Result<SmtpReply> {
        self.answer(ACCEPT_MAX).await
    }

    async fn answer(&mut self, within: Duration) -> io::Result<SmtpReply> {
        let answer = timeout(within, self.read_answer()).await;
        answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn read_answer(&mut self) -> io::Result<SmtpReply> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "the server there does not speak SMTP");
        let mut lines = Vec::new();
        while lines.len() < LINES_MAX {
            let mut line = Vec::new();
            (&mut self.stream).take(LINE_LEN_MAX).read_until(b'\n', &mut line).await?;
            if line.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let text = String::from_utf8_lossy(line.strip_suffix(b"\n").ok_or_else(bad)?).into_owned();
            let code = text.get(..3).and_then(|code| code.parse().ok()).ok_or_else(bad)?;
            let is_last = text.as_bytes().get(3) != Some(&b'-');
            let words = text.get(4..).unwrap_or_default().trim_end();
            let words: String = words.chars().filter(|c| (' '..='~').contains(c)).take(WORDS_MAX).collect();
            if is_last {
                lines.push(words.clone());
                return Ok(SmtpReply { code, words, lines });
            }
            lines.push(words);
        }
        Err(bad())
    }
}

fn unwilling(answer: &SmtpReply) -> io::Error {
    io::Error::other(format!("it says {} {}", answer.code, answer.words))
}

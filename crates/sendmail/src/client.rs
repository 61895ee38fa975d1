//! The part of SMTP that hands over one message (RFC 5321). Blocking: the program does nothing
//! else.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use nix::unistd::{User, getuid};

use super::SendError;
use super::message::MailMessage;

/// Time to connect, and for one reply. The relay's own times are shorter.
const CONNECT_MAX: Duration = Duration::from_secs(10);
const ANSWER_MAX: Duration = Duration::from_secs(360);

/// Longest line of a reply, and most lines of one.
const LINE_LEN_MAX: u64 = 1024;
const LINES_MAX: usize = 100;

/// The relay's extension that reports the default sender.
const SENDER: &str = "X-NAGAYA-SENDER ";

pub struct SmtpClient {
    stream: BufReader<TcpStream>,
    offers: Vec<String>,
}

impl SmtpClient {
    pub fn connect(server: SocketAddr) -> Result<Self, SendError> {
        let stream = TcpStream::connect_timeout(&server, CONNECT_MAX)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        stream.set_write_timeout(Some(ANSWER_MAX))?;
        let mut client = Self { stream: BufReader::new(stream), offers: Vec::new() };
        client.expect()?;
        client.offers = client.ask(&format!("EHLO {}", host_name()))?;
        Ok(client)
    }

    /// Returns the largest message in bytes. `None` if no limit is given.
    pub fn size_max(&self) -> Option<u64> {
        let size = self.offers.iter().find_map(|line| line.strip_prefix("SIZE ")?.trim().parse().ok());
        size.filter(|size| *size > 0)
    }

    pub fn default_sender(&self) -> String {
        let told = self.offers.iter().find_map(|line| line.strip_prefix(SENDER)).map(str::to_owned);
        told.unwrap_or_else(|| {
            let user = User::from_uid(getuid()).ok().flatten().map(|user| user.name);
            format!("{}@{}", user.unwrap_or_else(|| getuid().to_string()), host_name())
        })
    }

    /// Hands the message over.
    pub fn send(&mut self, sender: &str, message: &MailMessage) -> Result<(), SendError> {
        for address in message.recipients.iter().map(String::as_str).chain([sender]) {
            if address.chars().any(|character| character.is_control() || character.is_whitespace()) {
                return Err(SendError::Data(format!("'{}' is no address", address.escape_debug())));
            }
        }
        self.ask(&format!("MAIL FROM:<{sender}>"))?;
        for recipient in &message.recipients {
            self.ask(&format!("RCPT TO:<{recipient}>"))?;
        }
        self.ask("DATA")?;
        self.stream.get_mut().write_all(&message.text)?;
        self.ask(".")?;
        // It is handed over, so the result does not matter.
        let _ = self.ask("QUIT");
        Ok(())
    }

    fn ask(&mut self, command: &str) -> Result<Vec<String>, SendError> {
        self.stream.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        self.expect()
    }

    /// Reads a reply, which must be positive. Returns the text after its codes.
    fn expect(&mut self) -> Result<Vec<String>, SendError> {
        let mut lines = Vec::new();
        while lines.len() < LINES_MAX {
            let mut line = Vec::new();
            (&mut self.stream).take(LINE_LEN_MAX).read_until(b'\n', &mut line)?;
            if !line.ends_with(b"\n") {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            lines.push(line.get(4..).unwrap_or_default().to_owned());
            if line.as_bytes().get(3) == Some(&b'-') {
                continue;
            }
            return match line.as_bytes().first() {
                Some(b'2' | b'3') => Ok(lines),
                Some(b'5') => Err(SendError::Unavailable(line)),
                _ => Err(SendError::Temporary(line)),
            };
        }
        Err(SendError::Temporary("the mail server does not end its answer".into()))
    }
}

fn host_name() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

//! One connection of a program: its commands are checked and passed on to the mail server.
//!
//! The connection to the server is made when a message begins. The server gets nothing before that.
//! The program gets the server's answers to addresses and to the text. A stream is anything that
//! reads and writes. Not here: the limits of a tenant's mail (`desk`).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nagaya_base::date;
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::time::timeout;

use super::address::read_path;
use super::data::{TextProgress, TextReader};
use super::desk::{MailDesk, MailRefusal, MessageGuard};
use super::server::{SmtpConnection, SmtpReply};
use super::tallies::{MessageEnd, RefusalReason};
use super::{LIMITED, MailSender, NO_SERVER};

/// Maximum time without a command of the program.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Maximum time of a message altogether, until its text has come.
const MESSAGE_MAX: Duration = Duration::from_secs(600);

/// Maximum length of a command, bytes (RFC 5321 section 4.5.3.1.4, and room for parameters).
const COMMAND_LEN_MAX: u64 = 1024;

/// Maximum number of commands of one connection, so that none lasts for ever.
const COMMANDS_MAX: usize = 10_000;

/// Number of bytes of a text that are read at once.
const PIECE_LEN: usize = 16 * 1024;

/// Maximum length of the node's name, characters.
const NAME_MAX: usize = 255;

/// A message that has begun.
struct OpenMessage<T> {
    server: SmtpConnection<T>,
    from: String,
    recipients: u32,
    since: Instant,
    guard: MessageGuard,
}

impl<T> OpenMessage<T> {
    fn is_late(&self) -> bool {
        self.since.elapsed() >= MESSAGE_MAX
    }
}

const TOO_SLOW: &str = "421 4.4.2 the message took too long";

struct MailSession<'a, S, T, C> {
    stream: BufReader<S>,
    desk: &'a Arc<MailDesk>,
    sender: &'a MailSender,
    node: String,
    /// Connects to the mail server.
    connect: C,
    message: Option<OpenMessage<T>>,
}

/// Whether the conversation continues.
type GoesOn = bool;

/// Serves a program until it leaves or sends something that cannot be understood. `connect`
/// connects to the mail server.
pub async fn serve_with<S, T>(
    stream: S,
    desk: &Arc<MailDesk>,
    sender: &MailSender,
    connect: impl AsyncFn(SocketAddr) -> io::Result<T>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let stream = BufReader::with_capacity(PIECE_LEN, stream);
    let mut session = MailSession { stream, desk, sender, node: node_name(), connect, message: None };
    let _guard = match desk.begin_session(&sender.tenant, Instant::now()) {
        Ok(guard) => guard,
        Err(refusal) => return session.refuse(&refusal).await,
    };
    let greeting = format!("220 {} nagaya relays mail of tenant '{}'", session.node, sender.tenant);
    session.say(&greeting).await?;
    for _ in 0..COMMANDS_MAX {
        let Some(command) = session.read_command().await? else { return Ok(()) };
        if session.message.as_ref().is_some_and(|message| message.is_late()) {
            return session.refuse(&MailRefusal::new(RefusalReason::Slow, TOO_SLOW)).await;
        }
        if !session.obey(&command).await? {
            return Ok(());
        }
    }
    session.say("421 4.7.0 too many commands").await
}

/// Returns the node's name as a domain of SMTP.
fn node_name() -> String {
    let name = rustix::system::uname();
    let fits = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let name: String = name.nodename().to_string_lossy().chars().filter(fits).take(NAME_MAX).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

impl<S, T, C> MailSession<'_, S, T, C>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
    C: AsyncFn(SocketAddr) -> io::Result<T>,
{
    async fn say(&mut self, line: &str) -> io::Result<()> {
        let sent = timeout(SILENCE_MAX, self.stream.write_all(format!("{line}\r\n").as_bytes())).await;
        sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn refuse(&mut self, refusal: &MailRefusal) -> io::Result<()> {
        self.desk.tallies().count_refusal(&self.sender.tenant, refusal.reason);
        self.say(&refusal.answer).await
    }

    /// Passes the server's reply to the program.
    async fn pass(&mut self, answer: &SmtpReply) -> io::Result<()> {
        if !answer.is_positive() {
            self.desk.tallies().count_refusal(&self.sender.tenant, RefusalReason::Server);
        }
        let line = format!("{} {}", answer.code, answer.words);
        self.say(&line).await
    }

    /// Returns `None` if the program has left.
    async fn read_command(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        let mut limited = (&mut self.stream).take(COMMAND_LEN_MAX);
        let read = timeout(SILENCE_MAX, limited.read_until(b'\n', &mut line)).await;
        if read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? == 0 {
            return Ok(None);
        }
        let Some(line) = line.strip_suffix(b"\n") else {
            self.say("500 5.5.2 a line of this length is no command").await?;
            return Ok(None);
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        // A line with other bytes is no command, and no address.
        let is_plain = line.iter().all(|byte| (b' '..=b'~').contains(byte));
        Ok(Some(if is_plain { String::from_utf8_lossy(line).into_owned() } else { String::new() }))
    }

    async fn obey(&mut self, command: &str) -> io::Result<GoesOn> {
        let after = |prefix: &str| {
            let begin = command.get(..prefix.len())?;
            begin.eq_ignore_ascii_case(prefix).then(|| &command[prefix.len()..])
        };
        let verb = command.split(' ').next().unwrap_or_default().to_ascii_uppercase();
        if let Some(rest) = after("MAIL FROM:") {
            self.begin(rest).await?;
        } else if let Some(rest) = after("RCPT TO:") {
            self.add_recipient(rest).await?;
        } else {
            match verb.as_str() {
                "EHLO" => self.greet().await?,
                "HELO" => self.say(&format!("250 {}", self.node.clone())).await?,
                "DATA" => return self.take_text().await,
                "RSET" => {
                    self.message = None;
                    self.say("250 2.0.0 ok").await?;
                }
                "NOOP" => self.say("250 2.0.0 ok").await?,
                "VRFY" => self.say("252 2.0.0 send it, and see").await?,
                "QUIT" => {
                    self.say("221 2.0.0 bye").await?;
                    return Ok(false);
                }
                _ => self.say("502 5.5.1 this relay does not know that").await?,
            }
        }
        Ok(true)
    }

    async fn greet(&mut self) -> io::Result<()> {
        self.message = None;
        let (bytes, node) = (self.desk.options().bytes_max, self.node.clone());
        let sender = format!("{}@{node}", self.sender.tenant);
        self.say(&format!("250-{node}\r\n250-8BITMIME\r\n250-SIZE {bytes}\r\n250 X-NAGAYA-SENDER {sender}"))
            .await
    }

    async fn begin(&mut self, rest: &str) -> io::Result<()> {
        if self.message.is_some() {
            return self.say("503 5.5.1 a message has begun already").await;
        }
        let Some((from, parameters)) = read_path(rest) else {
            return self.refuse(&no_address("501 5.1.7 this is no address that may send here")).await;
        };
        let options = self.desk.options();
        let announced =
            parameters.split(' ').find_map(|word| word.strip_prefix("SIZE=")?.parse::<u64>().ok());
        if announced.is_some_and(|bytes| bytes > options.bytes_max) {
            return self.refuse(&too_large(options.bytes_max)).await;
        }
        if !options.relay {
            let answer = format!("550 5.7.1 this node relays no mail [{LIMITED}]");
            return self.refuse(&MailRefusal::new(RefusalReason::NoMail, answer)).await;
        }
        let guard = match self.desk.begin_message(&self.sender.tenant, Instant::now()) {
            Ok(guard) => guard,
            Err(refusal) => return self.refuse(&refusal).await,
        };
        let begun = async {
            let mut server = SmtpConnection::connect(&self.connect, options.server, &self.node).await?;
            let answer = server.mail(from).await?;
            io::Result::Ok((server, answer))
        };
        match begun.await {
            Ok((server, answer)) => {
                if answer.is_positive() {
                    let from = from.to_owned();
                    let since = Instant::now();
                    self.message = Some(OpenMessage { server, from, recipients: 0, since, guard });
                }
                self.pass(&answer).await
            }
            Err(error) => self.lost(&error).await,
        }
    }

    /// Handles a server that is not there, or not any more.
    async fn lost(&mut self, error: &io::Error) -> io::Result<()> {
        self.message = None;
        self.desk.note_lost(error);
        let answer = format!("451 4.4.1 the node's mail server cannot be used now [{NO_SERVER}]");
        self.refuse(&MailRefusal::new(RefusalReason::NoServer, answer)).await
    }

    async fn add_recipient(&mut self, rest: &str) -> io::Result<()> {
        let most = self.desk.options().recipients_max;
        let Some(message) = &mut self.message else {
            return self.say("503 5.5.1 no message has begun").await;
        };
        let Some((to, _)) = read_path(rest).filter(|(to, _)| !to.is_empty()) else {
            return self
                .refuse(&no_address("501 5.1.3 this is no address that mail goes to from here"))
                .await;
        };
        if message.recipients >= most {
            let answer = format!("452 4.5.3 a message may have {most} recipients [{LIMITED}]");
            return self.refuse(&MailRefusal::new(RefusalReason::MessageRecipients, answer)).await;
        }
        if let Err(refusal) = self.desk.count_recipient(&self.sender.tenant, Instant::now()) {
            return self.refuse(&refusal).await;
        }
        match message.server.ask(&format!("RCPT TO:<{to}>")).await {
            Ok(answer) => {
                if answer.is_positive() {
                    message.recipients += 1;
                    self.desk.tallies().count_recipient(&self.sender.tenant);
                }
                self.pass(&answer).await
            }
            Err(error) => self.lost(&error).await,
        }
    }

    async fn take_text(&mut self) -> io::Result<GoesOn> {
        let Some(mut message) = self.message.take_if(|message| message.recipients > 0) else {
            self.say("503 5.5.1 the message has no recipient").await?;
            return Ok(true);
        };
        let asked = message.server.ask("DATA").await;
        match asked {
            Ok(answer) if answer.code == 354 => {}
            Ok(answer) => {
                message.guard.end = MessageEnd::Refused;
                self.pass(&answer).await?;
                return Ok(true);
            }
            Err(error) => {
                self.lost(&error).await?;
                return Ok(true);
            }
        }
        self.say("354 end it with a dot alone on a line").await?;
        let most = self.desk.options().bytes_max;
        let taken = match self.pass_text(&mut message, most).await? {
            TextResult::Passed(bytes) => message.server.accept().await.map(|answer| (answer, bytes)),
            // Without an end the server discards its part.
            TextResult::Refused(refusal) => {
                message.guard.end = MessageEnd::Refused;
                self.refuse(&refusal).await?;
                return Ok(false);
            }
            TextResult::Lost(error) => Err(error),
        };
        match taken {
            Ok((answer, bytes)) => {
                let end = if answer.is_positive() { MessageEnd::HandedOver } else { MessageEnd::Refused };
                message.guard.end = end;
                let MailSender { tenant, site } = self.sender;
                let site = site.as_ref().map(|site| site.as_str());
                let OpenMessage { from, recipients, .. } = &message;
                let SmtpReply { code, words, .. } = &answer;
                tracing::info!(%tenant, site, from, recipients, bytes, "mail was handed over: {code} {words}");
                self.pass(&answer).await?;
                Ok(true)
            }
            Err(error) => {
                self.lost(&error).await?;
                // Part of the text may be unread, which is no command.
                Ok(false)
            }
        }
    }

    /// Passes the text on to its end. A text that is too long is read further for a while, and
    /// discarded. Closing a connection with unread bytes would take its reply back.
    async fn pass_text(&mut self, message: &mut OpenMessage<T>, most: u64) -> io::Result<TextResult> {
        if let Err(error) = message.server.send(self.trace().as_bytes()).await {
            return Ok(TextResult::Lost(error));
        }
        let (mut reader, mut bytes, mut refused) = (TextReader::default(), 0_u64, None);
        loop {
            let piece = timeout(SILENCE_MAX, self.stream.fill_buf()).await;
            let piece = piece.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            if piece.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let progress = reader.read(piece);
            let len = match progress {
                TextProgress::Open => piece.len(),
                TextProgress::Ended(len) => len,
                TextProgress::BareLineEnd => {
                    let answer = "554 5.6.0 its lines must end with CR LF";
                    return Ok(TextResult::Refused(MailRefusal::new(RefusalReason::LineEnd, answer)));
                }
            };
            if message.is_late() {
                return Ok(TextResult::Refused(MailRefusal::new(RefusalReason::Slow, TOO_SLOW)));
            }
            bytes += len as u64;
            if refused.is_none() {
                refused = count_piece(self.desk, self.sender, len as u64, bytes, most).err();
            }
            if let Some(refusal) = refused.take_if(|_| progress != TextProgress::Open || bytes > 2 * most) {
                return Ok(TextResult::Refused(refusal));
            }
            if refused.is_some() {
                self.stream.consume(len);
                continue;
            }
            if let Err(error) = message.server.send(&piece[..len]).await {
                return Ok(TextResult::Lost(error));
            }
            self.stream.consume(len);
            if progress != TextProgress::Open {
                return Ok(TextResult::Passed(bytes));
            }
        }
    }

    /// Returns the field that names the message's owner (RFC 5321 section 4.4). It comes before all
    /// of the program's text.
    fn trace(&self) -> String {
        let MailSender { tenant, site } = self.sender;
        let (date, node) = (date::mail(SystemTime::now()), &self.node);
        let site = site.as_ref().map(|site| format!(", site {site}")).unwrap_or_default();
        format!(
            "Received: from {tenant}.nagaya.invalid (tenant {tenant}{site})\r\n\tby {node} (nagaya) with ESMTP;\r\n\t{date}\r\n"
        )
    }
}

/// Result of passing a text on.
enum TextResult {
    /// Number of its bytes.
    Passed(u64),
    Refused(MailRefusal),
    Lost(io::Error),
}

/// Counts a piece of a text that has `bytes` with it, and may have `most`.
fn count_piece(
    desk: &MailDesk,
    sender: &MailSender,
    len: u64,
    bytes: u64,
    most: u64,
) -> Result<(), MailRefusal> {
    if bytes > most {
        return Err(too_large(most));
    }
    desk.count_bytes(&sender.tenant, len, Instant::now())
}

fn too_large(most: u64) -> MailRefusal {
    let answer = format!("552 5.3.4 a message may have {most} bytes [{LIMITED}]");
    MailRefusal::new(RefusalReason::MessageBytes, answer)
}

fn no_address(answer: &str) -> MailRefusal {
    MailRefusal::new(RefusalReason::Address, answer)
}

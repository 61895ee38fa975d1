//! `sendmail` for programs of tenants. It reads a message from standard input and passes it on by
//! SMTP, to port 25 of its own loopback.
//!
//! It runs with the rights of the calling tenant's program, in that program's network, where the
//! keeper relays mail. If the network is the node's, it meets the node's mail server itself. All or
//! none of the recipients get the message. Exit statuses are those of sysexits(3). `nagaya` is this
//! program when it is called as `sendmail`. Not here: which mail a tenant may send
//! (`nagaya_keeper`'s `mail`).

mod addresses;
mod arguments;
mod client;
#[doc(hidden)]
pub mod fuzzing;
mod message;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use self::arguments::MailArguments;
use self::client::SmtpClient;
use self::message::MailMessage;

/// Address of the relay.
const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 25);

/// Longest message if the server gives no size, bytes.
const MESSAGE_LEN_MAX: u64 = 64 << 20;

/// Why nothing was sent.
#[derive(Debug)]
enum SendError {
    /// The arguments are invalid.
    Usage(String),
    /// The message cannot be sent as it is.
    Data(String),
    /// It will not be sent, usually because of the server's reply.
    Unavailable(String),
    /// It may be sent later.
    Temporary(String),
}

impl SendError {
    /// Returns the status of sysexits(3).
    fn status(&self) -> u8 {
        match self {
            Self::Usage(_) => 64,
            Self::Data(_) => 65,
            Self::Unavailable(_) => 69,
            Self::Temporary(_) => 75,
        }
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(why) | Self::Data(why) | Self::Unavailable(why) | Self::Temporary(why)) = self;
        f.write_str(why)
    }
}

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        Self::Temporary(format!("the mail server at {SERVER} cannot be used: {error}"))
    }
}

/// Sends the message. On failure, prints the reason on standard error.
pub fn run(arguments: &[OsString]) -> ExitCode {
    match send(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sendmail: {error}");
            ExitCode::from(error.status())
        }
    }
}

fn send(arguments: &[OsString]) -> Result<(), SendError> {
    let arguments = MailArguments::parse(arguments).map_err(SendError::Usage)?;
    let mut client = SmtpClient::connect(SERVER)?;
    let most = client.size_max().unwrap_or(MESSAGE_LEN_MAX);
    let mut text = Vec::new();
    let input = io::stdin().lock();
    let read = input.take(most + 1).read_to_end(&mut text);
    read.map_err(|error| SendError::Data(format!("the message cannot be read: {error}")))?;
    if text.len() as u64 > most {
        return Err(SendError::Unavailable(format!(
            "the message is longer than the {most} bytes it may have"
        )));
    }
    let sender = arguments.sender.clone().unwrap_or_else(|| client.default_sender());
    let message = MailMessage::prepare(&text, &arguments, &sender).map_err(SendError::Data)?;
    if message.recipients.is_empty() {
        return Err(SendError::Usage("nobody is named to send it to".into()));
    }
    client.send(&sender, &message)
}

//! The relay for mail: messages of tenants' programs, handed to the node's mail server in their
//! tenant's name.
//!
//! Programs get no new rights (`no_new_privs`). So the `sendmail` of a mail server, which is setuid
//! or setgid, cannot queue for them. They speak SMTP with the keeper instead, at port 25 of their
//! own loopback: through nagaya's own `sendmail`, or directly. The keeper passes on commands and
//! text to one server, by the node's network.
//!
//! A tenant is hostile. A checked address is the only part of a command that reaches the server
//! (`address`). No part of a text reaches it in which two servers could see different ends of a
//! message (`data`). The first field of each message names its owner. Conversations, messages under
//! way, their recipients and bytes have limits, of a tenant and of the node (`desk`). No message is
//! kept here, so its memory is that of its connection. Nothing here waits without a limit, and all
//! of it is on the relay's thread. Not here: the sockets inside (`relay`), the program
//! (`nagaya_sendmail`).

mod address;
mod data;
mod desk;
mod kept;
mod server;
mod session;
mod tallies;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use nagaya_base::Code;
use nagaya_records::{RecordIndex, SiteName, TenantName};
use parking_lot::RwLock;
use tokio::net::TcpStream;

use crate::options::KeeperConfig;

use self::kept::KeptCounts;

pub use desk::MailDesk;
pub use tallies::MailTallies;
pub(crate) use {data::TextProgress, data::TextReader, server::SmtpConnection, session::serve_with};

/// Address of the relay in programs' own network.
pub const MAIL_ADDRESS: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, MAIL_PORT));
pub const MAIL_PORT: u16 = 25;

/// A tenant's program may not send this now.
const LIMITED: Code = Code(370);
/// The mail server cannot be used.
const NO_SERVER: Code = Code(371);

/// The file of counts, in the keeper's directory.
const COUNTS_FILE: &str = "mail-counts";

/// Owner of the messages of a connection.
#[derive(Debug, Clone)]
pub struct MailSender {
    pub tenant: TenantName,
    /// `None` for CGI and PHP programs, which are their tenant's.
    pub site: Option<SiteName>,
}

/// Returns nagaya's own program, which is `sendmail` under that name. `None` if its file is gone.
pub fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| std::env::current_exe().ok()).as_deref();
    program.filter(|path| path.is_file())
}

/// Opens the desk, with the counts of the previous keeper.
pub fn open_desk(
    table: Arc<RwLock<RecordIndex>>,
    options: &KeeperConfig,
    tallies: Arc<MailTallies>,
) -> MailDesk {
    let path = options.runtime_dir.join(COUNTS_FILE);
    let kept = KeptCounts::open(&path, desk::WINDOW).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "counts of tenants' mail begin again, and are not kept");
        Default::default()
    });
    MailDesk::new(Some(table), options.mail.clone(), tallies, kept)
}

/// Serves a program until it leaves or sends something that cannot be understood.
pub async fn serve(stream: TcpStream, desk: &Arc<MailDesk>, sender: &MailSender) -> io::Result<()> {
    serve_with(stream, desk, sender, TcpStream::connect).await
}

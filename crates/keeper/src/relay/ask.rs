//! Sends one query to a database on the node, and keeps a digest of the response. It is the tag of
//! an image.
//!
//! The connection is made as the relay makes an application's: with the tenant's uid, to a path
//! that is looked up with its rights. There is no password, so that the database must know the
//! tenant by its uid. The peer may be a program of the tenant's: each answer is bounded in bytes
//! and time, nothing of it is kept but its digest and the first words of an error, and no file is
//! ever sent. The writer is nobody (`SO_PASSCRED`), as with the relay. Blocks: it is a worker's
//! part. Not here: when it is asked (`instances::run::app_launch`), what another answer means
//! (`image::watch`).

mod answer;
mod mysql;
mod postgresql;
mod redis;

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nagaya_records::record::{DatabaseKind, DatabaseTag};

use crate::image::Digest;
use crate::sys::UnixIdentity;

use self::answer::BoundedExchange;
use super::socket::{connect, write_as_nobody};

pub use self::answer::AskError;

/// Maximum time of all queries of one wake, together.
pub const ASK_MAX: Duration = Duration::from_secs(2);

/// Sends the query as this user, and returns a digest of the response.
///
/// # Errors
///
/// The database cannot be reached, refuses, or has not responded completely by `until`.
pub fn ask(
    socket: &Path,
    whose: UnixIdentity,
    tag: &DatabaseTag,
    tenant: &str,
    until: Instant,
) -> Result<Digest, AskError> {
    let work = || {
        // For this thread alone: it has no other work, and starts no program.
        write_as_nobody()?;
        let stream = TimedStream::new(connect(socket, whose)?, until)?;
        converse(stream, tag, tenant)
    };
    let name = "keeper-ask".to_owned();
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| AskError::Wrong("the question was lost inside the keeper"))?
    })
}

/// Runs the whole conversation, by the kind's protocol.
pub fn converse(stream: impl Read + Write, tag: &DatabaseTag, tenant: &str) -> Result<Digest, AskError> {
    let mut answer = BoundedExchange::new(stream);
    let user = tag.user.as_deref().unwrap_or(tenant);
    match tag.kind {
        DatabaseKind::Mysql => mysql::ask(&mut answer, user, tag.database.as_deref(), &tag.ask)?,
        DatabaseKind::Postgresql => {
            postgresql::ask(&mut answer, user, tag.database.as_deref().unwrap_or(user), &tag.ask)?;
        }
        DatabaseKind::Redis => redis::ask(&mut answer, tag.database.as_deref(), &tag.ask)?,
    }
    Ok(Digest::of(&[&answer.said]))
}

/// A connection that ends at a given time, however slowly its bytes come.
struct TimedStream {
    stream: UnixStream,
    until: Instant,
}

impl TimedStream {
    fn new(socket: OwnedFd, until: Instant) -> io::Result<Self> {
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(Self { stream, until })
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for TimedStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests;

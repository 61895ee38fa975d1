//! `nagaya instance exec`: a command in a running instance, as if it ran here.
//!
//! It gets pipes, or a terminal of its own, that the keeper makes; what is typed and written goes through here, so nothing
//! of this terminal or these files is ever open in the instance. When this command ends, that one is ended. Not here:
//! running it (`nagaya_keeper`), the way there (`admin::exec`).

use std::fs::File;
use std::io::{self, IoSliceMut, IsTerminal, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use nagaya_cmdb::instance::{EXEC_GO, Exec, ExecSaid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::stdio;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::output::{self, CliError, Place};

/// Descriptors with one line.
const FDS_MAX: usize = 3;

/// Longest line the keeper says, bytes.
const LINE_MAX: usize = 64 * 1024;

/// How long what the command wrote may take to come, once it has ended. It is all in a pipe then, unless something that
/// it left behind holds it open.
const REST_MAX: Duration = Duration::from_secs(2);

/// Bytes passed on at once.
const PIECE_LEN: usize = 64 * 1024;

/// As shells have it: a command ended by a signal has its number and this.
const SIGNALLED: i32 = 128;

#[derive(Debug, clap::Args)]
pub struct Run {
    /// Its site
    site: String,
    /// Wake it if it rests
    #[arg(long)]
    wake: bool,
    /// End the command after so many seconds [default: 3600]
    #[arg(long, value_name = "SECONDS")]
    seconds_max: Option<u32>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs it, and ends with its status: 125 if nagaya could not run it.
pub fn run(run: &Run, place: &Place) -> Result<ExitCode, CliError> {
    execute(run, place).map_err(|error| CliError::NotRun(Box::new(error)))
}

fn execute(run: &Run, place: &Place) -> Result<ExitCode, CliError> {
    let has_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let exec = Exec {
        site: run.site.clone(),
        command: run.command.clone(),
        wake: run.wake,
        terminal: has_terminal.then(|| std::env::var("TERM").unwrap_or_else(|_| "dumb".into())),
        seconds_max: run.seconds_max,
    };
    let connection = output::exec_on_node(place, &run.site, &exec)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
    runtime.block_on(follow(connection))
}

/// What is between this end and the command's.
#[derive(Default)]
struct Between {
    /// Puts this terminal back as it was.
    _raw: Option<Raw>,
    /// The command's terminal.
    terminal: Option<OwnedFd>,
    /// Says so for each stream that has come to its end.
    streams: Option<(mpsc::Receiver<()>, usize)>,
}

async fn follow(connection: OwnedFd) -> Result<ExitCode, CliError> {
    let mut connection = StdUnixStream::from(connection);
    connection.write_all(&[EXEC_GO]).map_err(broken)?;
    connection.set_nonblocking(true).map_err(broken)?;
    let connection = UnixStream::from_std(connection).map_err(broken)?;
    let mut resized = signal(SignalKind::window_change()).map_err(broken)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(broken)?;
    let mut lines = Vec::new();
    let mut between = Between::default();
    loop {
        tokio::select! {
            heard = hear(&connection, &mut lines) => match heard.map_err(broken)? {
                Some((ExecSaid::Runs, ends)) => between = connect(ends).map_err(broken)?,
                Some((ExecSaid::Exited { status, signal }, _)) => {
                    between.drain();
                    let status = status.or(signal.map(|signal| SIGNALLED + signal)).unwrap_or(1);
                    return Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)));
                }
                Some((ExecSaid::Failed { error, code }, _)) => {
                    between.drain();
                    return Err(CliError::Exec { error, code });
                }
                None => return Err(CliError::Exec {
                    error: "the connection ended before the command did: did the keeper end?".into(),
                    code: "NGY0510".into(),
                }),
            },
            () = next(&mut resized) => between.resize(),
            // The terminal is put back first; the keeper ends the command.
            () = next(&mut terminated) => return Ok(ExitCode::from(128 + 15)),
        }
    }
}

async fn next(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        std::future::pending().await
    }
}

/// The next line, and what came with it. None: there is none any more.
async fn hear(socket: &UnixStream, lines: &mut Vec<u8>) -> io::Result<Option<(ExecSaid, Vec<OwnedFd>)>> {
    let mut fds = Vec::new();
    loop {
        if let Some(end) = lines.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = lines.drain(..=end).collect();
            return Ok(Some((serde_json::from_slice(&line)?, fds)));
        }
        if lines.len() > LINE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line without an end"));
        }
        socket.readable().await?;
        let mut piece = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = socket.try_io(Interest::READABLE, || {
            let mut bytes = [IoSliceMut::new(&mut piece)];
            Ok(recvmsg(socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes)
        });
        match received {
            Ok(0) => return Ok(None),
            Ok(len) => lines.extend_from_slice(&piece[..len]),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                io::ErrorKind::ConnectionReset => return Ok(None),
                _ => return Err(error),
            },
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                fds.extend(passed);
            }
        }
    }
}

/// Passes on what is typed and written, on threads: reading a terminal or a file blocks.
fn connect(ends: Vec<OwnedFd>) -> io::Result<Between> {
    let (over, ended) = mpsc::channel();
    if let [_] = ends[..] {
        let raw = Raw::begin()?;
        let terminal = ends.into_iter().next();
        let Some(terminal) = terminal else { return Err(io::ErrorKind::InvalidData.into()) };
        let (to, from) = (terminal.try_clone()?, terminal.try_clone()?);
        pass("input", io::stdin(), File::from(to), None)?;
        pass("output", File::from(from), io::stdout(), Some(over))?;
        let between = Between { _raw: Some(raw), terminal: Some(terminal), streams: Some((ended, 1)) };
        between.resize();
        return Ok(between);
    }
    let Ok([to, from, errors]) = <[OwnedFd; 3]>::try_from(ends) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the keeper gave other ends than it should"));
    };
    pass("input", io::stdin(), File::from(to), None)?;
    pass("output", File::from(from), io::stdout(), Some(over.clone()))?;
    pass("errors", File::from(errors), io::stderr(), Some(over))?;
    Ok(Between { streams: Some((ended, 2)), ..Between::default() })
}

fn pass(
    name: &str,
    mut from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    over: Option<mpsc::Sender<()>>,
) -> io::Result<()> {
    let work = move || {
        let mut piece = vec![0; PIECE_LEN];
        // A terminal whose last program has gone fails to be read: that is its end.
        while let Ok(len @ 1..) = from.read(&mut piece) {
            if to.write_all(&piece[..len]).and_then(|()| to.flush()).is_err() {
                break;
            }
        }
        // Both ends are closed before anybody is told.
        drop((from, to));
        if let Some(over) = over {
            let _ = over.send(());
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

impl Between {
    /// Waits until all that the command wrote was passed on.
    fn drain(&mut self) {
        let Some((ended, streams)) = self.streams.take() else { return };
        for _ in 0..streams {
            if ended.recv_timeout(REST_MAX).is_err() {
                return;
            }
        }
    }

    fn resize(&self) {
        // Only for how lines are broken.
        if let (Some(terminal), Ok(size)) = (&self.terminal, tcgetwinsize(stdio::stdin())) {
            let _ = tcsetwinsize(terminal, size);
        }
    }
}

/// This terminal takes keys as they come, until it is dropped.
struct Raw(Termios);

impl Raw {
    fn begin() -> io::Result<Self> {
        let before = tcgetattr(stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdio::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has gone needs nothing.
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, &self.0);
    }
}

fn broken(error: impl Into<io::Error>) -> CliError {
    CliError::Exec {
        error: format!("the command cannot be followed: {}", error.into()),
        code: "NGY0323".into(),
    }
}

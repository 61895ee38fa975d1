//! `nagaya instance exec`: a command in a running instance, as if it ran here.
//!
//! The keeper makes pipes, or a terminal, for the command. All input and output goes through here.
//! So nothing of this terminal or these files is ever open in the instance. When this command ends,
//! the other is ended. Not here: running it (`nagaya_keeper`), the route there (`admin::exec`).

use std::fs::File;
use std::io::{self, IoSliceMut, IsTerminal, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use nagaya_records::instance::{EXEC_GO, ExecCommand, ExecSaid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::stdio;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::output::{self, CliError, RecordSource};

/// Descriptors with one line.
const FDS_MAX: usize = 3;

/// Longest line from the keeper, bytes.
const LINE_MAX: usize = 64 * 1024;

/// Longest time for the rest of the output after the command has ended. All of it is in a pipe
/// then, unless a leftover process holds the pipe open.
const REST_MAX: Duration = Duration::from_secs(2);

/// Bytes passed on at once.
const PIECE_LEN: usize = 64 * 1024;

/// As in shells: a command ended by a signal has its number plus this.
const SIGNALLED: i32 = 128;

#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    /// Site of the instance
    site: String,
    /// Wake the instance if it rests
    #[arg(long)]
    wake: bool,
    /// End the command after this many seconds [default: 3600]
    #[arg(long, value_name = "SECONDS")]
    seconds_max: Option<u32>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs it, and ends with its status: 125 if nagaya could not run it.
pub fn run(run: &ExecArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    execute(run, place).map_err(|error| CliError::NotRun(Box::new(error)))
}

fn execute(run: &ExecArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let has_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let exec = ExecCommand {
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

/// The connection between this end and the command's.
#[derive(Default)]
struct ExecStreams {
    /// Restores this terminal.
    _raw: Option<RawTerminal>,
    /// The command's terminal.
    terminal: Option<OwnedFd>,
    /// Reports each stream that has ended.
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
    let mut between = ExecStreams::default();
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
            // The terminal is restored first; the keeper ends the command.
            () = next(&mut terminated) => return Ok(ExitCode::from(128 + 15)),
        }
    }
}

async fn next(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        std::future::pending().await
    }
}

/// Returns the next line, and its descriptors. `None` at the end.
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

/// Passes on input and output, on threads: reading a terminal or a file blocks.
fn connect(ends: Vec<OwnedFd>) -> io::Result<ExecStreams> {
    let (over, ended) = mpsc::channel();
    if let [_] = ends[..] {
        let raw = RawTerminal::begin()?;
        let terminal = ends.into_iter().next();
        let Some(terminal) = terminal else { return Err(io::ErrorKind::InvalidData.into()) };
        let to = terminal.try_clone()?;
        let from = terminal.try_clone()?;
        pass("input", io::stdin(), File::from(to), None)?;
        pass("output", File::from(from), io::stdout(), Some(over))?;
        let between = ExecStreams { _raw: Some(raw), terminal: Some(terminal), streams: Some((ended, 1)) };
        between.resize();
        return Ok(between);
    }
    let Ok([to, from, errors]) = <[OwnedFd; 3]>::try_from(ends) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the keeper did not pass the expected pipes"));
    };
    pass("input", io::stdin(), File::from(to), None)?;
    pass("output", File::from(from), io::stdout(), Some(over.clone()))?;
    pass("errors", File::from(errors), io::stderr(), Some(over))?;
    Ok(ExecStreams { streams: Some((ended, 2)), ..ExecStreams::default() })
}

fn pass(
    name: &str,
    mut from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    over: Option<mpsc::Sender<()>>,
) -> io::Result<()> {
    let work = move || {
        let mut piece = vec![0; PIECE_LEN];
        // Reading a terminal fails once its last program has gone: that is its end.
        while let Ok(len @ 1..) = from.read(&mut piece) {
            if to.write_all(&piece[..len]).and_then(|()| to.flush()).is_err() {
                break;
            }
        }
        // Both ends are closed before the report.
        drop((from, to));
        if let Some(over) = over {
            let _ = over.send(());
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

impl ExecStreams {
    /// Waits until all output of the command was passed on.
    fn drain(&mut self) {
        let Some((ended, streams)) = self.streams.take() else { return };
        for _ in 0..streams {
            if ended.recv_timeout(REST_MAX).is_err() {
                return;
            }
        }
    }

    fn resize(&self) {
        // Only for line wrapping.
        if let (Some(terminal), Ok(size)) = (&self.terminal, tcgetwinsize(stdio::stdin())) {
            let _ = tcsetwinsize(terminal, size);
        }
    }
}

/// Makes this terminal pass on each key, until it is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn begin() -> io::Result<Self> {
        let before = tcgetattr(stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdio::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A closed terminal needs nothing.
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, &self.0);
    }
}

fn broken(error: impl Into<io::Error>) -> CliError {
    CliError::Exec {
        error: format!("the command cannot be followed: {}", error.into()),
        code: "NGY0323".into(),
    }
}

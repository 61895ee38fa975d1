//! `nagaya vm-exec PORT DIRECTORY COMMAND...`: runs a command in the guest, beside the application.
//!
//! It runs in the sandbox, as an operator's command for an application without a kernel of its own
//! would. Its input, its output and the size of its terminal are carried over one connection with
//! the guest's server for commands, in frames: a byte for the kind, the length, and so many bytes.
//! Invariant: a frame of the guest has a bound, and a wrong one ends the command. Not here: the
//! guest's side (`c/guest_session.c`), who may run one (`nagaya_keeper`).

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use rustix::termios::{OptionalActions, tcgetattr, tcgetwinsize, tcsetattr};

use crate::guest_config::render_command;

/// Kinds of frames to the guest. Input without a byte is its end.
const INPUT: u8 = 0;
const SIZE: u8 = 1;

/// Kinds of frames from the guest: its outputs, and the exit status.
const OUTPUT: u8 = 1;
const ERROR_OUTPUT: u8 = 2;
const EXIT: u8 = 3;

/// Maximum length of a frame's bytes.
const FRAME_LEN_MAX: usize = 16 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error("usage: nagaya vm-exec PORT DIRECTORY COMMAND...")]
    Usage,
    #[error("the guest takes no commands (yet): {0}")]
    Connect(io::Error),
    #[error("the guest's server for commands has ended, or says what is no message of it")]
    Guest,
    #[error("its terminal or its input: {0}")]
    Io(#[from] io::Error),
}

/// Runs the command of these arguments to its end. Returns its exit status.
pub fn run(arguments: &[OsString]) -> Result<u8, ExecError> {
    let [port, directory, command @ ..] = arguments else { return Err(ExecError::Usage) };
    let port: u16 = port.to_str().and_then(|port| port.parse().ok()).ok_or(ExecError::Usage)?;
    let directory = PathBuf::from(directory);
    if command.is_empty() {
        return Err(ExecError::Usage);
    }
    let has_terminal = io::stdin().is_terminal();
    let resized = SigSet::from(Signal::SIGWINCH);
    resized.thread_block().map_err(io::Error::from)?;
    if has_terminal {
        let mut settings = tcgetattr(io::stdin()).map_err(io::Error::from)?;
        settings.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &settings).map_err(io::Error::from)?;
    }
    let stream =
        TcpStream::connect(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).map_err(ExecError::Connect)?;
    let to_guest = Arc::new(Mutex::new(stream.try_clone()?));
    send_order(&to_guest, command, &directory, has_terminal)?;
    let input = Arc::clone(&to_guest);
    thread::Builder::new().name("input".into()).spawn(move || send_input(&input))?;
    if has_terminal {
        thread::Builder::new().name("size".into()).spawn(move || {
            while resized.wait().is_ok() {
                send(&to_guest, SIZE, &terminal_size());
            }
        })?;
    }
    take_output(stream)
}

fn send_order(
    to: &Mutex<TcpStream>,
    command: &[OsString],
    directory: &Path,
    has_terminal: bool,
) -> io::Result<()> {
    let variables: Vec<Vec<u8>> =
        std::env::vars_os().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect();
    let terminal = has_terminal.then(|| {
        let size = tcgetwinsize(io::stdin());
        size.map_or((0, 0), |size| (size.ws_row, size.ws_col))
    });
    let order = render_command(command, directory, &variables, terminal);
    let len = u32::try_from(order.len()).map_err(io::Error::other)?;
    let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
    to.write_all(&len.to_le_bytes())?;
    to.write_all(order.as_bytes())
}

fn terminal_size() -> [u8; 4] {
    let size = tcgetwinsize(io::stdin()).map_or((0, 0), |size| (size.ws_row, size.ws_col));
    let ([row, rows], [column, columns]) = (size.0.to_le_bytes(), size.1.to_le_bytes());
    [row, rows, column, columns]
}

fn send_input(to: &Mutex<TcpStream>) {
    let mut bytes = [0; FRAME_LEN_MAX];
    loop {
        match io::stdin().read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(len @ 1..) if send(to, INPUT, &bytes[..len]) => {}
            _ => break,
        }
    }
    send(to, INPUT, &[]);
}

/// Sends a frame. Returns false if the connection has ended.
fn send(to: &Mutex<TcpStream>, kind: u8, bytes: &[u8]) -> bool {
    let len = u32::try_from(bytes.len()).unwrap_or(0).to_le_bytes();
    let frame = [&[kind], &len[..], bytes].concat();
    to.lock().unwrap_or_else(PoisonError::into_inner).write_all(&frame).is_ok()
}

/// Writes what the guest sends, until the command has ended.
fn take_output(mut from: TcpStream) -> Result<u8, ExecError> {
    let mut bytes = vec![0; FRAME_LEN_MAX];
    let status = loop {
        let (kind, len) = receive(&mut from, &mut bytes)?;
        let bytes = &bytes[..len];
        // Without a reader the rest is lost, and the exit status is not.
        let _ = match (kind, bytes) {
            (OUTPUT, _) => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
            (ERROR_OUTPUT, _) => io::stderr().write_all(bytes),
            (EXIT, [status]) => break *status,
            _ => return Err(ExecError::Guest),
        };
    };
    let _ = from.shutdown(Shutdown::Both);
    Ok(status)
}

/// Receives a frame. Returns its kind and its length.
fn receive(from: &mut impl Read, bytes: &mut [u8]) -> Result<(u8, usize), ExecError> {
    let mut head = [0; 5];
    from.read_exact(&mut head).map_err(|_| ExecError::Guest)?;
    let [kind, len @ ..] = head;
    let len = u32::from_le_bytes(len) as usize;
    let bytes = bytes.get_mut(..len).ok_or(ExecError::Guest)?;
    from.read_exact(bytes).map_err(|_| ExecError::Guest)?;
    Ok((kind, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_a_guest_have_a_bound() {
        let frame = |kind: u8, len: u32, bytes: &[u8]| [&[kind], &len.to_le_bytes()[..], bytes].concat();
        let mut bytes = vec![0; FRAME_LEN_MAX];
        let mut take = |frame: Vec<u8>| receive(&mut &frame[..], &mut bytes).ok();
        assert_eq!(take(frame(OUTPUT, 3, b"abc")), Some((OUTPUT, 3)));
        assert_eq!(take(frame(EXIT, 0, b"")), Some((EXIT, 0)));
        assert_eq!(take(frame(OUTPUT, 4, b"abc")), None);
        assert_eq!(take(frame(OUTPUT, u32::MAX, b"abc")), None);
        assert_eq!(take(frame(OUTPUT, FRAME_LEN_MAX as u32 + 1, &[0; FRAME_LEN_MAX + 1])), None);
        assert_eq!(take(vec![OUTPUT, 1]), None);
    }
}

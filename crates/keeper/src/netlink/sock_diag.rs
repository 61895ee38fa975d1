//! Queries the kernel about one Unix socket by its inode number: `unix_diag` of sock_diag(7),
//! include/uapi/linux/unix_diag.h.
//!
//! Not here: the meaning of the results (`instances::limits`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;

/// Requested attributes (`UDIAG_SHOW_NAME | UDIAG_SHOW_PEER`), and their numbers in the reply.
const SHOW: u32 = 0x1 | 0x4;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_PEER: u16 = 2;

/// Lengths of a message's header (netlink(7)), of `unix_diag_msg`, and of an attribute's header.
const HEADER_LEN: usize = 16;
const FIXED_LEN: usize = 16;
const ATTRIBUTE_LEN: usize = 4;

/// Largest number of an error (`MAX_ERRNO`, include/linux/err.h).
const ERRNO_MAX: i32 = 4095;

/// Maximum length of a reply: the fixed parts, a name of 108 bytes and a number.
const ANSWER_LEN_MAX: usize = 512;

/// Whether this kernel reports Unix sockets; if not, why. The query may load its module.
pub fn is_there() -> Result<(), String> {
    judge(ask_for_own())
}

/// Queries a socket that certainly exists. The kernel gives the same reply for an unknown family as
/// for a missing socket.
fn ask_for_own() -> io::Result<Option<DiagSocket>> {
    let (own, _other) = UnixStream::pair()?;
    let inode = rustix::fs::fstat(own.as_fd())?.st_ino;
    SockDiag::open()?.ask(u32::try_from(inode).map_err(|_| io::ErrorKind::InvalidData)?)
}

fn judge(asked: io::Result<Option<DiagSocket>>) -> Result<(), String> {
    match asked {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err("the kernel has no unix_diag".into()),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::PROTONOSUPPORT) => {
            Err("the kernel has no sock_diag".into())
        }
        Err(error) => Err(format!("the kernel cannot be asked: {error}")),
    }
}

/// A netlink socket for queries about sockets of this thread's network.
#[derive(Debug)]
pub struct SockDiag(OwnedFd);

#[derive(Debug, Default, PartialEq, Eq)]
pub struct DiagSocket {
    pub state: u8,
    /// `None` if it is not connected, or the other end was not accepted yet.
    pub peer: Option<u32>,
    /// Its address. An accepted socket has the address of the listening one.
    pub name: Vec<u8>,
}

impl SockDiag {
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let protocol = Some(netlink::SOCK_DIAG);
        Ok(Self(rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?))
    }

    /// Returns `None` if there is no such socket, or this kernel cannot tell.
    pub fn ask(&self, inode: u32) -> io::Result<Option<DiagSocket>> {
        rustix::io::write(&self.0, &question(inode))?;
        let mut answer = [0; ANSWER_LEN_MAX];
        // The kernel replies before `write` returns.
        let len = rustix::io::read(&self.0, &mut answer)?;
        parse(&answer[..len])
    }
}

fn question(inode: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(40);
    let mut put = |part: &[u8]| bytes.extend_from_slice(part);
    put(&40_u32.to_ne_bytes());
    put(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(&NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and sender.
    put(&[0; 8]);
    let family = u8::try_from(AddressFamily::UNIX.as_raw()).expect("AF_UNIX is 1");
    put(&[family, 0, 0, 0]);
    // In any state.
    put(&u32::MAX.to_ne_bytes());
    put(&inode.to_ne_bytes());
    put(&SHOW.to_ne_bytes());
    // Any socket that has that number now.
    put(&[0xff; 8]);
    bytes
}

pub(crate) fn parse(answer: &[u8]) -> io::Result<Option<DiagSocket>> {
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    match short_at(answer, 4).ok_or_else(short)? {
        NLMSG_ERROR => {
            let number = number_at(answer, HEADER_LEN).ok_or_else(short)?.cast_signed().wrapping_neg();
            match number {
                _ if number == Errno::NOENT.raw_os_error() => Ok(None),
                // `Errno` takes no other numbers.
                1..=ERRNO_MAX => Err(io::Error::from_raw_os_error(number)),
                _ => Err(io::ErrorKind::InvalidData.into()),
            }
        }
        SOCK_DIAG_BY_FAMILY => {
            let state = *answer.get(HEADER_LEN + 2).ok_or_else(short)?;
            let mut found = DiagSocket { state, ..DiagSocket::default() };
            let mut rest = answer.get(HEADER_LEN + FIXED_LEN..).ok_or_else(short)?;
            while let (Some(len), Some(kind)) = (short_at(rest, 0), short_at(rest, 2)) {
                let len = usize::from(len);
                let value = rest.get(ATTRIBUTE_LEN..len).ok_or_else(short)?;
                match kind {
                    UNIX_DIAG_NAME => found.name = value.to_vec(),
                    // An end that was not accepted yet has no inode.
                    UNIX_DIAG_PEER => found.peer = number_at(value, 0).filter(|inode| *inode != 0),
                    _ => {}
                }
                rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
            }
            Ok(Some(found))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn short_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn inode(socket: impl std::os::fd::AsFd) -> u32 {
        u32::try_from(rustix::fs::fstat(socket).unwrap().st_ino).unwrap()
    }

    #[test]
    fn the_other_end_is_known_once_it_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let client = UnixStream::connect(dir.path().join("s")).unwrap();
        let diag = SockDiag::open().unwrap();
        if let Err(why) = is_there() {
            eprintln!("SKIPPED: {why}");
            return;
        }
        let waits = diag.ask(inode(&client)).unwrap().expect("it is open");
        assert_eq!(waits.peer, None);
        let (server, _) = listener.accept().unwrap();
        assert_eq!(diag.ask(inode(&client)).unwrap().unwrap().peer, Some(inode(&server)));
        let accepted = diag.ask(inode(&server)).unwrap().unwrap();
        let listens = diag.ask(inode(&listener)).unwrap().unwrap();
        assert_eq!((&accepted.name, accepted.state, listens.state), (&listens.name, 1, 10));
        assert!(!accepted.name.is_empty());
        let gone = inode(&client);
        drop((client, server));
        assert_eq!(diag.ask(gone).unwrap(), None);
    }

    #[test]
    fn kernel_without_socket_diagnostics_is_recognized() {
        assert_eq!(judge(Ok(Some(DiagSocket::default()))), Ok(()));
        for (asked, why) in [
            (Ok(None), "no unix_diag"),
            (Err(Errno::PROTONOSUPPORT.into()), "no sock_diag"),
            (Err(Errno::PERM.into()), "cannot be asked"),
            (Err(io::ErrorKind::UnexpectedEof.into()), "cannot be asked"),
        ] {
            assert!(judge(asked).unwrap_err().contains(why), "{why}");
        }
    }

    #[test]
    fn truncated_netlink_answer_is_an_error() {
        let mut whole = vec![0; 16];
        whole[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        whole.extend([0; 16]);
        whole.extend(8_u16.to_ne_bytes());
        whole.extend(UNIX_DIAG_PEER.to_ne_bytes());
        whole.extend(7_u32.to_ne_bytes());
        assert_eq!(parse(&whole).unwrap().unwrap().peer, Some(7));
        for len in (0..whole.len()).filter(|len| *len != 32 && !(33..36).contains(len)) {
            assert!(parse(&whole[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn an_error_has_a_number_that_errors_have() {
        let answer = |number: i32| {
            let mut bytes = vec![0; HEADER_LEN];
            bytes[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            bytes.extend(number.to_ne_bytes());
            parse(&bytes)
        };
        assert_eq!(answer(-2).unwrap(), None);
        assert_eq!(answer(-13).unwrap_err().raw_os_error(), Some(13));
        for number in [0, 1, -4096, i32::MIN, i32::MAX] {
            assert_eq!(answer(number).unwrap_err().kind(), io::ErrorKind::InvalidData, "{number}");
        }
    }
}

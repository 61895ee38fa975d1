//! Captures the whole network. Every TCP connection to an address outside of the sandbox' loopback
//! arrives at one socket of the keeper's. The connection's own address shows its destination.
//!
//! Two things achieve that. A route makes every address the sandbox' own. A kernel program gives
//! each new connection to that socket (`BPF_PROG_TYPE_SK_LOOKUP` of `bpf(2)`). Both are in the
//! sandbox' network and end with it, the program also with the descriptor that holds it. Not here:
//! where connections lead (`crate::relay`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::netlink::route;

use super::{kernel, outlet};

/// Address of the sandbox' name server.
pub const RESOLVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(127, 77, 1, 53), 53);

/// The port of the one socket: one that no program in there can listen on. Nobody need know it.
const PORT: u16 = 1;

/// Sockets at which a sandbox' connections arrive. All of them must be kept while it runs.
#[derive(Debug)]
pub struct NetworkCapture {
    /// Non-blocking.
    pub listener: OwnedFd,
    /// Name queries, by UDP and TCP. Non-blocking.
    pub questions: OwnedFd,
    pub long_questions: OwnedFd,
    /// Dropping it ends the capture.
    pub hold: OwnedFd,
}

/// Captures the network of this thread.
pub fn capture() -> io::Result<NetworkCapture> {
    route::add_all_addresses(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    let v6 = outlet::listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT)));
    let listener = match v6 {
        // It takes those of IPv4, too.
        Ok(listener) => {
            // Without IPv6 there is nothing to capture.
            if let Err(error) = route::add_all_addresses(IpAddr::V6(Ipv6Addr::LOCALHOST)) {
                tracing::debug!(%error, "a sandbox has no IPv6 outside");
            }
            listener
        }
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) => {
            outlet::listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)))?
        }
        Err(error) => return Err(error),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let questions = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    rustix::net::bind(&questions, &RESOLVER)?;
    let long_questions = outlet::listen(SocketAddr::V4(RESOLVER))?;
    let hold = give_all_to(listener.as_fd()).map_err(|error| {
        io::Error::new(error.kind(), format!("taking its connections by a program of the kernel's: {error}"))
    })?;
    Ok(NetworkCapture { listener, questions, long_questions, hold })
}

fn give_all_to(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let network = rustix::fs::open("/proc/thread-self/ns/net", flags, Mode::empty())?;
    let sockets = kernel::socket_map(listener)?;
    let program = kernel::lookup_program(&program(sockets.as_raw_fd()))?;
    kernel::attach_lookup(program.as_fd(), network.as_fd())
}

/// Registers by their use in the program: the result and arguments of a function, and two that it
/// preserves.
const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const CONTEXT: u8 = 6;
const SOCKET: u8 = 7;
const FRAME: u8 = 10;

/// Operations (`linux/bpf.h`, RFC 9669).
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x62;
const LOAD_MAP: u8 = 0x18;
const ADD: u8 = 0x07;
const AND: u8 = 0x57;
const OR: u8 = 0x4f;
const SET: u8 = 0xb7;
const COPY: u8 = 0xbf;
const IF_EQUAL: u8 = 0x15;
const IF_OTHER: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// The source register that marks an immediate value as a map's descriptor (`BPF_PSEUDO_MAP_FD`).
const MAP_FD: u8 = 1;

/// Functions of the kernel.
const MAP_LOOKUP: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;

/// Fields of `struct bpf_sk_lookup`. Addresses are in network order, each word read as it is
/// stored.
const FAMILY: i16 = 8;
const PROTOCOL: i16 = 12;
const LOCAL_IP4: i16 = 40;
const LOCAL_IP6: i16 = 44;

const INET: i32 = 2;
const TCP: i32 = 6;

/// Gives a new TCP connection to the first socket of the map, unless it is to 127.0.0.0/8 or ::1.
/// In that case, as in all others, the kernel proceeds as usual.
fn program(map: i32) -> Vec<u64> {
    let first_byte = i32::from_ne_bytes([0xff, 0, 0, 0]);
    let loopback4 = i32::from_ne_bytes([127, 0, 0, 0]);
    let loopback6 = i32::from_ne_bytes([0, 0, 0, 1]);
    vec![
        code(COPY, CONTEXT, R1, 0, 0),
        code(LOAD_WORD, R2, CONTEXT, PROTOCOL, 0),
        code(IF_OTHER, R2, 0, 28, TCP),
        code(LOAD_WORD, R2, CONTEXT, FAMILY, 0),
        code(IF_OTHER, R2, 0, 4, INET),
        code(LOAD_WORD, R2, CONTEXT, LOCAL_IP4, 0),
        code(AND, R2, 0, 0, first_byte),
        code(IF_EQUAL, R2, 0, 23, loopback4),
        code(IF_OTHER, R2, 0, 8, loopback4),
        // IPv6: three words of zero, and the fourth.
        code(LOAD_WORD, R2, CONTEXT, LOCAL_IP6, 0),
        code(LOAD_WORD, R3, CONTEXT, LOCAL_IP6 + 4, 0),
        code(OR, R2, R3, 0, 0),
        code(LOAD_WORD, R3, CONTEXT, LOCAL_IP6 + 8, 0),
        code(OR, R2, R3, 0, 0),
        code(IF_OTHER, R2, 0, 2, 0),
        code(LOAD_WORD, R3, CONTEXT, LOCAL_IP6 + 12, 0),
        code(IF_EQUAL, R3, 0, 14, loopback6),
        // The socket.
        code(STORE_WORD, FRAME, 0, -4, 0),
        code(COPY, R2, FRAME, 0, 0),
        code(ADD, R2, 0, 0, -4),
        code(LOAD_MAP, R1, MAP_FD, 0, map),
        code(0, 0, 0, 0, 0),
        code(CALL, 0, 0, 0, MAP_LOOKUP),
        code(IF_EQUAL, R0, 0, 7, 0),
        code(COPY, SOCKET, R0, 0, 0),
        code(COPY, R1, CONTEXT, 0, 0),
        code(COPY, R2, R0, 0, 0),
        code(SET, R3, 0, 0, 0),
        code(CALL, 0, 0, 0, SK_ASSIGN),
        code(COPY, R1, SOCKET, 0, 0),
        code(CALL, 0, 0, 0, SK_RELEASE),
        // `SK_PASS`: with the socket that was assigned, or as usual.
        code(SET, R0, 0, 0, 1),
        code(EXIT, 0, 0, 0, 0),
    ]
}

/// `struct bpf_insn`. Jumps are counted from the next instruction.
fn code(operation: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
    let mut bytes = [operation, registers, 0, 0, 0, 0, 0, 0];
    bytes[2..4].copy_from_slice(&offset.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

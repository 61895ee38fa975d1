//! Reads and changes the kernel's addresses and routes, in the network of the calling thread.
//!
//! Not here: sockets at those addresses (`sandbox::outlet`, `sandbox::capture`), permissions
//! (`relay`).

use std::io;
use std::net::IpAddr;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Index of the loopback device, the first in every network namespace.
const LOOPBACK: u32 = 1;

/// `rtnetlink(7)` and `netlink(7)`.
const NLMSG_ERROR: u16 = 2;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Nobody else can have an address of a loopback device.
const IFA_F_NODAD: u8 = 0x2;
const RT_SCOPE_HOST: u8 = 254;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;

/// Length of `struct nlmsghdr`, bytes.
const HEADER_LEN: usize = 16;

/// Position of a route's kind in `struct rtmsg`, behind the header.
const ROUTE_KIND: usize = HEADER_LEN + 7;

/// Number of bytes of a reply that are read: the needed ones are among the first.
const ANSWER_LEN: usize = 512;

/// Gives the loopback device this address.
pub fn add_address(address: IpAddr) -> io::Result<()> {
    acknowledged(&ask(&new_address(address))?)
}

/// Makes all addresses of this one's family the network's own. Packets to them arrive at the
/// loopback device, from this address.
pub fn add_all_addresses(from: IpAddr) -> io::Result<()> {
    acknowledged(&ask(&new_route(from))?)
}

/// Whether packets to this address stay on this machine. Unlike binding to it, this does not change
/// where `net.ipv4.ip_nonlocal_bind` is set.
pub fn is_own(address: IpAddr) -> io::Result<bool> {
    Ok(route_kind(&ask(&get_route(address))?)? == RTN_LOCAL)
}

fn ask(message: &[u8]) -> io::Result<Vec<u8>> {
    let flags = SocketFlags::CLOEXEC;
    // Its protocol 0 is that of addresses and routes.
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    rustix::net::send(&socket, message, SendFlags::empty())?;
    let mut answer = vec![0; ANSWER_LEN];
    let (len, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    answer.truncate(len);
    Ok(answer)
}

/// Builds the message that gives the loopback device this one address.
fn new_address(address: IpAddr) -> Vec<u8> {
    let (family, bytes) = family_and_bytes(address);
    // `struct ifaddrmsg`.
    let mut body = vec![family, bits_of(&bytes), IFA_F_NODAD, RT_SCOPE_HOST];
    body.extend(LOOPBACK.to_ne_bytes());
    for kind in [IFA_LOCAL, IFA_ADDRESS] {
        body.extend(attribute(kind, &bytes));
    }
    change(RTM_NEWADDR, &body)
}

/// Builds the message that makes every address of a family a local one.
fn new_route(from: IpAddr) -> Vec<u8> {
    let (family, bytes) = family_and_bytes(from);
    // `struct rtmsg`: no bits of a destination or a source, and no type of service.
    let mut body = vec![family, 0, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL];
    body.extend([0; 4]);
    body.extend(attribute(RTA_OIF, &LOOPBACK.to_ne_bytes()));
    body.extend(attribute(RTA_PREFSRC, &bytes));
    change(RTM_NEWROUTE, &body)
}

/// Builds the message that requests the route to this address.
fn get_route(address: IpAddr) -> Vec<u8> {
    let (family, bytes) = family_and_bytes(address);
    let mut body = vec![family, bits_of(&bytes)];
    body.extend([0; 10]);
    body.extend(attribute(RTA_DST, &bytes));
    message(RTM_GETROUTE, 0, &body)
}

fn family_and_bytes(address: IpAddr) -> (u8, Vec<u8>) {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (AddressFamily::INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AddressFamily::INET6, address.octets().to_vec()),
    };
    (u8::try_from(family.as_raw()).expect("both families have small numbers"), bytes)
}

fn bits_of(address: &[u8]) -> u8 {
    u8::try_from(address.len() * 8).expect("4 or 16 bytes")
}

/// Builds an attribute. `bytes` are a whole number of words.
fn attribute(kind: u16, bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + bytes.len()).expect("an address is short");
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), bytes].concat()
}

/// Builds a message that is acknowledged, and may repeat an existing state.
fn change(kind: u16, body: &[u8]) -> Vec<u8> {
    message(kind, NLM_F_ACK | NLM_F_REPLACE | NLM_F_CREATE, body)
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(HEADER_LEN + body.len()).expect("the message is short");
    let flags = flags | NLM_F_REQUEST;
    // With a number that comes back, and the kernel's own address.
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], body].concat()
}

/// Checks an acknowledgement, which is an error with the number 0.
pub(crate) fn acknowledged(answer: &[u8]) -> io::Result<()> {
    match (kind_of(answer), error_of(answer)) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        _ => Err(refused(answer)),
    }
}

pub(crate) fn route_kind(answer: &[u8]) -> io::Result<u8> {
    match (kind_of(answer), answer.get(ROUTE_KIND)) {
        (Some(RTM_NEWROUTE), Some(kind)) => Ok(*kind),
        _ => Err(refused(answer)),
    }
}

fn refused(answer: &[u8]) -> io::Error {
    match (kind_of(answer), error_of(answer)) {
        (Some(NLMSG_ERROR), Some(error)) if error != 0 => {
            io::Error::from_raw_os_error(error.saturating_neg())
        }
        _ => io::Error::new(io::ErrorKind::InvalidData, "the kernel answers otherwise than it should"),
    }
}

fn kind_of(answer: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?))
}

fn error_of(answer: &[u8]) -> Option<i32> {
    Some(i32::from_ne_bytes(answer.get(HEADER_LEN..HEADER_LEN + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_as_long_as_it_says() {
        for (address, len, route_len, asked_len) in [("203.0.113.7", 40, 44, 36), ("2001:db8::1", 64, 56, 48)]
        {
            let address: IpAddr = address.parse().unwrap();
            for (message, len) in [
                (new_address(address), len),
                (new_route(address), route_len),
                (get_route(address), asked_len),
            ] {
                assert_eq!(message.len(), len);
                assert_eq!(u32::from_ne_bytes(message[..4].try_into().unwrap()) as usize, len);
            }
        }
    }

    #[test]
    fn an_answer_is_an_acknowledgement_or_an_error() {
        let answer = |kind: u16, error: i32| {
            let mut answer = vec![0; 36];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            answer[16..20].copy_from_slice(&error.to_ne_bytes());
            answer
        };
        acknowledged(&answer(2, 0)).unwrap();
        let is_refused = |answer: &[u8], kind| {
            assert_eq!(acknowledged(answer).unwrap_err().kind(), kind);
            assert_eq!(route_kind(answer).unwrap_err().kind(), kind);
        };
        is_refused(&answer(2, -1), io::ErrorKind::PermissionDenied);
        is_refused(&answer(3, 0), io::ErrorKind::InvalidData);
        is_refused(&[], io::ErrorKind::InvalidData);
        // No acknowledgement says which way an address is.
        assert!(route_kind(&answer(2, 0)).is_err());
    }

    #[test]
    fn addresses_of_this_machine_are_known() {
        for own in ["127.0.0.1", "127.1.2.3", "0.0.0.0"] {
            assert!(is_own(own.parse().unwrap()).unwrap(), "{own}");
        }
        // For documentation: no machine has it, and some have no way to it.
        let other = is_own("203.0.113.254".parse().unwrap());
        assert!(!matches!(other, Ok(true)), "{other:?}");
    }
}

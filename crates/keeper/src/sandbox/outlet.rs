//! Places in a sandbox' network that lead out of it: sockets the keeper listens on in there, at addresses of others.
//!
//! A connection to such an address ends at the sandbox' own loopback device, which has the address too. Not here: where
//! they lead (`crate::relay`).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::network::BACKLOG;

/// Index of the loopback device, the first in every network namespace.
const LOOPBACK: u32 = 1;

/// `rtnetlink(7)` and `netlink(7)`.
const NLMSG_ERROR: u16 = 2;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
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
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;

/// Bytes of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;

/// Listens at this address of the network this thread is in, which gets the address if it has it not.
pub fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    if !address.ip().is_loopback() {
        add_address(address.ip())?;
    }
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn add_address(address: IpAddr) -> io::Result<()> {
    ask(&new_address(address))
}

/// Makes all addresses of this one's family the network's own: what is sent to them comes to the loopback device, from
/// this address.
pub fn add_all_addresses(from: IpAddr) -> io::Result<()> {
    ask(&new_route(from))
}

fn ask(message: &[u8]) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    // Its protocol 0 is that of addresses and routes.
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    rustix::net::send(&socket, message, SendFlags::empty())?;
    let mut answer = [0; 512];
    let (len, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    read_answer(answer.get(..len).unwrap_or_default())
}

/// The message that gives the loopback device this address and no other.
fn new_address(address: IpAddr) -> Vec<u8> {
    let (family, bytes) = family_and_bytes(address);
    let bits = u8::try_from(bytes.len() * 8).expect("4 or 16 bytes");
    // `struct ifaddrmsg`.
    let mut body = vec![family, bits, IFA_F_NODAD, RT_SCOPE_HOST];
    body.extend(LOOPBACK.to_ne_bytes());
    for kind in [IFA_LOCAL, IFA_ADDRESS] {
        body.extend(attribute(kind, &bytes));
    }
    message(RTM_NEWADDR, &body)
}

/// The message that makes every address of a family a local one.
fn new_route(from: IpAddr) -> Vec<u8> {
    let (family, bytes) = family_and_bytes(from);
    // `struct rtmsg`: no bits of a destination or a source, and no kind of service.
    let mut body = vec![family, 0, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL];
    body.extend([0; 4]);
    body.extend(attribute(RTA_OIF, &LOOPBACK.to_ne_bytes()));
    body.extend(attribute(RTA_PREFSRC, &bytes));
    message(RTM_NEWROUTE, &body)
}

fn family_and_bytes(address: IpAddr) -> (u8, Vec<u8>) {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (AddressFamily::INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AddressFamily::INET6, address.octets().to_vec()),
    };
    (u8::try_from(family.as_raw()).expect("both families have small numbers"), bytes)
}

/// `bytes` are a whole number of words.
fn attribute(kind: u16, bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + bytes.len()).expect("an address is short");
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), bytes].concat()
}

fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(HEADER_LEN + body.len()).expect("the message is short");
    let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_REPLACE | NLM_F_CREATE;
    // With a number that comes back, and the kernel's own address.
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], body].concat()
}

/// An acknowledgement is an error with the number 0.
fn read_answer(answer: &[u8]) -> io::Result<()> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "the kernel answers otherwise than it should");
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error = answer.get(HEADER_LEN..HEADER_LEN + 4).and_then(|bytes| bytes.try_into().ok());
    match (kind, error.map(i32::from_ne_bytes)) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_as_long_as_it_says() {
        for (address, len, route_len) in [("203.0.113.7", 40, 44), ("2001:db8::1", 64, 56)] {
            let address: IpAddr = address.parse().unwrap();
            for (message, len) in [(new_address(address), len), (new_route(address), route_len)] {
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
            read_answer(&answer)
        };
        answer(2, 0).unwrap();
        assert_eq!(answer(2, -1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(answer(3, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(read_answer(&[]).is_err());
    }
}

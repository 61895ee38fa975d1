//! Names of fields between proxies, and how addresses and numbers are written in them.

use std::net::IpAddr;

use http::header::HeaderName;

pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

pub const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");

/// Writes an address. Nearly every one is IPv4, and `fmt` takes longer for its four numbers than
/// for the rest of the head.
pub fn push_address(out: &mut impl Extend<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            for (place, octet) in address.octets().into_iter().enumerate() {
                if place > 0 {
                    out.extend([b'.']);
                }
                push_number(out, octet.into());
            }
        }
        IpAddr::V6(address) => out.extend(address.to_string().bytes()),
    }
}

/// Returns the lowest `N` hexadecimal digits of `number`.
pub fn hex<const N: usize>(number: u128) -> [u8; N] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    std::array::from_fn(|at| DIGITS[(number >> ((N - 1 - at) * 4)) as usize & 15])
}

pub fn push_number(out: &mut impl Extend<u8>, number: u16) {
    out.extend(itoa::Buffer::new().format(number).bytes());
}

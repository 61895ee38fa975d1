//! Parses the header that a proxy sends first on a connection. It names the client: PROXY
//! protocol, versions 1 and 2.
//!
//! Source: `proxy-protocol.txt` of HAProxy, sections 2.1 (text), 2.2 (binary) and 2.2.3 (CRC32c).
//! Existing crates do not verify checksums, and this is the first input of an unknown peer.
//! Invariant: not a byte behind the header is taken off the socket, so TLS and HTTP find all
//! their data. Not here: whose headers are believed (`listen::connection`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

/// First bytes of version 2.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// Length of the fixed part of version 2. It has the signature, version and command, family and
/// protocol, and the length of the rest.
const FIXED_LEN: usize = 16;

/// First bytes of version 1.
const TEXT_BEGIN: &[u8] = b"PROXY ";

/// Maximum length of a line of version 1, with its end.
const TEXT_LEN_MAX: usize = 107;

/// Maximum length of a header of version 2. HAProxy's are below 600 bytes. A client's certificate
/// may be in it.
pub const HEADER_LEN_MAX: usize = 4096;

/// Type of the extension with a CRC32c of the whole header.
const TYPE_CRC32C: u8 = 0x03;

/// Both ends of a client's connection to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxiedAddresses {
    pub source: SocketAddr,
    pub destination: SocketAddr,
}

/// A whole header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyHeader {
    pub len: usize,
    /// `None` if the connection is the proxy's own (`LOCAL`), or its client has no IP address
    /// (`UNKNOWN`, `UNSPEC`, `AF_UNIX`).
    pub told: Option<ProxiedAddresses>,
}

/// Reason why bytes are no header.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("it does not begin with a PROXY header")]
    Absent,
    #[error("its PROXY header is malformed: {0}")]
    Malformed(&'static str),
    #[error("its PROXY header is longer than {HEADER_LEN_MAX} bytes")]
    TooLong,
    #[error("its PROXY header has a wrong checksum")]
    Checksum,
    #[error("it ended within its PROXY header: {0}")]
    Io(#[from] io::Error),
}

/// Reads the header off the connection, and nothing behind it. There is no time limit here.
pub async fn read(stream: &mut TcpStream) -> Result<ProxyHeader, HeaderError> {
    let mut taken = Vec::new();
    let mut ahead = [0; HEADER_LEN_MAX + 1];
    loop {
        let room = ahead.len() - taken.len().min(HEADER_LEN_MAX);
        let seen = stream.peek(&mut ahead[..room]).await?;
        if seen == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let before = taken.len();
        taken.extend_from_slice(&ahead[..seen]);
        let header = parse(&taken)?;
        // All bytes so far belong to an incomplete header.
        let end = header.map_or(taken.len(), |header| header.len);
        stream.read_exact(&mut ahead[..end - before]).await?;
        if let Some(header) = header {
            return Ok(header);
        }
    }
}

/// Returns the header at the beginning of `input`. `None` if more is needed. Then all of `input`
/// belongs to it.
pub fn parse(input: &[u8]) -> Result<Option<ProxyHeader>, HeaderError> {
    let begins = |with: &[u8]| input.iter().zip(with).all(|(a, b)| a == b);
    if begins(SIGNATURE) {
        return parse_binary(input);
    }
    if begins(TEXT_BEGIN) {
        return parse_text(input);
    }
    Err(HeaderError::Absent)
}

/// Parses version 1: one line of text.
fn parse_text(input: &[u8]) -> Result<Option<ProxyHeader>, HeaderError> {
    let within = &input[..input.len().min(TEXT_LEN_MAX)];
    let Some(end) = within.windows(2).position(|pair| pair == b"\r\n") else {
        let is_over = input.len() >= TEXT_LEN_MAX;
        return if is_over { Err(HeaderError::Malformed("its line does not end")) } else { Ok(None) };
    };
    let line = std::str::from_utf8(&input[..end]).map_err(|_| HeaderError::Malformed("it is not ASCII"))?;
    Ok(Some(ProxyHeader { len: end + 2, told: parse_line(line).map_err(HeaderError::Malformed)? }))
}

fn parse_line(line: &str) -> Result<Option<ProxiedAddresses>, &'static str> {
    let mut words = line.split(' ');
    words.next();
    let family = words.next().ok_or("it names no protocol")?;
    // The rest of the line must be ignored.
    if family == "UNKNOWN" {
        return Ok(None);
    }
    let words: Vec<&str> = words.collect();
    let &[source, destination, source_port, destination_port] = &words[..] else {
        return Err("it has not two addresses and two ports");
    };
    let address = |word: &str| match family {
        "TCP4" => word.parse().map(IpAddr::V4).map_err(|_| "an address is not IPv4"),
        "TCP6" => word.parse().map(IpAddr::V6).map_err(|_| "an address is not IPv6"),
        _ => Err("its protocol is not known"),
    };
    let source = SocketAddr::new(address(source)?, parse_port(source_port)?);
    let destination = SocketAddr::new(address(destination)?, parse_port(destination_port)?);
    Ok(Some(ProxiedAddresses { source, destination }))
}

/// Parses a decimal number without leading zeroes.
fn parse_port(word: &str) -> Result<u16, &'static str> {
    let is_plain = word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    let port = is_plain.then(|| word.parse().ok()).flatten();
    port.ok_or("a port is not a number up to 65535")
}

/// Parses version 2: binary.
fn parse_binary(input: &[u8]) -> Result<Option<ProxyHeader>, HeaderError> {
    let Some((fixed, _)) = input.split_at_checked(FIXED_LEN) else { return Ok(None) };
    let len = FIXED_LEN + usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if len > HEADER_LEN_MAX {
        return Err(HeaderError::TooLong);
    }
    let (version, command) = (fixed[12] >> 4, fixed[12] & 0x0f);
    if version != 2 {
        return Err(HeaderError::Malformed("its version is not 2"));
    }
    if command > 1 {
        return Err(HeaderError::Malformed("its command is neither LOCAL nor PROXY"));
    }
    let Some(whole) = input.get(..len) else { return Ok(None) };
    let (told, addresses_len) = parse_addresses(fixed[13], &whole[FIXED_LEN..])?;
    check_extensions(whole, FIXED_LEN + addresses_len)?;
    let is_local = command == 0;
    Ok(Some(ProxyHeader { len, told: told.filter(|_| !is_local) }))
}

/// Returns the addresses of a family, and their length in bytes.
fn parse_addresses(family: u8, bytes: &[u8]) -> Result<(Option<ProxiedAddresses>, usize), HeaderError> {
    const TCP4: u8 = 0x11;
    const TCP6: u8 = 0x21;
    const SHORT: HeaderError = HeaderError::Malformed("it is too short for its addresses");
    let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    // The upper half is the family, the lower one the protocol.
    match family {
        TCP4 => {
            let octets = bytes.first_chunk::<12>().ok_or(SHORT)?;
            let [a, b, c, d, e, f, g, h, ..] = *octets;
            let source = SocketAddr::from((Ipv4Addr::new(a, b, c, d), port(8)));
            let destination = SocketAddr::from((Ipv4Addr::new(e, f, g, h), port(10)));
            Ok((Some(ProxiedAddresses { source, destination }), 12))
        }
        TCP6 => {
            let (source, rest) = bytes.split_first_chunk::<16>().ok_or(SHORT)?;
            let (destination, ports) = rest.split_first_chunk::<16>().ok_or(SHORT)?;
            if ports.len() < 4 {
                return Err(SHORT);
            }
            let source = SocketAddr::from((Ipv6Addr::from(*source), port(32)));
            let destination = SocketAddr::from((Ipv6Addr::from(*destination), port(34)));
            Ok((Some(ProxiedAddresses { source, destination }), 36))
        }
        // AF_UNIX, as a stream or as datagrams: two paths of 108 bytes.
        0x31 | 0x32 if bytes.len() >= 216 => Ok((None, 216)),
        0x31 | 0x32 => Err(SHORT),
        // Datagrams over IP cannot have come here.
        0x12 | 0x22 => Err(HeaderError::Malformed("its client does not speak TCP")),
        // UNSPEC: the rest must be ignored, and the begin of extensions is not defined.
        0x00 => Ok((None, bytes.len())),
        _ => Err(HeaderError::Malformed("its family is not known")),
    }
}

/// Checks the extensions behind the addresses. One may be a checksum.
fn check_extensions(whole: &[u8], mut at: usize) -> Result<(), HeaderError> {
    const BROKEN: HeaderError = HeaderError::Malformed("an extension is longer than the header");
    while at < whole.len() {
        let [kind, high, low] = *whole[at..].first_chunk::<3>().ok_or(BROKEN)?;
        let len = usize::from(u16::from_be_bytes([high, low]));
        let value = at + 3..at + 3 + len;
        let bytes = whole.get(value.clone()).ok_or(BROKEN)?;
        if kind == TYPE_CRC32C {
            let said: [u8; 4] =
                bytes.try_into().map_err(|_| HeaderError::Malformed("its checksum has not 4 bytes"))?;
            if crc32c(whole, &value) != u32::from_be_bytes(said) {
                return Err(HeaderError::Checksum);
            }
        }
        at = value.end;
    }
    Ok(())
}

/// Returns the CRC32c (RFC 3720 appendix B.4) of the bytes, with those in `zeroed` as zero. At
/// most `HEADER_LEN_MAX` bytes, so bit by bit is quick enough.
fn crc32c(bytes: &[u8], zeroed: &std::ops::Range<usize>) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut crc = u32::MAX;
    for (at, byte) in bytes.iter().enumerate() {
        crc ^= if zeroed.contains(&at) { 0 } else { u32::from(*byte) };
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests;

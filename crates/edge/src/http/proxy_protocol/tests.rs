//! Tests of PROXY headers: what the specification allows, what it does not, and any bytes at all.

use proptest::prelude::*;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::*;

fn told(source: &str, destination: &str) -> Option<ProxiedAddresses> {
    Some(ProxiedAddresses { source: source.parse().unwrap(), destination: destination.parse().unwrap() })
}

/// A header of version 2: command, family, addresses and extensions.
fn binary(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let len = u16::try_from(rest.len()).unwrap().to_be_bytes();
    [&SIGNATURE[..], &[0x20 | command, family, len[0], len[1]], rest].concat()
}

const TCP4: &[u8] = &[192, 0, 2, 1, 198, 51, 100, 1, 0x13, 0x88, 0x01, 0xbb];

fn tcp6() -> Vec<u8> {
    let octets = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    [&octets("2001:db8::1")[..], &octets("2001:db8::2")[..], &[0x13, 0x88, 0x01, 0xbb]].concat()
}

/// An extension.
fn extension(kind: u8, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(value.len()).unwrap().to_be_bytes();
    [&[kind, len[0], len[1]], value].concat()
}

/// A header with a right checksum in front of another extension.
fn with_checksum() -> Vec<u8> {
    let rest = [TCP4, &extension(TYPE_CRC32C, &[0; 4]), &extension(0x02, b"example.org")].concat();
    let mut header = binary(1, 0x11, &rest);
    let value = FIXED_LEN + TCP4.len() + 3;
    let crc = crc32c(&header, &(0..0)).to_be_bytes();
    header[value..value + 4].copy_from_slice(&crc);
    header
}

#[test]
fn the_text_form_is_read() {
    let longest = "PROXY UNKNOWN ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535\r\n";
    assert_eq!(longest.len(), TEXT_LEN_MAX);
    let rows = [
        ("PROXY TCP4 192.0.2.1 198.51.100.1 5000 443\r\n", told("192.0.2.1:5000", "198.51.100.1:443")),
        ("PROXY TCP4 255.255.255.255 0.0.0.0 65535 0\r\n", told("255.255.255.255:65535", "0.0.0.0:0")),
        ("PROXY TCP6 2001:db8::1 2001:db8::2 5000 443\r\n", told("[2001:db8::1]:5000", "[2001:db8::2]:443")),
        ("PROXY UNKNOWN\r\n", None),
        (longest, None),
    ];
    for (line, told) in rows {
        let input = format!("{line}GET / HTTP/1.1\r\n");
        assert_eq!(parse(input.as_bytes()).unwrap(), Some(ProxyHeader { len: line.len(), told }), "{line}");
    }
}

#[test]
fn a_malformed_text_is_refused() {
    for line in [
        "PROXY\r\n",
        "PROXY \r\n",
        "PROXY TCP4\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 5000\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 5000 443 \r\n",
        "PROXY TCP4  192.0.2.1 198.51.100.1 5000 443\r\n",
        "PROXY TCP4 192.0.2.1\t198.51.100.1 5000 443\r\n",
        "PROXY TCP4 192.0.2.256 198.51.100.1 5000 443\r\n",
        "PROXY TCP4 192.0.2.01 198.51.100.1 5000 443\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 05000 443\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 +5000 443\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 65536 443\r\n",
        "PROXY TCP4 2001:db8::1 2001:db8::2 5000 443\r\n",
        "PROXY TCP6 192.0.2.1 198.51.100.1 5000 443\r\n",
        "PROXY TCP6 2001:db8::1%eth0 2001:db8::2 5000 443\r\n",
        "PROXY UDP4 192.0.2.1 198.51.100.1 5000 443\r\n",
        "PROXY tcp4 192.0.2.1 198.51.100.1 5000 443\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 5000 443\n\r\n",
        "PROXY UNKNOWN\u{e9}\u{0}\r",
        "proxy TCP4 192.0.2.1 198.51.100.1 5000 443\r\n",
        " PROXY UNKNOWN\r\n",
        "GET / HTTP/1.1\r\n",
        "PRI * HTTP/2.0\r\n",
    ] {
        let padded = format!("{line}{:200}", "");
        assert!(parse(padded.as_bytes()).is_err(), "{line}");
    }
    assert!(matches!(parse(b"\x16\x03\x01\x02\x00\x01"), Err(HeaderError::Absent)), "a TLS ClientHello");
}

#[test]
fn a_text_that_does_not_end_is_refused_at_its_longest() {
    let line = format!("PROXY TCP4 {}", "1".repeat(200));
    assert_eq!(parse(&line.as_bytes()[..TEXT_LEN_MAX - 1]).unwrap(), None);
    assert!(parse(&line.as_bytes()[..TEXT_LEN_MAX]).is_err());
}

#[test]
fn the_binary_form_is_read() {
    let tcp4 = told("192.0.2.1:5000", "198.51.100.1:443");
    let tcp6_told = told("[2001:db8::1]:5000", "[2001:db8::2]:443");
    let rows = [
        ("TCP over IPv4", binary(1, 0x11, TCP4), tcp4),
        ("TCP over IPv6", binary(1, 0x21, &tcp6()), tcp6_told),
        (
            "with extensions",
            binary(1, 0x11, &[TCP4, &extension(0x01, b"h2"), &extension(0x04, &[])].concat()),
            tcp4,
        ),
        ("with a checksum", with_checksum(), tcp4),
        ("LOCAL without a word", binary(0, 0x00, &[]), None),
        ("LOCAL with addresses, which are ignored", binary(0, 0x11, TCP4), None),
        ("UNSPEC", binary(1, 0x00, &[1, 2, 3]), None),
        ("AF_UNIX", binary(1, 0x31, &[7; 216]), None),
        (
            "AF_UNIX with an extension",
            binary(1, 0x31, &[&[7; 216][..], &extension(0x05, b"id")].concat()),
            None,
        ),
        (
            "as long as may be",
            binary(1, 0x11, &[TCP4, &extension(0x04, &[0; HEADER_LEN_MAX - FIXED_LEN - 12 - 3])].concat()),
            tcp4,
        ),
    ];
    for (name, header, told) in rows {
        let input = [&header[..], b"GET / HTTP/1.1\r\n"].concat();
        assert_eq!(parse(&input).unwrap(), Some(ProxyHeader { len: header.len(), told }), "{name}");
        for cut in 0..header.len() {
            assert_eq!(parse(&header[..cut]).unwrap(), None, "{name} cut at {cut}");
        }
    }
}

#[test]
fn a_malformed_binary_is_refused() {
    let mut version = binary(1, 0x11, TCP4);
    version[12] = 0x11;
    let mut wrong_sum = with_checksum();
    *wrong_sum.last_mut().unwrap() ^= 1;
    let rows = [
        ("another version", version),
        ("an unknown command", binary(2, 0x11, TCP4)),
        ("an unknown family", binary(1, 0x41, TCP4)),
        ("an unknown protocol", binary(1, 0x13, TCP4)),
        ("UDP", binary(1, 0x12, TCP4)),
        ("IPv4 too short", binary(1, 0x11, &TCP4[..11])),
        ("IPv6 too short", binary(1, 0x21, &tcp6()[..35])),
        ("AF_UNIX too short", binary(1, 0x31, &[7; 215])),
        ("half of an extension's head", binary(1, 0x11, &[TCP4, &[1, 0]].concat())),
        ("an extension beyond the header", binary(1, 0x11, &[TCP4, &[1, 0, 2, b'h']].concat())),
        ("a checksum of three bytes", binary(1, 0x11, &[TCP4, &extension(TYPE_CRC32C, &[0; 3])].concat())),
        ("a wrong checksum", wrong_sum),
        ("too long", binary(1, 0x11, &[0; HEADER_LEN_MAX - FIXED_LEN + 1])),
    ];
    for (name, header) in rows {
        assert!(parse(&header).is_err(), "{name}");
    }
}

/// RFC 3720 appendix B.4.
#[test]
fn checksums_are_castagnolis() {
    assert_eq!(crc32c(&[0; 32], &(0..0)), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32], &(0..0)), 0x62a8_ab43);
    assert_eq!(crc32c(b"123456789", &(0..0)), 0xe306_9283);
    assert_eq!(crc32c(&[0xff; 32], &(0..32)), 0x8a91_36aa);
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_harm(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse(&input);
        for begin in [&SIGNATURE[..], &[&SIGNATURE[..], &[0x21, 0x11, 0, 40]].concat(), TEXT_BEGIN, b"PROXY TCP4 "] {
            if let Ok(Some(header)) = parse(&[begin, &input].concat()) {
                prop_assert!(header.len <= begin.len() + input.len() && header.len <= HEADER_LEN_MAX);
            }
        }
    }

    #[test]
    fn address_pairs_from_a_proxy_are_understood(v4 in any::<(u32, u32)>(), v6 in any::<(u128, u128)>(), ports in any::<(u16, u16)>()) {
        let pairs: [(IpAddr, IpAddr); 2] = [
            (Ipv4Addr::from(v4.0).into(), Ipv4Addr::from(v4.1).into()),
            (Ipv6Addr::from(v6.0).into(), Ipv6Addr::from(v6.1).into()),
        ];
        for (from, to) in pairs {
            let told = ProxiedAddresses { source: (from, ports.0).into(), destination: (to, ports.1).into() };
            let name = if from.is_ipv4() { "TCP4" } else { "TCP6" };
            let line = format!("PROXY {name} {from} {to} {} {}\r\n", ports.0, ports.1);
            prop_assert_eq!(parse(line.as_bytes()).unwrap(), Some(ProxyHeader { len: line.len(), told: Some(told) }));
        }
    }
}

#[tokio::test]
async fn nothing_behind_the_header_is_taken() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for header in [b"PROXY TCP4 192.0.2.1 198.51.100.1 5000 443\r\n".to_vec(), with_checksum()] {
        for cut in [0, 1, 8, 13, 20, header.len() - 1, header.len()] {
            let mut proxy = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            let (first, second) = header.split_at(cut);
            let sending = async {
                proxy.write_all(first).await.unwrap();
                tokio::task::yield_now().await;
                proxy.write_all(&[second, b"GET /"].concat()).await.unwrap();
                proxy.shutdown().await.unwrap();
            };
            let (read, ()) = tokio::join!(read(&mut stream), sending);
            assert_eq!(read.unwrap().told, told("192.0.2.1:5000", "198.51.100.1:443"));
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"GET /", "cut at {cut}");
        }
    }
}

#[tokio::test]
async fn a_connection_that_ends_within_its_header_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut proxy = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    proxy.write_all(b"PROXY TCP4 192").await.unwrap();
    drop(proxy);
    assert!(matches!(read(&mut stream).await, Err(HeaderError::Io(_))));
}

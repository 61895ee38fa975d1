//! Fuzzes input of other nodes of the cluster: fields beside a request or a response, and
//! datagrams.
//!
//! Not here: images, which keepers seal (`nagaya_keeper::fuzzing`).

use std::time::Instant;

use http::{HeaderMap, Method, Version};
use nagaya_base::RequestId;
use nagaya_base::fuzz::copy_seeds;
use ring::hmac;

use crate::cluster::peers::probe::datagram::{DatagramKind, ProbeDatagram};
use crate::cluster::peers::probe::vouch;
use crate::cluster::peers::probe::vouch::VouchMessage;
use crate::fuzzing::heads;
use crate::fuzzing::inputs::read_lines;
use crate::http::message::RequestHead;
use crate::http::peer_fields;

pub(super) fn peer_fields() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"nagaya-peer-request: 1.1 192.0.2.7:5000 192.0.2.1:443 0102030405060708090a0b0c0d0e0f10 wiki 7 1500 2\n\
          nagaya-peer-tls: TLSv1.3 TLS13_AES_256_GCM_SHA384 wiki.example\nx-kept: y",
        b"nagaya-peer-request: 2 [2001:db8::1]:5000 [::1]:443 0102030405060708090a0b0c0d0e0f10 wiki 0 99999999999 0\n\
          nagaya-peer-target: /a<b>?c\nnagaya-peer-hostless:\nupgrade: websocket",
        b"nagaya-peer-refused: not-placed-here 12\nnagaya-peer-tried: 3\nnagaya-peer-served: b wake_us=5 backend_us=9",
        b"nagaya-peer-refused: fenced\nnagaya-peer-switched: websocket",
    ])
}

pub(super) fn read_peer_fields(bytes: &[u8]) {
    let now = Instant::now();
    let headers = read_lines(bytes);
    let mut answer = headers.clone();
    if let Some(denied) = peer_fields::denied(&answer) {
        peer_fields::deny(&mut answer, denied);
        assert_eq!(peer_fields::denied(&answer), Some(denied));
    }
    peer_fields::take_served(&mut answer);
    peer_fields::switched(&answer);
    peer_fields::strip(&mut answer);
    assert!(answer.keys().all(|name| !name.as_str().starts_with("nagaya-peer-")));

    let mut head = arrived(headers);
    if peer_fields::read(&mut head, now).is_err() {
        return;
    }
    assert!(head.headers.keys().all(|name| !name.as_str().starts_with("nagaya-peer-")));
    // The received data is passed on, and must be read as the same.
    let carried = head.conn.carried.clone().expect("read with the request");
    let mut told = HeaderMap::new();
    peer_fields::write(&mut told, &head, &carried, now);
    let mut again = arrived(told);
    assert_eq!(peer_fields::read(&mut again, now), Ok(()));
    assert_eq!((again.id, again.version, &again.upgrade), (head.id, head.version, &head.upgrade));
    let ends = |head: &RequestHead| [head.conn.peer, head.conn.local].map(|end| (end.ip(), end.port()));
    assert_eq!(ends(&again), ends(&head));
    assert_eq!(again.conn.scheme(), head.conn.scheme());
    assert_eq!(again.conn.carried, head.conn.carried);
}

fn arrived(headers: HeaderMap) -> RequestHead {
    RequestHead {
        id: RequestId(9),
        method: Method::GET,
        path: "/".into(),
        query: None,
        host: "wiki.example".into(),
        port: None,
        version: Version::HTTP_2,
        headers,
        upgrade: None,
        conn: heads::connection(),
    }
}

// === Datagrams ===

/// Bytes of HMAC-SHA256 at the end of a datagram.
const SEAL_LEN: usize = 32;

fn key() -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, &[7; 32])
}

pub(super) fn datagrams() -> Vec<Vec<u8>> {
    let id = "0".repeat(32);
    let probe = |kind| ProbeDatagram { kind, nonce: [1; 16], node: "a.b".into(), id: id.clone() };
    let probes = [DatagramKind::Question, DatagramKind::Answer]
        .map(|kind| probe(kind).write(&key()).unwrap_or_default());
    // A vouch: version, kind, nonce, two numbers, two ids.
    let vouch = |kind: u8| [&[1, kind][..], &[7; 16], &[1; 16], id.as_bytes(), id.as_bytes()].concat();
    let unsealed = probes.map(|bytes| bytes[..bytes.len() - SEAL_LEN].to_vec());
    unsealed.into_iter().chain([vouch(3), vouch(4), b"\x01\x01\x00".to_vec(), vec![1; 400]]).collect()
}

/// Reads it unchanged, and with the seal of a member that breaks the protocol.
pub(super) fn read_datagram(bytes: &[u8]) {
    let key = key();
    let sealed = [bytes, hmac::sign(&key, bytes).as_ref()].concat();
    for bytes in [bytes, &sealed] {
        let (probe, said) = (ProbeDatagram::read(bytes, &key), VouchMessage::read(bytes, &key));
        assert!(probe.is_none() || said.is_none(), "a datagram means one thing");
        assert!(said.is_none() || vouch::is_one(bytes));
        if let Some(probe) = probe {
            let written = probe.write(&key).expect("what a node has sent can be sent");
            assert_eq!(ProbeDatagram::read(&written, &key), Some(probe));
        }
        if let Some(said) = said {
            assert_eq!(said.write(&key).as_deref(), Some(bytes), "a vouch has one form");
        }
    }
}

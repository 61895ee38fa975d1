//! Messages between the keeper's processes, with the edge, and from the kernel.

use nagaya_base::fuzz::copy_seeds;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::{decode, encode};
use crate::instances::holder::diag;
use crate::netlink;
use crate::protocol::{Answer, Ask};
use crate::sandbox::order;

/// What is accepted must mean one thing: written out again, it is read as the same.
fn check_same<T: DeserializeOwned + Serialize>(bytes: &[u8]) {
    let Ok(message) = decode::<T>(bytes) else { return };
    let written = encode(&message).expect("what came in one message fits in one");
    let again = decode::<T>(&written).expect("our own encoding decodes");
    assert_eq!(encode(&again).expect("as before"), written);
}

/// The first number chooses a variant: each has a seed, and zeros for what follows.
fn variants(count: u8) -> Vec<Vec<u8>> {
    (0..count).map(|variant| [&[variant][..], &[0; 40]].concat()).collect()
}

pub(super) fn asks() -> Vec<Vec<u8>> {
    // A tag, then the verb.
    let of_verb = |verb: Vec<u8>| [&[1][..], &verb].concat();
    let mut seeds: Vec<_> = variants(40).into_iter().map(of_verb).collect();
    seeds.extend(copy_seeds(&[b"", b"\x01\x00\x01\x03abc\x00", &[255; 64]]));
    seeds
}

pub(super) fn read_ask(bytes: &[u8]) {
    check_same::<Ask>(bytes);
}

pub(super) fn answers() -> Vec<Vec<u8>> {
    let mut seeds = variants(8);
    seeds.extend((0..40).map(|reply| [&[0, 1, 0, reply][..], &[0; 40]].concat()));
    seeds
}

pub(super) fn read_answer(bytes: &[u8]) {
    check_same::<Answer>(bytes);
}

pub(super) fn channel() -> Vec<Vec<u8>> {
    variants(12)
}

/// Between the launcher, the first process of a sandbox and the keeper.
pub(super) fn read_channel(bytes: &[u8]) {
    check_same::<order::Order>(bytes);
    check_same::<order::Ward>(bytes);
    check_same::<order::Birth>(bytes);
    check_same::<order::Ask>(bytes);
    check_same::<order::Told>(bytes);
}

pub(super) fn netlink() -> Vec<Vec<u8>> {
    let message = |kind: u16, body: &[u8]| {
        let len = u32::try_from(16 + body.len()).unwrap_or_default();
        [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10], body].concat()
    };
    // An acknowledgement, an error, a route, and a socket with its name and its peer.
    let attributes = [8, 0, 2, 0, 1, 2, 3, 4, 6, 0, 0, 0, b'/', b'a', 0, 0];
    vec![
        message(2, &[0; 20]),
        message(2, &(-2_i32).to_ne_bytes()),
        message(24, &[2, 32, 0, 0, 254, 0, 0, 2, 0, 0, 0, 0]),
        message(20, &[&[1, 5, 1, 0][..], &[7; 12], &attributes].concat()),
    ]
}

pub(super) fn read_netlink(bytes: &[u8]) {
    let is_acknowledged = netlink::acknowledged(bytes).is_ok();
    let kind = netlink::route_kind(bytes);
    assert!(!(is_acknowledged && kind.is_ok()), "a message has one meaning");
    if let Ok(Some(found)) = diag::parse(bytes) {
        assert!(found.name.len() <= bytes.len() && found.peer != Some(0));
    }
}

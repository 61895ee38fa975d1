//! Messages between the keeper's processes, with the edge, and from the kernel.

use nagaya_base::fuzz::copy_seeds;
use nagaya_keeper_api::codec::{decode, encode};
use nagaya_keeper_api::protocol::{KeeperMessage, Verb, VerbCall};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::confinement::{check, check_changes, check_giving_way};
use crate::netlink::{route, sock_diag};
use crate::sandbox::order;

/// Accepted input must have one meaning: written out again, it is read as the same.
fn check_same<T: DeserializeOwned + Serialize>(bytes: &[u8]) {
    let Ok(message) = decode::<T>(bytes) else { return };
    let written = encode(&message).expect("what came in one message fits in one");
    let again = decode::<T>(&written).expect("our own encoding decodes");
    assert_eq!(encode(&again).expect("as before"), written);
}

/// The first number selects a variant: each has a seed, with zeros as its content.
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

/// A message that decodes is checked as the keeper checks it.
pub(crate) fn read_ask(bytes: &[u8]) {
    check_same::<VerbCall>(bytes);
    let Ok(ask) = decode::<VerbCall>(bytes) else { return };
    let _acceptable = match &ask.verb {
        Verb::SpawnCgi { confinement, .. } | Verb::Enter { confinement, .. } => check(confinement),
        Verb::ChangeCells { changes } => check_changes(changes),
        Verb::GiveWay { give_way, resume } => check_giving_way(give_way, resume),
        _ => Ok(()),
    };
}

pub(super) fn answers() -> Vec<Vec<u8>> {
    let mut seeds = variants(8);
    seeds.extend((0..40).map(|reply| [&[0, 1, 0, reply][..], &[0; 40]].concat()));
    seeds
}

pub(super) fn read_answer(bytes: &[u8]) {
    check_same::<KeeperMessage>(bytes);
}

pub(super) fn channel() -> Vec<Vec<u8>> {
    variants(12)
}

/// Messages between the launcher, the first process of a sandbox and the keeper.
pub(super) fn read_channel(bytes: &[u8]) {
    check_same::<order::LauncherCommand>(bytes);
    check_same::<order::WardenCommand>(bytes);
    check_same::<order::SandboxBirth>(bytes);
    check_same::<order::InitRequest>(bytes);
    check_same::<order::InitReply>(bytes);
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
    let is_acknowledged = route::acknowledged(bytes).is_ok();
    let kind = route::route_kind(bytes);
    assert!(!(is_acknowledged && kind.is_ok()), "a message has one meaning");
    if let Ok(Some(found)) = sock_diag::parse(bytes) {
        assert!(found.name.len() <= bytes.len() && found.peer != Some(0));
    }
}

//! Hostile bytes as a message to the keeper: `cargo +nightly fuzz run keeper_ask`.
//!
//! Not here: the same property on random bytes in every test run (`crates/keeper/src/codec/tests.rs`).
#![no_main]

use libfuzzer_sys::fuzz_target;
use nagaya_keeper::codec::{decode, encode};
use nagaya_keeper::protocol::Ask;

fuzz_target!(|bytes: &[u8]| {
    // What is accepted must mean one thing: written out again, it is read as the same.
    if let Ok(ask) = decode::<Ask>(bytes) {
        let written = encode(&ask).expect("what came in one message fits in one");
        assert_eq!(decode::<Ask>(&written).expect("our own encoding decodes"), ask);
    }
});

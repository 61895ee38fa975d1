//! Hostile bytes as a message from the keeper to an edge: `cargo +nightly fuzz run keeper_answer`.
//!
//! The keeper is trusted; whoever bound its socket's path before it would not be. Not here: what the keeper reads
//! (`keeper_ask`).
#![no_main]

use libfuzzer_sys::fuzz_target;
use nagaya_keeper::codec::{decode, encode};
use nagaya_keeper::protocol::Answer;

fuzz_target!(|bytes: &[u8]| {
    // What is accepted must mean one thing: written out again, it is read as the same.
    if let Ok(answer) = decode::<Answer>(bytes) {
        let written = encode(&answer).expect("what came in one message fits in one");
        assert_eq!(decode::<Answer>(&written).expect("our own encoding decodes"), answer);
    }
});

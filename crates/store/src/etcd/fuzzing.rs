//! Fuzz target for values of etcd, which anybody may have put there: raw, and with a member's
//! signature.

use nagaya_base::fuzz::copy_seeds;

use super::keys::KeySpace;
use super::signed::{RECORD_SECRET_LEN, RecordKeys, RecordSigning, ValueSigner};

const KEY: &str = "/nagaya/c/v1/sites/s";
const OTHER: &str = "/nagaya/c/v1/sites/other";

fn signer(secret: u8) -> ValueSigner {
    let keys =
        RecordKeys { current: (3, [secret; RECORD_SECRET_LEN]), older: vec![(2, [9; RECORD_SECRET_LEN])] };
    ValueSigner::new(KeySpace::new("c"), RecordSigning::Required(keys))
}

pub fn values() -> Vec<Vec<u8>> {
    let signed = signer(7).sign(KEY.as_bytes(), b"{}".to_vec(), 5).unwrap_or_default();
    [vec![signed], copy_seeds(&[b"{\"name\":\"s\"}", b"{}\nv1 3 5 AAAA", b"\n", b"\x01sealed"])].concat()
}

/// Checks that a value counts only if a member has signed it for this key, and only as signed.
pub fn read_value(bytes: &[u8]) {
    let ours = signer(7);
    let at = KEY.as_bytes();
    if ours.open(at, bytes, 0).is_ok() {
        assert!(ours.open(OTHER.as_bytes(), bytes, 0).is_err(), "it is another key's");
    }
    let Ok(signed) = ours.sign(at, bytes.to_vec(), 5) else { return };
    let opened = ours.open(at, &signed, 5).map(|opened| opened.body);
    assert_eq!(opened.ok().as_deref(), Some(bytes));
    assert!(ours.open(OTHER.as_bytes(), &signed, 5).is_err(), "it is another key's");
    assert!(signer(8).open(at, &signed, 5).is_err(), "it is another cluster's");
}

//! The id of one request: 128 bits, printed as 32 hexadecimal digits, the form of a W3C trace id.
//!
//! Not here: the source of randomness; the edge passes it in.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u128);

impl RequestId {
    /// Returns its digits, as text in ASCII.
    pub fn digits(&self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 32];
        for (pair, byte) in text.chunks_exact_mut(2).zip(self.0.to_be_bytes()) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        text
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every request writes its own id, mostly more than once: `{:032x}` takes several times as
        // long.
        f.write_str(str::from_utf8(&self.digits()).expect("digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_all_of_its_digits() {
        let digits = "00fedcba9876543210000000000000a1";
        let id = RequestId(u128::from_str_radix(digits, 16).unwrap());
        assert_eq!(id.to_string(), digits);
        assert_eq!(RequestId(u128::MAX).to_string(), "f".repeat(32));
    }
}

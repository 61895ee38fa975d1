//! The id of one request: 128 bits, printed as 32 hexadecimal digits, the form of a W3C trace id.
//!
//! Not here: the source of randomness; the edge hands it in.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u128);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

//! How fuzz targets take their input apart.

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

/// Reads header fields in lines `name: value`. Other lines are skipped.
pub fn read_lines(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (HeaderName::from_bytes(&line[..at]), line[at + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    headers
}

/// Returns the first byte, as a number from 1 on, and the rest.
pub fn split_step(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (step, rest) = bytes.split_first()?;
    Some((usize::from(*step).max(1), rest))
}

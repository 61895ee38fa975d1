//! A fuzzed parser as its fuzzer sees it: a name, a function and initial inputs.
//!
//! Each crate lists its own in a hidden module `fuzzing`. Not here: the fuzzer (`fuzz/`).

/// One parser of input from others.
#[derive(Clone, Copy)]
pub struct FuzzTarget {
    /// Unique among all crates: lower-case letters, digits and `_`.
    pub name: &'static str,
    /// Gives any bytes to the parser. It panics if the parser does, or if accepted input breaks a
    /// promise.
    pub run: fn(&[u8]),
    /// Returns inputs that reach most of the parser.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Copies texts, as seeds.
pub fn copy_seeds(texts: &[&[u8]]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.to_vec()).collect()
}

//! What a fuzzed parser is to the program that fuzzes it: a name, a function and inputs to begin with.
//!
//! Each crate lists its own in a hidden module `fuzzing`. Not here: the fuzzer (`fuzz/`).

/// One parser that reads what others wrote.
#[derive(Clone, Copy)]
pub struct FuzzTarget {
    /// Unique among all crates: lower-case letters, digits and `_`.
    pub name: &'static str,
    /// Gives any bytes to the parser. It panics if the parser does, or if what was accepted breaks a promise.
    pub run: fn(&[u8]),
    /// Inputs that reach most of the parser.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Copies texts, as seeds.
pub fn copy_seeds(texts: &[&[u8]]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.to_vec()).collect()
}

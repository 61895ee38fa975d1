//! Programs in Python: what an application of a test does with the network, and what answers it there.
//!
//! Not here: what is tested (`outbound`, `nat`, `databases`).

/// What is outside: `outside.py LOG ADDRESS/PORT...`.
pub const SERVICE: &str = include_str!("../../fixtures/outside.py");

/// An application that answers each request with what `act` of this program makes of its path.
pub fn application(acts: &str) -> String {
    format!("{acts}{}", include_str!("../../fixtures/answers.py"))
}

/// One that does what it is asked to with the network, and says what came of it.
pub fn reaching() -> String {
    application(include_str!("../../fixtures/reaches.py"))
}

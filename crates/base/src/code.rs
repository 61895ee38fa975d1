//! Error codes: an operator sees `NGY0301` and looks it up with `nagaya error NGY0301`.
//!
//! Not here: the pages themselves (`docs/errors/NGYnnnn.md`, embedded by the `nagaya` binary; a
//! tidy test checks that each code used in the sources has one).
//!
//! | range | area |
//! |---|---|
//! | 01xx | configuration |
//! | 02xx | store and import |
//! | 03xx | keeper (processes, files, certificates) |
//! | 04xx | edge (requests and refusals) |
//! | 05xx | supervisor and admin interface |
//! | 06xx | rules |

use std::fmt;

/// The number of one operator-visible error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u16);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NGY{:04}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Code;

    #[test]
    fn a_code_prints_with_four_digits() {
        assert_eq!(Code(301).to_string(), "NGY0301");
    }
}

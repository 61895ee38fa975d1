//! One row of the table of methods.

/// A class or module as upstream names it.
pub struct UpstreamClass {
    pub name: &'static str,
    pub rows: &'static [MethodRow],
}

/// Methods that are alike, separated by spaces; those of the class itself begin with a dot.
pub struct MethodRow(pub &'static str, pub MethodSupport);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodSupport {
    Same,
    /// How it differs from upstream.
    Differs(&'static str),
    /// Why it is missing, and the alternative, if there is one.
    Missing(&'static str),
}

//! Kinds of process trees.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProcessKind {
    Cgi,
    Php,
    /// A process that makes PHP workers, and serves no request.
    PhpParent,
    App,
}

/// All kinds; the position of each is its number.
pub const KINDS: [ProcessKind; 4] =
    [ProcessKind::Cgi, ProcessKind::Php, ProcessKind::PhpParent, ProcessKind::App];

impl ProcessKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cgi => "cgi",
            Self::Php => "php",
            Self::PhpParent => "php_parent",
            Self::App => "app",
        }
    }

    /// Whether programs of this kind get time to end by themselves. The others only serve a request
    /// that is over.
    pub fn is_kept(self) -> bool {
        self == Self::App
    }
}

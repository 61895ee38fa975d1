//! Limits on which more than one crate must agree, each with its arithmetic.
//!
//! Not here: limits that an operator can set (the configuration reference lists those) and limits
//! that only one module knows (named there).

/// Longest DNS name in text form, RFC 1035 section 2.3.4 (255 octets on the wire leave 253
/// characters).
pub const HOST_LEN_MAX: usize = 253;

/// Longest tenant or site name. It fits a path component and a cgroup directory name with room for
/// a suffix.
pub const NAME_LEN_MAX: usize = 128;

/// Most host patterns of one site.
pub const HOSTS_PER_SITE_MAX: usize = 256;

/// Longest path inside a document root, in bytes: Linux's `PATH_MAX` (4096) less the room of the
/// root itself.
pub const SITE_PATH_LEN_MAX: usize = 3072;

/// Largest datagram between edge and keeper, in bytes. A CGI environment is the largest message.
/// The header section is bounded at 64 KiB by default, and each field gains the five bytes of
/// `HTTP_`.
pub const KEEPER_MESSAGE_MAX: usize = 128 * 1024;

/// Most file descriptors passed with one keeper message.
pub const KEEPER_FDS_MAX: usize = 4;

//! Bounds that more than one crate must agree on, each with its arithmetic.
//!
//! Not here: limits an operator can set (the configuration reference lists those) and bounds that only
//! one module knows about (named there).

/// Longest DNS name in text form, RFC 1035 section 2.3.4 (255 octets on the wire leave 253 characters).
pub const HOST_LEN_MAX: usize = 253;

/// Longest tenant or site name. Fits a path component and a cgroup directory name with room for a suffix.
pub const NAME_LEN_MAX: usize = 128;

/// Most host patterns one site may answer to.
pub const HOSTS_PER_SITE_MAX: usize = 256;

/// Longest path inside a document root that is looked up, in bytes; Linux's `PATH_MAX` (4096) less the
/// room the root itself may take.
pub const SITE_PATH_LEN_MAX: usize = 3072;

/// Largest datagram between edge and keeper, in bytes. A CGI environment is the largest message: the
/// request head is bounded at 64 KiB by default, and each header gains the five bytes of `HTTP_`.
pub const KEEPER_MESSAGE_MAX: usize = 128 * 1024;

/// Most file descriptors passed with one keeper message.
pub const KEEPER_FDS_MAX: usize = 4;

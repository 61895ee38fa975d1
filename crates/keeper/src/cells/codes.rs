//! The codes of problems with cells, NGY0340 to NGY0369.
//!
//! Not here: the other codes of the keeper (`fault`), their pages (`docs/errors`).

use nagaya_base::Code;

/// A cell cannot be made.
pub const MAKE: Code = Code(340);
/// A controller limits nothing here.
pub const MISSING: Code = Code(341);
/// The kernel refused a limit.
pub const REFUSED: Code = Code(342);
/// A limit names a disk that is not there.
pub const NO_DEVICE: Code = Code(343);
/// A site's files are on no disk.
pub const NO_DISK: Code = Code(344);
/// There are too many named cells.
pub const NAMED_MAX: Code = Code(345);
/// A named cell has several directories on v2, each with its own limits.
pub const SEVERAL: Code = Code(346);
/// On v1, limits of a disk apply at one level only.
pub const FLAT: Code = Code(347);
/// A cgroup of another owner is in the way.
pub const SHARED: Code = Code(348);
/// A process cannot be moved to a cell.
pub const MOVE: Code = Code(349);
/// Somebody removed a cell's directory.
pub const REMOVED: Code = Code(350);
/// The kernel does not report which process of an application serves a connection.
pub const NO_DIAG: Code = Code(351);

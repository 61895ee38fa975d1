//! Why the keeper refused a verb: a coarse failure for the edge, a code and a message for the
//! operator.
//!
//! Not here: the HTTP status made from it (`edge::refusal`), the pages of the codes
//! (`docs/errors`).

use std::io;
use std::path::Path;

use nagaya_base::Code;
use nagaya_keeper_api::protocol::{FailureKind, VerbReply};

pub use nagaya_keeper_api::codes::{LIMIT, PROTOCOL};

/// The keeper does not know this tenant or site.
pub const UNKNOWN: Code = Code(301);
/// The verb does not fit the kind of the site.
pub const WRONG_KIND: Code = Code(302);
/// A document root cannot be opened.
pub const ROOT: Code = Code(303);
/// The name of a program is not acceptable.
pub const SCRIPT_NAME: Code = Code(304);
/// A program is not there or may not run.
pub const SCRIPT: Code = Code(305);
/// A variable for a program is not acceptable.
pub const ENVIRONMENT: Code = Code(306);
/// A program could not be started.
pub const SPAWN: Code = Code(308);
/// `php-cgi` is not installed.
pub const NO_PHP: Code = Code(309);
/// An application does not listen.
pub const APP: Code = Code(310);
/// An application failed and waits before it is started again.
pub const APP_BACKOFF: Code = Code(311);
/// A certificate cannot be opened.
pub const CERTIFICATE: Code = Code(312);
/// A tenant's uid must not run programs.
pub const TENANT_UID: Code = Code(314);
/// Processes survived their end.
pub const UNKILLABLE: Code = Code(315);
/// Process trees cannot be tracked and killed together.
pub const NO_FENCE: Code = Code(316);
/// The keeper cannot serve.
pub const START: Code = Code(317);
/// A confinement or a change of cells is not acceptable.
pub const CONFINEMENT: Code = Code(318);

/// A secret of an application cannot be read.
pub const SECRET: Code = Code(319);
/// An application listens and does not answer as its record requires.
pub const NOT_READY: Code = Code(320);
/// An image is not used again.
pub const BAD_IMAGE: Code = Code(321);
/// An instance cannot rest, or cannot wake from its rest.
pub const REST: Code = Code(322);
/// A command is not run in an instance, or was ended.
pub const EXEC: Code = Code(323);
/// Processes of an instance were killed for lack of memory.
pub const OUT_OF_MEMORY: Code = Code(324);
/// An instance goes to rest although it computes.
pub const STILL_AT_WORK: Code = Code(352);
/// An application did not end in time after `SIGTERM`, and was killed.
pub const STOP_CUT: Code = Code(353);
/// A process of an application was killed right after a rest, as a watchdog does it.
pub const WATCHDOG: Code = Code(354);
/// The access of an application to the outside cannot be set up.
pub const OUTLET: Code = Code(325);

/// The Unix socket of a site's server cannot be connected to.
pub const SERVER_SOCKET: Code = Code(328);

/// A request from the edge is not passed on to PHP.
pub const GATE: Code = Code(356);

/// A link below a document root is not followed out of it.
pub const LINK: Code = Code(358);

/// A tenant's programs cannot be isolated from those of others.
pub const ENCLOSURE: Code = Code(357);

/// A tenant's programs do not see their site's files.
pub const HIDDEN: Code = Code(359);

/// Lines are missing in the log of an application.
pub const LOG: Code = Code(338);
/// The machine of an application cannot be made.
pub const MACHINE: Code = Code(372);

/// A refused verb.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Fault {
    pub failure: FailureKind,
    pub code: Code,
    pub message: String,
}

impl Fault {
    pub fn new(failure: FailureKind, code: Code, message: impl Into<String>) -> Self {
        Self { failure, code, message: message.into() }
    }

    /// Makes the fault for a failed look-up of `path`.
    pub fn of_path(code: Code, what: &str, path: &Path, error: io::Error) -> Self {
        let failure = match rustix::io::Errno::from_io_error(&error) {
            Some(errno) if is_missing(errno) => FailureKind::NotFound,
            Some(errno) if is_forbidden(errno) => FailureKind::Forbidden,
            None if error.kind() == io::ErrorKind::PermissionDenied => FailureKind::Forbidden,
            _ => FailureKind::Broken,
        };
        Self::new(failure, code, format!("{what} {}: {error}", path.display()))
    }

    pub fn into_reply(self) -> VerbReply {
        VerbReply::Failed { failure: self.failure, code: self.code.0, message: self.message }
    }
}

fn is_missing(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG)
}

/// Whether the error means "forbidden". `openat2` reports `XDEV` for a path that leaves its base
/// directory. It reports `LOOP` for a path that passes a link of `/proc`.
fn is_forbidden(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(errno, Errno::ACCESS | Errno::PERM | Errno::XDEV | Errno::LOOP)
}

//! What did not work on the way to a sandbox, in a form that travels.
//!
//! Not here: what the operator reads of it (`SandboxError`).

use std::io;

/// A step that failed, in words that follow "cannot", and the number of the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub step: String,
    pub errno: i32,
}

/// Adds the step to an error.
pub trait Step<T> {
    fn step(self, step: impl Into<String>) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|error| {
            let (error, step) = (error.into(), step.into());
            match error.raw_os_error() {
                Some(errno) => Failure { step, errno },
                // An error of ours says more than any number.
                None => Failure { step: format!("{step} ({error})"), errno: errno_of(&error) },
            }
        })
    }
}

fn errno_of(error: &io::Error) -> i32 {
    let errno = match error.kind() {
        io::ErrorKind::NotFound => rustix::io::Errno::NOENT,
        io::ErrorKind::PermissionDenied => rustix::io::Errno::ACCESS,
        io::ErrorKind::TimedOut => rustix::io::Errno::TIMEDOUT,
        io::ErrorKind::InvalidInput => rustix::io::Errno::INVAL,
        _ => rustix::io::Errno::IO,
    };
    errno.raw_os_error()
}

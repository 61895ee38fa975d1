//! Failures on the way to a sandbox, in a form that can be sent.
//!
//! Not here: the operator's text (`SandboxError`).

use std::io;

/// A step that failed, in words that follow "cannot", and the number of the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFailure {
    pub step: String,
    pub errno: i32,
}

/// Adds the step to an error.
pub trait StepContext<T> {
    fn step(self, step: impl Into<String>) -> Result<T, StepFailure>;
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn step(self, step: impl Into<String>) -> Result<T, StepFailure> {
        self.map_err(|error| {
            let (error, step) = (error.into(), step.into());
            match error.raw_os_error() {
                Some(errno) => StepFailure { step, errno },
                // An error of ours says more than any number.
                None => StepFailure { step: format!("{step} ({error})"), errno: errno_of(&error) },
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

//! Why CRIU refused, from its log: in words for the one whose application it is, where the reason
//! is known.
//!
//! Not here: the consequences (`store`).

use std::io::{self, BufRead, BufReader, Read};

/// Maximum number of bytes read of a log. The reason is among its first errors.
const LOG_LEN_MAX: u64 = 1 << 20;

/// Maximum number of characters of a line that are repeated.
const LINE_LEN_MAX: usize = 300;

/// Known parts of error lines, and their meaning.
const KNOWN: [(&str, &str); 15] = [
    (
        "External socket is used",
        "a Unix socket is connected to something outside of the sandbox: close such connections when the application \
         is idle, let it connect for each request, or name a database's socket in its record (--database)",
    ),
    ("unix: Unix socket ", OUTSIDE),
    ("Can't dump half of stream unix connection", OUTSIDE),
    ("Can't dump name-less external socket", OUTSIDE),
    (
        "sockets: Can't get 1:16 opt",
        "this CRIU does not know TCP sockets of this kernel: install 4.2 or newer",
    ),
    (IN_FLIGHT, "a connection was just being made; another try may find none"),
    (CLOSED_IN_FLIGHT, "it has not taken a connection yet that was closed again; another try may find none"),
    ("fsnotify:", WATCHES),
    ("irmap:", WATCHES),
    ("Can't fetch filter on", "the application has put a system call filter of its own on itself"),
    ("of that type", "it has something open that cannot be carried, such as io_uring or a device"),
    ("Can't lookup mount", "it has a file open that is not in the sandbox"),
    ("is outside of its pid namespace", "one of its processes belongs to a session outside of the sandbox"),
    ("Can't dump ghost file", "it keeps a large file open that has been removed"),
    (NO_SPACE, "no space is left on the device of the images"),
];

const WATCHES: &str = "it watches files (inotify), as reloaders and file watchers do, and CRIU cannot carry such a watch here: turn the watching off";

const OUTSIDE: &str = "one end of a Unix socket's connection is outside of the sandbox";

/// The reason for a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CriuFailure {
    /// `None` if it is not a known one.
    pub known: Option<&'static str>,
    /// The first error of the log.
    pub line: String,
}

/// CRIU requests more open files than the node allows, and continues without.
const HARMLESS: &str = "Can't setup RLIMIT_NOFILE for self";

/// Part of errors that say nothing about the application: connections that it has not accepted yet,
/// nagaya's own among them.
const IN_FLIGHT: &str = "In-flight connection";
const CLOSED_IN_FLIGHT: &str = "closed in-flight socket";

/// Part of an error about a file that could not be written.
const NO_SPACE: &str = "No space left on device";

impl CriuFailure {
    /// Whether the disk is full, which is not the application's doing.
    pub fn is_no_space(&self) -> bool {
        self.line.contains(NO_SPACE)
    }
}

impl CriuFailure {
    /// Whether another try may succeed.
    pub fn is_passing(&self) -> bool {
        [IN_FLIGHT, CLOSED_IN_FLIGHT].iter().any(|mark| self.line.contains(mark))
    }
}

impl std::fmt::Display for CriuFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.known {
            Some(known) => write!(f, "{known} (CRIU: {})", self.line),
            None => write!(f, "CRIU: {}", self.line),
        }
    }
}

/// Finds the reason in a log. It is the first error, unless only a later one is known.
pub fn reason(log: impl Read) -> io::Result<CriuFailure> {
    let mut first = None;
    for line in BufReader::new(log.take(LOG_LEN_MAX)).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        let Some((_, message)) = line.split_once("Error (") else { continue };
        if message.contains(HARMLESS) {
            continue;
        }
        let message: String = format!("({message}").chars().take(LINE_LEN_MAX).collect();
        let known = KNOWN.iter().find(|(mark, _)| message.contains(mark)).map(|(_, meaning)| *meaning);
        if known.is_some() {
            return Ok(CriuFailure { known, line: message });
        }
        first.get_or_insert(message);
    }
    let line = first.unwrap_or_else(|| "its log names no error; it may have been killed".into());
    Ok(CriuFailure { known: None, line })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(log: &str) -> CriuFailure {
        reason(log.as_bytes()).unwrap()
    }

    #[test]
    fn a_known_error_is_put_into_words() {
        let log = "(00.01) Warn  (criu/x.c:1): no\n\
                   (00.02) Error (criu/files-reg.c:1): something first\n\
                   (00.03) Error (criu/sk-unix.c:842): unix: External socket is used. Consider using --ext-unix-sk\n\
                   (00.04) Error (criu/cr-dump.c:2128): Dumping FAILED.\n";
        let reason = of(log);
        assert!(reason.to_string().starts_with("a Unix socket is connected"), "{reason}");
        assert!(reason.line.starts_with("(criu/sk-unix.c:842)"), "{reason}");
    }

    #[test]
    fn watches_of_files_are_named() {
        let reason = of("(0) Error (criu/fsnotify.c:292): fsnotify: \tHandle 0x3:0x11 cannot be opened\n");
        assert!(reason.to_string().starts_with("it watches files (inotify)"), "{reason}");
    }

    #[test]
    fn of_unknown_errors_the_first_is_told() {
        let reason = of("(0) Error (criu/a.c:1): first\n(0) Error (criu/b.c:1): second\n");
        assert_eq!(reason, CriuFailure { known: None, line: "(criu/a.c:1): first".into() });
    }

    #[test]
    fn a_log_without_errors_says_so() {
        assert!(of("").line.contains("names no error"));
        assert!(of("\u{0}\u{1}").line.contains("names no error"));
        let long = format!("Error (x): {}", "y".repeat(10_000));
        assert_eq!(of(&long).line.chars().count(), LINE_LEN_MAX);
    }
}

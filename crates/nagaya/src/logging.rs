//! The node's own log: its destination, form and level.
//!
//! Not here: the access log (`nagaya_edge`).

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::{
    EnvFilter, Registry, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

use crate::config::settings::{LogFormat, LogSettings};

/// Bytes read at once from a process's standard error.
const COPY_LEN: usize = 16 << 10;

static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Destination of lines: standard error, or a file that can be reopened after it was moved.
#[derive(Debug, Clone)]
pub struct LogSink {
    file: Option<Arc<LogFile>>,
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: Mutex<File>,
}

impl LogSink {
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        let file = match path {
            None => None,
            Some(path) => {
                let file = Mutex::new(append(path)?);
                Some(Arc::new(LogFile { path: path.into(), file }))
            }
        };
        Ok(Self { file })
    }

    pub fn standard_error() -> Self {
        Self { file: None }
    }

    /// Reopens the log after a rotation: lines go to a new file of the same name. If it cannot be
    /// made, they go to the old one.
    pub fn reopen(&self) -> io::Result<()> {
        if let Some(log) = &self.file {
            let file = append(&log.path)?;
            *log.file.lock() = file;
        }
        Ok(())
    }

    pub fn is_file(&self) -> bool {
        self.file.is_some()
    }

    /// Copies a process's standard error until it ends. Lines of processes may come in any order.
    /// None is cut by another unless it is longer than `COPY_LEN`.
    pub fn copy_from(&self, mut stderr: impl io::Read + Send + 'static) -> io::Result<()> {
        let mut sink = self.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || {
            let mut held = Vec::new();
            let mut read = [0; COPY_LEN];
            while let Ok(len @ 1..) = stderr.read(&mut read) {
                held.extend_from_slice(&read[..len]);
                let whole = held.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let whole = if whole == 0 && held.len() >= COPY_LEN { held.len() } else { whole };
                // A full disk must not end the process whose line is lost.
                let _ = sink.write_all(&held[..whole]);
                held.drain(..whole);
            }
            let _ = sink.write_all(&held);
        })?;
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

impl Write for LogSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.file {
            Some(log) => log.file.lock().write(bytes),
            None => io::stderr().lock().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogSink {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Returns whether lines are JSON: as configured, or because there is no terminal.
pub fn is_json(log: &LogSettings) -> bool {
    match log.format {
        LogFormat::Json => true,
        LogFormat::Text => false,
        LogFormat::Auto => log.file.is_some() || !io::stderr().is_terminal(),
    }
}

/// Starts logging. An invalid level counts as `info`: the configuration was checked before.
pub fn start(level: &str, json: bool, sink: LogSink) {
    let (filter, handle) = reload::Layer::new(filter(level));
    let ansi = !json && !sink.is_file() && io::stderr().is_terminal();
    let registry = tracing_subscriber::registry().with(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(sink).with_ansi(ansi);
    let started = if json {
        registry.with(lines.json().flatten_event(true)).try_init()
    } else {
        registry.with(lines.with_target(false)).try_init()
    };
    if started.is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// Sets the level from now on.
pub fn set_level(level: &str) {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(level))
    {
        tracing::warn!("the log level stays as it is: {error}");
    }
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_file_is_left_alone_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.log");
        let mut sink = LogSink::open(Some(&path)).unwrap();
        sink.write_all(b"one\n").unwrap();
        std::fs::rename(&path, dir.path().join("node.log.1")).unwrap();
        sink.write_all(b"two\n").unwrap();
        sink.reopen().unwrap();
        sink.write_all(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("node.log.1")).unwrap(), "one\ntwo\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "three\n");
    }
}

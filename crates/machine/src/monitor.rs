//! Orders to a running QEMU: the QEMU Machine Protocol over a socket (QEMU's documentation, "QMP").
//!
//! QEMU runs code of the tenant's guest. So nothing that it says is trusted: replies have a bound,
//! and a wrong one is an error. Not here: which orders it gets (`run`).

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

/// Maximum length of one message of QEMU, bytes.
const MESSAGE_LEN_MAX: u64 = 1 << 20;

/// Maximum number of events before the reply to an order.
const EVENTS_MAX: usize = 1_000;

/// Maximum time until QEMU replies. An emulated CPU may keep it from that.
const REPLY_MAX: Duration = Duration::from_secs(60);

/// The connection with one QEMU.
#[derive(Debug)]
pub struct QemuMonitor(BufReader<UnixStream>);

#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("QEMU's monitor: {0}")]
    Io(#[from] io::Error),
    #[error("QEMU's monitor says what is no message of its protocol: {0}")]
    Protocol(String),
    #[error("QEMU refuses '{order}': {reason}")]
    Refused { order: String, reason: String },
}

impl QemuMonitor {
    /// Greets QEMU. It may still be starting.
    pub fn connect(stream: UnixStream) -> Result<Self, MonitorError> {
        stream.set_read_timeout(Some(REPLY_MAX))?;
        stream.set_write_timeout(Some(REPLY_MAX))?;
        let mut monitor = Self(BufReader::new(stream));
        let greeting = monitor.receive()?;
        if greeting.get("QMP").is_none() {
            return Err(MonitorError::Protocol(shortened(&greeting)));
        }
        monitor.order("qmp_capabilities", Value::Null)?;
        Ok(monitor)
    }

    /// Gives an order and returns the reply.
    pub fn order(&mut self, name: &str, arguments: Value) -> Result<Value, MonitorError> {
        let mut message = json!({ "execute": name });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        self.0.get_mut().write_all(format!("{message}\n").as_bytes())?;
        self.reply(name)
    }

    /// Hands a descriptor over, under a name for a later order.
    pub fn hand_over(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), MonitorError> {
        let message = format!("{}\n", json!({ "execute": "getfd", "arguments": { "fdname": name } }));
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let parts = [io::IoSlice::new(message.as_bytes())];
        let sent =
            sendmsg(self.0.get_ref(), &parts, &mut control, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
        self.0.get_mut().write_all(&message.as_bytes()[sent..])?;
        self.reply("getfd").map(|_| ())
    }

    /// Returns the reply to an order.
    fn reply(&mut self, name: &str) -> Result<Value, MonitorError> {
        for _ in 0..EVENTS_MAX {
            let mut reply = self.receive()?;
            if let Some(value) = reply.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = reply.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason").to_owned();
                return Err(MonitorError::Refused { order: name.to_owned(), reason });
            }
        }
        Err(MonitorError::Protocol(format!("no reply to '{name}' among {EVENTS_MAX} messages")))
    }

    /// Gives an order of the older monitor, for which the protocol has no other. An answer is a
    /// complaint.
    pub fn human(&mut self, line: &str) -> Result<(), MonitorError> {
        let said = self.order("human-monitor-command", json!({ "command-line": line }))?;
        match said.as_str().map(str::trim) {
            Some("") => Ok(()),
            said => {
                let reason = said.unwrap_or("no text").to_owned();
                Err(MonitorError::Refused { order: line.to_owned(), reason })
            }
        }
    }

    fn receive(&mut self) -> Result<Value, MonitorError> {
        let mut line = Vec::new();
        self.0.by_ref().take(MESSAGE_LEN_MAX).read_until(b'\n', &mut line)?;
        match line.last() {
            Some(b'\n') => {}
            Some(_) => return Err(MonitorError::Protocol(format!("a message of {} bytes", line.len()))),
            None => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
        serde_json::from_slice(&line).map_err(|error| MonitorError::Protocol(error.to_string()))
    }
}

fn shortened(value: &Value) -> String {
    value.to_string().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// A QEMU that sends these lines, one after each line that it gets. The first one comes at once.
    fn qemu(lines: &'static [&str]) -> (UnixStream, thread::JoinHandle<Vec<Value>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serve = move || {
            let mut heard = Vec::new();
            let mut theirs = BufReader::new(theirs);
            for line in lines {
                theirs.get_mut().write_all(line.as_bytes()).unwrap();
                let mut order = String::new();
                if theirs.read_line(&mut order).unwrap() == 0 {
                    break;
                }
                heard.push(serde_json::from_str(&order).unwrap());
            }
            heard
        };
        (ours, thread::spawn(serve))
    }

    #[test]
    fn orders_get_their_replies_and_events_are_passed_over() {
        let (stream, qemu) = qemu(&[
            "{\"QMP\": {\"version\": {}}}\n",
            "{\"return\": {}}\n",
            "{\"event\": \"RESUME\"}\n{\"event\": \"X\"}\n{\"return\": {\"status\": \"running\"}}\n",
            "{\"return\": \"\"}\n",
            "{\"return\": \"could not set up host forwarding rule\\r\\n\"}\n",
            "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such thing\"}}\n",
        ]);
        let mut monitor = QemuMonitor::connect(stream).unwrap();
        assert_eq!(monitor.order("query-status", Value::Null).unwrap()["status"], "running");
        monitor.human("hostfwd_add n0 x").unwrap();
        let error = monitor.human("hostfwd_add n0 x").unwrap_err().to_string();
        assert!(error.contains("could not set up"), "{error}");
        let error = monitor.order("cont", json!({ "a": 1 })).unwrap_err().to_string();
        assert!(error.contains("'cont'") && error.contains("no such thing"), "{error}");
        drop(monitor);
        let heard = qemu.join().unwrap();
        assert_eq!(heard[1], json!({ "execute": "query-status" }));
        assert_eq!(heard[2]["arguments"]["command-line"], "hostfwd_add n0 x");
    }

    #[test]
    fn whatever_else_it_says_is_an_error() {
        for greeting in ["", "nonsense\n", "{\"return\": {}}\n", "[1]\n", "{\"QMP\": {}}\n{\"event\"}\n"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(greeting.as_bytes()).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            QemuMonitor::connect(ours).unwrap_err();
        }
    }
}

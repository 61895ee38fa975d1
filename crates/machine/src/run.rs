//! `nagaya vm-run`: the life of one machine, from QEMU's start to its end.
//!
//! It is the application's first process in its sandbox. It speaks with the guest's first process
//! over a port, one message in each line: sends the configuration once the guest has started, and
//! opens the application's address once it listens. QEMU's network accepts connections before
//! anything listens in the guest.
//!
//! Invariant: nothing that the guest says is trusted. Lines have a bound, a line has an effect
//! once, and only the configuration waits for the guest to read. Not here: the guest's side
//! (`c/guest_init.c`).

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;

use crate::command_line::{self, MemoryFile};
use crate::door::WakeDoor;
use crate::guest_config::{FORWARD_PORT_MIN, render};
use crate::monitor::{MonitorError, QemuMonitor};
use crate::pump;
use crate::qemu::{self, PortSockets, QemuOrder, QemuProcess, StartError, StateMemory};
use crate::settings::{Accelerator, ForwardedPlace, ImageContent, MachineOrigin, MachineSettings, VARIABLE};

/// The keeper's signal that the machine is back from its image, with its QEMU.
pub const WAKE: Signal = Signal::SIGALRM;

/// The keeper's signal before it takes an image of the sandbox. A machine whose image is a state
/// saves itself, and QEMU ends, until a wake (`door`).
pub const SAVE: Signal = Signal::SIGVTALRM;

/// Signals that the application gets.
const PASSED: [Signal; 4] = [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH];

/// Addresses of the application and of the server for commands in QEMU's network
/// (`c/guest_init.c`).
const APPLICATION_ADDRESS: &str = "10.0.2.15:8080";
const EXEC_ADDRESS: &str = "10.0.2.15:8081";

/// Maximum length of a message of the guest, bytes.
const MESSAGE_LEN_MAX: usize = 4096;

/// Bytes of the log that are copied at once.
const LOG_LEN: usize = 16 << 10;

/// Bytes of randomness that a guest gets with each wake.
const SEED_LEN: usize = 64;

/// Time without any event after which the guest's clock is set again: the counter that it follows
/// is known to a few millionths.
const CLOCK_EVERY: Timespec = Timespec { tv_sec: 3600, tv_nsec: 0 };

/// Maximum number of connections at once to forwarded places.
const CONNECTIONS_MAX: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error("the variable {VARIABLE} has no settings of a machine: {0}")]
    Settings(String),
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("the machine does not begin as its template: {0}")]
    Template(MonitorError),
    #[error("the machine does not continue from its state: {0}")]
    Saved(MonitorError),
    #[error("the machine cannot be tended: {0}")]
    Io(#[from] io::Error),
}

/// Runs the machine of the environment to its end. Returns the exit status of its application, or
/// of QEMU if that ended first.
pub fn run() -> Result<u8, MachineError> {
    let text = std::env::var(VARIABLE).map_err(|error| MachineError::Settings(error.to_string()))?;
    let settings: MachineSettings =
        serde_json::from_str(&text).map_err(|error| MachineError::Settings(error.to_string()))?;
    if settings.hardware.accelerator == Accelerator::Tcg {
        // QEMU asks for large pages for all of its translated code, and uses a part of each.
        let _ = nix::sys::prctl::set_thp_disable(true);
    }
    let signals = block_signals()?;
    forward_places(&settings.application.places)?;
    RunningMachine::start(settings)?.tend(&signals)
}

/// Signals that arrive as messages: the end of QEMU, the keeper's wish to end, an image and a wake.
fn block_signals() -> Result<SignalFd, MachineError> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, WAKE, SAVE].into_iter().chain(PASSED) {
        signals.add(signal);
    }
    signals.thread_block().map_err(io::Error::from)?;
    Ok(SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(io::Error::from)?)
}

/// The parts of a machine whose QEMU ends before an image is taken.
struct SavingParts {
    /// QEMU's ends of the ports, for the next one. They keep the bytes that it has not read.
    its_ports: PortSockets,
    /// The state of the machine while it has no QEMU.
    state: Option<File>,
    door: WakeDoor,
}

/// QEMU, and the ends of its sockets.
struct RunningMachine {
    settings: MachineSettings,
    /// `None` while the machine is saved.
    qemu: Option<Child>,
    /// For a machine whose image is its state.
    saving: Option<SavingParts>,
    /// `None` once it has failed: orders to QEMU are not obeyed any more.
    monitor: Option<QemuMonitor>,
    agent: UnixStream,
    log: UnixStream,
    heard: Vec<u8>,
    has_config: bool,
    is_open: bool,
    /// Exit status of the application, as the guest says.
    status: Option<u8>,
}

impl RunningMachine {
    /// Starts QEMU. A machine with a template runs then, and waits for its configuration.
    fn start(settings: MachineSettings) -> Result<Self, MachineError> {
        let origin = &settings.origin;
        let has_started = matches!(origin, MachineOrigin::Template { .. });
        let (PortSockets { agent, log, files }, its_ports) = PortSockets::pair()?;
        let QemuProcess { child, monitor } =
            QemuProcess::start(&order_of(&settings, has_started), &its_ports)?;
        let mut monitor = QemuMonitor::connect(monitor).map_err(MachineError::Template)?;
        if let MachineOrigin::Template { state, .. } = origin {
            let file =
                File::open(state).map_err(|error| MachineError::File { path: state.clone(), error })?;
            qemu::load_state(&mut monitor, &file, StateMemory::LeftOut).map_err(MachineError::Template)?;
        }
        pump::serve(files, &settings.root)?;
        let saving = match settings.image {
            ImageContent::Process => None,
            ImageContent::State => Some(SavingParts { its_ports, state: None, door: WakeDoor::open()? }),
        };
        drop_device()?;
        let mut machine = Self {
            settings,
            qemu: Some(child),
            saving,
            monitor: Some(monitor),
            agent,
            log,
            heard: Vec::new(),
            has_config: false,
            is_open: false,
            status: None,
        };
        machine.open_port(machine.settings.exec_port, EXEC_ADDRESS);
        if has_started {
            machine.configure()?;
        } else {
            machine.agent.set_nonblocking(true)?;
        }
        Ok(machine)
    }

    /// Serves the machine until QEMU has ended.
    fn tend(mut self, signals: &SignalFd) -> Result<u8, MachineError> {
        let mut has_log = true;
        loop {
            if let Some(status) = self.qemu.as_mut().map(Child::try_wait).transpose()?.flatten() {
                self.saving = None;
                self.copy_log();
                self.hear()?;
                return Ok(self.status.unwrap_or_else(|| status_of(status)));
            }
            let mut watched = vec![
                PollFd::new(signals, PollFlags::IN),
                PollFd::new(&self.agent, PollFlags::IN),
                PollFd::new(&self.log, if has_log { PollFlags::IN } else { PollFlags::empty() }),
            ];
            watched.extend(self.saving.iter().map(|parts| PollFd::new(parts.door.listener(), PollFlags::IN)));
            let polled = match poll(&mut watched, Some(&CLOCK_EVERY)) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled.map_err(io::Error::from)?,
            };
            let [of_signals, of_agent, of_log] = [0, 1, 2].map(|at: usize| watched[at].revents());
            let is_called = watched.get(3).is_some_and(|door| door.revents().contains(PollFlags::IN));
            if polled == 0 {
                self.say(&format!("clock {}", nanoseconds()));
            }
            if !of_signals.is_empty() {
                self.take_signals(signals);
            }
            if is_called {
                self.take_call()?;
            }
            if of_log.intersects(PollFlags::IN | PollFlags::HUP) {
                has_log = self.copy_log();
            }
            if of_agent.contains(PollFlags::IN) {
                self.hear()?;
            } else if of_agent.contains(PollFlags::HUP) {
                // QEMU is ending.
                return Ok(self.end());
            }
        }
    }

    fn end(mut self) -> u8 {
        let ended = self.qemu.as_mut().map_or(1, |qemu| qemu.wait().map_or(1, status_of));
        self.status.unwrap_or(ended)
    }

    fn take_signals(&mut self, signals: &SignalFd) {
        while let Ok(Some(signal)) = signals.read_signal() {
            match Signal::try_from(signal.ssi_signo.cast_signed()) {
                Ok(Signal::SIGTERM | Signal::SIGINT) => self.say("stop"),
                Ok(SAVE) => self.save(),
                Ok(WAKE) => self.wake(),
                Ok(signal) if PASSED.contains(&signal) => self.say(&format!("signal {}", signal as i32)),
                _ => {}
            }
        }
    }

    /// Saves the machine, if its image is a state. QEMU has ended then.
    fn save(&mut self) {
        let (Some(parts), Some(monitor)) = (&mut self.saving, &mut self.monitor) else { return };
        match save_in_memory(monitor) {
            Ok(file) => parts.state = Some(file),
            Err(error) => {
                eprintln!("the machine is not saved: {error}");
                let _ = monitor.order("cont", serde_json::Value::Null);
                return;
            }
        }
        self.monitor = None;
        if let Some(mut qemu) = self.qemu.take() {
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }

    /// Lets a caller wake a machine that was saved.
    fn take_call(&mut self) -> Result<(), MachineError> {
        let Some(Ok(call)) = self.saving.as_ref().map(|parts| parts.door.take()) else { return Ok(()) };
        rustix::stdio::dup2_stdin(&call.device).map_err(io::Error::from)?;
        self.resume()?;
        drop_device()?;
        self.wake();
        call.finish();
        Ok(())
    }

    /// Starts a machine that was saved, from where it was.
    fn resume(&mut self) -> Result<(), MachineError> {
        let Some(SavingParts { its_ports, state, .. }) = &mut self.saving else { return Ok(()) };
        let Some(mut file) = state.take() else { return Ok(()) };
        let QemuProcess { child, monitor } = QemuProcess::start(&order_of(&self.settings, true), its_ports)?;
        self.qemu = Some(child);
        let mut monitor = QemuMonitor::connect(monitor).map_err(MachineError::Saved)?;
        file.rewind()?;
        qemu::load_state(&mut monitor, &file, StateMemory::Contained).map_err(MachineError::Saved)?;
        self.monitor = Some(monitor);
        // The ports of QEMU's network are not in its state.
        self.open_port(self.settings.exec_port, EXEC_ADDRESS);
        if self.is_open {
            self.open_port(self.settings.port, APPLICATION_ADDRESS);
        }
        Ok(())
    }

    /// Copies some of the log. Returns false once there is no more.
    fn copy_log(&mut self) -> bool {
        let mut bytes = [0; LOG_LEN];
        match self.log.read(&mut bytes) {
            Ok(0) => false,
            // Without a reader of the log it is lost.
            Ok(len) => io::stdout().write_all(&bytes[..len]).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// Obeys what the guest has said so far.
    fn hear(&mut self) -> Result<(), MachineError> {
        let mut bytes = [0; MESSAGE_LEN_MAX];
        while let Ok(len @ 1..) = self.agent.read(&mut bytes) {
            self.heard.extend_from_slice(&bytes[..len]);
            while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                self.obey(&String::from_utf8_lossy(&line[..end]))?;
            }
            if self.heard.len() > MESSAGE_LEN_MAX {
                self.heard.clear();
            }
        }
        Ok(())
    }

    fn obey(&mut self, line: &str) -> Result<(), MachineError> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "hello" if !self.has_config => self.configure()?,
            "ready" if !self.is_open => {
                self.is_open = true;
                self.open_port(self.settings.port, APPLICATION_ADDRESS);
            }
            "exit" => self.status = self.status.or(Some(rest.parse().unwrap_or(1))),
            "failed" => {
                eprintln!("the guest cannot start: {}", rest.escape_debug());
                self.status = self.status.or(Some(1));
            }
            "note" => eprintln!("the guest: {}", rest.escape_debug()),
            _ => {}
        }
        Ok(())
    }

    /// Tells a guest that has started everything that it needs. It reads that before anything else.
    fn configure(&mut self) -> Result<(), MachineError> {
        self.has_config = true;
        let variables: Vec<Vec<u8>> = std::env::vars_os()
            .filter(|(name, _)| name != VARIABLE)
            .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
            .collect();
        let config = render(&self.settings, &variables);
        self.agent.set_nonblocking(false)?;
        self.wake();
        self.agent.write_all(format!("config {}\n{config}", config.len()).as_bytes())?;
        Ok(self.agent.set_nonblocking(true)?)
    }

    /// Leads a port of loopback in the sandbox to an address of the guest.
    fn open_port(&mut self, port: u16, address: &str) {
        let order = format!("hostfwd_add {} tcp:127.0.0.1:{port}-{address}", command_line::NETWORK);
        if let Some(Err(error)) = self.monitor.as_mut().map(|monitor| monitor.human(&order)) {
            eprintln!("the guest cannot be reached at port {port}: {error}");
            self.monitor = None;
        }
    }

    /// Tells the guest the time, and gives it randomness of its own.
    fn wake(&mut self) {
        let mut seed = [0; SEED_LEN];
        if getrandom::fill(&mut seed).is_err() {
            return;
        }
        let seed: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
        self.say(&format!("wake {} {seed}", nanoseconds()));
    }

    /// Sends a message. A guest that reads none gets none.
    fn say(&mut self, line: &str) {
        let _ = self.agent.write(format!("{line}\n").as_bytes());
    }
}

fn order_of(settings: &MachineSettings, is_incoming: bool) -> QemuOrder<'_> {
    let MachineSettings { name, qemu, hardware, origin, .. } = settings;
    let memory = match origin {
        MachineOrigin::Kernel { .. } => None,
        MachineOrigin::Template { memory, .. } => Some(MemoryFile { path: memory, is_shared: false }),
    };
    QemuOrder { qemu, name, hardware, origin, memory, is_incoming }
}

/// Lets go of a device that was standard input: no image contains it.
fn drop_device() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdin(&File::open("/dev/null")?)?)
}

/// Saves the machine in memory of this process, which an image contains.
fn save_in_memory(monitor: &mut QemuMonitor) -> Result<File, MonitorError> {
    let memory = rustix::fs::memfd_create("machine", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    let file = File::from(memory);
    qemu::save_state(monitor, &file, StateMemory::Contained)?;
    Ok(file)
}

/// Returns the time since 1970.
fn nanoseconds() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()
}

/// Returns the exit status as a shell shows it.
fn status_of(status: ExitStatus) -> u8 {
    let number = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(number).unwrap_or(1)
}

// === Places of the sandbox ===

/// Listens for the guest's connections to places in the sandbox, and passes them on.
fn forward_places(places: &[ForwardedPlace]) -> Result<(), MachineError> {
    let open = Arc::new(AtomicUsize::new(0));
    for (place, port) in places.iter().cloned().zip(FORWARD_PORT_MIN..) {
        let listener = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
        let open = Arc::clone(&open);
        thread::Builder::new().name("forward".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                    open.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (place, open) = (place.clone(), Arc::clone(&open));
                let pass = move || {
                    // A refused connection is closed, which the guest sees.
                    let _ = forward(stream, &place);
                    open.fetch_sub(1, Ordering::Relaxed);
                };
                let _ = thread::Builder::new().name("connection".into()).spawn(pass);
            }
        })?;
    }
    Ok(())
}

/// Passes one connection on, until both directions are closed.
fn forward(inside: TcpStream, place: &ForwardedPlace) -> io::Result<()> {
    match place {
        ForwardedPlace::Address(address) => {
            let outside = TcpStream::connect(address)?;
            let (back, on) = (outside.try_clone()?, inside.try_clone()?);
            both_ways((inside, outside), (back, on))
        }
        ForwardedPlace::Path(path) => {
            let outside = UnixStream::connect(path)?;
            let (back, on) = (outside.try_clone()?, inside.try_clone()?);
            both_ways((inside, outside), (back, on))
        }
    }
}

fn both_ways<A, B>((from, to): (A, B), (back, on): (B, A)) -> io::Result<()>
where
    A: io::Read + io::Write + AsFd + Send + 'static,
    B: io::Read + io::Write + AsFd + Send + 'static,
{
    let answering = thread::Builder::new().name("answers".into()).spawn(move || copy(back, on))?;
    copy(from, to);
    let _ = answering.join();
    Ok(())
}

/// Copies until one end is closed, and then closes this direction at the other.
fn copy(mut from: impl io::Read + AsFd, mut to: impl io::Write + AsFd) {
    let _ = io::copy(&mut from, &mut to);
    let _ = rustix::net::shutdown(&to, rustix::net::Shutdown::Write);
    let _ = rustix::net::shutdown(&from, rustix::net::Shutdown::Read);
}

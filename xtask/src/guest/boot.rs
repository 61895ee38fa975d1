//! QEMU: the guest is started, read to its end, and never outlives this program.
//!
//! Not here: the content of its disks (`root`, `initramfs`).

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{Access, access};

/// With KVM a kernel is up in less than a second. On some machines /dev/kvm makes virtual machines
/// that never start to run.
const KVM_UP_MAX: Duration = Duration::from_secs(5);

/// An emulated CPU takes two seconds, and its emulator may have to wait for a real one.
const EMULATED_UP_MAX: Duration = Duration::from_secs(120);

/// Options of the CPU, by kind of acceleration.
const KVM: &[&str] = &["-accel", "kvm", "-smp", "2"];

/// Several emulated CPUs would take turns, and wait for each other most of the time.
const EMULATED: &[&str] = &["-accel", "tcg", "-smp", "1"];

/// Lines of the console that are not read yet.
const LINES_MAX: usize = 1_000;

/// It has an HPET, against which the kernel can measure the time stamp counter even when this
/// machine is busy. QEMU's smaller `microvm` has only timers for which a busy emulator is late; its
/// kernel then hangs at the start.
const MACHINE: &str = "q35,usb=off";

/// The kernel prints only fatal errors to the console, and ends the machine with them. It trusts
/// its time stamp counter: otherwise it would take the slower HPET.
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=1 tsc=reliable reboot=t panic=-1 mitigations=off";

/// Messages of the guest's scripts: the system is up, and the tests' exit status.
const UP: &str = "guest: up";
const STATUS: &str = "guest: status ";

/// The time that passes with each instruction of an emulated CPU, whatever else the machine does.
/// So the load of the machine does not blur measured times and limits.
#[derive(Debug, Clone, Copy)]
pub enum InstructionTime {
    /// QEMU's shortest, and still slower than a real CPU.
    Nanosecond,
    /// Work that takes a given time here takes less than half of it on a real CPU.
    TwoNanoseconds,
}

impl InstructionTime {
    /// Returns QEMU's word: the power of two.
    fn icount(self) -> &'static str {
        match self {
            Self::Nanosecond => "shift=0",
            Self::TwoNanoseconds => "shift=1",
        }
    }
}

pub struct GuestMachine {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// MiB.
    pub memory: u32,
    /// For an emulated CPU.
    pub instruction: InstructionTime,
    /// `/dev/vda`. The guest's writes to it end with the guest.
    pub root: PathBuf,
    /// `/dev/vdb`, read-only.
    pub tests: PathBuf,
}

/// The running QEMU.
struct RunningGuest {
    child: Child,
    lines: Receiver<String>,
}

impl GuestMachine {
    /// Runs the guest to its end and returns the tests' exit status. Every line they print is
    /// passed to `each`.
    pub fn run(&self, limit: Duration, mut each: impl FnMut(&str)) -> Result<i32> {
        let begun = Instant::now();
        let guest = self.start()?;
        loop {
            match guest.lines.recv_timeout(limit.saturating_sub(begun.elapsed())) {
                Ok(line) => match line.strip_prefix(STATUS) {
                    Some(status) => return status.parse().context("the guest's status"),
                    None => each(&line),
                },
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended before its tests did; its last lines are above")
                }
                Err(RecvTimeoutError::Timeout) => bail!("the guest was not done after {limit:?}"),
            }
        }
    }

    /// Starts it where it runs fastest, and returns once it is up.
    fn start(&self) -> Result<RunningGuest> {
        if let Some(guest) = self.start_with_kvm()? {
            println!("guest: it runs with KVM");
            return Ok(guest);
        }
        let icount = self.instruction.icount();
        let guest = self.start_with(&[EMULATED, &["-icount", icount]].concat())?;
        ensure!(guest.is_up(EMULATED_UP_MAX), "the guest did not start within {EMULATED_UP_MAX:?}");
        println!("guest: its processor is emulated");
        Ok(guest)
    }

    /// Returns whether its clock is its own, so that the load of this machine does not affect it.
    /// KVM is tried for that.
    pub fn is_emulated(&self) -> Result<bool> {
        Ok(self.start_with_kvm()?.is_none())
    }

    /// Starts it with KVM. `None` if no KVM works.
    fn start_with_kvm(&self) -> Result<Option<RunningGuest>> {
        static FAILS: AtomicBool = AtomicBool::new(false);
        let is_there = access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).is_ok();
        if !is_there || FAILS.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let guest = self.start_with(KVM)?;
        if guest.is_up(KVM_UP_MAX) {
            return Ok(Some(guest));
        }
        FAILS.store(true, Ordering::Relaxed);
        Ok(None)
    }

    fn start_with(&self, speed: &[&str]) -> Result<RunningGuest> {
        // The end of this program always ends the guest, too.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
            .args(["-machine", MACHINE, "-cpu", "max,la57=off", "-m", &self.memory.to_string()])
            .args(speed)
            .args(["-no-user-config", "-nodefaults", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio", "-append", KERNEL_WORDS])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-drive", &drive("root", &self.root, "snapshot=on")])
            .args(["-device", "virtio-blk-pci,drive=root"])
            .args(["-drive", &drive("tests", &self.tests, "readonly=on")])
            .args(["-device", "virtio-blk-pci,drive=tests"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting qemu-system-x86_64 ('sudo ./dev setup guest' installs it)")?;
        let console = child.stdout.take().context("the guest's console")?;
        let (sender, lines) = mpsc::sync_channel(LINES_MAX);
        thread::spawn(move || {
            for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
                // A terminal's driver ends lines with both characters.
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(RunningGuest { child, lines })
    }
}

fn drive(id: &str, file: &std::path::Path, how: &str) -> String {
    // In QEMU's lists a comma is written twice.
    let file = file.to_string_lossy().replace(',', ",,");
    format!("if=none,format=raw,cache=unsafe,id={id},{how},file={file}")
}

impl RunningGuest {
    /// Returns whether its first process speaks within this time.
    fn is_up(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        while let Ok(line) = self.lines.recv_timeout(limit.saturating_sub(begun.elapsed())) {
            // Firmware leaves the cursor anywhere in a line.
            if line.ends_with(UP) {
                return true;
            }
            println!("guest: {line}");
        }
        false
    }
}

impl Drop for RunningGuest {
    fn drop(&mut self) {
        // It may have ended by itself; only waiting for it matters then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

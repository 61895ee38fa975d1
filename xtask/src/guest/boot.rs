//! QEMU: the guest is started, read to its end, and never outlives this program.
//!
//! Not here: what is on its disks (`root`, `initramfs`).

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{Access, access};

/// With KVM a kernel is up in less than a second. There are machines whose /dev/kvm makes virtual machines that never
/// begin to run.
const KVM_UP_MAX: Duration = Duration::from_secs(5);

/// An emulated processor takes two seconds, and its emulator may have to wait for a real one.
const EMULATED_UP_MAX: Duration = Duration::from_secs(120);

/// How fast the guest is, by kind of acceleration.
const KVM: &[&str] = &["-accel", "kvm", "-smp", "2"];

/// Several emulated processors would take turns, and wait for each other most of the time.
const EMULATED: &[&str] = &["-accel", "tcg", "-smp", "1"];

/// Lines of the console that are not read yet.
const LINES_MAX: usize = 1_000;

/// It has an HPET, against which the kernel can measure the time stamp counter even when this machine is busy. QEMU's
/// smaller `microvm` has only timers that a busy emulator is late for; its kernel then hangs at the start.
const MACHINE: &str = "q35,usb=off";

/// The kernel prints to the console only what it dies of, and ends the machine with that. It need not doubt its time stamp
/// counter, for which it would take the slower HPET.
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=1 tsc=reliable reboot=t panic=-1";

/// What the guest's scripts say of themselves: that there is a system, and how the tests ended.
const UP: &str = "guest: up";
const STATUS: &str = "guest: status ";

/// The time that passes with each instruction of an emulated processor, whatever else the machine does meanwhile: what is
/// read of time and limits is not blurred by how busy that is.
#[derive(Debug, Clone, Copy)]
pub enum Instruction {
    /// QEMU's shortest, and still slower than a real processor.
    Nanosecond,
    /// What keeps the processor busy for a given time is over twice as soon on the real one.
    TwoNanoseconds,
}

impl Instruction {
    /// QEMU's word: the power of two.
    fn icount(self) -> &'static str {
        match self {
            Self::Nanosecond => "shift=0",
            Self::TwoNanoseconds => "shift=1",
        }
    }
}

pub struct Machine {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// MiB.
    pub memory: u32,
    /// An emulated processor's.
    pub instruction: Instruction,
    /// `/dev/vda`. What the guest writes to it is gone with the guest.
    pub root: PathBuf,
    /// `/dev/vdb`, read-only.
    pub tests: PathBuf,
}

/// The running QEMU.
struct Guest {
    child: Child,
    lines: Receiver<String>,
}

impl Machine {
    /// Runs the guest to its end and returns the tests' exit status. Every line they print is given to `each`.
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
    fn start(&self) -> Result<Guest> {
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

    /// Whether its clock is its own: then it does not matter to it what else this machine does. KVM is tried for that.
    pub fn is_emulated(&self) -> Result<bool> {
        Ok(self.start_with_kvm()?.is_none())
    }

    /// None: there is no KVM that works.
    fn start_with_kvm(&self) -> Result<Option<Guest>> {
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

    fn start_with(&self, speed: &[&str]) -> Result<Guest> {
        // Whatever ends this program ends the guest too.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
            .args(["-machine", MACHINE, "-cpu", "max", "-m", &self.memory.to_string()])
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
        Ok(Guest { child, lines })
    }
}

fn drive(id: &str, file: &std::path::Path, how: &str) -> String {
    // In QEMU's lists a comma is written twice.
    let file = file.to_string_lossy().replace(',', ",,");
    format!("if=none,format=raw,cache=unsafe,id={id},{how},file={file}")
}

impl Guest {
    /// Whether its first process speaks within this time.
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

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended by itself; only waiting for it matters then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! A guest whose root is hostile, under real QEMU: `nagaya vm-run` stays within its bounds, and ends
//! with the machine.
//!
//! Not here: the sandbox around both, which is the wall (`nagaya_keeper`'s kernel tests). Skipped
//! without QEMU or a kernel for virtual machines (`NAGAYA_KERNELS`).

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Trial};
use nagaya_machine::archive::{ArchiveWriter, PROGRAM, SECRET};
use nagaya_machine::kernel::{GuestKernel, MODULES};
use nagaya_machine::settings::{
    Accelerator, GuestApplication, GuestListen, ImageContent, MachineHardware, MachineOrigin,
    MachineSettings, QemuProgram, VARIABLE,
};
use nagaya_machine::{TEMPLATE_LIBRARY, clock, initramfs};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const MEMORY_MIB: u32 = 128;

/// The guest says it once it begins (`hostile_init.c`).
const BEGUN: &str = "the guest cannot start: begun";

/// Time for all of it: a kernel starts in seconds.
const MACHINE_MAX: Duration = Duration::from_secs(120);

/// A hostile guest does its worst for this long.
const WORST: Duration = Duration::from_secs(4);

/// Most memory of `vm-run` itself, KiB. It holds a few buffers.
const RESIDENT_KIB_MAX: u64 = 96 << 10;

fn main() {
    if std::env::var_os(VARIABLE).is_some() {
        // The other side of `machine`.
        let ended = nagaya_machine::run::run();
        std::process::exit(ended.map_or(1, i32::from));
    }
    let facts: [(&str, fn()); 4] = [
        ("writes to every device end at most the machine", writes_to_every_device),
        ("floods of all ports hold no memory of the node", floods_of_all_ports),
        ("floods of the network hold no memory of the node", floods_of_the_network),
        ("machines that end themselves are over", machines_that_end_themselves),
    ];
    let missing = kernel().err();
    let trial = |(name, run): (&str, fn())| match missing.clone() {
        Some(why) => Trial::ignorable_test(name, move || Ok(Completion::ignored_with(why))),
        None => Trial::test(name, move || {
            run();
            Ok(())
        }),
    };
    libtest_mimic::run(&Arguments::from_args(), facts.map(trial).into()).exit();
}

/// Returns the kernel, or why there is none.
fn kernel() -> Result<GuestKernel, String> {
    if !Path::new(QEMU).exists() {
        return Err(format!("there is no {QEMU}"));
    }
    let tree = std::env::var_os("NAGAYA_KERNELS").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    GuestKernel::newest(&tree).map_err(|error| error.to_string())
}

/// Compiles the hostile first process, once.
fn init() -> &'static [u8] {
    static INIT: OnceLock<Vec<u8>> = OnceLock::new();
    INIT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("init");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile_init.c");
        let compiled =
            Command::new("cc").args(["-std=gnu11", "-O2", "-static", "-o"]).arg(&out).arg(source).status();
        assert!(compiled.unwrap().success());
        fs::read(out).unwrap()
    })
}

struct HostileMachine {
    run: Child,
    /// Bytes of its log so far.
    logged: Arc<AtomicU64>,
    _dir: tempfile::TempDir,
}

/// Starts a machine with this kind of guest, and waits until that begins.
fn machine(mode: &str) -> HostileMachine {
    let kernel = kernel().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (initramfs_file, library) = (dir.path().join("initramfs"), dir.path().join("library.so"));
    let mut own = ArchiveWriter::default();
    own.add("init", PROGRAM, init()).unwrap();
    own.add("mode", SECRET, mode.as_bytes()).unwrap();
    let mut all = initramfs::build(&kernel.read_modules(&MODULES).unwrap()).unwrap();
    all.extend(own.finish().unwrap());
    fs::write(&initramfs_file, all).unwrap();
    fs::write(&library, TEMPLATE_LIBRARY).unwrap();
    let tsc_khz = clock::tsc_khz();
    let settings = MachineSettings {
        name: "hostile".into(),
        qemu: QemuProgram { words: vec![QEMU.into()], library, modules: None },
        hardware: MachineHardware {
            accelerator: Accelerator::Tcg,
            memory_mib: MEMORY_MIB,
            vcpus: 1,
            tsc_khz,
        },
        origin: MachineOrigin::Kernel { kernel: kernel.image, initramfs: initramfs_file },
        image: ImageContent::Process,
        root: dir.path().to_owned(),
        application: GuestApplication {
            command: vec!["none".into()],
            uid: 65_534,
            gid: 65_534,
            open_files_max: 64,
            directory: "/".into(),
            listen: GuestListen::Port(8080),
            places: Vec::new(),
        },
        port: free_port(),
        exec_port: free_port(),
    };
    let mut run = Command::new(std::env::current_exe().unwrap())
        .env(VARIABLE, serde_json::to_string(&settings).unwrap())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let logged = Arc::new(AtomicU64::new(0));
    let (mut log, count) = (run.stdout.take().unwrap(), Arc::clone(&logged));
    thread::spawn(move || {
        let mut bytes = [0; 65_536];
        while let Ok(len @ 1..) = log.read(&mut bytes) {
            count.fetch_add(len as u64, Ordering::Relaxed);
        }
    });
    let mut errors = BufReader::new(run.stderr.take().unwrap());
    // From here on it ends with this value.
    let machine = HostileMachine { run, logged, _dir: dir };
    let mut said = String::new();
    while !said.contains(BEGUN) {
        let len = errors.read_line(&mut said).unwrap();
        assert_ne!(len, 0, "it ended before the guest began: {said}");
    }
    thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
    machine
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl HostileMachine {
    /// Returns its exit status, or `None` if it runs on for this time. Its memory is looked at all
    /// the while.
    fn watch(&mut self, time: Duration) -> Option<i32> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            if let Some(status) = self.run.try_wait().unwrap() {
                return Some(status.code().expect("no signal ends it"));
            }
            let status = fs::read_to_string(format!("/proc/{}/status", self.run.id())).unwrap_or_default();
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            let resident: u64 =
                resident.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0);
            assert!(resident <= RESIDENT_KIB_MAX, "vm-run holds {resident} KiB");
            thread::yield_now();
        }
        None
    }
}

impl Drop for HostileMachine {
    fn drop(&mut self) {
        // QEMU is its child, and ends with its sockets.
        let children = format!("/proc/{0}/task/{0}/children", self.run.id());
        let children = fs::read_to_string(children).unwrap_or_default();
        for pid in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        let _ = self.run.kill();
        let _ = self.run.wait();
    }
}

fn writes_to_every_device() {
    let mut machine = machine("devices");
    // It runs on or ends: both are right.
    machine.watch(WORST);
}

fn floods_of_all_ports() {
    let mut machine = machine("ports");
    machine.watch(WORST);
    assert!(machine.logged.load(Ordering::Relaxed) > 0, "the log was flooded");
}

fn floods_of_the_network() {
    let mut machine = machine("network");
    assert_eq!(machine.watch(WORST), None, "QEMU's network stands it");
}

fn machines_that_end_themselves() {
    for mode in ["power", "fault", "memory"] {
        let mut machine = machine(mode);
        let status = machine.watch(MACHINE_MAX).unwrap_or_else(|| panic!("{mode}: it runs on"));
        assert_eq!(status, 1, "{mode}: as the guest's first word said");
    }
}

//! Machines of this node: which kernel and which accelerator there is, and a template for each
//! kernel and hardware, from which all machines with these begin.
//!
//! Files are made once, below one directory that only root enters. Initial RAM disks stay. The
//! accelerator that works, the frequency of the time stamp counter and templates are kept until the
//! machine's next boot (`boot-ID`).
//!
//! Invariants: a template is made in a sandbox of nobody's, from a kernel that only root can
//! change. It is copied out of there, and never written again. All calls but `turn` block.
//! Not here: an application's machine (`instances::run::app_machine`).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_machine::kernel::{GuestKernel, MODULES};
use nagaya_machine::settings::{Accelerator, ImageContent, MachineHardware, QemuProgram};
use nagaya_machine::template::{MEMORY_FILE, STATE_FILE, TEMPLATE_VARIABLE, TemplateOrder};
use nagaya_machine::{DIRECTORY, TEMPLATE_LIBRARY, clock, initramfs};
use parking_lot::Mutex;

use crate::fault::{self, Fault};
use crate::image::Digest;
use crate::mail;
use crate::options::KeeperConfig;
use crate::sandbox::{CellEntrance, Launcher, NOBODY, SandboxBind, SandboxProgram, SandboxSpec};

/// QEMU's program on the node.
pub const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// Files of a sandbox with a machine, in `DIRECTORY`.
pub const PROGRAM_FILE: &str = "nagaya";
pub const KERNEL_FILE: &str = "kernel";
pub const INITRAMFS_FILE: &str = "initramfs";
pub const LIBRARY_FILE: &str = "template_memory.so";

/// The device by which QEMU runs a guest on the processor itself.
const KVM: &str = "/dev/kvm";

/// Identifier of the node's run (Documentation/admin-guide/sysctl/kernel.rst).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Maximum time until a kernel has started, seconds: translated, and on the processor itself. Some
/// nodes have a `/dev/kvm` on which it never does.
const TCG_BOOT_SECONDS_MAX: u32 = 60;
const KVM_BOOT_SECONDS_MAX: u32 = 5;

/// Time for what comes before and after that.
const TEMPLATE_MARGIN: Duration = Duration::from_secs(60);

/// Sizes in a template's sandbox.
const SHM_BYTES_MAX: u64 = 1 << 20;
const OPEN_FILES_MAX: u64 = 256;

/// Maximum length of a reason, bytes.
const REASON_LEN_MAX: u64 = 2048;

/// Bytes of a template's memory that are copied at once. Those that are all zero are left out.
const PAGE_LEN: usize = 4096;

/// The parts of a machine that are the same for all with one kernel.
#[derive(Debug, Clone)]
pub struct MachineParts {
    /// nagaya's own program.
    pub program: PathBuf,
    pub library: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Nobody but root can change the kernel. So it may have a template.
    pub is_of_root: bool,
}

/// How guests run on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceleratorChoice {
    pub accelerator: Accelerator,
    /// Why it is not KVM. Empty if it is.
    pub reason: String,
}

/// The result of starting a machine on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineProbe {
    /// The kernel for `--kernel node`.
    pub kernel: PathBuf,
    /// Why its code is translated. Empty with KVM.
    pub reason: String,
}

/// Memory of the machine that is started to find out, MiB.
const PROBE_MIB: u32 = 128;

/// Starts a machine, unless a keeper of this run of the node has done that. The error says what is
/// missing.
pub fn probe(launcher: &Launcher, options: &KeeperConfig) -> Result<MachineProbe, String> {
    let kernel = GuestKernel::newest(&options.instances.kernels).map_err(|error| error.to_string())?;
    let known = boot_name().ok().and_then(|name| read_choice(&directory(options).join(name)));
    let choice = match known {
        Some(choice) => choice,
        None => try_machine(launcher, options, &kernel)?,
    };
    Ok(MachineProbe { kernel: kernel.image, reason: choice.reason })
}

/// Makes a template in a directory of its own, beside the keeper's.
fn try_machine(
    launcher: &Launcher,
    options: &KeeperConfig,
    kernel: &GuestKernel,
) -> Result<AcceleratorChoice, String> {
    let mut options = options.clone();
    options.instances.images = directory(&options).with_file_name("machine-probe").join("images");
    let all = directory(&options);
    let tried = (|| {
        let (parts, templates) = (parts(&options, kernel)?, MachineTemplates::default());
        let hardware = templates.hardware(launcher, &options, &parts, (PROBE_MIB, 1))?;
        templates.get(launcher, &options, &parts, &hardware)?;
        templates.choose(launcher, &options, &parts, &hardware)
    })();
    let _ = all.parent().map(fs::remove_dir_all);
    tried.map_err(|fault: Fault| fault.message)
}

/// The directory of a template with its two files.
#[derive(Debug, Clone)]
pub struct TemplateFiles {
    pub memory: PathBuf,
    pub state: PathBuf,
}

/// Returns the directory of all of it.
pub fn directory(options: &KeeperConfig) -> PathBuf {
    options.instances.images.with_file_name("machines")
}

// === Parts ===

/// Finds nagaya's program and QEMU, and makes the initial RAM disk of this kernel.
pub fn parts(options: &KeeperConfig, kernel: &GuestKernel) -> Result<MachineParts, Fault> {
    let program = mail::program().ok_or_else(|| broken("the file of nagaya's own program is gone"))?;
    if !Path::new(QEMU).is_file() {
        return Err(broken(format!("there is no {QEMU}: install qemu-system-x86")));
    }
    let directory = directory(options);
    Ok(MachineParts {
        program: program.to_owned(),
        library: make_library(&directory)?,
        initramfs: make_initramfs(&directory, kernel)?,
        is_of_root: is_of_root(&kernel.image),
        kernel: kernel.image.clone(),
    })
}

/// Whether only root can change this file or what its path leads to. In a directory like `/tmp`
/// nobody else can change an entry of root's.
fn is_of_root(path: &Path) -> bool {
    let is_safe = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|file| {
            let is_sticky = file.is_dir() && file.mode() & 0o1000 != 0;
            file.uid() == 0 && (file.is_symlink() || is_sticky || file.mode() & 0o022 == 0)
        })
    };
    // A link of root's may lead to what others can change.
    let target = path.canonicalize();
    path.is_absolute()
        && path.ancestors().all(is_safe)
        && target.is_ok_and(|target| target.ancestors().all(is_safe))
}

/// Makes the initial RAM disk of this kernel, unless it is there.
fn make_initramfs(directory: &Path, kernel: &GuestKernel) -> Result<PathBuf, Fault> {
    let failed = |error| in_directory(directory, error);
    let mut facts = file_facts(&kernel.image).map_err(failed)?;
    if let Some(modules) = &kernel.modules {
        facts.extend(file_facts(modules).map_err(failed)?);
    }
    let path = directory.join(format!("initramfs-{}", Digest::of(&[&facts, initramfs::INIT])));
    if path.is_file() {
        return Ok(path);
    }
    let modules = kernel.read_modules(&MODULES).map_err(|error| broken(error.to_string()))?;
    let bytes = initramfs::build(&modules).map_err(|error| broken(error.to_string()))?;
    write_once(&path, &bytes, 0o444).map_err(failed)?;
    Ok(path)
}

fn make_library(directory: &Path) -> Result<PathBuf, Fault> {
    let path = directory.join(format!("template_memory-{}.so", Digest::of(&[TEMPLATE_LIBRARY])));
    if !path.is_file() {
        write_once(&path, TEMPLATE_LIBRARY, 0o555).map_err(|error| in_directory(directory, error))?;
    }
    Ok(path)
}

/// Writes a file that appears as a whole.
fn write_once(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        make_directory(directory)?;
    }
    let new = path.with_extension(format!("new-{}", std::process::id()));
    fs::write(&new, bytes)?;
    fs::set_permissions(&new, Permissions::from_mode(mode))?;
    fs::rename(&new, path)
}

fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Returns the numbers that tell a file from any other, and from itself after a change.
pub fn file_facts(path: &Path) -> io::Result<Vec<u8>> {
    let file = fs::metadata(path)?;
    let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()].map(i64::cast_unsigned);
    let numbers = [file.dev(), file.ino(), file.size()].into_iter().chain(times);
    Ok(numbers.flat_map(u64::to_le_bytes).collect())
}

// === Templates ===

/// The templates of this node. One is made at a time.
#[derive(Debug, Default)]
pub struct MachineTemplates {
    turn: tokio::sync::Mutex<()>,
    /// Those whose files have been compared with their digest by this process.
    verified: Mutex<Vec<PathBuf>>,
}

impl MachineTemplates {
    /// Waits for the turn to ask for one, without a thread.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Returns the hardware of a machine of this size, with the accelerator that works here.
    pub fn hardware(
        &self,
        launcher: &Launcher,
        options: &KeeperConfig,
        parts: &MachineParts,
        (memory_mib, vcpus): (u32, u32),
    ) -> Result<MachineHardware, Fault> {
        let boot = boot_directory(options)?;
        let mut hardware =
            MachineHardware { accelerator: Accelerator::Tcg, memory_mib, vcpus, tsc_khz: tsc_khz(&boot) };
        hardware.accelerator = match read_choice(&boot) {
            Some(choice) => choice.accelerator,
            // A kernel that a tenant can change is no test.
            None if parts.is_of_root => self.choose(launcher, options, parts, &hardware)?.accelerator,
            None => Accelerator::Tcg,
        };
        Ok(hardware)
    }

    /// Finds out by starting this kernel whether KVM works, and keeps the answer.
    pub fn choose(
        &self,
        launcher: &Launcher,
        options: &KeeperConfig,
        parts: &MachineParts,
        hardware: &MachineHardware,
    ) -> Result<AcceleratorChoice, Fault> {
        let boot = boot_directory(options)?;
        if let Some(choice) = read_choice(&boot) {
            return Ok(choice);
        }
        let tried = if Path::new(KVM).exists() {
            let hardware = MachineHardware { accelerator: Accelerator::Kvm, ..hardware.clone() };
            self.get(launcher, options, parts, &hardware).map_err(|fault| fault.message)
        } else {
            Err(format!("there is no {KVM}"))
        };
        let choice = match tried {
            Ok(_) => AcceleratorChoice { accelerator: Accelerator::Kvm, reason: String::new() },
            Err(reason) => AcceleratorChoice { accelerator: Accelerator::Tcg, reason },
        };
        let text = format!("{} {}", choice.accelerator.word(), choice.reason);
        write_once(&boot.join(ACCELERATOR_FILE), text.as_bytes(), 0o600)
            .map_err(|error| in_directory(&boot, error))?;
        Ok(choice)
    }

    /// Returns the template of this kernel and hardware. Makes it if it is missing or not as it was
    /// made.
    pub fn get(
        &self,
        launcher: &Launcher,
        options: &KeeperConfig,
        parts: &MachineParts,
        hardware: &MachineHardware,
    ) -> Result<TemplateFiles, Fault> {
        let boot = boot_directory(options)?;
        let failed = |error| in_directory(&boot, error);
        let mut facts = serde_json::to_vec(hardware).map_err(|error| broken(error.to_string()))?;
        for path in [&*parts.kernel, &*parts.initramfs, Path::new(QEMU)] {
            facts.extend(file_facts(path).map_err(failed)?);
        }
        let path = boot.join(format!("template-{}", Digest::of(&[&facts])));
        let files = TemplateFiles { memory: path.join(MEMORY_FILE), state: path.join(STATE_FILE) };
        let mut verified = self.verified.lock();
        if verified.contains(&path) && files.memory.is_file() && files.state.is_file() {
            return Ok(files);
        }
        if is_as_made(&path, &files) {
            verified.push(path);
            return Ok(files);
        }
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(()) => {
                tracing::warn!(path = %path.display(), "a template of machines has changed, and is made anew")
            }
            Err(_) => {}
        }
        let began = std::time::Instant::now();
        make(launcher, options, parts, hardware, &path)?;
        tracing::info!(memory_mib = hardware.memory_mib, accelerator = hardware.accelerator.word(), took = ?began.elapsed(), "a template of machines is ready");
        verified.push(path);
        Ok(files)
    }
}

/// Files in a template's directory and in that of the node's run.
const DIGEST_FILE: &str = "digest";
const ACCELERATOR_FILE: &str = "accelerator";
const TSC_FILE: &str = "tsc_khz";

/// Returns the name of the directory of the node's run.
fn boot_name() -> io::Result<String> {
    Ok(format!("boot-{}", fs::read_to_string(BOOT_ID)?.trim()))
}

/// Returns the directory of the node's run. Removes those of earlier ones: no process has any of
/// their files.
fn boot_directory(options: &KeeperConfig) -> Result<PathBuf, Fault> {
    let all = directory(options);
    let find = || -> io::Result<PathBuf> {
        let name = boot_name()?;
        let path = all.join(&name);
        if path.is_dir() {
            return Ok(path);
        }
        make_directory(&path)?;
        for entry in fs::read_dir(&all)?.flatten() {
            let other = entry.file_name();
            if other.to_str().is_some_and(|other| other.starts_with("boot-") && other != name) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(path)
    };
    find().map_err(|error| in_directory(&all, error))
}

/// Returns the counter's frequency, the same as long as the node runs: templates depend on it.
fn tsc_khz(boot: &Path) -> Option<u32> {
    let path = boot.join(TSC_FILE);
    if let Some(known) = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()) {
        return Some(known);
    }
    let khz = clock::tsc_khz()?;
    if let Err(error) = write_once(&path, khz.to_string().as_bytes(), 0o600) {
        tracing::warn!(path = %path.display(), %error, "the frequency of the clock is not kept");
    }
    Some(khz)
}

fn read_choice(boot: &Path) -> Option<AcceleratorChoice> {
    let text = fs::read_to_string(boot.join(ACCELERATOR_FILE)).ok()?;
    let (word, reason) = text.split_once(' ')?;
    let accelerator = [Accelerator::Kvm, Accelerator::Tcg].into_iter().find(|one| one.word() == word)?;
    Some(AcceleratorChoice { accelerator, reason: reason.to_owned() })
}

/// Whether these are the files whose digest was written when they were made.
fn is_as_made(path: &Path, files: &TemplateFiles) -> bool {
    let digest = || -> io::Result<Digest> { digest_of(files) };
    fs::read_to_string(path.join(DIGEST_FILE))
        .is_ok_and(|made| digest().is_ok_and(|now| now.to_string() == made))
}

fn digest_of(files: &TemplateFiles) -> io::Result<Digest> {
    let [memory, state] =
        [&files.memory, &files.state].map(|path| File::open(path).and_then(|file| Digest::of_file(&file)));
    Ok(Digest::of(&[memory?.to_string().as_bytes(), state?.to_string().as_bytes()]))
}

/// Makes a template in a sandbox, and copies it to this directory, which appears as a whole.
fn make(
    launcher: &Launcher,
    options: &KeeperConfig,
    parts: &MachineParts,
    hardware: &MachineHardware,
    path: &Path,
) -> Result<(), Fault> {
    let failed = |error| in_directory(path, error);
    let making = path.with_extension("making");
    let new = path.with_extension("new");
    for left in [&making, &new] {
        match fs::remove_dir_all(left) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => make_directory(left).map_err(failed)?,
        }
    }
    chown(&making, Some(NOBODY.uid), Some(NOBODY.gid)).map_err(failed)?;
    let made = run_in_sandbox(launcher, options, parts, hardware, &making);
    let copied = made.and_then(|()| copy_out(&making, &new, hardware).map_err(failed));
    let _ = fs::remove_dir_all(&making);
    if copied.is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    copied?;
    fs::rename(&new, path).map_err(failed)
}

fn run_in_sandbox(
    launcher: &Launcher,
    options: &KeeperConfig,
    parts: &MachineParts,
    hardware: &MachineHardware,
    making: &Path,
) -> Result<(), Fault> {
    let in_sandbox = |name: &str| Path::new(DIRECTORY).join(name);
    let boot_seconds_max = match hardware.accelerator {
        Accelerator::Kvm => KVM_BOOT_SECONDS_MAX,
        Accelerator::Tcg => TCG_BOOT_SECONDS_MAX,
    };
    let order = TemplateOrder {
        qemu: QemuProgram { words: vec![QEMU.to_owned()], library: in_sandbox(LIBRARY_FILE), modules: None },
        hardware: hardware.clone(),
        kernel: in_sandbox(KERNEL_FILE),
        initramfs: in_sandbox(INITRAMFS_FILE),
        into: "/tmp".into(),
        boot_seconds_max,
    };
    let order = serde_json::to_string(&order).map_err(|error| broken(error.to_string()))?;
    let device = kvm(hardware.accelerator, ImageContent::of(hardware.accelerator))?;
    let sandbox = launcher.create(&sandbox_spec(options, parts, making)).map_err(of_sandbox)?;
    let (mut said, errors) = sandbox
        .pipe()
        .map(|(ours, its)| (File::from(ours), its))
        .map_err(|error| broken(error.to_string()))?;
    let program = SandboxProgram {
        argv: vec![in_sandbox(PROGRAM_FILE).into(), "vm-template".into()],
        env: vec![
            (OsString::from("PATH"), OsString::from("/usr/bin:/bin")),
            (TEMPLATE_VARIABLE.into(), order.into()),
        ],
        directory: "/".into(),
        stdin: device.as_ref().map(File::as_fd),
        stdout: None,
        stderr: Some(errors.as_fd()),
        listener: None,
        pid: Some(crate::sandbox::ROOT_PID),
        open_files_max: OPEN_FILES_MAX,
        has_terminal: false,
    };
    let task = sandbox.run(&program).map_err(of_sandbox)?;
    drop(errors);
    let limit = Duration::from_secs(boot_seconds_max.into()) + TEMPLATE_MARGIN;
    let exit = task.wait(limit).map_err(|error| broken(format!("a template is not made: {error}")))?;
    // Nothing may write to its files any more.
    sandbox.end().map_err(|error| broken(format!("a template's sandbox does not end: {error}")))?;
    if exit.status == Some(0) {
        return Ok(());
    }
    let mut reason = String::new();
    let _ = (&mut said).take(REASON_LEN_MAX).read_to_string(&mut reason);
    let reason = reason.trim().rsplit('\n').next().unwrap_or_default();
    let reason = reason.trim_start_matches("nagaya vm-template: ");
    Err(broken(format!("cannot make a template in {}: {reason}", making.display())))
}

/// Opens the device for a machine that needs it. Its sandbox has no devices of the node's.
pub fn kvm(accelerator: Accelerator, image: ImageContent) -> Result<Option<File>, Fault> {
    let open = || OpenOptions::new().read(true).write(true).open(KVM);
    match (accelerator, image) {
        (Accelerator::Tcg, ImageContent::Process) => Ok(None),
        // A test: the device is carried through the image, and is not used.
        (Accelerator::Tcg, ImageContent::State) => Ok(open().ok()),
        (Accelerator::Kvm, _) => open().map(Some).map_err(|error| broken(format!("{KVM}: {error}"))),
    }
}

fn sandbox_spec(options: &KeeperConfig, parts: &MachineParts, making: &Path) -> SandboxSpec {
    let bind = |source: &Path, name: &str| SandboxBind {
        source: source.to_owned(),
        target: Path::new(DIRECTORY).join(name),
        writable: false,
        as_tenant: false,
        is_optional: false,
    };
    SandboxSpec {
        identity: NOBODY,
        home: None,
        hostname: "template".into(),
        base: "/".into(),
        base_as_tenant: false,
        binds: vec![
            bind(&parts.program, PROGRAM_FILE),
            bind(&parts.library, LIBRARY_FILE),
            bind(&parts.kernel, KERNEL_FILE),
            bind(&parts.initramfs, INITRAMFS_FILE),
        ],
        hide: options.hidden_directories().collect(),
        tmp: Some(making.to_owned()),
        run: None,
        shm_bytes_max: SHM_BYTES_MAX,
        host_network: false,
        entrance: CellEntrance::default(),
    }
}

/// Copies the two files, checks their sizes, and writes their digest.
fn copy_out(from: &Path, to: &Path, hardware: &MachineHardware) -> io::Result<()> {
    let memory_len = u64::from(hardware.memory_mib) << 20;
    for (name, len_max) in [(MEMORY_FILE, memory_len), (STATE_FILE, memory_len)] {
        // No link, and no waiting for a pipe: the directory is nobody's.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let flags = flags.bits().cast_signed();
        let mut source = OpenOptions::new().read(true).custom_flags(flags).open(from.join(name))?;
        let facts = source.metadata()?;
        if !facts.is_file() || facts.len() > len_max || (name == MEMORY_FILE && facts.len() != memory_len) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name} has a wrong size")));
        }
        let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o444).open(to.join(name))?;
        copy_sparse(&mut source, &mut copy)?;
        copy.set_len(facts.len())?;
    }
    let files = TemplateFiles { memory: to.join(MEMORY_FILE), state: to.join(STATE_FILE) };
    fs::write(to.join(DIGEST_FILE), digest_of(&files)?.to_string())
}

fn copy_sparse(from: &mut File, to: &mut File) -> io::Result<()> {
    let mut page = vec![0; PAGE_LEN];
    loop {
        let mut len = 0;
        while len < page.len() {
            match from.read(&mut page[len..])? {
                0 => break,
                more => len += more,
            }
        }
        if len == 0 {
            return Ok(());
        }
        if page[..len].iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(i64::try_from(len).map_err(io::Error::other)?))?;
        } else {
            to.write_all(&page[..len])?;
        }
    }
}

fn of_sandbox(error: crate::sandbox::SandboxError) -> Fault {
    broken(format!("a template's sandbox: {error}"))
}

fn in_directory(directory: &Path, error: io::Error) -> Fault {
    Fault::of_path(fault::MACHINE, "cannot make files in", directory, error)
}

/// Returns the fault of a machine that cannot be made.
pub fn broken(message: impl Into<String>) -> Fault {
    Fault::new(FailureKind::Broken, fault::MACHINE, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_no_zeros_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let mut content = vec![0; 1 << 20];
        content[300_000] = 7;
        let from = dir.path().join("from");
        fs::write(&from, &content).unwrap();
        let to = dir.path().join("to");
        let mut copy = File::create(&to).unwrap();
        copy_sparse(&mut File::open(&from).unwrap(), &mut copy).unwrap();
        copy.set_len(content.len() as u64).unwrap();
        assert_eq!(fs::read(&to).unwrap(), content);
        assert!(fs::metadata(&to).unwrap().blocks() * 512 <= 16 << 10);
    }

    #[test]
    fn the_choice_of_an_accelerator_is_kept_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_choice(dir.path()), None);
        let written = |text: &str| {
            fs::write(dir.path().join(ACCELERATOR_FILE), text).unwrap();
            read_choice(dir.path())
        };
        let choice =
            |accelerator, reason: &str| Some(AcceleratorChoice { accelerator, reason: reason.into() });
        assert_eq!(written("kvm "), choice(Accelerator::Kvm, ""));
        assert_eq!(written("tcg there is no /dev/kvm"), choice(Accelerator::Tcg, "there is no /dev/kvm"));
        assert_eq!(written("xen "), None);
        assert_eq!(written(""), None);
    }

    #[test]
    fn a_kernel_that_others_may_change_has_no_template() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmlinuz");
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        assert!(!is_of_root(&path), "its group may");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(!is_of_root(&link), "a link does not make it root's");
        assert!(is_of_root(Path::new("/usr/bin/env")));
        assert!(!is_of_root(Path::new("usr/bin/env")));
    }
}

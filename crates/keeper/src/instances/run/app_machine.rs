//! A kernel of its own for an application: its sandbox runs `nagaya vm-run`, which runs QEMU.
//!
//! The sandbox is the same as without, and gets some more files: nagaya's own program, and a
//! template or a kernel. On a base of its own it also gets the node's programs, in a directory that
//! the guest does not see, and runs them with the node's libraries. Nothing else of the keeper's
//! learns about machines. Not here: the machine (`nagaya_machine`), templates (`machines`).

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nagaya_machine::DIRECTORY;
use nagaya_machine::kernel::{self, GuestKernel};
use nagaya_machine::settings::{
    ForwardedPlace, GuestApplication, GuestListen, ImageContent, MachineHardware, MachineOrigin,
    MachineSettings, QemuProgram, VARIABLE,
};
use nagaya_machine::template::{MEMORY_FILE, STATE_FILE};
use nagaya_records::record::{APP_PORT, App, AppListen, AppMachine, MachineKernel};
use nagaya_records::{Site, Tenant};

use crate::fault::{self, Fault};
use crate::image::Digest;
use crate::machines::{
    self, INITRAMFS_FILE, KERNEL_FILE, LIBRARY_FILE, MachineParts, MachineTemplates, PROGRAM_FILE, QEMU,
    TemplateFiles, broken, file_facts, parts,
};
use crate::mail;
use crate::options::KeeperConfig;
use crate::paths::tenant_path::PathOwner;
use crate::relay::EgressPlan;
use crate::sandbox::{Launcher, SandboxBind, UnixIdentity};
use crate::spawn::{self, AppAddress};

/// Port of loopback in the sandbox where the guest takes commands of an operator.
const EXEC_PORT: u16 = APP_PORT + 1;

/// Directory of the sandbox with the node's programs, on a base of its own.
const NODE_DIR: &str = "node";

/// The node's programs and libraries, and which of them starts a program with the others
/// (ld.so(8)).
const NODE_PROGRAMS: &str = "/usr";
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// Memory that QEMU needs besides the guest's, MiB.
const QEMU_MIB: u64 = 64;

/// The files that a machine is made from, on the node.
#[derive(Debug, Clone)]
pub struct MachineFiles {
    parts: MachineParts,
    hardware: MachineHardware,
    /// The part of it in its image.
    image: ImageContent,
    /// The kernel's path is the record's, and must be readable for the tenant.
    is_of_record: bool,
    /// `None`: the kernel starts, because a tenant may have changed it.
    template: Option<TemplateFiles>,
}

/// Everything that describes one machine.
pub struct MachineOrder<'a> {
    pub site: &'a Site,
    pub tenant: &'a Tenant,
    pub app: &'a App,
    pub files: &'a MachineFiles,
    pub is_node_base: bool,
    pub identity: UnixIdentity,
    pub open_files_max: u64,
    pub plan: Option<&'a EgressPlan>,
}

impl MachineFiles {
    /// Finds the kernel of this record, and makes its template unless it is there. Blocks.
    pub fn prepare(
        machine: &AppMachine,
        options: &KeeperConfig,
        owner: &PathOwner,
        launcher: &Launcher,
        templates: &MachineTemplates,
    ) -> Result<Self, Fault> {
        let (kernel, is_of_record) = match &machine.kernel {
            MachineKernel::Node => {
                let newest = GuestKernel::newest(&options.instances.kernels);
                (newest.map_err(|error| broken(error.to_string()))?, false)
            }
            MachineKernel::File(path) => {
                let file = owner
                    .open_file(path)
                    .map_err(|error| Fault::of_path(fault::MACHINE, "cannot open the kernel", path, error))?;
                kernel::check_file(&file, path).map_err(|error| broken(error.to_string()))?;
                (GuestKernel::of_release(path.clone()), true)
            }
        };
        let parts = parts(options, &kernel)?;
        let memory_mib = machine.memory_mib().map_err(|wrong| broken(format!("memory {wrong}")))?;
        let hardware = templates.hardware(launcher, options, &parts, (memory_mib, machine.vcpus()))?;
        let template = match parts.is_of_root {
            true => Some(templates.get(launcher, options, &parts, &hardware)?),
            false => None,
        };
        let image = match options.instances.machines_save_states {
            true => ImageContent::State,
            false => ImageContent::of(hardware.accelerator),
        };
        Ok(Self { parts, hardware, image, is_of_record, template })
    }

    /// Returns what its sandbox shows besides.
    pub fn binds(&self, is_node_base: bool) -> Vec<SandboxBind> {
        let bind = |source: &Path, name: &str, as_tenant| SandboxBind {
            source: source.to_owned(),
            target: Path::new(DIRECTORY).join(name),
            writable: false,
            as_tenant,
            is_optional: false,
        };
        let MachineParts { program, library, kernel, initramfs, .. } = &self.parts;
        let mut binds = vec![bind(program, PROGRAM_FILE, false), bind(library, LIBRARY_FILE, false)];
        match &self.template {
            Some(TemplateFiles { memory, state }) => {
                binds.extend([bind(memory, MEMORY_FILE, false), bind(state, STATE_FILE, false)]);
            }
            None => binds.extend([
                bind(kernel, KERNEL_FILE, self.is_of_record),
                bind(initramfs, INITRAMFS_FILE, false),
            ]),
        }
        if !is_node_base {
            binds.push(bind(Path::new(NODE_PROGRAMS), &format!("{NODE_DIR}{NODE_PROGRAMS}"), false));
        }
        binds
    }

    /// Returns a digest of all of it, for the machine's image. Files are known by their times: what
    /// the image needs of their contents is in the image.
    pub fn digest(&self) -> io::Result<Digest> {
        let MachineParts { program, library, kernel, initramfs, .. } = &self.parts;
        let mut facts = serde_json::to_vec(&(&self.hardware, self.image)).map_err(io::Error::other)?;
        let of_template = self.template.iter().flat_map(|TemplateFiles { memory, state }| [&**memory, state]);
        for path in [&**program, library, kernel, initramfs, Path::new(QEMU)].into_iter().chain(of_template) {
            facts.extend(file_facts(path)?);
        }
        Ok(Digest::of(&[b"machine", &facts]))
    }

    /// Whether QEMU ends before an image is taken (`machine_state`).
    pub fn saves_state(&self) -> bool {
        self.image == ImageContent::State
    }

    /// Returns the device that its sandbox gets as standard input, if it needs one.
    pub fn device(&self) -> Result<Option<File>, Fault> {
        machines::kvm(self.hardware.accelerator, self.image)
    }

    /// Checks that a memory limit of its cell, bytes, is not below its own memory. The kernel would
    /// end QEMU, and not a program in the guest.
    pub fn check_limit(&self, limit: Option<u64>) -> Result<(), Fault> {
        // A state is in memory beside the machine.
        let times = if self.saves_state() { 2 } else { 1 };
        let needed = (u64::from(self.hardware.memory_mib) * times + QEMU_MIB) << 20;
        match limit {
            Some(limit) if limit < needed => Err(broken(format!(
                "the memory limit of its cell is {} MiB, and a machine with {} MiB needs {}: raise the one or lower the other (--vm-memory)",
                limit >> 20,
                self.hardware.memory_mib,
                needed >> 20
            ))),
            _ => Ok(()),
        }
    }

    fn origin(&self) -> MachineOrigin {
        match self.template {
            Some(_) => {
                MachineOrigin::Template { memory: in_sandbox(MEMORY_FILE), state: in_sandbox(STATE_FILE) }
            }
            None => MachineOrigin::Kernel {
                kernel: in_sandbox(KERNEL_FILE),
                initramfs: in_sandbox(INITRAMFS_FILE),
            },
        }
    }
}

fn in_sandbox(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// Returns where the keeper reaches the application in its sandbox.
pub fn listen(app: &App) -> AppListen {
    if app.machine.is_some() { AppListen::Port } else { app.listen }
}

/// Returns the command of the sandbox, and the variable that describes the machine.
pub fn command(
    order: &MachineOrder<'_>,
    address: &AppAddress,
) -> Result<(Vec<OsString>, (OsString, OsString)), Fault> {
    let MachineOrder { site, tenant, app, files, is_node_base, identity, open_files_max, plan } = order;
    let settings = MachineSettings {
        name: site.name.to_string(),
        qemu: qemu(*is_node_base),
        hardware: files.hardware.clone(),
        origin: files.origin(),
        image: files.image,
        root: "/".into(),
        application: GuestApplication {
            command: spawn::app_command(app, address)?,
            uid: identity.uid,
            gid: identity.gid,
            open_files_max: *open_files_max,
            directory: spawn::home(tenant).join(&app.directory),
            listen: match address {
                AppAddress::Socket(path) => GuestListen::Path(path.clone()),
                AppAddress::Port(port) => GuestListen::Port(*port),
                AppAddress::Inherited(_) => GuestListen::Socket,
            },
            places: places(app, *plan),
        },
        port: APP_PORT,
        exec_port: EXEC_PORT,
    };
    let settings = serde_json::to_string(&settings).map_err(|error| broken(error.to_string()))?;
    let mut argv = program_words(*is_node_base);
    argv.push("vm-run".into());
    Ok((argv, (VARIABLE.into(), settings.into())))
}

/// Returns the command of the sandbox that runs this one in the guest.
pub fn exec_command(app: &App, tenant: &Tenant, is_node_base: bool, command: &[OsString]) -> Vec<OsString> {
    let mut argv = program_words(is_node_base);
    let directory = spawn::home(tenant).join(&app.directory);
    argv.extend(["vm-exec".into(), EXEC_PORT.to_string().into(), directory.into_os_string()]);
    argv.extend_from_slice(command);
    argv
}

/// Returns the command of the sandbox that wakes a machine which was saved.
pub fn wake_command(is_node_base: bool) -> Vec<OsString> {
    let mut argv = program_words(is_node_base);
    argv.push("vm-wake".into());
    argv
}

/// Returns the words that start nagaya's own program in the sandbox.
fn program_words(is_node_base: bool) -> Vec<OsString> {
    let program = in_sandbox(PROGRAM_FILE).into_os_string();
    if is_node_base {
        return vec![program];
    }
    loader_words().into_iter().map(OsString::from).chain([program]).collect()
}

fn qemu(is_node_base: bool) -> QemuProgram {
    let library = in_sandbox(LIBRARY_FILE);
    if is_node_base {
        return QemuProgram { words: vec![QEMU.to_owned()], library, modules: None };
    }
    let node = in_sandbox(NODE_DIR);
    let mut words = loader_words();
    words.push(format!("{}{QEMU}", node.display()));
    for directory in FIRMWARE {
        words.extend(["-L".to_owned(), node.join(directory).display().to_string()]);
    }
    QemuProgram { words, library, modules: Some(node.join(MODULES)) }
}

/// Returns the words that start a program of the node's with the node's libraries.
fn loader_words() -> Vec<String> {
    let node = in_sandbox(NODE_DIR);
    let [loader, libraries] = [LOADER, LIBRARIES].map(|path| node.join(path).display().to_string());
    vec![loader, "--library-path".to_owned(), format!("{libraries}:{libraries}/pulseaudio")]
}

/// Returns the places that the guest cannot reach by itself: addresses of loopback, and sockets.
fn places(app: &App, plan: Option<&EgressPlan>) -> Vec<ForwardedPlace> {
    let addresses = plan.into_iter().flat_map(|plan| {
        plan.addresses().into_iter().chain(plan.own_addresses().to_vec()).chain([mail::MAIL_ADDRESS])
    });
    let of_loopback = addresses.filter_map(|address| match address {
        SocketAddr::V4(address) if address.ip().is_loopback() => Some(ForwardedPlace::Address(address)),
        _ => None,
    });
    let sockets = app
        .databases
        .iter()
        .map(|database| ForwardedPlace::Path(database.inside.as_ref().unwrap_or(&database.socket).clone()));
    of_loopback.chain(sockets).collect()
}

//! Puts an application into a sandbox: starts it, or restores it from its image. All of it blocks,
//! so it runs on a worker thread.
//!
//! Not here: when (`lifecycle`), the steps before and after (`start`), the contents of the sandbox
//! (`sandbox_spec`).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::record::{
    App, AppDatabase, AppListen, BodyBuffering, FileRoot, IdleSteps, ImageMemory, ImageWhen, OutboundRules,
};
use nagaya_records::{Site, Tenant};

use crate::authority::PlacementLease;
use crate::bases::UnpackedBase;
use crate::cells::Leaf;
use crate::fault::{self, Fault};
use crate::image::{
    Digest, HandedFds, Image, ImageError, ImageLookup, ImageSubject, ImageTerms, NodeImages, ReadRecorder,
    WatchTerms, WatchedInputs, WatchedTag, base_digest,
};
use crate::instances::run::app_machine::{self, MachineFiles, MachineOrder};
use crate::instances::run::restart_file::{self, RestartFile};
use crate::instances::run::sandbox_spec::{self, ScratchDirs};
use crate::instances::run::volatile_files::{self, IfPresent};
use crate::mail::{MAIL_ADDRESS, MailSender};
use crate::options::KeeperConfig;
use crate::paths::tenant_path::PathOwner;
use crate::process::{StartedProgram, TreeRoot};
use crate::relay::{self, EgressGuard, EgressPlan, EgressSockets, OwnSites, Relay, SocketTarget, ask};
use crate::sandbox::{
    Launcher, RESOLVER, ROOT_PID, Sandbox, SandboxError, SandboxProgram, SandboxTask, UnixIdentity,
};
use crate::spawn::{self, RunAs};
use crate::sys::{self, AccessRight};
use crate::workers::ThreadPool;

/// File in its `/run` with other bytes after each restore. Programs read it that would reuse the
/// random numbers of the image.
const WAKE_FILE: &str = "nagaya.wake";

/// All that is needed to put one site's application into a sandbox.
pub struct AppLaunch {
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
    pub app: App,
    pub runner: RunAs,
    pub options: Arc<KeeperConfig>,
    /// Path on the node for a socket that the keeper listens on.
    pub listens_at: PathBuf,
    /// Its access to the outside, and the relay there and to its databases. `None`: nothing.
    pub outside: Option<OutsideAccess>,
    /// Threads that look up its databases.
    pub workers: ThreadPool,
    /// Its base, if that is an OCI image.
    pub unpacked: Option<Arc<UnpackedBase>>,
    /// Its machine, if it has a kernel of its own.
    pub machine: Option<MachineFiles>,
    pub authority: PlacementLease,
}

/// Access of a sandbox to the outside.
pub struct OutsideAccess {
    pub plan: EgressPlan,
    pub relay: Relay,
    /// Access to the node's edge. `None`: it is reached as its record says.
    pub own_sites: Option<OwnSites>,
    /// Sender of its mail. `None`: it has no mail relay.
    pub sender: Option<MailSender>,
}

/// Result of a launch besides the processes.
pub struct LaunchResult {
    pub sandbox: Arc<Sandbox>,
    /// When the sandbox was ready.
    pub since: Instant,
    /// Subject of an image that is taken of it. `None` if none is taken.
    pub subject: Option<ImageSubject>,
    /// For an image that is taken of it.
    pub handover: HandoverFds,
    pub image: Option<Image>,
    /// Records which files it reads. `None` if no image is taken of a restored instance.
    pub reads: Option<Arc<ReadRecorder>>,
    pub restart_file: Option<Arc<RestartFile>>,
    /// Tags from its databases, read before it was started.
    pub tags: Vec<WatchedTag>,
    /// Must be kept while the processes run.
    pub outlets: Option<EgressGuard>,
}

/// Ends of descriptors that an application was given. An image does not carry them.
pub struct HandoverFds {
    listener: Option<OwnedFd>,
    log: OwnedFd,
}

impl HandoverFds {
    fn handed(&self) -> HandedFds<'_> {
        HandedFds { listener: self.listener.as_ref().map(AsFd::as_fd), log: Some(self.log.as_fd()) }
    }
}

/// Why nothing was restored.
pub enum NotRestored {
    /// There is no image.
    Nothing,
    /// There is an image, and files that it depends on have changed: which.
    Stale(String),
    /// No image can be taken.
    ImageImpossible(String, Box<ImageSubject>),
    /// The image is wrong, and was put aside with this reason.
    PutAside(Fault),
    /// A failure unrelated to the image.
    Failed(Fault),
}

impl AppLaunch {
    fn identity(&self) -> UnixIdentity {
        self.runner.identity.expect("sandboxes are made by root for tenants")
    }

    pub(crate) fn owner(&self) -> PathOwner {
        PathOwner::of(&self.tenant, self.runner.identity)
    }

    /// Returns the file whose change of time restarts it.
    pub fn restart_path(&self) -> Option<PathBuf> {
        restart_file::path_of(self.tenant.home.as_deref(), &self.directory())
    }

    /// Makes the file's state for its present run. Blocks.
    fn restart_file(&self) -> Option<RestartFile> {
        let home = self.tenant.home.as_deref()?;
        let root = self.site.backend.files().map(|files| home.join(&files.root));
        // A path outside of the tenant's home is the operator's to restart.
        let root = root.filter(|root| root.starts_with(home));
        let directories = std::iter::once(self.directory()).chain(root).collect();
        self.restart_path().map(|path| RestartFile::new(self.owner(), path, directories))
    }

    fn is_imaged_at_rest(&self) -> bool {
        self.app.image_when == ImageWhen::Rest
    }

    pub fn directory(&self) -> PathBuf {
        spawn::home(&self.tenant).join(&self.app.directory)
    }

    /// Queries its databases as its record says, all within `ask::ASK_MAX`. Blocks.
    fn ask_databases(&self) -> Vec<WatchedTag> {
        let until = Instant::now() + ask::ASK_MAX;
        let ask = |database: &AppDatabase| {
            let tag = database.tag.as_ref()?;
            let asked = format!("'{}' at {}", tag.ask, database.socket.display());
            let answer = ask::ask(&database.socket, self.identity(), tag, self.tenant.name.as_str(), until);
            Some(WatchedTag { asked, answer: answer.map_err(|error| error.to_string()) })
        };
        self.app.databases.iter().filter_map(ask).collect()
    }

    /// Describes a change in what the image depends on, or returns `None`. Blocks.
    pub fn find_change(&self, images: &NodeImages, image: &Image) -> Option<String> {
        let changed = images.find_change(image, &self.owner());
        changed.or_else(|| image.watched().find_other_answer(&self.ask_databases()))
    }

    /// Returns the paths that its image depends on.
    fn watch_terms(&self) -> WatchTerms {
        let (home, directory) = (spawn::home(&self.tenant), self.directory());
        let roots =
            std::iter::once(directory.clone()).chain(self.app.writable.iter().map(|path| home.join(path)));
        // The base has a digest of its own.
        let roots = roots.filter(|root| root != Path::new("/")).collect();
        let named = self.app.image_watch.iter().map(|path| directory.join(path)).chain(self.restart_path());
        WatchTerms { roots, named: named.collect(), directory, ..WatchTerms::default() }
    }

    fn scratch(&self) -> ScratchDirs {
        ScratchDirs::of(&self.site, &self.options)
    }

    fn sandbox(&self, launcher: &Launcher, leaf: &Leaf) -> Result<Sandbox, Fault> {
        let whose = (self.identity(), leaf.entrance());
        let Self { site, tenant, app, options, .. } = self;
        let from = (self.base(), self.sockets_dir(), self.outside.as_ref().map(|outside| &outside.plan));
        let mut spec = sandbox_spec::spec(site, tenant, app, &self.scratch(), options, from, whose);
        spec.binds.extend(self.machine.iter().flat_map(|machine| machine.binds(self.has_node_base())));
        launcher.create(&spec).map_err(|error| of_sandbox(&error))
    }

    /// Whether it may reach everything outside of the node.
    fn reaches_all(&self) -> bool {
        self.app.outbound == OutboundRules::Nat
    }

    /// Makes its directories, and the keeper's files for it.
    fn make_scratch(&self) -> Result<ScratchDirs, Fault> {
        let scratch = self.scratch();
        scratch.make(self.identity())?;
        sandbox_spec::write_own_files(&scratch, self.base())?;
        if let Some(mut text) = self.outside.as_ref().and_then(|outside| outside.plan.hosts()) {
            // An application that reaches all outside knows the node's names for it, after those of
            // its own sites.
            text.push_str(&sandbox_spec::node_hosts(&self.app, self.base()));
            scratch.write(&scratch.hosts, &text)?;
        }
        if self.reaches_all() {
            scratch.write(&scratch.resolver, &format!("nameserver {}\n", RESOLVER.ip()))?;
        }
        Ok(scratch)
    }

    /// Listens at the places where it sees its databases. Called before its sandbox is made,
    /// because the listening sockets are bound into it.
    fn listen_for_databases(&self) -> Result<Vec<(OwnedFd, SocketTarget)>, Fault> {
        if !self.app.databases.is_empty() {
            self.make_sockets_dir()?;
        }
        let listen = |(number, database): (usize, &AppDatabase)| {
            let at = sandbox_spec::database_socket(self.sockets_dir(), number);
            let listener = relay::listen(&at)
                .map_err(|error| Fault::of_path(fault::OUTLET, "cannot listen on", &at, error))?;
            let (path, workers) = (database.socket.clone(), self.workers.clone());
            Ok((listener, SocketTarget { path, whose: self.identity(), workers }))
        };
        self.app.databases.iter().enumerate().map(listen).collect()
    }

    /// Opens what it may reach outside. Connects to nothing outside.
    fn open_outlets(
        &self,
        sandbox: &Sandbox,
        sockets: Vec<(OwnedFd, SocketTarget)>,
    ) -> Result<Option<EgressGuard>, Fault> {
        let Some(OutsideAccess { plan, relay, own_sites, sender }) = &self.outside else { return Ok(None) };
        let mail = sender.as_ref().map(|_| MAIL_ADDRESS);
        let mut addresses = plan.addresses();
        addresses.extend(plan.own_addresses());
        addresses.extend(mail);
        let listen = || if addresses.is_empty() { Ok(Vec::new()) } else { sandbox.outlets(&addresses) };
        let opened = listen().and_then(|listeners| {
            let mut listeners = listeners.into_iter();
            let places = plan.endpoints().map_while(|place| Some((listeners.next()?, place))).collect();
            let own_ports = plan
                .own_addresses()
                .iter()
                .map_while(|address| Some((listeners.next()?, address.port())))
                .collect();
            let mail = listeners.collect();
            let outside = self.reaches_all().then(|| sandbox.capture()).transpose()?;
            let (own_sites, sender) = (own_sites.clone(), sender.clone());
            relay.open(EgressSockets {
                places,
                sockets,
                own_ports,
                mail,
                outside,
                own_sites,
                sender,
                ..EgressSockets::default()
            })
        });
        opened.map(Some).map_err(|error| {
            let failure = if error.kind() == io::ErrorKind::WouldBlock {
                FailureKind::Busy
            } else {
                FailureKind::Broken
            };
            let message = format!("its outbound access cannot be set up: {error}");
            Fault::new(failure, fault::OUTLET, message)
        })
    }

    /// Starts the program.
    pub fn boot(&self, launcher: &Launcher, leaf: &Leaf) -> Result<(StartedProgram, LaunchResult), Fault> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        let subject = self
            .subject(&secrets)
            .map_err(|error| Fault::of_path(fault::APP, "cannot look at the base", self.base(), error))?;
        if let Some(machine) = &self.machine {
            let limits = [&self.site.limits, &self.tenant.limits].map(|limits| limits.limits().memory);
            machine.check_limit(limits.into_iter().flatten().min())?;
        }
        let device = self.machine.as_ref().map(MachineFiles::device).transpose()?.flatten();
        self.make_scratch()?;
        let databases = self.listen_for_databases()?;
        let sandbox = Arc::new(self.sandbox(launcher, leaf)?);
        let outlets = self.open_outlets(&sandbox, databases)?;
        let since = Instant::now();
        let restart_file = self.restart_file().map(Arc::new);
        let reads = Some(Arc::new(ReadRecorder::of_sandbox(&sandbox, self.watch_terms())));
        // Before it can read anything, so that a change during its start is noticed.
        let tags = self.ask_databases();
        let (log, handover) = self.hand_over(&sandbox)?;
        let address = sandbox_spec::told(self.app.listen, &self.listens_at);
        let mut env = environment(&self.app, &self.tenant, &address, secrets);
        sandbox_spec::add_own_variables(self.base(), &mut env);
        let program = SandboxProgram {
            argv: self.command(&address, &mut env)?,
            env,
            directory: spawn::home(&self.tenant).join(&self.app.directory),
            stdin: device.as_ref().map(AsFd::as_fd),
            stdout: Some(handover.log.as_fd()),
            stderr: Some(handover.log.as_fd()),
            listener: handover.listener.as_ref().map(AsFd::as_fd),
            pid: Some(ROOT_PID),
            open_files_max: self.runner.open_files_max,
            has_terminal: false,
        };
        let task = sandbox.run(&program).map_err(|error| of_sandbox(&error))?;
        let started = started(&sandbox, task, log);
        let subject = Some(subject);
        let image = None;
        Ok((
            started,
            LaunchResult { sandbox, since, subject, handover, image, reads, restart_file, tags, outlets },
        ))
    }

    /// Returns the command of its sandbox. For a machine, a variable describes that.
    fn command(
        &self,
        address: &spawn::AppAddress,
        env: &mut Vec<(OsString, OsString)>,
    ) -> Result<Vec<OsString>, Fault> {
        let Some(files) = &self.machine else {
            return Ok(spawn::app_command(&self.app, address)?.into_iter().map(OsString::from).collect());
        };
        let order = MachineOrder {
            site: &self.site,
            tenant: &self.tenant,
            app: &self.app,
            files,
            is_node_base: self.has_node_base(),
            identity: self.identity(),
            open_files_max: self.runner.open_files_max,
            plan: self.outside.as_ref().map(|outside| &outside.plan),
        };
        let (command, variable) = app_machine::command(&order, address)?;
        env.push(variable);
        Ok(command)
    }

    /// Whether its machine saves itself before an image is taken of its sandbox.
    pub fn saves_state(&self) -> bool {
        self.machine.as_ref().is_some_and(MachineFiles::saves_state)
    }

    /// Returns the command that wakes a machine which was saved, and the device for its standard
    /// input.
    pub fn wake_command(&self) -> Result<(Vec<OsString>, Option<File>), Fault> {
        let device = self.machine.as_ref().map(MachineFiles::device).transpose()?.flatten();
        Ok((app_machine::wake_command(self.has_node_base()), device))
    }

    /// Restores it from its image, if it has one.
    pub fn restore(
        &self,
        launcher: &Launcher,
        images: &NodeImages,
        leaf: &Leaf,
    ) -> Result<(StartedProgram, LaunchResult), NotRestored> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        // A base that cannot be read has no image. The start that follows reports why.
        let subject = self.subject(&secrets).map_err(|_| NotRestored::Nothing)?;
        let image = match images.find(&subject) {
            ImageLookup::Image(image) => *image,
            ImageLookup::Nothing => return Err(NotRestored::Nothing),
            ImageLookup::ImageImpossible(why) => {
                return Err(NotRestored::ImageImpossible(why, Box::new(subject)));
            }
        };
        if let Some(why) = self.find_change(images, &image) {
            return Err(NotRestored::Stale(why));
        }
        let restart_file = self.restart_file().map(Arc::new);
        let scratch = self.make_scratch()?;
        self.put_back(&scratch).map_err(|error| {
            let why = format!("the files it expects cannot be put back: {error}");
            images.quarantine(&image, &why);
            NotRestored::PutAside(Fault::new(FailureKind::Broken, fault::BAD_IMAGE, why))
        })?;
        let databases = self.listen_for_databases()?;
        let sandbox = Arc::new(self.sandbox(launcher, leaf)?);
        // Before the restore: restored sockets may be bound to these addresses.
        let outlets = self.open_outlets(&sandbox, databases)?;
        let since = Instant::now();
        let (log, handover) = self.hand_over(&sandbox)?;
        let reads = self.is_imaged_at_rest().then(|| {
            let terms = WatchTerms { before: image.watched().clone(), ..self.watch_terms() };
            Arc::new(ReadRecorder::of_sandbox(&sandbox, terms))
        });
        // A run that was frozen meanwhile says nothing about its image.
        let stops = self.authority.stops(&self.site.name);
        let is_to_blame = || self.authority.stops(&self.site.name) == stops;
        match images.restore_watched(&image, &sandbox, &handover.handed(), is_to_blame) {
            Ok(task) => {
                let started = started(&sandbox, task, log);
                let subject = self.is_imaged_at_rest().then_some(subject);
                let (tags, image) = (image.watched().tags().to_vec(), Some(image));
                let made = LaunchResult {
                    sandbox,
                    since,
                    subject,
                    handover,
                    image,
                    reads,
                    restart_file,
                    tags,
                    outlets,
                };
                Ok((started, made))
            }
            Err(error) => {
                let fault = Fault::new(FailureKind::Broken, error.code(), error.to_string());
                Err(match error {
                    ImageError::LessFenced { .. } => NotRestored::PutAside(fault),
                    error if error.is_of_image() && is_to_blame() => NotRestored::PutAside(fault),
                    _ => NotRestored::Failed(fault),
                })
            }
        }
    }

    /// Takes an image of an instance that `boot` has made. The instance continues.
    pub fn take(
        &self,
        images: &NodeImages,
        sandbox: &Sandbox,
        subject: &ImageSubject,
        handover: &HandoverFds,
        watched: WatchedInputs,
    ) -> Result<Image, ImageError> {
        // If it is to be imaged again, none of its memory may belong to the image.
        let memory = if self.is_imaged_at_rest() { ImageMemory::Copied } else { self.app.image_memory };
        let how = ImageTerms { memory, watched };
        let image = images.take(subject, sandbox, &handover.handed(), how)?;
        if let Err(error) = self.keep(&self.scratch()) {
            if error.kind() == io::ErrorKind::StorageFull {
                images.discard(&image);
                return Err(ImageError::NoSpace {
                    reason: format!("the files it expects cannot be kept: {error}"),
                });
            }
            images.quarantine(&image, &format!("the files it expects cannot be kept: {error}"));
            return Err(ImageError::Io { what: "keep the files an image expects".into(), error });
        }
        Ok(image)
    }

    fn keep(&self, scratch: &ScratchDirs) -> io::Result<()> {
        let dirs = scratch.open()?;
        sys::as_tenant(self.runner.identity, || {
            volatile_files::copy(&dirs.run(), &dirs.carried_run(), IfPresent::Replace)?;
            if let Err(error) = volatile_files::copy(&dirs.tmp(), &dirs.carried_tmp(), IfPresent::Replace) {
                // No process has most of these files open.
                tracing::debug!(site = %self.site.name, %error, "not all of /tmp goes with its image");
            }
            Ok(())
        })?
    }

    /// Returns the subject of an image that would be taken now.
    pub fn present_subject(&self) -> Result<ImageSubject, Fault> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        self.subject(&secrets)
            .map_err(|error| Fault::of_path(fault::APP, "cannot look at the base", self.base(), error))
    }

    /// Packs the files that its image expects beside it, for another node.
    pub fn packed(&self) -> io::Result<Vec<u8>> {
        let dirs = self.scratch().open()?;
        sys::as_tenant(self.runner.identity, || {
            volatile_files::pack(&[&dirs.carried_run(), &dirs.carried_tmp()])
        })?
    }

    /// Unpacks these files from another node.
    pub fn put_packed(&self, packed: &[u8]) -> io::Result<()> {
        let scratch = self.scratch();
        scratch.make_missing(self.identity())?;
        let dirs = scratch.open()?;
        sys::as_tenant(self.runner.identity, || {
            volatile_files::unpack(packed, &[&dirs.carried_run(), &dirs.carried_tmp()])
        })?
    }

    fn put_back(&self, scratch: &ScratchDirs) -> io::Result<()> {
        let dirs = scratch.open()?;
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        sys::as_tenant(self.runner.identity, || {
            volatile_files::copy(&dirs.carried_run(), &dirs.run(), IfPresent::Replace)?;
            volatile_files::copy(&dirs.carried_tmp(), &dirs.tmp(), IfPresent::Keep)?;
            let text = format!("{:032x}\n", u128::from_ne_bytes(bytes));
            volatile_files::replace_file(&dirs.run().join(WAKE_FILE), text.as_bytes())
        })?
    }

    fn base(&self) -> &Path {
        match (&self.unpacked, &self.app.base) {
            (Some(unpacked), _) => &unpacked.path,
            (None, Some(base)) => base.path(),
            (None, None) => Path::new("/"),
        }
    }

    fn has_node_base(&self) -> bool {
        sandbox_spec::is_node(self.base())
    }

    /// Returns the digest of what an image of its processes depends on.
    fn base_digest(&self) -> io::Result<Digest> {
        match &self.unpacked {
            // Its files may be unpacked again and are the same.
            Some(unpacked) => Ok(Digest::of(&[b"oci", unpacked.digest.as_bytes()])),
            None => {
                let base = self.owner().open_directory(self.base(), AccessRight::Search)?;
                base_digest(self.base(), &base)
            }
        }
    }

    fn subject(&self, secrets: &[(String, String)]) -> io::Result<ImageSubject> {
        let Self { site, tenant, app, runner, .. } = self;
        let record = serde_json::to_vec(&what_runs(app)).map_err(io::Error::other)?;
        let home = spawn::home(tenant).as_os_str().as_encoded_bytes();
        let files_max = runner.open_files_max.to_le_bytes();
        let machine = self.machine.as_ref().map(MachineFiles::digest).transpose()?;
        let machine = machine.map(|digest| digest.to_string()).unwrap_or_default();
        let mut parts = vec![record.as_slice(), home, &files_max, machine.as_bytes()];
        parts.extend(secrets.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]));
        let UnixIdentity { uid, gid } = self.identity();
        Ok(ImageSubject {
            site: site.name.to_string(),
            release: app.release.clone().unwrap_or_default(),
            definition: Digest::of(&parts),
            base: self.base_digest()?,
            uid,
            gid,
        })
    }

    /// Makes the keeper's end of the log, and the program's ends.
    fn hand_over(&self, sandbox: &Sandbox) -> Result<(OwnedFd, HandoverFds), Fault> {
        let listener = match app_machine::listen(&self.app) {
            AppListen::Fd => Some(self.listen(sandbox)?),
            AppListen::Socket | AppListen::Port => None,
        };
        let (log, output) = sandbox.pipe().map_err(|error| {
            Fault::new(FailureKind::Busy, fault::SPAWN, format!("cannot make the pipe of its log: {error}"))
        })?;
        Ok((log, HandoverFds { listener, log: output }))
    }

    fn listen(&self, sandbox: &Sandbox) -> Result<OwnedFd, Fault> {
        self.make_sockets_dir()?;
        sandbox
            .listener(&self.listens_at)
            .map_err(|error| Fault::of_path(fault::APP, "cannot listen on", &self.listens_at, error))
    }

    /// Returns the directory on the node of sockets that the keeper listens on for it.
    fn sockets_dir(&self) -> &Path {
        self.listens_at.parent().expect("a file in a directory")
    }

    /// Makes that directory, for root alone.
    fn make_sockets_dir(&self) -> Result<(), Fault> {
        match fs::DirBuilder::new().mode(0o700).create(self.sockets_dir()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(Fault::of_path(fault::APP, "cannot make", self.sockets_dir(), error))
            }
            _ => Ok(()),
        }
    }
}

impl From<Fault> for NotRestored {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

fn started(sandbox: &Arc<Sandbox>, task: SandboxTask, log: OwnedFd) -> StartedProgram {
    StartedProgram {
        root: TreeRoot::Sandboxed { sandbox: Arc::clone(sandbox), task },
        log,
        fds: Vec::new(),
        enclosure: None,
    }
}

/// Builds the environment variables of an application, or of a command beside it.
pub fn environment(
    app: &App,
    tenant: &Tenant,
    address: &spawn::AppAddress,
    secrets: Vec<(String, String)>,
) -> Vec<(OsString, OsString)> {
    let mut env = spawn::app_environment(app, tenant, address);
    // The sandbox sets that itself.
    env.remove("LISTEN_FDS");
    env.extend(secrets);
    env.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

pub fn of_sandbox(error: &SandboxError) -> Fault {
    let failure = match error {
        SandboxError::Run { error, .. } | SandboxError::Create { error, .. }
            if matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock) =>
        {
            FailureKind::Busy
        }
        _ => FailureKind::Broken,
    };
    Fault::new(failure, error.code(), error.to_string())
}

/// Returns the part of a record that a running instance is made from.
pub fn what_runs(app: &App) -> App {
    let when = App { idle: IdleSteps::default(), min: None, max: None, timeout_seconds: None, ..app.clone() };
    let when = App { request_trailers: Vec::new(), after_wake: Vec::new(), ..when };
    // Its files are reduced to the places of scripts. The edge's use of the others does not matter
    // here.
    let files = app.files.as_ref().map(|files| {
        let FileRoot { root, index, front_controller, extensions, .. } = (**files).clone();
        Box::new(FileRoot { root, index, front_controller, extensions, ..FileRoot::default() })
    });
    let when = App { stop_seconds: None, linger_seconds: None, ..when };
    App { start_seconds: None, cpu_max: None, request_buffering: BodyBuffering::On, files, ..when }
}

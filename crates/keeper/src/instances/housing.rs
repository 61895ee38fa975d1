//! Putting an application into a sandbox: started anew, or brought back from its image. All of it blocks: it is a
//! worker's part.
//!
//! Not here: when (`lifecycle`), what comes before and after (`start`), what the sandbox shows (`surroundings`).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nagaya_cmdb::record::{App, Buffering, Database, Files, Idle, ImageMemory, ImageWhen, Listen, Outbound};
use nagaya_cmdb::{Site, Tenant};

use super::carried::{self, Present};
use super::restarts::{self, RestartFile};
use super::surroundings::{self, Scratch};
use crate::authority::Authority;
use crate::bases::Unpacked;
use crate::cells::Leaf;
use crate::fault::{self, Fault};
use crate::image::{
    Digest, Found, Handed, Image, ImageError, ImageTerms, Images, ReadRecorder, Subject, WatchTerms, Watched,
    base_digest,
};
use crate::options::Options;
use crate::process::Root;
use crate::protocol::Failure;
use crate::relay::{self, Outlets, Plan, Relay, Socket, Ways};
use crate::sandbox::{Identity, Launcher, Program, RESOLVER, ROOT_PID, Sandbox, SandboxError, Task};
use crate::spawn::{self, Runner, Started};
use crate::sys::{self, Access};
use crate::tenant_path::PathOwner;
use crate::workers::Workers;

/// In its `/run`: other bytes after each restoration, for programs that would go on with the random numbers of the image.
const WAKE_FILE: &str = "nagaya.wake";

/// All that is needed to put one site's application into a sandbox.
pub struct Housing {
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
    pub app: App,
    pub runner: Runner,
    pub options: Arc<Options>,
    /// On the node, for a socket the keeper listens on.
    pub listens_at: PathBuf,
    /// What it may reach outside, and what leads there and to its databases. None: nothing.
    pub outside: Option<(Plan, Relay)>,
    /// Where its databases are looked up.
    pub workers: Workers,
    /// Its base, where that is an image of a layout.
    pub unpacked: Option<Arc<Unpacked>>,
    pub authority: Authority,
}

/// What came of it besides the processes.
pub struct Made {
    pub sandbox: Arc<Sandbox>,
    /// When the sandbox was ready.
    pub since: Instant,
    /// What an image that is taken of it is to say. `None` if none is.
    pub subject: Option<Subject>,
    /// For an image that is taken of it.
    pub handover: Handover,
    pub image: Option<Image>,
    /// Which files it reads. `None` if no image is taken of what an image has brought back.
    pub reads: Option<Arc<ReadRecorder>>,
    pub restart_file: Option<Arc<RestartFile>>,
    /// To be kept as long as the processes run.
    pub outlets: Option<Outlets>,
}

/// Ends of what an application was given: an image does not carry them.
pub struct Handover {
    listener: Option<OwnedFd>,
    log: OwnedFd,
}

impl Handover {
    fn handed(&self) -> Handed<'_> {
        Handed { listener: self.listener.as_ref().map(AsFd::as_fd), log: Some(self.log.as_fd()) }
    }
}

/// Why nothing was brought back.
pub enum NotRestored {
    /// There is no image.
    Nothing,
    /// There is one, of files that are not as they were: which, in words.
    Stale(String),
    /// None can be taken.
    Unfit(String, Box<Subject>),
    /// It is wrong, and was put aside with this reason.
    PutAside(Fault),
    /// Something else than the image.
    Failed(Fault),
}

impl Housing {
    fn identity(&self) -> Identity {
        self.runner.identity.expect("sandboxes are made by root for tenants")
    }

    pub(super) fn owner(&self) -> PathOwner {
        PathOwner::of(&self.tenant, self.runner.identity)
    }

    /// The file whose touch starts it anew.
    pub fn restart_path(&self) -> Option<PathBuf> {
        restarts::path_of(self.tenant.home.as_deref(), &self.directory())
    }

    fn is_imaged_at_rest(&self) -> bool {
        self.app.image_when == ImageWhen::Rest
    }

    fn directory(&self) -> PathBuf {
        spawn::home(&self.tenant).join(&self.app.directory)
    }

    /// What its image depends on.
    fn watch_terms(&self) -> WatchTerms {
        let (home, directory) = (spawn::home(&self.tenant), self.directory());
        let roots =
            std::iter::once(directory.clone()).chain(self.app.writable.iter().map(|path| home.join(path)));
        // The base has a digest of its own.
        let roots = roots.filter(|root| root != Path::new("/")).collect();
        let named = self.app.image_watch.iter().map(|path| directory.join(path)).chain(self.restart_path());
        WatchTerms { roots, named: named.collect(), directory, ..WatchTerms::default() }
    }

    fn scratch(&self) -> Scratch {
        Scratch::of(&self.site, &self.options)
    }

    fn sandbox(&self, launcher: &Launcher, leaf: &Leaf) -> Result<Sandbox, Fault> {
        let whose = (self.identity(), leaf.entrance());
        let Self { site, tenant, app, options, .. } = self;
        let from = (self.base(), self.sockets_dir());
        let spec = surroundings::spec(site, tenant, app, &self.scratch(), options, from, whose);
        launcher.create(&spec).map_err(|error| of_sandbox(&error))
    }

    /// All that is outside of the node.
    fn reaches_all(&self) -> bool {
        self.app.outbound == Outbound::Nat
    }

    /// Its directories, and files of the keeper's for it.
    fn make_scratch(&self) -> Result<Scratch, Fault> {
        let scratch = self.scratch();
        scratch.make(self.identity())?;
        if let Some(text) = self.outside.as_ref().and_then(|(plan, _)| plan.hosts()) {
            scratch.write(&scratch.hosts, &text)?;
        }
        if self.reaches_all() {
            scratch.write(&scratch.resolver, &format!("nameserver {}\n", RESOLVER.ip()))?;
        }
        Ok(scratch)
    }

    /// Listens where its databases are in its sight. Before its sandbox is made: what listens is bound into it.
    fn listen_for_databases(&self) -> Result<Vec<(OwnedFd, Socket)>, Fault> {
        if !self.app.databases.is_empty() {
            self.make_sockets_dir()?;
        }
        let listen = |(number, database): (usize, &Database)| {
            let at = surroundings::database_socket(self.sockets_dir(), number);
            let listener = relay::listen(&at)
                .map_err(|error| Fault::of_path(fault::OUTLET, "cannot listen on", &at, error))?;
            let (path, workers) = (database.socket.clone(), self.workers.clone());
            Ok((listener, Socket { path, whose: self.identity(), workers }))
        };
        self.app.databases.iter().enumerate().map(listen).collect()
    }

    /// Opens what it may reach outside. Nothing outside is asked for that.
    fn open_outlets(
        &self,
        sandbox: &Sandbox,
        sockets: Vec<(OwnedFd, Socket)>,
    ) -> Result<Option<Outlets>, Fault> {
        let Some((plan, relay)) = &self.outside else { return Ok(None) };
        let listen = || if plan.is_empty() { Ok(Vec::new()) } else { sandbox.outlets(&plan.addresses()) };
        let opened = listen().and_then(|listeners| {
            let places = listeners.into_iter().zip(plan.endpoints()).collect();
            let outside = self.reaches_all().then(|| sandbox.capture()).transpose()?;
            relay.open(Ways { places, sockets, outside, ..Ways::default() })
        });
        opened.map(Some).map_err(|error| {
            let failure =
                if error.kind() == io::ErrorKind::WouldBlock { Failure::Busy } else { Failure::Broken };
            let message = format!("what it may reach outside cannot be opened for it: {error}");
            Fault::new(failure, fault::OUTLET, message)
        })
    }

    /// Starts the program.
    pub fn boot(&self, launcher: &Launcher, leaf: &Leaf) -> Result<(Started, Made), Fault> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        let subject = self
            .subject(&secrets)
            .map_err(|error| Fault::of_path(fault::APP, "cannot look at the base", self.base(), error))?;
        self.make_scratch()?;
        let databases = self.listen_for_databases()?;
        let sandbox = Arc::new(self.sandbox(launcher, leaf)?);
        let outlets = self.open_outlets(&sandbox, databases)?;
        let since = Instant::now();
        let restart_file = self.restart_file().map(Arc::new);
        let reads = Some(Arc::new(sandbox.record_reads(self.watch_terms())));
        let (log, handover) = self.hand_over(&sandbox)?;
        let address = surroundings::told(self.app.listen, &self.listens_at);
        let env = environment(&self.app, &self.tenant, &address, secrets);
        let program = Program {
            argv: spawn::app_command(&self.app, &address)?.into_iter().map(OsString::from).collect(),
            env,
            directory: spawn::home(&self.tenant).join(&self.app.directory),
            stdin: None,
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
        Ok((started, Made { sandbox, since, subject, handover, image: None, reads, restart_file, outlets }))
    }

    /// Brings it back from its image, if it has one.
    pub fn restore(
        &self,
        launcher: &Launcher,
        images: &Images,
        leaf: &Leaf,
    ) -> Result<(Started, Made), NotRestored> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        // A base that cannot be looked at has no image; the start that follows says why.
        let subject = self.subject(&secrets).map_err(|_| NotRestored::Nothing)?;
        let image = match images.find(&subject) {
            Found::Image(image) => *image,
            Found::Nothing => return Err(NotRestored::Nothing),
            Found::Unfit(why) => return Err(NotRestored::Unfit(why, Box::new(subject))),
        };
        if let Some(why) = images.find_change(&image, &self.owner()) {
            return Err(NotRestored::Stale(why));
        }
        let restart_file = self.restart_file().map(Arc::new);
        let scratch = self.make_scratch()?;
        self.put_back(&scratch).map_err(|error| {
            let why = format!("the files it expects cannot be put back: {error}");
            images.quarantine(&image, &why);
            NotRestored::PutAside(Fault::new(Failure::Broken, fault::BAD_IMAGE, why))
        })?;
        let databases = self.listen_for_databases()?;
        let sandbox = Arc::new(self.sandbox(launcher, leaf)?);
        // Before: sockets that come back may be bound to these addresses.
        let outlets = self.open_outlets(&sandbox, databases)?;
        let since = Instant::now();
        let (log, handover) = self.hand_over(&sandbox)?;
        let reads = self.is_imaged_at_rest().then(|| {
            let terms = WatchTerms { before: image.watched().clone(), ..self.watch_terms() };
            Arc::new(sandbox.record_reads(terms))
        });
        // What stood still meanwhile says nothing about its image.
        let stops = self.authority.stops(&self.site.name);
        let is_to_blame = || self.authority.stops(&self.site.name) == stops;
        match images.restore_watched(&image, &sandbox, &handover.handed(), is_to_blame) {
            Ok(task) => {
                let started = started(&sandbox, task, log);
                let subject = self.is_imaged_at_rest().then_some(subject);
                let image = Some(image);
                Ok((started, Made { sandbox, since, subject, handover, image, reads, restart_file, outlets }))
            }
            Err(error) => {
                let fault = Fault::new(Failure::Broken, error.code(), error.to_string());
                Err(match error {
                    ImageError::LessFenced { .. } => NotRestored::PutAside(fault),
                    error if error.is_of_image() && is_to_blame() => NotRestored::PutAside(fault),
                    _ => NotRestored::Failed(fault),
                })
            }
        }
    }

    /// Takes an image of what `boot` has made, which goes on.
    pub fn take(
        &self,
        images: &Images,
        sandbox: &Sandbox,
        subject: &Subject,
        handover: &Handover,
        watched: Watched,
    ) -> Result<Image, ImageError> {
        // Of what is to be imaged again, no memory may be the image's.
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

    fn keep(&self, scratch: &Scratch) -> io::Result<()> {
        let dirs = scratch.open()?;
        sys::as_tenant(self.runner.identity, || {
            carried::copy(&dirs.run(), &dirs.carried_run(), Present::Replace)?;
            if let Err(error) = carried::copy(&dirs.tmp(), &dirs.carried_tmp(), Present::Replace) {
                // Most of what is there no process has open.
                tracing::debug!(site = %self.site.name, %error, "not all of /tmp goes with its image");
            }
            Ok(())
        })?
    }

    /// What an image would be taken of now.
    pub fn present_subject(&self) -> Result<Subject, Fault> {
        let secrets = spawn::secrets(&self.app, &self.tenant, &self.runner)?;
        self.subject(&secrets)
            .map_err(|error| Fault::of_path(fault::APP, "cannot look at the base", self.base(), error))
    }

    /// What its image expects beside it, for another node.
    pub fn packed(&self) -> io::Result<Vec<u8>> {
        let dirs = self.scratch().open()?;
        sys::as_tenant(self.runner.identity, || carried::pack(&[&dirs.carried_run(), &dirs.carried_tmp()]))?
    }

    /// The same, from another node.
    pub fn put_packed(&self, packed: &[u8]) -> io::Result<()> {
        let scratch = self.scratch();
        scratch.make_missing(self.identity())?;
        let dirs = scratch.open()?;
        sys::as_tenant(self.runner.identity, || {
            carried::unpack(packed, &[&dirs.carried_run(), &dirs.carried_tmp()])
        })?
    }

    fn put_back(&self, scratch: &Scratch) -> io::Result<()> {
        let dirs = scratch.open()?;
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        sys::as_tenant(self.runner.identity, || {
            carried::copy(&dirs.carried_run(), &dirs.run(), Present::Replace)?;
            carried::copy(&dirs.carried_tmp(), &dirs.tmp(), Present::Keep)?;
            let text = format!("{:032x}\n", u128::from_ne_bytes(bytes));
            carried::replace_file(&dirs.run().join(WAKE_FILE), text.as_bytes())
        })?
    }

    fn base(&self) -> &Path {
        match (&self.unpacked, &self.app.base) {
            (Some(unpacked), _) => &unpacked.path,
            (None, Some(base)) => base.path(),
            (None, None) => Path::new("/"),
        }
    }

    /// What an image of its processes depends on.
    fn base_digest(&self) -> io::Result<Digest> {
        match &self.unpacked {
            // Its files may be unpacked anew and are the same.
            Some(unpacked) => Ok(Digest::of(&[b"oci", unpacked.digest.as_bytes()])),
            None => {
                let base = self.owner().open_directory(self.base(), Access::Search)?;
                base_digest(self.base(), &base)
            }
        }
    }

    fn subject(&self, secrets: &[(String, String)]) -> io::Result<Subject> {
        let Self { site, tenant, app, runner, .. } = self;
        let record = serde_json::to_vec(&what_runs(app)).map_err(io::Error::other)?;
        let home = spawn::home(tenant).as_os_str().as_encoded_bytes();
        let files_max = runner.open_files_max.to_le_bytes();
        let mut parts = vec![record.as_slice(), home, &files_max];
        parts.extend(secrets.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]));
        let Identity { uid, gid } = self.identity();
        Ok(Subject {
            site: site.name.to_string(),
            release: app.release.clone().unwrap_or_default(),
            definition: Digest::of(&parts),
            base: self.base_digest()?,
            uid,
            gid,
        })
    }

    /// The keeper's end of the log, and what the program gets.
    fn hand_over(&self, sandbox: &Sandbox) -> Result<(OwnedFd, Handover), Fault> {
        let listener = match self.app.listen {
            Listen::Fd => Some(self.listen(sandbox)?),
            Listen::Socket | Listen::Port => None,
        };
        let (log, output) = sandbox.pipe().map_err(|error| {
            Fault::new(Failure::Busy, fault::SPAWN, format!("cannot make the pipe of its log: {error}"))
        })?;
        Ok((log, Handover { listener, log: output }))
    }

    fn listen(&self, sandbox: &Sandbox) -> Result<OwnedFd, Fault> {
        self.make_sockets_dir()?;
        sandbox
            .listener(&self.listens_at)
            .map_err(|error| Fault::of_path(fault::APP, "cannot listen on", &self.listens_at, error))
    }

    /// On the node, for sockets the keeper listens on for it.
    fn sockets_dir(&self) -> &Path {
        self.listens_at.parent().expect("a file in a directory")
    }

    /// Makes that, for root alone.
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

fn started(sandbox: &Arc<Sandbox>, task: Task, log: OwnedFd) -> Started {
    Started {
        root: Root::Sandboxed { sandbox: Arc::clone(sandbox), task },
        log,
        fds: Vec::new(),
        enclosure: None,
    }
}

/// The variables of an application, and of a command beside it.
pub fn environment(
    app: &App,
    tenant: &Tenant,
    address: &spawn::Address,
    secrets: Vec<(String, String)>,
) -> Vec<(OsString, OsString)> {
    let mut env = spawn::app_environment(app, tenant, address);
    // The sandbox says that itself.
    env.remove("LISTEN_FDS");
    env.extend(secrets);
    env.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

pub fn of_sandbox(error: &SandboxError) -> Fault {
    let failure = match error {
        SandboxError::Run { error, .. } | SandboxError::Create { error, .. }
            if matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock) =>
        {
            Failure::Busy
        }
        _ => Failure::Broken,
    };
    Fault::new(failure, error.code(), error.to_string())
}

/// What of a record a running instance was made from.
pub fn what_runs(app: &App) -> App {
    let when = App { idle: Idle::default(), min: None, max: None, timeout_seconds: None, ..app.clone() };
    let when = App { request_trailers: Vec::new(), after_wake: Vec::new(), ..when };
    // Of its files, which scripts are where. What the edge makes of the others is not its concern.
    let files = app.files.as_ref().map(|files| {
        let Files { root, index, front_controller, extensions, .. } = (**files).clone();
        Box::new(Files { root, index, front_controller, extensions, ..Files::default() })
    });
    App { start_seconds: None, cpu_max: None, request_buffering: Buffering::On, files, ..when }
}

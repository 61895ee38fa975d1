//! The environment of an application in its sandbox: its base, its files, the places where it may
//! write, and its endpoint.
//!
//! Not here: making the sandbox (`sandbox`), the program in it (`start`).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use nagaya_records::record::{APP_PORT, App, AppDatabase, AppListen, BaseRecord, OutboundRules};
use nagaya_records::{Site, Tenant};

use crate::fault::{self, Fault};
use crate::instances::run::volatile_files;
use crate::options::KeeperConfig;
use crate::relay::EgressPlan;
use crate::sandbox::{CellEntrance, SandboxAddress, SandboxBind, SandboxSpec, UnixIdentity};
use crate::{mail, spawn};

/// Path of its socket, if it is to listen on one.
const SOCKET: &str = "/run/app.sock";

/// Size of its `/dev/shm`, bytes. An image carries its contents.
const SHM_BYTES_MAX: u64 = 64 << 20;

/// File that says how names are looked up (resolv.conf(5)).
const RESOLVER: &str = "/etc/resolv.conf";

/// File of names and their addresses (hosts(5)).
const HOSTS: &str = "/etc/hosts";

/// Path of nagaya's own `sendmail`; and further paths, if its base is the node's.
const SENDMAIL: &str = "/run/nagaya/sendmail";
const USUAL_SENDMAIL: &str = "/usr/sbin/sendmail";

/// Settings for every kind of PHP (`PHP_INI_SCAN_DIR`), in a directory of their own.
const PHP_SETTINGS: &str = "/run/nagaya/php/nagaya.ini";

/// Variable and value by which PHP reads these before those of its own directory.
const PHP_SCAN_DIR: (&str, &str) = ("PHP_INI_SCAN_DIR", "/run/nagaya/php:");

/// In a sandbox only PHP itself removes its sessions. Debian's PHP leaves that to cron.
const PHP_SETTINGS_TEXT: &str =
    "sendmail_path = \"/run/nagaya/sendmail -t -i\"\nsession.gc_probability = 1\n";

/// Default directory of sessions of Debian's PHP. Here each application has its own.
const PHP_SESSIONS: &str = "/var/lib/php/sessions";

/// Maximum length of a host name (`__NEW_UTS_LEN`).
const HOSTNAME_LEN_MAX: usize = 64;

/// Directories on disk that an instance keeps from one run to the next. They are the tenant's,
/// below one that only root enters.
#[derive(Debug, Clone)]
pub struct ScratchDirs {
    pub tmp: PathBuf,
    pub run: PathBuf,
    /// Their contents when its image was taken.
    pub carried_tmp: PathBuf,
    pub carried_run: PathBuf,
    /// Its `/etc/hosts` and `/etc/resolv.conf`, if it has its own. Owned by the keeper.
    pub hosts: PathBuf,
    pub resolver: PathBuf,
    /// Its settings for PHP, owned by the keeper, and PHP's sessions, owned by the tenant.
    pub php_settings: PathBuf,
    pub php_sessions: PathBuf,
}

/// These directories, opened, for a process with the tenant's rights, which cannot reach their
/// paths.
pub struct OpenScratch([OwnedFd; 4]);

impl OpenScratch {
    fn path(&self, index: usize) -> PathBuf {
        format!("/proc/self/fd/{}", self.0[index].as_raw_fd()).into()
    }

    pub fn tmp(&self) -> PathBuf {
        self.path(0)
    }

    pub fn run(&self) -> PathBuf {
        self.path(1)
    }

    pub fn carried_tmp(&self) -> PathBuf {
        self.path(2)
    }

    pub fn carried_run(&self) -> PathBuf {
        self.path(3)
    }
}

impl ScratchDirs {
    pub fn of(site: &Site, options: &KeeperConfig) -> Self {
        // Beside the images: on disk, because images do not carry what is in memory.
        let dir = options.instances.images.with_file_name("instances").join(site.name.as_str());
        let path = |name: &str| dir.join(name);
        Self {
            tmp: path("tmp"),
            run: path("run"),
            carried_tmp: path("carried-tmp"),
            carried_run: path("carried-run"),
            hosts: path("hosts"),
            resolver: path("resolv.conf"),
            php_settings: path("php.ini"),
            php_sessions: path("php-sessions"),
        }
    }

    pub fn open(&self) -> io::Result<OpenScratch> {
        let open = |path: &PathBuf| spawn::open_directory(path);
        let Self { tmp, run, carried_tmp, carried_run, .. } = self;
        Ok(OpenScratch([open(tmp)?, open(run)?, open(carried_tmp)?, open(carried_run)?]))
    }

    /// Removes all of it: the site is gone.
    pub fn remove(&self) -> io::Result<()> {
        match self.tmp.parent().map(fs::remove_dir_all) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes them for a start. Files in `/run` belong to an earlier run and are removed. `/tmp` is
    /// kept.
    pub fn make(&self, owner: UnixIdentity) -> Result<(), Fault> {
        let make = || {
            self.make_missing(owner)?;
            // The directory itself stays: removing and making it would wait for the disk.
            volatile_files::empty(&self.run)?;
            fs::set_permissions(&self.run, fs::Permissions::from_mode(0o700))
        };
        make().map_err(|error| Fault::of_path(fault::APP, "cannot make", &self.run, error))
    }

    /// Makes those that are missing.
    pub fn make_missing(&self, owner: UnixIdentity) -> io::Result<()> {
        for path in [&self.tmp, &self.run, &self.carried_tmp, &self.carried_run, &self.php_sessions] {
            if let Some(above) = path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(above)?;
            }
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            chown(path, Some(owner.uid), Some(owner.gid))?;
        }
        Ok(())
    }
}

impl ScratchDirs {
    /// Writes one of the keeper's files for it, unless it is up to date.
    pub fn write(&self, file: &Path, text: &str) -> Result<(), Fault> {
        if fs::read(file).is_ok_and(|now| now == text.as_bytes()) {
            return Ok(());
        }
        // Every process in the sandbox may read it.
        let write = || -> io::Result<()> {
            fs::write(file, text)?;
            fs::set_permissions(file, fs::Permissions::from_mode(0o644))
        };
        write().map_err(|error| Fault::of_path(fault::OUTLET, "cannot write", file, error))
    }
}

/// Returns the path at which the keeper listens for its database of this number, in the directory
/// of its sockets.
pub fn database_socket(sockets: &Path, number: usize) -> PathBuf {
    sockets.join(format!("db.{number}"))
}

/// Returns nagaya's own files for an application on the node's own files: `sendmail`, and settings
/// for PHP.
fn own_binds(scratch: &ScratchDirs, is_node: bool, has_mail: bool) -> Vec<SandboxBind> {
    let bind = |source: &Path, target: &str, writable| SandboxBind {
        source: source.to_owned(),
        target: target.into(),
        writable,
        as_tenant: false,
        is_optional: !Path::new(target).starts_with("/run"),
    };
    let mut binds = Vec::new();
    // On another base the program may not run.
    if let Some(program) = mail::program().filter(|_| is_node && has_mail) {
        binds.extend([SENDMAIL, USUAL_SENDMAIL].map(|target| bind(program, target, false)));
    }
    if is_node {
        binds.push(bind(&scratch.php_settings, PHP_SETTINGS, false));
        binds.push(bind(&scratch.php_sessions, PHP_SESSIONS, true));
    }
    binds
}

/// Whether this is the node's own tree, with its programs.
pub fn is_node(base: &Path) -> bool {
    base == Path::new("/")
}

/// Writes the files of nagaya's own that `spec` binds.
pub fn write_own_files(scratch: &ScratchDirs, base: &Path) -> Result<(), Fault> {
    if is_node(base) { scratch.write(&scratch.php_settings, PHP_SETTINGS_TEXT) } else { Ok(()) }
}

/// Adds further variables for an application on the node's own files, unless its record sets them.
pub fn add_own_variables(base: &Path, env: &mut Vec<(OsString, OsString)>) {
    let (name, value) = PHP_SCAN_DIR;
    if is_node(base) && env.iter().all(|(known, _)| known != name) {
        env.push((name.into(), value.into()));
    }
}

/// Returns the files by which it looks names up, where they are not its base's.
fn name_binds(app: &App, scratch: &ScratchDirs, base: &Path, plan: Option<&EgressPlan>) -> Vec<SandboxBind> {
    let mut binds = Vec::new();
    let host_network = app.outbound == OutboundRules::Host;
    // Path where a service of the node writes it. A base of its own has no link there.
    let service = Path::new(RESOLVER).canonicalize().ok().filter(|path| path.starts_with("/run"));
    if let Some(path) = service.clone().filter(|_| host_network) {
        binds.push(SandboxBind {
            source: path.clone(),
            target: path,
            writable: false,
            as_tenant: true,
            is_optional: false,
        });
    }
    if app.outbound == OutboundRules::Nat {
        let is_linked = base == Path::new("/");
        let target = service.filter(|_| is_linked).unwrap_or_else(|| RESOLVER.into());
        let source = scratch.resolver.clone();
        binds.push(SandboxBind { source, target, writable: false, as_tenant: false, is_optional: false });
    }
    if plan.and_then(EgressPlan::hosts).is_some() {
        // A file of the keeper's in a directory that only root enters. Names of own sites alone are
        // no reason not to start.
        let (source, target) = (scratch.hosts.clone(), HOSTS.into());
        let is_optional = EgressPlan::new(app.outbound.endpoints()).hosts().is_none();
        binds.push(SandboxBind { source, target, writable: false, as_tenant: false, is_optional });
    }
    binds
}

/// Returns the node's own names, for an application that reaches all outside by them.
pub fn node_hosts(app: &App, base: &Path) -> String {
    let is_wanted = is_node(base) && app.outbound == OutboundRules::Nat;
    if is_wanted { fs::read_to_string(HOSTS).unwrap_or_default() } else { String::new() }
}

/// Describes the sandbox of this application: on `base`, with its databases' sockets from the
/// directory `sockets`.
pub fn spec(
    site: &Site,
    tenant: &Tenant,
    app: &App,
    scratch: &ScratchDirs,
    options: &KeeperConfig,
    (base, sockets, plan): (&Path, &Path, Option<&EgressPlan>),
    (identity, entrance): (UnixIdentity, CellEntrance),
) -> SandboxSpec {
    let home = spawn::home(tenant);
    let directory = home.join(&app.directory);
    // Its own files. It owns nothing outside of its home, such as a program of the base.
    let is_own = tenant.home.is_some() && directory.starts_with(home);
    let bind = |source: PathBuf, target: PathBuf, writable| SandboxBind {
        source,
        target,
        writable,
        as_tenant: true,
        is_optional: false,
    };
    let mut binds = Vec::new();
    // The root directory, where an OCI image works by default, is the base's and already there.
    if directory != Path::new("/") {
        binds.push(bind(directory.clone(), directory, app.writable.is_empty() && is_own));
    }
    for path in &app.writable {
        let path = home.join(path);
        binds.push(bind(path.clone(), path, true));
    }
    for (number, AppDatabase { socket, inside, .. }) in app.databases.iter().enumerate() {
        // A socket of the keeper's in a directory that only root enters. For the kernel, connecting
        // is writing.
        let (source, target) = (database_socket(sockets, number), inside.as_ref().unwrap_or(socket).clone());
        binds.push(SandboxBind { source, target, writable: true, as_tenant: false, is_optional: false });
    }
    binds.extend(name_binds(app, scratch, base, plan));
    let host_network = app.outbound == OutboundRules::Host;
    binds.extend(own_binds(scratch, is_node(base), !host_network && options.mail.relay));
    let name: String = site.name.as_str().chars().take(HOSTNAME_LEN_MAX).collect();
    SandboxSpec {
        identity,
        home: tenant.home.clone(),
        hostname: name,
        base: base.to_owned(),
        base_as_tenant: matches!(app.base, Some(BaseRecord::Directory(_))),
        binds,
        hide: options.hidden_directories().chain(homes_beside(tenant)).collect(),
        tmp: Some(scratch.tmp.clone()),
        run: Some(scratch.run.clone()),
        shm_bytes_max: SHM_BYTES_MAX,
        host_network,
        entrance,
    }
}

/// Returns the directory with other tenants' homes beside this one's, if sandboxes show it.
fn homes_beside(tenant: &Tenant) -> Option<PathBuf> {
    let beside = tenant.home.as_deref()?.parent()?;
    let is_shown = ["/var", "/opt"].iter().any(|top| beside.starts_with(top) && beside != Path::new(top));
    let is_common = ["/var/lib", "/var/cache"].iter().any(|common| beside == Path::new(common));
    (is_shown && !is_common && beside.is_dir()).then(|| beside.to_owned())
}

/// Returns the address that it is given to listen at.
pub fn told(listen: AppListen, path: &Path) -> spawn::AppAddress {
    match listen {
        AppListen::Socket => spawn::AppAddress::Socket(SOCKET.into()),
        AppListen::Port => spawn::AppAddress::Port(APP_PORT),
        AppListen::Fd => spawn::AppAddress::Inherited(path.into()),
    }
}

/// Returns the same address, for a client.
pub fn address(listen: AppListen, path: &Path) -> SandboxAddress {
    match listen {
        AppListen::Socket => SandboxAddress::Socket(SOCKET.into()),
        AppListen::Port => SandboxAddress::Port(APP_PORT),
        AppListen::Fd => SandboxAddress::Listener(path.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(backend: &str) -> (Site, App) {
        let text = format!(r#"{{"name":"blog","tenant":"t","hosts":["b"],"backend":{backend}}}"#);
        let site: Site = serde_json::from_str(&text).unwrap();
        let nagaya_records::Backend::App(app) = site.backend.clone() else { panic!("{backend}") };
        (site, app)
    }

    fn binds_and_rights(backend: &str) -> Vec<SandboxBind> {
        let (site, app) = site(backend);
        let tenant = serde_json::from_str(r#"{"name":"t","uid":9,"gid":9,"home":"/home/t"}"#).unwrap();
        let options = KeeperConfig::default();
        let scratch = ScratchDirs::of(&site, &options);
        let whose = (UnixIdentity { uid: 9, gid: 9 }, CellEntrance::default());
        let plan = EgressPlan::new(app.outbound.endpoints());
        let from = (Path::new("/"), Path::new("/run/nagaya/apps/blog.1"), Some(&plan));
        let mut binds = spec(&site, &tenant, &app, &scratch, &options, from, whose).binds;
        binds.retain(|bind| !bind.target.starts_with("/run/nagaya") && !bind.is_optional);
        binds
    }

    fn binds(backend: &str) -> Vec<(String, String, bool)> {
        let binds = binds_and_rights(backend);
        assert!(binds.iter().all(|bind| bind.as_tenant), "nothing is looked up with root's rights");
        let text = |path: &Path| path.display().to_string();
        binds.iter().map(|bind| (text(&bind.source), text(&bind.target), bind.writable)).collect()
    }

    fn same(path: &str, writable: bool) -> (String, String, bool) {
        (path.into(), path.into(), writable)
    }

    #[test]
    fn directory_is_writable_unless_the_record_names_others() {
        let own = binds(r#"{"kind":"app","command":["x"],"directory":"app"}"#);
        assert_eq!(own, [same("/home/t/app", true)]);
        let said =
            binds(r#"{"kind":"app","command":["x"],"directory":"app","writable":["app/media","/srv/x"]}"#);
        assert_eq!(said, [same("/home/t/app", false), same("/home/t/app/media", true), same("/srv/x", true)]);
        let of_base = binds(r#"{"kind":"app","command":["x"],"directory":"/usr/share/redmine"}"#);
        assert_eq!(of_base, [same("/usr/share/redmine", false)]);
        let of_root = binds(r#"{"kind":"app","command":["x"],"directory":"/"}"#);
        assert_eq!(of_root, [], "the base is there, and cannot be bound over itself");
    }

    #[test]
    fn outside_names_are_in_a_file_the_application_cannot_change() {
        let with = |outbound: &str| {
            binds_and_rights(&format!(
                r#"{{"kind":"app","command":["x"],"directory":"app","outbound":{outbound}}}"#
            ))
        };
        let named = with(r#"["db.internal:3306"]"#);
        assert!(named[1].source.ends_with("instances/blog/hosts") && !named[1].writable);
        assert_eq!(named[1].target, Path::new("/etc/hosts"));
        assert_eq!(with(r#"["203.0.113.7:443"]"#).len(), 1, "an address needs no name");
        let all = with(r#""nat""#);
        assert!(all[1].source.ends_with("instances/blog/resolv.conf") && !all[1].writable);
    }

    #[test]
    fn a_database_is_reached_through_a_socket_of_the_keepers() {
        let backend = r#"{"kind":"app","command":["x"],"directory":"app",
            "databases":[{"socket":"/run/mysqld/mysqld.sock"},{"socket":"/run/a.sock","inside":"/tmp/b.sock"}]}"#;
        let binds = binds_and_rights(backend);
        for (bind, name, target) in
            [(&binds[1], "db.0", "/run/mysqld/mysqld.sock"), (&binds[2], "db.1", "/tmp/b.sock")]
        {
            assert_eq!(bind.source, Path::new("/run/nagaya/apps/blog.1").join(name));
            assert!(bind.target == Path::new(target) && bind.writable);
        }
    }
}

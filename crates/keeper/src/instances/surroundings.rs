//! What an application finds around it in its sandbox: its base, its files, where it may write, where it listens.
//!
//! Not here: making the sandbox (`sandbox`), what runs in it (`start`).

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use nagaya_cmdb::record::{APP_PORT, App, Base, Database, Listen, Outbound};
use nagaya_cmdb::{Site, Tenant};

use super::carried;
use crate::fault::{self, Fault};
use crate::options::Options;
use crate::relay::Plan;
use crate::sandbox::{Address, Bind, Entrance, Identity, Spec};
use crate::spawn;

/// Where it makes its socket, if it is to listen on one.
const SOCKET: &str = "/run/app.sock";

/// Bytes of its `/dev/shm`. An image carries them.
const SHM_BYTES_MAX: u64 = 64 << 20;

/// How names are looked up (resolv.conf(5)).
const RESOLVER: &str = "/etc/resolv.conf";

/// Names and their addresses (hosts(5)).
const HOSTS: &str = "/etc/hosts";

/// Longest host name (`__NEW_UTS_LEN`).
const HOSTNAME_LEN_MAX: usize = 64;

/// Directories on disk that an instance keeps from one run to the next. They are the tenant's, beneath one that only
/// root enters.
#[derive(Debug, Clone)]
pub struct Scratch {
    pub tmp: PathBuf,
    pub run: PathBuf,
    /// What was in them when its image was taken.
    pub carried_tmp: PathBuf,
    pub carried_run: PathBuf,
    /// Its `/etc/hosts` and `/etc/resolv.conf`, if they are of its own. The keeper's.
    pub hosts: PathBuf,
    pub resolver: PathBuf,
}

/// The same, opened, for who has the tenant's rights and could not come there by their paths.
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

impl Scratch {
    pub fn of(site: &Site, options: &Options) -> Self {
        // Beside the images: on disk, because images do not carry what is in memory.
        let dir = options.instances.images.with_file_name("instances").join(site.name.as_str());
        let [tmp, run, carried_tmp, carried_run, hosts, resolver] =
            ["tmp", "run", "carried-tmp", "carried-run", "hosts", "resolv.conf"].map(|name| dir.join(name));
        Self { tmp, run, carried_tmp, carried_run, hosts, resolver }
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

    /// Makes them for a start: what a run before left in `/run` is of nothing that lives; its `/tmp` it keeps.
    pub fn make(&self, owner: Identity) -> Result<(), Fault> {
        let make = || {
            self.make_missing(owner)?;
            // It stays itself: removing a directory and making it anew waits for the disk.
            carried::empty(&self.run)?;
            fs::set_permissions(&self.run, fs::Permissions::from_mode(0o700))
        };
        make().map_err(|error| Fault::of_path(fault::APP, "cannot make", &self.run, error))
    }

    /// Makes those that are not there.
    pub fn make_missing(&self, owner: Identity) -> io::Result<()> {
        for path in [&self.tmp, &self.run, &self.carried_tmp, &self.carried_run] {
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

impl Scratch {
    /// Writes one of the keeper's files for it, unless that is as it should be.
    pub fn write(&self, file: &Path, text: &str) -> Result<(), Fault> {
        if fs::read(file).is_ok_and(|now| now == text.as_bytes()) {
            return Ok(());
        }
        // It is read in the sandbox, by whoever is there.
        let write = || -> io::Result<()> {
            fs::write(file, text)?;
            fs::set_permissions(file, fs::Permissions::from_mode(0o644))
        };
        write().map_err(|error| Fault::of_path(fault::OUTLET, "cannot write", file, error))
    }
}

/// Where the keeper listens for its database of this number, in the directory of its sockets.
pub fn database_socket(sockets: &Path, number: usize) -> PathBuf {
    sockets.join(format!("db.{number}"))
}

/// The sandbox of this application: on `base`, with its databases' sockets from the directory `sockets`.
pub fn spec(
    site: &Site,
    tenant: &Tenant,
    app: &App,
    scratch: &Scratch,
    options: &Options,
    (base, sockets): (&Path, &Path),
    (identity, entrance): (Identity, Entrance),
) -> Spec {
    let home = spawn::home(tenant);
    let directory = home.join(&app.directory);
    // Its own files; of what is not beneath its home, such as a program of the base, it owns nothing.
    let is_own = tenant.home.is_some() && directory.starts_with(home);
    let bind =
        |source: PathBuf, target: PathBuf, writable| Bind { source, target, writable, as_tenant: true };
    let mut binds = Vec::new();
    // The root of all, where an OCI image works by default, is the base's and there already.
    if directory != Path::new("/") {
        binds.push(bind(directory.clone(), directory, app.writable.is_empty() && is_own));
    }
    for path in &app.writable {
        let path = home.join(path);
        binds.push(bind(path.clone(), path, true));
    }
    for (number, Database { socket, inside }) in app.databases.iter().enumerate() {
        // A socket of the keeper's in a directory that only root enters. To connect is to write, as the kernel sees it.
        let (source, target) = (database_socket(sockets, number), inside.as_ref().unwrap_or(socket).clone());
        binds.push(Bind { source, target, writable: true, as_tenant: false });
    }
    let host_network = app.outbound == Outbound::Host;
    // Where a service of the node writes it. A base of its own has no link there.
    let service = Path::new(RESOLVER).canonicalize().ok().filter(|path| path.starts_with("/run"));
    if let Some(path) = service.clone().filter(|_| host_network) {
        binds.push(Bind { source: path.clone(), target: path, writable: false, as_tenant: true });
    }
    if app.outbound == Outbound::Nat {
        let is_linked = base == Path::new("/");
        let target = service.filter(|_| is_linked).unwrap_or_else(|| RESOLVER.into());
        binds.push(Bind { source: scratch.resolver.clone(), target, writable: false, as_tenant: false });
    }
    if Plan::new(app.outbound.endpoints()).hosts().is_some() {
        // A file of the keeper's in a directory that only root enters.
        let (source, target) = (scratch.hosts.clone(), HOSTS.into());
        binds.push(Bind { source, target, writable: false, as_tenant: false });
    }
    let name: String = site.name.as_str().chars().take(HOSTNAME_LEN_MAX).collect();
    Spec {
        identity,
        home: tenant.home.clone(),
        hostname: name,
        base: base.to_owned(),
        base_as_tenant: matches!(app.base, Some(Base::Directory(_))),
        binds,
        hide: hidden(options).chain(homes_beside(tenant)).collect(),
        tmp: Some(scratch.tmp.clone()),
        run: Some(scratch.run.clone()),
        shm_bytes_max: SHM_BYTES_MAX,
        host_network,
        entrance,
    }
}

/// What is the keeper's. `/run` is each sandbox's own anyway.
fn hidden(options: &Options) -> impl Iterator<Item = PathBuf> {
    let own = [
        Some(options.runtime_dir.as_path()),
        options.instances.images.parent(),
        options.certificates.as_deref(),
    ];
    let is_there = |path: &&Path| path.is_absolute() && path.parent().is_some() && path.is_dir();
    own.into_iter().flatten().filter(is_there).map(Path::to_path_buf)
}

/// Where other tenants' homes are beside this one's, if that is in a directory which sandboxes show.
fn homes_beside(tenant: &Tenant) -> Option<PathBuf> {
    let beside = tenant.home.as_deref()?.parent()?;
    let is_shown = ["/var", "/opt"].iter().any(|top| beside.starts_with(top) && beside != Path::new(top));
    let is_common = ["/var/lib", "/var/cache"].iter().any(|common| beside == Path::new(common));
    (is_shown && !is_common && beside.is_dir()).then(|| beside.to_owned())
}

/// Where it listens, as it is told.
pub fn told(listen: Listen, path: &Path) -> spawn::Address {
    match listen {
        Listen::Socket => spawn::Address::Socket(SOCKET.into()),
        Listen::Port => spawn::Address::Port(APP_PORT),
        Listen::Fd => spawn::Address::Inherited(path.into()),
    }
}

/// The same place, for who connects to it.
pub fn address(listen: Listen, path: &Path) -> Address {
    match listen {
        Listen::Socket => Address::Socket(SOCKET.into()),
        Listen::Port => Address::Port(APP_PORT),
        Listen::Fd => Address::Listener(path.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(backend: &str) -> (Site, App) {
        let text = format!(r#"{{"name":"blog","tenant":"t","hosts":["b"],"backend":{backend}}}"#);
        let site: Site = serde_json::from_str(&text).unwrap();
        let nagaya_cmdb::Backend::App(app) = site.backend.clone() else { panic!("{backend}") };
        (site, app)
    }

    fn binds_and_rights(backend: &str) -> Vec<Bind> {
        let (site, app) = site(backend);
        let tenant = serde_json::from_str(r#"{"name":"t","uid":9,"gid":9,"home":"/home/t"}"#).unwrap();
        let options = Options::default();
        let scratch = Scratch::of(&site, &options);
        let whose = (Identity { uid: 9, gid: 9 }, Entrance::default());
        let from = (Path::new("/"), Path::new("/run/nagaya/apps/blog.1"));
        spec(&site, &tenant, &app, &scratch, &options, from, whose).binds
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
    fn its_directory_is_its_own_unless_the_record_says_where_it_writes() {
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
    fn names_outside_are_in_a_file_that_the_application_cannot_change() {
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

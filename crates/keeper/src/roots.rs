//! Opening what belongs to tenants: document roots, the programs in them, and certificates.
//!
//! A tenant's files are opened with the tenant's own rights, so that neither a record nor a link makes the
//! keeper open what the tenant could not (`tenant_path`). All of it blocks: call it from `workers`. Not here: reading them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nagaya_cmdb::names::is_host_name;
use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Backend, Site, Tenant};
use rustix::fs::{CWD, Mode, OFlags};

use crate::fault::{self, Fault};
use crate::protocol::Failure;
use crate::sys::{Access, Identity};
use crate::tenant_path::{self, PathOwner};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A program found beneath a document root.
#[derive(Debug)]
pub struct Script {
    /// The file itself, links resolved.
    pub path: PathBuf,
    /// The document root, links resolved.
    pub root: PathBuf,
}

/// The site's document root as an `O_PATH` directory. The tenant itself must be able to list it: the edge opens what is in it
/// with the edge's rights, not the tenant's.
pub fn open_root(site: &Site, tenant: &Tenant, identity: Option<Identity>) -> Result<OwnedFd, Fault> {
    let files = site.backend.files().ok_or_else(|| no_root(site))?;
    let path = root_path(files, tenant)?;
    PathOwner::of(tenant, identity)
        .open_directory(&path, Access::List)
        .map_err(|error| Fault::of_path(fault::ROOT, "cannot open the document root", &path, error))
}

/// Major and minor number of the device a site's files are on. An application that has none beside it has its tenant's home.
pub fn device(site: &Site, tenant: &Tenant, identity: Option<Identity>) -> Result<(u32, u32), Fault> {
    let failed = |error| {
        let what = "cannot find the device of the files of site";
        Fault::of_path(fault::ROOT, what, Path::new(site.name.as_str()), error)
    };
    let directory = match (&site.backend, site.backend.files()) {
        (Backend::App(_), None) => {
            let home = tenant.home.as_deref().unwrap_or(Path::new("/"));
            PathOwner::of(tenant, identity).open_directory(home, Access::Search).map_err(failed)?
        }
        _ => open_root(site, tenant, identity)?,
    };
    let stat = rustix::fs::fstat(&directory).map_err(|errno| failed(errno.into()))?;
    Ok((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)))
}

/// Where a site's document root is, by its record.
pub fn root_path(files: &Files, tenant: &Tenant) -> Result<PathBuf, Fault> {
    match &tenant.home {
        _ if files.root.is_absolute() => Ok(files.root.clone()),
        Some(home) => Ok(home.join(&files.root)),
        None => Err(Fault::new(
            Failure::NotFound,
            fault::ROOT,
            format!(
                "document root '{}' is relative and tenant '{}' has no home: give it one",
                files.root.display(),
                tenant.name
            ),
        )),
    }
}

/// The program `script` beneath the site's root, if the tenant may run it.
///
/// What was looked at here is executed later by its path, and the tenant may change the path in between:
/// then it runs something else of its own, under its own uid, which it could do anyway.
pub fn find_script(
    site: &Site,
    tenant: &Tenant,
    identity: Option<Identity>,
    script: &str,
) -> Result<Script, Fault> {
    let root = open_root(site, tenant, identity)?;
    let found = PathOwner::of(tenant, identity).open_program_beneath(&root, Path::new(script));
    let file = found.map_err(|error| {
        let path = real_path(&root).unwrap_or_default().join(script);
        let (failure, hint) = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => (Failure::NotFound, ""),
            _ => (Failure::Forbidden, "; a program is a regular file the tenant may execute (chmod +x)"),
        };
        let message = format!("cannot run {} of site '{}': {error}{hint}", path.display(), site.name);
        Fault::new(failure, fault::SCRIPT, message)
    })?;
    let path_of = |fd: &OwnedFd| {
        real_path(fd).map_err(|error| Fault::of_path(fault::SCRIPT, "cannot find", Path::new(script), error))
    };
    Ok(Script { path: path_of(&file)?, root: path_of(&root)? })
}

/// `<name>.pem` in the directory of certificates.
pub fn open_certificate(certificates: Option<&Path>, name: &str) -> Result<OwnedFd, Fault> {
    if !is_host_name(name) || name.bytes().any(|b| b.is_ascii_uppercase()) {
        let message = format!("'{}' is not a host name in lower case", name.escape_debug());
        return Err(Fault::new(Failure::Invalid, fault::CERTIFICATE, message));
    }
    let absent = |dir: &str| {
        Fault::new(Failure::NotFound, fault::CERTIFICATE, format!("no certificate for '{name}'{dir}"))
    };
    let Some(dir) = certificates else { return Err(absent(": no directory of certificates is configured")) };
    let path = dir.join(format!("{name}.pem"));
    let open = || -> io::Result<OwnedFd> {
        let dir = rustix::fs::openat(CWD, dir, DIRECTORY, Mode::empty())?;
        Ok(tenant_path::open_file_beneath(&dir, Path::new(&format!("{name}.pem")))?.into())
    };
    open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => absent(&format!(": there is no {}", path.display())),
        _ => Fault::of_path(fault::CERTIFICATE, "cannot open the certificate", &path, error),
    })
}

fn no_root(site: &Site) -> Fault {
    let message =
        format!("site '{}' is of kind {}, which has no document root", site.name, site.backend.kind());
    Fault::new(Failure::Invalid, fault::WRONG_KIND, message)
}

/// Where an open file is now.
fn real_path(fd: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

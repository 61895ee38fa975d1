//! Opens files of tenants: document roots, the programs in them, and certificates.
//!
//! A tenant's files are opened with the tenant's own rights, so that neither a record nor a link
//! makes the keeper open what the tenant could not (`tenant_path`). All of it blocks: call it from
//! `workers`. Not here: reading them.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use nagaya_base::limits::SITE_PATH_LEN_MAX;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::names::is_host_name;
use nagaya_records::record::{FileRoot, LinkPolicy};
use nagaya_records::{Backend, Site, Tenant};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::fault::{self, Fault};
use crate::paths::tenant_path::{self, PathOwner, PathSteps, real_path};
use crate::sys::{AccessRight, UnixIdentity};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A program found below a document root.
#[derive(Debug)]
pub struct ScriptFile {
    /// The file itself, links resolved.
    pub path: PathBuf,
    /// The document root, links resolved.
    pub root: PathBuf,
}

/// Opens the site's document root as an `O_PATH` directory. The tenant itself must be able to list
/// it. The edge opens its entries with the edge's rights, not the tenant's.
pub fn open_root(site: &Site, tenant: &Tenant, identity: Option<UnixIdentity>) -> Result<OwnedFd, Fault> {
    let files = site.backend.files().ok_or_else(|| no_root(site))?;
    let path = root_path(files, tenant)?;
    PathOwner::of(tenant, identity)
        .open_directory(&path, AccessRight::List)
        .map_err(|error| Fault::of_path(fault::ROOT, "cannot open the document root", &path, error))
}

/// Returns the path to the site's document root, for watching it.
pub fn trace_root(
    site: &Site,
    tenant: &Tenant,
    identity: Option<UnixIdentity>,
) -> io::Result<Option<PathSteps>> {
    let Some(path) = site.backend.files().and_then(|files| root_path(files, tenant).ok()) else {
        return Ok(None);
    };
    PathOwner::of(tenant, identity).trace(&path)
}

/// Returns major and minor number of the device of a site's files. An application without such
/// files has its tenant's home.
pub fn device(site: &Site, tenant: &Tenant, identity: Option<UnixIdentity>) -> Result<(u32, u32), Fault> {
    let failed = |error| {
        let what = "cannot find the device of the files of site";
        Fault::of_path(fault::ROOT, what, Path::new(site.name.as_str()), error)
    };
    let directory = match (&site.backend, site.backend.files()) {
        (Backend::App(_), None) => {
            let home = tenant.home.as_deref().unwrap_or(Path::new("/"));
            PathOwner::of(tenant, identity).open_directory(home, AccessRight::Search).map_err(failed)?
        }
        _ => open_root(site, tenant, identity)?,
    };
    let stat = rustix::fs::fstat(&directory).map_err(|errno| failed(errno.into()))?;
    Ok((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)))
}

/// Returns the path of a site's document root, by its record.
pub fn root_path(files: &FileRoot, tenant: &Tenant) -> Result<PathBuf, Fault> {
    match &tenant.home {
        _ if files.root.is_absolute() => Ok(files.root.clone()),
        Some(home) => Ok(home.join(&files.root)),
        None => Err(Fault::new(
            FailureKind::NotFound,
            fault::ROOT,
            format!(
                "document root '{}' is relative and tenant '{}' has no home: give it one",
                files.root.display(),
                tenant.name
            ),
        )),
    }
}

/// Opens (`O_PATH`) a directory or a file at a path below the site's document root. The path may
/// leave the root by links of the tenant's own.
pub fn open_link(
    site: &Site,
    tenant: &Tenant,
    identity: Option<UnixIdentity>,
    path: &str,
) -> Result<OwnedFd, Fault> {
    let files = site.backend.files().ok_or_else(|| no_root(site))?;
    let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
    let is_plain = !path.is_empty() && path.len() <= SITE_PATH_LEN_MAX && !path.contains('\0');
    if !is_plain || !Path::new(path).components().all(is_name) {
        let message = "a path below a document root has only names".to_owned();
        return Err(Fault::new(FailureKind::Invalid, fault::LINK, message));
    }
    let root = root_path(files, tenant)?;
    let opened = match files.links {
        LinkPolicy::Own => PathOwner::of(tenant, identity).open_by_own_links(&root, Path::new(path)),
        LinkPolicy::None => {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, "its site has 'links' = none"))
        }
    };
    opened.map_err(|error| {
        let what = format!("a link out of the document root of site '{}' is not followed:", site.name);
        Fault::of_path(fault::LINK, &what, &root.join(path), error)
    })
}

/// Finds the program `script` below the site's root, if the tenant may run it. It may be behind
/// links of the tenant's own.
///
/// The checked file is executed later by its path, and the tenant may change the path in between.
/// Then it runs another program of its own, under its own uid, which it could do anyway.
pub fn find_script(
    site: &Site,
    tenant: &Tenant,
    identity: Option<UnixIdentity>,
    script: &str,
) -> Result<ScriptFile, Fault> {
    let root = open_root(site, tenant, identity)?;
    let owner = PathOwner::of(tenant, identity);
    let found = owner.open_program_beneath(&root, Path::new(script));
    let found = found.or_else(|error| match (Errno::from_io_error(&error), site.backend.files()) {
        (Some(Errno::XDEV), Some(files)) if files.links == LinkPolicy::Own => {
            let root = root_path(files, tenant).map_err(|_| error)?;
            owner.open_program_by_own_links(&root, Path::new(script))
        }
        _ => Err(error),
    });
    let file = found.map_err(|error| {
        let path = real_path(&root).unwrap_or_default().join(script);
        let (failure, hint) = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => (FailureKind::NotFound, ""),
            _ => (FailureKind::Forbidden, "; a program is a regular file the tenant may execute (chmod +x)"),
        };
        let message = format!("cannot run {} of site '{}': {error}{hint}", path.display(), site.name);
        Fault::new(failure, fault::SCRIPT, message)
    })?;
    let path_of = |fd: &OwnedFd| {
        real_path(fd).map_err(|error| Fault::of_path(fault::SCRIPT, "cannot find", Path::new(script), error))
    };
    Ok(ScriptFile { path: path_of(&file)?, root: path_of(&root)? })
}

/// Opens `<name>.pem` in the directory of certificates.
pub fn open_certificate(certificates: Option<&Path>, name: &str) -> Result<OwnedFd, Fault> {
    if !is_host_name(name) || name.bytes().any(|b| b.is_ascii_uppercase()) {
        let message = format!("'{}' is not a host name in lower case", name.escape_debug());
        return Err(Fault::new(FailureKind::Invalid, fault::CERTIFICATE, message));
    }
    let absent = |dir: &str| {
        Fault::new(FailureKind::NotFound, fault::CERTIFICATE, format!("no certificate for '{name}'{dir}"))
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
    Fault::new(FailureKind::Invalid, fault::WRONG_KIND, message)
}

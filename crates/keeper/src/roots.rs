//! Opening what belongs to tenants: document roots, the programs in them, and certificates.
//!
//! A tenant's files are opened with the tenant's own rights, so that neither a record nor a link makes the
//! keeper open what the tenant could not. All of it blocks: call it from `workers`. Not here: reading them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nagaya_cmdb::names::is_host_name;
use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Backend, Site, Tenant};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::fault::{self, Fault};
use crate::protocol::Failure;
use crate::sys::{Identity, as_tenant, check_executable};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// `RESOLVE_NO_MAGICLINKS` besides, because links of `/proc` lead out of any directory.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// Tries of a look-up that a rename elsewhere disturbs (`EAGAIN` of `openat2`).
const RESOLVE_TRIES: usize = 64;

/// A program found beneath a document root.
#[derive(Debug)]
pub struct Script {
    /// The file itself, links resolved.
    pub path: PathBuf,
    /// The document root, links resolved.
    pub root: PathBuf,
}

/// The site's document root as an `O_PATH` directory.
pub fn open_root(site: &Site, tenant: &Tenant, identity: Option<Identity>) -> Result<OwnedFd, Fault> {
    let files = site.backend.files().ok_or_else(|| no_root(site))?;
    let path = root_path(files, tenant)?;
    let opened = as_tenant(identity, || match files.root.is_absolute() {
        true => Ok(rustix::fs::openat(CWD, &files.root, DIRECTORY, Mode::empty())?),
        false => {
            let home = tenant.home.as_deref().unwrap_or(Path::new("/"));
            let home = rustix::fs::openat(CWD, home, DIRECTORY, Mode::empty())?;
            beneath(&home, &files.root, DIRECTORY)
        }
    });
    opened
        .and_then(|opened| opened)
        .map_err(|error| Fault::of_path(fault::ROOT, "cannot open the document root", &path, error))
}

/// Major and minor number of the device a site's files are on. An application that has none beside it has its tenant's home.
pub fn device(site: &Site, tenant: &Tenant, identity: Option<Identity>) -> Result<(u32, u32), Fault> {
    let failed = |error| {
        let what = "cannot find the device of the files of site";
        Fault::of_path(fault::ROOT, what, Path::new(site.name.as_str()), error)
    };
    let stat = match (&site.backend, site.backend.files()) {
        (Backend::App(_), None) => {
            let home = tenant.home.as_deref().unwrap_or(Path::new("/"));
            as_tenant(identity, || rustix::fs::stat(home)).map_err(failed)?
        }
        _ => rustix::fs::fstat(open_root(site, tenant, identity)?),
    };
    let stat = stat.map_err(|errno| failed(errno.into()))?;
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
    let found = as_tenant(identity, || {
        let file = beneath(&root, Path::new(script), OFlags::PATH | OFlags::CLOEXEC)?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, Errno::ACCESS));
        }
        check_executable(file.as_fd())?;
        Ok(file)
    });
    let file = found.and_then(|found| found).map_err(|error| {
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
        // Not blocking: a pipe in place of the file must not hold up the keeper.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = beneath(&dir, Path::new(&format!("{name}.pem")), flags)?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not a regular file"));
        }
        Ok(file)
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

fn beneath(dir: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    // An empty root is the home itself, which `openat2` wants to be called `.`.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    for _ in 1..RESOLVE_TRIES {
        match rustix::fs::openat2(dir, path, flags, Mode::empty(), BENEATH) {
            Err(Errno::AGAIN) => {}
            opened => return Ok(opened?),
        }
    }
    Ok(rustix::fs::openat2(dir, path, flags, Mode::empty(), BENEATH)?)
}

/// Where an open file is now.
fn real_path(fd: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

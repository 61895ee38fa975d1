//! `nagaya tenant`: the owners of sites.
//!
//! Not here: the check of a tenant (`nagaya_records::check`), access to records (`output`).

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, lchown};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nagaya_records::Tenant;
use nix::unistd::{Uid, User};
use serde_json::{Map, Value, json};

use super::output::{
    self, AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource, TableColumns, escape, plain,
};
use super::{limits, transfer};
use crate::doctor::tenants::home_warnings;

#[derive(Debug, clap::Subcommand)]
pub enum TenantArgs {
    /// Add a tenant
    Add(TenantAddArgs),
    /// Change a tenant. Only the given options change
    Set(TenantSetArgs),
    /// Show one tenant
    Show {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// List all tenants
    List {
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Remove a tenant that has no sites; its files stay
    Remove {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Add or replace tenants and sites from JSON lines: all of them, or none
    Import(transfer::ImportArgs),
    /// Write all tenants and sites as JSON lines
    Export(transfer::ExportArgs),
}

#[derive(Debug, clap::Args)]
pub struct TenantAddArgs {
    pub name: String,
    #[command(flatten)]
    pub format: OutputFormat,
    #[command(flatten)]
    pub fields: Box<TenantFields>,
}

#[derive(Debug, clap::Args)]
pub struct TenantSetArgs {
    pub name: String,
    /// Remove a field, so that its default applies again. FIELD is home, max-concurrent,
    /// php-workers, network, mail-per-hour, or a limit without its dashes. limits removes all
    /// limits
    #[arg(long, value_name = "FIELD", value_parser = unsettable())]
    pub unset: Vec<String>,
    #[command(flatten)]
    pub format: OutputFormat,
    #[command(flatten)]
    pub fields: Box<TenantFields>,
}

#[derive(Debug, Default, clap::Args)]
pub struct TenantFields {
    /// Uid of the tenant's processes; without it, the next free uid
    #[arg(long, conflicts_with = "user")]
    pub uid: Option<u32>,
    /// Take uid, gid and home from this user of the system
    #[arg(long)]
    pub user: Option<String>,
    /// Gid of the tenant's processes; without it, the same number as the uid
    #[arg(long)]
    pub gid: Option<u32>,
    /// Home directory. Relative roots of its sites are below it. If it is missing, root makes it
    /// for the tenant alone (mode 0700)
    #[arg(long, value_name = "DIR")]
    pub home: Option<String>,
    /// Requests of all its sites that may run at once
    #[arg(long, value_name = "N")]
    pub max_concurrent: Option<u32>,
    /// PHP workers that may run at once
    #[arg(long, value_name = "N")]
    pub php_workers: Option<u32>,
    /// Weight against other tenants when requests queue, 1 to 10000; default 100
    #[arg(long, value_name = "N")]
    pub weight: Option<u32>,
    /// Network of its CGI programs and PHP workers: its own, or the node's with everything that
    /// listens there
    #[arg(long, value_parser = ["own", "host"])]
    pub network: Option<String>,
    /// Most recipients of its programs' mail within an hour; 0 for no mail
    #[arg(long, value_name = "N")]
    pub mail_per_hour: Option<u32>,
    #[command(flatten)]
    pub limits: limits::CellFields,
}

/// Returns the fields that a tenant can lack.
fn unsettable() -> clap::builder::PossibleValuesParser {
    let own = ["home", "max-concurrent", "php-workers", "weight", "network", "mail-per-hour", limits::ALL];
    clap::builder::PossibleValuesParser::new(own.into_iter().chain(limits::OPTIONS))
}

pub fn run(command: TenantArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let (result, format) = match &command {
        TenantArgs::Add(add) => (self::add(add, place), add.format),
        TenantArgs::Set(set) => (self::set(set, place), set.format),
        TenantArgs::Show { name, format } => (show(name, *format, place), *format),
        TenantArgs::List { format } => (list(*format, place), *format),
        TenantArgs::Remove { name, format } => (remove(name, *format, place), *format),
        TenantArgs::Import(import) => (transfer::import(import, place), import.format),
        TenantArgs::Export(export) => (transfer::export(export, place), export.format),
    };
    output::end(result, format)
}

fn path(name: &str) -> String {
    format!("/v1/tenants/{}", escape(name))
}

fn add(command: &TenantAddArgs, place: &RecordSource) -> Result<(), CliError> {
    let mut record = Map::new();
    apply(&command.fields, &mut record)?;
    let access = RecordAccess::open(place, AccessIntent::Change)?;
    let reply = access.add(&path(&command.name), &Value::Object(record))?;
    let tenant = &reply.0["tenant"];
    make_home(tenant)?;
    warn_of_home(tenant);
    if command.format.json {
        return output::print_json(tenant);
    }
    let uid = &tenant["uid"];
    output::print(&format!("tenant '{}' was added with uid {uid}", command.name))
}

fn set(command: &TenantSetArgs, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Change)?;
    let reply = access.update(&path(&command.name), |seen| {
        let mut record = seen["tenant"].as_object().cloned().unwrap_or_default();
        for field in &command.unset {
            if !limits::unset(field, &mut record)? {
                record.remove(&field.replace('-', "_"));
            }
        }
        apply(&command.fields, &mut record)?;
        Ok(Value::Object(record))
    })?;
    make_home(&reply.0["tenant"])?;
    warn_of_home(&reply.0["tenant"]);
    if command.format.json {
        return output::print_json(&reply.0["tenant"]);
    }
    let what = if reply.0["changed"] == json!(true) { "was changed" } else { "is as it was" };
    output::print(&format!("tenant '{}' {what}", command.name))
}

fn apply(fields: &TenantFields, record: &mut Map<String, Value>) -> Result<(), CliError> {
    let TenantFields {
        uid,
        user,
        gid,
        home,
        max_concurrent,
        php_workers,
        weight,
        network,
        mail_per_hour,
        limits,
    } = fields;
    if let Some(name) = user {
        let user = User::from_name(name)
            .map_err(|error| CliError::Usage(format!("user '{name}' cannot be looked up: {error}")))?
            .ok_or_else(|| CliError::Usage(format!("there is no user '{name}' on this system")))?;
        record.insert("uid".into(), user.uid.as_raw().into());
        record.insert("gid".into(), user.gid.as_raw().into());
        let home = user.dir.to_str().ok_or_else(|| {
            CliError::Usage(format!("the home {} of user '{name}' is not UTF-8", user.dir.display()))
        })?;
        record.insert("home".into(), home.into());
    }
    if let Some(home) = home {
        record.insert("home".into(), home.as_str().into());
    }
    let numbers = [
        ("uid", uid),
        ("gid", gid),
        ("max_concurrent", max_concurrent),
        ("php_workers", php_workers),
        ("weight", weight),
        ("mail_per_hour", mail_per_hour),
    ];
    for (key, value) in numbers {
        if let Some(value) = value {
            record.insert(key.into(), (*value).into());
        }
    }
    if let Some(network) = network {
        record.insert("network".into(), network.as_str().into());
    }
    limits.apply(record);
    Ok(())
}

/// Warns on standard error of faults in the tenant's home, which may be corrected later.
pub fn warn_of_home(tenant: &Value) {
    let Ok(tenant) = serde_json::from_value::<Tenant>(tenant.clone()) else { return };
    // Without root the tenant owns nothing.
    if !Uid::effective().is_root() {
        return;
    }
    for warning in home_warnings(&tenant) {
        eprintln!("warning: tenant '{}': {warning}", tenant.name);
    }
}

/// Makes the home. Other tenants must not even traverse it; the keeper opens it with the tenant's
/// own ids.
fn make_home(tenant: &Value) -> Result<(), CliError> {
    let Some(home) = tenant["home"].as_str().map(PathBuf::from) else { return Ok(()) };
    if !Uid::effective().is_root() {
        return Ok(());
    }
    let id = |key: &str| tenant[key].as_u64().and_then(|id| u32::try_from(id).ok());
    create_owned(&home, id("uid"), id("gid")).map_err(|error| CliError::Home {
        tenant: plain(&tenant["name"]),
        home,
        error,
    })
}

fn create_owned(home: &Path, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
    if let Some(parent) = home.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(home) {
        Ok(()) => lchown(home, uid, gid),
        // An existing home stays as it is.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn show(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let reply = RecordAccess::open(place, AccessIntent::Look)?.get(&path(name))?;
    if format.json {
        output::print_json(&reply.0["tenant"])
    } else {
        output::print_fields(&reply.0["tenant"])
    }
}

fn list(format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    if format.json {
        return output::print_json_list(&access, "/v1/tenants", "tenants", None);
    }
    let mut columns = TableColumns::new(&["NAME", "UID", "GID", "HOME"]);
    access.each("/v1/tenants", "tenants", None, |tenant| {
        let home = tenant["home"].as_str().unwrap_or("-").to_owned();
        columns.add([plain(&tenant["name"]), plain(&tenant["uid"]), plain(&tenant["gid"]), home]);
        Ok(())
    })?;
    columns.print()
}

fn remove(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let reply = RecordAccess::open(place, AccessIntent::Look)?.remove(&path(name))?;
    if format.json {
        output::print_json(&reply.0)
    } else {
        output::print(&format!("tenant '{name}' was removed"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_home_is_made_for_its_owner_alone_and_an_old_one_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path().join("homes/t");
        let uid = Uid::effective().as_raw();
        let gid = nix::unistd::Gid::effective().as_raw();
        create_owned(&home, Some(uid), Some(gid)).unwrap();
        let made = std::fs::metadata(&home).unwrap();
        assert_eq!((made.mode() & 0o7777, made.uid(), made.gid()), (0o700, uid, gid));
        std::fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        create_owned(&home, Some(uid), Some(gid)).unwrap();
        assert_eq!(std::fs::metadata(&home).unwrap().mode() & 0o7777, 0o755);
    }
}

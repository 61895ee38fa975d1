//! Finds tenants with wrong ids or homes, each with the fault and the remedy.
//!
//! `look` reads the file system, `judge` decides and is pure. Not here: which ids are refused
//! (`nagaya_records::check::IdPolicy`).

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nagaya_records::Tenant;
use nagaya_records::check::IdPolicy;

/// Warnings that are listed for all tenants together; more are counted.
pub const WARNINGS_MAX: usize = 20;

/// Write permission for the group and for others.
const WRITE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A directory's present state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathLookup {
    pub path: PathBuf,
    pub is_directory: bool,
    pub uid: u32,
    pub gid: u32,
    /// Permissions only.
    pub mode: u32,
}

/// Returns a tenant's faults, as sentences.
pub fn warnings(tenant: &Tenant, policy: &IdPolicy) -> Vec<String> {
    let name = &tenant.name;
    let ids = policy.refusal(tenant).map(|refusal| format!("{refusal}; nothing of it is served (NGY0314)"));
    ids.into_iter().chain(home_warnings(tenant).map(|home| format!("tenant '{name}': {home}"))).collect()
}

/// Returns the faults of a tenant's home, if it has one.
pub fn home_warnings(tenant: &Tenant) -> impl Iterator<Item = String> {
    let found = tenant.home.as_deref().map(|home| match look(home) {
        Ok(places) => judge(tenant, &places),
        Err(error) => vec![format!("its home {}: {}", home.display(), unseen(tenant, home, &error))],
    });
    found.into_iter().flatten()
}

fn unseen(tenant: &Tenant, home: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!(
            "does not exist: install -d -m 0700 -o {} -g {} {}",
            tenant.uid,
            tenant.gid,
            home.display()
        ),
        _ => error.to_string(),
    }
}

/// Returns the home and the directories above it, the home first. Links are followed, as the keeper
/// follows them.
fn look(home: &Path) -> io::Result<Vec<PathLookup>> {
    let home = std::fs::canonicalize(home)?;
    home.ancestors()
        .map(|path| {
            let found = std::fs::metadata(path)?;
            Ok(PathLookup {
                path: path.into(),
                is_directory: found.is_dir(),
                uid: found.uid(),
                gid: found.gid(),
                mode: found.mode() & 0o7777,
            })
        })
        .collect()
}

fn judge(tenant: &Tenant, places: &[PathLookup]) -> Vec<String> {
    let [home, above @ ..] = places else { return Vec::new() };
    let at = home.path.display();
    if !home.is_directory {
        return vec![format!("its home {at} is no directory: name another with `nagaya tenant set --home`")];
    }
    let mut found = Vec::new();
    if home.uid != tenant.uid {
        found.push(format!("its home {at} belongs to uid {}: chown {} {at}", home.uid, tenant.uid));
    }
    // Members of a group that is not the tenant's are others, too.
    let group = if home.gid == tenant.gid { 0 } else { 0o070 };
    let open = home.mode & (0o007 | group);
    if open != 0 {
        let wanted = home.mode & !(0o007 | group) & 0o777;
        found.push(format!(
            "its home {at} is open to others (mode {:04o}): chmod {wanted:04o} {at}",
            home.mode
        ));
    }
    // A user with write permission above it can put another directory in its place.
    let is_loose = |place: &&PathLookup| {
        let is_strangers = place.uid != 0 && place.uid != tenant.uid;
        let is_writable = place.mode & WRITE_BY_OTHERS != 0 && place.mode & STICKY == 0;
        is_strangers || is_writable
    };
    if let Some(place) = above.iter().find(is_loose) {
        found.push(format!(
            "{}, above its home {at}, may be changed by others (uid {}, mode {:04o}): give it to root with mode 0755",
            place.path.display(),
            place.uid,
            place.mode
        ));
    }
    found
}

/// Warnings of all checked tenants.
#[derive(Debug, Default)]
pub struct TenantFinding {
    pub warnings: Vec<String>,
    /// Number of further warnings.
    pub more: usize,
    pub looked_at: usize,
}

impl TenantFinding {
    pub fn add(&mut self, tenant: &Tenant, policy: &IdPolicy) {
        self.looked_at += 1;
        for warning in warnings(tenant, policy) {
            if self.warnings.len() < WARNINGS_MAX {
                self.warnings.push(warning);
            } else {
                self.more += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant() -> Tenant {
        serde_json::from_str(r#"{"name":"alice","uid":5000,"gid":5000,"home":"/srv/alice"}"#).unwrap()
    }

    fn place(path: &str, uid: u32, gid: u32, mode: u32) -> PathLookup {
        PathLookup { path: path.into(), is_directory: true, uid, gid, mode }
    }

    fn judged(home: (u32, u32, u32), parent: (u32, u32)) -> Vec<String> {
        let places = [
            place("/srv/alice", home.0, home.1, home.2),
            place("/srv", parent.0, 0, parent.1),
            place("/", 0, 0, 0o755),
        ];
        judge(&tenant(), &places)
    }

    #[test]
    fn a_home_of_the_tenants_alone_is_as_it_should_be() {
        for mode in [0o700, 0o750, 0o770, 0o2750] {
            assert_eq!(judged((5000, 5000, mode), (0, 0o755)), [""; 0], "{mode:o}");
        }
        // A directory like /tmp: others cannot take away what is not theirs.
        assert_eq!(judged((5000, 5000, 0o700), (0, 0o1777)), [""; 0]);
    }

    #[test]
    fn doctor_reports_a_home_others_may_reach_or_replace() {
        for (home, parent, said) in [
            ((0, 0, 0o700), (0, 0o755), "belongs to uid 0: chown 5000"),
            ((5000, 5000, 0o777), (0, 0o755), "is open to others (mode 0777): chmod 0770"),
            ((5000, 5000, 0o701), (0, 0o755), "is open to others (mode 0701): chmod 0700"),
            ((5000, 33, 0o750), (0, 0o755), "is open to others (mode 0750): chmod 0700"),
            ((5000, 5000, 0o700), (0, 0o777), "/srv, above its home"),
            ((5000, 5000, 0o700), (0, 0o775), "/srv, above its home"),
            ((5000, 5000, 0o700), (6000, 0o755), "/srv, above its home"),
        ] {
            let found = judged(home, parent);
            assert!(found.len() == 1 && found[0].contains(said), "{home:?} {parent:?}: {found:?}");
        }
    }

    #[test]
    fn a_home_that_is_not_there_is_told_with_how_to_make_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut tenant = tenant();
        tenant.home = Some(directory.path().join("missing"));
        let found: Vec<_> = home_warnings(&tenant).collect();
        assert!(found.len() == 1 && found[0].contains("install -d -m 0700 -o 5000 -g 5000"), "{found:?}");
        std::fs::write(directory.path().join("missing"), "").unwrap();
        let found: Vec<_> = home_warnings(&tenant).collect();
        assert!(found[0].contains("is no directory"), "{found:?}");
    }

    #[test]
    fn no_more_is_told_than_can_be_read() {
        let mut found = TenantFinding::default();
        let mut tenant = tenant();
        tenant.uid = 5;
        tenant.home = None;
        for _ in 0..WARNINGS_MAX + 3 {
            found.add(&tenant, &IdPolicy::default());
        }
        assert_eq!((found.warnings.len(), found.more, found.looked_at), (WARNINGS_MAX, 3, WARNINGS_MAX + 3));
    }
}

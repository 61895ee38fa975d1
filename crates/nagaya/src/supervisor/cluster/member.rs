//! This machine's membership in a cluster, in one file below `state_dir`: the store, the name, the
//! keys.
//!
//! Not here: the content of the store (`nagaya_records`), making the keys (`pki`).

use std::cell::{Ref, RefCell};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nagaya_edge::options::ClusterOptions;
use nagaya_keeper::image::ClusterKey;
use nagaya_records::NodeName;
use nagaya_store::etcd::{RecordKeys, RecordSigning};
use serde::{Deserialize, Serialize};

use crate::config::settings::ClusterSettings as Configured;
use crate::etcd_access::{EtcdAccess, etcd_options};

use super::pki::{
    KeyOpener, KnownGeneration, MemberSecrets, NodeCredentials, PkiError, StoredKeys, WrapIdentity,
};

const FILE: &str = "member.json";

/// Longest file that is read, bytes: certificates and keys of a few kilobytes.
const FILE_LEN_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: it is not what this version of nagaya wrote: {error}; restore a copy, or move it away and join the cluster again", path.display())]
    Damaged { path: PathBuf, error: serde_json::Error },
}

/// This node as a member.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterMember {
    pub cluster: String,
    pub node: NodeName,
    /// As in its record.
    pub id: String,
    pub etcd: EtcdAccess,
    /// Opens the members' keys in the store, while this node is one of them.
    pub identity: WrapIdentity,
    /// The newest generation of these keys that it has taken over.
    pub known: KnownGeneration,
    /// The last known value in the store, so that it can start while the store is down.
    pub authorities: String,
    /// Signs its probes.
    pub probe_key: String,
    /// Other valid keys of probes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probe_keys_also: Vec<String>,
    /// Keys of images, the newest first.
    pub image_keys: Vec<ClusterKey>,
    pub credentials: NodeCredentials,
    /// Keys that sign the cluster's records; an unsigned record does not count.
    pub records: RecordKeys,
}

/// The member that this node is now. Its keys change while it runs; only `member_keys` replaces it.
pub struct CurrentMember {
    now: RefCell<ClusterMember>,
}

impl CurrentMember {
    pub fn new(member: ClusterMember) -> Self {
        Self { now: RefCell::new(member) }
    }

    pub fn borrow(&self) -> Ref<'_, ClusterMember> {
        self.now.borrow()
    }

    pub fn replace(&self, member: ClusterMember) {
        *self.now.borrow_mut() = member;
    }
}

/// Returns the edge's options about the cluster.
pub fn edge_options(member: &ClusterMember, configured: &Configured) -> Arc<ClusterOptions> {
    Arc::new(ClusterOptions {
        node: member.node.to_string(),
        id: member.id.clone(),
        authorities: member.authorities.clone(),
        certificate: member.credentials.certificate.clone(),
        key: member.credentials.key.clone(),
        probe_key: member.probe_key.clone(),
        probe_keys_also: member.probe_keys_also.clone(),
        probe: configured.probe,
        probe_ms: configured.probe_ms,
    })
}

/// How the member of a directory's file reaches the cluster's store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoreAccess {
    /// There is no member.
    #[default]
    None,
    Safe,
    /// Others reach it, too, for this reason.
    Weak(String),
    /// The file cannot be read, for this reason.
    Unknown(String),
}

impl StoreAccess {
    pub fn of_member(dir: &Path) -> Self {
        let weakness = |member: ClusterMember| etcd_options(&member.cluster, &member.etcd).weakness();
        match ClusterMember::load(dir) {
            Ok(None) => Self::None,
            Ok(Some(member)) => weakness(member).map_or(Self::Safe, Self::Weak),
            Err(error) => Self::Unknown(error.to_string()),
        }
    }
}

impl ClusterMember {
    pub fn opener(&self) -> KeyOpener<'_> {
        KeyOpener { cluster: &self.cluster, node: &self.node, id: &self.id, identity: &self.identity }
    }

    /// Returns how the store's values are signed and checked.
    pub fn signing(&self) -> RecordSigning {
        RecordSigning::Required(self.records.clone())
    }

    /// Takes over the store's present keys of members. `is_renewed` says that there is a
    /// certificate of the newest CA.
    pub fn take_over(
        &mut self,
        stored: &StoredKeys,
        keys: &MemberSecrets,
        is_renewed: bool,
    ) -> Result<(), PkiError> {
        if is_renewed {
            self.credentials = stored.issue(&self.cluster, keys, &self.node)?;
            self.probe_key.clone_from(&keys.probe);
        }
        self.known = stored.remember(keys)?;
        self.records = signing_keys(&keys.records, &self.records, is_renewed);
        self.authorities.clone_from(&stored.authorities);
        let all = keys.probes_before.iter().chain([&keys.probe]);
        self.probe_keys_also = all.filter(|key| **key != self.probe_key).cloned().collect();
        self.take_image_key(keys, stored.count_authorities());
        Ok(())
    }

    /// Loads the membership. `None` if this node is in no cluster.
    pub fn load(dir: &Path) -> Result<Option<Self>, MemberError> {
        let path = dir.join(FILE);
        let io = |error| MemberError::Io { path: path.clone(), error };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io(error)),
        };
        let text = io::read_to_string(io::Read::take(file, FILE_LEN_MAX)).map_err(io)?;
        let read = serde_json::from_str(&text);
        read.map(Some).map_err(|error| MemberError::Damaged { path: path.clone(), error })
    }

    /// Saves it atomically: the old or the new file exists, whatever happens, and only its owner
    /// reads it.
    pub fn save(&self, dir: &Path) -> Result<(), MemberError> {
        let path = dir.join(FILE);
        let draft = dir.join(format!("{FILE}.new"));
        let save = || -> io::Result<()> {
            fs::create_dir_all(dir)?;
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&draft, &path)?;
            File::open(dir)?.sync_all()
        };
        save().map_err(|error| MemberError::Io { path: path.clone(), error })
    }

    /// Takes over the newest CA's key for images. Those of former CAs count while these are
    /// trusted.
    fn take_image_key(&mut self, keys: &MemberSecrets, authorities: usize) {
        let newest = keys.image_key();
        self.image_keys.retain(|key| *key != newest);
        self.image_keys.insert(0, newest);
        self.image_keys.truncate(authorities);
    }

    /// Forgets the membership: from now on this node is in no cluster.
    pub fn forget(dir: &Path) -> Result<(), MemberError> {
        let path = dir.join(FILE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(MemberError::Io { path, error }),
            _ => Ok(()),
        }
    }
}

/// Returns the keys of records as this node uses them. It signs with its former key while that
/// counts and others may not know the newest.
fn signing_keys(keys: &RecordKeys, own: &RecordKeys, is_renewed: bool) -> RecordKeys {
    let all = || std::iter::once(keys.current).chain(keys.older.iter().copied());
    let is_kept = !is_renewed && all().any(|key| key == own.current);
    let current = if is_kept { own.current } else { keys.current };
    RecordKeys { current, older: all().filter(|key| *key != current).collect() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn founded() -> (ClusterMember, StoredKeys, MemberSecrets) {
        let node = NodeName::new("a").unwrap();
        let identity = WrapIdentity::generate();
        let id = "0".repeat(32);
        let opener = KeyOpener { cluster: "main", node: &node, id: &id, identity: &identity };
        let (stored, keys) = StoredKeys::create_first(&opener).unwrap();
        let member = ClusterMember {
            cluster: "main".into(),
            etcd: EtcdAccess { endpoints: vec!["http://127.0.0.1:2379".into()], ..EtcdAccess::default() },
            known: stored.remember(&keys).unwrap(),
            records: keys.records.clone(),
            authorities: stored.authorities.clone(),
            probe_key: keys.probe.clone(),
            probe_keys_also: Vec::new(),
            image_keys: vec![keys.image_key()],
            credentials: stored.issue("main", &keys, &node).unwrap(),
            node,
            id,
            identity,
        };
        (member, stored, keys)
    }

    fn member() -> ClusterMember {
        founded().0
    }

    #[test]
    fn probes_and_images_of_both_keys_count_during_an_exchange() {
        let (mut member, first, keys) = founded();
        let old = keys.probe.clone();
        let (second, next) = first
            .exchange("main", &keys, crate::supervisor::cluster::pki::KeyOverlap::UntilRenewed, |_, _| true)
            .unwrap();
        member.take_over(&second, &next, false).unwrap();
        assert_eq!((&member.probe_key, &member.probe_keys_also), (&old, &vec![next.probe.clone()]));
        assert_eq!((member.known.serial, member.credentials.serial), (2, 1));
        assert_eq!(member.records.current, keys.records.current, "others may not know the newest yet");
        assert_eq!(member.records.older, [next.records.current]);
        assert!(member.image_keys == [next.image_key(), keys.image_key()]);
        member.take_over(&second, &next, true).unwrap();
        assert_eq!((&member.probe_key, &member.probe_keys_also), (&next.probe, &vec![old]));
        assert_eq!(member.records, next.records);
        assert_eq!(member.image_keys.len(), 2);
        let alone = second.forget_old("main", &next).unwrap();
        let keys = alone.open(&member.opener(), &member.known).unwrap();
        assert_eq!(member.records.older.len(), 1, "records of before are signed anew first");
        member.take_over(&alone, &keys, false).unwrap();
        assert_eq!((&member.probe_key, member.probe_keys_also.len()), (&next.probe, 0));
        assert!(member.image_keys == [next.image_key()]);
    }

    #[test]
    fn a_members_file_stays_until_forgotten_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("cluster");
        assert!(ClusterMember::load(&dir).unwrap().is_none());
        member().save(&dir).unwrap();
        member().save(&dir).unwrap();
        assert_eq!(ClusterMember::load(&dir).unwrap().unwrap().node.as_str(), "a");
        let mode = fs::metadata(dir.join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        ClusterMember::forget(&dir).unwrap();
        ClusterMember::forget(&dir).unwrap();
        assert!(ClusterMember::load(&dir).unwrap().is_none());
    }

    #[test]
    fn a_damaged_file_is_named_and_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{}").unwrap();
        let error = ClusterMember::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("member.json"), "{error}");
        assert_eq!(fs::read_to_string(dir.path().join(FILE)).unwrap(), "{}");
    }
}

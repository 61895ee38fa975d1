//! What makes this machine a member of a cluster, in one file beneath `state_dir`: which store, which name, which keys.
//!
//! Not here: what the store holds (`nagaya_cmdb`), how the keys are made (`pki`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nagaya_cmdb::NodeName;
use nagaya_cmdb::store::etcd::{RecordKeys, RecordSigning};
use nagaya_keeper::image::ClusterKey;
use serde::{Deserialize, Serialize};

use super::pki::{Credentials, Keys};

const FILE: &str = "member.json";

/// Longest file that is read, bytes: certificates and keys of a few kilobytes.
const FILE_LEN_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: it is not what nagaya wrote: {error}; restore a copy, or move it away and join the cluster again", path.display())]
    Damaged { path: PathBuf, error: serde_json::Error },
}

/// Where the cluster's records are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Etcd {
    /// `http://` or `https://`, address and port.
    pub endpoints: Vec<String>,
    /// PEM: who signed etcd's certificate. None: it is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// PEM: what this node shows etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// It may be reached in clear text, or without a login: the operator said so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// This node as a member.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub cluster: String,
    pub node: NodeName,
    /// As in its record.
    pub id: String,
    pub etcd: Etcd,
    /// The join token.
    pub token: String,
    /// As the store held them last, so that it can start while the store is down.
    pub authorities: String,
    pub probe_key: String,
    /// Of images, the newest first. Empty: this version has not seen the authority yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_keys: Vec<ClusterKey>,
    pub credentials: Credentials,
    /// What signs the cluster's records. `None`: they are not signed yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<RecordKeys>,
    /// No record counts that is not signed. Once it is so it stays so, whatever the store says.
    #[serde(default)]
    pub records_required: bool,
}

impl Member {
    /// How the store's values are read and written.
    pub fn signing(&self) -> RecordSigning {
        match (&self.records, self.records_required) {
            (None, _) => RecordSigning::Unsigned,
            (Some(keys), false) => RecordSigning::Optional(keys.clone()),
            (Some(keys), true) => RecordSigning::Required(keys.clone()),
        }
    }

    /// None: this node is in no cluster.
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

    /// The old file or the new one is there, whatever happens, and only its owner reads it.
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

    /// Takes the newest authority's key for images over. `keeps_old`: that of the authority before counts, too, as long as that one
    /// is believed.
    pub fn take_image_key(&mut self, keys: &Keys, keeps_old: bool) {
        let newest = keys.image_key();
        self.image_keys.retain(|key| *key != newest);
        self.image_keys.insert(0, newest);
        self.image_keys.truncate(if keeps_old { 2 } else { 1 });
    }

    /// From now on it is in no cluster.
    pub fn forget(dir: &Path) -> Result<(), MemberError> {
        let path = dir.join(FILE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(MemberError::Io { path, error }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn member() -> Member {
        Member {
            cluster: "main".into(),
            node: NodeName::new("a").unwrap(),
            id: "0".repeat(32),
            etcd: Etcd { endpoints: vec!["http://127.0.0.1:2379".into()], ..Etcd::default() },
            token: "nagaya-x".into(),
            authorities: String::new(),
            probe_key: String::new(),
            image_keys: Vec::new(),
            credentials: Credentials {
                certificate: String::new(),
                key: String::new(),
                serial: 1,
                renew_at: 0,
            },
            records: None,
            records_required: false,
        }
    }

    #[test]
    fn file_of_an_older_version_is_read_and_signs_nothing() {
        let mut old = serde_json::to_value(member()).unwrap();
        assert!(old.as_object_mut().unwrap().remove("records_required").is_some());
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), old.to_string()).unwrap();
        let read = Member::load(dir.path()).unwrap().unwrap();
        assert_eq!(read.signing(), RecordSigning::Unsigned);
        let keys = RecordKeys::from_hex(1, &"ab".repeat(32)).unwrap();
        let upgraded = Member { records: Some(keys.clone()), records_required: true, ..read };
        upgraded.save(dir.path()).unwrap();
        let read = Member::load(dir.path()).unwrap().unwrap();
        assert_eq!(read.signing(), RecordSigning::Required(keys));
    }

    #[test]
    fn a_member_stays_one_until_it_is_forgotten_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("cluster");
        assert!(Member::load(&dir).unwrap().is_none());
        member().save(&dir).unwrap();
        member().save(&dir).unwrap();
        assert_eq!(Member::load(&dir).unwrap().unwrap().node.as_str(), "a");
        let mode = fs::metadata(dir.join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        Member::forget(&dir).unwrap();
        Member::forget(&dir).unwrap();
        assert!(Member::load(&dir).unwrap().is_none());
    }

    #[test]
    fn a_damaged_file_is_named_and_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{}").unwrap();
        let error = Member::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("member.json"), "{error}");
        assert_eq!(fs::read_to_string(dir.path().join(FILE)).unwrap(), "{}");
    }
}

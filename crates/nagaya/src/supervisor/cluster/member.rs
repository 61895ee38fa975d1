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

use super::pki::{Credentials, Identity, Keys, Known, Opener, PkiError, Stored};

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

/// The port at which etcd takes clients where an endpoint names none (`--listen-client-urls`).
const ETCD_PORT: u16 = 2379;

impl Etcd {
    /// `host:port` of each endpoint. One that is no address of the web is passed over: etcd is not reached by it either.
    pub fn places(&self) -> Vec<String> {
        let place = |endpoint: &String| {
            let uri: http::Uri = endpoint.parse().ok()?;
            Some(format!("{}:{}", uri.host()?, uri.port_u16().unwrap_or(ETCD_PORT)))
        };
        self.endpoints.iter().filter_map(place).collect()
    }
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
    /// Opens the members' keys in the store, as long as this node is one of them.
    pub identity: Identity,
    /// The newest generation of these keys that it has taken over.
    pub known: Known,
    /// As the store held them last, so that it can start while the store is down.
    pub authorities: String,
    /// Signs its probes.
    pub probe_key: String,
    /// Those of others that count, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probe_keys_also: Vec<String>,
    /// Of images, the newest first.
    pub image_keys: Vec<ClusterKey>,
    pub credentials: Credentials,
    /// Sign the cluster's records; none counts that is not signed.
    pub records: RecordKeys,
}

impl Etcd {
    /// What is not said here is as in `other`, but for what each operator has to say. A certificate and its key go together.
    pub fn or(self, other: Self) -> Self {
        let has_identity = self.certificate.is_some();
        Self {
            endpoints: if self.endpoints.is_empty() { other.endpoints } else { self.endpoints },
            ca: self.ca.or(other.ca),
            certificate: if has_identity { self.certificate } else { other.certificate },
            key: if has_identity { self.key } else { other.key },
            user: self.user.or(other.user),
            password: self.password.or(other.password),
            insecure: self.insecure,
        }
    }
}

impl Member {
    pub fn opener(&self) -> Opener<'_> {
        Opener { cluster: &self.cluster, node: &self.node, id: &self.id, identity: &self.identity }
    }

    /// How the store's values are read and written.
    pub fn signing(&self) -> RecordSigning {
        RecordSigning::Required(self.records.clone())
    }

    /// Takes over what the store holds of the members' keys. `is_renewed`: with a certificate of the newest authority.
    pub fn take_over(&mut self, stored: &Stored, keys: &Keys, is_renewed: bool) -> Result<(), PkiError> {
        if is_renewed {
            self.credentials = stored.issue(&self.cluster, keys, &self.node)?;
            self.probe_key.clone_from(&keys.probe);
        }
        self.known = stored.known(keys)?;
        self.records = signing_keys(&keys.records, &self.records, is_renewed);
        self.authorities.clone_from(&stored.authorities);
        let all = keys.probes_before.iter().chain([&keys.probe]);
        self.probe_keys_also = all.filter(|key| **key != self.probe_key).cloned().collect();
        self.take_image_key(keys, stored.count_authorities());
        Ok(())
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

    /// Takes the newest authority's key for images over. Those of the authorities before count as long as these are believed.
    fn take_image_key(&mut self, keys: &Keys, authorities: usize) {
        let newest = keys.image_key();
        self.image_keys.retain(|key| *key != newest);
        self.image_keys.insert(0, newest);
        self.image_keys.truncate(authorities);
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

/// The keys of records as this node uses them. It signs with the key that it had, as long as that counts and others may not know the newest.
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

    fn founded() -> (Member, Stored, Keys) {
        let (node, identity) = (NodeName::new("a").unwrap(), Identity::generate());
        let id = "0".repeat(32);
        let opener = Opener { cluster: "main", node: &node, id: &id, identity: &identity };
        let (stored, keys) = Stored::found(&opener).unwrap();
        let member = Member {
            cluster: "main".into(),
            etcd: Etcd { endpoints: vec!["http://127.0.0.1:2379".into()], ..Etcd::default() },
            known: stored.known(&keys).unwrap(),
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

    fn member() -> Member {
        founded().0
    }

    #[test]
    fn places_of_etcd_are_hosts_and_ports() {
        let endpoints =
            ["http://10.0.0.9:2379", "https://e1.internal", "https://[2001:db8::1]:4001/", "no place"];
        let etcd = Etcd { endpoints: endpoints.map(String::from).to_vec(), ..Etcd::default() };
        assert_eq!(etcd.places(), ["10.0.0.9:2379", "e1.internal:2379", "[2001:db8::1]:4001"]);
    }

    #[test]
    fn probes_and_images_of_both_keys_count_until_the_exchange_is_over() {
        let (mut member, first, keys) = founded();
        let old = keys.probe.clone();
        let (second, next) = first
            .exchange("main", &keys, crate::supervisor::cluster::pki::Overlap::UntilRenewed, |_, _| true)
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
    fn what_is_said_at_a_join_goes_before_the_token() {
        let one = |word: &str| Some(word.to_owned());
        let token = Etcd {
            endpoints: vec!["https://e1:2379".into()],
            ca: one("ca"),
            certificate: one("c"),
            key: one("k"),
            ..Etcd::default()
        };
        assert_eq!(Etcd::default().or(token.clone()), token);
        let own = Etcd { certificate: one("own"), key: one("own key"), user: one("u"), ..Etcd::default() };
        let both = own.clone().or(token.clone());
        assert_eq!((both.certificate, both.key, both.ca), (own.certificate, own.key, token.ca));
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

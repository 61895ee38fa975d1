//! `nagaya cluster etcd-certs`: certificates for etcd's members and for the nodes that use it, in
//! files.
//!
//! There are two CAs: one for clients and members, the other for the members among themselves. So
//! no node can pass for a member of etcd. Existing files stay as they are. Not here: certificates
//! between nodes (`supervisor::cluster`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nagaya_records::NodeName;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason,
    RevokedCertParams, SerialNumber,
};
use serde::{Deserialize, Serialize};

use super::output::{self, CliError};
use crate::supervisor::hold_certificate;

/// Lifetime of these certificates. Nothing renews them; `--revoke` revokes one.
const AGE_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Bytes of a serial number, which is random (RFC 5280, 4.1.2.2: at most 20).
const SERIAL_LEN: usize = 16;

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// Directory of the files on a member's machine, in the printed options.
const INSTALLED: &str = "/etc/etcd";

const CA: &str = "ca";
const PEER_CA: &str = "peer-ca";
const REVOKED: &str = "crl.pem";
const ISSUED: &str = "issued.json";

#[derive(Debug, clap::Args)]
pub struct EtcdCerts {
    /// Directory of the files. It contains the keys of the certificate authorities. Keep it where
    /// only you can read it, best not on a node
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Member of etcd and its addresses: NAME=ADDRESS or NAME=ADDRESS,ADDRESS. Others use the first
    /// address
    #[arg(long = "member", value_name = "NAME=ADDRESS", value_parser = member)]
    pub members: Vec<EtcdHost>,
    /// Node that uses etcd
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Revoke all certificates that were made for a node so far
    #[arg(long, value_name = "NODE")]
    pub revoke: Vec<String>,
}

/// A member of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdHost {
    name: NodeName,
    addresses: Vec<String>,
}

/// Issued certificates, by serial numbers in hexadecimal digits.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IssuedCertificate {
    nodes: BTreeMap<String, Vec<String>>,
    revoked: Vec<String>,
    /// Number of the latest list of revoked certificates.
    list: u64,
}

fn member(text: &str) -> Result<EtcdHost, String> {
    let (name, addresses) = text.split_once('=').ok_or("write NAME=ADDRESS")?;
    let addresses: Vec<String> = addresses.split(',').map(|address| address.trim().to_owned()).collect();
    if addresses.iter().any(|address| address.is_empty() || address.contains(['/', ' '])) {
        return Err("an address is an IP address or a host name, without a port".into());
    }
    Ok(EtcdHost { name: NodeName::new(name).map_err(|error| error.to_string())?, addresses })
}

pub fn run(words: &EtcdCerts) -> Result<(), CliError> {
    let nodes: Vec<NodeName> = words.nodes.iter().map(|name| named(name)).collect::<Result<_, _>>()?;
    let desk = CertificateIssuer::open(&words.dir)?;
    let ca = desk.authority(CA)?;
    let peer_ca = desk.authority(PEER_CA)?;
    for member in &words.members {
        let local = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let addresses: Vec<String> = member.addresses.iter().cloned().chain(local).collect();
        desk.certify(&ca, &format!("member-{}", member.name), addresses)?;
        desk.certify(&peer_ca, &format!("member-{}-peer", member.name), member.addresses.clone())?;
    }
    let mut issued = desk.issued()?;
    for node in &nodes {
        if let Some(serial) = desk.certify(&ca, &format!("node-{node}"), vec![node.to_string()])? {
            issued.nodes.entry(node.to_string()).or_default().push(serial);
        }
    }
    for node in &words.revoke {
        let serials = issued.nodes.remove(node);
        let none = || {
            CliError::Usage(format!("no certificate for node '{node}' was made in {}", words.dir.display()))
        };
        issued.revoked.extend(serials.ok_or_else(none)?);
        desk.forget(&format!("node-{node}"))?;
    }
    desk.write_list(&ca, &mut issued)?;
    output::print(&told(words, &nodes))
}

fn named(name: &str) -> Result<NodeName, CliError> {
    NodeName::new(name).map_err(|error| CliError::Usage(format!("--node: {error}")))
}

/// The directory of all these files.
struct CertificateIssuer<'a> {
    dir: &'a Path,
}

struct CaKey {
    issuer: Issuer<'static, KeyPair>,
}

impl<'a> CertificateIssuer<'a> {
    fn open(dir: &'a Path) -> Result<Self, CliError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| CliError::Io { path: dir.into(), error })?;
        Ok(Self { dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the CA of this name, which is made if it does not exist.
    fn authority(&self, name: &str) -> Result<CaKey, CliError> {
        let mut params = CertificateParams::new(Vec::new()).map_err(made)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("nagaya etcd {name}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        hold_certificate(&mut params, AGE_MAX);
        let key_path = self.path(&format!("{name}.key"));
        let path = self.path(&format!("{name}.pem"));
        let key = match fs::read_to_string(&key_path) {
            Ok(pem) => KeyPair::from_pem(&pem).map_err(made)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = KeyPair::generate().map_err(made)?;
                write_new(&path, params.self_signed(&key).map_err(made)?.pem().as_bytes(), 0o644)?;
                write_new(&key_path, key.serialize_pem().as_bytes(), 0o600)?;
                key
            }
            Err(error) => return Err(CliError::Io { path: key_path, error }),
        };
        Ok(CaKey { issuer: Issuer::new(params, key) })
    }

    /// Makes a certificate and its key. Returns the serial number in hexadecimal digits. `None` if
    /// there is one of this name.
    fn certify(&self, by: &CaKey, name: &str, names: Vec<String>) -> Result<Option<String>, CliError> {
        let path = self.path(&format!("{name}.pem"));
        let key_path = self.path(&format!("{name}.key"));
        if path.exists() && key_path.exists() {
            return Ok(None);
        }
        let key = KeyPair::generate().map_err(made)?;
        let mut params = CertificateParams::new(names).map_err(made)?;
        // etcd takes a common name for that of a user.
        params.distinguished_name = DistinguishedName::new();
        let mut serial = [0; SERIAL_LEN];
        getrandom::fill(&mut serial).map_err(|error| CliError::Usage(format!("no random bytes: {error}")))?;
        // Positive, and without a leading zero (RFC 5280, 4.1.2.2).
        serial[0] = serial[0] & 0x7f | 0x40;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        // etcd's gateway shows the member's certificate to the member itself.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        hold_certificate(&mut params, AGE_MAX);
        let certificate = params.signed_by(&key, &by.issuer).map_err(made)?;
        write_new(&key_path, key.serialize_pem().as_bytes(), 0o600)?;
        write_new(&path, certificate.pem().as_bytes(), 0o644)?;
        Ok(Some(data_encoding::HEXLOWER.encode(&serial)))
    }

    fn forget(&self, name: &str) -> Result<(), CliError> {
        for end in ["pem", "key"] {
            let path = self.path(&format!("{name}.{end}"));
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(CliError::Io { path, error });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn issued(&self) -> Result<IssuedCertificate, CliError> {
        let path = self.path(ISSUED);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| CliError::Usage(format!("{}: {error}", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(IssuedCertificate::default()),
            Err(error) => Err(CliError::Io { path, error }),
        }
    }

    /// Writes the list of revoked certificates, and the issued ones.
    fn write_list(&self, ca: &CaKey, issued: &mut IssuedCertificate) -> Result<(), CliError> {
        issued.list += 1;
        let mut times = CertificateParams::default();
        hold_certificate(&mut times, AGE_MAX);
        let revoked = |serial: &String| {
            let serial = data_encoding::HEXLOWER.decode(serial.as_bytes()).unwrap_or_default();
            RevokedCertParams {
                serial_number: SerialNumber::from_slice(&serial),
                revocation_time: times.not_before,
                reason_code: Some(RevocationReason::KeyCompromise),
                invalidity_date: None,
            }
        };
        let list = CertificateRevocationListParams {
            this_update: times.not_before,
            next_update: times.not_after,
            crl_number: SerialNumber::from(issued.list),
            issuing_distribution_point: None,
            revoked_certs: issued.revoked.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&ca.issuer).map_err(made)?.pem().map_err(made)?;
        self.replace(REVOKED, list.as_bytes(), 0o644)?;
        let text = serde_json::to_vec_pretty(issued).expect("it has text keys, and writing to memory works");
        self.replace(ISSUED, &text, 0o600)
    }

    /// Replaces a file atomically: the old or the new one exists, whatever happens.
    fn replace(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), CliError> {
        let draft = self.path(&format!("{name}.new"));
        let path = self.path(name);
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&draft)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&draft, &path)
        };
        write().map_err(|error| CliError::Io { path: path.clone(), error })
    }
}

fn made(error: rcgen::Error) -> CliError {
    CliError::Usage(format!("a key or certificate cannot be made: {error}"))
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<(), CliError> {
    let write = || {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(mode).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| CliError::Io { path: path.into(), error })
}

/// Returns the instructions for the files.
fn told(words: &EtcdCerts, nodes: &[NodeName]) -> String {
    let dir = words.dir.display();
    let mut text =
        format!("the files are in {dir}; keep {CA}.key and {PEER_CA}.key there, and give them to nobody\n");
    for member in &words.members {
        let name = &member.name;
        let files =
            [&format!("{CA}.pem"), REVOKED, &format!("{PEER_CA}.pem"), &format!("member-{name}*")].join(", ");
        let _ = write!(
            text,
            "\nmember {name} of etcd: {files} belong into {INSTALLED} of {}, owned by etcd's user; /etc/default/etcd:\n{}",
            member.addresses[0],
            options(member, &words.members)
        );
    }
    if !words.revoke.is_empty() {
        let _ = write!(
            text,
            "\nrevoked certificates: copy {REVOKED} to {INSTALLED} of each member, and restart each member to end open connections\n"
        );
    }
    for node in nodes {
        let _ = write!(
            text,
            "\nnode {node}: --etcd-ca {dir}/{CA}.pem --etcd-cert {dir}/node-{node}.pem --etcd-key {dir}/node-{node}.key at `nagaya cluster init`,\n  or `nagaya cluster token --etcd-cert {dir}/node-{node}.pem --etcd-key {dir}/node-{node}.key` on a member, and `nagaya cluster join` on the node\n"
        );
    }
    text.trim_end().to_owned()
}

/// Returns a member's options as variables, which etcd accepts like flags.
fn options(member: &EtcdHost, all: &[EtcdHost]) -> String {
    let name = &member.name;
    let address = url_host(&member.addresses[0]);
    let peer =
        |member: &EtcdHost| format!("{}=https://{}:{PEER_PORT}", member.name, url_host(&member.addresses[0]));
    let cluster: Vec<_> = all.iter().map(peer).collect();
    let client = format!("https://{address}:{CLIENT_PORT}");
    let peer = format!("https://{address}:{PEER_PORT}");
    let file = |name: String| format!("{INSTALLED}/{name}");
    let rows = [
        ("NAME", name.to_string()),
        ("LISTEN_CLIENT_URLS", client.clone()),
        ("ADVERTISE_CLIENT_URLS", client),
        ("CLIENT_CERT_AUTH", "true".into()),
        ("TRUSTED_CA_FILE", file(format!("{CA}.pem"))),
        ("CLIENT_CRL_FILE", file(REVOKED.into())),
        ("CERT_FILE", file(format!("member-{name}.pem"))),
        ("KEY_FILE", file(format!("member-{name}.key"))),
        ("LISTEN_PEER_URLS", peer.clone()),
        ("INITIAL_ADVERTISE_PEER_URLS", peer),
        ("PEER_CLIENT_CERT_AUTH", "true".into()),
        ("PEER_TRUSTED_CA_FILE", file(format!("{PEER_CA}.pem"))),
        ("PEER_CERT_FILE", file(format!("member-{name}-peer.pem"))),
        ("PEER_KEY_FILE", file(format!("member-{name}-peer.key"))),
        ("INITIAL_CLUSTER", cluster.join(",")),
        ("INITIAL_CLUSTER_STATE", "new".into()),
    ];
    rows.iter().map(|(key, value)| format!("  ETCD_{key}={value}\n")).collect()
}

/// Returns a host for a URL: an IPv6 address has brackets around it.
fn url_host(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.into() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn words(dir: &Path, nodes: &[&str], revoke: &[&str]) -> EtcdCerts {
        EtcdCerts {
            dir: dir.join("pki"),
            members: vec![member("e1=10.0.0.9,etcd.test").unwrap(), member("e2=fd00::2").unwrap()],
            nodes: nodes.iter().map(|name| (*name).to_owned()).collect(),
            revoke: revoke.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    #[test]
    fn members_are_read() {
        let both = member("e1=10.0.0.9,etcd.test").unwrap();
        assert_eq!((both.name.as_str(), both.addresses.len()), ("e1", 2));
        for wrong in ["e1", "e1=", "=10.0.0.9", "e1=https://10.0.0.9", "E 1=10.0.0.9"] {
            assert!(member(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_stay_and_only_their_owner_reads_keys() {
        let dir = tempfile::tempdir().unwrap();
        run(&words(dir.path(), &["a"], &[])).unwrap();
        let pki = dir.path().join("pki");
        let read = |name: &str| fs::read(pki.join(name)).unwrap();
        let before: Vec<_> = ["ca.pem", "peer-ca.key", "member-e1.pem", "node-a.pem"].map(read).to_vec();
        run(&words(dir.path(), &["a", "b"], &[])).unwrap();
        assert_eq!(["ca.pem", "peer-ca.key", "member-e1.pem", "node-a.pem"].map(read).to_vec(), before);
        for name in ["ca.key", "peer-ca.key", "member-e1.key", "member-e2-peer.key", "node-b.key"] {
            let mode = fs::metadata(pki.join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{name}");
        }
    }

    #[test]
    fn revoked_certificate_is_listed_and_can_be_issued_anew() {
        let dir = tempfile::tempdir().unwrap();
        run(&words(dir.path(), &["a", "b"], &[])).unwrap();
        let pki = dir.path().join("pki");
        let empty = fs::read(pki.join(REVOKED)).unwrap();
        run(&words(dir.path(), &[], &["b"])).unwrap();
        let issued: IssuedCertificate = serde_json::from_slice(&fs::read(pki.join(ISSUED)).unwrap()).unwrap();
        assert_eq!((issued.revoked.len(), issued.nodes.len()), (1, 1));
        assert!(fs::read(pki.join(REVOKED)).unwrap().len() > empty.len());
        assert!(!pki.join("node-b.pem").exists() && pki.join("node-a.pem").exists());
        assert!(run(&words(dir.path(), &[], &["nobody"])).is_err());
        run(&words(dir.path(), &["b"], &[])).unwrap();
        assert!(pki.join("node-b.pem").exists());
    }

    #[test]
    fn options_name_each_member_and_its_files() {
        let words = words(Path::new("/tmp"), &["a"], &[]);
        let told = told(&words, &[NodeName::new("a").unwrap()]);
        for wanted in [
            "ETCD_INITIAL_CLUSTER=e1=https://10.0.0.9:2380,e2=https://[fd00::2]:2380\n",
            "ETCD_LISTEN_CLIENT_URLS=https://[fd00::2]:2379\n",
            "ETCD_PEER_CERT_FILE=/etc/etcd/member-e1-peer.pem\n",
            "ETCD_CLIENT_CRL_FILE=/etc/etcd/crl.pem\n",
            "--etcd-cert /tmp/pki/node-a.pem",
        ] {
            assert!(told.contains(wanted), "{wanted} is missing in\n{told}");
        }
    }
}

//! Expiry of the certificates that the node shows to clients.
//!
//! Their files belong to the operator. Only public parts are kept in memory here. Not here: showing
//! them (`nagaya_edge`), opening them for that (`nagaya_keeper`), repeated warnings
//! (`supervisor::certificates`).

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::UNIX_EPOCH;

use nagaya_base::{Clock as _, SystemClock};
use serde::Serialize;
use x509_parser::pem::Pem;

/// Files of one directory that are read. The others are only counted.
const FILES_MAX: usize = 20_000;

/// Largest file that is read, bytes. Handshakes take no larger one.
const FILE_BYTES_MAX: u64 = 256 << 10;

const DAY: i64 = 24 * 60 * 60;

/// How near the end of a certificate is, in order of urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostNearness {
    Far,
    /// 30 days or less.
    Month,
    /// 7 days or less.
    Week,
    /// 24 hours or less.
    Day,
    Over,
}

impl HostNearness {
    fn of(ends: i64, now: i64) -> Self {
        match ends - now {
            ..=0 => Self::Over,
            left if left <= DAY => Self::Day,
            left if left <= 7 * DAY => Self::Week,
            left if left <= 30 * DAY => Self::Month,
            _ => Self::Far,
        }
    }
}

/// One certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TlsCertificate {
    /// Its file's name without `.pem`.
    pub name: String,
    /// Unix time of its end, seconds (RFC 5280 section 4.1.2.5).
    pub ends: i64,
    pub nearness: HostNearness,
}

impl TlsCertificate {
    /// Returns a text for people: `shop.example.org ends in 3 days`.
    pub fn describe(&self, now: i64) -> String {
        let Self { name, ends, .. } = self;
        match ends - now {
            over @ ..=0 => format!("{name} ended {} days ago", -over / DAY),
            left if left <= DAY => format!("{name} ends within a day"),
            left => format!("{name} ends in {} days", left / DAY),
        }
    }
}

/// Contents of a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateScan {
    /// The one that ends first comes first.
    pub certificates: Vec<TlsCertificate>,
    /// Files that are not certificates, and why.
    pub broken: Vec<String>,
    /// Files beyond `FILES_MAX`.
    pub left_out: usize,
}

impl CertificateScan {
    /// Returns those that end within 30 days, or have ended.
    pub fn ending(&self) -> impl Iterator<Item = &TlsCertificate> {
        self.certificates.iter().take_while(|one| one.nearness > HostNearness::Far)
    }
}

/// Returns the present time, as certificates count it.
pub fn unix_now() -> i64 {
    let wall = SystemClock.wall().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(wall.as_secs()).unwrap_or(i64::MAX)
}

/// Reads each `NAME.pem` of the directory. Blocks.
///
/// # Errors
/// Fails if the directory cannot be read.
pub fn scan_directory(dir: &Path, now: i64) -> io::Result<CertificateScan> {
    let mut found = CertificateScan::default();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".pem")) else {
            continue;
        };
        if found.certificates.len() + found.broken.len() >= FILES_MAX {
            found.left_out += 1;
            continue;
        }
        match read(&path) {
            Ok(ends) => {
                let nearness = HostNearness::of(ends, now);
                found.certificates.push(TlsCertificate { name: name.to_owned(), ends, nearness });
            }
            Err(why) => found.broken.push(format!("{}: {why}", path.display())),
        }
    }
    found.certificates.sort_by(|one, other| (one.ends, &one.name).cmp(&(other.ends, &other.name)));
    found.broken.sort();
    Ok(found)
}

/// Returns when the first certificate of the file ends: the site's own, before its issuers.
fn read(path: &Path) -> Result<i64, String> {
    let told = |error: io::Error| error.to_string();
    // A pipe or a device in the directory by mistake must not block the rest.
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = File::options().read(true).custom_flags(nonblocking).open(path).map_err(told)?;
    if !file.metadata().map_err(told)?.is_file() {
        return Err("it is no regular file".into());
    }
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(told)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it is larger than {FILE_BYTES_MAX} bytes"));
    }
    for pem in Pem::iter_from_buffer(&text) {
        let pem = pem.map_err(|error| format!("it is not PEM: {error}"))?;
        if pem.label == "CERTIFICATE" {
            let certificate = pem.parse_x509().map_err(|error| format!("its certificate: {error}"))?;
            return Ok(certificate.validity().not_after.timestamp());
        }
    }
    Err("it has no CERTIFICATE section".into())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn write(dir: &Path, name: &str, ends: i64) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        params.not_after = epoch + std::time::Duration::from_secs(ends.try_into().unwrap());
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        // As tools write it: some put the key first.
        let text = key.serialize_pem() + &certificate.pem();
        fs::write(dir.join(format!("{name}.pem")), text).unwrap();
    }

    #[test]
    fn ends_are_read_and_the_nearest_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let ends = [
            ("far", NOW + 31 * DAY, HostNearness::Far, "far ends in 31 days"),
            ("month", NOW + 30 * DAY, HostNearness::Month, "month ends in 30 days"),
            ("week", NOW + 7 * DAY, HostNearness::Week, "week ends in 7 days"),
            ("day", NOW + DAY, HostNearness::Day, "day ends within a day"),
            ("over", NOW - 3 * DAY, HostNearness::Over, "over ended 3 days ago"),
        ];
        ends.iter().for_each(|(name, ends, ..)| write(dir.path(), name, *ends));
        fs::write(dir.path().join("notes.txt"), "no certificate").unwrap();
        let found = scan_directory(dir.path(), NOW).unwrap();
        assert_eq!((&found.broken, found.left_out), (&Vec::new(), 0));
        for (one, (name, ends, nearness, text)) in found.certificates.iter().rev().zip(ends) {
            assert_eq!(*one, TlsCertificate { name: name.into(), ends, nearness });
            assert_eq!(one.describe(NOW), text);
        }
        assert_eq!(found.ending().count(), 4);
    }

    #[test]
    fn broken_certificate_is_reported_and_holds_up_nothing() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "good", NOW + 90 * DAY);
        let path = |name: &str| dir.path().join(name);
        fs::write(path("empty.pem"), "").unwrap();
        fs::write(path("garbage.pem"), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
            .unwrap();
        fs::write(path("large.pem"), vec![b'x'; 300 << 10]).unwrap();
        fs::create_dir(path("directory.pem")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("pipe.pem"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let found = scan_directory(dir.path(), NOW).unwrap();
        assert_eq!(found.certificates.len(), 1);
        assert_eq!(found.broken.len(), 5, "{:?}", found.broken);
        assert!(scan_directory(&path("nowhere"), NOW).is_err());
    }
}

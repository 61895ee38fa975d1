//! Caches the certificates in use, each at most a second old.
//!
//! A file is requested again at most once a second, and only for a handshake. It is read again
//! only if it is another file than before. So a replaced certificate is live within a second, and
//! 100,000 certificates cost nothing until they are used.
//!
//! Not here: which names are tried for a client (`tls`), the content of a file (`certificate`).

use std::cell::RefCell;
use std::fmt;
use std::fmt::Display;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use lru::LruCache;
use nagaya_base::Code;
use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::http::tls::TlsShared;
use crate::http::tls::certificate::{CertificateFlaw, ServerCertificate};
use crate::metrics::{CertificateLookup, EdgeMetrics};

/// Maximum number of certificates in memory, per thread. One takes about 10 KiB (chain, parsed
/// key, configuration), so 10 MiB in all. A dropped one costs a question to the keeper and some
/// 100 us at its next handshake.
const CERTIFICATES_MAX: usize = 1024;

/// Maximum number of names known to have no certificate, per thread, 100 bytes each. Kept apart,
/// so that a client with invented names cannot push certificates out.
const ABSENT_MAX: usize = 4096;

/// Time for which a file, or its absence, is not checked again.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// Interval at which a failing source is reported.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

const CODE_BROKEN: Code = Code(430);
const CODE_SOURCE: Code = Code(431);

/// Source of certificate files: the keeper, which alone may read private keys.
pub trait CertificateSource {
    type Error: Display;

    /// Returns the file for a name, open for reading from its beginning. `name` is a host name,
    /// `_wildcard.` and a host name, or `default`. `None` if there is no file.
    fn open(&self, name: &str) -> impl Future<Output = Result<Option<OwnedFd>, Self::Error>>;
}

impl CertificateSource for Rc<KeeperClient> {
    type Error = KeeperCallError;

    async fn open(&self, name: &str) -> Result<Option<OwnedFd>, KeeperCallError> {
        self.open_certificate(name).await
    }
}

/// Result for one name.
#[derive(Debug, Clone)]
pub(super) enum FoundCertificate {
    Certificate(Rc<ServerCertificate>),
    Absent,
    /// There is a file, and it is unusable or not available.
    Broken,
}

/// Identifies one state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CertificateStamp {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug)]
struct CertificateEntry {
    /// The newest usable state of the file.
    certificate: Option<Rc<ServerCertificate>>,
    /// The state that was read last, usable or not.
    stamp: CertificateStamp,
    checked: Instant,
}

pub(super) struct CertificateStore<S> {
    source: S,
    shared: &'static TlsShared,
    metrics: Arc<EdgeMetrics>,
    entries: RefCell<LruCache<Box<str>, CertificateEntry>>,
    absent: RefCell<LruCache<Box<str>, Instant>>,
    /// Names that are being requested. The number of running handshakes limits it.
    asking: RefCell<HashMap<Box<str>, Rc<Mutex<()>>>>,
    complained: RefCell<Option<Instant>>,
}

impl<S> fmt::Debug for CertificateStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({} certificates)", self.entries.borrow().len())
    }
}

impl<S: CertificateSource> CertificateStore<S> {
    pub(super) fn new(source: S, shared: &'static TlsShared, metrics: Arc<EdgeMetrics>) -> Self {
        let bound = |n| NonZeroUsize::new(n).expect("not zero");
        Self {
            source,
            shared,
            metrics,
            entries: RefCell::new(LruCache::new(bound(CERTIFICATES_MAX))),
            absent: RefCell::new(LruCache::new(bound(ABSENT_MAX))),
            asking: RefCell::default(),
            complained: RefCell::default(),
        }
    }

    /// Returns the present result for this name. Handshakes for the same name at once request it
    /// once.
    pub(super) async fn find(&self, name: &str) -> FoundCertificate {
        if let Some(found) = self.fresh(name) {
            self.metrics.certificate(CertificateLookup::Hit);
            return found;
        }
        let turn = LookupTurn::new(self, name);
        let _mine = turn.lock.lock().await;
        if let Some(found) = self.fresh(name) {
            self.metrics.certificate(CertificateLookup::Hit);
            return found;
        }
        let (found, lookup) = self.ask(name).await;
        self.metrics.certificate(lookup);
        found
    }

    #[cfg(test)]
    pub(super) fn asking_len(&self) -> usize {
        self.asking.borrow().len()
    }

    /// Returns the result for this name if it was checked just now.
    fn fresh(&self, name: &str) -> Option<FoundCertificate> {
        let is_fresh = |checked: Instant| checked.elapsed() < FRESH_FOR;
        if let Some(entry) = self.entries.borrow_mut().get(name) {
            return is_fresh(entry.checked).then(|| entry.found());
        }
        let checked = self.absent.borrow_mut().get(name).copied()?;
        is_fresh(checked).then_some(FoundCertificate::Absent)
    }

    async fn ask(&self, name: &str) -> (FoundCertificate, CertificateLookup) {
        match self.source.open(name).await {
            Ok(Some(fd)) => self.take_file(name, File::from(fd)),
            Ok(None) => {
                self.entries.borrow_mut().pop(name);
                self.absent.borrow_mut().put(name.into(), Instant::now());
                (FoundCertificate::Absent, CertificateLookup::Absent)
            }
            Err(error) => {
                self.complain(name, &error);
                // An old certificate is better than none. The next request is made in a second,
                // not at once.
                let mut entries = self.entries.borrow_mut();
                let Some(entry) = entries.get_mut(name) else {
                    return (FoundCertificate::Broken, CertificateLookup::Broken);
                };
                entry.checked = Instant::now();
                (entry.found(), CertificateLookup::Broken)
            }
        }
    }

    fn take_file(&self, name: &str, file: File) -> (FoundCertificate, CertificateLookup) {
        let stamp = match CertificateStamp::of(&file) {
            Ok(stamp) => stamp,
            Err(error) => {
                self.complain(name, &error);
                return (FoundCertificate::Broken, CertificateLookup::Broken);
            }
        };
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get_mut(name)
            && entry.stamp == stamp
        {
            entry.checked = Instant::now();
            return (entry.found(), CertificateLookup::Unchanged);
        }
        let previous = entries.pop(name).and_then(|entry| entry.certificate);
        let (certificate, lookup) = match ServerCertificate::read(file, &self.shared.config) {
            Ok(certificate) => (Some(Rc::new(certificate)), CertificateLookup::Loaded),
            Err(flaw) => {
                self.report(name, stamp, &flaw, previous.is_some());
                (previous, CertificateLookup::Broken)
            }
        };
        let entry = CertificateEntry { certificate, stamp, checked: Instant::now() };
        let found = entry.found();
        entries.put(name.into(), entry);
        self.absent.borrow_mut().pop(name);
        (found, lookup)
    }

    fn report(&self, name: &str, stamp: CertificateStamp, flaw: &CertificateFlaw, has_previous: bool) {
        if self.shared.is_first_report(name, stamp) {
            let meanwhile = if has_previous {
                "The certificate before it is used on"
            } else {
                "Clients of this name cannot connect"
            };
            tracing::error!("{CODE_BROKEN}: certificate file '{name}' cannot be used: {flaw}. {meanwhile}");
        }
    }

    fn complain(&self, name: &str, error: &dyn Display) {
        let mut complained = self.complained.borrow_mut();
        if complained.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
            *complained = Some(Instant::now());
            tracing::error!("{CODE_SOURCE}: cannot get certificate '{name}' from the keeper: {error}");
        }
    }
}

impl CertificateEntry {
    fn found(&self) -> FoundCertificate {
        self.certificate.as_ref().map_or(FoundCertificate::Broken, |certificate| {
            FoundCertificate::Certificate(Rc::clone(certificate))
        })
    }
}

impl CertificateStamp {
    pub(super) fn of(file: &File) -> rustix::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (stat.st_mtime, stat.st_mtime_nsec as i64),
            changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
        })
    }
}

/// One handshake's place among those for the same name. The last to leave clears the table, also
/// when its client left while it waited.
struct LookupTurn<'a> {
    asking: &'a RefCell<HashMap<Box<str>, Rc<Mutex<()>>>>,
    name: &'a str,
    lock: Rc<Mutex<()>>,
}

impl<'a> LookupTurn<'a> {
    fn new<S>(store: &'a CertificateStore<S>, name: &'a str) -> Self {
        let asking = &store.asking;
        let lock = Rc::clone(asking.borrow_mut().entry(name.into()).or_default());
        Self { asking, name, lock }
    }
}

impl Drop for LookupTurn<'_> {
    fn drop(&mut self) {
        // One reference is the table's, one is ours.
        if Rc::strong_count(&self.lock) == 2 {
            self.asking.borrow_mut().remove(self.name);
        }
    }
}

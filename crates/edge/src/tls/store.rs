//! The certificates in memory: as many as are in use, each as fresh as a second ago.
//!
//! A file is asked for again at most once a second, and only when a handshake wants it; it is read again only
//! if it is another file than before. So a replaced certificate is live within a second, and 100,000
//! certificates cost nothing until somebody comes.
//!
//! Not here: which names are tried for a client (`tls`), what a file must hold (`certificate`).

use std::cell::RefCell;
use std::fmt::{self, Display};
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use lru::LruCache;
use nagaya_base::Code;
use nagaya_keeper::client::{ClientError, Keeper};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Shared;
use super::certificate::{Certificate, Flaw};
use crate::metrics::{CertificateLookup, Metrics};

/// Certificates in memory, per thread. One takes about 10 KiB (chain, parsed key, configuration), so 10 MiB; a
/// handshake for one that fell out costs a question to the keeper and some 100 us.
const CERTIFICATES_MAX: usize = 1024;

/// Names known to have no certificate, per thread; 100 bytes each. Kept apart, so that a client that makes names
/// up cannot push certificates out.
const ABSENT_MAX: usize = 4096;

/// How long a file, or its absence, is taken for granted.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// A source that fails is reported this often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

const CODE_BROKEN: Code = Code(430);
const CODE_SOURCE: Code = Code(431);

/// Where certificate files come from: the keeper, which alone may read private keys.
pub trait CertificateSource {
    type Error: Display;

    /// The file for a name (a host name, `_wildcard.` and a host name, or `default`), open for reading from its
    /// beginning; None if there is none.
    fn open(&self, name: &str) -> impl Future<Output = Result<Option<OwnedFd>, Self::Error>>;
}

impl CertificateSource for Rc<Keeper> {
    type Error = ClientError;

    async fn open(&self, name: &str) -> Result<Option<OwnedFd>, ClientError> {
        self.open_certificate(name).await
    }
}

/// What there is for one name.
#[derive(Debug, Clone)]
pub(super) enum Found {
    Certificate(Rc<Certificate>),
    Absent,
    /// There is a file, and it cannot be used or not be had.
    Broken,
}

/// Tells one state of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug)]
struct Entry {
    /// The newest usable state of the file.
    certificate: Option<Rc<Certificate>>,
    /// The state that was read last, usable or not.
    stamp: Stamp,
    checked: Instant,
}

pub(super) struct Store<S> {
    source: S,
    shared: &'static Shared,
    metrics: Arc<Metrics>,
    entries: RefCell<LruCache<Box<str>, Entry>>,
    absent: RefCell<LruCache<Box<str>, Instant>>,
    /// Names being asked for. Bounded by the handshakes under way.
    asking: RefCell<HashMap<Box<str>, Rc<Mutex<()>>>>,
    complained: RefCell<Option<Instant>>,
}

impl<S> fmt::Debug for Store<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({} certificates)", self.entries.borrow().len())
    }
}

impl<S: CertificateSource> Store<S> {
    pub(super) fn new(source: S, shared: &'static Shared, metrics: Arc<Metrics>) -> Self {
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

    /// What there is for this name now. Handshakes that want the same name at once ask for it once.
    pub(super) async fn find(&self, name: &str) -> Found {
        if let Some(found) = self.fresh(name) {
            self.metrics.certificate(CertificateLookup::Hit);
            return found;
        }
        let turn = Turn::new(self, name);
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

    /// What is known of this name and was checked just now.
    fn fresh(&self, name: &str) -> Option<Found> {
        let is_fresh = |checked: Instant| checked.elapsed() < FRESH_FOR;
        if let Some(entry) = self.entries.borrow_mut().get(name) {
            return is_fresh(entry.checked).then(|| entry.found());
        }
        let checked = self.absent.borrow_mut().get(name).copied()?;
        is_fresh(checked).then_some(Found::Absent)
    }

    async fn ask(&self, name: &str) -> (Found, CertificateLookup) {
        match self.source.open(name).await {
            Ok(Some(fd)) => self.take_file(name, File::from(fd)),
            Ok(None) => {
                self.entries.borrow_mut().pop(name);
                self.absent.borrow_mut().put(name.into(), Instant::now());
                (Found::Absent, CertificateLookup::Absent)
            }
            Err(error) => {
                self.complain(name, &error);
                // Better the certificate of a moment ago than none; ask again in a second, not at once.
                let mut entries = self.entries.borrow_mut();
                let Some(entry) = entries.get_mut(name) else {
                    return (Found::Broken, CertificateLookup::Broken);
                };
                entry.checked = Instant::now();
                (entry.found(), CertificateLookup::Broken)
            }
        }
    }

    fn take_file(&self, name: &str, file: File) -> (Found, CertificateLookup) {
        let stamp = match Stamp::of(&file) {
            Ok(stamp) => stamp,
            Err(error) => {
                self.complain(name, &error);
                return (Found::Broken, CertificateLookup::Broken);
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
        let (certificate, lookup) = match Certificate::read(file, &self.shared.config) {
            Ok(certificate) => (Some(Rc::new(certificate)), CertificateLookup::Loaded),
            Err(flaw) => {
                self.report(name, stamp, &flaw, previous.is_some());
                (previous, CertificateLookup::Broken)
            }
        };
        let entry = Entry { certificate, stamp, checked: Instant::now() };
        let found = entry.found();
        entries.put(name.into(), entry);
        self.absent.borrow_mut().pop(name);
        (found, lookup)
    }

    fn report(&self, name: &str, stamp: Stamp, flaw: &Flaw, has_previous: bool) {
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

impl Entry {
    fn found(&self) -> Found {
        self.certificate
            .as_ref()
            .map_or(Found::Broken, |certificate| Found::Certificate(Rc::clone(certificate)))
    }
}

impl Stamp {
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

/// One handshake's place among those that want the same name. The last to leave clears the table, also when
/// its client left while it waited.
struct Turn<'a> {
    asking: &'a RefCell<HashMap<Box<str>, Rc<Mutex<()>>>>,
    name: &'a str,
    lock: Rc<Mutex<()>>,
}

impl<'a> Turn<'a> {
    fn new<S>(store: &'a Store<S>, name: &'a str) -> Self {
        let asking = &store.asking;
        let lock = Rc::clone(asking.borrow_mut().entry(name.into()).or_default());
        Self { asking, name, lock }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // One reference is the table's, one is ours.
        if Rc::strong_count(&self.lock) == 2 {
            self.asking.borrow_mut().remove(self.name);
        }
    }
}

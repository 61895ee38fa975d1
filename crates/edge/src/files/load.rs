//! One file as it is sent: its content or descriptor, its prebuilt headers, its precompressed siblings, and the
//! check that all this still is what lies on disk.
//!
//! Not here: keeping entries (`cache`), answering with them (`files`).

use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::io::IoSliceMut;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::HeaderValue;
use http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, HeaderMap,
    LAST_MODIFIED, VARY,
};
use rustix::io::{Errno, ReadWriteFlags};
use smallvec::SmallVec;

use super::beneath::{self, Access, Look, LookupError, Opened, Stamp};
use super::conditional::Validators;
use super::encoding::{Accepted, Coding};
use super::root::{Root, RootId};
use crate::refusal::Refusal;

/// Files up to this size are kept as bytes. Above it the kernel sends them from the page cache, and a copy here
/// would only cost memory twice.
pub const SMALL_FILE_MAX: u64 = 32 * 1024;

/// A file that changed less than this ago may change again without its timestamps telling: two writes within one
/// tick of the file system's clock (10 ms on most, 2 s on FAT and some network servers) leave the same mtime and ctime.
/// Such a file is served, but neither kept nor given a strong entity tag, until it has been quiet for this long.
const RACY_MARGIN: Duration = Duration::from_secs(2);

/// How often an entry looks for a sibling that was not there. Until then the plain file is sent, which is right
/// too; a sibling that is *used* is checked on every request.
const SIBLING_PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Most fields that `load` and `represent` put into the map of a plain file.
const FIELDS: usize = 6;

/// What a variant costs beside its content: its header map and its path.
const VARIANT_BYTES: usize = 1024;

/// So much of a text is looked at to learn whether it is UTF-8.
const CHARSET_BYTES: usize = 32 * 1024;

/// What was at a path.
pub(super) enum Loaded {
    File(Box<Files>),
    Directory,
    Missing,
}

/// A file and its siblings as they were read, perhaps on another thread.
pub(super) struct Files {
    path: CString,
    source: Source,
    content_type: HeaderValue,
    encoded: SmallVec<[(Coding, CString, Source); 3]>,
}

/// A file ready to be sent, in every coding there is of it.
pub(super) struct Entry {
    root: RootId,
    path: CString,
    cache_control: Option<Box<str>>,
    plain: Representation,
    variants: SmallVec<[Variant; 3]>,
    probed: Cell<Instant>,
    /// The turn of the event loop in which it was last found to be current, and what of it.
    looked: Cell<(u64, Option<usize>)>,
    settled: bool,
    /// A look at it may hang: it is done on another thread.
    is_remote: bool,
}

struct Variant {
    coding: Coding,
    path: CString,
    representation: Representation,
}

/// One coding of a file: exactly these bytes, with exactly these headers.
pub(super) struct Representation {
    stamp: Stamp,
    pub(super) content: Content,
    /// The header fields of a 200, complete.
    pub(super) headers: Rc<HeaderMap>,
    modified: Option<u64>,
}

#[derive(Clone)]
pub(super) enum Content {
    Memory(Bytes),
    Open { file: Arc<OwnedFd>, size: u64 },
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Open { size, .. } => *size,
        }
    }
}

impl Representation {
    pub(super) fn validators(&self) -> Validators<'_> {
        Validators { etag: &self.headers[ETAG], modified: self.modified }
    }
}

impl Entry {
    pub(super) fn is_for(&self, root: RootId, path: &str) -> bool {
        self.root == root && self.path.as_bytes() == path.as_bytes()
    }

    pub(super) fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// What `is_current` looks at, for another thread: what must be as it was, and what must not be there.
    pub(super) fn looks(&self, chosen: Option<usize>, now: Instant) -> Looks {
        let mut present = vec![(self.path.clone(), self.plain.stamp)];
        if let Some(place) = chosen {
            let variant = &self.variants[place];
            present.push((variant.path.clone(), variant.representation.stamp));
        }
        let absent = if self.is_probe_due(now) { self.absent_siblings().collect() } else { Vec::new() };
        Looks { present, absent, newer_than: self.plain.stamp.mtime }
    }

    pub(super) fn is_for_cache_control(&self, cache_control: Option<&str>) -> bool {
        self.cache_control.as_deref() == cache_control
    }

    /// May be kept for the next request.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Which variant suits the client; `None` is the plain file.
    pub(super) fn choose(&self, headers: &HeaderMap) -> Option<usize> {
        if self.variants.is_empty() || !headers.contains_key(ACCEPT_ENCODING) {
            return None;
        }
        let best = Accepted::read(headers).best(self.variants.iter().map(|variant| variant.coding))?;
        self.variants.iter().position(|variant| variant.coding == best)
    }

    pub(super) fn representation(&self, chosen: Option<usize>) -> &Representation {
        chosen.map_or(&self.plain, |place| &self.variants[place].representation)
    }

    /// Whether everything `chosen` would send is what lies on disk in this turn of the event loop, made for this
    /// `cache_control`.
    ///
    /// The look at the file follows symbolic links without the confinement of `openat2`, at half the cost of
    /// opening it anew. That is safe because nothing is read through it: it only answers whether the path leads to
    /// the *same* inode, unchanged to the nanosecond, that was once opened beneath this root. If a tenant has
    /// swapped a directory for a link to the outside since, the path leads to another inode, and the file is opened
    /// anew, confined; if it leads to the same inode by a detour, its content is what this root served already. A
    /// chmod changes ctime, and a directory that was closed makes the look fail, so lost permissions are noticed.
    pub(super) fn is_current(
        &self,
        root: &Root,
        chosen: Option<usize>,
        cache_control: Option<&str>,
        (now, turn): (Instant, u64),
    ) -> bool {
        if self.cache_control.as_deref() != cache_control {
            return false;
        }
        if self.looked.get() == (turn, chosen) {
            return true;
        }
        let is_current = is_unchanged(root, &self.path, &self.plain)
            && chosen.is_none_or(|place| {
                let variant = &self.variants[place];
                is_unchanged(root, &variant.path, &variant.representation)
            })
            && !self.has_new_sibling(root, now);
        if is_current {
            self.looked.set((turn, chosen));
        }
        is_current
    }

    fn has_new_sibling(&self, root: &Root, now: Instant) -> bool {
        self.is_probe_due(now)
            && self
                .absent_siblings()
                .filter_map(|path| beneath::stamp_anywhere(root.dir(), path.as_c_str()))
                .any(|stamp| stamp.mtime >= self.plain.stamp.mtime)
    }

    /// Notes that siblings are looked for now, if it is time.
    fn is_probe_due(&self, now: Instant) -> bool {
        let is_due = now.saturating_duration_since(self.probed.get()) >= SIBLING_PROBE_INTERVAL;
        if is_due {
            self.probed.set(now);
        }
        is_due
    }

    fn absent_siblings(&self) -> impl Iterator<Item = CString> {
        siblings(&self.path)
            .filter(|(coding, _)| self.variants.iter().all(|variant| variant.coding != *coding))
            .map(|(_, path)| path)
    }

    /// Bytes of content, with the overhead of variants, and number of open descriptors.
    pub(super) fn weight(&self) -> (usize, usize) {
        let variants = self.variants.iter().map(|variant| &variant.representation);
        let overhead = self.variants.len() * VARIANT_BYTES;
        variants.chain([&self.plain]).fold((overhead, 0), |(bytes, open), one| match &one.content {
            Content::Memory(content) => (bytes + content.len(), open),
            Content::Open { .. } => (bytes, open + 1),
        })
    }
}

fn is_unchanged(root: &Root, path: &CStr, representation: &Representation) -> bool {
    beneath::stamp_anywhere(root.dir(), path) == Some(representation.stamp)
}

/// Looks at files that another thread is to make.
pub(super) struct Looks {
    present: Vec<(CString, Stamp)>,
    absent: Vec<CString>,
    newer_than: (i64, u32),
}

impl Looks {
    /// Whether all is as it was. See `Entry::is_current`.
    pub(super) fn hold(&self, dir: BorrowedFd<'_>) -> bool {
        let is_same =
            |(path, stamp): &(CString, Stamp)| beneath::stamp_anywhere(dir, path.as_c_str()) == Some(*stamp);
        let is_new = |path: &CString| {
            beneath::stamp_anywhere(dir, path.as_c_str()).is_some_and(|stamp| stamp.mtime >= self.newer_than)
        };
        self.present.iter().all(is_same) && !self.absent.iter().any(is_new)
    }
}

/// Reads what is at `path` beneath the root, with its siblings.
pub(super) fn load(look: Look<'_>, path: &str) -> Result<Loaded, LookupError> {
    // A NUL can only come from a site's record, and no file has such a name.
    let Ok(path) = CString::new(path) else { return Ok(Loaded::Missing) };
    let (file, stamp) = match beneath::open(look, if path.is_empty() { c"." } else { path.as_c_str() })? {
        Opened::File(file, stamp) => (file, stamp),
        Opened::Directory(_) => return Ok(Loaded::Directory),
        Opened::Missing => return Ok(Loaded::Missing),
    };
    let source = Source::read(file, stamp, look.access)?;
    let mut encoded = SmallVec::<[_; 3]>::new();
    for (coding, sibling) in siblings(&path) {
        if let Some(found) = open_sibling(look, &sibling, &source.stamp)? {
            encoded.push((coding, sibling, found));
        }
    }
    let content_type = content_type(&path, &source, look.access)?;
    Ok(Loaded::File(Box::new(Files { path, source, content_type, encoded })))
}

impl Files {
    /// Ready to be sent. `wall` was read before the files were.
    pub(super) fn into_entry(
        self,
        root: &Root,
        cache_control: Option<&str>,
        now: Instant,
        wall: SystemTime,
    ) -> Result<Rc<Entry>, Refusal> {
        let Self { path, source, content_type, encoded } = self;
        let mut fields = HeaderMap::with_capacity(FIELDS);
        fields.insert(CONTENT_TYPE, content_type);
        fields.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        if let Some(value) = cache_control {
            let value = HeaderValue::from_str(value)
                .map_err(|_| Refusal::SiteBroken("cache_control is not a valid header value".into()))?;
            fields.insert(CACHE_CONTROL, value);
        }
        if !encoded.is_empty() {
            fields.insert(VARY, HeaderValue::from_static("accept-encoding"));
        }
        let stamps = || encoded.iter().map(|(_, _, found)| &found.stamp).chain([&source.stamp]);
        let settled = stamps().all(|stamp| is_settled(stamp, wall));
        let is_remote = root.is_remote() || stamps().any(|stamp| stamp.mount != root.mount());
        let variants = encoded
            .into_iter()
            .map(|(coding, path, found)| {
                let mut fields = fields.clone();
                fields.insert(CONTENT_ENCODING, coding.value());
                Variant { coding, path, representation: found.represent(fields, wall) }
            })
            .collect();
        Ok(Rc::new(Entry {
            root: root.id(),
            path,
            cache_control: cache_control.map(Into::into),
            plain: source.represent(fields, wall),
            variants,
            probed: Cell::new(now),
            looked: Cell::new((0, None)),
            settled,
            is_remote,
        }))
    }
}

/// A sibling counts if it can be read and is not older than the plain file. Whatever else is wrong with it is no
/// reason to refuse the plain one, unless the node is out of descriptors.
fn open_sibling(look: Look<'_>, path: &CStr, plain: &Stamp) -> Result<Option<Source>, LookupError> {
    match beneath::open(look, path) {
        Ok(Opened::File(file, stamp)) if stamp.mtime >= plain.mtime => {
            Source::read(file, stamp, look.access).map(Some)
        }
        Err(LookupError::WouldBlock) => Err(LookupError::WouldBlock),
        Err(LookupError::Refused(refusal)) if refusal == beneath::OUT_OF_DESCRIPTORS => Err(refusal.into()),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// Where precompressed forms of `path` would be. A file that is compressed itself has none.
fn siblings(path: &CStr) -> impl Iterator<Item = (Coding, CString)> {
    let plain = path.to_bytes();
    let compressed = Coding::ALL.iter().any(|coding| plain.ends_with(coding.extension().as_bytes()));
    let codings: &[Coding] = if compressed { &[] } else { &Coding::ALL };
    codings.iter().map(move |coding| {
        let path = [plain, coding.extension().as_bytes()].concat();
        (*coding, CString::new(path).expect("it was a C string, and the extension has no NUL"))
    })
}

/// A file's bytes, or a way to them, and the state they were in.
struct Source {
    content: Content,
    stamp: Stamp,
}

impl Source {
    fn read(file: OwnedFd, before: Stamp, access: Access) -> Result<Self, LookupError> {
        if before.size > SMALL_FILE_MAX {
            return Ok(Self {
                content: Content::Open { file: Arc::new(file), size: before.size },
                stamp: before,
            });
        }
        let bytes = read_front(&file, before.size as usize, access)?;
        // If it was written meanwhile, the bytes may be of either state. Its new stamp is then too young to be kept
        // or to carry a strong tag, so nobody takes this mixture for one of the two.
        let stamp = beneath::stamp_of(&file)?;
        Ok(Self { content: Content::Memory(bytes.into()), stamp })
    }

    fn represent(self, mut fields: HeaderMap, wall: SystemTime) -> Representation {
        fields.insert(ETAG, etag(&self.stamp, is_settled(&self.stamp, wall)));
        // RFC 9110 section 8.8.2.1: no date that lies in the future; and HTTP dates begin with 1970.
        let modified = u64::try_from(self.stamp.mtime.0).ok().filter(|seconds| *seconds <= seconds_of(wall));
        if let Some(seconds) = modified {
            let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds));
            fields.insert(LAST_MODIFIED, HeaderValue::try_from(date).expect("a date is printable ASCII"));
        }
        Representation { stamp: self.stamp, content: self.content, headers: Rc::new(fields), modified }
    }
}

/// The first `length` bytes, or fewer if it has become shorter.
fn read_front(file: &OwnedFd, length: usize, access: Access) -> Result<Vec<u8>, LookupError> {
    let flags = match access {
        Access::Cached => ReadWriteFlags::NOWAIT,
        Access::Blocking => ReadWriteFlags::empty(),
    };
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        let mut rest = [IoSliceMut::new(&mut bytes[filled..])];
        match rustix::io::preadv2(file, &mut rest, filled as u64, flags) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            // The second is said by file systems that cannot tell.
            Err(Errno::AGAIN | Errno::OPNOTSUPP) if access == Access::Cached => {
                return Err(LookupError::WouldBlock);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn is_settled(stamp: &Stamp, wall: SystemTime) -> bool {
    let Ok(quiet_since) = wall.duration_since(UNIX_EPOCH).map(|now| now.saturating_sub(RACY_MARGIN)) else {
        return false;
    };
    let quiet_since = (quiet_since.as_secs() as i64, quiet_since.subsec_nanos());
    stamp.mtime.max(stamp.ctime) <= quiet_since
}

fn seconds_of(wall: SystemTime) -> u64 {
    wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Strong, unless the file changed so recently that it may do so again unnoticed (RFC 9110 section 8.8.1).
fn etag(stamp: &Stamp, strong: bool) -> HeaderValue {
    let (seconds, nanoseconds) = stamp.mtime;
    let nanoseconds = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let weak = if strong { "" } else { "W/" };
    let text = format!("{weak}\"{nanoseconds:x}-{:x}-{:x}\"", stamp.size, stamp.inode);
    HeaderValue::try_from(text).expect("hexadecimal digits in quotes")
}

/// The type says what the name says; an unknown ending is bytes, so that no browser guesses it to be a page.
///
/// `charset=utf-8` is added to a text only if its beginning is UTF-8. Old sites in Shift_JIS or Latin-1 name their
/// charset in the page, and the header would overrule it.
fn content_type(path: &CStr, source: &Source, access: Access) -> Result<HeaderValue, LookupError> {
    let path = path.to_string_lossy();
    let name = path.rsplit('/').next().unwrap_or_default();
    let essence = mime_guess::from_path(name).first_raw().unwrap_or("application/octet-stream");
    if !essence.starts_with("text/") && essence != "application/javascript" {
        return Ok(HeaderValue::from_static(essence));
    }
    let utf8 = match &source.content {
        Content::Memory(bytes) => begins_as_utf8(bytes),
        Content::Open { file, .. } => begins_as_utf8(&read_front(file, CHARSET_BYTES, access)?),
    };
    if !utf8 {
        return Ok(HeaderValue::from_static(essence));
    }
    Ok(HeaderValue::try_from(format!("{essence}; charset=utf-8")).expect("a media type is printable ASCII"))
}

/// A character cut off at the end does not count against it.
fn begins_as_utf8(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).err().is_none_or(|error| error.error_len().is_none())
}

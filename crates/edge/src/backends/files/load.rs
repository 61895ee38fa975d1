//! Loads one file as it is sent: its content or descriptor, its prebuilt fields, its
//! precompressed siblings. It also checks that all this is still the same on disk.
//!
//! Not here: keeping entries (`cache`), responses with them (`files`).

use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
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

use crate::backends::files::beneath;
use crate::backends::files::beneath::{FileVersion, LookupAccess, LookupBase, LookupError, OpenedPath};
use crate::backends::files::conditional::Validators;
use crate::backends::files::encoding::{AcceptedCodings, ContentCoding};
use crate::backends::files::root::{DirectoryId, OpenBase};
use crate::blocking::DeviceShare;
use crate::http::refusal::Refusal;

/// Maximum size of a file that is kept as bytes. The kernel sends larger ones from the page
/// cache, and a copy here would only use the memory twice.
pub const SMALL_FILE_MAX: u64 = 32 * 1024;

/// Minimum age of a file's last change before its timestamps identify it. Two writes within one
/// tick of the file system's clock leave the same mtime and ctime. A tick is 10 ms on most, 2 s
/// on FAT and some network servers. A younger file is served, but neither kept nor given a strong
/// entity tag.
const RACY_MARGIN: Duration = Duration::from_secs(2);

/// Interval at which an entry searches for a missing sibling. Until then the plain file is sent,
/// which is right, too. A sibling in *use* is checked in every request.
const SIBLING_PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of fields that `load` and `represent` put into the map of a plain file.
const FIELDS: usize = 6;

/// Memory of a variant in addition to its content: its header map and its path.
const VARIANT_BYTES: usize = 1024;

/// Number of bytes of a text that are checked for UTF-8.
const CHARSET_BYTES: usize = 32 * 1024;

/// Result of loading a path.
pub(super) enum LoadedPath {
    File(Box<LoadedFiles>),
    Directory,
    Missing,
}

/// A file and its siblings as they were read, perhaps on another thread.
pub(super) struct LoadedFiles {
    path: CString,
    source: FileSource,
    content_type: HeaderValue,
    encoded: SmallVec<[(ContentCoding, CString, FileSource); 3]>,
}

/// A file ready to be sent, in each of its codings.
pub(super) struct ServedFile {
    /// The base directory of its path.
    base: DirectoryId,
    path: CString,
    /// Number of bytes of the path that are a link out of the document root, including the slash
    /// behind it.
    skip: usize,
    cache_control: Option<Box<str>>,
    plain: Representation,
    variants: SmallVec<[EncodedVariant; 3]>,
    probed: Cell<Instant>,
    /// The turn of the event loop in which it was last found to be current, and the checked
    /// variant.
    looked: Cell<(u64, Option<usize>)>,
    settled: bool,
    /// Set if a check of it may hang. Then it is done on another thread, with this share of them.
    remote_share: Option<DeviceShare>,
}

struct EncodedVariant {
    coding: ContentCoding,
    path: CString,
    representation: Representation,
}

/// One coding of a file: exactly these bytes, with exactly these headers.
pub(super) struct Representation {
    stamp: FileVersion,
    pub(super) content: FileContent,
    /// The header fields of a complete 200.
    pub(super) headers: Rc<HeaderMap>,
    modified: Option<u64>,
}

#[derive(Clone)]
pub(super) enum FileContent {
    Memory(Bytes),
    Open { file: Arc<OwnedFd>, size: u64 },
}

impl FileContent {
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

impl ServedFile {
    pub(super) fn is_for(&self, base: DirectoryId, path: &str) -> bool {
        self.base == base && self.path.as_bytes() == path.as_bytes()
    }

    pub(super) fn remote_share(&self) -> Option<DeviceShare> {
        self.remote_share
    }

    /// Returns the checks of `is_current` for another thread: unchanged files, and absent ones.
    pub(super) fn looks(&self, chosen: Option<usize>, now: Instant) -> VersionChecks {
        let mut present = vec![(self.beneath(&self.path).to_owned(), self.plain.stamp)];
        if let Some(place) = chosen {
            let variant = &self.variants[place];
            present.push((self.beneath(&variant.path).to_owned(), variant.representation.stamp));
        }
        let absent = if self.is_probe_due(now) {
            self.absent_siblings().map(|path| self.beneath(&path).to_owned()).collect()
        } else {
            Vec::new()
        };
        VersionChecks { present, absent, newer_than: self.plain.stamp.mtime }
    }

    pub(super) fn is_for_cache_control(&self, cache_control: Option<&str>) -> bool {
        self.cache_control.as_deref() == cache_control
    }

    /// Returns whether it may be kept for the next request.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Returns the variant for the client. `None` is the plain file.
    pub(super) fn choose(&self, headers: &HeaderMap) -> Option<usize> {
        if self.variants.is_empty() || !headers.contains_key(ACCEPT_ENCODING) {
            return None;
        }
        let best = AcceptedCodings::read(headers).best(self.variants.iter().map(|variant| variant.coding))?;
        self.variants.iter().position(|variant| variant.coding == best)
    }

    pub(super) fn representation(&self, chosen: Option<usize>) -> &Representation {
        chosen.map_or(&self.plain, |place| &self.variants[place].representation)
    }

    /// Returns one of its paths relative to the base.
    fn beneath<'p>(&self, path: &'p CStr) -> &'p CStr {
        // Without a link this is the path itself.
        CStr::from_bytes_with_nul(&path.to_bytes_with_nul()[self.skip..]).unwrap_or_default()
    }

    /// Returns whether everything that `chosen` would send is still on disk in this turn of the
    /// event loop. The entry must also have this `cache_control`.
    ///
    /// The check follows symbolic links without the confinement of `openat2`, at half the cost of
    /// opening the file again. That is safe because nothing is read through it. It only answers
    /// whether the path leads to the *same* inode that was once opened below this root. The inode
    /// must be unchanged to the nanosecond. If a tenant has replaced a directory by a link to the
    /// outside, the path leads to another inode. Then the file is opened again, confined. If it
    /// leads to the same inode by a detour, the root has served this content already. A chmod
    /// changes ctime, and a closed directory makes the check fail. So lost permissions are
    /// noticed.
    pub(super) fn is_current(
        &self,
        base: &OpenBase,
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
        let is_current = is_unchanged(base, self.beneath(&self.path), &self.plain)
            && chosen.is_none_or(|place| {
                let variant = &self.variants[place];
                is_unchanged(base, self.beneath(&variant.path), &variant.representation)
            })
            && !self.has_new_sibling(base, now);
        if is_current {
            self.looked.set((turn, chosen));
        }
        is_current
    }

    fn has_new_sibling(&self, base: &OpenBase, now: Instant) -> bool {
        self.is_probe_due(now)
            && self
                .absent_siblings()
                .filter_map(|path| beneath::stamp_anywhere(base, self.beneath(&path)))
                .any(|stamp| stamp.mtime >= self.plain.stamp.mtime)
    }

    /// Records a search for siblings, if one is due. Returns whether it is.
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

    /// Returns the bytes of content with the overhead of variants, and the number of open
    /// descriptors.
    pub(super) fn weight(&self) -> (usize, usize) {
        let variants = self.variants.iter().map(|variant| &variant.representation);
        let overhead = self.variants.len() * VARIANT_BYTES;
        variants.chain([&self.plain]).fold((overhead, 0), |(bytes, open), one| match &one.content {
            FileContent::Memory(content) => (bytes + content.len(), open),
            FileContent::Open { .. } => (bytes, open + 1),
        })
    }
}

fn is_unchanged(base: &OpenBase, path: &CStr, representation: &Representation) -> bool {
    beneath::stamp_anywhere(base, path) == Some(representation.stamp)
}

/// Checks of files for another thread.
pub(super) struct VersionChecks {
    present: Vec<(CString, FileVersion)>,
    absent: Vec<CString>,
    newer_than: (i64, u32),
}

impl VersionChecks {
    /// Returns whether nothing has changed. See `ServedFile::is_current`.
    pub(super) fn hold(&self, base: &OpenBase) -> bool {
        let is_same = |(path, stamp): &(CString, FileVersion)| {
            beneath::stamp_anywhere(base, path.as_c_str()) == Some(*stamp)
        };
        let is_new = |path: &CString| {
            beneath::stamp_anywhere(base, path.as_c_str()).is_some_and(|stamp| stamp.mtime >= self.newer_than)
        };
        self.present.iter().all(is_same) && !self.absent.iter().any(is_new)
    }
}

/// Reads the file at `path` below the root, with its siblings.
pub(super) fn load(look: LookupBase<'_>, path: &str) -> Result<LoadedPath, LookupError> {
    // A NUL can only come from a site's record, and no file has such a name.
    let Ok(path) = CString::new(path) else { return Ok(LoadedPath::Missing) };
    let (file, stamp) = match beneath::open(look, path.as_bytes())? {
        OpenedPath::File(file, stamp) => (file, stamp),
        OpenedPath::Directory(_) => return Ok(LoadedPath::Directory),
        OpenedPath::Missing => return Ok(LoadedPath::Missing),
    };
    let source = FileSource::read(file, stamp, look.access)?;
    let mut encoded = SmallVec::<[_; 3]>::new();
    let beside = (!look.is_linked_file(path.as_bytes())).then(|| siblings(&path));
    for (coding, sibling) in beside.into_iter().flatten() {
        if let Some(found) = open_sibling(look, &sibling, &source.stamp)? {
            encoded.push((coding, sibling, found));
        }
    }
    let content_type = content_type(&path, &source, look.access)?;
    Ok(LoadedPath::File(Box::new(LoadedFiles { path, source, content_type, encoded })))
}

impl LoadedFiles {
    /// Returns the entry ready to be sent. `wall` was read before the files were.
    pub(super) fn into_entry(
        self,
        (base, skip): (&OpenBase, usize),
        cache_control: Option<&str>,
        now: Instant,
        wall: SystemTime,
    ) -> Result<Rc<ServedFile>, Refusal> {
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
        let is_remote = base.is_remote() || stamps().any(|stamp| stamp.mount != base.mount());
        let variants = encoded
            .into_iter()
            .map(|(coding, path, found)| {
                let mut fields = fields.clone();
                fields.insert(CONTENT_ENCODING, coding.value());
                EncodedVariant { coding, path, representation: found.represent(fields, wall) }
            })
            .collect();
        Ok(Rc::new(ServedFile {
            base: base.id(),
            path,
            skip,
            cache_control: cache_control.map(Into::into),
            plain: source.represent(fields, wall),
            variants,
            probed: Cell::new(now),
            looked: Cell::new((0, None)),
            settled,
            remote_share: is_remote.then(|| base.share()),
        }))
    }
}

/// Opens a sibling. It counts if it can be read and is not older than the plain file. Any other
/// fault of it does not refuse the plain file, unless the node is out of descriptors.
fn open_sibling(
    look: LookupBase<'_>,
    path: &CStr,
    plain: &FileVersion,
) -> Result<Option<FileSource>, LookupError> {
    match beneath::open(look, path.to_bytes()) {
        Ok(OpenedPath::File(file, stamp)) if stamp.mtime >= plain.mtime => {
            FileSource::read(file, stamp, look.access).map(Some)
        }
        Err(LookupError::WouldBlock) => Err(LookupError::WouldBlock),
        Err(LookupError::Refused(refusal)) if refusal == beneath::OUT_OF_DESCRIPTORS => Err(refusal.into()),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// Returns the possible paths of precompressed forms of `path`. A file that is compressed itself
/// has none.
fn siblings(path: &CStr) -> impl Iterator<Item = (ContentCoding, CString)> {
    let plain = path.to_bytes();
    let compressed = ContentCoding::ALL.iter().any(|coding| plain.ends_with(coding.extension().as_bytes()));
    let codings: &[ContentCoding] = if compressed { &[] } else { &ContentCoding::ALL };
    codings.iter().map(move |coding| {
        let path = [plain, coding.extension().as_bytes()].concat();
        (*coding, CString::new(path).expect("it was a C string, and the extension has no NUL"))
    })
}

/// A file's bytes, or a descriptor for them, and their version.
struct FileSource {
    content: FileContent,
    stamp: FileVersion,
}

impl FileSource {
    fn read(file: OwnedFd, before: FileVersion, access: LookupAccess) -> Result<Self, LookupError> {
        if before.size > SMALL_FILE_MAX {
            return Ok(Self {
                content: FileContent::Open { file: Arc::new(file), size: before.size },
                stamp: before,
            });
        }
        let bytes = read_front(&file, before.size as usize, access)?;
        // If it was written meanwhile, the bytes may be of either version. Its new version is
        // then too young to be kept or to have a strong tag. So nobody takes this mixture for one
        // of the two.
        let stamp = beneath::stamp_of(&file)?;
        Ok(Self { content: FileContent::Memory(bytes.into()), stamp })
    }

    fn represent(self, mut fields: HeaderMap, wall: SystemTime) -> Representation {
        fields.insert(ETAG, etag(&self.stamp, is_settled(&self.stamp, wall)));
        // RFC 9110 section 8.8.2.1: no date in the future. HTTP dates begin with 1970.
        let modified = u64::try_from(self.stamp.mtime.0).ok().filter(|seconds| *seconds <= seconds_of(wall));
        if let Some(seconds) = modified {
            let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds));
            fields.insert(LAST_MODIFIED, HeaderValue::try_from(date).expect("a date is printable ASCII"));
        }
        Representation { stamp: self.stamp, content: self.content, headers: Rc::new(fields), modified }
    }
}

/// Reads the first `length` bytes, or fewer if the file has become shorter.
fn read_front(file: &OwnedFd, length: usize, access: LookupAccess) -> Result<Vec<u8>, LookupError> {
    let flags = match access {
        LookupAccess::Cached => ReadWriteFlags::NOWAIT,
        LookupAccess::Blocking => ReadWriteFlags::empty(),
    };
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        let mut rest = [IoSliceMut::new(&mut bytes[filled..])];
        match rustix::io::preadv2(file, &mut rest, filled as u64, flags) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            // File systems that cannot tell return the second one.
            Err(Errno::AGAIN | Errno::OPNOTSUPP) if access == LookupAccess::Cached => {
                return Err(LookupError::WouldBlock);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn is_settled(stamp: &FileVersion, wall: SystemTime) -> bool {
    let Ok(quiet_since) = wall.duration_since(UNIX_EPOCH).map(|now| now.saturating_sub(RACY_MARGIN)) else {
        return false;
    };
    let quiet_since = (quiet_since.as_secs() as i64, quiet_since.subsec_nanos());
    stamp.mtime.max(stamp.ctime) <= quiet_since
}

fn seconds_of(wall: SystemTime) -> u64 {
    wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the entity tag. It is strong, unless the file changed so recently that it may change
/// again unnoticed (RFC 9110 section 8.8.1).
fn etag(stamp: &FileVersion, strong: bool) -> HeaderValue {
    let (seconds, nanoseconds) = stamp.mtime;
    let nanoseconds = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let weak = if strong { "" } else { "W/" };
    let text = format!("{weak}\"{nanoseconds:x}-{:x}-{:x}\"", stamp.size, stamp.inode);
    HeaderValue::try_from(text).expect("hexadecimal digits in quotes")
}

/// Returns the type by the file's name. An unknown ending means bytes, so that no browser takes
/// it for a page.
///
/// `charset=utf-8` is added to a text only if its beginning is UTF-8. Old sites in Shift_JIS or
/// Latin-1 name their charset in the page, and the field would override it.
fn content_type(path: &CStr, source: &FileSource, access: LookupAccess) -> Result<HeaderValue, LookupError> {
    let path = path.to_string_lossy();
    let name = path.rsplit('/').next().unwrap_or_default();
    let essence = mime_guess::from_path(name).first_raw().unwrap_or("application/octet-stream");
    if !essence.starts_with("text/") && essence != "application/javascript" {
        return Ok(HeaderValue::from_static(essence));
    }
    let utf8 = match &source.content {
        FileContent::Memory(bytes) => begins_as_utf8(bytes),
        FileContent::Open { file, .. } => begins_as_utf8(&read_front(file, CHARSET_BYTES, access)?),
    };
    if !utf8 {
        return Ok(HeaderValue::from_static(essence));
    }
    Ok(HeaderValue::try_from(format!("{essence}; charset=utf-8")).expect("a media type is printable ASCII"))
}

/// A character cut off at the end is ignored.
fn begins_as_utf8(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).err().is_none_or(|error| error.error_len().is_none())
}

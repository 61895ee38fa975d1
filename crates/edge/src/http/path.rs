//! Turns the path of a request, as sent, into the one path that is routed, looked up and
//! forwarded.
//!
//! Routing, `deny`, the file system and applications must agree on these decisions, so they are in
//! one place:
//! - Percent escapes are decoded exactly once. A malformed escape or a NUL is a bad request for
//!   every backend.
//! - `.` and `..` are resolved here, by text, and never above `/`. Going above it is a bad request.
//!   The kernel resolves symbolic links (`files::beneath`).
//! - Runs of `/` count as one, as they do for the kernel. Otherwise `//data` would slip past
//!   `deny: ["/data"]`.
//! - An encoded slash (`%2F`) is no separator, and a backslash is one only elsewhere. Routing
//!   accepts both as plain text, because an application may use them. No *file* is served under
//!   such a name (404), nor under one that is not UTF-8. A program that takes every path (a front
//!   controller) gets it.
//! - `.` or `..` beside an encoded slash, a backslash or a path parameter (`..%2f`, `..\`, `..;x`)
//!   is a bad request. Some servers resolve it and others do not. So it could be routed as one path
//!   and answered as another.
//! - An application gets the canonical form (`canonicalize`). Dot segments are resolved, and
//!   escapes of unreserved characters are decoded (RFC 3986 section 6.2.2). There is no run of `/`
//!   before or in the site's own path. Further in, an empty segment stays, because an application
//!   may mean it (`/fetch/http://example.org/`).
//!
//! Not here: opening anything (`files`), choosing the site (`router`).

use std::borrow::Cow;

use nagaya_base::limits::SITE_PATH_LEN_MAX;

use crate::http::refusal::Refusal;

#[cfg(test)]
mod tests;

/// Hidden names are never served, except this one at the top (RFC 8615).
const WELL_KNOWN: &str = ".well-known";

/// The whole path of a request, decoded and normal. Invariant: it begins with `/` and has no
/// empty, `.` or `..` segment. It ends with `/` exactly if it names a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePath<'a> {
    text: Cow<'a, str>,
    /// The same in bytes, if they are not UTF-8.
    bytes: Option<Vec<u8>>,
    /// False if no file may be served under it, by the decisions above.
    names_file: bool,
    /// Some segment begins with a dot.
    dotted: bool,
}

impl<'a> SitePath<'a> {
    /// `raw` is the path of the request target, percent-encoded, beginning with `/`.
    pub fn parse(raw: &'a str) -> Result<Self, Refusal> {
        if !raw.starts_with('/') {
            return Err(Refusal::BadRequest("the path does not begin with a slash"));
        }
        if is_normal(raw.as_bytes()) {
            return Ok(Self { text: Cow::Borrowed(raw), bytes: None, names_file: true, dotted: false });
        }
        PathDecoder::default().run(raw)
    }

    /// Returns the decoded path, with replacement characters if it was not UTF-8.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the same as an owned value.
    pub fn into_text(self) -> Cow<'a, str> {
        self.text
    }

    /// Returns the path below `mount` (a site's `path`). `None` if this path is not at or below
    /// it.
    pub fn below(&self, mount: &str) -> Result<Option<RelPath<'_>>, Refusal> {
        let Some(rel) = self.below_of_any(mount) else { return Ok(None) };
        rel.check_names_file().map(|()| Some(rel))
    }

    /// Returns the same for programs that take every path, also one that no file may have.
    pub fn below_of_any(&self, mount: &str) -> Option<RelPath<'_>> {
        if !matches_prefix(&self.text, mount) {
            return None;
        }
        let rest = self.text[1..].get(mount.trim_matches('/').len()..).unwrap_or_default();
        let directory = self.text.ends_with('/');
        let text = rest.trim_matches('/');
        let bytes = match &self.bytes {
            None => text.as_bytes(),
            // The part in front of `rest` is the record's, and so the same in both.
            Some(bytes) => {
                let rest = bytes.get(self.text.len() - rest.len()..).unwrap_or_default();
                trim_slashes(rest)
            }
        };
        Some(RelPath { text, bytes, directory, dotted: self.dotted, names_file: self.names_file })
    }
}

fn trim_slashes(bytes: &[u8]) -> &[u8] {
    let is_name = |byte: &u8| *byte != b'/';
    let begin = bytes.iter().position(is_name).unwrap_or(bytes.len());
    let end = bytes.iter().rposition(is_name).map_or(begin, |last| last + 1);
    &bytes[begin..end]
}

/// A path below a document root. Invariant: no leading or trailing slash, no empty, `.` or `..`
/// segment, no NUL. Empty is the root itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelPath<'a> {
    text: &'a str,
    /// The decoded path in bytes. It differs from `text` only if it is not UTF-8.
    bytes: &'a [u8],
    directory: bool,
    dotted: bool,
    names_file: bool,
}

/// The same for another thread.
#[derive(Debug)]
pub struct OwnedRelPath {
    text: Box<str>,
    bytes: Box<[u8]>,
    directory: bool,
    dotted: bool,
    names_file: bool,
}

impl OwnedRelPath {
    pub fn borrow(&self) -> RelPath<'_> {
        let Self { text, bytes, directory, dotted, names_file } = self;
        RelPath { text, bytes, directory: *directory, dotted: *dotted, names_file: *names_file }
    }
}

impl<'a> RelPath<'a> {
    pub fn to_owned(self) -> OwnedRelPath {
        let Self { text, bytes, directory, dotted, names_file } = self;
        OwnedRelPath { text: text.into(), bytes: bytes.into(), directory, dotted, names_file }
    }

    /// Returns the decoded bytes, which may be invalid UTF-8.
    pub fn as_bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// # Errors
    /// Fails if no file may be served under it.
    pub fn check_names_file(self) -> Result<(), Refusal> {
        if !self.names_file {
            return Err(Refusal::NotFound);
        }
        if self.text.len() > SITE_PATH_LEN_MAX {
            return Err(Refusal::TargetTooLong);
        }
        Ok(())
    }

    /// Returns whether its first `len` bytes may name a file, whatever follows them.
    pub fn begins_as_file(self, len: usize) -> bool {
        let begin = self.text.get(..len).unwrap_or_default();
        let is_doubtful =
            || begin.contains('\\') || begin.contains("%2F") || begin.contains(char::REPLACEMENT_CHARACTER);
        len <= SITE_PATH_LEN_MAX && (self.names_file || !is_doubtful())
    }

    pub fn as_str(self) -> &'a str {
        self.text
    }

    /// Returns whether it ended with a slash.
    pub fn is_directory(self) -> bool {
        self.directory
    }

    /// Returns the last segment.
    pub fn name(self) -> &'a str {
        self.text.rsplit('/').next().unwrap_or_default()
    }

    /// Returns whether some segment is hidden.
    pub fn is_hidden(self) -> bool {
        self.dotted && is_hidden(self.text)
    }
}

/// Returns whether some segment of `text` begins with a dot: `.git`, `.htaccess`. `.well-known`
/// at the top is public.
pub fn is_hidden(text: &str) -> bool {
    text.split('/')
        .enumerate()
        .any(|(place, segment)| segment.starts_with('.') && !(place == 0 && segment == WELL_KNOWN))
}

/// Returns whether the decoded `path` is `prefix` or lies below it, segment by segment and
/// case-sensitively. `/blog` has `/blog/x` below it and not `/blogger`. Slashes at either end do
/// not matter. Everything is below the prefix `/`.
pub fn matches_prefix(path: &str, prefix: &str) -> bool {
    let prefix = prefix.trim_matches('/');
    if prefix.is_empty() {
        return true;
    }
    match path.trim_start_matches('/').strip_prefix(prefix) {
        Some(rest) => rest.is_empty() || rest.starts_with('/'),
        None => false,
    }
}

/// Returns whether decoding and normalising would change nothing, which is the case for nearly
/// every request. It has no escape, no backslash, no NUL, and no segment that is empty or begins
/// with a dot.
fn is_normal(raw: &[u8]) -> bool {
    let mut after_slash = false;
    for &byte in raw {
        match byte {
            b'%' | b'\\' | 0 => return false,
            b'/' | b'.' if after_slash => return false,
            _ => after_slash = byte == b'/',
        }
    }
    true
}

/// Puts the path of a request into its canonical form, as `route` matched it. `mount` is the path
/// of the site.
///
/// # Errors
/// Fails if it has no form on which all readers agree.
pub fn canonicalize(path: &mut Box<str>, mount: &str) -> Result<(), Refusal> {
    if !path.starts_with('/') {
        return Err(Refusal::BadRequest("the path does not begin with a slash"));
    }
    if !is_normal(path.as_bytes()) {
        let mounted = mount.split('/').filter(|segment| !segment.is_empty()).count();
        *path = merge_slashes(resolve(path)?, mounted).into();
    }
    Ok(())
}

/// Removes dot segments and unnecessary escapes. Empty segments stay, but not in front.
fn resolve(raw: &str) -> Result<String, Refusal> {
    let mut out = String::with_capacity(raw.len());
    let mut decoded = Vec::new();
    let mut directory = false;
    for segment in raw.split('/').skip(1) {
        decode(segment.as_bytes(), &mut decoded)?;
        directory = true;
        match SegmentKind::of(&decoded)? {
            SegmentKind::Empty if out.is_empty() => {}
            SegmentKind::Empty => out.push('/'),
            SegmentKind::Here => {}
            SegmentKind::Up => {
                out.truncate(out.trim_end_matches('/').len());
                out.truncate(out.rfind('/').ok_or(ABOVE_ROOT)?);
            }
            SegmentKind::Name => {
                out.push('/');
                push_unescaped(&mut out, segment);
                directory = false;
            }
        }
    }
    if out.is_empty() || directory && !out.ends_with('/') {
        out.push('/');
    }
    Ok(out)
}

/// Merges runs of `/` at the front of `path`, up to the first `names` segments that are not
/// empty.
fn merge_slashes(path: String, names: usize) -> String {
    if !path.contains("//") {
        return path;
    }
    let mut out = String::with_capacity(path.len());
    let mut rest = path.as_str();
    for _ in 0..names {
        if rest.is_empty() {
            break;
        }
        rest = rest.trim_start_matches('/');
        let end = rest.find('/').unwrap_or(rest.len());
        out.push('/');
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

/// Appends the segment. Escapes stay only if they mean something other than the character itself.
/// All of them are valid.
fn push_unescaped(out: &mut String, segment: &str) {
    let mut rest = segment;
    while let Some(at) = rest.find('%') {
        let (escape, after) = rest[at..].split_at(3);
        out.push_str(&rest[..at]);
        match u8::from_str_radix(&escape[1..], 16) {
            Ok(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => out.push(char::from(byte)),
            _ => out.push_str(escape),
        }
        rest = after;
    }
    out.push_str(rest);
}

const ABOVE_ROOT: Refusal = Refusal::BadRequest("the path leads above the root");

/// One decoded segment of a path.
enum SegmentKind {
    Empty,
    /// `.`
    Here,
    /// `..`
    Up,
    Name,
}

impl SegmentKind {
    fn of(decoded: &[u8]) -> Result<Self, Refusal> {
        let is_dots = |part: &[u8]| {
            let name = part.split(|&byte| byte == b';').next().unwrap_or_default();
            matches!(name, b"." | b"..")
        };
        match decoded {
            b"" => Ok(Self::Empty),
            b"." => Ok(Self::Here),
            b".." => Ok(Self::Up),
            name if name.split(|byte| matches!(byte, b'/' | b'\\')).any(is_dots) => {
                Err(Refusal::BadRequest("the path has '.' or '..' beside an encoded slash, '\\' or ';'"))
            }
            _ => Ok(Self::Name),
        }
    }
}

/// Decodes the escapes of one segment into `decoded`.
fn decode(segment: &[u8], decoded: &mut Vec<u8>) -> Result<(), Refusal> {
    const MALFORMED: Refusal = Refusal::BadRequest("a percent escape in the path is malformed");
    decoded.clear();
    let mut rest = segment;
    while let [byte, tail @ ..] = rest {
        if *byte == b'%' {
            let [high, low, after @ ..] = tail else { return Err(MALFORMED) };
            let value = hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low);
            decoded.push(value.ok_or(MALFORMED)?);
            rest = after;
        } else {
            decoded.push(*byte);
            rest = tail;
        }
    }
    if decoded.contains(&0) {
        return Err(Refusal::BadRequest("the path has a NUL in it"));
    }
    Ok(())
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// Decodes the slow way: segment by segment.
#[derive(Default)]
struct PathDecoder {
    /// Each segment with its slash in front.
    text: Vec<u8>,
    dotted: bool,
    encoded_slash: bool,
}

impl PathDecoder {
    fn run<'a>(mut self, raw: &str) -> Result<SitePath<'a>, Refusal> {
        let mut decoded = Vec::new();
        let mut directory = false;
        for segment in raw.split('/').skip(1) {
            decode(segment.as_bytes(), &mut decoded)?;
            directory = true;
            match SegmentKind::of(&decoded)? {
                SegmentKind::Empty | SegmentKind::Here => {}
                SegmentKind::Up => {
                    let parent = memchr::memrchr(b'/', &self.text).ok_or(ABOVE_ROOT)?;
                    self.text.truncate(parent);
                }
                SegmentKind::Name => {
                    self.push(&decoded);
                    directory = false;
                }
            }
        }
        if directory {
            self.text.push(b'/');
        }
        let plain = !self.encoded_slash && memchr::memchr(b'\\', &self.text).is_none();
        let (text, bytes) = match String::from_utf8(self.text) {
            Ok(text) => (text, None),
            Err(error) => {
                let bytes = error.into_bytes();
                (String::from_utf8_lossy(&bytes).into_owned(), Some(bytes))
            }
        };
        let names_file = plain && bytes.is_none();
        Ok(SitePath { text: Cow::Owned(text), bytes, names_file, dotted: self.dotted })
    }

    fn push(&mut self, name: &[u8]) {
        self.dotted |= name[0] == b'.';
        self.text.push(b'/');
        for &byte in name {
            match byte {
                // A slash here was `%2F`. It stays encoded, so that no later reader takes it for
                // a separator.
                b'/' => {
                    self.encoded_slash = true;
                    self.text.extend_from_slice(b"%2F");
                }
                _ => self.text.push(byte),
            }
        }
    }
}

//! From the path of a request, as sent, to the one path that is routed, looked up and passed on.
//!
//! Decisions, in one place because routing, `deny`, the file system and applications must agree on them:
//! - Percent escapes are decoded exactly once. A malformed escape or a NUL is a bad request for every backend.
//! - `.` and `..` are resolved here, by text, and never above `/`: going above it is a bad request. What a
//!   symbolic link means is the kernel's business (`files::beneath`).
//! - Runs of `/` count as one, as they do for the kernel; otherwise `//data` would slip past `deny: ["/data"]`.
//! - An encoded slash (`%2F`) is no separator, and a backslash is one only elsewhere. Routing accepts both as
//!   plain text, because an application may use them; no *file* is served under such a name (404), nor under one
//!   that is not UTF-8.
//! - `.` or `..` beside an encoded slash, a backslash or a path parameter (`..%2f`, `..\`, `..;x`) is a bad request:
//!   some servers resolve it and others do not, so it could be routed as one path and answered as another.
//! - An application gets the canonical form (`canonicalize`): dot segments resolved, escapes of unreserved
//!   characters decoded (RFC 3986 section 6.2.2), no run of `/` before or in the site's own path. Further in, an
//!   empty segment stays, because an application may mean it (`/fetch/http://example.org/`).
//!
//! Not here: opening anything (`files`), choosing the site (`route`).

use std::borrow::Cow;

use nagaya_base::limits::SITE_PATH_LEN_MAX;

use crate::refusal::Refusal;

#[cfg(test)]
mod tests;

/// Hidden names are never served, except this one at the top (RFC 8615).
const WELL_KNOWN: &str = ".well-known";

/// The whole path of a request, decoded and normal: begins with `/`, has no empty, `.` or `..` segment, and ends
/// with `/` exactly if it names a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePath<'a> {
    text: Cow<'a, str>,
    /// False if no file may be served under it: see the decisions above.
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
            return Ok(Self { text: Cow::Borrowed(raw), names_file: true, dotted: false });
        }
        Decoder::default().run(raw)
    }

    /// Decoded; where it was not UTF-8, with replacement characters.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The same, to keep.
    pub fn into_text(self) -> Cow<'a, str> {
        self.text
    }

    /// The path below `mount` (a site's `path`), or `None` if this path is not at or below it.
    pub fn below(&self, mount: &str) -> Result<Option<RelPath<'_>>, Refusal> {
        if !matches_prefix(&self.text, mount) {
            return Ok(None);
        }
        if !self.names_file {
            return Err(Refusal::NotFound);
        }
        let rest = self.text[1..].get(mount.trim_matches('/').len()..).unwrap_or_default();
        let directory = self.text.ends_with('/');
        let text = rest.trim_matches('/');
        if text.len() > SITE_PATH_LEN_MAX {
            return Err(Refusal::TargetTooLong);
        }
        Ok(Some(RelPath { text, directory, dotted: self.dotted }))
    }
}

/// A path beneath a document root: no leading or trailing slash, no empty, `.` or `..` segment, no NUL. Empty is
/// the root itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelPath<'a> {
    text: &'a str,
    directory: bool,
    dotted: bool,
}

/// The same for another thread.
#[derive(Debug)]
pub struct OwnedRelPath {
    text: Box<str>,
    directory: bool,
    dotted: bool,
}

impl OwnedRelPath {
    pub fn borrow(&self) -> RelPath<'_> {
        RelPath { text: &self.text, directory: self.directory, dotted: self.dotted }
    }
}

impl<'a> RelPath<'a> {
    pub fn to_owned(self) -> OwnedRelPath {
        OwnedRelPath { text: self.text.into(), directory: self.directory, dotted: self.dotted }
    }

    pub fn as_str(self) -> &'a str {
        self.text
    }

    /// It ended with a slash.
    pub fn is_directory(self) -> bool {
        self.directory
    }

    /// The last segment.
    pub fn name(self) -> &'a str {
        self.text.rsplit('/').next().unwrap_or_default()
    }

    /// Some segment is hidden.
    pub fn is_hidden(self) -> bool {
        self.dotted && is_hidden(self.text)
    }

    /// At or below one of these prefixes.
    pub fn is_below_any(self, prefixes: &[String]) -> bool {
        prefixes.iter().any(|prefix| matches_prefix(self.text, prefix))
    }
}

/// True if some segment of `text` begins with a dot: `.git`, `.htaccess`. `.well-known` at the top is meant for
/// the public.
pub fn is_hidden(text: &str) -> bool {
    text.split('/')
        .enumerate()
        .any(|(place, segment)| segment.starts_with('.') && !(place == 0 && segment == WELL_KNOWN))
}

/// Whether the decoded `path` is `prefix` or lies below it, segment by segment and case-sensitively: `/blog` has
/// `/blog/x` below it and not `/blogger`. Slashes at either end do not matter; the prefix `/` has everything
/// below it.
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

/// True if decoding and normalising would change nothing, which is the case for nearly every request: no escape,
/// no backslash, no NUL, and no segment that is empty or begins with a dot.
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

/// Puts the path of a request into its canonical form, as `route` matched it with the path of the site, `mount`.
///
/// # Errors
/// If it has no form on which all readers agree.
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

/// Without dot segments and without escapes that need not be. Empty segments stay, but not in front.
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

/// Takes the runs of `/` out of the front of `path`, as far as the first `names` segments that are not empty.
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

/// The segment with escapes only where they mean something else than the character itself. All of them are sound.
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

/// The slow way: segment by segment.
#[derive(Default)]
struct Decoder {
    /// Each segment with its slash in front.
    text: Vec<u8>,
    dotted: bool,
    encoded_slash: bool,
}

impl Decoder {
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
        let (text, utf8) = match String::from_utf8(self.text) {
            Ok(text) => (text, true),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), false),
        };
        Ok(SitePath { text: Cow::Owned(text), names_file: plain && utf8, dotted: self.dotted })
    }

    fn push(&mut self, name: &[u8]) {
        self.dotted |= name[0] == b'.';
        self.text.push(b'/');
        for &byte in name {
            match byte {
                // A slash here was `%2F`. It stays encoded, so that no later reader takes it for a separator.
                b'/' => {
                    self.encoded_slash = true;
                    self.text.extend_from_slice(b"%2F");
                }
                _ => self.text.push(byte),
            }
        }
    }
}

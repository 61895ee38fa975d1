//! From the path of a request, as sent, to a path that is safe to look up beneath a document root.
//!
//! Decisions, in one place because routing, `deny` and the file system must agree on them:
//! - Percent escapes are decoded exactly once. A malformed escape or a NUL is a bad request for every backend.
//! - `.` and `..` are resolved here, by text, and never above `/`: going above it is a bad request. What a
//!   symbolic link means is the kernel's business (`files::beneath`).
//! - Runs of `/` count as one, as they do for the kernel; otherwise `//data` would slip past `deny: ["/data"]`.
//! - An encoded slash (`%2F`) is no separator, and a backslash is one only elsewhere. Routing accepts both as
//!   plain text, because an application may use them; no *file* is served under such a name (404), nor under one
//!   that is not UTF-8.
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

impl<'a> RelPath<'a> {
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
        let mut directory = false;
        for segment in raw.split('/').skip(1) {
            let start = self.text.len();
            self.text.push(b'/');
            self.push_decoded(segment.as_bytes())?;
            directory = true;
            match &self.text[start + 1..] {
                b"" | b"." => self.text.truncate(start),
                b".." => {
                    self.text.truncate(start);
                    let parent = memchr::memrchr(b'/', &self.text)
                        .ok_or(Refusal::BadRequest("the path leads above the root"))?;
                    self.text.truncate(parent);
                }
                name => {
                    self.dotted |= name[0] == b'.';
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

    fn push_decoded(&mut self, segment: &[u8]) -> Result<(), Refusal> {
        const MALFORMED: Refusal = Refusal::BadRequest("a percent escape in the path is malformed");
        let mut rest = segment;
        while let [byte, tail @ ..] = rest {
            let decoded = if *byte == b'%' {
                let [high, low, after @ ..] = tail else { return Err(MALFORMED) };
                let value = hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low);
                rest = after;
                value.ok_or(MALFORMED)?
            } else {
                rest = tail;
                *byte
            };
            match decoded {
                0 => return Err(Refusal::BadRequest("the path has a NUL in it")),
                // A slash here was `%2F`. It stays encoded, so that no later reader takes it for a separator.
                b'/' => {
                    self.encoded_slash = true;
                    self.text.extend_from_slice(b"%2F");
                }
                _ => self.text.push(decoded),
            }
        }
        Ok(())
    }
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

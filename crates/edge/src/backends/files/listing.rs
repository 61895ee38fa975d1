//! Renders the page that lists a directory, for sites that enable it.
//!
//! Not here: whether the directory may be served, and its index (`files`).

use std::fmt::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use http::StatusCode;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use nagaya_records::record::FileRoot;
use percent_encoding::utf8_percent_encode;
use rustix::fs::{AtFlags, Dir, FileType, StatxFlags};

use crate::backends::files::beneath::LookupError;
use crate::backends::files::{FileContext, PATH_ESCAPED, beneath, join, refuse_denied};
use crate::http::message::{Response, ResponseBody};

/// Maximum number of entries read in one directory. Each costs a system call.
const LISTING_ENTRIES_MAX: usize = 2000;

pub(super) struct ListingEntry {
    name: String,
    directory: bool,
    /// Size in bytes and time of last change. `None` for symbolic links.
    file: Option<(u64, i64)>,
}

/// Returns the page for the result of `read`: directories first, then by name.
pub(super) fn respond(ctx: &FileContext<'_>, (mut entries, complete): (Vec<ListingEntry>, bool)) -> Response {
    entries.sort_by(|a, b| b.directory.cmp(&a.directory).then_with(|| a.name.cmp(&b.name)));
    let page = page(ctx.path.as_str(), !ctx.rel.as_str().is_empty(), &entries, complete);
    Response::new(StatusCode::OK)
        .with_header(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"))
        .with_header(CACHE_CONTROL, HeaderValue::from_static("no-cache"))
        // Tenants' users choose the names. They are escaped; this policy is a second protection.
        .with_header(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"))
        .with_header(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"))
        .with_body(ResponseBody::Bytes(Bytes::from(page)))
}

/// Returns the entries of `directory`, which is at `path`, and whether these are all. Hidden,
/// denied and unservable names are left out.
pub(super) fn read(
    directory: &OwnedFd,
    path: &str,
    files: &FileRoot,
) -> Result<(Vec<ListingEntry>, bool), LookupError> {
    let mut entries = Vec::new();
    for (seen, entry) in Dir::read_from(directory)?.enumerate() {
        let entry = entry?;
        if seen == LISTING_ENTRIES_MAX {
            return Ok((entries, false));
        }
        // A name that is not text, or contains a backslash, could not be requested (`path`).
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name.starts_with('.') || name.contains('\\') {
            continue;
        }
        if refuse_denied(&join(path, name), files).is_err() {
            continue;
        }
        // Links are not followed, because the target's size and date may belong to another site.
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let mask = StatxFlags::TYPE | StatxFlags::SIZE | StatxFlags::MTIME;
        let Ok(stat) = rustix::fs::statx(directory, name, flags, mask) else { continue };
        let kind = beneath::file_type(&stat);
        let is_file = kind == FileType::RegularFile;
        if is_file || kind == FileType::Directory || kind == FileType::Symlink {
            entries.push(ListingEntry {
                name: name.to_owned(),
                directory: kind == FileType::Directory,
                file: is_file.then_some((stat.stx_size, stat.stx_mtime.tv_sec)),
            });
        }
    }
    Ok((entries, true))
}

fn page(path: &str, has_parent: bool, entries: &[ListingEntry], complete: bool) -> String {
    let mut page = String::with_capacity(256 + entries.len() * 128);
    let title = HtmlEscaped(path);
    // Writing to a string cannot fail.
    let _ = writeln!(
        page,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Index of {title}</title>\
         <h1>Index of {title}</h1><table><tr><th>Name<th>Bytes<th>Changed"
    );
    if has_parent {
        page.push_str("<tr><td><a href=\"../\">../</a><td><td>\n");
    }
    for entry in entries {
        let slash = if entry.directory { "/" } else { "" };
        // Without `./` in front, a name like `a:b` would be read as a scheme.
        let link = utf8_percent_encode(&entry.name, PATH_ESCAPED).to_string();
        let _ = write!(
            page,
            "<tr><td><a href=\"./{}{slash}\">{}{slash}</a><td>",
            HtmlEscaped(&link),
            HtmlEscaped(&entry.name)
        );
        let _ = match entry.file {
            Some((size, changed)) => writeln!(page, "{size}<td>{}", date(changed)),
            None => writeln!(page, "<td>"),
        };
    }
    page.push_str("</table>\n");
    if !complete {
        let _ = writeln!(page, "<p>There is more: only {LISTING_ENTRIES_MAX} entries were looked at.");
    }
    page.push_str("</html>\n");
    page
}

/// Returns the form of HTTP dates. Empty for a time before 1970.
fn date(seconds: i64) -> String {
    /// HTTP dates have four digits for the year.
    const YEAR_10000: u64 = 253_402_300_800;
    match u64::try_from(seconds) {
        Ok(seconds) if seconds < YEAR_10000 => {
            httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds))
        }
        _ => String::new(),
    }
}

/// Writes text as HTML, in content and in quoted attributes.
struct HtmlEscaped<'a>(&'a str);

impl std::fmt::Display for HtmlEscaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|character| match character {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            other => f.write_char(other),
        })
    }
}

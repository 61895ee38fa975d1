//! Finds the program of a path, for sites whose files are partly programs.
//!
//! Not here: running it (`cgi`, `php`), or its rights, which the keeper checks when it starts the
//! program.

use nagaya_records::record::{AppProtocol, Backend, FileRoot};

use crate::backends::files::beneath::{LookupBase, LookupError};
use crate::backends::files::{PathKind, refuse_denied};
use crate::http::path::{RelPath, is_hidden};
use crate::http::refusal::Refusal;

/// States which of a site's files are programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramKind {
    None,
    Cgi,
    Php,
    /// Scripts for an application.
    FastCgi,
}

/// A program, and the part of the path that it interprets itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundProgram {
    /// Relative to the document root, without a leading slash.
    pub script: String,
    /// RFC 3875 section 4.1.5: empty, or with a leading slash. Decoded, but for `%2F`. It is not
    /// always UTF-8.
    pub path_info: Vec<u8>,
    /// It answers for a path that is not its file.
    pub is_front: bool,
}

/// Endings that servers run as PHP, or that programs in PHP include.
const PHP_SOURCES: &[&str] =
    &[".php", ".php3", ".php4", ".php5", ".php7", ".php8", ".phtml", ".pht", ".phar", ".inc"];

/// Endings by which editors and people mark a copy of a program.
const COPIES: &[&str] =
    &["~", ".bak", ".old", ".orig", ".save", ".swp", ".dist", ".tmp", ".txt", ".disabled", ".1", ".2"];

impl ProgramKind {
    pub fn of(backend: &Backend) -> Self {
        match backend {
            Backend::Cgi(_) => Self::Cgi,
            Backend::Php(_) => Self::Php,
            Backend::App(app) if app.protocol == AppProtocol::FastCgi => Self::FastCgi,
            Backend::Static(_) | Backend::Http(_) | Backend::App(_) => Self::None,
        }
    }

    /// Returns whether a file of this name is a program, in any case of letters. A file that is
    /// not run would be sent, and nobody wants to send `Config.PHP`.
    pub fn contains(self, files: &FileRoot, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Php => {
                ends_with(name, ".php") || files.extensions.iter().any(|extension| ends_with(name, extension))
            }
            Self::FastCgi if files.extensions.is_empty() => ends_with(name, ".php"),
            Self::Cgi if files.extensions.is_empty() => ends_with(name, ".cgi"),
            Self::Cgi | Self::FastCgi => files.extensions.iter().any(|extension| ends_with(name, extension)),
        }
    }

    /// Returns whether a file of this name has the text of a program and is never sent. These are
    /// programs, files that programs include, and copies of both.
    pub fn is_source(self, files: &FileRoot, name: &str) -> bool {
        if self == Self::None {
            return false;
        }
        let copy_of = COPIES.iter().find(|mark| ends_with(name, mark));
        let name = copy_of.map_or(name, |mark| &name[..name.len() - mark.len()]);
        let is_php = || self != Self::Cgi && PHP_SOURCES.iter().any(|ending| ends_with(name, ending));
        self.contains(files, name) || is_php()
    }

    /// Returns the names tried for a directory, in order.
    pub fn index(self, files: &FileRoot) -> impl Iterator<Item = &str> {
        let defaults: &[&str] = match self {
            _ if !files.index.is_empty() => &[],
            Self::None => &["index.html"],
            Self::Cgi => &["index.cgi", "index.html"],
            Self::Php | Self::FastCgi => &["index.php", "index.html"],
        };
        files.index.iter().map(String::as_str).chain(defaults.iter().copied())
    }
}

fn ends_with(name: &str, extension: &str) -> bool {
    let start = name.len().checked_sub(extension.len());
    start.and_then(|start| name.get(start..)).is_some_and(|end| end.eq_ignore_ascii_case(extension))
}

/// Returns the program that answers this path, if one does. Otherwise `serve` answers.
///
/// The order is:
///
/// - the first part of the path that is a program's file, with the rest as `PATH_INFO`
/// - the index program of a directory
/// - the front controller, if there is no file
///
/// A path that no file may have (`path`), or whose file must stay hidden, has none.
pub(super) fn find_program(
    look: LookupBase<'_>,
    rel: RelPath<'_>,
    files: &FileRoot,
    programs: ProgramKind,
) -> Result<Option<FoundProgram>, LookupError> {
    if programs == ProgramKind::None {
        return Ok(None);
    }
    if let Some(program) = split(look, rel, files, programs)? {
        return Ok(Some(program));
    }
    let Some(script) = &files.front_controller else {
        rel.check_names_file()?;
        return Ok(find_file(look, rel, files, programs)?.into_program());
    };
    refuse_denied(rel.as_str(), files)?;
    if rel.is_hidden() || rel.check_names_file().is_err() {
        return Ok(Some(front(script, rel, programs)));
    }
    Ok(match find_file(look, rel, files, programs)? {
        PathHandler::Nobody => Some(front(script, rel, programs)),
        found => found.into_program(),
    })
}

/// The handler of a path that does not continue after a program's name.
enum PathHandler {
    File,
    Index(FoundProgram),
    Nobody,
}

impl PathHandler {
    fn into_program(self) -> Option<FoundProgram> {
        match self {
            Self::Index(program) => Some(program),
            Self::File | Self::Nobody => None,
        }
    }
}

fn find_file(
    look: LookupBase<'_>,
    rel: RelPath<'_>,
    files: &FileRoot,
    programs: ProgramKind,
) -> Result<PathHandler, LookupError> {
    let is_answered = match super::lookup(look, rel, files)? {
        PathKind::File => !rel.is_directory(),
        PathKind::Directory => match find_index(look, rel, files, programs)? {
            // Without its slash the directory is redirected to first. Otherwise the links of its
            // index would be wrong.
            Some(script) if rel.is_directory() && programs.contains(files, &script) => {
                return Ok(PathHandler::Index(FoundProgram {
                    script,
                    path_info: Vec::new(),
                    is_front: false,
                }));
            }
            index => index.is_some() || files.listing,
        },
        PathKind::Missing => false,
    };
    Ok(if is_answered { PathHandler::File } else { PathHandler::Nobody })
}

/// Returns the front controller as Apache's `ScriptAlias /` does: a CGI program gets the whole
/// path. PHP programs read `REQUEST_URI`, and some take a `PATH_INFO` for another kind of links.
fn front(script: &str, rel: RelPath<'_>, programs: ProgramKind) -> FoundProgram {
    let path_info = match programs {
        ProgramKind::Cgi => {
            let slash: &[u8] = if rel.is_directory() && !rel.as_str().is_empty() { b"/" } else { b"" };
            [b"/", rel.as_bytes(), slash].concat()
        }
        _ => Vec::new(),
    };
    FoundProgram { script: script.trim_start_matches('/').to_owned(), path_info, is_front: true }
}

/// Only possible program names are looked up, so an ordinary path costs nothing here.
fn split(
    look: LookupBase<'_>,
    rel: RelPath<'_>,
    files: &FileRoot,
    programs: ProgramKind,
) -> Result<Option<FoundProgram>, LookupError> {
    let path = rel.as_str();
    let ends = memchr::memchr_iter(b'/', path.as_bytes()).chain([path.len()]);
    let mut start = 0;
    for end in ends {
        let (script, name) = (&path[..end], &path[start..end]);
        start = end + 1;
        // Its ending need not be that of a program.
        let front = files.front_controller.as_deref().map(|front| front.trim_start_matches('/'));
        if !programs.contains(files, name) && front != Some(script) {
            continue;
        }
        if !rel.begins_as_file(end) || is_hidden(script) {
            return match front {
                Some(_) => Ok(None),
                None => Err(Refusal::NotFound.into()),
            };
        }
        refuse_denied(script, files)?;
        match super::find(look, script)? {
            PathKind::File => {
                let slash: &[u8] = if rel.is_directory() { b"/" } else { b"" };
                let behind = rel.as_bytes().get(end..).unwrap_or_default();
                let path_info = [behind, slash].concat();
                return Ok(Some(FoundProgram { script: script.to_owned(), path_info, is_front: false }));
            }
            PathKind::Directory => {}
            PathKind::Missing => return Ok(None),
        }
    }
    Ok(None)
}

fn find_index(
    look: LookupBase<'_>,
    rel: RelPath<'_>,
    files: &FileRoot,
    programs: ProgramKind,
) -> Result<Option<String>, LookupError> {
    for name in programs.index(files) {
        let path = super::join(rel.as_str(), name);
        refuse_denied(&path, files)?;
        if super::find(look, &path)? == PathKind::File {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

//! Which program a path means, for the sites whose files are partly programs.
//!
//! Not here: running it (`cgi`, `php`), or its rights: the keeper looks at those when it starts the program.

use nagaya_cmdb::record::{Backend, Files, Protocol};

use super::beneath::{Look, LookupError};
use super::{Found, refuse_denied};
use crate::path::{RelPath, is_hidden};
use crate::refusal::Refusal;

/// Which of a site's files are programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Programs {
    None,
    Cgi,
    Php,
    /// Scripts for an application.
    FastCgi,
}

/// A program, and what of the path it is to interpret itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Beneath the document root, without a leading slash.
    pub script: String,
    /// RFC 3875 section 4.1.5: empty, or beginning with a slash. Decoded.
    pub path_info: String,
    /// It answers for a path that it is not the file of.
    pub is_front: bool,
}

/// Endings that servers run as PHP, or that programs in PHP include.
const PHP_SOURCES: &[&str] =
    &[".php", ".php3", ".php4", ".php5", ".php7", ".php8", ".phtml", ".pht", ".phar", ".inc"];

/// How editors and people mark a copy of a program.
const COPIES: &[&str] =
    &["~", ".bak", ".old", ".orig", ".save", ".swp", ".dist", ".tmp", ".txt", ".disabled", ".1", ".2"];

impl Programs {
    pub fn of(backend: &Backend) -> Self {
        match backend {
            Backend::Cgi(_) => Self::Cgi,
            Backend::Php(_) => Self::Php,
            Backend::App(app) if app.protocol == Protocol::FastCgi => Self::FastCgi,
            Backend::Static(_) | Backend::Http(_) | Backend::App(_) => Self::None,
        }
    }

    /// Whether a file of this name is a program. In any case of letters: what is not run would be sent, and
    /// nobody wants to send `Config.PHP`.
    pub fn contains(self, files: &Files, name: &str) -> bool {
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

    /// Whether a file of this name holds the text of a program and is never sent: one that is run, one that programs include, and
    /// copies of both.
    pub fn is_source(self, files: &Files, name: &str) -> bool {
        if self == Self::None {
            return false;
        }
        let copy_of = COPIES.iter().find(|mark| ends_with(name, mark));
        let name = copy_of.map_or(name, |mark| &name[..name.len() - mark.len()]);
        let is_php = || self != Self::Cgi && PHP_SOURCES.iter().any(|ending| ends_with(name, ending));
        self.contains(files, name) || is_php()
    }

    /// The names tried for a directory, in order.
    pub fn index(self, files: &Files) -> impl Iterator<Item = &str> {
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

/// The program that answers this path, if one does; otherwise `serve` answers. In this order: the first part of
/// the path that is a program's file (the rest is `PATH_INFO`), the index program of a directory, the front
/// controller where there is no file.
pub(super) fn find_program(
    look: Look<'_>,
    rel: RelPath<'_>,
    files: &Files,
    programs: Programs,
) -> Result<Option<Program>, LookupError> {
    if programs == Programs::None {
        return Ok(None);
    }
    if let Some(program) = split(look, rel, files, programs)? {
        return Ok(Some(program));
    }
    let answered = match super::lookup(look, rel, files)? {
        Found::File => !rel.is_directory(),
        Found::Directory => match find_index(look, rel, files, programs)? {
            // Without its slash the directory is redirected to first, or the links of its index would be wrong.
            Some(index) if rel.is_directory() && programs.contains(files, &index) => {
                return Ok(Some(Program { script: index, path_info: String::new(), is_front: false }));
            }
            index => index.is_some() || files.listing,
        },
        Found::Missing => false,
    };
    Ok(match &files.front_controller {
        Some(script) if !answered => {
            let script = script.trim_start_matches('/').to_owned();
            // As Apache's `ScriptAlias /` does: all of the path is the program's. PHP programs read `REQUEST_URI`, and some take a
            // `PATH_INFO` for the mark of another kind of links.
            let slash = if rel.is_directory() && !rel.as_str().is_empty() { "/" } else { "" };
            let path_info = match programs {
                Programs::Cgi => format!("/{}{slash}", rel.as_str()),
                _ => String::new(),
            };
            Some(Program { script, path_info, is_front: true })
        }
        _ => None,
    })
}

/// Only names that could be programs are looked up, so an ordinary path costs nothing here.
fn split(
    look: Look<'_>,
    rel: RelPath<'_>,
    files: &Files,
    programs: Programs,
) -> Result<Option<Program>, LookupError> {
    let path = rel.as_str();
    let ends = memchr::memchr_iter(b'/', path.as_bytes()).chain([path.len()]);
    let mut start = 0;
    for end in ends {
        let (script, name) = (&path[..end], &path[start..end]);
        start = end + 1;
        // Its ending need not be one of programs'.
        let front = files.front_controller.as_deref().map(|front| front.trim_start_matches('/'));
        if !programs.contains(files, name) && front != Some(script) {
            continue;
        }
        if is_hidden(script) {
            return Err(Refusal::NotFound.into());
        }
        refuse_denied(script, files)?;
        match super::find(look, script)? {
            Found::File => {
                let slash = if rel.is_directory() { "/" } else { "" };
                let path_info = format!("{}{slash}", &path[end..]);
                return Ok(Some(Program { script: script.to_owned(), path_info, is_front: false }));
            }
            Found::Directory => {}
            Found::Missing => return Ok(None),
        }
    }
    Ok(None)
}

fn find_index(
    look: Look<'_>,
    rel: RelPath<'_>,
    files: &Files,
    programs: Programs,
) -> Result<Option<String>, LookupError> {
    for name in programs.index(files) {
        let path = super::join(rel.as_str(), name);
        refuse_denied(&path, files)?;
        if super::find(look, &path)? == Found::File {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

//! Checks the files of a site that was just added. It finds files that look like programs and would
//! be sent as text. It also finds files for Apache that are not read here, and a document root that
//! the site's programs do not see.
//!
//! It reads only names and modes, follows no link, and is bounded. A root that does not exist, or
//! that this user may not read, is no error. The site may come before its files. Not here: which
//! files are really served (the edge's `files`).

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};
use serde_json::Value;

/// Entries checked, and deepest level of directories.
const ENTRIES_MAX: usize = 20_000;
const DEPTH_MAX: usize = 16;

/// Files named in one warning.
const NAMED_MAX: usize = 5;

/// File name endings that other servers run, or include.
const ENDINGS: &[&str] = &[
    "php", "php3", "php4", "php5", "php7", "php8", "phtml", "pht", "phar", "inc", "cgi", "fcgi", "pl", "py",
    "rb", "lua", "sh", "jsp", "asp", "aspx",
];

/// Endings that a site which runs PHP never sends.
const PHP_ENDINGS: &[&str] = &["php", "php3", "php4", "php5", "php7", "php8", "phtml", "pht", "phar", "inc"];

/// Endings that mark a copy, which begins with the program's own name.
const COPIES: &[&str] = &["bak", "old", "orig", "save", "swp", "dist", "tmp", "txt", "disabled", "1", "2"];

/// Returns warnings about the files of a site with this record, whose tenant has this home.
pub fn warn_of_files(site: &Value, home: Option<&str>) -> Vec<String> {
    let Some(look) = ScanProgress::of(site, home) else { return Vec::new() };
    let mut found = RootScan::default();
    if let Ok(root) = open_directory(CWD, look.root.as_os_str().as_bytes()) {
        look.walk(&root, "", 0, &mut found);
    }
    let root = look.root.display().to_string();
    let mut warnings = Vec::new();
    if let Some(names) = found.programs.list() {
        warnings.push(format!(
            "{names} below {root} look like programs and are sent as text to every client: name their ending (--extension), keep them from being sent (--deny), or move them out of the document root"
        ));
    }
    if let Some(names) = found.kept.list() {
        warnings.push(format!(
            "{names} below {root} look like programs, and are neither run nor sent: to have them run, name their ending (--extension)"
        ));
    }
    if let Some(names) = found.apache.list() {
        warnings.push(format!(
            "{names} below {root} are not read, so they deny, rewrite or protect nothing here. Use --deny, \
             --front-controller and --error-document, or a rule"
        ));
    }
    if !warnings.is_empty() && found.entries >= ENTRIES_MAX {
        warnings.push(format!("only the first {ENTRIES_MAX} entries below {root} were checked"));
    }
    warnings
}

/// Returns a warning if programs of the site do not see its document root. It looks at the path
/// alone, not at links on the way.
pub fn warn_of_hidden_root(site: &Value, home: Option<&str>) -> Option<String> {
    if !matches!(site["backend"]["kind"].as_str(), Some("php" | "cgi")) {
        return None;
    }
    let root = ScanProgress::of(site, home)?.root;
    let directory = nagaya_keeper::hiding_directory(&root, home.map(Path::new))?;
    Some(format!(
        "programs do not see the document root {}, and are refused (NGY0359): their tenant has a {directory} of its own. Move the files out of {directory}",
        root.display()
    ))
}

/// Search criteria, and the directory.
struct ScanProgress {
    root: PathBuf,
    /// Endings of the site's own programs, with their dot, in lower case.
    own: Vec<String>,
    front: Option<String>,
    deny: Vec<String>,
    runs_php: bool,
}

#[derive(Default)]
struct RootScan {
    entries: usize,
    programs: NameMatcher,
    /// Neither run nor sent.
    kept: NameMatcher,
    apache: NameMatcher,
}

#[derive(Default)]
struct NameMatcher {
    count: usize,
    first: Vec<String>,
}

impl NameMatcher {
    fn add(&mut self, path: &str) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(path.escape_debug().to_string());
        }
    }

    fn list(&self) -> Option<String> {
        let named = self.first.join(", ");
        match self.count.checked_sub(self.first.len())? {
            0 if self.count == 0 => None,
            0 => Some(named),
            more => Some(format!("{named} and {more} more")),
        }
    }
}

impl ScanProgress {
    /// Makes a check. `None` for a site without files.
    fn of(site: &Value, home: Option<&str>) -> Option<Self> {
        let backend = &site["backend"];
        let kind = backend["kind"].as_str()?;
        let files = if kind == "app" { &backend["files"] } else { backend };
        let root = Path::new(files["root"].as_str()?);
        let root = if root.is_absolute() { root.to_owned() } else { Path::new(home?).join(root) };
        let texts = |value: &Value| -> Vec<String> {
            let list = value.as_array().into_iter().flatten();
            list.filter_map(|text| text.as_str().map(str::to_owned)).collect()
        };
        let named = texts(&files["extensions"]).iter().map(|ending| ending.to_ascii_lowercase()).collect();
        let own = match (kind, &files["extensions"]) {
            ("static", _) => Vec::new(),
            ("php", _) => [vec![".php".to_owned()], named].concat(),
            ("app", Value::Null) => vec![".php".into()],
            ("cgi", Value::Null) => vec![".cgi".into()],
            _ => named,
        };
        let front = files["front_controller"].as_str().map(|front| front.trim_start_matches('/').to_owned());
        let runs_php = matches!(kind, "php" | "app");
        Some(Self { root, own, front, deny: texts(&files["deny"]), runs_php })
    }

    fn walk(&self, directory: &OwnedFd, path: &str, depth: usize, found: &mut RootScan) {
        let Ok(entries) = Dir::read_from(directory) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            found.entries += 1;
            if found.entries >= ENTRIES_MAX {
                return;
            }
            let text = String::from_utf8_lossy(name);
            let below = if path.is_empty() { text.to_string() } else { format!("{path}/{text}") };
            let Ok(stat) = statat(directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile if name == b".htaccess" => found.apache.add(&below),
                // Hidden names are not served.
                _ if name.starts_with(b".") || self.is_denied(&below) => {}
                FileType::RegularFile if self.is_other_program(&below, &text, stat.st_mode) => {
                    match PhpSource::of(&text).filter(|_| self.runs_php) {
                        None => found.programs.add(&below),
                        Some(PhpSource::Itself) => found.kept.add(&below),
                        Some(PhpSource::Copy) => {}
                    }
                }
                FileType::Directory if depth < DEPTH_MAX => {
                    if let Ok(inner) = open_directory(directory, name) {
                        self.walk(&inner, &below, depth + 1, found);
                    }
                }
                _ => {}
            }
        }
    }

    fn is_denied(&self, path: &str) -> bool {
        self.deny.iter().map(|prefix| prefix.trim_matches('/')).any(|prefix| {
            prefix.is_empty()
                || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }

    /// Returns whether the file looks like a program and is not one of the site's.
    fn is_other_program(&self, path: &str, name: &str, mode: u32) -> bool {
        let name = name.to_ascii_lowercase();
        if self.own.iter().any(|ending| name.ends_with(ending.as_str()))
            || self.front.as_deref() == Some(path)
        {
            return false;
        }
        let name = name.trim_end_matches('~');
        let is_program =
            |name: &str| name.rsplit_once('.').is_some_and(|(_, ending)| ENDINGS.contains(&ending));
        let is_copy = |name: &str| {
            name.rsplit_once('.').is_some_and(|(first, ending)| COPIES.contains(&ending) && is_program(first))
        };
        is_program(name) || is_copy(name) || mode & 0o111 != 0
    }
}

/// A file that holds the text of a PHP program.
enum PhpSource {
    Itself,
    Copy,
}

impl PhpSource {
    fn of(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let is_php =
            |name: &str| name.rsplit_once('.').is_some_and(|(_, ending)| PHP_ENDINGS.contains(&ending));
        if is_php(&name) {
            return Some(Self::Itself);
        }
        let copy_of = name.strip_suffix('~').or_else(|| {
            name.rsplit_once('.').filter(|(_, ending)| COPIES.contains(ending)).map(|(first, _)| first)
        });
        copy_of.filter(|name| is_php(name)).map(|_| Self::Copy)
    }
}

/// Opens a directory and nothing else, not through a link.
fn open_directory(at: impl std::os::fd::AsFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    openat(at, OsStr::from_bytes(name), flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use serde_json::json;

    use super::*;

    fn tree() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = home.path().join("www").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        };
        let names = [
            "index.php",
            "INDEX2.PHP",
            "a.phtml",
            "b.php7",
            "lib/db.inc",
            "config.php.bak",
            "edit.php~",
            "page.html",
            "style.css",
            ".htaccess",
            "admin/.htaccess",
            ".git/hook.sh",
            "data/x.php5",
            "run",
        ];
        names.into_iter().for_each(write);
        fs::set_permissions(home.path().join("www/run"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("/usr/bin", home.path().join("www/bin")).unwrap();
        home
    }

    fn warnings(backend: Value) -> Vec<String> {
        let home = tree();
        warn_of_files(&json!({ "backend": backend }), home.path().to_str())
    }

    #[test]
    fn files_that_would_be_sent_as_text_are_named() {
        let all = warnings(json!({ "kind": "php", "root": "www", "deny": ["/data"] }));
        let [sent, kept, apache] = &all[..] else { panic!("{all:?}") };
        assert!(sent.starts_with("run below"), "{sent}");
        for name in ["a.phtml", "b.php7", "lib/db.inc"] {
            assert!(kept.contains(name), "{name}: {kept}");
        }
        let others = [
            "index.php",
            "INDEX2.PHP",
            "page.html",
            "hook.sh",
            "data/",
            "bin/",
            "config.php.bak",
            "edit.php~",
        ];
        for name in others {
            assert!(!sent.contains(name) && !kept.contains(name), "{name}: {all:?}");
        }
        assert!(apache.contains(".htaccess") && apache.contains("admin/.htaccess"), "{all:?}");
        let named = json!({ "kind": "php", "root": "www", "extensions": [".phtml", ".PHP7"] });
        assert!(!warnings(named)[1].contains("phtml"));
    }

    #[test]
    fn a_root_that_programs_do_not_see_is_told() {
        let warned = |kind: &str, root: &str, home: Option<&str>| {
            let warning = warn_of_hidden_root(&json!({ "backend": { "kind": kind, "root": root } }), home);
            assert!(warning.as_ref().is_none_or(|text| text.contains("NGY0359")), "{warning:?}");
            warning.is_some()
        };
        assert!(warned("php", "/tmp/www", None) && warned("cgi", "/dev/shm/www", Some("/srv/alice")));
        assert!(!warned("static", "/tmp/www", None) && !warned("php", "/srv/www", None));
        assert!(!warned("php", "www", Some("/tmp/alice")), "a home is seen there");
    }

    #[test]
    fn programs_of_the_site_are_none_of_them() {
        let own = json!({ "kind": "cgi", "root": "www", "front_controller": "/run",
            "extensions": [".php", ".phtml", ".php7", ".inc", ".bak", "~", ".php5"] });
        let all = warnings(own);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            warnings(json!({ "kind": "static", "root": "www" }))[0].contains("more"),
            "all of them are sent"
        );
        assert_eq!(warnings(json!({ "kind": "http", "address": "a:1" })), Vec::<String>::new());
        assert_eq!(warnings(json!({ "kind": "php", "root": "missing" })), Vec::<String>::new());
    }
}

//! From the text of `nagaya.toml` to settings, with every mistake found in one pass.
//!
//! Not here: what keys exist (`schema`), what a single value may be (`value`).

use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::mistake::{self, CONFLICT, Mistake, Problem, SYNTAX, UNKNOWN, WRONG_TYPE};
use super::schema::{Key, LISTEN, LISTEN_PATH, SECTIONS, Section};
use super::settings::{Listen, Settings};

/// Most `[[listen]]` entries; each costs one socket per edge thread.
pub const LISTEN_MAX: usize = 256;

/// The settings in `text`, and all that is wrong with it. With mistakes, the settings hold what was right.
pub fn read(file: &Path, text: &str) -> (Settings, Vec<Mistake>) {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader =
        Reader { file, text, settings: Settings::default(), places: Places::default(), mistakes: Vec::new() };
    for error in errors {
        let problem = Problem::new(SYNTAX, error.message().to_owned(), "correct the TOML here".into());
        reader.note(error.span().unwrap_or(0..0), problem);
    }
    reader.table("", document.get_ref());
    reader.cross_check();
    reader.mistakes.sort_by_key(|mistake| (mistake.line, mistake.column));
    (reader.settings, reader.mistakes)
}

/// Where in the file the settings stood that are checked against others.
#[derive(Default)]
struct Places {
    listen: Vec<Range<usize>>,
    user: Option<Range<usize>>,
    uid: Option<Range<usize>>,
    group: Option<Range<usize>>,
}

struct Reader<'a> {
    file: &'a Path,
    text: &'a str,
    settings: Settings,
    places: Places,
    mistakes: Vec<Mistake>,
}

impl Reader<'_> {
    fn note(&mut self, span: Range<usize>, problem: Problem) {
        self.mistakes.push(Mistake::at(self.file, self.text, span.start, problem));
    }

    fn table(&mut self, path: &str, table: &DeTable<'_>) {
        let section = SECTIONS.iter().find(|section| section.path == path);
        for (name, value) in table {
            let full = join(path, name.get_ref());
            if let Some(key) = section.and_then(|s| s.keys.iter().find(|key| key.name == *name.get_ref())) {
                self.key(&full, key, value);
            } else if full == LISTEN_PATH {
                self.listen(value);
            } else if SECTIONS.iter().any(|s| s.path == full || s.path.starts_with(&format!("{full}."))) {
                match value.get_ref() {
                    DeValue::Table(inner) => self.table(&full, inner),
                    other => {
                        let what = format!("'{full}' is a table, not a value of type {}", other.type_str());
                        let hint = format!("write [{full}] and its keys on the lines below");
                        self.note(value.span(), Problem::new(WRONG_TYPE, what, hint));
                    }
                }
            } else {
                let names = section.map_or(&[][..], |section| section.keys).iter().map(|key| key.name);
                self.note(name.span(), unknown(path, name.get_ref(), value.get_ref(), names));
            }
        }
    }

    fn key(&mut self, full: &str, key: &Key<Settings>, value: &Spanned<DeValue<'_>>) {
        match key.kind.check(value.get_ref()) {
            Ok(checked) => {
                (key.set)(&mut self.settings, checked);
                match full {
                    "edge.user" => self.places.user = Some(value.span()),
                    "edge.uid" => self.places.uid = Some(value.span()),
                    "admin.group" => self.places.group = Some(value.span()),
                    _ => {}
                }
            }
            Err(mut problem) => {
                problem.what = format!("{full}: {}", problem.what);
                self.note(value.span(), problem);
            }
        }
    }

    fn listen(&mut self, value: &Spanned<DeValue<'_>>) {
        let entries = value.get_ref().as_array().filter(|list| list.iter().all(|e| e.get_ref().is_table()));
        let Some(entries) = entries else {
            let what = format!("'{LISTEN_PATH}' is a list of tables");
            let hint = "write [[listen]] with address = \"0.0.0.0:80\" below it".into();
            return self.note(value.span(), Problem::new(WRONG_TYPE, what, hint));
        };
        self.settings.listen.clear();
        for entry in entries.iter() {
            if let Some(table) = entry.get_ref().as_table() {
                self.listen_entry(entry.span(), table);
            }
        }
        if entries.len() > LISTEN_MAX {
            let what = format!("{} addresses are listened on; at most {LISTEN_MAX} can be", entries.len());
            self.note(
                value.span(),
                Problem::new(CONFLICT, what, "listen on [::] and 0.0.0.0 instead".into()),
            );
        }
    }

    fn listen_entry(&mut self, span: Range<usize>, table: &DeTable<'_>) {
        let mut listen = Listen { address: ([0, 0, 0, 0], 0).into(), tls: false, by_default: false };
        let mut place = None;
        let mut wrong = false;
        for (name, value) in table {
            let Some(key) = LISTEN.iter().find(|key| key.name == *name.get_ref()) else {
                let names = LISTEN.iter().map(|key| key.name);
                self.note(name.span(), unknown(LISTEN_PATH, name.get_ref(), value.get_ref(), names));
                continue;
            };
            match key.kind.check(value.get_ref()) {
                Ok(checked) => (key.set)(&mut listen, checked),
                Err(mut problem) => {
                    problem.what = format!("{LISTEN_PATH}.{}: {}", key.name, problem.what);
                    self.note(value.span(), problem);
                    wrong = true;
                }
            }
            if key.name == "address" {
                place = Some(value.span());
            }
        }
        match place {
            None => {
                let what = "this [[listen]] has no address".into();
                let hint = "add address = \"0.0.0.0:80\"".into();
                self.note(span, Problem::new(CONFLICT, what, hint));
            }
            Some(place) if !wrong => {
                self.settings.listen.push(listen);
                self.places.listen.push(place);
            }
            Some(_) => {}
        }
    }

    /// What no single key can show.
    fn cross_check(&mut self) {
        let listen = self.settings.listen.clone();
        for (at, (entry, place)) in listen.iter().zip(self.places.listen.clone()).enumerate() {
            // For port 0 the kernel chooses, each time another one.
            let is_same = |other: &Listen| other.address == entry.address && entry.address.port() != 0;
            if let Some(before) = listen[..at].iter().position(is_same) {
                let line =
                    Mistake::at(self.file, self.text, self.places.listen[before].start, conflict("", ""))
                        .line;
                let what = format!("{} is listened on twice", entry.address);
                self.note(place.clone(), conflict(&what, &format!("remove it here, or on line {line}")));
            }
            if entry.tls && self.settings.keeper.certificates.is_none() {
                let what = format!("{} speaks TLS, and there are no certificates", entry.address);
                self.note(
                    place,
                    conflict(&what, "set certificates in [tls] to the directory that holds them"),
                );
            }
        }
        if let (Some(_), Some(place)) = (&self.places.user, &self.places.uid) {
            self.note(place.clone(), conflict("edge.uid and edge.user are both set", "keep one of them"));
        }
        self.check_accounts();
    }

    fn check_accounts(&mut self) {
        if let (Some(user), Some(place)) = (&self.settings.identity.user, self.places.user.clone()) {
            match nix::unistd::User::from_name(user) {
                Ok(Some(found)) if !found.uid.is_root() => {}
                Ok(Some(_)) => {
                    let what = format!("edge.user: '{user}' is root, and the edge must not be");
                    self.note(place, conflict(&what, "name a user without rights of its own"));
                }
                _ => {
                    let what = format!("edge.user: there is no user '{user}' on this machine");
                    let hint = format!(
                        "create it: useradd --system --no-create-home --shell /usr/sbin/nologin {user}"
                    );
                    self.note(place, Problem::new(mistake::ACCOUNT, what, hint));
                }
            }
        }
        if let (Some(group), Some(place)) = (&self.settings.admin.group, self.places.group.clone())
            && !matches!(nix::unistd::Group::from_name(group), Ok(Some(_)))
        {
            let what = format!("admin.group: there is no group '{group}' on this machine");
            self.note(
                place,
                Problem::new(mistake::ACCOUNT, what, format!("create it: groupadd --system {group}")),
            );
        }
    }
}

fn conflict(what: &str, hint: &str) -> Problem {
    Problem::new(CONFLICT, what.into(), hint.into())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// A key or table nobody knows, with the one that was probably meant: spelt alike here, or of this name elsewhere.
fn unknown<'k>(path: &str, name: &str, value: &DeValue<'_>, keys: impl Iterator<Item = &'k str>) -> Problem {
    let what = match (path, value) {
        ("", DeValue::Table(_)) => format!("unknown section [{name}]"),
        ("", _) => format!("unknown key '{name}'"),
        (LISTEN_PATH, _) => format!("unknown key '{name}' in [[{LISTEN_PATH}]]"),
        _ => format!("unknown key '{name}' in [{path}]"),
    };
    let inner = SECTIONS.iter().filter_map(|s| section_below(path, s));
    let listen = (path.is_empty()).then_some(LISTEN_PATH);
    let near: Vec<&str> = keys.chain(inner).chain(listen).collect();
    let hint = if let Some(near) = mistake::nearest(name, near.iter().copied()) {
        format!("did you mean '{near}'?")
    } else if let Some(section) = SECTIONS.iter().find(|s| s.keys.iter().any(|key| key.name == name)) {
        match section.path {
            "" => format!("'{name}' belongs at the top of the file, before the first section"),
            path => format!("'{name}' belongs in [{path}]"),
        }
    } else {
        "`nagaya config reference` lists all keys".into()
    };
    Problem::new(UNKNOWN, what, hint)
}

/// The name by which a section is reached from `path`, if it lies right below it.
fn section_below(path: &str, section: &Section) -> Option<&'static str> {
    let rest =
        if path.is_empty() { section.path } else { section.path.strip_prefix(path)?.strip_prefix('.')? };
    (!rest.is_empty() && !rest.contains('.')).then_some(rest)
}

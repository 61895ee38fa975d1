//! Reads settings from the text of `nagaya.toml`, and finds every mistake in one pass.
//!
//! Not here: the existing keys (`schema`), the check of a single value (`value`).

use std::ops::Range;
use std::path::Path;

use nagaya_rules::RuleFile;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::mistake::{self, CONFLICT, ConfigMistake, ConfigProblem, SYNTAX, UNKNOWN, WRONG_TYPE};
use super::schema::{ARRAYS, ArrayRow, KeyRow, LISTEN, RENAMED, RULES, SECTIONS, SectionRow};
use super::settings::{ListenSettings, NodeSettings, SystemIds};
use crate::tenant_ids::{gid_of, uid_of};

/// Returns the settings in `text`, and all mistakes. With mistakes, the settings hold the correct
/// values.
pub fn read(file: &Path, text: &str) -> (NodeSettings, Vec<ConfigMistake>) {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = ConfigReader {
        file,
        text,
        settings: NodeSettings::default(),
        places: KeyPlaces::default(),
        mistakes: Vec::new(),
    };
    for error in errors {
        let problem = ConfigProblem::new(SYNTAX, error.message().to_owned(), "correct the TOML here".into());
        reader.note(error.span().unwrap_or(0..0), problem);
    }
    reader.table("", document.get_ref());
    reader.cross_check();
    reader.mistakes.sort_by_key(|mistake| (mistake.line, mistake.column));
    (reader.settings, reader.mistakes)
}

/// Positions in the file of settings that are checked against others.
#[derive(Default)]
struct KeyPlaces {
    listen: Vec<Range<usize>>,
    rules: Vec<Range<usize>>,
    user: Option<Range<usize>>,
    uid: Option<Range<usize>>,
    group: Option<Range<usize>>,
    system_users: Option<Range<usize>>,
    system_groups: Option<Range<usize>>,
    /// Keys of `[admin]` that name users and groups.
    roles: Vec<(String, Range<usize>)>,
}

struct ConfigReader<'a> {
    file: &'a Path,
    text: &'a str,
    settings: NodeSettings,
    places: KeyPlaces,
    mistakes: Vec<ConfigMistake>,
}

impl ConfigReader<'_> {
    fn note(&mut self, span: Range<usize>, problem: ConfigProblem) {
        self.mistakes.push(ConfigMistake::at(self.file, self.text, span.start, problem));
    }

    fn line(&self, place: &Range<usize>) -> usize {
        ConfigMistake::at(self.file, self.text, place.start, conflict("", "")).line
    }

    fn table(&mut self, path: &str, table: &DeTable<'_>) {
        let section = SECTIONS.iter().find(|section| section.path == path);
        for (name, value) in table {
            let full = join(path, name.get_ref());
            if let Some(key) = section.and_then(|s| s.keys.iter().find(|key| key.name == *name.get_ref())) {
                self.key(&full, key, value);
            } else if full == LISTEN.path {
                if let Some(entries) = self.entries(&LISTEN, value) {
                    (self.settings.listen, self.places.listen) = entries.into_iter().unzip();
                }
            } else if full == RULES.path {
                if let Some(entries) = self.entries(&RULES, value) {
                    (self.settings.edge.rules, self.places.rules) = entries.into_iter().unzip();
                }
            } else if SECTIONS.iter().any(|s| s.path == full || s.path.starts_with(&format!("{full}."))) {
                match value.get_ref() {
                    DeValue::Table(inner) => self.table(&full, inner),
                    other => {
                        let what = format!("'{full}' is a table, not a value of type {}", other.type_str());
                        let hint = format!("write [{full}] and its keys on the lines below");
                        self.note(value.span(), ConfigProblem::new(WRONG_TYPE, what, hint));
                    }
                }
            } else {
                let names = section.map_or(&[][..], |section| section.keys).iter().map(|key| key.name);
                self.note(name.span(), unknown(path, name.get_ref(), value.get_ref(), names));
            }
        }
    }

    fn key(&mut self, full: &str, key: &KeyRow<NodeSettings>, value: &Spanned<DeValue<'_>>) {
        match key.kind.check(value.get_ref()) {
            Ok(checked) => {
                (key.set)(&mut self.settings, checked);
                match full {
                    "edge.user" => self.places.user = Some(value.span()),
                    "tenants.system_users" => self.places.system_users = Some(value.span()),
                    "tenants.system_groups" => self.places.system_groups = Some(value.span()),
                    "edge.uid" => self.places.uid = Some(value.span()),
                    "admin.group" => self.places.group = Some(value.span()),
                    "admin.read" | "admin.operate" | "admin.all" => {
                        self.places.roles.push((full.to_owned(), value.span()));
                    }
                    _ => {}
                }
            }
            Err(mut problem) => {
                problem.what = format!("{full}: {}", problem.what);
                self.note(value.span(), problem);
            }
        }
    }

    /// Returns the entries of an array of tables without mistakes, each with the position for later
    /// mistakes. `None` if it is not an array of tables.
    fn entries<T>(
        &mut self,
        array: &ArrayRow<T>,
        value: &Spanned<DeValue<'_>>,
    ) -> Option<Vec<(T, Range<usize>)>> {
        let tables = value.get_ref().as_array().filter(|list| list.iter().all(|e| e.get_ref().is_table()));
        let Some(tables) = tables else {
            let what = format!("'{}' is a list of tables", array.path);
            let lines: Vec<_> = array.required.iter().map(|(_, line)| *line).collect();
            let hint = format!("write [[{}]] with {} below it", array.path, lines.join(" and "));
            self.note(value.span(), ConfigProblem::new(WRONG_TYPE, what, hint));
            return None;
        };
        if tables.len() > array.entries_max {
            let what = format!(
                "there are {} entries of [[{}]]; at most {} can be",
                tables.len(),
                array.path,
                array.entries_max
            );
            self.note(value.span(), conflict(&what, array.instead));
        }
        let mut entries = Vec::with_capacity(tables.len());
        for entry in tables.iter() {
            let table = entry.get_ref().as_table()?;
            entries.extend(self.entry(array, entry.span(), table));
        }
        Some(entries)
    }

    fn entry<T>(
        &mut self,
        array: &ArrayRow<T>,
        span: Range<usize>,
        table: &DeTable<'_>,
    ) -> Option<(T, Range<usize>)> {
        let mut read = (array.blank)();
        let mut is_whole = true;
        for (name, value) in table {
            let Some(key) = array.keys.iter().find(|key| key.name == *name.get_ref()) else {
                let names = array.keys.iter().map(|key| key.name);
                self.note(name.span(), unknown(array.path, name.get_ref(), value.get_ref(), names));
                continue;
            };
            match key.kind.check(value.get_ref()) {
                Ok(checked) => (key.set)(&mut read, checked),
                Err(mut problem) => {
                    problem.what = format!("{}.{}: {}", array.path, key.name, problem.what);
                    self.note(value.span(), problem);
                    is_whole = false;
                }
            }
        }
        let mut place = None;
        for (name, line) in array.required {
            match table.get(*name) {
                Some(value) => place = place.or(Some(value.span())),
                None => {
                    let what = format!("this [[{}]] has no {name}", array.path);
                    self.note(span.clone(), conflict(&what, &format!("add {line}")));
                    is_whole = false;
                }
            }
        }
        place.filter(|_| is_whole).map(|place| (read, place))
    }

    /// Checks settings against each other.
    fn cross_check(&mut self) {
        let listen = self.settings.listen.clone();
        for (at, (entry, place)) in listen.iter().zip(self.places.listen.clone()).enumerate() {
            // For port 0 the kernel chooses another port each time.
            let is_same =
                |other: &ListenSettings| other.address == entry.address && entry.address.port() != 0;
            if let Some(before) = listen[..at].iter().position(is_same) {
                let line = self.line(&self.places.listen[before]);
                let what = format!("{} is listened on twice", entry.address);
                self.note(place.clone(), conflict(&what, &format!("remove it here, or on line {line}")));
            }
            if entry.tls && self.settings.keeper.certificates.is_none() {
                let what = format!("{} speaks TLS, and there are no certificates", entry.address);
                self.note(
                    place.clone(),
                    conflict(&what, "set certificates in [tls] to the directory that holds them"),
                );
            }
            self.check_proxies(entry, place);
        }
        let rules = self.settings.edge.rules.clone();
        for (at, (rule, place)) in rules.iter().zip(self.places.rules.clone()).enumerate() {
            let is_same = |other: &RuleFile| other.path == rule.path && other.phase == rule.phase;
            if let Some(before) = rules[..at].iter().position(is_same) {
                let line = self.line(&self.places.rules[before]);
                let what = format!("{} is listed twice for {}", rule.path.display(), rule.phase.as_str());
                self.note(place, conflict(&what, &format!("remove it here, or on line {line}")));
            }
        }
        if let (Some(_), Some(place)) = (&self.places.user, &self.places.uid) {
            self.note(place.clone(), conflict("edge.uid and edge.user are both set", "keep one of them"));
        }
        self.check_accounts();
    }

    fn check_proxies(&mut self, entry: &ListenSettings, place: Range<usize>) {
        let nobody_named = entry.proxy_protocol_from.is_empty();
        if entry.proxy_protocol && nobody_named && self.settings.edge.trusted_proxies.is_empty() {
            let what =
                format!("{} takes PROXY headers, and no proxy is named that may send them", entry.address);
            let hint = "name the proxies in proxy_protocol_from here, or in trusted_proxies of [edge]";
            self.note(place, conflict(&what, hint));
        } else if !entry.proxy_protocol && !nobody_named {
            let what = format!("{} names proxies and takes no PROXY headers", entry.address);
            self.note(place, conflict(&what, "set proxy_protocol = true, or remove proxy_protocol_from"));
        }
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
                    self.note(place, ConfigProblem::new(mistake::ACCOUNT, what, hint));
                }
            }
        }
        self.check_system_ids();
        if let (Some(group), Some(place)) = (&self.settings.admin.group, self.places.group.clone())
            && !matches!(nix::unistd::Group::from_name(group), Ok(Some(_)))
        {
            let what = format!("admin.group: there is no group '{group}' on this machine");
            self.note(
                place,
                ConfigProblem::new(mistake::ACCOUNT, what, format!("create it: groupadd --system {group}")),
            );
        }
        self.check_roles();
    }

    fn check_roles(&mut self) {
        for (key, place) in std::mem::take(&mut self.places.roles) {
            let admin = &self.settings.admin;
            let names = match key.as_str() {
                "admin.read" => &admin.read,
                "admin.operate" => &admin.operate,
                _ => &admin.all,
            };
            let is_missing = |name: &&String| match name.strip_prefix('@') {
                Some(group) => gid_of(group).is_none(),
                None => uid_of(name).is_none(),
            };
            for name in names.clone().iter().filter(is_missing) {
                let (kind, bare) = name.strip_prefix('@').map_or(("user", &**name), |group| ("group", group));
                let what = format!("{key}: there is no {kind} '{bare}' on this machine");
                let hint = "remove it, create it, or write its number; a group has @ in front".to_owned();
                self.note(place.clone(), ConfigProblem::new(mistake::ACCOUNT, what, hint));
            }
        }
    }

    fn check_system_ids(&mut self) {
        let SystemIds { users, groups } = self.settings.system_ids.clone();
        let of_users = self.places.system_users.clone();
        let of_groups = self.places.system_groups.clone();
        let users = users.iter().filter(|name| uid_of(name).is_none()).map(|name| ("user", name, &of_users));
        let groups =
            groups.iter().filter(|name| gid_of(name).is_none()).map(|name| ("group", name, &of_groups));
        for (kind, name, place) in users.chain(groups) {
            let what = format!("tenants.system_{kind}s: there is no {kind} '{name}' on this machine");
            let hint = "remove it, or write its number".to_owned();
            self.note(place.clone().unwrap_or_default(), ConfigProblem::new(mistake::ACCOUNT, what, hint));
        }
    }
}

fn conflict(what: &str, hint: &str) -> ConfigProblem {
    ConfigProblem::new(CONFLICT, what.into(), hint.into())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Reports an unknown key or table, with the one that was probably meant. That is a similar name
/// here, or the same name elsewhere.
fn unknown<'k>(
    path: &str,
    name: &str,
    value: &DeValue<'_>,
    keys: impl Iterator<Item = &'k str>,
) -> ConfigProblem {
    let what = match (path, value) {
        ("", DeValue::Table(_)) => format!("unknown section [{name}]"),
        ("", _) => format!("unknown key '{name}'"),
        _ if ARRAYS.contains(&path) => format!("unknown key '{name}' in [[{path}]]"),
        _ => format!("unknown key '{name}' in [{path}]"),
    };
    let inner = SECTIONS.iter().filter_map(|s| section_below(path, s));
    let arrays = ARRAYS.into_iter().filter(|_| path.is_empty());
    let near: Vec<&str> = keys.chain(inner).chain(arrays).collect();
    let full = join(path, name);
    let hint = if let Some((_, now)) = RENAMED.iter().find(|(before, _)| *before == full) {
        format!("it is now {now}")
    } else if let Some(near) = mistake::nearest(name, near.iter().copied()) {
        format!("did you mean '{near}'?")
    } else if let Some(section) = SECTIONS.iter().find(|s| s.keys.iter().any(|key| key.name == name)) {
        match section.path {
            "" => format!("'{name}' belongs at the top of the file, before the first section"),
            path => format!("'{name}' belongs in [{path}]"),
        }
    } else {
        "`nagaya config reference` lists all keys".into()
    };
    ConfigProblem::new(UNKNOWN, what, hint)
}

/// Returns the name by which a section is reached from `path`, if it is directly below it.
fn section_below(path: &str, section: &SectionRow) -> Option<&'static str> {
    let rest =
        if path.is_empty() { section.path } else { section.path.strip_prefix(path)?.strip_prefix('.')? };
    (!rest.is_empty() && !rest.contains('.')).then_some(rest)
}

//! The rules of the store as files, which the edge watches and reads like those of the operator.
//!
//! A file is written under another name and then put in its place. So no reader sees half of it.
//! That happens before the change is reported as done: a request that is sent then meets the new
//! rule. The directory is made when the node starts and removed when it ends; the store is
//! authoritative.
//!
//! Not here: compiling (`nagaya_rules`), the watch (`nagaya_edge::rules`), which of them are in
//! effect (the configuration).

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, chown, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_records::RecordChange;
use nagaya_store::Store;
use parking_lot::Mutex;

use super::node::SupervisedNode;
use crate::config::settings::rule_file;

const CODE: Code = Code(514);

/// Interval at which a failed write is tried again.
const AGAIN_EVERY: Duration = Duration::from_secs(5);

/// The directory, which only the supervisor changes.
#[derive(Debug)]
pub struct StoredRules {
    dir: PathBuf,
    /// The edge's group, which may read it. `None` if the edge has the rights of this process.
    reader: Option<u32>,
    /// Held while files are changed. True if they differ from the store.
    is_off: Mutex<bool>,
}

impl StoredRules {
    /// Makes the directory and nothing in it.
    pub fn make(dir: PathBuf, reader: Option<u32>) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        // Rules may hold secrets from tenants, and the directory above is open to them.
        if let Some(group) = reader {
            chown(&dir, None, Some(group))?;
        }
        fs::set_permissions(&dir, Permissions::from_mode(if reader.is_some() { 0o750 } else { 0o700 }))?;
        Ok(Self { dir, reader, is_off: Mutex::new(false) })
    }

    /// Makes the files match the store.
    pub fn take_all(&self, store: &dyn Store) {
        let mut is_off = self.is_off.lock();
        let taken = self.try_take_all(store);
        *is_off = taken.is_err();
        if let Err(error) = taken {
            self.say(&error);
        }
    }

    fn try_take_all(&self, store: &dyn Store) -> io::Result<()> {
        let rules = store.rules().map_err(io::Error::other)?;
        let mut wanted: HashSet<OsString> = HashSet::new();
        for rule in &rules {
            let file = rule_file(&self.dir, rule.name.as_str());
            // All threads of the edge need not read an unchanged one again.
            if !fs::read(&file).is_ok_and(|text| text == rule.text.as_bytes()) {
                self.put(&file, &rule.text)?;
            }
            wanted.extend(file.file_name().map(OsString::from));
        }
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if !wanted.contains(&entry.file_name()) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Takes committed changes, in order of revision.
    pub fn follow(&self, changes: &[RecordChange]) {
        for change in changes {
            let (name, text) = match change {
                RecordChange::PutRule(rule) => (&rule.name, Some(&*rule.text)),
                RecordChange::DropRule(name) => (name, None),
                _ => continue,
            };
            let mut is_off = self.is_off.lock();
            let file = rule_file(&self.dir, name.as_str());
            let done = match text {
                Some(text) => self.put(&file, text),
                None => remove(&file),
            };
            if let Err(error) = done {
                *is_off = true;
                self.say(&error);
            }
        }
    }

    fn put(&self, file: &Path, text: &str) -> io::Result<()> {
        // No rule's name begins with a dot.
        let draft = self.dir.join(".new");
        let mut to = OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(&draft)?;
        if let Some(group) = self.reader {
            fchown(&to, None, Some(group))?;
        }
        // The umask may have removed the group's bit.
        to.set_permissions(Permissions::from_mode(0o640))?;
        to.write_all(text.as_bytes())?;
        drop(to);
        fs::rename(&draft, file)
    }

    fn say(&self, error: &io::Error) {
        let dir = self.dir.display();
        tracing::error!(
            code = %CODE,
            "rules of the store cannot be put into {dir}: {error}; those there stay in force, and it is tried again every {} s",
            AGAIN_EVERY.as_secs()
        );
    }
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Tries failed writes again. Never ends.
pub async fn keep(node: Arc<SupervisedNode>) {
    loop {
        tokio::time::sleep(AGAIN_EVERY).await;
        if *node.rules.is_off.lock() {
            let node = Arc::clone(&node);
            // A panic there has been reported.
            let _ = tokio::task::spawn_blocking(move || node.rules.take_all(&*node.store)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use nagaya_records::{RuleName, RuleRecord};
    use nagaya_store::{ChangeMode, RedbStore};

    use super::*;

    fn put(name: &str, text: &str) -> RecordChange {
        RecordChange::PutRule(RuleRecord { name: RuleName::new(name).unwrap(), text: text.into() })
    }

    fn files(rules: &StoredRules) -> Vec<(String, String)> {
        let read = |entry: io::Result<fs::DirEntry>| {
            let path = entry.unwrap().path();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap())
        };
        let mut files: Vec<_> = fs::read_dir(&rules.dir).unwrap().map(read).collect();
        files.sort();
        files
    }

    fn pairs(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn files_are_what_the_store_has() {
        let dir = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&dir.path().join("store.redb")).unwrap();
        store.transaction(vec![put("a", "1"), put("b.rb", "2")], ChangeMode::Merge).unwrap();
        let rules = StoredRules::make(dir.path().join("rules"), None).unwrap();
        // What a node that was killed has left behind.
        for name in ["gone.rb", ".new"] {
            fs::write(rules.dir.join(name), "old").unwrap();
        }
        rules.take_all(&store);
        assert_eq!(files(&rules), pairs(&[("a.rb", "1"), ("b.rb.rb", "2")]));
        rules.follow(&[put("c", "3"), put("a", "4"), RecordChange::DropRule(RuleName::new("b.rb").unwrap())]);
        assert_eq!(files(&rules), pairs(&[("a.rb", "4"), ("c.rb", "3")]));
    }

    #[test]
    fn rule_that_could_not_be_written_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&dir.path().join("store.redb")).unwrap();
        let rules = StoredRules::make(dir.path().join("rules"), None).unwrap();
        fs::create_dir(rule_file(&rules.dir, "a")).unwrap();
        let committed = store.transaction(vec![put("a", "1")], ChangeMode::Merge).unwrap();
        rules.follow(&committed.changes);
        assert!(*rules.is_off.lock());
        fs::remove_dir(rule_file(&rules.dir, "a")).unwrap();
        rules.take_all(&store);
        assert!(!*rules.is_off.lock());
        assert_eq!(files(&rules), pairs(&[("a.rb", "1")]));
    }
}

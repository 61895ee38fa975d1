//! The configuration of the node: one file, one table of keys, all mistakes at once.
//!
//! Not here: tenants and sites (`records`), the meaning of settings to a process (its own
//! `Options`).

pub mod mistake;
mod read;
mod reference;
mod rule_files;
mod schema;
pub mod settings;
mod value;

use std::path::{Path, PathBuf};

pub use mistake::{ConfigMistake, MistakeSeverity};
pub use reference::{dump, reference};
pub use rule_files::check_rules;
pub use settings::NodeSettings;

use self::mistake::{ConfigProblem, FILE_LEN_MAX, UNREADABLE};

/// Settings and their source.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    pub settings: NodeSettings,
    /// `None` if there is no file, and none was named.
    pub file: Option<PathBuf>,
}

/// Reads and checks the file named on the command line, or the default one if it exists.
pub fn load(named: Option<&Path>) -> Result<LoadedConfig, Vec<ConfigMistake>> {
    let file = named.unwrap_or(Path::new(settings::DEFAULT_FILE));
    if named.is_none() && !file.exists() {
        return Ok(LoadedConfig { settings: NodeSettings::default(), file: None });
    }
    let text = read_text(file).map_err(|problem| vec![ConfigMistake::whole(file, problem)])?;
    let (settings, mistakes) = read::read(file, &text);
    if mistakes.is_empty() { Ok(LoadedConfig { settings, file: Some(file.into()) }) } else { Err(mistakes) }
}

fn read_text(file: &Path) -> Result<String, ConfigProblem> {
    let unreadable = |what: String, hint: &str| ConfigProblem::new(UNREADABLE, what, hint.into());
    let meta = std::fs::metadata(file).map_err(|error| {
        unreadable(format!("cannot be read: {error}"), "create it, or give another one with --config")
    })?;
    if meta.len() > FILE_LEN_MAX {
        let what = format!("is {} bytes long; at most {FILE_LEN_MAX} are read", meta.len());
        return Err(unreadable(what, "sites and tenants do not belong here: see `nagaya site --help`"));
    }
    std::fs::read_to_string(file)
        .map_err(|error| unreadable(format!("cannot be read: {error}"), "it must be a text file in UTF-8"))
}

#[cfg(test)]
mod tests;

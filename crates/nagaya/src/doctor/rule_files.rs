//! Rule files as the edge meets them: whether its user may read them, and whether they compile.
//!
//! Not here: compiling (`nagaya_rules`), the message about it (`config::check_rules`).

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::config::{Settings, check_rules};
use crate::supervisor::of_edge;

/// What is wrong with each rule file that is not in order: where, and what.
pub fn troubles(settings: &Settings) -> Vec<String> {
    let mut found: Vec<String> =
        check_rules(settings).iter().map(|mistake| mistake.to_string().replace('\n', ";")).collect();
    if let Some(edge) = of_edge(settings) {
        for rule in &settings.edge.rules {
            if let Ok(path) = fs::canonicalize(&rule.path)
                && let Some(at) = refuses(&path, edge.uid, edge.gid)
            {
                let (rule, at) = (rule.path.display(), at.display());
                found.push(format!("{rule}: the edge (uid {}) may not read it because of {at}", edge.uid));
            }
        }
    }
    found
}

/// The first part of the path whose mode keeps this user out. Access control lists may say otherwise.
fn refuses(path: &Path, uid: u32, gid: u32) -> Option<&Path> {
    let mut parts: Vec<&Path> = path.ancestors().collect();
    parts.reverse();
    parts.into_iter().find(|part| {
        fs::metadata(part).is_ok_and(|meta| {
            let wanted = if meta.is_dir() { 0o1 } else { 0o4 };
            granted(&meta, uid, gid) & wanted == 0
        })
    })
}

/// The three bits of the mode that hold for this user.
fn granted(meta: &Metadata, uid: u32, gid: u32) -> u32 {
    let shift = match () {
        () if meta.uid() == uid => 6,
        () if meta.gid() == gid => 3,
        () => 0,
    };
    meta.mode() >> shift & 0o7
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_closed_directory_or_file_keeps_the_edge_out() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.rb");
        fs::write(&file, "").unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        // A uid and gid that own neither.
        let (uid, gid) = (fs::metadata(&file).unwrap().uid() + 1, fs::metadata(&file).unwrap().gid() + 1);
        mode(dir.path(), 0o755);
        mode(&file, 0o640);
        assert_eq!(refuses(&file, uid, gid), Some(file.as_path()));
        assert_eq!(refuses(&file, uid, gid - 1), None);
        mode(&file, 0o644);
        assert_eq!(refuses(&file, uid, gid), None);
        mode(dir.path(), 0o700);
        assert_eq!(refuses(&file, uid, gid), Some(dir.path()));
        assert_eq!(refuses(&file, uid - 1, gid), None);
    }
}

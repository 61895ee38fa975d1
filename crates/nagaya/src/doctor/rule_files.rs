//! Checks rule files from the edge's view: whether its user may read them, and whether they
//! compile.
//!
//! Not here: compiling (`nagaya_rules`), the message about it (`config::check_rules`).

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::config::{NodeSettings, check_rules};
use crate::identity::of_edge;

/// Returns the fault of each rule file that has one: where, and what.
pub fn troubles(settings: &NodeSettings) -> Vec<String> {
    let mut found: Vec<String> =
        check_rules(settings).iter().map(|mistake| mistake.to_string().replace('\n', ";")).collect();
    if let Some(edge) = of_edge(settings) {
        for rule in &settings.edge.rules {
            if let Some(at) = refuses(&rule.path, edge.uid, edge.gid) {
                let rule = rule.path.display();
                let at = at.display();
                found.push(format!("{rule}: the edge (uid {}) may not read it because of {at}", edge.uid));
            }
        }
    }
    found
}

/// Depth of a directory directly below `/`, including `/` itself. The edge sees no such directory,
/// only the rule in it.
const WIDE_DEPTH: usize = 2;

/// Returns the directory or file whose mode excludes this user. Access control lists may differ.
///
/// The edge sees the directory of the rule, and the one to which its link leads. The directories
/// above are its own (`supervisor::edge_root`), whatever they are on the node.
fn refuses(path: &Path, uid: u32, gid: u32) -> Option<PathBuf> {
    let file = fs::canonicalize(path).ok()?;
    let directory = path.parent().and_then(|directory| fs::canonicalize(directory).ok());
    let directories = [directory, file.parent().map(PathBuf::from)].into_iter().flatten();
    let shown = directories.filter(|directory| directory.components().count() > WIDE_DEPTH);
    shown.chain([file.clone()]).find(|part| {
        fs::metadata(part).is_ok_and(|meta| {
            let wanted = if meta.is_dir() { 0o1 } else { 0o4 };
            granted(&meta, uid, gid) & wanted == 0
        })
    })
}

/// Returns the three bits of the mode that apply to this user.
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
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().canonicalize().unwrap().join("rules");
        fs::create_dir(&dir).unwrap();
        let file = dir.join("a.rb");
        fs::write(&file, "").unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        // A uid and gid that own neither.
        let uid = fs::metadata(&file).unwrap().uid() + 1;
        let gid = fs::metadata(&file).unwrap().gid() + 1;
        mode(&dir, 0o755);
        mode(&file, 0o640);
        assert_eq!(refuses(&file, uid, gid), Some(file.clone()));
        assert_eq!(refuses(&file, uid, gid - 1), None);
        mode(&file, 0o644);
        assert_eq!(refuses(&file, uid, gid), None);
        mode(&dir, 0o700);
        assert_eq!(refuses(&file, uid, gid), Some(dir.clone()));
        assert_eq!(refuses(&file, uid - 1, gid), None);
        // A link to it, from a directory that is open.
        let open = top.path().join("open");
        fs::create_dir(&open).unwrap();
        mode(&open, 0o755);
        std::os::unix::fs::symlink(&file, open.join("b.rb")).unwrap();
        assert_eq!(refuses(&open.join("b.rb"), uid, gid), Some(dir.clone()));
        // Directories above do not matter.
        mode(&dir, 0o755);
        mode(top.path(), 0o700);
        assert_eq!(refuses(&file, uid, gid), None);
    }
}

//! The inodes that the guest knows, each with its path beneath the root.
//!
//! Not here: the files themselves (`super`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Number of the root, by the protocol.
const ROOT: u64 = 1;

/// Maximum number of inodes. A guest that forgets none gets no more.
const INODES_MAX: usize = 1 << 20;

/// The place of an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SharedNode {
    Path(PathBuf),
    /// Its last name was removed. It may still be open.
    Gone,
}

#[derive(Debug)]
pub struct InodeTable {
    next: u64,
    nodes: HashMap<u64, CountedNode>,
    numbers: HashMap<PathBuf, u64>,
}

#[derive(Debug)]
struct CountedNode {
    node: SharedNode,
    /// Number of look-ups that the guest has not forgotten.
    lookups: u64,
}

impl Default for InodeTable {
    fn default() -> Self {
        let root = CountedNode { node: SharedNode::Path(PathBuf::new()), lookups: 1 };
        Self {
            next: ROOT,
            nodes: HashMap::from([(ROOT, root)]),
            numbers: HashMap::from([(PathBuf::new(), ROOT)]),
        }
    }
}

impl InodeTable {
    pub fn get(&self, inode: u64) -> Option<SharedNode> {
        self.nodes.get(&inode).map(|counted| counted.node.clone())
    }

    /// Counts a look-up of this path. Returns its inode. `None` if there are too many.
    pub fn enter(&mut self, path: PathBuf) -> Option<u64> {
        if let Some(inode) = self.numbers.get(&path) {
            if let Some(counted) = self.nodes.get_mut(inode) {
                counted.lookups += 1;
            }
            return Some(*inode);
        }
        if self.nodes.len() >= INODES_MAX {
            return None;
        }
        self.next += 1;
        self.nodes.insert(self.next, CountedNode { node: SharedNode::Path(path.clone()), lookups: 1 });
        self.numbers.insert(path, self.next);
        Some(self.next)
    }

    pub fn forget(&mut self, inode: u64, count: u64) {
        let Some(counted) = self.nodes.get_mut(&inode).filter(|_| inode != ROOT) else { return };
        counted.lookups = counted.lookups.saturating_sub(count);
        if counted.lookups > 0 {
            return;
        }
        if let Some(CountedNode { node: SharedNode::Path(path), .. }) = self.nodes.remove(&inode) {
            self.numbers.remove(&path);
        }
    }

    /// The path was removed.
    pub fn remove(&mut self, path: &Path) {
        if let Some(inode) = self.numbers.remove(path)
            && let Some(counted) = self.nodes.get_mut(&inode)
        {
            counted.node = SharedNode::Gone;
        }
    }

    /// The path has another name now, with all below it. `exchanges`: the two have each other's.
    pub fn rename(&mut self, from: &Path, to: &Path, exchanges: bool) {
        let below = |table: &Self, root: &Path| -> Vec<(PathBuf, u64)> {
            let all = table.numbers.iter().filter(|(path, _)| path.starts_with(root));
            all.map(|(path, inode)| (path.clone(), *inode)).collect()
        };
        let (moved, replaced) = (below(self, from), below(self, to));
        for (path, _) in moved.iter().chain(&replaced) {
            self.numbers.remove(path);
        }
        for (path, inode) in moved {
            self.put(path, from, to, inode);
        }
        for (path, inode) in replaced {
            if exchanges {
                self.put(path, to, from, inode);
            } else if let Some(counted) = self.nodes.get_mut(&inode) {
                counted.node = SharedNode::Gone;
            }
        }
    }

    fn put(&mut self, path: PathBuf, from: &Path, to: &Path, inode: u64) {
        let rest = path.strip_prefix(from).unwrap_or(Path::new(""));
        let path = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
        if let Some(counted) = self.nodes.get_mut(&inode) {
            counted.node = SharedNode::Path(path.clone());
            self.numbers.insert(path, inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(table: &InodeTable, inode: u64) -> Option<PathBuf> {
        match table.get(inode)? {
            SharedNode::Path(path) => Some(path),
            SharedNode::Gone => Some("(gone)".into()),
        }
    }

    #[test]
    fn inodes_live_until_each_look_up_is_forgotten() {
        let mut table = InodeTable::default();
        let inode = table.enter("a".into()).unwrap();
        assert_eq!(table.enter("a".into()), Some(inode));
        table.forget(inode, 1);
        assert_eq!(path_of(&table, inode), Some("a".into()));
        table.forget(inode, 5);
        assert_eq!(path_of(&table, inode), None);
        assert_ne!(table.enter("a".into()), Some(inode), "another one");
        table.forget(ROOT, 100);
        assert_eq!(path_of(&table, ROOT), Some(PathBuf::new()));
    }

    #[test]
    fn a_rename_moves_all_that_is_below() {
        let mut table = InodeTable::default();
        let [dir, file, other, below] =
            ["a", "a/b", "ab", "c/d"].map(|path| table.enter(path.into()).unwrap());
        table.rename(Path::new("a"), Path::new("c"), false);
        assert_eq!(path_of(&table, dir), Some("c".into()));
        assert_eq!(path_of(&table, file), Some("c/b".into()));
        assert_eq!(path_of(&table, other), Some("ab".into()), "another name with the same beginning");
        assert_eq!(path_of(&table, below), Some("(gone)".into()), "it was replaced");
        table.rename(Path::new("c"), Path::new("ab"), true);
        let all = [dir, file, other].map(|inode| path_of(&table, inode).unwrap());
        assert_eq!(all, ["ab", "ab/b", "c"].map(PathBuf::from));
        table.remove(Path::new("ab/b"));
        assert_eq!(path_of(&table, file), Some("(gone)".into()));
    }
}

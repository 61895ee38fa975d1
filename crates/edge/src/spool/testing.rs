//! A spool for tests.

use super::*;

/// A spool in a directory of its own, with these quotas.
pub fn spool(bytes: u64, tenant_bytes: u64) -> (Arc<Spool>, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let fd = std::fs::File::open(directory.path()).expect("it is there").into();
    let options = SpoolOptions { bytes, tenant_bytes };
    (Arc::new(Spool::new(Some(fd), &options, Arc::default())), directory)
}

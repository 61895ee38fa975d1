//! All fuzz targets, and their inputs: seeds that the crates list, and files of `corpus/` that fuzzing has found.
//!
//! The test of this package gives every input to its target, without a fuzzer. Not here: the parsers and what is asserted
//! of them (`fuzzing` in each crate), the fuzzer (`main`), how it is called (`xtask/src/fuzz.rs`).

use std::io;
use std::path::{Path, PathBuf};

use nagaya_base::fuzz::FuzzTarget;

/// Every target, in order of name.
pub fn list_targets() -> Vec<FuzzTarget> {
    let all = [
        nagaya_records::fuzzing::TARGETS,
        nagaya_store::fuzzing::TARGETS,
        nagaya_edge::fuzzing::TARGETS,
        nagaya_keeper::fuzzing::TARGETS,
        nagaya_rules::fuzzing::TARGETS,
        nagaya_sendmail::fuzzing::TARGETS,
    ];
    let mut targets = all.concat();
    targets.sort_by_key(|target| target.name);
    targets
}

/// The directory with what fuzzing has found for a target. It need not be there.
pub fn corpus_of(target: &FuzzTarget) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

/// Every input of a target that is kept, with where it is from.
///
/// # Errors
/// If a file of the corpus cannot be read.
pub fn list_inputs(target: &FuzzTarget) -> io::Result<Vec<(String, Vec<u8>)>> {
    let seeds = (target.seeds)().into_iter().enumerate();
    let mut inputs: Vec<_> = seeds.map(|(number, seed)| (format!("seed {number}"), seed)).collect();
    let files = match corpus_of(target).read_dir() {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(inputs),
        Err(error) => return Err(error),
    };
    for file in files {
        let path = file?.path();
        inputs.push((path.display().to_string(), std::fs::read(&path)?));
    }
    Ok(inputs)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn every_kept_input_passes() {
        let mut failed = Vec::new();
        for target in list_targets() {
            for (from, input) in list_inputs(&target).unwrap() {
                if catch_unwind(|| (target.run)(&input)).is_err() {
                    failed.push(format!("{}: {from}", target.name));
                }
            }
        }
        assert!(failed.is_empty(), "{failed:#?}");
    }

    /// Cut and altered inputs reach what whole ones do not, and need no fuzzer.
    #[test]
    fn cut_and_altered_seeds_pass() {
        for target in list_targets() {
            for seed in (target.seeds)() {
                let ends = (0..seed.len()).step_by(seed.len() / 64 + 1);
                for end in ends {
                    (target.run)(&seed[..end]);
                    let mut altered = seed.clone();
                    altered[end] ^= 0x15;
                    (target.run)(&altered);
                }
            }
        }
    }

    #[test]
    fn every_target_has_a_name_of_its_own_and_seeds() {
        let targets = list_targets();
        let names: HashSet<_> = targets.iter().map(|target| target.name).collect();
        assert_eq!(names.len(), targets.len());
        for target in &targets {
            let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
            assert!(target.name.bytes().all(is_plain), "{}", target.name);
            assert!((target.seeds)().iter().any(|seed| !seed.is_empty()), "{} has no seeds", target.name);
        }
    }

    #[test]
    fn every_directory_of_the_corpus_is_of_a_target() {
        let targets = list_targets();
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        for entry in corpus.read_dir().into_iter().flatten() {
            let entry = entry.unwrap();
            let name = entry.file_name();
            let is_known = targets.iter().any(|target| *target.name == *name) || !entry.path().is_dir();
            assert!(is_known, "{name:?} is of no target");
        }
    }
}

//! The pages in which programs of this machine get their memory: larger ones are filled with fewer
//! faults, and to fill memory is most of what bringing an instance back from its image takes. Not
//! every application gains (decision 0024).
//!
//! It is a switch of the whole machine (multi-size THP,
//! `Documentation/admin-guide/mm/transhuge.rst`, Linux 6.8): a process can only be taken out of it,
//! and CRIU does not ask for larger pages itself. So it is set where the configuration says so, and
//! nobody takes it back. Not here: what the machine has (`nagaya doctor`).

use std::fs;
use std::io;
use std::path::Path;

use nagaya_base::Code;

use crate::options::HugePages;

/// The kernel does not give larger pages.
pub const HUGE_PAGES: Code = Code(327);

/// Switch of this one size. Smaller pages gain less. 2 MiB cost memory, and time where a host takes
/// free ones back.
pub const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled";

const ALWAYS: &str = "always";

/// Sets the switch, if wanted. A failure is logged, and everything works without it.
pub fn apply(wanted: HugePages) {
    if wanted == HugePages::AsIs {
        return;
    }
    match set(Path::new(SWITCH)) {
        Ok(true) => tracing::info!("programs of this machine get their memory in pages of up to 64 KiB"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!("{HUGE_PAGES}: `huge_pages` in [instances] cannot be: {SWITCH}: {error}");
        }
    }
}

/// Sets the switch. Returns whether it had to be changed.
fn set(switch: &Path) -> io::Result<bool> {
    if is_always(&fs::read_to_string(switch)?) {
        return Ok(false);
    }
    fs::write(switch, ALWAYS)?;
    Ok(true)
}

/// Whether all programs get them. The kernel lists all values, with the present one in brackets:
/// `always inherit madvise [never]`.
pub fn is_always(text: &str) -> bool {
    text.split_whitespace().any(|word| word.strip_prefix('[') == Some("always]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bracketed_word_is_the_setting_that_holds() {
        assert!(is_always("[always] inherit madvise never\n"));
        for other in ["always inherit madvise [never]\n", "always [inherit] madvise never", ""] {
            assert!(!is_always(other), "{other}");
        }
    }

    #[test]
    fn the_switch_is_set_once_and_what_is_missing_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let switch = dir.path().join("enabled");
        assert_eq!(set(&switch).expect_err("not there").kind(), io::ErrorKind::NotFound);
        fs::write(&switch, "always inherit madvise [never]\n").expect("a file");
        assert!(set(&switch).expect("it is set"));
        assert_eq!(fs::read_to_string(&switch).expect("the file"), ALWAYS);
        fs::write(&switch, "[always] inherit madvise never\n").expect("a file");
        assert!(!set(&switch).expect("it is read"), "it was set before");
    }
}

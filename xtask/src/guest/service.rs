//! nagaya as a service of a real systemd: the unit that is shipped, in a guest whose process 1 is systemd.
//!
//! Not here: what is asked of the service (`tests/tests/e2e/service.rs`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::boot::Instruction;
use super::{CRIU, Fitting, Job, built_test, root, tests};
use crate::workspace;

/// As for other tests, and systemd.
const FITTING: Fitting = Fitting {
    name: "service",
    packages: &["systemd", "php-cgi", "perl", "python3", "procps", "iproute2", "mount", "util-linux", "curl"],
    room: 1024,
    memory: 1536,
    instruction: Instruction::TwoNanoseconds,
    modules: &["veth", "tun"],
    script: include_str!("systemd.sh"),
    limit: Duration::from_secs(1800),
};

/// The tests of the service; `words` select among them. Images need a CRIU, and are left out where there is none.
pub fn job(nagaya: PathBuf, mut words: Vec<String>) -> Result<Job> {
    if words.is_empty() {
        words.push("service::".into());
    }
    let unit = workspace::root().join("packaging/nagaya.service");
    let mut beside = vec![("nagaya", nagaya), ("nagaya.service", unit)];
    if Path::new(CRIU).is_dir() {
        beside.push(("criu", CRIU.into()));
    }
    let environment = vec![
        format!("NAGAYA_BIN={}/nagaya", root::TESTS),
        format!("NAGAYA_UNIT={}/nagaya.service", root::TESTS),
    ];
    let job = tests(built_test("e2e")?, beside, environment, words);
    Ok(Job { fitting: &FITTING, ..job })
}

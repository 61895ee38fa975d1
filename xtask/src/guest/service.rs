//! nagaya as a service of a real systemd: the shipped unit, in a guest whose process 1 is systemd.
//!
//! Not here: the tests of the service (`tests/tests/e2e/service.rs`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::boot::InstructionTime;
use super::job::{CRIU, GuestFitting, GuestJob, built_test, tests};
use super::root;
use crate::workspace;

/// As for other tests, and systemd.
const FITTING: GuestFitting = GuestFitting {
    name: "service",
    packages: &["systemd", "php-cgi", "perl", "python3", "procps", "iproute2", "mount", "util-linux", "curl"],
    room: 1024,
    memory: 1536,
    instruction: InstructionTime::TwoNanoseconds,
    modules: &["veth", "tun"],
    script: include_str!("systemd.sh"),
    limit: Duration::from_secs(1800),
};

/// Returns the tests of the service; `words` select among them. Images need a CRIU, and are left
/// out without one.
pub fn job(nagaya: PathBuf, mut words: Vec<String>) -> Result<GuestJob> {
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
    Ok(GuestJob { fitting: &FITTING, ..job })
}

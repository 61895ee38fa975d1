//! Fuzz targets for exported lines and values in etcd.
//!
//! Not here: the fuzzer (`fuzz/`), single records (`records::fuzzing`).

use nagaya_base::fuzz::FuzzTarget;
use nagaya_records::fuzzing::{SITE, TENANT};

use crate::{etcd, import};

/// All fuzz targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "import", run: read_import, seeds: imports },
    FuzzTarget { name: "etcd_value", run: etcd::fuzzing::read_value, seeds: etcd::fuzzing::values },
];

fn imports() -> Vec<Vec<u8>> {
    let lines = [
        format!(r#"{{"tenant":{TENANT}}}"#),
        format!(r#"{{"site":{SITE}}}"#),
        r#"{"setting":{"key":"a.b","value":["x"]}}"#.into(),
        r#"{"uids":{"next":231002}}"#.into(),
        String::new(),
    ];
    let twice = [&lines[0][..], "\n", &lines[0], "\n{}\n{\"site\":", SITE].concat();
    vec![
        lines.join("\n").into_bytes(),
        twice.into_bytes(),
        b"{\"tenant\":{\"name\":\"..\"}}\n\xff\n".to_vec(),
    ]
}

fn read_import(bytes: &[u8]) {
    let nothing = import::RecordChecks { tenant: &|_, _| {}, rule: &|_| None };
    if let Err(import::ImportError::Refused { named, count }) = import::read_batch(bytes, &nothing) {
        assert!(
            !named.is_empty() && named.len() <= import::BAD_LINES_NAMED_MAX && named.len() as u64 <= count
        );
        assert!(named.windows(2).all(|pair| pair[0].line <= pair[1].line), "in order of line");
    }
}

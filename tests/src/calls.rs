//! Counts the system calls of a process, by strace.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::machine;

/// How often all threads of this process made each system call while `run` ran. `table`: a file for what strace says.
#[track_caller]
pub fn count_calls(pid: i32, table: &Path, run: impl FnOnce()) -> BTreeMap<String, usize> {
    let mut strace = Command::new("strace")
        .args(["-f", "-c", "-o"])
        .arg(table)
        .args(["-p", &pid.to_string()])
        .stderr(Stdio::piped())
        .spawn()
        .expect("strace runs");
    // It says so once it sees the calls of all threads.
    let mut said = BufReader::new(strace.stderr.take().expect("it is a pipe"));
    let mut line = String::new();
    while !line.contains("attached") {
        assert_ne!(said.read_line(&mut line).expect("it is read"), 0, "strace ended: {line}");
    }
    run();
    machine::signal(i32::try_from(strace.id()).expect("a process number"), "INT");
    strace.wait().expect("it ends");
    read_table(&fs::read_to_string(table).expect("it has written"))
}

/// Rows of share, seconds, microseconds for each call, calls, errors if there were any, and name.
fn read_table(text: &str) -> BTreeMap<String, usize> {
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, calls) = (words.last()?, words.get(3)?.parse().ok()?);
        (*name != "total").then(|| ((*name).to_owned(), calls))
    };
    text.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_with_and_without_errors() {
        let text = "% time     seconds  usecs/call     calls    errors syscall\n\
                    ------ ----------- ----------- --------- --------- ----------------\n \
                    60.00    0.154260          10     14723           pread64\n \
                    40.00    0.107561          18      5891        12 recvfrom\n\
                    ------ ----------- ----------- --------- --------- ----------------\n\
                    100.00    0.360705          12     20614        12 total\n";
        let expected = [("pread64".to_owned(), 14_723), ("recvfrom".to_owned(), 5_891)];
        assert_eq!(read_table(text), BTreeMap::from(expected));
    }
}

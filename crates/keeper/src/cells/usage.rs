//! What a cell used: the kernel's counters, read from descriptors that stay open.
//!
//! Not here: who is told (`process`), what one process counts for itself (`Exit`).

use std::fs::File;
use std::io;
use std::ops::Sub;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nagaya_cmdb::cell::Usage;
use rustix::process::Pid;

/// Longest text of a file that is read. `io.stat` has a line of about 100 bytes for each disk.
const TEXT_LEN_MAX: usize = 8192;

/// Counters that only rise, as long as their directories live.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub cpu_us: u64,
    pub throttled_us: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
}

impl Sub for Counters {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            cpu_us: self.cpu_us.saturating_sub(earlier.cpu_us),
            throttled_us: self.throttled_us.saturating_sub(earlier.throttled_us),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            write_bytes: self.write_bytes.saturating_sub(earlier.write_bytes),
        }
    }
}

impl From<Counters> for Usage {
    fn from(counters: Counters) -> Self {
        let Counters { cpu_us, throttled_us, read_bytes, write_bytes } = counters;
        Self { cpu_us, throttled_us, read_bytes, write_bytes, demoted: 0 }
    }
}

/// A file with counters, and how it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// v1: nanoseconds.
    CpuacctUsage,
    /// v2, with or without the controller: `usage_usec`.
    CpuStatUsage,
    /// v1 and v2, since Linux 6.6: all the time something in it could not run for want of quota, its own or that of
    /// a directory above.
    CpuStatLocal,
    /// v1 and v2: for want of its own quota.
    CpuStatThrottled,
    /// v1: of this directory alone, and beneath it too.
    BlkioBytes,
    BlkioBytesRecursive,
    /// v2.
    IoStat,
}

impl Source {
    pub fn file(self) -> &'static str {
        match self {
            Self::CpuacctUsage => "cpuacct.usage",
            Self::CpuStatUsage | Self::CpuStatThrottled => "cpu.stat",
            Self::CpuStatLocal => "cpu.stat.local",
            Self::BlkioBytes => "blkio.throttle.io_service_bytes",
            Self::BlkioBytesRecursive => "blkio.throttle.io_service_bytes_recursive",
            Self::IoStat => "io.stat",
        }
    }

    /// Adds what the text of the file says.
    fn read(self, text: &str, into: &mut Counters) {
        match self {
            Self::CpuacctUsage => into.cpu_us += text.trim_end().parse::<u64>().unwrap_or(0) / 1000,
            Self::CpuStatUsage => into.cpu_us += keyed(text, "usage_usec").unwrap_or(0),
            Self::CpuStatLocal | Self::CpuStatThrottled => {
                let micros = keyed(text, "throttled_usec");
                let nanos = || keyed(text, "throttled_time").map(|nanos| nanos / 1000);
                into.throttled_us += micros.or_else(nanos).unwrap_or(0);
            }
            Self::BlkioBytes | Self::BlkioBytesRecursive => {
                for line in text.lines() {
                    let mut words = line.split(' ').skip(1);
                    let (Some(what), Some(Ok(bytes))) = (words.next(), words.next().map(str::parse::<u64>))
                    else {
                        continue;
                    };
                    match what {
                        "Read" => into.read_bytes += bytes,
                        "Write" => into.write_bytes += bytes,
                        _ => {}
                    }
                }
            }
            Self::IoStat => {
                for word in text.split_ascii_whitespace() {
                    match word.split_once('=') {
                        Some(("rbytes", bytes)) => into.read_bytes += bytes.parse().unwrap_or(0),
                        Some(("wbytes", bytes)) => into.write_bytes += bytes.parse().unwrap_or(0),
                        _ => {}
                    }
                }
            }
        }
    }
}

/// The number behind this key, in a file of one `key value` per line.
pub fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The open files of one cell.
#[derive(Debug, Default)]
pub struct Meter {
    sources: Vec<(Source, File)>,
}

impl Meter {
    /// Adds a file of this directory, if it has it.
    pub fn add(&mut self, source: Source, dir: &Path) -> io::Result<bool> {
        match File::open(dir.join(source.file())) {
            Ok(file) => self.sources.push((source, file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir.exists() => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// An error of `ENODEV`: somebody removed the directory.
    pub fn read(&self) -> io::Result<Counters> {
        let mut counters = Counters::default();
        let mut buffer = [0; TEXT_LEN_MAX];
        for (source, file) in &self.sources {
            let len = file.read_at(&mut buffer, 0)?;
            source.read(str::from_utf8(&buffer[..len]).unwrap_or(""), &mut counters);
        }
        Ok(counters)
    }
}

/// Bytes these processes, and the children they waited for, read from and caused to be written to disks
/// (`/proc/PID/io`, proc_pid_io(5)). Who is gone, or must not be looked at, counts nothing.
pub fn of_processes(pids: &[Pid]) -> Counters {
    let mut counters = Counters::default();
    for pid in pids {
        let text = std::fs::read_to_string(format!("/proc/{}/io", pid.as_raw_nonzero())).unwrap_or_default();
        let of = |key| keyed(&text, key).unwrap_or(0);
        counters.read_bytes += of("read_bytes:");
        counters.write_bytes += of("write_bytes:").saturating_sub(of("cancelled_write_bytes:"));
    }
    counters
}

/// The share of the last ten seconds in which something waited, in percent: `some avg10=1.53 avg60=...`
/// (Documentation/accounting/psi.rst).
pub fn pressure(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("avg10=")?.parse().ok())
}

/// All the time in which some of it waited, microseconds: the `total=` of the same line.
pub fn waited_us(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("total=")?.trim_end().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(source: Source, text: &str) -> Counters {
        let mut counters = Counters::default();
        source.read(text, &mut counters);
        counters
    }

    #[test]
    fn counters_of_both_versions_are_read() {
        let cpu = |cpu_us| Counters { cpu_us, ..Counters::default() };
        let throttled = |throttled_us| Counters { throttled_us, ..Counters::default() };
        let bytes = |read_bytes, write_bytes| Counters { read_bytes, write_bytes, ..Counters::default() };
        let v1_stat =
            "nr_periods 100\nnr_throttled 92\nthrottled_time 301248569\nnr_bursts 0\nburst_time 0\n";
        let v2_stat = "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\nnr_periods 3\nthrottled_usec 77\n";
        let blkio = "254:0 Read 94208\n254:0 Write 8396800\n254:0 Sync 8491008\n254:0 Total 8491008\n\
                     8:0 Read 10\nTotal 8491008\n";
        let io = "254:0 rbytes=94208 wbytes=8396800 rios=9 wios=8 dbytes=0 dios=0\n8:0 rbytes=10 wbytes=0 rios=1\n";
        for (source, text, expected) in [
            (Source::CpuacctUsage, "1500999\n", cpu(1500)),
            (Source::CpuStatUsage, v2_stat, cpu(1500)),
            (Source::CpuStatThrottled, v1_stat, throttled(301_248)),
            (Source::CpuStatThrottled, v2_stat, throttled(77)),
            (Source::CpuStatLocal, "throttled_time 301248569\n", throttled(301_248)),
            (Source::CpuStatLocal, "throttled_usec 12\n", throttled(12)),
            (Source::BlkioBytes, blkio, bytes(94_218, 8_396_800)),
            (Source::BlkioBytes, "Total 0\n", bytes(0, 0)),
            (Source::IoStat, io, bytes(94_218, 8_396_800)),
            (Source::IoStat, "", bytes(0, 0)),
            (Source::CpuacctUsage, "nonsense", cpu(0)),
        ] {
            assert_eq!(read(source, text), expected, "{source:?}");
        }
    }

    #[test]
    fn pressure_is_read_where_there_is_any() {
        let text = "some avg10=1.53 avg60=0.20 avg300=0.00 total=77\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(pressure(text), Some(1.53));
        assert_eq!((waited_us(text), waited_us("full total=3")), (Some(77), None));
        assert_eq!(pressure(""), None);
    }
}

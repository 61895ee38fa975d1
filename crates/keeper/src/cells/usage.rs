//! The use of a cell: the kernel's counters, read from descriptors that stay open.
//!
//! Not here: the readers (`process`), the numbers that one process counts for itself (`Exit`).

use std::fs::File;
use std::io;
use std::ops::Sub;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nagaya_records::cell::RequestUsage;
use rustix::process::Pid;

/// Maximum length of a file's text that is read. `io.stat` has a line of about 100 bytes for each
/// disk.
const TEXT_LEN_MAX: usize = 8192;

/// Counters that only rise while their directories live.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CellCounters {
    pub cpu_us: u64,
    pub throttled_us: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
}

impl Sub for CellCounters {
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

impl From<CellCounters> for RequestUsage {
    fn from(counters: CellCounters) -> Self {
        let CellCounters { cpu_us, throttled_us, read_bytes, write_bytes } = counters;
        Self { cpu_us, throttled_us, read_bytes, write_bytes, demoted: 0 }
    }
}

/// A file with counters, and its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CounterSource {
    /// v1: nanoseconds.
    CpuacctUsage,
    /// v2, with or without the controller: `usage_usec`.
    CpuStatUsage,
    /// v1 and v2, since Linux 6.6: all time throttled by its own quota or an ancestor's.
    CpuStatLocal,
    /// v1 and v2: throttled by its own quota.
    CpuStatThrottled,
    /// v1: of this directory alone, and of those below it, too.
    BlkioBytes,
    BlkioBytesRecursive,
    /// v2.
    IoStat,
}

impl CounterSource {
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

    /// Adds the values in the text of the file.
    fn read(self, text: &str, into: &mut CellCounters) {
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

/// Returns the number of this key, in a file of one `key value` per line.
pub fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The open files of one cell.
#[derive(Debug, Default)]
pub struct CellMeter {
    sources: Vec<(CounterSource, File)>,
}

impl CellMeter {
    /// Adds a file of this directory, if it exists.
    pub fn add(&mut self, source: CounterSource, dir: &Path) -> io::Result<bool> {
        match File::open(dir.join(source.file())) {
            Ok(file) => self.sources.push((source, file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir.exists() => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Reads the counters. Error `ENODEV`: somebody removed the directory.
    pub fn read(&self) -> io::Result<CellCounters> {
        let mut counters = CellCounters::default();
        let mut buffer = [0; TEXT_LEN_MAX];
        for (source, file) in &self.sources {
            let len = file.read_at(&mut buffer, 0)?;
            source.read(str::from_utf8(&buffer[..len]).unwrap_or(""), &mut counters);
        }
        Ok(counters)
    }
}

/// Returns the bytes that these processes, and the children they waited for, read from and wrote to
/// disks (`/proc/PID/io`, proc_pid_io(5)). Processes that are gone, or must not be read, count
/// nothing.
pub fn of_processes(pids: &[Pid]) -> CellCounters {
    let mut counters = CellCounters::default();
    for pid in pids {
        let text = std::fs::read_to_string(format!("/proc/{}/io", pid.as_raw_nonzero())).unwrap_or_default();
        let of = |key| keyed(&text, key).unwrap_or(0);
        counters.read_bytes += of("read_bytes:");
        counters.write_bytes += of("write_bytes:").saturating_sub(of("cancelled_write_bytes:"));
    }
    counters
}

/// Returns the share of the last ten seconds in which something waited, in percent: `some
/// avg10=1.53 avg60=...` (Documentation/accounting/psi.rst).
pub fn pressure(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("avg10=")?.parse().ok())
}

/// Returns all time in which some of it waited, microseconds: the `total=` of the same line.
pub fn waited_us(text: &str) -> Option<u64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("total=")?.trim_end().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(source: CounterSource, text: &str) -> CellCounters {
        let mut counters = CellCounters::default();
        source.read(text, &mut counters);
        counters
    }

    #[test]
    fn counters_of_both_versions_are_read() {
        let cpu = |cpu_us| CellCounters { cpu_us, ..CellCounters::default() };
        let throttled = |throttled_us| CellCounters { throttled_us, ..CellCounters::default() };
        let bytes =
            |read_bytes, write_bytes| CellCounters { read_bytes, write_bytes, ..CellCounters::default() };
        let v1_stat =
            "nr_periods 100\nnr_throttled 92\nthrottled_time 301248569\nnr_bursts 0\nburst_time 0\n";
        let v2_stat = "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\nnr_periods 3\nthrottled_usec 77\n";
        let blkio = "254:0 Read 94208\n254:0 Write 8396800\n254:0 Sync 8491008\n254:0 Total 8491008\n\
                     8:0 Read 10\nTotal 8491008\n";
        let io = "254:0 rbytes=94208 wbytes=8396800 rios=9 wios=8 dbytes=0 dios=0\n8:0 rbytes=10 wbytes=0 rios=1\n";
        for (source, text, expected) in [
            (CounterSource::CpuacctUsage, "1500999\n", cpu(1500)),
            (CounterSource::CpuStatUsage, v2_stat, cpu(1500)),
            (CounterSource::CpuStatThrottled, v1_stat, throttled(301_248)),
            (CounterSource::CpuStatThrottled, v2_stat, throttled(77)),
            (CounterSource::CpuStatLocal, "throttled_time 301248569\n", throttled(301_248)),
            (CounterSource::CpuStatLocal, "throttled_usec 12\n", throttled(12)),
            (CounterSource::BlkioBytes, blkio, bytes(94_218, 8_396_800)),
            (CounterSource::BlkioBytes, "Total 0\n", bytes(0, 0)),
            (CounterSource::IoStat, io, bytes(94_218, 8_396_800)),
            (CounterSource::IoStat, "", bytes(0, 0)),
            (CounterSource::CpuacctUsage, "nonsense", cpu(0)),
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

//! Swap for one run, on a machine that has none. It is in compressed memory if the kernel can,
//! otherwise in a file. It is gone afterwards, however the run ends.
//!
//! Not here: the swapped memory (the keeper, tier `reclaimed`), swap of the keeper's own tests
//! (`tests/kernel/swap.rs`).

use std::fs::{self, File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// Makes and removes compressed block devices (Documentation/admin-guide/blockdev/zram.rst).
const CONTROL: &str = "/sys/class/zram-control";

/// One part in this number of the machine's memory may be swapped out. Compressed it takes a third
/// of that or less.
const ZRAM_PART: u64 = 2;

/// A file takes its whole length of the disk.
const FILE_LEN: u64 = 4 << 30;

/// Longest wait for a device that was just made.
const DEVICE_MAX: Duration = Duration::from_secs(5);

/// Removes it as soon as its input ends, even when this process is killed. Signals from a terminal
/// are not for it. `$0` is the swap device or file, `$1` the number of a compressed device or
/// nothing.
const REMOVE: &str = "trap '' INT TERM HUP; cat > /dev/null; s=0; \
     if grep -q \"^$0 \" /proc/swaps; then swapoff \"$0\" || s=1; fi; \
     if [ -n \"$1\" ]; then echo \"$1\" > /sys/class/zram-control/hot_remove || s=1; else rm -f \"$0\"; fi; exit $s";

/// Swap, until it is dropped.
#[derive(Debug)]
pub struct SwapSpace {
    /// `None` if the machine has its own.
    remover: Option<Child>,
    /// Number of the compressed device.
    zram: Option<u32>,
}

impl SwapSpace {
    /// Returns the machine's own swap, or makes one now; its file is in this directory. The error
    /// says why there can be none.
    pub fn get(dir: &Path) -> Result<Self> {
        if is_there() {
            return Ok(Self { remover: None, zram: None });
        }
        match compressed() {
            Ok(swap) => Ok(swap),
            Err(why) => in_file(dir).with_context(|| format!("{why:#}; and in a file")),
        }
    }

    /// Returns the destination of swapped memory, in words.
    pub fn kind(&self) -> &'static str {
        match (&self.remover, self.zram) {
            (None, _) => "the machine's own",
            (Some(_), Some(_)) => "compressed memory (zram), made for this run",
            (Some(_), None) => "a file, made for this run",
        }
    }

    /// Returns the bytes of memory that swapped pages take. `None` if they are not in memory, or if
    /// it is unknown.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<f64> {
        let stat = fs::read_to_string(format!("/sys/block/zram{}/mm_stat", self.zram?)).ok()?;
        stat.split_whitespace().nth(2)?.parse().ok()
    }
}

impl Drop for SwapSpace {
    fn drop(&mut self) {
        let Some(remover) = &mut self.remover else { return };
        drop(remover.stdin.take());
        if !remover.wait().is_ok_and(|status| status.success()) {
            eprintln!("the swap of this run could not be taken away: see /proc/swaps");
        }
    }
}

/// Returns whether memory can go anywhere except to image files.
pub fn is_there() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|table| table.lines().count() > 1)
}

fn compressed() -> Result<SwapSpace> {
    let made = fs::read_to_string(format!("{CONTROL}/hot_add")).context("this kernel has no zram")?;
    let number: u32 = made.trim().parse().context("the number of a zram device")?;
    let device = PathBuf::from(format!("/dev/zram{number}"));
    let remover = remover(&device, &number.to_string())?;
    let swap = SwapSpace { remover: Some(remover), zram: Some(number) };
    let bytes = memory()? / ZRAM_PART;
    let size = format!("/sys/block/zram{number}/disksize");
    fs::write(&size, bytes.to_string()).with_context(|| format!("writing {size}"))?;
    let waits = std::time::Instant::now();
    while !device.exists() {
        ensure!(waits.elapsed() < DEVICE_MAX, "{} does not appear", device.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    turn_on(&device)?;
    Ok(swap)
}

fn in_file(dir: &Path) -> Result<SwapSpace> {
    let path = dir.join("swap");
    let remover = remover(&path, "")?;
    let swap = SwapSpace { remover: Some(remover), zram: None };
    let mut file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    file.set_permissions(Permissions::from_mode(0o600)).context("hiding the file of the swap")?;
    // No holes: the kernel needs the blocks.
    let zeros = vec![0; 1 << 20];
    for _ in 0..FILE_LEN >> 20 {
        file.write_all(&zeros).context("filling the file of the swap")?;
    }
    file.sync_all().context("writing the file of the swap")?;
    turn_on(&path)?;
    Ok(swap)
}

fn remover(place: &Path, zram: &str) -> Result<Child> {
    Command::new("sh")
        .args(["-c", REMOVE])
        .arg(place)
        .arg(zram)
        .stdin(Stdio::piped())
        .spawn()
        .context("starting what takes the swap away")
}

fn turn_on(place: &Path) -> Result<()> {
    for program in ["mkswap", "swapon"] {
        let output =
            Command::new(program).arg(place).output().with_context(|| format!("running {program}"))?;
        if !output.status.success() {
            bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
    }
    Ok(())
}

/// Returns the bytes of the machine's memory.
fn memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    kib.map(|kib: u64| kib * 1024).context("/proc/meminfo without MemTotal")
}

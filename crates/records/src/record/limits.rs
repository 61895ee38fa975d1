//! Limits of a cell as operators write them in records: `{"cpu": "50%", "read": "5M", "processes":
//! 64}`.
//!
//! Not here: the same limits as numbers (`cell`), which of them a record may have and in what range
//! (`check`), how they reach the kernel (`keeper::cells`).

use std::collections::BTreeMap;
use std::fmt;

use nagaya_base::units::{parse_bytes, parse_duration};
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::cell::{self, CpuQuota, Device, IoLimit, LimitSet};

/// The word for "no limit here", in the place of any amount.
pub const UNLIMITED: &str = "unlimited";

/// Range of `cpu`, in thousandths of a core. The smallest is the kernel's least quota in its
/// longest period, the largest is 1,024 cores.
pub const CPU_THOUSANDTHS_MIN: u32 = 1;
pub const CPU_THOUSANDTHS_MAX: u32 = 1_024_000;

/// Smallest `memory`, bytes: with less, a program does not even start.
pub const MEMORY_MIN: u64 = 1 << 20;

/// Most `processes`: Linux's `PID_MAX_LIMIT` on 64 bits (proc_sys_kernel(5)).
pub const PROCESSES_MAX: u32 = 1 << 22;

/// Most operations per second: the range of cgroup v1's `blkio.throttle.*_iops_device`.
pub const IOPS_MAX: u64 = u32::MAX as u64;

/// Limits of one cell. An absent field and `"unlimited"` mean the same: no limit at this level.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellLimits {
    /// CPU time as a share of one core: `50%`, `12.5%`, `150%`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<WrittenAmount>,
    /// Weight against its siblings, `cell::CPU_SHARES_MIN..=CPU_SHARES_MAX`. Siblings without one
    /// have `cell::CPU_SHARES_DEFAULT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_shares: Option<u32>,
    /// Bytes per second from the disk of the site's files: `5M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<WrittenAmount>,
    /// Operations per second on that disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<WrittenAmount>,
    /// Processes and threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<WrittenAmount>,
    /// Bytes: `512M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<WrittenAmount>,
    /// Other disks, by `MAJOR:MINOR`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<String, DeviceLimits>,
}

/// Limits of one disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLimits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<WrittenAmount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<WrittenAmount>,
}

impl CellLimits {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns them as numbers. Values that `check` would refuse are left out.
    pub fn limits(&self) -> LimitSet {
        let mut io: Vec<IoLimit> = self.root_device().as_limit(Device::Root).into_iter().collect();
        io.extend(self.devices.iter().filter_map(|(device, limits)| limits.as_limit(device.parse().ok()?)));
        LimitSet {
            cpu: number(self.cpu.as_ref(), WrittenAmount::cpu).map(CpuQuota::of_core),
            cpu_shares: self.cpu_shares,
            io,
            processes: number(self.processes.as_ref(), WrittenAmount::processes),
            memory: number(self.memory.as_ref(), WrittenAmount::memory),
            cpus: None,
            mems: None,
        }
    }

    /// Returns the limits that name no device.
    pub(crate) fn root_device(&self) -> DeviceLimits {
        DeviceLimits {
            read: self.read.clone(),
            write: self.write.clone(),
            read_iops: self.read_iops.clone(),
            write_iops: self.write_iops.clone(),
        }
    }
}

impl DeviceLimits {
    fn as_limit(&self, device: Device) -> Option<IoLimit> {
        let limit = IoLimit {
            device,
            read_bps: number(self.read.as_ref(), WrittenAmount::rate),
            write_bps: number(self.write.as_ref(), WrittenAmount::rate),
            read_iops: number(self.read_iops.as_ref(), WrittenAmount::iops),
            write_iops: number(self.write_iops.as_ref(), WrittenAmount::iops),
        };
        (limit != IoLimit::of(device)).then_some(limit)
    }
}

fn number<T>(
    amount: Option<&WrittenAmount>,
    read: fn(&WrittenAmount) -> Result<Option<T>, String>,
) -> Option<T> {
    amount.and_then(|amount| read(amount).ok().flatten())
}

/// One step of slowing down a running request. Once the request has used this much CPU time, these
/// limits are laid over those of its cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenDemotion {
    /// For example `500ms` or `2s`.
    pub after_cpu: String,
    pub limits: CellLimits,
}

impl WrittenDemotion {
    /// Returns it as numbers; `None` for values that `check` refuses.
    pub fn demotion(&self) -> Option<cell::Demotion> {
        Some(cell::Demotion { after_cpu_us: self.after_cpu_us().ok()?, limits: self.limits.limits() })
    }

    /// Returns microseconds, or the mistake in the text.
    pub(crate) fn after_cpu_us(&self) -> Result<u64, String> {
        let wrong = |why| format!("is not an amount of CPU time: {why}");
        let us = parse_duration(&self.after_cpu).map_err(wrong)?.as_micros();
        match u64::try_from(us) {
            Ok(0) => Err("is not possible: use 1ms or more".into()),
            Ok(us) => Ok(us),
            Err(_) => Err("is too long".into()),
        }
    }
}

/// An amount as it was written: a number, or a text with a unit. Its meaning depends on the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenAmount(Box<str>);

impl WrittenAmount {
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn is_unlimited(&self) -> bool {
        &*self.0 == UNLIMITED
    }

    /// Returns thousandths of a core, or `None` for no limit. The error is the mistake, worded to
    /// follow the text.
    pub fn cpu(&self) -> Result<Option<u32>, String> {
        if self.is_unlimited() {
            return Ok(None);
        }
        let wrong = || {
            "is not a share of CPU time: write a percentage of one core with at most one digit after the point, \
             like 50%, 12.5% or 150%"
        };
        let thousandths = self.0.strip_suffix('%').and_then(thousandths).ok_or_else(wrong)?;
        match u32::try_from(thousandths) {
            Ok(fits) if (CPU_THOUSANDTHS_MIN..=CPU_THOUSANDTHS_MAX).contains(&fits) => Ok(Some(fits)),
            _ => Err(format!("is out of range: 0.1% to {}%", CPU_THOUSANDTHS_MAX / 10)),
        }
    }

    /// Returns bytes per second, like [`WrittenAmount::cpu`].
    pub fn rate(&self) -> Result<Option<u64>, String> {
        self.bytes("a number of bytes per second", 1)
    }

    /// Returns bytes, like [`WrittenAmount::cpu`].
    pub fn memory(&self) -> Result<Option<u64>, String> {
        self.bytes("a number of bytes", MEMORY_MIN)
    }

    /// Returns operations per second, like [`WrittenAmount::cpu`].
    pub fn iops(&self) -> Result<Option<u64>, String> {
        self.count("a number of operations per second", IOPS_MAX)
    }

    /// Returns processes and threads, like [`WrittenAmount::cpu`].
    pub fn processes(&self) -> Result<Option<u32>, String> {
        let count = self.count("a number of processes", PROCESSES_MAX.into())?;
        Ok(count.map(|count| u32::try_from(count).expect("PROCESSES_MAX fits 32 bits")))
    }

    fn bytes(&self, what: &str, least: u64) -> Result<Option<u64>, String> {
        if self.is_unlimited() {
            return Ok(None);
        }
        // `K`, `M`, `G` and `T` alone are binary units, too, as everywhere in cgroups.
        let text: String = match self.0.chars().last() {
            Some('K' | 'M' | 'G' | 'T') => format!("{}iB", self.0),
            _ => self.as_str().into(),
        };
        let bytes = parse_bytes(&text).map_err(|_| {
            format!("is not {what}: write it like 5M or 1.5G (units of 1024), or {UNLIMITED}")
        })?;
        if bytes < least {
            return Err(format!("is too little: use {least} or more, or {UNLIMITED}"));
        }
        Ok(Some(bytes))
    }

    fn count(&self, what: &str, most: u64) -> Result<Option<u64>, String> {
        if self.is_unlimited() {
            return Ok(None);
        }
        let digits = self.0.bytes().all(|b| b.is_ascii_digit());
        let number: Option<u64> = self.0.parse().ok().filter(|_| digits);
        match number {
            Some(number) if (1..=most).contains(&number) => Ok(Some(number)),
            Some(_) => Err(format!("is out of range: 1 to {most}, or {UNLIMITED}")),
            None => Err(format!("is not {what}: write 1 to {most}, or {UNLIMITED}")),
        }
    }
}

/// Returns `12.5` as 125.
fn thousandths(percent: &str) -> Option<u64> {
    let (whole, tenth) = percent.split_once('.').unwrap_or((percent, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(tenth) || tenth.len() != 1 {
        return None;
    }
    whole.parse::<u64>().ok()?.checked_mul(10)?.checked_add(tenth.parse().ok()?)
}

impl fmt::Display for WrittenAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<u64> for WrittenAmount {
    fn from(number: u64) -> Self {
        Self(number.to_string().into())
    }
}

impl Serialize for WrittenAmount {
    /// Writes a bare number as a number, so that records look like JSON that people write.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0.parse::<u64>() {
            Ok(number) if number.to_string() == *self.0 => to.serialize_u64(number),
            _ => to.serialize_str(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for WrittenAmount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct NumberOrText;
        impl Visitor<'_> for NumberOrText {
            type Value = WrittenAmount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or a text like \"50%\" or \"5M\"")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<WrittenAmount, E> {
                Ok(number.into())
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<WrittenAmount, E> {
                if text.len() > AMOUNT_LEN_MAX {
                    return Err(E::custom(format!("an amount of {} bytes", text.len())));
                }
                Ok(WrittenAmount::new(text))
            }
        }
        from.deserialize_any(NumberOrText).map_err(D::Error::custom)
    }
}

/// Longest amount, in bytes; no meaningful amount is near it.
const AMOUNT_LEN_MAX: usize = 64;

#[cfg(test)]
mod tests;

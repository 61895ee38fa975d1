//! The options of `nagaya tenant` and `nagaya site` that limit cells, as fields of their records.
//!
//! Not here: the check of a limit (`nagaya_records::check`), its effect (`nagaya_keeper`).

use serde_json::{Map, Value, json};

use super::output::CliError;

/// The fields of a cell's limits, by their options.
pub const OPTIONS: [&str; 9] =
    ["cpu", "cpu-shares", "read", "write", "read-iops", "write-iops", "processes", "memory", "device"];

/// Removes all of a record's limits at once.
pub const ALL: &str = "limits";

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Limits for all requests together")]
pub struct CellFields {
    /// CPU time as a share of one core: 50%, 150%, or unlimited
    #[arg(long, value_name = "PERCENT")]
    pub cpu: Option<String>,
    /// Weight against others that want the CPU, too; default 1024
    #[arg(long, value_name = "N")]
    pub cpu_shares: Option<u32>,
    /// Bytes per second read from disk, like 5M
    #[arg(long, value_name = "BYTES")]
    pub read: Option<String>,
    /// Bytes per second written to disk, like 5M
    #[arg(long, value_name = "BYTES")]
    pub write: Option<String>,
    /// Reads from disk per second
    #[arg(long, value_name = "N")]
    pub read_iops: Option<String>,
    /// Writes to disk per second
    #[arg(long, value_name = "N")]
    pub write_iops: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "N")]
    pub processes: Option<String>,
    /// Memory, like 512M
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Limit for another disk, like 8:0:read=30M; repeat for more
    #[arg(long = "device", value_name = "MAJOR:MINOR:LIMIT=VALUE", value_parser = device)]
    pub devices: Vec<(String, String, String)>,
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Limits for each single request")]
pub struct RequestFields {
    /// CPU time as a share of one core: 50%, 150%, or unlimited
    #[arg(long, value_name = "PERCENT")]
    pub request_cpu: Option<String>,
    /// Weight against the site's other requests; default 1024
    #[arg(long, value_name = "N")]
    pub request_cpu_shares: Option<u32>,
    /// Bytes per second read from disk, like 5M
    #[arg(long, value_name = "BYTES")]
    pub request_read: Option<String>,
    /// Bytes per second written to disk, like 5M
    #[arg(long, value_name = "BYTES")]
    pub request_write: Option<String>,
    /// Reads from disk per second
    #[arg(long, value_name = "N")]
    pub request_read_iops: Option<String>,
    /// Writes to disk per second
    #[arg(long, value_name = "N")]
    pub request_write_iops: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "N")]
    pub request_processes: Option<String>,
    /// Limit for another disk, like 8:0:read=30M; repeat for more
    #[arg(long = "request-device", value_name = "MAJOR:MINOR:LIMIT=VALUE", value_parser = device)]
    pub request_devices: Vec<(String, String, String)>,
    /// Lower the limits of a request (cgi, php) after it used this CPU time, like
    /// 500ms:cpu=10%,read=1M; repeat for more steps
    #[arg(long = "demote", value_name = "TIME:LIMIT=VALUE", value_parser = demotion)]
    pub demotions: Vec<Value>,
}

impl CellFields {
    pub fn apply(&self, record: &mut Map<String, Value>) {
        let amounts = [
            ("cpu", &self.cpu),
            ("read", &self.read),
            ("write", &self.write),
            ("read_iops", &self.read_iops),
            ("write_iops", &self.write_iops),
            ("processes", &self.processes),
            ("memory", &self.memory),
        ];
        apply(record, "limits", &amounts, self.cpu_shares, &self.devices);
    }
}

impl RequestFields {
    pub fn apply(&self, record: &mut Map<String, Value>) {
        let amounts = [
            ("cpu", &self.request_cpu),
            ("read", &self.request_read),
            ("write", &self.request_write),
            ("read_iops", &self.request_read_iops),
            ("write_iops", &self.request_write_iops),
            ("processes", &self.request_processes),
        ];
        apply(record, "request_limits", &amounts, self.request_cpu_shares, &self.request_devices);
        if !self.demotions.is_empty() {
            record.insert("demotions".into(), self.demotions.clone().into());
        }
    }
}

fn apply(
    record: &mut Map<String, Value>,
    field: &str,
    amounts: &[(&str, &Option<String>)],
    shares: Option<u32>,
    devices: &[(String, String, String)],
) {
    let mut limits = record.remove(field).and_then(|limits| limits.as_object().cloned()).unwrap_or_default();
    for (key, value) in amounts {
        if let Some(value) = value {
            limits.insert((*key).into(), amount(value));
        }
    }
    if let Some(shares) = shares {
        limits.insert("cpu_shares".into(), shares.into());
    }
    for (device, limit, value) in devices {
        let all = limits.entry("devices").or_insert_with(|| json!({}));
        all[device][limit] = amount(value);
    }
    if !limits.is_empty() {
        record.insert(field.into(), limits.into());
    }
}

/// Removes the field of an option from the record. `Ok(false)` if it is not an option of limits.
pub fn unset(option: &str, record: &mut Map<String, Value>) -> Result<bool, CliError> {
    let removed = match option {
        ALL => record.remove("limits"),
        "request-limits" => record.remove("request_limits"),
        "demote" => record.remove("demotions"),
        _ => {
            let (field, name) = match option.strip_prefix("request-") {
                Some(name) => ("request_limits", name),
                None => ("limits", option),
            };
            if !OPTIONS.contains(&name) {
                return Ok(false);
            }
            let key = if name == "device" { "devices".into() } else { name.replace('-', "_") };
            record.get_mut(field).and_then(Value::as_object_mut).and_then(|limits| limits.remove(&key))
        }
    };
    match removed {
        Some(_) => Ok(true),
        None => Err(CliError::Usage(format!("there is no {option} to unset"))),
    }
}

/// Numbers are numbers in the record; the store's checks judge any other text.
fn amount(text: &str) -> Value {
    let number = text.parse::<u64>().ok().filter(|number| number.to_string() == text);
    number.map_or_else(|| text.into(), Value::from)
}

/// Parses `8:0:read=30M`.
fn device(text: &str) -> Result<(String, String, String), String> {
    let parts = text.split_once('=').and_then(|(limit, value)| Some((limit.rsplit_once(':')?, value)));
    let ((device, limit), value) = parts.ok_or("write it like 8:0:read=30M")?;
    let limit = limit.replace('-', "_");
    if !["read", "write", "read_iops", "write_iops"].contains(&&*limit) {
        return Err(format!("'{limit}' is no limit of a disk: use read, write, read-iops or write-iops"));
    }
    Ok((device.into(), limit, value.into()))
}

/// Parses `500ms:cpu=10%,read=1M`.
fn demotion(text: &str) -> Result<Value, String> {
    let wrong = || "write it like 500ms:cpu=10%".to_owned();
    let (after, rest) = text.split_once(':').ok_or_else(wrong)?;
    let mut limits = Map::new();
    for pair in rest.split(',') {
        let (limit, value) = pair.split_once('=').ok_or_else(wrong)?;
        if limits.insert(limit.replace('-', "_"), amount(value)).is_some() {
            return Err(format!("it names {limit} twice"));
        }
    }
    Ok(json!({ "after_cpu": after, "limits": limits }))
}

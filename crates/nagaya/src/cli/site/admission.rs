//! `nagaya site add|set`: how a site admits visitors when more come than can run.
//!
//! Not here: the meaning of the fields (`records::record::admission`), the present lanes
//! (`cli::lanes`).

use serde_json::{Map, Value, json};

use super::put;
use crate::cli::output::CliError;

/// The record's field.
const ADMISSION: &str = "admission";

/// Options of `--unset`, and their fields.
const FIELDS: [(&str, &str); 8] = [
    ("auto", "auto"),
    ("wait-seconds", "wait_seconds"),
    ("waiting", "waiting"),
    ("tickets", "tickets"),
    ("slot-seconds", "slot_seconds"),
    ("visit-seconds", "visit_seconds"),
    ("weight", "weight"),
    ("waiting-page", "page"),
];

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Admission (more requests than may run)")]
pub struct AdmissionFields {
    /// Measure how many requests should run at once, up to --max-concurrent
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub auto: Option<bool>,
    /// Longest predicted wait with which a request may queue, in seconds
    #[arg(long, value_name = "N")]
    pub wait_seconds: Option<u32>,
    /// Most requests in the queue
    #[arg(long, value_name = "N")]
    pub waiting: Option<u32>,
    /// Give tickets when the queue is full
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub tickets: Option<bool>,
    /// Length of a ticket's slot, in seconds
    #[arg(long, value_name = "N")]
    pub slot_seconds: Option<u32>,
    /// Time that a client who waited and was let in goes before newcomers, in seconds; 0 for never;
    /// default 600
    #[arg(long, value_name = "N")]
    pub visit_seconds: Option<u32>,
    /// Weight against other sites of the tenant, 1 to 10000; default 100
    #[arg(long, value_name = "N")]
    pub weight: Option<u32>,
    /// HTML file with the site's own waiting page; docs/admission.md lists its placeholders
    #[arg(long, value_name = "FILE")]
    pub waiting_page: Option<std::path::PathBuf>,
}

impl AdmissionFields {
    pub fn apply(&self, record: &mut Map<String, Value>) -> Result<(), CliError> {
        let page = self.waiting_page.as_ref().map(std::fs::read_to_string).transpose().map_err(|error| {
            let path = self.waiting_page.as_deref().unwrap_or_else(|| "".as_ref());
            CliError::Usage(format!("{} cannot be read: {error}", path.display()))
        })?;
        let mut own = record.remove(ADMISSION).and_then(|old| old.as_object().cloned()).unwrap_or_default();
        put(&mut own, "auto", self.auto);
        put(&mut own, "wait_seconds", self.wait_seconds);
        put(&mut own, "waiting", self.waiting);
        put(&mut own, "tickets", self.tickets);
        put(&mut own, "slot_seconds", self.slot_seconds);
        put(&mut own, "visit_seconds", self.visit_seconds);
        put(&mut own, "weight", self.weight);
        put(&mut own, "page", page);
        if !own.is_empty() {
            record.insert(ADMISSION.into(), json!(own));
        }
        Ok(())
    }
}

/// Removes one of these from the record; false if the option is none of them.
pub fn unset(option: &str, record: &mut Map<String, Value>) -> Result<bool, CliError> {
    let Some((_, field)) = FIELDS.iter().find(|(known, _)| *known == option) else { return Ok(false) };
    let own = record.get_mut(ADMISSION).and_then(Value::as_object_mut);
    if own.and_then(|own| own.remove(*field)).is_none() {
        return Err(CliError::Usage(format!("the site has no {option} to unset")));
    }
    Ok(true)
}

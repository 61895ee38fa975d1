//! `nagaya instance`: running applications, their tiers, and an operator's commands to one.
//!
//! Not here: doing it (`nagaya_keeper`), an application's record (`site`), a live overview of all
//! (`top`).

use std::process::ExitCode;
use std::time::Duration;

use nagaya_base::units::format_bytes;
use nagaya_records::instance::{Tier, WakeReport};
use serde::Deserialize;
use serde_json::Value;

use super::exec;
use super::output::{
    self, CliError, OutputFormat, RecordSource, TableColumns, escape, printable, short_time,
};

#[derive(Debug, clap::Subcommand)]
pub enum InstanceArgs {
    /// List instances and the tier of each
    List {
        /// Show only instances of this tenant
        #[arg(long)]
        tenant: Option<String>,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Show all details of an instance
    Show(OneInstance),
    /// Wake an instance now, as a request would
    Wake(OneInstance),
    /// Move an instance to a deeper tier, unless a request needs it
    Rest {
        /// Site of the instance
        site: String,
        /// Tier to rest at; without it, one tier deeper
        #[arg(long, value_name = "TIER", value_parser = tier)]
        to: Option<Tier>,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Take a new image of an instance, after a new start if necessary
    Image(OneInstance),
    /// Restart an instance. The old run ends, and its image is not used again
    Restart(OneInstance),
    /// End the processes of an instance; the next request starts it
    Stop(OneInstance),
    /// Show the last lines that an instance wrote
    Logs(OneInstance),
    /// Run a command beside an application, as its tenant and in its sandbox
    Exec(exec::ExecArgs),
}

#[derive(Debug, clap::Args)]
pub struct OneInstance {
    /// Site of the instance
    pub site: String,
    #[command(flatten)]
    pub format: OutputFormat,
}

/// The keeper's reply.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct InstancesReply {
    pub instances: Vec<InstanceView>,
}

/// One instance. Values that the keeper does not know are absent.
#[derive(Debug, Deserialize)]
pub struct InstanceView {
    pub site: String,
    #[serde(default)]
    pub tenant: String,
    pub tier: Tier,
    /// Its present activity.
    pub state: Option<String>,
    pub since_seconds: Option<u64>,
    /// Edge threads that keep it awake.
    pub uses: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub cpu_us: Option<u64>,
    /// Time of its threads in the run queue. `None` where they stand still.
    pub queued_us: Option<u64>,
    pub wakes: Option<u64>,
    pub last_wake: Option<WakeReport>,
    pub image: Option<ImageView>,
    pub note: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct ImageView {
    pub bytes: Option<u64>,
}

impl InstanceView {
    /// Returns its present activity, otherwise its tier.
    pub fn state(&self) -> String {
        match self.state.as_deref() {
            None | Some("idle" | "in use") => self.tier.to_string(),
            Some(state) => printable(state),
        }
    }

    pub fn show_age(&self) -> String {
        self.since_seconds.map_or_else(absent, |seconds| short_time(Duration::from_secs(seconds)))
    }

    pub fn memory(&self) -> String {
        self.memory_bytes.map_or_else(absent, whole_kib)
    }
}

pub fn absent() -> String {
    "-".into()
}

/// Returns whole KiB: pages are never smaller.
fn whole_kib(bytes: u64) -> String {
    format_bytes(bytes / 1024 * 1024)
}

fn tier(word: &str) -> Result<Tier, String> {
    Tier::ALL.into_iter().find(|tier| tier.as_str() == word && *tier != Tier::Running).ok_or_else(|| {
        let known: Vec<_> = Tier::ALL.iter().rev().skip(1).map(|tier| tier.as_str()).collect();
        format!("use {}", known.join(", "))
    })
}

pub fn run(command: &InstanceArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let (result, format) = match command {
        InstanceArgs::List { tenant, format } => (list(tenant.as_deref(), *format, place), *format),
        InstanceArgs::Show(one) => (show(one, place), one.format),
        InstanceArgs::Wake(one) => (act(&one.site, "wake", "runs", one.format, place), one.format),
        InstanceArgs::Rest { site, to, format } => {
            let what = to.map_or_else(|| "rest".to_owned(), |tier| format!("rest?to={tier}"));
            (act(site, &what, "rests", *format, place), *format)
        }
        InstanceArgs::Image(one) => {
            (act(&one.site, "image", "has a new image", one.format, place), one.format)
        }
        InstanceArgs::Restart(one) => {
            (act(&one.site, "restart", "starts anew", one.format, place), one.format)
        }
        InstanceArgs::Stop(one) => {
            (act(&one.site, "stop", "has no process any more", one.format, place), one.format)
        }
        InstanceArgs::Logs(one) => (logs(one, place), one.format),
        InstanceArgs::Exec(command) => return exec::run(command, place),
    };
    output::end(result, format)
}

pub fn fetch_instances(place: &RecordSource) -> Result<Value, CliError> {
    output::ask_node(place, "/v1/instances")
}

pub fn parse_instances(answer: Value) -> Result<InstancesReply, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the list is of another version of nagaya: {error}")))
}

fn list(tenant: Option<&str>, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let mut answer = fetch_instances(place)?;
    if let (Some(tenant), Some(all)) = (tenant, answer["instances"].as_array_mut()) {
        all.retain(|instance| instance["tenant"] == tenant);
    }
    if format.json {
        return output::print_json(&answer["instances"]);
    }
    let all = parse_instances(answer)?.instances;
    if all.is_empty() {
        return output::print(
            "there is no instance: a site of kind app has one, see `nagaya site add --help`",
        );
    }
    table(&all).print()
}

fn table(all: &[InstanceView]) -> TableColumns {
    let mut columns = TableColumns::with_sentences(&[
        "SITE",
        "TENANT",
        "STATE",
        "FOR",
        "USES",
        "MEMORY",
        "IMAGE",
        "WAKES",
        "LAST WAKE",
        "NOTE",
    ]);
    for instance in all {
        let number = |number: Option<u64>| number.map_or_else(absent, |number| number.to_string());
        let image = instance.image.as_ref();
        columns.add([
            printable(&instance.site),
            printable(&instance.tenant),
            instance.state(),
            instance.show_age(),
            number(instance.uses),
            instance.memory(),
            image.map_or_else(absent, |image| image.bytes.map_or_else(|| "yes".into(), whole_kib)),
            number(instance.wakes),
            instance.last_wake.as_ref().map_or_else(absent, wake),
            instance.note.as_deref().map_or_else(String::new, printable),
        ]);
    }
    columns
}

/// Returns a text such as `image 41.2 ms`.
pub fn wake(wake: &WakeReport) -> String {
    let us = wake.stages.iter().fold(0, |sum: u64, (_, us)| sum.saturating_add(*us));
    format!("{} {}", wake.from, output::short_us(us))
}

fn path(site: &str) -> String {
    format!("/v1/instances/{}", escape(site))
}

fn show(one: &OneInstance, place: &RecordSource) -> Result<(), CliError> {
    let answer = output::ask_node(place, &path(&one.site))?;
    if one.format.json {
        output::print_json(&answer)
    } else {
        let (fields, costs) = known(answer);
        output::print_fields(&fields)?;
        costs.map_or(Ok(()), |costs| costs.print())
    }
}

/// Costs of one tier.
#[derive(Debug, Deserialize)]
struct TierCost {
    tier: Tier,
    return_us: u64,
    return_samples: u32,
    return_of: String,
    holds_bytes: Option<u64>,
    holds_samples: Option<u32>,
    holds_of: Option<String>,
}

/// Returns the wake time and memory of each tier, with the source and number of measurements.
fn costs(all: &[TierCost]) -> TableColumns {
    let mut columns = TableColumns::new(&["TIER", "RETURN", "OF", "TIMES", "HOLDS", "OF", "TIMES"]);
    for cost in all {
        let number = |number: Option<u32>| number.map_or_else(absent, |number| number.to_string());
        columns.add([
            cost.tier.to_string(),
            output::short_us(cost.return_us),
            printable(&cost.return_of),
            number(Some(cost.return_samples)),
            cost.holds_bytes.map_or_else(absent, whole_kib),
            cost.holds_of.as_deref().map_or_else(absent, printable),
            number(cost.holds_samples),
        ]);
    }
    columns
}

/// Returns the known fields, each stage of the last wake by its name, and the tiers' costs as a
/// table.
fn known(mut answer: Value) -> (Value, Option<TableColumns>) {
    let told = answer.as_object_mut().and_then(|fields| fields.remove("costs"));
    let told: Option<Vec<TierCost>> = told.and_then(|told| serde_json::from_value(told).ok());
    if let Some(fields) = answer.as_object_mut() {
        fields.retain(|name, value| name != "ok" && !value.is_null());
    }
    if let Some(wake) = answer.get_mut("last_wake")
        && let Ok(read) = WakeReport::deserialize(&*wake)
    {
        let stages = read.stages.iter();
        wake["stages"] = stages
            .map(|(stage, us)| (stage.as_str().to_owned(), Value::from(output::short_us(*us))))
            .collect();
        if let Some(fields) = wake.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
    }
    (answer, told.map(|told| costs(&told)))
}

fn act(
    site: &str,
    what: &str,
    done: &str,
    format: OutputFormat,
    place: &RecordSource,
) -> Result<(), CliError> {
    let answer = output::tell_node(place, &format!("{}/{what}", path(site)))?;
    if format.json {
        output::print_json(&answer)
    } else {
        output::print(&format!("the instance of '{site}' {done}"))
    }
}

fn logs(one: &OneInstance, place: &RecordSource) -> Result<(), CliError> {
    let answer = output::ask_node(place, &format!("{}/logs", path(&one.site)))?;
    if one.format.json {
        return output::print_json(&answer);
    }
    let lines = answer["lines"].as_array().map_or(&[][..], Vec::as_slice);
    // An application's output is shown, not obeyed.
    lines.iter().try_for_each(|line| output::print(&printable(&output::plain(line))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_shows_how_deep_each_rests_and_what_its_last_wake_took() {
        let all = parse_instances(json!({ "instances": [
            {
                "site": "wiki", "tenant": "demo", "tier": "image", "since_seconds": 3_700, "uses": 0, "wakes": 3, "state": "idle",
                "memory_bytes": 0, "image": { "bytes": 35_651_584, "digest": "ab" },
                "last_wake": { "from": "image", "stages": [["restore", 38_000], ["connect", 40]] },
            },
            { "site": "b", "tenant": "demo", "tier": "cold", "state": "starting",
              "note": "it has no image: CRIU is missing, install it as docs/instances.md says" },
        ], "waking": 1 }))
        .unwrap();
        assert_eq!(
            table(&all.instances).text(),
            "SITE  TENANT  STATE     FOR    USES  MEMORY  IMAGE  WAKES  LAST WAKE      NOTE\n\
             wiki  demo    image     1h 1m  0     0B      34MiB  3      image 38.0 ms\n\
             b     demo    starting  -      -     -       -      -      -              it has no image: CRIU is missing, install it as docs/instances.md says\n"
        );
    }

    #[test]
    fn instance_is_shown_with_only_known_facts() {
        let answer = json!({
            "ok": true, "site": "wiki", "note": null,
            "last_wake": { "from": "image", "stages": [["restore", 38_000], ["connect", 40]], "predicted_us": null },
            "costs": [
                { "tier": "frozen", "return_us": 400, "return_samples": 12, "return_of": "own", "holds_bytes": 31_457_280, "holds_samples": 1, "holds_of": "node" },
                { "tier": "image", "return_us": 41_000, "return_samples": 0, "return_of": "assumed", "holds_bytes": 0, "holds_samples": null, "holds_of": null },
            ],
        });
        let shown = json!({
            "site": "wiki", "last_wake": { "from": "image", "stages": { "restore": "38.0 ms", "connect": "40 us" } },
        });
        let (fields, costs) = known(answer);
        assert_eq!(fields, shown);
        assert_eq!(
            costs.unwrap().text(),
            "TIER    RETURN   OF       TIMES  HOLDS  OF    TIMES\n\
             frozen  400 us   own      12     30MiB  node  1\n\
             image   41.0 ms  assumed  0      0B     -     -\n"
        );
    }

    #[test]
    fn one_rests_at_a_tier_and_not_at_running() {
        assert_eq!(tier("frozen"), Ok(Tier::Frozen));
        for bad in ["running", "asleep", ""] {
            assert_eq!(tier(bad), Err("use quiet, frozen, reclaimed, image, cold".into()), "{bad}");
        }
    }
}

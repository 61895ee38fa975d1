//! `nagaya instance`: running applications, how deep each rests, and what an operator does to one.
//!
//! Not here: doing it (`nagaya_keeper`), an application's record (`site`), all of them at a glance every second (`top`).

use std::process::ExitCode;
use std::time::Duration;

use nagaya_base::units::format_bytes;
use nagaya_cmdb::instance::{Tier, Wake};
use serde::Deserialize;
use serde_json::Value;

use super::exec;
use super::output::{self, CliError, Columns, Format, Place, escape, printable, short_time};

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List instances and how deep each rests
    List {
        /// Only this tenant's
        #[arg(long)]
        tenant: Option<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Show all that is known of one
    Show(One),
    /// Make one run now, as a request would
    Wake(One),
    /// Let one rest deeper, unless a request needs it
    Rest {
        /// Its site
        site: String,
        /// How deep; one step deeper if it is not said
        #[arg(long, value_name = "TIER", value_parser = tier)]
        to: Option<Tier>,
        #[command(flatten)]
        format: Format,
    },
    /// Take a new image of one, starting it anew if need be
    Image(One),
    /// Start one anew: what runs is ended, and its image is not used again
    Restart(One),
    /// End the processes of one; the next request starts it
    Stop(One),
    /// Show the last lines one wrote
    Logs(One),
    /// Run a command beside one's application, as its tenant and in its sandbox
    Exec(exec::Run),
}

#[derive(Debug, clap::Args)]
pub struct One {
    /// Its site
    pub site: String,
    #[command(flatten)]
    pub format: Format,
}

/// The keeper's answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Instances {
    pub instances: Vec<Instance>,
}

/// One instance. What the keeper does not know is absent.
#[derive(Debug, Deserialize)]
pub struct Instance {
    pub site: String,
    #[serde(default)]
    pub tenant: String,
    pub tier: Tier,
    /// What goes on with it now.
    pub state: Option<String>,
    pub since_seconds: Option<u64>,
    /// Edge threads that keep it awake.
    pub uses: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub cpu_us: Option<u64>,
    pub wakes: Option<u64>,
    pub last_wake: Option<Wake>,
    pub image: Option<Image>,
    pub note: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Image {
    pub bytes: Option<u64>,
}

impl Instance {
    /// What goes on with it, and else how deep it rests.
    pub fn state(&self) -> String {
        match self.state.as_deref() {
            None | Some("idle" | "in use") => self.tier.to_string(),
            Some(state) => printable(state),
        }
    }

    pub fn since(&self) -> String {
        self.since_seconds.map_or_else(absent, |seconds| short_time(Duration::from_secs(seconds)))
    }

    pub fn memory(&self) -> String {
        self.memory_bytes.map_or_else(absent, whole_kib)
    }
}

pub fn absent() -> String {
    "-".into()
}

/// Pages are never less than a KiB.
fn whole_kib(bytes: u64) -> String {
    format_bytes(bytes / 1024 * 1024)
}

fn tier(word: &str) -> Result<Tier, String> {
    Tier::ALL.into_iter().find(|tier| tier.as_str() == word && *tier != Tier::Running).ok_or_else(|| {
        let known: Vec<_> = Tier::ALL.iter().rev().skip(1).map(|tier| tier.as_str()).collect();
        format!("use {}", known.join(", "))
    })
}

pub fn run(command: &Command, place: &Place) -> Result<ExitCode, CliError> {
    let (result, format) = match command {
        Command::List { tenant, format } => (list(tenant.as_deref(), *format, place), *format),
        Command::Show(one) => (show(one, place), one.format),
        Command::Wake(one) => (act(&one.site, "wake", "runs", one.format, place), one.format),
        Command::Rest { site, to, format } => {
            let what = to.map_or_else(|| "rest".to_owned(), |tier| format!("rest?to={tier}"));
            (act(site, &what, "rests", *format, place), *format)
        }
        Command::Image(one) => (act(&one.site, "image", "has a new image", one.format, place), one.format),
        Command::Restart(one) => (act(&one.site, "restart", "starts anew", one.format, place), one.format),
        Command::Stop(one) => {
            (act(&one.site, "stop", "has no process any more", one.format, place), one.format)
        }
        Command::Logs(one) => (logs(one, place), one.format),
        Command::Exec(command) => return exec::run(command, place),
    };
    output::end(result, format)
}

pub fn ask(place: &Place) -> Result<Value, CliError> {
    output::ask_node(place, "/v1/instances")
}

pub fn read(answer: Value) -> Result<Instances, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the list is of another version of nagaya: {error}")))
}

fn list(tenant: Option<&str>, format: Format, place: &Place) -> Result<(), CliError> {
    let mut answer = ask(place)?;
    if let (Some(tenant), Some(all)) = (tenant, answer["instances"].as_array_mut()) {
        all.retain(|instance| instance["tenant"] == tenant);
    }
    if format.json {
        return output::print_json(&answer["instances"]);
    }
    let all = read(answer)?.instances;
    if all.is_empty() {
        return output::print(
            "there is no instance: a site of kind app has one, see `nagaya site add --help`",
        );
    }
    table(&all).print()
}

fn table(all: &[Instance]) -> Columns {
    let mut columns = Columns::with_sentences(&[
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
            instance.since(),
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

/// `image 41.2 ms`.
pub fn wake(wake: &Wake) -> String {
    let us = wake.stages.iter().fold(0, |sum: u64, (_, us)| sum.saturating_add(*us));
    format!("{} {}", wake.from, output::short_us(us))
}

fn path(site: &str) -> String {
    format!("/v1/instances/{}", escape(site))
}

fn show(one: &One, place: &Place) -> Result<(), CliError> {
    let answer = output::ask_node(place, &path(&one.site))?;
    match one.format.json {
        true => output::print_json(&answer),
        false => {
            let (fields, costs) = known(answer);
            output::print_fields(&fields)?;
            costs.map_or(Ok(()), |costs| costs.print())
        }
    }
}

/// What one tier costs.
#[derive(Debug, Deserialize)]
struct Cost {
    tier: Tier,
    return_us: u64,
    return_samples: u32,
    return_of: String,
    holds_bytes: Option<u64>,
    holds_samples: Option<u32>,
    holds_of: Option<String>,
}

/// How long it takes to come back from each tier and what is held there, with whose measurements say so and how many.
fn costs(all: &[Cost]) -> Columns {
    let mut columns = Columns::new(&["TIER", "RETURN", "OF", "TIMES", "HOLDS", "OF", "TIMES"]);
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

/// What there is to say, each stage of the last wake by its name, and what tiers cost as a table of its own.
fn known(mut answer: Value) -> (Value, Option<Columns>) {
    let told = answer.as_object_mut().and_then(|fields| fields.remove("costs"));
    let told: Option<Vec<Cost>> = told.and_then(|told| serde_json::from_value(told).ok());
    if let Some(fields) = answer.as_object_mut() {
        fields.retain(|name, value| name != "ok" && !value.is_null());
    }
    if let Some(wake) = answer.get_mut("last_wake")
        && let Ok(read) = Wake::deserialize(&*wake)
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

fn act(site: &str, what: &str, done: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let answer = output::tell_node(place, &format!("{}/{what}", path(site)))?;
    match format.json {
        true => output::print_json(&answer),
        false => output::print(&format!("the instance of '{site}' {done}")),
    }
}

fn logs(one: &One, place: &Place) -> Result<(), CliError> {
    let answer = output::ask_node(place, &format!("{}/logs", path(&one.site)))?;
    if one.format.json {
        return output::print_json(&answer);
    }
    let lines = answer["lines"].as_array().map_or(&[][..], Vec::as_slice);
    // What an application writes is shown, not obeyed.
    lines.iter().try_for_each(|line| output::print(&printable(&output::plain(line))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_shows_how_deep_each_rests_and_what_its_last_wake_took() {
        let all = read(json!({ "instances": [
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
    fn what_is_shown_of_one_is_what_is_known() {
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

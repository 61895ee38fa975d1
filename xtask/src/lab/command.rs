//! `./dev cluster`: a lab from the command line, for people and for tests.
//!
//! Not here: the effect of the words (`Lab`).

use std::fmt;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::guard;
use super::network::WireFault;
use super::running::{Lab, LabPlan, PROBE, SHARED};
use crate::{interrupt, workspace};

const USAGE: &str = "\
usage: ./dev cluster VERB [--name NAME | --dir DIR]

  up N [--etcd 0|1|3] [--fence MS] [--probe udp|connect|icmp] [--program FILE] [--tables FILE] [--no-join] [--attached]
                       [--json]
                       N nodes, n1 to nN, and etcd members e1 to e3, as a cluster; --tables: more of the nodes' configuration;
                       --attached: until the end of standard input or 'down'
  status [--json]      what there is
  cut MACHINE          its packets are dropped, in and out; with --one-way in|out only those it gets, or sends;
                       --slow MS: they take longer, each way; --loss PERCENT: some of them are lost;
                       --store: only those from and to the members of etcd are dropped
  heal MACHINE         its wire is as it was first
  kill MACHINE         all its processes at once, with SIGKILL
  start MACHINE        again
  pause MACHINE [--ms N]
                       all its processes stand still; with --ms for so long, else until 'resume'
  resume MACHINE
  etcd stop|start K    kills the member eK, or starts it again
  exec NODE -- WORDS   a command of nagaya on a node: exec n1 -- site list
  in MACHINE -- WORDS  any program in a machine's network, or in that of 'clients'
  down                 ends everything; nothing is left
";

/// Name of a lab without one.
const NAME: &str = "main";

const FENCE_MS: u32 = 300;

/// Interval at which an attached lab checks for an interrupt, or for its removal.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Words of a command line, in any order.
#[derive(Debug, Default)]
struct LabArgs {
    plain: Vec<String>,
    options: Vec<(String, String)>,
    flags: Vec<String>,
    /// Words after `--`.
    command: Vec<String>,
}

const OPTIONS: [&str; 11] = [
    "--name",
    "--dir",
    "--etcd",
    "--fence",
    "--probe",
    "--program",
    "--tables",
    "--one-way",
    "--slow",
    "--loss",
    "--ms",
];
const FLAGS: [&str; 4] = ["--no-join", "--attached", "--json", "--store"];

impl LabArgs {
    fn read(arguments: &[String]) -> Result<Self> {
        let mut words = Self::default();
        let mut rest = arguments.iter();
        while let Some(word) = rest.next() {
            match word.as_str() {
                "--" => words.command = rest.by_ref().cloned().collect(),
                flag if FLAGS.contains(&flag) => words.flags.push(flag.into()),
                option if OPTIONS.contains(&option) => {
                    let value = rest.next().with_context(|| format!("{option} needs a value"))?;
                    words.options.push((option.into(), value.clone()));
                }
                other if other.starts_with('-') => bail!("unknown option '{other}'\n{USAGE}"),
                plain => words.plain.push(plain.into()),
            }
        }
        Ok(words)
    }

    fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        let parse =
            |text: &str| text.parse().ok().with_context(|| format!("{name} needs a number, not '{text}'"));
        self.option(name).map(parse).transpose()
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|one| one == flag)
    }

    fn tag(&self) -> &str {
        self.option("--name").unwrap_or(NAME)
    }

    fn dir(&self) -> Result<PathBuf> {
        let by_name = || std::env::temp_dir().join(format!("nagaya-lab-{}", self.tag()));
        let dir = self.option("--dir").map_or_else(by_name, PathBuf::from);
        std::path::absolute(dir).context("the lab's directory")
    }

    fn lab(&self) -> Result<Lab> {
        Lab::open(&self.dir()?)
    }

    /// Returns the only word after the verb.
    fn one(&self, what: &str) -> Result<&str> {
        match &self.plain[..] {
            [one] => Ok(one),
            _ => bail!("which {what}?\n{USAGE}"),
        }
    }
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let (verb, rest) = arguments.split_first().with_context(|| USAGE.to_owned())?;
    let words = LabArgs::read(rest)?;
    let machine = || words.one("machine");
    match verb.as_str() {
        guard::VERB => guard::watch(Path::new(words.one("lab's directory")?))?,
        "up" => up(&words)?,
        "status" => show(&words.lab()?, words.has("--json"))?,
        "cut" => words.lab()?.cut(machine()?, fault(&words)?)?,
        "heal" => words.lab()?.heal(machine()?)?,
        "kill" => words.lab()?.kill(machine()?)?,
        "start" => words.lab()?.start(machine()?)?,
        "resume" => words.lab()?.resume(machine()?)?,
        "pause" => pause(&words)?,
        "etcd" => etcd(&words)?,
        "exec" => return exec(&words),
        "in" => return within(&words),
        "down" => words.lab()?.down()?,
        "help" | "-h" | "--help" => print!("{USAGE}"),
        other => bail!("unknown verb '{other}'\n{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn up(words: &LabArgs) -> Result<()> {
    let nodes = words.one("number of nodes")?;
    let tables =
        words.option("--tables").map(|file| std::fs::read_to_string(file).with_context(|| file.to_owned()));
    interrupt::install()?;
    let program = match words.option("--program") {
        Some(program) => std::path::absolute(program).context("the program")?,
        None => workspace::build_nagaya(workspace::Build::Shipped)?,
    };
    let lab = Lab::up(&LabPlan {
        nodes: nodes.parse().with_context(|| format!("'{nodes}' is not a number of nodes"))?,
        stores: words.number("--etcd")?.unwrap_or(3),
        fence_ms: words.number("--fence")?.unwrap_or(FENCE_MS),
        probe: words.option("--probe").unwrap_or(PROBE).into(),
        tag: words.tag().into(),
        dir: words.dir()?,
        program,
        is_joined: !words.has("--no-join"),
        tables: tables.transpose()?.unwrap_or_default(),
    })?;
    show(&lab, words.has("--json"))?;
    if !words.has("--attached") {
        if !words.has("--json") {
            print!("{}", hint(words.tag(), &words.dir()?));
        }
        return lab.keep();
    }
    // The reader waits for it.
    std::io::stdout().flush().context("telling that the lab is there")?;
    let input = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    while !input.is_finished() && lab.exists() && !interrupt::wait(LOOK_EVERY) {}
    lab.down()
}

fn hint(tag: &str, dir: &Path) -> String {
    let name = if tag == NAME { String::new() } else { format!(" --name {tag}") };
    let shared = dir.join(SHARED);
    format!(
        "\nwhat sites are made of belongs into {}, which all nodes see\n\
         ask as a client:  sudo ./dev cluster in clients{name} -- curl -si -H 'Host: NAME' http://10.99.0.1/\n\
         pull a cable:     sudo ./dev cluster cut n1{name}\n\
         end it:           sudo ./dev cluster down{name}\n",
        shared.display()
    )
}

fn show(lab: &Lab, is_json: bool) -> Result<()> {
    let all = lab.describe()?;
    if is_json {
        println!("{all}");
        return Ok(());
    }
    println!("{:8} {:12} {:>9}  IS", "MACHINE", "ADDRESS", "PROCESSES");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    for machine in all["machines"].as_array().into_iter().flatten() {
        let mut is = vec![if machine["processes"] == 0 { "down" } else { "up" }.to_owned()];
        is.extend((machine["paused"] == true).then(|| "paused".into()));
        is.extend(machine["fault"].as_str().map(Into::into));
        let (name, address) = (text(&machine["name"]), text(&machine["address"]));
        println!("{name:8} {address:12} {:>9}  {}", machine["processes"].to_string(), is.join(", "));
    }
    println!("in {}", text(&all["dir"]));
    Ok(())
}

fn fault(words: &LabArgs) -> Result<WireFault> {
    let (way, slow, loss) = (words.option("--one-way"), words.number("--slow")?, words.number("--loss")?);
    let fault = match (way, slow, loss, words.has("--store")) {
        (None, None, None, false) => WireFault::Silent,
        (None, None, None, true) => WireFault::Storeless,
        (Some("in"), None, None, false) => WireFault::Deaf,
        (Some("out"), None, None, false) => WireFault::Mute,
        (None, Some(ms), None, false) => WireFault::Slow { ms },
        (None, None, Some(percent), false) => WireFault::Lossy { percent },
        (Some(other), None, None, false) => bail!("--one-way is 'in' or 'out', not '{other}'"),
        _ => bail!("one of --one-way, --slow, --loss and --store"),
    };
    match fault {
        WireFault::Slow { ms } => ensure!((0.0..=10_000.0).contains(&ms), "--slow: 0 to 10000 ms, not {ms}"),
        WireFault::Lossy { percent } => {
            ensure!((0.0..=100.0).contains(&percent), "--loss: 0 to 100, not {percent}")
        }
        WireFault::Silent | WireFault::Storeless | WireFault::Deaf | WireFault::Mute => {}
    }
    Ok(fault)
}

fn pause(words: &LabArgs) -> Result<()> {
    let (lab, machine) = (words.lab()?, words.one("machine")?);
    match words.number("--ms")? {
        None => lab.pause(machine),
        Some(ms) => {
            let stood = lab.pause_for(machine, Duration::from_millis(ms))?;
            println!("{machine} stood still for {:.0} ms", stood.as_secs_f64() * 1e3);
            Ok(())
        }
    }
}

fn etcd(words: &LabArgs) -> Result<()> {
    let lab = words.lab()?;
    let [verb, number] = &words.plain[..] else { bail!("etcd stop K, or etcd start K\n{USAGE}") };
    let member = format!("e{number}");
    ensure!(
        lab.store_names().contains(&member),
        "there is no member {number}: {}",
        lab.store_names().join(", ")
    );
    match verb.as_str() {
        "stop" => lab.kill(&member),
        "start" => lab.start(&member),
        other => bail!("etcd stop or etcd start, not '{other}'"),
    }
}

fn exec(words: &LabArgs) -> Result<ExitCode> {
    let node = words.lab()?.node(words.one("node")?)?;
    let command: Vec<&str> = words.command.iter().map(String::as_str).collect();
    ended(&node.command(&command))
}

fn within(words: &LabArgs) -> Result<ExitCode> {
    let lab = words.lab()?;
    let name = words.one("machine")?;
    ensure!(!words.command.is_empty(), "which program? in {name} -- PROGRAM WORDS");
    ensure!(lab.network.file(name).exists(), "there is no machine '{name}'");
    ended(&[&lab.network.enter(name)[..], &words.command].concat())
}

/// Runs a command to its end, which is ours.
fn ended(command: &[String]) -> Result<ExitCode> {
    let status = Command::new(&command[0]).args(&command[1..]).status();
    let status = status.with_context(|| format!("running {}", command[0]))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

impl fmt::Display for WireFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => write!(f, "silent"),
            Self::Storeless => write!(f, "cut off from etcd"),
            Self::Deaf => write!(f, "hears nothing"),
            Self::Mute => write!(f, "is not heard"),
            Self::Slow { ms } => write!(f, "slow by {ms} ms"),
            Self::Lossy { percent } => write!(f, "loses {percent} %"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> LabArgs {
        LabArgs::read(&text.split(' ').map(Into::into).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn options_stand_before_or_behind_what_they_are_for() {
        let read = words("n1 --name a-b -- site list --json");
        assert_eq!((read.tag(), read.one("node").unwrap()), ("a-b", "n1"));
        assert_eq!(read.command, ["site", "list", "--json"]);
        assert!(!read.has("--json"));
        assert!(LabArgs::read(&["--sideways".into()]).is_err());
    }

    #[test]
    fn a_wire_has_one_fault_at_a_time() {
        assert_eq!(fault(&words("n1")).unwrap(), WireFault::Silent);
        assert_eq!(fault(&words("--one-way in n1")).unwrap(), WireFault::Deaf);
        assert_eq!(fault(&words("n1 --slow 2.5")).unwrap(), WireFault::Slow { ms: 2.5 });
        assert_eq!(fault(&words("n1 --store")).unwrap(), WireFault::Storeless);
        assert!(fault(&words("n1 --slow 2 --loss 3")).is_err());
        assert!(fault(&words("n1 --store --one-way in")).is_err());
        assert!(fault(&words("n1 --loss 101")).is_err());
        assert!(fault(&words("n1 --one-way up")).is_err());
    }
}

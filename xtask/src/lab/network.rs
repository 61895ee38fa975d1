//! The lab's network: a namespace for each machine, one for the clients, and a bridge in one of its
//! own. It also makes faults of a machine's wire.
//!
//! A namespace is a file in the lab's directory (nsfs, bind-mounted), not a name in `/run/netns`.
//! The machine's own network has nothing of a lab, and labs with the same addresses run side by
//! side. Not here: processes (`machine`).

use std::fs::{self, File};
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::mount::{UnmountFlags, unmount};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::content::run;

/// The namespace with the bridge.
const HUB: &str = "hub";

/// The bridge in it.
const BRIDGE: &str = "lan";

/// A machine's only interface.
const INTERFACE: &str = "eth0";

/// Our table of filters in a machine's namespace.
const TABLE: &str = "lab";

/// Resolution of loss: percent with one decimal.
const LOSS_PARTS: f64 = 1000.0;

/// Directory of a lab's namespaces.
#[derive(Debug, Clone)]
pub struct LabNetwork {
    dir: PathBuf,
}

/// A fault of a machine's wire. Packets already on their way arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WireFault {
    /// Nothing goes in or out, not even ARP: as if the cable were pulled.
    Silent,
    /// The same for traffic with members of etcd.
    Storeless,
    /// It can send, and receives nothing.
    Deaf,
    /// It receives, and its packets do not arrive.
    Mute,
    /// Each packet takes this much longer, in each direction.
    Slow { ms: f64 },
    /// This percentage of packets is lost, in each direction.
    Lossy { percent: f64 },
}

impl LabNetwork {
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.join("net") }
    }

    /// Makes the bridge, without machines.
    pub fn make(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).with_context(|| format!("creating {}", self.dir.display()))?;
        self.namespace(HUB)?;
        self.ip(HUB, &format!("link add name {BRIDGE} type bridge"))?;
        // No port waits before it forwards.
        self.ip(HUB, &format!("link set dev {BRIDGE} type bridge forward_delay 0 stp_state 0"))?;
        self.ip(HUB, &format!("link set dev {BRIDGE} up"))
    }

    /// Attaches a machine to the bridge.
    pub fn attach(&self, name: &str, address: Ipv4Addr, bits: u8) -> Result<()> {
        self.namespace(name)?;
        let file = self.file(name);
        let file = file.to_string_lossy();
        let pair = ["link", "add", "name", name, "type", "veth", "peer", "name", INTERFACE, "netns", &file];
        self.run_in(HUB, "ip", &pair)?;
        self.ip(HUB, &format!("link set dev {name} master {BRIDGE} up"))?;
        self.ip(name, "link set dev lo up")?;
        self.ip(name, &format!("address add {address}/{bits} dev {INTERFACE}"))?;
        self.ip(name, &format!("link set dev {INTERFACE} up"))
    }

    /// Undoes `make` and `attach`; interfaces go with their namespaces.
    pub fn remove(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            // An unfinished one is a plain file.
            let _ = unmount(&path, UnmountFlags::DETACH);
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(())
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the prefix of a command that runs in a machine's network. The file system and all
    /// else stay unchanged (`ip netns exec` would hide the cgroups).
    pub fn enter(&self, name: &str) -> [String; 3] {
        ["nsenter".into(), format!("--net={}", self.file(name).display()), "--".into()]
    }

    pub fn enter_hub(&self) -> [String; 3] {
        self.enter(HUB)
    }

    /// Runs this in a thread whose network is the machine's; its threads and processes have it,
    /// too.
    pub fn within<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.file(name);
        let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| -> Result<T> {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                    .with_context(|| format!("entering the network of {name}: is this root?"))?;
                Ok(work())
            });
            inside.join().map_err(|_| anyhow!("what was done in the network of {name} panicked"))?
        })
    }

    // === Faults ===

    /// Sets filters for this fault, replacing the former ones.
    pub fn filter(&self, name: &str, fault: WireFault) -> Result<()> {
        let (in_rule, out_rule) = match fault {
            WireFault::Silent => ("drop".to_owned(), "drop".to_owned()),
            WireFault::Storeless => {
                let stores = super::addresses::stores_at();
                (format!("ip saddr {stores} drop"), format!("ip daddr {stores} drop"))
            }
            WireFault::Deaf => ("drop".into(), String::new()),
            WireFault::Mute => (String::new(), "drop".into()),
            WireFault::Slow { .. } => return self.unfilter(name),
            // A thousand out of a thousand is not a number with which nftables compares.
            WireFault::Lossy { percent } if percent >= 100.0 => ("drop".into(), "drop".into()),
            WireFault::Lossy { percent } => {
                let part = percent / 100.0 * LOSS_PARTS;
                let rule = format!("numgen random mod {LOSS_PARTS:.0} < {part:.0} drop");
                (rule.clone(), rule)
            }
        };
        // Of the family `netdev`: ARP is dropped, too, and the loopback interface is not affected.
        let chain = |hook: &str, rule: &str| {
            format!(
                "chain {hook}_{INTERFACE} {{\n type filter hook {hook} device \"{INTERFACE}\" priority 0; policy accept;\n {rule}\n}}\n"
            )
        };
        let chains = [chain("ingress", &in_rule), chain("egress", &out_rule)].concat();
        // One transaction: there is no moment without a filter between the old and the new.
        let text = format!(
            "table netdev {TABLE}\ndelete table netdev {TABLE}\ntable netdev {TABLE} {{\n{chains}}}\n"
        );
        self.nft(name, &text)
    }

    pub fn unfilter(&self, name: &str) -> Result<()> {
        self.nft(name, &format!("table netdev {TABLE}\ndelete table netdev {TABLE}\n"))
    }

    /// Takes a machine's wire off the bridge. Returns the names of the two ends that must be
    /// connected.
    pub fn unplug(&self, name: &str) -> Result<[String; 2]> {
        let (bridge_end, wire_end) = (format!("{name}b"), format!("{name}w"));
        self.run_in(
            HUB,
            "ip",
            &["link", "add", "name", &bridge_end, "type", "veth", "peer", "name", &wire_end],
        )?;
        self.ip(HUB, &format!("link set dev {name} nomaster"))?;
        self.ip(HUB, &format!("link set dev {bridge_end} master {BRIDGE} up"))?;
        self.ip(HUB, &format!("link set dev {wire_end} up"))?;
        Ok([name.to_owned(), wire_end])
    }

    pub fn plug(&self, name: &str) -> Result<()> {
        self.ip(HUB, &format!("link delete dev {name}b"))?;
        self.ip(HUB, &format!("link set dev {name} master {BRIDGE}"))
    }

    // === Programs ===

    fn namespace(&self, name: &str) -> Result<()> {
        let file = self.file(name);
        File::create_new(&file).with_context(|| format!("creating {}", file.display()))?;
        run(Command::new("unshare").arg(format!("--net={}", file.display())).arg("true"))
            .context("making a network namespace needs root")
    }

    fn ip(&self, name: &str, words: &str) -> Result<()> {
        self.run_in(name, "ip", &words.split(' ').collect::<Vec<_>>())
    }

    fn run_in(&self, name: &str, program: &str, words: &[&str]) -> Result<()> {
        let enter = self.enter(name);
        run(Command::new(&enter[0]).args(&enter[1..]).arg(program).args(words))
    }

    fn nft(&self, name: &str, text: &str) -> Result<()> {
        let enter = self.enter(name);
        let mut child = Command::new(&enter[0])
            .args(&enter[1..])
            .args(["nft", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("running nft")?;
        let mut input = child.stdin.take().context("the input of nft")?;
        input.write_all(text.as_bytes()).context("telling nft")?;
        drop(input);
        let output = child.wait_with_output().context("waiting for nft")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "nft in the network of {name}: {said}\n{text}");
        Ok(())
    }
}

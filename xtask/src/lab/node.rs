//! The lab's nodes: their configuration, their start, and how they become a cluster.
//!
//! Not here: a node alone (`server::nagaya`), whose commands are used here.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::addresses::{NET, NET_BITS, NODE_PORT};
use super::running::{Lab, LabPlan};
use crate::interrupt;
use crate::server::nagaya::NagayaNode;

const PEER_PORT: u16 = 7443;

/// Name of the cluster in etcd.
const CLUSTER: &str = "lab";

/// Longest wait until a node listens, and until all know each other.
const START_MAX: Duration = Duration::from_secs(60);
const JOIN_MAX: Duration = Duration::from_secs(30);

impl Lab {
    /// Returns the node as its operator has it: its commands and its files.
    pub fn node(&self, name: &str) -> Result<NagayaNode> {
        let known = self.node_names();
        ensure!(known.iter().any(|one| one == name), "no node '{name}': there are {}", known.join(", "));
        Ok(NagayaNode::at(&self.program, &self.dir.join(name), self.address(name)?))
    }

    pub(super) fn configure(&self, name: &str, plan: &LabPlan) -> Result<()> {
        let LabPlan { fence_ms, probe, tables, .. } = plan;
        let dir = self.dir.join(name);
        let (place, address) = (dir.display(), self.ip(name)?);
        let [a, b, c] = NET;
        let config = format!(
            "node = \"{name}\"\nruntime_dir = \"{place}/run\"\nstate_dir = \"{place}/state\"\n\n\
             [[listen]]\naddress = \"{address}:{NODE_PORT}\"\n\n\
             [cluster]\nlisten = \"{address}:{PEER_PORT}\"\nfence = \"{fence_ms}ms\"\nprobe = \"{probe}\"\n\n\
             # Clients of the lab are told what their requests took.\n[receipts]\nallow = [\"{a}.{b}.{c}.0/{NET_BITS}\"]\n\n\
             # All load of a lab comes from one address.\n[edge.networks]\nexempt = [\"{a}.{b}.{c}.0/{NET_BITS}\"]\n\n{tables}"
        );
        NagayaNode::with_config(&self.program, &dir, self.address(name)?, &config).map(drop)
    }

    /// Starts it and waits until it answers clients and its operator.
    pub(super) fn start_node(&self, name: &str) -> Result<()> {
        let (node, machine) = (self.node(name)?, self.machine(name)?);
        machine.start(&node.command(&["serve"]))?;
        // From its own network: its wire may be cut.
        let answers = || {
            let connected = self.network.within(name, || TcpStream::connect(node.address).is_ok());
            connected.unwrap_or(false) && std::os::unix::net::UnixStream::connect(node.admin_socket()).is_ok()
        };
        machine.wait_until(START_MAX, answers).with_context(|| format!("starting {name}"))
    }

    /// Makes the cluster with the first node; the others join it.
    pub(super) fn join_all(&self) -> Result<()> {
        let names = self.node_names();
        self.found(&names[0], CLUSTER)?;
        for name in &names[1..] {
            interrupt::check()?;
            self.join(name, &names[0])?;
        }
        for name in &names {
            self.wait_until_known(name, names.len())?;
        }
        Ok(())
    }

    /// Makes a cluster of a node.
    pub fn found(&self, name: &str, cluster: &str) -> Result<()> {
        let etcd = self.endpoints()?.join(",");
        let [ca, certificate, key] = self.store_access(name).map(|path| path.to_string_lossy().into_owned());
        let init = [
            &["cluster", "init", "--name", cluster, "--etcd", &etcd, "--etcd-ca", &ca][..],
            &["--etcd-cert", &certificate, "--etcd-key", &key],
        ];
        self.node(name)?.run(&init.concat()).map(drop)
    }

    /// Makes a node a member of `member`'s cluster, with a complete token.
    pub fn join(&self, name: &str, member: &str) -> Result<()> {
        let [_, certificate, key] = self.store_access(name).map(|path| path.to_string_lossy().into_owned());
        let words = ["cluster", "token", "--etcd-cert", &certificate, "--etcd-key", &key];
        let token = self.node(member)?.run(&words)?;
        let path = self.dir.join(name).join("token");
        fs::write(&path, "").and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o600)))?;
        fs::write(&path, token).context("keeping a join token")?;
        let join = ["cluster", "join", "--token-file", &path.to_string_lossy()];
        self.node(name)?.run(&join).with_context(|| format!("{name} joins"))?;
        fs::remove_file(&path).context("removing a join token")
    }

    /// Waits until the node knows of the others by its watch.
    fn wait_until_known(&self, name: &str, count: usize) -> Result<()> {
        let (node, begun) = (self.node(name)?, Instant::now());
        loop {
            let known: Value =
                serde_json::from_str(&node.run(&["nodes", "--json"])?).context("reading the nodes")?;
            let known = known.as_array().map_or(0, Vec::len);
            if known == count {
                return Ok(());
            }
            ensure!(begun.elapsed() < JOIN_MAX, "{name} knows {known} of {count} nodes");
            interrupt::check()?;
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns which node runs a site, and under which epoch, as `by` knows it. `None` before its
    /// first request.
    pub fn placement(&self, by: &str, site: &str) -> Result<Option<(String, u64)>> {
        let placed = self.placements(by)?;
        let one = placed.iter().find(|one| one["site"] == site);
        Ok(one.and_then(|one| Some((one["node"].as_str()?.to_owned(), one["epoch"].as_u64()?))))
    }

    pub fn placements(&self, by: &str) -> Result<Vec<Value>> {
        let listed = self.node(by)?.run(&["placements", "--json"])?;
        serde_json::from_str(&listed).context("reading the placements")
    }
}

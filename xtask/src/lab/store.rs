//! The lab's etcd: one member, or three. They accept only clients with a certificate that nagaya
//! made for them.
//!
//! Not here: the nodes' data there.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::running::Lab;
use crate::http;

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// A member's health port, without TLS and only for that.
const HEALTH_PORT: u16 = 2381;

/// Directory of the certificates for etcd, in the lab's directory.
const PKI: &str = "pki";

/// Longest wait until a member has a leader: elections take one to two seconds.
const START_MAX: Duration = Duration::from_secs(60);

impl Lab {
    /// Returns etcd's client endpoints.
    pub fn endpoints(&self) -> Result<Vec<String>> {
        self.store_names()
            .iter()
            .map(|name| Ok(format!("https://{}:{CLIENT_PORT}", self.ip(name)?)))
            .collect()
    }

    fn pki(&self, name: &str) -> String {
        self.dir.join(PKI).join(name).to_string_lossy().into_owned()
    }

    /// Returns a node's files for access to etcd: the CA certificate, the node's own certificate,
    /// and its key.
    pub fn store_access(&self, node: &str) -> [PathBuf; 3] {
        ["ca.pem", &format!("node-{node}.pem"), &format!("node-{node}.key")].map(|name| self.pki(name).into())
    }

    fn make_certificates(&self) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["cluster", "etcd-certs", "--dir"]).arg(self.dir.join(PKI));
        for name in self.store_names() {
            command.args(["--member", &format!("{name}={}", self.ip(&name)?)]);
        }
        for name in self.node_names() {
            command.args(["--node", &name]);
        }
        let output = command.output().context("running nagaya")?;
        ensure!(output.status.success(), "no certificates: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(self.dir.join(PKI).join("README"), output.stdout).context("keeping what nagaya said")
    }

    /// Starts all at once: a member alone has no leader.
    pub(super) fn start_stores(&self) -> Result<()> {
        if self.store_names().is_empty() {
            return Ok(());
        }
        self.make_certificates()?;
        for name in self.store_names() {
            self.start_store(&name)?;
        }
        for name in self.store_names() {
            self.wait_for_store(&name)?;
        }
        Ok(())
    }

    pub(super) fn start_store(&self, name: &str) -> Result<()> {
        let address = self.ip(name)?;
        let peer =
            |name: &str| Ok::<_, anyhow::Error>(format!("{name}=https://{}:{PEER_PORT}", self.ip(name)?));
        let peers: Vec<String> = self.store_names().iter().map(|name| peer(name)).collect::<Result<_>>()?;
        let (client_url, peer_url) =
            (format!("https://{address}:{CLIENT_PORT}"), format!("https://{address}:{PEER_PORT}"));
        let health_url = format!("http://{address}:{HEALTH_PORT}");
        let data = self.dir.join(name).join("data").to_string_lossy().into_owned();
        let mut command = vec![String::from("etcd")];
        for (option, value) in [
            ("name", name),
            ("data-dir", &data),
            ("listen-client-urls", &client_url),
            ("advertise-client-urls", &client_url),
            ("listen-peer-urls", &peer_url),
            ("initial-advertise-peer-urls", &peer_url),
            ("initial-cluster", &peers.join(",")),
            ("initial-cluster-token", &self.tag),
            ("initial-cluster-state", "new"),
            ("listen-metrics-urls", &health_url),
            ("trusted-ca-file", &self.pki("ca.pem")),
            ("client-crl-file", &self.pki("crl.pem")),
            ("cert-file", &self.pki(&format!("member-{name}.pem"))),
            ("key-file", &self.pki(&format!("member-{name}.key"))),
            ("peer-trusted-ca-file", &self.pki("peer-ca.pem")),
            ("peer-cert-file", &self.pki(&format!("member-{name}-peer.pem"))),
            ("peer-key-file", &self.pki(&format!("member-{name}-peer.key"))),
            ("logger", "zap"),
            ("log-level", "warn"),
        ] {
            command.extend([format!("--{option}"), value.to_owned()]);
        }
        command.extend(["--client-cert-auth", "--peer-client-cert-auth"].map(String::from));
        self.machine(name)?.start(&command)
    }

    pub(super) fn wait_for_store(&self, name: &str) -> Result<()> {
        let address = (self.ip(name)?, HEALTH_PORT).into();
        let is_healthy = || {
            let asked = self.network.within(name, || http::get(address, name, "/health"));
            asked.is_ok_and(|answer| {
                answer.is_ok_and(|(_, body)| String::from_utf8_lossy(&body).contains("\"true\""))
            })
        };
        self.machine(name)?.wait_until(START_MAX, is_healthy).context("starting etcd")
    }
}

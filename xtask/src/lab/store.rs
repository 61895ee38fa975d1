//! The lab's etcd: one member, or three.
//!
//! Not here: what nodes keep there.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Lab;
use crate::http;

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// Longest wait until a member has a leader: elections take one to two seconds.
const START_MAX: Duration = Duration::from_secs(60);

impl Lab {
    /// Where clients of etcd find it.
    pub fn endpoints(&self) -> Result<Vec<String>> {
        self.store_names().iter().map(|name| Ok(format!("http://{}:{CLIENT_PORT}", self.ip(name)?))).collect()
    }

    /// All at once: a member alone has no leader.
    pub(super) fn start_stores(&self) -> Result<()> {
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
            |name: &str| Ok::<_, anyhow::Error>(format!("{name}=http://{}:{PEER_PORT}", self.ip(name)?));
        let peers: Vec<String> = self.store_names().iter().map(|name| peer(name)).collect::<Result<_>>()?;
        let (client_url, peer_url) =
            (format!("http://{address}:{CLIENT_PORT}"), format!("http://{address}:{PEER_PORT}"));
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
            ("logger", "zap"),
            ("log-level", "warn"),
        ] {
            command.extend([format!("--{option}"), value.to_owned()]);
        }
        self.machine(name)?.start(&command)
    }

    pub(super) fn wait_for_store(&self, name: &str) -> Result<()> {
        let address = (self.ip(name)?, CLIENT_PORT).into();
        let is_healthy = || {
            let asked = self.network.within(name, || http::get(address, name, "/health"));
            asked.is_ok_and(|answer| {
                answer.is_ok_and(|(_, body)| String::from_utf8_lossy(&body).contains("\"true\""))
            })
        };
        self.machine(name)?.wait_until(START_MAX, is_healthy).context("starting etcd")
    }
}

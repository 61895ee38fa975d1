//! How a node reaches the etcd of its cluster's records: addresses, certificates and a login.
//!
//! Not here: the store (`nagaya_store`), keeping this with the member (`supervisor::cluster`).

use nagaya_store::etcd::EtcdOptions;
use serde::{Deserialize, Serialize};

/// Where the cluster's records are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdAccess {
    /// `http://` or `https://`, address and port.
    pub endpoints: Vec<String>,
    /// PEM: the CA of etcd's certificate. `None` if it is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// PEM: this node's client certificate for etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// The operator allows clear text, or access without a login.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// Etcd's client port if an endpoint names none (`--listen-client-urls`).
const ETCD_PORT: u16 = 2379;

impl EtcdAccess {
    /// Returns `host:port` of each endpoint. Invalid addresses are skipped: they do not reach etcd,
    /// either.
    pub fn places(&self) -> Vec<String> {
        let place = |endpoint: &String| {
            let uri: http::Uri = endpoint.parse().ok()?;
            Some(format!("{}:{}", uri.host()?, uri.port_u16().unwrap_or(ETCD_PORT)))
        };
        self.endpoints.iter().filter_map(place).collect()
    }

    /// Returns this with missing values from `other`, except those that each operator has to give.
    /// A certificate and its key go together.
    pub fn or(self, other: Self) -> Self {
        let has_identity = self.certificate.is_some();
        Self {
            endpoints: if self.endpoints.is_empty() { other.endpoints } else { self.endpoints },
            ca: self.ca.or(other.ca),
            certificate: if has_identity { self.certificate } else { other.certificate },
            key: if has_identity { self.key } else { other.key },
            user: self.user.or(other.user),
            password: self.password.or(other.password),
            insecure: self.insecure,
        }
    }
}

/// Returns how the cluster's store is opened.
pub fn etcd_options(cluster: &str, etcd: &EtcdAccess) -> EtcdOptions {
    let bytes = |text: &Option<String>| text.as_ref().map(|text| text.clone().into_bytes());
    EtcdOptions {
        endpoints: etcd.endpoints.clone(),
        cluster: cluster.into(),
        ca: bytes(&etcd.ca),
        identity: bytes(&etcd.certificate).zip(bytes(&etcd.key)),
        login: etcd.user.clone().zip(etcd.password.clone()),
        insecure: etcd.insecure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_etcd_are_hosts_and_ports() {
        let endpoints =
            ["http://10.0.0.9:2379", "https://e1.internal", "https://[2001:db8::1]:4001/", "no place"];
        let etcd = EtcdAccess { endpoints: endpoints.map(String::from).to_vec(), ..EtcdAccess::default() };
        assert_eq!(etcd.places(), ["10.0.0.9:2379", "e1.internal:2379", "[2001:db8::1]:4001"]);
    }

    #[test]
    fn access_given_at_a_join_precedes_the_token() {
        let one = |word: &str| Some(word.to_owned());
        let token = EtcdAccess {
            endpoints: vec!["https://e1:2379".into()],
            ca: one("ca"),
            certificate: one("c"),
            key: one("k"),
            ..EtcdAccess::default()
        };
        assert_eq!(EtcdAccess::default().or(token.clone()), token);
        let own = EtcdAccess {
            certificate: one("own"),
            key: one("own key"),
            user: one("u"),
            ..EtcdAccess::default()
        };
        let both = own.clone().or(token.clone());
        assert_eq!((both.certificate, both.key, both.ca), (own.certificate, own.key, token.ca));
    }
}

//! The network that an application reaches in addition to its own loopback. It is nothing, all but
//! the node itself, all that the node reaches, or named endpoints.
//!
//! Not here: the route there (`keeper::relay`), other checks of the record (`check::app`).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest name of a host, bytes (RFC 1035 section 2.3.4).
const NAME_LEN_MAX: usize = 253;
const LABEL_LEN_MAX: usize = 63;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum OutboundRules {
    #[default]
    None,
    /// Everything outside of the node, by TCP, and name resolution. The node itself and link-local
    /// addresses are excluded.
    Nat,
    /// Everything that the node reaches, including the node's own addresses. The application then
    /// has no network namespace of its own.
    Host,
    /// Only these, by TCP: each is an `NetworkEndpoint` in a record without mistakes.
    Only(Vec<String>),
}

impl OutboundRules {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the endpoints that it reaches by name or address.
    pub fn endpoints(&self) -> Vec<NetworkEndpoint> {
        match self {
            Self::None | Self::Nat | Self::Host => Vec::new(),
            Self::Only(list) => list.iter().filter_map(|text| text.parse().ok()).collect(),
        }
    }
}

impl Serialize for OutboundRules {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => "none".serialize(to),
            Self::Nat => "nat".serialize(to),
            Self::Host => "host".serialize(to),
            Self::Only(list) => list.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for OutboundRules {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "none, nat, host, or a list of HOST:PORT")]
        enum Written {
            Word(String),
            List(Vec<String>),
        }
        match Written::deserialize(from)? {
            Written::Word(word) if word == "none" => Ok(Self::None),
            Written::Word(word) if word == "nat" => Ok(Self::Nat),
            Written::Word(word) if word == "host" => Ok(Self::Host),
            Written::Word(word) => Err(serde::de::Error::custom(format!(
                "outbound '{word}' is unknown: use none, nat, host, or a list of HOST:PORT"
            ))),
            Written::List(list) => Ok(Self::Only(list)),
        }
    }
}

/// An endpoint on the network: `203.0.113.7:443`, `[2001:db8::1]:443`, `db.internal:3306`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NetworkEndpoint {
    pub host: EndpointHost,
    pub port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EndpointHost {
    Address(IpAddr),
    /// In lower case.
    Name(String),
}

impl fmt::Display for NetworkEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            EndpointHost::Address(address) => SocketAddr::new(*address, self.port).fmt(f),
            EndpointHost::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl FromStr for NetworkEndpoint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str =
            "is no HOST:PORT: use a name or an address, an IPv6 address in [], and a port from 1 to 65535";
        if let Ok(address) = text.parse::<SocketAddr>() {
            let is_one = !address.ip().is_unspecified() && !address.ip().is_multicast() && address.port() > 0;
            let host = EndpointHost::Address(address.ip());
            return if is_one {
                Ok(Self { host, port: address.port() })
            } else {
                Err("is not the address of a single host")
            };
        }
        let (name, port) = text.rsplit_once(':').ok_or(FORM)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or(FORM)?;
        let name = name.to_ascii_lowercase();
        if name == "localhost" {
            return Err("is the application's own: for one of the node's use 127.0.0.1 and its port");
        }
        if !is_name(&name) {
            return Err(FORM);
        }
        Ok(Self { host: EndpointHost::Name(name), port })
    }
}

/// Returns whether it has letters, digits, `-` and `_` in parts with dots between them. The last
/// part must not be a number.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=LABEL_LEN_MAX).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
    };
    let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= NAME_LEN_MAX && name.split('.').all(is_label) && !is_number(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in
            ["203.0.113.7:443", "[2001:db8::1]:443", "db.internal:3306", "127.0.0.1:5432", "a_b-1.x:1"]
        {
            assert_eq!(text.parse::<NetworkEndpoint>().unwrap().to_string(), text);
        }
        assert_eq!("DB.Internal:1".parse::<NetworkEndpoint>().unwrap().to_string(), "db.internal:1");
    }

    #[test]
    fn text_that_is_no_endpoint_is_refused() {
        let long = format!("{}.x:1", "a".repeat(64));
        for bad in [
            "",
            "db",
            "db:",
            "db:0",
            "db:65536",
            "db:x",
            ":1",
            "*.x:1",
            "a..b:1",
            "a b:1",
            "1.2.3:4",
            "0.0.0.0:1",
            "224.0.0.1:1",
            "10.0.0.1:0",
            "2001:db8::1:443",
            "localhost:1",
            "-a:1",
            "a\n:1",
            &long,
        ] {
            assert!(bad.parse::<NetworkEndpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_record_says_a_word_or_a_list() {
        for (text, outbound) in [
            (r#""none""#, OutboundRules::None),
            (r#""nat""#, OutboundRules::Nat),
            (r#""host""#, OutboundRules::Host),
            (r#"["a:1","b:2"]"#, OutboundRules::Only(vec!["a:1".into(), "b:2".into()])),
        ] {
            assert_eq!(serde_json::from_str::<OutboundRules>(text).unwrap(), outbound);
            assert_eq!(serde_json::to_string(&outbound).unwrap(), text);
        }
        let error = serde_json::from_str::<OutboundRules>(r#""all""#).unwrap_err().to_string();
        assert!(error.contains("'all' is unknown: use none, nat, host, or a list"), "{error}");
        assert!(serde_json::from_str::<OutboundRules>("7").is_err());
    }
}

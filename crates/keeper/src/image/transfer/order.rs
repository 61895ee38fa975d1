//! Orders of the supervisor to move one image: of this site, from this node to that one, for a
//! bounded time.
//!
//! ```text
//! <hex of HMAC-SHA256 over the rest> <JSON of `OrderContent`>
//! ```
//!
//! The edge carries an order and cannot make one: the key is a secret of the cluster's members that
//! no edge has. It comes to the keeper with its settings, by the feed. On a node in no cluster
//! there is no key, so every order is refused. One key makes all keys of a transfer (HKDF-SHA256,
//! RFC 5869): to sign orders, and to seal each stream (`sealed`). Not here: where the key comes
//! from, when an order is given (`nagaya`).

use std::fmt;
use std::time::Duration;

use data_encoding::HEXLOWER;
use nagaya_records::feed::FETCH_MAX;
use nagaya_records::{NodeName, SiteName};
use ring::hkdf::{self, HKDF_SHA256};
use ring::hmac;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::image::clock::unix_now;

/// Length of a cluster's key for images, bytes.
pub const KEY_LEN: usize = 32;

/// Maximum difference between the clocks of two nodes.
const CLOCK_MARGIN: Duration = Duration::from_secs(1800);

/// Validity of an order after it was given, and before it by a clock that is slow.
const ORDER_AGE_MAX: Duration = FETCH_MAX.saturating_add(CLOCK_MARGIN);

/// Maximum length of an order, bytes: three names of at most 253 bytes, numbers, and the
/// authenticator.
const ORDER_LEN_MAX: usize = 2048;

/// Length of the bytes that make two orders of one second different.
const NONCE_LEN: usize = 16;

/// A secret that the keepers and supervisors of one cluster share. As text: 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; KEY_LEN]);

impl ClusterKey {
    pub const fn new(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }

    fn derive(&self) -> hkdf::Prk {
        hkdf::Prk::new_less_safe(HKDF_SHA256, &self.0)
    }

    fn signs_orders(&self) -> hmac::Key {
        let secret = self.derive();
        let okm = secret.expand(&[b"nagaya image order"], hmac::HMAC_SHA256);
        okm.expect("a key is shorter than HKDF's bound").into()
    }

    /// Derives the key that seals one stream. These parts identify the stream.
    pub(crate) fn seals_stream(&self, parts: &[&[u8]]) -> ring::aead::LessSafeKey {
        let secret = self.derive();
        let info = crate::image::Digest::of(parts).to_string();
        let info = [b"nagaya image stream".as_slice(), info.as_bytes()];
        let okm = secret.expand(&info, &ring::aead::AES_256_GCM);
        let key = okm.expect("a key is shorter than HKDF's bound");
        ring::aead::LessSafeKey::new(key.into())
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

impl Serialize for ClusterKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&HEXLOWER.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for ClusterKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let bytes = HEXLOWER.decode(text.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| serde::de::Error::custom("a key has 64 hexadecimal digits"))
    }
}

/// Contents of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OrderContent {
    site: SiteName,
    from: NodeName,
    to: NodeName,
    /// Seconds since 1970.
    given_at: u64,
    nonce: String,
}

/// A node's end of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferEnd {
    Giver,
    Taker,
    Either,
}

/// An order that was verified.
#[derive(Debug, Clone)]
pub struct TransferOrder {
    /// Key that signed it, which also seals the stream.
    pub(crate) key: ClusterKey,
    /// The signed text.
    pub(crate) text: String,
}

/// Reason why an order is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("this node is in no cluster, or has not seen its keys yet: no image leaves it or comes to it")]
    NoCluster,
    #[error("no supervisor of this cluster has ordered it")]
    NotSigned,
    #[error("the order is of another site, node or direction")]
    OtherTransfer,
    #[error("the order is too old; are the clocks of the nodes more than half an hour apart?")]
    TooOld,
}

/// Writes an order. Fails if the system gives no random bytes.
pub fn give_order(
    key: &ClusterKey,
    site: &SiteName,
    from: &NodeName,
    to: &NodeName,
) -> std::io::Result<String> {
    let mut nonce = [0; NONCE_LEN];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    let (site, from, to) = (site.clone(), from.clone(), to.clone());
    let wording = OrderContent { site, from, to, given_at: unix_now(), nonce: HEXLOWER.encode(&nonce) };
    Ok(sign_order(key, &wording))
}

fn sign_order(key: &ClusterKey, wording: &OrderContent) -> String {
    sign_text(key, &serde_json::to_string(wording).expect("an order has texts and a number"))
}

pub(crate) fn sign_text(key: &ClusterKey, text: &str) -> String {
    let tag = hmac::sign(&key.signs_orders(), text.as_bytes());
    format!("{} {text}", HEXLOWER.encode(tag.as_ref()))
}

/// Verifies an order for this node and site. `keys`: of its cluster, the newest first.
pub fn verify_order(
    text: &str,
    keys: &[ClusterKey],
    node: Option<&str>,
    site: &SiteName,
    end: TransferEnd,
) -> Result<TransferOrder, OrderError> {
    let node = node.filter(|_| !keys.is_empty()).ok_or(OrderError::NoCluster)?;
    let signed = (text.len() <= ORDER_LEN_MAX).then(|| text.split_once(' ')).flatten();
    let (tag, wording) = signed.ok_or(OrderError::NotSigned)?;
    let tag = HEXLOWER.decode(tag.as_bytes()).map_err(|_| OrderError::NotSigned)?;
    let signs = |key: &&ClusterKey| hmac::verify(&key.signs_orders(), wording.as_bytes(), &tag).is_ok();
    let key = keys.iter().find(signs).ok_or(OrderError::NotSigned)?.clone();
    let wording: OrderContent = serde_json::from_str(wording).map_err(|_| OrderError::NotSigned)?;
    let (gives, takes) = (wording.from.as_str() == node, wording.to.as_str() == node);
    let is_ours = match end {
        TransferEnd::Giver => gives,
        TransferEnd::Taker => takes,
        TransferEnd::Either => gives || takes,
    };
    if !is_ours || wording.site != *site || wording.from == wording.to {
        return Err(OrderError::OtherTransfer);
    }
    if wording.given_at.abs_diff(unix_now()) > ORDER_AGE_MAX.as_secs() {
        return Err(OrderError::TooOld);
    }
    Ok(TransferOrder { key, text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ClusterKey = ClusterKey::new([7; KEY_LEN]);

    fn site(name: &str) -> SiteName {
        SiteName::new(name).unwrap()
    }

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn order() -> String {
        give_order(&KEY, &site("shop"), &node("a"), &node("b")).unwrap()
    }

    fn verify(text: &str, node: Option<&str>, end: TransferEnd) -> Result<(), OrderError> {
        verify_order(text, &[KEY], node, &site("shop"), end).map(drop)
    }

    #[test]
    fn an_order_holds_for_its_two_nodes_and_direction() {
        use TransferEnd::{Either, Giver, Taker};
        let order = order();
        let other = Err(OrderError::OtherTransfer);
        for (name, end, expected) in [
            ("a", Giver, Ok(())),
            ("a", Either, Ok(())),
            ("a", Taker, other),
            ("b", Taker, Ok(())),
            ("b", Either, Ok(())),
            ("b", Giver, other),
            ("c", Either, other),
        ] {
            assert_eq!(verify(&order, Some(name), end), expected, "{name} {end:?}");
        }
        let of_other = verify_order(&order, &[KEY], Some("a"), &site("bank"), Giver);
        assert_eq!(of_other.map(drop), Err(OrderError::OtherTransfer));
    }

    #[test]
    fn a_node_without_a_cluster_takes_no_order() {
        let order = order();
        assert_eq!(verify(&order, None, TransferEnd::Either), Err(OrderError::NoCluster));
        let no_key = verify_order(&order, &[], Some("a"), &site("shop"), TransferEnd::Giver);
        assert_eq!(no_key.map(drop), Err(OrderError::NoCluster));
    }

    #[test]
    fn any_change_of_an_order_is_refused() {
        let order = order();
        for at in 0..order.len() {
            let mut bytes = order.clone().into_bytes();
            bytes[at] ^= 1;
            let Ok(changed) = String::from_utf8(bytes) else { continue };
            assert_eq!(
                verify(&changed, Some("a"), TransferEnd::Giver),
                Err(OrderError::NotSigned),
                "{changed}"
            );
        }
        assert_eq!(verify("", Some("a"), TransferEnd::Giver), Err(OrderError::NotSigned));
        assert_eq!(verify(&"x ".repeat(5000), Some("a"), TransferEnd::Giver), Err(OrderError::NotSigned));
    }

    #[test]
    fn an_older_key_is_accepted_while_it_is_known() {
        let (order, newer) = (order(), ClusterKey::new([8; KEY_LEN]));
        let verify = |keys: &[ClusterKey]| {
            verify_order(&order, keys, Some("a"), &site("shop"), TransferEnd::Giver).map(|order| order.key)
        };
        assert_eq!(verify(&[newer.clone(), KEY]), Ok(KEY));
        assert_eq!(verify(&[newer]), Err(OrderError::NotSigned));
    }

    #[test]
    fn an_order_ends() {
        let at = |given_at| {
            let wording = OrderContent {
                site: site("shop"),
                from: node("a"),
                to: node("b"),
                given_at,
                nonce: String::new(),
            };
            verify(&sign_order(&KEY, &wording), Some("a"), TransferEnd::Giver)
        };
        let margin = 60;
        assert_eq!(at(unix_now() - ORDER_AGE_MAX.as_secs() + margin), Ok(()));
        assert_eq!(at(unix_now() - ORDER_AGE_MAX.as_secs() - margin), Err(OrderError::TooOld));
        assert_eq!(at(unix_now() + ORDER_AGE_MAX.as_secs() + margin), Err(OrderError::TooOld));
        assert_eq!(at(u64::MAX), Err(OrderError::TooOld));
    }

    #[test]
    fn a_key_is_written_and_read_and_not_shown() {
        let text = serde_json::to_string(&KEY).unwrap();
        assert_eq!(text, format!("\"{}\"", "07".repeat(KEY_LEN)));
        assert_eq!(serde_json::from_str::<ClusterKey>(&text).unwrap(), KEY);
        assert!(serde_json::from_str::<ClusterKey>("\"07\"").is_err());
        assert_eq!(format!("{KEY:?}"), "ClusterKey(..)");
    }
}

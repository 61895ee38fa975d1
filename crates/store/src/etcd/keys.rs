//! The layout of the cluster's store, and how a key and its value are read as a record.
//!
//! | key below `/nagaya/CLUSTER/` | value |
//! |---|---|
//! | `format` | number; of everything below `v1/`, whatever that name says |
//! | `v1/revision` | `{"count":N,"by":"..."}`: changes of configuration, last transaction |
//! | `v1/next_uid` | number |
//! | `v1/seeding` | the process that fills an empty cluster; only meanwhile |
//! | `v1/{tenants,sites,nodes}/NAME`, `v1/settings/KEY` | record as JSON |
//! | `v1/rules/NAME` | record as JSON, from format 2 on |
//! | `v1/placements/SITE` | record as JSON, begins with `{"epoch":N,`; it outlives its site |
//! | `v1/tickets/keys` | the keys that sign tickets, a record as JSON. Secret, like `pki` |
//! | `v1/left/NODE` | the site that was last taken from a node; only the time matters |
//! | `v1/doubts/NODE` | suspect mark: the node without a reply. Until it clears this, no lease |
//! | `v1/removed/NODE` | `fence_ms` of a removed node, until another takes its name |
//! | `v1/present/NODE` | load of a node as JSON, under an etcd lease |
//! | `v1/knows/NODE` | newest format of a node's program, same lease; none if only format 1 |
//! | `v1/pki/KEY` | bytes |
//!
//! From format 3 on, values are signed (`signed`), with exceptions. For `seeding`, `left` and
//! `doubts` only their existence and time count. Older programs have to read `format` and `knows`.
//! Machines without keys read `pki`, whose values prove themselves. Tenants, sites, settings, rules
//! and ticket keys are sealed as well.
//!
//! A value changes to a newer form only when all members know that form; `format` names it from
//! then on (`raise`). A program that does not know the number touches nothing. Not here: reading
//! and writing (`watch`, `write`).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::ClusterError;
use super::wire::{
    Compare, DeleteRange, Operand, PutRequest, RangeRequest, Relation, RequestKind, RequestOp, Target,
};
use crate::RecordKind;
use nagaya_records::names::{NodeName, RuleName, SiteName, TenantName};
use nagaya_records::record::{Placement, PlacementReason, RecordChange, ReplicaRecord};

/// The newest format that this program knows. It reads and writes the older ones, too, while the
/// cluster has them.
pub(super) const FORMAT: u64 = 3;

/// The oldest format that this program knows.
pub(super) const OLDEST: u64 = 1;

/// The first format with rules.
pub(super) const HAS_RULES: u64 = 2;

/// The first format whose values are signed.
pub(super) const HAS_SIGNATURES: u64 = 3;

/// The name of the only record of its kind.
pub(super) const TICKET_KEYS: &str = "keys";

/// The keys of one cluster.
#[derive(Debug, Clone)]
pub(super) struct KeySpace {
    cluster: String,
}

/// Meaning of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeyMeaning<'a> {
    Format,
    Revision,
    Record(RecordKind, &'a str),
    Present(&'a str),
    Pki,
    /// Irrelevant to a watcher, or of a later version.
    Other,
}

impl KeySpace {
    pub fn new(cluster: &str) -> Self {
        Self { cluster: cluster.into() }
    }

    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Returns the prefix of every key of the cluster.
    pub fn all(&self) -> String {
        format!("/nagaya/{}/", self.cluster)
    }

    pub fn format(&self) -> String {
        format!("/nagaya/{}/format", self.cluster)
    }

    pub fn revision(&self) -> String {
        self.below("revision")
    }

    pub fn next_uid(&self) -> String {
        self.below("next_uid")
    }

    pub fn seeding(&self) -> String {
        self.below("seeding")
    }

    pub fn present(&self, node: &NodeName) -> String {
        self.below(&format!("present/{node}"))
    }

    pub fn knows(&self, node: &str) -> String {
        self.below(&format!("knows/{node}"))
    }

    pub fn left(&self, node: &NodeName) -> String {
        self.below(&format!("left/{node}"))
    }

    pub fn suspect_key(&self, node: &NodeName) -> String {
        self.below(&format!("doubts/{node}"))
    }

    pub fn removed(&self, node: &NodeName) -> String {
        self.below(&format!("removed/{node}"))
    }

    pub fn pki(&self, key: &str) -> String {
        self.below(&format!("pki/{key}"))
    }

    pub fn record(&self, kind: RecordKind, name: &str) -> String {
        self.below(&format!("{}/{name}", place(kind)))
    }

    /// Returns the prefix of every record of this kind.
    pub fn records(&self, kind: RecordKind) -> String {
        self.below(&format!("{}/", place(kind)))
    }

    pub fn meaning<'a>(&self, key: &'a [u8]) -> KeyMeaning<'a> {
        let Some(rest) = str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&*self.all())) else {
            return KeyMeaning::Other;
        };
        if rest == "format" {
            return KeyMeaning::Format;
        }
        let Some(rest) = rest.strip_prefix("v1/") else { return KeyMeaning::Other };
        match rest.split_once('/') {
            None if rest == "revision" => KeyMeaning::Revision,
            None => KeyMeaning::Other,
            Some(("present", node)) => KeyMeaning::Present(node),
            Some(("pki", _)) => KeyMeaning::Pki,
            Some((place, name)) => match KINDS.iter().find(|(_, known)| *known == place) {
                Some((kind, _)) => KeyMeaning::Record(*kind, name),
                None => KeyMeaning::Other,
            },
        }
    }

    /// Returns whether the value at this key must be signed.
    pub fn is_signed(&self, key: &[u8]) -> bool {
        let rest =
            str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&*self.all())?.strip_prefix("v1/"));
        let Some(rest) = rest else { return false };
        let place = rest.split_once('/').map_or(rest, |(place, _)| place);
        !matches!(place, "seeding" | "left" | "doubts" | "knows" | "pki")
    }

    /// Returns whether the value at this key must be secret from readers of etcd.
    pub fn is_sealed(&self, key: &[u8]) -> bool {
        match self.meaning(key) {
            KeyMeaning::Record(kind, _) => match kind {
                RecordKind::Tenant
                | RecordKind::Site
                | RecordKind::Setting
                | RecordKind::Rule
                | RecordKind::TicketKeys => true,
                // etcd compares their beginnings.
                RecordKind::Node | RecordKind::Placement => false,
            },
            _ => false,
        }
    }

    /// Returns the key as shown to people: without the prefix of the cluster.
    pub fn label(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        let rest = key.strip_prefix(&*self.all()).unwrap_or(&key);
        rest.strip_prefix("v1/").unwrap_or(rest).to_owned()
    }

    fn below(&self, rest: &str) -> String {
        format!("/nagaya/{}/v1/{rest}", self.cluster)
    }
}

const KINDS: [(RecordKind, &str); 7] = [
    (RecordKind::Tenant, "tenants"),
    (RecordKind::Site, "sites"),
    (RecordKind::Setting, "settings"),
    (RecordKind::Rule, "rules"),
    (RecordKind::Node, "nodes"),
    (RecordKind::Placement, "placements"),
    (RecordKind::TicketKeys, "tickets"),
];

fn place(kind: RecordKind) -> &'static str {
    match kind {
        RecordKind::Tenant => "tenants",
        RecordKind::Site => "sites",
        RecordKind::Setting => "settings",
        RecordKind::Rule => "rules",
        RecordKind::Node => "nodes",
        RecordKind::Placement => "placements",
        RecordKind::TicketKeys => "tickets",
    }
}

/// Returns a record's key as shown to people.
pub(super) fn place_of(kind: RecordKind, name: &str) -> String {
    format!("{}/{name}", place(kind))
}

// === Values ===

/// Returns the number at `format`, if this program knows it.
pub(super) fn known_format(cluster: &str, found: &[u8]) -> Result<u64, ClusterError> {
    let number = str::from_utf8(found).ok().and_then(|text| text.parse().ok());
    number.filter(|format| (OLDEST..=FORMAT).contains(format)).ok_or_else(|| ClusterError::Version {
        cluster: cluster.into(),
        found: String::from_utf8_lossy(found).into_owned(),
        known: FORMAT,
    })
}

/// The value of `revision`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RevisionCount {
    pub count: u64,
    /// Random: a transaction that was sent twice because no reply came finds its own name here.
    pub by: String,
}

/// A placement with its epoch first, so that a comparison of the value can test the epoch alone.
#[derive(Serialize)]
struct EpochFirst<'a> {
    epoch: u64,
    site: &'a SiteName,
    node: &'a NodeName,
    since_ms: u64,
    why: PlacementReason,
    #[serde(skip_serializing_if = "is_zero")]
    wait_ms: u32,
    #[serde(skip_serializing_if = "is_none")]
    node_epoch: u64,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    copies: &'a [ReplicaRecord],
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_none(epoch: &u64) -> bool {
    *epoch == 0
}

pub(super) fn placement_value(placement: &Placement) -> Vec<u8> {
    let Placement { site, node, epoch, since_ms, why, wait_ms, node_epoch, copies } = placement;
    let epoch = *epoch;
    let since_ms = *since_ms;
    let why = *why;
    let wait_ms = *wait_ms;
    let node_epoch = *node_epoch;
    json(&EpochFirst { epoch, site, node, since_ms, why, wait_ms, node_epoch, copies })
}

/// Holds if the value at this key is a placement of this epoch. Such a value is between
/// `{"epoch":N,` and `{"epoch":N-`. `-` is the next byte after the comma, so exactly the values
/// with the first prefix are there.
pub(super) fn epoch_is(key: &str, epoch: u64) -> [Compare; 2] {
    let side = |relation: Relation, end: char| Compare {
        result: relation.into(),
        target: Target::Value.into(),
        key: key.into(),
        operand: Some(Operand::Value(format!("{{\"epoch\":{epoch}{end}").into_bytes())),
        range_end: Vec::new(),
    };
    [side(Relation::Greater, ','), side(Relation::Less, '-')]
}

pub(super) fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records have text keys and writing to memory works")
}

/// Returns the change that this key's new value, or its deletion, means. The error says what is
/// wrong with the record.
pub(super) fn change(kind: RecordKind, name: &str, value: Option<&[u8]>) -> Result<RecordChange, String> {
    let Some(value) = value else { return dropped(kind, name) };
    let read = || -> Result<RecordChange, serde_json::Error> {
        Ok(match kind {
            RecordKind::Tenant => RecordChange::PutTenant(serde_json::from_slice(value)?),
            RecordKind::Site => RecordChange::PutSite(serde_json::from_slice(value)?),
            RecordKind::Setting => RecordChange::PutSetting(serde_json::from_slice(value)?),
            RecordKind::Rule => RecordChange::PutRule(serde_json::from_slice(value)?),
            RecordKind::Node => RecordChange::PutNode(serde_json::from_slice(value)?),
            RecordKind::Placement => RecordChange::PutPlacement(serde_json::from_slice(value)?),
            RecordKind::TicketKeys => RecordChange::PutTicketKeys(serde_json::from_slice(value)?),
        })
    };
    let change = read().map_err(|error| match kind {
        // The error text could show a secret.
        RecordKind::TicketKeys => "it cannot be read".into(),
        _ => error.to_string(),
    })?;
    let named = match &change {
        RecordChange::PutTenant(tenant) => tenant.name.as_str(),
        RecordChange::PutSite(site) => site.name.as_str(),
        RecordChange::PutSetting(setting) => &setting.key,
        RecordChange::PutRule(rule) => rule.name.as_str(),
        RecordChange::PutNode(node) => node.name.as_str(),
        RecordChange::PutPlacement(placement) => placement.site.as_str(),
        RecordChange::PutTicketKeys(_) => TICKET_KEYS,
        _ => name,
    };
    if named == name { Ok(change) } else { Err(format!("the record there is of '{named}'")) }
}

fn dropped(kind: RecordKind, name: &str) -> Result<RecordChange, String> {
    let name_of = |error: nagaya_records::names::NameError| error.to_string();
    Ok(match kind {
        RecordKind::Tenant => RecordChange::DropTenant(TenantName::new(name).map_err(name_of)?),
        RecordKind::Site => RecordChange::DropSite(SiteName::new(name).map_err(name_of)?),
        RecordKind::Setting => RecordChange::DropSetting(name.into()),
        RecordKind::Rule => RecordChange::DropRule(RuleName::new(name).map_err(name_of)?),
        RecordKind::Node => RecordChange::DropNode(NodeName::new(name).map_err(name_of)?),
        RecordKind::Placement => RecordChange::DropPlacement(SiteName::new(name).map_err(name_of)?),
        RecordKind::TicketKeys if name == TICKET_KEYS => RecordChange::DropTicketKeys,
        RecordKind::TicketKeys => return Err("there is no such record".into()),
    })
}

/// Returns the name in a record's JSON.
pub(super) fn name_in(kind: RecordKind, json: &str) -> Option<String> {
    let field = match kind {
        RecordKind::Tenant | RecordKind::Site | RecordKind::Rule | RecordKind::Node => "name",
        RecordKind::Setting => "key",
        RecordKind::Placement => "site",
        RecordKind::TicketKeys => return Some(TICKET_KEYS.into()),
    };
    let record: Value = serde_json::from_str(json).ok()?;
    Some(record.get(field)?.as_str()?.to_owned())
}

// === Requests ===

/// Returns the end of the range of all keys with this prefix, which ends in an ASCII character.
pub(super) fn after_all(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

pub(super) fn get(key: &str) -> RangeRequest {
    RangeRequest { key: key.into(), ..RangeRequest::default() }
}

pub(super) fn getting(key: &str) -> RequestOp {
    RequestOp { request: Some(RequestKind::Range(get(key))) }
}

/// Reads all keys with this prefix.
pub(super) fn getting_all(prefix: &str) -> RequestOp {
    let range_end = after_all(prefix);
    RequestOp {
        request: Some(RequestKind::Range(RangeRequest {
            key: prefix.into(),
            range_end,
            ..RangeRequest::default()
        })),
    }
}

pub(super) fn putting(key: &str, value: impl Into<Vec<u8>>) -> RequestOp {
    RequestOp {
        request: Some(RequestKind::Put(PutRequest { key: key.into(), value: value.into(), lease: 0 })),
    }
}

pub(super) fn deleting(key: &str) -> RequestOp {
    RequestOp { request: Some(RequestKind::Delete(DeleteRange { key: key.into(), range_end: Vec::new() })) }
}

pub(super) fn deleting_all(prefix: &str) -> RequestOp {
    let range_end = after_all(prefix);
    RequestOp { request: Some(RequestKind::Delete(DeleteRange { key: prefix.into(), range_end })) }
}

pub(super) fn is_there(key: &str) -> Compare {
    created(key, Relation::Greater, 0)
}

pub(super) fn is_absent(key: &str) -> Compare {
    created(key, Relation::Equal, 0)
}

/// Holds if the key was made in exactly this revision and still exists.
pub(super) fn is_made(key: &str, revision: u64) -> Compare {
    created(key, Relation::Equal, revision)
}

fn created(key: &str, relation: Relation, revision: u64) -> Compare {
    Compare {
        result: relation.into(),
        target: Target::Created.into(),
        key: key.into(),
        operand: Some(Operand::Created(signed(revision))),
        range_end: Vec::new(),
    }
}

pub(super) fn is_value(key: &str, value: impl Into<Vec<u8>>) -> Compare {
    Compare {
        result: Relation::Equal.into(),
        target: Target::Value.into(),
        key: key.into(),
        operand: Some(Operand::Value(value.into())),
        range_end: Vec::new(),
    }
}

/// Holds if the key has this body, with any signature: the value is the body, or continues with a
/// newline. The bodies are JSON objects and numbers, so no other written value is between the two
/// bounds.
pub(super) fn stands(key: &str, body: Vec<u8>) -> [Compare; 2] {
    let mut low = body.clone();
    if let Some(last) = low.last_mut() {
        *last -= 1;
    }
    low.push(u8::MAX);
    let mut high = body;
    high.push(b'\n' + 1);
    let side = |relation: Relation, bound: Vec<u8>| Compare {
        result: relation.into(),
        target: Target::Value.into(),
        key: key.into(),
        operand: Some(Operand::Value(bound)),
        range_end: Vec::new(),
    };
    [side(Relation::Greater, low), side(Relation::Less, high)]
}

/// Holds if the key was last changed in exactly this revision; for 0, if it is absent.
pub(super) fn is_of(key: &str, revision: u64) -> Compare {
    modified(key, Relation::Equal, revision, Vec::new())
}

/// Holds if the key was not changed after this revision.
pub(super) fn is_no_newer(key: &str, revision: u64) -> Compare {
    modified(key, Relation::Less, revision + 1, Vec::new())
}

/// Holds if no key with this prefix was changed after this revision.
pub(super) fn are_no_newer(prefix: &str, revision: u64) -> Compare {
    modified(prefix, Relation::Less, revision + 1, after_all(prefix))
}

fn modified(key: &str, relation: Relation, revision: u64, range_end: Vec<u8>) -> Compare {
    Compare {
        result: relation.into(),
        target: Target::Modified.into(),
        key: key.into(),
        operand: Some(Operand::Modified(signed(revision))),
        range_end,
    }
}

/// Returns a revision as etcd counts it: in signed numbers that are never negative.
pub(super) fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As etcd compares.
    fn holds(compares: &[Compare], value: &[u8]) -> bool {
        compares.iter().all(|compare| {
            let Some(Operand::Value(bound)) = &compare.operand else { panic!("a comparison of values") };
            match Relation::try_from(compare.result).unwrap() {
                Relation::Greater => value > bound.as_slice(),
                Relation::Less => value < bound.as_slice(),
                Relation::Equal => value == bound.as_slice(),
            }
        })
    }

    #[test]
    fn body_stands_signed_or_not_and_no_other_does() {
        for body in [&b"300"[..], b"0", br#"{"name":"a","id":"1"}"#] {
            let compares = stands("k", body.to_vec());
            assert!(holds(&compares, body));
            assert!(holds(&compares, &[body, b"\n1 1 7 abc"].concat()));
            let last = body.len() - 1;
            let mut less = body.to_vec();
            less[last] -= 1;
            let mut more = body.to_vec();
            more[last] += 1;
            for other in
                [&body[..last], &[body, b"0"].concat(), &less, &[&less[..], b"\n1 1 7 abc"].concat(), &more]
            {
                assert!(!holds(&compares, other), "{}", String::from_utf8_lossy(other));
            }
        }
    }

    #[test]
    fn believed_keys_are_signed_and_configuration_is_sealed() {
        let keys = KeySpace::new("main");
        let at = |rest: &str| format!("/nagaya/main/{rest}").into_bytes();
        for (rest, is_signed, is_sealed) in [
            ("v1/tenants/t", true, true),
            ("v1/sites/s", true, true),
            ("v1/settings/a/b c", true, true),
            ("v1/rules/r", true, true),
            ("v1/tickets/keys", true, true),
            ("v1/nodes/a", true, false),
            ("v1/placements/s", true, false),
            ("v1/present/a", true, false),
            ("v1/removed/a", true, false),
            ("v1/next_uid", true, false),
            ("v1/revision", true, false),
            ("v1/of-a-later-version/x", true, false),
            ("format", false, false),
            ("v1/seeding", false, false),
            ("v1/left/a", false, false),
            ("v1/doubts/a", false, false),
            ("v1/knows/a", false, false),
            ("v1/pki/authority", false, false),
        ] {
            assert_eq!(keys.is_signed(&at(rest)), is_signed, "{rest}");
            assert_eq!(keys.is_sealed(&at(rest)), is_sealed, "{rest}");
        }
        assert!(!keys.is_signed(b"/nagaya/other/v1/sites/s"));
    }
}

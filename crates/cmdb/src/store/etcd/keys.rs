//! Where things lie in the cluster's store, and how a key and its value are read as a record.
//!
//! | key below `/nagaya/CLUSTER/` | value |
//! |---|---|
//! | `format` | number; of everything below `v1/`, whatever is in the place's name |
//! | `v1/revision` | `{"count":N,"by":"..."}`: changes of configuration so far, and which transaction made the last |
//! | `v1/next_uid` | number |
//! | `v1/seeding` | who fills an empty cluster; there only meanwhile |
//! | `v1/{tenants,sites,rules,nodes}/NAME`, `v1/settings/KEY` | record as JSON; rules from format 2 on |
//! | `v1/placements/SITE` | record as JSON that begins with `{"epoch":N,`; it outlives its site for a while |
//! | `v1/tickets/keys` | the keys that sign tickets, a record as JSON. Secret, as what is in `pki` is |
//! | `v1/left/NODE` | the site that was last taken from a node; what matters is when |
//! | `v1/doubts/NODE` | the node that got no answer from it: until it has taken this away, no read gives it authority |
//! | `v1/removed/NODE` | `fence_ms` of the record of a node that was removed; there until another one joins under its name |
//! | `v1/present/NODE` | load of a node as JSON, under a lease |
//! | `v1/knows/NODE` | the newest format that a node's program knows, under the same lease; none of a program that knows only format 1 |
//! | `v1/pki/KEY` | bytes |
//!
//! From format 3 on values are signed (`signed`), but not all: of `seeding`, `left` and `doubts` only counts that they are there and
//! since when; older programs have to read `format` and `knows`; and what is in `pki` is read by machines that have no keys yet, and
//! proves itself to them. Tenants, sites, settings, rules and ticket keys are sealed as well.
//!
//! What lies here is changed to a newer form only when all members know that one, and `format` says it from then on (`raise`).
//! Whoever does not know the number touches nothing. Not here: reading and writing (`watch`, `write`).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::ClusterError;
use super::wire::{Compare, DeleteRange, Operand, Operation, Put, Range, Relation, Request, Target};
use crate::names::{NodeName, RuleName, SiteName, TenantName};
use crate::record::{Change, Copied, Placement, Why};
use crate::store::Kind;

/// The newest format this program knows. It reads and writes the older ones too, as long as the cluster has them.
pub(super) const FORMAT: u64 = 3;

/// The oldest one it knows.
pub(super) const OLDEST: u64 = 1;

/// The first one that has rules.
pub(super) const HAS_RULES: u64 = 2;

/// The first one whose values are signed.
pub(super) const HAS_SIGNATURES: u64 = 3;

/// The name of the one record of its kind.
pub(super) const TICKET_KEYS: &str = "keys";

/// The keys of one cluster.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    cluster: String,
}

/// What a key stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning<'a> {
    Format,
    Revision,
    Record(Kind, &'a str),
    Present(&'a str),
    Pki,
    /// Of no use to who watches, or of a later version.
    Other,
}

impl Keys {
    pub fn new(cluster: &str) -> Self {
        Self { cluster: cluster.into() }
    }

    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Before every key of the cluster.
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

    pub fn doubt(&self, node: &NodeName) -> String {
        self.below(&format!("doubts/{node}"))
    }

    pub fn removed(&self, node: &NodeName) -> String {
        self.below(&format!("removed/{node}"))
    }

    pub fn pki(&self, key: &str) -> String {
        self.below(&format!("pki/{key}"))
    }

    pub fn record(&self, kind: Kind, name: &str) -> String {
        self.below(&format!("{}/{name}", place(kind)))
    }

    /// Before every record of this kind.
    pub fn records(&self, kind: Kind) -> String {
        self.below(&format!("{}/", place(kind)))
    }

    pub fn meaning<'a>(&self, key: &'a [u8]) -> Meaning<'a> {
        let Some(rest) = str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&*self.all())) else {
            return Meaning::Other;
        };
        if rest == "format" {
            return Meaning::Format;
        }
        let Some(rest) = rest.strip_prefix("v1/") else { return Meaning::Other };
        match rest.split_once('/') {
            None if rest == "revision" => Meaning::Revision,
            None => Meaning::Other,
            Some(("present", node)) => Meaning::Present(node),
            Some(("pki", _)) => Meaning::Pki,
            Some((place, name)) => match KINDS.iter().find(|(_, known)| *known == place) {
                Some((kind, _)) => Meaning::Record(*kind, name),
                None => Meaning::Other,
            },
        }
    }

    /// Whether the value at this key is to be signed.
    pub fn is_signed(&self, key: &[u8]) -> bool {
        let rest =
            str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&*self.all())?.strip_prefix("v1/"));
        let Some(rest) = rest else { return false };
        let place = rest.split_once('/').map_or(rest, |(place, _)| place);
        !matches!(place, "seeding" | "left" | "doubts" | "knows" | "pki")
    }

    /// Whether nobody who reads etcd alone is to know the value at this key.
    pub fn is_sealed(&self, key: &[u8]) -> bool {
        match self.meaning(key) {
            Meaning::Record(kind, _) => match kind {
                Kind::Tenant | Kind::Site | Kind::Setting | Kind::Rule | Kind::TicketKeys => true,
                // etcd compares their beginnings.
                Kind::Node | Kind::Placement => false,
            },
            _ => false,
        }
    }

    /// The key as people are told it: without what all keys of the cluster begin with.
    pub fn label(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        let rest = key.strip_prefix(&*self.all()).unwrap_or(&key);
        rest.strip_prefix("v1/").unwrap_or(rest).to_owned()
    }

    fn below(&self, rest: &str) -> String {
        format!("/nagaya/{}/v1/{rest}", self.cluster)
    }
}

const KINDS: [(Kind, &str); 7] = [
    (Kind::Tenant, "tenants"),
    (Kind::Site, "sites"),
    (Kind::Setting, "settings"),
    (Kind::Rule, "rules"),
    (Kind::Node, "nodes"),
    (Kind::Placement, "placements"),
    (Kind::TicketKeys, "tickets"),
];

fn place(kind: Kind) -> &'static str {
    match kind {
        Kind::Tenant => "tenants",
        Kind::Site => "sites",
        Kind::Setting => "settings",
        Kind::Rule => "rules",
        Kind::Node => "nodes",
        Kind::Placement => "placements",
        Kind::TicketKeys => "tickets",
    }
}

/// A record's key as people are told it.
pub(super) fn place_of(kind: Kind, name: &str) -> String {
    format!("{}/{name}", place(kind))
}

// === Values ===

/// The number that stands at `format`, if this program knows it.
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
pub(super) struct Count {
    pub count: u64,
    /// Random: a transaction that was sent twice, because no answer came, finds its own name here.
    pub by: String,
}

/// A placement with its epoch in front, so that a comparison of the value can ask for the epoch alone.
#[derive(Serialize)]
struct EpochFirst<'a> {
    epoch: u64,
    site: &'a SiteName,
    node: &'a NodeName,
    since_ms: u64,
    why: Why,
    #[serde(skip_serializing_if = "is_zero")]
    wait_ms: u32,
    #[serde(skip_serializing_if = "is_none")]
    node_epoch: u64,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    copies: &'a [Copied],
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_none(epoch: &u64) -> bool {
    *epoch == 0
}

pub(super) fn placement_value(placement: &Placement) -> Vec<u8> {
    let Placement { site, node, epoch, since_ms, why, wait_ms, node_epoch, copies } = placement;
    let (epoch, since_ms, why) = (*epoch, *since_ms, *why);
    let (wait_ms, node_epoch) = (*wait_ms, *node_epoch);
    json(&EpochFirst { epoch, site, node, since_ms, why, wait_ms, node_epoch, copies })
}

/// Holds if the value at this key is a placement of this epoch: it lies between `{"epoch":N,` and `{"epoch":N-`, and `-`
/// is the next byte after the comma, so that exactly what begins with the first lies there.
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

/// The change that this key's new value, or its end, is. An error says what is wrong with the record.
pub(super) fn change(kind: Kind, name: &str, value: Option<&[u8]>) -> Result<Change, String> {
    let Some(value) = value else { return dropped(kind, name) };
    let read = || -> Result<Change, serde_json::Error> {
        Ok(match kind {
            Kind::Tenant => Change::PutTenant(serde_json::from_slice(value)?),
            Kind::Site => Change::PutSite(serde_json::from_slice(value)?),
            Kind::Setting => Change::PutSetting(serde_json::from_slice(value)?),
            Kind::Rule => Change::PutRule(serde_json::from_slice(value)?),
            Kind::Node => Change::PutNode(serde_json::from_slice(value)?),
            Kind::Placement => Change::PutPlacement(serde_json::from_slice(value)?),
            Kind::TicketKeys => Change::PutTicketKeys(serde_json::from_slice(value)?),
        })
    };
    let change = read().map_err(|error| match kind {
        // What it says of a secret may show it.
        Kind::TicketKeys => "it cannot be read".into(),
        _ => error.to_string(),
    })?;
    let named = match &change {
        Change::PutTenant(tenant) => tenant.name.as_str(),
        Change::PutSite(site) => site.name.as_str(),
        Change::PutSetting(setting) => &setting.key,
        Change::PutRule(rule) => rule.name.as_str(),
        Change::PutNode(node) => node.name.as_str(),
        Change::PutPlacement(placement) => placement.site.as_str(),
        Change::PutTicketKeys(_) => TICKET_KEYS,
        _ => name,
    };
    if named == name { Ok(change) } else { Err(format!("the record there is of '{named}'")) }
}

fn dropped(kind: Kind, name: &str) -> Result<Change, String> {
    let name_of = |error: crate::names::NameError| error.to_string();
    Ok(match kind {
        Kind::Tenant => Change::DropTenant(TenantName::new(name).map_err(name_of)?),
        Kind::Site => Change::DropSite(SiteName::new(name).map_err(name_of)?),
        Kind::Setting => Change::DropSetting(name.into()),
        Kind::Rule => Change::DropRule(RuleName::new(name).map_err(name_of)?),
        Kind::Node => Change::DropNode(NodeName::new(name).map_err(name_of)?),
        Kind::Placement => Change::DropPlacement(SiteName::new(name).map_err(name_of)?),
        Kind::TicketKeys if name == TICKET_KEYS => Change::DropTicketKeys,
        Kind::TicketKeys => return Err("there is no such record".into()),
    })
}

/// The name in a record's JSON.
pub(super) fn name_in(kind: Kind, json: &str) -> Option<String> {
    let field = match kind {
        Kind::Tenant | Kind::Site | Kind::Rule | Kind::Node => "name",
        Kind::Setting => "key",
        Kind::Placement => "site",
        Kind::TicketKeys => return Some(TICKET_KEYS.into()),
    };
    let record: Value = serde_json::from_str(json).ok()?;
    Some(record.get(field)?.as_str()?.to_owned())
}

// === Requests ===

/// The end of the range of all keys that begin with this, which ends in an ASCII character.
pub(super) fn after_all(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

pub(super) fn get(key: &str) -> Range {
    Range { key: key.into(), ..Range::default() }
}

pub(super) fn getting(key: &str) -> Operation {
    Operation { request: Some(Request::Range(get(key))) }
}

/// Everything that begins with this.
pub(super) fn getting_all(prefix: &str) -> Operation {
    let range_end = after_all(prefix);
    Operation { request: Some(Request::Range(Range { key: prefix.into(), range_end, ..Range::default() })) }
}

pub(super) fn putting(key: &str, value: impl Into<Vec<u8>>) -> Operation {
    Operation { request: Some(Request::Put(Put { key: key.into(), value: value.into(), lease: 0 })) }
}

pub(super) fn deleting(key: &str) -> Operation {
    Operation { request: Some(Request::Delete(DeleteRange { key: key.into(), range_end: Vec::new() })) }
}

pub(super) fn deleting_all(prefix: &str) -> Operation {
    let range_end = after_all(prefix);
    Operation { request: Some(Request::Delete(DeleteRange { key: prefix.into(), range_end })) }
}

pub(super) fn is_there(key: &str) -> Compare {
    created(key, Relation::Greater, 0)
}

pub(super) fn is_absent(key: &str) -> Compare {
    created(key, Relation::Equal, 0)
}

/// Holds if the key was made in exactly this revision, and not taken away since.
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

/// Holds if this body stands at the key, whoever signed it: the value is the body, or goes on after it with a newline. The bodies are
/// JSON objects and numbers, so nothing else that anybody writes lies between the two bounds.
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

/// Holds if no key that begins with this was changed after this revision.
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

/// etcd counts in signed numbers that are never negative.
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
    fn what_is_believed_is_signed_and_configuration_is_sealed() {
        let keys = Keys::new("main");
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

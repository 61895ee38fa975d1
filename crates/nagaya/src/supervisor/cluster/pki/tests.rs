//! Tests of the members' keys: who opens them, who does not, and what changes with an exchange.

use super::token::JoinToken;
use super::*;
use crate::etcd_access::EtcdAccess;

const CLUSTER: &str = "main";

/// A member with what it keeps for itself.
struct Someone {
    node: NodeName,
    id: String,
    identity: WrapIdentity,
}

impl Someone {
    fn new(name: &str) -> Self {
        let id = name.repeat(32);
        Self { node: NodeName::new(name).unwrap(), id, identity: WrapIdentity::generate() }
    }

    fn opener(&self) -> KeyOpener<'_> {
        KeyOpener { cluster: CLUSTER, node: &self.node, id: &self.id, identity: &self.identity }
    }

    fn enter(&self, stored: &StoredKeys, keys: &MemberSecrets) -> StoredKeys {
        stored.with_member(CLUSTER, keys, &self.node, &self.id, &self.identity.public()).unwrap()
    }
}

/// The members `a` and `b`, and what they know of the first generation.
fn two() -> ([Someone; 2], StoredKeys, MemberSecrets, KnownGeneration) {
    let [a, b] = ["a", "b"].map(Someone::new);
    let (stored, keys) = StoredKeys::create_first(&a.opener()).unwrap();
    let known = stored.remember(&keys).unwrap();
    let stored = b.enter(&stored, &keys);
    ([a, b], stored, keys, known)
}

/// What one who took the wrapped key for itself would get.
fn is_refused(stored: &StoredKeys, opener: &KeyOpener<'_>, known: &KnownGeneration) -> bool {
    matches!(stored.open(opener, known), Err(PkiError::NotForUs))
}

#[test]
fn members_open_the_keys_and_nobody_else_does() {
    let ([a, b], stored, keys, known) = two();
    for member in [&a, &b] {
        assert_eq!(stored.open(&member.opener(), &known).unwrap().probe, keys.probe);
    }
    let stranger = Someone::new("c");
    assert!(is_refused(&stored, &stranger.opener(), &known));
    // Another machine of a member's name, or of its id, or in another cluster.
    let twin = Someone { id: a.id.clone(), ..Someone::new("a") };
    assert!(is_refused(&stored, &twin.opener(), &known));
    let other = Someone { id: "f".repeat(32), node: a.node.clone(), identity: a.identity.clone() };
    assert!(is_refused(&stored, &other.opener(), &known));
    let elsewhere = KeyOpener { cluster: "other", ..a.opener() };
    assert!(matches!(stored.open(&elsewhere, &known), Err(PkiError::Forged)));
}

#[test]
fn an_exchange_makes_every_key_anew() {
    let ([a, _], first, keys, known) = two();
    let (second, next) = first.exchange(CLUSTER, &keys, KeyOverlap::UntilRenewed, |_, _| true).unwrap();
    assert_eq!((second.serial, second.count_authorities()), (2, 2));
    assert!(next.authority != keys.authority && next.probe != keys.probe);
    assert_ne!(next.proofs[&2], keys.proofs[&1]);
    assert!(next.image_key() != keys.image_key());
    let opened = second.open(&a.opener(), &known).unwrap();
    assert!(opened.image_key() == next.image_key(), "all members make the same");
    assert_eq!((&opened.probe, &opened.probes_before), (&next.probe, &vec![keys.probe.clone()]));
    assert_eq!(opened.records.current.0, 2);
    assert_eq!(opened.records.older, [keys.records.current]);
    let signed = second.forget_old_records(CLUSTER, &opened).unwrap();
    assert!(signed.open(&a.opener(), &known).unwrap().records.older.is_empty());
    let alone = second.forget_old(CLUSTER, &opened).unwrap();
    // Whoever knows that they have ended does not take them over again.
    let newest = alone.remember(&opened).unwrap();
    assert!(matches!(second.open(&a.opener(), &newest), Err(PkiError::Forged)));
    assert!(!alone.is_exchanging() && second.authorities.starts_with(&alone.authorities));
    assert!(alone.open(&a.opener(), &known).unwrap().probes_before.is_empty());
    let (now, _) = first.exchange(CLUSTER, &keys, KeyOverlap::None, |_, _| true).unwrap();
    assert!(!now.is_exchanging());
    assert!(now.open(&a.opener(), &known).unwrap().probes_before.is_empty());
}

#[test]
fn exchanges_under_way_are_bounded() {
    let (_, mut stored, mut keys, _) = two();
    for _ in 1..AUTHORITIES_MAX {
        (stored, keys) = stored.exchange(CLUSTER, &keys, KeyOverlap::UntilRenewed, |_, _| true).unwrap();
    }
    let refused = stored.exchange(CLUSTER, &keys, KeyOverlap::UntilRenewed, |_, _| true);
    assert!(matches!(refused, Err(PkiError::Exchanging)));
    let (stored, _) = stored.exchange(CLUSTER, &keys, KeyOverlap::None, |_, _| true).unwrap();
    assert_eq!(stored.count_authorities(), 1);
}

#[test]
fn a_removed_member_opens_nothing_of_the_next_generation() {
    let ([a, b], first, keys, known) = two();
    // It has read all that there was, as root of its machine can.
    let read = first.open(&b.opener(), &known).unwrap();
    let (second, next) = first.exchange(CLUSTER, &keys, KeyOverlap::None, |node, _| *node == a.node).unwrap();
    assert!(is_refused(&second, &b.opener(), &known));
    // Nor by another one's wrapped key in its own place, nor in the place of the other.
    let mut swapped = second.clone();
    let its = swapped.members.remove(&a.node).unwrap();
    swapped.members.insert(b.node.clone(), KeyRecipient { id: b.id.clone(), ..its });
    assert!(matches!(swapped.open_own(&b.opener()), Err(PkiError::NotForUs)));
    let in_place = Someone { node: a.node.clone(), id: a.id.clone(), identity: b.identity.clone() };
    assert!(matches!(second.open_own(&in_place.opener()), Err(PkiError::NotForUs)));
    // What it writes by the keys that it has read is taken by nobody who knows the next generation.
    let (forged, _) = first.exchange(CLUSTER, &read, KeyOverlap::None, |_, _| true).unwrap();
    let newest = second.remember(&next).unwrap();
    assert!(matches!(forged.open(&a.opener(), &newest), Err(PkiError::Forged)));
    assert!(matches!(first.open(&a.opener(), &newest), Err(PkiError::Forged)), "nor the generation before");
}

#[test]
fn keys_that_no_member_wrote_are_taken_by_nobody() {
    let ([a, b], stored, _, known) = two();
    // Public keys are no secret: so anybody who writes into the store could wrap keys of its own.
    let (other, keys) = StoredKeys::create_first(&a.opener()).unwrap();
    let other = b.enter(&other, &keys);
    assert!(matches!(other.open(&a.opener(), &known), Err(PkiError::Forged)));
    // One more recipient, another order of authorities, another secret.
    let mut more = stored.clone();
    let its = more.members[&b.node].clone();
    more.members.insert(NodeName::new("c").unwrap(), its);
    let authorities = StoredKeys { authorities: other.authorities.clone(), ..stored.clone() };
    let sealed = StoredKeys { sealed: other.sealed.clone(), ..stored.clone() };
    let serial = StoredKeys { serial: 2, ..stored };
    for altered in [more, authorities, sealed, serial] {
        assert!(matches!(altered.open(&a.opener(), &known), Err(PkiError::Forged)));
    }
}

#[test]
fn a_member_may_miss_some_exchanges() {
    let ([a, b], mut stored, mut keys, known) = two();
    for _ in 1..GENERATIONS_MAX {
        (stored, keys) = stored.exchange(CLUSTER, &keys, KeyOverlap::None, |_, _| true).unwrap();
    }
    assert_eq!(stored.open(&a.opener(), &known).unwrap().probe, keys.probe);
    (stored, keys) = stored.exchange(CLUSTER, &keys, KeyOverlap::None, |_, _| true).unwrap();
    assert!(matches!(stored.open(&b.opener(), &known), Err(PkiError::Forged)));
    assert_eq!(keys.proofs.len(), GENERATIONS_MAX);
}

fn token(ttl: u64) -> JoinToken {
    JoinToken::make(CLUSTER, Duration::from_secs(ttl), EtcdAccess::default()).unwrap()
}

#[test]
fn a_token_opens_the_keys_of_its_generation_and_no_other_does() {
    let (_, stored, keys, known) = two();
    let token = token(60);
    let sealed = token.seal("a", &stored, &keys).unwrap();
    let again = JoinToken::read(&format!(" {}\n", token.text())).unwrap();
    assert_eq!(again.id(), token.id());
    let (opened, by_token) = again.open(&sealed).unwrap();
    assert!(opened.probe == keys.probe && by_token == known);
    let c = Someone::new("c");
    let joined = c.enter(&stored, &opened);
    assert!(joined.open(&c.opener(), &known).is_ok());
    let other = JoinToken::make("main", Duration::from_secs(60), EtcdAccess::default()).unwrap();
    assert!(matches!(other.open(&sealed), Err(PkiError::Spent)));
    // Nobody makes it look younger.
    let mut longer = sealed;
    longer.expires += 1;
    assert!(matches!(again.open(&longer), Err(PkiError::Spent)));
}

#[test]
fn an_old_token_opens_nothing_that_counts() {
    let (_, stored, keys, _) = two();
    // The store forgets it when its time is over; whatever the machine's clock says until then, it opens.
    let early = token(0);
    assert!(early.open(&early.seal("a", &stored, &keys).unwrap()).is_ok());
    // Of the generation before: what it opens proves nothing any more.
    let before = token(60);
    let sealed = before.seal("a", &stored, &keys).unwrap();
    let (next, _) = stored.exchange(CLUSTER, &keys, KeyOverlap::UntilRenewed, |_, _| true).unwrap();
    let (opened, known) = before.open(&sealed).unwrap();
    assert!(known.edition != next.edition && opened.authority == keys.authority);
    // One that was made while old keys still counted does not bring them back.
    let (next, keys) = stored.exchange(CLUSTER, &keys, KeyOverlap::UntilRenewed, |_, _| true).unwrap();
    let meanwhile = token(60);
    let (_, known) = meanwhile.open(&meanwhile.seal("a", &next, &keys).unwrap()).unwrap();
    assert_eq!(known.edition, next.edition);
    for ended in [next.forget_old(CLUSTER, &keys), next.forget_old_records(CLUSTER, &keys)] {
        assert_ne!(known.edition, ended.unwrap().edition);
    }
}

#[test]
fn text_that_is_no_token_is_refused() {
    let text = token(60).text();
    for wrong in
        ["", "nagaya-", "nagaya-12", "x", &text[1..], &text[..text.len() - 4], &text.replace('n', "-")]
    {
        assert!(matches!(JoinToken::read(wrong), Err(PkiError::NoToken)), "{wrong}");
    }
}

#[test]
fn a_certificate_is_due_after_days_or_with_a_new_authority() {
    let ([a, _], stored, keys, _) = two();
    let mut credentials = stored.issue(CLUSTER, &keys, &a.node).unwrap();
    assert!(!credentials.is_due(1));
    assert!(credentials.is_due(2));
    let left = credentials.renew_at - unix_now();
    assert!((4 * 86_400..5 * 86_400).contains(&left), "renewed after two thirds of a week: {left} s");
    credentials.renew_at = 0;
    assert!(credentials.is_due(1));
}

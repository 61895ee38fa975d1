//! The keys of members while they serve. Each node takes over exchanged keys and renews its
//! certificate in time. Operators exchange keys, remove nodes and make join tokens.
//!
//! An exchange without a lost request has three steps. All nodes trust the new CA and understand
//! the new key of probes. Each then gets a certificate from it and signs with the new key. When all
//! have done so, the old keys end. Not here: the keys (`pki`).

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_records::NodeName;
use nagaya_store::etcd::{ClusterError, PkiChange, VersionedValue};
use serde_json::{Value, json};

use super::codes::NOT_JOINED;
use super::load::NodeReport;
use super::member::{ClusterMember, CurrentMember, edge_options};
use super::pki::token::{JoinToken, StoredToken, TOKENS_MAX, TTL_MAX};
use super::pki::{KeyOverlap, KeyRecipient, MemberSecrets, PkiError, StoredKeys, unix_now};
use super::store_keys::{AUTHORITY, TOKENS, to_bytes};
use super::view::ClusterView;
use crate::admin::{NewToken, ProblemReply, list};
use crate::etcd_access::EtcdAccess;

/// Interval of checks of the members' keys, without news of a change.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The same interval during an exchange, and the longest wait for slow nodes.
const EXCHANGE_EVERY: Duration = Duration::from_secs(1);
const OTHERS_MAX: Duration = Duration::from_secs(30);

/// Longest wait for nodes that do not report that they sign with the newest key of records. Later
/// signatures with the former key do not count. Without a limit, an owner of the former key could
/// keep it valid by speaking for one of them.
const SIGNERS_MAX: Duration = Duration::from_secs(120);

/// Time from the last report of new certificates to the end of the old CA. The edges have them by
/// then, too.
const SETTLED: Duration = Duration::from_secs(2);

/// Longest wait of a new token for the end of an exchange, and the interval of checks.
const EXCHANGED_MAX: Duration = Duration::from_secs(60);
const EXCHANGED_LOOK: Duration = Duration::from_millis(200);

/// Tries of a change that others overtake.
const TRIES_MAX: u32 = 8;

/// This node's progress in an exchange.
#[derive(Default)]
struct KeyRenewal {
    /// Serial of the newest CA that it trusts.
    believes: Cell<u64>,
    /// A CA of which it has no certificate yet, and since when it knows of it.
    known: Cell<Option<(u64, Instant)>>,
    /// A CA of which all report certificates, and when they first did.
    renewed: Cell<Option<(u64, Instant)>>,
    /// The last read was older than this node's knowledge.
    was_old: Cell<bool>,
}

/// Returns the time of a mark of this serial, which is set to now if there is none.
fn since(mark: &Cell<Option<(u64, Instant)>>, serial: u64) -> Instant {
    let since = mark.get().filter(|(of, _)| *of == serial).map_or_else(Instant::now, |(_, since)| since);
    mark.set(Some((serial, since)));
    since
}

pub struct MemberKeys {
    view: Rc<ClusterView>,
    member: Rc<CurrentMember>,
    renewal: KeyRenewal,
}

impl MemberKeys {
    pub fn new(view: Rc<ClusterView>, member: Rc<CurrentMember>) -> Self {
        Self { view, member, renewal: KeyRenewal::default() }
    }

    /// Returns the serial of the newest authority that this node believes. 0: it does not know yet.
    pub fn believed_serial(&self) -> u64 {
        self.renewal.believes.get()
    }

    /// Changes the node's membership, also in its file. Nothing waits in between, so no other
    /// change is lost.
    pub fn change_member(&self, change: impl FnOnce(&mut ClusterMember)) -> Result<(), Box<ProblemReply>> {
        let mut member = self.view.member();
        change(&mut member);
        member.save(&self.view.context.dir)?;
        self.member.replace(member);
        Ok(())
    }

    /// Takes over exchanged keys, and renews this node's certificate in time.
    pub async fn run(self: Rc<Self>) {
        let mut changes = self.view.store.pki_changes();
        let mut said = String::new();
        loop {
            let is_exchanging = match self.renew_credentials().await {
                Ok(is_exchanging) => {
                    said.clear();
                    is_exchanging
                }
                Err(problem) => {
                    if said != problem.detail {
                        tracing::warn!(
                            code = problem.code,
                            "keys of the cluster's members: {}",
                            problem.detail
                        );
                    }
                    said.clone_from(&problem.detail);
                    false
                }
            };
            let again = if is_exchanging { EXCHANGE_EVERY } else { LOOK_EVERY };
            tokio::select! {
                () = tokio::time::sleep(again) => {}
                Ok(()) = changes.changed() => {}
            }
        }
    }

    /// Returns true while an exchange is not over.
    pub async fn renew_credentials(&self) -> Result<bool, Box<ProblemReply>> {
        let Some((stored, revision)) = self.stored_authority().await? else { return Ok(false) };
        // Nothing waits from here until it is saved.
        let mut member = self.view.member();
        if stored.edition < member.known.edition && !self.renewal.was_old.replace(true) {
            // Most likely it was read before this node took over the newer one.
            return Ok(true);
        }
        let is_due = member.credentials.is_due(stored.serial);
        let is_same = member.credentials.serial == stored.serial;
        // Without an overlap no node trusts its present certificate.
        let is_made = is_due && (is_same || !stored.is_exchanging() || self.is_believed(stored.serial));
        let is_known = member.known.edition == stored.edition;
        if is_made || !is_known {
            let keys = stored.open(&member.opener(), &member.known)?;
            member.take_over(&stored, &keys, is_made)?;
            self.keep(member)?;
            tracing::info!(serial = stored.serial, is_made, "this node has taken over keys of the members");
        }
        self.renewal.was_old.replace(false);
        self.renewal.believes.set(stored.serial);
        if stored.is_exchanging() && self.are_renewed(stored.serial) {
            self.finish(&stored, revision).await?;
        }
        Ok(stored.is_exchanging())
    }

    /// Saves this member and passes it to its edge.
    fn keep(&self, member: ClusterMember) -> Result<(), Box<ProblemReply>> {
        member.save(&self.view.context.dir)?;
        if self.view.borrow_member().records != member.records {
            self.view.store.set_record_keys(&member.records);
        }
        self.view.context.node.set_member(&member);
        let told = edge_options(&member, &self.view.context.configured);
        self.member.replace(member);
        self.view.context.node.credentials.send_replace(Some(told));
        Ok(())
    }

    /// Returns whether all present members report that they trust this CA, or had enough time.
    fn is_believed(&self, serial: u64) -> bool {
        let since = since(&self.renewal.known, serial);
        self.do_all_say(|load| load.believes >= serial) || since.elapsed() >= OTHERS_MAX
    }

    /// Returns whether this node has a certificate of this CA. All other present nodes must have
    /// reported one a while ago, or had enough time.
    fn are_renewed(&self, serial: u64) -> bool {
        if self.view.borrow_member().credentials.serial != serial {
            return false;
        }
        let known = since(&self.renewal.known, serial);
        if !self.do_all_say(|load| load.authority >= serial) {
            self.renewal.renewed.set(None);
            return known.elapsed() >= OTHERS_MAX;
        }
        since(&self.renewal.renewed, serial).elapsed() >= SETTLED
    }

    /// Returns whether this node signs with the newest keys, and all other present nodes do, too,
    /// or had enough time.
    pub fn do_all_sign_anew(&self) -> bool {
        let member = self.view.borrow_member();
        let serial = member.known.serial;
        if member.credentials.serial != serial {
            return false;
        }
        let known = since(&self.renewal.known, serial);
        self.do_all_say(|load| load.authority >= serial) || known.elapsed() >= SIGNERS_MAX
    }

    fn do_all_say(&self, says: impl Fn(&NodeReport) -> bool) -> bool {
        let Ok(known) = self.view.known_nodes() else { return false };
        let others = known.iter().filter(|node| node.record.name != self.view.node);
        others.filter_map(|node| node.load.as_ref()).all(says)
    }

    async fn stored_authority(&self) -> Result<Option<(StoredKeys, u64)>, Box<ProblemReply>> {
        let Some(found) = self.view.store.get(AUTHORITY).await? else { return Ok(None) };
        let stored = serde_json::from_slice(&found.value).map_err(PkiError::from)?;
        Ok(Some((stored, found.revision)))
    }

    /// Returns the present keys of members, and their revision in the store.
    pub async fn open_keys(&self) -> Result<(StoredKeys, MemberSecrets, u64), Box<ProblemReply>> {
        let member = self.view.member();
        let found = self.stored_authority().await?;
        let (stored, revision) =
            found.ok_or_else(|| ClusterError::NotInitialised { cluster: member.cluster.clone() })?;
        let keys = stored.open(&member.opener(), &member.known)?;
        Ok((stored, keys, revision))
    }

    // === What operators ask ===

    pub async fn exchange_keys(&self, finish: bool) -> Result<Value, Box<ProblemReply>> {
        self.view.in_step().await?;
        if finish { self.finish_exchange().await } else { self.begin_exchange().await }
    }

    async fn begin_exchange(&self) -> Result<Value, Box<ProblemReply>> {
        let cluster = self.view.borrow_member().cluster.clone();
        for _ in 0..TRIES_MAX {
            let (stored, keys, revision) = self.open_keys().await?;
            let (next, _) =
                stored.exchange(&cluster, &keys, KeyOverlap::UntilRenewed, self.members_without(None)?)?;
            let serial = next.serial;
            if self.view.store.change_pki(self.change_to(&next, revision).await?).await? {
                self.renew_credentials().await?;
                return Ok(json!({ "serial": serial }));
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    async fn finish_exchange(&self) -> Result<Value, Box<ProblemReply>> {
        let (stored, _, revision) = self.open_keys().await?;
        if !stored.is_exchanging() {
            return Ok(json!({ "serial": stored.serial }));
        }
        let known = self.view.known_nodes().unwrap_or_default();
        let is_old = |load: &NodeReport| load.authority != stored.serial;
        let old = known.iter().filter(|node| node.load.as_ref().is_some_and(is_old));
        let old: Vec<_> = old.map(|node| node.record.name.to_string()).collect();
        if !old.is_empty() {
            let detail = format!("{} still show certificates of the authority before", old.join(", "));
            return Err(ProblemReply::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        self.finish(&stored, revision).await?;
        self.renew_credentials().await?;
        Ok(json!({ "serial": stored.serial }))
    }

    /// Makes only the newest keys count. Another node may have done it meanwhile.
    async fn finish(&self, stored: &StoredKeys, revision: u64) -> Result<(), Box<ProblemReply>> {
        let member = self.view.member();
        let keys = stored.open(&member.opener(), &member.known)?;
        let alone = stored.forget_old(&member.cluster, &keys)?;
        self.view.store.change_pki(self.change_to(&alone, revision).await?).await?;
        Ok(())
    }

    /// Removes a node from the cluster, and invalidates every key that it has. With `is_stolen`,
    /// that happens at once, whatever else waits for it.
    pub async fn remove(&self, node: &str, force: bool, is_stolen: bool) -> Result<Value, Box<ProblemReply>> {
        let name = self.view.find_member(node)?;
        let cluster = self.view.borrow_member().cluster.clone();
        let overlap = if is_stolen { KeyOverlap::None } else { KeyOverlap::UntilRenewed };
        for _ in 0..TRIES_MAX {
            self.view.in_step().await?;
            let (stored, keys, revision) = self.open_keys().await?;
            let (next, _) = stored.exchange(&cluster, &keys, overlap, self.members_without(Some(&name))?)?;
            let changes = self.change_to(&next, revision).await?;
            if self.view.store.remove_with(&name, force || is_stolen, changes).await? {
                if name != self.view.node {
                    self.renew_credentials().await?;
                }
                return Ok(json!({ "node": name, "serial": next.serial }));
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    /// Returns the recipients of the next keys: all present members except this one.
    fn members_without(
        &self,
        but: Option<&NodeName>,
    ) -> Result<impl Fn(&NodeName, &KeyRecipient) -> bool + use<>, Box<ProblemReply>> {
        let nodes = self.view.records().nodes()?;
        let stay = nodes.into_iter().filter(|record| Some(&record.name) != but);
        let stay: Vec<_> = stay.map(|record| (record.name, record.id)).collect();
        Ok(move |node: &NodeName, recipient: &KeyRecipient| {
            stay.iter().any(|(name, id)| name == node && *id == recipient.id)
        })
    }

    /// Returns the changes to the next keys, and to end all join tokens: those open the former
    /// keys.
    pub async fn change_to(
        &self,
        next: &StoredKeys,
        revision: u64,
    ) -> Result<Vec<PkiChange>, Box<ProblemReply>> {
        let put = PkiChange::Put { key: AUTHORITY.into(), value: to_bytes(next), at: revision };
        let tokens = self.view.store.list(TOKENS).await?;
        let tokens = tokens.into_iter().map(|(id, _)| PkiChange::Drop { key: format!("{TOKENS}{id}") });
        Ok([put].into_iter().chain(tokens).collect())
    }

    /// Makes a join token, which is valid once.
    pub async fn make_token(&self, new: NewToken) -> Result<Value, Box<ProblemReply>> {
        let ttl = Duration::from_secs(new.ttl_seconds);
        if !(Duration::from_secs(1)..=TTL_MAX).contains(&ttl) {
            let detail = format!("a join token is good for 1 s to {} days", TTL_MAX.as_secs() / 86_400);
            return Err(ProblemReply::cluster(StatusCode::BAD_REQUEST, NOT_JOINED, detail));
        }
        if self.view.store.list(TOKENS).await?.len() >= TOKENS_MAX {
            let detail = format!(
                "there are {TOKENS_MAX} join tokens already: `nagaya cluster token --list` shows them, and --revoke ends one"
            );
            return Err(ProblemReply::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        let (stored, keys) = self.settled_keys().await?;
        let member = self.view.member();
        let etcd = EtcdAccess {
            endpoints: member.etcd.endpoints,
            ca: member.etcd.ca,
            certificate: new.certificate,
            key: new.key,
            ..EtcdAccess::default()
        };
        let token = JoinToken::make(&member.cluster, ttl, etcd)?;
        let sealed = token.seal(self.view.node.as_str(), &stored, &keys)?;
        self.view.store.put_for(&format!("{TOKENS}{}", token.id()), to_bytes(&sealed), ttl).await?;
        Ok(json!({ "token": token.text(), "id": token.id(), "expires": token.expires }))
    }

    /// Returns the keys when no exchange is in progress: its end would end a token, too.
    async fn settled_keys(&self) -> Result<(StoredKeys, MemberSecrets), Box<ProblemReply>> {
        let begun = Instant::now();
        loop {
            let (stored, keys, _) = self.open_keys().await?;
            if !stored.is_exchanging() && keys.records.older.is_empty() {
                return Ok((stored, keys));
            }
            if begun.elapsed() >= EXCHANGED_MAX {
                let detail =
                    "keys are being exchanged, and a token would end with that: try again in a minute";
                return Err(ProblemReply::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
            }
            tokio::time::sleep(EXCHANGED_LOOK).await;
        }
    }

    /// Returns the valid tokens.
    pub async fn tokens(&self) -> Result<Value, Box<ProblemReply>> {
        let now = unix_now();
        let row = |(id, found): (String, VersionedValue)| {
            let stored: StoredToken = serde_json::from_slice(&found.value).ok()?;
            let left = stored.expires.saturating_sub(now);
            Some(json!({ "id": id, "by": stored.by, "expires": stored.expires, "seconds_left": left }))
        };
        let rows = self.view.store.list(TOKENS).await?.into_iter().filter_map(row).collect();
        Ok(list("tokens", rows))
    }

    pub async fn revoke_token(&self, id: &str) -> Result<Value, Box<ProblemReply>> {
        let tokens = self.view.store.list(TOKENS).await?;
        if !tokens.iter().any(|(known, _)| known == id) {
            let detail = format!("there is no join token '{id}': it was used, has run out or was revoked");
            return Err(ProblemReply::cluster(StatusCode::NOT_FOUND, NOT_JOINED, detail));
        }
        self.view.store.change_pki(vec![PkiChange::Drop { key: format!("{TOKENS}{id}") }]).await?;
        Ok(json!({ "id": id }))
    }
}

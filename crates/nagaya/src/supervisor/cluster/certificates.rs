//! The keys of members while they serve: each node takes over what was exchanged and has its certificate made anew in time; operators
//! exchange them, remove nodes and make join tokens.
//!
//! An exchange without a lost request has three steps. All nodes believe the new authority and understand the new key of probes;
//! each then gets a certificate of it and signs with the new key; when all have done so, the old ones end. Not here: the keys (`pki`).

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_cmdb::NodeName;
use nagaya_cmdb::store::etcd::{ClusterError, PkiChange, Versioned};
use serde_json::{Value, json};

use super::asks::{AUTHORITY, TOKENS, to_bytes};
use super::load::Load;
use super::member::{Etcd, Member};
use super::membership::Membership;
use super::pki::token::{StoredToken, TOKENS_MAX, TTL_MAX, Token};
use super::pki::{Keys, Overlap, PkiError, Recipient, Stored, unix_now};
use super::{NOT_JOINED, credentials};
use crate::admin::{NewToken, Problem, list};

/// How often the members' keys are looked at, if nobody says that they have changed.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The same during an exchange, and how long others are waited for: for one that is slow.
const EXCHANGE_EVERY: Duration = Duration::from_secs(1);
const OTHERS_MAX: Duration = Duration::from_secs(30);

/// How long others are waited for that do not say that they sign with the newest key of records. What they still sign with the key
/// before does not count afterwards. Without a bound, whoever has that key could keep it good by speaking for one of them.
const SIGNERS_MAX: Duration = Duration::from_secs(120);

/// The old authority ends so long after all nodes have said that they have new certificates: their edges have them by then, too.
const SETTLED: Duration = Duration::from_secs(2);

/// Longest wait of a new token for the end of an exchange, and how often that is looked at.
const EXCHANGED_MAX: Duration = Duration::from_secs(60);
const EXCHANGED_LOOK: Duration = Duration::from_millis(200);

/// Tries of a change that others overtake.
const TRIES_MAX: u32 = 8;

/// How far this node is with an exchange.
#[derive(Default)]
pub struct Renewal {
    /// Serial of the newest authority that it believes.
    pub believes: Cell<u64>,
    /// An authority of which it has no certificate yet, and since when it knows of it.
    known: Cell<Option<(u64, Instant)>>,
    /// An authority of which all have certificates, as they said then.
    renewed: Cell<Option<(u64, Instant)>>,
    /// What was read last was older than what this node knows.
    was_old: Cell<bool>,
}

/// The value of a mark of this serial, which is set to now if there is none.
fn since(mark: &Cell<Option<(u64, Instant)>>, serial: u64) -> Instant {
    let since = mark.get().filter(|(of, _)| *of == serial).map_or_else(Instant::now, |(_, since)| since);
    mark.set(Some((serial, since)));
    since
}

impl Membership {
    /// Takes over keys that were exchanged, and has this node's certificate made anew in time.
    pub async fn follow_keys(self: Rc<Self>) {
        let mut changes = self.store.pki_changes();
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

    /// True: an exchange is not over yet.
    pub async fn renew_credentials(&self) -> Result<bool, Box<Problem>> {
        let Some((stored, revision)) = self.stored_authority().await? else { return Ok(false) };
        // Nothing waits from here until it is kept.
        let mut member = self.member();
        if stored.edition < member.known.edition && !self.renewal.was_old.replace(true) {
            // Most likely it was read before what this node has taken over meanwhile.
            return Ok(true);
        }
        let is_due = member.credentials.is_due(stored.serial);
        let is_same = member.credentials.serial == stored.serial;
        // Without an overlap nobody believes the certificate that it has.
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

    /// From now on this node is this member, also for its edge.
    fn keep(&self, member: Member) -> Result<(), Box<Problem>> {
        member.save(&self.context.dir)?;
        if self.member.borrow().records != member.records {
            self.store.set_record_keys(&member.records);
        }
        self.context.node.set_member(&member);
        let told = credentials(&member, &self.context.configured);
        *self.member.borrow_mut() = member;
        self.context.node.credentials.send_replace(Some(told));
        Ok(())
    }

    /// All members that are there have said that they believe this authority, or had time enough to do so.
    fn is_believed(&self, serial: u64) -> bool {
        let since = since(&self.renewal.known, serial);
        self.do_all_say(|load| load.believes >= serial) || since.elapsed() >= OTHERS_MAX
    }

    /// This node has a certificate of this authority. All others that are there have said so, a while ago, or had time enough.
    fn are_renewed(&self, serial: u64) -> bool {
        if self.member.borrow().credentials.serial != serial {
            return false;
        }
        let known = since(&self.renewal.known, serial);
        if !self.do_all_say(|load| load.authority >= serial) {
            self.renewal.renewed.set(None);
            return known.elapsed() >= OTHERS_MAX;
        }
        since(&self.renewal.renewed, serial).elapsed() >= SETTLED
    }

    /// This node signs with the newest keys, and so do all others that are there, or they had time enough.
    pub fn do_all_sign_anew(&self) -> bool {
        let member = self.member.borrow();
        let serial = member.known.serial;
        if member.credentials.serial != serial {
            return false;
        }
        let known = since(&self.renewal.known, serial);
        self.do_all_say(|load| load.authority >= serial) || known.elapsed() >= SIGNERS_MAX
    }

    fn do_all_say(&self, says: impl Fn(&Load) -> bool) -> bool {
        let Ok(known) = self.known_nodes() else { return false };
        let others = known.iter().filter(|node| node.record.name != self.node);
        others.filter_map(|node| node.load.as_ref()).all(says)
    }

    async fn stored_authority(&self) -> Result<Option<(Stored, u64)>, Box<Problem>> {
        let Some(found) = self.store.get(AUTHORITY).await? else { return Ok(None) };
        let stored = serde_json::from_slice(&found.value).map_err(PkiError::from)?;
        Ok(Some((stored, found.revision)))
    }

    /// The keys of members as they are now, and the store's revision of them.
    pub async fn open_keys(&self) -> Result<(Stored, Keys, u64), Box<Problem>> {
        let member = self.member();
        let found = self.stored_authority().await?;
        let (stored, revision) =
            found.ok_or_else(|| ClusterError::NotInitialised { cluster: member.cluster.clone() })?;
        let keys = stored.open(&member.opener(), &member.known)?;
        Ok((stored, keys, revision))
    }

    // === What operators ask ===

    pub async fn exchange_keys(&self, finish: bool) -> Result<Value, Box<Problem>> {
        self.in_step().await?;
        if finish { self.finish_exchange().await } else { self.begin_exchange().await }
    }

    async fn begin_exchange(&self) -> Result<Value, Box<Problem>> {
        let cluster = self.member.borrow().cluster.clone();
        for _ in 0..TRIES_MAX {
            let (stored, keys, revision) = self.open_keys().await?;
            let (next, _) =
                stored.exchange(&cluster, &keys, Overlap::UntilRenewed, self.members_without(None)?)?;
            let serial = next.serial;
            if self.store.change_pki(self.change_to(&next, revision).await?).await? {
                self.renew_credentials().await?;
                return Ok(json!({ "serial": serial }));
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    async fn finish_exchange(&self) -> Result<Value, Box<Problem>> {
        let (stored, _, revision) = self.open_keys().await?;
        if !stored.is_exchanging() {
            return Ok(json!({ "serial": stored.serial }));
        }
        let known = self.known_nodes().unwrap_or_default();
        let is_old = |load: &Load| load.authority != stored.serial;
        let old = known.iter().filter(|node| node.load.as_ref().is_some_and(is_old));
        let old: Vec<_> = old.map(|node| node.record.name.to_string()).collect();
        if !old.is_empty() {
            let detail = format!("{} still show certificates of the authority before", old.join(", "));
            return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        self.finish(&stored, revision).await?;
        self.renew_credentials().await?;
        Ok(json!({ "serial": stored.serial }))
    }

    /// Only the newest keys count from now on. Another node may have done it meanwhile.
    async fn finish(&self, stored: &Stored, revision: u64) -> Result<(), Box<Problem>> {
        let member = self.member();
        let keys = stored.open(&member.opener(), &member.known)?;
        let alone = stored.forget_old(&member.cluster, &keys)?;
        self.store.change_pki(self.change_to(&alone, revision).await?).await?;
        Ok(())
    }

    /// Takes a node out of the cluster, and every key that it has out of use. `is_stolen`: at once, whatever waits for that.
    pub async fn remove(&self, node: &str, force: bool, is_stolen: bool) -> Result<Value, Box<Problem>> {
        let name = self.named(node)?;
        let cluster = self.member.borrow().cluster.clone();
        let overlap = if is_stolen { Overlap::None } else { Overlap::UntilRenewed };
        for _ in 0..TRIES_MAX {
            self.in_step().await?;
            let (stored, keys, revision) = self.open_keys().await?;
            let (next, _) = stored.exchange(&cluster, &keys, overlap, self.members_without(Some(&name))?)?;
            let changes = self.change_to(&next, revision).await?;
            if self.store.remove_with(&name, force || is_stolen, changes).await? {
                if name != self.node {
                    self.renew_credentials().await?;
                }
                return Ok(json!({ "node": name, "serial": next.serial }));
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    /// Who gets the next keys: who has a record now, but for this one.
    fn members_without(
        &self,
        but: Option<&NodeName>,
    ) -> Result<impl Fn(&NodeName, &Recipient) -> bool + use<>, Box<Problem>> {
        let nodes = self.records().nodes()?;
        let stay = nodes.into_iter().filter(|record| Some(&record.name) != but);
        let stay: Vec<_> = stay.map(|record| (record.name, record.id)).collect();
        Ok(move |node: &NodeName, recipient: &Recipient| {
            stay.iter().any(|(name, id)| name == node && *id == recipient.id)
        })
    }

    /// The next keys, and the end of all join tokens: they open those before.
    pub async fn change_to(&self, next: &Stored, revision: u64) -> Result<Vec<PkiChange>, Box<Problem>> {
        let put = PkiChange::Put { key: AUTHORITY.into(), value: to_bytes(next), at: revision };
        let tokens = self.store.list(TOKENS).await?;
        let tokens = tokens.into_iter().map(|(id, _)| PkiChange::Drop { key: format!("{TOKENS}{id}") });
        Ok([put].into_iter().chain(tokens).collect())
    }

    /// Makes a join token, which is good once.
    pub async fn make_token(&self, new: NewToken) -> Result<Value, Box<Problem>> {
        let ttl = Duration::from_secs(new.ttl_seconds);
        if !(Duration::from_secs(1)..=TTL_MAX).contains(&ttl) {
            let detail = format!("a join token is good for 1 s to {} days", TTL_MAX.as_secs() / 86_400);
            return Err(Problem::cluster(StatusCode::BAD_REQUEST, NOT_JOINED, detail));
        }
        if self.store.list(TOKENS).await?.len() >= TOKENS_MAX {
            let detail = format!(
                "there are {TOKENS_MAX} join tokens already: `nagaya cluster token --list` shows them, and --revoke ends one"
            );
            return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        let (stored, keys) = self.settled_keys().await?;
        let member = self.member();
        let etcd = Etcd {
            endpoints: member.etcd.endpoints,
            ca: member.etcd.ca,
            certificate: new.certificate,
            key: new.key,
            ..Etcd::default()
        };
        let token = Token::make(&member.cluster, ttl, etcd)?;
        let sealed = token.seal(self.node.as_str(), &stored, &keys)?;
        self.store.put_for(&format!("{TOKENS}{}", token.id()), to_bytes(&sealed), ttl).await?;
        Ok(json!({ "token": token.text(), "id": token.id(), "expires": token.expires }))
    }

    /// The keys when no exchange is under way: its end would end a token, too.
    async fn settled_keys(&self) -> Result<(Stored, Keys), Box<Problem>> {
        let begun = Instant::now();
        loop {
            let (stored, keys, _) = self.open_keys().await?;
            if !stored.is_exchanging() && keys.records.older.is_empty() {
                return Ok((stored, keys));
            }
            if begun.elapsed() >= EXCHANGED_MAX {
                let detail =
                    "keys are being exchanged, and a token would end with that: try again in a minute";
                return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
            }
            tokio::time::sleep(EXCHANGED_LOOK).await;
        }
    }

    /// Tokens that are still good.
    pub async fn tokens(&self) -> Result<Value, Box<Problem>> {
        let now = unix_now();
        let row = |(id, found): (String, Versioned)| {
            let stored: StoredToken = serde_json::from_slice(&found.value).ok()?;
            let left = stored.expires.saturating_sub(now);
            Some(json!({ "id": id, "by": stored.by, "expires": stored.expires, "seconds_left": left }))
        };
        let rows = self.store.list(TOKENS).await?.into_iter().filter_map(row).collect();
        Ok(list("tokens", rows))
    }

    pub async fn revoke_token(&self, id: &str) -> Result<Value, Box<Problem>> {
        let tokens = self.store.list(TOKENS).await?;
        if !tokens.iter().any(|(known, _)| known == id) {
            let detail = format!("there is no join token '{id}': it was used, has run out or was revoked");
            return Err(Problem::cluster(StatusCode::NOT_FOUND, NOT_JOINED, detail));
        }
        self.store.change_pki(vec![PkiChange::Drop { key: format!("{TOKENS}{id}") }]).await?;
        Ok(json!({ "id": id }))
    }
}

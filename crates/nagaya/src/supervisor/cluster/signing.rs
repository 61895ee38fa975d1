//! The cluster's records are signed: this node takes over the key, has a cluster of an older version go over to it, and says what
//! does not count.
//!
//! A cluster of an older version has no key. The first node that sees it makes one and seals it with the authority. When all members
//! know the format that signs, one of them raises it (`nagaya_cmdb`), and from then on what is written is signed. The first node of those
//! that are there writes the rest anew, and then says in the sealed authority that it is done: from then on nothing counts that is not
//! signed. Each node remembers that in its own file, so nobody takes it back by writing into the store.
//!
//! Not here: signatures (`nagaya_cmdb`), who has the key (`pki`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::store::etcd::{RecordKeys, Refusals};
use serde_json::{Value, json};

use super::FORGED;
use super::asks::{AUTHORITY, to_bytes};
use super::member::{Etcd, Member};
use super::membership::Membership;
use super::pki::Secret;
use crate::admin::Problem;

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Between two lines of the log about values that do not count.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Values that one line names.
const NAMED_MAX: usize = 3;

/// The first format whose values are signed.
const SIGNED_FORMAT: u64 = 3;

impl Membership {
    pub(super) async fn keep_records_signed(self: Rc<Self>) {
        let mut refusal_log = RefusalLog::default();
        let mut resigned = None;
        let mut said = String::new();
        loop {
            refusal_log.look(&self.store.refusals());
            if let Err(problem) = self.advance_signing(&mut resigned).await {
                // The store says by itself that it is out of reach; what else it is is said once.
                if said != problem.detail {
                    tracing::warn!(
                        code = problem.code,
                        "signatures of the cluster's records: {}",
                        problem.detail
                    );
                    said = problem.detail.clone();
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Does the next step, if there is one. `resigned`: the keys with which everything was found to be signed.
    async fn advance_signing(&self, resigned: &mut Option<RecordKeys>) -> Result<(), Box<Problem>> {
        let member = self.member();
        if member.records_required && *resigned == member.records && !self.has_authority_changed() {
            return Ok(());
        }
        let Some((stored, revision)) = self.stored_authority().await? else { return Ok(()) };
        let secret = Secret::from_token(&member.token)?;
        let keys = stored.open(&member.cluster, &secret)?;
        let Some(record_keys) = keys.record_keys() else {
            // Nothing is signed yet. Later on this node does not give up what it knows for what the store says.
            if !member.records_required && self.store.format().holds < SIGNED_FORMAT {
                let next = stored.with_record_secret(&member.cluster, &secret)?;
                self.store.put_if(AUTHORITY, to_bytes(&next), Some(revision)).await?;
            }
            return Ok(());
        };
        // Somebody put an older authority back.
        if member.records.as_ref().is_some_and(|known| record_keys.current.0 < known.current.0) {
            return Ok(());
        }
        if member.records.as_ref() != Some(&record_keys) {
            self.change_member(|member| member.records = Some(record_keys.clone()))?;
            self.store.set_record_keys(&record_keys);
        }
        if keys.records_required && !member.records_required {
            self.change_member(|member| member.records_required = true)?;
            self.store.require_signatures();
            tracing::info!("the cluster's records are signed; from now on nothing counts that is not");
        }
        // Nothing of an older key is left to be written anew.
        if keys.records_required && record_keys.older.is_empty() {
            *resigned = Some(record_keys);
            return Ok(());
        }
        let is_signing = self.store.format().holds >= SIGNED_FORMAT;
        if resigned.as_ref() == Some(&record_keys) || !is_signing {
            return Ok(());
        }
        if !self.is_first_present() {
            if keys.records_required {
                *resigned = Some(record_keys);
            }
            return Ok(());
        }
        if self.store.resign_all().await?.is_complete() {
            if !keys.records_required {
                let next = stored.with_records_required(&member.cluster, &secret)?;
                self.store.put_if(AUTHORITY, to_bytes(&next), Some(revision)).await?;
                return Ok(());
            }
            *resigned = Some(record_keys);
        }
        Ok(())
    }

    /// So that one node does what one is enough for. Two that do it at once do no harm.
    fn is_first_present(&self) -> bool {
        self.store.presences().first().is_some_and(|first| first.node == self.node)
    }

    /// Since it was asked the last time.
    fn has_authority_changed(&self) -> bool {
        let mut seen = self.signing_seen.borrow_mut();
        let has_changed = seen.has_changed().unwrap_or(false);
        seen.mark_unchanged();
        has_changed
    }

    /// Nothing waits in between, so no other change is lost.
    fn change_member(&self, change: impl FnOnce(&mut Member)) -> Result<(), Box<Problem>> {
        let mut member = self.member();
        change(&mut member);
        member.save(&self.context.dir)?;
        self.set_member(member);
        Ok(())
    }

    pub fn keep_etcd(&self, etcd: Etcd) -> Result<(), Box<Problem>> {
        self.change_member(|member| member.etcd = etcd)
    }

    pub async fn repair_records(&self) -> Result<Value, Box<Problem>> {
        let done = self.store.repair().await?;
        tracing::warn!(repaired = done.repaired, signed = done.written, "the cluster's store was repaired");
        Ok(json!({ "repaired": done.repaired, "signed": done.written, "overtaken": done.overtaken }))
    }
}

/// Says what does not count, and not more often than [`LOG_EVERY`].
#[derive(Default)]
struct RefusalLog {
    told: u64,
    at: Option<Instant>,
}

impl RefusalLog {
    fn look(&mut self, refusals: &Refusals) {
        let new = refusals.total.saturating_sub(self.told);
        if new == 0 || self.at.is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return;
        }
        (self.told, self.at) = (refusals.total, Some(Instant::now()));
        let named = refusals.shown.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join("; ");
        tracing::error!(
            code = %FORGED,
            new,
            standing = refusals.standing,
            "values in the cluster's store do not count, and this node goes by what it knew before: {named}"
        );
    }
}

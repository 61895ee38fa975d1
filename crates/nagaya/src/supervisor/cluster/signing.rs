//! The cluster's records are signed anew after an exchange of keys, and what does not count is said.
//!
//! After an exchange what the key before has signed still counts. When all nodes that are there sign with the new key, the first
//! of them writes everything anew that is not signed with it, and then ends the key before.
//!
//! Not here: signatures (`nagaya_cmdb`), who has the keys (`pki`), their exchange (`certificates`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::store::etcd::Refusals;
use serde_json::{Value, json};

use super::FORGED;
use super::member::{Etcd, Member};
use super::membership::Membership;
use crate::admin::Problem;

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Between two lines of the log about values that do not count.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Values that one line names.
const NAMED_MAX: usize = 3;

impl Membership {
    pub(super) async fn keep_records_signed(self: Rc<Self>) {
        let mut refusal_log = RefusalLog::default();
        let mut said = String::new();
        loop {
            refusal_log.look(&self.store.refusals());
            if let Err(problem) = self.sign_anew().await {
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

    /// Does the next step, if there is one.
    async fn sign_anew(&self) -> Result<(), Box<Problem>> {
        let member = self.member();
        if member.records.older.is_empty() || !self.is_first_present() || !self.do_all_sign_anew() {
            return Ok(());
        }
        if !self.store.resign_all().await?.is_complete() {
            return Ok(());
        }
        let (stored, keys, revision) = self.open_keys().await?;
        if keys.records.current != member.records.current || keys.records.older.is_empty() {
            return Ok(());
        }
        let next = stored.forget_old_records(&member.cluster, &keys)?;
        self.store.change_pki(self.change_to(&next, revision).await?).await?;
        tracing::info!(
            key = keys.records.current.0,
            "all records are signed with the newest key, and no other counts"
        );
        Ok(())
    }

    /// So that one node does what one is enough for. Two that do it at once do no harm. A node that was removed may say that it is
    /// there, and does nothing.
    fn is_first_present(&self) -> bool {
        let known = self.known_nodes().unwrap_or_default();
        let first = known.iter().find(|node| node.load.is_some());
        first.is_some_and(|first| first.record.name == self.node)
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

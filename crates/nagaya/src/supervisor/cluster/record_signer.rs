//! Has the cluster's records signed again after an exchange of keys, and reports values that do not
//! count.
//!
//! After an exchange, values of the former key still count. When all present nodes sign with the
//! new key, the first of them rewrites all values without it. Then it ends the former key.
//!
//! Not here: signatures (`nagaya_records`), the keeper of the keys (`pki`), their exchange
//! (`member_keys`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_store::etcd::RefusedValues;
use serde_json::{Value, json};

use super::codes::FORGED;
use super::member_keys::MemberKeys;
use super::view::ClusterView;
use crate::admin::ProblemReply;
use crate::etcd_access::EtcdAccess;

/// Interval of checks.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Interval between two log lines about values that do not count.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Values named in one line.
const NAMED_MAX: usize = 3;

pub struct RecordSigner {
    pub view: Rc<ClusterView>,
    pub keys: Rc<MemberKeys>,
}

impl RecordSigner {
    /// Looks for as long as this node is a member.
    pub async fn run(self: Rc<Self>) {
        let mut refusal_log = RefusalLog::default();
        let mut said = String::new();
        loop {
            refusal_log.look(&self.view.store.refusals());
            if let Err(problem) = self.sign_anew().await {
                // The store itself reports that it is unreachable; any other fault is logged once.
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

    /// Takes the next step, if there is one.
    async fn sign_anew(&self) -> Result<(), Box<ProblemReply>> {
        let member = self.view.member();
        if member.records.older.is_empty() || !self.is_first_present() || !self.keys.do_all_sign_anew() {
            return Ok(());
        }
        if !self.view.store.resign_all().await?.is_complete() {
            return Ok(());
        }
        let (stored, keys, revision) = self.keys.open_keys().await?;
        if keys.records.current != member.records.current || keys.records.older.is_empty() {
            return Ok(());
        }
        let next = stored.forget_old_records(&member.cluster, &keys)?;
        self.view.store.change_pki(self.keys.change_to(&next, revision).await?).await?;
        tracing::info!(
            key = keys.records.current.0,
            "all records are signed with the newest key, and no other counts"
        );
        Ok(())
    }

    /// Returns whether this node is the first present one, so that one node does the work. Two at
    /// once do no harm. A removed node may still be present, and does nothing.
    fn is_first_present(&self) -> bool {
        let known = self.view.known_nodes().unwrap_or_default();
        let first = known.iter().find(|node| node.load.is_some());
        first.is_some_and(|first| first.record.name == self.view.node)
    }

    pub fn keep_etcd(&self, etcd: EtcdAccess) -> Result<(), Box<ProblemReply>> {
        self.keys.change_member(|member| member.etcd = etcd)
    }

    pub async fn repair_records(&self) -> Result<Value, Box<ProblemReply>> {
        let done = self.view.store.repair().await?;
        tracing::warn!(repaired = done.repaired, signed = done.written, "the cluster's store was repaired");
        Ok(json!({ "repaired": done.repaired, "signed": done.written, "overtaken": done.overtaken }))
    }
}

/// Logs values that do not count, at most once per [`LOG_EVERY`].
#[derive(Default)]
struct RefusalLog {
    told: u64,
    at: Option<Instant>,
}

impl RefusalLog {
    fn look(&mut self, refusals: &RefusedValues) {
        let new = refusals.total.saturating_sub(self.told);
        if new == 0 || self.at.is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return;
        }
        self.told = refusals.total;
        self.at = Some(Instant::now());
        let named = refusals.shown.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join("; ");
        tracing::error!(
            code = %FORGED,
            new,
            standing = refusals.standing,
            "values in the cluster's store do not count, and this node goes by what it knew before: {named}"
        );
    }
}

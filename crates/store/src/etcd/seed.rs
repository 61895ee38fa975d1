//! Fills an empty cluster from an embedded store. The rest of an interrupted run is removed by the
//! next one, which starts from the beginning. Until the last step no node takes it for a cluster,
//! because `v1/seeding` exists and `v1/revision` does not.
//!
//! Not here: when it is done (`nagaya cluster init`), and what serves meanwhile (the embedded
//! store).

use std::time::Duration;

use super::client::{EtcdClient, EtcdOptions, RAW_TXN};
use super::error::ClusterError;
use super::keys::{self, FORMAT, KeySpace, RevisionCount};
use super::parts::OPERATIONS_MAX;
use super::signed::{RecordKeys, RecordSigning, ValueSigner};
use super::wire::{KeyValue, RequestOp, TxnRequest, TxnResponse};
use crate::{RECORD_LEN_MAX, RecordKind, SiteFilter, Store, StoreError};

const WAIT: Duration = Duration::from_secs(10);

/// A step is sent when it has grown to this, in bytes. With one record more it is still below
/// etcd's limit.
const STEP_LEN: usize = 1 << 20;

const _: () = assert!(STEP_LEN + RECORD_LEN_MAX < (3 << 20) / 2);

/// Records read from the store at once.
const PAGE_LEN: usize = 100;

/// How often it starts from the beginning because the embedded store was changed meanwhile.
const TRIES_MAX: u32 = 3;

/// Returns whether such a cluster exists, complete and of a format that this program knows.
pub async fn is_initialised(options: &EtcdOptions) -> Result<bool, ClusterError> {
    let keys = KeySpace::new(&options.cluster);
    let [format, revision, seeding] = look(&EtcdClient::new(options)?, &keys).await?;
    check_format(&keys, format.as_deref())?;
    Ok(format.is_some() && revision.is_some() && seeding.is_none())
}

/// Makes the cluster and fills it with all of this store's tenants, sites, settings and rules,
/// signed with these keys. The last step adds these small values (`pki`). Refused if the cluster
/// exists already. The store is read in short steps that block.
pub async fn seed(
    options: &EtcdOptions,
    record_keys: &RecordKeys,
    values: &[(&str, Vec<u8>)],
    from: &dyn Store,
) -> Result<(), StoreError> {
    let client = EtcdClient::new(options)?;
    let keys = KeySpace::new(&options.cluster);
    let [format, revision, seeding] = look(&client, &keys).await?;
    check_format(&keys, format.as_deref())?;
    if revision.is_some() && seeding.is_none() {
        return Err(ClusterError::NotEmpty { cluster: options.cluster.clone() }.into());
    }
    let signer = ValueSigner::new(keys.clone(), RecordSigning::Required(record_keys.clone()));
    let seeder = StoreSeeder { client: &client, keys: &keys, signer, name: super::write::name()? };
    seeder.begin(seeding).await?;
    for _ in 0..TRIES_MAX {
        let revision = from.revision()?;
        seeder.clear().await?;
        seeder.fill(from).await?;
        let next_uid = from.next_uid()?;
        // Pages of different states do not make one state.
        if from.revision()? == revision {
            return Ok(seeder.finish(next_uid, values).await?);
        }
    }
    Err(ClusterError::Contended { tries: TRIES_MAX }.into())
}

async fn look(client: &EtcdClient, keys: &KeySpace) -> Result<[Option<Vec<u8>>; 3], ClusterError> {
    let look = TxnRequest {
        success: vec![
            keys::getting(&keys.format()),
            keys::getting(&keys.revision()),
            keys::getting(&keys.seeding()),
        ],
        ..TxnRequest::default()
    };
    let answer: TxnResponse = client.ask(RAW_TXN, look, WAIT).await?.value;
    Ok(crate::etcd::wire::raw_values(answer.responses).try_into().unwrap_or_default())
}

fn check_format(keys: &KeySpace, format: Option<&[u8]>) -> Result<(), ClusterError> {
    format.map_or(Ok(()), |found| keys::known_format(keys.cluster(), found).map(drop))
}

struct StoreSeeder<'a> {
    client: &'a EtcdClient,
    keys: &'a KeySpace,
    signer: ValueSigner,
    /// Its name in `seeding` while it fills. An older run finds another's name there and ends.
    name: String,
}

impl StoreSeeder<'_> {
    /// Takes the cluster's place; that of an interrupted run is taken over.
    async fn begin(&self, found: Option<Vec<u8>>) -> Result<(), ClusterError> {
        let marker = self.keys.seeding();
        let txn = TxnRequest {
            compare: vec![
                keys::is_absent(&self.keys.revision()),
                match found {
                    Some(other) => keys::is_value(&marker, other),
                    None => keys::is_absent(&marker),
                },
            ],
            success: vec![
                keys::putting(&self.keys.format(), FORMAT.to_string()),
                keys::putting(&marker, self.name.clone()),
            ],
            failure: vec![keys::getting(&marker)],
        };
        self.send(txn).await
    }

    async fn clear(&self) -> Result<(), ClusterError> {
        let kinds = [
            RecordKind::Tenant,
            RecordKind::Site,
            RecordKind::Setting,
            RecordKind::Rule,
            RecordKind::Node,
            RecordKind::Placement,
            RecordKind::TicketKeys,
        ];
        let mut left: Vec<RequestOp> =
            kinds.iter().map(|kind| keys::deleting_all(&self.keys.records(*kind))).collect();
        left.push(keys::deleting(&self.keys.next_uid()));
        self.step(left).await
    }

    async fn fill(&self, from: &dyn Store) -> Result<(), StoreError> {
        let mut step = SeedStep::default();
        let mut after: Option<String> = None;
        while let Some(page) = some(from.tenants(after.as_deref(), PAGE_LEN)?) {
            after = page.last().map(|tenant| tenant.name.to_string());
            for tenant in &page {
                self.add(&mut step, RecordKind::Tenant, tenant.name.as_str(), keys::json(tenant)).await?;
            }
        }
        let mut select = SiteFilter { limit: PAGE_LEN, ..SiteFilter::default() };
        while let Some(page) = some(from.sites(&select)?) {
            select.after = page.last().map(|site| site.name.to_string());
            for site in &page {
                self.add(&mut step, RecordKind::Site, site.name.as_str(), keys::json(site)).await?;
            }
        }
        after = None;
        while let Some(page) = some(from.settings(after.as_deref(), PAGE_LEN)?) {
            after = page.last().map(|setting| setting.key.to_string());
            for setting in &page {
                self.add(&mut step, RecordKind::Setting, &setting.key, keys::json(setting)).await?;
            }
        }
        for rule in from.rules()? {
            self.add(&mut step, RecordKind::Rule, rule.name.as_str(), keys::json(&rule)).await?;
        }
        Ok(self.step(step.operations).await?)
    }

    async fn add(
        &self,
        step: &mut SeedStep,
        kind: RecordKind,
        name: &str,
        value: Vec<u8>,
    ) -> Result<(), ClusterError> {
        step.len += value.len();
        step.operations.push(keys::putting(&self.keys.record(kind, name), value));
        if step.operations.len() == OPERATIONS_MAX || step.len >= STEP_LEN {
            let full = std::mem::take(step);
            self.step(full.operations).await?;
        }
        Ok(())
    }

    async fn finish(&self, next_uid: u32, values: &[(&str, Vec<u8>)]) -> Result<(), ClusterError> {
        let count = RevisionCount { count: 0, by: self.name.clone() };
        let marker = self.keys.seeding();
        let mut done = vec![
            keys::putting(&self.keys.next_uid(), next_uid.to_string()),
            keys::putting(&self.keys.revision(), keys::json(&count)),
            keys::deleting(&marker),
        ];
        done.extend(values.iter().map(|(key, value)| keys::putting(&self.keys.pki(key), value.clone())));
        let txn = TxnRequest {
            compare: vec![keys::is_value(&marker, self.name.clone())],
            success: done,
            failure: vec![keys::getting(&self.keys.revision())],
        };
        self.send(txn).await
    }

    async fn step(&self, success: Vec<RequestOp>) -> Result<(), ClusterError> {
        let marker = self.keys.seeding();
        let compare = vec![keys::is_value(&marker, self.name.clone())];
        self.send(TxnRequest { compare, success, failure: vec![keys::getting(&marker)] }).await
    }

    async fn send(&self, mut txn: TxnRequest) -> Result<(), ClusterError> {
        for operation in &mut txn.success {
            self.signer.sign_put(operation, self.client.newest())?;
        }
        let answer = self.client.ask::<_, TxnResponse>(RAW_TXN, txn, WAIT).await?;
        let found = crate::etcd::wire::raw_pairs(answer.value.responses).into_iter().next().flatten();
        let open = |kv: KeyValue| self.signer.open(&kv.key, &kv.value, keys::unsigned(kv.mod_revision)).ok();
        let found = found.and_then(open).map(|opened| opened.body);
        // A transaction sent twice, because no reply came, may have been done the first time. Then
        // our name is there.
        let was_ours = || {
            answer.repeated
                && found.is_some_and(|found| {
                    found == self.name.as_bytes()
                        || serde_json::from_slice::<RevisionCount>(&found)
                            .is_ok_and(|count| count.by == self.name)
                })
        };
        if answer.value.succeeded || was_ours() {
            return Ok(());
        }
        Err(ClusterError::BeingFilled { cluster: self.keys.cluster().into() })
    }
}

#[derive(Default)]
struct SeedStep {
    operations: Vec<RequestOp>,
    len: usize,
}

/// Returns a page, unless it is empty.
fn some<T>(page: Vec<T>) -> Option<Vec<T>> {
    (!page.is_empty()).then_some(page)
}

//! Operators' commands to the cluster, one function for each, and this node's entry into one.
//!
//! Not here: the admin paths (`admin::cluster`), the tasks of a member (`member_tasks`).

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use nagaya_placement::lease::{lease_term, max_elapsed};
use nagaya_records::feed::PlaceReply;
use nagaya_records::{NodeName, NodeRecord, PlacementReason, RecordChange, SiteName};
use nagaya_store::StoreError;
use nagaya_store::etcd::{self, ClusterError, EtcdOptions, JoinResult, PkiChange, RecordSigning, SeenNode};
use nagaya_store::{ClusterStore, RedbStore, Store as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::codes::{INSECURE, MEMBER_ALREADY, NO_MEMBER, NOT_JOINED};
use super::context::ClusterContext;
use super::load;
use super::member::{ClusterMember, MemberError, edge_options};
use super::member_tasks::{ChangedSites, MemberTasks};
use super::orders::{ClusterOrder, PlacementRequest, RebalanceStep};
use super::pki::token::JoinToken;
use super::pki::{self, KeyOpener, MemberSecrets, PkiError, StoredKeys, WrapIdentity};
use super::store_keys::{AUTHORITY, TOKENS, to_bytes};
use crate::admin::{ClusterCommand, FoundCommand, JoinCommand, ProblemReply};
use crate::etcd_access::{EtcdAccess, etcd_options};

/// Tries to become a member, while others become one.
const TRIES_MAX: u32 = 8;

/// Longest wait for the tasks of a former membership to end, and the interval of checks.
const LEAVE_MAX: Duration = Duration::from_secs(30);
const LEAVE_LOOK: Duration = Duration::from_millis(20);

type Answer = Result<Value, Box<ProblemReply>>;

/// Takes orders, whether this node is a member or not.
pub struct ClusterCommands {
    context: Rc<ClusterContext>,
    membership: RefCell<Option<Rc<MemberTasks>>>,
    /// Why this node does not follow its cluster, although its file says that it is a member.
    left_out: RefCell<Option<String>>,
    /// Held while this node becomes a member: one attempt at a time.
    entering: tokio::sync::Mutex<()>,
}

impl ClusterCommands {
    pub fn new(context: ClusterContext) -> Self {
        Self {
            context: Rc::new(context),
            membership: RefCell::default(),
            left_out: RefCell::default(),
            entering: tokio::sync::Mutex::default(),
        }
    }

    /// Resumes the membership from before the start.
    pub fn resume(&self, member: ClusterMember) {
        if let Err(problem) = self.begin(member) {
            tracing::error!(code = problem.code, "{}; this node serves what it knows", problem.detail);
            *self.left_out.borrow_mut() = Some(problem.detail.clone());
        }
    }

    pub async fn carry_out(self: Rc<Self>, order: ClusterOrder) {
        match order {
            ClusterOrder::Place(place) => self.place(place).await,
            // If nothing takes the reply, the asking task has ended.
            ClusterOrder::Loads(answer) => {
                let membership = self.membership.borrow().clone();
                let _ =
                    answer.send(membership.map(|membership| membership.report.loads()).unwrap_or_default());
            }
            ClusterOrder::Shift { site, shift, answer } => {
                let _ = answer.send(self.shift(&site, shift).await);
            }
            ClusterOrder::Heard(node) => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.relocator.note_heard(&node);
                }
            }
            ClusterOrder::Doubt(node) => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.terms.mark_suspect(node);
                }
            }
            ClusterOrder::Vouch { tag, id, edge } => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.lease.answer_vouch(tag, &id, &edge);
                }
            }
            ClusterOrder::Vouched { round, id, moved } => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.lease.add_vouch(round, &id, moved);
                }
            }
            ClusterOrder::Ask(ask, answer) => {
                // The client may have left.
                let _ = answer.send(self.answer(ask).await);
            }
        }
    }

    async fn place(&self, place: PlacementRequest) {
        let membership = self.membership.borrow().clone();
        let placed = match membership {
            Some(membership) => {
                let PlacementRequest { site, seen, why, lost, probe_us, .. } = &place;
                membership.relocator.place(site, *seen, *why, lost.clone(), *probe_us).await
            }
            None => PlaceReply::Nowhere {
                reason: "this node is in no cluster".into(),
                code: NO_MEMBER.to_string(),
            },
        };
        place.edge.send(nagaya_records::feed::FromSupervisor::Placed { tag: place.tag, placed });
    }

    async fn shift(&self, site: &SiteName, shift: RebalanceStep) -> Result<(), String> {
        let membership = self.member().map_err(|problem| problem.detail.clone())?;
        if !membership.view.lease().is_confirmed() {
            return Err("the cluster's store does not answer now".into());
        }
        match shift {
            RebalanceStep::Move(to) => {
                let moved = membership
                    .mover
                    .relocate_from_here(site.as_str(), Some(&to), PlacementReason::Load)
                    .await;
                moved.map(drop).map_err(|problem| problem.detail.clone())
            }
            RebalanceStep::Copy(to) => membership.replicas.copy(site, &to).await,
            RebalanceStep::Uncopy => membership.replicas.uncopy(site, PlacementReason::Load).await,
        }
    }

    async fn answer(&self, ask: ClusterCommand) -> Answer {
        match ask {
            ClusterCommand::Found(found) => self.found(found).await,
            ClusterCommand::Join(join) => self.join(join).await,
            ClusterCommand::Status => Ok(self.member()?.report.status()),
            ClusterCommand::Token(new) => self.member()?.keys.make_token(new).await,
            ClusterCommand::Tokens => self.member()?.keys.tokens().await,
            ClusterCommand::Revoke { id } => self.member()?.keys.revoke_token(&id).await,
            ClusterCommand::Authority { finish } => self.member()?.keys.exchange_keys(finish).await,
            ClusterCommand::Nodes => self.member()?.report.nodes().await,
            ClusterCommand::Drain { node, on } => self.member()?.report.set_draining(&node, on).await,
            ClusterCommand::Remove { node, force, stolen } => {
                self.member()?.keys.remove(&node, force, stolen).await
            }
            ClusterCommand::Placements { after, limit, node } => {
                self.member()?.report.placements(after.as_deref(), limit, node.as_deref())
            }
            ClusterCommand::Placement { site } => self.member()?.report.explain_placement(&site).await,
            ClusterCommand::Events { limit } => Ok(self.member()?.report.last_events(limit)),
            ClusterCommand::Store(etcd) => self.change_store(etcd).await,
            ClusterCommand::Repair => self.member()?.signer.repair_records().await,
            ClusterCommand::Move { site, to } => self.member()?.mover.relocate(&site, to.as_deref()).await,
        }
    }

    fn member(&self) -> Result<Rc<MemberTasks>, Box<ProblemReply>> {
        self.membership.borrow().clone().ok_or_else(|| {
            if let Some(why) = &*self.left_out.borrow() {
                let detail = format!("this node does not follow its cluster: {why}");
                return ProblemReply::cluster(StatusCode::CONFLICT, NO_MEMBER, detail);
            }
            let detail = "this node is in no cluster: `nagaya cluster init` makes one, `nagaya cluster join` enters one";
            ProblemReply::cluster(StatusCode::CONFLICT, NO_MEMBER, detail)
        })
    }

    /// Fails if this node is a member. A removed member may become one again.
    fn no_member_yet(&self) -> Result<(), Box<ProblemReply>> {
        match &*self.membership.borrow() {
            None => match &*self.left_out.borrow() {
                None => Ok(()),
                Some(why) => {
                    let detail = format!("this node is a member of a cluster, and does not follow it: {why}");
                    Err(ProblemReply::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
                }
            },
            Some(membership) if membership.view.is_member() => {
                let detail =
                    format!("this node is a member of cluster '{}'", membership.view.member().cluster);
                Err(ProblemReply::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
            }
            _ => Ok(()),
        }
    }

    /// Makes a cluster of this node and its records. An interrupted attempt is completed by
    /// repeating it.
    async fn found(&self, found: FoundCommand) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let options = etcd_options(&found.cluster, &found.etcd);
        options.check_access()?;
        let attempt = FounderAttempt::begin(&self.context.dir)?;
        let node = self.node_name()?;
        let (stored, keys) = StoredKeys::create_first(&attempt.opener(&found.cluster, &node))?;
        let authority = [(AUTHORITY, to_bytes(&stored))];
        match etcd::seed(&options, &keys.records, &authority, &*self.context.records).await {
            Ok(()) => {}
            // Possibly by this node, which was interrupted afterwards: then its own key opens the
            // present keys.
            Err(StoreError::Cluster(ClusterError::NotEmpty { .. })) => {}
            Err(error) => return Err(error.into()),
        }
        let glance = self.look_at(&options)?;
        let cluster = found.cluster.clone();
        let etcd = found.etcd;
        let member = self.found_member(&glance.store, cluster, node, etcd, attempt).await?;
        self.enter(member).await?;
        FounderAttempt::forget(&self.context.dir);
        // This makes its own record visible here. If that takes too long, the cluster is made all
        // the same.
        let _late = self.member()?.view.in_step().await;
        let counts = self.context.records.counts()?;
        Ok(
            json!({ "node": self.context.node.name, "cluster": found.cluster, "sites": counts.sites, "nodes": 1 }),
        )
    }

    async fn found_member(
        &self,
        store: &ClusterStore,
        cluster: String,
        node: NodeName,
        etcd: EtcdAccess,
        attempt: FounderAttempt,
    ) -> Result<ClusterMember, Box<ProblemReply>> {
        let (stored, _) = authority_in(store, &cluster).await?;
        let keys = stored.open_own(&attempt.opener(&cluster, &node)).map_err(|error| match error {
            PkiError::NotForUs | PkiError::Forged => {
                ClusterError::NotEmpty { cluster: cluster.clone() }.into()
            }
            error => Box::<ProblemReply>::from(error),
        })?;
        believe(store, &keys);
        let FounderAttempt { id, identity } = attempt;
        let member = new_member(cluster, node, id, identity, etcd, &stored, &keys)?;
        // It is saved first, then written. If it is interrupted between the two, the node continues
        // as a member when it is restarted. In the other order, its name would belong to a machine
        // that nobody has.
        member.save(&self.context.dir)?;
        if let Err(error) = store.join(self.record(&member)).await {
            ClusterMember::forget(&self.context.dir)?;
            return Err(error.into());
        }
        Ok(member)
    }

    /// Makes this node a member of an existing cluster.
    async fn join(&self, join: JoinCommand) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let token = JoinToken::read(&join.token)?;
        if let Some(wanted) = join.cluster.filter(|wanted| *wanted != token.cluster) {
            return Err(PkiError::OtherCluster { of: token.cluster, wanted }.into());
        }
        let cluster = token.cluster.clone();
        self.refuse_own_records(&cluster, join.discard)?;
        let etcd = join.etcd.or(token.etcd.clone());
        let options = etcd_options(&cluster, &etcd);
        options.check_access()?;
        let glance = self.look_at(&options)?;
        let before = ClusterMember::load(&self.context.dir)?;
        let member = match self.join_member(&glance.store, &token, &etcd).await {
            Ok(member) => member,
            Err(problem) => {
                match before {
                    Some(before) => before.save(&self.context.dir)?,
                    None => ClusterMember::forget(&self.context.dir)?,
                }
                return Err(problem);
            }
        };
        drop(glance);
        self.enter(member).await?;
        let membership = self.member()?;
        membership.view.in_step().await?;
        let counts = self.context.records.counts()?;
        let nodes = self.context.records.nodes()?.len();
        Ok(
            json!({ "node": self.context.node.name, "cluster": cluster, "sites": counts.sites, "nodes": nodes }),
        )
    }

    /// Refuses to drop own records. A removed member has only its copy of the cluster's records,
    /// and none of its own.
    fn refuse_own_records(&self, cluster: &str, discard: bool) -> Result<(), Box<ProblemReply>> {
        let is_copy = match &*self.membership.borrow() {
            Some(membership) => membership.view.member().cluster == cluster,
            None => false,
        };
        let own = self.context.records.counts()?;
        if !discard && !is_copy && own.tenants + own.sites + own.settings > 0 {
            let detail = format!(
                "this node has {} tenants, {} sites and {} settings of its own, which the cluster's would replace: export them, and join with --discard",
                own.tenants, own.sites, own.settings
            );
            return Err(ProblemReply::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        Ok(())
    }

    /// Takes the token, adds this node to the recipients of the members' keys, and writes its
    /// record. It does all of that or nothing.
    async fn join_member(
        &self,
        store: &ClusterStore,
        token: &JoinToken,
        etcd: &EtcdAccess,
    ) -> Result<ClusterMember, Box<ProblemReply>> {
        let node = self.node_name()?;
        let cluster = token.cluster.clone();
        let id = pki::node_id()?;
        let identity = WrapIdentity::generate();
        let key = format!("{TOKENS}{}", token.id());
        for _ in 0..TRIES_MAX {
            let found = store.get(&key).await?.ok_or(PkiError::Spent)?;
            let (keys, known) = token.open(&serde_json::from_slice(&found.value).map_err(PkiError::from)?)?;
            let (stored, revision) = authority_in(store, &cluster).await?;
            stored.verify(&cluster, &known)?;
            if stored.edition != known.edition {
                return Err(PkiError::Spent.into());
            }
            believe(store, &keys);
            let next = stored.with_member(&cluster, &keys, &node, &id, &identity.public())?;
            let own_id = id.clone();
            let own = identity.clone();
            let member = new_member(cluster.clone(), node.clone(), own_id, own, etcd.clone(), &next, &keys)?;
            // It is saved first, then written, as for a founder.
            member.save(&self.context.dir)?;
            // A removed node of this name may not know of it yet. This one would serve sites that
            // are still placed on the name at once.
            if let Ok(Some(SeenNode::Removed { fence_ms })) = store.read_node(&node).await {
                tokio::time::sleep(max_elapsed(lease_term(fence_ms))).await;
            }
            let changes = vec![
                PkiChange::Take { key: key.clone(), at: found.revision },
                PkiChange::Put { key: AUTHORITY.into(), value: to_bytes(&next), at: revision },
            ];
            match store.admit(self.record(&member), changes).await? {
                JoinResult::Joined => return Ok(member),
                JoinResult::Changed => {}
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    fn node_name(&self) -> Result<NodeName, Box<ProblemReply>> {
        NodeName::new(&self.context.node.name).map_err(|error| {
            ProblemReply::cluster(
                StatusCode::CONFLICT,
                NOT_JOINED,
                format!("node in the configuration: {error}"),
            )
        })
    }

    /// Opens the cluster's store with a temporary file: this node's own records are not touched
    /// before it is a member. Only the members' keys count yet, which prove themselves.
    fn look_at(&self, options: &EtcdOptions) -> Result<StoreGlance, Box<ProblemReply>> {
        let io = |error| MemberError::Io { path: self.context.dir.clone(), error };
        std::fs::create_dir_all(&self.context.dir).map_err(io)?;
        let dir = tempfile::tempdir_in(&self.context.dir).map_err(io)?;
        let file = Arc::new(RedbStore::open(&dir.path().join("looking.redb"))?);
        let store = ClusterStore::open(options, RecordSigning::Unsigned, file, Arc::new(|_, _| {}))?;
        Ok(StoreGlance { store, _dir: dir })
    }

    fn record(&self, member: &ClusterMember) -> NodeRecord {
        NodeRecord {
            name: member.node.clone(),
            id: member.id.clone(),
            peer: self.context.peer.to_string(),
            draining: false,
            cpus: load::cpus(),
            memory_bytes: load::memory().0,
            version: env!("CARGO_PKG_VERSION").into(),
            knows: 0,
            fence_ms: self.context.configured.fence_ms as u32,
            heeds_marks: true,
        }
    }

    /// Makes this node follow the cluster's store from now on.
    async fn enter(&self, member: ClusterMember) -> Result<(), Box<ProblemReply>> {
        self.leave().await?;
        self.begin(member)
    }

    /// Ends a membership that was over already. Two stores must not write into this node's copy of
    /// the records.
    async fn leave(&self) -> Result<(), Box<ProblemReply>> {
        let Some(before) = self.membership.borrow_mut().take() else { return Ok(()) };
        before.end();
        let store = Arc::downgrade(&before.view.store);
        drop(before);
        self.context.records.unfollow();
        let begun = std::time::Instant::now();
        while store.strong_count() > 0 {
            if begun.elapsed() >= LEAVE_MAX {
                let detail = "this node is a member now, and follows the cluster's records after a restart: work of its former membership does not end";
                return Err(ProblemReply::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
            }
            tokio::time::sleep(LEAVE_LOOK).await;
        }
        Ok(())
    }

    fn begin(&self, member: ClusterMember) -> Result<(), Box<ProblemReply>> {
        let options = etcd_options(&member.cluster, &member.etcd);
        self.note_access(&member.etcd, &options);
        let node = Arc::clone(&self.context.node);
        let changed = ChangedSites::default();
        let seen = changed.clone();
        let note_changes = move |changes: Vec<RecordChange>, revision| {
            seen.for_images.note_changes(&changes);
            seen.for_tombstones.note_changes(&changes);
            node.committed(super::super::feed::CommittedBatch { revision, changes });
        };
        let file = Arc::clone(self.context.records.file());
        let store = ClusterStore::open(&options, member.signing(), file, Arc::new(note_changes))?;
        if let Some(handle) = &self.context.node.cluster {
            handle.health.follow(&store);
        }
        self.context.records.follow(Arc::clone(&store));
        self.context.node.set_member(&member);
        let credentials = edge_options(&member, &self.context.configured);
        self.context.node.credentials.send_replace(Some(credentials));
        let record = self.record(&member);
        *self.membership.borrow_mut() =
            Some(MemberTasks::begin(Rc::clone(&self.context), member, record, store, changed));
        Ok(())
    }

    /// Notes how etcd is reached, for the node's status, whether it is allowed or refused.
    fn note_access(&self, etcd: &EtcdAccess, options: &EtcdOptions) {
        let weakness = options.weakness();
        if let (Some(weakness), true) = (&weakness, etcd.insecure) {
            tracing::warn!(
                code = %INSECURE,
                "{weakness}; --insecure allows it: everybody who reaches etcd can stop this cluster, and read where its applications run"
            );
        }
        if let Some(handle) = &self.context.node.cluster {
            handle.health.set_weakness(weakness.map(|weakness| {
                if etcd.insecure {
                    format!("{weakness}; --insecure allows it")
                } else {
                    format!("{weakness}; this node does not follow it ({INSECURE})")
                }
            }));
        }
    }

    /// Changes how this member reaches the store. The change takes effect at the next start, or now
    /// if the store was refused.
    async fn change_store(&self, etcd: EtcdAccess) -> Answer {
        let _entering = self.entering.lock().await;
        let before = match &*self.membership.borrow() {
            Some(membership) => Some(membership.view.member()),
            None => ClusterMember::load(&self.context.dir)?,
        };
        let Some(before) = before else {
            let detail = "this node is in no cluster: `nagaya cluster join` says how the store is reached";
            return Err(ProblemReply::cluster(StatusCode::CONFLICT, NO_MEMBER, detail));
        };
        let options = etcd_options(&before.cluster, &etcd);
        options.check_access()?;
        let glance = self.look_at(&options)?;
        let (stored, _) = authority_in(&glance.store, &before.cluster).await?;
        stored.open(&before.opener(), &before.known)?;
        drop(glance);
        let membership = self.membership.borrow().clone();
        let endpoints = etcd.endpoints.clone();
        match membership {
            Some(membership) => membership.signer.keep_etcd(etcd)?,
            None => {
                let member = ClusterMember { etcd, ..before };
                member.save(&self.context.dir)?;
                self.begin(member)?;
                *self.left_out.borrow_mut() = None;
            }
        }
        Ok(json!({ "etcd": endpoints, "needs_restart": self.is_using_other(&options) }))
    }

    /// Returns whether the followed store was opened with other options.
    fn is_using_other(&self, options: &EtcdOptions) -> bool {
        let membership = self.membership.borrow();
        membership.as_ref().is_some_and(|membership| membership.report.options != *options)
    }
}

/// The cluster's store, read before this node follows it.
struct StoreGlance {
    store: Arc<ClusterStore>,
    _dir: tempfile::TempDir,
}

/// The founder of a cluster that is being made, saved until that is done. After an interruption it
/// continues as the same.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FounderAttempt {
    id: String,
    identity: WrapIdentity,
}

impl FounderAttempt {
    const FILE: &str = "founder.json";

    fn opener<'a>(&'a self, cluster: &'a str, node: &'a NodeName) -> KeyOpener<'a> {
        KeyOpener { cluster, node, id: &self.id, identity: &self.identity }
    }

    fn begin(dir: &Path) -> Result<Self, Box<ProblemReply>> {
        let path = dir.join(Self::FILE);
        if let Some(attempt) = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
            return Ok(attempt);
        }
        let attempt = Self { id: pki::node_id()?, identity: WrapIdentity::generate() };
        let write = || -> std::io::Result<()> {
            use std::io::Write as _;
            use std::os::unix::fs::OpenOptionsExt as _;
            std::fs::create_dir_all(dir)?;
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&path)?;
            file.write_all(&to_bytes(&attempt))?;
            file.sync_all()
        };
        write().map_err(|error| MemberError::Io { path: path.clone(), error })?;
        Ok(attempt)
    }

    fn forget(dir: &Path) {
        let path = dir.join(Self::FILE);
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), "the file cannot be removed: {error}");
        }
    }
}

fn new_member(
    cluster: String,
    node: NodeName,
    id: String,
    identity: WrapIdentity,
    etcd: EtcdAccess,
    stored: &StoredKeys,
    keys: &MemberSecrets,
) -> Result<ClusterMember, PkiError> {
    Ok(ClusterMember {
        known: stored.remember(keys)?,
        records: keys.records.clone(),
        authorities: stored.authorities.clone(),
        probe_key: keys.probe.clone(),
        probe_keys_also: keys.probes_before.clone(),
        image_keys: vec![keys.image_key()],
        credentials: stored.issue(&cluster, keys, &node)?,
        cluster,
        node,
        id,
        etcd,
        identity,
    })
}

/// From now on its records count if a member signed them, and new values are signed.
fn believe(store: &ClusterStore, keys: &MemberSecrets) {
    store.set_record_keys(&keys.records);
    store.require_signatures();
}

/// Returns the members' keys in the store, and their revision.
async fn authority_in(store: &ClusterStore, cluster: &str) -> Result<(StoredKeys, u64), Box<ProblemReply>> {
    let found = store.get(AUTHORITY).await?;
    let found = found.ok_or_else(|| ClusterError::NotInitialised { cluster: cluster.into() })?;
    Ok((serde_json::from_slice(&found.value).map_err(PkiError::from)?, found.revision))
}

impl From<PkiError> for Box<ProblemReply> {
    fn from(error: PkiError) -> Self {
        ProblemReply::cluster(StatusCode::FORBIDDEN, NOT_JOINED, error)
    }
}

impl From<MemberError> for Box<ProblemReply> {
    fn from(error: MemberError) -> Self {
        ProblemReply::cluster(StatusCode::INTERNAL_SERVER_ERROR, NOT_JOINED, error)
    }
}

impl From<ClusterError> for Box<ProblemReply> {
    fn from(error: ClusterError) -> Self {
        let status = match error {
            ClusterError::Unreachable { .. } | ClusterError::Behind { .. } | ClusterError::Full { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::CONFLICT,
        };
        ProblemReply::cluster(status, error.code(), error)
    }
}

//! What operators ask of the cluster, one function for each, and this node's way into one.
//!
//! Not here: the paths they ask by (`admin::cluster`), what goes on while it is a member (`membership`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use http::StatusCode;
use nagaya_cmdb::feed::Placed;
use nagaya_cmdb::store::etcd::{self, ClusterError, EtcdOptions, RecordKeys, RecordSigning, Seen};
use nagaya_cmdb::store::{ClusterStore, RedbStore, Store as _};
use nagaya_cmdb::{Change, NodeName, NodeRecord, SiteName, StoreError, Why};
use nagaya_placement::fence::{outlasting, term_of};
use serde_json::{Value, json};

use super::images::Touched;
use super::load;
use super::member::{Etcd, Member, MemberError};
use super::membership::Membership;
use super::pki::{self, PkiError, Secret, Stored};
use super::{
    Context, INSECURE, MEMBER_ALREADY, NO_MEMBER, NOT_JOINED, NOWHERE, Order, Place, Shift, credentials,
};
use crate::admin::{Ask, Found, Join, Problem};

/// Where the authority lies in the store.
pub const AUTHORITY: &str = "authority";

type Answer = Result<Value, Box<Problem>>;

/// Takes orders, whether this node is a member or not.
pub struct Desk {
    context: Rc<Context>,
    membership: RefCell<Option<Rc<Membership>>>,
    /// This node is a member by its file, and does not follow its cluster: why.
    left_out: RefCell<Option<String>>,
    /// One at a time: becoming a member.
    entering: tokio::sync::Mutex<()>,
}

impl Desk {
    pub fn new(context: Context) -> Self {
        Self {
            context: Rc::new(context),
            membership: RefCell::default(),
            left_out: RefCell::default(),
            entering: tokio::sync::Mutex::default(),
        }
    }

    /// The node was a member before it was started.
    pub fn resume(&self, member: Member) {
        if let Err(problem) = self.enter(member) {
            tracing::error!(code = problem.code, "{}; this node serves what it knows", problem.detail);
            *self.left_out.borrow_mut() = Some(problem.detail.clone());
        }
    }

    pub async fn carry_out(self: Rc<Self>, order: Order) {
        match order {
            Order::Place(place) => self.place(place).await,
            // Whoever asked for either has ended, if nobody takes the answer.
            Order::Loads(answer) => {
                let membership = self.membership.borrow().clone();
                let _ = answer.send(membership.map(|membership| membership.loads()).unwrap_or_default());
            }
            Order::Shift { site, shift, answer } => {
                let _ = answer.send(self.shift(&site, shift).await);
            }
            Order::Heard(node) => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.heard(&node);
                }
            }
            Order::Doubt(node) => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.doubt(node);
                }
            }
            Order::Vouch { tag, id, edge } => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.vouch(tag, &id, &edge);
                }
            }
            Order::Vouched { round, id, moved } => {
                if let Some(membership) = &*self.membership.borrow() {
                    membership.vouched(round, &id, moved);
                }
            }
            Order::Ask(ask, answer) => {
                // Whoever asked may have left.
                let _ = answer.send(self.answer(ask).await);
            }
        }
    }

    async fn place(&self, place: Place) {
        let membership = self.membership.borrow().clone();
        let placed = match membership {
            Some(membership) => {
                let Place { site, seen, why, lost, probe_us, .. } = &place;
                membership.place(site, *seen, *why, lost.clone(), *probe_us).await
            }
            None => {
                Placed::Nowhere { reason: "this node is in no cluster".into(), code: NO_MEMBER.to_string() }
            }
        };
        place.edge.send(nagaya_cmdb::feed::Down::Placed { tag: place.tag, placed });
    }

    async fn shift(&self, site: &SiteName, shift: Shift) -> Result<(), String> {
        let membership = self.member().map_err(|problem| problem.detail.clone())?;
        if !membership.is_confirmed() {
            return Err("the cluster's store does not answer now".into());
        }
        match shift {
            Shift::Move(to) => {
                let moved = membership.relocate_from_here(site.as_str(), Some(&to), Why::Load).await;
                moved.map(drop).map_err(|problem| problem.detail.clone())
            }
            Shift::Copy(to) => membership.copy(site, &to).await,
            Shift::Uncopy => membership.uncopy(site, Why::Load).await,
        }
    }

    async fn answer(&self, ask: Ask) -> Answer {
        match ask {
            Ask::Found(found) => self.found(found).await,
            Ask::Join(join) => self.join(join).await,
            Ask::Status => Ok(self.member()?.status()),
            Ask::Token => Ok(json!({ "token": self.member()?.member().token })),
            Ask::Authority { finish } => self.member()?.exchange_authority(finish).await,
            Ask::Nodes => self.member()?.nodes().await,
            Ask::Drain { node, on } => self.member()?.set_draining(&node, on).await,
            Ask::Remove { node, force } => self.member()?.remove(&node, force).await,
            Ask::Placements { after, limit, node } => {
                self.member()?.placements(after.as_deref(), limit, node.as_deref())
            }
            Ask::Placement { site } => self.member()?.explain_placement(&site).await,
            Ask::Events { limit } => Ok(self.member()?.last_events(limit)),
            Ask::Store(etcd) => self.change_store(etcd).await,
            Ask::Repair => self.member()?.repair_records().await,
            Ask::Move { site, to } => self.member()?.relocate(&site, to.as_deref()).await,
        }
    }

    fn member(&self) -> Result<Rc<Membership>, Box<Problem>> {
        self.membership.borrow().clone().ok_or_else(|| {
            if let Some(why) = &*self.left_out.borrow() {
                let detail = format!("this node does not follow its cluster: {why}");
                return Problem::cluster(StatusCode::CONFLICT, NO_MEMBER, detail);
            }
            let detail = "this node is in no cluster: `nagaya cluster init` makes one, `nagaya cluster join` enters one";
            Problem::cluster(StatusCode::CONFLICT, NO_MEMBER, detail)
        })
    }

    fn no_member_yet(&self) -> Result<(), Box<Problem>> {
        match &*self.membership.borrow() {
            None => match &*self.left_out.borrow() {
                None => Ok(()),
                Some(why) => {
                    let detail = format!("this node is a member of a cluster, and does not follow it: {why}");
                    Err(Problem::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
                }
            },
            Some(membership) => {
                let detail = format!("this node is a member of cluster '{}'", membership.member().cluster);
                Err(Problem::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
            }
        }
    }

    /// Makes a cluster of this node and its records. An interrupted one is completed by doing it again.
    async fn found(&self, found: Found) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let options = etcd_options(&found.cluster, &found.etcd);
        options.check_access()?;
        let secret = self.secret_of_attempt()?;
        let stored = Stored::found(&found.cluster, &secret)?;
        let keys = record_keys(&stored, &found.cluster, &secret)?;
        let authority = [(AUTHORITY, to_bytes(&stored))];
        match etcd::seed(&options, &keys, &authority, &*self.context.records).await {
            Ok(()) => {}
            // Perhaps by this node, which was interrupted afterwards: then its secret opens what is there.
            Err(StoreError::Cluster(ClusterError::NotEmpty { .. })) => {}
            Err(error) => return Err(error.into()),
        }
        let member = self.become_member(&found.cluster, found.etcd, &secret, true).await?;
        self.enter(member)?;
        self.forget_attempt();
        let counts = self.context.records.counts()?;
        Ok(
            json!({ "node": self.context.node.name, "cluster": found.cluster, "sites": counts.sites, "nodes": 1 }),
        )
    }

    /// Makes this node a member of a cluster there is.
    async fn join(&self, join: Join) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let secret = Secret::from_token(&join.token)?;
        let own = self.context.records.counts()?;
        if !join.discard && own.tenants + own.sites + own.settings > 0 {
            let detail = format!(
                "this node has {} tenants, {} sites and {} settings of its own, which the cluster's would replace: export them, and join with --discard",
                own.tenants, own.sites, own.settings
            );
            return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        let member = self.become_member(&join.cluster, join.etcd, &secret, false).await?;
        self.enter(member)?;
        let membership = self.member()?;
        membership.in_step().await?;
        let counts = self.context.records.counts()?;
        let nodes = self.context.records.nodes()?.len();
        Ok(
            json!({ "node": self.context.node.name, "cluster": join.cluster, "sites": counts.sites, "nodes": nodes }),
        )
    }

    /// Writes this node's record and keeps what makes it a member. This node's own records are not touched yet: until the
    /// secret is seen to be right, the store is looked at through a file that is thrown away.
    async fn become_member(
        &self,
        cluster: &str,
        etcd: Etcd,
        secret: &Secret,
        is_founder: bool,
    ) -> Result<Member, Box<Problem>> {
        let node = NodeName::new(&self.context.node.name).map_err(|error| {
            Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, format!("node in the configuration: {error}"))
        })?;
        std::fs::create_dir_all(&self.context.dir)
            .map_err(|error| MemberError::Io { path: self.context.dir.clone(), error })?;
        let looking = tempfile::tempdir_in(&self.context.dir)
            .map_err(|error| MemberError::Io { path: self.context.dir.clone(), error })?;
        let file = Arc::new(RedbStore::open(&looking.path().join("looking.redb"))?);
        // Nothing of it counts yet but the authority, which proves itself by the secret.
        let options = etcd_options(cluster, &etcd);
        let store = ClusterStore::open(&options, RecordSigning::Unsigned, file, Arc::new(|_, _| {}))?;
        let stored = store.get(AUTHORITY).await?;
        let stored = stored.ok_or_else(|| ClusterError::NotInitialised { cluster: cluster.into() })?;
        let stored: Stored = serde_json::from_slice(&stored.value).map_err(PkiError::from)?;
        let keys = stored.open(cluster, secret).map_err(|error| match error {
            PkiError::WrongToken if is_founder => ClusterError::NotEmpty { cluster: cluster.into() }.into(),
            error => Box::<Problem>::from(error),
        })?;
        // A cluster without signatures is none that a machine may trust which knows nothing else of it.
        if !keys.records_required {
            return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, UNSIGNED));
        }
        let record_keys = record_keys(&stored, cluster, secret)?;
        store.set_record_keys(&record_keys);
        store.require_signatures();
        let member = Member {
            cluster: cluster.into(),
            node: node.clone(),
            id: pki::node_id()?,
            token: secret.token(),
            authorities: stored.authorities.clone(),
            probe_key: keys.probe.clone(),
            image_keys: vec![keys.image_key()],
            credentials: stored.issue(cluster, &keys, &node)?,
            records: Some(record_keys),
            records_required: true,
            etcd,
        };
        // First kept, then written: interrupted between the two, it goes on as a member when it is started anew. The other way
        // round its name would belong to a machine that nobody has.
        member.save(&self.context.dir)?;
        // A node of this name that was removed may not know it yet. What is still placed on the name, this one would serve at once.
        if let Ok(Some(Seen::Removed { fence_ms })) = store.seen(&node).await {
            tokio::time::sleep(outlasting(term_of(fence_ms))).await;
        }
        if let Err(error) = store.join(self.record(&member)).await {
            Member::forget(&self.context.dir)?;
            return Err(error.into());
        }
        Ok(member)
    }

    fn record(&self, member: &Member) -> NodeRecord {
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

    /// From now on this node follows the cluster's store.
    fn enter(&self, member: Member) -> Result<(), Box<Problem>> {
        let options = etcd_options(&member.cluster, &member.etcd);
        self.note_access(&member.etcd, &options);
        let node = Arc::clone(&self.context.node);
        let told_of = <[Arc<Touched>; 2]>::default();
        let seen = told_of.clone();
        let told = move |changes: Vec<Change>, revision| {
            seen.iter().for_each(|seen| seen.by(&changes));
            node.committed(super::super::feed::Changes { revision, changes });
        };
        let file = Arc::clone(self.context.records.file());
        let store = ClusterStore::open(&options, member.signing(), file, Arc::new(told))?;
        if let Some(handle) = &self.context.node.cluster {
            handle.health.follow(&store);
        }
        self.context.records.follow(Arc::clone(&store));
        self.context.node.set_image_keys(&member.image_keys);
        let credentials = credentials(&member, &self.context.configured);
        self.context.node.credentials.send_replace(Some(credentials));
        let record = self.record(&member);
        *self.membership.borrow_mut() =
            Some(Membership::begin(Rc::clone(&self.context), member, record, store, told_of));
        Ok(())
    }

    /// How etcd is reached is part of what the node says of itself, whether it is allowed or refused.
    fn note_access(&self, etcd: &Etcd, options: &EtcdOptions) {
        let weakness = options.weakness();
        if let (Some(weakness), true) = (&weakness, etcd.insecure) {
            tracing::warn!(
                code = %INSECURE,
                "{weakness}; --insecure allows it: whoever reaches etcd can stop this cluster, and read where its applications run"
            );
        }
        if let Some(handle) = &self.context.node.cluster {
            handle.health.set_weakness(weakness.map(|weakness| match etcd.insecure {
                true => format!("{weakness}; --insecure allows it"),
                false => format!("{weakness}; this node does not follow it ({INSECURE})"),
            }));
        }
    }

    /// From now on this member reaches the store in this way. It goes over to it when it is started anew, or now if it was refused.
    async fn change_store(&self, etcd: Etcd) -> Answer {
        let _entering = self.entering.lock().await;
        let before = match &*self.membership.borrow() {
            Some(membership) => Some(membership.member()),
            None => Member::load(&self.context.dir)?,
        };
        let Some(before) = before else {
            let detail = "this node is in no cluster: `nagaya cluster join` says how the store is reached";
            return Err(Problem::cluster(StatusCode::CONFLICT, NO_MEMBER, detail));
        };
        let options = etcd_options(&before.cluster, &etcd);
        let looking = tempfile::tempdir_in(&self.context.dir)
            .map_err(|error| MemberError::Io { path: self.context.dir.clone(), error })?;
        let file = Arc::new(RedbStore::open(&looking.path().join("looking.redb"))?);
        let store = ClusterStore::open(&options, before.signing(), file, Arc::new(|_, _| {}))?;
        let stored = store.get(AUTHORITY).await?;
        let stored =
            stored.ok_or_else(|| ClusterError::NotInitialised { cluster: before.cluster.clone() })?;
        let stored: Stored = serde_json::from_slice(&stored.value).map_err(PkiError::from)?;
        stored.open(&before.cluster, &Secret::from_token(&before.token)?)?;
        let membership = self.membership.borrow().clone();
        let endpoints = etcd.endpoints.clone();
        match membership {
            Some(membership) => membership.keep_etcd(etcd)?,
            None => {
                let member = Member { etcd, ..before };
                member.save(&self.context.dir)?;
                self.enter(member)?;
                *self.left_out.borrow_mut() = None;
            }
        }
        Ok(json!({ "etcd": endpoints, "needs_restart": self.is_using_other(&options) }))
    }

    /// Whether the store that is followed was opened in another way.
    fn is_using_other(&self, options: &EtcdOptions) -> bool {
        let membership = self.membership.borrow();
        membership.as_ref().is_some_and(|membership| membership.options != *options)
    }

    /// The secret of a cluster that is being made, kept until that is done: who was interrupted goes on with the same.
    fn secret_of_attempt(&self) -> Result<Secret, Box<Problem>> {
        let path = self.context.dir.join("token.new");
        if let Ok(text) = std::fs::read_to_string(&path) {
            return Ok(Secret::from_token(&text)?);
        }
        let secret = Secret::generate()?;
        let write = || -> std::io::Result<()> {
            use std::io::Write as _;
            use std::os::unix::fs::OpenOptionsExt as _;
            std::fs::create_dir_all(&self.context.dir)?;
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(secret.token().as_bytes())?;
            file.sync_all()
        };
        write().map_err(|error| MemberError::Io { path: path.clone(), error })?;
        Ok(secret)
    }

    fn forget_attempt(&self) {
        let path = self.context.dir.join("token.new");
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), "it stays behind: {error}");
        }
    }
}

pub fn etcd_options(cluster: &str, etcd: &Etcd) -> EtcdOptions {
    let bytes = |text: &Option<String>| text.as_ref().map(|text| text.clone().into_bytes());
    EtcdOptions {
        endpoints: etcd.endpoints.clone(),
        cluster: cluster.into(),
        ca: bytes(&etcd.ca),
        identity: bytes(&etcd.certificate).zip(bytes(&etcd.key)),
        login: etcd.user.clone().zip(etcd.password.clone()),
        insecure: etcd.insecure,
    }
}

/// Said to a machine that would join a cluster of an older version.
const UNSIGNED: &str = "the records of this cluster are not all signed yet: update nagaya on all its nodes; when `nagaya cluster status` \
                        on one of them shows records_signed: true, join again";

/// What signs the records of a cluster with this authority.
fn record_keys(stored: &Stored, cluster: &str, secret: &Secret) -> Result<RecordKeys, Box<Problem>> {
    let keys = stored.open(cluster, secret)?.record_keys();
    keys.ok_or_else(|| Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, UNSIGNED))
}

pub fn to_bytes(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("it has text keys, and writing to memory works")
}

impl From<PkiError> for Box<Problem> {
    fn from(error: PkiError) -> Self {
        Problem::cluster(StatusCode::FORBIDDEN, NOT_JOINED, error)
    }
}

impl From<MemberError> for Box<Problem> {
    fn from(error: MemberError) -> Self {
        Problem::cluster(StatusCode::INTERNAL_SERVER_ERROR, NOT_JOINED, error)
    }
}

impl From<ClusterError> for Box<Problem> {
    fn from(error: ClusterError) -> Self {
        let status = match error {
            ClusterError::Unreachable { .. } | ClusterError::Behind { .. } | ClusterError::Full { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::CONFLICT,
        };
        Problem::cluster(status, error.code(), error)
    }
}

/// Where a site could not be placed.
pub fn nowhere(reason: impl Into<String>) -> Placed {
    Placed::Nowhere { reason: reason.into(), code: NOWHERE.to_string() }
}

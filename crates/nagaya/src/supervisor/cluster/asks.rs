//! What operators ask of the cluster, one function for each, and this node's way into one.
//!
//! Not here: the paths they ask by (`admin::cluster`), what goes on while it is a member (`membership`).

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use nagaya_cmdb::feed::Placed;
use nagaya_cmdb::store::etcd::{self, Admission, ClusterError, EtcdOptions, PkiChange, RecordSigning, Seen};
use nagaya_cmdb::store::{ClusterStore, RedbStore, Store as _};
use nagaya_cmdb::{Change, NodeName, NodeRecord, SiteName, StoreError, Why};
use nagaya_placement::fence::{outlasting, term_of};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::images::Touched;
use super::load;
use super::member::{Etcd, Member, MemberError};
use super::membership::Membership;
use super::pki::token::Token;
use super::pki::{self, Identity, Keys, Opener, PkiError, Stored};
use super::{
    Context, INSECURE, MEMBER_ALREADY, NO_MEMBER, NOT_JOINED, NOWHERE, Order, Place, Shift, credentials,
};
use crate::admin::{Ask, Found, Join, Problem};

/// Where the keys of members lie in the store, and those that join tokens open.
pub const AUTHORITY: &str = "authority";
pub const TOKENS: &str = "tokens/";

/// Tries to become a member, while others become one.
const TRIES_MAX: u32 = 8;

/// Longest wait for the end of what a former membership was doing, and how often it is looked at.
const LEAVE_MAX: Duration = Duration::from_secs(30);
const LEAVE_LOOK: Duration = Duration::from_millis(20);

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
        if let Err(problem) = self.begin(member) {
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
            Ask::Token(new) => self.member()?.make_token(new).await,
            Ask::Tokens => self.member()?.tokens().await,
            Ask::Revoke { id } => self.member()?.revoke_token(&id).await,
            Ask::Authority { finish } => self.member()?.exchange_keys(finish).await,
            Ask::Nodes => self.member()?.nodes().await,
            Ask::Drain { node, on } => self.member()?.set_draining(&node, on).await,
            Ask::Remove { node, force, stolen } => self.member()?.remove(&node, force, stolen).await,
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

    /// One that was removed may become one again.
    fn no_member_yet(&self) -> Result<(), Box<Problem>> {
        match &*self.membership.borrow() {
            None => match &*self.left_out.borrow() {
                None => Ok(()),
                Some(why) => {
                    let detail = format!("this node is a member of a cluster, and does not follow it: {why}");
                    Err(Problem::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
                }
            },
            Some(membership) if membership.is_member() => {
                let detail = format!("this node is a member of cluster '{}'", membership.member().cluster);
                Err(Problem::cluster(StatusCode::CONFLICT, MEMBER_ALREADY, detail))
            }
            _ => Ok(()),
        }
    }

    /// Makes a cluster of this node and its records. An interrupted one is completed by doing it again.
    async fn found(&self, found: Found) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let options = etcd_options(&found.cluster, &found.etcd);
        options.check_access()?;
        let attempt = Attempt::begin(&self.context.dir)?;
        let node = self.node_name()?;
        let (stored, keys) = Stored::found(&attempt.opener(&found.cluster, &node))?;
        let authority = [(AUTHORITY, to_bytes(&stored))];
        match etcd::seed(&options, &keys.records, &authority, &*self.context.records).await {
            Ok(()) => {}
            // Perhaps by this node, which was interrupted afterwards: then its own key opens what is there.
            Err(StoreError::Cluster(ClusterError::NotEmpty { .. })) => {}
            Err(error) => return Err(error.into()),
        }
        let glance = self.look_at(&options)?;
        let (cluster, etcd) = (found.cluster.clone(), found.etcd);
        let member = self.found_member(&glance.store, cluster, node, etcd, attempt).await?;
        self.enter(member).await?;
        Attempt::forget(&self.context.dir);
        // So that its own record is seen here. If that takes too long, the cluster is made all the same.
        let _late = self.member()?.in_step().await;
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
        etcd: Etcd,
        attempt: Attempt,
    ) -> Result<Member, Box<Problem>> {
        let (stored, _) = authority_in(store, &cluster).await?;
        let keys = stored.open_own(&attempt.opener(&cluster, &node)).map_err(|error| match error {
            PkiError::NotForUs | PkiError::Forged => {
                ClusterError::NotEmpty { cluster: cluster.clone() }.into()
            }
            error => Box::<Problem>::from(error),
        })?;
        believe(store, &keys);
        let Attempt { id, identity } = attempt;
        let member = new_member(cluster, node, id, identity, etcd, &stored, &keys)?;
        // First kept, then written: interrupted between the two, it goes on as a member when it is started anew. The other way
        // round its name would belong to a machine that nobody has.
        member.save(&self.context.dir)?;
        if let Err(error) = store.join(self.record(&member)).await {
            Member::forget(&self.context.dir)?;
            return Err(error.into());
        }
        Ok(member)
    }

    /// Makes this node a member of a cluster there is.
    async fn join(&self, join: Join) -> Answer {
        let _entering = self.entering.lock().await;
        self.no_member_yet()?;
        let token = Token::read(&join.token)?;
        if let Some(wanted) = join.cluster.filter(|wanted| *wanted != token.cluster) {
            return Err(PkiError::OtherCluster { of: token.cluster, wanted }.into());
        }
        let cluster = token.cluster.clone();
        self.refuse_own_records(&cluster, join.discard)?;
        let etcd = join.etcd.or(token.etcd.clone());
        let options = etcd_options(&cluster, &etcd);
        options.check_access()?;
        let glance = self.look_at(&options)?;
        let before = Member::load(&self.context.dir)?;
        let member = match self.join_member(&glance.store, &token, &etcd).await {
            Ok(member) => member,
            Err(problem) => {
                match before {
                    Some(before) => before.save(&self.context.dir)?,
                    None => Member::forget(&self.context.dir)?,
                }
                return Err(problem);
            }
        };
        drop(glance);
        self.enter(member).await?;
        let membership = self.member()?;
        membership.in_step().await?;
        let counts = self.context.records.counts()?;
        let nodes = self.context.records.nodes()?.len();
        Ok(
            json!({ "node": self.context.node.name, "cluster": cluster, "sites": counts.sites, "nodes": nodes }),
        )
    }

    /// What a removed member has is its copy of the cluster's records, and nothing of its own.
    fn refuse_own_records(&self, cluster: &str, discard: bool) -> Result<(), Box<Problem>> {
        let is_copy = match &*self.membership.borrow() {
            Some(membership) => membership.member().cluster == cluster,
            None => false,
        };
        let own = self.context.records.counts()?;
        if !discard && !is_copy && own.tenants + own.sites + own.settings > 0 {
            let detail = format!(
                "this node has {} tenants, {} sites and {} settings of its own, which the cluster's would replace: export them, and join with --discard",
                own.tenants, own.sites, own.settings
            );
            return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
        }
        Ok(())
    }

    /// Takes the token, adds this node to those who open the members' keys, and writes its record: all of it or nothing.
    async fn join_member(
        &self,
        store: &ClusterStore,
        token: &Token,
        etcd: &Etcd,
    ) -> Result<Member, Box<Problem>> {
        let (node, cluster) = (self.node_name()?, token.cluster.clone());
        let (id, identity) = (pki::node_id()?, Identity::generate());
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
            let (own_id, own) = (id.clone(), identity.clone());
            let member = new_member(cluster.clone(), node.clone(), own_id, own, etcd.clone(), &next, &keys)?;
            // First kept, then written, as of a founder.
            member.save(&self.context.dir)?;
            // A node of this name that was removed may not know it yet. What is still placed on the name, this one would serve at once.
            if let Ok(Some(Seen::Removed { fence_ms })) = store.seen(&node).await {
                tokio::time::sleep(outlasting(term_of(fence_ms))).await;
            }
            let changes = vec![
                PkiChange::Take { key: key.clone(), at: found.revision },
                PkiChange::Put { key: AUTHORITY.into(), value: to_bytes(&next), at: revision },
            ];
            match store.admit(self.record(&member), changes).await? {
                Admission::Joined => return Ok(member),
                Admission::Changed => {}
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX }.into())
    }

    fn node_name(&self) -> Result<NodeName, Box<Problem>> {
        NodeName::new(&self.context.node.name).map_err(|error| {
            Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, format!("node in the configuration: {error}"))
        })
    }

    /// The cluster's store through a file that is thrown away: this node's own records are not touched before it is a member. Nothing
    /// counts of it yet but the members' keys, which prove themselves.
    fn look_at(&self, options: &EtcdOptions) -> Result<Glance, Box<Problem>> {
        let io = |error| MemberError::Io { path: self.context.dir.clone(), error };
        std::fs::create_dir_all(&self.context.dir).map_err(io)?;
        let dir = tempfile::tempdir_in(&self.context.dir).map_err(io)?;
        let file = Arc::new(RedbStore::open(&dir.path().join("looking.redb"))?);
        let store = ClusterStore::open(options, RecordSigning::Unsigned, file, Arc::new(|_, _| {}))?;
        Ok(Glance { store, _dir: dir })
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
    async fn enter(&self, member: Member) -> Result<(), Box<Problem>> {
        self.leave().await?;
        self.begin(member)
    }

    /// Ends a membership that was over already. Two stores must not write into this node's copy of the records.
    async fn leave(&self) -> Result<(), Box<Problem>> {
        let Some(before) = self.membership.borrow_mut().take() else { return Ok(()) };
        before.end();
        let store = Arc::downgrade(&before.store);
        drop(before);
        self.context.records.unfollow();
        let begun = std::time::Instant::now();
        while store.strong_count() > 0 {
            if begun.elapsed() >= LEAVE_MAX {
                let detail = "this node is a member now, and follows the cluster's records once it is started anew: what it did in its former membership does not end";
                return Err(Problem::cluster(StatusCode::CONFLICT, NOT_JOINED, detail));
            }
            tokio::time::sleep(LEAVE_LOOK).await;
        }
        Ok(())
    }

    fn begin(&self, member: Member) -> Result<(), Box<Problem>> {
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
        self.context.node.set_member(&member);
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
        options.check_access()?;
        let glance = self.look_at(&options)?;
        let (stored, _) = authority_in(&glance.store, &before.cluster).await?;
        stored.open(&before.opener(), &before.known)?;
        drop(glance);
        let membership = self.membership.borrow().clone();
        let endpoints = etcd.endpoints.clone();
        match membership {
            Some(membership) => membership.keep_etcd(etcd)?,
            None => {
                let member = Member { etcd, ..before };
                member.save(&self.context.dir)?;
                self.begin(member)?;
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
}

/// The cluster's store, looked at before this node follows it.
struct Glance {
    store: Arc<ClusterStore>,
    _dir: tempfile::TempDir,
}

/// The founder of a cluster that is being made, kept until that is done: who was interrupted goes on as the same.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Attempt {
    id: String,
    identity: Identity,
}

impl Attempt {
    const FILE: &str = "founder.json";

    fn opener<'a>(&'a self, cluster: &'a str, node: &'a NodeName) -> Opener<'a> {
        Opener { cluster, node, id: &self.id, identity: &self.identity }
    }

    fn begin(dir: &Path) -> Result<Self, Box<Problem>> {
        let path = dir.join(Self::FILE);
        if let Some(attempt) = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
            return Ok(attempt);
        }
        let attempt = Self { id: pki::node_id()?, identity: Identity::generate() };
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
            tracing::warn!(path = %path.display(), "it stays behind: {error}");
        }
    }
}

fn new_member(
    cluster: String,
    node: NodeName,
    id: String,
    identity: Identity,
    etcd: Etcd,
    stored: &Stored,
    keys: &Keys,
) -> Result<Member, PkiError> {
    Ok(Member {
        known: stored.known(keys)?,
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

/// From now on its records count if a member signed them, and what is written is signed.
fn believe(store: &ClusterStore, keys: &Keys) {
    store.set_record_keys(&keys.records);
    store.require_signatures();
}

/// The members' keys as the store has them, and at which revision.
async fn authority_in(store: &ClusterStore, cluster: &str) -> Result<(Stored, u64), Box<Problem>> {
    let found = store.get(AUTHORITY).await?;
    let found = found.ok_or_else(|| ClusterError::NotInitialised { cluster: cluster.into() })?;
    Ok((serde_json::from_slice(&found.value).map_err(PkiError::from)?, found.revision))
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

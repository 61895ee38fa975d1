//! Tickets as they travel: in a cookie for people, in a header field for programs.
//!
//! In a cluster all nodes sign with the same keys, and a ticket's number says which of them gave it: a ticket of another node is
//! taken over where it is shown, as its site may have moved.
//!
//! Not here: signatures and slots (`nagaya_admission`), where they are kept (`store`), who is given one (`turned`), where the
//! cluster's keys come from (`nagaya_cmdb`).

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use http::HeaderValue;
use http::header::{COOKIE, HeaderName};
use nagaya_admission::{ClientKey, Keys, Nonce, Rejected, Ticket};
use nagaya_base::Code;
use nagaya_cmdb::TicketKeys;
use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::lanes::{Lane, Lanes};
use super::store::{Store, Stored};
use crate::account::Account;
use crate::message::Head;
use crate::node::Node;
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Carries a ticket in both directions, for clients that keep no cookies.
pub const NAGAYA_TICKET: HeaderName = HeaderName::from_static("nagaya-ticket");

const CODE_NO_STORE: Code = Code(442);

/// A cookie's name goes on with the lane's.
const COOKIE_PREFIX: &str = "nagaya-ticket-";

/// Longest `Cookie` field that is looked through, bytes.
const COOKIE_LEN_MAX: usize = 16 << 10;

/// What this edge signs with, and where it keeps what it promised.
pub struct Tickets {
    pub store: Store,
    /// The keys of all nodes of the cluster.
    cluster: RwLock<Option<Arc<Keys>>>,
    /// What an earlier start had stored, where its file could not be read at once.
    stored: Mutex<Option<oneshot::Receiver<Stored>>>,
}

/// A ticket that a request shows.
pub struct Shown {
    pub ticket: Ticket,
    /// Another node of the cluster gave it.
    pub is_foreign: bool,
    /// The client keeps it as a cookie, to be taken away once it is used.
    pub cookie: Option<String>,
}

impl Tickets {
    /// The ticket for this lane that a request shows. `mark` is this node's in its cluster, if it is in one.
    ///
    /// # Errors
    /// If a program shows one that is not ours, or not for this lane. A cookie may be left over from long ago: it counts as none.
    pub fn shown(&self, lane: &Lane, head: &Head, mark: Option<Mark>) -> Result<Option<Shown>, Refusal> {
        // Before the file has been opened nobody knows what was used.
        let Some(own) = self.store.keys() else { return Ok(None) };
        let verify = |text: &str| self.verify(&own, text, mark);
        if let Some(value) = head.headers.get(NAGAYA_TICKET) {
            let text = value.to_str().map_err(|_| Refusal::TicketInvalid("it is not text".into()))?;
            let (ticket, is_foreign) =
                verify(text).map_err(|rejected| Refusal::TicketInvalid(rejected.to_string()))?;
            if ticket.lane != lane.name {
                return Err(Refusal::TicketInvalid("it was given for something else".into()));
            }
            return Ok(Some(Shown { ticket, is_foreign, cookie: None }));
        }
        let name = cookie_name(lane);
        let found = cookie(head, &name).and_then(|text| verify(text).ok());
        let found = found.filter(|(ticket, _)| ticket.lane == lane.name);
        Ok(found.map(|(ticket, is_foreign)| Shown { ticket, is_foreign, cookie: Some(name) }))
    }

    /// The ticket that a text is, and whether another node gave it.
    fn verify(&self, own: &Keys, text: &str, mark: Option<Mark>) -> Result<(Ticket, bool), Rejected> {
        let cluster = mark.and_then(|mark| Some((mark, self.cluster.read().clone()?)));
        match (own.verify(text), cluster) {
            (Ok(ticket), _) => Ok((ticket, false)),
            // Its keys are the cluster's: of them it is said what is wrong.
            (Err(Rejected::Key), Some((mark, keys))) => {
                let ticket = keys.verify(text)?;
                Ok((ticket, !mark.is_in(ticket.nonce)))
            }
            (Err(rejected), _) => Err(rejected),
        }
    }

    /// What tickets are signed with now: in a cluster with what its other nodes can verify. `None`: the file has not been opened yet.
    pub fn keys(&self, mark: Option<Mark>) -> Option<Arc<Keys>> {
        let own = self.store.keys()?;
        let cluster = mark.and_then(|_| self.cluster.read().clone());
        Some(cluster.unwrap_or(own))
    }

    /// The cluster's keys are these from now on.
    pub fn set_cluster_keys(&self, keys: Option<&TicketKeys>) {
        *self.cluster.write() = keys.and_then(signing_last).map(Arc::new);
    }

    /// One client: an address, or the network that one subscriber of IPv6 has (RFC 6177).
    pub fn client_key(client: IpAddr) -> ClientKey {
        let mut text = [0; 17];
        match client.to_canonical() {
            IpAddr::V4(address) => text[1..5].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => {
                text[0] = 6;
                text[1..9].copy_from_slice(&address.octets()[..8]);
            }
        }
        // A good hash, so that nobody finds an address of the same key as another's and is given that one's ticket.
        let digest = ring::digest::digest(&ring::digest::SHA256, &text);
        let first = digest.as_ref()[..8].try_into().expect("a digest of 32 bytes");
        ClientKey(u64::from_le_bytes(first))
    }
}

/// Keys that are signed with as the record says. `None`: there are none.
fn signing_last(record: &TicketKeys) -> Option<Keys> {
    let (signs, others): (Vec<_>, Vec<_>) = record.keys.iter().partition(|key| key.id == record.signs);
    let mut rows = others.into_iter().chain(signs);
    let first = rows.next()?;
    let mut keys = Keys::new(first.id, &first.secret.0);
    rows.for_each(|key| keys.rotate(key.id, &key.secret.0));
    Some(keys)
}

/// Opens the store in this directory, so that tickets are given; what was promised before is known before anybody is served.
pub fn open(shared: &Shared, directory: OwnedFd) {
    let (store, mut stored) = match Store::open(directory, shared.lanes.reckoning()) {
        Ok(opened) => opened,
        Err(error) => {
            return tracing::error!(code = %CODE_NO_STORE, %error, "no tickets are given: their store has no thread");
        }
    };
    let stored = match stored.try_recv() {
        Ok(records) => {
            shared.lanes.restore(records);
            None
        }
        Err(TryRecvError::Empty) => Some(stored),
        Err(TryRecvError::Closed) => None,
    };
    let cluster = RwLock::default();
    shared.set_tickets(Tickets { store, cluster, stored: Mutex::new(stored) });
}

/// Takes what was promised before as soon as it can be read.
pub async fn restore_later(tickets: Arc<Tickets>, lanes: Arc<Lanes>) {
    let stored = tickets.stored.lock().take();
    if let Some(stored) = stored
        && let Ok(records) = stored.await
    {
        lanes.restore(records);
    }
}

/// The request of a ticket runs: the client need not show it again, and the next start is to know that it was used.
pub fn used(node: &Node, account: &mut Account, shown: Option<&Shown>) {
    let Some(shown) = shown else { return };
    if let Some(cookie) = &shown.cookie {
        account.take_cookie(cookie.clone());
    }
    keep_rest(node);
}

/// Takes to the store what nobody waits for: that tickets were used, or have ended.
pub fn keep_rest(node: &Node) {
    let Some(tickets) = node.shared.tickets() else { return };
    let mut records = node.shared.lanes.take_records();
    let has_lost = tickets.store.take_lost();
    if has_lost {
        // Before what has become of them since.
        records.splice(0..0, node.shared.lanes.promises());
    }
    if !records.is_empty() {
        tokio::task::spawn_local(async move {
            // The store says by itself that it cannot keep them.
            if tickets.store.keep(records).await.is_err() && has_lost {
                tickets.store.still_lost();
            }
        });
    }
}

/// The name of the cookie for a lane's tickets.
pub fn cookie_name(lane: &Lane) -> String {
    format!("{COOKIE_PREFIX}{}", short(lane))
}

/// A lane in paths and names of cookies: the beginning of its name.
pub fn short(lane: &Lane) -> String {
    lane.name.0[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of the first cookie of this name (RFC 6265 section 4.2.1).
pub fn cookie<'a>(head: &'a Head, name: &str) -> Option<&'a str> {
    let fields = head.headers.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
    let pairs = fields.filter(|field| field.len() <= COOKIE_LEN_MAX).flat_map(|field| field.split(';'));
    pairs
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(found, _)| *found == name)
        .map(|(_, value)| value)
}

/// Sets the cookie; `text` empty takes it away.
pub fn set_cookie(name: &str, text: &str, seconds: u64, is_secure: bool) -> HeaderValue {
    let secure = if is_secure { "; Secure" } else { "" };
    let value = format!("{name}={text}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    HeaderValue::try_from(value).expect("a lane's name and a ticket are of plain characters")
}

/// Takes the cookie of this name away.
pub fn take_away(name: &str) -> HeaderValue {
    set_cookie(name, "", 0, false)
}

/// What the numbers of all tickets begin with that one node of a cluster gives: the beginning of its own number, which it drew when it
/// joined. Two nodes that have drawn the same do not take each other's tickets over, and nothing worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    /// Of a node with this id, of hexadecimal digits.
    pub fn of(id: &str) -> Option<Self> {
        u32::from_str_radix(id.get(..8)?, 16).ok().map(Self)
    }

    fn is_in(self, nonce: Nonce) -> bool {
        nonce.0 >> 96 == u128::from(self.0)
    }
}

/// A number for a new ticket, which nobody can guess.
pub fn nonce(mark: Option<Mark>) -> Nonce {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes once it has booted");
    if let Some(Mark(mark)) = mark {
        bytes[..4].copy_from_slice(&mark.to_be_bytes());
    }
    Nonce(u128::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nagaya_admission::{LaneName, Moment};
    use nagaya_base::Reckoning;
    use nagaya_cmdb::record::{TicketKey, TicketSecret};

    use super::*;

    fn key(id: u32) -> TicketKey {
        TicketKey { id, secret: TicketSecret([u8::try_from(id).unwrap(); 32]), made_ms: 0, ended_ms: None }
    }

    #[test]
    fn a_tickets_number_says_which_node_of_the_cluster_gave_it() {
        let [own, other] =
            ["0123456789abcdef", "1123456789abcdef"].map(|id| Mark::of(id).expect("hexadecimal"));
        let nonce = nonce(Some(own));
        assert!(own.is_in(nonce) && !other.is_in(nonce));
        assert_eq!((Mark::of("0123"), Mark::of("not digits")), (None, None));
    }

    #[test]
    fn only_a_member_knows_its_clusters_tickets_and_its_own_among_them() {
        let directory = tempfile::tempdir().unwrap();
        let directory = OwnedFd::from(File::open(directory.path()).unwrap());
        let (store, _stored) = Store::open(directory, Reckoning::of_wall()).unwrap();
        let tickets = Tickets { store, cluster: RwLock::default(), stored: Mutex::new(None) };
        let [mark, other] = ["00000001", "00000002"].map(Mark::of);
        let (begins, ends) = (Moment(1), Moment(2));
        let ticket = Ticket { lane: LaneName([1; 16]), begins, ends, epoch: 0, nonce: nonce(mark) };
        let own = tickets.keys(None).expect("the file is open");
        let by_own = own.sign(&ticket);
        assert_eq!(tickets.keys(mark).expect("it is").sign(&ticket), by_own, "there are no others yet");

        tickets.set_cluster_keys(Some(&TicketKeys { signs: 7, keys: vec![key(7), key(8)] }));
        let by_cluster = tickets.keys(mark).expect("it is").sign(&ticket);
        assert_eq!(by_cluster, Keys::new(7, &[7; 32]).sign(&ticket));
        assert_eq!(tickets.keys(None).expect("it is").sign(&ticket), by_own);
        let by_next = Keys::new(8, &[8; 32]).sign(&ticket);
        let verify = |text: &str, mark| tickets.verify(&own, text, mark);
        for text in [&by_cluster, &by_next] {
            assert_eq!(verify(text, None), Err(Rejected::Key));
            assert_eq!(verify(text, mark), Ok((ticket, false)));
            assert_eq!(verify(text, other), Ok((ticket, true)));
        }
        assert_eq!(verify(&by_own, other), Ok((ticket, false)), "nobody else can have signed it");
        assert_eq!(verify(&Keys::new(7, &[8; 32]).sign(&ticket), mark), Err(Rejected::Signature));
        assert_eq!(verify(&Keys::new(9, &[9; 32]).sign(&ticket), mark), Err(Rejected::Key));
        tickets.set_cluster_keys(None);
        assert_eq!(verify(&by_cluster, mark), Err(Rejected::Key));
    }
}

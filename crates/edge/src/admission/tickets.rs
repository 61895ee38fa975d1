//! Reads and writes tickets in requests and responses: in a cookie for people, in a header field
//! for programs.
//!
//! In a cluster all nodes sign with the same keys, and a ticket's number identifies the issuing
//! node. A ticket of another node is accepted, because its site may have moved.
//!
//! Not here: signatures and slots (`nagaya_admission`), their storage (`store`), which clients get
//! one (`deferral`), the source of the cluster's keys (`nagaya_records`).

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use http::HeaderValue;
use http::header::{COOKIE, HeaderName};
use nagaya_admission::{ClientKey, Nonce, SigningPurpose, Ticket, TicketError, TicketKeyring};
use nagaya_base::Code;
use nagaya_records::TicketKeys;
use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::admission::lanes::{EdgeLane, LaneSet, short};
use crate::admission::store::{StoredTickets, TicketStore};
use crate::cluster::nonce_prefix::NoncePrefix;
use crate::http::message::RequestHead;
use crate::http::refusal::Refusal;

/// Carries a ticket in both directions, for clients that keep no cookies.
pub const NAGAYA_TICKET: HeaderName = HeaderName::from_static("nagaya-ticket");

const CODE_NO_STORE: Code = Code(442);

/// Prefix of a cookie's name. The lane follows it.
const COOKIE_PREFIX: &str = "nagaya-ticket-";

/// Maximum length of a `Cookie` field that is searched, bytes.
const COOKIE_LEN_MAX: usize = 16 << 10;

/// Signing keys of this edge, and the store of its promises.
pub struct TicketIssuer {
    pub store: TicketStore,
    /// The keys of all nodes of the cluster.
    cluster: RwLock<Option<Arc<TicketKeyring>>>,
    /// Records of an earlier start, if its file could not be read at once.
    stored: Mutex<Option<oneshot::Receiver<StoredTickets>>>,
}

/// The tickets of all threads, once their store is there.
#[derive(Default)]
pub struct CurrentTickets(RwLock<Option<Arc<TicketIssuer>>>);

impl CurrentTickets {
    /// `None` where there is nowhere to keep them.
    pub fn get(&self) -> Option<Arc<TicketIssuer>> {
        self.0.read().clone()
    }
}

/// A ticket that a request presents.
pub struct PresentedTicket {
    pub ticket: Ticket,
    /// Another node of the cluster issued it.
    pub is_foreign: bool,
    /// Name of its cookie, which is deleted once the ticket is used.
    pub cookie: Option<String>,
}

impl TicketIssuer {
    /// Returns the ticket for this lane that a request presents. `mark` is this node's in its
    /// cluster, if it is in one.
    ///
    /// # Errors
    /// Fails if a program presents one that is not ours, or not for this lane. A cookie may be
    /// left over from long ago: it counts as none.
    pub fn shown(
        &self,
        lane: &EdgeLane,
        head: &RequestHead,
        mark: Option<NoncePrefix>,
    ) -> Result<Option<PresentedTicket>, Refusal> {
        // Before the file has been opened, used tickets are not known.
        let Some(own) = self.store.keys() else { return Ok(None) };
        let verify = |text: &str| self.verify(&own, text, mark);
        if let Some(value) = head.headers.get(NAGAYA_TICKET) {
            let text = value.to_str().map_err(|_| Refusal::TicketInvalid("it is not text".into()))?;
            let (ticket, is_foreign) =
                verify(text).map_err(|rejected| Refusal::TicketInvalid(rejected.to_string()))?;
            if ticket.lane != lane.name {
                return Err(Refusal::TicketInvalid("it was given for something else".into()));
            }
            return Ok(Some(PresentedTicket { ticket, is_foreign, cookie: None }));
        }
        let name = cookie_name(lane);
        let found = cookie(head, &name).and_then(|text| verify(text).ok());
        let found = found.filter(|(ticket, _)| ticket.lane == lane.name);
        Ok(found.map(|(ticket, is_foreign)| PresentedTicket { ticket, is_foreign, cookie: Some(name) }))
    }

    /// Returns the ticket in a text, and whether another node issued it.
    fn verify(
        &self,
        own: &TicketKeyring,
        text: &str,
        mark: Option<NoncePrefix>,
    ) -> Result<(Ticket, bool), TicketError> {
        let cluster = mark.and_then(|mark| Some((mark, self.cluster.read().clone()?)));
        match (own.verify(text), cluster) {
            (Ok(ticket), _) => Ok((ticket, false)),
            // It is signed by a cluster's key, so the error of that check counts.
            (Err(TicketError::Key), Some((mark, keys))) => {
                let ticket = keys.verify(text)?;
                Ok((ticket, !mark.is_in(ticket.nonce)))
            }
            (Err(rejected), _) => Err(rejected),
        }
    }

    /// Returns the visit in a text, if a node of the cluster has signed it.
    pub(super) fn verify_visit(&self, text: &str, mark: Option<NoncePrefix>) -> Option<Ticket> {
        let own = self.store.keys()?;
        let cluster = mark.and_then(|_| self.cluster.read().clone());
        let verify = |keys: &TicketKeyring| keys.verify_for(SigningPurpose::Visit, text).ok();
        verify(&own).or_else(|| cluster.as_deref().and_then(verify))
    }

    /// Returns the keys that sign tickets now. In a cluster the other nodes can verify them.
    /// `None` if the file has not been opened yet.
    pub fn keys(&self, mark: Option<NoncePrefix>) -> Option<Arc<TicketKeyring>> {
        let own = self.store.keys()?;
        let cluster = mark.and_then(|_| self.cluster.read().clone());
        Some(cluster.unwrap_or(own))
    }

    /// Sets the cluster's keys.
    pub fn set_cluster_keys(&self, keys: Option<&TicketKeys>) {
        *self.cluster.write() = keys.and_then(signing_last).map(Arc::new);
    }

    /// Returns the key of one client: an address, or the network of one IPv6 subscriber (RFC
    /// 6177).
    pub fn client_key(client: IpAddr) -> ClientKey {
        let mut text = [0; 17];
        match client.to_canonical() {
            IpAddr::V4(address) => text[1..5].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => {
                text[0] = 6;
                text[1..9].copy_from_slice(&address.octets()[..8]);
            }
        }
        // A cryptographic hash. So nobody can find an address with the same key as another's, and
        // get that one's ticket.
        let digest = ring::digest::digest(&ring::digest::SHA256, &text);
        let first = digest.as_ref()[..8].try_into().expect("a digest of 32 bytes");
        ClientKey(u64::from_le_bytes(first))
    }
}

/// Returns the keys with the signing key of the record. `None` if there are none.
fn signing_last(record: &TicketKeys) -> Option<TicketKeyring> {
    let (signs, others): (Vec<_>, Vec<_>) = record.keys.iter().partition(|key| key.id == record.signs);
    let mut rows = others.into_iter().chain(signs);
    let first = rows.next()?;
    let mut keys = TicketKeyring::new(first.id, &first.secret.0);
    rows.for_each(|key| keys.rotate(key.id, &key.secret.0));
    Some(keys)
}

/// Opens the store in this directory, which enables tickets. Earlier promises are known before
/// any request is served.
pub fn open(current: &CurrentTickets, lanes: &LaneSet, directory: OwnedFd) {
    let (store, mut stored) = match TicketStore::open(directory, lanes.anchored_clock()) {
        Ok(opened) => opened,
        Err(error) => {
            return tracing::error!(code = %CODE_NO_STORE, %error, "no tickets are given: their store has no thread");
        }
    };
    let stored = match stored.try_recv() {
        Ok(records) => {
            lanes.restore(records);
            None
        }
        Err(TryRecvError::Empty) => Some(stored),
        Err(TryRecvError::Closed) => None,
    };
    let cluster = RwLock::default();
    *current.0.write() = Some(Arc::new(TicketIssuer { store, cluster, stored: Mutex::new(stored) }));
}

/// Takes over earlier promises as soon as they can be read.
pub async fn restore_later(tickets: Arc<TicketIssuer>, lanes: Arc<LaneSet>) {
    let stored = tickets.stored.lock().take();
    if let Some(stored) = stored
        && let Ok(records) = stored.await
    {
        lanes.restore(records);
    }
}

/// Stores records that no request waits for: that tickets were used, or have ended.
pub fn keep_rest(current: &CurrentTickets, lanes: &LaneSet) {
    let Some(tickets) = current.get() else { return };
    let mut records = lanes.take_records();
    let has_lost = tickets.store.take_lost();
    if has_lost {
        // Promises go before their later changes.
        records.splice(0..0, lanes.promises());
    }
    if !records.is_empty() {
        tokio::task::spawn_local(async move {
            // The store logs by itself that it cannot keep them.
            if tickets.store.keep(records).await.is_err() && has_lost {
                tickets.store.still_lost();
            }
        });
    }
}

/// Returns the name of the cookie for a lane's tickets.
pub fn cookie_name(lane: &EdgeLane) -> String {
    format!("{COOKIE_PREFIX}{}", short(lane))
}

/// Returns the value of the first cookie of this name (RFC 6265 section 4.2.1).
pub fn cookie<'a>(head: &'a RequestHead, name: &str) -> Option<&'a str> {
    let fields = head.headers.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
    let pairs = fields.filter(|field| field.len() <= COOKIE_LEN_MAX).flat_map(|field| field.split(';'));
    pairs
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(found, _)| *found == name)
        .map(|(_, value)| value)
}

/// Returns the field that sets the cookie. An empty `text` deletes it.
pub fn set_cookie(name: &str, text: &str, seconds: u64, is_secure: bool) -> HeaderValue {
    let secure = if is_secure { "; Secure" } else { "" };
    let value = format!("{name}={text}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    HeaderValue::try_from(value).expect("a lane's name and a ticket are of plain characters")
}

/// Returns the field that deletes the cookie of this name.
pub fn take_away(name: &str) -> HeaderValue {
    set_cookie(name, "", 0, false)
}

/// Returns a number for a new ticket, which nobody can guess.
pub fn nonce(mark: Option<NoncePrefix>) -> Nonce {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes once it has booted");
    if let Some(NoncePrefix(mark)) = mark {
        bytes[..4].copy_from_slice(&mark.to_be_bytes());
    }
    Nonce(u128::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nagaya_admission::{LaneName, Moment};
    use nagaya_base::AnchoredClock;
    use nagaya_records::record::{TicketKey, TicketSecret};

    use super::*;

    fn key(id: u32) -> TicketKey {
        TicketKey { id, secret: TicketSecret([u8::try_from(id).unwrap(); 32]), made_ms: 0, ended_ms: None }
    }

    #[test]
    fn a_tickets_number_says_which_node_of_the_cluster_gave_it() {
        let [own, other] =
            ["0123456789abcdef", "1123456789abcdef"].map(|id| NoncePrefix::of(id).expect("hexadecimal"));
        let nonce = nonce(Some(own));
        assert!(own.is_in(nonce) && !other.is_in(nonce));
        assert_eq!((NoncePrefix::of("0123"), NoncePrefix::of("not digits")), (None, None));
    }

    #[test]
    fn only_a_member_knows_its_clusters_and_its_own_tickets() {
        let directory = tempfile::tempdir().unwrap();
        let directory = OwnedFd::from(File::open(directory.path()).unwrap());
        let (store, _stored) = TicketStore::open(directory, AnchoredClock::of_wall()).unwrap();
        let tickets = TicketIssuer { store, cluster: RwLock::default(), stored: Mutex::new(None) };
        let [mark, other] = ["00000001", "00000002"].map(NoncePrefix::of);
        let (begins, ends) = (Moment(1), Moment(2));
        let ticket = Ticket { lane: LaneName([1; 16]), begins, ends, epoch: 0, nonce: nonce(mark) };
        let own = tickets.keys(None).expect("the file is open");
        let by_own = own.sign(&ticket);
        assert_eq!(tickets.keys(mark).expect("it is").sign(&ticket), by_own, "there are no others yet");

        tickets.set_cluster_keys(Some(&TicketKeys { signs: 7, keys: vec![key(7), key(8)] }));
        let by_cluster = tickets.keys(mark).expect("it is").sign(&ticket);
        assert_eq!(by_cluster, TicketKeyring::new(7, &[7; 32]).sign(&ticket));
        assert_eq!(tickets.keys(None).expect("it is").sign(&ticket), by_own);
        let by_next = TicketKeyring::new(8, &[8; 32]).sign(&ticket);
        let verify = |text: &str, mark| tickets.verify(&own, text, mark);
        for text in [&by_cluster, &by_next] {
            assert_eq!(verify(text, None), Err(TicketError::Key));
            assert_eq!(verify(text, mark), Ok((ticket, false)));
            assert_eq!(verify(text, other), Ok((ticket, true)));
        }
        assert_eq!(verify(&by_own, other), Ok((ticket, false)), "nobody else can have signed it");
        assert_eq!(verify(&TicketKeyring::new(7, &[8; 32]).sign(&ticket), mark), Err(TicketError::Signature));
        assert_eq!(verify(&TicketKeyring::new(9, &[9; 32]).sign(&ticket), mark), Err(TicketError::Key));
        tickets.set_cluster_keys(None);
        assert_eq!(verify(&by_cluster, mark), Err(TicketError::Key));
    }
}
